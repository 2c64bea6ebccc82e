"""Rankers inside LangChain, LlamaIndex and Haystack: order, scores, ids and metadata kept."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import ConfigError

QUESTION = "What is kovarin?"
TEXTS = ["Badesso.", "Kovarin ne kovarin.", " ", "Lala muri.", "Muri.", "Quintol ba.", "Zelimut."]


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory) -> str:
    """A tiny cascade that drops half after each exit but the last."""
    made = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 2, 3])
    made.drop_ratios = 0.5
    return str(save(made, tmp_path_factory.mktemp("adapted") / "cascade"))


@pytest.fixture(scope="module")
def expected(model) -> list[tuple[str, int | None]]:
    """Texts and exit layers as the ranker itself gives them; the blank one has none."""
    held = [text for text in TEXTS if text.strip()]
    return [(one.text, one.exit_layer) for one in load(model).rank(QUESTION, held)]


def falls(scores) -> bool:
    return scores == sorted(scores, reverse=True)


@pytest.fixture(scope="module")
def langchain():
    pytest.importorskip("langchain_core", reason="the extra `integrations` is not installed")
    from langchain_core.documents import Document

    from as2ray.integrations.langchain import As2rayReranker

    return As2rayReranker, [
        Document(page_content=text, id=f"d{i}", metadata={"n": i}) for i, text in enumerate(TEXTS)
    ]


def test_langchain_compressor_ranks_and_keeps_ids_and_metadata(langchain, model, expected):
    reranker, documents = langchain
    found = reranker(model=model).compress_documents(documents, QUESTION)
    assert [(one.page_content, one.metadata["exit_layer"]) for one in found] == expected
    assert falls([one.metadata["relevance_score"] for one in found])
    assert all(one.id == f"d{one.metadata['n']}" for one in found)
    assert all(set(one.metadata) == {"n"} for one in documents)


def test_langchain_compressor_takes_the_best_and_other_drop_ratios(langchain, model):
    reranker, documents = langchain
    found = reranker(model=model, top_n=2, drop_ratios=0.0).compress_documents(documents, QUESTION)
    assert [one.metadata["exit_layer"] for one in found] == [3, 3]
    assert reranker(model=model).compress_documents([], QUESTION) == []
    with pytest.raises(ValueError, match="top_n"):
        reranker(model=model, top_n=0)


@pytest.mark.parametrize("framework", ["langchain", "llama_index"])
def test_model_may_be_the_path_of_a_folder(framework, request, model):
    ranker, _ = request.getfixturevalue(framework)
    assert ranker(model=Path(model)).model == model


@pytest.fixture(scope="module")
def llama_index():
    pytest.importorskip("llama_index.core", reason="the extra `integrations` is not installed")
    from llama_index.core.schema import NodeWithScore, TextNode

    from as2ray.integrations.llama_index import As2rayRerank

    return As2rayRerank, [
        NodeWithScore(node=TextNode(text=text, id_=f"d{i}"), score=float(i))
        for i, text in enumerate(TEXTS)
    ]


def test_llama_index_postprocessor_ranks_and_keeps_ids(llama_index, model, expected):
    rerank, nodes = llama_index
    found = rerank(model=model, keep_retrieval_score=True).postprocess_nodes(
        nodes, query_str=QUESTION
    )
    assert [(one.node.text, one.node.metadata["exit_layer"]) for one in found] == expected
    assert falls([one.score for one in found])
    assert all(one.node.node_id == f"d{one.node.metadata['retrieval_score']:.0f}" for one in found)
    assert [one.score for one in nodes] == [float(i) for i in range(len(TEXTS))]
    assert all(not one.node.metadata for one in nodes)


def test_llama_index_models_do_not_read_what_the_postprocessor_adds(llama_index, model):
    from llama_index.core.schema import MetadataMode

    rerank, nodes = llama_index
    titled = nodes[1].node.model_copy(update={"metadata": {"title": "Kovarin"}})
    first = nodes[1].model_copy(update={"node": titled})
    postprocessor = rerank(model=model, keep_retrieval_score=True)
    ranked = postprocessor.postprocess_nodes([first], query_str=QUESTION)
    assert set(ranked[0].node.metadata) == {"title", "exit_layer", "retrieval_score"}
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert ranked[0].node.get_content(mode) == titled.get_content(mode)
    again = postprocessor.postprocess_nodes(ranked, query_str=QUESTION)
    assert again[0].score == ranked[0].score


def test_llama_index_postprocessor_needs_a_query_and_takes_the_best(llama_index, model):
    rerank, nodes = llama_index
    assert len(rerank(model=model, top_n=2).postprocess_nodes(nodes, query_str=QUESTION)) == 2
    with pytest.raises(ConfigError, match="without a query"):
        rerank(model=model).postprocess_nodes(nodes)


@pytest.fixture(scope="module")
def haystack():
    pytest.importorskip("haystack", reason="the extra `integrations` is not installed")
    from haystack import Document

    from as2ray.integrations.haystack import As2rayRanker

    return As2rayRanker, [
        Document(content=text, id=f"d{i}", meta={"n": i}) for i, text in enumerate(TEXTS)
    ]


def test_haystack_ranker_ranks_in_a_pipeline_that_went_through_its_file(haystack, model, expected):
    from haystack import Pipeline

    ranker, documents = haystack
    pipeline = Pipeline()
    pipeline.add_component("ranker", ranker(Path(model)))
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=["as2ray.integrations.haystack"])
    again.warm_up()
    asked = {"query": QUESTION, "documents": [*documents, documents[1]]}
    found = again.run({"ranker": asked})["ranker"]["documents"]
    assert [(one.content, one.meta["exit_layer"]) for one in found] == expected
    assert falls([one.score for one in found])
    assert all(one.id == f"d{one.meta['n']}" for one in found)
    assert all(one.score is None for one in documents)


def test_haystack_ranker_s_run_overrides_the_component(haystack, model):
    ranker, documents = haystack
    made = ranker(model, top_k=3, drop_ratios=0.5)
    assert len(made.run(QUESTION, documents)["documents"]) == 3
    found = made.run(QUESTION, documents, top_k=1, drop_ratios=0.0)["documents"]
    assert [one.meta["exit_layer"] for one in found] == [3]
    nothing = made.run(QUESTION, [documents[2]])
    assert nothing == {"documents": []}


def test_a_ranker_is_asked_by_one_thread_at_a_time(monkeypatch):
    from as2ray.integrations import shared_ranker

    class Alone:
        busy = False

        def rank(self, *_):
            assert not self.busy
            self.busy = True
            time.sleep(0.05)
            self.busy = False
            return []

    alone = Alone()
    monkeypatch.setattr(shared_ranker, "cached_ranker", lambda *_: alone)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(shared_ranker.rank_texts, "m", "auto", QUESTION, TEXTS, None)
            for _ in range(4)
        ]
        assert [one.result() for one in asked] == [[]] * 4
