"""Quickstart: adapts the packaged MiniLM to the Python language reference.

    python -m pipelines.quickstart

The documents are part of every CPython, so nothing is downloaded. The steps are those of
`pipelines.own_documents`: questions made from the documents, BM25's labels, then a few questions
that people wrote and labeled. Other questions of this kind are the test.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass as stage_dataclass
from dataclasses import field, replace
from html import escape
from typing import Any

import pyarrow as pa
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.checkpoints import packaged
from as2ray.corpora import python_reference
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.report import build_report, save_report, to_markdown, to_summary
from as2ray.experiments.command import Pipeline
from as2ray.experiments.documents import FittedScoring
from as2ray.experiments.encoders import (
    CombinedScores,
    EmbeddedIndex,
    IndexScores,
    SearchEvaluation,
    SimilarityScores,
)
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.indexes import write_stage_index
from as2ray.experiments.rankers import StoredScores, TableEvaluation, TableScores
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.experiments.tables import prepared_table, read_table
from as2ray.progress import result
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.subject_bound import OFF_TOPIC_TEST_QUESTIONS
from as2ray.tables.schema import count_table
from as2ray.text.bm25 import BM25
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import METRICS, read_metrics
from pipelines import own_documents
from pipelines.own_documents import OwnDocuments

log = logging.getLogger(__name__)

OUTPUT = "output/quickstart"
CORPUS = "python_reference"
DEV_NEGATIVES = 19
"""Maximum number of negatives of each dev question."""
MEASURES = ("AP", "RR", "P@1")
SAMPLES = (
    "What does the pass statement do?",
    "Can a dictionary key be mutable?",
    "How long is a whale?",
)
SYSTEMS = {
    "bm25": "BM25",
    "untrained": "cosine (untrained)",
    "context": "cosine (untrained), in context",
    "encoder": "cosine (adapted), in context",
    "hybrid": "cosine (adapted), in context, and BM25",
    "pseudo": "MiniLM, BM25's labels",
    "adapted": "MiniLM, then written questions",
    "all": "combined",
    "answering": "combined, stage zero",
}
"""Names of the systems in the report; in context, embeddings take in headings and neighbors."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Quickstart:
    """Adapts a small encoder to the Python language reference and answers questions from it."""

    model: ModelSpec = field(
        default_factory=lambda: ModelSpec(packaged.MINILM_NAME, max_length=128)
    )
    """Pretrained model to start from."""
    encoder: str = packaged.MINILM_NAME
    """Sentence encoder that is adapted, and finds candidates."""
    max_questions: PositiveInt = 600
    """Maximum number of questions made from the documents."""
    max_negatives: PositiveInt | None = None
    """Maximum number of negatives of each test question, sampled from the sentences of its section;
    `null` takes all, some 58. Few are easier: the first answer is a right one more often."""
    off_topic_test_questions: str | None = None
    """A file of questions on other subjects, one per line, which the report asks; by default 100 of
    general knowledge that nothing was fitted to."""
    score_each_run: bool = False
    """Whether the report has the ranker after its first run, too: 26,000 pairs, a minute more."""
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=1, global_batch_size=16, learning_rate=1e-4)
    )
    """Hyperparameters of the ranker's first run, on BM25's labels."""
    fine_tuning: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, global_batch_size=16, learning_rate=5e-5)
    )
    """Hyperparameters of the ranker's second run, on the labeled questions."""
    encoder_training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, global_batch_size=32, learning_rate=5e-5)
    )
    """Hyperparameters of the encoder's adaptation to all of these questions."""

    def own_documents(self) -> OwnDocuments:
        """Returns the settings of the adaptation."""
        return OwnDocuments(
            documents="",
            max_questions=self.max_questions,
            model=self.model,
            encoder=self.encoder,
            encoder_training=self.encoder_training,
            training=self.training,
            fine_tuning=self.fine_tuning,
            ask=list(SAMPLES),
        )


@stage_dataclass(frozen=True, eq=False)
class ReferenceIndex(Stage):
    """An index of the Python reference, which it writes as HTML pages.

    Each sentence of the corpus is a paragraph of its own, so the index holds the same sentences.
    """

    VERSION = 3
    python: str
    """Version of Python."""

    def run(self, context: StageContext) -> Outputs:
        """Writes the documents, and indexes them."""
        folder = context.output / "documents"
        for document in python_reference.load_documents():
            page = folder / f"{document.id}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(_to_html(document), encoding="utf-8")
        return write_stage_index(context, folder, IndexConfig(sentence_splitter="lines"))


def _to_html(document: python_reference.Document) -> str:
    """Returns a page with the sentences of a document below their headings."""
    lines, last = [f"<title>{escape(document.id.partition('/')[2])}</title>"], ""
    for heading, sentence in zip(document.headings, document.sentences):
        lines += [f"<h2>{escape(heading)}</h2>"] if heading != last else []
        lines += [f"<p>{escape(sentence)}</p>"]
        last = heading
    return "\n".join(lines)


def build(quickstart: Quickstart, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: that of own documents, and the evaluations of both runs."""
    specs = {
        # Of some 40 negatives of a question; an epoch samples one.
        "train": TableSpec(CORPUS, "train", max_negatives=6),
        "dev": TableSpec(CORPUS, "dev", max_negatives=DEV_NEGATIVES),
        "test": TableSpec(CORPUS, "test", max_negatives=quickstart.max_negatives),
    }
    tables = {split: prepared_table(spec, data_dirs) for split, spec in specs.items()}
    experiment = Experiment()
    experiment.add("written/test", tables["test"])
    labeled = {split: tables[split] for split in ("train", "dev")}
    index = ReferenceIndex(sys.version.split()[0])
    own = quickstart.own_documents()
    own_documents.add_ranker(experiment, own, index, labeled)
    stages, test = experiment.stages, tables["test"]
    untrained = EmbeddedIndex(index, own.encoder)
    ranker, embedded, scoring = stages["adapted"], stages["index"], stages["scoring"]
    assert isinstance(scoring, FittedScoring)
    hybrid = experiment.add("hybrid", replace(scoring, ranker=None))
    similarity, bm25 = (IndexScores(test, embedded, part) for part in ("similarity", "bm25"))
    logits = TableScores(ranker, test)
    combined = CombinedScores(test, scoring, similarity, logits, bm25)
    scores: dict[str, StoredScores] = {
        "untrained": SimilarityScores(test, own.encoder),
        "context": IndexScores(test, untrained, "similarity"),
        "encoder": similarity,
        "hybrid": CombinedScores(test, hybrid, similarity, bm25=bm25),
        **({"pseudo": TableScores(stages["pseudo"], test)} if quickstart.score_each_run else {}),
        "adapted": logits,
        "all": replace(combined, uses_stage_zero=False),
        "answering": combined,
    }
    for name, stage in scores.items():
        evaluation = experiment.add(f"evaluations/{name}", TableEvaluation(stage, MEASURES))
        experiment.compare("test", SYSTEMS[name], 0, evaluation)
    off_topic_file = quickstart.off_topic_test_questions or OFF_TOPIC_TEST_QUESTIONS
    off_topic = tuple(own_documents.read_lines(off_topic_file))
    searches = {
        "bm25": SearchEvaluation(untrained, test, "bm25"),
        "context": SearchEvaluation(untrained, test, "dense"),
        "encoder": SearchEvaluation(embedded, test, "dense"),
        "hybrid": SearchEvaluation(embedded, test, scoring=hybrid),
        "answering": SearchEvaluation(
            embedded, test, scoring=scoring, ranker=ranker, off_topic=off_topic
        ),
    }
    for name, search in searches.items():
        experiment.add(f"searches/{name}", search)
    return experiment


def report(quickstart: Quickstart, finished: Finished) -> None:
    """Prints answers, and compares the parts of the score, their sum and BM25."""
    from as2ray.evaluation import plots

    own_documents.report(quickstart.own_documents(), finished)
    tests, runs = finished.named("written/test"), ("pseudo", "adapted")
    if not tests or not finished.named("evaluations"):
        return
    rows = read_table(finished.path(tests[""]))
    bm25 = {0: evaluate(rows, BM25().score_candidates(rows), MEASURES)}
    systems = {SYSTEMS["bm25"]: bm25, **finished.evaluations()["test"]}
    title = "Python reference, test questions"
    comparison = build_report(title, systems, baseline=SYSTEMS["untrained"])
    save_report(comparison, finished.output / "report.md")
    searches = f"\n{_describe_candidates(quickstart, rows)}\n{_searches_table(finished)}"
    with (finished.output / "report.md").open("a", encoding="utf-8") as file:
        file.write(searches)
    measures = {row.system: row.measures for row in comparison.rows}
    path = finished.output / "measures.png"
    plots.bar_chart(measures, comparison.title, "mean over questions", path)
    losses = {}
    for run in runs:
        for stage in finished.named(run).values():
            lines = read_metrics(finished.path(stage) / METRICS)
            losses[run] = [(x["step"], x["train/loss"]) for x in lines if "train/loss" in x]
    plots.loss_curve(losses, "Training", finished.output / "loss.png")
    path = finished.output / "report.md"
    summary = to_summary(comparison, path, SYSTEMS["answering"], [SYSTEMS["bm25"]])
    summary = f"\n{summary}{_describe_searches(finished)}"
    log.info("%s", summary, extra=result(f"\n{to_markdown(comparison)}{searches}\nReport: {path}"))


def _describe_candidates(quickstart: Quickstart, rows: pa.Table) -> str:
    """Returns a sentence on the candidates of the test questions."""
    counts, number = count_table(rows), quickstart.max_negatives
    drawn = "all sentences" if number is None else f"its answers and at most {number} sampled ones"
    return (
        f"The candidates of a question are {drawn} of the document with its answers: "
        f"{counts.num_pairs / counts.num_questions:.1f} on average, of which "
        f"{counts.num_positives / counts.num_questions:.1f} are answers."
    )


def _describe_searches(finished: Finished) -> str:
    """Returns how often the answer is found in the whole index; empty if it is not known."""
    searches = {n: finished.outputs(s) for n, s in finished.named("searches/").items()}
    if not {"answering", "bm25"} <= searches.keys():
        return ""
    hits = {n: [x["measures"][f"hit@{k}"] for k in (1, 10)] for n, x in searches.items()}
    (first, among), (bm25_first, bm25_among) = hits["answering"], hits["bm25"]
    return (
        f"In the whole index an answer comes first for {first:.1%} of the questions (BM25 "
        f"{bm25_first:.1%}), and among ten for {among:.1%} (BM25 {bm25_among:.1%}).\n"
        + _describe_abstention(searches["answering"])
    )


def _describe_abstention(outputs: Mapping[str, Any]) -> str:
    """Returns a sentence on the questions that got an answer and those that got none."""
    given, precision = (outputs["abstention"][key] for key in ("given", "precision"))
    return (
        f"{given:.1%} of the questions get an answer, the first of which is labeled "
        f"as right for {precision or 0.0:.1%} of these; the others get `no answer`."
    )


def _searches_table(finished: Finished) -> str:
    """Returns how often each system finds the answer in the whole index, as Markdown."""
    lines, abstention = list[str](), ""
    for name, stage in finished.named("searches/").items():
        outputs = finished.outputs(stage)
        measures = outputs["measures"]
        if not lines:
            lines = [f"| {' | '.join(['system', *measures])} |", "|---" * (len(measures) + 1) + "|"]
        cells = [SYSTEMS[name], *(f"{value:.4f}" for value in measures.values())]
        lines.append(f"| {' | '.join(cells)} |")
        if name == "answering":
            abstention = _abstention_section(outputs["abstention"])
    return "\n".join(["\n### Whole index\n", *lines, "", abstention, ""])


def _abstention_section(abstention: Mapping[str, Any]) -> str:
    """Returns which questions are told from others, and risk against coverage, as Markdown."""
    on_subject, others = abstention["on_subject"], abstention["others"]
    lines = [
        "### Abstention\n",
        f"Subject: {on_subject['own']:.1%} of the test questions and {on_subject['others']:.1%} of "
        f"{others['number']} on other subjects are close enough to some sentence.",
    ]
    if "precision_at" in abstention:
        shares = abstention["precision_at"]
        lines += [
            "Risk against coverage: the first answers to the test questions that are most probably "
            f"answered rightly (AURC {abstention['AURC']:.4f}).\n",
            f"| share of the questions | {' | '.join(f'{float(s):.0%}' for s in shares)} |",
            "|---" * (len(shares) + 1) + "|",
            f"| labeled as right | {' | '.join(f'{p:.1%}' for p in shares.values())} |\n",
        ]
    lines += [
        f"With the fitted threshold {abstention['given']:.1%} of the test questions get an answer; "
        f"the first one is labeled as right for {abstention['precision'] or 0.0:.1%} of these. "
        f"{others['given']} of the {others['number']} on other subjects get one. The rest gets "
        "`no answer`.",
    ]
    return "\n".join(lines)


PIPELINE = Pipeline(Quickstart, build, report)


def main() -> None:
    """Runs the command line, by default in this process and with the output `output/quickstart`."""
    arguments = sys.argv[1:]
    for name, value in (("--output", OUTPUT), ("--workers.num_workers", "0")):
        if not any(argument.startswith(name) for argument in arguments):
            arguments = [name, value, *arguments]
    PIPELINE.command(arguments)


if __name__ == "__main__":
    main()
