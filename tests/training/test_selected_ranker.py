import json

import pyarrow.compute as pc
import pytest
import tiny
from pydantic import ValidationError
from training_runs import read_logged

from as2ray.checkpoints.loading import load
from as2ray.tables.parquet import ParquetTable
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train
from as2ray.training.tracking import TrackingConfig
from as2ray.training.validation import EvalSet, validate


@pytest.mark.parametrize("select_by", ["dev/AP", "dev/P@1", "epoch"])
def test_ranker_of_a_run_is_its_best_or_its_last(checkpoint, corpus, tmp_path, select_by):
    # What the run learns is wrong on dev, whose MAP falls.
    turned = ParquetTable.open(corpus).to_table()
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
    name = "dev/AP" if select_by == "epoch" else select_by
    values = [x[name] for x in read_logged(tmp_path / "run", name)]
    found = validate(ranker, {"dev": EvalSet.from_table(turned, ranker, 8_192)})[name]
    assert found == pytest.approx(values[-1] if select_by == "epoch" else max(values), abs=1e-6)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(job, tmp_path / "run") == selected  # a complete run is not trained again
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == lines


def test_unknown_selection_is_refused():
    with pytest.raises(ValidationError, match=r"select_by(.|\n)*'test/AP'"):
        TrainingConfig(select_by="test/AP")
