"""Building a corpus by tasks of the cluster: some read records, others make candidates of them.

Knows Ray Data. Must not know any corpus: what a record becomes is `corpora/building.py`'s.

The tables come back in the order of the records, so a corpus is the same byte for byte whether this
process made it or a cluster did.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data

from as2ray.corpora.base import Building, Record
from as2ray.corpora.building import RECORDS, Bad, Made, Spread, make
from as2ray.distributed.cluster import own_errors
from as2ray.distributed.plan import nodes
from as2ray.errors import ResourceError
from as2ray.text.sentences import Splitter, find, register

READING = 0.5
"""CPUs of a task that reads. Another share than that of the tasks that make, or Ray Data would
fuse the two and one packed file would keep one core at work."""

NAMES = pa.list_(pa.string())


def spread(cpus: float) -> Spread:
    """What makes all records of some files on the cluster.

    Args:
        cpus: CPUs that the tasks may hold at a time; at least 1.5.
    """
    return partial(_spread, cpus=max(cpus, 1 + READING))


def _spread(
    building: Building, paths: list[Path], options: Mapping[str, Any], cpus: float
) -> Iterator[Made]:
    has = sum(node.get("CPU", 0.0) for node in nodes())
    if has < 1 + READING:
        # A task that reads holds its share while it waits for what it read to be taken.
        raise ResourceError(
            f"a cluster of {has:g} CPU to build on",
            expected=f"at least {1 + READING:g}: one task reads while another makes candidates",
            mend="add a node, or build in this process: --workers.count 0",
        )
    names = [{"path": str(path)} for path in paths]
    # A splitter that was registered here is not known where the tasks run.
    splitter = find(options["splitter"]) if "splitter" in options else None
    made = {"building": building, "options": dict(options), "splitter": splitter}
    dataset = (
        ray.data.from_items(names, override_num_blocks=len(names))
        .map_batches(_read, batch_size=1, fn_kwargs={"building": building}, num_cpus=READING)
        .map_batches(_make, batch_size=1, batch_format="pyarrow", fn_kwargs=made, num_cpus=1)
    )
    execution = dataset.context.execution_options
    execution.preserve_order = True
    execution.resource_limits = ray.data.ExecutionResources(cpu=cpus)
    dataset.context.enable_progress_bars = False
    with own_errors():
        for rows in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from _made(rows)


def _read(files: dict[str, np.ndarray], building: Building) -> Iterator[pa.Table]:
    """Rows of `RECORDS` records each."""
    for path in files["path"].tolist():
        records = building.records(Path(path))
        while batch := list(islice(records, RECORDS)):
            where, texts = zip(*batch)
            column = pa.array([list(texts)], pa.list_(pa.large_string()))
            yield pa.table({"where": pa.array([list(where)], NAMES), "text": column})


def _make(
    rows: pa.Table, building: Building, options: dict[str, Any], splitter: Splitter | None
) -> pa.Table:
    if splitter is not None:
        register(splitter.name, splitter.version, splitter.split)
    found = [
        make(building, map(Record, row["where"], row["text"]), options) for row in rows.to_pylist()
    ]
    tables = [None if table is None else _bytes(table) for table, _ in found]
    return pa.table(
        {
            "table": pa.array(tables, pa.large_binary()),
            "where": pa.array([[one.where for one in bad] for _, bad in found], NAMES),
            "came": pa.array([[one.came for one in bad] for _, bad in found], NAMES),
        }
    )


def _made(rows: pa.Table) -> Iterator[Made]:
    for row in rows.to_pylist():
        table = pa.ipc.open_stream(row["table"]).read_all() if row["table"] else None
        yield table, list(map(Bad, row["where"], row["came"]))


def _bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
