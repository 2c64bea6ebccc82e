"""Trains a ranker on tables of the user's own, in this process, and compares it with baselines."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as validated_dataclass

from as2ray.checkpoints.packaged import MINILM_NAME, resolve_model_path, split_revision
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.report import Report, to_markdown
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.comparison import start_experiment
from as2ray.experiments.configuration import validate
from as2ray.experiments.encoders import CombinedScores, SimilarityScores, TableScoring
from as2ray.experiments.executor import SequentialBackend
from as2ray.experiments.experiment import Experiment, Finished, run_experiment
from as2ray.experiments.rankers import (
    RANKER,
    StoredScores,
    TableEvaluation,
    TableScores,
    absolute_model_path,
    trained_rankers,
)
from as2ray.experiments.recipe import LeakPolicy, LossSpec, Recipe
from as2ray.experiments.reports import write_reports
from as2ray.experiments.retrieved import BM25Scores
from as2ray.experiments.stage import Stage, StageContext
from as2ray.experiments.store import Store
from as2ray.experiments.tables import table_checks
from as2ray.losses import import_path
from as2ray.losses.distillation import DistillationLoss
from as2ray.tables.loading import check_source, load_table
from as2ray.tables.source_files import hash_table
from as2ray.text.bm25 import BM25
from as2ray.training.config import TABLE_TRAINING, TrainingConfig

if TYPE_CHECKING:
    from as2ray.models.ranker import Ranker

SYSTEMS = (RANKER, "bm25", "similarity", "hybrid")
"""The systems of the report: the trained ranker, BM25, the cosine of the same encoder, and the sum
of both with the weights of `DEFAULT_WEIGHTS`."""

TEACHER = "teacher"
"""The ranker that is distilled, in the report."""

SPLIT_SHARES = {"dev": 0.1, "test": 0.1}
"""Shares of the questions that are held out if only one table is given."""

FIRST = "P@1"
MEASURES = ("AP", "RR", FIRST, "nDCG@10")

TRAINING, INPUTS, STORE = "training", "inputs", "store"
"""Folders of the output: the training run, tables that were given as objects, and the stages."""


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """A trained ranker and how it compares with BM25, the similarity of its encoder, and both."""

    folder: Path
    """Its checkpoint."""
    report: Report
    """Measures and paired tests; the baseline is BM25."""

    def _repr_html_(self) -> str:
        from markdown_it import MarkdownIt

        return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(repr(self)))

    def load(self) -> "Ranker":
        """Loads the ranker."""
        from as2ray.checkpoints.loading import load

        return load(self.folder)

    def __repr__(self) -> str:
        means = {row.system: row.measures[MEASURES[0]].mean for row in self.report.rows}
        best = max(means, key=lambda system: means[system])
        ranker, *others = (
            f"{row.system} for {row.measures[FIRST].mean:.0%}" for row in self.report.rows
        )
        questions = f"{self.report.counts.num_questions:,} questions"
        verdict = f"An answer comes first: {ranker} of the {questions}, {', '.join(others)}.\n"
        if best != RANKER:
            verdict += f"The ranker is worse than {best}; more questions or epochs may help.\n"
        return f"{to_markdown(self.report)}\n{verdict}ranker: {self.folder}"


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TableRecipe(Recipe):
    """A recipe of one run whose report has BM25, the similarity of its encoder and both, too."""

    has_similarity: bool = True
    """Whether the model is a sentence encoder."""
    teacher: str | None = None
    """Folder or hub id of a ranker whose logits the run learns from, beside the labels."""

    def systems(self) -> list[str]:
        """Returns the run, the baselines and the teacher."""
        baselines = SYSTEMS if self.has_similarity else SYSTEMS[:2]
        return [*baselines, *[TEACHER] * bool(self.teacher)]


@dataclass(frozen=True, eq=False)
class GivenRanker(Stage):
    """A ranker that was trained elsewhere."""

    path: str
    """Folder or hub id."""

    def identity(self, fingerprints: Mapping[Stage, str]) -> dict[str, Any]:
        """Has the content of a folder instead of its path."""
        return {**super().identity(fingerprints), "path": hash_table(self.path)}

    def run(self, context: StageContext) -> None:
        """Copies the ranker."""
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.saving import save

        save(load(self.path, dtype="fp32", device="cpu"), context.output / RANKER)


def train(  # noqa: PLR0913 - every argument is a flag
    table: Any,
    output: str | Path,
    *,
    dev: Any = None,
    test: Any = None,
    columns: Mapping[str, str] | None = None,
    min_positive_grade: float | None = None,
    max_bad_records: int = 0,
    model: str | Path = MINILM_NAME,
    max_length: int = 128,
    loss: LossSpec | Callable[..., Any] = "cross_entropy",
    training: TrainingConfig | Mapping[str, Any] = TABLE_TRAINING,
    teacher: str | Path | None = None,
    on_leak: LeakPolicy = "error",
    seed: int = 0,
) -> TrainingResult:
    """Trains a ranker on a table and reports it; see `as2ray.load_table` for what a table may be.

    Without `dev` and `test`, a tenth of the questions selects the checkpoint and a tenth is
    reported. With `dev` alone the report is on `dev`, which also selects. The same call with the
    same output continues a run that was interrupted, or returns its result; a call with other
    settings is refused.

    Args:
        table: What to train on.
        output: Folder of the ranker (`ranker/`), the report, and the stages (`store/`).
        dev: Table that selects the best checkpoint.
        test: Table that is reported.
        columns: Name in the tables of `question`, `candidate`, `label` and ids.
        min_positive_grade: Lowest grade that counts as an answer; by default labels are 0 and 1.
        max_bad_records: Rows of each table that may be left out because they cannot be used.
        model: Folder or hub id of an encoder or ranker.
        max_length: Maximum number of tokens of a pair.
        loss: Name of a loss, a loss with settings, `module:name` of one of your own, or a function
            of the logits [pairs, 2] and the targets that returns the loss summed over the batch.
        training: Hyperparameters. A large encoder needs a lower learning rate, such as 1e-5.
        teacher: Folder or hub id of a ranker whose scores are learned beside the labels
            (distillation), instead of `loss`.
        on_leak: What to do with training questions that are also in `dev` or `test`.
        seed: Seed of splits, of the order of examples and of the new head.

    Raises:
        As2rayError: A table, the model or a setting is not accepted, or the output is of others.
    """
    if table is None:
        raise ConfigError("table=None: there is nothing to train on")
    if not isinstance(output, str | Path):
        raise ConfigError(f"output={output!r:.200} is no folder")
    if not isinstance(model, str | Path):
        problem = f"model is a {type(model).__name__}, and neither a folder nor a hub id"
        raise ConfigError(problem, fix="give its folder or hub id; max_length is an argument")
    model, output, given = str(model), Path(output), {"train": table, "dev": dev, "test": test}
    shares = {} if dev is not None else {n: s for n, s in SPLIT_SHARES.items() if given[n] is None}
    settings = {
        "columns": dict(columns or {}),
        "min_positive_grade": min_positive_grade,
        "max_bad_records": max_bad_records,
    }
    tables = {
        name: _locate(source, settings, output / INPUTS / name)
        for name, source in given.items()
        if source is not None
    }
    for name in ("train", *shares) if shares else ():
        split = {"split": name, "split_shares": shares, "seed": seed}
        tables[name] = tables.get(name, tables["train"]) | split
    if isinstance(training, Mapping):
        training = {"learning_rate": TABLE_TRAINING.learning_rate, **training}
    else:
        training = asdict(training)
    if callable(loss):
        loss = import_path(loss)
    recipe = validate(
        TableRecipe,
        {
            "title": output.name + ("" if "test" in tables else ", on dev, which also selected it"),
            "model": {"path": model, "max_length": max_length},
            "tables": tables,
            "dev": "dev",
            "tests": ["test" if "test" in tables else "dev"],
            "runs": {RANKER: {"train": ["train"], "training": training, "loss": loss}},
            "baseline": SYSTEMS[1],
            "seeds": [seed],
            "measures": list(MEASURES),
            "on_leak": on_leak,
            "teacher": None if teacher is None else absolute_model_path(str(teacher)),
            "has_similarity": _is_sentence_encoder(model),
        },
    )
    reports: dict[str, Report] = {}
    store = Store(str((output / STORE).resolve()))
    finished = run_experiment(
        _build(recipe),
        output,
        store,
        SequentialBackend(store, WorkersConfig(num_workers=0)),
        lambda finished: reports.update(write_reports(recipe, finished, is_shown=False)),
        fail_fast=True,
        title=recipe.title,
    )
    [report] = reports.values()
    return TrainingResult(_write_ranker(recipe, finished, report), report)


def _write_ranker(recipe: TableRecipe, finished: Finished, report: Report) -> Path:
    """Writes the ranker in the format of other libraries, and its model card."""
    from as2ray.checkpoints.cross_encoder import export_cross_encoder
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.model_card import write_model_card
    from as2ray.checkpoints.saving import save
    from as2ray.models.pointwise import PointwiseRanker

    stages, folder = finished.experiment.stages, finished.output / RANKER
    ranker = load(finished.path(stages[TRAINING]) / RANKER, dtype="fp32", device="cpu")
    if type(ranker) is not PointwiseRanker:
        return save(ranker, folder)
    export_cross_encoder(ranker, folder)
    tables = {name: finished.outputs(stages[f"tables/{name}"]) for name in recipe.tables}
    data = [
        f"- {name}: {outputs['counts']['num_questions']:,} questions, "
        f"{outputs['counts']['num_pairs']:,} pairs, fingerprint `{outputs['fingerprint']}`"
        for name, outputs in tables.items()
    ]
    means = {name: summary.mean for name, summary in report.rows[0].measures.items()}
    run = recipe.runs[RANKER]
    settings = asdict(run.training).items()
    training = ", ".join(f"{name} {value}" for name, value in settings if value is not None)
    sections = {
        "Data": "\n".join(data),
        "Training": f"Loss {run.loss}; {training}.",
        "Results": to_markdown(report).partition("\n")[2].strip(),
    }
    write_model_card(folder, recipe.model.path, means, report.title, sections)
    return folder


def _locate(source: Any, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns where a table is read from; one that is no path is stored in the folder."""
    if isinstance(source, str | Path):
        check_source(str(source))
        return {"path": str(source), **settings}
    rows, path = load_table(source, **settings), folder / "rows.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)
    return {"path": str(path)}


def _is_sentence_encoder(model: str) -> bool:
    """Returns whether a model says how its states become an embedding."""
    folder = Path(resolve_model_path(model))
    if folder.is_dir():
        return (folder / "modules.json").is_file()
    from huggingface_hub import hf_hub_download

    from as2ray.checkpoints.hub import check_hub

    name, options = split_revision(model)
    check_hub(name, **options)
    try:
        hf_hub_download(name, "modules.json", revision=options.get("revision"))
    except (OSError, ValueError):  # no such file, no such model, or no network
        return False
    return True


def _build(recipe: TableRecipe) -> Experiment:
    """Returns the graph: tables, the ranker, and the evaluations of all systems."""
    experiment, tables = start_experiment(recipe, {})
    [ranker] = trained_rankers(recipe, tables, table_checks(recipe, tables)).values()
    teacher = GivenRanker(recipe.teacher) if recipe.teacher else None
    if teacher:
        logits = tuple(TableScores(teacher, table, "logits") for table in ranker.train)
        ranker = replace(ranker, loss=DistillationLoss(), teacher_logits=(logits,))
    experiment.add(TRAINING, ranker)
    bm25 = BM25Grid(tables[recipe.dev], ((BM25.k1, BM25.b),))
    for test in recipe.tests:
        table, kept = tables[test], recipe.question_filter
        similarity = SimilarityScores(table, recipe.model.path, kept)
        scoring = TableScoring(table, similarity, is_labeled=False)
        scores: dict[str, StoredScores] = {
            SYSTEMS[0]: TableScores(ranker, table, question_filter=kept),
            SYSTEMS[1]: BM25Scores(table, bm25, kept),
            SYSTEMS[2]: similarity,
            SYSTEMS[3]: CombinedScores(table, scoring, similarity, question_filter=kept),
        }
        if teacher:
            scores[TEACHER] = TableScores(teacher, table, question_filter=kept)
        for system in recipe.systems():
            stage = scores[system]
            evaluation = TableEvaluation(stage, tuple(recipe.measures), recipe.ties)
            experiment.compare(test, system, recipe.seeds[0], evaluation)
    return experiment
