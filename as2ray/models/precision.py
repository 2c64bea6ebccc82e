"""Number formats of matrix products."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # The command line needs the names only, and torch takes seconds to load.
    import torch
    from torch import Tensor

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
"""Number format of matrix products."""


def resolve_dtype(dtype: Dtype, device: "torch.device | str" = "cpu") -> "torch.dtype":
    """Returns the torch dtype that `dtype` means on a device.

    `auto` is bf16 on hardware that multiplies it natively (a CPU with AVX512-BF16 or AMX, a GPU
    since Ampere), and fp32 elsewhere.
    """
    import torch

    if dtype != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    if torch.device(device).type == "cuda":
        has_native_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_native_bf16 = (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        )
    return torch.bfloat16 if has_native_bf16 else torch.float32


def fp32_head(states: "Tensor") -> "torch.autocast":
    """Returns the context in which a head computes logits in fp32, whatever the dtype.

    A head takes 1 % of the operations, and the 8 bits of bf16 would give many candidates equal
    scores.
    """
    import torch

    return torch.autocast(states.device.type, enabled=False)
