"""CERBERUS: trains teachers and students with one or several heads, and ensembles of rankers.

    python -m pipelines.distill --config pipelines/recipes/cerberus_table2.yaml --output DIR

Runs are trained as in any recipe: a student is a run with `teachers`. This pipeline adds ensembles,
whose weights are searched on the dev table; a search for the drop ratios of students with several
exits; the agreement of students' heads with their teachers; the confidence of teachers that are
ensembles; and measured times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, field
from dataclasses import dataclass as stage_dataclass
from functools import partial
from typing import Any

import numpy as np
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from as2ray.distributed.score import read_scores
from as2ray.errors import ConfigError
from as2ray.evaluation.agreement import (
    head_teacher_agreement,
    list_vote_cases,
    measure_majority_agreement,
)
from as2ray.evaluation.measures import mean_average_precision
from as2ray.evaluation.report import markdown_table
from as2ray.experiments.cascades import DropSearch, DropSearchConfig
from as2ray.experiments.command import Pipeline
from as2ray.experiments.comparison import check_members, start_experiment
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import (
    RANKER,
    EnsembleLogits,
    TableScores,
    TrainedRanker,
    evaluation,
    trained_rankers,
)
from as2ray.experiments.recipe import Recipe as BaseRecipe
from as2ray.experiments.recipe import RunSpec
from as2ray.experiments.reports import write_reports
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.experiments.tables import read_table, table_checks
from as2ray.tables.schema import LOGIT_COLUMNS
from tune_spaces import ensembles

TIMED_PAIRS = 2_048
"""Maximum number of pairs of the first test over which time is measured."""

PAPER_BATCH = 128
"""Pairs of a batch of Table 5; the other times are of batches that are packed by tokens."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Savings:
    """What a system saves compared with another one."""

    parameters: PositiveFloat
    """How many times as many parameters the other one has."""
    size: float
    """Share of its size that is saved."""
    latency: float
    """Share of its time that is saved, in batches of `PAPER_BATCH`."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(BaseRecipe):
    """Teachers, students and ensembles."""

    ensembles: dict[str, list[str]] = field(default_factory=dict)
    """Ensembles by name: the runs of their members."""
    num_ensemble_trials: NonNegativeInt = 100
    """Trials of Optuna's search for each ensemble's weights, on the recipe's dev table."""
    search: DropSearchConfig = field(default_factory=DropSearchConfig)
    """Search for the drop ratios of students with several exits."""
    teacher_agreement: list[str] = field(default_factory=list)
    """Students with one head per teacher, whose heads are compared with them (Figure 3)."""
    measure_speed: bool = True
    """Whether to measure time too, with the rankers of the first seed (Table 5)."""
    published_savings: dict[str, Savings] = field(default_factory=dict)
    """What the paper says that the baseline saves, by the system that it is compared with."""
    published_latencies_us: dict[str, PositiveFloat] = field(default_factory=dict)
    """Microseconds that Table 5 prints, by system."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_members(self, "ensemble", self.ensembles, self.runs)
        for name in ("published_savings", "published_latencies_us"):
            if unknown := sorted(getattr(self, name).keys() - set(self.systems())):
                raise ConfigError(f"{name} of {unknown}; the systems are {self.systems()}")
        for name in self.teacher_agreement:
            run = self.runs.get(name)
            if run is None or not 0 < run.num_ranking_heads == len(run.teaching_runs):
                raise ConfigError(
                    f"teacher_agreement of {name!r} needs a run with as many ranking heads as "
                    "teachers"
                )

    def systems(self) -> list[str]:
        """Returns runs, ensembles, and students with several exits after their search."""
        return [*self.runs, *self.ensembles, *(f"{run}-searched" for run in self.searches())]

    def searches(self) -> list[str]:
        """Returns the runs whose drop ratios are searched."""
        return [name for name in self.runs if len(self.exits_of(name)) > 1]


NUM_CONFIDENCE_BINS = 20
"""Bins of the histogram of teachers' probabilities."""

CONFIDENT = 0.95
"""A teacher is confident of a pair if one of both labels has at least this probability."""

StoredScores = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Scores [rows, members], question ids [rows] and labels [rows] of a dev table."""


@stage_dataclass(frozen=True, eq=False)
class Ensemble(Stage):
    """An ensemble with the weights that are best on a dev table."""

    RESOURCES = "pool"

    member_scores: tuple[TableScores, ...]
    """Scores of each member's exits on the dev table."""
    num_trials: int

    def run(self, context: StageContext) -> Outputs:
        """Searches the weights with Optuna under Ray Tune; equal weights are a candidate too."""
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.saving import save
        from as2ray.distributed.cluster import ray_session
        from as2ray.distributed.tune import search_scores
        from as2ray.models.ensemble import EnsembleRanker

        output, num_members = context.output, len(self.member_scores)
        tables = [read_scores(context.path(scores)) for scores in self.member_scores]
        rows = read_table(context.path(self.member_scores[0].table))
        # A member's last exit is its score.
        stacked = np.stack([table[table.column_names[-1]].to_numpy() for table in tables], 1)
        stored = (stacked, rows["question_id"].to_numpy(), rows["label"].to_numpy())
        suggest = partial(ensembles.suggest, num_members=num_members)
        with ray_session():
            trials = search_scores(
                evaluate_params, suggest, {"quality": "max"}, stored, output, self.num_trials
            )
        equal = (1.0 / num_members,) * num_members
        weights = [ensembles.apply_params(params, num_members) for params, _ in trials]
        best = max([*weights, equal], key=lambda w: ensemble_map(w, stored))
        folders = [context.path(scores.ranker) / RANKER for scores in self.member_scores]
        members = [load(folder, device="cpu") for folder in folders]
        save(EnsembleRanker(members, best), output / RANKER)
        dev_map, equal_map = (ensemble_map(w, stored) for w in (best, equal))
        return {"weights": best, "dev MAP": dev_map, "equal weights": equal_map}


def evaluate_params(params: Mapping[str, Any], stored: StoredScores) -> dict[str, float]:
    """Returns the quality of an ensemble with the weights of a trial."""
    weights = ensembles.apply_params(params, stored[0].shape[1])
    return {"quality": ensemble_map(weights, stored)}


def ensemble_map(weights: Sequence[float], stored: StoredScores) -> float:
    """Returns the MAP of the members' weighted scores."""
    scores, question_ids, labels = stored
    return mean_average_precision(question_ids, labels, scores @ np.asarray(weights))


@stage_dataclass(frozen=True, eq=False)
class TeacherAgreement(Stage):
    """How often a student's heads agree with its teachers, and where it follows most of them."""

    VERSION = 2

    head_scores: TableScores
    scores: TableScores
    """Of the student."""
    teacher_scores: dict[str, TableScores]

    def run(self, context: StageContext) -> Outputs:
        """Compares the stored scores."""

        def read(scores: TableScores) -> dict[str, np.ndarray]:
            stored = read_scores(context.path(scores))
            names = [name for name in stored.column_names if not name.endswith("_id")]
            return {name: stored[name].to_numpy().astype(float) for name in names}

        rows, heads = read_table(context.path(self.scores.table)), read(self.head_scores)
        teachers = {name: read(scores)["score"] for name, scores in self.teacher_scores.items()}
        agreement = head_teacher_agreement(rows, heads, teachers).tolist()
        outputs = {"heads": [*heads], "teachers": [*teachers], "agreement": agreement}
        if len(teachers) % 2 == 0:
            return outputs
        student = read(self.scores)["score"]
        majority = measure_majority_agreement(rows, student, teachers)
        cases = ("all_right", "majority_right", "minority_right")
        outputs["majority"] = {case: getattr(majority, case) for case in cases}
        return {**outputs, "votes": list_vote_cases(rows, student, teachers)}


@stage_dataclass(frozen=True, eq=False)
class TeacherConfidence(Stage):
    """How the probabilities of teachers are spread over a training table (CERBERUS, section 3.2).

    There an ensemble of large models is no good teacher, because most of its probabilities are
    close to 0 or 1.
    """

    teachers: dict[str, Stage]
    """Logits of the table by teacher."""

    def run(self, context: StageContext) -> Outputs:
        """Counts the positive label's probabilities in equal bins."""
        from scipy.special import expit

        outputs = {}
        for name, stage in self.teachers.items():
            stored = read_scores(context.path(stage))
            negative, positive = (stored[column].to_numpy() for column in LOGIT_COLUMNS)
            outputs[name] = summarize_confidence(expit(positive.astype(float) - negative))
        return outputs


def summarize_confidence(probabilities: np.ndarray) -> dict[str, Any]:
    """Summarizes probabilities of the positive label, shape [pairs].

    Returns:
        The share of pairs in each bin, the share of which the teacher is confident, and the mean
        entropy in bits, which is 0 for hard labels.
    """
    from scipy.special import entr

    counts, _ = np.histogram(probabilities, NUM_CONFIDENCE_BINS, (0, 1))
    both = np.stack([probabilities, 1 - probabilities])
    return {
        "shares": (counts / len(probabilities)).tolist(),
        "confident": float((both.max(0) >= CONFIDENT).mean()),
        "entropy": float(entr(both).sum(0).mean() / np.log(2)),
    }


@stage_dataclass(frozen=True, eq=False)
class RankingTimes(Stage):
    """Parameters of several rankers, and their times compared with the first one's."""

    VERSION = 2
    RESOURCES = "device"

    rankers: dict[str, Stage]
    table: Stage

    def run(self, context: StageContext) -> Outputs:
        """Measures them in one process, in turn."""
        from as2ray.checkpoints.loading import load
        from as2ray.profiling.latency import measure_latencies

        rankers = {name: load(context.path(s) / RANKER) for name, s in self.rankers.items()}
        rows = read_table(context.path(self.table))[:TIMED_PAIRS]
        packed = measure_latencies(rankers, rows)
        batched = measure_latencies(rankers, rows, batch_size=PAPER_BATCH)
        return {
            name: {
                "num_parameters": latency.num_parameters,
                "latency_us": latency.latency_us,
                "batched_latency_us": batched[name].latency_us,
                "slowdown": str(latency.slowdown or ""),
            }
            for name, latency in packed.items()
        }


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: rankers, ensembles of them, searched students, evaluations of all."""
    experiment, tables = start_experiment(recipe, data_dirs)
    trained = trained_rankers(recipe, tables, table_checks(recipe, tables))
    rankers: dict[tuple[str, int], Stage] = {**trained}
    dev = tables[recipe.dev]
    for name, members in recipe.ensembles.items():
        for seed in recipe.seeds_shared(name, members):
            scores = tuple(TableScores(trained[run, seed], dev, "exits") for run in members)
            rankers[name, seed] = Ensemble(scores, recipe.num_ensemble_trials)
    for name in recipe.searches():
        for seed in recipe.seeds_of(name):
            student = trained[name, seed]
            on_dev = TableScores(student, student.dev or dev, "exits", recipe.question_filter)
            rankers[f"{name}-searched", seed] = DropSearch(student, on_dev, recipe.search)
    for (name, seed), ranker in rankers.items():
        experiment.add(f"rankers/{name}-seed{seed}", ranker)
        for test in recipe.tests:
            experiment.compare(test, name, seed, evaluation(recipe, ranker, tables[test]))
    for name in recipe.teacher_agreement:
        seed, teachers = recipe.seeds_of(name)[0], recipe.runs[name].teaching_runs
        for test in recipe.tests:
            scores_of = {n: TableScores(trained[n, seed], tables[test]) for n in (name, *teachers)}
            heads = TableScores(trained[name, seed], tables[test], "heads")
            agreement = TeacherAgreement(heads, scores_of.pop(name), scores_of)
            experiment.add(f"agreement/{test}-{name}", agreement)
    for name, run in recipe.runs.items():
        _add_confidence(experiment, name, run, trained[name, recipe.seeds_of(name)[0]])
    if recipe.measure_speed:
        first_test = recipe.tests[0]
        order = sorted(recipe.systems(), key=lambda name: name != recipe.against(first_test))
        first = {n: next(r for (system, _), r in rankers.items() if system == n) for n in order}
        experiment.add("latency", RankingTimes(first, tables[first_test]))
    return experiment


def _add_confidence(experiment: Experiment, name: str, run: RunSpec, student: Stage) -> None:
    """Compares each teacher of a run that is an ensemble with its members, on each table."""
    assert isinstance(student, TrainedRanker)
    for teacher, by_table in zip(run.teachers, student.teacher_logits):
        if isinstance(teacher, str):
            continue
        for table, logits in zip(run.train, by_table):
            assert isinstance(logits, EnsembleLogits)
            teachers: dict[str, Stage] = dict(zip(teacher, logits.members))
            confidence = TeacherConfidence({**teachers, "ensemble": logits})
            experiment.add(f"confidence/{table}-{name}", confidence)


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the reports: systems, agreement with teachers, their confidence, times."""
    write_reports(recipe, finished)
    for name, stage in finished.named("agreement/").items():
        _write_agreement(finished, name, finished.outputs(stage))
    for name, stage in finished.named("confidence/").items():
        _write_confidence(finished, name, finished.outputs(stage))
    for stage in finished.named("latency").values():
        latencies = _format_latencies(
            finished.outputs(stage), recipe.published_savings, recipe.published_latencies_us
        )
        finished.write("latency.md", latencies)


def _format_latencies(
    systems: Outputs, published: Mapping[str, Savings], printed_us: Mapping[str, float]
) -> str:
    """Formats Table 5, what the first system saves compared with each other one, and claims.

    A claim holds if as much is saved as the paper prints, to its digits.
    """
    rows, claims, first = [], [], next(iter(systems.values()))
    for system, values in systems.items():
        times = [values[key] for key in ("latency_us", "batched_latency_us")]
        ratio = values["num_parameters"] / first["num_parameters"]
        saved_time = 1 - first["batched_latency_us"][0] / values["batched_latency_us"][0]
        if system in published:
            ours = Savings(round(ratio, 1), round(1 - 1 / ratio, 2), round(saved_time, 2))
            for (name, value), printed in zip(asdict(ours).items(), astuple(published[system])):
                holds = "holds" if value >= printed else "does not hold"
                claims.append((system, name, f"{printed:g}", f"{value:g}", holds))
        rows.append(
            (
                system,
                f"{values['num_parameters']:,}",
                *("{:,.1f} ± {:,.1f}".format(*time) for time in times),
                values["slowdown"],
                *(f"{ratio:.2f}", f"{1 - 1 / ratio:.0%}", f"{saved_time:.0%}"),
                f"{printed_us[system]:g}" if system in printed_us else "",
            )
        )
    columns = (
        *("system", "parameters", "µs a pair", f"in batches of {PAPER_BATCH}"),
        *("times the baseline's", "times its parameters", "it saves in size", "in latency"),
        "µs as printed",
    )
    table = markdown_table(columns, rows)
    if not claims:
        return table
    names = ("the baseline saves against", "of", "published", "ours", "claim")
    return f"{table}\n\n{markdown_table(names, claims)}"


def _write_confidence(finished: Finished, name: str, outputs: Outputs) -> None:
    """Writes the histogram of teachers' probabilities, and what it shows in numbers."""
    from as2ray.evaluation import plots

    shares = {teacher: values["shares"] for teacher, values in outputs.items()}
    labels = ("probability of the positive label", "share of pairs")
    plots.histogram(shares, name, *labels, finished.output / f"{name}-confidence.png")
    rows = [
        (teacher, f"{values['confident']:.1%}", f"{values['entropy']:.3f}")
        for teacher, values in outputs.items()
    ]
    columns = ("teacher", f"a label has at least {CONFIDENT}", "entropy, bits")
    finished.write(f"{name}-confidence.md", markdown_table(columns, rows))


def _write_agreement(finished: Finished, name: str, outputs: Outputs) -> None:
    """Writes Figure 3, and how often the student follows a majority of its teachers."""
    from as2ray.evaluation import plots

    heads, teachers, agreement = (outputs[key] for key in ("heads", "teachers", "agreement"))
    path = finished.output / f"{name}-agreement.png"
    plots.heatmap(np.array(agreement), heads, teachers, name, path)
    rows = [(head, *(f"{share:.3f}" for share in shares)) for head, shares in zip(heads, agreement)]
    text = markdown_table(("", *teachers), rows)
    for case, (num_right, num_questions) in outputs.get("majority", {}).items():
        text += f"\n\n{case}: the student is right on {num_right} of {num_questions} questions"
    columns = ("teachers right", "student", "questions", "majority's confidence", "others' highest")
    votes = [
        (
            str(count),
            "right" if is_right else "wrong",
            str(number),
            f"{majority:.3f}",
            "" if minority is None else f"{minority:.3f}",
        )
        for count, is_right, number, majority, minority in outputs.get("votes", ())
    ]
    text += f"\n\n{markdown_table(columns, votes)}" if votes else ""
    finished.write(f"{name}-agreement.md", text)


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
