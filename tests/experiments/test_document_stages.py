"""Stages of own documents give the same with and without Ray."""

import pytest
import tiny

from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments import pseudo_labels
from as2ray.experiments import retrieved as retrieved_stages
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.documents import GeneratedQueries, labeled_tables
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.indexes import INDEX, CandidateIndex, DocumentIndex
from as2ray.experiments.pseudo_labels import LabelledTable
from as2ray.experiments.retrieved import BM25Run, RetrievedTable
from as2ray.experiments.store import Store
from as2ray.retrieval.index_writer import IndexConfig
from as2ray.retrieval.pseudo_labels import PseudoLabelConfig
from as2ray.retrieval.sentence_index import SentenceIndex

WORKERS = (WorkersConfig(num_workers=0), WorkersConfig(num_workers=2, cpus_per_worker=0.5))


def files_with_and_without_ray(stage, folder):
    """The files of a stage by name, from each kind of workers."""
    results = []
    for number, workers in enumerate(WORKERS):
        store = Store(str(folder / f"store-{number}"))
        graph = run_graph([stage], store, SequentialBackend(store, workers))
        graph.raise_failures({})
        output = store.fetch(graph.results[stage])
        files = [path for path in output.rglob("*") if path.is_file()]
        results.append(
            {
                str(path.relative_to(output)): path.read_bytes()
                for path in files
                if path.name != "manifest.json"
            }
        )
    return results


@pytest.fixture
def queries_in_groups(monkeypatch):
    for module in (pseudo_labels, retrieved_stages):
        monkeypatch.setattr(module, "QUERIES_PER_TASK", 3)


@pytest.mark.slow
def test_index_questions_and_labels_are_the_same_from_tasks_of_ray(
    documents, tmp_path, ray_local, queries_in_groups, sentence_encoder
):
    config = IndexConfig(encoder=sentence_encoder)
    index = DocumentIndex.from_documents(documents, config)
    queries = GeneratedQueries(index, ("headings", "words"), None)
    here, there = files_with_and_without_ray(
        LabelledTable(index, queries, PseudoLabelConfig()), tmp_path
    )
    assert here.keys() == {"part-00000.parquet"}
    assert here == there
    folders = [next((tmp_path / f"store-{k}").glob("DocumentIndex/*/index")) for k in range(2)]
    indexes = [SentenceIndex.open(folder, load_sentence_encoder) for folder in folders]
    assert [len(opened.shards) for opened in indexes] == [1, 2]
    one, other = (opened.search_candidates("largest animal") for opened in indexes)
    assert [c.similarity for c in one] == pytest.approx([c.similarity for c in other], abs=1e-4)


@pytest.mark.slow
def test_retrieved_candidates_are_the_same_from_tasks_of_ray(
    corpus, tmp_path, ray_local, queries_in_groups
):
    [table] = labeled_tables({"train": str(corpus)}).values()
    grid = BM25Grid(table, ((0.9, 0.4), (1.2, 0.75)))
    run = BM25Run(table, CandidateIndex((table,), grid), 7)
    retrieved = RetrievedTable(run, append_missed=True)
    here, there = files_with_and_without_ray(retrieved, tmp_path)
    assert here.keys() > {"part-00000.parquet", "part-00001.parquet", "bm25_scores.npy"}
    assert here == there


@pytest.mark.slow
def test_generator_asks_the_same_in_actors_of_ray(documents, tmp_path, ray_local, seq2seq):
    index = DocumentIndex.from_documents(documents, IndexConfig())
    queries = GeneratedQueries(index, ("generator",), 8, str(seq2seq), "ask: ")
    here, there = files_with_and_without_ray(queries, tmp_path)
    assert here == there


@pytest.mark.slow
def test_documents_are_indexed_by_tasks_of_ray_as_in_one_process(
    documents, tmp_path, ray_local, complete
):
    stage = DocumentIndex.from_documents(documents, IndexConfig(), num_shards=2)
    here, folder = complete(stage)
    store = Store(str(tmp_path / "other"))
    run = run_graph([stage], store, SequentialBackend(store, WORKERS[1]))
    run.raise_failures({})
    assert run.results[stage].outputs == here
    path = store.fetch(run.results[stage])
    indexes = [SentenceIndex.open(each / INDEX) for each in (folder, path)]
    question = f"Which {tiny.TOPICS[0]} has {tiny.WORDS[0]}?"
    hits = [index.search(question, 5) for index in indexes]
    assert hits[0] == hits[1] != []
    assert len(indexes[1].shards) == 2
    assert {each.name for each in path.iterdir()} == {INDEX, "manifest.json"}
