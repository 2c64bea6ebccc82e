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

from as2ray.corpora.corpus import Record, RecordConversion
from as2ray.corpora.record_conversion import (
    RECORDS_PER_BATCH,
    ConversionResult,
    ConvertAll,
    RejectedRecord,
    convert_records,
)
from as2ray.distributed.cluster import unwrap_ray_errors
from as2ray.distributed.plan import node_resources
from as2ray.errors import ResourceError
from as2ray.text.sentences import SentenceSplitter, get_splitter, register_splitter

READ_TASK_CPUS = 0.5
"""CPUs of a task that reads. Another share than that of the tasks that make, or Ray Data would
fuse the two and one packed file would keep one core at work."""

STRING_LIST = pa.list_(pa.string())


def convert_on_ray(num_cpus: float) -> ConvertAll:
    """What makes all records of some files on the cluster.

    Args:
        cpus: CPUs that the tasks may hold at a time; at least 1.5.
    """
    return partial(_convert_on_ray, num_cpus=max(num_cpus, 1 + READ_TASK_CPUS))


def _convert_on_ray(
    conversion: RecordConversion, paths: list[Path], options: Mapping[str, Any], num_cpus: float
) -> Iterator[ConversionResult]:
    has = sum(node.get("CPU", 0.0) for node in node_resources())
    if has < 1 + READ_TASK_CPUS:
        # A task that reads holds its share while it waits for what it read to be taken.
        raise ResourceError(
            f"a cluster of {has:g} CPU to build on"
            f"; expected at least {1 + READ_TASK_CPUS:g}: one task reads while another makes candidates",
            fix="add a node, or build in this process: --workers.count 0",
        )
    names = [{"path": str(path)} for path in paths]
    # A splitter that was registered here is not known where the tasks run.
    splitter = get_splitter(options["splitter"]) if "splitter" in options else None
    made = {"building": conversion, "options": dict(options), "splitter": splitter}
    dataset = (
        ray.data.from_items(names, override_num_blocks=len(names))
        .map_batches(
            _read_records, batch_size=1, fn_kwargs={"building": conversion}, num_cpus=READ_TASK_CPUS
        )
        .map_batches(
            _convert_batch, batch_size=1, batch_format="pyarrow", fn_kwargs=made, num_cpus=1
        )
    )
    execution = dataset.context.execution_options
    execution.preserve_order = True
    execution.resource_limits = ray.data.ExecutionResources(cpu=num_cpus)
    dataset.context.enable_progress_bars = False
    with unwrap_ray_errors():
        for rows in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from _decode_results(rows)


def _read_records(files: dict[str, np.ndarray], conversion: RecordConversion) -> Iterator[pa.Table]:
    """Rows of `RECORDS` records each."""
    for path in files["path"].tolist():
        records = conversion.read_records(Path(path))
        while batch := list(islice(records, RECORDS_PER_BATCH)):
            where, texts = zip(*batch)
            column = pa.array([list(texts)], pa.list_(pa.large_string()))
            yield pa.table({"where": pa.array([list(where)], STRING_LIST), "text": column})


def _convert_batch(
    rows: pa.Table,
    conversion: RecordConversion,
    options: dict[str, Any],
    splitter: SentenceSplitter | None,
) -> pa.Table:
    if splitter is not None:
        register_splitter(splitter.name, splitter.version, splitter.split)
    found = [
        convert_records(conversion, map(Record, row["where"], row["text"]), options)
        for row in rows.to_pylist()
    ]
    tables = [None if table is None else _to_ipc_bytes(table) for table, _ in found]
    return pa.table(
        {
            "table": pa.array(tables, pa.large_binary()),
            "where": pa.array([[one.source for one in bad] for _, bad in found], STRING_LIST),
            "came": pa.array([[one.problem for one in bad] for _, bad in found], STRING_LIST),
        }
    )


def _decode_results(rows: pa.Table) -> Iterator[ConversionResult]:
    for row in rows.to_pylist():
        table = pa.ipc.open_stream(row["table"]).read_all() if row["table"] else None
        yield table, list(map(RejectedRecord, row["where"], row["came"]))


def _to_ipc_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
