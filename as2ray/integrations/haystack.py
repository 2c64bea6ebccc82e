"""A Haystack ranker component.

Knows Haystack's documents and components. Must not know rankers' insides.

Each document keeps its id and meta, to which a cascade's `exit_layer` is added; what was given
stays as it was, and of documents with one id the first counts.
"""

from dataclasses import replace
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict

from as2ray.integrations.shared_ranker import OptionalDropRatios, cached_ranker, rank_texts
from as2ray.models.ranker import Dtype


@component
class As2rayRanker:
    """Ranks documents by how well they answer the query.

    Args:
        model: Checkpoint folder or hub id.
        top_k: How many to return; all by default.
        drop: Other drop ratios than a cascade's own.
        precision: Number format of the matrix products.
    """

    def __init__(
        self,
        model: str,
        top_k: int | None = None,
        drop_ratios: OptionalDropRatios = None,
        dtype: Dtype = "auto",
    ) -> None:
        self.model, self.top_k, self.drop_ratios, self.dtype = model, top_k, drop_ratios, dtype

    def warm_up(self) -> None:
        """Loads the checkpoint before the first query does."""
        cached_ranker(self.model, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """As a pipeline's file holds it."""
        kept: dict[str, Any] = default_to_dict(
            self, model=self.model, top_k=self.top_k, drop=self.drop_ratios, precision=self.dtype
        )
        return kept

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "As2rayRanker":
        """Out of a pipeline's file."""
        made: As2rayRanker = default_from_dict(cls, data)
        return made

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    def run(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        drop_ratios: float | None = None,
    ) -> dict[str, list[Document]]:
        """The best documents, best first.

        Args:
            query: The question.
            documents: What to rank.
            top_k: Other than the component's.
            drop: Other than the component's; 0 drops nothing.
        """
        distinct = list({document.id: document for document in reversed(documents)}.values())[::-1]
        placed = rank_texts(
            self.model,
            self.dtype,
            query,
            [document.content for document in distinct],
            self.top_k if top_k is None else top_k,
            self.drop_ratios if drop_ratios is None else drop_ratios,
        )
        return {
            "documents": [
                _with_score(distinct[one.index], one.score, one.exit_layer) for one in placed
            ]
        }


def _with_score(document: Document, score: float, exit_layer: int | None) -> Document:
    added = {} if exit_layer is None else {"exit_layer": exit_layer}
    return replace(document, score=score, meta={**document.meta, **added})
