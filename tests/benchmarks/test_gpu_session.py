"""The session on a GPU without one: its stages, what they judge, and what is concluded from them.

What needs minutes of interpreting runs once, as a dry run of the whole script, marked slow.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import torch
import triton
import triton.language as tl
from click.testing import CliRunner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks import sources
from benchmarks.kernels import on_gpu, same_bits, tune, workloads
from benchmarks.kernels.on_gpu import launching_on
from fluxq.kernels import tiles
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import MatmulTile, Tile, find_tile

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_session.py"
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def load_session() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_session", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_session"] = module  # dataclasses look there
    path = sys.path.copy()
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


session = load_session()


# --- kernels on copies


@triton.jit
def double_kernel(x, y, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < N, other=0.0), mask=at < N)


def test_a_launch_on_copies_writes_what_one_on_the_originals_writes() -> None:
    memory = torch.arange(32.0)
    with interpreting(), launching_on(CPU):
        double_kernel[(1,)](memory[4:9], memory[20:25], 5, BLOCK=8)
    expected = torch.arange(32.0)
    expected[20:25] = 2 * expected[4:9]
    assert torch.equal(memory, expected)


def test_every_storage_is_copied_whole_and_once_and_copied_back(monkeypatch) -> None:
    seen: dict[str, Any] = {}

    def launch(kernel: object, *args: Any, **options: Any) -> str:
        seen["args"], seen["options"] = args, options
        args[0].fill_(7.0)
        whole = torch.empty(0).set_(args[1].untyped_storage())
        whole[0] = -1.0  # outside of every argument, as a kernel with a fault would
        return "compiled"

    monkeypatch.setattr(JITFunction, "run", launch)
    memory, other = torch.zeros(64), torch.ones(8, 16, dtype=torch.bfloat16)
    view, turned = memory[8:24].view(4, 4), memory[32:48].view(4, 4).t()
    with launching_on(CPU):
        left = TensorDescriptor.from_tensor(other, [4, 8])
        result = double_kernel[(3,)](view, turned, left, None, 5, (view, 2), y=other)
    x, y, descriptor, nothing, five, pair = seen["args"]
    assert result == "compiled" and nothing is None and five == 5 and pair[1] == 2
    assert x.data_ptr() != view.data_ptr() and (x.shape, x.stride()) == (view.shape, view.stride())
    assert y.stride() == (1, 4) and y.data_ptr() - x.data_ptr() == turned.data_ptr() - view.data_ptr()
    assert x.untyped_storage().nbytes() == memory.nbytes and pair[0].data_ptr() == x.data_ptr()
    assert descriptor.base.data_ptr() == seen["options"]["y"].data_ptr() != other.data_ptr()
    assert descriptor.block_shape == [4, 8] and seen["options"]["grid"] == (3,)
    assert (view == 7).all() and memory[0] == -1 and (other == 1).all()


def test_after_the_block_launches_are_as_before_even_if_it_raises() -> None:
    before = JITFunction.run
    with pytest.raises(ZeroDivisionError), launching_on(CPU):
        assert JITFunction.run is not before
        raise ZeroDivisionError
    assert JITFunction.run is before


@pytest.mark.gpu
def test_a_gpu_computes_on_copies_of_cpu_tensors() -> None:
    memory = torch.arange(32.0)
    with launching_on(torch.device("cuda")):
        double_kernel[(1,)](memory[4:9], memory[20:25], 5, BLOCK=8)
    assert memory[20:25].tolist() == [8, 10, 12, 14, 16] and memory[25] == 25


@dataclass
class Item:
    name: str
    path: str = "a.py"

    @property
    def nodeid(self) -> str:
        return self.name


class Config:
    """Stand-in for pytest's config, with what the plugin asks of it."""

    def __init__(self, **options: Any) -> None:
        self.options, self.deselected = options, []
        self.hook = self

    def getoption(self, name: str) -> Any:
        return self.options.get(name.removeprefix("--").replace("-", "_"))

    def pytest_deselected(self, items: list[Item]) -> None:
        self.deselected = items


def test_shards_share_out_all_tests_but_those_that_plant_faults(tmp_path) -> None:
    names = ["test_a", "test_a_fault_in_x[1]", "test_b", "test_outside_the_interpreter_cpu", "test_c"]
    found = []
    for shard in ("0/2", "1/2"):
        items = [Item(name) for name in names]
        config = Config(shard=shard, outcomes=tmp_path / "lines")
        on_gpu.pytest_collection_modifyitems(config, items)
        found.append([item.name for item in items])
        assert {item.name for item in config.deselected} == set(names) - set(found[-1])
    assert found == [["test_a", "test_c"], ["test_b"]]
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["test"] for line in lines] == ["test_a", "test_c", "test_b"]
    assert {line["outcome"] for line in lines} == {"not run"}


def test_a_gpu_skips_tests_of_other_chips_and_of_what_it_is_not_offered(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(on_gpu, "chip_of", lambda device: "sm_90")
    with on_gpu._launching(CPU), on_gpu._launching(CPU, "sm_90"):
        pass
    with (
        pytest.raises(pytest.skip.Exception, match="it is for sm_100, this is sm_90"),
        on_gpu._launching(CPU, "sm_100"),
    ):
        pass
    items = [Item("test_a", "test_block_scaled_matmul_kernel.py"), Item("test_b")]
    on_gpu.pytest_collection_modifyitems(Config(on_device="cuda", shard="0/1", outcomes=tmp_path / "lines"), items)
    assert [item.name for item in items] == ["test_b"]


# --- bytes


def test_the_interpreters_bytes_are_compared_and_counted(tmp_path) -> None:
    answers = iter([torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -torch.nan])])
    same = same_bits.against_interpreter(same_bits.Exact("same", lambda chip: next(answers)), CPU, "sm_90")
    assert same["ok"] and same["differ"] == 0 and same["interpreter"] == same["device"]
    answers = iter([torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])])
    other = same_bits.against_interpreter(same_bits.Exact("other", lambda chip: next(answers)), CPU, "sm_90")
    assert not other["ok"] and other["differ"] == 1 and other["interpreter"] != other["device"]


def test_codes_of_blocks_of_nan_may_be_any_and_others_not() -> None:
    x = torch.ones(2, 64)
    x[1, 40] = torch.nan
    q = QuantizedTensor(*(t.clone() for t in _mxfp8(x)), None, (2, 64), same_bits.FORMATS["mxfp8"])
    codes = q.codes.view(torch.uint8).clone()
    codes[1, 33] = 99
    within = QuantizedTensor(codes.view(torch.float8_e4m3fn), q.scale, None, q.shape, q.format)
    codes = codes.clone()
    codes[1, 3] = 99
    outside = QuantizedTensor(codes.view(torch.float8_e4m3fn), q.scale, None, q.shape, q.format)
    hashes = [same_bits._hash(same_bits.canonical(result)) for result in (q, within, outside)]
    assert hashes[0] == hashes[1] != hashes[2]


def _mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from fluxq.kernels import ops

    q = ops.quantize_activation(x, same_bits.FORMATS["mxfp8"])
    return q.codes, q.scale


def test_awkward_input_holds_every_bfloat16_number() -> None:
    x = same_bits.awkward()
    assert x.shape == (32, 4096) and x[16:].isfinite().all()
    assert torch.equal(x[:16].view(torch.int16).flatten(), torch.arange(2**16, dtype=torch.int32).to(torch.int16))


def test_bytes_of_a_dry_run_agree_and_what_differs_ends_in_an_error(tmp_path, monkeypatch) -> None:
    file = tmp_path / "found.json"
    run = ["interpreter", "--dry-run", "--json", str(file), "--shard", "1/3"]
    assert CliRunner().invoke(same_bits.main, run, catch_exceptions=False).exit_code == 0
    found = json.loads(file.read_text())
    assert found["complete"] and found["cases"] and all(row["ok"] and row["bytes"] for row in found["cases"])
    monkeypatch.setattr(same_bits, "exact_calls", lambda x: [same_bits.Exact("broken", lambda chip: 1 / 0)])
    done = CliRunner().invoke(same_bits.main, ["interpreter", "--dry-run", "--json", str(file)])
    assert done.exit_code == 1 and "ZeroDivisionError" in done.output
    assert json.loads(file.read_text())["cases"][0] == {
        "case": "broken",
        "ok": False,
        "reason": "ZeroDivisionError: division by zero",
    }


def test_a_result_that_changes_from_run_to_run_is_found(monkeypatch) -> None:
    results = iter(torch.ones(4) + i / 1000 for i in range(100))
    work = workloads.Work(lambda: next(results), lambda: torch.ones(4), 0.0, 16, None)
    monkeypatch.setattr(workloads, "prepare", lambda *_: work)
    row = same_bits.run_to_run((workloads.BASELINE, (4, 4, 4)), CPU, "sm_90", 10)
    assert not row["ok"] and row["different"] == 10
    steady = workloads.Work(lambda: torch.ones(4), lambda: torch.ones(4), 0.0, 16, None)
    monkeypatch.setattr(workloads, "prepare", lambda *_: steady)
    assert same_bits.run_to_run((workloads.BASELINE, (4, 4, 4)), CPU, "sm_90", 10)["ok"]


@pytest.mark.slow
def test_a_kernel_that_crashes_takes_no_other_s_proof_with_it(tmp_path) -> None:
    file = tmp_path / "first.0.json"
    calls = [(workloads.BASELINE, "_exit"), (workloads.ACTS[0], "getpid"), (workloads.ACTS[1], "never")]
    outcomes = [3, 0, ZeroDivisionError("reached")]

    def outcome_of(case: tuple[workloads.Case, str]) -> dict[str, Any]:
        written = json.loads(file.read_text())
        assert len(written["cases"]) + len(written["left"]) == 3 and not written["complete"]
        status = outcomes[len(written["cases"])]
        if isinstance(status, Exception):
            raise status
        return same_bits.apart(os._exit, status, seconds=60) if status else {"case": case[0].name, "ok": True}

    with pytest.raises(click.exceptions.Exit):
        same_bits._each(calls, outcome_of, file, "0/1")
    found = json.loads(file.read_text())
    assert [row["ok"] for row in found["cases"]] == [False, True, False] and found["complete"]
    assert "exit code 3" in found["cases"][0]["reason"]


def test_a_kernel_is_proven_where_all_its_shapes_were_right_and_none_is_left(tmp_path) -> None:
    ours, blocks = workloads.ACTS[1], workloads.Case("matmul", "nvfp4-nvfp4", "block_scaled_matmul")
    right, wrong = {"case": ours.name, "ok": True, "error": 0.0}, {"case": ours.name, "ok": False, "error": 0.5}
    refused = {"case": blocks.name, "ok": True, "left_out": "no matrix unit"}

    def why(*rows: dict[str, Any], left: tuple[str, ...] = ()) -> str:
        (tmp_path / "first.0.json").write_text(json.dumps({"cases": rows[:1], "left": []}))
        (tmp_path / "first.1.json").write_text(json.dumps({"cases": rows[1:], "left": left}))
        return same_bits.not_proven([ours, blocks], tmp_path, "sm_90").removeprefix(
            f"{ours.name} is not proven right: "
        )

    assert why(right, refused) == why(right, right, refused) == why(right) == ""  # Hopper is not offered the other
    assert why(right, wrong) == why(wrong, right) == "relative error 0.5"
    assert why(right, left=(ours.name,)) == "it was not reached" and why(refused) == "it was not tried"
    assert why({"case": ours.name, "ok": True, "left_out": "out of memory"}) == "out of memory"
    why(right, refused)
    assert same_bits.not_proven([blocks], tmp_path, "sm_100").endswith("not proven right: no matrix unit")


# --- tiles


@pytest.mark.parametrize("search", tune.SEARCHES, ids=lambda s: f"{s.kernel} {s.format} {s.max_m}")
def test_searches_are_of_tiles_that_the_tables_hold(search: tune.Search) -> None:
    chip = "sm_100" if search.kernel == "block_scaled_matmul" else "sm_90"
    base = tune._base(search, chip)
    assert all(m <= (search.max_m or m) for m, _, _ in search.shapes)
    for changes in search.tiles:
        tile = tune._changed(base, changes)
        if isinstance(tile, MatmulTile) and tile.acc_split:
            several = tile.acc_split % tile.k == 0 and tile.descriptors
            assert tile.k % tile.acc_split == 0 or several
    for name in search.also:
        assert find_tile(search.kernel, name, chip, 1) is not None


def timed(best: Tile | MatmulTile, search: tune.Search, dry_run: bool = False) -> dict[str, Any]:
    row = {"search": tune.SEARCHES.index(search), "best": tune._plain(best)}
    return {"chip": "sm_90", "dry_run": dry_run, "device": {"gpu": "NVIDIA H200"}, "searches": [row]}


def test_the_best_tile_is_taken_on_its_chip_up_to_its_tokens_and_nowhere_else(tmp_path) -> None:
    search = next(s for s in tune.SEARCHES if s.kernel == "scaled_matmul" and s.format == "fp8" and s.max_m == 64)
    best = MatmulTile(16, 256, 64, 8, 5, acc_split=64)
    before = {(chip, m): find_tile("scaled_matmul", "fp8", chip, m) for chip in ("sm_89", "sm_90") for m in (1, 64, 65)}
    tune.write_tuned(timed(best, search), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in tiles.TUNED.glob("*.json"))
    with tune.tuned_from(tmp_path):
        assert find_tile("scaled_matmul", "fp8", "sm_90", 64) == best
        assert find_tile("scaled_matmul", "fp8_tensor", "sm_90", 1) == best
        assert find_tile("scaled_matmul", "fp8", "sm_90", 65) == before["sm_90", 65]
        assert find_tile("scaled_matmul", "fp8", "sm_89", 64) == before["sm_89", 64]
        row = next(row for row in tiles.tuned_rows("scaled_matmul") if row.tile == best)
        assert row.measured == "NVIDIA H200" and row.chips == ("sm_90",)
    assert find_tile("scaled_matmul", "fp8", "sm_90", 64) == before["sm_90", 64]


def test_rows_that_are_replaced_for_a_chip_are_gone_for_it_alone() -> None:
    front = [{"format": "fp8", "max_m": 64}]
    left = tune._without(front, "sm_90")
    assert left({"format": "fp8", "chips": ["sm_90"], "max_m": 64}) is None
    assert left({"format": "fp8", "chips": ["sm_90", "sm_100"], "max_m": 16})["chips"] == ["sm_100"]
    for kept in (
        {"format": "fp8", "chips": ["sm_90"]},
        {"format": "int8", "chips": ["sm_90"], "max_m": 64},
        {"format": "fp8", "max_m": 64},
    ):
        assert left(kept) is kept


def test_no_tile_is_chosen_by_a_dry_run(tmp_path) -> None:
    with pytest.raises(ValueError, match="timings of a dry run"):
        tune.write_tuned(timed(Tile(1, 64, 1), tune.SEARCHES[0], dry_run=True), tmp_path)


@pytest.mark.slow
def test_candidates_are_compiled_checked_and_timed(tmp_path) -> None:
    tried, timings = tmp_path / "tried.json", tmp_path / "timed.json"
    for arguments in (
        ["try", "--dry-run", "--json", str(tried)],
        ["time", "--dry-run", "--json", str(timings), str(tried)],
    ):
        assert CliRunner().invoke(tune.main, arguments, catch_exceptions=False).exit_code == 0
    rows = json.loads(tried.read_text())
    assert rows["complete"] and [row["fit"] for row in rows["candidates"]] == [True, True]
    found = json.loads(timings.read_text())
    (search,) = found["searches"]
    assert found["dry_run"] and len(search["tiles"]) == 2 and search["best"] in [row["tile"] for row in search["tiles"]]


def test_the_best_tile_is_the_fastest_over_all_shapes(monkeypatch) -> None:
    fit = [MatmulTile(64, 64, size, 4, 3) for size in (32, 64, 128)]
    work = workloads.Work(lambda: None, lambda: torch.ones(1), 0.0, 1, None)
    monkeypatch.setattr(workloads, "prepare", lambda *_: work)
    shapes = iter(({"0": 3.0, "1": 2.0, "2": 1.0}, {"0": 3.0, "1": 2.0, "2": 5.0}))
    monkeypatch.setattr(
        tune.timing, "measure", lambda *_: {n: tune.timing.Times(us, 0, 0, 2) for n, us in next(shapes).items()}
    )
    found = tune.time_search(tune.SEARCHES[0], fit, CPU, "sm_90", 2)
    assert tune.tile_of(found["best"]) == fit[1] and [row["us"] for row in found["tiles"]][2] == [1.0, 5.0]


def test_a_search_that_fails_is_named_and_tried_again_and_those_that_are_done_stay(tmp_path, monkeypatch) -> None:
    one, tried, timings = tune.searches(True)[0], tmp_path / "tried.json", tmp_path / "timed.json"
    monkeypatch.setattr(tune, "searches", lambda dry_run: (one,) * 3)
    tiles_of: list[list[Tile]] = [[Tile(1, 64, 1)], [Tile(1, 64, 2)], [Tile(1, 64, 4)]]
    timed: list[int] = []  # searches

    def time_search(search: Any, fit: list, *_: Any) -> dict[str, Any]:
        timed.append(tiles_of.index(fit))
        if timed == [0, 1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"tiles": [{"tile": tune._plain(tile)} for tile in fit]}

    monkeypatch.setattr(tune, "time_search", time_search)

    def run() -> dict[str, Any]:
        rows = [
            {"search": number, "fit": True, "tile": dataclasses.asdict(tile)}
            for number, fit in enumerate(tiles_of)
            for tile in fit
        ]
        tried.write_text(json.dumps({"candidates": rows}))
        arguments = ["time", "--dry-run", "--json", str(timings), str(tried)]
        assert CliRunner().invoke(tune.main, arguments, catch_exceptions=False).exit_code == 0
        return json.loads(timings.read_text())

    found = run()
    assert timed == [0, 1, 2] and [row["search"] for row in found["searches"]] == [0, 2] and not found["complete"]
    assert found["failed"] == [{"search": 1, "reason": "OutOfMemoryError: CUDA out of memory"}]
    found = run()
    assert timed[3:] == [1] and [row["search"] for row in found["searches"]] == [0, 2, 1] and found["complete"]
    tiles_of[2] = [Tile(1, 64, 4), Tile(1, 64, 8)]  # another was found fit meanwhile
    assert len(run()["searches"]) == 3 and timed[4:] == [2]
    monkeypatch.setattr(tune, "sources", lambda: "others")
    assert len(run()["searches"]) == 3 and timed[5:] == [0, 1, 2]


@pytest.mark.often(2)
@pytest.mark.parametrize("search", tune.SEARCHES[::-1], ids=lambda s: f"{s.kernel} {s.format} {s.max_m}")
def test_each_candidate_is_timed_at_its_own_tile(search: tune.Search, monkeypatch) -> None:
    """Launches of timed calls, by sizes of blocks, warps and stages, are others for every tile."""
    chip = "sm_100" if search.kernel == "block_scaled_matmul" else "sm_90"
    base = tune._base(search, chip)
    fit = list(dict.fromkeys([base, *(tune._changed(base, changes) for changes in search.tiles)]))
    launched: list[Any] = []

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kinds = int, MatmulTile, Tile
        launched.append((grid, {name: each for name, each in options.items() if isinstance(each, kinds)}))

    def measure(calls: dict, *_: Any) -> dict[str, tune.timing.Times]:
        for number, sets in calls.items():
            launched.clear()
            sets[0]()
            seen[fit[int(number)]] = repr(launched)
            warps = {options["num_warps"] for _, options in launched}
            assert fit[int(number)].warps in warps
        return {number: tune.timing.Times(1.0, 1.0, 1.0, 2) for number in calls}

    seen: dict[Any, str] = {}
    monkeypatch.setattr(tune.timing, "measure", measure)
    monkeypatch.setattr(workloads.dispatch, "compiled_with", lambda: "3.6")
    small = dataclasses.replace(search, shapes=((search.max_m or 128, 256, 256),))
    monkeypatch.setattr(workloads, "_size", lambda *_: 0)  # whose calls are those of a builder
    with interpreting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        tune.time_search(small, fit, CPU, chip, 2)
    assert len(set(seen.values())) == len(fit)


def test_a_candidate_that_does_not_compile_well_or_computes_wrongly_is_unfit(monkeypatch) -> None:
    candidate = next(tune.candidates("sm_90", dry_run=True))
    cells = tune.aot.all_cells()
    row = tune.aot.CompiledCell("dequantize_kernel", "nvfp4", "sm_90", reason="7 spills")
    monkeypatch.setattr(tune, "apart", lambda call, *arguments, seconds: call(*arguments))
    monkeypatch.setattr(tune.aot, "compile_cell", lambda *_: row)
    found = tune.try_candidate(candidate, CPU, "sm_90")
    assert not found["fit"] and "7 spills" in found["reason"]
    monkeypatch.setattr(tune.aot, "compile_cell", lambda *_: tune.aot.CompiledCell("k", "nvfp4", "sm_90", ok=True))
    monkeypatch.setattr(workloads, "error", lambda work: float("nan"))
    found = tune.try_candidate(candidate, CPU, "sm_90")
    assert not found["fit"] and "relative errors [nan]" in found["reason"]
    assert tune.aot.all_cells() == cells, "a candidate's tiles are left behind"


# --- stages


def stage(name: str, code: str, judged: dict[str, Any] | Callable, weight: float = 1.0) -> Any:
    """A stage of one Python process."""
    judge = judged if callable(judged) else lambda _: {"right": True, "complete": True, "about": name} | judged
    return session.Stage(name, weight, lambda s, seconds: [[sys.executable, "-S", "-c", code]], judge)


@pytest.fixture
def dry(tmp_path) -> Any:
    (tmp_path / "stages").mkdir()
    return session.Session(tmp_path, dry_run=True)


@pytest.mark.slow
def test_a_stage_that_crashes_hangs_or_leaves_nothing_takes_no_other_with_it(dry) -> None:
    def unreadable(_: object) -> dict:
        raise FileNotFoundError("tests.0.json")

    stages = [
        stage("crashes", "import os; os.abort()", {}),
        stage("hangs", "import time; print('begun', flush=True); time.sleep(60)", {"right": None}),
        stage("wrong", "raise SystemExit(1)", {"right": False}),
        stage("raises", "1 / 0", {}),
        stage("silent", "", unreadable),
        stage("partial", "", {"complete": False}),
        stage("well", "print('all well')", {}),
        session.Stage("absent", 1.0, lambda s, seconds: [], lambda s: {"about": "no such tool"}),
    ]
    found = session.run_stages(dry, stages, seconds=16)
    verdicts = {row["stage"]: row["verdict"] for row in found["stages"]}
    assert verdicts == {
        "crashes": "crashed",
        "hangs": "incomplete",
        "wrong": "wrong",
        "raises": "crashed",
        "silent": "crashed",
        "partial": "incomplete",
        "well": "right",
        "absent": "not here",
    }
    log = (dry.out / "log.txt").read_text()
    assert "begun" in log and "ZeroDivisionError" in log and "all well" in log
    written = json.loads((dry.out / "results.json").read_text())
    assert [row["stage"] for row in written["stages"]] == list(verdicts)
    assert "out of time" in written["stages"][1]["about"] and "-6" in written["stages"][0]["about"]
    assert written["dry_run"] and written["commit"] and written["device"]["torch"] == torch.__version__


def test_a_stage_may_run_again_and_the_others_stay(dry) -> None:
    for run in ("first", "second"):
        only = [stage("a", f"print('{run} a')", {"about": run})]
        only += [stage("b", "", {"about": run})] if run == "first" else []
        kept = session.forget(dry, only)
        for name in ("a", "b"):
            if any(s.name == name for s in only):
                dry.file(name).write_text("{}")
        found = session.run_stages(dry, only, 20.0, kept)
    assert {row["stage"]: row["about"] for row in found["stages"]} == {"a": "second", "b": "first"}
    assert dry.file("b").exists() and "second a" in (dry.out / "log.txt").read_text()
    (dry.out / "results.json").write_text(json.dumps(found | {"sources": "others"}))
    assert session.forget(dry, only) == [] and not dry.file("b").exists()


def test_other_sources_or_tiles_are_told_apart_without_git(tmp_path, monkeypatch) -> None:
    package = tmp_path / "fluxq"
    for name in ("kernels/tuned/dequantize.json", "kernels/launch.py", "cli.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("[]")
    monkeypatch.setattr(sources.fluxq, "__file__", str(package / "__init__.py"))
    seen = [sources.sources.__wrapped__()]
    for path in (package / "kernels" / "tuned" / "dequantize.json", package / "cli.py"):
        path.write_text("[1]")
        seen.append(sources.sources.__wrapped__())
    (package / "kernels" / "notes.txt").write_text("no code")
    assert len(set(seen)) == 3 and sources.sources.__wrapped__() == seen[-1]


def test_what_is_collected_is_few_files_that_another_call_can_go_on_from(tmp_path) -> None:
    (tmp_path / "found" / "stages").mkdir(parents=True)
    dry = session.Session(tmp_path / "found", dry_run=True, collect=tmp_path / "few" / "files")
    for name in ("rates", "step"):
        dry.file(name).write_text(json.dumps({"rows": [], "peaks": {}}))
    seen = stage("seen", f"import os; assert len(os.listdir({str(dry.collect)!r})) == 4", {})
    found = session.run_stages(dry, [stage("a", "print('a')", {}), seen], 20.0)
    assert [row["verdict"] for row in found["stages"]] == ["right", "right"]
    names = {"results.json", "rates.json", "flux_step.json", "session.tar.gz"}
    assert {path.name for path in dry.collect.iterdir()} == names
    elsewhere = session.Session(tmp_path / "elsewhere", dry_run=True)
    session.shutil.unpack_archive(dry.collect / "session.tar.gz", elsewhere.out)
    stages = [session.Stage(name, 1.0, None, None) for name in ("a", "b")]
    assert [stage.name for stage in session.unfinished(elsewhere, stages)] == ["b"]
    assert (elsewhere.out / "stages" / "a.0.log").read_text() == "a\n"
    dry.file("step").unlink()
    session.conclude(dry, found)
    session.collect(dry)
    assert {path.name for path in dry.collect.iterdir()} == names - {"flux_step.json"}


def test_a_step_is_of_the_same_tiles_in_every_call(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "missing_packages", lambda: [])
    real = session.Session(tmp_path, dry_run=False)
    (tmp_path / "stages").mkdir()
    before = session._step(real, 60.0)
    real.file("time").write_text(json.dumps(timed(Tile(1, 2048, 4), tune.SEARCHES[8])))
    assert session._step(real, 60.0) == before


def test_without_time_a_stage_is_not_begun(dry) -> None:
    found = session.run_stages(dry, [stage("late", "open('never')", {})], seconds=0.5)
    assert found["stages"][0]["verdict"] == "no time"


def test_a_stage_that_needs_more_than_its_share_leaves_it_to_the_next(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "describe", lambda device: {})
    (tmp_path / "stages").mkdir()
    shares = []
    stages = [
        session.Stage("long", 3.0, lambda s, seconds: shares.append(seconds) or [], None, least=50),
        session.Stage("short", 1.0, lambda s, seconds: shares.append(seconds) or [], lambda s: {"about": "nothing"}),
    ]
    found = session.run_stages(session.Session(tmp_path, dry_run=False), stages, seconds=40)
    assert [row["verdict"] for row in found["stages"]] == ["no time", "not here"]
    assert shares == [pytest.approx(0.9 * 40, rel=0.05)]


def test_what_is_not_done_is_done_by_another_call(dry) -> None:
    """Right, wrong and missing stages stay; one that continues finds what it left, the others begin anew."""
    verdicts = {"a": "right", "b": "incomplete", "c": "crashed", "d": "no time", "e": "not here", "f": "wrong"}
    stages = [session.Stage(name, 1.0, None, None, continues=name == "b") for name in (*verdicts, "g")]
    rows = [{"stage": name, "verdict": verdict} for name, verdict in verdicts.items()]
    for name in verdicts:
        dry.file(name).write_text("{}")
    found = {"stages": rows, "sources": session.sources(), "dry_run": True}
    (dry.out / "results.json").write_text(json.dumps(found))
    left = session.unfinished(dry, stages)
    assert [stage.name for stage in left] == ["b", "c", "d", "g"]
    kept = session.forget(dry, left, resume=True)
    assert [row["stage"] for row in kept] == ["a", "e", "f"]
    assert {file.name for file in (dry.out / "stages").iterdir()} == {"a.0.json", "b.0.json", "e.0.json", "f.0.json"}
    (dry.out / "results.json").write_text(json.dumps(found | {"sources": "others"}))
    assert session.unfinished(dry, stages) == stages
    session.forget(dry, stages, resume=True)
    assert not any((dry.out / "stages").iterdir())


def shares_of(minutes: float, spends: Callable[[str], float], tmp_path: Path, monkeypatch) -> dict[str, float]:
    """Seconds that each stage is given, where stages take this part of theirs."""
    now, shares = [0.0], {}

    def run_stage(_: Any, stage: Any, seconds: float) -> dict[str, Any]:
        shares[stage.name] = seconds
        if seconds < stage.least:
            return {"stage": stage.name, "verdict": "no time", "seconds": 0.0, "about": ""}
        now[0] += seconds * spends(stage.name)
        return {"stage": stage.name, "verdict": "right", "seconds": seconds, "about": ""}

    for name, value in {"run_stage": run_stage, "describe": lambda device: {}}.items():
        monkeypatch.setattr(session, name, value)
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    session.run_stages(session.Session(tmp_path, dry_run=False), session.STAGES, 60 * minutes)
    return shares


def test_a_first_call_measures_the_headline_and_right_comes_before_fast(tmp_path, monkeypatch) -> None:
    names = [stage.name for stage in session.STAGES]
    assert names[:4] == ["first", "doctor", "rates", "step"]
    assert max(map(names.index, (*session.PROOFS, "blocks"))) < min(map(names.index, ("try", "time", "bench")))
    minutes = next(option for option in session.main.params if option.name == "minutes").default
    assert 60 * minutes + 30 <= 600  # a call of ten minutes; processes start, files are written
    least = {stage.name: stage.least for stage in session.STAGES}
    shares = shares_of(minutes, lambda name: 1.0, tmp_path, monkeypatch)  # each takes all that it is given
    assert {name: shares[name] >= least[name] for name in names[:4]} == dict.fromkeys(names[:4], True)
    assert shares["step"] > 240 and least["step"] >= 150
    assert shares["tests"] == least["tests"] and shares["bench"] < least["bench"]  # the rest is for another call


def test_a_later_call_has_time_for_all_that_a_first_one_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "STAGES", session.STAGES[4:])
    shares = shares_of(9.25, lambda name: 1.0, tmp_path, monkeypatch)
    assert all(shares[stage.name] >= stage.least for stage in session.STAGES), shares


def test_the_tests_that_want_a_gpu_are_found() -> None:
    found = {Path(path).name for path in session.gpu_tests()}
    assert "test_fused_kernels.py::test_on_a_gpu_every_op_of_a_block_is_its_reference_too" in found
    assert any(name.startswith("test_graphs.py") for name in found)
    assert not any("test_gpu_session" in name for name in found)


def test_stages_of_whole_models_say_what_is_not_installed(dry, monkeypatch) -> None:
    monkeypatch.setattr(session, "find_spec", lambda name: None if name == "diffusers" else name)
    whole = [stage for stage in session.STAGES if stage.name in ("blocks", "step")]
    found = session.run_stages(dry, whole, 9.0)
    assert [row["verdict"] for row in found["stages"]] == ["not here"] * 2
    real = replace(dry, dry_run=False)
    assert session._doctor(real, 9.0) == [] and session._judge_doctor(real)["about"] == "not installed: diffusers"
    assert {row["about"] for row in found["stages"]} == {"not installed: diffusers"}


def test_what_doctor_found_counts_also_where_it_did_not_end(dry) -> None:
    real, file = replace(dry, dry_run=False), dry.out / "cache" / "fluxq" / "gpu.json"
    assert session._environment(real)["XDG_CACHE_HOME"] == str(dry.out / "cache")
    assert session._judge_doctor(real)["right"] is None
    file.parent.mkdir(parents=True)
    for why, right in (("", True), ("codes: 1 of 9 differ", False)):
        file.write_text(json.dumps({"rows": [{"why": ""}, {"why": why}]}))
        found = session._judge_doctor(real)
        assert (found["right"], found["complete"], len(found["wrong"])) == (right, False, bool(why))
    real.file("doctor").write_text("{}")
    assert session._judge_doctor(real)["complete"]


def test_a_step_is_judged_by_its_rows_and_says_its_goals(dry) -> None:
    goal = {"goal": "fp8", "at_least": 1.5, "measured": 1.44, "met": False, "row": "fp8, optimized"}
    found = {
        "complete": False,
        "baseline": [],
        "rows": [{"seconds": [1.0]}, {"missing": "memory"}],
        "goals": [goal, goal | {"measured": None}],
    }
    dry.file("step").write_text(json.dumps(found))
    judged = session._judge_step(dry)
    assert (judged["right"], judged["complete"]) == (True, False)
    assert judged["about"] == "1 rows, 1 missing, fp8 1.44x of 1.5x: not met"
    dry.file("step").write_text(json.dumps(found | {"rows": []}))
    assert session._judge_step(dry)["right"] is None
    lacking = {"baseline": [{"missing": "no compiler"}], "unseen": "CUPTI"}
    dry.file("step").write_text(json.dumps(found | lacking))
    assert "no baseline: no compiler, not taken apart: CUPTI" in session._judge_step(dry)["about"]
    refused = goal | {"measured": None, "refused": "pinned to cudnn, and fmha ran"}
    dry.file("step").write_text(json.dumps(found | {"goals": [refused]}))
    assert session._judge_step(dry)["about"].endswith("fp8 refused: pinned to cudnn, and fmha ran")


def test_times_of_steps_hold_as_soon_as_they_are_there_and_until_something_is_wrong(dry) -> None:
    dry.file("step").write_text('{"rows": []}')
    for first in ("right", "wrong"):  # each row has looked at what it launches
        _, files = concluded(dry, {"first": first, "step": "right", "tests": "no time"})
        assert "flux_step.json" in files and "report.md" not in files
    proofs = {"first": "wrong", "tests": "no time", "interpreter": "not run", "runs": "not run", "blocks": "not run"}
    assert json.loads((dry.out / "flux_step.json").read_text())["proofs"] == proofs
    for stage in ("tests", "blocks"):
        well, files = concluded(dry, PROVEN | {"blocks": "right"})
        assert well and "flux_step.json" in files
        well, files = concluded(dry, PROVEN | {stage: "wrong"})
        assert not well and "flux_step.json" not in files


def test_rates_are_kept_with_what_became_of_the_proofs(dry) -> None:
    dry.file("rates").write_text(json.dumps(BENCH | {"results": [{}], "peaks": {"copy": 4300.2, "bf16": 790.0}}))
    assert session._judge_rates(dry)["about"] == "1 results, 0 left out, 0 wrong, copy 4300, bf16 790"
    concluded(dry, {"first": "incomplete"})
    assert json.loads((dry.out / "rates.json").read_text())["proofs"]["first"] == "incomplete"


def test_what_may_be_concluded_is_written_after_each_stage(dry) -> None:
    rows = json.dumps({"rows": []})
    step = stage("step", f"open({str(dry.file('step'))!r}, 'w').write({rows!r})", {})
    seen = stage("seen", f"assert open({str(dry.out / 'flux_step.json')!r}).read()", {})
    found = session.run_stages(dry, [step, seen], seconds=10)
    assert [row["verdict"] for row in found["stages"]] == ["right", "right"]


BENCH = {
    "kind": session.report.__globals__["KIND"],
    "dry_run": True,
    "commit": "c",
    "chip": "sm_90",
    "device": {"gpu": "none", "torch": "2", "triton": "3"},
    "complete": True,
    "peaks": {"copy": 1.0},
    "results": [],
    "left_out": [],
    "wrong": [],
}


def concluded(dry: Any, verdicts: dict[str, str], **bench: Any) -> tuple[bool, set[str]]:
    """Conclude a session; return whether all is well, and the files that are there then."""
    dry.file("bench").write_text(json.dumps(BENCH | bench))
    rows = [{"stage": name, "verdict": verdict, "about": ""} for name, verdict in verdicts.items()]
    well = session.conclude(dry, {"dry_run": True, "stages": rows})
    return well, {path.name for path in dry.out.iterdir()} - {"stages"}


PROVEN = dict.fromkeys(session.PROOFS, "right")


def test_there_is_a_report_if_nothing_is_wrong(dry) -> None:
    well, files = concluded(dry, PROVEN | {"tests": "incomplete", "bench": "right"})
    assert well and files == {"results.json", "bench.json", "report.md"}
    assert "- tests: incomplete" in (dry.out / "report.md").read_text()
    assert "Dry run" in (dry.out / "report.md").read_text()
    goals = json.loads((dry.out / "results.json").read_text())["goals"]
    assert goals and {row["verdict"] for row in goals} == {"not measured"}


@pytest.mark.parametrize("verdict", ["wrong", "crashed", "no time", None])
@pytest.mark.parametrize("proof", ["first", "runs"])
def test_there_is_none_if_a_proof_is_wrong_or_missing(dry, proof: str, verdict: str | None) -> None:
    verdicts = {name: word for name, word in (PROVEN | {proof: verdict}).items() if word}
    well, files = concluded(dry, verdicts)
    assert not well and "report.md" not in files
    rows = [{"stage": name, "verdict": word} for name, word in verdicts.items()]
    assert session.proofs_of({"stages": rows})[proof] == (verdict or "not run")


def test_there_is_none_if_the_benchmark_found_something_wrong(dry) -> None:
    well, files = concluded(dry, PROVEN | {"bench": "wrong"}, wrong=[{"case": "x"}])
    assert not well and "report.md" not in files


def test_on_a_gpu_tables_are_left_too(tmp_path) -> None:
    (tmp_path / "stages").mkdir()
    real = session.Session(tmp_path, dry_run=False)
    real.file("time").write_text(json.dumps(timed(Tile(1, 2048, 4), tune.SEARCHES[8])))
    row = {"op": "linear", "scheme": "fp8-fp8", "implementation": "scaled_matmul", "shared": 1, "m": 1, "n": 2, "k": 3}
    row |= {"us": 1.0, "us_low": 1.0, "us_high": 1.0, "tflops": 1.0, "gb_per_s": 1.0, "mb": 1.0, "roofline": 1.0}
    well, files = concluded(real, PROVEN, dry_run=False, results=[row])
    assert well and {"tuned", "measured.json", "report.md"} <= files
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["rows"][0]["scheme"] == "fp8-fp8" and measured["machine"]["chip"] == "sm_90"


def test_what_tests_left_is_counted(dry) -> None:
    def judged(*outcomes: str) -> dict[str, Any]:
        lines = [{"test": f"t{i}", "outcome": outcome} for i, outcome in enumerate(outcomes)]
        (dry.out / "stages" / "tests.0.lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return session._judge_outcomes("tests")(dry)

    assert judged("passed", "skipped")["right"] is True
    assert judged("passed", "not run") | {"failed": 0} == {
        "right": True,
        "complete": False,
        "about": "1 passed, 0 failed, 0 skipped, 1 not run",
        "failed": 0,
    }
    assert judged("passed", "failed")["right"] is False
    assert judged()["right"] is None and judged("not run")["right"] is None


def test_the_sanitizer_is_judged_by_its_summaries(dry, monkeypatch) -> None:
    monkeypatch.setattr(session.shutil, "which", lambda name: None)
    assert session._sanitizer(dry, 9.0) == []
    assert "not available: compute-sanitizer is not on the PATH" in session._judge_sanitizer(dry)["about"]
    dry.file("sanitizer").write_text('{"why_not": ""}')
    log = dry.out / "stages" / "sanitizer.0.log"
    log.write_text("x\n========= ERROR SUMMARY: 0 errors\n")
    assert session._judge_sanitizer(dry)["right"] is True
    log.write_text("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n")
    assert session._judge_sanitizer(dry)["right"] is False
    log.write_text("killed")
    assert session._judge_sanitizer(dry)["right"] is None


def test_a_gpu_is_asked_for() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        done = CliRunner().invoke(session.main, ["--out", "never"])
    assert done.exit_code == 2 and "there is no CUDA device" in done.output and not Path("never").exists()
    done = CliRunner().invoke(session.main, ["--out", "never", "--dry-run", "--only", "everything"])
    assert done.exit_code == 2 and "no stage everything" in done.output


@pytest.mark.long
def test_the_whole_session_runs_dry(tmp_path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.json", "flux_step.json", "log.txt", "rates.json", "report.md", "results.json", "stages"
    }  # fmt: skip
    stages = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert [row["stage"] for row in stages] == [stage.name for stage in session.STAGES]
    assert {row["verdict"] for row in stages} <= {"right", "not here"}, stages
    bench = json.loads((tmp_path / "bench.json").read_text())
    assert bench["dry_run"] and bench["complete"] and bench["results"] and not bench["wrong"]
