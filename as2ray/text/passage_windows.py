"""Passages as token sequences with a marker in front of every sentence (Two-in-One, section 4.1).

Knows the pair tokenizer. Must not know models, labels or files.

    [CLS] question [SEP] sentence 1 [SEP] sentence 2 ... [SEP]

The separator in front of a sentence is its marker: a position, not a token id, for the tokens of
BERT, RoBERTa, ELECTRA and ALBERT differ. RoBERTa's pairs have two separators after a question (the
paper has one), of which the second marks. A passage longer than the window is read in several
windows, each beginning with the sentence that the one before it ended with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from as2ray.errors import ConfigError
from as2ray.text.packing import PackedBatch, TokenSequences, split_by_tokens
from as2ray.text.tokenization import CANDIDATE, QUESTION, PairTokenizer


@dataclass(frozen=True)
class PassageWindows:
    """Windows of passages, and where their sentences stand."""

    sequences: TokenSequences
    """Token sequences, shape [windows]."""
    window_passage: np.ndarray
    """Number of each window's passage, shape [windows]."""
    marker_window: np.ndarray
    """Number of each marker's window, ascending, shape [markers]."""
    marker_position: np.ndarray
    """Token of each marker in its window, from 0, shape [markers]."""
    marker_sentence: np.ndarray
    """Number of each marker's sentence, counted through all passages, shape [markers]."""

    def iter_batches(self, max_batch_tokens: int) -> Iterator[PackedBatch]:
        """All windows as batches of at most `budget` tokens, longest first."""
        for which in split_by_tokens(self.sequences.lengths, max_batch_tokens):
            yield self.pack(which)

    def pack(
        self,
        which: np.ndarray,
        window_data: Mapping[str, np.ndarray] | None = None,
        sentence_data: Mapping[str, np.ndarray] | None = None,
    ) -> PackedBatch:
        """Windows as one batch, longest first, with their sentences' markers.

        Args:
            which: Numbers of the windows, shape [n].
            of_window: Arrays over all windows; the batch takes their rows, beside `row`, the number
                of each one's passage, and `number`, its own.
            of_sentence: Arrays over all sentences; each marker takes its sentence's row, beside
                `window`, the number of its window in the batch, `sentence`, and `mark`, its own.
        """
        numbers = np.arange(len(self.sequences))
        own = {**(window_data or {}), "row": self.window_passage, "number": numbers}
        batch = self.sequences.pack(which, own)
        order = batch.sequence_data["number"]
        place = np.full(len(self.sequences), -1)
        place[order] = np.arange(len(order))
        here = np.flatnonzero(place[self.marker_window] >= 0)
        here = here[np.argsort(place[self.marker_window[here]], kind="stable")]
        window, sentence = place[self.marker_window[here]], self.marker_sentence[here]
        starts = np.cumsum(batch.lengths) - batch.lengths
        of_mark = {name: values[sentence] for name, values in (sentence_data or {}).items()}
        return replace(
            batch,
            marks=starts[window] + self.marker_position[here],
            of_mark={**of_mark, "window": window, "sentence": sentence, "mark": here},
        )


def encode_passages(
    tokenizer: PairTokenizer, questions: Sequence[str], passages: Sequence[Sequence[str]]
) -> PassageWindows:
    """Windows of passages, each with its question in front.

    A sentence that does not fit into a window of its own is cut off at its end.

    Args:
        tokenizer: Its `max_length` is the window; the question is cut at its `max_question`.
        questions: Of each passage, shape [passages].
        passages: Sentences of each, [passages][sentences].

    Raises:
        RecipeError: A passage without sentences.
    """
    empty = [number for number, sentences in enumerate(passages) if not sentences]
    if empty:
        raise ConfigError(
            f"{len(empty)} passages without sentences, first number {empty[0]}"
            "; expected at least one sentence in each",
        )
    asked, _ = _tokenize(tokenizer, questions)
    texts, sizes = _tokenize(tokenizer, list(chain.from_iterable(passages)))
    ends = np.cumsum([len(sentences) for sentences in passages])
    frame = _SpecialTokens.from_tokenizer(tokenizer)
    made: list[_Window] = []
    for number, (question, end) in enumerate(zip(asked, ends)):
        head = frame.build_question_prefix(question[: tokenizer.max_question_length])
        first, room = end - len(passages[number]), tokenizer.max_length - len(head) - 1
        for begin, stop in _split_passage(sizes[first:end] + 1, room + 1):
            numbers = range(first + begin, first + stop)
            made.append(frame.build_window(head, texts, numbers, number, tokenizer.max_length))
    return _join_windows(made)


def _tokenize(
    tokenizer: PairTokenizer, texts: Sequence[str]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Token ids of each text, and how many they are."""
    flat = tokenizer.tokenize_texts(texts, tokenizer.max_length)
    ids = [flat.token_ids[s : s + n] for s, n in zip(flat.starts, flat.lengths)]
    return ids, flat.lengths


def _split_passage(sentence_lengths: np.ndarray, max_tokens: int) -> list[tuple[int, int]]:
    """(first, one past the last) sentence of each window; neighbours share one where they can."""
    cuts, begin = [], 0
    while True:
        fits = int(np.searchsorted(np.cumsum(sentence_lengths[begin:]), max_tokens, side="right"))
        stop = begin + max(1, fits)
        cuts.append((begin, stop))
        if stop >= len(sentence_lengths):
            return cuts
        # The last sentence again, unless it was alone or leaves no room for the next.
        shared = stop - 1
        again = shared > begin and sentence_lengths[shared] + sentence_lengths[stop] <= max_tokens
        begin = shared if again else stop


@dataclass(frozen=True)
class _Window:
    token_ids: np.ndarray
    token_types: np.ndarray
    passage_index: int
    marker_position: np.ndarray
    marker_sentence: np.ndarray


@dataclass(frozen=True)
class _SpecialTokens:
    """The special tokens around question and sentences, and their types."""

    prefix_ids: np.ndarray
    """Ids before the question."""
    separator_ids: np.ndarray
    """Ids between question and candidate; the last marks a sentence."""
    end_id: int
    """Id at the end."""
    token_types: tuple[int, int]
    """Of the question with what stands around it, and of the candidate."""

    @classmethod
    def from_tokenizer(cls, tokenizer: PairTokenizer) -> "_SpecialTokens":
        places = [place for place, _ in tokenizer.special_token_layout]
        q, c = places.index(QUESTION), places.index(CANDIDATE)
        types = (tokenizer.special_token_layout[q][1], tokenizer.special_token_layout[c][1])
        before, between = (np.array(part, np.int32) for part in (places[:q], places[q + 1 : c]))
        return cls(before, between, places[-1], types)

    def build_question_prefix(self, question_ids: np.ndarray) -> np.ndarray:
        """Ids up to the first sentence; the last of them marks it."""
        return np.concatenate([self.prefix_ids, question_ids, self.separator_ids])

    def build_window(
        self,
        question_prefix: np.ndarray,
        sentence_token_ids: Sequence[np.ndarray],
        sentence_indices: range,
        passage_index: int,
        max_length: int,
    ) -> _Window:
        """A window of some sentences."""
        marker = self.separator_ids[-1:]
        parts, position, at = [question_prefix], [len(question_prefix) - 1], len(question_prefix)
        for number in sentence_indices:
            if number != sentence_indices[0]:
                parts.append(marker)
                position.append(at)
                at += 1
            text = sentence_token_ids[number][: max_length - 1 - at]
            parts.append(text)
            at += len(text)
        ids = np.concatenate([*parts, [self.end_id]]).astype(np.int32)
        types = np.full(len(ids), self.token_types[1], np.int32)
        types[: len(question_prefix)] = self.token_types[0]
        return _Window(ids, types, passage_index, np.array(position), np.array(sentence_indices))


def _join_windows(windows: Sequence[_Window]) -> PassageWindows:
    lengths = np.array([len(window.token_ids) for window in windows], np.int32)
    marks = [len(window.marker_position) for window in windows]
    return PassageWindows(
        TokenSequences(
            np.concatenate([window.token_ids for window in windows]),
            np.concatenate([window.token_types for window in windows]),
            lengths,
        ),
        np.array([window.passage_index for window in windows]),
        np.repeat(np.arange(len(windows)), marks),
        np.concatenate([window.marker_position for window in windows]),
        np.concatenate([window.marker_sentence for window in windows]),
    )
