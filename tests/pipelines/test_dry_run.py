"""Every shipped recipe can be shown before it is run, without data, models or a hub."""

from pathlib import Path

import pytest

from pipelines import cascade, distill, pseudo_label, search, transfer_adapt, two_in_one

RECIPES = sorted(Path("pipelines/recipes").glob("*.yaml"))


def pipeline_of(path):
    pipelines = {
        "tanda": transfer_adapt,
        "cascade": cascade,
        "cerberus": distill,
        "two": two_in_one,
        "pseudo": pseudo_label,
        "mokrii": pseudo_label,
    }
    others = {"cerberus_teachers": transfer_adapt, "mokrii_epochs": search}
    if path.stem in others:
        return others[path.stem].PIPELINE
    return pipelines[path.stem.partition("_")[0]].PIPELINE


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path / "nothing"))
    return ["--output", str(tmp_path / "out"), "--dry_run"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dry_run_of_a_recipe_lists_its_stages_and_what_is_missing(path, no_data, capsys, tmp_path):
    pipeline_of(path).command(["--config", str(path), *no_data])
    text = capsys.readouterr().out
    assert "hours on one device" in text
    assert "PreparedTable" in text
    assert "TrainedRanker" in text or "FewShotRanker" in text
    assert "missing: " in text
    assert "missing: 'tables/" not in text  # the corpus is named, with what gets it
    assert "data_dirs." in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        ("listwise_cross_entropy", "listwise_cross_entropy"),
        ("{type: listwise_cross_entropy, list_size: 30}", "listwise_cross_entropy"),
        ("as2ray.losses.pointwise:cross_entropy", "as2ray.losses.pointwise:cross_entropy"),
    ],
)
def test_dry_run_shows_the_loss_of_a_run(no_data, capsys, loss, shown):
    path = "pipelines/recipes/tanda_minilm.yaml"
    transfer_adapt.PIPELINE.command(["--config", path, *no_data, "--runs.wikiqa.loss", loss])
    [line] = [
        x for x in capsys.readouterr().out.splitlines() if x.startswith("rankers/wikiqa-seed0")
    ]
    assert line.split()[0] == "rankers/wikiqa-seed0,1,2"  # one row for all seeds
    assert line.split()[3] == shown


def test_dry_run_of_a_recipe_that_cannot_run_exits_with_its_error(no_data, capsys):
    path = "pipelines/recipes/tanda_table3.yaml"
    with pytest.raises(SystemExit) as raised:
        transfer_adapt.PIPELINE.command(
            ["--config", path, *no_data, "--runs.wikiqa.num_layers", "13"]
        )
    assert raised.value.code == 2
    assert "'rankers/wikiqa-seed0': num_layers=13 is not from 1 to 12" in capsys.readouterr().err


def test_output_that_cannot_be_written_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    path = "pipelines/recipes/tanda_minilm.yaml"
    with pytest.raises(SystemExit) as error:
        transfer_adapt.PIPELINE.command(["--config", path, "--output", str(tmp_path / "file/out")])
    assert error.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("NotADirectoryError: ")
