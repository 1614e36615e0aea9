"""Attention with warps apart: its results and its barriers on the interpreter, its machine code, and when it is taken.

No GPU has run the kernel. The interpreter runs its partitions in many orders and finds what no barrier orders; faults
planted in the kernel show that it does.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_bounds import as_kernels_keep, bounds
from kernel_tests import sibling, with_fault
from torch import Tensor

from benchmarks.kernels import aot
from fluxq.kernels import dispatch, findings, launch
from fluxq.kernels.attention import kernel, warp_specialized
from fluxq.kernels.attention import op as reference
from fluxq.kernels.compare import Sample
from fluxq.kernels.dispatch import PROVEN, WARPS_APART, accepted_files
from fluxq.kernels.gluon_interpreter import Fault, scheduled
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.plans import watched

portable = sibling("test_attention_kernel", "warps")
SCALE = portable.SCALE
Shape = tuple[int, int, int, int]  # B, S, Skv, H
SHAPES = [(1, 1, 1, 1), (1, 17, 130, 2), (2, 130, 257, 2), (1, 128, 128, 1), (1, 64, 640, 1), (1, 3, 900, 1)]
CELLS = {cell.format: cell for cell in aot.all_cells(["attention"]) if cell.format.startswith("warps")}
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # infinity and NaN are among x


@pytest.fixture(autouse=True, scope="module")
def on_the_interpreter() -> Iterator[None]:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper alone, and another GPU that it would be launched on")
    with interpreting():
        yield


def check(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape = (1, 130, 641, 2),
    d: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Tensor:
    """o of the reference's codes is within the bound of the other kernel, and bytes around it stay."""
    operands = reference.quantize_operands(*portable.inputs(*shape, d=d, dtype=dtype))
    with portable.poisoned(kernels, monkeypatch), scheduled(seed):
        o = kernels.attend(as_kernels_keep(operands), *shape[1:3], SCALE, dtype)
    assert o.shape == (shape[0], shape[1], shape[3], d) and o.dtype == dtype and o.is_contiguous()
    expected, bound = bounds(operands, *shape[1:3], SCALE, dtype)
    wrong = ~((o - expected).abs() <= bound)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"
    return o


@pytest.mark.often(4)
@pytest.mark.parametrize("d", reference.HEAD_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_within_the_bound_of_the_other_kernel(shape: Shape, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(warp_specialized, monkeypatch, shape, d)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_within_it_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(warp_specialized, monkeypatch, (2, 17, 257, 2), dtype=dtype)


@pytest.mark.slow
def test_no_order_of_what_runs_at_once_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = (check(warp_specialized, monkeypatch, seed=seed) for seed in range(8))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_and_infinity_go_where_the_references_go(name: str, value: float) -> None:
    x = dict(zip("qkv", portable.inputs(1, 130, 130, 2), strict=True))
    x[name] = x[name].clone()
    x[name][0, 3, 1, 5] = value
    found = kernel.by_warps_apart(**x, scale=SCALE, chip="sm_90")
    expected = reference.attention_fp8(**x, scale=SCALE)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()


def test_scales_that_vanish_leave_the_mean_of_the_values() -> None:
    q, k, v = portable.inputs(1, 17, 17, 2)
    operands = reference.quantize_operands(q * 1e-25, k * 1e-25, v)
    found = warp_specialized.attend(as_kernels_keep(operands), 17, 17, SCALE, torch.float32)
    torch.testing.assert_close(found, reference.attend(operands, 17, 17, SCALE, torch.float32), rtol=0, atol=1e-3)


# Faults: the text `old` (which must occur once) becomes `new`, and the check must notice, in every order.
KEYS_READ = """t = warpgroup_mma_wait(0, deps=[t])
    mbarrier.arrive(keys_free.index(s), count=1)"""
VALUES_READ = """part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(values_free.index(s), count=1)"""
LOADING = "for turn in range(0, blocks):"
FAULTS: dict[str, tuple[str, str, str]] = {
    "keys never free": ("    mbarrier.arrive(keys_free.index(s), count=1)\n", "", "deadlock"),
    "values never free": ("    mbarrier.arrive(values_free.index(s), count=1)\n", "", "deadlock"),
    "keys free before they are read": (KEYS_READ, "\n    ".join(KEYS_READ.split("\n    ")[::-1]), "is overwritten"),
    "values free before they are read": (
        VALUES_READ,
        "\n    ".join(VALUES_READ.split("\n    ")[::-1]),
        "is overwritten",
    ),
    "logits not waited for": (
        "    t = warpgroup_mma_wait(0,",
        "    t = warpgroup_mma_wait(1,",
        "before warpgroup_mma_wait",
    ),
    "sums not waited for": (
        "part = warpgroup_mma_wait(0,",
        "part = warpgroup_mma_wait(1,",
        "before warpgroup_mma_wait",
    ),
    "keys free for one group": (
        "mbarrier.init(keys_free.index(s), count=2)",
        "mbarrier.init(keys_free.index(s), count=1)",
        "is overwritten|deadlock",
    ),
    "keys free for three groups": (
        "mbarrier.init(keys_free.index(s), count=2)",
        "mbarrier.init(keys_free.index(s), count=3)",
        "deadlock",
    ),
    "a second arrival": (
        "mbarrier.arrive(values_free.index(s), count=1)",
        "mbarrier.arrive(values_free.index(s), count=3)",
        "beyond the 2",
    ),
    "a barrier not made": ("        mbarrier.init(values_loaded.index(s), count=1)\n", "", "before mbarrier.init"),
    "keys not waited for": ("    mbarrier.wait(keys_loaded.index(s), phase)\n", "", "nobody wrote|being overwritten"),
    "values not waited for": (
        "    mbarrier.wait(values_loaded.index(s), phase)\n",
        "",
        "nobody wrote|being overwritten",
    ),
    "queries not waited for": ("    mbarrier.wait(queries_loaded, 0)\n", "", "nobody wrote|being overwritten"),
    "keys of the last phase": (
        "mbarrier.wait(keys_loaded.index(s), phase)",
        "mbarrier.wait(keys_loaded.index(s), phase ^ 1)",
        "nobody wrote|being overwritten|deadlock",
    ),
    "values of the first phase": (
        "mbarrier.wait(values_loaded.index(s), phase)",
        "mbarrier.wait(values_loaded.index(s), 0)",
        "being overwritten|deadlock",
    ),
    "keys loaded without leave": ("        mbarrier.wait(keys_free.index(s), phase ^ 1)\n", "", "is overwritten"),
    "values loaded without leave": ("        mbarrier.wait(values_free.index(s), phase ^ 1)\n", "", "is overwritten"),
    "keys never loaded": (
        "mbarrier.wait(keys_free.index(s), phase ^ 1)",
        "mbarrier.wait(keys_free.index(s), phase)",
        "deadlock",
    ),
    "bytes that never come": (
        "mbarrier.expect(keys_loaded.index(s), k.block_type.nbytes)",
        "mbarrier.expect(keys_loaded.index(s), k.block_type.nbytes + 16)",
        "deadlock",
    ),
    "one barrier for both": (
        "values_loaded.index(s), values.index(s))",
        "keys_loaded.index(s), values.index(s))",
        "deadlock",
    ),
    "keys into one buffer": (
        "keys_loaded.index(s), keys.index(s))",
        "keys_loaded.index(s), keys.index(0))",
        "is overwritten",
    ),
    "one block too few": (LOADING, "for turn in range(0, blocks - 1):", "deadlock"),
    "one block too many": (LOADING, "for turn in range(0, blocks + 1):", "nobody waits for 2 of 15"),
    "phases of other turns": (
        "        phase = (turn // STAGES) & 1\n        mbarrier.wait(keys_free",
        "        phase = turn & 1\n        mbarrier.wait(keys_free",
        "deadlock|is overwritten",
    ),
    "no mask of keys": ("    if MASKED:", "    if False:", "differ"),
    "no first block": ("        first = 1\n", "        first = 2\n", "nobody waits|deadlock"),
    "blocks by turn": ("block = gl.where(turn == 0, blocks, turn) - 1", "block = turn", "differ"),
    "scales by turn": ("gl.load(k_scale + block)", "gl.load(k_scale + turn)", "differ"),
    "both the upper half": ("queries.slice(HALF * M, M, 0)", "queries.slice(0, M, 0)", "differ"),
    "queries of another head": ("copy_block(q, [place * (2 * M), 0]", "copy_block(q, [0, 0]", "differ"),
    "values of another head": ("copy_block(v, [head * D,", "copy_block(v, [0,", "differ"),
    "sums not corrected": ("total = total * correction + ", "total = total + ", "differ"),
    "products not corrected": ("* correction[:, None], part)", "* 1.0, part)", "differ"),
    "weights in their own order": (".permute((0, 1, 3, 2, 4))", "", "differ"),
    "no mask of queries": ("mask=(tokens < S)[:, None])", "mask=(tokens >= 0)[:, None])", "differ|outside every"),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_turns_its_check_red(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, message = FAULTS[fault]
    faulty = with_fault(warp_specialized, old, new, tmp_path)
    for seed in range(3):
        with pytest.raises((AssertionError, Fault, IndexError), match=message):
            check(faulty, monkeypatch, seed=seed)


@pytest.mark.parametrize("version", PROVEN)
def test_the_accepted_rows_are_what_it_is_for(version: str) -> None:
    """A loop no longer than the other kernel's, a wait for each of its two products, nothing that ptxas serializes."""
    rows = {row["format"]: row for _, row in accepted_files(version) if row["kernel"] == "attention_warps_kernel"}
    assert {row["target"] for row in rows.values()} == {"sm_90"} and rows.keys() == CELLS.keys()
    for name, row in rows.items():
        assert row["ok"] and row["loop"] <= 480
        assert row["waits"] == (0.25 if name.startswith("warps-128") else 0.33)  # 2, of 8 or 6 matrix instructions
        assert row["spills"] == 0 and row["remarks"] == "" and "QGMMA" in row["instruction"]


REFUSALS = {
    "another chip": ("fp8", 64, "sm_100", torch.bfloat16, "never compiled for heads of 64 on sm_100"),
    "other heads": ("fp8", 96, "sm_90", torch.bfloat16, "never compiled for heads of 96"),
    "other codes": ("int8", 64, "sm_90", torch.bfloat16, "not int8 of bfloat16"),
    "another dtype": ("fp8", 64, "sm_90", torch.float16, "not fp8 of float16"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_calls_that_it_does_not_take_are_refused(case: str) -> None:
    codes, size, chip, dtype, why = REFUSALS[case]
    assert why in dispatch.warps_refusal(codes, size, chip, dtype)
    x = torch.zeros(1, 4, 1, 64, dtype=dtype)
    if size == 64:
        with pytest.raises(dispatch.NoKernel, match=why):
            kernel.by_warps_apart(x, x, x, None, codes, chip=chip)


def test_a_triton_that_never_compiled_it_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dispatch.warps_refusal("fp8", 64, "sm_90", torch.bfloat16)
    monkeypatch.setattr(dispatch.triton, "__version__", "3.7.1")
    assert "never compiled with Triton 3.7, only with 3.6" in dispatch.warps_refusal("fp8", 64, "sm_90", torch.bfloat16)


def test_a_row_that_is_not_ok_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"format": "warps-64 128x128 ragged", "target": "sm_90", "ok": False, "reason": "4 spills"}
    monkeypatch.setattr(dispatch, "accepted_files", lambda version: [("attention", row)])
    dispatch._refusals.cache_clear()
    try:
        assert dispatch.warps_refusal("fp8", 64, "sm_90", torch.bfloat16) == "4 spills"
    finally:
        dispatch._refusals.cache_clear()


OURS = "attention_fp8"
Q, K, V = portable.inputs(2, 70, 130, 2)


def document(us: dict[str, float | None], why: str = "") -> dict[str, Any]:
    """A file of doctor's with the times of attention of a shape, of which those of the kernel may be wrong."""
    gpu = {"gpu": "NVIDIA H200", "chip": "sm_90", "driver": "1", "fluxq": "1", "torch": "1", "triton": "1"}
    row = {"format": "64", "scheme": "attention 64", "m": 140, "n": 128, "k": 130, "share": 0.5}
    return findings.document(gpu, [row | {"op": op, "us": t, "why": why * (op != OURS)} for op, t in us.items()])


CASES: dict[str, tuple[dict[str, float | None], str, str]] = {
    "faster": ({OURS: 30.0, WARPS_APART: 20.0}, "", WARPS_APART),
    "slower": ({OURS: 20.0, WARPS_APART: 30.0}, "", OURS),
    "wrong": ({OURS: 30.0, WARPS_APART: 20.0}, "errors of heads", OURS),
    "not timed": ({OURS: 30.0, WARPS_APART: None}, "", OURS),
    "never judged": ({}, "", OURS),
    "timed without ours": ({OURS: None, WARPS_APART: 20.0}, "", OURS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_taken_where_doctor_found_it_right_and_faster(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    us, why, expected = CASES[case]
    called: list[str] = []
    attend = warp_specialized.attend
    monkeypatch.setattr(warp_specialized, "attend", lambda *x: called.append("apart") or attend(*x))
    with findings.instead(document(us, why)):
        dispatch.forget()
        assert kernel.cells(Q, K, V, None, chip="sm_90") == ((expected, "64"),)
        found = launch.launcher(OURS)(Q, K, V, None, chip="sm_90")
        assert bool(called) == (expected == WARPS_APART)
        assert not kernel.compare(found, Q, K, V, None, chip="sm_90", sample=Sample()).is_wrong
        assert kernel.compare(found.roll(1, 1), Q, K, V, None, chip="sm_90", sample=Sample()).is_wrong
    dispatch.forget()


@pytest.mark.parametrize("here", [{}, {OURS: None, WARPS_APART: None}], ids=["never judged", "never timed"])
def test_times_of_other_gpus_do_not_choose_it(here: dict[str, float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_shipped", lambda: (document({OURS: 30.0, WARPS_APART: 20.0}),))
    with findings.instead(document(here)):
        dispatch.forget()
        assert dispatch.choose_attention("fp8", 64, "sm_90", 140, 128, 130, Q.dtype).implementation == OURS


@pytest.mark.slow
def test_a_call_of_it_has_no_plan() -> None:
    operands = q, k, v = Q.clone(), K.clone(), V.clone()
    found, plan = watched(lambda: kernel.by_warps_apart(q, k, v, None, chip="sm_90"), operands)
    assert plan is None and torch.equal(found, kernel.by_warps_apart(Q, K, V, None, chip="sm_90"))
