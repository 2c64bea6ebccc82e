"""A LangChain document compressor.

Knows LangChain's documents. Must not know rankers' insides.

Each document keeps its id and metadata, to which `relevance_score` and, of a cascade, `exit_layer`
are added; what was given stays as it was.
"""

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, PositiveInt

from as2ray.adapters.placed import Drop, place
from as2ray.models.ranker import Precision


class As2rayReranker(BaseDocumentCompressor):  # type: ignore[misc]
    """Ranks documents by how well they answer the query."""

    model_config = ConfigDict(extra="forbid")
    model: str
    """Checkpoint folder or hub id."""
    top_n: PositiveInt | None = None
    """How many to return; all by default."""
    drop: Drop = None
    """Other drop ratios than a cascade's own."""
    precision: Precision = "auto"
    """Number format of the matrix products."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """The best documents, best first."""
        texts = [document.page_content for document in documents]
        placed = place(self.model, self.precision, query, texts, self.top_n, self.drop)
        return [_told(documents[one.index], one.score, one.exit_layer) for one in placed]


def _told(document: Document, score: float, exit_layer: int | None) -> Document:
    metadata = {**document.metadata, "relevance_score": score}
    if exit_layer is not None:
        metadata["exit_layer"] = exit_layer
    return document.model_copy(update={"metadata": metadata})
