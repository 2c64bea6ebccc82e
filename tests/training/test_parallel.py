"""Two processes with gloo: the same run as one process, copied (DDP) and shared out (FSDP2)."""

import gc
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from training_runs import (
    DEV,
    NO_DROPOUT,
    StopTrainingError,
    assert_close,
    create_trainer,
    read_losses,
)

from as2ray.checkpoints.loading import load
from as2ray.losses import get_loss
from as2ray.models import precision
from as2ray.training import parallel
from as2ray.training.tracking import read_metrics

pytestmark = pytest.mark.slow

RANKS = 2


@dataclass(frozen=True)
class Case:
    """One run, in one process or in two."""

    family: str = "bert"
    exit_layers: tuple[int, ...] | None = None
    """Of a cascade."""
    dropout: bool = False
    stop_before: tuple[int, int] | None = None
    """Where a first try ends; the second goes on from its checkpoint."""
    first_alone: bool = False
    """The first try is one process."""
    settings: dict[str, Any] = field(default_factory=dict)


# 65 pairs in steps of 32: the last step of an epoch is one pair, and rank 1's share is empty.
TRAINING = {"epochs": 2, "global_batch_size": 32, "select_by": "epoch"}
CASES = {
    "copied": Case(),
    "copied-accumulating": Case(settings={"max_batch_tokens": 60}),
    "copied-resumed": Case(stop_before=(1, 1)),
    "copied-dropout": Case(dropout=True),
    "copied-dropout-resumed": Case(dropout=True, stop_before=(1, 1)),
    "copied-after-one-process": Case(stop_before=(1, 1), first_alone=True),
    "shared": Case(settings={"fsdp": True}),
    "shared-accumulating": Case(settings={"fsdp": True, "max_batch_tokens": 60}),
    "shared-resumed": Case(stop_before=(1, 1), settings={"fsdp": True}),
    "shared-checkpointing": Case(settings={"fsdp": True, "gradient_checkpointing": True}),
    "shared-albert": Case("albert", settings={"fsdp": True}),
    "shared-after-one-process": Case(stop_before=(1, 1), first_alone=True, settings={"fsdp": True}),
    "copied-cascade": Case("plain", exit_layers=(1, 2)),
    "copied-cascade-resumed": Case("plain", exit_layers=(1, 2), stop_before=(1, 1)),
    "shared-cascade": Case("plain", exit_layers=(1, 2), settings={"fsdp": True}),
    # The upper layers have no moments before the second step.
    "shared-cascade-resumed": Case(
        "plain", exit_layers=(1, 2), stop_before=(1, 1), settings={"fsdp": True}
    ),
}
INTERRUPTED = Case(stop_before=(1, 1), settings={"fsdp": True})
"""Two processes begin it, and one resumes it."""


def run(case: Case, models: dict[str, Path], root: Path, name: str) -> dict[str, Any]:
    """Runs a case in as many processes as there are; what is to be compared, on rank 0."""
    model = models[f"{case.family}-dropout" if case.dropout else case.family]
    settings = {**TRAINING, **case.settings, "save_every_steps": 2 if case.stop_before else None}
    if case.exit_layers:
        settings |= {"exit_layers": case.exit_layers, "loss": get_loss("uniform_exit")}
    where = (model, root / "pairs", root / name)
    if case.stop_before and not case.first_alone:
        with pytest.raises(StopTrainingError):
            create_trainer(*where, stop_before=case.stop_before, **settings).fit()
        if case is INTERRUPTED:
            return {}
        if dist.is_initialized():
            dist.barrier()  # rank 0 may still be writing what both resume from
    loop = create_trainer(*where, **settings)
    loop.fit()
    scores = loop.eval_sets["dev"].compute_scores(loop.ranker)
    moments = [state["exp_avg"] for state in loop.optimizer.state.values()]
    held = sum(m.to_local().numel() if isinstance(m, DTensor) else m.numel() for m in moments)
    found = {"weights": parallel.get_model_state(loop.model), "scores": scores, "held": held}
    return {**found, "concurrent": loop.ranker.allow_parallel}


def check_precision(rank: int) -> None:
    """A worker whose hardware lacks bf16 makes all of them train in fp32."""
    device, supports = torch.device("cpu"), torch.cpu._is_avx512_bf16_supported
    measured, precision._is_bf16_faster = precision._is_bf16_faster, lambda: True
    for is_supported, expected in ((rank == 0, "fp32"), (rank < RANKS, "bf16")):
        torch.cpu._is_avx512_bf16_supported = lambda: is_supported  # noqa: B023
        torch.cpu._is_amx_tile_supported = lambda: False
        assert parallel.agree_on_precision("auto", device) == expected
    torch.cpu._is_avx512_bf16_supported = supports
    precision._is_bf16_faster = measured
    assert parallel.agree_on_precision("bf16", device) == "bf16"


def work(rank: int, models: dict[str, Path], root: Path) -> None:
    """One of two processes: all cases, one after the other."""
    torch.set_num_threads(1)
    meeting = f"file://{root / 'meeting'}"
    dist.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=300),  # ranks out of step fail, and do not hang the tests
    )
    check_precision(rank)
    for name, case in CASES.items():
        found = run(case, models, root, name)
        torch.save(found, root / f"{name}-{rank}.pt")
    run(INTERRUPTED, models, root, "interrupted")
    gc.collect()  # process groups held in cycles would end with the interpreter, which aborts
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    tiny.write_corpus(folder / "pairs", tiny.candidates(13))
    return folder


@pytest.fixture(scope="module")
def models(checkpoint) -> dict[str, Path]:
    small = {"num_hidden_layers": 2}
    return {
        "bert": checkpoint("bert", 2, **small, **NO_DROPOUT),
        "bert-dropout": checkpoint("bert", 2, **small),
        "plain": checkpoint("bert", None, **small, **NO_DROPOUT),
        "albert": checkpoint("albert", 2, classifier_dropout_prob=0.0, **small, **NO_DROPOUT),
    }


@pytest.fixture(scope="module")
def alone(root, models) -> dict[str, dict[str, Any]]:
    """The same run in this process, by family."""
    cases = (Case("bert"), Case("albert"), Case("plain", exit_layers=(1, 2)))
    return {case.family: run(case, models, root, f"alone-{case.family}") for case in cases}


@pytest.fixture(scope="module")
def together(root, models) -> dict[str, list[dict[str, Any]]]:
    """What each rank found, by case."""
    for name, case in CASES.items():
        if case.first_alone:
            where = (models[case.family], root / "pairs", root / name)
            how = {"stop_before": case.stop_before, "save_every_steps": 2}
            how |= {**TRAINING, **case.settings}
            loop = create_trainer(*where, **how)
            with pytest.raises(StopTrainingError):
                loop.fit()
    # Both are forked from a process that has imported all of this, which takes most of their time.
    mp.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (models, root), nprocs=RANKS, start_method="forkserver")
    return {
        name: [torch.load(root / f"{name}-{r}.pt", weights_only=False) for r in range(RANKS)]
        for name in CASES
    }


LIKE_ALONE = [name for name, case in CASES.items() if not case.dropout]


@pytest.mark.parametrize("name", LIKE_ALONE)
def test_two_processes_train_the_weights_of_one(together, alone, name):
    expected = alone[CASES[name].family]
    assert_close(together[name][0]["weights"], expected["weights"])


@pytest.mark.parametrize("name", LIKE_ALONE)
def test_two_processes_validate_to_the_scores_of_one(together, alone, name):
    for found in together[name]:
        assert len(found["scores"]) == DEV.num_rows
        np.testing.assert_allclose(found["scores"], alone[CASES[name].family]["scores"], atol=1e-5)
    assert (together[name][0]["scores"] == together[name][1]["scores"]).all()


@pytest.mark.parametrize("name", LIKE_ALONE)
def test_two_processes_tell_the_losses_and_gradients_of_one(together, alone, root, name):
    expected, found = (
        read_metrics(root / folder / "metrics.jsonl")
        for folder in (f"alone-{CASES[name].family}", name)
    )
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, other in zip(found, expected):
        train = {name: value for name, value in other.items() if name.startswith("train/")}
        assert {name: line[name] for name in train} == pytest.approx(train, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_hold_the_moments_whole_or_half(together, alone, name):
    whole, shared = alone[CASES[name].family]["held"], CASES[name].settings.get("fsdp", False)
    for found in together[name]:
        assert found["held"] < 0.6 * whole if shared else found["held"] == whole


@pytest.mark.parametrize("name", CASES)
def test_sharded_weights_come_to_one_batch_at_a_time(together, name):
    for found in together[name]:
        assert found["concurrent"] != CASES[name].settings.get("fsdp", False)


def test_every_process_writes_its_part_of_the_moments_and_one_process_resumes_from_them(
    together, alone, models, root
):
    shards = root / "interrupted" / "last" / "optimizer"
    parts = sorted(shards.glob("*.distcp"))
    assert [path.name for path in parts] == ["__0_0.distcp", "__1_0.distcp"]
    sizes = [path.stat().st_size for path in parts]
    assert max(sizes) < 0.6 * sum(sizes)
    assert not (shards.parent / "optimizer.pt").exists()
    settings = {**TRAINING, **INTERRUPTED.settings}
    loop = create_trainer(models["bert"], root / "pairs", root / "interrupted", **settings)
    assert loop.state.global_step == 2
    loop.fit()
    assert_close(parallel.get_model_state(loop.model), alone["bert"]["weights"])


def test_two_copies_resumed_with_dropout_go_on_as_if_not_interrupted(together, root):
    weights = [together[f"copied-dropout{which}"][0]["weights"] for which in ("", "-resumed")]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert read_losses(root / "copied-dropout") == read_losses(root / "copied-dropout-resumed")


@pytest.mark.parametrize("name", CASES)
def test_two_processes_write_a_whole_checkpoint(together, root, name):
    ranker = load(root / name / "best" / "ranker")
    held, expected = ranker.state_dict(), together[name][0]["weights"]
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[n], expected[n]) for n in held)
