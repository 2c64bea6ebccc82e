import pyarrow.compute as pc
import pytest
import tiny
from training_runs import told

from as2ray.checkpoint import load
from as2ray.errors import RecipeError
from as2ray.text.files import PairFiles
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import Tracking
from as2ray.training.train import train_here
from as2ray.training.validation import Watched, validate


@pytest.mark.parametrize("selection", ["dev/AP", "epoch"])
def test_ranker_of_a_run_is_its_best_or_its_last(checkpoint, corpus, tmp_path, selection):
    # What the run learns is wrong on dev, whose MAP falls.
    turned = PairFiles.find(corpus).table()
    place, field = turned.column_names.index("label"), turned.schema.field("label")
    labels = pc.subtract(1, turned["label"]).cast(field.type)
    turned = turned.set_column(place, field, labels)
    dev = tiny.write_corpus(tmp_path / "dev", turned)
    settings = {"epochs": 4, "batch": 16, "learning_rate": 3e-3, "precision": "fp32"}
    job = Job(
        Model(str(checkpoint("bert", None, initializer_range=0.1)), max_length=40),
        (str(corpus),),
        {"dev": str(dev)},
        Training(**settings, selection=selection),
        tracking=Tracking(tensorboard=False),
    )
    ranker = load(train_here(job, tmp_path / "run"), precision="fp32")
    maps = [x["dev/AP"] for x in told(tmp_path / "run", "dev/AP")]
    assert maps[-1] < max(maps) - 0.05
    found = validate(ranker, {"dev": Watched.pack(turned, ranker, 8_192)})["dev/AP"]
    assert found == pytest.approx(max(maps) if selection == "dev/AP" else maps[-1], abs=1e-6)


def test_unknown_selection_is_refused():
    with pytest.raises(RecipeError, match="'selection': 'test/AP'"):
        Training(selection="test/AP")
