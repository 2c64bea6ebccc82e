"""Ends of several studies side by side."""

import json

import pytest

from as2ray.errors import ConfigError
from pipelines.table_1 import combine_studies


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
    for damaged in ('{"measure": "RR", "tar', '{"measure": "RR"}', "[]"):
        (tmp_path / "one" / "table1.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"table1\.json is damaged: \w+Error"):
            combine_studies([one])
    with pytest.raises(ConfigError, match=r"no table1\.json"):
        combine_studies([str(tmp_path / "nothing")])
