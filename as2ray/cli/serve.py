"""`as2ray serve`: serves a ranker over HTTP, for the clients of common rerank services."""

from pathlib import Path

from as2ray.errors import ConfigError
from as2ray.serving.settings import ServiceConfig, Settings

DEFAULT_SETTINGS = Settings()


def serve(
    model: str | None = None,
    model_name: str = "default",
    index: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings = DEFAULT_SETTINGS,
) -> None:
    """Serves a ranker, an index or both until the process is interrupted, with a demo page.

    Args:
        model: Checkpoint folder or Hugging Face Hub id. Without one the service answers from the
            index alone, as `as2ray ask` does.
        model_name: Name of the model in requests and responses.
        index: Output folder of `as2ray index`, from which `/ask` answers.
        host: Address to listen on; other machines reach any but the loopback address.
        port: Port to listen on; 0 for any free one, which the line about the start names.
        settings: Limits, batching, load shedding, replicas, authentication.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.serving.server import run_server

    if model is None and index is None and settings.index_path is None:
        raise ConfigError("there is nothing to serve", fix="give --model, --index, or both")
    # The working directory of a replica is another one.
    files = {
        "index_path": settings.index_path if index is None else index,
        "auth_token_file": settings.auth_token_file,
    }
    paths = {key: str(Path(path).resolve()) for key, path in files.items() if path is not None}
    models = {}
    if model is not None:
        models[model_name] = str(Path(model).resolve()) if Path(model).exists() else model
    config = ServiceConfig.from_models(models, settings.model_copy(update=paths))
    for checkpoint in models.values():  # An invalid one is reported before replicas fail on it.
        load(checkpoint, dtype=settings.dtype, device="cpu")
    run_server(config, host, port)
