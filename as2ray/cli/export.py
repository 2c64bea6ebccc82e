"""`as2ray export`: exports a ranker for sentence-transformers."""

import sys


def export(model: str, output: str) -> None:
    """Writes a pointwise ranker as a checkpoint that sentence-transformers' CrossEncoder loads.

    Args:
        model: Checkpoint folder or hub id.
        output: New folder for the exported checkpoint.
    """
    from as2ray.checkpoints.cross_encoder import export_cross_encoder
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import check_new_path

    folder = check_new_path(output)
    ranker = load(model, dtype="fp32", device="cpu")
    exported = export_cross_encoder(ranker, folder)
    sys.stdout.write(f"{exported}\n")
    if ranker.calibration or ranker.threshold is not None:
        sys.stderr.write(
            "without the calibration and its threshold, which CrossEncoder cannot use\n"
        )
    if ranker.tokenizer.prompt:
        sys.stderr.write("CrossEncoder puts no prompt around pairs: give it whole prompts\n")
