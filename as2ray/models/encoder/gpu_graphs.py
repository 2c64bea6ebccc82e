"""Layers over small batches on a GPU, recorded once as CUDA graphs and replayed.

A request of 30 candidates keeps a GPU busy for half a millisecond, but starting its operations one
by one takes ten times as long. A graph has fixed sizes: a batch is padded with rows that belong to
no sequence, and with sequences without tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from as2ray.models.encoder.packed_attention import SequenceLayout

MIN_TOKENS = 256
"""Tokens of the smallest graph. Each next size is at most half as large again."""

MAX_TOKENS = 16_384
"""Tokens of the largest graph; the operations of larger batches take longer than starting them."""

MIN_LENGTH = 64
"""Graphs are recorded for sequences of at most this many tokens, twice as many, and so on."""

TOKENS_PER_SEQUENCE = 8
"""Mean tokens of a sequence, at least; batches of shorter sequences are not replayed."""

_LOCK = Lock()
"""Held while a graph is recorded or replayed: CUDA refuses both while another thread records, also
where that is a graph of another encoder."""

Run = Callable[[Tensor, SequenceLayout, Tensor], Tensor]
"""Runs layers over states, their layout, and the indices of tokens that a head reads."""


@dataclass(frozen=True)
class _FixedLayout(SequenceLayout):
    """A layout whose rows may belong to no sequence."""

    num_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of rows."""
        return self.num_rows


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    cu_seqlens: Tensor
    token_index: Tensor
    output: Tensor


class LayerGraphs:
    """Graphs of some layers, by size. They are recorded when a size is first met."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        """Memory of all graphs: only one of them runs at a time."""

    def run(
        self, name: object, run: Run, hidden: Tensor, layout: SequenceLayout, token_index: Tensor
    ) -> Tensor | None:
        """Returns what `run` returns, with further rows at the end; None if it fits no graph.

        Args:
            name: What `run` computes; it must be the same for the same name.
            run: See `Run`. All its operations must run on the GPU.
            hidden: Packed states, shape [tokens, hidden].
            layout: Positions of the sequences in them.
            token_index: Indices of at most one token of each sequence; may be empty.
        """
        num_tokens = _round_up(len(hidden))
        num_sequences, max_length = num_tokens // TOKENS_PER_SEQUENCE, MIN_LENGTH
        while max_length < layout.max_seqlen:
            max_length *= 2
        if len(hidden) > MAX_TOKENS or len(layout.first_tokens) > num_sequences:
            return None
        key = (name, num_tokens, max_length, hidden.dtype)
        with _LOCK:
            graph = self._graphs.get(key)
            if graph is None:
                sizes = (num_tokens, num_sequences, max_length)
                graph = self._graphs[key] = _record(run, hidden, sizes, self._pool)
            graph.hidden[: len(hidden)].copy_(hidden)
            graph.cu_seqlens[: len(layout.cu_seqlens)].copy_(layout.cu_seqlens)
            graph.cu_seqlens[len(layout.cu_seqlens) :].fill_(len(hidden))
            graph.token_index[: len(token_index)].copy_(token_index)
            graph.graph.replay()
            return graph.output.clone()  # the next batch overwrites it


def _round_up(num_tokens: int) -> int:
    """Returns the next power of two, or three quarters of it."""
    power = max(MIN_TOKENS, 1 << max(0, num_tokens - 1).bit_length())
    return power * 3 // 4 if num_tokens <= power * 3 // 4 and power > MIN_TOKENS else power


def _record(run: Run, like: Tensor, sizes: tuple[int, int, int], pool: Any) -> _Graph:
    num_tokens, num_sequences, max_length = sizes
    # A tensor of inference mode could not be written outside of it later.
    with torch.inference_mode(False), torch.no_grad():
        hidden = torch.zeros(num_tokens, like.shape[1], dtype=like.dtype, device=like.device)
        cu_seqlens = torch.zeros(num_sequences + 1, dtype=torch.int32, device=like.device)
        token_index = torch.zeros(num_sequences, dtype=torch.int64, device=like.device)
        layout = _FixedLayout(
            ((num_sequences, max_length),), cu_seqlens, max_length, num_rows=num_tokens
        )
        current = torch.cuda.current_stream(like.device)
        stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # kernels are compiled and chosen before recording
            for _ in range(2):
                run(hidden, layout, token_index)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A recording that fails would leave this thread on the stream of recordings: its later
        # batches would run beside those of other threads, in the same memory.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
        ):
            output = run(hidden, layout, token_index)
    return _Graph(graph, hidden, cu_seqlens, token_index, output)
