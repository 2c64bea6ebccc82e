"""Configurations: YAML files and flags are merged, and every error names its path."""

import sys
from dataclasses import field, fields
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import pytest
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.errors import MAX_PROBLEMS, ConfigError
from as2ray.experiments.configuration import (
    PRINT_CONFIG,
    describe_type,
    print_config,
    print_help,
    read_tree,
    validate,
)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Training:
    epochs: PositiveInt = 3
    learning_rate: float = 1e-5


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Run:
    train: list[str]
    training: Training = field(default_factory=Training)
    split: str = "all"
    fsdp: bool = False


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Uniform:
    low: float = 0.0
    type: Literal["uniform"] = "uniform"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Normal:
    deviation: float = 1.0
    name: str = ""
    type: Literal["normal"] = "normal"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Study:
    """A study."""

    title: str
    runs: dict[str, Run] = field(default_factory=dict)
    training: Training = field(default_factory=lambda: Training(epochs=7))
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    precision: Literal["fp32", "bf16"] = "fp32"
    prompt: str | None = None
    sources: dict[str, str] = field(default_factory=lambda: {"a": "b", "c": "d"})
    noise: Annotated[Uniform | Normal, Field(discriminator="type")] | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Place:
    output: str = "here"
    overwrite: bool = False


def read_config(kind, arguments):
    print_help([kind], arguments)
    return validate(kind, read_tree([kind], arguments))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("title: T\nruns: {adapt: {train: [a], training: {epochs: 2}}}\n")
    return path


def test_flags_of_entries_have_the_types_of_their_fields(config):
    flags = ["--config", str(config), "--runs.adapt.split", "2024", "--runs.adapt.fsdp"]
    run = read_config(Study, [*flags, "--runs.adapt.training.epochs=5"]).runs["adapt"]
    assert run == Run(["a"], Training(epochs=5), "2024", fsdp=True)


def test_help_of_one_choice_shows_its_fields(capsys):
    with pytest.raises(SystemExit) as ended:
        read_config(Study, ["--title", "T", "--noise.help", "Uniform"])
    assert ended.value.code == 0
    assert "--noise.low" in capsys.readouterr().out


def test_empty_mapping_as_flag_empties_that_of_the_file(config):
    assert read_config(Study, ["--config", str(config), "--runs", "{}"]).runs == {}
    kept = read_config(Study, ["--config", str(config), "--training", "{}"])
    assert kept.training == Training(epochs=7)


@pytest.mark.parametrize("sources", [{}, {"a": "c"}])
def test_entries_that_are_given_replace_the_default_ones(sources):
    assert read_config(Study, ["--title=T", f"--sources={sources}"]).sources == sources


def test_flags_change_keys_of_the_file(config):
    study = read_config(
        Study,
        ["--config", str(config), "--runs.adapt.training.epochs=5", "--runs.more", "{train: [b]}"],
    )
    assert study.runs["adapt"] == Run(["a"], Training(epochs=5))
    assert study.runs["more"] == Run(["b"])


def test_a_flag_keeps_the_other_defaults_of_its_field():
    study = read_config(Study, ["--title", "T", "--training.learning_rate", "1e-3"])
    assert study.training == Training(epochs=7, learning_rate=1e-3)


def test_value_of_a_string_is_not_read_as_yaml():
    study = read_config(Study, ["--title=2024", "--prompt", "[ask]: a=b"])
    assert (study.title, study.prompt) == ("2024", "[ask]: a=b")
    assert read_config(Study, ["--title=T", "--prompt=null"]).prompt is None


def test_plus_appends_to_a_list_or_its_default(config):
    arguments = ["--config", str(config), "--seeds+", "5", "--runs.adapt.train+=[b, c]"]
    study = read_config(Study, arguments)
    assert study.seeds == [0, 1, 5]
    assert study.runs["adapt"].train == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("yaml", "error"),
    [
        ("{runs: {a: {train: [t], training: {epochs: 0}}}}", "runs.a.training.epochs=0: Input"),
        ("{runs: {a: {train: [t], trainin: {epochs: 1}}}}", "runs.a.trainin: unknown key"),
        ("{runs: {a: {}}}", "runs.a.train: required"),
        ("{training: {epochs: many}}", "training.epochs='many': Input should be a valid integer"),
        ("{titel: x}", "titel: unknown key"),
        ("{precision: fp64}", "precision='fp64': Input should be 'fp32' or 'bf16'"),
        ("{noise: {type: normal, deviatoin: 1}}", "noise.normal.deviatoin: unknown key; did you"),
        ("[1, 2]", "not a YAML mapping"),
        ("{", "is not YAML: line 1, column 2: expected"),
        ("title: T\ntitle: U", "is not YAML: line 2, column 1: the key 'title' is there twice"),
    ],
)
def test_wrong_values_are_refused_with_their_path(tmp_path, yaml, error):
    (tmp_path / "wrong.yaml").write_text(yaml)
    with pytest.raises(ConfigError) as raised:
        read_config(Study, ["--title=T", f"--config={tmp_path / 'wrong.yaml'}"])
    assert error in str(raised.value)


def test_truth_values_in_place_of_numbers_are_refused_with_their_paths():
    runs = "{a: {train: [t], training: {epochs: yes}}}"
    with pytest.raises(ConfigError) as raised:
        read_config(Study, ["--title=T", "--seeds=[0, true]", f"--runs={runs}"])
    assert sorted(str(raised.value).splitlines()) == [
        "runs.a.training.epochs=True must be a number",
        "seeds.1=True must be a number",
    ]


def test_keys_of_two_classes_stand_in_one_file_and_are_suggested_for_misspelled_ones(tmp_path):
    arguments = ["--title", "1", "--overwrite", "--output", "2024"]
    tree = read_tree([Study, Place], arguments)
    assert tree == {"title": "1", "overwrite": True, "output": "2024"}
    with pytest.raises(ConfigError, match=r"ouptut: unknown key; did you mean 'output'"):
        validate(Study, {"title": "1", "ouptut": "2024"}, Place)


def test_configuration_is_printed_with_its_defaults_in_the_order_of_its_keys(capsys):
    configs = [Study("Größe"), Place()]
    print_config(configs, ["--title=T"])
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        print_config(configs, ["--title=T", PRINT_CONFIG])
    printed = capsys.readouterr().out
    keys = [line.partition(":")[0] for line in printed.splitlines() if line[0].isalpha()]
    assert keys == [each.name for config in configs for each in fields(config)]
    assert "title: Größe" in printed
    assert "training:\n  epochs: 7\n" in printed


def test_recipe_is_found_by_its_name_from_everywhere_behind_files_of_that_path(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name, place = "tanda_minilm.yaml", "pipelines/recipes"
    for path in (name, f"./{name}", f"{place}/{name}"):
        assert read_tree([Study], ["--config", path])["title"] != "Mine"
    for path in (f"recipes/{name}", f"{place}/more/{name}"):
        with pytest.raises(ConfigError, match="no such file"):
            read_tree([Study], ["--config", path])
    (tmp_path / name).write_text("title: Mine")
    assert read_tree([Study], ["--config", name])["title"] == "Mine"


def test_misspelled_name_of_a_file_is_told_with_that_of_the_file_beside_it(config):
    config.with_name("studx.txt").touch()
    with pytest.raises(ConfigError, match=r"there is no such file\n.*did you mean 'study\.yaml'"):
        read_tree([Study], ["--config", str(config.with_name("studx.yaml"))])
    with pytest.raises(ConfigError, match=r"did you mean 'tanda_minilm\.yaml'"):
        read_tree([Study], ["--config", "tanda_minlm.yaml"])


def test_all_wrong_values_are_told_at_once():
    with pytest.raises(ConfigError) as raised:
        read_config(Study, ["--training.epochs=0", "--bogus=1"])
    assert len(str(raised.value).splitlines()) == 3


def test_error_about_many_values_has_few_lines():
    keys = [f"--key{number}=1" for number in range(9)]
    with pytest.raises(ConfigError) as raised:
        read_config(Study, keys)
    *_, last = lines = str(raised.value).splitlines()
    assert len(lines) == MAX_PROBLEMS
    assert last == "and 6 more"


@pytest.mark.parametrize("arguments", [["title"], ["--title"], ["--config=nowhere.yaml"]])
def test_what_is_not_a_flag_with_a_value_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"not a flag with a value|no such file"):
        read_config(Study, arguments)


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as stopped:
        read_config(Study, ["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--training.epochs" in printed
    assert "Annotated" not in printed
    assert "(type: str or null, default: null)" in " ".join(printed.split())
    assert "A study." in printed


def test_help_of_a_pipeline_begins_with_the_command_that_runs_it(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("pipelines.cascade"))
    with pytest.raises(SystemExit):
        read_config(Study, ["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m pipelines.cascade ")


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (PositiveInt, "int > 0"),
        (Annotated[float, Field(gt=0, lt=1)] | None, "float > 0 and < 1 or null"),
        (tuple[PositiveInt, ...] | None, "list of int > 0 or null"),
        (dict[Literal["train", "dev"], list[str]], "dict[train or dev, list of str]"),
        (dict[str, Any], "dict[str, any]"),
        (str | Training, "str or Training"),
    ],
)
def test_types_in_the_help_are_for_those_who_write_a_value(hint, text):
    assert describe_type(hint) == text
