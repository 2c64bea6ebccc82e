"""`as2ray serve`: a ranker over HTTP, for the rerank clients people have."""

from pathlib import Path

from as2ray.serving.settings import Served, Settings

DEFAULTS = Settings()


def serve(
    model: str,
    name: str = "default",
    index: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings = DEFAULTS,
) -> None:
    """Serves a ranker until it is interrupted, with a page to try it on.

    Args:
        model: Checkpoint folder or hub id.
        name: What clients call it.
        index: What `as2ray index` wrote; `/ask` answers from it.
        host: Address to listen on; others than the loopback are reached from outside.
        port: Port to listen on.
        settings: Limits, batches, replicas, tokens.
    """
    from as2ray.serving.run import run

    if index is not None:
        settings = settings.model_copy(update={"index": str(Path(index).resolve())})
    run(Served.of({name: model}, settings), host, port)
