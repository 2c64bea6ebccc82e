"""Passes of whole questions, and the settings of rankers of several stages."""

import numpy as np
import pytest

from as2ray.cascade.margins import Margins
from as2ray.checkpoints.initialization import init_ranker
from as2ray.models.multi_stage import _split_into_passes


def split(lengths, question_index, max_pass_tokens):
    passes = _split_into_passes(np.array(lengths), np.array(question_index), max_pass_tokens)
    return [rows.tolist() for rows in passes]


@pytest.mark.parametrize(
    ("max_pass_tokens", "expected"),
    [
        (1, [[1, 3], [0, 2], [4]]),
        (12, [[1, 3], [0, 2], [4]]),
        (13, [[1, 3], [0, 2, 4]]),  # a pass may be as large as the budget
        (16, [[1, 3, 0, 2], [4]]),
        (19, [[1, 3, 0, 2], [4]]),
        (20, [[1, 3, 0, 2, 4]]),
    ],
)
def test_pass_has_whole_questions_up_to_its_budget(max_pass_tokens, expected):
    lengths, question_index = [4, 2, 5, 5, 4], [1, 0, 1, 0, 2]
    assert split(lengths, question_index, max_pass_tokens) == expected


def test_no_rows_have_no_pass():
    assert split([], [], 10) == []


@pytest.fixture
def cascade(checkpoint):
    return init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 2, 3])


def test_ratios_of_a_request_replace_those_of_the_checkpoint_and_its_margins(cascade):
    cascade.drop_ratios = [0.25, 0.5]
    resolved = cascade.resolve_pruning(None, 2)
    assert resolved.drop_ratios.tolist() == [[0.25, 0.5]] * 2
    assert np.isinf(resolved.margins).all()
    given = cascade.resolve_pruning(0.75, 1)
    assert given.drop_ratios.tolist() == [[0.75, 0.75]]
    assert cascade.resolve_pruning(given, 9) is given
    cascade.rounding = "nearest"
    cascade.margins = Margins((1.0, 2.0), top_k=3)
    resolved = cascade.resolve_pruning(None, 2)
    assert (resolved.margins.tolist(), resolved.top_k, resolved.rounding) == (
        [[1.0, 2.0]] * 2,
        3,
        "nearest",
    )
    assert resolved.drop_ratios.tolist() == [[0.0, 0.0]] * 2
    given = cascade.resolve_pruning(0.5, 1)
    assert np.isinf(given.margins).all()
    assert given.rounding == "nearest"


def test_setting_ratios_or_margins_removes_what_was_set_for_others(cascade):
    assert (cascade.margins, cascade.bm25_margin, cascade.rounding) == (None, None, "floor")
    assert cascade.bm25_weights == (0.0, 0.0, 0.0)
    assert not cascade.uses_bm25
    cascade.margins = Margins((1.0, 2.0))
    cascade.bm25_margin, cascade.bm25_weights = 0.5, (0.1, 0.2)
    assert cascade.bm25_weights == (0.1, 0.2, 0.0)
    assert cascade.uses_bm25
    assert cascade.margins == Margins((1.0, 2.0))
    cascade.margins = Margins((3.0, 4.0))
    assert (cascade.bm25_margin, cascade.uses_bm25) == (None, False)
    cascade.drop_ratios = 0.5
    assert (cascade.margins, cascade.drop_ratios) == (None, [0.5, 0.5])
    cascade.bm25_margin = 1.0
    assert cascade.uses_bm25
    assert cascade.checkpoint_settings()["drop_ratios"] == [0.5, 0.5]
    assert cascade.checkpoint_settings()["bm25_margin"] == 1.0


def test_bm25_selects_by_its_margin_and_the_number_of_the_margins(cascade):
    question, candidates = "who wrote", ["who wrote it", "she wrote", "rain falls"]
    assert cascade.select_by_bm25(question, candidates) is None
    cascade.bm25_weights = (0.5, 0.5)
    assert cascade.select_by_bm25(question, candidates).enters.all()
    cascade.bm25_margin = 0.0
    assert cascade.select_by_bm25(question, candidates).enters.tolist() == [True, False, False]
    cascade.margins = Margins((1.0, 2.0), top_k=2)
    cascade.bm25_margin = 0.0
    assert cascade.select_by_bm25(question, candidates).enters.tolist() == [True, True, False]
