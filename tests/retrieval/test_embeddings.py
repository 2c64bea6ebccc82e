import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tiny
import torch

from as2ray.checkpoints.loading import load
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.errors import ConfigError, SentenceIndexError
from as2ray.retrieval import embeddings as embeddings_module
from as2ray.retrieval.answer_scoring import AnswerScoring, default_scoring
from as2ray.retrieval.embeddings import Embeddings, EncoderInfo, ShardEmbeddings
from as2ray.retrieval.index_writer import (
    MANIFEST,
    IndexConfig,
    _link,
    add_embeddings,
    write_index,
)
from as2ray.retrieval.question_answering import (
    UNFITTED_MAX_RANKED,
    QuestionAnswerer,
    find_candidates,
    resolve_scoring,
)
from as2ray.retrieval.sentence_index import SentenceIndex

QUESTION = f"what is {tiny.TOPICS[0]}?"

TEXT = """Owls hunt mice at night. Cats sleep by day.

Mice eat corn. Crows hunt too. Bats see owls at night. Who is here?
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nine files of made-up sentences, and one without any."""
    root, random = tmp_path_factory.mktemp("documents"), Random(5)
    for number in range(9):
        sentences = [
            tiny.sentence(random, random.randint(2, 6), random.choice(tiny.TOPICS)).capitalize()
            for _ in range(30)
        ]
        (root / f"{number}.txt").write_text(". ".join(sentences) + ".")
    (root / "9.png").write_bytes(b"\0")
    return root


@pytest.fixture
def build(folder, sentence_encoder, tmp_path):
    """Builds an index with embeddings and opens it: `build(name, **options)`."""

    def make(name="i", load_encoder=load_sentence_encoder, **options) -> SentenceIndex:
        config = IndexConfig(encoder=sentence_encoder)
        write_index(folder, tmp_path / name, config, load_encoder=load_encoder, **options)
        return SentenceIndex.open(tmp_path / name, load_sentence_encoder)

    return make


class VowelEncoder:
    """Counts vowels, for tests that need no network."""

    dimension = 5

    def __init__(self, name):
        self.name, self.fingerprint = name, f"of {name}"

    def encode_documents(self, texts):
        counts = np.array([[text.count(letter) for letter in "aeiou"] for text in texts])
        return (0.1 * counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)

    encode_queries = encode_documents


def change_weights(folder, value: float):
    """Adds a value to a weight of an encoder, in place."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] += value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def embed_with_neighbors(index: SentenceIndex, model) -> np.ndarray:
    """Returns the embedding of each sentence, to which those of two on either side are added."""
    documents = [index.sentence(i).document_id for i in range(len(index))]
    embeddings, rows = model.encode_documents(index.texts(range(len(index)))), []
    for i, embedding in enumerate(embeddings):
        near = [j for j in range(i - 2, i + 3) if j != i and 0 <= j < len(index)]
        sums = sum(embeddings[j] for j in near if documents[j] == documents[i])
        row = embedding + 0.3 * sums * np.linalg.norm(embedding) / np.linalg.norm(sums)
        rows.append(row * np.linalg.norm(embedding) / np.linalg.norm(row))
    return np.array(rows)


@pytest.mark.parametrize(("num_shards", "block_size"), [(1, 50), (1, 3), (10, 8_192)])
def test_dense_search_finds_the_nearest_embeddings(
    build, sentence_encoder, num_shards, block_size, monkeypatch
):
    monkeypatch.setattr(embeddings_module, "BLOCK_SIZE", block_size)
    index = build(num_shards=num_shards)
    model = load_sentence_encoder(sentence_encoder)
    embeddings = embed_with_neighbors(index, model)
    similarities = embeddings @ model.encode_queries([QUESTION])[0]
    candidates = index.search_candidates(QUESTION, 40, method="dense")
    nearest = set(np.argsort(-similarities)[:40].tolist())
    assert len(nearest & {c.index for c in candidates}) >= 38  # int8
    for candidate in candidates:
        assert candidate.similarity == pytest.approx(similarities[candidate.index], abs=0.004)
        assert candidate.bm25 == index.score_sentences(QUESTION)[candidate.index]
    assert candidates == sorted(candidates, key=lambda c: (-c.similarity, c.index))
    rows = np.array([candidate.index for candidate in candidates])
    found = index.embeddings.similarities(index.embeddings.encode_query(QUESTION), rows)
    assert (found.dtype, found.tolist()) == (np.float32, [c.similarity for c in candidates])
    assert all(isinstance(shard.codes, np.memmap) for shard in index.embeddings.shards)
    last = index.search_candidates(QUESTION, 10_000, method="dense")[39]
    # Products of another size round differently.
    assert last.similarity == pytest.approx(candidates[39].similarity, abs=1e-6)
    assert (last.index, last.bm25) == (candidates[39].index, candidates[39].bm25)


@pytest.mark.parametrize("heading", ["Food", "Food.", "Food:", "Food?", "Food!", ""])
def test_heading_ends_with_one_mark_before_the_text(heading):
    marked = heading + "." * (heading == "Food")
    assert embeddings_module.add_heading(heading, "They eat.") == f"{marked} They eat.".lstrip()


def test_embedding_takes_in_the_heading_of_its_paragraph(sentence_encoder, tmp_path):
    (tmp_path / "a.md").write_text("# Kovarin\n\nIt has no end.\n\n# Why it ends?\n\nIt is old.")
    config = IndexConfig(encoder=sentence_encoder)
    write_index(tmp_path / "a.md", tmp_path / "i", config, load_encoder=load_sentence_encoder)
    index = SentenceIndex.open(tmp_path / "i", load_sentence_encoder)
    texts = ["Kovarin. It has no end.", "Why it ends? It is old."]
    first, second = index.embeddings.encoder.encode_documents(texts)
    row = first + 0.3 * second * np.linalg.norm(first) / np.linalg.norm(second)
    row *= np.linalg.norm(first) / np.linalg.norm(row)
    np.testing.assert_allclose(index.embeddings.shards[0].rows(slice(0, 1))[0], row, atol=0.02)
    assert index.texts([0, 1]) == ["It has no end.", "It is old."]


def test_hybrid_candidates_come_from_both_lists_with_both_scores(build, monkeypatch):
    index = build()
    lists = {m: index.search_candidates(QUESTION, 20, method=m) for m in ("bm25", "dense")}
    hybrid = index.search_candidates(QUESTION, 20)
    assert hybrid == index.search_candidates(QUESTION, 20, method="hybrid")
    sources = [{c.index for c in candidates} for candidates in lists.values()]
    assert {c.index for c in hybrid} <= sources[0] | sources[1]
    assert all({c.index for c in hybrid} & source for source in sources)
    assert all(c.similarity is None for c in lists["bm25"])
    by_index = {c.index: c for c in lists["dense"]}
    for candidate in hybrid:
        assert candidate.index not in by_index or candidate == by_index[candidate.index]
    neighbors = index.search_candidates(QUESTION, 20, num_neighbors=1)
    assert [c.index for c in neighbors[:1]] == [c.index for c in hybrid[:1]]
    assert neighbors[1].index in index.neighbors(hybrid[0].index, 1)
    monkeypatch.setattr(Embeddings, "search", lambda self, query, k: np.array([3]))
    assert [c.index for c in index.search_candidates(QUESTION, 20, method="dense")] == [3]
    both = {c.index for c in index.search_candidates(QUESTION, 20)}
    assert len(both) == 20
    assert both <= {3, *sources[0]}


def test_hybrid_order_weights_scores_that_are_divided_by_their_maximum(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    config = IndexConfig(encoder="vowels")
    write_index(tmp_path / "a.txt", tmp_path / "i", config, load_encoder=VowelEncoder)
    index = SentenceIndex.open(tmp_path / "i", VowelEncoder)
    candidates = index.search_candidates("when do owls hunt mice?", len(index))
    assert len(candidates) == len(index) == 6
    similarities = np.array([candidate.similarity for candidate in candidates])
    bm25 = np.array([candidate.bm25 for candidate in candidates])
    fused = 0.7 * similarities / similarities.max() + 0.3 * bm25 / bm25.max()
    assert np.diff(fused).max() < 1e-6


def test_approximate_search_agrees_with_the_exact_one(build, monkeypatch):
    monkeypatch.setattr(embeddings_module, "MIN_APPROXIMATE", 270)
    index = build(num_shards=2)
    assert len(index) == 270  # as many as needed
    assert index.embeddings.is_approximate
    assert embeddings_module.APPROXIMATE_FILE in index.manifest["files"]
    query = index.embeddings.encode_query(QUESTION)
    exact = index.embeddings.search(query, 50, exact=True)
    approximate = index.embeddings.search(query, 50)
    assert len(set(exact.tolist()) & set(approximate.tolist())) >= 45
    # Each reads its own files alone.
    without_shards = replace(index.embeddings, shards=())
    assert without_shards.search(query, 50).tolist() == approximate.tolist()
    without_file = replace(index.embeddings, folder=Path("nowhere"))
    assert without_file.search(query, 50, exact=True).tolist() == exact.tolist()
    assert index.search_candidates(QUESTION, 5)[0].similarity is not None
    # Where the lists that are probed hold too few, all sentences are compared.
    index.embeddings._approximate.nprobe = 1
    for k in (270, 1_000):
        assert sorted(index.embeddings.search(query, k)) == list(range(270))


def test_interrupted_build_goes_on_and_leaves_the_older_index_usable(build, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings_module, "BLOCK_SIZE", 50)
    expected = build()
    num_blocks, encoded, max_blocks = -(-len(expected) // 50), [], 3

    def load_encoder(name):
        model = load_sentence_encoder(name)
        encode = model.encode_documents

        def encode_documents(texts):
            if len(encoded) == max_blocks:
                raise KeyboardInterrupt
            encoded.append(len(texts))
            return encode(texts)

        model.encode_documents = encode_documents
        return model

    with pytest.raises(KeyboardInterrupt):
        build(load_encoder=load_encoder, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".i-embeddings", "i"]
    index = SentenceIndex.open(tmp_path / "i", load_sentence_encoder)
    assert index.search_candidates(QUESTION) == expected.search_candidates(QUESTION)
    shutil.copytree(tmp_path / ".i-embeddings", tmp_path / ".j-embeddings")
    max_blocks = None
    resumed = build(load_encoder=load_encoder, overwrite=True)
    assert len(encoded) == num_blocks
    assert sum(encoded) == len(expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".j-embeddings", "i"]
    assert resumed.search_candidates(QUESTION) == expected.search_candidates(QUESTION)
    block = next((tmp_path / ".j-embeddings").iterdir())
    block.write_bytes(block.read_bytes()[:100])
    with pytest.raises(SentenceIndexError, match="interrupted build, is damaged") as error:
        build("j")
    assert str(block.parent) in error.value.fix


def test_index_without_embeddings_is_searched_by_bm25_and_says_so(
    folder, sentence_encoder, tmp_path
):
    write_index(folder, tmp_path / "i")
    index = SentenceIndex.open(tmp_path / "i", load_sentence_encoder)
    assert index.search_candidates(QUESTION) == index.search_candidates(QUESTION, method="bm25")
    with pytest.raises(SentenceIndexError, match="has no embeddings") as error:
        index.search_candidates(QUESTION, method="hybrid")
    assert "--encoder" in error.value.fix
    with pytest.raises(ConfigError, match="nothing loads the encoder"):
        write_index(folder, tmp_path / "j", IndexConfig(encoder=sentence_encoder))


def test_embeddings_that_are_added_are_those_of_a_new_index(
    build, folder, sentence_encoder, tmp_path
):
    expected = build("expected")
    write_index(folder, tmp_path / "plain")
    added = tmp_path / "added"
    manifest = add_embeddings(tmp_path / "plain", added, sentence_encoder, load_sentence_encoder)
    shutil.rmtree(tmp_path / "plain")  # what it has are its own files, and the encoder too
    index = SentenceIndex.open(added, load_sentence_encoder)
    assert index.search_candidates(QUESTION) == expected.search_candidates(QUESTION)
    assert index.manifest == manifest
    assert manifest["settings"]["encoder"] == manifest["embeddings"]["name"]
    assert (added / manifest["embeddings"]["name"] / "modules.json").is_file()
    assert [path.name for path in tmp_path.glob(".*")] == []
    # Embeddings of before are not kept, and what stays is linked.
    add_embeddings(added, tmp_path / "again", sentence_encoder, load_sentence_encoder)
    again = SentenceIndex.open(tmp_path / "again", load_sentence_encoder)
    assert again.search_candidates(QUESTION) == expected.search_candidates(QUESTION)
    sentences = [path / "shard-00000" / "sentences.arrow" for path in (added, tmp_path / "again")]
    assert sentences[0].samefile(sentences[1])
    codes = [path / "shard-00000" / "embeddings.npy" for path in (added, tmp_path / "again")]
    assert not codes[0].samefile(codes[1])


def test_file_that_cannot_be_linked_is_copied(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_text("owls")
    _link(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "owls"


def test_blocks_that_are_encoded_elsewhere_give_the_same_index(tmp_path, monkeypatch):
    calls, tasks = [], []

    @contextmanager
    def record_task(name, total, unit, counts_rows):
        steps = []
        tasks.append((total, counts_rows, steps))
        yield steps.append

    def map_blocks(create, blocks):
        calls.append(len(blocks))
        return map(create(), blocks)

    monkeypatch.setattr(embeddings_module, "BLOCK_SIZE", 4)
    monkeypatch.setattr(embeddings_module, "task", record_task)
    (tmp_path / "a.txt").write_text(TEXT)
    write_index(tmp_path / "a.txt", tmp_path / "i")
    arguments = (tmp_path / "i", tmp_path / "here", "vowels", VowelEncoder)
    expected = add_embeddings(*arguments)
    assert add_embeddings(arguments[0], tmp_path / "there", *arguments[2:], map_blocks) == expected
    rows = [
        SentenceIndex.open(tmp_path / name).embeddings.shards[0].rows(slice(None))
        for name in ("here", "there")
    ]
    assert rows[0].tolist() == rows[1].tolist()
    assert calls == [2]
    assert tasks == [(6, True, []), (6, False, [4, 2])]


def test_index_opened_without_an_encoder_is_searched_by_bm25_and_says_so(build, tmp_path):
    build()
    index = SentenceIndex.open(tmp_path / "i")
    assert index.search_candidates(QUESTION)[0].similarity is None
    with pytest.raises(SentenceIndexError, match="opened without an encoder"):
        index.search_candidates(QUESTION, method="dense")
    # Scores that were fitted with similarities would be others without them.
    encoder = index.embeddings.info.fingerprint
    for fitted in (
        AnswerScoring({"similarity": 1.0}, encoder=encoder),
        AnswerScoring({"bm25": 1.0}, min_similarity=0.5, encoder=encoder),
    ):
        with pytest.raises(SentenceIndexError, match="opened without an encoder"):
            QuestionAnswerer(index, scoring=fitted)


def test_question_without_indexed_words_has_dense_candidates_only(build):
    index = build()
    assert index.search_candidates("a", 7, method="bm25") == []
    candidates = index.search_candidates("a", 7)
    assert len(candidates) == 7
    assert {c.bm25 for c in candidates} == {0.0}


def test_ranker_without_a_fitted_scoring_ranks_what_similarity_and_bm25_place_first(
    build, checkpoint
):
    index, ranker = build(), load(checkpoint("bert", 2), device="cpu", dtype="fp32")
    default = default_scoring(index.embeddings.info.fingerprint, has_ranker=True)
    candidates = find_candidates(index, default, QUESTION, 100, 1)
    scores = AnswerScoring({"similarity": 1.0, "bm25": 0.5}).score(candidates.parts)
    first = np.argsort(-scores, kind="stable")[:UNFITTED_MAX_RANKED].tolist()
    expected = set(index.texts([candidates.candidates[row].index for row in first]))
    assert resolve_scoring(index, None, True).encoder == default.encoder
    # A scoring that is given stands.
    for scoring, is_bounded in ((None, True), (default, False)):
        answers = QuestionAnswerer(index, ranker, scoring=scoring).ask(QUESTION, 100).answers
        ranked = {answer.text for answer in answers if answer.exit_layer != 0}
        assert (ranked == expected) == is_bounded
        assert (len(ranked) == len(answers)) != is_bounded


def test_encoder_that_is_another_or_has_changed_is_refused(folder, sentence_encoder, tmp_path):
    copy = shutil.copytree(sentence_encoder, tmp_path / "copy")
    config = IndexConfig(encoder=str(copy))
    write_index(folder, tmp_path / "i", config, load_encoder=load_sentence_encoder)
    change_weights(copy, 0.5)
    index = SentenceIndex.open(tmp_path / "i", load_sentence_encoder)
    with pytest.raises(SentenceIndexError, match="another encoder, or has changed"):
        index.search_candidates(QUESTION)
    model = load_sentence_encoder(sentence_encoder)
    model.projection = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Tanh())
    index = SentenceIndex.open(tmp_path / "i", lambda _: model)
    with pytest.raises(SentenceIndexError, match=r"embeddings of 32 numbers .* gives 8"):
        index.search_candidates(QUESTION)


def test_embedding_that_is_not_finite_is_refused(folder, sentence_encoder, build, tmp_path):
    index = build()
    copy = shutil.copytree(sentence_encoder, tmp_path / "copy")
    change_weights(copy, float("nan"))
    problem = f"gives {len(index)} embeddings that are not finite, the first for"
    with pytest.raises(SentenceIndexError, match=problem):
        build(load_encoder=lambda _: load_sentence_encoder(copy), overwrite=True)
    assert SentenceIndex.open(tmp_path / "i").search(QUESTION) == index.search(QUESTION)
    with torch.no_grad():
        index.embeddings.encoder.network.embeddings.LayerNorm.bias.fill_(float("nan"))
    with pytest.raises(SentenceIndexError, match="not finite for 'what is"):
        index.search_candidates(QUESTION)


@pytest.mark.parametrize("damage", ["cut", "rows", "version", "nan", "faiss"])
def test_damaged_embeddings_are_refused(build, tmp_path, damage, monkeypatch):
    if damage == "faiss":
        monkeypatch.setattr(embeddings_module, "MIN_APPROXIMATE", 200)
    index = build()
    shard = tmp_path / "i" / "shard-00000"
    stored = [np.load(shard / name) for name in embeddings_module.FILES]
    assert [array.dtype for array in stored] == [np.int8, np.float32]
    manifest = json.loads((tmp_path / "i" / MANIFEST).read_text())
    name = "shard-00000/embeddings.npy"
    if damage == "cut":
        (shard / "embeddings.npy").write_bytes((shard / "embeddings.npy").read_bytes()[:-9])
    elif damage == "faiss":
        (tmp_path / "i" / embeddings_module.APPROXIMATE_FILE).unlink()
    elif damage == "rows":
        np.save(shard / "embeddings.npy", np.zeros((len(index) - 1, 32), np.int8))
        manifest["files"][name] = (shard / "embeddings.npy").stat().st_size
    elif damage == "nan":
        np.save(shard / "embedding_scales.npy", np.full(len(index), np.nan, np.float32))
    else:
        manifest["embeddings"]["format_version"] = 0
    (tmp_path / "i" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SentenceIndexError, match="a damaged index"):
        SentenceIndex.open(tmp_path / "i")


def write_shards(folder, *sizes, dimension=4) -> Embeddings:
    """Writes shards of random embeddings of many lengths, and opens them without an encoder."""
    random, shards = np.random.default_rng(0), []
    for number, size in enumerate(sizes):
        shards.append(folder / f"shard-{number:05d}")
        shards[-1].mkdir(parents=True)
        codes = random.integers(-127, 128, (size, dimension)).astype(np.int8)
        for name, array in zip(
            embeddings_module.FILES,
            (codes, random.uniform(0.5, 5.0, size).astype(np.float32) / np.float32(127)),
            strict=True,
        ):
            np.save(shards[-1] / name, array)
    parts = tuple(map(ShardEmbeddings.open, shards))
    bounds = [0, *np.cumsum(sizes).tolist()]
    embeddings_module._write_approximate(shards, dimension)
    return Embeddings(folder, EncoderInfo("none", dimension, ""), True, parts, bounds, None)


def test_approximate_file_has_each_sentence_once_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings_module, "BLOCK_SIZE", 100)
    embeddings = write_shards(tmp_path, 250, 130)
    rows = np.concatenate([shard.rows(slice(None)) for shard in embeddings.shards])
    assert embeddings._approximate.ntotal == len(rows) == 380
    query = rows[0]
    products = np.sort(rows @ query)[::-1]
    for exact in (False, True):
        indices = embeddings.search(query, 20, exact)
        assert rows[indices] @ query == pytest.approx(products[:20], rel=0.02)
        assert sorted(embeddings.search(query, 1_000, exact)) == [*range(380)]


def test_similarities_of_many_sentences_are_computed_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings_module, "SEARCH_BLOCK", 3)
    [shard] = write_shards(tmp_path, 40).shards
    rows, query = shard.rows(slice(None)), np.array([1, -2, 3, 4], np.float32)
    similarities = shard.similarities(query)
    assert rows.dtype == similarities.dtype == np.float32
    np.testing.assert_allclose(similarities, rows @ query, rtol=1e-5, atol=1e-5)


def test_approximate_file_is_the_same_each_time(tmp_path):
    contents = []
    for name in ("a", "b"):
        write_shards(tmp_path / name, 17_000, dimension=1)  # more than the lists are trained on
        contents.append((tmp_path / name / embeddings_module.APPROXIMATE_FILE).read_bytes())
    assert contents[0] == contents[1]


def test_neighbours_of_embeddings_of_any_length_leave_it(monkeypatch):
    monkeypatch.setattr(embeddings_module, "BLOCK_SIZE", 3)
    random = np.random.default_rng(1)
    codes = random.integers(-127, 128, (12, 6)).astype(np.int8)
    codes[4] = 0
    scales = random.uniform(0.001, 0.04, 12).astype(np.float32)
    documents = np.array([0] * 9 + [1, 2, 2])
    before = codes * scales[:, None]
    embeddings_module.add_neighbors(codes, scales, documents)
    for i, embedding in enumerate(before):
        near = [j for j in range(max(0, i - 2), min(12, i + 3)) if documents[j] == documents[i]]
        sums, length = sum(before[j] for j in near) - embedding, np.linalg.norm(embedding)
        row = embedding + 0.3 * length * sums / max(np.linalg.norm(sums), 1e-9)
        row *= length / max(np.linalg.norm(row), 1e-9)
        np.testing.assert_allclose(codes[i] * scales[i], row, atol=length / 127)


def test_long_embedding_without_neighbours_stays_as_it_is():
    codes, scales = np.array([[127, 64], [127, 0]], np.int8), np.full(2, 1.0, np.float32)
    embeddings_module.add_neighbors(codes, scales, np.array([0, 1]))
    assert codes.tolist() == [[127, 64], [127, 0]]
    assert scales.tolist() == pytest.approx([1.0, 1.0])
