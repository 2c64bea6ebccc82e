"""Uploads a ranker to the Hugging Face hub."""

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi

from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError, ConfigError
from as2ray.models.ranker import Ranker

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.md")
"""Files of a checkpoint, in whatever folder; nothing else leaves the machine."""


def push_to_hub(
    model: str | Path | Ranker,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Uploads a ranker as a model of the Hugging Face hub, which `as2ray.load(repo_id)` reads.

    Args:
        model: A checkpoint folder, whose `README.md` becomes the model card, or a ranker.
        repo_id: `OWNER/NAME`; the repository is made if there is none.
        private: Whether a new repository is private.
        token: Token of the hub; by default that of `hf auth login`.
        endpoint: Address of another hub.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: The folder is no checkpoint, or the hub refuses or cannot be reached.
        ConfigError: There is no ranker or no name.
    """
    if isinstance(model, Ranker):
        with TemporaryDirectory() as folder:
            path = save(model, Path(folder) / "ranker")
            return push_to_hub(path, repo_id, private=private, token=token, endpoint=endpoint)
    if not isinstance(model, str | Path) or not isinstance(repo_id, str):
        raise ConfigError(
            f"model={model!r:.200}, repo_id={repo_id!r:.200}: expected a ranker or its folder, and "
            "a name such as OWNER/NAME"
        )
    folder_path = Path(model)
    if not (folder_path / "config.json").is_file():
        raise CheckpointError(f"{model} is no checkpoint: it has no config.json")
    api = HfApi(endpoint=endpoint, token=token, library_name="as2ray")
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder_path,
            allow_patterns=list(FILES),
            commit_message=f"Upload {folder_path.name} with as2ray",
        )
    except Exception as error:  # many types, of names, tokens, networks and HTTP clients
        raise CheckpointError(
            f"{repo_id} cannot be uploaded: {' '.join(str(error).split())[:300]}",
            fix="log in with `hf auth login`, or give a token that may write there",
        ) from error
    return str(commit.commit_url)
