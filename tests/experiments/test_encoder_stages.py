"""Stages of sentence encoders, and of the scores that are combined with them."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from pyarrow import csv

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.errors import (
    CheckpointError,
    ConfigError,
    CorpusError,
    SentenceIndexError,
    StaleStageError,
)
from as2ray.experiments import documents
from as2ray.experiments.documents import AnsweringRanker, FittedScoring, labeled_tables
from as2ray.experiments.encoders import (
    AdaptedEncoder,
    CombinedScores,
    EmbeddedIndex,
    IndexScores,
    SearchEvaluation,
    SimilarityScores,
    TableScoring,
    TableWithHeadings,
    describe_abstention,
)
from as2ray.experiments.indexes import INDEX, DocumentIndex
from as2ray.experiments.rankers import RANKER
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import TABLE
from as2ray.retrieval.answer_fitting import fit_answer_scoring
from as2ray.retrieval.answer_scoring import FILE, AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.question_answering import Answer, QuestionAnswer, QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.retrieval.subject_bound import share_on_subject
from as2ray.tables.schema import CANDIDATE_SCHEMA, from_rows
from as2ray.text.bm25 import BM25
from as2ray.training.config import TrainingConfig

TRAINING = TrainingConfig(epochs=2, global_batch_size=8, learning_rate=1e-3, precision="fp32")
OFF_TOPIC = ("xylophone?", "who?")


class UntrainedRanker(Stage):
    """A ranker without training."""

    def __init__(self, checkpoint) -> None:
        self.checkpoint = checkpoint

    def run(self, context):
        save(init_ranker(self.checkpoint, max_length=32), context.output / RANKER)


@pytest.fixture
def index(tmp_path):
    root = tmp_path / "documents"
    root.mkdir()
    for number, topic in enumerate(tiny.TOPICS):
        lines = [f"The {topic} has {word} of kind {n} inside." for n, word in enumerate(tiny.WORDS)]
        (root / f"{number}.md").write_text(f"# All about {topic}\n\n" + "\n\n".join(lines[:12]))
    return DocumentIndex.from_documents(root, IndexConfig())


@pytest.fixture
def table(tmp_path):
    """Sixteen questions about the documents, each with one sentence of them that answers it."""
    rows = []
    for number in range(16):
        topic, word = tiny.TOPICS[number % 4], tiny.WORDS[number // 4]
        for n in range(4):
            text = f"The {topic} has {tiny.WORDS[n]} of kind {n} inside."
            label = int(tiny.WORDS[n] == word)
            rows.append((f"q{number}", f"has {topic} any {word}?", f"q{number}-{n}", text, label))
    folder = tiny.write_corpus(tmp_path / "table", from_rows(rows, CANDIDATE_SCHEMA))
    return labeled_tables({"dev": str(folder)})["dev"]


def test_labeled_table_may_be_a_file_as_annotate_writes_it(table, complete, tmp_path):
    names = ["question", "candidate", "label"]
    rows = pq.read_table(complete(table)[1] / "part-00000.parquet").select(names)
    csv.write_csv(rows, tmp_path / "dev.csv")
    _, folder = complete(labeled_tables({"dev": str(tmp_path / "dev.csv")})["dev"])
    assert pq.read_table(folder / "part-00000.parquet").select(names).equals(rows)
    (tmp_path / "dev.csv").write_text("question,candidate,label\nwho?,It.,\n")
    with pytest.raises(CorpusError, match=r"dev\.csv"):
        labeled_tables({"dev": str(tmp_path / "dev.csv")})


@pytest.fixture
def ranker(checkpoint):
    return UntrainedRanker(checkpoint("bert", None))


@pytest.fixture
def embedded(index, sentence_encoder):
    return EmbeddedIndex(index, sentence_encoder)


def test_encoder_is_adapted_only_if_dev_likes_it_better(table, sentence_encoder, complete):
    untrained = load_sentence_encoder(sentence_encoder)
    is_adapted = []
    for learning_rate in (1e-3, 3.0):
        training = replace(TRAINING, learning_rate=learning_rate, epochs=6)
        outputs, folder = complete(AdaptedEncoder(sentence_encoder, (table,), table, training))
        kept = load_sentence_encoder(folder / "encoder")
        is_adapted.append(outputs["is_adapted"])
        assert outputs["is_adapted"] == (outputs["dev"]["adapted"] >= outputs["dev"]["untrained"])
        assert (kept.fingerprint != untrained.fingerprint) == outputs["is_adapted"]
    assert is_adapted == [True, False]


def test_results_of_an_encoder_that_has_changed_are_refused_and_of_one_that_is_gone_kept(
    index, table, sentence_encoder, complete, tmp_path, overwrite_weights
):
    folder = shutil.copytree(sentence_encoder, tmp_path / "encoder")
    stages = [
        AdaptedEncoder(str(folder), (table,), table, replace(TRAINING, epochs=1)),
        EmbeddedIndex(index, str(folder)),
        SimilarityScores(table, str(folder)),
    ]
    stored = [complete(stage) for stage in stages]
    overwrite_weights(folder)
    for stage in stages:
        with pytest.raises(StaleStageError, match=r"encoder has changed .*: model\.safetensors"):
            complete(stage)
    shutil.rmtree(folder)
    assert [complete(stage) for stage in stages] == stored


def test_index_holds_its_adapted_encoder(index, table, sentence_encoder, complete, tmp_path):
    encoder = AdaptedEncoder(sentence_encoder, (table,), table, TRAINING)
    _, folder = complete(EmbeddedIndex(index, encoder))
    moved = (folder / INDEX).rename(tmp_path / "moved")
    opened = SentenceIndex.open(moved, load_sentence_encoder)
    adapted = load_sentence_encoder(complete(encoder)[1] / "encoder")
    assert opened.embeddings.info.fingerprint == adapted.fingerprint
    found = opened.search_candidates("has kovarin any lamp?", 10)
    assert all(candidate.similarity is not None for candidate in found)


def test_index_of_documents_may_be_made_with_the_embeddings_of_an_encoder(
    index, embedded, sentence_encoder, complete
):
    config = IndexConfig(encoder=sentence_encoder)
    outputs, folder = complete(DocumentIndex.from_documents(index.source, config))
    opened, other = (
        SentenceIndex.open(each / INDEX, load_sentence_encoder)
        for each in (folder, complete(embedded)[1])
    )
    assert opened.embeddings.info.fingerprint == other.embeddings.info.fingerprint
    assert outputs["sentences"] == len(opened) == len(other) > 0


@pytest.fixture
def scoring(embedded, table, ranker):
    return FittedScoring(embedded, table, True, ranker, 0.5, OFF_TOPIC)


def test_answers_are_scored_as_fitted(scoring, ranker, embedded, complete, caplog):
    _, folder = complete(AnsweringRanker(ranker, scoring))
    assert "16 labeled dev questions are few" in caplog.text
    fitted = AnswerScoring.read(folder / RANKER)
    assert fitted.weights
    assert {"similarity", "bm25", "ranker", "answered"} <= fitted.dev_quality.keys()
    assert json.loads((folder / RANKER / FILE).read_text())["weights"] == fitted.weights
    opened = SentenceIndex.open(complete(embedded)[1] / INDEX, load_sentence_encoder)
    answerer = QuestionAnswerer(opened, load(folder / RANKER), scoring=fitted, score_threshold=0.0)
    result = answerer.ask("has kovarin any lamp?")
    assert len(result.answers) == 3
    assert result.answers[0].score >= result.answers[1].score
    with pytest.raises(ConfigError, match="fitted with a ranker, and none is given"):
        QuestionAnswerer(opened, scoring=replace(fitted, weights={"ranker": 1.0}))
    with pytest.raises(SentenceIndexError, match="but the index has those of"):
        QuestionAnswerer(opened, load(folder / RANKER), scoring=replace(fitted, encoder="other"))
    other = {"coefficients": [1.0], "intercept": 0.0, "threshold": None}
    (folder / RANKER / FILE).write_text(json.dumps({"weights": {}, "answer_model": other}))
    with pytest.raises(CheckpointError, match="another version of as2ray fitted it"):
        AnswerScoring.read(folder / RANKER)
    (folder / RANKER / FILE).write_text('{"weights": {"ranker": -1}}')
    with pytest.raises(CheckpointError, match="is damaged"):
        AnswerScoring.read(folder / RANKER)


@pytest.mark.parametrize("high_confidence", [False, True])
def test_a_threshold_may_be_one_that_new_questions_reach(
    scoring, complete, monkeypatch, high_confidence
):
    fits = []

    def fit(*args, **options):
        fits.append(options.get("high_confidence"))
        return fit_answer_scoring(*args, **options)

    monkeypatch.setattr(documents, "fit_answer_scoring", fit)
    complete(replace(scoring, high_confidence=high_confidence))
    assert fits[-1] is high_confidence


def test_without_labels_similarity_and_half_of_bm25_order_the_answers(scoring, complete):
    _, folder = complete(replace(scoring, is_labeled=False))
    fitted = AnswerScoring.read(folder)
    assert fitted.weights == {"similarity": 1.0, "bm25": 0.5}
    assert "only where labeled questions show that it helps" in fitted.describe()
    assert fitted.answer_model is None
    assert fitted.min_similarity is not None


@pytest.fixture
def parts(table, embedded):
    """Similarity and BM25 of the table's candidates in the index."""
    return {part: IndexScores(table, embedded, part) for part in ("similarity", "bm25")}


def stored(complete, stage):
    return pq.read_table(complete(stage)[1] / TABLE)["score"].to_numpy()


def test_index_scores_a_candidate_as_it_scores_an_answer(parts, table, embedded, complete):
    index = SentenceIndex.open(complete(embedded)[1] / INDEX, load_sentence_encoder)
    rows = pq.read_table(complete(table)[1] / "part-00000.parquet")
    question = rows["question"][0].as_py()
    candidates = index.search_candidates(question, len(index))
    texts = index.texts([candidate.index for candidate in candidates])
    for part, stage in parts.items():
        expected = {text: getattr(c, part) for text, c in zip(texts, candidates)}
        scores = dict(zip(rows["candidate"].to_pylist()[:4], stored(complete, stage)[:4]))
        assert scores == pytest.approx({text: expected[text] for text in scores})


def test_candidate_that_an_index_does_not_have_is_refused(embedded, complete, tmp_path):
    rows = from_rows([("q", "who?", f"q-{n}", f"It {n}.", n) for n in range(2)], CANDIDATE_SCHEMA)
    folder = tiny.write_corpus(tmp_path / "other", rows)
    table = labeled_tables({"dev": str(folder)})["dev"]
    with pytest.raises(CorpusError, match=r"2 candidates of the table are no .* 'It 0\.'"):
        complete(IndexScores(table, embedded, "bm25"))


def test_combined_scores_of_a_table_rank_as_the_fitted_scoring_does(
    scoring, table, parts, complete
):
    hybrid = replace(scoring, ranker=None)
    fitted = AnswerScoring.read(complete(hybrid)[1])
    similarity = stored(complete, parts["similarity"])
    rows = pq.read_table(complete(table)[1] / "part-00000.parquet")
    for bm25 in (BM25().score_candidates(rows), stored(complete, parts["bm25"])):
        given = None if np.allclose(bm25, BM25().score_candidates(rows)) else parts["bm25"]
        stage = CombinedScores(table, hybrid, parts["similarity"], bm25=given)
        scores = stored(complete, stage)
        for start in range(0, len(scores), 4):
            part = slice(start, start + 4)
            order = fitted.order({"similarity": similarity[part], "bm25": bm25[part]})
            assert np.argsort(-scores[part]).tolist() == order


def test_combined_scores_take_the_bm25_that_is_given(scoring, table, parts, complete):
    unlabeled = TableScoring(table, parts["similarity"], is_labeled=False)
    similarity = stored(complete, parts["similarity"])
    by_given, by_own = (
        stored(complete, CombinedScores(table, unlabeled, parts["similarity"], bm25=bm25))
        for bm25 in (parts["similarity"], None)
    )
    orders = [
        [np.argsort(-scores[i : i + 4], kind="stable").tolist() for i in range(0, len(scores), 4)]
        for scores in (similarity, by_given, by_own)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_weights_of_a_table_s_parts_are_fitted_to_labels_or_default(parts, table, complete):
    _, folder = complete(TableScoring(table, parts["similarity"]))
    assert set(AnswerScoring.read(folder).dev_quality) == {
        *("similarity", "bm25", "similarity + bm25")
    }
    _, folder = complete(TableScoring(table, parts["similarity"], is_labeled=False))
    assert AnswerScoring.read(folder).weights == {"similarity": 1.0, "bm25": 0.5}


def test_encoder_learns_from_candidates_below_their_headings(index, table, complete):
    _, folder = complete(TableWithHeadings(table, index))
    before, after = (
        pq.read_table(path / "part-00000.parquet") for path in (complete(table)[1], folder)
    )
    topic = tiny.TOPICS[0]
    text = before["candidate"][0].as_py()
    assert after["candidate"][0].as_py() == f"All about {topic}. {text}"
    assert after.drop_columns("candidate") == before.drop_columns("candidate")


def test_search_counts_the_questions_whose_answer_is_found(embedded, table, scoring, complete):
    outputs, _ = complete(SearchEvaluation(embedded, table, "bm25"))
    measures = outputs["measures"]
    assert outputs["num_questions"] == 16
    assert 0 < measures["hit@1"] <= measures["hit@3"] <= measures["hit@10"] <= measures["R@100"]
    assert measures["hit@1"] <= measures["RR"] <= measures["R@100"] == 1.0
    asked = SearchEvaluation(embedded, table, "auto", scoring, scoring.ranker, OFF_TOPIC)
    ranked, _ = complete(asked)
    assert ranked["measures"]["R@100"] == 1.0
    abstention = ranked["abstention"]
    fitted = AnswerScoring.read(complete(scoring)[1])
    opened = SentenceIndex.open(complete(embedded)[1] / INDEX, load_sentence_encoder)
    assert abstention["on_subject"]["others"] == share_on_subject(
        opened, OFF_TOPIC, fitted.min_similarity
    )
    assert abstention["others"]["number"] == len(OFF_TOPIC)
    assert ("precision_at" in abstention) == (fitted.answer_model is not None)
    AnswerScoring({"ranker": 1.0}).write(complete(scoring)[1])
    with_ranker, _ = complete(SearchEvaluation(embedded, table, "bm25", scoring, scoring.ranker))
    assert with_ranker["measures"] != ranked["measures"]


def test_risk_counts_questions_on_other_subjects_last():
    def result(
        best_score: float | None, is_given: bool, is_off_topic: bool = False
    ) -> QuestionAnswer:
        answer = Answer("text", 1.0, "document", "", "", "")
        answers = (answer,) if is_given else ()
        return QuestionAnswer(answers, 1, best_score, None, answer, is_off_topic=is_off_topic)

    own = [result(0.9, False, True), result(0.8, True), result(0.6, True), result(0.1, False)]
    others = [result(0.7, False, True), result(0.7, True)]
    described = describe_abstention(own, np.array([0, 1, 1, 0], bool), others, True)
    assert described["given"] == 0.5
    assert described["precision"] == 1.0
    assert described["on_subject"] == {"own": 0.75, "others": 0.5}
    assert described["others"] == {"number": 2, "given": 1}
    assert described["precision_at"] == {
        "0.1": 1.0,
        "0.25": 1.0,
        "0.5": 1.0,
        "0.75": pytest.approx(2 / 3),
        "1": 0.5,
    }
    assert described["AURC"] == pytest.approx((0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert "AURC" not in describe_abstention(own, np.zeros(4, bool), others, False)
    without_candidates = [result(None, False), result(0.8, True)]
    described = describe_abstention(without_candidates, np.array([0, 1], bool), [], True)
    assert described["AURC"] == pytest.approx((0 + 1 / 2) / 2)


def test_similarity_is_the_product_of_the_embeddings(table, sentence_encoder, complete):
    _, folder = complete(SimilarityScores(table, sentence_encoder))
    scores = pq.read_table(folder / TABLE)["score"].to_numpy()
    rows = pa.concat_tables([pq.read_table(complete(table)[1] / "part-00000.parquet")])
    encoder = load_sentence_encoder(sentence_encoder)
    first = encoder.encode_queries([rows["question"][5].as_py()])[0]
    assert scores[5] == pytest.approx(
        first @ encoder.encode_documents([rows["candidate"][5].as_py()])[0], abs=1e-3
    )
