"""What a joint model says of passages and the sentences in them (Two-in-One).

Knows tensors. Must not know models or losses: the one makes it, the other reads it.
"""

from typing import NamedTuple

from torch import Tensor


class Joint(NamedTuple):
    """What a joint model says of passages (or windows of them) and of the sentences in them."""

    passage: Tensor
    """Score of each passage, shape [passages]."""
    sentence: Tensor
    """Score of each sentence, shape [sentences]."""
    passage_state: Tensor
    """State that stands for each passage, shape [passages, hidden]."""
    sentence_state: Tensor
    """State that stands for each sentence, shape [sentences, hidden]."""
    answer: Tensor | None = None
    """Logits of being an answer's first and last token, shape [tokens, 2]; None of a model that
    gives no answers."""
    window: Tensor | None = None
    """Number of each token's passage, shape [tokens]; None where `answer` is."""
