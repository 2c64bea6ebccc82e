"""A LlamaIndex node postprocessor. Nodes are copied with their id and metadata.

What is added to the metadata is in no text that a model reads: neither a prompt nor another ranker.
"""

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from as2ray.errors import ConfigError
from as2ray.integrations.shared_ranker import ModelPath, OptionalDropRatios, rank_texts
from as2ray.models.precision import Dtype


class As2rayRerank(BaseNodePostprocessor):  # type: ignore[misc]
    """Ranks nodes by how well they answer the query."""

    model: ModelPath = Field(description="Checkpoint folder or hub id.")
    top_n: int | None = Field(None, gt=0, description="Number of nodes to return; by default all.")
    drop_ratios: OptionalDropRatios = Field(
        None, description="Drop ratios of a cascade; by default the checkpoint's."
    )
    dtype: Dtype = Field("auto", description="Number format of matrix products.")
    keep_retrieval_score: bool = Field(
        False, description="Whether the retriever's score is stored in the metadata."
    )

    @classmethod
    def class_name(cls) -> str:
        """Returns the name under which LlamaIndex serializes the class."""
        return "As2rayRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ConfigError(
                "nodes cannot be ranked without a query", fix="pass query_bundle or query_str"
            )
        question = query_bundle.query_str
        payload = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: self.model,
            EventPayload.QUERY_STR: question,
            EventPayload.TOP_K: self.top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
            ranking = rank_texts(
                self.model, self.dtype, question, texts, self.top_n, self.drop_ratios
            )
            ranked = [self._with_score(nodes[r.index], r.score, r.exit_layer) for r in ranking]
            event.on_end(payload={EventPayload.NODES: ranked})
        return ranked

    def _with_score(
        self, scored_node: NodeWithScore, score: float, exit_layer: int | None
    ) -> NodeWithScore:
        added: dict[str, Any] = {} if exit_layer is None else {"exit_layer": exit_layer}
        if self.keep_retrieval_score:
            added["retrieval_score"] = scored_node.score
        node = scored_node.node
        update = {
            "metadata": node.metadata | added,
            "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, *added],
            "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, *added],
        }
        return NodeWithScore(node=node.model_copy(update=update), score=score)
