"""Converts the records of a corpus in tasks of Ray Data.

Some tasks read records and others make candidates of them. The tables come back in the order of the
records, so a corpus is the same byte for byte whether one process or a cluster converted it.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray.data

from as2ray.corpora.corpus import Record, RecordConversion
from as2ray.corpora.page_grades import PageOptions
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
from as2ray.tables.schema import batched, from_rows
from as2ray.text.sentences import SentenceSplitter, get_splitter, register_splitter

READ_TASK_CPUS = 0.5
"""CPUs of a task that reads. It must differ from the share of the tasks that convert, or Ray Data
would fuse the two, and a release of one packed file would be converted on one core."""

STRING_LIST = pa.list_(pa.string())
RECORD_SCHEMA = pa.schema([("source", STRING_LIST), ("text", pa.list_(pa.large_string()))])
RESULT_SCHEMA = pa.schema(
    [("table", pa.large_binary()), ("source", STRING_LIST), ("problem", STRING_LIST)]
)


def convert_on_ray(num_cpus: float) -> ConvertAll:
    """Returns a function that converts all records of some files on the cluster.

    Args:
        num_cpus: CPUs that its tasks use at the same time; at least 1.5.
    """
    return partial(_convert_on_ray, num_cpus=max(num_cpus, 1 + READ_TASK_CPUS))


def _convert_on_ray(
    conversion: RecordConversion, paths: list[Path], options: PageOptions, num_cpus: float
) -> Iterator[ConversionResult]:
    cluster_cpus = sum(node.get("CPU", 0.0) for node in node_resources())
    if cluster_cpus < 1 + READ_TASK_CPUS:
        # A task that reads keeps its CPUs while it waits for its output to be consumed.
        raise ResourceError(
            f"the cluster has {cluster_cpus:g} CPU; at least {1 + READ_TASK_CPUS:g} are needed, so "
            "that one task can read while another converts",
            fix="add a node, or build in this process: --workers.num_workers 0",
        )
    files = [{"path": str(path)} for path in paths]
    # A splitter that was registered in this process is not registered in the tasks'.
    splitter = get_splitter(options.sentence_splitter)
    texts = ray.data.from_items(files, override_num_blocks=len(files)).map_batches(
        _read_records, batch_size=1, fn_kwargs={"conversion": conversion}, num_cpus=READ_TASK_CPUS
    )
    settings = {"conversion": conversion, "options": options, "splitter": splitter}
    dataset = texts.map_batches(
        _convert_batch, batch_size=1, batch_format="pyarrow", fn_kwargs=settings, num_cpus=1
    )
    execution = dataset.context.execution_options
    execution.preserve_order = True
    execution.resource_limits = ray.data.ExecutionResources(cpu=num_cpus)
    dataset.context.enable_progress_bars = False
    with unwrap_ray_errors():
        for rows in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from _decode_results(rows)


def _read_records(files: dict[str, np.ndarray], conversion: RecordConversion) -> Iterator[pa.Table]:
    """Yields tables of one row, which holds `RECORDS_PER_BATCH` records."""
    for path in files["path"].tolist():
        for batch in batched(conversion.read_records(Path(path)), RECORDS_PER_BATCH):
            yield from_rows([list(zip(*batch))], RECORD_SCHEMA)


def _convert_batch(
    rows: pa.Table, conversion: RecordConversion, options: PageOptions, splitter: SentenceSplitter
) -> pa.Table:
    register_splitter(splitter.name, splitter.version, splitter.split)
    results = []
    for row in rows.to_pylist():
        records = map(Record, row["source"], row["text"])
        table, rejected = convert_records(conversion, records, options)
        content = None if table is None else _to_ipc_bytes(table)
        results.append((content, [r.source for r in rejected], [r.problem for r in rejected]))
    return from_rows(results, RESULT_SCHEMA)


def _decode_results(rows: pa.Table) -> Iterator[ConversionResult]:
    for row in rows.to_pylist():
        table = pa.ipc.open_stream(row["table"]).read_all() if row["table"] else None
        yield table, list(map(RejectedRecord, row["source"], row["problem"]))


def _to_ipc_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
