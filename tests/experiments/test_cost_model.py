"""Sizes, hours and downloads of stages, checked by hand, without data or models."""

import json
import math
from dataclasses import replace

import pytest
from sleeping_stages import Cell

from as2ray.cascade.cost import EncoderShape
from as2ray.checkpoints.packaged import resolve_model_path
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.cascades import CascadeExits, RankerCascade, SequentialRanker
from as2ray.experiments.cost_model import (
    ENCODER_SHAPES,
    MEAN_PAIR_TOKENS,
    START_HOURS,
    Cost,
    DeviceRates,
    _stage_size,
    describe_source,
    device_rates,
    encoder_shape,
    ranker_layers,
    scoring_cost,
    table_pairs,
    table_size,
    training_cost,
)
from as2ray.experiments.few_shot import SampledTable
from as2ray.experiments.indexes import CollectionIndex, CollectionTexts
from as2ray.experiments.pseudo_labels import LabelledTable
from as2ray.experiments.rankers import TableScores, trained_rankers
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec
from as2ray.experiments.retrieved import BM25Run, RetrievedTable
from as2ray.experiments.tables import PreparedTable, table_stages
from as2ray.losses.distillation import DistillationLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig
from as2ray.training.cascade_config import CascadeConfig
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec

TOKENS = MEAN_PAIR_TOKENS["wikiqa"]


def _rankers(model="bert-base-uncased", **runs):
    """Stages of runs on WikiQA's 8,672 pairs of 873 questions, with a dev table of 1,126 pairs."""
    tables = {
        "train": TableSpec("wikiqa", "train", "no_all_negative"),
        "dev": TableSpec("wikiqa", "dev", "clean"),
        "hotpotqa": TableSpec("hotpotqa", "train"),
    }
    names = {"dev": "dev", "tests": ["dev"], "baseline": next(iter(runs)), "seeds": [0]}
    recipe = Recipe("costs", ModelSpec(model), tables, runs=runs, **names)
    stages = table_stages(recipe, {})
    passages = {"hotpotqa": stages["hotpotqa"], "dev": stages["hotpotqa"]}
    rankers = trained_rankers(recipe, stages, passages=passages)
    return [rankers[name, 0] for name in runs]


def test_each_run_has_its_own_seeds_and_weights_of_tables():
    names = {"dev": "dev", "tests": ["dev"], "baseline": "first", "seeds": [0, 1]}
    runs = {
        "first": _run(),
        "second": _run(seeds=[1], train=["train", "other"], train_weights={"other": 2.0}),
        "third": _run(),
    }
    tables = {name: TableSpec("wikiqa", "train") for name in ("train", "other", "dev")}
    recipe = Recipe("seeds", ModelSpec("bert-base-uncased"), tables, runs=runs, **names)
    rankers = trained_rankers(recipe, table_stages(recipe, {}))
    assert list(rankers) == [("first", 0), ("third", 0), *((name, 1) for name in runs)]
    assert rankers["second", 1].train_weights == (1.0, 2.0)
    assert rankers["third", 1].train_weights == ()


def _run(epochs=1, **settings):
    training = {"epochs": epochs, **settings.pop("training", {})}
    return RunSpec(**{"train": ["train"], "training": TrainingConfig(**training), **settings})


def _layer(tokens, hidden=768):
    """Operations of a layer over a pair: 12 hidden^2 weights, and two products of attention."""
    return 24 * tokens * hidden**2 + 4 * tokens**2 * hidden


@pytest.fixture(autouse=True)
def rates():
    """Devices that train 1e12 and score 2e12 operations per second, and copy at once."""
    earlier = dict(device_rates)
    device_rates.clear()
    device_rates[None] = DeviceRates(1e12, 2e12, math.inf)
    yield
    device_rates.clear()
    device_rates.update(earlier)


def test_run_costs_its_epochs_thrice_and_a_validation_after_each():
    (ranker,) = _rankers(only=_run(3, training={"global_batch_size": 20}))
    cost = training_cost(ranker)
    pair = 12 * _layer(TOKENS)
    assert cost.num_updates == 3 * math.ceil(8_672 / 20)
    assert cost.work_hours == pytest.approx(3 * (3 * 8_672 + 1_126 / 2) * pair / 1e12 / 3_600)
    assert cost.max_devices == 20 / 8
    assert ranker.hours() == pytest.approx(START_HOURS + cost.work_hours)


def test_batches_in_tokens_and_frequent_validations_are_counted():
    settings = {"global_batch_tokens": 10 * TOKENS, "eval_steps": 100}
    once, often = _rankers(once=_run(), often=_run(training=settings))
    once, often = training_cost(once), training_cost(often)
    assert (often.num_updates, often.max_devices) == (868, 10 / 8)
    dev_hours = 1_126 * 12 * _layer(TOKENS) / 2e12 / 3_600
    assert often.work_hours - once.work_hours == pytest.approx(8 * dev_hours)


def test_gradient_checkpointing_repeats_the_forward_pass():
    plain, repeated = map(
        training_cost, _rankers(a=_run(), b=_run(training={"gradient_checkpointing": True}))
    )
    train_hours = 8_672 * 12 * _layer(TOKENS) / 1e12 / 3_600
    assert repeated.work_hours - plain.work_hours == pytest.approx(train_hours)


def test_cascade_trains_its_mean_exit_and_scores_its_last_one():
    exits = (4, 6, 8, 10, 11)
    first, second = _rankers(
        first=_run(exit_layers=exits, loss="uniform_exit"),
        second=_run(init_from="first", loss="uniform_exit"),
    )
    dev_hours = 1_126 * 11 * _layer(TOKENS) / 2e12 / 3_600
    train_hours = 3 * 8_672 * 7.8 * _layer(TOKENS) / 1e12 / 3_600
    assert training_cost(first).work_hours == pytest.approx(train_hours + dev_hours)
    assert training_cost(second) == training_cost(first)
    assert scoring_cost(TableScores(second, second.dev)).work_hours == pytest.approx(dev_hours)


def test_each_ranking_head_repeats_the_layers_above_the_last_exit():
    (ranker,) = _rankers(only=_run(exit_layers=(10,), num_ranking_heads=3, loss="all_exits"))
    assert ranker_layers(ranker)[0].passed == 10 + 3 * 2


def test_student_has_the_scores_of_its_teacher_as_an_input():
    _, student = _rankers(
        teacher=_run(model="roberta-large"),
        student=_run(teachers=["teacher"], loss=DistillationLoss()),
    )
    cost = scoring_cost(student.teacher_logits[0][0])
    assert cost.work_hours == pytest.approx(8_672 * 24 * _layer(TOKENS, 1_024) / 2e12 / 3_600)
    assert cost.max_devices == 8_672 / 1_024


def test_all_members_of_a_ranker_score():
    members = _rankers(small=_run(num_layers=4), large=_run(num_layers=8))
    scores = TableScores(SequentialRanker(tuple(members)), members[0].dev)
    assert scoring_cost(scores).work_hours == pytest.approx(
        1_126 * (4 + 8) * _layer(TOKENS) / 2e12 / 3_600
    )


def test_the_layers_of_a_cascade_of_a_ranker_count_once():
    (ranker,) = _rankers(only=_run(num_layers=4))
    exits = CascadeExits(ranker, ranker.train[0], CascadeConfig())
    cascade = RankerCascade(exits, ranker, ranker.train[0], CascadeConfig())
    assert ranker_layers(cascade) == ranker_layers(ranker)


def test_epoch_of_lists_has_one_list_of_each_question():
    (ranker,) = _rankers(only=_run(loss=MarginRankingLoss(), training={"global_batch_size": 10}))
    cost = training_cost(ranker)
    assert (cost.num_updates, cost.max_devices) == (math.ceil(873 / 10), 2 * 10 / 8)
    flops = 3 * 2 * 873 * 12 * _layer(TOKENS) / 1e12 + 1_126 * 12 * _layer(TOKENS) / 2e12
    assert cost.work_hours == pytest.approx(flops / 3_600)


def test_joint_model_trains_on_balanced_passages():
    (ranker,) = _rankers(only=_run(train=["hotpotqa"], loss=TwoInOneLoss()))
    assert training_cost(ranker).num_updates == math.ceil(4 * 90_447 / 32)


def test_state_to_resume_from_has_the_size_that_was_measured():
    (ranker,) = _rankers("roberta-large", only=_run())
    device_rates[None] = DeviceRates(write_bytes=1e9)
    state_bytes = ranker_layers(ranker)[0].write_hours(12) * 3_600 * 1e9
    assert state_bytes == pytest.approx(4.26e9, rel=0.01)
    (albert,) = _rankers("albert/albert-xxlarge-v2", only=_run())
    # ALBERT-xxlarge has 223M weights, as all its layers share theirs.
    assert ranker_layers(albert)[0].write_hours(4) * 3_600 * 1e9 < 4 * 223e6


def test_checkpoints_take_time_by_the_clock_and_by_improvements():
    (ranker,) = _rankers("roberta-large", only=_run(training={"eval_steps": 1}))
    without = training_cost(ranker)
    device_rates[None] = DeviceRates(1e12, 2e12, 1e9)
    cost, write_hours = training_cost(ranker), ranker_layers(ranker)[0].write_hours(4)
    assert cost.work_hours == pytest.approx(without.work_hours * (1 + 3 * write_hours * 6))
    assert cost.fixed_hours == pytest.approx(START_HOURS + write_hours * without.num_updates / 10)


def test_devices_that_a_batch_cannot_feed_do_not_help():
    cost = Cost(10, work_hours=4.0, max_devices=4.0, fixed_hours=0.5)
    assert cost.hours == 4.5
    assert cost.hours_on(2) == pytest.approx(0.5 + 2 / 0.9)
    assert cost.hours_on(64) == cost.hours_on(4) == pytest.approx(0.5 + 1 / 0.9)


def test_judgments_of_a_track_are_not_those_of_its_training_split():
    relevant_alone = TableSpec("msmarco", "train", corpus_options={"run_depth": 0})
    assert table_pairs(relevant_alone) == 793_700
    assert table_pairs(TableSpec("msmarco", "train", max_negatives=9)) == 10 * 793_700
    assert table_pairs(TableSpec("msmarco", "dl19", max_negatives=9)) == 43 * (19.7 + 9)


def test_updates_take_at_least_the_time_to_start_their_layers_on_any_number_of_devices():
    (ranker,) = _rankers(only=_run(3, training={"global_batch_size": 20}))
    without = training_cost(ranker)
    device_rates[None] = DeviceRates(1e12, 2e12, math.inf, layer_launch_s=0.1)
    cost = training_cost(ranker)
    update_hours = 3 * 3 * 8_672 * 12 * _layer(TOKENS) / 1e12 / 3_600
    launch_hours = 3 * math.ceil(8_672 / 20) * 12 * 0.1 / 3_600
    assert launch_hours > update_hours
    assert cost.hours == pytest.approx(without.hours + launch_hours - update_hours)
    device_rates[None] = DeviceRates(1e12, 2e12, math.inf, layer_launch_s=0.01)
    cost = training_cost(ranker)
    assert cost.hours == pytest.approx(without.hours)
    assert cost.hours_on(2) == pytest.approx(without.hours_on(2))
    device_rates[None] = DeviceRates(1e12, 2e12, math.inf, layer_launch_s=0.03)
    cost = training_cost(ranker)
    assert cost.hours == pytest.approx(without.hours)
    assert cost.hours_on(2) == pytest.approx(
        without.hours_on(2) + 0.3 * launch_hours - update_hours / 1.8
    )


def test_label_sets_of_asnq_are_counted_by_grade():
    assert table_pairs(TableSpec("asnq", "train")) == 20_377_568
    hard = TableSpec("asnq", "train", corpus_options={"negative_grades": [3]})
    assert table_pairs(hard) == 503_326
    assert table_pairs(TableSpec("asnq", "dev", "no_all_negative")) == 930_062 / 2


@pytest.mark.parametrize(
    ("spec", "pairs"),
    [
        (TableSpec("wikiqa", "test", "clean"), 2_341),
        (TableSpec("wikiqa", "train", "clean", label_noise=0.2), 8_651),
        (TableSpec("trecqa", "train-all", "clean", {"variant": "tanda"}), 53_417),
        (TableSpec("trecqa", "train-all", max_negatives=2), 6_410 + 2 * 1_229),
        (TableSpec("wikiqa", "train", num_questions=1_059), 20_360 / 2),
        (TableSpec("wikiqa", "train", num_questions=10**6), 20_360),
        (TableSpec("squad", "train", corpus_options={"max_candidates": 10}), 875_990),
        (TableSpec("squad", "dev", corpus_options={"candidate_scope": "paragraph"}), 49_679),
        (TableSpec("qnli", "train"), 104_743),
        (TableSpec("hotpotqa", "train", max_negatives=8), 90_447 * 10.4),
    ],
    ids=lambda value: None if isinstance(value, TableSpec) else str(value),
)
def test_size_of_a_table_follows_from_published_counts(spec, pairs):
    assert table_pairs(spec) == pytest.approx(pairs, rel=1e-3)


def test_unknown_sizes_are_none_and_no_error(tmp_path):
    assert table_pairs(TableSpec("msmarco", "listed")) is None
    assert table_pairs(TableSpec("msmarco", "listed", num_questions=10)) == 1_000
    (ranker,) = _rankers("org/unknown", only=_run())
    cost = training_cost(ranker)
    assert (cost.num_updates, cost.hours, scoring_cost(TableScores(ranker, ranker.dev)).hours) == (
        math.ceil(8_672 / 32),
        None,
        None,
    )
    unknown = replace(ranker, train=(PreparedTable(TableSpec("dpr", "sample")),))
    assert training_cost(unknown) == Cost()
    assert training_cost(replace(ranker, train=(Cell("no table of a corpus"),))) == Cost()
    assert unknown.hours() > 0  # it has a place in the queue


def test_dry_run_shows_of_a_run_where_it_starts_its_loss_updates_batch_and_hours():
    tokens = {"global_batch_tokens": 1_000}
    settings = {"loss": MarginRankingLoss(), "training": tokens}
    first, second = _rankers(first=_run(), second=_run(init_from="first", **settings))
    costs = [training_cost(each) for each in (first, second)]
    assert first.describe() == {
        "data": "bert-base-uncased",
        "loss": "cross_entropy",
        "updates": costs[0].num_updates,
        "batch": 32,
        "hours": costs[0].hours,
        "source": "model bert-base-uncased",
    }
    assert second.describe() == {
        "data": first,
        "loss": "margin_ranking",
        "updates": costs[1].num_updates,
        "batch": 1_000,
        "hours": costs[1].hours,
        "source": None,
    }


def test_sample_of_a_table_is_as_large_as_it_says():
    spec = TableSpec("wikiqa", "train", num_questions=1_059)
    every, half = (table_size(each, False) for each in (TableSpec("wikiqa", "train"), spec))
    assert half == (1_059, every.num_pairs / 2, every.num_positives / 2, every.mean_tokens)
    assert every.num_questions == 2_118
    (ranker,) = _rankers(only=_run(training={"global_batch_size": 1}))
    few = replace(
        ranker, train=(SampledTable(ranker.train[0], num_questions=97, seed=0, nested=False),)
    )
    assert training_cost(few).num_updates == math.ceil(8_672 / 9)


def test_known_encoder_has_the_sizes_of_its_configuration(tmp_path):
    path = "packaged:all-MiniLM-L6-v2"
    assert encoder_shape(path) == encoder_shape(resolve_model_path(path))
    assert encoder_shape("org/unknown") is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no encoder"}))
    assert encoder_shape(str(tmp_path)) is None
    assert ENCODER_SHAPES["bert-base-uncased"] == EncoderShape()


def test_source_says_what_is_missing_and_how_to_get_it(tmp_path):
    spec = TableSpec("wikiqa", "dev")
    missing = describe_source(spec, str(tmp_path))
    assert (missing["is_present"], missing["source"]) == (False, str(tmp_path))
    assert "WikiQA-dev.tsv" in missing["fix"]
    assert "--data_dirs.wikiqa" in missing["fix"]
    (tmp_path / "WikiQA-dev.tsv").touch()
    present = describe_source(spec, str(tmp_path))
    assert (present["is_present"], present["fix"]) == (True, "")
    assert "research" in present["license"]
    assert describe_source(spec, "hub")["source"] == "microsoft/wiki_qa on the hub"
    assert describe_source(TableSpec("msmarco", "qa-dev"), "hub")["is_present"] is None
    not_there = describe_source(TableSpec("msmarco", "train"), "hub")
    assert not_there["is_present"] is False
    assert "the hub does not have it; as2ray corpora fetch " in not_there["fix"]
    # The text of this corpus comes with the interpreter.
    assert describe_source(TableSpec("python_reference", "train"), None)["is_present"]


def test_retrieved_tables_have_as_many_candidates_as_are_retrieved():
    spec = TableSpec("yahoo_answers", "l6-train", corpus_options={"run_depth": 0})
    questions = PreparedTable(spec)
    grid = BM25Grid(questions, ((0.9, 0.4),))
    index = CollectionIndex((CollectionTexts("yahoo_answers", "l6-answers", "data"),), grid)
    size = _stage_size(questions, False)
    retrieved = _stage_size(RetrievedTable(BM25Run(questions, index, 100), False), False)
    assert retrieved.num_pairs == 100 * size.num_questions > size.num_pairs
    assert _stage_size(LabelledTable(index, questions, PseudoLabelConfig()), False) == size
