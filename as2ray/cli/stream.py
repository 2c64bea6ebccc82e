"""`as2ray stream`: reads a corpus as training on a cluster does, and says how fast."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from as2ray.checkpoints.packaged import MINILM_NAME, resolve_model_path
from as2ray.cli.console import create_console, validate_corpus_options
from as2ray.console.configuration import console_log
from as2ray.errors import ConfigError


def stream(  # noqa: PLR0913 - every argument is a flag
    *,
    table: str | None = None,
    corpus: str | None = None,
    split: str = "train",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    workers: PositiveInt = 2,
    num_data_cpus: PositiveFloat | None = None,
    epochs: PositiveInt = 1,
    model: str = MINILM_NAME,
    num_data_shards: PositiveInt = 1,
    model_pairs_per_second: PositiveFloat | None = None,
    quiet: bool = False,
    verbose: bool = False,
    json_log: bool = False,
) -> None:
    """Reads a table through the path of training into workers that only count.

    Runs on the cluster of RAY_ADDRESS, or on the cores of this machine.

    Args:
        table: Folder of a prepared table, or of your own Parquet files with its columns.
        corpus: Name of a corpus, which is prepared in a temporary folder first.
        split: Split of the corpus.
        data_dir: Folder of the raw release, or `hub`; by default its folder in the data root.
        corpus_options: Options of the corpus.
        workers: Number of workers.
        num_data_cpus: CPUs for reading, tokenizing and packing; by default all.
        epochs: Number of epochs.
        model: Model whose tokenizer is used.
        num_data_shards: Shards that the examples are dealt to; see the training setting.
        model_pairs_per_second: Pairs that your model trains on per second on one device; adds the
            hours of an epoch with as many devices as workers.
        quiet: Show warnings, errors and results alone.
        verbose: Show the log of other libraries and of each step, too.
        json_log: Write the log as one JSON object per line.
    """
    if (table is None) == (corpus is None):
        raise ConfigError(f"give either --table or --corpus (table={table}, corpus={corpus})")
    with (
        console_log(quiet=quiet, verbose=verbose, json_log=json_log),
        TemporaryDirectory(prefix="as2ray-stream-") as folder,
    ):
        # Ray logs to the standard error of its import: inside, its own lines are not shown.
        from as2ray.distributed.cluster import ray_session
        from as2ray.distributed.plan import node_resources
        from as2ray.distributed.stream import COUNTER_CPUS, StreamConfig
        from as2ray.distributed.stream import stream as run
        from as2ray.distributed.workers_config import WorkersConfig
        from as2ray.tables.parquet import ParquetTable

        if corpus is not None:
            from as2ray.corpora.preparation import prepare_splits

            options = validate_corpus_options(corpus, corpus_options)
            prepared = Path(folder) / "table"
            prepare_splits(corpus, data_dir, prepared, {split: "raw"}, **options)
            table = str(prepared / split)
        ParquetTable.open(str(table))  # A table that cannot be read is refused before Ray starts.
        config = StreamConfig(
            str(Path(str(table)).resolve()),
            resolve_model_path(model),
            num_data_shards=num_data_shards,
            epochs=epochs,
        )
        with ray_session():
            if num_data_cpus is None:
                cpus = sum(node.get("CPU", 0.0) for node in node_resources())
                num_data_cpus = max(0.1, cpus - workers * COUNTER_CPUS)
            plan = WorkersConfig(workers, COUNTER_CPUS, num_data_cpus=num_data_cpus)
            reports = run(config, plan)
    console = create_console()
    for report in reports:
        counts, wait_s = report.counts, report.counts.wait_s / workers
        for stats in report.stats:
            console.print(stats)
        console.print(
            f"{counts.num_pairs:,} pairs and {counts.num_tokens:,} tokens in "
            f"{report.duration_s:,.1f} s: {report.pairs_per_second:,.0f} pairs/s, "
            f"{report.tokens_per_second:,.0f} tokens/s; a worker waited {wait_s:,.1f} s and took "
            f"up to {counts.host_memory_gb:.2f} GB; {report.spilled_bytes:,} bytes were spilled"
        )
        if model_pairs_per_second is not None:
            training = workers * model_pairs_per_second
            slower = "the model" if training < report.pairs_per_second else "reading"
            hours = counts.num_pairs / min(training, report.pairs_per_second) / 3_600
            console.print(
                f"an epoch of training takes {hours:,.2f} hours on {workers} devices that train on "
                f"{model_pairs_per_second:,g} pairs/s each: {slower} limits it"
            )
