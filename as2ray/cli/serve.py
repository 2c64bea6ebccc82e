"""`as2ray serve`: a ranker over HTTP, for the rerank clients people have."""

from pathlib import Path

from as2ray.serving.settings import ServiceConfig, Settings

DEFAULT_SETTINGS = Settings()


def serve(
    model: str,
    model_name: str = "default",
    index: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings = DEFAULT_SETTINGS,
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
    from as2ray.checkpoints.loading import load
    from as2ray.serving.server import run_server

    # A replica may stand in another folder than we do.
    files = {"index": index or settings.index_path, "token_file": settings.auth_token_file}
    found = {key: str(Path(path).resolve()) for key, path in files.items() if path is not None}
    model = str(Path(model).resolve()) if Path(model).exists() else model
    served = ServiceConfig.from_models({model_name: model}, settings.model_copy(update=found))
    load(model, device="cpu")  # what is no ranker is told here, not by a dying replica
    run_server(served, host, port)
