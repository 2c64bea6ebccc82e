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

from as2ray import checkpoint, corpora
from as2ray.corpora import hotpotqa
from as2ray.corpora.sample import balanced
from as2ray.distributed.plan import Workers
from as2ray.errors import RecipeError
from as2ray.evaluation.measures import Evaluation
from as2ray.evaluation.selection import Rule, Selecting, Selection, best, select
from as2ray.evaluation.supporting_facts import gap, measure_facts
from as2ray.models.ranker import Ranker
from as2ray.models.two_in_one import TwoInOneRanker
from as2ray.objectives import TwoInOne
from as2ray.pruning import drop_ratios
from as2ray.records import ShortAnswer, by_passage, count
from as2ray.stages import digest, manifest, stage
from pipelines.experiment import Found, prepare, rankers, tell
from pipelines.recipe import Data, Step, command
from pipelines.recipe import Recipe as Steps
from pipelines.steps import TABLE, evaluated, table

log = logging.getLogger(__name__)

ANSWERS = "-answers"
"""Ends the name of what is measured of answers, after the table's."""


@dataclass(frozen=True)
class Recipe(Steps):
    """Joint models beside rankers of passages or sentences alone."""

    selects: list[str] = field(default_factory=list)
    """Tables of HotpotQA on which supporting facts are selected and measured."""
    selecting: Selecting = field(default_factory=Selecting)
    """How they are selected; what a system goes by follows from its step."""
    balanced: bool = True
    """Train on as many irrelevant passages as relevant ones, as the released code does."""
    drop: float = 0.0
    """Drop ratio after every exit of a cascade when it selects among all sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        drop_ratios(self.drop, 2)
        wrong = [
            name
            for name in self.selects
            if name not in self.tables or self.tables[name].corpus != hotpotqa.CORPUS.name
        ]
        wrong += [name for name in self.selects if name in self.tests]
        if wrong or not self.selects:
            raise RecipeError(
                f"supporting facts to select on {self.selects}",
                expected="at least one of the recipe's tables of hotpotqa, none of its tests",
                mend="describe it under `tables`; under another name for a test, too",
            )

    def reported(self) -> list[str]:
        """What is selected on, and the tests."""
        return [*self.selects, *self.tests]

    def may_print(self) -> set[str]:
        """What is selected on has a report of the answers, too."""
        return {*self.reported(), *(name + ANSWERS for name in self.selects)}

    def rule(self, step: Step) -> Rule:
        """What a step's ranker goes by when it selects."""
        if not isinstance(step.objective, TwoInOne) or not step.objective.passages:
            return "sentences"
        return "joint" if step.objective.sentences else "passages"


def run(
    recipe: Recipe, output: str | Path, workers: Workers, sources: Mapping[str, str] | None = None
) -> None:
    """Runs what is not there yet, and writes the reports.

    Args:
        recipe: What to do.
        output: Folder of the stages.
        workers: What to take of the cluster.
        sources: For each corpus its folder; by default its place in AS2RAY_DATA.
    """
    folder, sources = Path(output).resolve(), sources or {}
    tables = prepare(recipe, folder / "tables", sources)
    passages = _by_passages(recipe, folder / "passages", tables)
    found: Found = {test: {} for test in recipe.reported()}
    gaps: dict[str, dict[str, list[float]]] = {test: {} for test in recipe.selects}
    for name, seed, ranker in rankers(recipe, folder, workers, tables, passages):
        tests = {test: tables[test] for test in recipe.tests}
        runs = evaluated(
            folder / "runs" / ranker.name, ranker, tests, recipe.measures, recipe.filter
        )
        for test in recipe.selects:
            asked = replace(recipe.selecting, rule=recipe.rule(recipe.steps[name]))
            place = folder / "selections" / f"{ranker.name}-{test}"
            drop = recipe.drop if recipe.exits_of(name) else None
            made = _selected(place, ranker, tables[test], asked, drop)
            runs |= _measured(made, test, recipe.tables[test], tables[test], sources)
            if (apart := manifest(made)["found"]["gap"]) is not None:
                gaps[test].setdefault(name, []).append(apart)
        for test, evaluation in runs.items():
            found.setdefault(test, {}).setdefault(name, {})[seed] = evaluation
    for test in [test for test in found if test.endswith(ANSWERS)]:
        answered = found.pop(test)
        named = [recipe.against(test), recipe.against(test.removesuffix(ANSWERS)), *answered]
        baseline = next(name for name in named if name in answered)
        tell(replace(recipe, baseline=str(baseline)), folder, {test: answered})
    tell(recipe, folder, found)
    for test, of in gaps.items():
        for name, seeds in of.items():
            log.info("%s, %s: passage and best sentence lie %.3f apart", test, name, np.mean(seeds))


def _by_passages(recipe: Recipe, folder: Path, tables: Mapping[str, Path]) -> dict[str, Path]:
    """Stages by passages of the tables that joint models train on, and are watched on."""
    joint = [step for step in recipe.steps.values() if isinstance(step.objective, TwoInOne)]
    train = {name for step in joint for name in step.train}
    watched = {step.dev or recipe.dev for step in joint}
    watched |= set(recipe.tests) if recipe.curves and joint else set()
    made = {name: _passages(folder / name, tables[name], recipe.balanced) for name in sorted(train)}
    return made | {name: _passages(folder / name, tables[name], False) for name in sorted(watched)}


def _passages(folder: Path, source: Path, few: bool) -> Path:
    """A stage that holds a table by passages."""
    identity = {"table": manifest(source)["found"]["fingerprint"], "balanced": few}

    def make(part: Path) -> Mapping[str, Any]:
        rows = by_passage(table(source))
        rows = balanced(rows) if few else rows
        pq.write_table(rows, part / TABLE, row_group_size=4_096, compression="zstd")
        plain = manifest(source)["found"]["fingerprint"]
        return {"passages": rows.num_rows, "fingerprint": f"{plain}-{'balanced' if few else 'all'}"}

    return stage(folder, identity, make)


def _selected(folder: Path, ranker: Path, source: Path, how: Selecting, drop: float | None) -> Path:
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
    identity |= {} if drop is None else {"drop": drop}

    def make(part: Path) -> Mapping[str, Any]:
        rows = table(source)
        passages = by_passage(rows)
        loaded = checkpoint.load(ranker / "ranker")
        passage, sentence = _scores(loaded, rows, passages, how.rule, drop)
        chosen = select(passages, passage, sentence, how)
        answers = _answers(loaded, passages, chosen)
        (part / "prediction.json").write_text(json.dumps(chosen.as_json(answers), indent=2) + "\n")
        (part / "titles.json").write_text(json.dumps(chosen.titles, indent=2) + "\n")
        apart = gap(passage, best(passages, sentence)) if how.rule == "joint" else None
        return {"gap": apart, "answers": answers is not None}

    return stage(folder, identity, make)


def _scores(
    ranker: Ranker, rows: pa.Table, passages: pa.Table, rule: Rule, drop: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores around 0 of passages and of sentences; a rule reads those that its ranker has."""
    if isinstance(ranker, TwoInOneRanker):
        texts = passages["candidate"].to_pylist()
        scores, sentence = ranker.score_passages(passages["question"].to_pylist(), texts)
        return (best(passages, sentence) if rule == "sentences" else scores), sentence
    # Of a cascade, none but the survivors of all stages can lie above 0.
    sentence = ranker.score_table(rows, drop).rank_by - max(0, len(ranker.exits) - 1) - 0.5
    return best(passages, sentence), sentence


def _answers(ranker: Ranker, passages: pa.Table, chosen: Selection) -> dict[str, str] | None:
    """Each question's short answer, if its selected sentences hold one; None of a ranker that does
    not look for any."""
    if not (isinstance(ranker, TwoInOneRanker) and ranker.network.answer is not None):
        return None
    found: dict[str, ShortAnswer] = {}
    rows = passages.to_pylist()
    rows = [row for row in rows if row["title"] in chosen.titles[row["question_id"]]]
    for answer in ranker.find_answers(
        [row["question"] for row in rows], [row["candidate"] for row in rows]
    ):
        row = rows[answer.passage]
        name, fact = row["question_id"], (row["title"], row["sentence_index"][answer.sentence])
        best_yet = found.get(name)
        if fact in chosen.facts[name] and (best_yet is None or answer.score > best_yet.score):
            found[name] = answer
    return {name: answer.text for name, answer in found.items()}


def _measured(
    selection: Path, test: str, data: Data, source: Path, sources: Mapping[str, str]
) -> dict[str, Evaluation]:
    """A selection against the questions as they were published, facts by the test's name.

    Facts that no table can show are missed. Where there are answers, they and the joint measures
    stand under the name with `-answers`.
    """
    corpus = corpora.get(data.corpus)
    place = corpora.located(corpus, sources.get(data.corpus))
    gold = hotpotqa.gold(data.split, place, **corpus.resolve(data.options))
    rows = table(source)
    if data.questions is not None or data.filter != "raw":
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
        name: Evaluation(
            measures={m: float(np.mean(of[m])) for m in of.column_names[1:]},
            per_question=of,
            counts=count(rows),
            filter=data.filter,
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
