"""What `--print_config` prints of a recipe is a recipe of the same stages."""

import random
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dry_run import RECIPES, pipeline_of

from as2ray.errors import ConfigError
from as2ray.experiments.configuration import PRINT_CONFIG, print_config, validate
from as2ray.experiments.recipe import Recipe, RunOptions, RunSpec, TableSpec, read_recipe
from as2ray.losses.listwise import ListwiseLoss
from as2ray.losses.pairwise import MarginRankingLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec

IN_ORDER = {"runs", "stages"}
"""Keys whose mappings have an order: a run may build on those before it."""


def printed(recipe_type, arguments, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        read_recipe(recipe_type, [*arguments, "--print_config"])
    assert not stopped.value.code
    return capsys.readouterr().out


def read_text(recipe_type, text, folder):
    path = folder / "printed.yaml"
    path.write_text(text, encoding="utf-8")
    return read_recipe(recipe_type, ["--config", str(path)])


def respelled(value, rng, key=""):
    """The same configuration with keys in another order and numbers written in another way."""
    if isinstance(value, dict):
        keys = list(value)
        if key not in IN_ORDER:
            rng.shuffle(keys)
        return {name: respelled(value[name], rng, name) for name in keys}
    if isinstance(value, list):
        return [respelled(item, rng) for item in value]
    if isinstance(value, float):
        return f"{value:.17e}"
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_printed_recipe_is_the_same_recipe_however_it_is_spelled(path, capsys, tmp_path):
    pipeline = pipeline_of(path)
    arguments = ["--config", str(path), "--output", "out"]
    original = read_recipe(pipeline.recipe_type, arguments)
    text = printed(pipeline.recipe_type, arguments, capsys)
    assert read_text(pipeline.recipe_type, text, tmp_path) == original
    values = respelled(yaml.load(text, yaml.CSafeLoader), random.Random(0))
    other = yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False)
    recipe, options = read_text(pipeline.recipe_type, other, tmp_path)
    assert (recipe, options) == original
    stages = [pipeline.build(each, {}).stages for each in (original[0], recipe)]
    assert stages[0] == stages[1]


RECIPE_TYPES = {pipeline_of(path).recipe_type for path in RECIPES}


@pytest.mark.parametrize("recipe_type", sorted(RECIPE_TYPES, key=str), ids=lambda t: t.__name__)
def test_help_lists_every_field_of_a_recipe_and_of_its_options(recipe_type, capsys):
    with pytest.raises(SystemExit) as stopped:
        read_recipe(recipe_type, ["--help"])
    assert not stopped.value.code
    text = capsys.readouterr().out
    names = [field.name for kind in (recipe_type, RunOptions) for field in fields(kind)]
    assert [name for name in names if f"--{name}" not in text] == []


# PyYAML reads these three as ends of lines, whatever it wrote.
LETTER = st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029")
TEXT = st.text(LETTER) | st.sampled_from(["null", "1e3", "yes", "- a", "~"])
NUMBER = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
LOSS = st.one_of(
    st.just("cross_entropy"),
    st.builds(ListwiseLoss, list_size=st.integers(2, 30)),
    st.builds(MarginRankingLoss, margin=NUMBER),
)


@settings(max_examples=50)
@given(
    title=TEXT,
    loss=LOSS,
    learning_rate=NUMBER,
    path=TEXT,
    columns=st.dictionaries(TEXT, TEXT),
    published=st.dictionaries(TEXT, st.floats(allow_nan=False)),
    store=st.none() | TEXT,
)
def test_printed_recipe_has_the_same_texts_numbers_and_losses(
    title, loss, learning_rate, path, columns, published, store
):
    training = TrainingConfig(learning_rate=learning_rate, max_batch_tokens=4_096)
    recipe = Recipe(
        title=title,
        model=ModelSpec(path),
        tables={"all": TableSpec(path=path, columns=columns), "test": TableSpec(path=title)},
        dev="test",
        tests=["test"],
        runs={"a": RunSpec(["all"], training, loss=loss), "b": RunSpec(["all"], init_from="a")},
        baseline="a",
        published_results={"test": {"a": published}},
    )
    options = RunOptions(output=title or "out", store=store or None)
    with redirect_stdout(StringIO()) as stream, pytest.raises(SystemExit):
        print_config([recipe, options], [PRINT_CONFIG])
    with TemporaryDirectory() as folder:
        assert read_text(Recipe, stream.getvalue(), Path(folder)) == (recipe, options)


@pytest.mark.parametrize("flag", ["output", "store", "workers.storage_path"])
def test_relative_folder_in_the_copy_of_a_job_is_refused(tmp_path, monkeypatch, flag):
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    kept = {"output": "/shared/out", "store": "s3://bucket/store"}
    assert validate(RunOptions, kept).store == kept["store"]
    keys = {"workers": {"storage_path": "kept"}} if "." in flag else {flag: "kept"}
    with pytest.raises(ConfigError, match=f"^{flag}=kept is in the job's copy"):
        validate(RunOptions, {**kept, **keys})
