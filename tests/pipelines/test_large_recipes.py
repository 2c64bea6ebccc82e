"""A recipe of large encoders: their published widths, random weights, few and thinner layers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.checkpoints.loading import load
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.recipe import RunSpec, read_recipe
from pipelines.distill import PIPELINE, Recipe

ELECTRA = {"max_position_embeddings": 512, "num_hidden_layers": 2}
PUBLISHED = {
    "roberta-large": (
        "roberta",
        {
            "hidden_size": 1_024,
            "num_attention_heads": 16,
            "intermediate_size": 256,
            "max_position_embeddings": 514,
            "num_hidden_layers": 2,
        },
    ),
    "google/electra-large-discriminator": (
        "electra",
        {
            **ELECTRA,
            "embedding_size": 1_024,
            "hidden_size": 1_024,
            "num_attention_heads": 16,
            "intermediate_size": 256,
        },
    ),
    "google/electra-base-discriminator": (
        "electra",
        {
            **ELECTRA,
            "embedding_size": 768,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 256,
        },
    ),
    "albert/albert-xxlarge-v2": (
        "albert",
        {
            "embedding_size": 128,
            "hidden_size": 4_096,
            "num_attention_heads": 64,
            "intermediate_size": 256,
            "max_position_embeddings": 512,
            "num_hidden_layers": 1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}
"""Of the encoders that the recipe names: family, and shape as on the hub, but for the depth, the
vocabulary and the feed-forward layers, which are narrow."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for gigabytes that goes with the test."""
    with TemporaryDirectory() as place:
        yield Path(place)


@pytest.fixture
def encoders(folder, published) -> dict[str, str]:
    """For each encoder of the hub a folder with one of its shape."""
    return {
        name: str(tiny.write_checkpoint(folder / name, family, published(family), None, **shape))
        for name, (family, shape) in PUBLISHED.items()
    }


@pytest.mark.slow
def test_large_teachers_teach_a_student_with_a_head_for_each(encoders, folder, data_root):
    path = "pipelines/recipes/cerberus_table3.yaml"
    recipe, *_ = read_recipe(Recipe, ["--config", path, "--output", "out"])
    widths = {"roberta-large": 1_024, "electra-large": 1_024, "albert-xxlarge": 4_096}
    assert recipe.runs["cerberus"].teachers == list(widths)

    def reduced(name: str) -> RunSpec:
        step = replace(recipe.runs[name], dev=None)  # there is no small ASNQ dev
        training = replace(step.training, epochs=1, max_steps=None)
        if name in widths:  # adapted without their transfer: their files are gigabytes
            model = encoders[recipe.runs[f"{name}-asnq"].model or ""]
            return replace(step, model=model, init_from=None, training=training)
        return replace(step, exit_layers=(1,) if step.exit_layers else None, training=training)

    few = {"asnq": 6, "wikiqa-train": 6, "wikiqa-dev": 4, "wikiqa-test": 4}
    names = [*widths, "electra-base-asnq", "single", "cerberus"]
    small = replace(
        recipe,
        model=replace(recipe.model, path=encoders[recipe.model.path]),
        tables={
            name: replace(recipe.tables[name], num_questions=number) for name, number in few.items()
        },
        runs={name: reduced(name) for name in names},
        seeds=[0],
        measure_speed=False,
    )
    out = folder / "out"
    PIPELINE.run(small, out, WorkersConfig(num_workers=0))

    rows = json.loads((out / "wikiqa-test.json").read_text())["rows"]
    assert [row["system"] for row in rows] == names
    for teacher, width in widths.items():
        config = json.loads((out / "rankers" / f"{teacher}-seed0/ranker/config.json").read_text())
        assert config["hidden_size"] == width
    logits = [
        table
        for table in map(pq.read_table, (folder / "store" / "TableScores").glob("*/*.parquet"))
        if table.column_names == ["candidate_id", "not_answer", "answer"]
    ]
    assert len(logits) == len(widths)
    assert all(pc.all(pc.is_finite(table["answer"])).as_py() for table in logits)
    assert load(out / "rankers" / "cerberus-seed0" / "ranker").network.heads[-1].num_outputs == 3
