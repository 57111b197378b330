"""The laws of every compressor: what it promises holds for any vector, whatever its shape, dtype and size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decent_opt.compression import Compressor, Key, Layout, make_compressor, names, topk_global

SPECS = [
    "identity", "bf16", "fp16", "sign", "sign:chunk=50", "topk", "topk:share=0.1,block=200", "topk:block=300",
    "random-blocks", "random-blocks:share=0.3,block=16", "random-blocks:block=16,unbiased=yes", "randk",
    "randk:share=0.3,unbiased=yes", "topk-global", "topk-global:share=0.1", "int8", "int8:chunk=33", "int4", "int2",
]  # fmt: skip
SHAPES = [(), (0,), (1,), (2,), (33,), (5, 0), (4097,), (64, 64), (70, 97), (3, 11, 200), (129, 32)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every = pytest.mark.parametrize("spec", SPECS)
# float16 ends at 65504 and below 6e-5; the others are asked for 1e-30 to 1e30.
EXPONENTS = {torch.float16: (-4, 4)}


def vector(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    low, high = EXPONENTS.get(dtype, (-30, 29))
    if kind == "magnitudes":
        values = np.sign(values) * 10.0 ** rng.uniform(low, high, shape)
    elif kind == "large":
        values = values * 10.0 ** (high - 1)
    elif kind == "tiny":
        values = values * 10.0**low
    elif kind == "ties":
        values = rng.integers(-1, 2, shape).astype(float)
    elif kind == "zeros":
        values = np.zeros(shape)
    elif kind == "one":
        values = np.where(rng.random(shape) < 0.001, 7.0, 0.0)
    return torch.from_numpy(np.asarray(values)).to(dtype)


KINDS = ["normal", "magnitudes", "large", "tiny", "ties", "zeros", "one"]
vectors = st.builds(
    vector, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.integers(0, 2**16)
)
relaxed = settings(max_examples=60, deadline=None, derandomize=True)


def test_every_registered_compressor_is_under_these_laws() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} >= {name for name in names() if "test" not in name}


@every
@given(x=vectors)
@relaxed
def test_shape_and_dtype_come_back_and_the_input_stays(spec: str, x: Tensor) -> None:
    compressor, before, state = make_compressor(spec), x.clone(), torch.random.get_rng_state()
    key = Key(3, 4, 5, 6)
    message = compressor.compress(x, key)
    assert message.dtype == torch.uint8 and message.numel() == compressor.nbytes(Layout.of(x.shape), x.dtype)
    sent = message.clone()
    y = compressor.decompress(message, x.shape, x.dtype, key)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.equal(x, before) and torch.equal(message, sent)
    assert torch.equal(torch.random.get_rng_state(), state)
    if not (spec.startswith("rand") and x.dtype == torch.float16):  # scaled by m / k, a float16 may leave its range
        assert y.isfinite().all()
    assert torch.equal(y, make_compressor(spec).decompress(message, x.shape, x.dtype, key))


def error_and_square(compressor: Compressor, x: Tensor, key: Key, factor: float) -> tuple[float, float]:
    """||factor Q(x) - x||^2 and ||x||^2 in float64."""
    wide = x if x.dtype.itemsize >= 4 else x.float()  # in training 16-bit values are widened before they are encoded
    y = compressor.decompress(compressor.compress(wide, key), x.shape, wide.dtype, key)
    return float((factor * y.double() - x.double()).square().sum()), float(x.double().square().sum())


@every
@given(x=vectors)
@relaxed
def test_contraction_or_omega(spec: str, x: Tensor) -> None:
    compressor, layout = make_compressor(spec), Layout.of(x.shape)
    delta, omega = compressor.delta(layout), compressor.omega(layout)
    assert (delta is None) != (omega is None)
    randomised = omega is not None or spec.startswith("rand")
    found = [error_and_square(compressor, x, Key(round=r), 1.0) for r in range(40 if randomised else 1)]
    errors, square = np.array([e for e, _ in found]), found[0][1]
    bound = (1.0 - delta if delta is not None else omega) * square
    # 4 standard errors of a mean, for a thousand means are looked at; the rounding of a scale, and of values below the
    # smallest normal, on top. Where one element is nearly all of x, forty draws may miss it and find no spread; but an
    # error in [0, ||x||^2] with the mean (1 - delta) ||x||^2 has the spread (delta (1 - delta))^0.5 ||x||^2 at most.
    slack = 0.0
    if randomised:
        spread = max(errors.std(ddof=1), 0.0 if delta is None else (delta * (1.0 - delta)) ** 0.5 * square)
        slack = 4 * spread / len(errors) ** 0.5
    assert errors.mean() <= bound + slack + 1e-6 * square + x.numel() * torch.finfo(torch.float32).tiny ** 2
    if square == 0:
        assert errors.max() == 0


@pytest.mark.parametrize(
    "spec", ["random-blocks:block=16,unbiased=yes", "randk:share=0.3,unbiased=yes", "int8", "int4", "int2"]
)
@pytest.mark.parametrize("kind", ["normal", "ties", "magnitudes"])
def test_unbiased(spec: str, kind: str) -> None:
    x, compressor, draws = vector((9, 111), torch.float64, kind, 1), make_compressor(spec), 400
    ys = torch.stack(
        [compressor.decompress(compressor.compress(x, k), x.shape, x.dtype, k) for k in map(key_of, range(draws))]
    )
    # Along fixed directions the mean of the draws is x's projection, within 3 standard errors.
    for direction in torch.randn(8, *x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype):
        along = (ys * direction).sum(dim=(1, 2))
        expected = float((x * direction).sum())
        assert abs(float(along.mean()) - expected) <= 3.2 * float(along.std()) / draws**0.5 + 1e-12 * abs(expected)


@pytest.mark.parametrize("spec", ["int8", "int4", "int2"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_values_far_below_a_step_are_unbiased_too(spec: str, sign: float) -> None:
    compressor, draws = make_compressor(spec), 300
    small = sign * 2.0**-12  # of a step, once the largest of every chunk is put to s
    x = torch.full((64, 64), small)
    x.view(-1)[:: compressor.chunk] = compressor.levels  # type: ignore[attr-defined]
    total = sum(
        compressor.decompress(compressor.compress(x, k), x.shape, x.dtype, k) for k in map(key_of, range(draws))
    )
    found = total[x == small].mean() / draws
    count = float((x == small).sum()) * draws
    assert abs(float(found) - small) <= 4 * (abs(small) / count) ** 0.5


@pytest.mark.parametrize("spec", ["int8", "int4", "int2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_values_stay_on_the_last_level(spec: str, dtype: torch.dtype) -> None:
    compressor = make_compressor(spec)
    for scale in (1.0, 0.7, 1e-3, 3.3e7):
        x = torch.full((1 << 21,), scale, dtype=dtype)
        x[::2] *= -1
        ratio = compressor.decompress(compressor.compress(x), x.shape, dtype) / x
        # One in a hundred thousand may come down a level; one level up it would be another value altogether.
        assert float(((ratio - 1).abs() < 1e-6).double().mean()) > 0.999 and float(ratio.max()) <= 1 + 1e-6
        assert float(ratio.min()) >= 1 - 1.001 / compressor.levels  # type: ignore[attr-defined]


def key_of(round: int) -> Key:
    return Key(seed=7, round=round, rank=1, tensor=2)


@every
def test_decoding_accumulates_with_a_weight(spec: str) -> None:
    compressor, x = make_compressor(spec), vector((70, 97), torch.float64, "normal", 0).reshape(-1)
    layout = Layout.of((70, 97))
    message = torch.empty(compressor.nbytes(layout, x.dtype), dtype=torch.uint8)
    compressor.encode(x, layout, message, key_of(0))
    q = torch.zeros_like(x)
    compressor.decode_add_(q, layout, message, 1.0, key_of(0))
    acc = torch.arange(len(x), dtype=x.dtype)
    compressor.decode_add_(acc, layout, message, -0.25, key_of(0))
    assert torch.allclose(acc, torch.arange(len(x), dtype=x.dtype) - 0.25 * q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", ["random-blocks:block=16", "randk"])
def test_places_change_with_the_key_and_are_rebuilt_from_it(spec: str) -> None:
    compressor, x = make_compressor(spec), torch.ones(4000)
    sets = [compressor.decompress(compressor.compress(x, k), x.shape, x.dtype, k) for k in map(key_of, range(5))]
    assert all(int((s != 0).sum()) == int((sets[0] != 0).sum()) for s in sets)
    assert len({tuple(s.tolist()) for s in sets}) == 5
    other = compressor.decompress(compressor.compress(x, key_of(0)), x.shape, x.dtype, key_of(1))
    assert not torch.equal(other, sets[0]), "the receiver does not use its key"


@pytest.mark.parametrize(("share", "kept"), [(0.3, 3), (0.6, 6), (0.8, 8), (0.01, 1)])
def test_randk_keeps_every_element_equally_often(share: float, kept: int) -> None:
    compressor, x, draws = make_compressor(f"randk:share={share}"), torch.ones(10), 4000
    found = torch.stack(
        [compressor.decompress(compressor.compress(x, k), x.shape, x.dtype, k) for k in map(key_of, range(draws))]
    )
    assert torch.equal(found.sum(1), torch.full((draws,), float(kept)))
    chance = kept / 10
    # 4 standard deviations of a binomial's share
    assert float((found.mean(0) - chance).abs().max()) < 4 * (chance * (1 - chance) / draws) ** 0.5


@pytest.mark.parametrize("slack", [5.0, -5.0, 1e9])
@pytest.mark.parametrize("kind", ["normal", "ties", "one", "zeros", "nan"])
def test_the_threshold_of_topk_global_is_only_a_short_cut(
    monkeypatch: pytest.MonkeyPatch, slack: float, kind: str
) -> None:
    monkeypatch.setattr(topk_global, "SLACK", slack)  # below zero the candidates are too few, far above they are all
    x = vector((300_003,), torch.float32, kind, 0)
    if kind == "nan":
        x = torch.randn(len(x), generator=torch.Generator().manual_seed(0))
        x[[5, -1]] = torch.nan
    compressor = make_compressor("topk-global")
    y = compressor.decompress(compressor.compress(x), x.shape, x.dtype)
    expected = x.abs().topk(3000).values
    assert torch.equal(y[y != 0].abs().sort().values, expected[expected != 0].sort().values) or kind == "nan"
    assert torch.equal(y.isnan(), x.isnan())


def transformer() -> Layout:
    """A GPT-2 of 25M parameters: 8 blocks of width 432, a vocabulary of 16384, 256 positions."""
    width, shapes = 432, [(16384, 432), (256, 432)]
    for _ in range(8):
        shapes += [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        shapes += [(n,) for n in (3 * width, width, 4 * width, width, width, width, width, width)]  # type: ignore[misc]
    return Layout.join([run for shape in shapes for run in Layout.of(shape).runs])


def test_bytes_on_a_transformer() -> None:
    layout = transformer()
    assert 24e6 < layout.numel < 26e6
    assert make_compressor("sign").bits(layout) <= 1.02
    for spec in ("topk", "topk-global"):
        assert make_compressor(spec).nbytes(layout, torch.float32) <= 0.01 * layout.numel * (4 + 2) * 1.05
    assert make_compressor("randk").nbytes(layout, torch.float32) <= 4 * (0.125 * layout.numel + 1)
    blocks = make_compressor("random-blocks")
    assert blocks.nbytes(layout, torch.float32) <= 4 * (0.125 * layout.numel + 16384)  # values, rounded to a block
