"""Compares pseudo-labels, transfer and few-shot training on one target (Mokrii et al. 2021).

    python -m pipelines.pseudo_label --config pipelines/recipes/pseudo_label_squad.yaml --output D

Starts are the model itself (`scratch`), rankers trained on source corpora, and one trained on
BM25's labels of the target's own questions (`pseudo`). Each is evaluated before (zero-shot) and
after training on samples of the target's labeled questions: Figure 1 is the curve, Table 1 its
ends. `python -m pipelines.table_1` puts the ends of several targets side by side.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.measures import EvaluationResult, evaluate
from as2ray.evaluation.presets import parse_measure
from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.stage import MANIFEST, digest, manifest, stage
from as2ray.losses import get_loss
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.exits import ExitLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.trec import align_run, read_run
from as2ray.text.bm25 import BM25
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.tracking import TrackingConfig
from pipelines.curves import curve, ends, table_1
from pipelines.few_shot import FewShotConfig, best_bm25_weight, interpolate_on_dev, mix_scores
from pipelines.labels import (
    index_candidates,
    label_queries,
    questions_of,
    retrieval_scores,
    retrieve_candidates,
    sample_table,
    tune_bm25,
)
from pipelines.recipe import LossSpec, TableSpec, command
from pipelines.steps import Plan, check_model, evaluate_ranker, prepare_table, table, train_ranker

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
"""Section 4: learning rates of encoder and head, batch size, weight decay, and a learning rate that
grows for a fifth of the run and then stays."""


@config_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Study:
    """One target, several starts, several numbers of labeled questions."""

    title: str
    """Heading of the report."""
    model: ModelSpec
    """Pretrained encoder, which is the start `scratch`."""
    train: TableSpec
    """The target's labeled questions."""
    dev: TableSpec
    """Selects k1 and b, checkpoints (by AP; also those of rankers that are evaluated zero-shot) and
    the weights of the remedies."""
    tests: Annotated[dict[str, TableSpec], Field(min_length=1)]
    """Tables that are reported."""
    out_of_domain_tests: dict[str, TableSpec] = field(default_factory=dict)
    """Tests on other collections; they are reported too, but keep their own candidates."""
    unlabeled_questions: TableSpec | None = None
    """Questions that BM25 labels for `pseudo`; by default those of `train`."""
    transfer_sources: dict[str, TableSpec] = field(default_factory=dict)
    """Other corpora to transfer from, by the names of their starts."""
    extra_documents: list[TableSpec] = field(default_factory=list)
    """Tables whose candidates BM25 indexes too, beside those of `train`, `dev` and the tests."""
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
    measures: Annotated[list[str], Field(min_length=1)] = field(
        default_factory=lambda: ["RR", "AP", "P@1"]
    )
    """Names of ir-measures; the first one is plotted, and selects the weights of the remedies."""
    question_filter: QuestionFilter = "no_all_negative"
    """Questions to evaluate."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Trackers of the runs."""

    def __post_init__(self) -> None:
        # They name stages and systems; `pipelines.curves` splits the latter at + and commas.
        reserved = [SCRATCH, PSEUDO, KEYWORDS, "train", "dev", "unlabeled_questions"]
        names = [*reserved, *self.tests, *self.out_of_domain_tests, *self.transfer_sources]
        wrong = {n for n in names if names.count(n) > 1 or not re.fullmatch(r"[\w.-]+", n)}
        if wrong:
            raise ConfigError(
                f"the names {sorted(wrong)} of tests or transfer_sources are invalid or in use; "
                f"a name has letters, digits and . - _, is used once, and is none of {reserved}"
            )
        if self.training.epochs != PAPER.epochs:
            raise ConfigError(
                f"training.epochs={self.training.epochs} has no effect: the epochs of a run depend "
                "on its number of questions",
                fix="set few_shot.epochs, .reference_questions, .epoch_decay and .min_epochs",
            )
        for measure in self.measures:
            parse_measure(measure)
        loss = get_loss(self.loss)
        has_exit_loss = isinstance(loss, ExitLoss)
        has_exits = bool(self.model.exit_layers)
        if isinstance(loss, DistillationLoss | TwoInOneLoss) or has_exit_loss != has_exits:
            raise ConfigError(
                f"loss {self.loss!r} of a model with exit_layers {self.model.exit_layers}; exits "
                "need a loss such as 'uniform_exit', others one such as 'margin_ranking', and "
                "there are no teachers and no joint models",
                fix="choose another loss, or change model.exit_layers",
            )
        if self.retrieval_depth is None:
            return
        if self.out_of_domain_tests:
            raise ConfigError(
                f"retrieval_depth={self.retrieval_depth} retrieves candidates, and the "
                f"out_of_domain_tests {list(self.out_of_domain_tests)} keep their own",
                fix="leave one of the two out",
            )
        if self.question_filter != "raw":
            raise ConfigError(
                f"retrieval_depth={self.retrieval_depth} needs question_filter='raw', not "
                f"{self.question_filter!r}: a question whose positives BM25 misses counts as 0",
                fix="set question_filter: raw, and filters of dev and the tests that remove "
                "questions without a positive",
            )

    @property
    def reported(self) -> dict[str, TableSpec]:
        """All tests."""
        return {**self.tests, **self.out_of_domain_tests}


@dataclass(frozen=True)
class Bench:
    """What all runs of a study share."""

    study: Study
    folder: Path
    workers: WorkersConfig
    tables: Mapping[str, Path]
    """Stages of all tables of the study, by name."""
    bm25: BM25
    index: Path
    """Stage of the index of all candidates."""

    @property
    def watched(self) -> dict[str, Path]:
        """Returns the tables that are scored: dev and the tests."""
        return {name: self.tables[name] for name in ("dev", *self.study.reported)}

    def ranker(self, name: str, rows: Path, start: Path | None = None, sample: int = 0) -> Path:
        """Trains a ranker; returns its stage."""
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
        """Returns BM25 scores, shape [rows]: those of the index if candidates are retrieved."""
        if self.study.retrieval_depth is None:
            return self.bm25.score_candidates(rows)
        return retrieval_scores(rows, self.index, self.study.retrieval_depth)

    def evaluations(self, ranker: Path) -> dict[str, EvaluationResult]:
        """Evaluates a ranker on dev and the tests."""
        runs = self.folder / "runs" / ranker.name
        return evaluate_ranker(
            runs, ranker, self.watched, self.study.measures, self.study.question_filter
        )


Found = dict[str, dict[int, dict[str, EvaluationResult]]]
"""Results by system, sample and table."""


def run(
    study: Study,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Trains and evaluates what does not exist yet, and writes reports, curves and Table 1.

    Args:
        study: Target, starts and samples.
        output: Folder of the stages.
        workers: Part of the cluster to use.
        data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.

    Raises:
        ConfigError: A sample larger than the target's labeled questions, or layers or exits that
            the model does not have.
        CheckpointError: The model is neither an encoder nor a ranker.
    """
    folder = Path(output).resolve()
    if not any(folder.glob(f"rankers/*/{MANIFEST}")):
        check_model(study.model)
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
    _check_sample_sizes(study, tables["train"])
    learnt = {
        **study.transfer_sources,
        **({"unlabeled_questions": study.unlabeled_questions} if study.unlabeled_questions else {}),
    }
    tables |= {name: make(name, data, held_out) for name, data in learnt.items()}
    more = [make(f"documents-{n}", data, {}) for n, data in enumerate(study.extra_documents)]
    chosen = tune_bm25(folder / "bm25", tables["dev"], workers.num_workers == 0)
    indexed = ("train", "unlabeled_questions", "dev", *study.tests)
    every = [tables[name] for name in indexed if name in tables] + more
    index = index_candidates(folder / "index", every, chosen)
    if study.retrieval_depth is not None:
        for name in ("train", "dev", *study.tests):
            stage = folder / "retrieved" / name
            how = study.retrieval_depth, name == "train"
            tables[name] = retrieve_candidates(stage, tables[name], index, *how)
        _check_sample_sizes(study, tables["train"])  # Questions without any hit were removed.
    return Bench(study, folder, workers, tables, chosen, index)


def _check_sample_sizes(study: Study, train: Path) -> None:
    """Checks that no sample is larger than the target's labeled questions."""
    num_questions = questions_in(train)
    sizes = [size for size in study.few_shot.num_questions if size is not None]
    if too_large := [size for size in sizes if size > num_questions]:
        raise ConfigError(
            f"few_shot.num_questions {too_large}, but the target has {num_questions:,} labeled "
            "questions; null stands for all of them"
        )


def _starts(bench: Bench) -> Iterator[tuple[str, Path | None]]:
    """Yields name and ranker of each start; `scratch` has no ranker."""
    study = bench.study
    yield SCRATCH, None
    for name in study.transfer_sources:
        yield name, bench.ranker(name, bench.tables[name])
    queries = questions_of(bench.tables.get("unlabeled_questions", bench.tables["train"]))
    made = label_queries(
        bench.folder / "tables" / "pseudo", bench.index, queries, study.pseudo_labels
    )
    yield PSEUDO, bench.ranker(PSEUDO, made)


def questions_in(stage: Path) -> int:
    """Returns the number of questions of a table."""
    num_questions: int = manifest(stage)["outputs"]["counts"]["num_questions"]
    return num_questions


def _few_shot(
    bench: Bench, start: str, ranker: Path | None
) -> Iterator[tuple[str, int, dict[str, EvaluationResult]]]:
    """Yields system, sample and results of each few-shot ranker, and then of its remedies."""
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
            if "bm25_mixing" in how.remedies:
                yield f"{system}, with BM25", sample, _with_keywords(bench, stage)
            if "weight_interpolation" in how.remedies and ranker is not None:
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
    """Evaluates the ranker's stored scores mixed with BM25's, with the best weight on dev."""
    study, runs = bench.study, bench.folder / "runs" / ranker.name
    scores: dict[str, tuple[Any, Any, Any]] = {}
    for name, path in bench.watched.items():
        rows = table(path)
        own = align_run(read_run(runs / f"{name}.run"), rows)
        scores[name] = rows, own, bench.keywords(rows)
    part = best_bm25_weight(*scores["dev"], study.measures[0], study.question_filter)
    log.info("%s: %.1f of BM25", ranker.name, part)
    return {
        name: evaluate(
            of[0], mix_scores(*of, part), study.measures, question_filter=study.question_filter
        )
        for name, of in scores.items()
    }


def _towards(bench: Bench, ranker: Path, start: Path) -> Path:
    """Makes a stage with the ranker interpolated with its start, with the best weight on dev."""
    study, start_weights = bench.study, bench.study.few_shot.interpolation_weights

    def make(part: Path) -> dict[str, Any]:
        moved, begun = (load(s / "ranker") for s in (ranker, start))
        dev = table(bench.tables["dev"])
        found = interpolate_on_dev(
            moved, begun, dev, study.measures[0], study.question_filter, start_weights
        )
        save(moved, part / "ranker")
        log.info("%s: %.2f of its start", ranker.name, found)
        return {"part": found}

    inputs = {
        "ranker": digest(ranker),
        "start": digest(start),
        "measure": study.measures[0],
        "question_filter": study.question_filter,
        "interpolation_weights": list(start_weights),
    }
    return stage(bench.folder / "rankers" / f"{ranker.name}-towards", inputs, make)


def main() -> None:
    """Runs the command line."""
    command(Study, run)


if __name__ == "__main__":
    main()
