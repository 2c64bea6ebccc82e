"""Two-in-One: trains joint models of passages and sentences, and rankers of one kind alone.

    python -m pipelines.two_in_one --config pipelines/recipes/two_in_one_minilm.yaml --output DIR

Runs with the joint loss train on tables by passages; other runs train rankers of sentences as in
the other pipelines. All of them select supporting facts on `fact_selection_tests`, which are
evaluated as HotpotQA's evaluator does (Tables 1 and 2 of the paper), and rank the candidates of
`tests` (zero-shot, if these are of another corpus).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from as2ray.checkpoints.loading import load
from as2ray.corpora import hotpotqa
from as2ray.corpora.preparation import release_path
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.sampling import balance_passages
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.evaluation.fact_selection import (
    FactSelectionConfig,
    ScoreSource,
    SelectedFacts,
    max_sentence_score,
    select_facts,
)
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.supporting_facts import consistency_gap, measure_facts
from as2ray.experiments.stage import digest, manifest, stage
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.models.ranker import Ranker
from as2ray.models.two_in_one import TwoInOneRanker
from as2ray.outputs import ShortAnswer
from as2ray.tables.schema import count_table, group_by_passage
from pipelines.experiment import Found, prepare, train_runs, write_reports
from pipelines.recipe import Recipe as BaseRecipe
from pipelines.recipe import RunSpec, TableSpec, command
from pipelines.steps import TABLE, evaluate_ranker, table

log = logging.getLogger(__name__)

ANSWERS = "-answers"
"""Suffix of the report of answers, after the name of the table."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(BaseRecipe):
    """Joint models, compared with rankers of passages or sentences alone."""

    fact_selection_tests: list[str] = field(default_factory=list)
    """HotpotQA tables on which supporting facts are selected and evaluated."""
    fact_selection: FactSelectionConfig = field(default_factory=FactSelectionConfig)
    """How facts are selected; the score source of a system follows from its run."""
    balance_passages: bool = True
    """Train on as many irrelevant passages as relevant ones, as the released code does."""
    drop_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop ratio after every exit of a cascade that selects among all sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [
            name
            for name in self.fact_selection_tests
            if name not in self.tables
            or self.tables[name].corpus != hotpotqa.CORPUS.name
            or name in self.tests
        ]
        if wrong or not self.fact_selection_tests:
            raise ConfigError(
                f"fact_selection_tests {self.fact_selection_tests} must name at least one of the "
                "recipe's tables of hotpotqa, and none of its tests",
                fix="describe the table under `tables`; twice, if it is a test too",
            )

    def reported(self) -> list[str]:
        """Returns the tables of fact selection, and the tests."""
        return [*self.fact_selection_tests, *self.tests]

    def may_print(self) -> set[str]:
        """Returns the names of the reports, including those of answers."""
        return {*self.reported(), *(name + ANSWERS for name in self.fact_selection_tests)}

    def rule(self, run: RunSpec) -> ScoreSource:
        """Returns the scores that a run's ranker selects facts by."""
        if not isinstance(run.loss, TwoInOneLoss) or not run.loss.passage_loss:
            return "sentences"
        return "joint" if run.loss.sentence_loss else "passages"


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Trains and evaluates what does not exist yet, and writes the reports.

    Args:
        recipe: Tables, runs and systems.
        output: Folder of the stages.
        workers: Part of the cluster to use.
        data_dirs: Folder of each corpus; by default its folder in AS2RAY_DATA.
    """
    folder, data_dirs = Path(output).resolve(), data_dirs or {}
    tables = prepare(recipe, folder / "tables", data_dirs)
    passages = _by_passages(recipe, folder / "passages", tables)
    found: Found = {test: {} for test in recipe.reported()}
    gaps: dict[str, dict[str, list[float]]] = {test: {} for test in recipe.fact_selection_tests}
    for name, seed, ranker in train_runs(recipe, folder, workers, tables, passages):
        tests = {test: tables[test] for test in recipe.tests}
        runs = evaluate_ranker(
            folder / "runs" / ranker.name, ranker, tests, recipe.measures, recipe.question_filter
        )
        for test in recipe.fact_selection_tests:
            asked = replace(recipe.fact_selection, score_source=recipe.rule(recipe.runs[name]))
            place = folder / "selections" / f"{ranker.name}-{test}"
            drop = recipe.drop_ratio if recipe.exits_of(name) else None
            made = _selected(place, ranker, tables[test], asked, drop)
            runs |= _measured(made, test, recipe.tables[test], tables[test], data_dirs)
            if (apart := manifest(made)["outputs"]["gap"]) is not None:
                gaps[test].setdefault(name, []).append(apart)
        for test, evaluation in runs.items():
            found.setdefault(test, {}).setdefault(name, {})[seed] = evaluation
    for test in [test for test in found if test.endswith(ANSWERS)]:
        answered = found.pop(test)
        named = [recipe.against(test), recipe.against(test.removesuffix(ANSWERS)), *answered]
        baseline = next(name for name in named if name in answered)
        write_reports(replace(recipe, baseline=str(baseline)), folder, {test: answered})
    write_reports(recipe, folder, found)
    for test, of in gaps.items():
        for name, seeds in of.items():
            log.info("%s, %s: passage and best sentence lie %.3f apart", test, name, np.mean(seeds))


def _by_passages(recipe: Recipe, folder: Path, tables: Mapping[str, Path]) -> dict[str, Path]:
    """Makes stages by passages of the tables that joint models train on and are evaluated on."""
    joint = [step for step in recipe.runs.values() if isinstance(step.loss, TwoInOneLoss)]
    train = {name for step in joint for name in step.train}
    watched = {step.dev or recipe.dev for step in joint}
    watched |= set(recipe.tests) if recipe.plot_learning_curves and joint else set()
    made = {
        name: _passages(folder / name, tables[name], recipe.balance_passages)
        for name in sorted(train)
    }
    return made | {name: _passages(folder / name, tables[name], False) for name in sorted(watched)}


def _passages(folder: Path, source: Path, few: bool) -> Path:
    """Makes a stage with a table by passages."""
    inputs = {"table": manifest(source)["outputs"]["fingerprint"], "balance_passages": few}

    def make(part: Path) -> Mapping[str, Any]:
        rows = group_by_passage(table(source))
        rows = balance_passages(rows) if few else rows
        pq.write_table(rows, part / TABLE, row_group_size=4_096, compression="zstd")
        plain = manifest(source)["outputs"]["fingerprint"]
        return {"passages": rows.num_rows, "fingerprint": f"{plain}-{'balanced' if few else 'all'}"}

    return stage(folder, inputs, make)


def _selected(
    folder: Path, ranker: Path, source: Path, how: FactSelectionConfig, drop_ratio: float | None
) -> Path:
    """Makes a stage with the selected facts of every question, as the official evaluator reads it.

    Args:
        folder: Folder of the stage.
        ranker: Stage of the trained ranker.
        source: Stage of the table.
        how: How facts are selected.
        drop_ratio: Drop ratio of a cascade.
    """
    fingerprint = manifest(source)["outputs"]["fingerprint"]
    inputs = {"ranker": digest(ranker), "table": fingerprint, "fact_selection": how}
    inputs |= {} if drop_ratio is None else {"drop_ratio": drop_ratio}

    def make(part: Path) -> Mapping[str, Any]:
        rows = table(source)
        passages = group_by_passage(rows)
        loaded = load(ranker / "ranker")
        passage, sentence = _scores(loaded, rows, passages, how.score_source, drop_ratio)
        chosen = select_facts(passages, passage, sentence, how)
        answers = _answers(loaded, passages, chosen)
        (part / "prediction.json").write_text(json.dumps(chosen.as_json(answers), indent=2) + "\n")
        (part / "titles.json").write_text(json.dumps(chosen.titles, indent=2) + "\n")
        apart = (
            consistency_gap(passage, max_sentence_score(passages, sentence))
            if how.score_source == "joint"
            else None
        )
        return {"gap": apart, "answers": answers is not None}

    return stage(folder, inputs, make)


def _scores(
    ranker: Ranker, rows: pa.Table, passages: pa.Table, rule: ScoreSource, drop_ratio: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores of passages and sentences around 0; a score source uses those it needs."""
    if isinstance(ranker, TwoInOneRanker):
        texts = passages["candidate"].to_pylist()
        scores, sentence = ranker.predict_passages(passages["question"].to_pylist(), texts)
        return (max_sentence_score(passages, sentence) if rule == "sentences" else scores), sentence
    # In a cascade, only candidates that no stage dropped can have a score above 0.
    sentence = (
        ranker.predict_table(rows, drop_ratio).sort_keys - max(0, len(ranker.exit_layers) - 1) - 0.5
    )
    return max_sentence_score(passages, sentence), sentence


def _answers(ranker: Ranker, passages: pa.Table, chosen: SelectedFacts) -> dict[str, str] | None:
    """Returns each question's short answer that is in a selected sentence.

    Returns None for a ranker that does not extract answers.
    """
    if not (isinstance(ranker, TwoInOneRanker) and ranker.network.answer is not None):
        return None
    found: dict[str, ShortAnswer] = {}
    rows = passages.to_pylist()
    rows = [row for row in rows if row["title"] in chosen.titles[row["question_id"]]]
    for answer in ranker.extract_answers(
        [row["question"] for row in rows], [row["candidate"] for row in rows]
    ):
        row = rows[answer.passage_index]
        name, fact = (
            row["question_id"],
            (row["title"], row["sentence_index"][answer.sentence_index]),
        )
        best_yet = found.get(name)
        if fact in chosen.facts[name] and (best_yet is None or answer.score > best_yet.score):
            found[name] = answer
    return {name: answer.text for name, answer in found.items()}


def _measured(
    selection: Path, test: str, data: TableSpec, source: Path, data_dirs: Mapping[str, str]
) -> dict[str, EvaluationResult]:
    """Evaluates a selection against the published questions; returns results by report.

    Facts that are in no table count as missed. If the ranker extracts answers, they and the joint
    measures are reported under the name with `-answers`.
    """
    corpus = get_corpus(data.corpus)
    place = release_path(corpus, data_dirs.get(data.corpus))
    options = asdict(corpus.parse_options(data.corpus_options))
    gold = hotpotqa.read_gold_questions(data.split, place, **options)
    rows = table(source)
    if data.num_questions is not None or data.question_filter != "raw":
        gold = {name: gold[name] for name in rows["question_id"].unique().to_pylist()}
    made = json.loads((selection / "prediction.json").read_text())
    facts = {name: [(title, n) for title, n in of] for name, of in made["sp"].items()}
    titles = json.loads((selection / "titles.json").read_text())
    found = {test: measure_facts(gold, facts, titles)}
    if manifest(selection)["outputs"]["answers"]:
        both = measure_facts(gold, facts, titles, made["answer"])
        own = [name for name in both.column_names if name not in found[test].column_names]
        found[f"{test}{ANSWERS}"] = both.select(["question_id", *own])
    return {
        name: EvaluationResult(
            measures={m: float(np.mean(of[m])) for m in of.column_names[1:]},
            per_question=of,
            counts=count_table(rows),
            question_filter=data.question_filter,
            ties="pessimistic",
            relevance="label",
            fingerprint=manifest(source)["outputs"]["fingerprint"],
        )
        for name, of in found.items()
    }


def main() -> None:
    """Runs the command line."""
    command(Recipe, run)


if __name__ == "__main__":
    main()
