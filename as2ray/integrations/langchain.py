"""A LangChain document compressor.

Knows LangChain's documents. Must not know rankers' insides.

Each document keeps its id and metadata, to which `relevance_score` and, of a cascade, `exit_layer`
are added; what was given stays as it was.
"""

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, PositiveInt

from as2ray.integrations.shared_ranker import OptionalDropRatios, rank_texts
from as2ray.models.ranker import Dtype


class As2rayReranker(BaseDocumentCompressor):  # type: ignore[misc]
    """Ranks documents by how well they answer the query."""

    model_config = ConfigDict(extra="forbid")
    model: str
    """Checkpoint folder or hub id."""
    top_n: PositiveInt | None = None
    """How many to return; all by default."""
    drop_ratios: OptionalDropRatios = None
    """Other drop ratios than a cascade's own."""
    dtype: Dtype = "auto"
    """Number format of the matrix products."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """The best documents, best first."""
        texts = [document.page_content for document in documents]
        placed = rank_texts(self.model, self.dtype, query, texts, self.top_n, self.drop_ratios)
        return [_with_score(documents[one.index], one.score, one.exit_layer) for one in placed]


def _with_score(document: Document, score: float, exit_layer: int | None) -> Document:
    metadata = {**document.metadata, "relevance_score": score}
    if exit_layer is not None:
        metadata["exit_layer"] = exit_layer
    return document.model_copy(update={"metadata": metadata})
