"""`as2ray train`: trains a ranker on a table of the user's own."""

import logging
import sys

from as2ray.console.configuration import console_log
from as2ray.training.config import TABLE_TRAINING, TrainingConfig


def train_command(  # noqa: PLR0913 - every argument is a flag
    *,
    table: str,
    output: str,
    dev: str | None = None,
    test: str | None = None,
    columns: dict[str, str] = {},  # noqa: B006
    min_positive_grade: float | None = None,
    max_bad_records: int = 0,
    model: str = "packaged:all-MiniLM-L6-v2",
    max_length: int = 128,
    loss: str = "cross_entropy",
    training: TrainingConfig = TABLE_TRAINING,
    teacher: str | None = None,
    on_leak: str = "error",
    seed: int = 0,
    quiet: bool = False,
    verbose: bool = False,
    json_log: bool = False,
) -> None:
    """Trains a ranker on a table, in this process, and compares it with BM25 and its own encoder.

    Args:
        table: A file (CSV, TSV, JSON lines, Parquet), a folder of Parquet files or of `datasets`,
            or hub:OWNER/NAME:SPLIT. It has a question, a candidate and a label in each row.
        output: Folder of the ranker (`ranker/`), its report and all stages. The same command
            continues there; a command with other settings is refused.
        dev: Table that selects the best checkpoint; by default a tenth of the questions.
        test: Table that is reported; by default a tenth of the questions, or dev.
        columns: Names of the columns, such as {"question": "q", "candidate": "text", "label": "y"}.
        min_positive_grade: Lowest grade that counts as an answer; by default labels are 0 and 1.
        max_bad_records: Rows of each table that may be left out because they cannot be used.
        model: Folder or hub id of an encoder or ranker.
        max_length: Maximum number of tokens of a pair.
        loss: Name of a loss, such as cross_entropy or listwise_cross_entropy, or module:name of a
            function of your own, in a module of this folder or an installed one.
        training: Hyperparameters. A large encoder needs a lower learning rate, such as 1e-5.
        teacher: Folder or hub id of a ranker whose scores are learned beside the labels
            (distillation), instead of loss.
        on_leak: What to do with questions that are also in dev or test: error, drop or keep.
        seed: Seed of splits, of the order of examples and of the new head.
        quiet: Show warnings, errors and results alone.
        verbose: Show the log of other libraries and of each step, too.
        json_log: Write the log as one JSON object per line.
    """
    from as2ray.experiments.table_training import train as train_on_table

    logging.getLogger("as2ray.experiments.reports").setLevel(logging.WARNING)  # printed below
    with console_log(quiet=quiet, verbose=verbose, json_log=json_log):
        result = train_on_table(
            table,
            output,
            dev=dev,
            test=test,
            columns=columns,
            min_positive_grade=min_positive_grade,
            max_bad_records=max_bad_records,
            model=model,
            max_length=max_length,
            loss=loss,
            training=training,
            teacher=teacher,
            on_leak=on_leak,  # type: ignore[arg-type]
            seed=seed,
        )
    sys.stdout.write(f"{result}\n")
