"""Stages of BM25: grid, indexes, candidates, labels, parts of a table, scores."""

import os
from dataclasses import dataclass, replace
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

from as2ray.corpora.registry import get_corpus
from as2ray.distributed.score import read_scores
from as2ray.errors import ConfigError, CorpusError, CountMismatchError, StaleStageError
from as2ray.evaluation.measures import evaluate
from as2ray.experiments import retrieved as retrieved_stages
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.indexes import (
    INDEX,
    CandidateIndex,
    CollectionIndex,
    CollectionTexts,
    DocumentIndex,
)
from as2ray.experiments.pseudo_labels import LabelledTable, SplitTable
from as2ray.experiments.queries import (
    NOTHING_FOUND,
    read_queries,
    retrieved_rows,
    write_queries,
)
from as2ray.experiments.rankers import TableEvaluation
from as2ray.experiments.retrieved import BM25Run, BM25Scores, RetrievedTable
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import read_table, write_table
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig, Query
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.tables.fingerprint import fingerprint
from as2ray.tables.schema import CANDIDATE_SCHEMA, from_rows, validate_table
from as2ray.tables.trec import read_run
from as2ray.text.bm25 import BM25, TermConfig
from tune_spaces.bm25 import param_grid

ROWS = (
    ("a", "which birds hunt mice", "a-0", "Owls hunt mice.", 1),
    ("a", "which birds hunt mice", "a-1", "Cats  sleep.", 0),
    ("b", "when do cats sleep", "b-0", "All day long.", 1),
    ("b", "when do cats sleep", "b-1", "Cats sleep.", 0),
    ("b", "when do cats sleep", "b-2", "Mice run.", 0),
)


@dataclass(frozen=True, eq=False)
class Rows(Stage):
    """A table of given rows."""

    rows: tuple[tuple, ...] = ROWS

    def run(self, context):
        return write_table(from_rows(self.rows, CANDIDATE_SCHEMA), context.output)


@dataclass(frozen=True, eq=False)
class Questions(Stage):
    """Questions without candidates."""

    queries: tuple[Query, ...]

    def run(self, context):
        return write_queries(self.queries, context.output)


SOURCE = Rows()
GRID = BM25Grid(SOURCE, ((0.9, 0.4),))
CANDIDATES = CandidateIndex((SOURCE,), GRID)


def texts(folder):
    rows = read_table(folder).to_pylist()
    return [(row["question_id"], row["candidate"], row["label"]) for row in rows]


def test_grid_takes_the_best_of_its_points(complete):
    outputs, _ = complete(BM25Grid(SOURCE, tuple(param_grid())))
    assert len(outputs["grid"]) == 56
    assert outputs["RR"] == max(point[2] for point in outputs["grid"])
    scores = BM25(outputs["k1"], outputs["b"]).score_candidates(from_rows(ROWS, CANDIDATE_SCHEMA))
    again = evaluate(
        from_rows(ROWS, CANDIDATE_SCHEMA), scores, ["RR"], question_filter="no_all_negative"
    )
    assert again.measures["RR"] == outputs["RR"]


def test_grid_over_lists_takes_both_k1_and_b(complete):
    """With a large k1 a word that stands three times counts more than two words."""
    texts = [("Owl owl owl.", 1), ("Owl mice.", 0), ("Mice.", 0)]
    rows = Rows(tuple(("q", "owl mice", f"q-{n}", *each) for n, each in enumerate(texts)))
    outputs, _ = complete(BM25Grid(rows, ((0.1, 0.0), (4.0, 0.0))))
    assert outputs["grid"] == [[0.1, 0.0, 0.5], [4.0, 0.0, 1.0]]
    assert (outputs["k1"], outputs["b"]) == (4.0, 0.0)


def test_question_without_an_answer_does_not_count_in_a_grid_over_lists(complete):
    rows = Rows((*ROWS, ("c", "what do mice eat", "c-0", "Owls fly.", 0)))
    points = ((0.9, 0.4), (0.9, 0.5))
    assert complete(BM25Grid(rows, points))[0]["RR"] == complete(BM25Grid(SOURCE, points))[0]["RR"]


def test_first_of_equal_points_of_a_grid_is_taken(complete):
    outputs, _ = complete(BM25Grid(Rows(ROWS[:2]), ((0.9, 0.4), (0.8, 0.3))))
    assert [point[2] for point in outputs["grid"]] == [1.0, 1.0]
    assert outputs["content"] == "k1=0.9, b=0.4"


def test_grid_over_a_collection_ranks_what_the_index_retrieves(complete):
    """Every question's own candidates rank well; among all texts a distractor comes first."""
    others = Rows((("x", "noise", "x-0", "Which birds hunt mice? Which birds hunt?", 0),))
    points = ((0.9, 0.4), (0.9, 0.5))
    assert complete(BM25Grid(Rows(ROWS[:2]), points))[0]["RR"] == 1.0
    source = Rows(ROWS[:2])
    grid = BM25Grid(source, points, collection=(source, others), depth=10)
    outputs, _ = complete(grid)
    assert outputs["RR"] == 0.5
    assert complete(replace(grid, depth=1))[0]["RR"] == 0.0  # the distractor alone is found
    index = CandidateIndex((source, others), grid)
    table = RetrievedTable(BM25Run(source, index, 10), append_missed=False)
    stored, _ = complete(TableEvaluation(BM25Scores(table, index), ("RR",)))
    assert stored["evaluations"][""]["measures"]["RR"] == outputs["RR"]


def test_single_point_is_taken_without_ranking(complete):
    outputs, _ = complete(GRID)
    assert outputs == {"k1": 0.9, "b": 0.4, "content": "k1=0.9, b=0.4"}


def test_whole_collection_is_indexed_like_the_candidates_of_a_table(complete, tmp_path):
    passages = dict.fromkeys(" ".join(row[3].split()) for row in ROWS)
    lines = [f"{number}\t{text}\n" for number, text in enumerate(passages)]
    (tmp_path / "collection.tsv").write_text("".join(lines))
    collection = CollectionTexts("msmarco", "passages", str(tmp_path), check_size=False)
    outputs, _ = complete(collection)
    assert (outputs["num_texts"], outputs["verified"]) == (4, False)
    with pytest.raises(CountMismatchError, match="has 4 texts; published are 8,800,000"):
        complete(replace(collection, check_size=True))
    index = CollectionIndex((collection,), GRID)
    found, expected = (
        complete(RetrievedTable(BM25Run(SOURCE, each, 10), append_missed=True))[0]
        for each in (index, CANDIDATES)
    )
    assert found == expected
    place = f"msmarco ({get_corpus('msmarco').license})"
    assert collection.describe() == {
        "data": "msmarco/passages",
        "source": f"{place}: {tmp_path}",
    }
    gone = replace(collection, data_dir="/x").describe()
    assert gone["source"] == f"missing (collection.tsv): {place}: /x"


def test_collection_that_changed_is_refused_and_one_that_is_gone_kept(complete, tmp_path):
    file = tmp_path / "collection.tsv"
    file.write_text("0\tone\n")
    collection = CollectionTexts("msmarco", "passages", str(tmp_path), check_size=False)
    stored = complete(collection)
    file.write_text("0\ttwo\n")
    with pytest.raises(StaleStageError, match=r"msmarco/passages has changed .*collection\.tsv"):
        complete(collection)
    file.unlink()
    assert complete(collection) == stored


def test_grids_that_choose_alike_make_one_index(complete):
    index, folder = CandidateIndex((SOURCE,), GRID), complete(CANDIDATES)[1]
    other = CandidateIndex((SOURCE,), BM25Grid(Rows(ROWS[:3]), ((0.9, 0.4),)))
    assert index.key != other.key
    assert complete(other)[1] == folder
    weaker = complete(CandidateIndex((SOURCE,), BM25Grid(SOURCE, ((1.2, 0.4),))))[1]
    assert weaker != folder
    opened = SentenceIndex.open(weaker / INDEX)
    assert opened.manifest["settings"]["bm25"].items() >= {"k1": 1.2, "b": 0.4}.items()


def test_retrieved_candidates_come_from_all_and_keep_their_labels(complete):
    assert complete(CANDIDATES)[0]["sentences"] == 4  # one text stands twice, with other blanks
    _, tested = complete(RetrievedTable(BM25Run(SOURCE, CANDIDATES, 10), append_missed=False))
    validate_table(read_table(tested), "retrieved")
    assert texts(tested) == [
        ("a", "Owls hunt mice.", 1),
        ("a", "Mice run.", 0),
        ("b", "Cats sleep.", 0),
    ]
    _, trained = complete(RetrievedTable(BM25Run(SOURCE, CANDIDATES, 10), append_missed=True))
    assert texts(trained)[-2:] == [("b", "Cats sleep.", 0), ("b", "All day long.", 1)]
    outputs, first = complete(RetrievedTable(BM25Run(SOURCE, CANDIDATES, 1), append_missed=False))
    assert len(texts(first)) == 2
    assert outputs["bm25"] == {"finds nothing": 0, "misses all positives": 1}


def test_retrieved_candidates_have_the_scores_of_the_index_that_found_them(complete):
    table = RetrievedTable(BM25Run(SOURCE, CANDIDATES, 10), append_missed=True)
    _, folder = complete(BM25Scores(table, CANDIDATES))
    index = SentenceIndex.open(complete(CANDIDATES)[1] / INDEX)
    hits = [hit.score for row in (ROWS[0], ROWS[2]) for hit in index.search(row[1], 10)]
    # The last is a positive that BM25 missed.
    assert read_scores(folder)["score"].to_pylist() == [*hits, 0.0]


def test_interrupted_run_goes_on_behind_its_last_complete_part(complete, monkeypatch):
    expected, _ = complete(RetrievedTable(BM25Run(SOURCE, CANDIDATES, 10), append_missed=True))
    monkeypatch.setattr(retrieved_stages, "QUERIES_PER_TASK", 1)
    run = BM25Run(SOURCE, CANDIDATES, 9)  # another run than the one above
    search, searched = retrieved_stages._search, []

    def search_until_lost(store, index, depth, queries):
        if len(searched) == 1:
            raise CorpusError("the node is lost")
        searched.extend(queries)
        return search(store, index, depth, queries)

    monkeypatch.setattr(retrieved_stages, "_search", search_until_lost)
    with pytest.raises(CorpusError, match="lost"):
        complete(run)
    monkeypatch.setattr(retrieved_stages, "_search", search)
    outputs, folder = complete(run)
    assert outputs == {"num_parts": 2, "num_searched_parts": 1}
    assert [query.id for query in searched] == ["a"]
    assert read_table(folder)["question_id"].unique().to_pylist() == ["a", "b"]
    retrieved, folder = complete(RetrievedTable(run, append_missed=True))
    assert len(list(folder.glob("*.parquet"))) == 2
    # Parts change neither rows nor counts.
    assert retrieved == expected


def test_grid_and_index_count_terms_as_the_recipe_says(complete):
    rows = Rows((("q", "of mice", "q-0", "Out of sight.", 1), ("q", "of mice", "q-1", "Mice.", 0)))
    given = BM25Grid(rows, ((0.9, 0.4),))
    chosen = BM25Grid(rows, ((0.9, 0.4), (1.2, 0.4)), collection=(rows,))
    for grid, number in ((given, 2), (chosen, 2)):
        without = replace(grid, terms=TermConfig(stop_words=True))
        assert complete(without)[0]["content"] == "k1=0.9, b=0.4, stop_words"
        folders = [complete(CandidateIndex((rows,), each))[1] for each in (grid, without)]
        hits = [len(SentenceIndex.open(folder / INDEX).search("of mice")) for folder in folders]
        assert hits == [number, 1]
    without = replace(chosen, terms=TermConfig(stop_words=True))
    assert [complete(each)[0]["RR"] for each in (chosen, without)] == [0.5, 0.0]


def test_own_candidates_are_scored_with_the_words_of_the_whole_table(complete):
    rows = (*ROWS, ("c", "what do mice eat", "c-0", "Owls fly.", 0))
    table = Rows(rows)
    _, folder = complete(BM25Scores(table, GRID, "no_all_negative"))
    every = BM25(0.9, 0.4).score_candidates(from_rows(rows, CANDIDATE_SCHEMA))
    assert read_scores(folder)["score"].to_pylist() == every[:5].tolist()


def test_bm25_is_evaluated_like_a_ranker(complete):
    outputs, folder = complete(TableEvaluation(BM25Scores(SOURCE, GRID), ("RR",)))
    rows = from_rows(ROWS, CANDIDATE_SCHEMA)
    expected = evaluate(rows, BM25(0.9, 0.4).score_candidates(rows), ["RR"])
    stored = outputs["evaluations"][""]
    assert (stored["measures"], stored["fingerprint"]) == (expected.measures, fingerprint(rows))
    assert pq.read_table(folder / "questions-0.parquet").equals(expected.per_question)


def test_evaluation_of_ids_with_white_space_writes_a_run_that_names_them(complete):
    spaced = Rows(tuple((f"faq {row[0]}", *row[1:]) for row in ROWS))
    outputs, folder = complete(TableEvaluation(BM25Scores(spaced, GRID), ("RR",)))
    expected, _ = complete(TableEvaluation(BM25Scores(SOURCE, GRID), ("RR",)))
    assert outputs["evaluations"][""]["measures"] == expected["evaluations"][""]["measures"]
    written = read_run(folder / "ranking.run")["question_id"].to_pylist()
    assert [unquote(id) for id in written] == [row[0] for row in spaced.rows]
    assert pq.read_table(folder / "questions-0.parquet")["question_id"][0].as_py() == "faq a"


def test_questions_that_find_nothing_are_counted(complete):
    zebras = Rows(tuple((row[0], "zebra?", *row[2:]) for row in ROWS))
    outputs, _ = complete(RetrievedTable(BM25Run(zebras, CANDIDATES, 10), append_missed=False))
    assert outputs["bm25"] == {"finds nothing": 2, "misses all positives": 2}
    _, trained = complete(RetrievedTable(BM25Run(zebras, CANDIDATES, 10), append_missed=True))
    assert {label for _, _, label in texts(trained)} == {1}


def test_question_that_finds_nothing_counts_as_0(complete):
    some = Rows((*ROWS[:2], *((row[0], "zebra?", *row[2:]) for row in ROWS[2:])))
    points = ((0.9, 0.4), (0.9, 0.5))
    grid, _ = complete(BM25Grid(some, points, collection=(some,), depth=10))
    table = RetrievedTable(BM25Run(some, CANDIDATES, 10), append_missed=False)
    stored, _ = complete(TableEvaluation(BM25Scores(table, CANDIDATES), ("RR",)))
    assert texts(complete(table)[1])[-1] == ("b", NOTHING_FOUND, 0)
    assert stored["evaluations"][""]["measures"]["RR"] == grid["RR"] == 0.5


def test_file_that_cannot_be_read_or_named_in_unicode_stops_no_index(complete, tmp_path):
    root = tmp_path / "documents"
    root.mkdir()
    (root / "owls.txt").write_text("Owls hunt mice.")
    (root / "memory.txt").symlink_to("/proc/self/mem")
    (root / os.fsdecode(b"caf\xe9.txt")).write_text("Coffee here.")
    outputs, _ = complete(DocumentIndex.from_documents(root, IndexConfig()))
    assert (outputs["documents"], outputs["skipped"]) == (2, {"unreadable": 1})


def test_index_of_documents_is_named_by_their_content_and_not_by_place_or_shards(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owls.txt").write_text("Owls hunt mice.")
    here = DocumentIndex.from_documents(tmp_path / "here", IndexConfig())
    assert here == DocumentIndex.from_documents(tmp_path / "there", IndexConfig(), num_shards=4)
    assert here != DocumentIndex.from_documents(tmp_path / "here", IndexConfig(BM25(k1=1.2)))
    place = str(tmp_path / "here")
    assert here.describe() == {"data": place, "source": f"documents {place}"}
    assert here.identity({})["config"]["sentence_splitter"].startswith("syntok-")
    (tmp_path / "here" / "owls.txt").write_text("Owls hunt voles.")
    assert here != DocumentIndex.from_documents(tmp_path / "here", IndexConfig())
    with pytest.raises(CorpusError, match="no such folder"):
        DocumentIndex.from_documents(tmp_path / "nowhere", IndexConfig())


def test_stored_questions_are_read_as_they_were_written(tmp_path):
    queries = [Query("a", "which birds hunt mice", 3), Query("b", "when do cats sleep")]
    assert write_queries(queries, tmp_path) == {"num_questions": 2}
    assert read_queries(tmp_path) == queries


def test_questions_of_a_table_are_read_once_each(complete):
    _, folder = complete(SOURCE)
    assert read_queries(folder) == [
        Query("a", "which birds hunt mice"),
        Query("b", "when do cats sleep"),
    ]


def test_question_without_an_answer_is_not_counted_as_one_whose_answers_are_missed():
    queries = [Query("a", "owls?"), Query("b", "mice?"), Query("c", "cats?")]
    results = [{"One.": 2.0}, {"One.": 3.0, "Two.": 1.0}, {}]
    positives = {"a": ["Three."], "c": ["Four."]}
    for append_missed, rest in ((True, [("c", "Four.", 1)]), (False, [("c", NOTHING_FOUND, 0)])):
        given = [dict(each) for each in results]
        rows, scores, counts = retrieved_rows(positives, queries, given, append_missed)
        of_first = [("a", "One.", 0), *[("a", "Three.", 1)] * append_missed]
        columns = (rows[name].to_pylist() for name in ("question_id", "candidate", "label"))
        assert list(zip(*columns)) == [*of_first, ("b", "One.", 0), ("b", "Two.", 0), *rest]
        assert scores.tolist() == [2.0, *[0.0] * append_missed, 3.0, 1.0, 0.0]
        assert counts == {"finds nothing": 1, "misses all positives": 2}
        assert rows["candidate_id"].to_pylist()[-3:] == ["b-0", "b-1", "c-0"]


def test_question_goes_to_the_same_part_whatever_the_other_questions_are(complete):
    rows = tuple((f"{n}", f"question {n}?", f"{n}-0", "Yes.", 1) for n in range(80))

    def part(rows, name, share=4):
        return {row[0] for row in texts(complete(SplitTable(Rows(rows), name, share))[1])}

    dev = part(rows, "dev")
    assert 10 <= len(dev) <= 30
    assert part(rows, "train") == {row[0] for row in rows} - dev
    assert part(rows[:40], "dev") == dev & {row[0] for row in rows[:40]}
    assert part(rows, "dev", share=8) < dev


@pytest.mark.parametrize("share", [1, 10**9])  # by their hashes all are dev's, or none
def test_neither_part_of_a_divided_table_is_empty(complete, share):
    parts = [complete(SplitTable(SOURCE, part, share)) for part in ("train", "dev")]
    assert [len(read_queries(folder)) for _, folder in parts] == [1, 1]
    assert {row[0] for _, folder in parts for row in texts(folder)} == {"a", "b"}
    for outputs, folder in parts:
        assert outputs["content"] == fingerprint(read_table(folder))


def test_one_labelled_question_cannot_be_divided(complete):
    questions = Questions((Query("a", "cats and mice"), Query("b", "zebra")))
    with pytest.raises(ConfigError, match="1 questions that BM25 can label of 2") as error:
        complete(LabelledTable(CANDIDATES, questions, PseudoLabelConfig(), min_questions=2))
    assert "at least two are needed" in error.value.problem
    outputs, folder = complete(LabelledTable(CANDIDATES, questions, PseudoLabelConfig()))
    assert len(read_queries(folder)) == 1
    assert outputs["left_out"] == {"finds nothing": 1}


def test_questions_of_a_held_out_table_are_not_labelled(complete):
    """People have labeled some of the questions, and these judge what the others train."""
    queries = (Query("x", "Which birds hunt mice"), Query("y", "cats and mice"))
    labelled = LabelledTable(CANDIDATES, Questions(queries), PseudoLabelConfig(), held_out=SOURCE)
    outputs, folder = complete(labelled)
    assert [query.id for query in read_queries(folder)] == ["y"]
    assert outputs["left_out"] == {"held out": 1}
    with pytest.raises(ConfigError, match="1 questions that BM25 can label of 2, left out"):
        complete(replace(labelled, min_questions=2))
