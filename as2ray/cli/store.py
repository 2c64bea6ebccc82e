"""`as2ray store`: lists the stages in a store, and removes those that no experiment needs."""

from collections.abc import Sequence

from as2ray.cli.console import create_console, create_console_table
from as2ray.experiments.store import Store, StoredStage


class StoreCommands:
    """Stages of experiments: files of tables, rankers, scores and evaluations."""

    def list(self, store: str) -> None:
        """Lists the stages with their sizes.

        Args:
            store: Folder or URI of the store.
        """
        _print_stages(Store(store).stored_stages(), "in the store")

    def prune(self, store: str, keep: tuple[str, ...], dry_run: bool = False) -> None:
        """Removes all stages but those that an output needs, also one whose run was interrupted.

        Args:
            store: Folder or URI of the store.
            keep: Output folders of the experiments to keep, such as '["output/tanda"]'.
            dry_run: Whether the stages are listed and not removed.
        """
        stages = Store(store).prune(keep, dry_run)
        _print_stages(stages, "would be removed" if dry_run else "removed")


def _print_stages(stages: Sequence[StoredStage], outcome: str) -> None:
    overview = create_console_table("kind", "digest", "bytes", "")
    for stage in stages:
        state = "complete" if stage.is_complete else "interrupted or running"
        overview.add_row(stage.kind, stage.digest, f"{stage.num_bytes:,}", state)
    create_console().print(overview)
    num_bytes = sum(stage.num_bytes for stage in stages)
    create_console().print(f"{len(stages):,} stages with {num_bytes:,} bytes {outcome}")
