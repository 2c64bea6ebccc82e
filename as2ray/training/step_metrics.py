"""Metrics of training steps between two reports: losses, gradients, speed and memory."""

import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from as2ray.cascade.cost import EncoderShape
from as2ray.data.packed_dataset import MicroBatch
from as2ray.models.ranker import Ranker
from as2ray.training import parallel

PEAK_FLOPS: Mapping[tuple[str, ...], float] = {
    ("A100",): 312e12,
    ("H100", "HBM3"): 989e12,
    ("H200",): 989e12,
    ("L4",): 121e12,
    ("L40S",): 362e12,
}
"""Dense bf16 operations per second of GPUs, from NVIDIA's data sheets, by words of their names."""


@dataclass
class StepMetrics:
    """What the steps since the last report have left; `reduce` computes the metrics of it.

    Until then nothing waits for the device, and next to nothing is computed.
    """

    ranker: Ranker
    max_batch_tokens: int
    """Maximum number of tokens of a packed batch."""
    losses: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Loss of each packed batch as "", and its parts by name, summed over the examples."""
    weights: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """What each of them is multiplied by."""
    num_steps: Counter[str] = field(default_factory=Counter)
    """Steps in which each of them was computed."""
    gradient_norms: list[Tensor] = field(default_factory=list)
    batches: list[tuple[np.ndarray, int]] = field(default_factory=list)
    """Length of each pair of a packed batch, and the number of layers that were run."""
    wait_s: float = 0.0
    """Seconds in which training waited for data."""
    started_at: float = field(default_factory=time.perf_counter)

    def add_batch(
        self,
        micro_batch: MicroBatch,
        loss: Tensor,
        parts: Mapping[str, Tensor],
        exit_indices: Sequence[int] | None,
    ) -> None:
        """Adds a forward and backward pass.

        Args:
            micro_batch: The batch.
            loss: The loss, summed over its examples.
            parts: Parts of the loss, summed over its examples.
            exit_indices: Exits that were run; None for all layers.
        """
        is_empty = micro_batch.is_empty
        for name, value in (("", loss), *parts.items()):
            self.losses[name].append(value)
            self.weights[name].append(0.0 if is_empty else 1.0 / micro_batch.num_examples)
        if not is_empty:
            self.batches.append((micro_batch.batch.lengths, self._num_layers(exit_indices)))

    def end_step(self, names: Iterable[str], gradient_norm: Tensor | None) -> None:
        """Ends a step.

        Args:
            names: Names of the parts of its loss.
            gradient_norm: Norm of the gradients before clipping, if it is known.
        """
        self.num_steps.update(["", *names])
        if gradient_norm is not None:
            self.gradient_norms.append(gradient_norm)

    def reduce(self) -> dict[str, float]:
        """Returns the metrics over all workers, by name; every worker calls it."""
        device, num_workers = self.ranker.device, parallel.get_world_size()
        names = sorted(self.losses)
        losses = [
            torch.stack(self.losses[name]).double()
            @ torch.tensor(self.weights[name], dtype=torch.float64, device=device)
            for name in names
        ]
        norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in self.gradient_norms]
        lengths = [lengths for lengths, _ in self.batches]
        num_tokens, num_pairs = (sum(map(f, lengths)) for f in (np.sum, len))
        counts = [num_tokens, num_pairs, len(lengths), self._count_flops(), self.wait_s]
        sums = parallel.all_reduce_sum(
            torch.cat(
                [
                    torch.stack(losses),
                    torch.tensor(counts, dtype=torch.float64, device=device),
                    *([torch.stack(norms).double().mean()[None]] if norms else []),
                ]
            )
        ).tolist()
        duration_s = time.perf_counter() - self.started_at
        means = {name: sums.pop(0) / self.num_steps[name] for name in names}
        num_tokens, num_pairs, num_batches, flops, wait_s, *norm = sums
        metrics = {f"train/loss/{name}".removesuffix("/"): mean for name, mean in means.items()}
        if norm:
            metrics["train/gradient_norm"] = norm[0] / num_workers
        metrics |= {
            "speed/pairs_per_second": num_pairs / duration_s,
            "speed/tokens_per_second": num_tokens / duration_s,
            "speed/data_wait_s": wait_s / num_workers,
            "speed/batch_fill": num_tokens / max(1.0, num_batches) / self.max_batch_tokens,
            "speed/teraflops": flops / duration_s / num_workers / 1e12,
        }
        if peak := peak_flops(self.ranker):
            metrics["speed/mfu"] = flops / duration_s / num_workers / peak
        return metrics | _peak_memory(device)

    def _count_flops(self) -> float:
        """Counts the operations of the forward passes, and twice as many of the backward passes."""
        shape = EncoderShape.from_config(self.ranker.network.config)
        return 3.0 * sum(
            num_layers * float(shape.layer_flops(lengths).sum())
            for lengths, num_layers in self.batches
        )

    def _num_layers(self, exit_indices: Sequence[int] | None) -> int:
        """Returns the number of layers that a pass runs, those of heads included."""
        exit_layers = self.ranker.exit_layers
        if exit_indices and exit_indices[-1] < len(exit_layers) - 1:
            return exit_layers[exit_indices[-1]]
        return sum(len(encoder) for encoder in self.ranker.encoders)


def peak_flops(ranker: Ranker) -> float | None:
    """Returns the operations per second that its device can do in bf16; None if not known."""
    if ranker.device.type != "cuda" or ranker.dtype != "bf16":
        return None
    words = set(torch.cuda.get_device_name(ranker.device).replace("-", " ").split())
    peaks = [peak for gpu, peak in PEAK_FLOPS.items() if words.issuperset(gpu)]
    return peaks[0] if peaks and "MIG" not in words else None


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Returns the highest memory of a worker's process and of its GPU so far, in GB."""
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peaks["device"] = torch.cuda.max_memory_allocated(device)
    return {
        f"speed/{name}_memory_gb": parallel.all_reduce_max(peak, device) / 1e9
        for name, peak in peaks.items()
    }
