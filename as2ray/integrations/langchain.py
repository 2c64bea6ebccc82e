"""A LangChain document compressor.

Documents are copied with their id and metadata, to which `relevance_score` and the `exit_layer` of
a cascade are added.
"""

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, PositiveInt

from as2ray.integrations.shared_ranker import ModelPath, OptionalDropRatios, rank_texts
from as2ray.models.precision import Dtype


class As2rayReranker(BaseDocumentCompressor):  # type: ignore[misc]
    """Ranks documents by how well they answer the query."""

    model_config = ConfigDict(extra="forbid")
    model: ModelPath
    """Checkpoint folder or hub id."""
    top_n: PositiveInt | None = None
    """Number of documents to return; by default all."""
    drop_ratios: OptionalDropRatios = None
    """Drop ratios of a cascade; by default the checkpoint's."""
    dtype: Dtype = "auto"
    """Number format of matrix products."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Returns the best documents, best first."""
        texts = [document.page_content for document in documents]
        ranking = rank_texts(self.model, self.dtype, query, texts, self.top_n, self.drop_ratios)
        return [_with_score(documents[r.index], r.score, r.exit_layer) for r in ranking]


def _with_score(document: Document, score: float, exit_layer: int | None) -> Document:
    metadata = {**document.metadata, "relevance_score": score}
    if exit_layer is not None:
        metadata["exit_layer"] = exit_layer
    return document.model_copy(update={"metadata": metadata})
