"""A sentence encoder: one vector per text, from an encoder over packed batches and its pooling."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from as2ray.models.encoder.cpu_parallel import balanced_budget, parallel_map
from as2ray.models.encoder.encoder import Encoder
from as2ray.models.encoder.inference_bert import InferenceBert
from as2ray.models.encoder.packed_attention import SequenceLayout
from as2ray.models.precision import Dtype, fp32_head, resolve_dtype
from as2ray.progress import count_rows
from as2ray.text.packing import PackedBatch, TokenSequences, pack_sequences
from as2ray.text.tokenization import TOKENIZE_BATCH

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKEN_BUDGET = 8_192
"""Maximum number of tokens of a packed batch."""


@dataclass(frozen=True)
class TokenizerFile:
    """What `SentenceEncoder` needs of a fast tokenizer, without transformers."""

    backend_tokenizer: Tokenizer
    model_max_length: int
    """Maximum number of tokens of a sequence."""


@dataclass(frozen=True)
class EmbeddingSettings:
    """How token states become the embedding of a text, as in sentence-transformers."""

    max_length: int
    """Maximum number of tokens of a text, special tokens included; the rest is truncated."""
    pooling: Literal["mean", "first"] = "mean"
    """What is taken of the token states: their mean, or the first one."""
    normalize: bool = True
    """Whether embeddings have length 1."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """What compares two embeddings."""
    query_prompt: str = ""
    """Text before each query."""
    document_prompt: str = ""
    """Text before each sentence of a document."""
    default_prompt: str = ""
    """Text before each text of `encode`."""


class SentenceEncoder(nn.Module):
    """An encoder whose pooled token states are the embedding of a text.

    Args:
        name: Where it was loaded from: a folder, a hub id or the name of a packaged encoder.
        network: A transformers model of a supported family, without a head; or a BERT that cannot
            be trained or saved.
        hf_tokenizer: Its fast tokenizer.
        settings: How token states become an embedding.
        projection: A linear layer with its activation after the pooling.
    """

    def __init__(
        self,
        name: str,
        network: "PreTrainedModel | InferenceBert",
        hf_tokenizer: "PreTrainedTokenizerBase | TokenizerFile",
        settings: EmbeddingSettings,
        projection: nn.Sequential | None = None,
    ) -> None:
        super().__init__()
        self.name, self.network, self.settings = name, network, settings
        self.hf_tokenizer, self.projection = hf_tokenizer, projection
        self.encoder = Encoder(network)
        self.dtype: Dtype = "auto"
        self.tokenizer: Any = Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(settings.max_length)

    @property
    def dimension(self) -> int:
        """Number of elements of an embedding."""
        if self.projection is None:
            return int(self.network.config.hidden_size)
        linear: Any = self.projection[0]
        return int(linear.out_features)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the weights, the tokenizer and the settings."""
        digest = hashlib.sha256(json.dumps(asdict(self.settings)).encode())
        digest.update(self.tokenizer.to_str().encode())
        for name, weights in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(weights.cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    def encode(self, texts: Sequence[str], prompt: str | None = None) -> np.ndarray:
        """Returns the embeddings of texts, as sentence-transformers' `encode` does.

        Args:
            texts: Shape [texts].
            prompt: Text before each text; by default the checkpoint's default prompt.

        Returns:
            float32, shape [texts, dimension].
        """
        prompt = self.settings.default_prompt if prompt is None else prompt
        sequences = self.tokenize([prompt + text for text in texts] if prompt else texts)
        embeddings = np.empty((len(texts), self.dimension), np.float32)
        device = self.encoder.device
        num_threads = torch.get_num_threads() if device.type == "cpu" else 1
        budget = max(TOKEN_BUDGET, self.settings.max_length)
        batches = pack_sequences(sequences, balanced_budget(sequences.lengths, budget, num_threads))
        dtype = resolve_dtype(self.dtype, device)

        def embed(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray]:
            autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
            with torch.inference_mode(), autocast:
                return batch.sequence_data["row"], self(batch).cpu().numpy()

        if self.training:
            self.eval()
        with torch.inference_mode(), self.encoder.fused_inference(dtype):
            for rows, values in parallel_map(embed, batches, num_threads):
                embeddings[rows] = values
                count_rows(len(values))
        return embeddings

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Returns embeddings of queries; float32, shape [texts, dimension].

        Their inner product with those of `encode_documents` is the similarity.
        """
        return self._encode_for_search(texts, self.settings.query_prompt)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """Returns embeddings of sentences; see `encode_queries`."""
        return self._encode_for_search(texts, self.settings.document_prompt)

    def _encode_for_search(self, texts: Sequence[str], prompt: str) -> np.ndarray:
        embeddings = self.encode(texts, prompt)
        if self.settings.similarity == "cosine" and not self.settings.normalize:
            embeddings /= np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
        return embeddings

    def tokenize(self, texts: Sequence[str]) -> TokenSequences:
        """Returns the tokens of texts with special tokens, truncated to the maximum length."""
        batches = (texts[i : i + TOKENIZE_BATCH] for i in range(0, len(texts), TOKENIZE_BATCH))
        ids = [
            np.array(encoding.ids, np.int32)
            for batch in batches
            for encoding in self.tokenizer.encode_batch_fast(list(batch))
        ]
        token_ids = np.concatenate(ids) if ids else np.zeros(0, np.int32)
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        return TokenSequences(token_ids, np.zeros_like(token_ids), lengths)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns the embeddings of a packed batch; float32, shape [sequences, dimension]."""
        hidden, layout = self.encoder.embed(batch)
        if self.settings.pooling == "first":
            pooled = self.encoder.run_to_tokens(layout.first_tokens, hidden, layout).float()
        else:
            pooled = _mean_of_sequences(self.encoder.run_layers(hidden, layout), layout)
        with fp32_head(pooled):
            if self.projection is not None:
                pooled = self.projection(pooled)
            return functional.normalize(pooled) if self.settings.normalize else pooled


def _mean_of_sequences(hidden: Tensor, layout: SequenceLayout) -> Tensor:
    """Returns the mean of each sequence's states, shape [sequences, hidden]."""
    sizes = [count * length for count, length in layout.length_buckets]
    buckets = zip(layout.length_buckets, hidden.float().split(sizes))  # type: ignore[no-untyped-call]
    return torch.cat([states.view(*bucket, -1).mean(1) for bucket, states in buckets])
