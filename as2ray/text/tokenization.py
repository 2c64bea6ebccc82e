"""Tokenizes question-candidate pairs into token sequences; only the candidate is truncated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from as2ray.errors import CheckpointError, ConfigError
from as2ray.text.packing import Prefixes, TokenSequences, ragged_arange
from as2ray.text.prompts import PromptParts, divide_prompt, ends_tokens

QUESTION, CANDIDATE = -1, -2
"""Stand for the tokens of a text in `PairTokenizer.special_token_layout`."""

TOKENIZER_SETTINGS = (
    "max_length",
    "max_question_length",
    "max_candidate_length",
    "single_separator",
    "prompt",
    "instruction",
)
"""Fields of a `PairTokenizer` that a checkpoint stores."""

TOKENIZE_BATCH = 2_048
"""Texts that are tokenized at a time: 10 % faster and 100 MB less than a whole window at once."""


@lru_cache(maxsize=8)
def _load_tokenizer(tokenizer_json: str) -> Any:
    """Builds a tokenizer; cached because every task of a cluster unpickles the JSON again."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@lru_cache(maxsize=8)
def _divide_prompt(tokenizer_json: str, prompt: tuple[str, ...], instruction: str) -> PromptParts:
    """Divides a prompt; cached because some thousand texts are tokenized to find its parts."""
    return divide_prompt(prompt, instruction, partial(ends_tokens, _load_tokenizer(tokenizer_json)))


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of texts; texts may share their ids."""

    token_ids: np.ndarray
    """Vocabulary ids, shape [tokens]."""
    starts: np.ndarray
    """Index of each text's first token in `token_ids`, shape [texts]."""
    lengths: np.ndarray
    """Number of tokens of each text, shape [texts]."""

    def __getitem__(self, index: int) -> list[int]:
        """Returns the token ids of a text."""
        token_ids: list[int] = self.token_ids[self.starts[index] :][: self.lengths[index]].tolist()
        return token_ids


@dataclass(frozen=True)
class PairTokenizer:
    """Turns (question, candidate) into `[CLS] question [SEP] candidate [SEP]` or its equivalent.

    Each distinct text is tokenized once, then pairs are assembled from token ids: a question with
    413 candidates is tokenized once. The layout of the special tokens is read from the tokenizer,
    so BERT, RoBERTa, ELECTRA and ALBERT need no code of their own.
    """

    tokenizer_json: str
    """The content of a `tokenizer.json`."""
    max_length: int = 128
    """Maximum number of tokens of a pair, special tokens included."""
    max_question_length: int = 64
    """Maximum number of tokens of a question; the candidate takes what is left."""
    max_candidate_length: int | None = None
    """Maximum number of tokens of a candidate; by default all that is left."""
    single_separator: bool = False
    """Whether one separator is between the texts, of RoBERTa too. Other libraries put its two."""
    prompt: tuple[str, ...] = ()
    """A decoder's prompt instead of special tokens, in segments that are tokenized apart, with the
    fields `{question}`, `{candidate}` and `{instruction}`."""
    instruction: str = ""
    """What stands for `{instruction}`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))  # JSON has lists
        num_special = self.num_special_tokens
        if self.prompt and self.max_length < num_special + 2:
            raise ConfigError(
                f"max_length={self.max_length} has no place for a question and a candidate: the "
                f"prompt alone takes {num_special} tokens",
                fix=f"raise max_length to {num_special + 2} or more",
            )
        if not 0 < self.max_question_length < self.max_length - num_special:
            raise ConfigError(
                f"max_question_length={self.max_question_length} must be above 0 and below "
                f"max_length={self.max_length} minus {num_special} "
                f"{'tokens of the prompt' if self.prompt else 'special tokens'}",
                fix="raise max_length or lower max_question_length",
            )

    @classmethod
    def from_folder(cls, folder: str | Path, **settings: Any) -> "PairTokenizer":
        """Reads the `tokenizer.json` of a checkpoint folder.

        Args:
            folder: A checkpoint folder with a fast tokenizer.
            settings: Some of `TOKENIZER_SETTINGS`.

        Raises:
            CheckpointError: The folder has no `tokenizer.json`.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json, the file of a fast tokenizer",
                fix="save it with AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
            )
        return cls(path.read_text(encoding="utf-8"), **settings)

    @property
    def _tokenizer(self) -> Any:
        return _load_tokenizer(self.tokenizer_json)

    @cached_property
    def special_token_layout(self) -> list[tuple[int, int]]:
        """Token id and token type of each special token; a text is one entry with its marker.

        The marker is `QUESTION` or `CANDIDATE`.
        """
        if self.prompt:
            parts = self._prompt_parts
            return [
                *((token_id, 0) for text in parts.before for token_id in self._token_ids(text)),
                (QUESTION, 0),
                *((token_id, 0) for text in parts.between for token_id in self._token_ids(text)),
                (CANDIDATE, 0),
                *((token_id, 0) for text in parts.after for token_id in self._token_ids(text)),
            ]
        pair = self._tokenizer.encode("question", "candidate")
        layout: list[tuple[int, int]] = []
        for token_id, token_type, text in zip(pair.ids, pair.type_ids, pair.sequence_ids):
            entry = (token_id if text is None else (QUESTION, CANDIDATE)[text], token_type)
            if text is None or entry not in layout:
                layout.append(entry)
        if self.single_separator:
            question, candidate = (layout.index(e) for e in layout if e[0] < 0)
            del layout[question + 1 : candidate - 1]
        return layout

    def _token_ids(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    @cached_property
    def _prompt_parts(self) -> PromptParts:
        return _divide_prompt(self.tokenizer_json, self.prompt, self.instruction)

    @cached_property
    def num_special_tokens(self) -> int:
        """Number of tokens of a pair that belong to neither text."""
        num_special = len(self.special_token_layout) - 2
        if not self.prompt:
            return num_special
        parts = self._prompt_parts
        around = "a".join(parts.question), parts.candidate + "a"
        return num_special + sum(len(self._token_ids(text)) - 1 for text in around)

    def id_to_token(self, token_id: int) -> str:
        """Returns a token of the vocabulary."""
        token: str = self._tokenizer.id_to_token(token_id)
        return token

    def tokenize_questions(self, questions: Sequence[str]) -> TokenizedTexts:
        """Tokenizes questions, at most `max_question_length` tokens of each.

        With a prompt, the part around the question is tokenized with it and not truncated.
        """
        if not self.prompt:
            return self.tokenize_texts(questions, self.max_question_length)
        head, tail = self._prompt_parts.question
        short = {text: self._truncate_text(text) for text in dict.fromkeys(questions)}
        return self.tokenize_texts([f"{head}{short[text]}{tail}" for text in questions], 10**9)

    def tokenize_candidates(self, candidates: Sequence[str]) -> TokenizedTexts:
        """Tokenizes candidates, with a prompt after the text that is tokenized with them."""
        if self.prompt:
            head = self._prompt_parts.candidate
            candidates = [head + text for text in candidates]
        return self.tokenize_texts(candidates, self.max_length)

    def _truncate_text(self, text: str) -> str:
        """Returns the characters of a question's first `max_question_length` tokens."""
        offsets = self.char_offsets(text)
        if len(offsets) <= self.max_question_length:
            return text
        return text[: offsets[self.max_question_length][0]]

    def encode(self, questions: Sequence[str], candidates: Sequence[str]) -> TokenSequences:
        """Tokenizes pairs, in order.

        Args:
            questions: Shape [pairs]; repeated questions are tokenized once.
            candidates: Shape [pairs].
        """
        return self.join_pairs(
            self.tokenize_questions(questions), self.tokenize_candidates(candidates)
        )

    def tokenize_texts(self, texts: Sequence[str], max_length: int) -> TokenizedTexts:
        """Tokenizes texts without special tokens, each distinct text once.

        Args:
            texts: Shape [texts].
            max_length: Maximum number of tokens of a text; the rest is truncated.
        """
        index_of_text = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        distinct, lengths = list(index_of_text), np.zeros(len(index_of_text), np.int64)
        token_ids = [np.zeros(0, np.int32)]
        for start in range(0, len(distinct), TOKENIZE_BATCH):
            batch = distinct[start : start + TOKENIZE_BATCH]
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            batch_ids = [encoding.ids for encoding in encodings]
            lengths[start : start + len(batch)] = [len(ids) for ids in batch_ids]
            token_ids.append(np.fromiter(chain.from_iterable(batch_ids), np.int32))
        indices = np.fromiter((index_of_text[text] for text in texts), np.int64, len(texts))
        starts, lengths = np.cumsum(lengths) - lengths, np.minimum(lengths, max_length)
        return TokenizedTexts(np.concatenate(token_ids), starts[indices], lengths[indices])

    def char_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns begin and end of each token's characters, for the tokens of `tokenize_texts`."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoded.offsets
        return offsets

    def join_pairs(self, questions: TokenizedTexts, candidates: TokenizedTexts) -> TokenSequences:
        """Joins special tokens, questions and truncated candidates to token sequences."""
        num_special = len(self.special_token_layout) - 2
        max_lengths = self.max_length - num_special - questions.lengths
        max_lengths = np.minimum(max_lengths, self.max_candidate_length or self.max_length)
        candidates = replace(candidates, lengths=np.minimum(candidates.lengths, max_lengths))
        texts = {QUESTION: questions, CANDIDATE: candidates}
        lengths = questions.lengths + candidates.lengths + num_special
        token_ids = np.empty(int(lengths.sum()), np.int32)
        token_types = np.zeros_like(token_ids)
        cursor = np.cumsum(lengths) - lengths
        for token_id, token_type in self.special_token_layout:
            if token_id in texts:
                text = texts[token_id]
                positions = ragged_arange(text.lengths)
                target = np.repeat(cursor, text.lengths) + positions
                token_ids[target] = text.token_ids[np.repeat(text.starts, text.lengths) + positions]
                token_types[target] = token_type
                cursor = cursor + text.lengths
            else:
                token_ids[cursor], token_types[cursor] = token_id, token_type
                cursor = cursor + 1
        prefixes = self._find_prefixes(questions) if self.prompt else None
        return TokenSequences(token_ids, token_types, lengths.astype(np.int32), prefixes)

    def _find_prefixes(self, questions: TokenizedTexts) -> Prefixes:
        """Returns the prefixes of a prompt: the tokens before the candidate, once per question."""
        _, first, index = np.unique(questions.starts, return_index=True, return_inverse=True)
        num_before = self.special_token_layout.index((CANDIDATE, 0)) - 1
        return Prefixes(index, questions.lengths[first] + num_before)
