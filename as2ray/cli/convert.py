"""`as2ray convert`: converts a published weights file to a checkpoint."""

import sys


def convert(weights: str, base_model: str, output: str, max_length: int = 128) -> None:
    """Converts the CERBERUS authors' `cerberus_model.pt` to a checkpoint.

    Args:
        weights: The file.
        base_model: Encoder that it was trained from, such as google/electra-base-discriminator.
        output: New folder for the checkpoint.
        max_length: Maximum number of tokens of a pair.
    """
    from as2ray.checkpoints.cerberus_file import load_cerberus_file
    from as2ray.checkpoints.saving import check_new_path, save

    folder = check_new_path(output)
    sys.stdout.write(f"{save(load_cerberus_file(weights, base_model, max_length), folder)}\n")
