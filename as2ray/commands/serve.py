"""`as2ray serve`: a ranker over HTTP, for the rerank clients people have."""

from as2ray.serving.settings import Served, Settings

DEFAULTS = Settings()


def serve(
    model: str,
    name: str = "default",
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings = DEFAULTS,
) -> None:
    """Serves a ranker until it is interrupted, with a page to try it on.

    Args:
        model: Checkpoint folder or hub id.
        name: What clients call it.
        host: Address to listen on; others than the loopback are reached from outside.
        port: Port to listen on.
        settings: Limits, batches, replicas, tokens.
    """
    from as2ray.serving.run import run

    run(Served.of({name: model}, settings), host, port)
