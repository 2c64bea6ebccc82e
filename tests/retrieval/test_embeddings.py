import json
import shutil
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
from as2ray.retrieval.index_writer import MANIFEST, IndexConfig, add_embeddings, write_index
from as2ray.retrieval.question_answering import (
    UNFITTED_MAX_RANKED,
    QuestionAnswerer,
    find_candidates,
)
from as2ray.retrieval.sentence_index import SentenceIndex

QUESTION = f"what is {tiny.TOPICS[0]}?"


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


def test_hybrid_candidates_come_from_both_lists_with_both_scores(build):
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


def test_approximate_search_agrees_with_the_exact_one(build, monkeypatch):
    monkeypatch.setattr(embeddings_module, "MIN_APPROXIMATE", 200)
    index = build(num_shards=2)
    assert index.embeddings.is_approximate
    assert embeddings_module.APPROXIMATE_FILE in index.manifest["files"]
    query = index.embeddings.encode_query(QUESTION)
    exact = index.embeddings.search(query, 50, exact=True)
    approximate = index.embeddings.search(query, 50)
    assert len(set(exact.tolist()) & set(approximate.tolist())) >= 45
    assert index.search_candidates(QUESTION, 5)[0].similarity is not None


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
    with pytest.raises(SentenceIndexError, match="embeddings that are not finite, the first for"):
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
