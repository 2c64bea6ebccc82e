"""The digest of a stage: equal for equal configurations, another for every change that matters."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from as2ray.experiments.recipe import TableSpec, read_recipe
from as2ray.experiments.stage import NOT_IDENTITY, Stage, sorted_stages
from as2ray.experiments.tables import PreparedTable
from pipelines import cascade, distill, pseudo_label, search, transfer_adapt, two_in_one

RECIPES = {
    "cascade_bounds": cascade,
    "cascade_minilm": cascade,
    "cerberus_minilm": distill,
    "mokrii_epochs": search,
    "mokrii_yahoo": pseudo_label,
    "tanda_minilm": transfer_adapt,
    "two_in_one_minilm": two_in_one,
}


@dataclass(frozen=True, eq=False)
class Configured(Stage):
    settings: Any = None
    source: Stage | None = None
    place: str = field(default="", metadata=NOT_IDENTITY)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
SETTINGS = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=9
)


def rewritten(value, rng):
    """The same value with keys in another order and tuples for lists."""
    if isinstance(value, dict):
        return {key: rewritten(value[key], rng) for key in rng.sample(list(value), len(value))}
    return tuple(rewritten(item, rng) for item in value) if isinstance(value, list) else value


@given(settings=SETTINGS, rng=st.randoms(use_true_random=False), place=st.text())
def test_digest_depends_neither_on_the_order_of_keys_nor_on_the_place(settings, rng, place):
    stage = Configured(settings, Configured({"of": settings}))
    other = rewritten(settings, rng)
    same = Configured(other, Configured({"of": other}, place=place), place=place)
    assert same.key == stage.key
    assert same.identity({}) == json.loads(json.dumps(stage.identity({})))


@given(one=SETTINGS, other=SETTINGS)
def test_digest_of_another_configuration_or_input_is_another(one, other):
    assume(one != other)
    stages = [Configured(one), Configured(other), Configured(source=Configured(one))]
    assert len({stage.key for stage in stages}) == 3
    assert Configured(source=Configured(other)).key != stages[2].key


def test_digest_depends_on_version_and_class_and_a_path_is_its_text():
    class Newer(Configured):
        VERSION = Configured.VERSION + 1

        kind = "Configured"

    class Other(Configured):
        pass

    assert len({each().key for each in (Configured, Newer, Other)}) == 3
    assert Configured(Path("a/b")).key == Configured("a/b").key


@cache
def graphs() -> dict[str, dict[str, Stage]]:
    """The stages of each recipe by name."""
    by_recipe = {}
    for name, module in RECIPES.items():
        arguments = ["--config", f"pipelines/recipes/{name}.yaml", "--output", "-"]
        recipe, _ = read_recipe(module.PIPELINE.recipe_type, arguments)
        by_recipe[name] = module.PIPELINE.build(recipe, {}).stages
    return by_recipe


def keys() -> list[list[str]]:
    """The digests of all stages by recipe and name, in the order in which they are made."""
    return [[r, n, stage.key] for r, graph in graphs().items() for n, stage in graph.items()]


def changed(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields a value with one part changed, and the path of that part."""
    if isinstance(value, Stage):
        yield path, Configured(value)
    elif is_dataclass(value):
        for each in fields(value):
            for place, part in changed(getattr(value, each.name), f"{path}.{each.name}"):
                other = copy.copy(value)
                object.__setattr__(other, each.name, part)  # also what pydantic would refuse
                yield place, other
    elif isinstance(value, dict):
        yield path, {**value, "another": 1}
    elif isinstance(value, tuple):
        yield path, (*value, "another")
    elif isinstance(value, str):
        yield path, f"{value}x"
    else:
        yield path, not value if isinstance(value, bool | None) else value + 1


def test_every_part_of_a_stage_changes_its_digest_but_places_and_what_is_not_used():
    graph = sorted_stages(stage for each in graphs().values() for stage in each.values())
    by_kind = {stage.kind: stage for stage in graph if stage.kind != "PreparedTable"}
    assert len(by_kind) > 25
    for kind, stage in by_kind.items():
        for each in fields(stage):
            for path, value in changed(getattr(stage, each.name), each.name):
                other = copy.copy(stage)
                other.__dict__.pop("key", None)
                object.__setattr__(other, each.name, value)
                is_used = each.metadata.get("identity", True) and not (
                    path == "model.path" and getattr(stage, "init_from", None)
                )
                assert (other.key != stage.key) == is_used, f"{kind}.{path}"


TABLE = {"corpus": "squad", "split": "train", "corpus_options": {"max_candidates": 20}}


@pytest.mark.parametrize(
    "change",
    [
        {"corpus": "hotpotqa", "corpus_options": {}},
        {"split": "dev"},
        {"question_filter": "clean"},
        {"corpus_options": {"max_candidates": 21}},
        {"corpus_options": {"max_candidates": 20, "candidate_scope": "paragraph"}},
        {"label_noise": 0.1},
        {"num_questions": 5},
        {"max_negatives": 5},
        {"seed": 1},
        {"verify": False},
    ],
)
def test_every_setting_of_a_table_changes_its_digest(change):
    table = PreparedTable(TableSpec(**TABLE))
    assert PreparedTable(TableSpec(**{**TABLE, **change})) != table
    assert PreparedTable(TableSpec(**TABLE), data_dir="/elsewhere") == table
    assert PreparedTable(TableSpec(**TABLE), (table,)) != table
    some, hard = ({**TABLE, "max_negatives": 5, "hard_negatives": n} for n in (0, 2))
    assert PreparedTable(TableSpec(**some)) != PreparedTable(TableSpec(**hard))
    assert "hard_negatives" not in PreparedTable(TableSpec(**some)).identity({})["spec"]
    assert PreparedTable(TableSpec(**TABLE), min_leak_similarity=0.5) != table


def test_options_of_a_corpus_are_the_same_however_they_are_spelled():
    spellings = [TABLE | {"corpus_options": {"max_candidates": n}} for n in (20, 20.0, "20")]
    assert len({PreparedTable(TableSpec(**spelling)).key for spelling in spellings}) == 1


def test_digests_and_their_order_are_the_same_in_a_process_with_other_hashes_of_strings():
    code = "import json, test_stage_identity; print(json.dumps(test_stage_identity.keys()))"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout) == keys()
