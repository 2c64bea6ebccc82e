"""`as2ray convert`: a published model file as a checkpoint."""

import sys


def convert(weights: str, base_model: str, output: str, max_length: int = 128) -> None:
    """Writes the authors' `cerberus_model.pt` as a checkpoint that ranks.

    Args:
        file: The file.
        base: The encoder that it was made from, such as google/electra-base-discriminator.
        output: A new folder.
        max_length: Most tokens of a pair.
    """
    from as2ray.checkpoints.cerberus_file import load_cerberus_file
    from as2ray.checkpoints.saving import check_new_path, save

    folder = check_new_path(output)
    sys.stdout.write(f"{save(load_cerberus_file(weights, base_model, max_length), folder)}\n")
