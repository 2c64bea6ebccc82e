"""What a cascade is compared with: cut layers, and stored similarities before it."""

from dataclasses import replace

import numpy as np
import pytest
import tiny

from as2ray.cascade.time_plan import NOT_SCORED
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.errors import EvaluationError
from as2ray.tables.schema import question_indices
from benchmarks import ranking
from benchmarks.ranking_stages import CutRanker, SimilarityStage, split_by_question

TABLE = tiny.with_distinct_questions(tiny.candidates(40, each=7))
PAIRS = TABLE["question"].to_pylist(), TABLE["candidate"].to_pylist()
QUESTION_INDEX = question_indices(TABLE)


@pytest.fixture(scope="module")
def cascade(checkpoint):
    return init_ranker(checkpoint("bert", None), exit_layers=[1, 3], max_length=60).eval()


@pytest.fixture(scope="module")
def stage(cascade, sentence_encoder) -> SimilarityStage:
    encoder = load_sentence_encoder(sentence_encoder, dtype="fp32", device="cpu")
    return SimilarityStage.from_texts(cascade, encoder, PAIRS[1])


def test_cut_ranker_scores_as_the_exit_and_drops_nothing(cascade):
    staged = CutRanker(cascade, 0).predict_pairs(*PAIRS, QUESTION_INDEX)
    np.testing.assert_allclose(staged.scores, cascade.predict_exits(*PAIRS)[:, 0], atol=0.01)
    assert staged.stage_index is None


def test_dropped_candidates_stay_below_in_the_order_of_their_similarity(stage, cascade):
    everything = stage.predict_pairs(*PAIRS, QUESTION_INDEX)
    expected = cascade.predict_pairs(*PAIRS, QUESTION_INDEX)
    np.testing.assert_array_equal(everything.scores, expected.scores)
    staged = replace(stage, max_gap=0.0).predict_pairs(*PAIRS, QUESTION_INDEX)
    similarities = stage.measure_similarities(*PAIRS, QUESTION_INDEX)
    assert np.mean(staged.stage_index == NOT_SCORED) > 0.5
    for rows in split_by_question(QUESTION_INDEX):
        scored = rows[staged.stage_index[rows] != NOT_SCORED]
        assert set(similarities[scored]) == {similarities[rows].max()}
        by_rank = rows[np.argsort(-staged.sort_keys[rows], kind="stable")]
        assert np.all(np.diff(similarities[by_rank]) <= 1e-6)  # as far as float32 tells


def test_gap_is_the_least_one_whose_loss_is_bounded(stage, cascade):
    firsts = cascade.predict_pairs(*PAIRS, QUESTION_INDEX).sort_keys

    def mean_loss(max_gap: float) -> float:
        keys = replace(stage, max_gap=max_gap).predict_pairs(*PAIRS, QUESTION_INDEX).sort_keys
        losses = []
        for rows in split_by_question(QUESTION_INDEX):
            first = rows[np.argmax(firsts[rows])]
            losses.append(1 - 1 / (1 + np.sum(keys[rows] > keys[first])))
        return (np.sum(losses) + 1) / (len(losses) + 1)

    bounded = stage.with_bounded_loss(TABLE, 0.3)
    assert 0 < bounded.max_gap < np.inf
    assert mean_loss(bounded.max_gap) <= 0.3 < mean_loss(0.0)
    assert stage.with_bounded_loss(TABLE, 0.1).max_gap >= bounded.max_gap
    with pytest.raises(EvaluationError, match="needs 99 questions"):
        stage.with_bounded_loss(TABLE, 0.01)


def test_profile_times_each_step_and_counts_what_it_leaves(stage):
    profile = replace(stage, max_gap=0.05).profile(*PAIRS, QUESTION_INDEX)
    staged = replace(stage, max_gap=0.05).predict_pairs(*PAIRS, QUESTION_INDEX)
    assert profile["left by BM25"] == np.sum(staged.stage_index != NOT_SCORED) / 40
    assert profile["left by BM25"] <= profile["left by similarity"] < 7
    assert min(profile[step] for step in ("similarity", "BM25", "tokens", "layers")) > 0


@pytest.mark.parametrize("max_loss", ["0", "1", "-0.1"])
def test_bound_outside_of_its_range_is_refused_before_anything_runs(max_loss, capsys):
    with pytest.raises(SystemExit, match="2"):
        ranking.main(["--max_loss", max_loss])
    assert f"must be above 0 and below 1, not {max_loss}" in capsys.readouterr().err
