"""Block scales in the 128x4 layout: the kernel against the torch reference, byte for byte, on Triton's interpreter."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from poison import assert_guards_untouched, guarded, poisoned
from torch import Tensor
from triton.runtime.errors import InterpreterError

from benchmarks.kernels.interpreter import interpreting
from fluxq.kernels import tensor
from fluxq.kernels.swizzle_scales import kernel as kernels
from fluxq.kernels.tiles import Tile, find_memory_tile


def sibling(name: str) -> ModuleType:
    """Another file of this folder, for what it defines."""
    spec = importlib.util.spec_from_file_location(f"beside_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


beside = sibling("test_quantize_activation_kernel")
TILE = Tile(rows=128, columns=8, warps=4)


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter():
    with interpreting():
        yield


def scales(rows: int, groups: int) -> Tensor:
    """(rows, groups) bytes, none of them the padding's 0, poison around them."""
    scale = guarded(rows, groups, dtype=torch.uint8)
    return scale.random_(1, 256, generator=torch.Generator().manual_seed(rows * groups))


def check(module: ModuleType, rows: int = 130, groups: int = 19, tile: Tile = TILE) -> None:
    """The bytes of the reference, padding included, and none beside them."""
    scale = scales(rows, groups)
    expected = tensor.swizzle_scales(scale)
    with poisoned():
        out = module.swizzle_scales(scale, tile=tile)
    wrong = (out != expected).nonzero().flatten()
    assert not len(wrong), f"{len(wrong)} of {len(out)} differ, first at {wrong[0]}, in tile {wrong[0] // 512}"
    assert_guards_untouched(scale)


@pytest.mark.parametrize("rows", [1, 5, 17, 128, 130])
@pytest.mark.parametrize("groups", [1, 4, 9, 19])
def test_the_kernel_gives_the_bytes_of_the_reference(rows: int, groups: int) -> None:
    check(kernels, rows, groups)


@pytest.mark.parametrize("columns", [4, 16, 64])
def test_tiles_of_every_width(columns: int) -> None:
    check(kernels, 260, 37, Tile(rows=128, columns=columns, warps=4))
    check(kernels, tile=find_memory_tile("swizzle_scales", "8bit", "sm_100", 130))


def test_the_result_has_the_type_of_the_scales() -> None:
    scale = scales(33, 5).view(torch.float8_e4m3fn)
    flat = kernels.swizzle_scales(scale, tile=TILE)
    assert flat.dtype == scale.dtype
    back = tensor.unswizzle_scales(flat, 33, 5)
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_what_does_not_fit_is_named() -> None:
    scale = scales(33, 8)
    cases = {
        r"scale is torch.bfloat16 \(33, 8\), expected block scales \(rows, G\) of one byte": (scale.bfloat16(), {}),
        r"scale is torch.uint8 \(264,\), expected block scales \(rows, G\)": (scale.flatten(), {}),
        r"scale has strides \(1, 8\) for shape \(8, 33\): pass .contiguous\(\)": (scale.t(), {}),
        r"the tile is 64x8, expected 128 rows and a multiple of 4": (scale, {"tile": Tile(64, 8, 4)}),
        r"the tile is 128x2, expected 128 rows and a multiple of 4": (scale, {"tile": Tile(128, 2, 4)}),
    }
    for message, (given, options) in cases.items():
        with pytest.raises(ValueError, match=f"swizzle_scales: {message}"):
            kernels.swizzle_scales(given, **{"tile": TILE} | options)


FAULTS = {
    "quarters are 16 rows apart": ("% 4 * 32", "% 4 * 16"),
    "quarters and lines exchanged": ("place // 4 % 4 * 32 + place // 16 % 32", "place // 4 % 4 + place // 16 % 32 * 4"),
    "groups follow lines": ("wide * 4 + place % 4", "wide * 4 + place // 128 % 4"),
    "no mask of rows": ("mask=(rows < N) & (groups < G)", "mask=groups < G"),
    "no mask of groups": ("mask=(rows < N) & (groups < G)", "mask=rows < N"),
    "padding is not 0": ("(groups < G), other=0", "(groups < G), other=1"),
    "no mask where it writes": ("value, mask=wide < W", "value"),
    "a tile of groups is not written": ("mask=wide < W)", "mask=wide < W - 1)"),
    "rows of tiles overlap": ("tl.cdiv(G, 4)", "(G // 4)"),
    "one program of rows": ("tl.program_id(0).to(tl.int64) * 128", "tl.program_id(1).to(tl.int64) * 128"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path) -> None:
    faulty = beside.with_fault("swizzle_scales.py", *FAULTS[fault], tmp_path)
    with pytest.raises((AssertionError, InterpreterError), match=r"differ|outside every argument tensor"):
        check(faulty)
