"""How the nodes of a cluster see each other's files; by default on a file system of all nodes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


class NodeFiles:
    """Files that all nodes see in the same folders, so that nothing needs to be copied.

    `experiments.store.Store` is the subclass for an object store, whose files a node downloads.
    """

    @property
    def is_local(self) -> bool:
        """Whether files that a node writes need not be published for others to see them."""
        return True

    def fetch_paths(self, paths: Iterable[str | Path]) -> None:
        """Makes files and folders that other nodes wrote available on this node."""

    def publish(self, path: Path) -> None:
        """Makes a file or a folder of this node available to others; it may not exist."""

    def restore(self, folder: Path) -> None:
        """Makes the published files of a folder available on this node, as they were published."""

    def train_storage(self, folder: Path) -> tuple[str, Any]:
        """Returns `storage_path` and `storage_filesystem` of Ray for a folder."""
        return str(folder), None
