"""Ingest: the stream's windows read, tokenised and packed by Ray Data; a row is a packed batch.

Knows Ray Data. Must not decide which pairs make up a step: that is `text/stream.py`.

Every worker has a dataset of its own windows' shares. A row that leaves it is a packed batch, so
nothing downstream can split, merge or drop pairs, and the ranks stay in step by construction.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import ray.data

from as2ray.distributed.cluster import own_errors
from as2ray.text.packing import PackedBatch, ragged_arange
from as2ray.text.stream import MicroBatch, Stream

FIELDS = ("token_ids", "token_types", "lengths", "marks")

AHEAD = 128 * 1024**2
"""Bytes of packed batches that may wait in the object store for each CPU that makes them. Without
it Ray Data fills half the store, which is gigabytes, ahead of a training that reads slowly."""


@dataclass(frozen=True)
class RayEpochs:
    """A `Stream` whose windows are made by tasks of the cluster."""

    stream: Stream
    cpus: float = 1.0
    """CPUs that the tasks of this worker may hold at a time."""

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.stream.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """This worker's packed batches from step `start` of an epoch on."""
        if start >= self.steps:
            return
        first = start // self.stream.steps_a_window
        batches = self._dataset(epoch, first, start).iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=1
        )
        with own_errors():
            for rows in batches:
                for row in range(rows.num_rows):
                    yield from_row(rows, row)

    def _dataset(self, epoch: int, first: int, start: int) -> "ray.data.Dataset":
        windows = self.stream.windows - first
        dataset = ray.data.range(windows, override_num_blocks=windows).map_batches(
            _make_windows,
            batch_size=None,
            fn_kwargs={"stream": self.stream, "epoch": epoch, "first": first, "start": start},
            num_cpus=min(1.0, self.cpus),
        )
        options = dataset.context.execution_options
        options.preserve_order = True
        options.resource_limits = ray.data.ExecutionResources(
            cpu=self.cpus, object_store_memory=AHEAD * max(1.0, self.cpus)
        )
        dataset.context.enable_progress_bars = False
        return dataset


def _make_windows(
    ids: dict[str, np.ndarray], stream: Stream, epoch: int, first: int, start: int
) -> Iterator[pa.Table]:
    # One task has one core; the tokenizer's own threads would take the others'.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for window in ids["id"]:
        yield to_table(list(stream.read_window(epoch, first + int(window), start)))


def to_table(micros: list[MicroBatch]) -> pa.Table:
    """Packed batches as Arrow rows."""
    batches = [m.batch for m in micros]
    columns = {
        "step": pa.array([m.step for m in micros]),
        "pairs": pa.array([m.pairs for m in micros]),
        "last": pa.array([m.last for m in micros]),
        **{name: _lists([getattr(b, name) for b in batches]) for name in FIELDS},
    }
    for name in batches[0].of_sequence:
        columns[f"of_{name}"] = _lists([b.of_sequence[name].ravel() for b in batches])
    for name in batches[0].of_mark:
        columns[f"mark_{name}"] = _lists([b.of_mark[name] for b in batches])
    return pa.table(columns)


def _lists(arrays: list[np.ndarray]) -> pa.Array:
    ends = np.cumsum([0, *map(len, arrays)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(arrays)))


def from_row(rows: pa.Table, row: int) -> MicroBatch:
    """The packed batch of one Arrow row."""

    def values(name: str) -> np.ndarray:
        return np.array(rows[name][row].values)

    lengths = values("lengths")
    names = rows.column_names
    batch = PackedBatch(
        values("token_ids"),
        values("token_types"),
        ragged_arange(lengths),
        lengths,
        {n[3:]: _shaped(values(n), len(lengths)) for n in names if n.startswith("of_")},
        values("marks"),
        {n[5:]: values(n) for n in names if n.startswith("mark_")},
    )
    step, pairs, last = (rows[name][row].as_py() for name in ("step", "pairs", "last"))
    return MicroBatch(step, pairs, last, batch)


def _shaped(values: np.ndarray, sequences: int) -> np.ndarray:
    return values if len(values) == sequences else values.reshape(sequences, -1)
