"""Ends of several studies side by side."""

import json

import numpy as np
import pytest
import tiny

from as2ray.errors import ConfigError
from as2ray.evaluation.measures import evaluate
from pipelines.table_1 import answer_questions, combine_studies, command


@pytest.fixture
def study(tmp_path):
    """A finished study's folder: `study(name, measure, targets)`."""

    def made(name, measure, targets):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "table1.json").write_text(json.dumps({"measure": measure, "targets": targets}))
        return str(folder)

    return made


def test_targets_stand_side_by_side_and_gaps_stay_empty(study):
    one = study("one", "RR", {"squad": {"wikiqa": ["0.5*", "0.7"], "BM25": ["0.4", ""]}})
    two = study("two", "RR", {"wikiqa": {"squad": ["0.6", "0.8"], "BM25": ["0.3", ""]}})
    lines = combine_studies([one, two]).splitlines()
    assert lines[:5] == [
        "| RR | squad ZS | squad FS | wikiqa ZS | wikiqa FS |",
        "| --- | --- | --- | --- | --- |",
        "| wikiqa | 0.5* | 0.7 |  |  |",
        "| BM25 | 0.4 |  | 0.3 |  |",
        "| squad |  |  | 0.6 | 0.8 |",
    ]


def test_studies_that_do_not_go_together_are_refused(study, tmp_path):
    one = study("one", "RR", {"squad": {}})
    with pytest.raises(ConfigError, match=r"targets \['squad'\] again"):
        combine_studies([one, one])
    with pytest.raises(ConfigError, match="one measure"):
        combine_studies([one, study("two", "AP", {"wikiqa": {}})])
    for damaged, problem in (
        ('{"measure": "RR", "tar', "Invalid JSON"),
        ('{"measure": "RR"}', "targets: required"),
        ("[]", "object"),
    ):
        (tmp_path / "one" / "table1.json").write_text(damaged)
        with pytest.raises(ConfigError, match=rf"table1\.json is damaged: .*{problem}"):
            combine_studies([one])
    with pytest.raises(ConfigError, match=r"no table1\.json"):
        combine_studies([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="no study is given"):
        combine_studies([])


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ([["0.5", "0.7"]], r"targets\.wikiqa=.*object"),
        ({"BM25": ["0.4"]}, r"targets\.wikiqa\.BM25\.1: required"),
        ({"BM25": ["0.4", "", ""]}, r"targets\.wikiqa\.BM25="),
        ({"BM25": ["0.4", 0.5]}, r"targets\.wikiqa\.BM25\.1=0\.5"),
    ],
)
def test_target_with_other_cells_is_refused_beside_another_study(study, target, problem):
    one = study("one", "RR", {"squad": {"BM25": ["0.4", ""]}})
    with pytest.raises(ConfigError, match=rf"table1\.json is damaged: .*{problem}"):
        combine_studies([one, study("two", "RR", {"wikiqa": target})])


def test_research_questions_are_answered_by_numbers():
    table = tiny.candidates(60, each=8)
    label, noise = table["label"].to_numpy(), np.random.default_rng(0)

    def results(*qualities):
        """Results by sample of rankers that put so large a share of the positives first."""
        chosen = [noise.permutation(60) < round(60 * quality) for quality in qualities]
        scores = [np.where(np.repeat(c, 8), label, -label) for c in chosen]
        return {n: evaluate(table, s + 0.0, ["P@1"]) for n, s in enumerate(scores)}

    systems = {
        "BM25": results(0.5),
        "scratch+128": results(0.6, 0.7),
        "scratch+32": results(0.6, 0.2),
        "scratch+all": results(0.9),
        "squad": results(0.25),
        "pseudo": results(0.55),
        "squad+32": results(0.2, 0.2),
        "squad+128": results(0.8),
        "squad+32, with BM25": results(0.9),
    }
    lines = answer_questions(systems, ["squad"], "P@1").splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:4] for row in rows] == [
        ["RQ1", "questions from which on scratch is above BM25", "128", ""],
        ["RQ2", "pseudo against BM25", "+10.0%", "higher"],
        ["RQ3", "squad against BM25", "-50.0%", "lower"],
        ["RQ4", "squad against pseudo", "-54.5%", "lower"],
        ["RQ5", "squad+32 against squad", "-20.0%", "lower: a little bit is worse than none"],
        ["RQ5", "squad+128 against squad", "+220.0%", "higher"],
    ]
    assert [row[4] for row in rows][1:] == ["", "significant", "significant", "", "significant"]
    below = {**systems, "scratch+all": results(0.1)}
    assert "| more than all |" in answer_questions(below, [], "P@1")


def test_wrong_command_line_is_refused_as_those_of_pipelines(study, capsys):
    for arguments, problem in (
        (["--studies", "output/squad"], "ConfigError: studies='output/squad': Input should be a"),
        ([], "ConfigError: studies: required"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command(arguments)
        assert capsys.readouterr().err.startswith(problem)
    command(["--studies", str([study("one", "RR", {"squad": {"BM25": ["0.4", ""]}})])])
    assert "| BM25 | 0.4 |  |" in capsys.readouterr().out
