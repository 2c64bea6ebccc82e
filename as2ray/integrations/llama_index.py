"""A LlamaIndex node postprocessor.

Knows LlamaIndex's nodes. Must not know rankers' insides.

Each node keeps its id and metadata; what was given stays as it was.
"""

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from as2ray.errors import ConfigError
from as2ray.integrations.shared_ranker import OptionalDropRatios, rank_texts
from as2ray.models.ranker import Dtype


class As2rayRerank(BaseNodePostprocessor):  # type: ignore[misc]
    """Ranks nodes by how well they answer the query."""

    model: str = Field(description="Checkpoint folder or hub id.")
    top_n: int | None = Field(None, gt=0, description="How many to return; all by default.")
    drop_ratios: OptionalDropRatios = Field(
        None, description="Other drop ratios than a cascade's own."
    )
    dtype: Dtype = Field("auto", description="Number format of the matrix products.")
    keep_retrieval_score: bool = Field(
        False, description="Whether the metadata keep the score of the stage before."
    )

    @classmethod
    def class_name(cls) -> str:
        """What LlamaIndex stores it by."""
        return "As2rayRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ConfigError(
                "nodes without a query; expected a query to rank them by",
                fix="pass query_bundle or query_str",
            )
        question = query_bundle.query_str
        told = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: self.model,
            EventPayload.QUERY_STR: question,
            EventPayload.TOP_K: self.top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=told) as event:
            texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
            placed = rank_texts(
                self.model, self.dtype, question, texts, self.top_n, self.drop_ratios
            )
            ranked = [
                self._with_score(nodes[one.index], one.score, one.exit_layer) for one in placed
            ]
            event.on_end(payload={EventPayload.NODES: ranked})
        return ranked

    def _with_score(
        self, scored_node: NodeWithScore, score: float, exit_layer: int | None
    ) -> NodeWithScore:
        added: dict[str, Any] = {} if exit_layer is None else {"exit_layer": exit_layer}
        if self.keep_retrieval_score:
            added["retrieval_score"] = scored_node.score
        node = scored_node.node.model_copy(
            update={"metadata": {**scored_node.node.metadata, **added}}
        )
        return NodeWithScore(node=node, score=score)
