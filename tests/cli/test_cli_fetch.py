"""Fetching from a folder in the layout of the hub, and from no network."""

import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.cli.main import main
from as2ray.corpora import wikiqa
from as2ray.corpora.preparation import read_split
from as2ray.errors import CorpusError
from as2ray.tables.raw_files import HUB_COPIES


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A copy of microsoft/wiki_qa, made from a release in the publisher's format."""
    monkeypatch.setenv(HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    release = tmp_path / "release"
    release.mkdir()
    tiny.write_wikiqa(release, "dev", 0, 9)
    rows = wikiqa.raw_files.read_tsv(release / "WikiQA-dev.tsv", wikiqa.COLUMNS, has_header=True)
    (table,) = rows
    columns = wikiqa.CANDIDATE_COLUMNS
    names = {columns[name]: wikiqa.HUB_COLUMNS[name] for name in columns}
    table = table.select(list(names)).rename_columns(list(names.values()))
    folder = tmp_path / "hub" / wikiqa.HUB_DATASET / "data"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "validation-00000-of-00001.parquet")
    return release


def test_split_is_fetched_from_a_folder_in_the_layout_of_the_hub(hub, capsys):
    with pytest.raises(SystemExit):
        main(["corpora", "fetch", "--corpus", "wikiqa", "--splits", '["dev"]'])
    assert "published are 296 questions" in capsys.readouterr().err
    fetched = read_split("wikiqa", "dev", "hub", verify=False)
    assert fetched.num_rows > 9
    assert fetched.equals(read_split("wikiqa", "dev", hub, verify=False))


def test_without_a_network_fetching_ends_with_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit):
        main(["corpora", "fetch", "--corpus", "wikiqa", "--splits", '["dev"]'])
    told = capsys.readouterr().err
    assert "microsoft/wiki_qa cannot be read from the hub" in told
    assert "Traceback" not in told
    revision = {"hub_revision": "refs/convert/parquet"}
    for corpus in ("wikiqa", "asnq", "qnli", "squad", "hotpotqa"):
        with pytest.raises(CorpusError, match=r"@refs/convert/parquet cannot be read"):
            read_split(corpus, "train", "hub", **revision)
