"""Adapts a ranker to a folder of documents: index, questions, BM25's labels, calibration.

    python -m pipelines.own_documents --documents FOLDER --output DIR
    as2ray ask "..." --index DIR/index/index --model DIR/answering/ranker

No labels are needed. The questions are a user's (`--questions`, one per line), or are made from the
documents. Labeled questions (`--labeled_tables`, prepared tables) are trained on last: a few
hundred help.
"""

import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, Field, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from as2ray.checkpoints import packaged
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.corpora.leaks import check_leaks
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, CorpusError
from as2ray.experiments.stage import MANIFEST, digest, stage
from as2ray.models.calibration import CalibrationMethod
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig, Query
from as2ray.retrieval.query_generation import QuerySource, generate_queries
from as2ray.retrieval.question_answering import QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.schema import count_table, validate_table
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from pipelines.generator import QuestionGenerator
from pipelines.labels import INDEX, index_documents, label_queries, split_train_dev, too_few
from pipelines.recipe import described
from pipelines.steps import TABLE, Plan, check_model, table, train_ranker

log = logging.getLogger(__name__)

DEV_SHARE = 10
"""About one of this number of questions selects the checkpoint and calibrates the scores."""

QUERIES = pa.schema([("id", pa.string()), ("text", pa.string()), ("source_sentence", pa.int64())])
"""Schema of stored questions: the fields of `Query`."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OwnDocuments:
    """Adapts a ranker to unlabeled documents, and answers questions from them."""

    documents: str
    """A folder of text, Markdown, HTML, JSON lines or Parquet files, or one such table."""
    output: str
    """Folder of the stages."""
    questions: str | None = None
    """A file of questions, one per line; without it they are made from the documents."""
    query_sources: list[QuerySource] = field(default_factory=lambda: ["headings", "words"])
    """What questions are made from."""
    query_generator: str | None = None
    """Folder or hub id of a sequence-to-sequence model for the source `generator`."""
    prompt: str = ""
    """Text before each sentence that the generator reads."""
    max_questions: PositiveInt | None = 20_000
    """Maximum number of questions, sampled if there are more; `null` keeps all."""
    labeled_tables: dict[Literal["train", "dev"], str] = field(default_factory=dict)
    """Folders of labeled candidates tables: `train`, `dev`, or both."""
    model: ModelSpec = field(default_factory=lambda: ModelSpec(packaged.MINILM_NAME))
    """Pretrained model to start from; with `exit_layers` it becomes a cascade."""
    index: IndexConfig = field(default_factory=IndexConfig)
    """How documents are read and scored."""
    pseudo_labels: PseudoLabelConfig = field(
        default_factory=lambda: PseudoLabelConfig(max_similarity=0.8)
    )
    """How BM25 labels questions."""
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, global_batch_size=16, learning_rate=1e-4)
    )
    """Hyperparameters of the run on BM25's labels. In a cascade a step trains one exit, so its
    partial classifiers have ten times the learning rate, unless `head_learning_rate` is set."""
    fine_tuning: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=4, global_batch_size=16, learning_rate=5e-5)
    )
    """Hyperparameters of the run on the labeled questions; for cascades see `training`."""
    calibration_method: CalibrationMethod = "isotonic"
    """The margin loss only trains differences of scores, so their level is arbitrary; a temperature
    could not correct it."""
    min_precision: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Minimum share of correct answers among those that are given."""
    ask: list[Annotated[str, Field(pattern=r"\S")]] = field(default_factory=list)
    """Questions to answer at the end."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """Part of the machine to use."""
    num_shards: PositiveInt = 1
    """Number of shards of the index."""

    @model_validator(mode="after")
    def _check_queries(self) -> "OwnDocuments":
        if self.questions is None and not self.query_sources:
            raise ValueError(
                f"no query_sources and no file of questions; name some of {get_args(QuerySource)}"
            )
        sources = self.query_sources if self.questions is None else []
        if ("generator" in sources) != (self.query_generator is not None):
            raise ValueError(
                f"query_generator={self.query_generator} with query_sources={sources}: the source "
                "`generator` and a model for it need each other, and no file of questions"
            )
        return self


def run(own: OwnDocuments) -> Path:
    """Makes what does not exist yet.

    Args:
        own: Documents and settings.

    Returns:
        The folder of the ranker that answers.

    Raises:
        ConfigError: The output is among the documents, there are too few questions, or the model
            does not have the layers or exits.
        CorpusError: No documents, or a labeled table that is none or has only one label.
        LeakError: The labeled tables share questions.
        CheckpointError: The model is neither an encoder nor a ranker.
    """
    folder = Path(own.output).resolve()
    documents = Path(own.documents).resolve()
    _check_output(folder, documents)
    if not (folder / "pseudo" / MANIFEST).is_file():
        check_model(own.model)
    queries = None
    if own.questions is not None:
        queries = _read_questions(own.questions, own.max_questions)
    labeled = _store_labeled_tables(folder / "tables", own.labeled_tables)
    index = index_documents(folder / "index", documents, own.index, own.num_shards)
    if queries is None:
        queries = _make_queries(folder / "questions", index, own)
    pseudo_labeled = label_queries(
        folder / "tables" / "labeled", index, queries, own.pseudo_labels, divides=True
    )
    tables = split_train_dev(folder / "tables", pseudo_labeled, DEV_SHARE)
    loss = "uniform_exit" if own.model.exit_layers else "margin_ranking"
    training, fine_tuning = (
        _with_head_learning_rate(training, own.model)
        for training in (own.training, own.fine_tuning)
    )
    job = TrainingJob(own.model, (str(tables["train"]),), {"dev": str(tables["dev"])}, training)
    job = replace(job, loss=loss)
    ranker = train_ranker(folder / "pseudo", Plan(job, tables), own.workers)
    dev = labeled.get("dev", tables["dev"])
    if "train" in labeled:
        tables = {"train": labeled["train"], "dev": dev}
        job = replace(job, train_tables=(str(labeled["train"]),), eval_tables={"dev": str(dev)})
        job = replace(job, training=fine_tuning)
        ranker = train_ranker(folder / "adapted", Plan(job, tables, ranker), own.workers)
    answering = _calibrate(folder / "answering", ranker, dev, own) / "ranker"
    sys.stdout.write(f"{_format_answers(own, SentenceIndex.open(index / INDEX), answering)}\n")
    return answering


def _check_output(folder: Path, documents: Path) -> None:
    """Checks that the next run would not read the output as documents."""
    if not folder.is_relative_to(documents):
        return
    if not any(part.startswith(".") for part in folder.relative_to(documents).parts):
        raise ConfigError(
            f"output {folder} is inside documents {documents}, where all folders but hidden ones "
            "are read as documents",
            fix="choose another output",
        )


def _with_head_learning_rate(training: TrainingConfig, model: ModelSpec) -> TrainingConfig:
    """Adds the learning rate of a cascade's partial classifiers (docs/log.md, 2026-11-22)."""
    if not model.exit_layers or training.head_learning_rate is not None:
        return training
    return replace(training, head_learning_rate=10 * training.learning_rate)


def _read_questions(source: str, max_questions: int | None) -> list[Query]:
    """Reads a user's questions, or samples some of them."""
    try:
        # Not splitlines: a line may contain a form feed or a Unicode separator.
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source} cannot be read as a file of questions in UTF-8: {error}"
        ) from error
    texts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not texts:
        raise ConfigError(f"{source} contains no question; write one per line, or give no file")
    queries = [Query(f"own-{number}", text) for number, text in enumerate(texts)]
    if max_questions is None or max_questions >= len(queries):
        return queries
    return [queries[i] for i in sorted(Random(0).sample(range(len(queries)), max_questions))]


def _make_queries(folder: Path, index: Path, own: OwnDocuments) -> list[Query]:
    """Makes a stage with questions from the documents; returns them."""

    def make(part: Path) -> Mapping[str, Any]:
        generator = None
        if own.query_generator is not None:
            generator = QuestionGenerator(own.query_generator, own.prompt)
        queries = generate_queries(
            SentenceIndex.open(index / INDEX),
            own.query_sources,
            own.max_questions,
            query_generator=generator,
        )
        if len(queries) < 2:
            raise too_few(f"only {len(queries)} questions were made from {own.query_sources}")
        rows = pa.Table.from_pylist([query._asdict() for query in queries], QUERIES)
        pq.write_table(rows, part / TABLE, compression="zstd")
        return {"questions": len(queries)}

    how = {
        "query_sources": own.query_sources,
        "max_questions": own.max_questions,
        "query_generator": own.query_generator,
        "prompt": own.prompt,
    }
    found = table(stage(folder, {"index": digest(index), **how}, make))
    return [Query(**row) for row in found.to_pylist()]


def _store_labeled_tables(
    folder: Path, sources: Mapping[Literal["train", "dev"], str]
) -> dict[str, Path]:
    """Checks the labeled tables, then copies them to stages."""
    tables: dict[str, pa.Table] = {}
    for name, source in sources.items():
        rows = validate_table(table(Path(source)), source)
        if not 0 < count_table(rows).num_positives < rows.num_rows:
            raise CorpusError(
                f"{source} has {count_table(rows)}; it needs both labels: answers, and candidates "
                "that are none"
            )
        tables[name] = rows
    check_leaks(tables)
    return {name: _store_table(folder / f"labeled-{name}", rows) for name, rows in tables.items()}


def _store_table(folder: Path, rows: pa.Table) -> Path:
    outputs = {"fingerprint": fingerprint(rows)}

    def make(part: Path) -> Mapping[str, Any]:
        pq.write_table(rows, part / TABLE, row_group_size=4_096, compression="zstd")
        return outputs

    return stage(folder, outputs, make)


def _calibrate(folder: Path, ranker: Path, dev: Path, own: OwnDocuments) -> Path:
    """Makes a stage with the ranker, calibrated and with a threshold for abstention."""

    def make(part: Path) -> dict[str, Any]:
        loaded = load(ranker / "ranker")
        loaded.calibrate(table(dev), own.calibration_method, own.min_precision)
        save(loaded, part / "ranker")
        return {"threshold": loaded.threshold}

    how = {"calibration_method": own.calibration_method, "min_precision": own.min_precision}
    inputs = {"ranker": digest(ranker), "dev": digest(dev), **how}
    return stage(folder, inputs, make)


def _format_answers(own: OwnDocuments, index: SentenceIndex, ranker: Path) -> str:
    """Returns the answers to the questions in `ask`, and the command that asks more."""
    lines = []
    if own.ask:
        answerer = QuestionAnswerer(index, load(ranker))
        for question in own.ask:
            lines.append(f"\n{question}")
            answers = answerer.ask(question).answers
            lines += [f"  {a.score:.3f}  {a.text}  ({a.document_id})" for a in answers]
            lines += [] if answers else ["  no answer"]
    where = Path(own.output) / "index" / INDEX
    command = shutil.which("as2ray") or Path(sys.executable).with_name("as2ray")
    return "\n".join([*lines, f'\n{command} ask "..." --index {where} --model {ranker}'])


def main() -> None:
    """Runs the command line."""
    own = described(OwnDocuments)
    with ray_session() if own.workers.num_workers else nullcontext():
        run(own)


if __name__ == "__main__":
    main()
