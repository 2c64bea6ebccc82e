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

from as2ray import checkpoint
from as2ray.distributed.plan import Workers
from as2ray.errors import RecipeError
from as2ray.evaluation.measures import Evaluation, evaluate
from as2ray.evaluation.presets import as_measure
from as2ray.evaluation.report import markdown, report, save
from as2ray.evaluation.trec import read_run, scores_of_run
from as2ray.filters import Filter
from as2ray.objectives import Distillation, Exits, Listwise, Margin, TwoInOne, objective
from as2ray.retrieval.bm25 import BM25
from as2ray.retrieval.pseudo_labels import PseudoLabels
from as2ray.stages import MANIFEST, digest, manifest, stage
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import Tracking
from pipelines.curves import curve, ends, table_1
from pipelines.few_shot import Protocol, best_part, best_step, mixed
from pipelines.labels import (
    candidates_indexed,
    labelled,
    questions_of,
    retrieval_scores,
    retrieved,
    sampled,
    tuned,
)
from pipelines.recipe import Data, command
from pipelines.steps import Plan, evaluated, prepared, refuse_unfit, table, trained

log = logging.getLogger(__name__)

SCRATCH, PSEUDO, KEYWORDS = "scratch", "pseudo", "BM25"

PAPER = Training(
    batch=16,
    learning_rate=2e-5,
    head_learning_rate=2e-4,
    weight_decay=1e-7,
    schedule="constant",
    warmup=0.2,
)
"""Section 4: rates of body and head, batch, decay, and the rate that grows for a fifth of the run
and stays."""


@dataclass(frozen=True)
class Study:
    """One target, several starts, several sizes of annotation."""

    title: str
    """Heading of the report."""
    model: Model
    """What `scratch` is: a pretrained encoder."""
    train: Data
    """The target's annotated questions."""
    dev: Data
    """Chooses k1 and b, checkpoints (by AP; also those of rankers that are then measured zero-shot)
    and what the remedies mix."""
    tests: dict[str, Data]
    """What is reported."""
    elsewhere: dict[str, Data] = field(default_factory=dict)
    """Tests on other collections: reported too, but BM25 does not find their candidates."""
    unlabelled: Data | None = None
    """Questions that BM25 labels for `pseudo`, annotated or not; by default those of `train`."""
    transfers: dict[str, Data] = field(default_factory=dict)
    """Other corpora to transfer from, by the names of their starts."""
    documents: list[Data] = field(default_factory=list)
    """Tables whose candidates BM25 finds, beside those of `train`, `dev` and the tests."""
    retrieve: int | None = None
    """Rank so many that BM25 finds among all candidates in place of each question's own: 100 in the
    paper. A question whose positives it all misses counts 0, so `filter` must be `raw`; filters of
    `dev` and the tests leave out those that have no positive at all."""
    labels: PseudoLabels = field(default_factory=PseudoLabels)
    """How BM25 labels."""
    protocol: Protocol = field(default_factory=Protocol)
    """Sizes, samples, epochs, remedies."""
    training: Training = field(default_factory=lambda: PAPER)
    """Of every run, but for its epochs: those are the protocol's, by the number of questions."""
    objective: str | Listwise | Margin = "margin"
    """Of every run; one of exits where the model has `exits`. There are no teachers."""
    measures: list[str] = field(default_factory=lambda: ["RR", "AP", "P@1"])
    """Names of ir-measures; the first one is drawn, and chooses what the remedies mix."""
    filter: Filter = "no_all_negative"
    """Questions that count."""
    tracking: Tracking = field(default_factory=Tracking)
    """What follows the runs."""

    def __post_init__(self) -> None:
        # Names of stages, and of systems, which `pipelines.curves` takes apart at + and commas.
        names = [SCRATCH, PSEUDO, KEYWORDS, "train", "dev", "unlabelled"]
        names += [*self.tests, *self.elsewhere, *self.transfers]
        odd = {n for n in names if names.count(n) > 1 or not re.fullmatch(r"[\w.-]+", n)}
        if odd or not self.tests:
            raise RecipeError(
                f"{len(self.tests)} tests {list(self.tests)}, transfers {list(self.transfers)}"
                f"{f': {sorted(odd)} cannot be names' if odd else ''}",
                expected="at least one test, and each name of letters, digits and . - _ once; "
                f"{names[:6]} are taken",
                mend="correct the recipe",
            )
        if self.training.epochs != PAPER.epochs:
            raise RecipeError(
                f"training.epochs {self.training.epochs}",
                expected="no epochs there: a run's fall with its number of questions",
                mend="set protocol.epochs, protocol.at, protocol.power and protocol.least",
            )
        if (self.retrieve is not None and self.retrieve < 1) or not self.measures:
            raise RecipeError(
                f"retrieve {self.retrieve}, measures {self.measures}",
                expected="retrieve of at least 1 or none, and at least one measure",
                mend="correct the recipe",
            )
        for measure in self.measures:
            as_measure(measure)
        asked = objective(self.objective)
        cascades = isinstance(asked, Exits)
        if isinstance(asked, Distillation | TwoInOne) or cascades != bool(self.model.exits):
            raise RecipeError(
                f"objective {self.objective!r} of a model with exits {self.model.exits}",
                expected="exits and an objective such as 'uniform_exit'; or no exits, and one such "
                "as 'margin'; no teachers and no passages",
                mend="name another objective, or correct the model's exits",
            )
        if self.retrieve is not None and self.elsewhere:
            raise RecipeError(
                f"retrieve {self.retrieve} and elsewhere {list(self.elsewhere)}",
                expected="tests whose candidates are found, or tests with their own candidates",
                mend="leave one of the two out",
            )
        if self.retrieve is not None and self.filter != "raw":
            raise RecipeError(
                f"retrieve {self.retrieve} under the filter {self.filter!r}",
                expected="the filter `raw`: a question whose positives BM25 misses counts 0",
                mend="filter: raw, and filters of their own for dev and tests with questions that "
                "have no positive",
            )

    @property
    def reported(self) -> dict[str, Data]:
        """All tests."""
        return {**self.tests, **self.elsewhere}


@dataclass(frozen=True)
class Bench:
    """What every run of a study shares."""

    study: Study
    folder: Path
    workers: Workers
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
        epochs = self.study.protocol.epochs_of(questions)
        log.info("%s: %s questions, %d epochs", name, f"{questions:,}", epochs)
        job = Job(
            model=self.study.model,
            train=(str(rows),),
            watched={"dev": str(self.tables["dev"])},
            training=replace(training, epochs=epochs, seed=training.seed + sample),
            objective=self.study.objective,
            tracking=self.study.tracking,
        )
        inputs = {"train": rows, "dev": self.tables["dev"]}
        return trained(self.folder / "rankers" / name, Plan(job, inputs, start), self.workers)

    def keywords(self, rows: pa.Table) -> np.ndarray:
        """BM25 of each row, shape [rows]: of the index where candidates were retrieved from it."""
        if self.study.retrieve is None:
            return self.bm25.scores_within(rows)
        return retrieval_scores(rows, self.index, self.study.retrieve)

    def evaluations(self, ranker: Path) -> dict[str, Evaluation]:
        """Of a ranker on dev and the tests."""
        runs = self.folder / "runs" / ranker.name
        return evaluated(runs, ranker, self.watched, self.study.measures, self.study.filter)


Found = dict[str, dict[int, dict[str, Evaluation]]]
"""Evaluations by system, sample and table."""


def run(
    study: Study, output: str | Path, workers: Workers, sources: Mapping[str, str] | None = None
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
    bench = _bench(study, folder, workers, sources or {})
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
        told = report(
            f"{study.title}: {test}",
            systems,
            baseline=KEYWORDS,
            published={n: {study.measures[0]: v} for n, v in study.protocol.published.items()},
        )
        save(told, bench.folder / f"{test}.md")
        log.info("\n%s", markdown(told))
        sizes = {n: every if n is None else n for n in study.protocol.sizes}
        curve(study.title, systems, sizes, study.measures[0], bench.folder / f"{test}-curve.png")
        targets[test] = ends(systems, list(study.transfers), study.measures[0])
    told_ends = {"measure": study.measures[0], "targets": targets}
    (bench.folder / "table1.json").write_text(json.dumps(told_ends, indent=2) + "\n")
    (bench.folder / "table1.md").write_text(table_1(targets, study.measures[0]))


def _bench(study: Study, folder: Path, workers: Workers, sources: Mapping[str, str]) -> Bench:
    def make(name: str, data: Data, without: Mapping[str, Path]) -> Path:
        return prepared(folder / "tables" / name, data, sources.get(data.corpus), without)

    held_out = {name: make(name, data, {}) for name, data in study.reported.items()}
    held_out["dev"] = make("dev", study.dev, held_out)
    tables = held_out | {"train": make("train", study.train, held_out)}
    _refuse_beyond(study, tables["train"])
    learnt = {**study.transfers, **({"unlabelled": study.unlabelled} if study.unlabelled else {})}
    tables |= {name: make(name, data, held_out) for name, data in learnt.items()}
    more = [make(f"documents-{n}", data, {}) for n, data in enumerate(study.documents)]
    chosen = tuned(folder / "bm25", tables["dev"], workers.count == 0)
    indexed = ("train", "unlabelled", "dev", *study.tests)
    every = [tables[name] for name in indexed if name in tables] + more
    index = candidates_indexed(folder / "index", every, chosen)
    if study.retrieve is not None:
        for name in ("train", "dev", *study.tests):
            stage = folder / "retrieved" / name
            how = study.retrieve, name == "train"
            tables[name] = retrieved(stage, tables[name], index, *how)
        _refuse_beyond(study, tables["train"])  # without those for which BM25 finds nothing
    return Bench(study, folder, workers, tables, chosen, index)


def _refuse_beyond(study: Study, train: Path) -> None:
    """Samples that are larger than the target's annotated questions."""
    every = questions_in(train)
    if beyond := [size for size in study.protocol.sizes if size is not None and size > every]:
        raise RecipeError(
            f"samples of {beyond} of {every:,} questions",
            expected=f"sizes of at most {every:,}, or null for all",
            mend="correct the protocol",
        )


def _starts(bench: Bench) -> Iterator[tuple[str, Path | None]]:
    """Each start by its name; `scratch` has no ranker yet."""
    study = bench.study
    yield SCRATCH, None
    for name in study.transfers:
        yield name, bench.ranker(name, bench.tables[name])
    queries = questions_of(bench.tables.get("unlabelled", bench.tables["train"]))
    made = labelled(bench.folder / "tables" / "pseudo", bench.index, queries, study.labels)
    yield PSEUDO, bench.ranker(PSEUDO, made)


def questions_in(stage: Path) -> int:
    """The number of questions of a table."""
    found: int = manifest(stage)["found"]["counts"]["questions"]
    return found


def _few_shot(
    bench: Bench, start: str, ranker: Path | None
) -> Iterator[tuple[str, int, dict[str, Evaluation]]]:
    """Systems trained on samples, by name and sample; after each, what the remedies make of it."""
    how = bench.study.protocol
    for size in how.sizes:
        for sample in range(how.samples if size is not None else 1):
            system = f"{start}+{'all' if size is None else size}"
            rows = bench.tables["train"]
            if size is not None:
                part = bench.folder / "tables" / f"train-{size}-{sample}"
                rows = sampled(part, rows, size, sample, how.nested)
            stage = bench.ranker(f"{system}-{sample}", rows, ranker, sample)
            yield system, sample, bench.evaluations(stage)
            if "bm25" in how.remedies:
                yield f"{system}, with BM25", sample, _with_keywords(bench, stage)
            if "weights" in how.remedies and ranker is not None:
                moved = _towards(bench, stage, ranker)
                yield f"{system}, towards its start", sample, bench.evaluations(moved)


def _keywords(bench: Bench) -> dict[str, Evaluation]:
    found = {}
    for name, path in bench.watched.items():
        rows = table(path)
        scores = bench.keywords(rows)
        found[name] = evaluate(rows, scores, bench.study.measures, filter=bench.study.filter)
    return found


def _with_keywords(bench: Bench, ranker: Path) -> dict[str, Evaluation]:
    """The ranker's stored scores with BM25's, in the part that dev likes best."""
    study, runs = bench.study, bench.folder / "runs" / ranker.name
    scores: dict[str, tuple[Any, Any, Any]] = {}
    for name, path in bench.watched.items():
        rows = table(path)
        own = scores_of_run(read_run(runs / f"{name}.run"), rows)
        scores[name] = rows, own, bench.keywords(rows)
    part = best_part(*scores["dev"], study.measures[0], study.filter)
    log.info("%s: %.1f of BM25", ranker.name, part)
    return {
        name: evaluate(of[0], mixed(*of, part), study.measures, filter=study.filter)
        for name, of in scores.items()
    }


def _towards(bench: Bench, ranker: Path, start: Path) -> Path:
    """A stage with the ranker moved towards what it started from: of the protocol's steps the one
    that dev likes best."""
    study, steps = bench.study, bench.study.protocol.steps

    def make(part: Path) -> dict[str, Any]:
        moved, begun = (checkpoint.load(s / "ranker") for s in (ranker, start))
        dev = table(bench.tables["dev"])
        found = best_step(moved, begun, dev, study.measures[0], study.filter, steps)
        checkpoint.save(moved, part / "ranker")
        log.info("%s: %.2f of its start", ranker.name, found)
        return {"part": found}

    identity = {
        "ranker": digest(ranker),
        "start": digest(start),
        "measure": study.measures[0],
        "filter": study.filter,
        "steps": list(steps),
    }
    return stage(bench.folder / "rankers" / f"{ranker.name}-towards", identity, make)


def main() -> None:
    """The command line."""
    command(Study, run)


if __name__ == "__main__":
    main()
