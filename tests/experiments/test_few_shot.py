"""Stages of few-shot training: epochs, samples, mixtures, interpolated rankers."""

from dataclasses import dataclass

import pytest
import tiny
import torch
from pydantic import ValidationError

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.corpora.sampling import sample_questions
from as2ray.distributed.score import read_scores
from as2ray.errors import ConfigError
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.score_mixing import best_bm25_weight, mix_scores
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.few_shot import (
    BM25Weight,
    FewShotConfig,
    InterpolatedRanker,
    MixedScores,
    SampledTable,
    max_questions,
)
from as2ray.experiments.indexes import CandidateIndex
from as2ray.experiments.rankers import RANKER, TableScores
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.retrieved import BM25Run, BM25Scores, RetrievedTable
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import PreparedTable, read_table, sample_rows, write_table
from as2ray.tables.parquet import ParquetTable


@dataclass(frozen=True, eq=False)
class Candidates(Stage):
    """A table that `tiny` generates."""

    num_questions: int
    seed: int = 0

    def run(self, context):
        return write_table(tiny.candidates(self.num_questions, seed=self.seed), context.output)


@dataclass(frozen=True, eq=False)
class Checkpoint(Stage):
    """A ranker of a checkpoint."""

    path: str

    def run(self, context):
        save(load(self.path, device="cpu"), context.output / RANKER)
        return {"shape": {"num_layers": 3}, "parameters": 7}


@pytest.fixture
def rankers(checkpoint):
    return [Checkpoint(str(checkpoint("bert", 2, initializer_range=size))) for size in (0.2, 0.3)]


def test_epochs_fall_from_32_on_32_questions():
    config, sizes = FewShotConfig(), (8, 32, 128, 512, 2_048, 100_000)
    assert [config.num_epochs(n) for n in sizes] == [32, 32, 16, 8, 4, 1]
    assert FewShotConfig(epoch_decay=1.0, min_epochs=2).num_epochs(512) == 2
    assert FewShotConfig(num_samples=5, epochs=9).epochs_rule == FewShotConfig(epochs=9).epochs_rule


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_questions": ()},
        {"num_questions": (0,)},
        {"num_samples": 0},
        {"epoch_decay": -1.0},
        {"interpolation_weights": ()},
        {"interpolation_weights": (0.5, 1.5)},
    ],
)
def test_impossible_protocol_is_refused(wrong):
    with pytest.raises(ValidationError):
        FewShotConfig(**wrong)


def test_nested_samples_hold_the_smaller_ones_and_independent_ones_do_not():
    table = tiny.candidates(60)

    def drawn(size: int, nested: bool) -> set[str]:
        return set(sample_questions(table, size, seed=4, nested=nested)["question_id"].to_pylist())

    assert drawn(8, True) < drawn(20, True) < drawn(40, True)
    assert len(drawn(20, True)) == 20
    assert not drawn(8, False) < drawn(20, False)


def test_sample_is_a_stage_with_some_questions(complete):
    outputs, folder = complete(SampledTable(Candidates(12), 5, 3, nested=True))
    expected = sample_questions(tiny.candidates(12), 5, None, 3, True)
    assert outputs["counts"]["num_questions"] == 5
    assert read_table(folder).equals(expected)


def test_sample_reads_the_texts_of_its_own_rows_only(tmp_path, monkeypatch):
    table, reads = tiny.candidates(40, each=6), []
    take = ParquetTable.take

    def count(files, rows, columns):
        reads.append((len(rows), "candidate" in columns))
        return take(files, rows, columns)

    monkeypatch.setattr(ParquetTable, "take", count)
    folder = tiny.write_corpus(tmp_path / "table", table)
    sample = sample_rows(folder, 5, 2, seed=3, nested=True)
    assert sample.equals(sample_questions(table, 5, 2, 3, True))
    assert reads == [(240, False), (sample.num_rows, True)]


def test_sample_is_refused_before_anything_runs_if_the_size_of_its_table_is_known(complete):
    published = PreparedTable(TableSpec("wikiqa", "train"))
    assert max_questions(published, {}) == 2_118
    limited = PreparedTable(TableSpec("wikiqa", "train", num_questions=50))
    assert max_questions(limited, {}) == 50
    assert max_questions(PreparedTable(TableSpec("squad", "train", num_questions=9)), {}) == 9
    index = CandidateIndex((limited,), BM25Grid(limited, ()))
    assert max_questions(RetrievedTable(BM25Run(limited, index, 5), True), {}) == 50
    assert max_questions(Candidates(4), {}) is None
    SampledTable(limited, 50, 0, False).check({})
    with pytest.raises(ConfigError, match="has 51, but the target has at most 50"):
        SampledTable(limited, 51, 0, False).check({})


def test_sample_of_a_table_of_unknown_size_is_refused_once_the_table_is_there(complete):
    for _ in range(2):  # The second time, the table is stored before anything starts.
        with pytest.raises(ConfigError, match="has 5, but the target has at most 4"):
            complete(SampledTable(Candidates(4), 5, 0, False))


def test_mixture_has_the_weight_that_dev_likes_best(complete, rankers):
    dev, test = Candidates(12, 1), Candidates(9, 2)
    grid = BM25Grid(dev, ((0.9, 0.4),))
    tuned = {t: TableScores(rankers[0], t, question_filter="clean") for t in (dev, test)}
    bm25 = {t: BM25Scores(t, grid, "clean") for t in (dev, test)}
    weight = BM25Weight(tuned[dev], bm25[dev], "RR")
    mixed = MixedScores(test, "clean", tuned[test], bm25[test], weight)
    scores = read_scores(complete(mixed)[1])["score"].to_numpy()
    stored = {
        t: [read_scores(complete(each[t])[1])["score"].to_numpy() for each in (tuned, bm25)]
        for t in (dev, test)
    }
    # All candidates of every question are either positive or negative here, so none is filtered.
    best = best_bm25_weight(tiny.candidates(12, seed=1), *stored[dev], "RR")
    assert complete(weight)[0]["bm25_weight"] == best > 0
    assert scores.tolist() == mix_scores(tiny.candidates(9, seed=2), *stored[test], best).tolist()


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_single_weight_is_taken_whatever_dev_says(complete, rankers, weight):
    tuned, start = rankers
    stage = InterpolatedRanker(tuned, start, Candidates(4, 6), "RR", "raw", (weight,))
    outputs, folder = complete(stage)
    assert outputs["start_weight"] == weight
    assert (outputs["shape"], outputs["parameters"]) == ({"num_layers": 3}, 7)
    own, other = (load(each.path, device="cpu").state_dict() for each in rankers)
    for name, values in load(folder / RANKER, device="cpu").state_dict().items():
        assert torch.allclose(values, torch.lerp(own[name], other[name], weight))


def test_interpolated_ranker_is_the_nearest_to_the_trained_one_of_equals(complete, rankers):
    tuned, _ = rankers
    stage = InterpolatedRanker(tuned, tuned, Candidates(4, 6), "RR", "raw", (0.5, 0.0, 1.0))
    assert complete(stage)[0]["start_weight"] == 0.0


def test_interpolated_ranker_is_where_dev_likes_it_best(complete, rankers):
    tuned, start = rankers
    stage = InterpolatedRanker(tuned, start, Candidates(20, 6), "RR", "raw", (0.0, 1.0))
    outputs, folder = complete(stage)

    def quality(path):
        dev = tiny.candidates(20, seed=6)
        return evaluate(dev, load(path).predict_table(dev).sort_keys, ["RR"]).measures["RR"]

    expected = {0.0: quality(tuned.path), 1.0: quality(start.path)}
    assert outputs["dev"] == pytest.approx({str(k): v for k, v in expected.items()})
    assert expected[outputs["start_weight"]] == max(expected.values())
    assert quality(folder / RANKER) == pytest.approx(max(expected.values()))
