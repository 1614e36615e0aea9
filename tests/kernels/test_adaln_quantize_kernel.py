"""The adaLN kernel on Triton's interpreter: against torch, against float64, and fused against one step after another.

Each check takes the kernel file as an argument: the tests hand it the real one, the last test one with a fault.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_tests import launches_on_a_gpu, with_fault
from poison import poisoned
from rounding import norm_steps, steps
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fluxq.kernels.adaln_quantize import kernel as adaln_quantize
from fluxq.kernels.adaln_quantize import op as adaln
from fluxq.kernels.compare import same_but_few
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.quantize_activation import kernel as quantize_activation
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import Tile, whole_row_tile
from fluxq.recipes.formats import FORMATS

TILE = Tile(rows=4, columns=512, warps=4)
TALL = Tile(rows=64, columns=512, warps=4)  # fewer programs for the rows that pad the 128x4 layout
D = 352  # 11 blocks of 32, 22 of 16: neither the tile's columns nor the 128x4 layout's 4 groups
EPS = 1e-6
FORMATS_MADE = ("int8", "fp8", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinity and NaN are among x


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def layers(
    m: int,
    images: int,
    dtype: torch.dtype = torch.bfloat16,
    modulation: torch.dtype | None = None,
    *,
    whole: bool = False,
    d: int = D,
) -> dict[str, Tensor]:
    """x, branch, scale, shift, gate and weight; modulation is chunked, rows of x and branch lie apart.

    whole: x and gate · branch are integers, n has an integer mean, and its squares add up exactly in every order.
    """
    noise = torch.Generator().manual_seed(m * images)
    modulation = modulation or dtype
    x = torch.randn(m, d, generator=noise) * torch.logspace(-3, 2, m).roll(1)[:, None] + 0.5
    branch = torch.randn(m, d, generator=noise) * 2
    chunks = (torch.randn(images, 4 * d, generator=noise) * 0.4).to(modulation)
    scale, shift, gate, _ = chunks.chunk(4, dim=1)
    if whole:
        x, branch = (torch.randint(-9, 10, (m, d), generator=noise).float() for _ in "xb")
        gate.copy_(torch.randint(-1, 2, (images, d), generator=noise))
        n = x + gate.float().repeat_interleave(m // images, 0) * branch
        off = n.sum(1).long() % d  # so many elements too much by one: taken off the last ones
        x -= (torch.arange(d) >= d - off[:, None]).float()
    padded = torch.zeros(2, m, d + 24)
    padded[0, :, :d], padded[1, :, :d] = x, branch
    x, branch = padded.to(dtype)[:, :, :d]
    weight = (torch.rand(d, generator=noise) + 0.5).to(modulation)
    return {"x": x, "branch": branch, "scale": scale, "shift": shift, "gate": gate, "weight": weight}


def run(kernels: ModuleType, tensors: dict[str, Tensor], format: str | None, **options: Any) -> Any:
    """The kernel file's adaln_quantize over poisoned buffers."""
    with poisoned():
        how = {name: options.pop(name) for name in ("eps", "tile", "norm") if name in options}
        given = {name: tensor for name, tensor in tensors.items() if name != "x"} | options
        return kernels.adaln_quantize(
            tensors["x"], *norm_steps(format or "", **given), **{"eps": EPS, "tile": TILE} | how
        )


def assert_same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal, the sign of zero and where NaN is included."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, f"{what}: shapes or types differ"
    ours, theirs = found.float(), expected.float()
    wrong = ~((ours == theirs) & (ours.signbit() == theirs.signbit()) | (ours.isnan() & theirs.isnan()))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        place = f"{at}, in program {at[0] // TILE.rows}" if at else "()"
        raise AssertionError(f"{what}: {int(wrong.sum())} differ, first at {place}: {ours[at]} instead of {theirs[at]}")


def separate_layers(tensors: dict[str, Tensor], norm: str) -> tuple[Tensor, Tensor | None]:
    """v and n as the torch reference composes them."""
    given = adaln.NormTensors(**{name: tensor for name, tensor in tensors.items() if name != "x"})
    return adaln.modulated_norm(tensors["x"], given, norm, EPS)


def expected_v(n: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None, norm: str) -> Tensor:
    """v of n (M, D), rounded to scale's dtype where layers round; sums of n are exact."""
    tokens = n.shape[0] // scale.shape[0]
    scale, shift = (t.repeat_interleave(tokens, 0) for t in (scale, shift))
    h = n.float()
    if norm == "layer":
        h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    if norm == "rms":
        h = h.to(scale.dtype)
    h = h if weight is None else h * weight.to(h.dtype)
    return (h.to(scale.dtype) * (1 + scale) + shift).to(n.dtype)


def check_v(
    kernels: ModuleType,
    m: int = 5,
    images: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    modulation: torch.dtype | None = None,
    norm: str = "layer",
    without: tuple[str, ...] = (),
    d: int = D,
) -> None:
    """n always, and v where sums are exact, are the bits of separate layers."""
    tensors = {
        name: t for name, t in layers(m, images, dtype, modulation, whole=True, d=d).items() if name not in without
    }
    v, new = run(kernels, tensors, None, norm=norm)
    reference, n = separate_layers(tensors, norm)
    if n is None:
        assert new is None
        n = tensors["x"]
    else:
        assert_same_bits(new, n, "n")
    expected = expected_v(n, tensors["scale"], tensors["shift"], tensors.get("weight"), norm)
    assert_same_bits(v, expected, "v")
    if norm == "rms":  # torch's LayerNorm on CPUs is another formula
        assert_same_bits(v, reference, "v")


def check_bound(
    kernels: ModuleType, dtype: torch.dtype, modulation: torch.dtype | None, norm: str, m: int = 17, images: int = 1
) -> None:
    """n's bits, and |v - v64| <= (roundings · u + 2^-18) · (|h · (1 + scale)| + |shift|) + u' · |v64|.

    u, u': half the spacing at 1 of modulation's and of x's dtype. Rounded are h (twice around RMSNorm's weight),
    1 + scale, the product, the sum. 2^-18 covers fp32's own roundings, and 2^-20 · mean |n| those of LayerNorm's mean.
    """
    tensors = layers(m, images, dtype, modulation)
    v, new = run(kernels, tensors, None, norm=norm)
    n = separate_layers(tensors, norm)[1]
    assert n is not None
    assert_same_bits(new, n, "n")
    scale, shift, h = (t.double() for t in (tensors["scale"], tensors["shift"], new))
    scale, shift = (t.repeat_interleave(m // images, 0) for t in (scale, shift))
    off = 2.0**-20 * h.abs().mean(-1, keepdim=True) * (norm == "layer")
    h = h - h.mean(-1, keepdim=True) if norm == "layer" else h
    factor = tensors["weight"].double() / (h.square().mean(-1, keepdim=True) + EPS).sqrt()
    h = h * factor
    unit = (5 if norm == "rms" else 4) * torch.finfo(modulation or dtype).eps / 2 + 2.0**-18
    exact = h * (1 + scale) + shift
    bound = (
        (off * factor * (1 + scale)).abs()
        + unit * ((h * (1 + scale)).abs() + shift.abs())
        + torch.finfo(dtype).eps / 2 * exact.abs()
    )
    excess = (v.double() - exact).abs() - bound - torch.finfo(dtype).smallest_normal
    assert (excess <= 0).all(), f"v: {int((excess > 0).sum())} differ by more than the bound, most at {excess.argmax()}"


def check_fused(
    kernels: ModuleType,
    format: str,
    m: int = 5,
    images: int = 1,
    given: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    modulation: torch.dtype | None = None,
    spoilt: bool = False,
    tile: Tile = TILE,
    d: int = D,
    **options: Any,
) -> None:
    """Codes and scales are the bytes that the quantizing kernel makes of v; n and v do not change with the format.

    On a GPU few codes may be neighbours, as v of another launch may have other sums.
    """
    d = 384 if format == "fp8_1x128" else d  # whole blocks
    tensors = layers(m, images, dtype, modulation, d=d)
    if spoilt:
        tensors["x"][0, 7], tensors["branch"][m - 1, 9] = torch.nan, torch.inf
    noise = torch.Generator().manual_seed(3)
    for name in ("smooth", "mean"):
        if options.get(name):
            options[name] = torch.randn(d, generator=noise) * 0.3 + 1
    if given:
        tokens = m if FORMATS[format].block[0] else 0
        as_given = torch.linspace(0.01, 0.3, tokens)[:, None] if tokens else torch.tensor(0.03)
        options["input_scale"] = as_given.clone()  # which a faulty kernel might overwrite
    norm = {"norm": options.pop("norm")} if "norm" in options else {}
    q, new = run(kernels, tensors, format, **norm, **options, tile=tile)
    v, alone = run(kernels, tensors, None, **norm)
    assert_same_bits(new, alone, "n")
    if given:
        options["input_scale"] = as_given
    with poisoned():
        expected, _ = quantize_activation.quantize_activation(v, *steps(format, **options), tile=tile)
    assert isinstance(q, QuantizedTensor) and q.shape == (m, d)
    if launches_on_a_gpu() and not spoilt:
        assert not same_but_few(q.unswizzled(), expected.unswizzled()).is_wrong
        return
    for name, tensor in expected.tensors().items():
        found = q.tensors()[name]
        assert_same_bits(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8), name)


@pytest.mark.often(2)
@pytest.mark.parametrize("norm", adaln.NORMS)
@pytest.mark.parametrize(
    ("dtype", "modulation"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, None),
        (torch.bfloat16, torch.float32),  # Wan
        (torch.float16, torch.float32),
    ],
)
def test_bits_are_those_of_separate_layers(dtype: torch.dtype, modulation: torch.dtype | None, norm: str) -> None:
    check_v(adaln_quantize, dtype=dtype, modulation=modulation, norm=norm)
    check_bound(adaln_quantize, dtype, modulation, norm)


@pytest.mark.parametrize("without", [("weight",), ("branch", "gate"), ("branch", "gate", "weight")])
@pytest.mark.parametrize("norm", adaln.NORMS)
def test_what_is_optional_may_be_left_out(without: tuple[str, ...], norm: str) -> None:
    check_v(adaln_quantize, norm=norm, without=without)


@pytest.mark.often(1)
@pytest.mark.parametrize(("m", "images"), [(1, 1), (17, 1), (130, 2), (18, 3), (17, 17)])
def test_images_of_tokens_and_modulation_of_its_own_for_each_token(m: int, images: int) -> None:
    check_v(adaln_quantize, m, images)
    check_bound(adaln_quantize, torch.bfloat16, None, "layer", m, images)


@pytest.mark.parametrize("d", [1, 3, 64, 511, 512])
def test_rows_of_any_length(d: int) -> None:
    check_v(adaln_quantize, norm="rms" if d == 1 else "layer", d=d)


@pytest.mark.often(2)
@pytest.mark.parametrize("m", [1, 17])
@pytest.mark.parametrize("format", FORMATS_MADE)
def test_fused_is_composed_byte_for_byte(format: str, m: int) -> None:
    check_fused(adaln_quantize, format, m)


@pytest.mark.often(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format", FORMATS_MADE)
def test_other_types_of_x_are_composed_alike(format: str, dtype: torch.dtype) -> None:
    check_fused(adaln_quantize, format, dtype=dtype, norm="rms")


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("format", "options"),
    [
        *((name, {"smooth": True, "mean": True, "hadamard": 32}) for name in FORMATS_MADE),
        *((name, {"smooth": True}) for name in FORMATS_MADE),
        ("int8", {"hadamard": 16, "regular": True, "m": 17}),
        ("int8", {"hadamard": 64, "regular": True, "d": 448, "smooth": True, "mean": True}),
        ("int8", {"hadamard": 256, "regular": True, "m": 6, "images": 2, "norm": "rms", "d": 512}),
        ("nvfp4", {"hadamard": 16, "four_over_six": True}),
        ("nvfp4", {"four_over_six": True, "given": True}),
        *((name, {"given": True}) for name in ("int8", "fp8", "fp8_tensor", "nvfp4")),
        ("mxfp8", {"swizzled": True, "tile": TALL}),
        ("mxfp4", {"swizzled": True, "m": 130, "images": 2, "tile": TALL}),
        ("nvfp4", {"swizzled": True, "mean": True, "tile": TALL}),
        *((name, {"spoilt": True, "norm": norm}) for name in FORMATS_MADE for norm in adaln.NORMS),
    ],
    ids=str,
)
def test_every_step_is_composed_byte_for_byte(format: str, options: dict[str, Any]) -> None:
    check_fused(adaln_quantize, format, **options)


@pytest.mark.slow
@pytest.mark.parametrize("d", [32, 64])
def test_the_128x4_layout_of_short_rows(d: int) -> None:
    tensors = layers(3, 1, d=d)
    q, _ = run(adaln_quantize, tensors, "mxfp8", swizzled=True, tile=whole_row_tile(d, "sm_100", many=True))
    v, _ = run(adaln_quantize, tensors, None)
    expected, _ = quantize_activation.quantize_activation(v, *steps("mxfp8", swizzled=True), tile=TILE)
    assert_same_bits(q.codes.view(torch.uint8), expected.codes.view(torch.uint8), "codes")
    assert_same_bits(q.scale.view(torch.uint8), expected.scale.view(torch.uint8), "scales")


def test_nvfp4_takes_one_global_scale_for_all_tokens() -> None:
    tensors = layers(5, 1)
    q, _ = run(adaln_quantize, tensors, "nvfp4", input_scale=torch.tensor(0.03))
    rows, _ = run(adaln_quantize, tensors, "nvfp4", input_scale=torch.full((5, 1), 0.03))
    assert_same_bits(q.codes, rows.codes, "codes")
    assert_same_bits(q.scale, rows.scale, "scales")


def test_nan_and_infinity_stay_in_their_row() -> None:
    tensors = layers(5, 1)
    tensors["x"][1, 5], tensors["x"][3, 6] = torch.nan, torch.inf
    for norm in ("layer", "rms"):
        v, _ = run(adaln_quantize, tensors, None, norm=norm)
        assert v.isnan().any(1).nonzero().flatten().tolist() == [1, 3]
    expected, _ = separate_layers(tensors, "rms")
    assert torch.equal(v.isnan(), expected.isnan())


def check_distant_rows(kernels: ModuleType) -> None:
    """The third row of x is 2^31 elements from the first, an offset that does not fit into 32 bits."""
    near = layers(3, 1, d=32)
    far = torch.empty(2**31 + 32, dtype=torch.bfloat16).as_strided(
        (3, 32), (2**30, 1)
    )  # only what is written is resident
    far.copy_(near["x"])
    v, _ = run(kernels, near | {"x": far}, None)
    assert_same_bits(v, run(kernels, near, None)[0], "v")


def test_rows_of_each_tensor_have_a_distance_of_their_own() -> None:
    near = layers(6, 2, d=32)
    wide = {name: torch.zeros(len(t), 40 + 8 * i, dtype=t.dtype) for i, (name, t) in enumerate(near.items())}
    apart = {name: wide[name][:, :32].copy_(t) if t.ndim == 2 else t for name, t in near.items()}
    for ours, theirs in zip(run(adaln_quantize, apart, None), run(adaln_quantize, near, None), strict=True):
        assert_same_bits(ours, theirs, "v or n")


def test_rows_may_be_any_distance_apart() -> None:
    check_distant_rows(adaln_quantize)


X, ONE = torch.ones(4, 64), torch.ones(1, 64)
BAD_INPUT: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"x": X[:0]}, r"x is .* \(0, 64\), expected \(M, D\)"),
    "three axes": ({"x": X[None]}, r"expected \(M, D\)"),
    "integers": ({"x": X.int()}, "x is torch.int32"),
    "column stride": ({"x": torch.ones(64, 4).t()}, r"x has strides \(1, 4\).*contiguous"),
    "unknown norm": ({"norm": "group"}, "unknown norm 'group', expected one of layer, rms"),
    "images that split tokens": ({"scale": torch.ones(3, 64)}, r"scale \(3, 64\) does not split 4 tokens"),
    "scale of one axis": ({"scale": ONE[0]}, r"scale \(64,\) does not split"),
    "scale of another type": ({"scale": ONE.half()}, r"scale is torch.float16, expected x's torch.float32"),
    "scale of another size": ({"scale": ONE[:, :32]}, r"scale is .* \(1, 32\).*expected .* \(1, 64\)"),
    "shift of other images": ({"shift": torch.ones(2, 64)}, r"shift is .* \(2, 64\)"),
    "shift strided": ({"shift": torch.ones(64, 2).t()[:1]}, r"shift has strides .*contiguous"),
    "shift elsewhere": ({"shift": ONE.to("meta")}, "shift is .* on meta"),
    "gate alone": ({"gate": ONE}, "gate is given without the other"),
    "branch alone": ({"branch": X}, "branch is given without the other"),
    "branch of another type": ({"branch": X.half(), "gate": ONE}, "branch is torch.float16"),
    "weight of another size": ({"weight": ONE}, r"weight is .* \(1, 64\), expected float32 \(64,\)"),
    "a narrow tile": ({"tile": Tile(1, 65536, 32)}, "a row of 64 takes 65536 elements, expected at most 32768"),
    "a step without a format": ({"format": "", "hadamard": 16}, "hadamard is given, but no format"),
    "a scale without a format": ({"format": "", "input_scale": X}, "input_scale is given, but no format"),
    "a weight format": ({"format": "int4"}, "not quantized to int4, only to int8"),
    "K tail": ({"format": "mxfp8", "x": X[:, :40], "scale": ONE[:, :40], "shift": ONE[:, :40]}, "multiples of 32"),
    "unknown hadamard": ({"hadamard": 24}, "hadamard is 24, expected one of"),
    "a tile that splits hadamard": ({"hadamard": 128}, "no multiple of hadamard 128"),
    "a tile that splits the layout": ({"format": "mxfp8", "swizzled": True, "tile": Tile(4, 64, 1)}, "multiple of 128"),
    "4-over-6 of int8": ({"four_over_six": True}, "four_over_six chooses nvfp4's"),
    "swizzled rows": ({"swizzled": True}, "swizzled is for block scales"),
    "an mx scale": ({"format": "mxfp4", "input_scale": X[:, :1]}, "give no input_scale"),
    "a scale per tensor for rows": (
        {"input_scale": torch.ones(())},
        r"input_scale is .* \(\), expected float32 \(4, 1\)",
    ),
    "no scale of the tensor": ({"format": "fp8_tensor"}, r"fp8_tensor needs an input_scale \(\)"),
    "smooth of another type": ({"smooth": ONE[0].half()}, r"smooth is torch.float16"),
    "mean of another size": ({"mean": X}, r"mean is .* \(4, 64\), expected float32 \(64,\)"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_input_that_the_kernel_does_not_take_is_named(case: str) -> None:
    changed, message = BAD_INPUT[case]
    arguments = {"x": X, "scale": ONE, "shift": ONE, "format": "int8", "eps": EPS, "tile": TILE} | changed
    how = {name: arguments.pop(name) for name in ("eps", "tile", "norm") if name in arguments}
    with pytest.raises(ValueError, match=message):
        adaln_quantize.adaln_quantize(arguments.pop("x"), *norm_steps(**arguments), **how)


# Faults: the text `old` (which must occur once) becomes `new`, and the check must notice.
rms = partial(check_v, norm="rms")
images = partial(check_v, m=18, images=3)
int8 = partial(check_fused, format="int8")
nvfp4 = partial(check_fused, format="nvfp4")
bound = partial(check_bound, dtype=torch.bfloat16, modulation=None, norm="rms")
fp32 = partial(check_v, modulation=torch.float32)
TOKENS = "images = rows // modulation.tokens"
FAULTS: dict[str, tuple[str, str, Callable]] = {
    "gate ignored": ("gated = gated * load_rows", "gated = load_rows", check_v),
    "gated branch not rounded": ("rounded(gated, gate)", "gated", bound),
    "n not rounded": (
        "n = rounded(n + rounded(gated, gate), x)",
        "n = n + rounded(gated, gate)",
        partial(bound, modulation=torch.float32),
    ),
    "one image": (TOKENS, "images = rows * 0", images),
    "images interleaved": (TOKENS, "images = rows % (M // modulation.tokens)", images),
    "modulation without its stride": (
        "load_rows(shift, images, modulation.stride_shift",
        "load_rows(shift, images, D",
        images,
    ),
    "scale for shift": ("load_rows(shift, images", "load_rows(scale, images", check_v),
    "scale without the one": ("rounded(1.0 + load_rows(scale", "rounded(0.0 + load_rows(scale", check_v),
    "1 + scale not rounded": (
        "rounded(1.0 + load_rows(scale, images, modulation.stride_scale, columns, mask), scale)",
        "1.0 + load_rows(scale, images, modulation.stride_scale, columns, mask)",
        check_v,
    ),
    "product not rounded": ("v = rounded(v * factor, scale)", "v = v * factor", check_v),
    "rounded to x's dtype": ("v = rounded(v * factor, scale)", "v = rounded(v * factor, x)", fp32),
    "h not rounded": ("        v = rounded(v, scale)\n        factor", "        factor", check_v),
    "weight without rounding": (
        'if NORM == "rms":\n                v =',
        'if NORM == "none":\n                v =',
        rms,
    ),
    "weight ignored": ("v = v * weight", "v = v + 0.0 * weight", check_v),
    "mean not taken off": ('NORM == "layer"', 'NORM == "none"', check_v),
    "mean of the tile": ("tl.sum(total, 1), D * 1.0", "tl.sum(total, 1), 512.0", check_v),
    "tail in the variance": ("COLUMNS)[1], n, 0.0)", "COLUMNS)[1], n, 1.0)", check_v),
    "eps ignored": ("variance + eps", "variance", partial(check_v, m=1, d=1)),
    "v not rounded": ("v = rounded(v, x)", "v = v + 0.0", partial(int8, modulation=torch.float32)),
    "rows unwritten": ("tl.program_id(0) * ROWS", "(tl.program_id(0) + 1) * ROWS", check_v),
    "no mask of rows": ("columns, (rows < M)[:, None] &", "columns, (rows < M + 1)[:, None] &", check_v),
    "no mask of columns": ("& (columns < D)[None, :]", "& (columns < D + 1)[None, :]", check_v),
    "32-bit rows": ("tl.arange(0, ROWS)).to(tl.int64)", "tl.arange(0, ROWS))", check_distant_rows),
    "own scale where one is given": (
        "if SCALE_GIVEN:\n                s =",
        "if False:\n                s =",
        partial(int8, given=True),
    ),
    "one given scale": (
        "tl.load(out.scale + rows * out.stride",
        "tl.load(out.scale + rows * 0",
        partial(int8, given=True),
    ),
    "one global scale": (
        "tl.load(out.global_scale + rows * out.stride",
        "tl.load(out.global_scale + rows * 0",
        partial(nvfp4, given=True),
    ),
    "global scale unwritten": ("tl.store(out.global_scale + rows, g", "tl.store(out.global_scale + rows * 0, g", nvfp4),
    "no hadamard": ("tile, D, HADAMARD, ROWS", "tile, D, 0, ROWS", partial(nvfp4, hadamard=16)),
    "hadamard: Sylvester's for the regular one": (
        "levels_of(how.hadamard, how.regular)",
        "levels_of(how.hadamard, False)",
        partial(int8, hadamard=16, regular=True),
    ),
    "mean for smooth": (
        "transform_tile(v, source.smooth, source.mean,",
        "transform_tile(v, source.mean, source.smooth,",
        partial(int8, smooth=True, mean=True),
    ),
}


@pytest.mark.often(10)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    old, new, check = FAULTS[fault]
    faulty = with_fault(adaln_quantize, old, new, tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)
