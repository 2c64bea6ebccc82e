import json
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import tiny
import torch

from as2ray.cascade.margins import Margins
from as2ray.cascade.pruning import Pruning, log_odds
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError, ConfigError, EvaluationError
from as2ray.evaluation.margin_path import fit_margins
from as2ray.evaluation.measures import evaluate
from as2ray.models.calibration import Calibration
from as2ray.models.encoder import encoder as encoder_module
from as2ray.models.encoder.packed_attention import ATTENTION_IMPLEMENTATION
from as2ray.models.ranker import Ranker
from as2ray.tables.schema import question_indices
from as2ray.text.bm25 import list_probabilities
from as2ray.training import frozen_cascade
from as2ray.training.cascade_config import CascadeConfig
from as2ray.training.frozen_cascade import (
    choose_margins,
    held_out_questions,
    make_cascade,
    train_exits,
)
from as2ray.training.run_job import train

QUESTION = "What is kovarin?"
CONFIG = CascadeConfig(max_loss=0.2, epochs=4, learning_rate=5e-3, use_bm25=False)
TABLE = tiny.with_distinct_questions(tiny.candidates(60, each=7))
CANDIDATES = TABLE["candidate"].to_pylist()[:18]
ALL = {"drop_ratios": 0.0}
OTHERS = tiny.with_distinct_questions(tiny.candidates(30, each=7, seed=5))


def loaded(folder) -> Ranker:
    return load(folder, dtype="fp32", max_length=60, device="cpu")


@pytest.fixture(scope="module")
def monolith(checkpoint):
    return loaded(checkpoint("bert"))


@pytest.fixture(scope="module")
def cascade(monolith):
    made = make_cascade(monolith, TABLE, calibration_table=OTHERS, config=CONFIG)
    made.margins = Margins((0.5,) * (len(made.exit_layers) - 1), 1, made.margins.bound)
    return made


def test_questions_of_the_report_are_those_held_out_or_all_where_ratios_drop():
    by_ratios = held_out_questions(TABLE, None, CascadeConfig(drop_ratios=(0.5,)))
    assert by_ratios.num_rows == TABLE.num_rows
    assert 0 < held_out_questions(TABLE, None, CONFIG).num_rows < TABLE.num_rows
    assert held_out_questions(TABLE, OTHERS, CONFIG).num_rows == OTHERS.num_rows


@pytest.mark.parametrize(("labels", "dtype"), [(2, "fp32"), (1, "bf16")])
def test_nothing_dropped_ranks_bit_for_bit_as_the_ranker(
    checkpoint, family, labels, dtype, tmp_path
):
    ranker = load(checkpoint(family, labels), dtype=dtype, max_length=60, device="cpu")
    config = CascadeConfig(drop_ratios=(0.5,), epochs=1)
    made = make_cascade(ranker, TABLE[:70], tmp_path / "cascade", config=config)
    ranker.max_batch_tokens = 200  # several batches
    expected, table = ranker.rank(QUESTION, CANDIDATES), TABLE[70:210]
    table_scores = ranker.predict_table(table).scores
    for cascade in (made, load(tmp_path / "cascade", dtype=dtype, device="cpu")):
        # Of ModernBERT only global layers, and the last one.
        assert cascade.exit_layers == ((1, 3) if family == "modernbert" else (1, 2, 3))
        cascade.max_batch_tokens = 200
        ranked = cascade.rank(QUESTION, CANDIDATES, drop_ratios=0.0)
        assert [(r.index, r.score) for r in ranked] == [(r.index, r.score) for r in expected]
        assert np.array_equal(cascade.predict_table(table, 0.0).scores, table_scores)
        dropped = cascade.rank(QUESTION, CANDIDATES)
        assert {r.exit_layer for r in dropped} == set(cascade.exit_layers)
        by_index = {r.index: r.score for r in expected}
        assert [r.score for r in dropped if r.exit_layer == 3] == pytest.approx(
            [by_index[r.index] for r in dropped if r.exit_layer == 3], abs=0.02
        )


def test_ranker_whose_packed_scores_are_not_those_of_transformers_is_refused(
    checkpoint, monkeypatch, tmp_path
):
    monkeypatch.setattr(encoder_module, "first_position", lambda _: 0)
    ranker = loaded(checkpoint("roberta", initializer_range=0.3))
    with pytest.raises(CheckpointError, match=r"RobertaForSequenceClassification differ.*padded"):
        make_cascade(ranker, TABLE, tmp_path / "cascade", config=CONFIG)
    assert not (tmp_path / "cascade").exists()
    assert ranker.network.config._attn_implementation == ATTENTION_IMPLEMENTATION
    assert ranker.dtype == "fp32"


def test_ranker_is_not_changed_and_training_follows_its_seed(monolith, cascade):
    before = {name: weights.clone() for name, weights in monolith.state_dict().items()}
    again = make_cascade(monolith, TABLE, calibration_table=OTHERS, config=CONFIG)
    assert all(torch.equal(before[name], w) for name, w in monolith.state_dict().items())
    found, expected = again.state_dict(), cascade.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_exits_learn_the_log_odds_of_the_ranker(monolith):
    config = CascadeConfig(drop_ratios=(0.0,), epochs=40, learning_rate=1e-2)
    cascade = make_cascade(monolith, TABLE, config=config)
    untrained = frozen_cascade._build_cascade(monolith, config)
    texts = (OTHERS["question"].to_pylist(), OTHERS["candidate"].to_pylist())
    scores = cascade.predict_exits(*texts)
    first, _, last = scores.T
    untrained_error = np.abs(untrained.predict_exits(*texts)[:, 0] - last).mean()
    assert np.abs(first - last).mean() < untrained_error / 2
    assert np.corrcoef(first, last)[0, 1] > 0.5


def exit_errors(cascade, ranker) -> np.ndarray:
    """Returns the mean distance of each exit's log-odds from the ranker's."""
    texts = (OTHERS["question"].to_pylist(), OTHERS["candidate"].to_pylist())
    expected = log_odds(ranker.predict_exits(*texts)[:, 0])
    return np.abs(log_odds(cascade.predict_exits(*texts)) - expected[:, None]).mean(0)


def test_joint_training_brings_the_exits_closer_to_the_ranker(monolith):
    settings = {"drop_ratios": (0.0,), "epochs": 4, "learning_rate": 5e-3}
    frozen = make_cascade(monolith, TABLE[:210], config=CascadeConfig(**settings))
    settings |= {"joint_epochs": 4, "joint_learning_rate": 2e-3, "label_weight": 0.0}
    config, before = CascadeConfig(**settings, joint=True), monolith.state_dict()
    before = {name: weights.clone() for name, weights in before.items()}
    joint = make_cascade(monolith, TABLE[:210], config=config)
    errors = exit_errors(joint, monolith)
    assert np.all(errors[:-1] < 0.8 * exit_errors(frozen, monolith)[:-1])
    assert 0 < errors[-1] < errors[0]
    assert (joint.dtype, joint.use_fused_layers) == (monolith.dtype, monolith.use_fused_layers)
    assert all(torch.equal(before[name], w) for name, w in monolith.state_dict().items())


def test_files_of_joint_training_stay_in_the_folder_that_is_given(monolith, tmp_path):
    config = replace(CONFIG, joint=True, joint_epochs=1, max_loss=0.6)
    make_cascade(monolith, TABLE, config=config, scratch=tmp_path / "scratch")
    assert list((tmp_path / "scratch").rglob("*.safetensors"))


@pytest.mark.parametrize(("labels", "label_weight"), [("both", 0.5), ("zero", 0.0)])
def test_joint_training_learns_labels_where_there_are_any(monolith, labels, label_weight):
    table = TABLE[:70]
    if labels == "zero":
        table = table.set_column(4, "label", [np.zeros(70, np.int8)])
    jobs = []

    def train_job(job, folder):
        jobs.append(job)
        return train(job, folder)

    config = CascadeConfig(drop_ratios=(0.5,), epochs=1, joint=True, joint_epochs=1)
    made = make_cascade(monolith, table, config=config, train_job=train_job)
    [job] = jobs
    assert job.loss.alpha == label_weight
    assert list(job.eval_tables) == (["dev"] if labels == "both" else [])  # measures need labels
    assert made.drop_ratios == [0.5, 0.5]


def test_change_of_the_last_exit_is_stored_with_the_bound(monolith, tmp_path):
    config = replace(CONFIG, joint=True, joint_epochs=1, joint_learning_rate=2e-3)
    settings = {"calibration_table": OTHERS, "config": config}
    made = make_cascade(monolith, TABLE, tmp_path / "c", **settings)
    bound = load(tmp_path / "c", device="cpu").margins.bound
    scores = [r.predict_table(OTHERS, **k).scores for r, k in ((monolith, {}), (made, ALL))]
    starts = np.arange(0, OTHERS.num_rows, 7)
    places = [
        1 + np.sum(scores[1][s : s + 7] > scores[1][s + np.argmax(scores[0][s : s + 7])])
        for s in starts
    ]
    assert bound.last_exit_loss == pytest.approx(np.mean(1 - 1 / np.array(places)))
    assert bound.last_exit_loss > 0
    assert "place of the last exit's first" in str(bound)


def test_margins_drop_what_the_replay_says_with_questions_side_by_side(cascade):
    replay = frozen_cascade._score(cascade, OTHERS)
    every = list(range(len(cascade.exit_layers)))
    for top_k, margins in ((1, (0.3, 0.1)), (2, (0.5, 0.5)), (1, (0.0, 0.0))):
        cascade.margins = Margins(margins[: len(every) - 1], top_k)
        expected = replay.rank_by_margins(every, cascade.margins.values, top_k)
        staged = cascade.predict_table(OTHERS)
        np.testing.assert_array_equal(staged.stage_index, expected.stage_index)
        np.testing.assert_allclose(staged.scores, expected.scores, atol=1e-5)
        assert len(set(staged.stage_index.tolist())) > 1
        np.testing.assert_array_equal(cascade.predict_table(OTHERS).scores, staged.scores)
        cascade.max_pass_tokens = 100
        small = cascade.predict_table(OTHERS)
        cascade.max_pass_tokens = 65_536
        np.testing.assert_array_equal(small.stage_index, staged.stage_index)


def test_checkpoint_keeps_margins_and_their_bound(cascade, tmp_path):
    cascade.margins = Margins((0.3,) * (len(cascade.exit_layers) - 1), 2, cascade.margins.bound)
    again = load(save(cascade, tmp_path / "cascade"), dtype="fp32", device="cpu")
    assert again.margins == cascade.margins
    again.drop_ratios = 0.5
    assert again.margins is None
    assert "Infinity" not in (tmp_path / "cascade/config.json").read_text()


def test_bound_says_what_was_fitted(monolith, tmp_path):
    made = make_cascade(monolith, TABLE, tmp_path / "c", calibration_table=OTHERS, config=CONFIG)
    bound = load(tmp_path / "c", device="cpu").margins.bound
    assert (bound.risk, bound.max_loss, bound.num_questions) == ("first_place", 0.2, 30)
    assert (bound.mean_loss * 30 + 1) / 31 <= 0.2
    replay = frozen_cascade._score(made, OTHERS)
    staged = replay.rank_by_margins(list(range(len(made.exit_layers))), made.margins.values)
    assert (staged.stage_index == len(made.exit_layers) - 1).mean() < 1
    assert 0 < bound.relative_flops < 1


@pytest.mark.parametrize("keep_top", [None, 2])
def test_cascade_with_bm25_ranks_as_its_replay_says(monolith, tmp_path, keep_top, monkeypatch):
    # Of a ranker with random weights words tell nothing.
    monkeypatch.setattr(frozen_cascade, "fit_bm25_weights", lambda *_: {1: 3.0, 2: 2.0})
    bound = {"max_loss": 0.5} if keep_top is None else {"keep_top": keep_top, "at_least": 0.1}
    config = replace(CONFIG, use_bm25=True, **bound)
    made = make_cascade(monolith, TABLE, tmp_path / "c", calibration_table=OTHERS, config=config)
    assert sum(made.bm25_weights) >= 2
    weights = dict(zip(made.exit_layers, made.bm25_weights))
    replay = frozen_cascade._score(made, OTHERS).with_bm25(weights)
    assert replay.exit_layers == (0, *made.exit_layers)
    every = list(range(len(replay.exit_layers)))
    assert made.margins.top_k == (keep_top or 1)
    margins = (made.bm25_margin, *made.margins.values)
    expected = replay.rank_by_margins(every, margins, made.margins.top_k)
    staged = load(tmp_path / "c", dtype="fp32", device="cpu").predict_table(OTHERS)
    np.testing.assert_array_equal(staged.stage_index + 1, expected.stage_index)
    scored = staged.stage_index >= 0
    np.testing.assert_allclose(staged.scores[scored], expected.scores[scored], rtol=1e-3)
    assert 0 < np.mean(staged.stage_index < 0) < 1
    flops = replay.measure(every, expected).relative_flops
    assert made.margins.bound.relative_flops == pytest.approx(flops)
    assert (made.margins.bound.mean_loss * 30 + 1) / 31 <= config.bound[0]


def test_exits_are_trained_once_for_several_bounds(monolith, tmp_path):
    exits = train_exits(monolith, TABLE, OTHERS, CONFIG)
    assert (exits.exit_layers, exits.margins) == ((1, 2, 3), None)
    save(exits, tmp_path / "exits")
    num_dropped = []
    for max_loss in (0.04, 0.2, 0.6):
        config = replace(CONFIG, max_loss=max_loss)
        restored = load(tmp_path / "exits", dtype="fp32", device="cpu")
        choose_margins(restored, monolith, TABLE, OTHERS, config)
        if max_loss == 0.2:
            expected = make_cascade(monolith, TABLE, calibration_table=OTHERS, config=config)
            assert restored.margins == expected.margins
            assert restored.exit_layers == expected.exit_layers
        last = len(restored.exit_layers) - 1
        num_dropped.append(int(np.sum(restored.predict_table(OTHERS).stage_index < last)))
    assert num_dropped == sorted(num_dropped)
    assert num_dropped[0] < num_dropped[-1]
    with pytest.raises(EvaluationError, match="needs 199 questions"):
        choose_margins(exits, monolith, TABLE, OTHERS, replace(CONFIG, max_loss=0.005))


def test_ratios_of_a_request_replace_the_margins(cascade):
    cascade.margins = Margins((0.1,) * (len(cascade.exit_layers) - 1))
    assert {r.exit_layer for r in cascade.rank(QUESTION, CANDIDATES, drop_ratios=0.0)} == {3}
    pruning = cascade.resolve_pruning(None, 2)
    assert np.all(pruning.margins == 0.1)
    assert isinstance(pruning, Pruning)
    assert pruning.margins.shape == (2, len(cascade.exit_layers) - 1)


def test_questions_are_divided_by_their_text_and_sampled_whole():
    parts = frozen_cascade._divide(TABLE, None, CascadeConfig(max_loss=0.5, max_train_pairs=70))
    texts = [set(part["question"].to_pylist()) for part in vars(parts).values()]
    assert len(set.union(*texts)) == sum(map(len, texts))
    assert parts.heads.num_rows == parts.path.num_rows == 70
    shared = frozen_cascade._divide(TABLE, TABLE[:210], CONFIG)
    assert not set(shared.heads["question"].to_pylist()) & set(TABLE[:210]["question"].to_pylist())


def test_repeated_question_chooses_the_margins_once():
    ids = [f"again-{id}" for id in OTHERS["question_id"].to_pylist()]
    twice = pa.concat_tables([OTHERS, OTHERS.set_column(0, "question_id", [ids])])
    parts = frozen_cascade._divide(TABLE, twice, CONFIG)
    assert parts.calibration.equals(OTHERS)
    seven = filter_ids(twice, "q0", "q1", "q2", "q3", "again-q0", "again-q1", "again-q2")
    with pytest.raises(EvaluationError, match="but there are 4"):
        frozen_cascade._divide(TABLE, seven, replace(CONFIG, max_loss=0.15))


def filter_ids(table: pa.Table, *ids: str) -> pa.Table:
    return table.filter(pc.is_in(table["question_id"], pa.array(ids)))


def test_all_questions_that_do_not_choose_the_margins_order_them(monolith, monkeypatch):
    replays = []

    def spy(*args):
        replays.extend(args[:2])
        return fit_margins(*args)

    monkeypatch.setattr(frozen_cascade, "fit_margins", spy)
    make_cascade(monolith, TABLE, config=replace(CONFIG, max_loss=0.5))
    ordering, calibration = (set(replay.table["question"].to_pylist()) for replay in replays)
    assert len(ordering) == 45
    assert ordering | calibration == set(TABLE["question"].to_pylist())
    assert not ordering & calibration


def test_calibration_of_the_ranker_is_that_of_every_exit(checkpoint):
    ranker = loaded(checkpoint("bert"))
    ranker.calibrate(TABLE)
    made = make_cascade(ranker, TABLE, calibration_table=OTHERS, config=CONFIG)
    assert made.calibration == ranker.calibration * len(made.exit_layers)
    assert made.threshold == ranker.threshold


def test_exits_with_bm25_in_their_scores_get_probabilities_of_their_own(
    checkpoint, monkeypatch, tmp_path
):
    monkeypatch.setattr(frozen_cascade, "fit_bm25_weights", lambda *_: {1: 40.0, 2: 20.0})
    ranker = loaded(checkpoint("bert"))
    ranker.calibration = (Calibration("temperature", 2.0),)
    config = replace(CONFIG, max_loss=0.5, use_bm25=True)
    cascade = make_cascade(ranker, TABLE, calibration_table=OTHERS, config=config)
    *early, last = cascade.calibration
    assert last == ranker.calibration[0]
    assert len(early) == sum(weight > 0 for weight in cascade.bm25_weights) > 0
    texts = (OTHERS["question"].to_pylist(), OTHERS["candidate"].to_pylist())
    scores = cascade.predict_stage_scores(*texts, question_indices(OTHERS)).T
    expected = last(scores[-1]).mean()
    assert last(scores[0]).mean() < expected - 0.02  # BM25 has lowered them
    for calibration, exit_scores in zip(early, scores):
        assert calibration(exit_scores).mean() == pytest.approx(expected, abs=0.005)
    # Where BM25 has no part in them, with drop ratios, they have the ranker's own calibration.
    assert cascade.plain_calibration == ranker.calibration * len(cascade.exit_layers)
    exits = cascade.predict_exits([QUESTION] * 18, CANDIDATES)
    for found in cascade.rank(QUESTION, CANDIDATES, drop_ratios=0.5):
        score = exits[found.index, cascade.exit_layers.index(found.exit_layer)]
        assert found.score == pytest.approx(last(score), abs=1e-5)
    restored = load(save(cascade, tmp_path / "saved"), dtype="fp32", max_length=60, device="cpu")
    assert restored.plain_calibration == cascade.plain_calibration
    assert restored.rank(QUESTION, CANDIDATES) == cascade.rank(QUESTION, CANDIDATES)
    cascade.calibrate(OTHERS)
    assert cascade.plain_calibration == ()


def answered_by_words() -> pa.Table:
    """Questions whose answer is the candidate with the highest BM25, seven candidates each."""
    labels = np.zeros(TABLE.num_rows, np.int8)
    questions, candidates = TABLE["question"].to_pylist(), TABLE["candidate"].to_pylist()
    for start in range(0, TABLE.num_rows, 7):
        words = list_probabilities(questions[start], candidates[start : start + 7])
        labels[start + np.argmax(words)] = 1
    return TABLE.set_column(4, "label", [labels])


@pytest.mark.parametrize("joint", [False, True])
def test_last_exit_gets_a_part_of_bm25_where_labels_ask_for_it(monolith, tmp_path, joint):
    table = answered_by_words()
    config = replace(CONFIG, max_loss=0.5, use_bm25=True, use_labels=True)
    config = replace(config, joint=joint, joint_epochs=1 if joint else 3)
    with_labels = make_cascade(monolith, table, tmp_path / "c", config=config)
    assert with_labels.bm25_weights[-1] > 1
    restored = load(tmp_path / "c", dtype="fp32", device="cpu")
    assert restored.bm25_weights == with_labels.bm25_weights
    alone, with_bm25 = (evaluate(table, ranker).measures["AP"] for ranker in (monolith, restored))
    assert with_bm25 > alone + 0.1
    # Its first is another one than the ranker's, which the bound says.
    assert with_labels.margins.bound.last_exit_loss > 0.1
    assert "the ranker's first) was" in str(with_labels.margins.bound)
    if not joint:
        unlabelled = make_cascade(monolith, table, config=replace(config, use_labels=False))
        assert unlabelled.bm25_weights[-1] == 0


def test_ranker_with_bm25_needs_no_other_exit(monolith, tmp_path):
    table = answered_by_words()
    settings = {"max_loss": 0.5, "use_bm25": True, "use_labels": True, "exit_layers": (3,)}
    make_cascade(monolith, table, tmp_path / "c", config=replace(CONFIG, **settings))
    restored = load(tmp_path / "c", dtype="fp32", device="cpu")
    assert restored.exit_layers == (3,)
    assert restored.bm25_weights[0] > 1
    assert evaluate(table, restored).measures["AP"] > evaluate(table, monolith).measures["AP"] + 0.1


def refused(problem, kind, *args, **settings):
    with pytest.raises(kind, match=problem):
        make_cascade(*args, **settings)


def test_what_is_no_table_or_configuration_is_refused():
    for wrong in (None, "table.csv", TABLE.to_pandas()):
        refused(r"Arrow table, not \w+(.|\n)*load_table", ConfigError, "model", wrong)
    refused("Arrow table", ConfigError, "model", TABLE, calibration_table="table.csv")
    refused("must be an as2ray.CascadeConfig", ConfigError, "model", TABLE, config={})


def test_what_cannot_become_a_cascade_is_refused_before_it_is_scored(
    monolith, checkpoint, tmp_path
):
    single = TABLE.filter(np.arange(TABLE.num_rows) % 7 == 0)
    refused("none of the 60 questions has two", EvaluationError, monolith, single)
    refused("needs 49 questions .* but there are 15", EvaluationError, monolith, TABLE)
    tight = CascadeConfig(max_loss=0.005)
    refused("needs 199 questions", EvaluationError, monolith, TABLE, config=tight)
    sure = CascadeConfig(max_loss=0.2, high_confidence=True)
    refused("needs 11 questions .* are 10", EvaluationError, monolith, TABLE[: 40 * 7], config=sure)
    first = CascadeConfig(keep_top=1)
    refused("needs 99 questions", EvaluationError, monolith, TABLE, config=first)
    zeros = OTHERS.set_column(4, "label", [np.zeros(OTHERS.num_rows, np.int8)])
    labelled = CascadeConfig(max_loss=0.2, use_labels=True)
    refused(
        "all of 210 labels are 0",
        EvaluationError,
        monolith,
        TABLE,
        calibration_table=zeros,
        config=labelled,
    )
    unlabelled = TABLE.set_column(4, "label", [np.zeros(TABLE.num_rows, np.int8)])
    weighted = replace(CONFIG, joint=True, label_weight=0.5)
    settings = {"calibration_table": OTHERS, "config": weighted}
    refused("labels are 0", EvaluationError, monolith, unlabelled, **settings)
    same = {"calibration_table": TABLE, "config": CONFIG}
    refused("0 questions .* cannot be divided", EvaluationError, monolith, TABLE, **same)
    deep = CascadeConfig(max_loss=0.2, exit_layers=(1, 4))
    refused(r"\[1, 4\] are not ascending", ConfigError, monolith, TABLE, config=deep)
    wrong = CascadeConfig(drop_ratios=(0.1, 0.2, 0.3))
    refused("drop ratios", ConfigError, monolith, TABLE, config=wrong)
    encoder = checkpoint("bert", None)
    refused("no head|classifier", CheckpointError, encoder, TABLE, config=CONFIG)
    made = make_cascade(monolith, TABLE[:70], config=CascadeConfig(drop_ratios=(0.5,), epochs=1))
    refused("CascadeRanker cannot become", CheckpointError, made, TABLE, config=CONFIG)
    (tmp_path / "there").mkdir()
    refused("exists", CheckpointError, monolith, TABLE, tmp_path / "there", config=CONFIG)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_loss": 0},
        {"max_loss": 1},
        {"at_least": 1.0},
        {"at_least": 0.9999},  # without keep_top
        {"exit_layers": (0,)},
        {"label_weight": 0.5},  # without joint
        {"joint_epochs": 2},
        {"joint_learning_rate": 1e-4},
        {"use_labels": True, "drop_ratios": (0.5,)},
        {"keep_top": 3, "drop_ratios": (0.5,)},
        {"max_loss": 0.1, "drop_ratios": (0.5,)},
        {"high_confidence": True, "drop_ratios": (0.5,)},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        CascadeConfig(**settings)


def test_margins_for_another_number_of_exits_are_refused(cascade, tmp_path):
    with pytest.raises(ConfigError, match=r"4 margins for \d exits"):
        cascade.margins = Margins((1.0,) * 4)
    folder = save(cascade, tmp_path / "cascade")
    config = folder / "config.json"
    content = json.loads(config.read_text())
    content["as2ray"]["margins"] = asdict(Margins((1.0,) * 4))
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"4 margins for \d exits"):
        load(folder, device="cpu")
