"""Stages of cascades: replays of stored scores, the search for drop ratios, times, margins."""

from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import torch

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.distributed.score import read_scores
from as2ray.errors import ConfigError
from as2ray.evaluation.measures import evaluate
from as2ray.experiments.cascades import (
    CascadeExits,
    CascadeReplayEvaluation,
    DropSearch,
    DropSearchConfig,
    RankerCascade,
    RankingTime,
    ReplayEvaluation,
    SearchedReplay,
    SequentialRanker,
    iter_systems,
)
from as2ray.experiments.rankers import RANKER, TableEvaluation, TableScores, TrainedRanker
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import read_table, write_table
from as2ray.training.cascade_config import CascadeConfig
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec

MEASURES = ("AP", "RR")


@dataclass(frozen=True, eq=False)
class Candidates(Stage):
    """A table that `tiny` generates."""

    num_questions: int
    seed: int = 0

    def run(self, context):
        rows = tiny.candidates(self.num_questions, each=7, seed=self.seed)
        return write_table(tiny.with_distinct_questions(rows), context.output)


@dataclass(frozen=True, eq=False)
class Checkpoint(Stage):
    """A ranker of random weights, with or without exits."""

    path: str
    exit_layers: tuple[int, ...] = ()

    def run(self, context):
        settings = {"exit_layers": self.exit_layers} if self.exit_layers else {}
        ranker = init_ranker(self.path, max_length=32, **settings)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weights in ranker.parameters():
                weights.add_(torch.randn(weights.shape, generator=generator) * 0.2)
        save(ranker, context.output / RANKER)


@dataclass(frozen=True, eq=False)
class WithoutAnswer(Candidates):
    """Candidates of which the first question has no answer."""

    def run(self, context):
        rows = tiny.candidates(self.num_questions, each=7)
        labels = np.where(np.arange(rows.num_rows) < 7, 0, rows["label"].to_numpy())
        return write_table(rows.set_column(4, rows.field("label"), [labels]), context.output)


TABLE = Candidates(9)


@pytest.fixture
def path(checkpoint) -> str:
    return str(checkpoint("bert", None))


@pytest.fixture
def scores(path) -> TableScores:
    """Scores of all exits of a cascade."""
    return TableScores(Checkpoint(path, (1, 2, 3)), TABLE, "exits", "no_all_negative")


def test_systems_are_each_exit_but_the_last_and_each_drop_ratio():
    assert list(iter_systems("c", (2, 4, 6), (0.0, 0.25))) == [
        ("c, exit 2", [0], 0.0),
        ("c, exit 4", [1], 0.0),
        ("c, drop 0", [0, 1, 2], 0.0),
        ("c, drop 0.25", [0, 1, 2], 0.25),
    ]


def test_replay_measures_exits_and_drop_ratios_by_stored_scores(complete, scores):
    replay = ReplayEvaluation(scores, "c", (1, 2, 3), (0.0, 0.5), MEASURES)
    outputs, folder = complete(replay)
    stored, rows = read_scores(complete(scores)[1]), read_table(complete(TABLE)[1])
    found = outputs["evaluations"]
    assert list(found) == ["c, exit 1", "c, exit 2", "c, drop 0", "c, drop 0.5"]
    for name, exit_layer in (("c, exit 1", "1"), ("c, exit 2", "2"), ("c, drop 0", "3")):
        expected = evaluate(rows, stored[exit_layer].to_numpy(), MEASURES)
        assert found[name]["measures"] == expected.measures
        assert found[name]["question_filter"] == "no_all_negative"
        assert outputs["points"][name]["measures"]["AP"] == expected.measures["AP"]
    layers = {name: point["relative_layers"] for name, point in outputs["points"].items()}
    assert layers["c, drop 0"] == 1.0
    assert layers["c, exit 1"] == pytest.approx(1 / 3)
    assert layers["c, drop 0.5"] == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert (folder / "questions-3.parquet").is_file()
    # Of seven candidates a third is dropped: two, or by the nearest number three.
    points = [
        complete(ReplayEvaluation(scores, "c", (), (0.36,), MEASURES, *rounding))[0]["points"]
        for rounding in ((), ("floor",), ("nearest",))
    ]
    assert list(points[0]) == ["c, drop 0.36"]
    assert points[0] == points[1]
    costs = [each["c, drop 0.36"]["relative_flops"] for each in points]
    assert costs[2] < costs[1]


def test_search_without_trials_chooses_the_cheapest_point_of_the_grid(complete, scores):
    search = DropSearch(scores.ranker, scores, DropSearchConfig(max_map_loss=1.0, num_trials=0))
    outputs, folder = complete(search)
    assert outputs["chosen"]["exit_layers"] == [1, 2, 3]
    # Of three candidates 0.4 drops one, as 0.6 does.
    assert outputs["chosen"]["drop_ratios"] == [0.6, 0.4]
    assert outputs["undropped"]["drop_ratios"] == [0.0, 0.0]
    assert outputs["chosen"]["relative_flops"] < outputs["undropped"]["relative_flops"]
    ranker = load(folder / RANKER, device="cpu")
    assert (ranker.exit_layers, list(ranker.drop_ratios)) == ((1, 2, 3), [0.6, 0.4])
    assert ranker.rounding == "floor"
    lines = (folder / "pareto.md").read_text().splitlines()
    assert lines[0] == "| exits | drop ratios | dev MAP | operations |  |"
    [chosen] = [line for line in lines if line.endswith("chosen |")]
    flops, quality = outputs["chosen"]["relative_flops"], outputs["chosen"]["measures"]["AP"]
    assert chosen == (f"| 1, 2, 3 | 0.60, 0.40 | {quality:.4f} | {100 * flops:.1f} % | chosen |")
    assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")

    # On the table on which it was chosen, the point is the same again.
    replayed, _ = complete(SearchedReplay(scores, search, MEASURES))
    assert replayed["point"] == outputs["chosen"]
    evaluation = replayed["evaluations"][""]
    assert evaluation["measures"] == {m: outputs["chosen"]["measures"][m] for m in MEASURES}
    assert evaluation["question_filter"] == "no_all_negative"

    # A loss of nothing leaves out what loses quality, and the saved ranker drops as it is told.
    exact = DropSearch(scores.ranker, scores, DropSearchConfig(0.0, 0), "nearest")
    outputs, folder = complete(exact)
    assert outputs["chosen"]["measures"]["AP"] >= outputs["undropped"]["measures"]["AP"]
    assert load(folder / RANKER, device="cpu").rounding == "nearest"


def test_search_plots_each_measure_over_both_costs(complete, scores, monkeypatch):
    drawn = {}

    def draw(panels, title, path):
        drawn.update(panels=panels, title=title)

    monkeypatch.setattr("as2ray.evaluation.plots.pareto_plot", draw)
    complete(DropSearch(scores.ranker, scores, DropSearchConfig(num_trials=0)))
    panels = drawn["panels"]
    assert drawn["title"] == "Exits and drop ratios"
    assert [row[0].x_label for row in panels] == [
        "layers, % of the whole encoder's",
        "operations, % of the whole encoder's",
    ]
    assert [panel.y_label for panel in panels[0]] == [
        f"{measure} (dev)" for measure in ("AP", "RR", "P@1", "nDCG@10")
    ]
    panel = panels[0][0]
    assert list(panel.series) == ["grid"]
    assert len(panel.series["grid"]) == 36
    assert list(panel.marks) == ["drop 0.3", "drop 0.4", "drop 0.5"]
    assert panel.marks["drop 0.5"][0] == pytest.approx(100 * (1 + 0.5 + 0.25) / 3)
    assert panel.front[-1][0] <= 100.0
    assert [x for x, _ in panel.front] == sorted(x for x, _ in panel.front)


@pytest.fixture
def runs(path) -> list[TrainedRanker]:
    """Training runs of one and of three layers."""
    training = TrainingConfig(epochs=1, global_batch_size=64, precision="fp32")
    models = [ModelSpec(path, max_length=32, num_layers=n) for n in (1, 3)]
    return [TrainedRanker(model, (TABLE,), TABLE, training) for model in models]


def test_sequential_ranker_has_its_members_in_order_of_depth(complete, runs):
    _, folder = complete(SequentialRanker(tuple(runs)))
    ranker = load(folder / RANKER, device="cpu")
    assert ranker.exit_layers == (1, 3)
    rows = read_table(complete(TABLE)[1])
    texts = rows["question"].to_pylist(), rows["candidate"].to_pylist()
    for stage, run in enumerate(runs):
        member = load(complete(run)[1] / RANKER, device="cpu")
        expected = member.predict_table(rows).scores
        np.testing.assert_allclose(ranker.predict_exits(*texts)[:, stage], expected, atol=1e-5)
    scores = TableScores(SequentialRanker(tuple(runs)), TABLE, "exits")
    outputs, _ = complete(ReplayEvaluation(scores, "s", (), (0.0, 0.5), MEASURES))
    assert list(outputs["points"]) == ["s, drop 0", "s, drop 0.5"]
    # Each member starts from the embeddings.
    assert outputs["points"]["s, drop 0.5"]["relative_layers"] == pytest.approx((1 + 3 * 0.5) / 3)


@pytest.mark.parametrize("order", [(1, 0), (0, 0)])
def test_sequential_ranker_of_members_that_do_not_grow_is_refused(runs, order):
    stage = SequentialRanker(tuple(runs[i] for i in order))
    with pytest.raises(ConfigError, match="every ranker needs more layers than the one before"):
        stage.check({})
    SequentialRanker(tuple(runs)).check({})


@pytest.mark.parametrize(
    "settings",
    [{"drop_ratios": (0.3,)}, {"max_loss": 0.4}, {"max_loss": 0.4, "use_bm25": False}],
)
def test_cascade_of_a_ranker_ranks_as_its_replay_says(complete, path, settings):
    config = CascadeConfig(epochs=2, **settings)
    ranker, tuning, dev = Checkpoint(path), Candidates(40, 1), Candidates(30, 2)
    exits = CascadeExits(ranker, tuning, config.without_bound(), dev)
    cascade = RankerCascade(exits, ranker, tuning, config, dev)
    outputs, folder = complete(cascade)
    made = load(folder / RANKER, device="cpu")
    assert outputs["shape"]["exit_layers"] == list(made.exit_layers)
    assert outputs["shape"]["num_layers"] == len(made.encoder)
    assert complete(exits)[0]["shape"]["exit_layers"] == [1, 2, 3]
    assert list(made.drop_ratios) == list(outputs["drop_ratios"])
    assert (outputs["margins"] is None) == ("drop_ratios" in settings)
    assert outputs["bm25_margin"] == made.bm25_margin
    if "use_bm25" in settings:
        assert made.bm25_margin is None
        assert not any(outputs["bm25_weights"].values())
    replayed, _ = complete(
        CascadeReplayEvaluation(TableScores(exits, TABLE, "exits"), cascade, MEASURES)
    )
    ranked, _ = complete(TableEvaluation(TableScores(cascade, TABLE), MEASURES))
    assert replayed["evaluations"][""]["measures"] == pytest.approx(
        ranked["evaluations"][""]["measures"]
    )
    layers = list(made.exit_layers)
    with_bm25 = layers if made.bm25_margin is None else [0, *layers]
    assert replayed["point"]["exit_layers"] == with_bm25
    assert 0 < replayed["point"]["relative_flops"] <= 1.01


def test_replays_under_a_filter_are_of_the_same_table_as_evaluations(complete, path):
    table, ranker = WithoutAnswer(9), Checkpoint(path, (1, 2, 3))
    scores = TableScores(ranker, table, "exits", "clean")
    search = DropSearch(ranker, scores, DropSearchConfig(num_trials=0))
    stages = (
        TableEvaluation(TableScores(ranker, table, question_filter="clean"), MEASURES),
        ReplayEvaluation(scores, "c", (1, 2, 3), (0.0,), MEASURES),
        SearchedReplay(scores, search, MEASURES),
    )
    evaluations = [complete(stage)[0]["evaluations"].values() for stage in stages]
    fingerprints = {each["fingerprint"] for values in evaluations for each in values}
    assert fingerprints == {complete(table)[0]["fingerprint"]}


def test_times_are_of_the_first_pairs_at_each_drop_ratio(complete, path):
    ranker = Checkpoint(path, (1, 2, 3))
    outputs, _ = complete(RankingTime(ranker, TABLE, (None, 0.5), num_pairs=14))
    assert outputs["exit_layers"] == [1, 2, 3]
    own, half = outputs["savings"]
    assert (own["drop_ratios"], half["drop_ratios"]) == ([0.0, 0.0], [0.5, 0.5])
    assert half["relative_layers"] == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert half["relative_flops"] < own["relative_flops"]
    assert isinstance(half["speedup"], str)
    # Of seven candidates each of two questions drops three, or by the nearest number four.
    nearest, _ = complete(RankingTime(ranker, TABLE, (0.5,), num_pairs=14, rounding="nearest"))
    assert nearest["savings"][0]["relative_flops"] != half["relative_flops"]
