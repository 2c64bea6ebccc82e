"""A replica of this process, without Ray Serve: what it loads, rejects, probes and ranks."""

import asyncio
import math
import shutil

import pytest
import torch
from served import CANDIDATES, QUESTION

from as2ray.checkpoints import loading
from as2ray.errors import CheckpointError, ConfigError, EvaluationError
from as2ray.models.ranker import Ranker
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.serving import deployment
from as2ray.serving.settings import ServiceConfig
from as2ray.serving.types import RerankRequest


@pytest.fixture
def store(monkeypatch) -> deployment.ModelStore:
    """What is known of models, in this process instead of Ray's."""
    values: dict[tuple[str, str], str] = {}

    def put(name: str, value: str, namespace: str) -> None:
        values[namespace, name] = value

    monkeypatch.setattr(deployment.internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(
        deployment.internal_kv,
        "_internal_kv_get",
        lambda name, namespace: values.get((namespace, name)),
    )
    return deployment.ModelStore("an application")


@pytest.fixture
def replica(store):
    config = ServiceConfig.model_validate(
        {"models": {"m": "x"}, "dtype": "fp32", "replicas": {"num_cpus": 1.5}}
    )
    return deployment._create_replica_class(2)(config.settings, store)


def reconfigure(replica, models):
    asyncio.run(replica.reconfigure({"models": models}))


def test_models_that_cannot_be_loaded_are_rejected_without_their_paths(replica, store, tmp_path):
    store.save_good({"m": "before"})
    replica.names = {"before": "m"}
    models = {"m": str(tmp_path / "none"), "n": "before"}
    reconfigure(replica, models)
    assert (replica.names, replica.new_engines) == ({"before": "m"}, {})
    good, problem = store.replace_rejected(models)
    assert good == {"m": "before"}
    assert problem.startswith("the models ['m', 'n'] were rejected: the model m")
    assert str(tmp_path) not in problem


def test_error_of_another_library_is_told_by_its_name(replica, store, monkeypatch):
    def run_out_of_memory(checkpoint: str, dtype: str) -> None:
        raise RuntimeError("memory at /secret")

    monkeypatch.setattr(loading, "load", run_out_of_memory)
    store.save_good({"m": "before"})
    replica.names = {"before": "m"}
    reconfigure(replica, {"m": "other"})
    _, problem = store.replace_rejected({"m": "other"})
    assert problem == "the models ['m'] were rejected: RuntimeError"


WRONG_MODELS = [
    ({"models": {}}, "needs at least one model"),
    ({}, "needs at least one model"),
    ({"models": {"m": None}}, "models.m"),
    ({"models": {"é": "x"}}, "visible ASCII characters"),
]


@pytest.mark.parametrize(("user_config", "reason"), WRONG_MODELS)
def test_wrong_models_are_rejected_like_those_that_cannot_be_loaded(
    replica, store, user_config, reason
):
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(replica.reconfigure(user_config))
    store.save_good({"m": "before"})
    replica.names = {"before": "m"}
    asyncio.run(replica.reconfigure(user_config))
    assert replica.names == {"before": "m"}
    good, problem = store.replace_rejected(user_config.get("models"))
    assert good == {"m": "before"}
    assert problem.startswith("the models were rejected: ")
    assert reason in problem


def test_replica_without_models_fails_on_its_first_ones(replica, store, tmp_path):
    models = {"m": str(tmp_path / "none")}
    with pytest.raises(CheckpointError):
        reconfigure(replica, models)
    assert store.replace_rejected(models) == (models, None)


def test_loaded_model_has_the_settings_of_the_service_and_the_scores_of_its_folder(
    replica, cascade
):
    engine = asyncio.run(replica._load(cascade, "m"))
    assert engine.ranker.dtype == "fp32"
    assert engine.limits is replica.settings.limits
    assert engine.answer_scoring == AnswerScoring.read(cascade)
    assert engine.ranker.speed is not None  # measured before the first request


def test_clients_that_leave_while_a_model_is_loaded_leave_it_to_the_next(
    replica, engine, monkeypatch
):
    loaded, is_released = [], asyncio.Event()

    async def load(checkpoint: str, name: str):
        loaded.append(checkpoint)
        await is_released.wait()
        return engine

    monkeypatch.setattr(replica, "_load", load)

    async def ask():
        get_engine = type(replica).get_engine.__wrapped__  # without Serve's cache
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(get_engine(replica, "x"), 0.01)
        is_released.set()
        return await get_engine(replica, "x")

    assert asyncio.run(ask()) is engine
    assert loaded == ["x"]
    assert not replica.new_engines  # Serve's cache has it now


def test_model_whose_scores_are_not_finite_is_refused(replica, cascade, monkeypatch):
    load = loading.load

    def load_broken(checkpoint: str, dtype: str) -> Ranker:
        ranker = load(checkpoint, device="cpu", dtype=dtype)
        for weights in ranker.parameters():
            weights.data.fill_(math.nan)
        return ranker

    monkeypatch.setattr(loading, "load", load_broken)
    with pytest.raises(EvaluationError, match="not finite"):
        asyncio.run(replica._load(cascade, "m"))


def test_health_check_ranks_with_the_first_model(replica, engine, monkeypatch):
    asyncio.run(replica.check_health())  # nothing to rank with yet
    replica.probed_engine = engine
    asyncio.run(replica.check_health())
    asked = []

    def rank(question: str, candidates: list[str]) -> None:
        asked.append((question, candidates))
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.ranker, "rank", rank)
    with pytest.raises(RuntimeError, match="lost"):
        asyncio.run(replica.check_health())
    assert asked == [("question", ["candidate"])]


@pytest.mark.parametrize(
    ("tokens_per_second", "max_batch_tokens"),
    [(None, 777), (1_000.0, 2_048), (40_000.0, 5_000), (1e9, 8_192)],
)
def test_parts_of_a_batch_take_a_quarter_of_a_second_of_one_core(
    replica, engine, tokens_per_second, max_batch_tokens, monkeypatch
):
    monkeypatch.setattr(engine.ranker, "max_batch_tokens", 777)
    replica.queue.tokens_per_second = tokens_per_second
    batch = [engine.tokenize(RerankRequest(QUESTION, CANDIDATES, "m"))]
    num_threads = torch.get_num_threads()
    try:
        [result] = replica._rank_batch(batch, 0.0, 1)
        assert torch.get_num_threads() == 2  # of one and a half core, rounded up
        replica._rank_batch(batch, 0.0, 2)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(num_threads)
    assert len(result.ranking) == len(CANDIDATES)
    assert engine.ranker.max_batch_tokens == max_batch_tokens


@pytest.mark.parametrize("encoder", [None, "of the index"])
def test_model_that_was_adapted_to_another_encoder_is_rejected_beside_an_index(
    replica, store, cascade, tmp_path, encoder
):
    model = shutil.copytree(cascade, tmp_path / "model")
    AnswerScoring({"similarity": 1.0}, encoder="of the model").write(model)
    asyncio.run(replica._load(str(model), "m"))  # without an index it ranks
    replica.settings = replica.settings.model_copy(update={"index_path": "x"})
    replica.encoder, replica.names = encoder, {"before": "m"}
    store.save_good({"m": "before"})
    models = {"m": str(model)}
    reconfigure(replica, models)
    assert replica.names == {"before": "m"}
    _, problem = store.replace_rejected(models)
    assert "with the fingerprint of the model, but the index has " in problem
    replica.encoder = "of the model"
    asyncio.run(replica._load(str(model), "m"))
