import pyarrow as pa
import pytest
from datasets import Dataset

from as2ray.corpora import qnli
from as2ray.corpora.preparation import read_split
from as2ray.errors import CorpusError
from as2ray.tables import raw_files

HEADER = "index\tquestion\tsentence\tlabel\n"
ROWS = [
    ("who ate?", 'She said "ate.', "entailment"),
    ("who slept?", "Nobody.", "not_entailment"),
    ("who ate?", "It rained.", "not_entailment"),
]


def body(rows):
    return HEADER + "".join(f"{i}\t" + "\t".join(r) + "\n" for i, r in enumerate(rows))


def test_qnli_rows_of_one_question_come_together(write):
    table = read_split("qnli", "dev", write("dev.tsv", body(ROWS)))
    assert table["candidate_id"].to_pylist() == ["q000000-0", "q000000-1", "q000001-0"]
    assert table["candidate"].to_pylist() == ['She said "ate.', "It rained.", "Nobody."]
    assert table["label"].to_pylist() == [1, 0, 0]


def test_qnli_release_counts_the_pairs_of_each_file(write):
    path = write("dev.tsv", body(ROWS))
    [count] = qnli.count_release(path.parent)
    assert (count.split, count.name, count.published, count.actual) == ("dev", "pairs", 5_463, 3)


def test_qnli_unknown_label_is_refused_with_the_known_ones(write):
    with pytest.raises(CorpusError, match="label 'maybe'") as error:
        read_split("qnli", "dev", write("dev.tsv", body([("who?", "me", "maybe")])))
    assert "one of ['entailment', 'not_entailment']" in error.value.problem


def test_qnli_unlabeled_test_file_is_refused(write):
    path = write("dev.tsv", "index\tquestion\tsentence\n0\twho?\tme\n")
    with pytest.raises(CorpusError, match=r"columns \['index', 'question', 'sentence'\]"):
        read_split("qnli", "dev", path)


def test_qnli_hub_rows_give_the_candidates_of_the_file(write):
    rows = [
        {"question": q, "sentence": s, "label": int(w != "entailment"), "idx": i}
        for i, (q, s, w) in enumerate(ROWS)
    ]
    tables = qnli.from_hub_rows(raw_files.iter_arrow(Dataset.from_list(rows), 2))
    expected = read_split("qnli", "dev", write("dev.tsv", body(ROWS)))
    assert pa.concat_tables(tables).select(expected.column_names).equals(expected)


@pytest.mark.parametrize(("split", "hub_split"), [("train", "train"), ("dev", "validation")])
def test_qnli_of_the_hub_is_its_configuration_of_glue(write_hub, split, hub_split):
    rows = [{"question": q, "sentence": s, "label": 0, "idx": 0} for q, s, _ in ROWS]
    write_hub(qnli.HUB_DATASET, "qnli", hub_split, rows)
    assert read_split("qnli", split, "hub")["label"].to_pylist() == [1, 1, 1]


def test_qnli_file_without_rows_has_no_candidates(write):
    assert read_split("qnli", "dev", write("dev.tsv", HEADER)).num_rows == 0
