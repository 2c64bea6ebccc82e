"""`as2ray export`: a ranker for sentence-transformers."""

import sys


def export(model: str, output: str) -> None:
    """Writes a pointwise ranker as a checkpoint that sentence-transformers' CrossEncoder reads.

    Args:
        model: Checkpoint folder or hub id.
        output: A new folder.
    """
    from as2ray.checkpoints.cross_encoder import export_cross_encoder as write
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import check_new_path

    folder = check_new_path(output)
    written = write(load(model, dtype="fp32", device="cpu"), folder)
    sys.stdout.write(f"{written}\n")
