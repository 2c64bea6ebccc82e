"""Reads, tokenizes and packs training data in tasks of Ray Data.

`PackedDataset` decides which examples make up a step. Every worker has a Ray data set of its own
share of each window. A row of it is a packed batch, so nothing downstream can split, merge or drop
examples, and all ranks run the same steps.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from as2ray.data.packed_dataset import MicroBatch, PackedDataset
from as2ray.distributed.cluster import hide_log_of_ray_data, unwrap_ray_errors
from as2ray.text.packing import PackedBatch, ragged_arange

ARRAY_FIELDS = ("token_ids", "token_types", "lengths", "markers")
"""Arrays of a `PackedBatch` that are columns; `positions` follows from `lengths`."""

NUMBER_FIELDS = ("step", "num_examples", "is_last")
"""Other fields of a `MicroBatch` that are columns."""

MAX_PENDING_BYTES_PER_CPU = 128 * 1024**2
"""Bytes of packed batches in the object store for each CPU that makes them. Without a limit Ray
Data fills half of the store, which is gigabytes, if training is slower than packing."""


@dataclass(frozen=True)
class RayBatchSource:
    """The packed batches of a `PackedDataset`, made by tasks of the cluster."""

    dataset: PackedDataset
    num_cpus: float = 1.0
    """CPUs for the tasks of this worker, which the worker has reserved on its node."""
    data_group: PlacementGroup | None = None
    """Where they are reserved instead, with a bundle for each rank."""
    name: str = ""
    """Name of the run, in Ray's dashboard."""
    on_end: Callable[[str], None] | None = None
    """Called at the end of an epoch with Ray Data's statistics, which its log file has, too."""

    @property
    def steps(self) -> int:
        """Number of steps of an epoch."""
        return self.dataset.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yields this worker's packed batches from step `start` of an epoch on."""
        if start >= self.steps:
            return
        dataset = self._create_ray_dataset(epoch, start)
        batches = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
        with unwrap_ray_errors():
            for rows in batches:
                yield from (from_row(rows, row) for row in range(rows.num_rows))
        if self.on_end:
            self.on_end(dataset.stats())

    def _create_ray_dataset(self, epoch: int, start: int) -> "ray.data.Dataset":
        # Tasks that asked for CPUs could wait without end for those that workers hold. So these ask
        # for none, and no task reads the window numbers.
        first_window = self.dataset.find_window(epoch, start)
        windows = [{"id": window} for window in range(first_window, self.dataset.num_windows)]
        hide_log_of_ray_data()
        dataset = ray.data.from_items(windows, override_num_blocks=len(windows)).map_batches(
            _pack_windows,
            batch_size=None,
            fn_kwargs={"dataset": self.dataset, "epoch": epoch, "start": start},
            num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=max(1, round(self.num_cpus))),
            **self._placement(),
        )
        options = dataset.context.execution_options
        options.preserve_order = True
        max_bytes = MAX_PENDING_BYTES_PER_CPU * max(1.0, self.num_cpus)
        options.resource_limits = ray.data.ExecutionResources(object_store_memory=max_bytes)
        dataset.context.enable_progress_bars = False
        dataset.context.enable_auto_log_stats = True  # into Ray Data's log file
        name = self.name.replace("/", "-")  # Ray names a file after it.
        dataset.set_name(f"{name} epoch {epoch + 1} rank {self.dataset.rank}".strip())
        return dataset

    def _placement(self) -> dict[str, Any]:
        if self.data_group is not None:
            strategy = PlacementGroupSchedulingStrategy(self.data_group, self.dataset.rank)
            return {"scheduling_strategy": strategy}
        node = ray.get_runtime_context().get_node_id()
        # Before a node is taken it accepts no tasks, while workers still run there.
        other_nodes = {"label_selector": {"ray.io/node-id": f"!{node}"}}
        return {"label_selector": {"ray.io/node-id": node}, "fallback_strategy": [other_nodes]}


def _pack_windows(
    windows: dict[str, np.ndarray], dataset: PackedDataset, epoch: int, start: int
) -> Iterator[pa.Table]:
    # A task has one core; the tokenizer's own threads would use the cores of other tasks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for window in windows["id"].tolist():
        yield to_table(list(dataset.read_window(epoch, window, start)))


def to_table(micro_batches: list[MicroBatch]) -> pa.Table:
    """Stores packed batches as the rows of an Arrow table."""
    batches = [m.batch for m in micro_batches]
    columns = {name: pa.array([getattr(m, name) for m in micro_batches]) for name in NUMBER_FIELDS}
    arrays = {name: [getattr(b, name) for b in batches] for name in ARRAY_FIELDS}
    for name in batches[0].sequence_data:
        arrays[f"sequence_{name}"] = [b.sequence_data[name].ravel() for b in batches]
    for name in batches[0].marker_data:
        arrays[f"marker_{name}"] = [b.marker_data[name] for b in batches]
    columns |= {name: _to_list_array(values) for name, values in arrays.items()}
    return pa.table(columns)


def _to_list_array(arrays: list[np.ndarray]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, arrays)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))


def from_row(table: pa.Table, row: int) -> MicroBatch:
    """Reads the packed batch of one row."""

    def values(name: str) -> np.ndarray:
        return np.array(table[name][row].values)

    def values_by_name(prefix: str) -> dict[str, np.ndarray]:
        names = [name for name in table.column_names if name.startswith(prefix)]
        return {name.removeprefix(prefix): values(name) for name in names}

    lengths, sequence_data = values("lengths"), values_by_name("sequence_")
    for name, data in sequence_data.items():
        if len(data) != len(lengths):
            sequence_data[name] = data.reshape(len(lengths), -1)
    tokens = (values("token_ids"), values("token_types"), ragged_arange(lengths), lengths)
    batch = PackedBatch(*tokens, sequence_data, values("markers"), values_by_name("marker_"))
    return MicroBatch(**{name: table[name][row].as_py() for name in NUMBER_FIELDS}, batch=batch)
