"""Pseudo-labels, transfer and few-shot training compared on one target (Mokrii et al. 2021).

    python -m pipelines.pseudo_label --config pipelines/recipes/pseudo_label_squad.yaml --output D

Starts are the model itself (`scratch`), rankers trained on source corpora, and one trained on
BM25's labels of the target's own questions (`pseudo`). Each is measured as it is (zero-shot) and
after training on samples of the target's annotated questions: Figure 1 is the curve, Table 1 its
ends. `python -m pipelines.table_1` puts the ends of several targets side by side.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.plan import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.evaluation.presets import parse_measure
from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.stage import MANIFEST, digest, manifest, stage
from as2ray.losses import get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.exits import ExitLoss
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.trec import align_run, read_run
from as2ray.text.bm25 import BM25
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.tracking import TrackingConfig
from pipelines.curves import curve, ends, table_1
from pipelines.few_shot import Protocol, best_part, best_step, mixed
from pipelines.labels import (
    index_candidates,
    label_queries,
    questions_of,
    retrieval_scores,
    retrieve_candidates,
    sample_table,
    tune_bm25,
)
from pipelines.recipe import TableSpec, command
from pipelines.steps import Plan, evaluate_ranker, prepare_table, refuse_unfit, table, train_ranker

log = logging.getLogger(__name__)

SCRATCH, PSEUDO, KEYWORDS = "scratch", "pseudo", "BM25"

PAPER = TrainingConfig(
    global_batch_size=16,
    learning_rate=2e-5,
    head_learning_rate=2e-4,
    weight_decay=1e-7,
    lr_scheduler_type="constant",
    warmup_ratio=0.2,
)
"""Section 4: rates of body and head, batch, decay, and the rate that grows for a fifth of the run
and stays."""


@dataclass(frozen=True)
class Study:
    """One target, several starts, several sizes of annotation."""

    title: str
    """Heading of the report."""
    model: ModelSpec
    """What `scratch` is: a pretrained encoder."""
    train: TableSpec
    """The target's annotated questions."""
    dev: TableSpec
    """Chooses k1 and b, checkpoints (by AP; also those of rankers that are then measured zero-shot)
    and what the remedies mix."""
    tests: dict[str, TableSpec]
    """What is reported."""
    out_of_domain_tests: dict[str, TableSpec] = field(default_factory=dict)
    """Tests on other collections: reported too, but BM25 does not find their candidates."""
    unlabeled_questions: TableSpec | None = None
    """Questions that BM25 labels for `pseudo`, annotated or not; by default those of `train`."""
    transfer_sources: dict[str, TableSpec] = field(default_factory=dict)
    """Other corpora to transfer from, by the names of their starts."""
    extra_documents: list[TableSpec] = field(default_factory=list)
    """Tables whose candidates BM25 finds, beside those of `train`, `dev` and the tests."""
    retrieval_depth: int | None = None
    """Rank so many that BM25 finds among all candidates in place of each question's own: 100 in the
    paper. A question whose positives it all misses counts 0, so `filter` must be `raw`; filters of
    `dev` and the tests leave out those that have no positive at all."""
    pseudo_labels: PseudoLabelConfig = field(default_factory=PseudoLabelConfig)
    """How BM25 labels."""
    few_shot: Protocol = field(default_factory=Protocol)
    """Sizes, samples, epochs, remedies."""
    training: TrainingConfig = field(default_factory=lambda: PAPER)
    """Of every run, but for its epochs: those are the protocol's, by the number of questions."""
    loss: str | ListwiseLoss | MarginRankingLoss = "margin"
    """Of every run; one of exits where the model has `exits`. There are no teachers."""
    measures: list[str] = field(default_factory=lambda: ["RR", "AP", "P@1"])
    """Names of ir-measures; the first one is drawn, and chooses what the remedies mix."""
    question_filter: QuestionFilter = "no_all_negative"
    """Questions that count."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """What follows the runs."""

    def __post_init__(self) -> None:
        # Names of stages, and of systems, which `pipelines.curves` takes apart at + and commas.
        names = [SCRATCH, PSEUDO, KEYWORDS, "train", "dev", "unlabelled"]
        names += [*self.tests, *self.out_of_domain_tests, *self.transfer_sources]
        odd = {n for n in names if names.count(n) > 1 or not re.fullmatch(r"[\w.-]+", n)}
        if odd or not self.tests:
            raise ConfigError(
                f"{len(self.tests)} tests {list(self.tests)}, transfers {list(self.transfer_sources)}"
                f"{f': {sorted(odd)} cannot be names' if odd else ''}"
                "; expected at least one test, and each name of letters, digits and . - _ once; "
                f"{names[:6]} are taken",
            )
        if self.training.epochs != PAPER.epochs:
            raise ConfigError(
                f"training.epochs {self.training.epochs}"
                "; expected no epochs there: a run's fall with its number of questions",
                fix="set protocol.epochs, protocol.at, protocol.power and protocol.least",
            )
        if (self.retrieval_depth is not None and self.retrieval_depth < 1) or not self.measures:
            raise ConfigError(
                f"retrieve {self.retrieval_depth}, measures {self.measures}"
                "; expected retrieve of at least 1 or none, and at least one measure",
            )
        for measure in self.measures:
            parse_measure(measure)
        asked = get_loss(self.loss)
        cascades = isinstance(asked, ExitLoss)
        if isinstance(asked, DistillationLoss | TwoInOneLoss) or cascades != bool(
            self.model.exit_layers
        ):
            raise ConfigError(
                f"objective {self.loss!r} of a model with exits {self.model.exit_layers}"
                "; expected exits and an objective such as 'uniform_exit'; or no exits, and one such "
                "as 'margin'; no teachers and no passages",
                fix="name another objective, or correct the model's exits",
            )
        if self.retrieval_depth is not None and self.out_of_domain_tests:
            raise ConfigError(
                f"retrieve {self.retrieval_depth} and elsewhere {list(self.out_of_domain_tests)}"
                "; expected tests whose candidates are found, or tests with their own candidates",
                fix="leave one of the two out",
            )
        if self.retrieval_depth is not None and self.question_filter != "raw":
            raise ConfigError(
                f"retrieve {self.retrieval_depth} under the filter {self.question_filter!r}"
                "; expected the filter `raw`: a question whose positives BM25 misses counts 0",
                fix="filter: raw, and filters of their own for dev and tests with questions that "
                "have no positive",
            )

    @property
    def reported(self) -> dict[str, TableSpec]:
        """All tests."""
        return {**self.tests, **self.out_of_domain_tests}


@dataclass(frozen=True)
class Bench:
    """What every run of a study shares."""

    study: Study
    folder: Path
    workers: WorkersConfig
    tables: Mapping[str, Path]
    """Stages of `train`, `unlabelled` where there is one, `dev`, the tests and the transfers."""
    bm25: BM25
    index: Path
    """Stage of the index of all candidates."""

    @property
    def watched(self) -> dict[str, Path]:
        """The tables that are scored: the tests and dev."""
        return {name: self.tables[name] for name in ("dev", *self.study.reported)}

    def ranker(self, name: str, rows: Path, start: Path | None = None, sample: int = 0) -> Path:
        """Stage of a trained ranker."""
        training, questions = self.study.training, questions_in(rows)
        epochs = self.study.few_shot.epochs_of(questions)
        log.info("%s: %s questions, %d epochs", name, f"{questions:,}", epochs)
        job = TrainingJob(
            model=self.study.model,
            train_tables=(str(rows),),
            eval_tables={"dev": str(self.tables["dev"])},
            training=replace(training, epochs=epochs, seed=training.seed + sample),
            loss=self.study.loss,
            tracking=self.study.tracking,
        )
        inputs = {"train": rows, "dev": self.tables["dev"]}
        return train_ranker(self.folder / "rankers" / name, Plan(job, inputs, start), self.workers)

    def keywords(self, rows: pa.Table) -> np.ndarray:
        """BM25 of each row, shape [rows]: of the index where candidates were retrieved from it."""
        if self.study.retrieval_depth is None:
            return self.bm25.score_candidates(rows)
        return retrieval_scores(rows, self.index, self.study.retrieval_depth)

    def evaluations(self, ranker: Path) -> dict[str, EvaluationResult]:
        """Of a ranker on dev and the tests."""
        runs = self.folder / "runs" / ranker.name
        return evaluate_ranker(
            runs, ranker, self.watched, self.study.measures, self.study.question_filter
        )


Found = dict[str, dict[int, dict[str, EvaluationResult]]]
"""Evaluations by system, sample and table."""


def run(
    study: Study,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Runs what is not there yet, and writes reports, curves and Table 1.

    Args:
        study: What to do.
        output: Folder of the stages.
        workers: What to take of the cluster.
        sources: For each corpus its folder; by default its place in AS2RAY_DATA.

    Raises:
        RecipeError: A sample larger than the target's annotated questions, or layers or exits that
            the model does not have.
        CheckpointError: A model that is none.
    """
    folder = Path(output).resolve()
    if not any(folder.glob(f"rankers/*/{MANIFEST}")):
        refuse_unfit(study.model)
    bench = _bench(study, folder, workers, data_dirs or {})
    every = questions_in(bench.tables["train"])
    found: Found = {KEYWORDS: {0: _keywords(bench)}}
    for start, ranker in _starts(bench):
        if ranker is not None:
            found[start] = {0: bench.evaluations(ranker)}
        for name, sample, made in _few_shot(bench, start, ranker):
            found.setdefault(name, {})[sample] = made
    targets = {}
    for test in study.reported:
        systems = {name: {s: e[test] for s, e in of.items()} for name, of in found.items()}
        told = build_report(
            f"{study.title}: {test}",
            systems,
            baseline=KEYWORDS,
            published_results={
                n: {study.measures[0]: v} for n, v in study.few_shot.published_results.items()
            },
        )
        save_report(told, bench.folder / f"{test}.md")
        log.info("\n%s", to_markdown(told))
        sizes = {n: every if n is None else n for n in study.few_shot.num_questions}
        curve(study.title, systems, sizes, study.measures[0], bench.folder / f"{test}-curve.png")
        targets[test] = ends(systems, list(study.transfer_sources), study.measures[0])
    told_ends = {"measure": study.measures[0], "targets": targets}
    (bench.folder / "table1.json").write_text(json.dumps(told_ends, indent=2) + "\n")
    (bench.folder / "table1.md").write_text(table_1(targets, study.measures[0]))


def _bench(
    study: Study, folder: Path, workers: WorkersConfig, data_dirs: Mapping[str, str]
) -> Bench:
    def make(name: str, data: TableSpec, without: Mapping[str, Path]) -> Path:
        return prepare_table(folder / "tables" / name, data, data_dirs.get(data.corpus), without)

    held_out = {name: make(name, data, {}) for name, data in study.reported.items()}
    held_out["dev"] = make("dev", study.dev, held_out)
    tables = held_out | {"train": make("train", study.train, held_out)}
    _refuse_beyond(study, tables["train"])
    learnt = {
        **study.transfer_sources,
        **({"unlabelled": study.unlabeled_questions} if study.unlabeled_questions else {}),
    }
    tables |= {name: make(name, data, held_out) for name, data in learnt.items()}
    more = [make(f"documents-{n}", data, {}) for n, data in enumerate(study.extra_documents)]
    chosen = tune_bm25(folder / "bm25", tables["dev"], workers.num_workers == 0)
    indexed = ("train", "unlabelled", "dev", *study.tests)
    every = [tables[name] for name in indexed if name in tables] + more
    index = index_candidates(folder / "index", every, chosen)
    if study.retrieval_depth is not None:
        for name in ("train", "dev", *study.tests):
            stage = folder / "retrieved" / name
            how = study.retrieval_depth, name == "train"
            tables[name] = retrieve_candidates(stage, tables[name], index, *how)
        _refuse_beyond(study, tables["train"])  # without those for which BM25 finds nothing
    return Bench(study, folder, workers, tables, chosen, index)


def _refuse_beyond(study: Study, train: Path) -> None:
    """Samples that are larger than the target's annotated questions."""
    every = questions_in(train)
    if beyond := [
        size for size in study.few_shot.num_questions if size is not None and size > every
    ]:
        raise ConfigError(
            f"samples of {beyond} of {every:,} questions"
            f"; expected sizes of at most {every:,}, or null for all",
        )


def _starts(bench: Bench) -> Iterator[tuple[str, Path | None]]:
    """Each start by its name; `scratch` has no ranker yet."""
    study = bench.study
    yield SCRATCH, None
    for name in study.transfer_sources:
        yield name, bench.ranker(name, bench.tables[name])
    queries = questions_of(bench.tables.get("unlabelled", bench.tables["train"]))
    made = label_queries(
        bench.folder / "tables" / "pseudo", bench.index, queries, study.pseudo_labels
    )
    yield PSEUDO, bench.ranker(PSEUDO, made)


def questions_in(stage: Path) -> int:
    """The number of questions of a table."""
    found: int = manifest(stage)["found"]["counts"]["questions"]
    return found


def _few_shot(
    bench: Bench, start: str, ranker: Path | None
) -> Iterator[tuple[str, int, dict[str, EvaluationResult]]]:
    """Systems trained on samples, by name and sample; after each, what the remedies make of it."""
    how = bench.study.few_shot
    for size in how.num_questions:
        for sample in range(how.num_samples if size is not None else 1):
            system = f"{start}+{'all' if size is None else size}"
            rows = bench.tables["train"]
            if size is not None:
                part = bench.folder / "tables" / f"train-{size}-{sample}"
                rows = sample_table(part, rows, size, sample, how.nested_samples)
            stage = bench.ranker(f"{system}-{sample}", rows, ranker, sample)
            yield system, sample, bench.evaluations(stage)
            if "bm25" in how.remedies:
                yield f"{system}, with BM25", sample, _with_keywords(bench, stage)
            if "weights" in how.remedies and ranker is not None:
                moved = _towards(bench, stage, ranker)
                yield f"{system}, towards its start", sample, bench.evaluations(moved)


def _keywords(bench: Bench) -> dict[str, EvaluationResult]:
    found = {}
    for name, path in bench.watched.items():
        rows = table(path)
        scores = bench.keywords(rows)
        found[name] = evaluate(
            rows, scores, bench.study.measures, question_filter=bench.study.question_filter
        )
    return found


def _with_keywords(bench: Bench, ranker: Path) -> dict[str, EvaluationResult]:
    """The ranker's stored scores with BM25's, in the part that dev likes best."""
    study, runs = bench.study, bench.folder / "runs" / ranker.name
    scores: dict[str, tuple[Any, Any, Any]] = {}
    for name, path in bench.watched.items():
        rows = table(path)
        own = align_run(read_run(runs / f"{name}.run"), rows)
        scores[name] = rows, own, bench.keywords(rows)
    part = best_part(*scores["dev"], study.measures[0], study.question_filter)
    log.info("%s: %.1f of BM25", ranker.name, part)
    return {
        name: evaluate(
            of[0], mixed(*of, part), study.measures, question_filter=study.question_filter
        )
        for name, of in scores.items()
    }


def _towards(bench: Bench, ranker: Path, start: Path) -> Path:
    """A stage with the ranker moved towards what it started from: of the protocol's steps the one
    that dev likes best."""
    study, steps = bench.study, bench.study.few_shot.interpolation_weights

    def make(part: Path) -> dict[str, Any]:
        moved, begun = (load(s / "ranker") for s in (ranker, start))
        dev = table(bench.tables["dev"])
        found = best_step(moved, begun, dev, study.measures[0], study.question_filter, steps)
        save(moved, part / "ranker")
        log.info("%s: %.2f of its start", ranker.name, found)
        return {"part": found}

    identity = {
        "ranker": digest(ranker),
        "start": digest(start),
        "measure": study.measures[0],
        "filter": study.question_filter,
        "steps": list(steps),
    }
    return stage(bench.folder / "rankers" / f"{ranker.name}-towards", identity, make)


def main() -> None:
    """The command line."""
    command(Study, run)


if __name__ == "__main__":
    main()
