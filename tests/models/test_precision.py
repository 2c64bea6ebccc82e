"""Which number format `dtype` means, whatever the hardware of the test is."""

import pytest
import torch

from as2ray.errors import ConfigError
from as2ray.models import precision
from as2ray.models.precision import dtype_name, fp32_head, has_int8, resolve_dtype


@pytest.fixture
def cpu(monkeypatch):
    """Makes a CPU with or without each extension: `cpu(avx2=…, bf16=…, is_faster=…)`."""

    def make(avx2=False, avx512=False, amx=False, bf16=False, is_faster=False) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: avx2)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
        monkeypatch.setattr(precision, "_is_bf16_faster", lambda: is_faster)

    return make


@pytest.mark.parametrize(
    ("extensions", "expected"),
    [
        ({}, torch.float32),
        ({"is_faster": True}, torch.float32),
        ({"bf16": True}, torch.float32),
        ({"bf16": True, "is_faster": True}, torch.bfloat16),
        ({"amx": True, "is_faster": True}, torch.bfloat16),
    ],
)
def test_auto_is_bf16_where_the_cpu_has_it_and_it_is_faster(cpu, extensions, expected):
    cpu(**extensions)
    assert resolve_dtype("auto") == expected


@pytest.mark.parametrize(
    ("extensions", "is_there"),
    [({}, False), ({"avx2": True}, True), ({"avx512": True}, True), ({"amx": True}, True)],
)
def test_int8_needs_the_extension_and_ranges(cpu, extensions, is_there):
    cpu(**extensions)
    assert has_int8() is is_there
    assert not has_int8("cuda")
    assert resolve_dtype("auto") == torch.float32
    assert resolve_dtype("auto", has_ranges=True) == (torch.int8 if is_there else torch.float32)
    if is_there:
        assert resolve_dtype("int8", has_ranges=True) == torch.int8
        with pytest.raises(ConfigError, match="needs the ranges"):
            resolve_dtype("int8")
    else:
        with pytest.raises(ConfigError, match="needs a CPU with AVX2, AVX512 or AMX, but cpu has"):
            resolve_dtype("int8", has_ranges=True)


def test_format_that_is_asked_for_is_taken_whatever_the_ranges(cpu):
    cpu(avx512=True, bf16=True, is_faster=True)
    for name, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ):
        assert resolve_dtype(name, has_ranges=True) == dtype
        assert dtype_name(dtype) == name
    assert dtype_name(torch.int8) == "int8"


def test_head_computes_in_fp32_inside_autocast():
    states = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (states @ states).dtype == torch.bfloat16
        with fp32_head(states):
            assert (states @ states).dtype == torch.float32
