"""The clients that people already run, unchanged, against the service on a socket."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from served import CANDIDATES, QUESTION

from as2ray.checkpoints.loading import load
from benchmarks import budget

MISSING = "the extra `clients` is not installed"


@pytest.fixture(scope="module")
def order(cascade) -> list[int]:
    """Indices, best first."""
    return [one.index for one in load(cascade, device="cpu").rank(QUESTION, CANDIDATES)]


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch):
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_cohere_sdk_ranks(address, order, version):
    cohere = pytest.importorskip("cohere", reason=MISSING)
    client = getattr(cohere, version)(api_key="any", base_url=address)
    found = client.rerank(model="rerank-v3.5", query=QUESTION, documents=CANDIDATES, top_n=4)
    assert [one.index for one in found.results] == order[:4]
    assert found.meta.api_version.version == ("1" if version == "Client" else "2")
    scores = [one.relevance_score for one in found.results]
    assert scores == sorted(scores, reverse=True)


def test_cohere_sdk_v1_gets_documents_back(address, order):
    cohere = pytest.importorskip("cohere", reason=MISSING)
    documents = [{"text": text, "id": str(i)} for i, text in enumerate(CANDIDATES)]
    found = cohere.Client(api_key="any", base_url=address).rerank(
        model="m", query=QUESTION, documents=documents, return_documents=True
    )
    assert [one.document.text for one in found.results] == [CANDIDATES[i] for i in order]


@pytest.mark.parametrize(
    ("documents", "error"), [([], "BadRequestError"), ([" "], "UnprocessableEntityError")]
)
def test_cohere_sdk_raises_its_own_errors(address, documents, error):
    cohere = pytest.importorskip("cohere", reason=MISSING)
    client = cohere.ClientV2(api_key="any", base_url=address)
    with pytest.raises(getattr(cohere.errors, error)) as raised:
        client.rerank(model="m", query=QUESTION, documents=documents)
    assert raised.value.body["message"]


def test_langchain_s_cohere_reranker_ranks(address, order):
    langchain_cohere = pytest.importorskip("langchain_cohere", reason=MISSING)
    from langchain_core.documents import Document

    reranker = langchain_cohere.CohereRerank(
        model="m", cohere_api_key="any", base_url=address, top_n=len(CANDIDATES)
    )
    documents = [Document(page_content=text) for text in CANDIDATES]
    found = reranker.compress_documents(documents, QUESTION)
    assert [one.page_content for one in found] == [CANDIDATES[i] for i in order]
    assert all("relevance_score" in one.metadata for one in found)


def nodes():
    from llama_index.core.schema import NodeWithScore, TextNode

    return [NodeWithScore(node=TextNode(text=text)) for text in CANDIDATES]


def test_llama_index_s_cohere_reranker_ranks(address, order):
    module = pytest.importorskip(
        "llama_index.postprocessor.cohere_rerank", reason=MISSING, exc_type=ImportError
    )
    rerank = module.CohereRerank(model="m", api_key="any", base_url=address, top_n=len(CANDIDATES))
    found = rerank.postprocess_nodes(nodes(), query_str=QUESTION)
    assert [one.node.text for one in found] == [CANDIDATES[i] for i in order]


def test_llama_index_s_tei_reranker_ranks(address, order):
    module = pytest.importorskip(
        "llama_index.postprocessor.tei_rerank", reason=MISSING, exc_type=ImportError
    )
    rerank = module.TextEmbeddingInference(model_name="m", base_url=address, top_n=len(CANDIDATES))
    found = rerank.postprocess_nodes(nodes(), query_str=QUESTION)
    assert [one.node.text for one in found] == [CANDIDATES[i] for i in order]


@pytest.mark.parametrize("kind", ["cohere", "jina"])
def test_haystack_s_rankers_rank(address, order, kind):
    module = pytest.importorskip(f"haystack_integrations.components.rankers.{kind}", reason=MISSING)
    from haystack import Document
    from haystack.utils import Secret

    token, documents = Secret.from_token("any"), [Document(content=text) for text in CANDIDATES]
    if kind == "cohere":
        ranker = module.CohereRanker(model="m", api_key=token, api_base_url=address)
    else:
        ranker = module.JinaRanker(model="m", api_key=token, base_url=f"{address}/v1/rerank")
    found = ranker.run(query=QUESTION, documents=documents, top_k=len(CANDIDATES))["documents"]
    assert [one.content for one in found] == [CANDIDATES[i] for i in order]
    assert all(one.score is not None for one in found)


def test_example_of_clients_gets_the_same_order_from_each(address, cascade, monkeypatch, capsys):
    path = Path(__file__).parents[2] / "examples" / "clients.py"
    monkeypatch.setattr(sys, "argv", [str(path), address, "any"])
    example = runpy.run_path(str(path))
    ranked = load(cascade, device="cpu").rank(example["QUESTION"], example["TEXTS"])
    expected = [example["TEXTS"][one.index] for one in ranked]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(example["CLIENTS"])
    assert lines[0].endswith(str(expected))
    for line in lines[1:]:
        assert line.endswith(str(expected)) or "not installed" in line


def test_benchmark_of_budgets_asks_a_service_by_several_clients(
    address, cascade, tmp_path, monkeypatch
):
    monkeypatch.setattr(budget, "limit_cores", lambda num_cores: num_cores)  # of this process
    monkeypatch.setattr(budget, "BUDGETS_MS", (25, 500))
    flags = ["--small", "--http", "--url", address, "--clients", "3"]
    flags += ["--model", cascade, "--cascade", cascade, "--output", str(tmp_path / "report.json")]
    budget.main(flags)
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert results["clients"] == 3
    for name in ("25 ms", "500 ms", "none"):
        for measured in results[name].values():
            assert 0 < measured["MAP"] <= 1
            assert 0 < measured["p50"] <= measured["p99"]
