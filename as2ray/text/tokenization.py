"""Tokenising: question-candidate pairs into token sequences, truncating the candidate only.

Knows the `tokenizers` library. Must not import torch or transformers: the tasks that tokenise on
a cluster start in a fraction of the time without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from as2ray.errors import CheckpointError, ConfigError
from as2ray.text.packing import TokenSequences, ragged_arange

QUESTION, CANDIDATE = -1, -2

TOKENIZE_BATCH = 2_048
"""Texts that are tokenised at a time: a tenth faster and 100 MB less than a window at once."""


@lru_cache(maxsize=8)
def _load_tokenizer(tokenizer_json: str) -> Any:
    """The tokenizer, made once in a process: a cluster's tasks get the definition anew each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of many texts end to end: ids [tokens], starts and lengths [texts]."""

    token_ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class PairTokenizer:
    """Turns (question, candidate) into `[CLS] question [SEP] candidate [SEP]` or its like.

    Each distinct text is tokenised once, then pairs are put together from ids: a question with
    413 candidates is read once. The layout of special tokens is read off the tokenizer itself,
    so BERT, RoBERTa, ELECTRA and ALBERT differ in nothing here.
    """

    tokenizer_json: str
    """The content of a `tokenizer.json`."""
    max_length: int = 128
    """Most tokens of a pair, special tokens included."""
    max_question_length: int = 64
    """Most tokens of a question; the candidate takes what is left."""

    def __post_init__(self) -> None:
        special = len(self.special_token_layout) - 2
        if not 0 < self.max_question_length < self.max_length - special:
            raise ConfigError(
                f"max_question={self.max_question_length} with max_length={self.max_length}"
                f"; expected 0 < max_question < max_length - {special} special tokens",
                fix="raise max_length or lower max_question",
            )

    @classmethod
    def from_folder(cls, folder: str | Path, **lengths: int) -> "PairTokenizer":
        """Reads `tokenizer.json` of a checkpoint folder."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json"
                "; expected a checkpoint folder with a fast tokenizer's tokenizer.json",
                fix="save it with AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
            )
        return cls(path.read_text(encoding="utf-8"), **lengths)

    @property
    def _tokenizer(self) -> Any:
        return _load_tokenizer(self.tokenizer_json)

    @cached_property
    def special_token_layout(self) -> list[tuple[int, int]]:
        """Token ids and types of a pair, each text shrunk to one place: QUESTION or CANDIDATE."""
        pair = self._tokenizer.encode("question", "candidate")
        layout: list[tuple[int, int]] = []
        for token, kind, text in zip(pair.ids, pair.type_ids, pair.sequence_ids):
            place = (token if text is None else (QUESTION, CANDIDATE)[text], kind)
            if text is None or place not in layout:
                layout.append(place)
        return layout

    def encode(self, questions: Sequence[str], candidates: Sequence[str]) -> TokenSequences:
        """Token sequences of the pairs, in order.

        Args:
            questions: Shape [pairs]; repeats cost nothing.
            candidates: Shape [pairs].
        """
        return self.join_pairs(
            self.tokenize_texts(questions, self.max_question_length),
            self.tokenize_texts(candidates, self.max_length),
        )

    def tokenize_texts(self, texts: Sequence[str], max_length: int) -> TokenizedTexts:
        """Token ids of texts without special tokens, each distinct text tokenised once.

        Args:
            texts: Shape [texts].
            longest: Most tokens that a text counts.
        """
        number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        distinct = list(number)
        pieces = [
            self._encode_texts(distinct[i : i + TOKENIZE_BATCH])
            for i in range(0, max(len(distinct), 1), TOKENIZE_BATCH)
        ]
        flat, sizes = (np.concatenate(parts) for parts in zip(*pieces))
        which = np.fromiter((number[t] for t in texts), np.int64, len(texts))
        starts = np.cumsum(sizes) - sizes
        return TokenizedTexts(flat, starts[which], np.minimum(sizes, max_length)[which])

    def char_offsets(self, text: str) -> list[tuple[int, int]]:
        """First and one past the last character of each token of a text, as `flat` counts them."""
        found: list[tuple[int, int]] = self._tokenizer.encode(
            text, add_special_tokens=False
        ).offsets
        return found

    def _encode_texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of texts end to end, shape [tokens], and their lengths, shape [texts]."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [e.ids for e in encoded]
        sizes = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int32, int(sizes.sum())), sizes

    def join_pairs(self, questions: TokenizedTexts, candidates: TokenizedTexts) -> TokenSequences:
        """Lays special tokens, question and truncated candidate end to end."""
        special = len(self.special_token_layout) - 2
        room = self.max_length - special - questions.lengths
        texts = {
            QUESTION: questions,
            CANDIDATE: replace(candidates, lengths=np.minimum(candidates.lengths, room)),
        }
        total = texts[QUESTION].lengths + texts[CANDIDATE].lengths + special
        token_ids = np.empty(int(total.sum()), np.int32)
        token_types = np.zeros_like(token_ids)
        cursor = np.cumsum(total) - total
        for place, kind in self.special_token_layout:
            if place in texts:
                text = texts[place]
                inside = ragged_arange(text.lengths)
                target = np.repeat(cursor, text.lengths) + inside
                token_ids[target] = text.token_ids[np.repeat(text.starts, text.lengths) + inside]
                token_types[target] = kind
                cursor = cursor + text.lengths
            else:
                token_ids[cursor], token_types[cursor] = place, kind
                cursor = cursor + 1
        return TokenSequences(token_ids, token_types, total.astype(np.int32))
