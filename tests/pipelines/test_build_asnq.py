"""A corpus out of pages with marked answers, from the command line's recipe to the report."""

import json

import pytest
from pydantic import ValidationError

from as2ray.corpora.preparation import read_split
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.parquet import ParquetTable
from pipelines.build_asnq import PIPELINE, Recipe

HERE = WorkersConfig(num_workers=0)


@pytest.fixture
def squad(tmp_path):
    context = "Ann founded Oxbridge. It opened in 1209. Bo left."
    asked = {"id": "a", "question": "Who?", "answers": [{"answer_start": 0, "text": "Ann"}]}
    broken = {"id": "b", "question": "Who?", "answers": [{"answer_start": 3, "text": "Ann"}]}
    articles = [
        {"title": f"T{i}", "paragraphs": [{"context": context, "qas": [asked | {"id": f"a{i}"}]}]}
        for i in range(3)
    ]
    articles.insert(1, {"title": "B", "paragraphs": [{"context": context, "qas": [broken]}]})
    path = tmp_path / "dev-v1.1.json"
    path.write_text(json.dumps({"data": articles}))
    return {"squad": str(path)}


@pytest.mark.cluster
def test_built_corpus_is_what_the_reader_reads_with_its_counts_by_grade(squad, tmp_path):
    recipe = Recipe("squad", "dev", max_bad_records=1)
    PIPELINE.run(recipe, tmp_path / "out", HERE, squad)
    made = tmp_path / "out" / "squad-dev"
    found = json.loads((made / "manifest.json").read_text())["outputs"]
    assert found["counts"] == {"num_questions": 3, "num_pairs": 9, "num_positives": 3}
    assert found["grades"] == {"1": 0, "2": 0, "3": 6, "4": 3}
    assert found["fingerprint"] == fingerprint(ParquetTable.open(made).to_table())
    [bad] = [json.loads(line) for line in (made / "quarantine.jsonl").read_text().splitlines()]
    assert "article 1" in bad["source"]
    assert "is not at its offset, character 3" in bad["problem"]
    text = (tmp_path / "out" / "squad-dev.md").read_text()
    assert "3 positives; 1 bad records left out" in text
    assert "| 4 | in the long answer, with the short | 3 | 1.00 | 4,286 | 1.60 |" in text
    whole = json.loads((tmp_path / "dev-v1.1.json").read_text())
    whole["data"].pop(1)
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(whole))
    assert found["fingerprint"] == fingerprint(read_split("squad", "dev", squad["squad"]))


def test_more_bad_records_than_allowed_end_the_build_and_leave_no_stage(squad, tmp_path):
    with pytest.raises(CorpusError, match=r"1 bad records, such as .*article 1"):
        PIPELINE.run(Recipe("squad", "dev"), tmp_path / "out", HERE, squad)
    assert not (tmp_path / "out" / "squad-dev" / "manifest.json").exists()
    assert not list((tmp_path / "out" / "squad-dev").glob("**/*.parquet"))


def test_stored_corpus_without_more_bad_records_than_allowed_is_refused(squad, tmp_path):
    PIPELINE.run(Recipe("squad", "dev", max_bad_records=1), tmp_path / "out", HERE, squad)
    with pytest.raises(CorpusError, match=r"without 1 bad records(.|\n)*--max_bad_records 1"):
        PIPELINE.run(Recipe("squad", "dev"), tmp_path / "strict", HERE, squad)


def test_dry_run_says_which_release_is_read_or_missing(squad, tmp_path, capsys):
    arguments = ["--corpus", "squad", "--split", "dev", "--output", str(tmp_path), "--dry_run"]
    PIPELINE.command([*arguments, "--data_dirs.squad", squad["squad"]])
    assert "missing" not in capsys.readouterr().out
    PIPELINE.command([*arguments, "--data_dirs.squad", str(tmp_path / "nowhere")])
    assert "missing: squad" in capsys.readouterr().out


def test_corpus_that_is_candidates_already_is_refused(tmp_path):
    with pytest.raises(CorpusError, match="'wikiqa' is candidates already"):
        PIPELINE.run(Recipe("wikiqa", "dev"), tmp_path / "out", HERE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong", [{"max_bad_records": -1}, {"corpus": "squad", "asnq_compatible": True}]
)
def test_recipe_out_of_range_is_refused(wrong):
    with pytest.raises(ValidationError):
        Recipe(**wrong)


def test_compatible_recipe_joins_pages_flat_unless_an_option_says_otherwise():
    assert Recipe(asnq_compatible=True).resolved()["sentence_boundaries"] == "none"
    own = Recipe(asnq_compatible=True, corpus_options={"sentence_splitter": "syntok"}).resolved()
    assert (own["sentence_boundaries"], own["sentence_splitter"]) == ("none", "syntok")


def test_folder_of_an_unknown_corpus_is_refused_before_anything_runs(squad, tmp_path):
    folders = {**squad, "sqaud": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"data_dirs 'sqaud'(.|\n)*did you mean 'squad'"):
        PIPELINE.run(Recipe("squad", "dev"), tmp_path / "out", HERE, folders)
    assert not (tmp_path / "out").exists()


def test_wrong_option_of_a_pipeline_without_a_recipe_does_not_ask_for_one(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        PIPELINE.command(["--corpus=squad", "--asnq_compatible", "--output", str(tmp_path)])
    assert "recipe" not in capsys.readouterr().err


def test_folder_of_a_corpus_of_ones_own_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "squad_of_mine.py").write_text(
        "from dataclasses import replace\nfrom as2ray.corpora.squad import CORPUS\n"
        'CORPUS = replace(CORPUS, name="mine")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe("squad_of_mine:CORPUS", "dev")
    experiment, _ = PIPELINE.prepare(recipe, tmp_path / "out", {"mine": str(tmp_path)})
    assert [stage.data_dir for stage in experiment.targets] == [str(tmp_path)]
