"""`as2ray export`: a ranker for sentence-transformers."""

import sys


def export(model: str, output: str) -> None:
    """Writes a pointwise ranker as a checkpoint that sentence-transformers' CrossEncoder reads.

    Args:
        model: Checkpoint folder or hub id.
        output: A new folder.
    """
    from as2ray.adapters.sentence_transformers import export as write
    from as2ray.checkpoint import load, new_folder

    folder = new_folder(output)
    written = write(load(model, precision="fp32", device="cpu"), folder)
    sys.stdout.write(f"{written}\n")
