import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from as2ray.corpora import wikiqa as wikiqa_reader
from as2ray.corpora.corpus import Corpus, PublishedCounts
from as2ray.corpora.page_grades import PageOptions
from as2ray.corpora.preparation import read_split
from as2ray.corpora.registry import get_corpus
from as2ray.errors import ConfigError, CorpusError, CountMismatchError
from as2ray.tables import raw_files
from as2ray.tables.schema import TableCounts

OPEN = {"verify": False}


def test_wikiqa_bare_quotes_stay_plain_characters(wikiqa):
    table = read_split("wikiqa", "dev", wikiqa, verify=False)
    assert table["candidate"].to_pylist()[:2] == ['He said "hello.', '"Adele did" in 2015.']


def test_wikiqa_ids_come_from_the_source_and_count_inside_a_question(wikiqa):
    table = read_split("wikiqa", "dev", wikiqa, verify=False)
    assert table["candidate_id"].to_pylist() == ["Q1-0", "Q1-1", "Q2-0", "Q3-0"]
    assert table["document_id"].to_pylist() == ["D1", "D1", "D2", "D3"]


@pytest.mark.parametrize(
    ("filter", "kept"),
    [
        ("raw", ["Q1", "Q1", "Q2", "Q3"]),
        ("no_all_negative", ["Q1", "Q1", "Q3"]),
        ("clean", ["Q1", "Q1"]),
    ],
)
def test_wikiqa_filter_keeps_its_questions(wikiqa, filter, kept):
    assert read_split("wikiqa", "dev", wikiqa, filter, **OPEN)["question_id"].to_pylist() == kept


def test_wikiqa_other_counts_than_published_are_refused_with_both(wikiqa):
    with pytest.raises(CountMismatchError) as error:
        read_split("wikiqa", "dev", wikiqa)
    assert "has 3 questions / 4 pairs / 2 positives;" in error.value.problem
    assert error.value.problem.endswith("296 questions / 2,733 pairs / 140 positives")


def test_wikiqa_other_header_is_refused_with_its_columns(wikiqa, write):
    write("wikiqa/WikiQA-dev.tsv", "question\tanswer\nwho?\tme\n")
    with pytest.raises(CorpusError, match=r"columns \['question', 'answer'\]"):
        read_split("wikiqa", "dev", wikiqa)


def test_wikiqa_unknown_label_is_refused_with_its_row(wikiqa):
    path = wikiqa / "WikiQA-dev.tsv"
    path.write_text(path.read_text().replace("In Italy.\t1", "In Italy.\t2"))
    with pytest.raises(CorpusError, match=r"WikiQA-dev.tsv: Label '2' in .*In Italy"):
        read_split("wikiqa", "dev", wikiqa)


def test_wikiqa_empty_candidate_is_refused_with_its_row(wikiqa):
    path = wikiqa / "WikiQA-dev.tsv"
    path.write_text(path.read_text().replace("In Italy.", "  "))
    with pytest.raises(CorpusError, match=r"after 3 rows: row 0 has an empty candidate.*Q3"):
        read_split("wikiqa", "dev", wikiqa)


def test_wikiqa_line_cut_short_is_refused(wikiqa):
    path = wikiqa / "WikiQA-dev.tsv"
    path.write_text(path.read_text()[:-12])
    with pytest.raises(CorpusError, match="Expected 7 columns, got 6"):
        read_split("wikiqa", "dev", wikiqa)


def test_wikiqa_gzip_cut_short_is_refused(wikiqa):
    path = wikiqa / "WikiQA-dev.tsv"
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    (wikiqa / "WikiQA-dev.tsv.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(CorpusError, match=r"WikiQA-dev.tsv.gz"):
        read_split("wikiqa", "dev", wikiqa)


def test_wikiqa_rows_of_a_question_apart_are_refused(wikiqa):
    path = wikiqa / "WikiQA-dev.tsv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[3], lines[2], lines[4]]) + "\n")
    with pytest.raises(CorpusError, match="question that starts twice"):
        read_split("wikiqa", "dev", wikiqa)


def test_wikiqa_missing_file_is_told_by_the_names_looked_for(tmp_path):
    with pytest.raises(
        raw_files.RawFileNotFoundError, match=r"no WikiQA-dev.tsv \(or with .gz\) in"
    ):
        read_split("wikiqa", "dev", tmp_path)


def test_wikiqa_hub_rows_give_the_candidates_of_the_file(wikiqa):
    expected = read_split("wikiqa", "dev", wikiqa, verify=False).drop_columns(["document_id"])
    rows = [
        {
            "question_id": r["question_id"],
            "question": r["question"],
            "document_title": "Hello",
            "answer": r["candidate"],
            "label": r["label"],
        }
        for r in expected.to_pylist()
    ]
    tables = list(wikiqa_reader.from_hub_rows(raw_files.iter_arrow(Dataset.from_list(rows), 3)))
    table = pa.concat_tables(tables)
    assert table["document_id"].to_pylist() == ["Hello"] * 4
    assert table.select(expected.column_names).equals(expected)


def test_corpus_unknown_split_is_told_with_the_known_ones(wikiqa):
    with pytest.raises(ConfigError, match=r"unknown wikiqa split 'validation'") as error:
        read_split("wikiqa", "validation", wikiqa)
    assert "one of ['dev', 'test', 'train']" in error.value.problem


def test_corpus_unknown_option_is_told_with_the_known_ones(wikiqa):
    with pytest.raises(ConfigError, match=r"unknown options \['cased'\]"):
        read_split("wikiqa", "dev", wikiqa, cased=True)
    with pytest.raises(ConfigError, match=r"unknown options \['cased'\](.|\n)*'variant', 'detok"):
        read_split("trecqa", "dev", wikiqa, cased=True)


def test_corpus_unknown_filter_is_told_with_the_known_ones(wikiqa):
    with pytest.raises(ConfigError, match=r"unknown filter 'tidy'") as error:
        read_split("wikiqa", "dev", wikiqa, "tidy")
    assert "no_all_negative" in error.value.problem


def test_corpus_unknown_name_is_told_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown corpus 'wikiq'") as error:
        get_corpus("wikiq")
    assert "'wikiqa'" in error.value.problem


def test_corpus_published_counts_hold_only_for_their_options():
    entry = PublishedCounts("dev", "raw", TableCounts(1, 2, 1), {"negative_grades": (3,)})

    def reader(split, source, options):
        yield from ()

    corpus = Corpus("c", "", "", {"dev": ()}, reader, PageOptions, (entry,))
    hard = corpus.parse_options({"negative_grades": [3], "sentence_splitter": "lines"})
    assert corpus.published_count("dev", "raw", hard) == TableCounts(1, 2, 1)
    assert corpus.published_count("dev", "raw", corpus.parse_options({})) is None
    assert corpus.published_count("dev", "clean", hard) is None


def test_wikiqa_dev_of_the_hub_is_its_validation(wikiqa, tmp_path, monkeypatch):
    monkeypatch.setenv(raw_files.HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    release = read_split("wikiqa", "dev", wikiqa, **OPEN)
    names = {name: ours for ours, name in wikiqa_reader.HUB_COLUMNS.items()}
    folder = tmp_path / "hub" / "microsoft" / "wiki_qa" / "data"
    folder.mkdir(parents=True)
    rows = pa.table({name: release[ours] for name, ours in names.items()})
    pq.write_table(rows, folder / "validation-00000-of-00001.parquet")
    assert read_split("wikiqa", "dev", "hub", **OPEN).equals(release)
