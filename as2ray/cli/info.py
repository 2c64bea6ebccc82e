"""`as2ray info`: describes a ranker as this machine will run it."""

from as2ray.cli.cascade import describe_dropping
from as2ray.cli.console import create_console, create_console_table
from as2ray.models.precision import Dtype


def info(*, model: str, dtype: Dtype = "auto") -> None:
    """Describes a ranker: its kind, size and exits, and the number format of its products here.

    Args:
        model: Checkpoint folder or hub id.
        dtype: Number format of matrix products that is requested.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.models.cascade import CascadeRanker

    ranker = load(model, dtype=dtype)
    num_weights = sum(weights.numel() for weights in ranker.parameters())
    rows = {
        "ranker": ranker.checkpoint_settings()["ranker"],
        "weights": f"{num_weights:,}",
        "layers": " + ".join(str(len(encoder)) for encoder in ranker.encoders),
        "exits after layers": ", ".join(map(str, ranker.exit_layers)) or "none",
        "tokens of a pair": f"at most {ranker.tokenizer.max_length}",
        "calibrated": "yes" if ranker.calibration else "no",
        "device": str(ranker.device),
        "dtype": f"{ranker.dtype_name} ({dtype} was requested)",
    }
    if ranker.threshold is not None:
        rows["calibrated"] += f"; an answer needs a score of {ranker.threshold:.4f}"
    if isinstance(ranker, CascadeRanker):
        rows["drops"] = "\n".join(describe_dropping(ranker))
    table = create_console_table("", model)
    for name, value in rows.items():
        table.add_row(name, value)
    create_console().print(table)
