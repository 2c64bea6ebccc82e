"""A Haystack ranker component.

Documents are copied with their id and meta, to which the `exit_layer` of a cascade is added. Of
documents with the same id, the first one counts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict

from as2ray.integrations.shared_ranker import OptionalDropRatios, cached_ranker, rank_texts
from as2ray.models.precision import Dtype


@component
class As2rayRanker:
    """Ranks documents by how well they answer the query.

    Args:
        model: Checkpoint folder or hub id.
        top_k: Number of documents to return; by default all.
        drop_ratios: Drop ratios of a cascade; by default the checkpoint's.
        dtype: Number format of matrix products.
    """

    def __init__(
        self,
        model: str | Path,
        top_k: int | None = None,
        drop_ratios: OptionalDropRatios = None,
        dtype: Dtype = "auto",
    ) -> None:
        self.model = str(model)
        self.top_k, self.drop_ratios, self.dtype = top_k, drop_ratios, dtype

    def warm_up(self) -> None:
        """Loads the checkpoint before the first query."""
        cached_ranker(self.model, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Serializes the component for the file of a pipeline."""
        parameters: dict[str, Any] = default_to_dict(
            self,
            model=self.model,
            top_k=self.top_k,
            drop_ratios=self.drop_ratios,
            dtype=self.dtype,
        )
        return parameters

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "As2rayRanker":
        """Creates the component from the file of a pipeline."""
        ranker: As2rayRanker = default_from_dict(cls, data)
        return ranker

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    def run(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        drop_ratios: OptionalDropRatios = None,
    ) -> dict[str, list[Document]]:
        """Returns the best documents, best first.

        Args:
            query: The question.
            documents: The documents to rank.
            top_k: Number of documents to return; by default the component's.
            drop_ratios: By default the component's; 0 drops nothing.
        """
        distinct = list({document.id: document for document in reversed(documents)}.values())[::-1]
        ranking = rank_texts(
            self.model,
            self.dtype,
            query,
            [document.content for document in distinct],
            self.top_k if top_k is None else top_k,
            self.drop_ratios if drop_ratios is None else drop_ratios,
        )
        ranked = [_with_score(distinct[r.index], r.score, r.exit_layer) for r in ranking]
        return {"documents": ranked}


def _with_score(document: Document, score: float, exit_layer: int | None) -> Document:
    new_meta = {} if exit_layer is None else {"exit_layer": exit_layer}
    return replace(document, score=score, meta={**document.meta, **new_meta})
