"""The parts of an answer's score and their sums, on two made-up corpora."""

import pytest

from as2ray.console.configuration import console_log
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.recipe import TableSpec, read_recipe
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from pipelines.answer_scores import BASELINE, PIPELINE, AnswerScores, build

TINY = TrainingConfig(epochs=1, global_batch_size=16, learning_rate=1e-3, precision="fp32")


def test_all_parts_and_their_sums_are_compared_with_the_untrained_similarity(
    data_root, checkpoint, sentence_encoder, tmp_path, capsys
):
    dev, test = TableSpec("wikiqa", "dev"), TableSpec("wikiqa", "test")
    recipe = AnswerScores(
        model=ModelSpec(str(checkpoint("bert", None)), max_length=32),
        encoder=sentence_encoder,
        tables={
            "wikiqa": {"train": TableSpec("wikiqa", "train"), "dev": dev, "test": test},
            "qnli": {"train": TableSpec("qnli", "dev"), "dev": dev, "test": test},
        },
        sources={"wikiqa": "qnli"},
        encoder_training=TINY,
        training=TINY,
    )
    with console_log(verbose=True):
        PIPELINE.run(recipe, tmp_path / "out", WorkersConfig(num_workers=0))
    shown = capsys.readouterr().out
    report = (tmp_path / "out" / "wikiqa.md").read_text()
    for system in ("cosine", "hybrid", "ranker", "fused"):
        for kind in ("zero-shot", "adapted"):
            assert f"| {system}, {kind}" in report
    assert f"| {BASELINE}" in report
    assert "| BM25" in report
    assert "fused, zero-shot: score: 1 similarity + 0.5 bm25 + 1 ranker" in shown
    assert "fused, adapted: score: " in shown


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"sources": {"nope": "squad"}}, "unknown corpus of sources 'nope'"),
        ({"sources": {"wikiqa": "nope"}}, "unknown corpus of sources 'nope'"),
        ({"sources": {}}, "sources has no corpus"),
        ({"sources": {"a": "squad"}, "tables": {"a": {}}}, r"'a' lack \['train', 'dev', 'test'\]"),
    ],
)
def test_source_without_tables_is_refused(wrong, problem):
    with pytest.raises(ConfigError, match=problem):
        AnswerScores(**wrong)


def test_only_corpora_with_a_source_are_compared():
    wikiqa = ["--output", "out", "--sources", "{wikiqa: squad}", "--tables", "{unused: {}}"]
    recipe, _ = read_recipe(AnswerScores, wikiqa)
    assert {test for test, *_ in build(recipe, {}).evaluations} == {"wikiqa"}
