"""Number formats of matrix products."""

import time
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # The command line needs the names only, and torch takes seconds to load.
    import torch
    from torch import Tensor

from as2ray.errors import ConfigError

Dtype = Literal["auto", "int8", "fp32", "bf16", "fp16"]
"""Number format of matrix products."""

TORCH_NAMES = {"int8": "int8", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Name of each format in torch."""


def resolve_dtype(
    dtype: Dtype, device: "torch.device | str" = "cpu", has_ranges: bool = False
) -> "torch.dtype":
    """Returns the torch dtype that `dtype` means on a device.

    `auto` is int8 for a ranker with activation ranges on a CPU that multiplies bytes natively.
    Otherwise it is bf16 on a GPU since Ampere, and on a CPU with AVX512-BF16 or AMX whose products
    take less time in bf16 than in fp32; and fp32 elsewhere.

    Args:
        dtype: The requested format.
        device: Device of the weights.
        has_ranges: Whether the ranges of activations are known that int8 needs.

    Raises:
        ConfigError: int8 is requested without such hardware, or without ranges.
    """
    import torch

    if dtype == "int8":
        if not has_int8(device):
            raise ConfigError(
                f"dtype=int8 needs a CPU with AVX2, AVX512 or AMX, but {device} has none of them",
                fix="use auto, which takes the best format of the hardware",
            )
        if not has_ranges:
            raise ConfigError(
                "dtype=int8 needs the ranges of the ranker's activations, which it does not have",
                fix="fit them with `as2ray quantize`",
            )
        return torch.int8
    if dtype == "auto" and has_ranges and has_int8(device):
        return torch.int8
    if dtype != "auto":
        return getattr(torch, TORCH_NAMES[dtype])  # type: ignore[no-any-return]
    if torch.device(device).type == "cuda":
        has_native_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_native_bf16 = (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        ) and _is_bf16_faster()
    return torch.bfloat16 if has_native_bf16 else torch.float32


@cache
def _is_bf16_faster() -> bool:
    """Returns whether products in bf16 take less time than in fp32 on this CPU.

    Measured once in each process, in some 20 ms. A virtual machine may hide the AMX of its CPU,
    whose AVX512-BF16 is then half as fast as fp32.
    """
    import torch

    from as2ray.models.encoder.cpu_parallel import parallel_map

    def measure(_: None) -> bool:
        matrices = {t: torch.ones(256, 256, dtype=t) for t in (torch.bfloat16, torch.float32)}
        times_s: dict[torch.dtype, list[float]] = {dtype: [] for dtype in matrices}
        for _turn in range(20):
            for dtype, matrix in matrices.items():
                started_at = time.perf_counter()
                torch.mm(matrix, matrix)
                times_s[dtype].append(time.perf_counter() - started_at)
        return min(times_s[torch.bfloat16]) < min(times_s[torch.float32])

    # In a thread of one core: several would wait for one another where other processes are busy,
    # for longer than the products take, and processes of one machine would choose differently.
    return next(parallel_map(measure, [None], 1, one_core_each=True))


def dtype_name(dtype: "torch.dtype") -> str:
    """Returns the short name of a number format, such as bf16."""
    return next(name for name, torch_name in TORCH_NAMES.items() if str(dtype).endswith(torch_name))


def has_int8(device: "torch.device | str" = "cpu") -> bool:
    """Returns whether a device multiplies bytes natively: a CPU with AVX2, AVX512 or AMX."""
    import torch

    extensions = ("avx2", "avx512", "amx_tile")
    return (
        torch.device(device).type == "cpu"
        and any(getattr(torch.cpu, f"_is_{name}_supported")() for name in extensions)
        and hasattr(torch.ops.onednn, "qlinear_pointwise")
    )


def fp32_head(states: "Tensor") -> "torch.autocast":
    """Returns the context in which a head computes logits in fp32, whatever the dtype.

    A head takes 1 % of the operations, and the 8 bits of bf16 would give many candidates equal
    scores.
    """
    import torch

    return torch.autocast(states.device.type, enabled=False)
