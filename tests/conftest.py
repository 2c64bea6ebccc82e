"""Tiny checkpoints and corpora for all tests, made once a session; see `tiny`."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of a library that asks a hub
# A worker's report waits for the controller's next look, by default one every two seconds.
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
# Two processes of Ray that no test looks at: who tells of its use, who looks out
# for nodes that are about to be taken away.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny
from hypothesis import settings

from as2ray.checkpoints.gc_pause import gc_paused

if TYPE_CHECKING:
    import transformers

Checkpoint = Callable[..., Path]

# An example that waits for a core is no defect.
settings.register_profile("as2ray", deadline=None)
settings.load_profile("as2ray")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is loaded by now stays: looked through at every collection of garbage, which
    statsmodels orders for every table, it takes half a second."""
    with gc_paused():
        found = yield
    gc.collect()
    gc.freeze()
    return found


def pytest_collection_modifyitems(items):
    """Rooms with slow tests come first, so that no process has a long file left when the others
    end."""
    slow = {item.path.parent for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path.parent not in slow)


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    """One thread for tiny products, and no progress bars."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(params=tiny.FAMILIES)
def family(request) -> str:
    """Each supported family in turn."""
    return request.param


@pytest.fixture(scope="session")
def published() -> Callable[[str], "transformers.PreTrainedTokenizerBase"]:
    """The family's tokenizer of transformers."""
    return cache(tiny.published_tokenizer)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, published) -> Checkpoint:
    """Folder of a checkpoint that transformers wrote: `checkpoint(family, labels, **config)`."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(family: str = "bert", labels: int | None = 2, **changes: object) -> Path:
        name = "-".join(map(str, [family, labels, *changes.values()]))
        return tiny.write_checkpoint(root / name, family, published(family), labels, **changes)

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of Parquet files with 400 pairs that a tiny network can learn."""
    folder = tmp_path_factory.mktemp("corpus")
    return tiny.write_corpus(folder, tiny.candidates(80), files=2, row_group=150)


@pytest.fixture(scope="session")
def ray_local():
    """One local Ray for the tests of a process, as small as it goes."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            logging_level="ERROR",
        )
    yield
    ray.shutdown()
