"""Adapts an encoder and a ranker to a folder of documents, and fits how answers are scored.

    python -m pipelines.own_documents --documents FOLDER --output DIR
    as2ray ask "..." --index DIR/index/index --model DIR/answering/ranker

No labels are needed. The questions are a user's (`--questions`, one per line), or are made from the
documents. Labeled questions (`--labeled_tables`) are trained on last: a few hundred help.
"""

import logging
import shutil
import sys
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from as2ray.checkpoints import packaged
from as2ray.errors import ConfigError
from as2ray.experiments.command import Pipeline
from as2ray.experiments.documents import (
    AnsweringRanker,
    FittedScoring,
    GeneratedQueries,
    GivenQueries,
    labeled_tables,
)
from as2ray.experiments.encoders import AdaptedEncoder, EmbeddedIndex, TableWithHeadings
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.indexes import INDEX, DocumentIndex
from as2ray.experiments.pseudo_labels import LabelledTable, SplitTable, too_few_questions
from as2ray.experiments.rankers import RANKER, TrainedRanker, absolute_model_path
from as2ray.experiments.stage import Stage
from as2ray.experiments.store import Store
from as2ray.progress import RESULT
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig, Query
from as2ray.retrieval.query_generation import QuerySource
from as2ray.retrieval.subject_bound import OFF_TOPIC_QUESTIONS
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec

log = logging.getLogger(__name__)

DEV_SHARE = 10
"""About one of this number of questions selects the checkpoints."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OwnDocuments:
    """Adapts a ranker to unlabeled documents, and answers questions from them."""

    documents: str
    """A folder of text, Markdown, HTML, JSON lines or Parquet files, or one such table."""
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
    """Labeled candidates tables, files or folders (see `load_table`): `train`, `dev`, or both."""
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
    encoder: str = packaged.MINILM_NAME
    """Sentence encoder whose embeddings find candidates and take part in the score: a folder of
    sentence-transformers, a hub id, or the packaged MiniLM."""
    encoder_training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, global_batch_size=32, learning_rate=5e-5)
    )
    """Hyperparameters of the encoder's adaptation to the questions and their answers."""
    min_precision: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Minimum share of right answers among those that are given; it needs a labeled dev table."""
    high_confidence: bool = False
    """Whether new questions reach `min_precision` with a probability of 90 %, for which far fewer
    get an answer; by default the dev table reaches it."""
    off_topic_questions: str | None = None
    """A file of questions on other subjects, one per line, which should get no answer; by default
    100 of general knowledge."""
    ask: list[Annotated[str, Field(pattern=r"\S")]] = field(default_factory=list)
    """Questions to answer at the end."""
    num_shards: PositiveInt | None = None
    """Maximum number of shards of the index; by default as many as workers."""

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


def build(own: OwnDocuments, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: index, questions, BM25's labels, encoder, one or two runs, scoring.

    Raises:
        ConfigError: The file of questions cannot be used.
        CorpusError: There are no documents, or a labeled table is none or has only one label.
        LeakError: The labeled tables share questions.
    """
    experiment = Experiment()
    queries = None
    if own.questions is not None:
        queries = GivenQueries.from_queries(_read_questions(own.questions, own.max_questions))
    labeled = labeled_tables(own.labeled_tables)
    index = DocumentIndex.from_documents(own.documents, own.index, own.num_shards)
    add_ranker(experiment, own, index, labeled, queries)
    return experiment


def add_ranker(
    experiment: Experiment,
    own: OwnDocuments,
    index: Stage,
    labeled: Mapping[str, Stage],
    queries: Stage | None = None,
) -> None:
    """Adds what leads from an index of documents to a ranker that answers from it.

    Args:
        experiment: Its stages are added here.
        own: Settings.
        index: Index of the documents.
        labeled: Labeled tables `train`, `dev`, or both.
        queries: Questions of the user; by default they are made from the documents.
    """
    experiment.add("documents", index)
    generator = own.query_generator and absolute_model_path(own.query_generator)
    queries = queries or GeneratedQueries(
        index, tuple(own.query_sources), own.max_questions, generator, own.prompt
    )
    experiment.add("questions", queries)
    pseudo_labeled = LabelledTable(
        index, queries, own.pseudo_labels, min_questions=2, held_out=labeled.get("dev")
    )
    tables = {
        "labeled": pseudo_labeled,
        "train": SplitTable(pseudo_labeled, "train", DEV_SHARE),
        "dev": SplitTable(pseudo_labeled, "dev", DEV_SHARE),
        **{f"labeled-{name}": table for name, table in labeled.items()},
    }
    for name, table in tables.items():
        experiment.add(f"tables/{name}", table)
    ranker = TrainedRanker(
        model=replace(own.model, path=absolute_model_path(own.model.path)),
        train=(tables["train"],),
        dev=tables["dev"],
        training=_with_head_learning_rate(own.training, own.model),
        loss="uniform_exit" if own.model.exit_layers else "margin_ranking",
    )
    experiment.add("pseudo", ranker)
    dev = labeled.get("dev", tables["dev"])
    answers = [tables[name] for name in ("train", "labeled-train") if name in tables]
    encoder = AdaptedEncoder(
        absolute_model_path(own.encoder),
        tuple(TableWithHeadings(table, index) for table in answers),
        TableWithHeadings(dev, index),
        own.encoder_training,
    )
    encoder = experiment.add("encoder", encoder)
    embedded = EmbeddedIndex(index, encoder, with_subject_bound=True)
    experiment.add("index", embedded)
    if "train" in labeled:
        training = _with_head_learning_rate(own.fine_tuning, own.model)
        train = (labeled["train"],)
        ranker = replace(ranker, init_from=ranker, train=train, dev=dev, training=training)
        experiment.add("adapted", ranker)
    off_topic = tuple(read_lines(own.off_topic_questions or OFF_TOPIC_QUESTIONS))
    scoring = FittedScoring(
        embedded,
        dev,
        "dev" in labeled,
        ranker,
        own.min_precision,
        off_topic,
        own.high_confidence,
    )
    experiment.add("scoring", scoring)
    experiment.add("answering", AnsweringRanker(ranker, scoring))


def _with_head_learning_rate(training: TrainingConfig, model: ModelSpec) -> TrainingConfig:
    """Adds the learning rate of a cascade's partial classifiers (docs/log.md, 2026-11-22)."""
    if not model.exit_layers or training.head_learning_rate is not None:
        return training
    return replace(training, head_learning_rate=10 * training.learning_rate)


def _read_questions(source: str, max_questions: int | None) -> list[Query]:
    """Reads a user's questions, or samples some of them."""
    texts = read_lines(source)
    queries = [Query(f"own-{number}", text) for number, text in enumerate(texts)]
    if max_questions is not None and max_questions < len(queries):
        queries = [queries[i] for i in sorted(Random(0).sample(range(len(queries)), max_questions))]
    if len(queries) < 2:
        raise too_few_questions(f"{len(queries)} questions, one per line, of {source}")
    return queries


def read_lines(source: str | Path) -> list[str]:
    """Returns the distinct lines of a file that are not blank.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        # Not splitlines: a line may contain a form feed or a Unicode separator.
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source} cannot be read as a file of questions in UTF-8: {error}"
        ) from error
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


def report(own: OwnDocuments, finished: Finished) -> None:
    """Prints what was fitted, answers to the questions in `ask`, and a command that asks more."""
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
    from as2ray.retrieval.question_answering import QuestionAnswerer
    from as2ray.retrieval.sentence_index import SentenceIndex

    for stage in finished.named("answering").values():
        index, folder = finished.output / "index", finished.output / "answering"
        if not finished.store.is_local:
            index, folder = map(finished.path, (finished.experiment.stages["index"], stage))
        index, ranker = index / INDEX, folder / RANKER
        scoring = AnswerScoring.read(ranker)
        assert scoring is not None
        lines = [_describe_encoder(finished), scoring.describe()]
        if own.ask:
            answerer = QuestionAnswerer(
                SentenceIndex.open(index, load_sentence_encoder),
                load(ranker) if scoring.uses_ranker else None,
                scoring=scoring,
            )
            lines.append("")
            for question in own.ask:
                lines.append(question)
                result = answerer.ask(question)
                lines += [f"  {a.score:.3f}  {a.text}  ({a.document_id})" for a in result.answers]
                lines += [] if result.answers else [f"  no answer: {result.reason}"]
                lines += [f"  nearest: {a.text}  ({a.document_id})" for a in result.nearest]
        command = shutil.which("as2ray") or Path(sys.executable).with_name("as2ray")
        lines += [f'\n{command} ask "..." --index {index} --model {ranker}']
        log.info("%s", "\n".join(lines), extra=RESULT)


def _describe_encoder(finished: Finished) -> str:
    outputs = finished.outputs(finished.experiment.stages["encoder"])
    kept = "" if outputs["is_adapted"] else ", so it stays as it was"
    quality = "{adapted:.4f}, untrained {untrained:.4f}".format(**outputs["dev"])
    return f"sentence encoder: dev MAP {quality}{kept}"


class OwnDocumentsPipeline(Pipeline[OwnDocuments]):
    """Refuses an output, or a store, that the next run would read as documents."""

    def prepare(
        self, recipe: OwnDocuments, output: str | Path, *args: Any
    ) -> tuple[Experiment, Store]:
        """See `Pipeline`."""
        experiment, store = super().prepare(recipe, output, *args)
        documents = Path(recipe.documents).resolve()
        folders = {"output": Path(output).resolve(), "store": Path(store.uri).resolve()}
        for name, folder in folders.items():
            if not folder.is_relative_to(documents):
                continue
            if not any(part.startswith(".") for part in folder.relative_to(documents).parts):
                raise ConfigError(
                    f"{name} {folder} is inside documents {documents}, where all folders but "
                    "hidden ones are read as documents",
                    fix=f"choose another --{name}",
                )
        return experiment, store


PIPELINE = OwnDocumentsPipeline(OwnDocuments, build, report)

if __name__ == "__main__":
    PIPELINE.command()
