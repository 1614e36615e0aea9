"""Re-encoding stored weights to 8-bit rows: the reference, its ops, and the kernel, which gives the same bytes."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from poison import poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from benchmarks.kernels.interpreter import interpreting
from fluxq.kernels.reencode import kernel as kernels
from fluxq.kernels.reencode import op as reencode
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import Tile
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS


def sibling(name: str) -> ModuleType:
    """Another file of this folder, for what it defines."""
    spec = importlib.util.spec_from_file_location(f"beside_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


beside = sibling("test_quantize_activation_kernel")
SOURCES = (*KERNEL_FORMATS, "int4_g128")
TILE = Tile(rows=4, columns=256, warps=4)
# K is never a multiple of the tile's columns, of int8 and fp8 not of a word's four either.
COLUMNS = {"fp8": 331, "fp8_tensor": 331, "int8": 331, "int4": 320, "int4_g128": 384, "nvfp4": 336}
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinity and NaN are among w


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def weight(format: str, n: int, *, broken: bool = False) -> QuantizedTensor:
    """(n, K) with rows of every magnitude and one of zeros; broken: also rows with a NaN scale or code."""
    noise = torch.Generator().manual_seed(n)
    k = COLUMNS.get(format, 352)
    w = torch.randn(n, k, generator=noise) * torch.logspace(-5, 3, n)[:, None]
    w[n // 2] = 0.0
    w[n // 3] *= torch.logspace(-6, 0, k)  # groups far below the row's amax
    q = QuantizedTensor.quantize(w, format)
    if broken and q.format.group_size:
        q.scale.view(torch.uint8 if q.format.scale != "bf16" else torch.int16)[n // 4, 1] = {
            "e4m3": 0x7F,
            "e8m0": 0xFF,
            "bf16": 0x7FC0,
        }[q.format.scale]
    elif broken and q.format.element.name == "e4m3":
        q.codes.view(torch.uint8)[n // 4, 5] = 0x7F
    return q


def check_kernel(module: ModuleType, source: str, target: str, n: int, *, broken: bool = False) -> None:
    """The bytes of the reference."""
    w = weight(source, n, broken=broken)
    expected = reencode.reencode(w, target)
    with poisoned():
        out = module.reencode(w, target, tile=TILE)
    assert (out.scale.dtype, out.codes.dtype) == (torch.float32, expected.codes.dtype)
    assert_same_bytes(out.scale.view(torch.int32), expected.scale.view(torch.int32))
    assert_same_bytes(out.codes.view(torch.uint8), expected.codes.view(torch.uint8))


def assert_same_bytes(found: Tensor, expected: Tensor) -> None:
    wrong = found != expected
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        tile = [first[0] // TILE.rows, *(column // TILE.columns for column in first[1:])]
        raise AssertionError(f"{int(wrong.sum())} of {wrong.numel()} differ, first at {first}, in tile {tile}")


# The reference


@pytest.mark.parametrize("target", reencode.TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_code_is_the_nearest_to_its_exact_product(source: str, target: str) -> None:
    w = weight(source, 17)
    q = reencode.reencode(w, target)
    assert torch.equal(q.scale, torch.where(q.scale == 1, 1.0, w.dequantize().abs().amax(1) / q.format.element.max))
    # Within half a step of the last place, and 2^-8 for rounding the multiplier.
    plain, found = w.dequantize().double(), q.dequantize().double()
    step = q.scale.double()[:, None] * (1.0 if target == "int8" else 2.0**-9)
    slack = 0.0 if target == "int8" else 2.0**-4
    assert ((found - plain).abs() <= step / 2 * 1.001 + (slack + 2.0**-7.9) * plain.abs()).all()
    assert torch.equal(q.codes[8].float(), torch.zeros(w.shape[1]))


def test_the_amax_of_a_row_becomes_the_largest_code_and_never_overflows() -> None:
    for source in ("nvfp4", "mxfp4", "int4"):
        w = QuantizedTensor.quantize(torch.randn(500, 128, generator=torch.Generator().manual_seed(2)), source)
        for target in reencode.TARGETS:
            q = reencode.reencode(w, target)
            assert (q.codes.float().abs().amax(1) == q.format.element.max).all()


def test_products_are_exact_in_fp16_too_so_that_every_chip_rounds_once() -> None:
    w = weight("nvfp4", 33)
    for target in reencode.TARGETS:
        q = reencode.reencode(w, target)
        assert w.global_scale is not None
        multiplier = w.scale.float() * w.global_scale
        m = (multiplier * (1 / q.scale)[:, None]).bfloat16()
        for code in (0.5, 1.5, 3.0, 6.0, 5.0, 7.0):
            product = (code * m.double()).float()
            normal = product.abs() >= 2.0**-14
            assert torch.equal(product.half().float()[normal], product[normal])


def test_a_broken_row_is_nan_and_nothing_else_is() -> None:
    for source in ("nvfp4", "mxfp4", "mxfp8", "int4", "fp8"):
        w = weight(source, 13, broken=True)
        for target in reencode.TARGETS:
            q = reencode.reencode(w, target)
            assert q.dequantize().isnan().all(1).nonzero().flatten().tolist() == [3]
            assert not q.dequantize()[torch.arange(13) != 3].isnan().any()


def test_a_known_row_scale_is_taken() -> None:
    w = weight("nvfp4", 9)
    scale = reencode.row_scales(w, "int8")
    assert torch.equal(reencode.reencode(w, "int8", scale).codes, reencode.reencode(w, "int8").codes)
    assert torch.equal(reencode.reencode(w, "int8", scale * 2).scale, scale * 2)
    with pytest.raises(ValueError, match=r"row_scale is torch\.float32 \(8,\), expected float32 \(9,\)"):
        reencode.reencode(w, "int8", scale[:8])
    with pytest.raises(ValueError, match="no target 'nvfp4', only int8 and fp8"):
        reencode.reencode(w, "nvfp4")


def test_the_target_that_adds_less_error_is_chosen() -> None:
    noise = torch.Generator().manual_seed(3)
    w = torch.randn(64, 256, generator=noise)
    target, errors = reencode.choose_target(QuantizedTensor.quantize(w, "nvfp4"))
    assert target == "int8" and errors["int8"] < 0.01 < 0.02 < errors["fp8"] < 0.03
    w = torch.randn(8, 4096, generator=noise)
    w[:, 7] = 50.0  # leaves few int8 codes to the others, and all of fp8's
    target, errors = reencode.choose_target(w, ["int8", "fp8"])
    assert target == "fp8" and errors["fp8"] < 0.03 < 0.06 < errors["int8"]
    with pytest.raises(ValueError, match="no candidates"):
        reencode.choose_target(w, [])


def test_added_error_is_relative_and_zero_for_zeros() -> None:
    w = QuantizedTensor.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(4)), "int8")
    assert reencode.added_error(w, w) == 0.0
    half = QuantizedTensor(w.codes, w.scale * 1.5, None, w.shape, w.format)
    assert reencode.added_error(w, half) == pytest.approx(0.5, rel=1e-6)
    zeros = QuantizedTensor.quantize(torch.zeros(2, 64), "int8")
    assert reencode.added_error(zeros, zeros) == 0.0


# The ops


# Not of fp8 tensors: opcheck computes with its arguments, which torch cannot in fp8.
@pytest.mark.parametrize(("source", "target"), [("mxfp4", "int8"), ("int4_g128", "fp8"), ("int8", "fp8")])
def test_the_ops_are_what_torch_expects_of_ops(source: str, target: str) -> None:
    w = weight(source, 6)
    arguments = w.codes, w.scale, w.global_scale, source
    torch.library.opcheck(torch.ops.fluxq.reencode.default, (*arguments, target))
    torch.library.opcheck(torch.ops.fluxq.dequantize.default, (*arguments, torch.bfloat16))
    codes, scale = torch.ops.fluxq.reencode(*arguments, target)
    expected = reencode.reencode(w, target)
    assert torch.equal(codes.float(), expected.codes.float()) and torch.equal(scale, expected.scale)
    assert torch.equal(torch.ops.fluxq.dequantize(*arguments, torch.float16), w.dequantize(torch.float16))


def test_the_ops_compile_in_one_graph() -> None:
    w = weight("nvfp4", 6)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(codes: Tensor, scale: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
        plain = torch.ops.fluxq.dequantize(codes, scale, global_scale, "nvfp4", torch.float32)
        rows, row_scale = torch.ops.fluxq.reencode(codes, scale, global_scale, "nvfp4", "int8")
        return plain, rows.float() * row_scale[:, None]

    assert w.global_scale is not None
    plain, rows = run(w.codes, w.scale, w.global_scale)
    assert torch.equal(plain, w.dequantize())
    assert torch.equal(rows, reencode.reencode(w, "int8").dequantize())


def test_a_missing_global_scale_is_named() -> None:
    w = weight("nvfp4", 6)
    with pytest.raises(ValueError, match="nvfp4 needs a global scale, w_scale_2 is None"):
        torch.ops.fluxq.reencode(w.codes, w.scale, None, "nvfp4", "int8")


# The kernel


@pytest.mark.parametrize("target", reencode.TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_kernel_gives_the_bytes_of_the_reference(source: str, target: str) -> None:
    check_kernel(kernels, source, target, 13)


@pytest.mark.parametrize("n", [1, 5, 130])
def test_rows_of_every_number(n: int) -> None:
    check_kernel(kernels, "nvfp4", "int8", n)


@pytest.mark.parametrize("source", ["nvfp4", "mxfp4", "mxfp8", "int4", "fp8"])
def test_broken_rows_are_those_of_the_reference(source: str) -> None:
    for target in reencode.TARGETS:
        check_kernel(kernels, source, target, 13, broken=True)


def test_without_buffers_the_kernel_makes_them() -> None:
    w = weight("nvfp4", 5)
    q = kernels.reencode(w, "fp8", tile=TILE)
    assert q.format == FORMATS["fp8"] and torch.equal(q.dequantize(), reencode.reencode(w, "fp8").dequantize())


def test_what_the_kernel_does_not_take_is_named() -> None:
    w = weight("nvfp4", 4)
    short = QuantizedTensor(w.codes, w.scale[:, :3], w.global_scale, w.shape, w.format)
    bad: dict[str, Callable] = {
        "no target 'mxfp8', only int8 and fp8": partial(kernels.reencode, w, "mxfp8", tile=TILE),
        r"tile.columns is 8, expected a multiple of nvfp4's 16": partial(
            kernels.reencode, w, "int8", tile=Tile(4, 8, 1)
        ),
        r"weight_scale is .* \(4, 3\), expected float8_e4m3fn \(4, 21\)": partial(
            kernels.reencode, short, "int8", tile=TILE
        ),
    }
    for message, call in bad.items():
        with pytest.raises(ValueError, match=message):
            call()


# Faults: in a kernel file, the text `old` (which must occur once) becomes `new`, and the check must notice.
OURS, SHARED, LOOP = "reencode.py", "dequantize.py", "    for tile in range(TILES)"
nvfp4 = partial(check_kernel, source="nvfp4", target="int8", n=13)
broken = partial(check_kernel, source="mxfp4", target="int8", n=13, broken=True)
per_tensor = partial(check_kernel, source="fp8_tensor", target="int8", n=13)
FAULTS: dict[str, tuple[str, str, str, Callable]] = {
    "global scale ignored": (OURS, "mask=row_mask, other=1.0)", "mask=row_mask, other=1.0) * 0 + 1", nvfp4),
    "the amax of one tile": (OURS, "tl.int32)\n" + LOOP, "tl.int32)\n" + LOOP.replace("TILES", "1"), nvfp4),
    "a tile unwritten": (OURS, "step)\n" + LOOP, "step)\n" + LOOP.replace("TILES", "1, TILES"), nvfp4),
    "multiplier not rounded": (OURS, ".to(tl.bfloat16).to(tl.float32)", "", nvfp4),
    "NaN multiplier": (OURS, "tl.where(m == m, m, 0.0)", "tl.where(m == m, m, 1.0)", broken),
    "largest code": (OURS, "amax_scale(amax, LARGEST)", "amax_scale(amax, LARGEST + 1.0)", nvfp4),
    "no mask of columns": (OURS, "(columns < K)[None, :]", "(columns < K + 1)[None, :]", nvfp4),
    "no mask of rows": (OURS, "row_mask[:, None] & (columns", "(rows < N + 1)[:, None] & (columns", nvfp4),
    "scales of a row apart": (SHARED, "rows * stride_scale, mask", "rows, mask", per_tensor),
    "scales one group off": (SHARED, "groups = tile * (COLUMNS // GROUP) +", "groups = 1 +", nvfp4),
    "nibbles swapped": (SHARED, "tl.join(code & 0xF, code >> 4)", "tl.join(code >> 4, code & 0xF)", nvfp4),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, check = FAULTS[fault]
    check(kernels)
    faulty = beside.with_fault(file, old, new, tmp_path)
    if file == SHARED:
        for name in ("load_scales", "load_codes"):
            monkeypatch.setattr(kernels, name, getattr(faulty, name))
        faulty = kernels
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)
