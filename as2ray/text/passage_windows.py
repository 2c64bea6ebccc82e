"""Passages as token sequences with a marker before every sentence (Two-in-One, section 4.1).

    [CLS] question [SEP] sentence 1 [SEP] sentence 2 ... [SEP]

The separator before a sentence is its marker. A marker is a position, not a token id, because the
separators of BERT, RoBERTa, ELECTRA and ALBERT differ. There is one after the question, as in the
paper, of RoBERTa too, whose pairs have two. A passage longer than `max_length` is split into
several windows. Each begins with the last sentence of the window before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import numpy as np

from as2ray.errors import ConfigError
from as2ray.text.packing import PackedBatch, TokenSequences, ragged_arange, split_by_tokens
from as2ray.text.tokenization import CANDIDATE, QUESTION, PairTokenizer


@dataclass(frozen=True)
class PassageWindows:
    """Windows of passages and the positions of their sentences.

    Sentences are counted through all passages. A sentence at the border of two windows has a
    marker in each.
    """

    sequences: TokenSequences
    """One token sequence per window."""
    window_passage: np.ndarray
    """Index of each window's passage, shape [windows]."""
    marker_window: np.ndarray
    """Index of each marker's window, ascending, shape [markers]."""
    marker_position: np.ndarray
    """Position of each marker in its window, from 0, shape [markers]."""
    marker_sentence: np.ndarray
    """Index of each marker's sentence, shape [markers]."""
    window_data: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Data of each window, first axis [windows]."""
    sentence_data: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Data of each sentence, first axis [sentences]."""

    def iter_batches(self, max_batch_tokens: int) -> Iterator[PackedBatch]:
        """Packs all windows into batches of at most `max_batch_tokens` tokens, longest first."""
        for indices in split_by_tokens(self.sequences.lengths, max_batch_tokens):
            yield self.pack(indices)

    def pack(self, indices: np.ndarray) -> PackedBatch:
        """Packs the selected windows into one batch, longest first, with their markers.

        The batch's `sequence_data` has the data of its windows, and `row` (the index of the
        passage) and `number` (of the window). Its `marker_data` has the data of each marker's
        sentence, and `window` (the index of the window in the batch), `sentence` and `marker`
        (their indices in this object).

        Args:
            indices: Indices of the windows, shape [n].
        """
        window_numbers = np.arange(len(self.sequences))
        columns = {**self.window_data, "row": self.window_passage, "number": window_numbers}
        batch = self.sequences.pack(indices, columns)
        packed_windows = batch.sequence_data["number"]
        first_markers = np.searchsorted(self.marker_window, packed_windows)
        num_markers = np.searchsorted(self.marker_window, packed_windows, "right") - first_markers
        markers = np.repeat(first_markers, num_markers) + ragged_arange(num_markers)
        window = np.repeat(np.arange(len(batch)), num_markers)
        sentence = self.marker_sentence[markers]
        starts = np.cumsum(batch.lengths) - batch.lengths
        positions = starts[window] + self.marker_position[markers]
        marker_data = {name: values[sentence] for name, values in self.sentence_data.items()}
        marker_data |= {"window": window, "sentence": sentence, "marker": markers}
        return replace(batch, markers=positions, marker_data=marker_data)


def encode_passages(
    tokenizer: PairTokenizer, questions: Sequence[str], passages: Sequence[Sequence[str]]
) -> PassageWindows:
    """Tokenizes passages into windows, each with its question in front.

    A sentence that does not fit a window of its own is truncated.

    Args:
        tokenizer: Its `max_length` is the maximum length of a window; questions are truncated to
            its `max_question_length`.
        questions: The question of each passage, shape [passages].
        passages: The sentences of each passage, [passages][sentences].

    Raises:
        ConfigError: A passage has no sentences.
    """
    empty = [index for index, sentences in enumerate(passages) if not sentences]
    if empty:
        raise ConfigError(f"{len(empty)} passages without sentences, first index {empty[0]}")
    layout, layout_types = zip(*tokenizer.special_token_layout)
    question, candidate = layout.index(QUESTION), layout.index(CANDIDATE)
    before_question, separator = layout[:question], layout[candidate - 1]
    question_tokens = tokenizer.tokenize_texts(questions, tokenizer.max_question_length)
    sentences = list(chain.from_iterable(passages))
    sentence_tokens = tokenizer.tokenize_texts(sentences, tokenizer.max_length)
    offsets = np.cumsum([0, *map(len, passages)]).tolist()
    token_ids: list[np.ndarray] = []
    windows: list[tuple[int, int]] = []  # passage, length of the question's part
    markers: list[tuple[int, int, int]] = []  # window, position, sentence
    for passage, (start, end) in enumerate(pairwise(offsets)):
        prefix = [*before_question, *question_tokens[passage], separator]
        max_tokens = tokenizer.max_length - len(prefix)
        for first, stop in _split_passage(sentence_tokens.lengths[start:end] + 1, max_tokens):
            window = list(prefix)
            for sentence in range(start + first, start + stop):
                if sentence > start + first:
                    window.append(separator)
                markers.append((len(windows), len(window) - 1, sentence))
                window += sentence_tokens[sentence][: tokenizer.max_length - 1 - len(window)]
            token_ids.append(np.array([*window, layout[-1]], np.int32))
            windows.append((passage, len(prefix)))
    window_passage, prefix_lengths = np.array(windows).T
    lengths = np.fromiter(map(len, token_ids), np.int32)
    is_prefix = ragged_arange(lengths) < np.repeat(prefix_lengths, lengths)
    token_types = np.where(is_prefix, layout_types[question], layout_types[candidate])
    sequences = TokenSequences(np.concatenate(token_ids), token_types.astype(np.int32), lengths)
    return PassageWindows(sequences, window_passage, *np.array(markers).T)


def _split_passage(sentence_lengths: np.ndarray, max_tokens: int) -> list[tuple[int, int]]:
    """Returns first and one past the last sentence of each window.

    Neighboring windows share a sentence where it fits.
    """
    windows, begin = [], 0
    while True:
        ends = np.cumsum(sentence_lengths[begin:])
        num_sentences = int(np.searchsorted(ends, max_tokens, side="right"))
        stop = begin + max(1, num_sentences)
        windows.append((begin, stop))
        if stop >= len(sentence_lengths):
            return windows
        # Repeat the last sentence, unless it was alone or leaves no room for the next.
        last = stop - 1
        is_shared = last > begin and sentence_lengths[last] + sentence_lengths[stop] <= max_tokens
        begin = last if is_shared else stop
