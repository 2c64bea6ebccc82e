"""as2ray trains, distils and serves fast answer-sentence rankers on Ray."""

from as2ray.outputs import RankedCandidate

__all__ = ["RankedCandidate", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Torch and transformers are imported on first use: tasks that tokenise need neither.
    if name == "load":
        from as2ray.checkpoints.loading import load

        return load
    raise AttributeError(f"module 'as2ray' has no attribute {name!r}")
