import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pytest
import tiny
from training_runs import create_trainer, read_logged

from as2ray.checkpoints.loading import load
from as2ray.errors import ConfigError, StaleStageError
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import JOB, train
from as2ray.training.tracking import TrackingConfig
from as2ray.training.validation import EvalSet, validate

MEASURES = ["dev/AP", "dev/RR", "dev/P@1", "dev/nDCG@10"]


@pytest.mark.parametrize("select_by", ["dev/AP", "epoch"])
def test_ranker_of_a_run_is_its_best_or_its_last(checkpoint, tmp_path, select_by):
    turned = tiny.candidates(40)
    corpus = tiny.write_corpus(tmp_path / "train", turned)
    # What the run learns is wrong on dev, whose MAP falls.
    place, field = turned.column_names.index("label"), turned.schema.field("label")
    labels = pc.subtract(1, turned["label"]).cast(field.type)
    turned = turned.set_column(place, field, labels)
    dev = tiny.write_corpus(tmp_path / "dev", turned)
    settings = {"epochs": 4, "global_batch_size": 16, "learning_rate": 3e-3, "precision": "fp32"}
    job = TrainingJob(
        ModelSpec(str(checkpoint("bert", None, initializer_range=0.1)), max_length=40),
        (str(corpus),),
        {"dev": str(dev)},
        TrainingConfig(**settings, select_by=select_by),
        tracking=TrackingConfig(tensorboard=False),
    )
    selected = train(job, tmp_path / "run")
    ranker = load(selected, dtype="fp32")
    progress = json.loads((selected.parent / "progress.json").read_text())
    assert progress["precision"] == "fp32"
    assert progress["has_ended"] == (select_by == "epoch")
    maps = [x["dev/AP"] for x in read_logged(tmp_path / "run", "dev/AP")]
    assert maps[-1] < max(maps) - 0.05
    found = validate(ranker, {"dev": EvalSet.from_table(turned, ranker, 8_192)})["dev/AP"]
    assert found == pytest.approx(maps[-1] if select_by == "epoch" else max(maps), abs=1e-6)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(job, tmp_path / "run") == selected  # a complete run is not trained again
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_run_whose_tables_or_model_have_changed_is_refused_and_if_they_are_gone_kept(
    checkpoint, tmp_path
):
    table = tiny.candidates(8)
    folder = tiny.write_corpus(tmp_path / "train", table)
    model = shutil.copytree(checkpoint("bert", None), tmp_path / "start")
    training = TrainingConfig(epochs=1, precision="fp32", select_by="epoch")
    job = TrainingJob(ModelSpec(str(model), max_length=40), (str(folder),), {}, training)
    job, run = replace(job, tracking=TrackingConfig(tensorboard=False)), tmp_path / "run"
    selected = train(job, run)
    copies = {
        each: shutil.copytree(each, tmp_path / f"{each.name}-copy") for each in (folder, model)
    }
    tiny.write_corpus(folder, table.slice(0, 20))
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(StaleStageError) as raised:
        train(job, run)
    assert re.findall(r"content\.(\S+): ", str(raised.value)) == [str(model), str(folder)]
    for original, copy in copies.items():  # the same contents at other times
        shutil.rmtree(original)
        shutil.copytree(copy, original, copy_function=shutil.copy)
    assert train(job, run) == selected
    for original in copies:
        shutil.rmtree(original)
    assert train(job, run) == selected
    tiny.write_corpus(folder, table.slice(0, 20))
    with pytest.raises(StaleStageError):
        train(job, run)
    stored = json.loads((run / JOB).read_text())
    older = {key: value for key, value in stored.items() if not key.startswith("content.")}
    (run / JOB).write_text(json.dumps(older))
    assert train(job, run) == selected


def test_run_in_a_store_that_was_moved_is_the_same_run(checkpoint, tmp_path):
    def create_job(store: Path) -> TrainingJob:
        tables = (str(store / "train"), str(store / "more"))
        return TrainingJob(
            ModelSpec(str(store / "start"), max_length=40),
            tables,
            {"dev": str(store / "train")},
            TrainingConfig(epochs=1, precision="fp32"),
            tracking=TrackingConfig(tensorboard=False),
        )

    store, moved = tmp_path / "store", tmp_path / "moved"
    shutil.copytree(checkpoint("bert", None), store / "start")
    for name, seed in (("train", 0), ("more", 1)):
        tiny.write_corpus(store / name, tiny.candidates(8, seed=seed))
    selected = train(create_job(store), store / "run")
    store.rename(moved)
    assert train(create_job(moved), moved / "run") == moved / selected.relative_to(store)
    exchanged = replace(create_job(moved), train_tables=create_job(moved).train_tables[::-1])
    with pytest.raises(StaleStageError, match="job\\): train_tables: "):
        train(exchanged, moved / "run")


def test_run_whose_own_loss_has_changed_is_refused(checkpoint, corpus, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = "from as2ray.losses.pointwise import cross_entropy as loss\nFACTOR = 1\n"
    (tmp_path / "changing_loss.py").write_text(source)
    training = TrainingConfig(epochs=1, max_steps=1, precision="fp32", select_by="epoch")
    model = ModelSpec(str(checkpoint("bert", None)), max_length=40)
    job = TrainingJob(model, (str(corpus),), {}, training, loss="changing_loss:loss")
    job = replace(job, tracking=TrackingConfig(tensorboard=False))
    train(job, tmp_path / "run")
    (tmp_path / "changing_loss.py").write_text(source.replace("1", "22"))
    with pytest.raises(StaleStageError, match=r"content\.changing_loss:loss"):
        train(job, tmp_path / "run")


@pytest.mark.parametrize("select_by", MEASURES)
def test_measure_that_is_named_selects(checkpoint, corpus, tmp_path, monkeypatch, select_by):
    values = iter([{name: float(name == best) for name in MEASURES} for best in MEASURES])
    monkeypatch.setattr("as2ray.training.trainer.validate", lambda *_: dict(next(values)))
    steps = {"epochs": 1, "max_steps": len(MEASURES), "eval_steps": 1, "global_batch_size": 4}
    trainer = create_trainer(
        checkpoint("bert", None), corpus, tmp_path, select_by=select_by, **steps
    )
    trainer.fit()
    assert trainer.state.best_step == MEASURES.index(select_by) + 1


def test_unknown_selection_is_refused():
    with pytest.raises(ConfigError, match=r"select_by(.|\n)*'test/AP'"):
        TrainingConfig(select_by="test/AP")
