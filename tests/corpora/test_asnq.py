from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from as2ray.corpora import asnq
from as2ray.corpora.preparation import read_split
from as2ray.corpora.reader_utils import group_on_disk
from as2ray.corpora.registry import CORPORA, get_corpus
from as2ray.corpora.verification import verify_releases
from as2ray.errors import ConfigError, CorpusError, CountMismatchError
from as2ray.tables import raw_files
from as2ray.tables.schema import TableCounts

ROWS = [
    ("who wrote it", 'The " bare quote', 1),
    ("who wrote it", '"Kafka wrote it"', 4),
    ("who wrote it", "In the paragraph", 3),
    ("who wrote it", "Kafka was born", 2),
    ("what is hp", "Hit points", 4),
    ("what is hp", "A maker of printers", 1),
]


@pytest.fixture
def folder(write, tmp_path):
    body = "".join(f"{q}\t{s}\t{g}\n" for q, s, g in ROWS)
    write("asnq/train.tsv", body)
    write("asnq/dev.tsv", body)
    write("asnq/unique.dev", "what is hp\n")
    write("asnq/unique.test", "who wrote it\n")
    return tmp_path / "asnq"


def test_asnq_only_grade_four_is_positive_and_grades_stay(folder):
    table = read_split("asnq", "train", folder, verify=False)
    assert table["grade"].to_pylist() == [1, 4, 3, 2, 4, 1]
    assert table["label"].to_pylist() == [0, 1, 0, 0, 1, 0]


def test_asnq_quotes_stay_plain_characters(folder):
    table = read_split("asnq", "train", folder, verify=False)
    assert table["candidate"].to_pylist()[:2] == ['The " bare quote', '"Kafka wrote it"']


def test_asnq_fewer_negatives_leave_ids_as_they_were(folder):
    whole = read_split("asnq", "train", folder, verify=False)
    hard = read_split("asnq", "train", folder, verify=False, negative_grades=[3])
    assert hard["candidate_id"].to_pylist() == ["q000000-1", "q000000-2", "q000001-0"]
    assert set(hard["candidate_id"].to_pylist()) < set(whole["candidate_id"].to_pylist())


@pytest.mark.parametrize("grades", [(), (4,), (0, 3)])
def test_asnq_impossible_negatives_are_refused(folder, grades):
    with pytest.raises(ConfigError, match="negative_grades"):
        read_split("asnq", "train", folder, negative_grades=grades)


def test_asnq_halves_of_dev_keep_the_ids_of_the_whole(folder):
    whole = read_split("asnq", "dev-all", folder, verify=False)
    halves = [read_split("asnq", split, folder) for split in ("test", "dev")]
    assert pa.concat_tables(halves).equals(whole)


def test_asnq_half_of_dev_is_read_from_its_file_with_the_list_beside_it(folder):
    (folder / "unique.dev").write_bytes(b"what is hp\r\n \r\n")
    half = read_split("asnq", "dev", folder / "dev.tsv")
    assert half.equals(read_split("asnq", "dev", folder))
    assert half["question"].unique().to_pylist() == ["what is hp"]


def test_asnq_listed_question_that_does_not_come_is_told(folder):
    (folder / "unique.dev").write_text("what is hp\nwho else\n")
    with pytest.raises(
        CountMismatchError, match=r"1 of the 2 questions of dev; 'who else' is missing"
    ):
        read_split("asnq", "dev", folder)


def test_asnq_missing_list_is_told_by_name(folder):
    (folder / "unique.dev").unlink()
    with pytest.raises(raw_files.RawFileNotFoundError, match=r"unique.dev"):
        read_split("asnq", "dev", folder)


def test_asnq_label_of_another_scheme_is_refused(folder, write):
    path = write("asnq/train.tsv", "who\tme\tneg\n")
    with pytest.raises(CorpusError, match="label 'neg'"):
        read_split("asnq", "train", path)


def test_asnq_last_line_cut_short_is_refused(folder):
    path = folder / "train.tsv"
    path.write_text(path.read_text()[:-4])
    with pytest.raises(CorpusError, match="Expected 3 columns, got 2"):
        read_split("asnq", "train", folder)


def test_asnq_empty_file_is_refused(folder):
    (folder / "train.tsv").write_text("")
    with pytest.raises(CorpusError, match="Empty CSV file"):
        read_split("asnq", "train", folder)


def test_asnq_stream_in_small_blocks_gives_the_same_table(folder, monkeypatch):
    whole = read_split("asnq", "train", folder, verify=False)
    monkeypatch.setattr(raw_files, "BLOCK_BYTES", 64)
    pieces = list(get_corpus("asnq").read_tables("train", folder))
    assert len(pieces) > 1
    assert pa.concat_tables(pieces).equals(whole)


def test_asnq_scattered_rows_are_refused_until_gathered(folder):
    lines = (folder / "train.tsv").read_text().splitlines()
    (folder / "train.tsv").write_text("\n".join([*lines[4:5], *lines[:4], *lines[5:]]) + "\n")
    gathered = read_split("asnq", "train", folder, verify=False, ungrouped=True)
    assert len(set(gathered["question_id"].to_pylist())) == 2
    with pytest.raises(CorpusError, match="rows of the question 'what is hp' are not adjacent"):
        read_split("asnq", "train", folder, verify=False)


def test_regroup_any_stream_comes_out_whole_and_adjacent():
    rows = [{"question": f"q{i % 7}", "candidate": f"c{i}"} for i in range(100)]
    stream = [pa.Table.from_pylist(rows[i : i + 9]) for i in range(0, 100, 9)]
    out = pa.concat_tables(group_on_disk(stream, num_buckets=3)).to_pylist()
    assert sorted(out, key=str) == sorted(rows, key=str)
    texts = [r["question"] for r in out]
    assert sum(a != b for a, b in pairwise(texts)) == 6
    assert [r["candidate"] for r in out if r["question"] == "q0"] == [
        f"c{i}" for i in range(0, 100, 7)
    ]


def test_regroup_nothing_gives_nothing():
    assert list(group_on_disk([])) == []


HUB_ROWS = [
    {
        "question": q,
        "sentence": s,
        "label": int(g == 4),
        "sentence_in_long_answer": g >= 3,
        "short_answer_in_sentence": g % 2 == 0,
    }
    for q, s, g in ROWS
]


@pytest.mark.parametrize(("split", "num_rows"), [("train", 4), ("dev-all", 6)])
def test_asnq_dev_of_the_hub_is_its_validation(split, num_rows, tmp_path, monkeypatch):
    monkeypatch.setenv(raw_files.HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub" / asnq.HUB_DATASET / "data"
    folder.mkdir(parents=True)
    for name, rows in (("train", HUB_ROWS[:4]), ("validation", HUB_ROWS)):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}-00000-of-00001.parquet")
    assert read_split("asnq", split, "hub", verify=False).num_rows == num_rows


def test_asnq_hub_flags_give_the_grades():
    tables = asnq.from_hub_rows(raw_files.iter_arrow(Dataset.from_list(HUB_ROWS), 4))
    table = pa.concat_tables(tables)
    assert table["grade"].to_pylist() == [g for _, _, g in ROWS]
    assert table["label"].to_pylist() == [int(g == 4) for _, _, g in ROWS]


def test_asnq_halves_from_the_hub_are_refused():
    with pytest.raises(CorpusError, match="only train and dev-all"):
        asnq._read_question_list("hub", "dev")


def test_asnq_published_counts_agree_with_the_grades():
    entries = [e for e in CORPORA["asnq"].published_counts if e.options["variant"] == "public"]
    assert len(entries) == 2
    for entry in entries:
        grades = asnq.GRADE_COUNTS[entry.split]
        assert sum(grades) == entry.counts.num_pairs
        assert grades[3] == entry.counts.num_positives


def test_asnq_inventory_counts_lists_and_grades(folder):
    found = {(i.split, i.name): i.actual for i in asnq.count_release(folder)}
    assert found["dev", "questions in unique.dev"] == 1
    for split in ("train", "dev-all"):
        assert [found[split, f"rows of grade {g}"] for g in (1, 2, 3, 4)] == [2, 1, 1, 2]
    published = {(i.split, i.name): i.published for i in asnq.count_release(folder)}
    assert published["test", "questions in unique.test"] == 1_336
    assert published["train", "rows of grade 2"] == 428_122


@pytest.mark.parametrize(
    ("split", "counts"),
    [
        ("train", (57_242, 23_662_238, 69_002)),
        ("dev", (1_336, 539_210, 4_166)),
        ("test", (1_336, 535_116, 4_250)),
    ],
)
def test_asnq_cascade_variant_has_its_own_counts(split, counts):
    corpus = get_corpus("asnq")
    cascade, public = (corpus.parse_options({"variant": v}) for v in ("cascade", "public"))
    assert corpus.check_counts(split, "raw", TableCounts(*counts), cascade)
    with pytest.raises(CountMismatchError, match="verify: false"):
        corpus.check_counts("train", "raw", TableCounts(57_242, 23_662_238, 69_002), public)


def test_asnq_public_release_is_not_compared_with_the_private_counts(folder):
    checks = verify_releases(folder.parent)
    assert {check.split for check in checks if "variant" in check.name} == {"train", "dev-all"}
    assert not [check for check in checks if "variant=cascade" in check.name]
