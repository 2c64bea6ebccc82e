"""A recipe whose stages lie on an object store, from two machines."""

import json
import shutil

import pytest
import tiny

from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.recipe import Recipe, RunSpec, TableSpec
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import TrackingConfig
from pipelines import transfer_adapt

HERE = WorkersConfig(num_workers=0)


@pytest.fixture
def recipe(checkpoint, tmp_path, monkeypatch):
    for split, seed, questions in (("train", 0, 20), ("dev", 1, 5), ("test", 2, 6)):
        tiny.write_wikiqa(tmp_path / "data" / "wikiqa", split, seed, questions)
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("as2ray.corpora.corpus.Corpus.check_counts", lambda *_: False)
    training = TrainingConfig(epochs=1, global_batch_size=16, learning_rate=1e-3, precision="fp32")
    return Recipe(
        title="Tiny",
        model=ModelSpec(str(checkpoint("bert", None)), max_length=32),
        tables={split: TableSpec("wikiqa", split) for split in ("train", "dev", "test")},
        dev="dev",
        tests=["test"],
        runs={
            "first": RunSpec(["train"], training),
            "second": RunSpec(["train"], training, init_from="first"),
        },
        baseline="first",
        seeds=[0],
        tracking=TrackingConfig(tensorboard=False),
    )


def test_recipe_runs_on_an_object_store_and_another_machine_finds_its_results(
    recipe, bucket, tmp_path, monkeypatch
):
    reports = []
    for machine in ("one", "other"):
        monkeypatch.setenv("HOME", str(tmp_path / machine))
        output = tmp_path / machine / "out"
        transfer_adapt.PIPELINE.run(recipe, output, HERE, store=f"{bucket}/store")
        reports.append(json.loads((output / "test.json").read_text()))
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        monkeypatch.setattr("as2ray.training.run_job.run_job", None)  # nothing is trained again
    assert reports[0] == reports[1]
    assert not (tmp_path / "other" / "out" / "rankers").exists()
    cached = {path.parts[-3] for path in (tmp_path / "other").rglob("manifest.json")}
    assert cached == {"TableEvaluation"}
