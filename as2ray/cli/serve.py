"""`as2ray serve`: serves a ranker over HTTP, for the clients of common rerank services."""

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
    """Serves a ranker until the process is interrupted, with a demo page.

    Args:
        model: Checkpoint folder or Hugging Face Hub id.
        model_name: Name of the model in requests and responses.
        index: Output folder of `as2ray index`, from which `/ask` answers.
        host: Address to listen on; other machines reach any but the loopback address.
        port: Port to listen on.
        settings: Limits, batching, load shedding, replicas, authentication.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.serving.server import run_server

    # The working directory of a replica is another one.
    files = {
        "index_path": index or settings.index_path,
        "auth_token_file": settings.auth_token_file,
    }
    paths = {key: str(Path(path).resolve()) for key, path in files.items() if path is not None}
    model = str(Path(model).resolve()) if Path(model).exists() else model
    config = ServiceConfig.from_models({model_name: model}, settings.model_copy(update=paths))
    # An invalid checkpoint is reported here, before replicas fail on it.
    load(model, dtype=settings.dtype, device="cpu")
    run_server(config, host, port)
