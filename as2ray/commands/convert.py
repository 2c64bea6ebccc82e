"""`as2ray convert`: a published model file as a checkpoint."""

import sys


def convert(file: str, base: str, output: str, max_length: int = 128) -> None:
    """Writes the authors' `cerberus_model.pt` as a checkpoint that ranks.

    Args:
        file: The file.
        base: The encoder that it was made from, such as google/electra-base-discriminator.
        output: A new folder.
        max_length: Most tokens of a pair.
    """
    from as2ray.adapters.cerberus import read
    from as2ray.checkpoint import new_folder, save

    folder = new_folder(output)
    sys.stdout.write(f"{save(read(file, base, max_length), folder)}\n")
