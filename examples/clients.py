"""Asks a running service with each client: `python examples/clients.py [ADDRESS [TOKEN]]`.

Start it with `as2ray serve --model RANKER`. A client whose package is not installed is left out;
`pip install 'as2ray[clients]'` installs all of them.
"""

import json
import sys
import urllib.request
from collections.abc import Callable

ADDRESS = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000"
TOKEN = sys.argv[2] if sys.argv[2:] else "none"
QUESTION = "What do blue whales eat?"
TEXTS = ["Blue whales live in all oceans.", "Blue whales eat krill.", "Sperm whales dive."]


def ask_with_urllib() -> list[str]:
    """Our own path: also exit layers, drop ratios and time budgets."""
    body = json.dumps({"question": QUESTION, "candidates": TEXTS}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"{ADDRESS}/rank", body, headers)
    with urllib.request.urlopen(request) as response:
        return [TEXTS[ranked["index"]] for ranked in json.load(response)["ranking"]]


def ask_with_cohere() -> list[str]:
    """Cohere's SDK."""
    import cohere

    client = cohere.ClientV2(TOKEN, base_url=ADDRESS)
    response = client.rerank(model="default", query=QUESTION, documents=TEXTS)
    return [TEXTS[result.index] for result in response.results]


def ask_with_langchain() -> list[str]:
    """LangChain's reranker for Cohere."""
    from langchain_cohere import CohereRerank
    from langchain_core.documents import Document

    reranker = CohereRerank(
        model="default", cohere_api_key=TOKEN, base_url=ADDRESS, top_n=len(TEXTS)
    )
    ranked = reranker.compress_documents([Document(page_content=t) for t in TEXTS], QUESTION)
    return [document.page_content for document in ranked]


def ask_with_llama_index() -> list[str]:
    """LlamaIndex' reranker for Text Embeddings Inference."""
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    token = f"Bearer {TOKEN}"
    reranker = TextEmbeddingInference(
        model_name="default", base_url=ADDRESS, top_n=len(TEXTS), auth_token=token
    )
    ranked = reranker.postprocess_nodes(nodes, query_str=QUESTION)
    return [node.node.get_content() for node in ranked]


def ask_with_haystack() -> list[str]:
    """Haystack's ranker for Jina."""
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.jina import JinaRanker

    ranker = JinaRanker(
        model="default", api_key=Secret.from_token(TOKEN), base_url=f"{ADDRESS}/v1/rerank"
    )
    documents = [Document(content=text) for text in TEXTS]
    return [str(d.content) for d in ranker.run(query=QUESTION, documents=documents)["documents"]]


CLIENTS: dict[str, Callable[[], list[str]]] = {
    "urllib": ask_with_urllib,
    "cohere": ask_with_cohere,
    "langchain": ask_with_langchain,
    "llama_index (TEI)": ask_with_llama_index,
    "haystack (Jina)": ask_with_haystack,
}

for name, ask in CLIENTS.items():
    try:
        print(f"{name:18} {ask()}")
    except ImportError as error:
        print(f"{name:18} not installed: {error.name}")
