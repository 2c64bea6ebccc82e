import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from as2ray.corpora import preparation
from as2ray.corpora.corpus import PublishedCounts
from as2ray.corpora.preparation import prepare_splits, read_split
from as2ray.corpora.registry import CORPORA, get_corpus, register_corpus
from as2ray.corpora.verification import list_corpora
from as2ray.errors import ConfigError, CorpusError, CountMismatchError
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.tables import prepared_table
from as2ray.tables import parquet
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.schema import TableCounts, count_table

SPLITS = {"train": "no_all_negative", "dev": "clean"}


def test_prepare_writes_what_read_gives(wikiqa, tmp_path):
    manifest = prepare_splits("wikiqa", wikiqa, tmp_path / "out", SPLITS, verify=False)
    for split, filter in SPLITS.items():
        expected = read_split("wikiqa", split, wikiqa, filter, verify=False)
        table = ParquetTable.open(tmp_path / "out" / split).to_table()
        assert table.equals(expected)
        entry = manifest["splits"][split]
        assert entry["fingerprint"] == fingerprint(table)
        assert entry["counts"]["num_pairs"] == count_table(table).num_pairs


def test_prepare_verifies_the_counts_before_questions_are_left_out(wikiqa, tmp_path):
    published = PublishedCounts("dev", "raw", TableCounts(3, 4, 2))
    corpus = replace(get_corpus("wikiqa"), published_counts=(published,))
    held_out = [read_split("wikiqa", "dev", wikiqa, verify=False).slice(0, 1)]
    options = {"splits": {"dev": "raw"}, "held_out_tables": held_out}
    entry = prepare_splits(corpus, wikiqa, tmp_path / "out", **options)["splits"]["dev"]
    assert (entry["verified"], entry["num_leaked_questions"]) == (True, 1)
    assert entry["question_filter"] == "raw"
    assert entry["counts"] == {"num_questions": 2, "num_pairs": 2, "num_positives": 1}


def test_prepare_manifest_names_everything_the_data_depends_on(squad, tmp_path):
    prepare_splits("squad", squad, tmp_path / "out", {"dev": "raw"}, candidate_scope="paragraph")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["corpus"] == "squad"
    assert manifest["options"]["candidate_scope"] == "paragraph"
    assert manifest["options"]["negative_grades"] == [1, 2, 3]
    assert manifest["sentence_splitter"].startswith("syntok-")
    assert manifest["splits"]["dev"]["verified"] is False
    assert set(manifest["packages"]) == {"as2ray", "pyarrow", "numpy"}


def test_prepare_parts_end_with_a_question_and_share_one_fingerprint(squad, tmp_path, monkeypatch):
    whole = prepare_splits("squad", squad, tmp_path / "one", {"dev": "raw"})
    monkeypatch.setattr(preparation, "ROWS_PER_PART", 5)
    many = prepare_splits("squad", squad, tmp_path / "many", {"dev": "raw"})
    fingerprints = {m["splits"]["dev"]["fingerprint"] for m in (whole, many)}
    parts = sorted((tmp_path / "many" / "dev").glob("part-*.parquet"))
    questions = [set(pq.read_table(p)["question_id"].to_pylist()) for p in parts]
    assert len(fingerprints) == 1
    assert [p.name for p in parts] == [f"part-0000{i}.parquet" for i in range(3)]
    assert sum(map(len, questions)) == 3


def test_prepare_row_groups_stay_small(table, tmp_path, monkeypatch, wikiqa):
    monkeypatch.setattr(parquet, "ROW_GROUP_SIZE", 2)
    prepare_splits("wikiqa", wikiqa, tmp_path / "out", {"dev": "raw"}, verify=False)
    assert pq.ParquetFile(tmp_path / "out" / "dev" / "part-00000.parquet").num_row_groups == 2


def test_prepare_row_groups_begin_at_multiples_in_every_part(squad, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROW_GROUP_SIZE", 2)
    monkeypatch.setattr(preparation, "ROWS_PER_PART", 3)
    prepare_splits("squad", squad, tmp_path / "out", {"dev": "raw"})
    parts = sorted((tmp_path / "out" / "dev").glob("part-*.parquet"))
    groups = [pq.ParquetFile(part).metadata for part in parts]
    sizes = [m.row_group(g).num_rows for m in groups for g in range(m.num_row_groups)]
    starts = np.cumsum([0, *sizes[:-1]])
    part_starts = np.cumsum([0, *(m.num_rows for m in groups[:-1])])
    assert any(start % 2 for start in part_starts)
    assert all(start % 2 == 0 or start in part_starts for start in starts)
    assert max(sizes) == 2


@pytest.mark.parametrize("splits", [SPLITS, {"train": "raw", "nowhere": "raw"}])
def test_prepare_that_fails_leaves_nothing_behind(wikiqa, tmp_path, splits):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CorpusError):
        prepare_splits("wikiqa", wikiqa, tmp_path / "out", splits)
    assert sorted(tmp_path.iterdir()) == before


def test_prepare_of_no_split_is_refused(wikiqa, tmp_path):
    with pytest.raises(ConfigError, match="no splits; corpus 'wikiqa' has"):
        prepare_splits("wikiqa", wikiqa, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_prepare_other_counts_than_published_are_refused(wikiqa, tmp_path):
    with pytest.raises(CountMismatchError, match=r"wikiqa/train \(raw"):
        prepare_splits("wikiqa", wikiqa, tmp_path / "out", {"train": "raw"})


def test_prepare_existing_folder_is_refused_and_kept(wikiqa, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(CorpusError, match="out exists"):
        prepare_splits("wikiqa", wikiqa, tmp_path / "out", SPLITS)
    assert (tmp_path / "out").is_dir()


def test_prepare_filter_that_leaves_nothing_is_refused(write, tmp_path):
    write("qnli/dev.tsv", "index\tquestion\tsentence\tlabel\n0\twho?\tme\tentailment\n")
    with pytest.raises(CorpusError, match=r"qnli/dev \(clean\).*: no question passes the filter"):
        prepare_splits("qnli", tmp_path / "qnli", tmp_path / "out", {"dev": "clean"})


def test_read_without_source_looks_in_the_data_root(wikiqa, tmp_path, monkeypatch):
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path))
    assert read_split("wikiqa", "dev", verify=False).num_rows == 4


def test_every_corpus_names_its_options_files_and_license():
    for name, corpus in CORPORA.items():
        assert corpus.name == name
        assert corpus.description
        assert corpus.license
        assert corpus.splits
        assert all(entry.split in corpus.splits for entry in corpus.published_counts)
        options = asdict(corpus.parse_options({}))
        assert all(set(entry.options) <= set(options) for entry in corpus.published_counts)


OWN_CORPUS = """
from dataclasses import replace
from as2ray.corpora import wikiqa

CORPUS = replace(wikiqa.CORPUS, name="faq", hub=None, published_counts=())
"""


def test_own_corpus_is_known_by_its_module_its_entry_point_and_its_registration(
    wikiqa, tmp_path, monkeypatch
):
    (tmp_path / "corpus_of_mine.py").write_text(OWN_CORPUS)
    installed = tmp_path / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[as2ray.corpora]\nfaq = corpus_of_mine:CORPUS\n")
    monkeypatch.syspath_prepend(tmp_path)
    expected = read_split("wikiqa", "dev", wikiqa, verify=False)
    for name in ("corpus_of_mine:CORPUS", "faq"):
        assert read_split(name, "dev", wikiqa).equals(expected)
    assert "faq" in {corpus.name for corpus in list_corpora()}
    with pytest.raises(ConfigError, match="did you mean 'faq'"):
        get_corpus("fak")
    spec = TableSpec(corpus="corpus_of_mine:CORPUS", split="dev")
    assert prepared_table(spec, {"faq": str(wikiqa)}).data_dir == str(wikiqa)
    monkeypatch.setattr("as2ray.corpora.registry.CORPORA", dict(CORPORA))
    register_corpus(replace(get_corpus("faq"), name="another"))
    assert read_split("another", "dev", wikiqa).equals(expected)


def test_corpus_that_takes_the_name_of_another_or_is_none_is_an_error():
    with pytest.raises(ConfigError, match="as2ray has a corpus 'wikiqa'"):
        register_corpus(replace(CORPORA["wikiqa"], license="mine"))
    with pytest.raises(ConfigError, match=r"^register_corpus: expected an as2ray Corpus, not str"):
        register_corpus("wikiqa")
    for name in ("as2ray.corpora.wikiqa:FILES", "as2ray.corpora.wikiqa:absent", "absent:CORPUS"):
        with pytest.raises(ConfigError):
            get_corpus(name)


@pytest.mark.parametrize(
    ("name", "split", "command"),
    [
        ("wikiqa", "dev", "as2ray corpora fetch --corpus wikiqa --splits '[\"dev\"]'"),
        ("nq", "train", "as2ray corpora fetch --corpus nq --splits '[\"train\"]'"),
        ("squad", "dev", "as2ray corpora fetch --corpus squad --splits '[\"dev\"]'"),
        (
            "trecqa",
            "dev",
            "as2ray corpora fetch --corpus trecqa --splits '[\"dev\"]' --data_dir {folder}",
        ),
        ("annotated", "dev", "put the file there"),
    ],
)
def test_missing_release_is_an_error_with_file_folder_and_the_command_that_gets_it(
    name, split, command, tmp_path
):
    with pytest.raises(CorpusError) as raised:
        read_split(name, split, tmp_path)
    first_line, fix, *_ = str(raised.value).splitlines()
    assert first_line.startswith(f"corpus {name!r}, split {split!r}: no ")
    assert str(tmp_path) in first_line
    assert CORPORA[name].files[split][0] in first_line
    assert fix.startswith(f"  fix: {command.format(folder=tmp_path)}")
    assert len(str(raised.value).splitlines()) <= 6


def test_release_of_a_split_that_the_hub_lacks_is_downloaded():
    corpus = CORPORA["msmarco"]
    assert "then --data_dir hub (recipes: --data_dirs.msmarco hub)" in corpus.fetch_command(
        "qa-dev", "here"
    )
    assert corpus.fetch_command("dev", "here").endswith("--splits '[\"dev\"]' --data_dir here")
    page = CORPORA["yahoo_answers"].homepage
    assert CORPORA["yahoo_answers"].fetch_command("l6-dev", "here") == f"see {page}"


def test_guide_says_where_each_corpus_comes_from():
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    for corpus in CORPORA.values():
        sources = {*corpus.urls, *filter(None, (corpus.hub, corpus.homepage)), f"`{corpus.name}`"}
        assert not [source for source in sources if source not in guide], corpus.name
