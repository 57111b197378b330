"""Every compressor equals its plain reference, on shapes with and without rows, whole chunks and whole words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decent_opt.compression import Key, make_compressor, names
from tests.laws.reference import REFERENCES

SPECS = [
    *REFERENCES, "sign:chunk=50", "topk:share=0.1,block=200", "topk-global:share=0.3",
    "random-blocks:share=0.3,block=16", "random-blocks:block=16,unbiased=yes", "randk:share=0.3,unbiased=yes",
    "randk:share=0.7", "randk:share=1.0", "int8:chunk=33", "int4:chunk=50", "int2:chunk=7",
]  # fmt: skip
SHAPES = [(1,), (5,), (9000,), (64, 64), (70, 97), (129, 32), (3, 11, 200), (300, 700)]
KEY = Key(seed=1, round=2, rank=3, tensor=4)


def test_every_registered_compressor_has_a_reference() -> None:
    missing = [name for name in names() if name not in REFERENCES and "test" not in name]
    assert not missing, f"write the formula of {missing} into tests/laws/reference.py"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_equals_its_reference(spec: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compressor, generator = make_compressor(spec), torch.Generator().manual_seed(3)
    # Four decades of magnitudes: 16-bit formats meet their ends, and no two elements tie.
    x = torch.randn(shape, generator=generator, dtype=dtype)
    x *= 10.0 ** (4 * torch.rand(shape, generator=generator, dtype=dtype) - 2)
    found = compressor.decompress(compressor.compress(x, KEY), x.shape, x.dtype, KEY).double().numpy()
    expected = REFERENCES[compressor.name](x.numpy(), compressor, KEY).astype(np.float64)
    # The reference computes in float64: scales, which are sums or quotients, are rounded to the dtype of x.
    equal = np.isclose(found, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
    if spec.startswith("int") and dtype == torch.float32:
        # s x / m + u is rounded to 2^-18 at most before its floor is taken, which may go to the other side of a level.
        step = np.abs(x.double().numpy()).max() / compressor.levels  # type: ignore[attr-defined]
        assert (~equal).sum() <= max(1, 2**-15 * equal.size)
        assert np.abs(found - expected).max() <= 1.001 * step
    else:
        assert equal.all(), f"{(~equal).sum()} of {equal.size} differ, the first at {np.argwhere(~equal)[0]}"
