"""The stages that pipelines share: a prepared table, a trained ranker, an evaluated ranker.

Knows stages, corpora, training and evaluation. Must not know any one pipeline.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from as2ray import checkpoint, corpora, packaged
from as2ray.corpora.files import present
from as2ray.corpora.sample import sample
from as2ray.distributed.plan import Workers
from as2ray.distributed.score import score
from as2ray.distributed.train import fit
from as2ray.errors import RecipeError, StageMismatchError
from as2ray.evaluation.measures import Evaluation, evaluate
from as2ray.evaluation.trec import read_run, scores_of_run, write_run
from as2ray.filters import Filter
from as2ray.models.staged import check_exits
from as2ray.records import count, fingerprint
from as2ray.stages import digest, manifest, stage
from as2ray.text.files import PairFiles
from as2ray.text.sentences import versioned
from as2ray.training.job import Job, Model
from as2ray.training.run import link_or_copy
from pipelines.recipe import Data

log = logging.getLogger(__name__)

TABLE = "part-00000.parquet"


def prepared(
    folder: Path, data: Data, source: str | None = None, without: Mapping[str, Path] | None = None
) -> Path:
    """A stage that holds a table as Parquet files.

    Args:
        folder: The stage.
        data: What to prepare.
        source: Folder of the raw release, or `hub`; by default the corpus' place in AS2RAY_DATA.
        without: Stages whose questions are left out.

    Raises:
        StageMismatchError: The stage is there, of other data or of another release.
    """
    others, now = without or {}, _sizes(data, source)
    splitter = corpora.get(data.corpus).resolve(data.options).get("splitter")
    identity = {
        "data": data,
        "splitter": versioned(splitter) if splitter else None,
        "without": {name: digest(path) for name, path in others.items()},
    }

    def make(part: Path) -> Mapping[str, Any]:
        shutil.rmtree(part / "release", ignore_errors=True)
        found = corpora.prepare(
            data.corpus,
            source,
            part / "release",
            {data.split: data.filter},
            without=[table(path) for path in others.values()],
            **data.options,
        )
        release = part / "release" / data.split
        for path in sorted(release.glob("*.parquet")):
            path.rename(part / path.name)
        shutil.rmtree(part / "release")
        entry = found["splits"][data.split]
        return {**entry, **_changed(part, data), "source": now}

    made = stage(folder, identity, make)
    before = manifest(made)["found"].get("source", {})
    if before and now and before != now:
        raise StageMismatchError(
            f"{made} was made of {before}, and there is {now} (bytes)",
            expected="the same release under the same name",
            mend="choose another --output, or remove this stage and those built on it",
        )
    return made


def _sizes(data: Data, source: str | None) -> dict[str, int]:
    """The release's file of a split in bytes; nothing where it is not there, or no file."""
    corpus = corpora.get(data.corpus)
    where, names = corpora.located(corpus, source), corpus.files.get(data.split, ())
    path = None if where == corpora.HUB else present(Path(where), names)
    return {path.name: path.stat().st_size} if path else {}


def _changed(part: Path, data: Data) -> Mapping[str, Any]:
    """Draws and turns labels over; what that changes in the manifest."""
    if not (data.noise or data.questions is not None or data.negatives is not None):
        return {}
    changed = sample(table(part), data.questions, data.negatives, data.seed)
    changed = corpora.flip_labels(changed, data.noise, data.seed) if data.noise else changed
    for path in part.glob("*.parquet"):
        path.unlink()
    pq.write_table(changed, part / TABLE, row_group_size=4_096, compression="zstd")
    return {"counts": asdict(count(changed)), "fingerprint": fingerprint(changed), "parts": 1}


def table(folder: Path) -> pa.Table:
    """The table of a prepared stage."""
    return PairFiles.find(folder).table()


def refuse_unfit(model: Model) -> None:
    """Looks at a model to start from before anything is made for it; its weights are not read.

    Args:
        model: With its layers and exits.

    Raises:
        CheckpointError: No encoder or ranker.
        RecipeError: Layers or exits that it does not have.
    """
    depth = checkpoint.depth(packaged.resolve(model.path))
    layers = depth if model.layers is None else model.layers
    if not 1 <= layers <= depth:
        raise RecipeError(
            f"{layers} layers of an encoder that has {depth}",
            expected=f"1 to {depth} layers",
            mend="correct `model.layers`",
        )
    if model.exits is not None:
        check_exits(model.exits, layers)


@dataclass(frozen=True)
class Plan:
    """A training run and the stages that it is made from."""

    job: Job
    """The run; its model path may be `packaged:NAME`, and counts only where there is no `start`."""
    tables: Mapping[str, Path]
    """Stages of the tables it reads, by name."""
    start: Path | None = None
    """Stage of the ranker it starts from."""
    teachers: tuple[Path, ...] = ()
    """Stages of the rankers whose stored logits it learns from."""

    def resolved(self) -> Job:
        """The run with a folder or hub id to start from."""
        model = self.job.model
        path = str(self.start / "ranker") if self.start else packaged.resolve(model.path)
        return replace(self.job, model=replace(model, path=path))

    def identity(self) -> dict[str, Any]:
        """What changes its result."""
        path = digest(self.start) if self.start else self.job.model.path
        made = {name: manifest(stage)["found"] for name, stage in self.tables.items()}
        return {
            "model": {**asdict(self.job.model), "path": path},
            "objective": self.job.objective,
            "training": self.job.training,
            "tables": {name: found["fingerprint"] for name, found in made.items()},
            "teachers": [digest(teacher) for teacher in self.teachers],
        }


def trained(folder: Path, plan: Plan, workers: Workers) -> Path:
    """A stage that holds the best ranker of a run, its metrics and TensorBoard files.

    Args:
        folder: The stage.
        plan: The run.
        workers: What to take of the cluster.
    """

    def make(part: Path) -> Mapping[str, Any]:
        run, done = part / "run", part / "done"
        # All is taken out of the run before it goes, in one step: a try that is interrupted goes
        # on from the whole run, or trains no more.
        if run.exists() or not (part / "ranker").exists():
            best = fit(plan.resolved(), run, workers)
            shutil.copytree(best, part / "ranker", dirs_exist_ok=True, copy_function=link_or_copy)
            if (run / "metrics.jsonl").exists():
                shutil.copy(run / "metrics.jsonl", part)
            if (run / "tensorboard").exists():
                shutil.copytree(run / "tensorboard", part / "tensorboard", dirs_exist_ok=True)
            if run.exists():
                run.rename(done)
            if workers.count and workers.storage:
                shutil.rmtree(best.parents[1], ignore_errors=True)  # the run's, and copied
        if done.exists():
            shutil.rmtree(done)
        return {"workers": workers}

    return stage(folder, plan.identity(), make)


def taught(folder: Path, table: Path, teacher: Path, workers: Workers) -> Path:
    """A stage with a ranker's logits of every pair of a table.

    Args:
        folder: The stage.
        table: Stage of the table.
        teacher: Stage of the trained ranker.
        workers: What to take of the cluster.
    """
    identity = {"teacher": digest(teacher), "table": manifest(table)["found"]["fingerprint"]}

    def make(part: Path) -> Mapping[str, Any]:
        rate = score(table, teacher / "ranker", part, workers)
        log.info(
            "%s: %s pairs in %.0f s, %s bytes", folder.name, rate.scored, rate.seconds, rate.bytes
        )
        return {"rate": rate}

    return stage(folder, identity, make)


def evaluated(
    folder: Path, ranker: Path, tests: Mapping[str, Path], measures: Sequence[str], filter: Filter
) -> dict[str, Evaluation]:
    """A stage with a TREC run and the measures of each test table; the evaluations by table.

    Args:
        folder: The stage.
        ranker: Stage of the trained ranker.
        tests: Stages of the tables, by name.
        measures: Names of ir-measures.
        filter: Questions that count.
    """
    identity = {
        "ranker": digest(ranker),
        "tests": {name: manifest(path)["found"]["fingerprint"] for name, path in tests.items()},
        "measures": list(measures),
        "filter": filter,
    }

    def make(part: Path) -> None:
        loaded = checkpoint.load(ranker / "ranker")
        for name, path in tests.items():
            rows = table(path)
            scores = loaded.score_table(rows).rank_by
            write_run(part / f"{name}.run", rows, scores, tag=ranker.name)
            found = evaluate(rows, scores, measures, filter=filter)
            (part / f"{name}.json").write_text(json.dumps(found.measures, indent=2) + "\n")

    stage(folder, identity, make)
    return {name: _evaluation(folder, name, path, measures, filter) for name, path in tests.items()}


def _evaluation(
    folder: Path, name: str, path: Path, measures: Sequence[str], filter: Filter
) -> Evaluation:
    rows = table(path)
    scores = scores_of_run(read_run(folder / f"{name}.run"), rows)
    return evaluate(rows, scores, measures, filter=filter)
