"""From a folder of documents to answers: index, questions, BM25's labels, ranker, calibration.

    python -m pipelines.own_documents --documents FOLDER --output DIR
    as2ray ask "..." --index DIR/index/index --model DIR/answering/ranker

Nobody has to label anything. Questions are a user's (`--questions`, one a line), or made of the
documents. Annotated ones (`--annotated`, a prepared table) come last: a few hundred help.
"""

import logging
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.checkpoints import packaged
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.corpora.leaks import check_leaks
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.plan import WorkersConfig
from as2ray.errors import ConfigError, CorpusError
from as2ray.experiments.stage import MANIFEST, digest, stage
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.models.calibration import CalibrationMethod
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig, Query
from as2ray.retrieval.query_generation import QuerySource as Questions
from as2ray.retrieval.query_generation import generate_queries
from as2ray.retrieval.question_answering import QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.schema import count_table, validate_table
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from pipelines.generator import QuestionGenerator
from pipelines.labels import INDEX, index_documents, label_queries, split_train_dev, too_few
from pipelines.recipe import described
from pipelines.steps import TABLE, Plan, refuse_unfit, table, train_ranker

log = logging.getLogger(__name__)

SHARE = 10
"""One question in so many chooses the checkpoint and calibrates the scores."""

QUERIES = pa.schema([("id", pa.string()), ("text", pa.string()), ("without", pa.int64())])
"""The columns of stored questions: the fields of `Query`."""


@dataclass(frozen=True)
class OwnDocuments:
    """Adapts a ranker to documents that nobody labelled, and answers questions from them."""

    documents: str
    """A folder of text, Markdown, HTML, JSON lines or Parquet files, or one such table."""
    output: str
    """Folder of the stages."""
    questions: str | None = None
    """A file of questions, one a line; without it they are made of the documents."""
    query_sources: list[Questions] = field(default_factory=lambda: ["headings", "words"])
    """What questions are made of."""
    query_generator: str | None = None
    """A local sequence-to-sequence model for the kind `generator`: a folder or a hub id."""
    prompt: str = ""
    """What it is given before a sentence."""
    max_questions: int | None = 20_000
    """Draw so many questions, if there are more; a generator is asked for few more than that."""
    labeled_tables: dict[str, str] = field(default_factory=dict)
    """Folders of candidates tables that people labelled: `train`, `dev`, or both."""
    model: ModelSpec = field(default_factory=lambda: ModelSpec(packaged.MINILM_NAME))
    """What to start from; with `exits` it becomes a cascade."""
    index: IndexConfig = field(default_factory=IndexConfig)
    """How documents are read and scored."""
    pseudo_labels: PseudoLabelConfig = field(
        default_factory=lambda: PseudoLabelConfig(max_similarity=0.8)
    )
    """How BM25 labels."""
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, global_batch_size=16, learning_rate=1e-4)
    )
    """On BM25's labels. Of a cascade's exits one learns at a step: its partial classifiers have ten
    times the rate, unless `head_learning_rate` says otherwise."""
    fine_tuning: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=4, global_batch_size=16, learning_rate=5e-5)
    )
    """On the annotated questions; a cascade's partial classifiers as above."""
    calibration_method: CalibrationMethod = "isotonic"
    """The margin loss trains differences of scores: where they lie is any place, which a
    temperature could not mend."""
    min_precision: float = 0.5
    """Share of right ones among the answers that are given, at least."""
    ask: list[str] = field(default_factory=list)
    """Questions to answer at the end."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """What to take of the machine."""
    num_shards: int = 1
    """Parts of the index."""

    def __post_init__(self) -> None:
        if unknown := sorted(self.labeled_tables.keys() - {"train", "dev"}):
            raise ConfigError(
                f"annotated tables {unknown}; expected train, dev or both",
            )
        if self.max_questions is not None and self.max_questions < 1:
            raise ConfigError(
                f"most {self.max_questions}; expected at least 1 question, or all of them",
            )
        blank = [question for question in self.ask if not question.strip()]
        if not 0 < self.min_precision <= 1 or blank:
            raise ConfigError(
                f"precision {self.min_precision}, {len(blank)} blank questions in ask"
                "; expected a precision above 0, at most 1, and words in each question",
            )
        if not self.query_sources and self.questions is None:
            raise ConfigError(
                "no kinds of questions, and no file of them"
                f"; expected some of {get_args(Questions)}, or a file of questions",
                fix="name a kind, or give a file",
            )
        made_of = self.query_sources if self.questions is None else []
        if ("generator" in made_of) != (self.query_generator is not None):
            raise ConfigError(
                f"questions {self.questions}, made of {made_of}, generator {self.query_generator}"
                "; expected a generator and the kind `generator`, or neither",
                fix="add the one, or leave out the other",
            )


def run(own: OwnDocuments) -> Path:
    """Makes what is not there yet; the folder of the ranker that answers.

    Args:
        own: What to do.

    Raises:
        RecipeError: An output among the documents, too few questions, or layers or exits that the
            model does not have.
        CorpusError: No documents, or annotated tables that are none or have one label only.
        LeakError: Annotated tables that share questions.
        CheckpointError: A model that is none.
    """
    folder = Path(own.output).resolve()
    documents = Path(own.documents).resolve()
    _refuse_within(folder, documents)
    if not (folder / "pseudo" / MANIFEST).is_file():
        refuse_unfit(own.model)
    asked = None if own.questions is None else _asked(own.questions, own.max_questions)
    given = _annotated(folder / "tables", own.labeled_tables)
    index = index_documents(folder / "index", documents, own.index, own.num_shards)
    queries = _made(folder / "questions", index, own) if asked is None else asked
    every = label_queries(
        folder / "tables" / "labelled", index, queries, own.pseudo_labels, divides=True
    )
    tables = split_train_dev(folder / "tables", every, SHARE)
    objective: str | MarginRankingLoss = "uniform_exit" if own.model.exit_layers else "margin"
    training, adapt = (_rates(training, own.model) for training in (own.training, own.fine_tuning))
    job = TrainingJob(own.model, (str(tables["train"]),), {"dev": str(tables["dev"])}, training)
    job = replace(job, objective=objective)
    ranker = train_ranker(folder / "pseudo", Plan(job, tables), own.workers)
    dev = given.get("dev", tables["dev"])
    if "train" in given:
        named = {"train": given["train"], "dev": dev}
        job = replace(job, train=(str(given["train"]),), watched={"dev": str(dev)})
        job = replace(job, training=adapt)
        ranker = train_ranker(folder / "adapted", Plan(job, named, ranker), own.workers)
    answering = _calibrated(folder / "answering", ranker, dev, own) / "ranker"
    sys.stdout.write(f"{_told(own, SentenceIndex.open(index / INDEX), answering)}\n")
    return answering


def _refuse_within(folder: Path, documents: Path) -> None:
    """The next run would take an output among the documents for some of them."""
    if not folder.is_relative_to(documents):
        return
    if not any(part.startswith(".") for part in folder.relative_to(documents).parts):
        raise ConfigError(
            f"output {folder} inside documents {documents}"
            "; expected an output elsewhere, or in a hidden folder: all others there are read",
            fix="name another output",
        )


def _rates(training: TrainingConfig, model: ModelSpec) -> TrainingConfig:
    """The settings with a rate for a cascade's partial classifiers (docs/log.md, 2026-11-22)."""
    if not model.exit_layers or training.head_learning_rate is not None:
        return training
    return replace(training, head_learning_rate=10 * training.learning_rate)


def _asked(source: str, max_questions: int | None) -> list[Query]:
    """A user's questions, or some drawn from all of them."""
    try:
        # Not `splitlines`: a line may hold a form feed or a separator of Unicode's.
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source}: {error}; expected a file of questions in UTF-8, one a line",
        ) from error
    texts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not texts:
        raise ConfigError(
            f"{source}: no question; expected one a line",
            fix="write some, or none at all",
        )
    queries = [Query(f"own-{number}", text) for number, text in enumerate(texts)]
    if max_questions is None or max_questions >= len(queries):
        return queries
    return [queries[i] for i in sorted(Random(0).sample(range(len(queries)), max_questions))]


def _made(folder: Path, index: Path, own: OwnDocuments) -> list[Query]:
    """Questions made of the documents, read from the stage that holds them."""

    def make(part: Path) -> Mapping[str, Any]:
        asks = (
            None
            if own.query_generator is None
            else QuestionGenerator(own.query_generator, own.prompt)
        )
        queries = generate_queries(
            SentenceIndex.open(index / INDEX),
            own.query_sources,
            own.max_questions,
            query_generator=asks,
        )
        if len(queries) < 2:
            raise too_few(f"{len(queries)} questions made of {own.query_sources}")
        rows = pa.Table.from_pylist([query._asdict() for query in queries], QUERIES)
        pq.write_table(rows, part / TABLE, compression="zstd")
        return {"questions": len(queries)}

    how = {
        "kinds": own.query_sources,
        "most": own.max_questions,
        "generator": own.query_generator,
        "prompt": own.prompt,
    }
    found = table(stage(folder, {"index": digest(index), **how}, make))
    return [Query(**row) for row in found.to_pylist()]


def _annotated(folder: Path, sources: Mapping[str, str]) -> dict[str, Path]:
    """Stages with the annotated tables as they were given, looked at before the first is made."""
    rows = {name: validate_table(table(Path(source)), source) for name, source in sources.items()}
    for name, found in rows.items():
        if not 0 < count_table(found).num_positives < found.num_rows:
            raise CorpusError(
                f"{sources[name]}: {count_table(found)}"
                "; expected both labels: answers, and candidates that are none",
                fix="give a table that has both",
            )
    check_leaks(rows)
    return {name: _given(folder / f"annotated-{name}", found) for name, found in rows.items()}


def _given(folder: Path, rows: pa.Table) -> Path:
    found = fingerprint(rows)

    def make(part: Path) -> Mapping[str, Any]:
        pq.write_table(rows, part / TABLE, row_group_size=4_096, compression="zstd")
        return {"fingerprint": found}

    return stage(folder, {"fingerprint": found}, make)


def _calibrated(folder: Path, ranker: Path, dev: Path, own: OwnDocuments) -> Path:
    """A stage with the ranker whose scores are probabilities and that knows when to abstain."""

    def make(part: Path) -> dict[str, Any]:
        loaded = load(ranker / "ranker")
        loaded.calibrate(table(dev), own.calibration_method, own.min_precision)
        save(loaded, part / "ranker")
        return {"threshold": loaded.threshold}

    how = {"calibration": own.calibration_method, "precision": own.min_precision}
    identity = {"ranker": digest(ranker), "dev": digest(dev), **how}
    return stage(folder, identity, make)


def _told(own: OwnDocuments, index: SentenceIndex, ranker: Path) -> str:
    """The answers that were asked for, and how to ask more."""
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
    """The command line."""
    own = described(OwnDocuments)
    with ray_session() if own.workers.num_workers else nullcontext():
        run(own)


if __name__ == "__main__":
    main()
