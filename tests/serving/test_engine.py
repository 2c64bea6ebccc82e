"""Engines, without a queue and without HTTP."""

import asyncio
import pickle
import threading
import time

import numpy as np
import pytest
from served import CANDIDATES, QUESTION, with_budget

from as2ray.cascade.margins import Margins
from as2ray.checkpoints.loading import load
from as2ray.models.calibration import Calibration
from as2ray.models.ensemble import EnsembleRanker
from as2ray.models.ranker import BEFORE_BATCH
from as2ray.serving import engine as engine_module
from as2ray.serving.engine import RerankEngine, rank_batch
from as2ray.serving.protocol import CohereRequest, CohereResponse, TeiRequest, TeiScoredText
from as2ray.serving.settings import Limits, LoadSheddingConfig
from as2ray.serving.types import RequestError, RerankRequest, TimeBudget
from as2ray.text.tokenization import PairTokenizer

OTHERS = [f"{one} lala" for one in CANDIDATES[:4]]


def test_questions_ranked_together_are_ranked_as_each_alone(engine):
    asked = [
        RerankRequest(QUESTION, CANDIDATES, "m"),
        RerankRequest("What is muri?", OTHERS, "m", drop_ratios=0.0),
        RerankRequest("What is lala?", CANDIDATES, "m", drop_ratios=[0.0, 0.5]),
    ]
    answers = engine.rank([engine.tokenize(one) for one in asked])
    for one, answer in zip(asked, answers):
        alone = engine.ranker.rank(one.question, one.candidates, drop_ratios=one.drop_ratios)
        assert [(r.index, r.exit_layer) for r in answer.ranking] == [
            (r.index, r.exit_layer) for r in alone
        ]
        assert [r.score for r in answer.ranking] == pytest.approx([r.score for r in alone])
    assert [answer.num_scored for answer in answers] == [(6, 3, 2), (4, 4, 4), (6, 6, 3)]


def test_requests_with_drop_ratios_leave_margins_and_probabilities_of_others_alone(cascade):
    ranker = load(cascade, dtype="fp32", max_length=60, device="cpu")
    ranker.margins = Margins((0.01,) * (len(ranker.exit_layers) - 1), top_k=3)
    ranker.bm25_weights = [5.0] * len(ranker.exit_layers)
    ranker.calibration = (Calibration("temperature", 2.0),) * len(ranker.exit_layers)
    ranker.plain_calibration = (Calibration("temperature", 0.5),) * len(ranker.exit_layers)
    engine = RerankEngine(ranker, Limits())
    requests = [
        RerankRequest("What is muri?", OTHERS, "m", drop_ratios=0.3),
        RerankRequest(QUESTION, CANDIDATES, "m"),
    ]
    for answer, one in zip(engine.rank([engine.tokenize(one) for one in requests]), requests):
        alone = ranker.rank(one.question, one.candidates, drop_ratios=one.drop_ratios)
        ranked = [(each.index, each.exit_layer, each.score) for each in answer.ranking]
        assert ranked == [(r.index, r.exit_layer, pytest.approx(r.score)) for r in alone]


def test_survivors_are_those_that_the_exits_scored(engine):
    [answer] = engine.rank([engine.tokenize(RerankRequest(QUESTION, CANDIDATES, "m"))])
    layers = np.array([one.exit_layer for one in answer.ranking])
    assert answer.num_scored == tuple(int(np.sum(layers >= layer)) for layer in answer.exit_layers)


def test_small_request_is_tokenized_while_many_large_ones_wait_for_it(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "LARGE_REQUEST_CHARS", 200)
    released, tokenize = threading.Event(), engine.tokenize

    def wait_if_large(request):
        if len(request.candidates) > len(CANDIDATES):
            assert released.wait(60)
        return tokenize(request)

    monkeypatch.setattr(engine, "tokenize", wait_if_large)

    async def run() -> None:
        large = RerankRequest(QUESTION, CANDIDATES * 10, "m")
        tasks = [asyncio.create_task(engine.tokenize_in_thread(large)) for _ in range(100)]
        await asyncio.sleep(0)
        small = engine.tokenize_in_thread(RerankRequest(QUESTION, CANDIDATES, "m"))
        assert (await asyncio.wait_for(small, 30)).num_tokens > 0
        assert not any(task.done() for task in tasks)
        released.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_candidates_that_are_tokenized_in_parts_have_the_same_tokens(engine, monkeypatch):
    texts = [f"{text} {number}" * number for number, text in enumerate(CANDIDATES * 5, 1)]
    request = RerankRequest(QUESTION, texts, "m")
    sizes, whole = [], engine.tokenize(request).encoded
    encode = PairTokenizer.encode

    def count(self, questions, candidates):
        sizes.append(sum(map(len, candidates)))
        return encode(self, questions, candidates)

    monkeypatch.setattr(PairTokenizer, "encode", count)
    monkeypatch.setattr(engine_module, "MAX_TOKENIZED_CHARS", 500)
    parts = engine.tokenize(request).encoded
    assert len(sizes) > 3
    assert max(sizes) < 500 + max(map(len, texts))
    for name in ("token_ids", "token_types", "lengths"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_relief_raises_drop_ratios_but_those_that_were_asked(engine):
    asked = [
        RerankRequest(QUESTION, CANDIDATES, "m"),
        RerankRequest(QUESTION, CANDIDATES, "m", drop_ratios=0.0),
    ]
    raised, pinned = engine.rank([engine.tokenize(one) for one in asked], shed_drop_ratio=0.8)
    assert (raised.drop_ratios, raised.load_shed) == ((0.8, 0.8), True)
    assert (pinned.drop_ratios, pinned.load_shed) == ((0.0, 0.0), False)


def test_rankers_of_one_stage_and_ensembles_rank_too(checkpoint):
    pointwise = load(checkpoint("bert"), device="cpu", dtype="fp32")
    for ranker in (pointwise, EnsembleRanker([pointwise, pointwise]).eval()):
        engine = RerankEngine(ranker, Limits())
        [answer] = rank_batch([engine.tokenize(RerankRequest(QUESTION, CANDIDATES, "m"))])
        alone = ranker.rank(QUESTION, CANDIDATES)
        assert [one.index for one in answer.ranking] == [one.index for one in alone]
        assert (answer.exit_layers, answer.num_scored, answer.drop_ratios) == ((), (), ())
        with pytest.raises(RequestError, match="several stages"):
            engine.tokenize(RerankRequest(QUESTION, CANDIDATES, "m", drop_ratios=0.5))


def test_engine_tells_family_head_and_activation_and_tei_gets_what_they_say(checkpoint):
    ranker = load(checkpoint("modernbert", 1), device="cpu", dtype="fp32")
    ranker.activation = "identity"
    engine = RerankEngine(ranker, Limits())
    info = engine.model_info
    assert (info.family, info.activation) == ("modernbert", "identity")
    assert info.head == "ModernBertForSequenceClassification"
    [result] = engine.rank([engine.tokenize(RerankRequest(QUESTION, CANDIDATES, "m"))])
    expected = [(one.index, one.score) for one in ranker.rank(QUESTION, CANDIDATES)]
    for raw_scores in (False, True):
        request = TeiRequest(query=QUESTION, texts=CANDIDATES, raw_scores=raw_scores)
        scored = TeiScoredText.all_from_result(result, request)
        assert [one.index for one in scored] == [index for index, _ in expected]
        assert [one.score for one in scored] == pytest.approx([score for _, score in expected])
    cohere = CohereResponse.from_result(
        result, CohereRequest(model="m", query=QUESTION, documents=CANDIDATES)
    )
    assert [one.relevance_score for one in cohere.results] == pytest.approx(
        [score for _, score in expected]
    )
    assert min(score for _, score in expected) < 0  # no probabilities


def test_a_batch_of_two_desks_comes_back_in_order(engine, checkpoint):
    other = RerankEngine(load(checkpoint("bert"), device="cpu"), Limits())
    asked = RerankRequest(QUESTION, CANDIDATES, "m")
    answers = rank_batch([d.tokenize(asked) for d in (engine, other, engine)])
    assert [bool(answer.exit_layers) for answer in answers] == [True, False, True]


def test_budget_counts_from_the_arrival_on_this_machine_and_from_the_way_on_another():
    now = time.monotonic()
    assert TimeBudget(500, now - 0.2).ends_at == pytest.approx(now + 0.3)
    elsewhere = TimeBudget(500, now - 1e6, 0.2, clock_id="another machine's")
    assert elsewhere.ends_at == pytest.approx(now + 0.3, abs=0.1)
    assert TimeBudget(500, now - 0.2).sent_now().sent_after_s == pytest.approx(0.2, abs=0.1)


def test_budget_is_refused_of_a_ranker_that_keeps_none_and_of_too_many_tokens(engine, checkpoint):
    ensemble = EnsembleRanker([load(checkpoint("bert"), device="cpu", dtype="fp32")]).eval()
    with pytest.raises(RequestError, match="cannot keep a time budget") as refused:
        RerankEngine(ensemble, Limits()).tokenize(with_budget(50))
    assert refused.value.code == "invalid_request"
    small = RerankEngine(engine.ranker, Limits(max_request_tokens=512))
    with pytest.raises(RequestError, match="the limit is 512"):
        small.tokenize(with_budget(50, candidates=CANDIDATES * 20))
    assert small.tokenize(with_budget(50)).num_tokens > 0


def test_too_many_tokens_are_refused(cascade):
    engine = RerankEngine(load(cascade, device="cpu"), Limits(max_request_tokens=512))
    with pytest.raises(RequestError, match="the limit is 512") as refused:
        engine.tokenize(RerankRequest(QUESTION, CANDIDATES * 20, "m"))
    assert refused.value.code == "too_large"


def test_a_refusal_survives_the_way_between_processes():
    for fix in (None, "c"):
        error = RequestError("overloaded", "a", fix=fix, retry_after=7)
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.code, copy.problem, copy.fix, copy.retry_after) == ("overloaded", "a", fix, 7)
        assert (str(copy), copy.message) == (str(error), error.message)


def test_relief_grows_with_the_waiting_room():
    config = LoadSheddingConfig(max_drop_ratio=0.8, start_at_fill=0.5)
    assert [config.drop_ratio_at(f) for f in (0.0, 0.5, 0.75, 1.0)] == [0.0, 0.0, 0.4, 0.8]
    assert LoadSheddingConfig().drop_ratio_at(1.0) == 0.0


def test_a_large_request_that_is_interrupted_is_ranked_as_alone(engine):
    other = RerankRequest("What is muri?", OTHERS, "m")
    large = RerankRequest(QUESTION, CANDIDATES * 40, "m")
    expected = engine.rank([engine.tokenize(large)])
    num_interruptions = []

    def interrupt() -> None:
        num_interruptions.append(1)
        token = BEFORE_BATCH.set(None)
        engine.rank([engine.tokenize(other)])
        BEFORE_BATCH.reset(token)

    budget, engine.ranker.max_batch_tokens = engine.ranker.max_batch_tokens, 256
    token = BEFORE_BATCH.set(interrupt)
    try:
        answers = engine.rank([engine.tokenize(large)])
    finally:
        BEFORE_BATCH.reset(token)
        engine.ranker.max_batch_tokens = budget
    assert len(num_interruptions) > 3
    for found, wanted in zip(answers, expected):
        assert found.num_scored == wanted.num_scored
        scores = [sorted(one.score for one in a.ranking) for a in (found, wanted)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_margins_drop_unless_a_request_sets_ratios_and_load_raises_ratios_above_them(cascade):
    engine = RerankEngine(load(cascade, device="cpu", dtype="fp32"), Limits())
    engine.ranker.margins = Margins((0.0, 0.0))
    requests = [
        RerankRequest(QUESTION, CANDIDATES, "m"),
        RerankRequest(QUESTION, OTHERS, "m"),
        RerankRequest(QUESTION, CANDIDATES, "m", drop_ratios=0.0),
    ]
    by_margins, others, complete = engine.rank([engine.tokenize(one) for one in requests])
    assert [one.num_scored for one in (by_margins, others, complete)] == [
        (6, 1, 1),
        (4, 1, 1),
        (6, 6, 6),
    ]
    alone = engine.ranker.rank(QUESTION, CANDIDATES)
    assert [(r.index, r.exit_layer) for r in by_margins.ranking] == [
        (r.index, r.exit_layer) for r in alone
    ]
    assert (by_margins.drop_ratios, by_margins.load_shed) == ((0.0, 0.0), False)
    engine.ranker.margins = Margins((1e3, 1e3))
    shed = engine.rank([engine.tokenize(requests[0])], shed_drop_ratio=0.5)[0]
    assert (shed.num_scored, shed.load_shed) == ((6, 3, 2), True)
    assert engine.model_info.margins == Margins((1e3, 1e3))
