"""Compares pseudo-labels, transfer and few-shot training on one target (Mokrii et al. 2021).

    python -m pipelines.pseudo_label --config pipelines/recipes/pseudo_label_squad.yaml --output D

Starts are the model itself (`scratch`), rankers trained on source corpora, and one trained on
BM25's labels of the target's own questions (`pseudo`). Each is evaluated before (zero-shot) and
after training on samples of the target's labeled questions: Figure 1 is the curve, Table 1 its
ends. `python -m pipelines.table_1` puts the ends of several targets side by side.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.corpora.preparation import release_path
from as2ray.corpora.registry import get_corpus
from as2ray.errors import ConfigError, lookup
from as2ray.evaluation.presets import parse_measure
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.command import Pipeline
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.few_shot import (
    BM25Weight,
    EpochRuleRanker,
    FewShotConfig,
    FewShotRanker,
    InterpolatedRanker,
    MixedScores,
    SampledTable,
)
from as2ray.experiments.indexes import CandidateIndex, CollectionIndex, CollectionTexts
from as2ray.experiments.pseudo_labels import LabelledTable
from as2ray.experiments.rankers import (
    StoredScores,
    TableEvaluation,
    TableScores,
    absolute_model_path,
)
from as2ray.experiments.recipe import NON_EMPTY, STRICT, LossSpec, TableSpec
from as2ray.experiments.retrieved import BM25Run, BM25Scores, RetrievedTable
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import prepared_table
from as2ray.losses import get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.exits import ExitLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.progress import result
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig
from as2ray.tables.filters import QuestionFilter
from as2ray.text.bm25 import TermConfig
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig
from pipelines.table_1 import Systems, answer_questions, format_table, table_cells
from tune_spaces.bm25 import param_grid

log = logging.getLogger(__name__)

SCRATCH, PSEUDO, BM25 = "scratch", "pseudo", "BM25"

PAPER = TrainingConfig(
    global_batch_size=16,
    learning_rate=2e-5,
    head_learning_rate=2e-4,
    weight_decay=1e-7,
    lr_scheduler_type="constant",
    warmup_ratio=0.2,
    max_grad_norm=0.0,
)
"""Section 4: learning rates of encoder and head, batch size, weight decay, a learning rate that
grows for a fifth of the run and then stays, and no clipping, of which the paper says nothing."""


@config_dataclass(frozen=True, config=STRICT)
class CollectionSpec:
    """A collection of a corpus."""

    corpus: str
    name: str
    """Name of the collection, such as `passages` of MS MARCO."""
    verify: bool = True
    """Whether its number of texts must be the published one."""

    def __post_init__(self) -> None:
        lookup(get_corpus(self.corpus).collections, self.name, f"{self.corpus} collection")


@config_dataclass(frozen=True, config=STRICT)
class Study:
    """One target, several starts, several numbers of labeled questions."""

    title: str
    """Heading of the report."""
    model: ModelSpec
    """Pretrained encoder, which is the start `scratch`."""
    train: TableSpec
    """The target's labeled questions."""
    dev: TableSpec
    """Selects k1 and b, the weights of the remedies, and the checkpoints of all rankers (by AP),
    unless `training.select_by` is `epoch`: then rankers are independent of dev, as in the paper's
    zero-shot transfer."""
    tests: Annotated[dict[str, TableSpec], NON_EMPTY]
    """Tables that are reported."""
    out_of_domain_tests: dict[str, TableSpec] = field(default_factory=dict)
    """Tests on other collections; they are reported too, but keep their own candidates."""
    unlabeled_questions: TableSpec | None = None
    """Questions that BM25 labels for `pseudo`; by default those of `train`."""
    transfer_sources: dict[str, TableSpec] = field(default_factory=dict)
    """Other corpora to transfer from, by the names of their starts."""
    extra_documents: list[TableSpec] = field(default_factory=list)
    """Tables whose candidates BM25 indexes too, beside those of `train`, `dev` and the tests."""
    bm25_terms: TermConfig = field(default_factory=TermConfig)
    """What BM25 counts as a term: `stop_words` removes them, `lemmas` replaces words by theirs."""
    bm25_grid: Annotated[list[tuple[float, float]], NON_EMPTY] = field(default_factory=param_grid)
    """Pairs of k1 and b, of which dev chooses one; a single pair is taken as it is. More than one
    needs all indexed texts in memory."""
    collection: CollectionSpec | None = None
    """A whole collection to retrieve from, instead of the candidates of all tables. It needs
    `retrieval_depth`, and the tables only the relevant candidates of each question."""
    retrieval_depth: PositiveInt | None = None
    """Rank this number of candidates that BM25 retrieves from all, instead of each question's own;
    100 in the paper. A question whose positives are all missed counts as 0, so `question_filter`
    must be `raw`; the filters of `dev` and the tests remove questions without a positive."""
    pseudo_labels: PseudoLabelConfig = field(default_factory=PseudoLabelConfig)
    """How BM25 labels questions."""
    few_shot: FewShotConfig = field(default_factory=FewShotConfig)
    """Numbers of questions, samples, epochs and remedies."""
    training: TrainingConfig = field(default_factory=lambda: PAPER)
    """Hyperparameters of every run, except for the epochs, which `few_shot` determines."""
    loss: LossSpec = "margin_ranking"
    """Loss of every run; one of exits if the model has `exit_layers`. Distillation is not
    possible."""
    measures: Annotated[list[str], NON_EMPTY] = field(default_factory=lambda: ["RR", "AP", "P@1"])
    """Names of ir-measures; the first one is plotted, and selects the weights of the remedies."""
    question_filter: QuestionFilter = "no_all_negative"
    """Questions to evaluate."""
    min_leak_similarity: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of common words from which a training question is one of dev or the tests and is left
    out; by default only equal texts are. FlexNeuART's check of Yahoo! Answers takes 0.75."""
    source_leaks: Literal["drop", "keep"] = "drop"
    """Whether questions of dev and the tests are left out of `transfer_sources` too. With `keep`,
    as in the paper, a source is the same for every target, and is trained once for all of them."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Trackers of the runs."""

    def __post_init__(self) -> None:
        # They name stages and systems; reports split the latter at + and commas.
        reserved = [SCRATCH, PSEUDO, BM25, "train", "dev", "unlabeled_questions"]
        names = [*reserved, *self.tests, *self.out_of_domain_tests, *self.transfer_sources]
        wrong = {n for n in names if names.count(n) > 1 or not re.fullmatch(r"[\w.-]+", n)}
        if wrong:
            raise ConfigError(
                f"the names {sorted(wrong)} of tests or transfer_sources are invalid or in use; "
                f"a name has letters, digits and . - _, is used once, and is none of {reserved}"
            )
        if self.training.epochs != PAPER.epochs:
            raise ConfigError(
                f"training.epochs={self.training.epochs} has no effect: few_shot determines epochs",
                fix="set few_shot.epochs, .reference_questions, .epoch_decay and .min_epochs",
            )
        for measure in self.measures:
            parse_measure(measure, "label")
        loss, exits = get_loss(self.loss), self.model.exit_layers
        is_for_others = isinstance(loss, DistillationLoss | TwoInOneLoss)
        if is_for_others or isinstance(loss, ExitLoss) != bool(exits):
            raise ConfigError(
                f"loss {self.loss!r} of a model with exit_layers {exits}; losses of exits are for "
                "models with exits, and a study has no teachers and no joint models",
                fix="choose a loss such as 'margin_ranking', or with exits 'uniform_exit'",
            )
        if self.collection and (self.extra_documents or not self.retrieval_depth):
            raise ConfigError(
                "collection needs retrieval_depth, and replaces extra_documents",
                fix="set retrieval_depth: 100, and leave out extra_documents",
            )
        keep_own = list(self.out_of_domain_tests)
        if self.retrieval_depth and (keep_own or self.question_filter != "raw"):
            raise ConfigError(
                f"retrieval_depth={self.retrieval_depth} retrieves candidates; out_of_domain_tests "
                f"{keep_own} keep their own, and with question_filter {self.question_filter!r} a "
                "question whose positives BM25 misses would not count as 0",
                fix="leave out out_of_domain_tests, and set question_filter: raw, and filters of "
                "dev and the tests that remove questions without a positive",
            )

    @property
    def reported(self) -> dict[str, TableSpec]:
        """All tests."""
        return {**self.tests, **self.out_of_domain_tests}


def build(study: Study, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: BM25, starts, few-shot rankers with their remedies, and evaluations."""
    graph, few_shot = _StudyExperiment(study, data_dirs), study.few_shot
    tables = graph.tables
    graph.compare_scores(BM25, 0, graph.bm25_scores)
    queries = tables.get("unlabeled_questions", tables["train"])
    labelled = LabelledTable(graph.index, queries, study.pseudo_labels)
    sources = {name: tables[name] for name in study.transfer_sources}
    sources[PSEUDO] = graph.add(f"tables/{PSEUDO}", labelled)
    starts = {name: graph.add_ranker(name, table) for name, table in sources.items()}
    for start in (SCRATCH, *starts):
        if start in starts:
            graph.compare_ranker(start, 0, starts[start])
        for size in few_shot.num_questions:
            for sample in range(few_shot.num_samples if size is not None else 1):
                _add_few_shot(graph, start, starts.get(start), size, sample)
    return graph


class _StudyExperiment(Experiment):
    """An experiment with the tables and the index of a study.

    Args:
        study: Its settings.
        data_dirs: Folders of corpora by name.
    """

    def __init__(self, study: Study, data_dirs: Mapping[str, str]) -> None:
        super().__init__()
        self.study, self.tables = study, _prepared_tables(study, data_dirs)
        for name, table in self.tables.items():
            self.add(f"tables/{name}", table)
        names = ["train", "unlabeled_questions", "dev", *study.tests]
        names += [name for name in self.tables if name.startswith("documents-")]
        indexed: tuple[Stage, ...]
        indexed = tuple(self.tables[name] for name in names if name in self.tables)
        depth, collection = study.retrieval_depth, study.collection
        if collection is not None:
            source = release_path(get_corpus(collection.corpus), data_dirs.get(collection.corpus))
            folder = os.path.abspath(source)
            texts = CollectionTexts(
                collection.corpus, collection.name, folder, check_size=collection.verify
            )
            indexed = (self.add("collection", texts),)
        grid = BM25Grid(self.tables["dev"], tuple(study.bm25_grid), terms=study.bm25_terms)
        if depth is not None:
            grid = replace(grid, collection=indexed, depth=depth)
        bm25 = self.add("bm25", grid)
        kind = CandidateIndex if collection is None else CollectionIndex
        self.index = self.add("index", kind(indexed, bm25))
        if depth is None:
            return
        for name in ("train", "dev", *study.tests):
            run = self.add(f"bm25-runs/{name}", BM25Run(self.tables[name], self.index, depth))
            retrieved = RetrievedTable(run, append_missed=name == "train")
            self.tables[name] = self.add(f"retrieved/{name}", retrieved)

    def add_ranker(
        self, name: str, table: Stage, start: Stage | None = None, sample: int = 0
    ) -> EpochRuleRanker:
        """Adds a ranker that is trained on a table."""
        study = self.study
        kind = FewShotRanker if isinstance(table, SampledTable) else EpochRuleRanker
        ranker = kind(
            model=replace(study.model, path=absolute_model_path(study.model.path)),
            train=(table,),
            dev=self.tables["dev"] if study.training.needs_dev else None,
            training=replace(study.training, seed=study.training.seed + sample),
            loss=study.loss,
            init_from=start,
            tracking=study.tracking,
            epochs=study.few_shot.epochs_rule,
        )
        return self.add(f"rankers/{name}", ranker)

    def bm25_scores(self, table: str) -> BM25Scores:
        """Returns the stage of BM25's scores: those of the index if candidates are retrieved."""
        bm25 = self.index.bm25 if self.study.retrieval_depth is None else self.index
        return BM25Scores(self.tables[table], bm25, self.study.question_filter)

    def scores(self, ranker: Stage, table: str) -> TableScores:
        """Returns the stage of a ranker's scores."""
        return TableScores(ranker, self.tables[table], question_filter=self.study.question_filter)

    def compare_ranker(self, system: str, sample: int, ranker: Stage) -> None:
        """Evaluates a ranker on the tests."""
        self.compare_scores(system, sample, lambda test: self.scores(ranker, test))

    def compare_scores(
        self, system: str, sample: int, scores: Callable[[str], StoredScores]
    ) -> None:
        """Evaluates a system on the tests; `scores` returns its scores of a table."""
        for test in self.study.reported:
            name = f"{system}-{sample}-{test}"
            stored = self.add(f"scores/{name}", scores(test))
            evaluation = TableEvaluation(stored, tuple(self.study.measures))
            self.compare(test, system, sample, self.add(f"evaluations/{name}", evaluation))


def _prepared_tables(study: Study, data_dirs: Mapping[str, str]) -> dict[str, Stage]:
    """Returns the prepared tables; questions of dev and the tests are left out of all others."""

    def prepare(specs: Mapping[str, TableSpec], without: Iterable[Stage] = ()) -> dict[str, Stage]:
        leaks = (tuple(without), study.min_leak_similarity)
        return {n: prepared_table(spec, data_dirs, *leaks) for n, spec in specs.items()}

    tables = prepare(study.reported)
    tables |= prepare({"dev": study.dev}, tables.values())
    others = {"train": study.train}
    if study.unlabeled_questions is not None:
        others["unlabeled_questions"] = study.unlabeled_questions
    whole = {f"documents-{n}": spec for n, spec in enumerate(study.extra_documents)}
    (whole if study.source_leaks == "keep" else others).update(study.transfer_sources)
    return tables | prepare(others, tables.values()) | prepare(whole)


def _add_few_shot(
    graph: _StudyExperiment, start: str, ranker: Stage | None, size: int | None, sample: int
) -> None:
    """Trains a start on a sample of the target, applies the remedies, and evaluates all."""
    study, few_shot = graph.study, graph.study.few_shot
    measure, question_filter = study.measures[0], study.question_filter
    system, table = f"{start}+{size or 'all'}", graph.tables["train"]
    if size is not None:
        table = SampledTable(table, size, sample, few_shot.nested_samples)
        graph.add(f"tables/train-{size}-{sample}", table)
    tuned = graph.add_ranker(f"{system}-{sample}", table, ranker, sample)
    graph.compare_ranker(system, sample, tuned)
    if "bm25_mixing" in few_shot.remedies:
        weight = BM25Weight(graph.scores(tuned, "dev"), graph.bm25_scores("dev"), measure)

        def mix(test: str) -> MixedScores:
            scores, bm25 = graph.scores(tuned, test), graph.bm25_scores(test)
            return MixedScores(graph.tables[test], question_filter, scores, bm25, weight)

        graph.compare_scores(f"{system}, with BM25", sample, mix)
    if "weight_interpolation" in few_shot.remedies and ranker is not None:
        dev, weights = graph.tables["dev"], few_shot.interpolation_weights
        moved = InterpolatedRanker(tuned, ranker, dev, measure, question_filter, weights)
        graph.add(f"rankers/{system}-{sample}-towards", moved)
        graph.compare_ranker(f"{system}, towards its start", sample, moved)


def report(study: Study, finished: Finished) -> None:
    """Writes a report and a curve of each test whose BM25 is complete, and Table 1."""
    from as2ray.evaluation.report import build_report, save_report, to_markdown, to_summary

    measure, targets = study.measures[0], {}
    published = {name: {measure: v} for name, v in study.few_shot.published_results.items()}
    for test, systems in finished.evaluations().items():
        if BM25 not in systems:
            log.warning("no report of %s: its baseline %r is not complete", test, BM25)
            continue
        title = f"{study.title}: {test}"
        # A result of the paper is named as in "Mokrii et al., pseudo+all".
        reproduces = {name.rpartition(", ")[2]: name for name in published}
        results = build_report(
            title, systems, baseline=BM25, published_results=published, reproduces=reproduces
        )
        path = finished.output / f"{test}.md"
        save_report(results, path)
        log.info("\n%s", to_summary(results, path), extra=result(f"\n{to_markdown(results)}"))
        _plot_curve(study, finished, test, systems)
        answers = answer_questions(systems, list(study.transfer_sources), measure)
        finished.write(f"{test}-questions.md", answers)
        targets[test] = table_cells(systems, list(study.transfer_sources), measure)
    finished.write_json("table1.json", {"measure": measure, "targets": targets})
    finished.write("table1.md", format_table(targets, measure))


def _plot_curve(study: Study, finished: Finished, test: str, systems: Systems) -> None:
    """Plots a measure over the number of labeled questions, a line per start; 0 is zero-shot."""
    from as2ray.evaluation import plots

    stages, measure = finished.experiment.stages, study.measures[0]
    train = stages.get("retrieved/train", stages["tables/train"])
    if not finished.has(train):
        return
    num_all = finished.outputs(train)["counts"]["num_questions"]
    sizes = {"": 0} | {str(n or "all"): n or num_all for n in study.few_shot.num_questions}
    series: dict[str, list[tuple[float, float]]] = {}
    for name, by_sample in systems.items():
        start, _, size = name.partition("+")
        if size not in sizes:
            continue  # Remedies are only in the report.
        xs = sizes.values() if name == BM25 else [sizes[size]]
        points = [(float(x), each.measures[measure]) for each in by_sample.values() for x in xs]
        series.setdefault(start, []).extend(points)
    path = finished.output / f"{test}-curve.png"
    x_label = "annotated questions"
    plots.learning_curve(series, study.title, x_label, measure, path, log_x=True, band="range")


PIPELINE = Pipeline(Study, build, report)

if __name__ == "__main__":
    PIPELINE.command()
