from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from as2ray.errors import ConfigError
from as2ray.text import sentences

TEXT = 'Dr. Lee came.  He said "Hi." Then\nhe left. \n\n New part'


def cut(text, splitter="syntok"):
    return [text[start:end] for start, end in sentences.split(text, splitter)]


def test_syntok_knows_abbreviations_and_paragraphs():
    assert cut(TEXT) == ["Dr. Lee came.", 'He said "Hi."', "Then\nhe left.", "New part"]
    assert sentences.split(TEXT) == sentences.split(TEXT, "syntok")


def test_simple_splits_at_a_stop_before_a_capital():
    assert cut(TEXT, "simple") == [
        "Dr.",
        "Lee came.",
        'He said "Hi."',
        "Then\nhe left.",
        "New part",
    ]


def test_lines_splits_at_line_ends_alone():
    assert cut(TEXT, "lines") == ['Dr. Lee came.  He said "Hi." Then', "he left.", "New part"]


@pytest.mark.parametrize("splitter", ["syntok", "simple"])
@pytest.mark.parametrize(
    "parts",
    [
        ["蓝鲸很大。", "它们重一百五十吨！", "“会唱歌吗？”", "会的，很远。"],
        ["東京タワーは高い。", "「いつ完成したか？」", "一九五八年です｡"],
        ["هل يغني الحوت؟", "نعم، يغني."],
        ["नीली व्हेल बड़ी है।", "यह क्रिल खाती है।"],
    ],
)
def test_stops_of_other_scripts_end_sentences(splitter, parts):
    for blank in ("", " "):
        assert cut(blank.join(parts), splitter) == parts
    assert cut("他问：“你好吗？”，然后走了。", splitter) == ["他问：“你好吗？”，然后走了。"]


@pytest.mark.parametrize("splitter", ["syntok", "simple", "lines"])
@given(text=st.text(alphabet="aB1 .!?\"\n\t(é😀-'大。」", max_size=80))
def test_split_any_text_loses_only_blanks_and_never_overlaps(splitter, text):
    spans = sentences.split(text, splitter)
    assert all(a.end <= b.start for a, b in pairwise(spans))
    assert all(text[s.start : s.end].strip() == text[s.start : s.end] != "" for s in spans)
    assert "".join("".join(cut(text, splitter)).split()) == "".join(text.split())


def test_versioned_name_carries_the_version():
    assert sentences.versioned_name("simple") == "simple-2"
    assert sentences.versioned_name("syntok").split("-")[0] == "syntok"


def test_registered_splitter_is_used_by_its_name(monkeypatch):
    monkeypatch.setattr(sentences, "SPLITTERS", dict(sentences.SPLITTERS))
    sentences.register_splitter("halves", "2", lambda t: [(0, len(t) // 2), (len(t) // 2, len(t))])
    assert cut("ab cd ", "halves") == ["ab", "cd"]
    assert sentences.versioned_name("halves") == "halves-2"


def test_unknown_splitter_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown sentence splitter 'punkt'.*'syntok'"):
        sentences.split("a", "punkt")
