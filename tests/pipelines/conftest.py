"""Made-up corpora in the formats of real releases."""

from pathlib import Path

import pytest
import tiny

from as2ray.experiments.recipe import TableSpec
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig


def _write_qnli(folder: Path) -> None:
    with (folder / "dev.tsv").open("w") as file:
        file.write("index\tquestion\tsentence\tlabel\n")
        for i, row in enumerate(tiny.candidates(30, seed=5).to_pylist()):
            label = "entailment" if row["label"] else "not_entailment"
            file.write(f"{i}\t{row['question']}\t{row['candidate']}\t{label}\n")


def _write_asnq(folder: Path) -> None:
    with (folder / "train.tsv").open("w") as file:
        for row in tiny.candidates(30, seed=9).to_pylist():
            columns = (f"{row['question']} {row['question_id']}", row["candidate"])
            file.write("\t".join((*columns, "4" if row["label"] else "1")) + "\n")


@pytest.fixture(scope="session")
def releases(tmp_path_factory) -> Path:
    """Folder of small raw releases."""
    root = tmp_path_factory.mktemp("data")
    for name in ("wikiqa", "qnli", "asnq"):
        (root / name).mkdir()
    for seed, (split, questions) in enumerate({"train": 40, "dev": 10, "test": 12}.items()):
        tiny.write_wikiqa(root / "wikiqa", split, seed, questions)
    _write_qnli(root / "qnli")
    _write_asnq(root / "asnq")
    return root


@pytest.fixture
def data_root(releases, monkeypatch) -> Path:
    """The releases as what AS2RAY_DATA names."""
    # The made-up releases have their own sizes.
    monkeypatch.setattr("as2ray.corpora.corpus.Corpus.check_counts", lambda *_: False)
    monkeypatch.setenv("AS2RAY_DATA", str(releases))
    return releases


@pytest.fixture
def learn() -> dict[str, object]:
    """Of a step that trains for one epoch on the target."""
    training = TrainingConfig(epochs=1, global_batch_size=16, learning_rate=1e-3, precision="fp32")
    return {"train": ["target"], "training": training}


@pytest.fixture
def common(checkpoint, data_root) -> dict[str, object]:
    """What the recipes of all pipelines share here: model, tables, one test, nothing tracked."""
    return {
        "title": "Tiny",
        "model": ModelSpec(str(checkpoint("bert", None)), max_length=32),
        "tables": {
            "general": TableSpec("qnli", "dev"),
            "target": TableSpec("wikiqa", "train"),
            "dev": TableSpec("wikiqa", "dev"),
            "test": TableSpec("wikiqa", "test"),
        },
        "dev": "dev",
        "tests": ["test"],
        "tracking": TrackingConfig(tensorboard=False),
    }
