"""Two-in-One: trains joint models of passages and sentences, and rankers of one kind alone.

    python -m pipelines.two_in_one --config pipelines/recipes/two_in_one_minilm.yaml --output DIR

Runs with the joint loss train on tables by passages; other runs train rankers of sentences as in
the other pipelines. All of them select supporting facts on `fact_selection_tests`, which are
evaluated as HotpotQA's evaluator does (Tables 1 and 2 of the paper), and rank the candidates of
`tests` (zero-shot, if these are of another corpus).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from dataclasses import dataclass as stage_dataclass
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from as2ray.corpora import hotpotqa
from as2ray.corpora.preparation import release_path
from as2ray.corpora.registry import get_corpus
from as2ray.corpora.sampling import balance_passages
from as2ray.distributed.score import ScoreKind, read_scores
from as2ray.errors import ConfigError
from as2ray.evaluation.fact_selection import (
    FactSelectionConfig,
    ScoreSource,
    SelectedFacts,
    max_sentence_score,
    select_facts,
)
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.report import markdown_table
from as2ray.evaluation.supporting_facts import consistency_gap, measure_facts
from as2ray.experiments.command import Pipeline
from as2ray.experiments.comparison import start_experiment
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import (
    TableScores,
    evaluation,
    save_evaluations,
    trained_rankers,
)
from as2ray.experiments.recipe import Recipe as BaseRecipe
from as2ray.experiments.recipe import RunSpec
from as2ray.experiments.reports import write_reports
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.experiments.tables import TABLE, PreparedTable, read_table, table_checks
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.tables.parquet import write_part
from as2ray.tables.schema import count_table, group_by_passage

ANSWERS = "-answers"
"""Suffix of the report of answers, after the name of the table."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe(BaseRecipe):
    """Joint models, compared with rankers of passages or sentences alone."""

    fact_selection_tests: list[str] = field(default_factory=list)
    """HotpotQA tables on which supporting facts are selected and evaluated."""
    passage_tables: dict[str, str] = field(default_factory=dict)
    """Tables on which a run of the joint loss selects facts instead, by run: the same questions
    with the corpus option `passages` that it was trained with, `joined` or `single`."""
    fact_selection: FactSelectionConfig = field(default_factory=FactSelectionConfig)
    """How facts are selected; the score source of a system follows from its run."""
    balance_passages: bool = True
    """Train on as many irrelevant passages as relevant ones, as the released code does."""
    published_gaps: dict[str, float] = field(default_factory=dict)
    """Mean distance of a passage's score and its best sentence's that the paper prints, by run."""
    drop_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop ratio after every exit of a cascade that selects among all sentences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hotpotqa_tables = {n for n, t in self.tables.items() if t.corpus == hotpotqa.CORPUS.name}
        selected = self.fact_selection_tests
        if not selected or not set(selected) <= hotpotqa_tables - set(self.tests):
            raise ConfigError(
                f"fact_selection_tests {selected} must name at least one of the recipe's tables of "
                "hotpotqa, and none of its tests",
                fix="describe the table under `tables`; twice, if it is a test too",
            )
        if unknown := sorted(self.published_gaps.keys() - self.runs.keys()):
            raise ConfigError(f"published_gaps of {unknown}; the runs are {[*self.runs]}")
        for name, table in self.passage_tables.items():
            is_joint = name in self.runs and isinstance(self.runs[name].loss, TwoInOneLoss)
            if not is_joint or table not in hotpotqa_tables or len(selected) > 1:
                raise ConfigError(
                    f"passage_tables has {table!r} for {name!r}; it names tables of hotpotqa by "
                    "runs with the loss two_in_one, and needs a single table of facts to select"
                )

    def reported(self) -> list[str]:
        """Returns the tables of fact selection, and the tests."""
        return [*self.fact_selection_tests, *self.tests]

    def may_print(self) -> set[str]:
        """Returns the names of the reports, including those of answers."""
        return {*self.reported(), *(name + ANSWERS for name in self.fact_selection_tests)}

    def held_out(self) -> set[str]:
        """Adds the tables of other passages."""
        return super().held_out() | set(self.passage_tables.values())

    def passages_of(self, table: str) -> str:
        """Returns what a passage is in a table, `whole` by default."""
        return str(self.tables[table].corpus_options.get("passages", "whole"))

    def rule(self, run: RunSpec) -> ScoreSource:
        """Returns the scores that a run's ranker selects facts by."""
        if "single" in map(self.passages_of, run.train):
            return "sentences"
        if not isinstance(run.loss, TwoInOneLoss) or not run.loss.passage_loss:
            return "sentences"
        return "joint" if run.loss.sentence_loss else "passages"

    def extracts_answers(self, name: str) -> bool:
        """Returns whether a run's ranker extracts short answers."""
        run = self.runs[name]
        has_answer_loss = isinstance(run.loss, TwoInOneLoss) and run.loss.answer_loss
        return has_answer_loss or bool(run.init_from and self.extracts_answers(run.init_from))


@stage_dataclass(frozen=True, eq=False)
class PassageTable(Stage):
    """A table by passages, which joint models train on and are evaluated on."""

    table: Stage
    balance_passages: bool
    """Keep as many irrelevant passages as relevant ones."""

    def run(self, context: StageContext) -> Outputs:
        """Groups the sentences by passage."""
        passages = group_by_passage(read_table(context.path(self.table)))
        passages = balance_passages(passages) if self.balance_passages else passages
        write_part(passages, context.output / TABLE)
        return {"passages": passages.num_rows}


@stage_dataclass(frozen=True, eq=False)
class FactSelection(Stage):
    """The selected facts of every question, as HotpotQA's official evaluator reads them."""

    table: Stage
    """The sentences of whole passages."""
    scores: TableScores
    """Of passages and sentences for a joint model, else of all sentences."""
    config: FactSelectionConfig
    num_exits: int = 0
    """Exits of a cascade."""

    def run(self, context: StageContext) -> Outputs:
        """Selects by the stored scores."""
        passages = group_by_passage(read_table(context.path(self.table)))
        stored, output = read_scores(context.path(self.scores)), context.output
        passage_scores, sentence_scores = self._centered_scores(passages, stored)
        selected = select_facts(passages, passage_scores, sentence_scores, self.config)
        prediction = selected.as_json(_best_answers(passages, stored, selected))
        (output / "prediction.json").write_text(json.dumps(prediction, indent=2) + "\n")
        (output / "titles.json").write_text(json.dumps(selected.titles, indent=2) + "\n")
        if self.config.score_source != "joint":
            return {"gap": None}
        best_sentence = max_sentence_score(passages, sentence_scores)
        return {"gap": consistency_gap(passage_scores, best_sentence)}

    def _centered_scores(
        self, passages: pa.Table, stored: pa.Table
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores of passages and sentences around 0."""
        if self.scores.score_kind == "passages" and self.config.score_source == "sentences":
            sentence_scores = stored["score"].to_numpy()  # each sentence was a passage
        elif self.scores.score_kind == "passages" and self.scores.table != self.table:
            sentence_scores = np.zeros(len(pc.list_flatten(passages["candidate"])))
        elif self.scores.score_kind == "passages":
            sentence_scores = pc.list_flatten(stored["sentence_scores"]).to_numpy()
        else:
            # In a cascade, only candidates that no stage dropped can have a score above 0.
            sentence_scores = stored["score"].to_numpy() - max(0, self.num_exits - 1) - 0.5
        if self.config.score_source == "sentences":
            return max_sentence_score(passages, sentence_scores), sentence_scores
        return stored["score"].to_numpy(), sentence_scores


def _best_answers(
    passages: pa.Table, stored: pa.Table, selected: SelectedFacts
) -> dict[str, str] | None:
    """Returns each question's best short answer that is in a selected sentence.

    Returns None for a ranker that does not extract answers.
    """
    if "answers" not in stored.column_names:
        return None
    best: dict[str, tuple[float, str]] = {}
    columns = [passages[name].to_pylist() for name in ("question_id", "title", "sentence_index")]
    columns += [stored[name].to_pylist() for name in ("answers", "answer_scores")]
    for question_id, title, *sentences in zip(*columns):
        for number, text, score in zip(*sentences):
            is_selected = (title, number) in selected.facts[question_id]
            if text is not None and is_selected and score > best.get(question_id, (-np.inf,))[0]:
                best[question_id] = (score, text)
    return {question_id: text for question_id, (_, text) in best.items()}


@stage_dataclass(frozen=True, eq=False)
class FactEvaluation(Stage):
    """Measures of selected facts, and of answers, against the published questions.

    Facts that are in no table count as missed.
    """

    selection: FactSelection
    table: PreparedTable
    has_answers: bool

    def run(self, context: StageContext) -> Outputs:
        """Reads the questions of the release and compares."""
        spec, folder = self.table.spec, context.path(self.selection)
        corpus = get_corpus(spec.corpus)
        options = asdict(corpus.parse_options(spec.corpus_options))
        source = release_path(corpus, self.table.data_dir)
        gold = hotpotqa.read_gold_questions(spec.split, source, **options)
        rows = read_table(context.path(self.table))
        if spec.num_questions is not None or spec.question_filter != "raw":
            gold = {name: gold[name] for name in rows["question_id"].unique().to_pylist()}
        prediction = json.loads((folder / "prediction.json").read_text())
        facts = {name: [(title, n) for title, n in of] for name, of in prediction["sp"].items()}
        titles = json.loads((folder / "titles.json").read_text())
        measured = {"": measure_facts(gold, facts, titles)}
        if self.has_answers:
            both = measure_facts(gold, facts, titles, prediction["answer"])
            names = [name for name in both.column_names if name not in measured[""].column_names]
            measured[ANSWERS] = both.select(["question_id", *names])
        counts, content = count_table(rows), context.outputs(self.table)["fingerprint"]
        results = {}
        for name, values in measured.items():
            means = {m: float(np.mean(values[m])) for m in values.column_names[1:]}
            results[name] = EvaluationResult(
                means, values, counts, spec.question_filter, "pessimistic", "label", content
            )
        return save_evaluations(results, context.output)


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: tables by passages, rankers, their rankings and selected facts."""
    experiment, tables = start_experiment(recipe, data_dirs)
    passages = _passage_tables(recipe, tables)
    for name, table in passages.items():
        experiment.add(f"tables/{name}-passages", table)
    rankers = trained_rankers(recipe, tables, table_checks(recipe, tables), passages)
    for (name, seed), ranker in rankers.items():
        experiment.add(f"rankers/{name}-seed{seed}", ranker)
        for test in recipe.tests:
            experiment.compare(test, name, seed, evaluation(recipe, ranker, tables[test]))
        run, exits = recipe.runs[name], recipe.exits_of(name)
        kind: ScoreKind = "passages" if isinstance(run.loss, TwoInOneLoss) else "score"
        drop_ratio = recipe.drop_ratio if exits else None
        has_answers = recipe.extracts_answers(name)
        config = replace(recipe.fact_selection, score_source=recipe.rule(run))
        for test in recipe.fact_selection_tests:
            scored = tables[recipe.passage_tables.get(name, test)]
            scores = TableScores(ranker, scored, kind, drop_ratio=drop_ratio)
            selection = FactSelection(tables[test], scores, config, len(exits))
            experiment.add(f"selections/{name}-seed{seed}-{test}", selection)
            facts = FactEvaluation(selection, tables[test], has_answers)
            experiment.compare(test, name, seed, facts)
            if has_answers:
                experiment.compare(f"{test}{ANSWERS}", name, seed, facts, ANSWERS)
    return experiment


def _passage_tables(recipe: Recipe, tables: Mapping[str, Stage]) -> dict[str, Stage]:
    """Returns the tables by passages of joint models, balanced if they are trained on."""
    joint = [run for run in recipe.runs.values() if isinstance(run.loss, TwoInOneLoss)]
    watched = {run.dev or recipe.dev for run in joint}
    watched |= set(recipe.tests) if recipe.plot_learning_curves and joint else set()
    trained = dict.fromkeys(name for run in joint for name in run.train)
    names = {n: recipe.balance_passages and recipe.passages_of(n) != "single" for n in trained}
    names |= dict.fromkeys(sorted(watched), False)
    return {name: PassageTable(tables[name], balance) for name, balance in names.items()}


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the reports of rankings, facts and answers, and how consistent joint models are."""
    evaluations = finished.evaluations()
    for test in [test for test in evaluations if test.endswith(ANSWERS)]:
        systems = evaluations.pop(test)
        preferred = [recipe.against(test), recipe.against(test.removesuffix(ANSWERS)), *systems]
        baseline = next(str(name) for name in preferred if name in systems)
        write_reports(replace(recipe, baseline=baseline), finished, {test: systems})
    write_reports(recipe, finished, evaluations)
    selections = finished.named("selections/").items()
    gaps = {name: finished.outputs(stage)["gap"] for name, stage in selections}
    rows = [
        (name, f"{gap:.3f}", str(recipe.published_gaps.get(name.rpartition("-seed")[0], "")))
        for name, gap in gaps.items()
        if gap is not None
    ]
    columns = ("system", "mean distance of passage and best sentence", "as printed")
    finished.write("consistency.md", markdown_table(columns, rows))


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
