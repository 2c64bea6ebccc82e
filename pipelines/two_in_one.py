"""Two-in-One: joint models of passages and their sentences beside what ranks one kind alone.

    python -m pipelines.two_in_one --config pipelines/recipes/two_in_one_minilm.yaml --output DIR

A step whose objective is the joint loss trains on tables by passages; any other trains a ranker of
sentences as in the other pipelines (a pointwise ranker, a cascade). All select supporting facts on
the tables of `selects`, which are measured as HotpotQA's evaluator does (Tables 1 and 2 of the
paper), and rank the candidates of `tests` (zero-shot, where these are of another corpus).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.cascade.pruning import expand_drop_ratios
from as2ray.checkpoints.loading import load
from as2ray.corpora import hotpotqa
from as2ray.corpora.preparation import release_path
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.sampling import balance_passages
from as2ray.distributed.plan import WorkersConfig
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
from pipelines.recipe import Recipe as Steps
from pipelines.recipe import Step, TableSpec, command
from pipelines.steps import TABLE, evaluate_ranker, table

log = logging.getLogger(__name__)

ANSWERS = "-answers"
"""Ends the name of what is measured of answers, after the table's."""


@dataclass(frozen=True)
class Recipe(Steps):
    """Joint models beside rankers of passages or sentences alone."""

    fact_selection_tests: list[str] = field(default_factory=list)
    """Tables of HotpotQA on which supporting facts are selected and measured."""
    fact_selection: FactSelectionConfig = field(default_factory=FactSelectionConfig)
    """How they are selected; what a system goes by follows from its step."""
    balance_passages: bool = True
    """Train on as many irrelevant passages as relevant ones, as the released code does."""
    drop_ratio: float = 0.0
    """Drop ratio after every exit of a cascade when it selects among all sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expand_drop_ratios(self.drop_ratio, 2)
        wrong = [
            name
            for name in self.fact_selection_tests
            if name not in self.tables or self.tables[name].corpus != hotpotqa.CORPUS.name
        ]
        wrong += [name for name in self.fact_selection_tests if name in self.tests]
        if wrong or not self.fact_selection_tests:
            raise ConfigError(
                f"supporting facts to select on {self.fact_selection_tests}"
                "; expected at least one of the recipe's tables of hotpotqa, none of its tests",
                fix="describe it under `tables`; under another name for a test, too",
            )

    def reported(self) -> list[str]:
        """What is selected on, and the tests."""
        return [*self.fact_selection_tests, *self.tests]

    def may_print(self) -> set[str]:
        """What is selected on has a report of the answers, too."""
        return {*self.reported(), *(name + ANSWERS for name in self.fact_selection_tests)}

    def rule(self, step: Step) -> ScoreSource:
        """What a step's ranker goes by when it selects."""
        if not isinstance(step.loss, TwoInOneLoss) or not step.loss.passage_loss:
            return "sentences"
        return "joint" if step.loss.sentence_loss else "passages"


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> None:
    """Runs what is not there yet, and writes the reports.

    Args:
        recipe: What to do.
        output: Folder of the stages.
        workers: What to take of the cluster.
        sources: For each corpus its folder; by default its place in AS2RAY_DATA.
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
            asked = replace(recipe.fact_selection, rule=recipe.rule(recipe.runs[name]))
            place = folder / "selections" / f"{ranker.name}-{test}"
            drop = recipe.drop_ratio if recipe.exits_of(name) else None
            made = _selected(place, ranker, tables[test], asked, drop)
            runs |= _measured(made, test, recipe.tables[test], tables[test], data_dirs)
            if (apart := manifest(made)["found"]["gap"]) is not None:
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
    """Stages by passages of the tables that joint models train on, and are watched on."""
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
    """A stage that holds a table by passages."""
    identity = {"table": manifest(source)["found"]["fingerprint"], "balanced": few}

    def make(part: Path) -> Mapping[str, Any]:
        rows = group_by_passage(table(source))
        rows = balance_passages(rows) if few else rows
        pq.write_table(rows, part / TABLE, row_group_size=4_096, compression="zstd")
        plain = manifest(source)["found"]["fingerprint"]
        return {"passages": rows.num_rows, "fingerprint": f"{plain}-{'balanced' if few else 'all'}"}

    return stage(folder, identity, make)


def _selected(
    folder: Path, ranker: Path, source: Path, how: FactSelectionConfig, drop_ratio: float | None
) -> Path:
    """A stage with the selection of every question, as the official evaluator reads it.

    Args:
        folder: The stage.
        ranker: Stage of the trained ranker.
        source: Stage of the table.
        how: How to select.
        drop: Of a cascade.
    """
    fingerprint = manifest(source)["found"]["fingerprint"]
    identity = {"ranker": digest(ranker), "table": fingerprint, "how": how}
    identity |= {} if drop_ratio is None else {"drop": drop_ratio}

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

    return stage(folder, identity, make)


def _scores(
    ranker: Ranker, rows: pa.Table, passages: pa.Table, rule: ScoreSource, drop_ratio: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores around 0 of passages and of sentences; a rule reads those that its ranker has."""
    if isinstance(ranker, TwoInOneRanker):
        texts = passages["candidate"].to_pylist()
        scores, sentence = ranker.predict_passages(passages["question"].to_pylist(), texts)
        return (max_sentence_score(passages, sentence) if rule == "sentences" else scores), sentence
    # Of a cascade, none but the survivors of all stages can lie above 0.
    sentence = (
        ranker.predict_table(rows, drop_ratio).sort_keys - max(0, len(ranker.exit_layers) - 1) - 0.5
    )
    return max_sentence_score(passages, sentence), sentence


def _answers(ranker: Ranker, passages: pa.Table, chosen: SelectedFacts) -> dict[str, str] | None:
    """Each question's short answer, if its selected sentences hold one; None of a ranker that does
    not look for any."""
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
    """A selection against the questions as they were published, facts by the test's name.

    Facts that no table can show are missed. Where there are answers, they and the joint measures
    stand under the name with `-answers`.
    """
    corpus = get_corpus(data.corpus)
    place = release_path(corpus, data_dirs.get(data.corpus))
    gold = hotpotqa.read_gold_questions(data.split, place, **corpus.resolve(data.corpus_options))
    rows = table(source)
    if data.num_questions is not None or data.question_filter != "raw":
        gold = {name: gold[name] for name in rows["question_id"].unique().to_pylist()}
    made = json.loads((selection / "prediction.json").read_text())
    facts = {name: [(title, n) for title, n in of] for name, of in made["sp"].items()}
    titles = json.loads((selection / "titles.json").read_text())
    found = {test: measure_facts(gold, facts, titles)}
    if manifest(selection)["found"]["answers"]:
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
            fingerprint=manifest(source)["found"]["fingerprint"],
        )
        for name, of in found.items()
    }


def main() -> None:
    """The command line."""
    command(Recipe, run)


if __name__ == "__main__":
    main()
