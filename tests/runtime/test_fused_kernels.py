"""Whole blocks of Flux in fused forms, computed by the Triton kernels: every op against its torch reference, by tiles.

`Kernels` stands between a block and its ops: each op of fluxq is computed by its kernel, at the tiles of a chip, and
compared with the reference of the very same arguments. Codes, n and products of int8 are equal to the bit, all else is
within the bounds that the tests of each kernel state (tests/kernels). What a block makes of it in the end differs by
what numbers and codes do that were rounded to the other side: at most END, and none at all in most cases.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from attention_bounds import as_kernels_keep, bounds
from diffusers import FluxTransformer2DModel
from kernel_tests import sibling
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fluxq
from fluxq.kernels import launch, ops, tiles
from fluxq.kernels.adaln_quantize import kernel as adaln_kernel
from fluxq.kernels.adaln_quantize import op as adaln
from fluxq.kernels.attention import kernel as attention_kernels
from fluxq.kernels.attention import op as attention
from fluxq.kernels.attention.op import Operands
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.products import ProductTensors, gated
from fluxq.kernels.qk_norm_rope import op as rope
from fluxq.kernels.quantize_activation import kernel as producer
from fluxq.kernels.quantize_activation import op as quantizer
from fluxq.kernels.reencode import reencode
from fluxq.kernels.tensor import QuantizedTensor, pack_named, unpack_named
from fluxq.kernels.tiles import MatmulTile, Tile, chip_of, find_matmul_tile, find_memory_tile
from fluxq.kernels.weight_only_matmul import kernel as weight_only
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme, find_format
from fluxq.runtime import fused, layout

beside = sibling("test_quantize_activation_kernel")
HEADS = 3
D = HEADS * 64  # like all sizes here no multiple of a tile's 128 rows and columns
IMAGES, TEXT, IMAGE = 2, 3, 7  # tokens of a prompt and of an image
MODULATION = "fp8-16bit"  # of the adaLN Linears, as recipes have it
FP8_SUMS = 2.0**-11  # of Σ|a b|: what a GPU may lose of fp8 sums, which Hopper holds in fewer bits than fp32 has
POISON = 0xFF  # NaN in every type of floats
END = 2.0**-9  # |y - reference| / |reference| of a block's outputs; 2^-10.2 was the most at several numbers of tokens
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

FP8_ATTENTION = "16 bit, attention in fp8"
# (scheme, chip whose tiles are taken, format that 4-bit weights become inside the product)
CASES = {
    "16 bit": ("16 bit", "sm_90", ""),
    "int8": ("int8-int8", "sm_89", ""),
    "fp8": ("fp8-fp8", "sm_89", ""),
    "fp8 of consumer Blackwell": ("fp8-fp8", "sm_120", ""),
    "nvfp4": ("nvfp4-nvfp4-static", "sm_120", ""),
    "nvfp4 with its scales swizzled": ("nvfp4-nvfp4-static", "sm_100", ""),
    "mxfp8": ("mxfp8-mxfp8", "sm_120", ""),
    "nvfp4 as int8": ("nvfp4-nvfp4-static", "sm_90", "int8"),
    "nvfp4 as fp8": ("nvfp4-nvfp4-static", "sm_90", "fp8"),
    FP8_ATTENTION: ("16 bit", "sm_90", ""),
}
QUICK = {
    ("double", "16 bit"),
    ("double", "fp8"),
    ("single", "16 bit"),
    ("single", "nvfp4"),
    ("single", "nvfp4 as int8"),
}


@pytest.fixture
def on_the_interpreter():
    with interpreting():
        yield


def cases() -> list[Any]:
    both = [(kind, case) for kind in ("double", "single") for case in CASES]
    return [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in both]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), cases())
def test_every_op_of_a_block_is_its_reference_tile_by_tile(on_the_interpreter, kind: str, case: str) -> None:
    assert run(kind, case) == expected_calls(kind, case)


@pytest.mark.long
@pytest.mark.parametrize("case", ["int8", "nvfp4"])
def test_so_it_is_where_tokens_take_several_tiles(on_the_interpreter, case: str) -> None:
    assert run("double", case, image=67) == expected_calls("double", case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["16 bit", "int8", "fp8", "nvfp4 as int8", "nvfp4 as fp8"])
@pytest.mark.parametrize("kind", ["double", "single"])
def test_on_a_gpu_every_op_of_a_block_is_its_reference_too(kind: str, case: str) -> None:
    """The ops of the GPU at hand, with no interpreter; references are computed on the CPU."""
    assert run(kind, case, image=133, device="cuda") == expected_calls(kind, case)


def expected_calls(kind: str, case: str) -> dict[str, int]:
    """Return how often a block calls each op.

    It is once for an input that layers share, and once for each layer that shares none.
    """
    scheme, chip, decoded = CASES[case]
    double = kind == "double"
    calls = {"adaln_quantize": 4 if double else 1, "qk_norm_rope": 1}
    if scheme == "16 bit":
        return calls | {"attention_fp8": 1} if case == FP8_ATTENTION else calls
    blocks_have_scales = not decoded and scheme.startswith(("nvfp4", "mx"))
    product = "w4a8_matmul" if decoded else "block_scaled_matmul" if blocks_have_scales else "scaled_matmul"
    together = chip != "sm_100"  # q, k, v and up; widths here are no multiple of the 128 rows of swizzled scales
    if double:  # alone are both modulations and the layers that read the attention
        qkv = 1 if together else 3
        return calls | {product: 2 * (qkv + 1 + 1), "quantize_activation": 2, "quantized_linear": 2 + 2}
    return calls | {product: (1 if together else 4) + 1, "quantize_activation": 1, "quantized_linear": 1}


@torch.no_grad()
def run(kind: str, case: str, image: int = IMAGE, device: str = "cpu") -> Counter:
    """A block's calls of ops; each result is compared, and so are the block's outputs."""
    scheme, chip, decoded = CASES[case]
    block, inputs = block_of(
        kind, scheme, decoded, image, device, swizzled=chip == "sm_100", fp8_attention=case == FP8_ATTENTION
    )
    with References():
        want = block(*inputs)
    with Kernels(chip if device == "cpu" else None) as kernels:
        got = block(*inputs)
    for found, expected in zip(got, want, strict=True):
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        assert error <= END, f"{kind} block, {case}: the end differs by {error:.2g}, at most {END:.2g} is expected"
    return kernels.calls


# --- planted faults: the op is named, and its tiles, and how far off they are


# In the kernel of the first name one text becomes another; then what is said of it.
# Without a fault these cases, of a double block, are green above.
FAULTS = {
    "tiles of columns are skipped": (
        *("scaled_matmul", "% height, program % in_group // height", "% height, 0 * program"),
        *("fp8", r"scaled_matmul differs in 8 tiles of 64 x 64, at \(0, 1\): 384 by up to nan; \(0, 2\): 384 by"),
    ),
    "the scale of another row": (
        *("scaled_matmul", "tl.load(x_scale + rows * stride_x_scale", "tl.load(x_scale + rows * 0"),
        *("fp8", r"scaled_matmul differs in 9 tiles of 64 x 64, at \(0, 0\): \d+ by up to [\d.]+;"),
    ),
    "the modulation of the first image": (
        *("adaln_quantize", "images = rows // modulation.tokens", "images = rows * 0"),
        *("16 bit", r"adaln_quantize: v differs in 3 tiles of 1 x 192, at \(3, 0\): \d+ by up to [\d.]+; \(4, 0\)"),
    ),
    "codes under another scale": (
        *("adaln_quantize", "amax_bits(modulated, TILES), FORMAT.element.max)", "amax_bits(modulated, TILES), 99.0)"),
        *("fp8", r"adaln_quantize: codes differs in 6 tiles of 1 x 192, at \(0, 0\)"),
    ),
    "rotated as if the image came first": (
        *("qk_norm_rope", "cos += s * D", "cos += (s + S - S_FIRST) % S * D"),
        *("16 bit", r"qk_norm_rope: q differs in 20 tiles of 3 x 64, at \(0, 0\): \d+ by up to [\d.]+;"),
    ),
    "another gelu's codes": (
        *("quantize_activation", 'if ACT == "gelu_tanh"', 'if ACT == "none"'),
        *("fp8", "quantize_activation: codes differs"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_op_and_tiles(on_the_interpreter, fault: str, tmp_path: Path, monkeypatch) -> None:
    name, old, new, case, said = FAULTS[fault]
    faulty = beside.with_fault(f"{name}.py", old, new, tmp_path)
    monkeypatch.setitem(sys.modules, f"fluxq.kernels.{name}.kernel", faulty)
    with pytest.raises(AssertionError, match=said):
        run("double", case)


# --- the kernels in the place of the references


class References(TorchDispatchMode):
    """Computes every op of fluxq by its torch reference, on the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fluxq":
            return func(*args, **(kwargs or {}))
        return moved(func(*moved(args, "cpu")), args[0].device)


class Kernels(TorchDispatchMode):
    """Computes every op of fluxq by its kernel and compares what it returns. calls: how often, by name.

    chip: the one whose tiles the interpreter takes; None: on the GPU that holds the tensors, as everywhere.
    """

    def __init__(self, chip: str | None) -> None:
        super().__init__()
        self.chip, self.calls = chip, Counter()
        self.fp8_sums = 0.0 if chip else FP8_SUMS

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fluxq":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("fluxq::")
        self.calls[name] += 1
        found, tile = self.launched(name, *args)
        named = {argument.name: argument.default_value for argument in func._schema.arguments}
        named |= dict(zip(named, args, strict=False))
        CHECKS[name](self, moved(found, "cpu"), tile, **moved(named, "cpu"))
        return found

    def launched(self, name: str, *args: Any) -> tuple[Any, Any]:
        """Return a kernel's result for the arguments of its op, and its tile; new tensors hold poison before."""
        found_tiles: list[Any] = []

        def noting(find: Callable) -> Callable:
            def found(*wanted: Any, **how: Any) -> Any:
                found_tiles.append(find(*wanted, **how))
                return found_tiles[-1]

            return found

        with contextlib.ExitStack() as patches:
            for module, finder in FINDERS:
                now = sys.modules[module.__name__]  # a fault may have replaced it
                patches.enter_context(mock.patch.object(now, finder, noting(getattr(now, finder))))
            patches.enter_context(mock.patch.object(torch, "empty", poisoned))
            if self.chip is None:
                found = launch.run(name, *moved(args, "cuda"))
            else:
                found = launch.launcher(name)(*args, chip=self.chip)
        return found, found_tiles[-1] if found_tiles else Tile(1, 1, 1)  # the library's product has none

    def activated(self, x: Tensor, act: str, tile: Tile) -> Tensor:
        """act(x) by the kernel that rounds it and makes no codes of it."""
        return producer.activate(x if self.chip else x.cuda(), act, tile=tile).cpu()

    def quantized_heads(self, q: Tensor, k: Tensor, v: Tensor, codes: str) -> Operands:
        """Return the operands that the kernel's first launches make of q, k and v."""
        on_device = (x if self.chip else x.cuda() for x in (q, k, v))
        chip = self.chip or chip_of(torch.device("cuda"))
        tile = find_memory_tile("attention", f"quantize {q.shape[3]}", chip, q.shape[1])
        found = attention_kernels.quantize_operands(*on_device, codes, tile=tile)
        found = Operands(*(getattr(found, field.name).cpu() for field in fields(found)))
        return as_kernels_keep(found, back=True)


def moved(values: Any, device: str | torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def poisoned(*shape: Any, **options: Any) -> Tensor:
    wanted = EMPTY(*shape, **options | {"device": "meta"})
    whole = torch.full((wanted.nbytes,), POISON, dtype=torch.uint8, device=options.get("device"))
    return whole.view(wanted.dtype).reshape(wanted.shape)


EMPTY = torch.empty
FINDERS = (
    (tiles, "find_tile"),
    (weight_only, "find_tile"),
    (adaln_kernel, "whole_row_tile"),
    (producer, "whole_row_tile"),
)


# --- one check for each op: arguments by the names that the op gives them


def check_adaln(kernels: Kernels, found, tile: Tile, x, tensors, rounding, norm, eps) -> None:
    """n to the bit; v within its bound; codes to the bit those of the v that the kernel writes without a format."""
    codes, step, global_scale, new = found
    rows = tile.rows, D
    given, how = unpack_named(adaln.NormTensors, tensors, rounding, quantizer.Rounding.parse)
    n = adaln.modulated_norm(x, given, norm, eps)[1]
    if n is None:
        n = x
    else:
        assert_equal("adaln_quantize: n", new, n, rows)
    v = codes
    if how.format:
        plain = pack_named(given._replace(input_scale=None, smooth=None, mean=None), quantizer.Rounding())
        (v, *_), _ = kernels.launched("adaln_quantize", x, *plain, norm, eps)
        assert_codes("adaln_quantize", (codes, step, global_scale), v, rows, given.of_rounding, how)
    exact, bound = modulated(n, given.scale, given.shift, eps)
    assert given.weight is None and norm == "layer"
    assert_within("adaln_quantize: v", v, exact, bound, rows)


def modulated(n: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """LayerNorm(n) · (1 + scale) + shift in float64 and its bound, as test_adaln_quantize_kernel.py has it."""
    scale, shift = (t.double().repeat_interleave(n.shape[0] // t.shape[0], 0) for t in (scale, shift))
    h = n.double()
    off = 2.0**-20 * h.abs().mean(-1, keepdim=True)
    h = h - h.mean(-1, keepdim=True)
    factor = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    h, unit = h * factor, 4 * torch.finfo(n.dtype).eps / 2 + 2.0**-18
    exact = h * (1 + scale) + shift
    bound = (off * factor * (1 + scale)).abs() + unit * ((h * (1 + scale)).abs() + shift.abs())
    return exact, bound + torch.finfo(n.dtype).eps / 2 * exact.abs()


def check_rope(kernels: Kernels, found, tile: Tile, q, k, tensors, names, eps, interleaved, **_) -> None:
    """Within the bound of test_qk_norm_rope_kernel.py; rows are heads, one token's after those of the token before.

    The attention's v, of two streams, is that of one after that of the other.
    """
    given = unpack_named(rope.RopeTensors, tensors, names)[0]
    streams = rope.streams_of(q, k, given)
    cos, sin = (t[:, None].double() for t in (given.cos, given.sin))
    for name, y in zip("qk", found, strict=False):
        parts = []
        for stream in streams:
            x, weight = getattr(stream, name).double(), getattr(stream, f"{name}_weight").double()
            parts.append(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight)
        v = torch.cat(parts, 1)
        terms = v * cos, rope.rotate(v, interleaved) * sin
        bound = (torch.finfo(q.dtype).eps + 2.0**-20) * (terms[0].abs() + terms[1].abs())
        size = min(tile.rows, v.shape[2]), v.shape[3]
        y, v64, bound = (t.flatten(0, 2) for t in (y, terms[0] + terms[1], bound))
        assert_within(f"qk_norm_rope: {name}", y, v64, bound, size)
    vs = [stream.v for stream in streams if stream.v is not None]
    assert len(vs) == (2 if len(streams) == 2 else 0)
    assert_equal("qk_norm_rope: v", found[2], torch.cat(vs, 1) if vs else q.new_empty(0), (1, 1))


def check_activated(kernels: Kernels, found, tile: Tile, x, tensors, rounding) -> None:
    """To the bit those of the kernel's own gelu(x), which is within the bound of test_act_quantize_kernel.py.

    In a single block attention stands beside it.
    """
    given, how = unpack_named(quantizer.RoundingTensors, tensors, rounding, quantizer.Rounding.parse)
    assert given.down is None and how.act == "gelu_tanh"
    size = tile.rows, tile.columns
    a = kernels.activated(x, how.act, tile)
    whole = a if given.beside is None else torch.cat([given.beside, a], dim=1)
    assert_codes("quantize_activation", found, whole, size, given._replace(beside=None), replace(how, act=""))
    v = x.double()
    t = 2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
    y = v / (1 + torch.exp(-t))
    bound = (6 + 5 * t.abs()) * 2.0**-24 * y.abs()
    rounded = bound + torch.finfo(x.dtype).eps / 2 * (y.abs() + bound) + torch.finfo(x.dtype).smallest_normal
    assert_within("quantize_activation: gelu", a, y, rounded, size)


def check_attention(kernels: Kernels, found, tile: Any, q, k, v, scale, codes) -> None:
    """Within the bound that attention_bounds.py states for the codes that the kernel makes, head by head."""
    operands = kernels.quantized_heads(q, k, v, codes)
    how = q.shape[1], k.shape[1], attention.logit_scale(q, scale), q.dtype
    exact, bound = bounds(operands, *how)
    matmul = find_matmul_tile("attention", str(q.shape[3]), kernels.chip or chip_of(torch.device("cuda")), q.shape[1])
    for image, head in itertools.product(range(q.shape[0]), range(q.shape[2])):
        y, expected, within = (t[image, :, head] for t in (found, exact, bound))
        assert_within(f"attention_fp8: image {image}, head {head}", y, expected, within, (matmul.m, q.shape[3]))


def check_scaled(kernels: Kernels, found, tile: MatmulTile, x, tensors, formats, **follows) -> None:
    given, name = unpack_named(ProductTensors, tensors, formats)
    left, right = matrix(x, given.x_scale, None, name), matrix(given.w, given.w_scale, None, name)
    assert_product(kernels, "scaled_matmul", found, left, right, tile, **following(given), **follows)


def check_block_scaled(kernels: Kernels, found, tile: MatmulTile, x, tensors, formats, **follows) -> None:
    given, name = unpack_named(ProductTensors, tensors, formats)
    left = matrix(x, given.x_scale, given.x_scale_2, name)
    right = matrix(given.w, given.w_scale, given.w_scale_2, name)
    assert_product(kernels, "block_scaled_matmul", found, left, right, tile, **following(given), **follows)


def check_w4a8(kernels: Kernels, found, tile: MatmulTile, x, tensors, formats, **follows) -> None:
    given, names = unpack_named(ProductTensors, tensors, formats)
    weights, _, activations = names.partition("-")
    left = matrix(x, given.x_scale, None, activations)
    right = reencode(matrix(given.w, given.w_scale, given.w_scale_2, weights), activations, given.row_scale)
    assert_product(kernels, "w4a8_matmul", found, left, right, tile, **following(given), **follows)


def following(given: ProductTensors) -> dict[str, Any]:
    """The tensors of what follows a product, by name."""
    return {name: getattr(given, name) for name in ("bias", "h", "up", "gate", "residual")}


def check_linear(kernels: Kernels, found, tile: Tile | MatmulTile, x, tensors, scheme) -> None:
    """A layer that shares nothing: codes of its own, then the product; or 16-bit activations."""
    given, parsed = unpack_named(ops.LinearTensors, tensors, scheme, Scheme.parse)
    weight, weight_scale, weight_scale_2, input_scale, bias, *branches = given._replace(row_scale=None)
    assert all(value is None for value in branches)
    row_scale, x = given.row_scale, x.reshape(-1, x.shape[-1])
    w = matrix(weight, weight_scale, weight_scale_2, parsed.weights.name)
    name = f"quantized_linear {parsed}"
    found = found.reshape(-1, w.shape[0])
    if parsed.activations is None:
        assert_product(kernels, name, found, x, w, tile, bias=bias, dtype=x.dtype)
        return
    q = ops.quantize_activation(x, parsed.activations, input_scale)
    w = w if row_scale is None else reencode(w, parsed.activations.name, row_scale)
    assert_product(kernels, name, found, q, w, tile, bias=bias, dtype=x.dtype)


CHECKS: dict[str, Callable[..., None]] = {
    "adaln_quantize": check_adaln,
    "qk_norm_rope": check_rope,
    "quantize_activation": check_activated,
    "attention_fp8": check_attention,
    "scaled_matmul": check_scaled,
    "block_scaled_matmul": check_block_scaled,
    "w4a8_matmul": check_w4a8,
    "quantized_linear": check_linear,
}


# --- comparisons


def matrix(codes: Tensor, scale: Tensor, global_scale: Tensor | None, format: str) -> QuantizedTensor:
    """An op's tensors as one matrix, its block scales in rows."""
    return QuantizedTensor.stored(codes, scale, global_scale, find_format(format)).unswizzled()


def assert_codes(
    name: str,
    found: tuple[Tensor, ...],
    v: Tensor,
    size: tuple[int, int],
    given: quantizer.RoundingTensors,
    how: quantizer.Rounding,
) -> None:
    """Codes, scales and global scale are those that the torch reference makes of v."""
    expected = quantizer.quantize_activation(v, *pack_named(given, how))
    row = how.row
    groups = max(1, size[1] // (row.group_size or size[1]))
    sizes = (size[0], size[1] * row.element.bits // 8), (size[0], groups), (size[0], 1)
    for part, ours, theirs, each in zip(("codes", "scales", "global scales"), found, expected, sizes, strict=False):
        flat = ours.ndim == 1
        ours, theirs = (t.reshape(-1, 1) if flat else t for t in (ours, theirs))
        assert_equal(f"{name}: {part}", ours, theirs, (each[0], 1) if flat else each)


def assert_product(
    kernels: Kernels,
    name: str,
    found: Tensor,
    x: QuantizedTensor | Tensor,
    w: QuantizedTensor,
    tile: Tile | MatmulTile,
    *,
    bias: Tensor,
    dtype: torch.dtype,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    **follows: Any,
) -> None:
    """int8 to the bit; else within what sums in fp32 may lose, as test_scaled_matmul_kernel.py has it."""
    assert not any(value is not None and value is not False for value in follows.values()), (
        f"{name}: nothing is expected to follow the product, {follows} does"
    )
    size = (tile.m, tile.n) if isinstance(tile, MatmulTile) else (1, tile.rows)
    if isinstance(x, QuantizedTensor) and x.format.name == "int8":
        sums = (x.codes.double() @ w.codes.double().T).float()  # exact
        y = sums * x.scale[:, None] * w.scale + bias.float()
        assert_equal(name, found, gated(y.to(dtype), gate, residual), size)
        return
    a = (x.dequantize() if isinstance(x, QuantizedTensor) else x).double()
    b = w.dequantize().double()
    value, size_of_sums = a @ b.T + bias.double(), a.abs() @ b.abs().T + bias.double().abs()
    bound = (a.shape[1] + 8) * 2.0**-24 * size_of_sums + 2.0**-23 * value.abs()
    if isinstance(x, QuantizedTensor) and x.format.name == "fp8":
        bound += kernels.fp8_sums * size_of_sums
    half = torch.finfo(dtype).eps / 2
    if gate is not None:
        gates = gate.double().repeat_interleave(len(value) // len(gate), dim=0)
        value, bound = value * gates, (bound + half * (value.abs() + bound)) * gates.abs()
    if residual is not None:
        value, bound = value + residual.double(), bound + half * (value.abs() + bound)
    bound += half * (value.abs() + bound)
    assert_within(name, found, value, bound, size)


def assert_equal(name: str, found: Tensor, expected: Tensor, size: tuple[int, int]) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, f"{name}: shapes or types differ"
    if found.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    assert_within(name, found, expected.double(), torch.zeros((), dtype=torch.float64), size)


def assert_within(name: str, found: Tensor, expected: Tensor, bound: Tensor, size: tuple[int, int]) -> None:
    """|found - expected| <= bound; the message names tiles of that size (row, column), and how far off they are."""
    off = (found.double() - expected).abs()
    wrong = ~(off <= bound)  # NaN is wrong
    if not wrong.any():
        return
    tiles: dict[tuple[int, int], list[float]] = {}
    for row, column in wrong.nonzero().tolist():
        tiles.setdefault((row // size[0], column // size[1]), []).append(float(off[row, column]))
    said = [f"{tile}: {len(each)} by up to {max(each):.3g}" for tile, each in list(tiles.items())[:8]]
    raise AssertionError(f"{name} differs in {len(tiles)} tiles of {size[0]} x {size[1]}, at {'; '.join(said)}")


# --- blocks


def block_of(
    kind: str, scheme: str, decoded: str, image: int, device: str, *, swizzled: bool, fp8_attention: bool
) -> tuple[nn.Module, tuple[Any, ...]]:
    """An optimized block with random weights under a scheme, and the arguments of a call."""
    torch.manual_seed(0)
    config = {**TINY_CONFIGS["flux"], "num_single_layers": 1, "num_attention_heads": HEADS}
    model: Any = FluxTransformer2DModel.from_config(config)
    model = model.bfloat16().eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            module.weight.data = (1 + 0.2 * torch.randn(module.weight.shape)).bfloat16()
        if isinstance(module, nn.Linear) and "transformer_blocks" in name and scheme != "16 bit":
            is_modulation = name.endswith(".linear")
            layer = quantized(module, Scheme.parse(MODULATION if is_modulation else scheme))
            if decoded and not is_modulation:
                layout.add_row_scale(layer, (decoded,))
            if swizzled and not is_modulation:
                layout.swizzle(layer)
            model.set_submodule(name, layer)
    if fp8_attention:
        fluxq.set_attention(model, "fp8")
    model.to(device)
    fused.optimize(model, FAMILIES["flux"], torch.device(device).type, side_by_side=True)
    rope = model.pos_embed(torch.arange(3 * (TEXT + image)).reshape(-1, 3))
    hidden, text = (torch.randn(IMAGES, tokens, D).bfloat16() for tokens in (image, TEXT))
    block = model.transformer_blocks[0] if kind == "double" else model.single_transformer_blocks[0]
    return block, moved((hidden, text, torch.randn(IMAGES, D).bfloat16(), rope), device)


def quantized(linear: nn.Linear, scheme: Scheme) -> QuantLinear:
    scale = torch.tensor(0.002) if scheme.static_input else None
    return QuantLinear.from_quantized(
        QuantizedTensor.quantize(linear.weight, scheme.weights), linear.bias, scheme, scale
    )
