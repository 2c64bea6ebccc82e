import json
import re
import resource
import tracemalloc
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from as2ray.errors import ConfigError, CorpusError, SentenceIndexError
from as2ray.retrieval.index_writer import (
    MANIFEST,
    SHARD_SCHEMAS,
    IndexConfig,
    _copy_rows,
    write_index,
)
from as2ray.retrieval.sentence_index import IndexShard, SentenceIndex
from as2ray.text.bm25 import BM25
from as2ray.text.sentences import versioned_name

WORDS = [a + b + c for a in "bdfglm" for b in "aeiou" for c in "nr"]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Twelve files of made-up sentences, many of them equal."""
    root, random = tmp_path_factory.mktemp("many"), Random(3)
    for number in range(12):
        sentences = [words(random).capitalize() + "." for _ in range(25)]
        (root / f"{number:02d}.txt").write_text(" ".join(sentences))
    return root


def words(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 6)))


@pytest.mark.parametrize("shards", [2, 20])
def test_index_in_shards_gives_the_same_top_100_as_one(many, tmp_path, shards):
    whole = write_index(many, tmp_path / "one")
    parts = write_index(many, tmp_path / "parts", num_shards=shards)
    assert len(parts["shards"]) == min(shards, 12)
    assert parts["fingerprint"] == whole["fingerprint"]
    one, other = SentenceIndex.open(tmp_path / "one"), SentenceIndex.open(tmp_path / "parts")
    assert len(one) == len(other) == whole["sentences"]
    random = Random(0)
    for _ in range(30):
        question = words(random)
        hits = one.search(question, 100)
        assert hits
        assert other.search(question, 100) == hits
        assert other.search_candidates(question, 60, 2) == one.search_candidates(question, 60, 2)
        assert [other.sentence(h.index) for h in hits] == [one.sentence(h.index) for h in hits]


def test_neighbors_are_so_many_on_either_side_and_of_the_same_paragraph(many, tmp_path):
    write_index(many, tmp_path / "i", num_shards=2)
    index = SentenceIndex.open(tmp_path / "i")
    for _, paragraph in index.paragraphs():
        for position, number in enumerate(paragraph):
            expected = paragraph[max(0, position - 2) : position + 3]
            assert list(index.neighbors(number, 2)) == expected
            assert list(index.neighbors(number, 99)) == paragraph


def test_index_scores_as_bm25_of_its_texts_does(many, tmp_path):
    write_index(many, tmp_path / "i", IndexConfig(BM25(1.2, 0.75)), num_shards=3)
    index = SentenceIndex.open(tmp_path / "i")
    plain = BM25(1.2, 0.75).build_index(index.texts(range(len(index))))
    random = Random(1)
    for _ in range(20):
        question = words(random)
        hits, expected = index.search(question, 30), plain.search(question, 30)
        assert [h.index for h in hits] == [h.index for h in expected]
        assert [h.score for h in hits] == pytest.approx([h.score for h in expected], rel=1e-5)


def test_sentence_is_returned_with_its_source_and_its_neighbours(documents, tmp_path):
    manifest = write_index(documents, tmp_path / "i", num_shards=3)
    assert manifest["documents"] == 5
    assert manifest["skipped"]["binary or not UTF-8"] == 2
    index = SentenceIndex.open(tmp_path / "i")
    hit = index.search("how much does it weigh in tonnes")[0]
    sentence = index.sentence(hit.index)
    source = (sentence.document_id, sentence.title, sentence.heading)
    assert source == ("whales.md", "Whales", "Whales")
    assert sentence.text == "It weighs up to 199 tonnes."
    assert index.context(hit.index).startswith("The blue whale")
    assert index.context(hit.index).endswith("It eats krill.")
    (penguin,) = index.search("penguins")
    assert index.context(index.search("blue whale krill")[0].index).count(".") == 2
    counts = {"documents": 5, "sentences": len(index)}
    assert repr(index) == f"SentenceIndex({str(tmp_path / 'i')!r}, {counts})"
    titles = {"insects/ants.html": "Ants & bees", "notes.txt": "notes", "whales.md": "Whales"}
    assert {name: index.document(name, 9, 1_000).title for name in titles} == titles
    # A neighbour of another paragraph is none.
    assert index.context(penguin.index, 5) == "Penguins cannot fly. They swim."
    found = index.texts([c.index for c in index.search_candidates("penguins", 10, 1)])
    assert found == ["Penguins cannot fly.", "They swim."]
    assert index.search("zebra") == []
    assert index.search_candidates("zebra", 10, 1) == []
    for search in (index.search, index.search_candidates):
        with pytest.raises(ConfigError, match="k=-1 must be"):
            search("penguins", -1)
    with pytest.raises(ConfigError, match=r"unknown retrieval method 'bm26'(.|\n)*'bm25'"):
        index.search_candidates("penguins", method="bm26")


def test_text_of_a_shard_may_be_more_than_plain_strings_hold():
    ends = np.array([0, 3_000_000_000, 3_000_000_005, 3_000_000_010])
    text = np.zeros(ends[-1], np.uint8)  # takes no memory but where something is written
    text[-10:] = list(b"owls.mice.")
    long = pa.LargeStringArray.from_buffers(3, pa.py_buffer(ends), pa.py_buffer(text))
    last = pa.RecordBatch.from_arrays([long], ["text"]).slice(1)
    text_column = _copy_rows(last)["text"].cast(pa.string())
    assert text_column.to_pylist() == ["owls.", "mice."]


def test_index_of_one_document_is_an_index(tmp_path):
    (tmp_path / "one.md").write_text("Only this sentence.")
    assert write_index(tmp_path / "one.md", tmp_path / "i", num_shards=4)["documents"] == 1
    index = SentenceIndex.open(tmp_path / "i")
    assert [index.sentence(h.index).document_id for h in index.search("sentence")] == ["one.md"]


def test_manifest_has_the_splitter_s_version_and_fingerprints_of_ids_and_texts(tmp_path):
    (tmp_path / "one.md").write_text("Only this sentence.")
    manifest = write_index(tmp_path / "one.md", tmp_path / "i")
    assert manifest["settings"]["sentence_splitter"] == versioned_name("syntok") != "syntok"
    assert re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", manifest["fingerprint"])


def test_search_without_a_number_gives_a_hundred_sentences_from_mapped_files(tmp_path):
    (tmp_path / "owls.txt").write_text("\n".join(f"Owls hunt {n} mice." for n in range(110)))
    write_index(tmp_path / "owls.txt", tmp_path / "i", IndexConfig(sentence_splitter="lines"))
    index = SentenceIndex.open(tmp_path / "i")
    assert len(index.search("owls")) == len(index.search_candidates("owls")) == 100
    assert isinstance(index.shards[0].bm25.retriever.scores["data"], np.memmap)


def test_folder_without_text_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"\0")
    (tmp_path / "in" / "b.md").write_text("? !\n")
    with pytest.raises(CorpusError, match=r"without a word; skipped: 1 of another kind"):
        write_index(tmp_path / "in", tmp_path / "i")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_documents_with_one_id_are_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"id": 1, "text": "One."}\n{"id": 1, "text": "Two."}\n')
    with pytest.raises(CorpusError, match="2 documents with 1 distinct ids; several are called"):
        write_index(tmp_path / "t.jsonl", tmp_path / "i")
    assert not (tmp_path / "i").exists()


def test_disk_that_fills_leaves_no_index_and_the_older_one_whole(many, tmp_path):
    write_index(many, tmp_path / "i")
    before = (tmp_path / "i" / MANIFEST).read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The largest file that may be written stands for the room that is left.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        for name in ("new", "i"):
            with pytest.raises(SentenceIndexError, match="the index cannot be written"):
                write_index(many, tmp_path / name, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i"]
    assert (tmp_path / "i" / MANIFEST).read_text() == before
    assert len(SentenceIndex.open(tmp_path / "i"))


def test_place_where_nothing_can_be_written_is_refused(many, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SentenceIndexError, match="file"):
        write_index(many, tmp_path / "file" / "i")


def test_index_is_replaced_only_if_asked(many, documents, tmp_path):
    write_index(many, tmp_path / "i")
    with pytest.raises(SentenceIndexError, match="exists"):
        write_index(documents, tmp_path / "i")
    with pytest.raises(SentenceIndexError, match="exists"):
        write_index(documents, documents, overwrite=True)  # never a folder that is no index
    write_index(documents, tmp_path / "i", overwrite=True)
    assert SentenceIndex.open(tmp_path / "i").search("whale")


def test_unfinished_index_of_another_build_is_named_and_stays(documents, tmp_path, caplog):
    leftover = tmp_path / ".[i]-new-0123abcd"
    leftover.mkdir()
    (tmp_path / ".i-new-0123abcd").mkdir()
    write_index(documents, tmp_path / "[i]")
    assert (
        caplog.messages[0] == f"{leftover} is an unfinished index; if nothing builds it, remove it"
    )
    assert len([text for text in caplog.messages if "unfinished" in text]) == 1
    assert leftover.exists()


def test_index_of_another_format_is_refused(documents, tmp_path):
    write_index(documents, tmp_path / "i")
    path = tmp_path / "i" / MANIFEST
    manifest = json.loads(path.read_text())
    # The first format had the key `format`.
    old_manifest = {name: manifest[name] for name in manifest if name != "format_version"}
    for other, version in (({**manifest, "format_version": 1}, 1), (old_manifest, None)):
        path.write_text(json.dumps({**other, "format": 1}))
        with pytest.raises(SentenceIndexError, match=f"format_version {version}.* only 2") as error:
            SentenceIndex.open(tmp_path / "i")
        assert error.value.fix == "index the documents again"
    assert set(manifest["packages"]) == {"as2ray", "bm25s", "pyarrow", "numpy"}
    manifest["settings"]["bm25"]["delta"] = 1.0
    path.write_text(json.dumps(manifest))
    with pytest.raises(SentenceIndexError, match="delta"):
        SentenceIndex.open(tmp_path / "i")


@pytest.mark.parametrize("manifest", [None, {"format_version": 3, "files": {}}])
def test_folder_in_which_an_index_lies_is_refused_with_the_index_named(
    documents, tmp_path, manifest
):
    write_index(documents, tmp_path / "stage" / "index")
    if manifest is not None:  # as that of a pipeline's stage
        (tmp_path / "stage" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SentenceIndexError, match="stage is not an index") as error:
        SentenceIndex.open(tmp_path / "stage")
    assert error.value.fix == f"did you mean {tmp_path / 'stage' / 'index'}?"


@pytest.mark.parametrize(
    "damage", ["cut", "longer", "gone", "manifest", "nothing", "files", "settings", "shards"]
)
def test_broken_index_is_refused(documents, tmp_path, damage):
    write_index(documents, tmp_path / "i")
    path = tmp_path / "i" / "shard-00000" / "sentences.arrow"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "longer":
        path = next((tmp_path / "i").glob("shard-00000/bm25/*.json"))
        path.write_text(path.read_text() + "\n")  # still valid JSON
    elif damage == "gone":
        path.unlink()
    elif damage == "manifest":
        (tmp_path / "i" / MANIFEST).write_text("{")
    elif damage in ("files", "settings", "shards"):
        manifest = json.loads((tmp_path / "i" / MANIFEST).read_text())
        del manifest[damage]
        (tmp_path / "i" / MANIFEST).write_text(json.dumps(manifest))
    else:
        (tmp_path / "i" / MANIFEST).unlink()
    with pytest.raises(SentenceIndexError, match=r"a damaged index|not an index"):
        SentenceIndex.open(tmp_path / "i")


def test_shards_fewer_than_one_are_refused(documents, tmp_path):
    with pytest.raises(ConfigError, match="num_shards"):
        write_index(documents, tmp_path / "i", num_shards=0)
    assert not (tmp_path / "i").exists()


def test_index_holds_no_temporary_files_and_can_be_read_by_all(documents, tmp_path):
    manifest = write_index(documents, tmp_path / "i", num_shards=2)
    files = {
        path.relative_to(tmp_path / "i").as_posix()
        for path in (tmp_path / "i").rglob("*")
        if path.is_file()
    }
    assert files == {MANIFEST, *manifest["files"]}
    shard_files = {path.name for path in (tmp_path / "i" / "shard-00000").iterdir()}
    assert shard_files == {"bm25", *(f"{name}.arrow" for name in SHARD_SCHEMAS)}
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "i").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_neighbours_do_not_make_more_candidates_than_asked(many, tmp_path):
    write_index(many, tmp_path / "i")
    index = SentenceIndex.open(tmp_path / "i")
    question = index.sentence(40).text
    assert [len(index.search_candidates(question, k, 2)) for k in (1, 4, 7)] == [1, 4, 7]


def test_document_is_cut_at_its_bounds(documents, tmp_path):
    write_index(documents, tmp_path / "i")
    index = SentenceIndex.open(tmp_path / "i")
    penguins, owls = "Penguins cannot fly. They swim.", "Owls hunt at night."
    whole = len(penguins) + len(owls)
    for bounds, texts, is_complete in (
        ((9, 1_000), [penguins, owls], True),
        ((9, whole), [penguins, owls], True),
        ((9, whole - 1), [penguins, owls[:-1]], False),
        ((9, len(penguins) - 2), [penguins[:-2]], False),
        ((2, 1_000), [penguins, owls], True),
        ((1, 1_000), [penguins], False),
    ):
        document = index.document("notes.txt", *bounds)
        assert document.paragraphs == tuple(("", text) for text in texts)
        assert document.is_complete == is_complete
    assert index.document("whales.md", 9, 1_000).title == "Whales"
    assert index.document("other.txt", 9, 1_000) is None


def test_text_of_a_document_needs_no_memory_for_those_of_others():
    num_paragraphs = 200_000
    tables = {
        "sentences": {"text": ["a"] * num_paragraphs, "paragraph": range(num_paragraphs)},
        "paragraphs": {"heading": ["h"] * num_paragraphs, "document": range(num_paragraphs)},
        "documents": {"id": list(map(str, range(num_paragraphs))), "title": ["t"] * num_paragraphs},
    }
    parts = {n: pa.table(columns, SHARD_SCHEMAS[n]) for n, columns in tables.items()}
    index = SentenceIndex((IndexShard(None, **parts),), {}, Path())
    index.document("7", 10, 10)
    tracemalloc.start()
    try:
        assert index.document("9", 10, 10) == ("t", (("h", "a"),), True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * num_paragraphs


@pytest.mark.parametrize("shards", [1, 2])
def test_index_of_no_sentence_is_refused(documents, tmp_path, shards):
    write_index(documents, tmp_path / "i", num_shards=shards)
    index = SentenceIndex.open(tmp_path / "i")
    last = len(index) - 1
    assert index.texts([0, last]) == [index.sentence(0).text, index.sentence(last).text]
    for number in (-1, len(index), 10**6):
        for call in (
            *(index.sentence, index.context, lambda each: index.texts([0, each])),
            lambda each: index.neighbors(each, 1),
        ):
            with pytest.raises(ConfigError, match=f"has no sentence {number}: .*0 to {last}"):
                call(number)
