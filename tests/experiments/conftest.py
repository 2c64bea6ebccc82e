"""Stages that run in this process, each with a store of its own test."""

from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file, save_file

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.store import Store


@pytest.fixture
def complete(tmp_path):
    """Runs stages: `complete(stage)` returns the outputs and the folder."""
    store = Store(str(tmp_path / "store"))
    backend = SequentialBackend(store, WorkersConfig(num_workers=0))

    def run(stage):
        graph_run = run_graph([stage], store, backend)
        graph_run.raise_failures({})
        result = graph_run.results[stage]
        return result.outputs, store.fetch(result)

    return run


@pytest.fixture
def overwrite_weights():
    """Gives the model of a folder other weights of the same shapes: the files keep their sizes."""

    def overwrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        size, weights = path.stat().st_size, load_file(path)
        others = {name: values.flip(0).contiguous() for name, values in weights.items()}
        save_file(others, path, {"format": "pt"})
        assert path.stat().st_size == size

    return overwrite


@pytest.fixture
def documents(tmp_path) -> Path:
    """A folder of documents, each about a topic."""
    root = tmp_path / "documents"
    root.mkdir()
    for number, topic in enumerate(tiny.TOPICS):
        lines = [f"The {topic} has {word} of kind {n} inside." for n, word in enumerate(tiny.WORDS)]
        (root / f"{number}.md").write_text(f"# All about {topic}\n\n" + "\n\n".join(lines[:12]))
    return root
