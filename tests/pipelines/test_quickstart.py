"""The quickstart, end to end with a tiny encoder."""

import pytest

from as2ray.distributed.plan import Workers
from as2ray.errors import RecipeError
from as2ray.training.config import Training
from pipelines import quickstart
from pipelines.quickstart import Quickstart, run

TINY = Training(epochs=1, batch=256, learning_rate=1e-3, precision="fp32")


@pytest.mark.slow
def test_quickstart_trains_reports_answers_and_can_be_asked(checkpoint, tmp_path, capsys):
    asked = Quickstart(
        output=str(tmp_path / "out"),
        model=str(checkpoint("bert", None)),
        transfer=TINY,
        adapt=TINY,
        workers=Workers(count=0),
        max_length=48,
    )
    run(asked)
    out = capsys.readouterr().out
    assert "BM25" in out
    assert all(question in out for question in quickstart.SAMPLES)
    for name in ("report.md", "report.json", "measures.png", "loss.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    quickstart.answer(asked, "What is a generator?")
    assert "What is a generator?" in capsys.readouterr().out


def test_quickstart_asked_before_it_ran_says_what_to_run(tmp_path):
    with pytest.raises(RecipeError, match="make quickstart"):
        quickstart.answer(Quickstart(output=str(tmp_path)), "Why?")
