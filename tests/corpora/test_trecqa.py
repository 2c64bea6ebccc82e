import gzip
import json

import pytest

from as2ray.corpora.detokenize import detokenize
from as2ray.corpora.preparation import read_split
from as2ray.corpora.trecqa import count_release
from as2ray.corpora.verification import verify_releases
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.schema import TableCounts

LINES = [
    {
        "id": "1.4",
        "question": "What is Crips ' gang color ?",
        "candidates": [
            {"sentence": "`` It is blue , '' he said .", "label": 1},
            {"sentence": "word " * 41, "label": 0},
            {"sentence": "They do n't know .", "label": 0},
        ],
    },
    {"id": "1.5", "question": "Who ?", "candidates": []},
]

XML = """<QApairs id='32.1'>
<question>
What\tis\tAT&T\t?
WP\tVBZ\tNNP\t.
</question>
<positive>
AT&T\tearned\t<num>\t.
NNP\tVBD\tCD\t.
0\t1\t2\t3
</positive>
<negative>
It\tdid\tn't\t.
PRP\tVBD\tRB\t.
</negative>
</QApairs>
<QApairs id='32.2'>
<question>
Who\t?
</question>
</QApairs>
"""


@pytest.fixture
def folder(write, tmp_path):
    body = "".join(json.dumps(line) + "\n" for line in LINES)
    for name in ("dev.jsonl", "train-all.jsonl.gz"):
        write(f"trecqa/{name}", body)
    bare = [{k: v for k, v in line.items() if k != "id"} for line in LINES]
    for name in ("dev.jsonl", "train-all.jsonl"):
        write(f"trecqa/tanda/{name}", "".join(json.dumps(line) + "\n" for line in bare))
    return tmp_path / "trecqa"


def test_trecqa_release_counts_the_questions_of_each_file(folder):
    counts = [tuple(count) for count in count_release(folder)]
    assert sorted(counts) == [
        (split, f"listed questions{variant}", published, 2)
        for split, published in (("dev", 82), ("train-all", 1_229))
        for variant in ("", " in tanda")
    ]


def test_trecqa_question_without_candidates_is_no_row(folder):
    table = read_split("trecqa", "dev", folder, verify=False)
    assert table["candidate_id"].to_pylist() == ["1.4-0", "1.4-1", "1.4-2"]


def test_trecqa_tokens_become_plain_text(folder):
    table = read_split("trecqa", "dev", folder, verify=False)
    assert table["question"][0].as_py() == "What is Crips' gang color?"
    assert table["candidate"][0].as_py() == '"It is blue," he said.'


def test_trecqa_tokens_stay_where_asked(folder):
    table = read_split("trecqa", "dev", folder, verify=False, detokenize=False)
    assert table["candidate"][2].as_py() == "They do n't know ."


def test_trecqa_tanda_cuts_long_candidates_of_dev_alone(folder):
    ids = {
        (split, variant): read_split("trecqa", split, folder, verify=False, variant=variant)[
            "candidate_id"
        ].to_pylist()
        for split in ("dev", "train-all")
        for variant in ("tanda", "lexdecomp")
    }
    whole = [f"q000000-{k}" for k in range(3)]
    assert ids.pop(("dev", "tanda")) == [whole[0], whole[2]]
    assert list(ids.values()) == [whole] * 3


def test_trecqa_variant_is_read_from_its_own_folder_too(folder):
    options = {"verify": False, "variant": "tanda"}
    expected = read_split("trecqa", "dev", folder, **options)
    assert read_split("trecqa", "dev", folder / "tanda", **options).equals(expected)
    with_ids = read_split("trecqa", "dev", folder / "dev.jsonl", **options)
    assert with_ids["candidate_id"].to_pylist() == ["1.4-0", "1.4-2"]


def test_trecqa_candidate_of_forty_tokens_is_not_too_long(write):
    sentences = [{"sentence": "word " * n, "label": 0} for n in (40, 41)]
    path = write("dev.jsonl", json.dumps({"question": "Who ?", "candidates": sentences}))
    table = read_split("trecqa", "dev", path, verify=False, variant="tanda", detokenize=False)
    assert table["candidate_id"].to_pylist() == ["q000000-0"]
    assert table["question"][0].as_py() == "Who ?"


def test_trecqa_rows_are_counted_for_each_variant(folder):
    checks = [check for check in verify_releases(folder.parent) if check.split == "dev"]
    counts = [
        (check.name, check.actual) for check in checks if isinstance(check.actual, TableCounts)
    ]
    num_pairs = {("tanda" in name, counted.num_pairs) for name, counted in counts}
    assert len(counts) == 5
    assert num_pairs == {(False, 3), (True, 2)}


def test_trecqa_unknown_variant_is_told_with_the_known_ones(folder):
    with pytest.raises(ConfigError, match=r"variant='nums'.*'tanda'"):
        read_split("trecqa", "dev", folder, variant="nums")


def test_trecqa_from_the_hub_is_refused():
    with pytest.raises(CorpusError, match="corpus 'trecqa' is not on the hub"):
        read_split("trecqa", "dev", "hub")


def test_trecqa_pseudo_xml_gives_tokens_and_labels(write, tmp_path):
    write("TEST.xml.gz", XML.replace("\n", "\r\n"))
    table = read_split("trecqa", "test", tmp_path, verify=False)
    assert table["question"].to_pylist() == ["What is AT&T?"] * 2
    assert table["candidate"].to_pylist() == ["AT&T earned <num>.", "It didn't."]
    assert table["candidate_id"].to_pylist() == ["32.1-0", "32.1-1"]
    assert table["label"].to_pylist() == [1, 0]


@pytest.mark.parametrize(
    ("lines", "came"),
    [
        (slice(0, 12), "end of file inside a block"),
        (slice(1, None), "stray <question>"),
        (slice(5, 9), "stray <positive>"),
        ([0, 1, 2, 4, 4], "line 5: a stray </question>"),
        ([0, 1, 2, 5], "line 4: a stray <positive>"),
        ([0, 1, 2, 9], "line 4: a stray </positive>"),
        ([0, 1, 2, 14], "line 4: a stray </QApairs>"),
        ([14], "line 1: a stray </QApairs>"),
        ([0, 0], "line 2: a <QApairs> inside another"),
    ],
)
def test_trecqa_pseudo_xml_cut_short_is_refused(write, lines, came):
    whole = XML.splitlines()
    cut = whole[lines] if isinstance(lines, slice) else [whole[number] for number in lines]
    path = write("TEST.xml", "\n".join(cut) + "\n")
    with pytest.raises(CorpusError, match=came):
        read_split("trecqa", "test", path)


def test_trecqa_pseudo_xml_without_question_is_refused(write):
    path = write("TEST.xml", "<QApairs id='1'>\n</QApairs>\n")
    with pytest.raises(CorpusError, match="line 2: a block without a question"):
        read_split("trecqa", "test", path)


def test_trecqa_json_cut_short_is_refused_with_its_line(folder):
    path = folder / "dev.jsonl"
    path.write_text(path.read_text()[:-10])
    with pytest.raises(CorpusError, match=r"dev.jsonl, line 2"):
        read_split("trecqa", "dev", folder)


def test_trecqa_gzip_cut_short_is_refused(folder):
    path = folder / "train-all.jsonl.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) * 50)[:-9])
    with pytest.raises(CorpusError, match="end-of-stream marker"):
        read_split("trecqa", "train-all", folder)


@pytest.mark.parametrize("label", [3, True])
def test_trecqa_other_label_is_refused_with_its_line(write, label):
    wrong = {"question": "Who ?", "candidates": [{"sentence": "Me .", "label": label}]}
    path = write("dev.jsonl", json.dumps(wrong) + "\n")
    with pytest.raises(CorpusError, match=f"line 1: label {label}"):
        read_split("trecqa", "dev", path)


def test_trecqa_line_without_candidates_key_is_refused(write):
    path = write("dev.jsonl", '{"question": "Who ?", "answers": []}\n')
    with pytest.raises(CorpusError, match=r"\['answers', 'question'\], without \['candidates'\]"):
        read_split("trecqa", "dev", path)


@pytest.mark.parametrize(
    ("tokens", "plain"),
    [
        ("`` Do n't -LRB- ever -RRB- , '' he said .", '"Don\'t (ever)," he said.'),
        ("Ms . Lee ca n't pay $ 5 , or 3 % !", "Ms. Lee can't pay $5, or 3%!"),
        (
            "They can not , they wo n't and are n't gon na .",
            "They cannot, they won't and aren't gonna.",
        ),
        ("the '' big shots '' left", 'the "big shots" left'),
        ("it was fine . ''", 'it was fine."'),
        (
            "-LSB- sic -RSB- Bush 's and\\/or the Bushes ' ; `A'",
            "[sic] Bush's and/or the Bushes'; `A'",
        ),
        ("Plain text, already (as it is).", "Plain text, already (as it is)."),
        ("", ""),
    ],
)
def test_detokenize_treebank_tokens_become_plain_text(tokens, plain):
    assert detokenize(tokens) == plain


def test_trecqa_numbers_are_names_and_other_values_no_text(write):
    pair = {"sentence": "Me .", "label": 1}
    path = write("dev.jsonl", json.dumps({"id": 7, "question": "Who ?", "candidates": [pair]}))
    assert read_split("trecqa", "dev", path, verify=False)["question_id"].to_pylist() == ["7"]
    for wrong in ({"candidates": [pair | {"sentence": None}]}, {"candidates": 3}, {"question": 4}):
        write("dev.jsonl", json.dumps({"question": "Who ?", "candidates": [pair], **wrong}))
        with pytest.raises(CorpusError, match="line 1"):
            read_split("trecqa", "dev", path)
