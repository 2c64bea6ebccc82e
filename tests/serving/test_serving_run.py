"""Around Serve, without it: how `as2ray serve` ends, and what gateways make of replicas' errors."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from as2ray.serving import deployment, run
from as2ray.serving.asked import Asked, Refused
from as2ray.serving.service import Facts
from as2ray.serving.settings import Served


class Serve:
    """Stands in for `ray.serve`, and is interrupted once it serves."""

    def __init__(self, others: dict) -> None:
        self.applications, self.done = others, []

    def start(self, **_) -> None:
        pass

    def run(self, application, name, blocking) -> None:
        self.applications[name] = application
        raise KeyboardInterrupt

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=self.applications)

    def delete(self, name) -> None:
        self.done.append(f"delete {name}")

    def shutdown(self) -> None:
        self.done.append("shutdown")


@pytest.mark.parametrize(
    ("others", "done"), [({}, ["shutdown"]), ({"another": 1}, ["delete as2ray"])]
)
def test_an_interrupt_ends_our_application_and_no_other(monkeypatch, others, done):
    serve = Serve(others)
    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr(run, "connected", nullcontext)
    monkeypatch.setattr(run, "build", lambda args: args)
    run.run(Served(models={"a": "x"}), "127.0.0.1", 8000)
    assert serve.done == done


class Replicas:
    """A handle whose calls end one after the other as they were told."""

    def __init__(self, *ends) -> None:
        self.ends = list(ends)
        self.rank = self.facts = self

    def options(self, **_) -> "Replicas":
        return self

    async def remote(self, *_):
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


FULL = BackPressureError(num_queued_requests=1, max_queued_requests=1)


@pytest.fixture
def gateway():
    def make(*ends) -> deployment.Gateway:
        made = object.__new__(deployment.Gateway)  # to make one as Serve does takes a replica
        made.ranker, made.settings = Replicas(*ends), Served(models={"a": "x"}).settings
        made.models, made.known = {"a": "x"}, {}
        return made

    return make


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ([FULL], "overloaded"),
        ([RayActorError(), FULL], "overloaded"),
        ([DeploymentUnavailableError("ranker")], "too_late"),
        ([RayActorError(), RayActorError()], "too_late"),
    ],
)
@pytest.mark.parametrize("asks", ["rank", "facts"])
def test_a_gateway_tells_replicas_that_are_full_or_gone_by_their_kind(gateway, asks, ends, kind):
    made = gateway(*ends)
    asked = made.rank(Asked("q", ["a"]), "a") if asks == "rank" else made.facts("a")
    with pytest.raises(Refused) as refused:
        asyncio.run(asked)
    assert refused.value.kind == kind


def test_facts_are_asked_again_of_another_replica_and_then_known(gateway):
    facts = Facts(60, (1, 2), (0.5,))
    made = gateway(RayActorError(), facts)
    for _ in range(2):
        assert asyncio.run(made.facts("a")) == facts
