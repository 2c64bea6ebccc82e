"""Packed batches, and what transformers itself gives for the same pairs, padded."""

from random import Random

import numpy as np
import pytest
import tiny

from as2ray.text.packing import PackedBatch
from as2ray.text.tokenization import PairTokenizer


@pytest.fixture
def pairs() -> tuple[list[str], list[str]]:
    """18 questions and candidates of many lengths, some of them equally long."""
    random = Random(5)
    questions = [f"What is {random.choice(tiny.TOPICS)}?" for _ in range(18)]
    return questions, [tiny.sentence(random, random.randint(1, 12)) for _ in range(18)]


@pytest.fixture
def packed(published, family, pairs) -> PackedBatch:
    """The pairs as one packed batch of the family's tokens."""
    definition = published(family).backend_tokenizer.to_str()
    encoded = PairTokenizer(definition, max_length=60, max_question_length=24).encode(*pairs)
    numbers = range(len(encoded))
    return encoded.pack(np.array(numbers), {"row": np.array(numbers)})


@pytest.fixture
def padded(published, family, pairs, packed) -> dict[str, object]:
    """The pairs as transformers pads them, in the packed batch's order."""
    rows = packed.sequence_data["row"].tolist()
    questions, candidates = ([texts[r] for r in rows] for texts in pairs)
    # Transformers 5 leaves ALBERT's types out unless asked; it was pretrained with them.
    how = {"padding": True, "return_tensors": "pt", "return_token_type_ids": True}
    return published(family)(questions, candidates, **how)
