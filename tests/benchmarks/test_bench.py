"""The benchmark's command, its statistics and its tables; times themselves are never asserted."""

import contextlib
import json
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner
from triton.runtime.jit import JITFunction

from benchmarks.kernels import bench, report, workloads
from benchmarks.kernels.report import GOALS, Figures
from benchmarks.kernels.workloads import BASELINE, Case
from fluxq.base import settings
from fluxq.eval.speed.machine import describe
from fluxq.kernels import dispatch, findings, timing
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.tiles import NoTile
from fluxq.recipes.formats import Scheme

CPU = torch.device("cpu")


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "bench.json"
    arguments = ["--cpu", "--size", "8", "64", "32", "--pairs", "3", "--json", str(file)]
    done = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    heading, line = done.output.splitlines()
    assert "speedup" in heading and line.startswith("int8-int8") and "8 x 64 x 32" in line
    written = json.loads(file.read_text())
    (result,) = written["results"]
    assert (result["name"], result["baseline"], result["shape"]) == ("int8-int8", "bf16", [8, 64, 32])
    assert result["pairs"] == 3
    assert 0 < result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert result["ours_ms"] > 0 and result["baseline_ms"] > 0
    assert written["threads"] == 1 and {"torch", "machine"} <= set(written["versions"]) and written["commit"]


def test_without_a_gpu_another_way_must_be_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(bench.main, [])
    assert done.exit_code == 2 and "--cpu" in done.output and "--dry-run" in done.output


def test_the_ratio_is_taken_pair_by_pair():
    seconds = [(1.0, 2.0), (10.0, 30.0), (1.0, 4.0)]  # a slow moment in the second pair changes no ratio
    result = bench.summarize("ours", "theirs", (1, 2, 3), seconds)
    assert (result.ratio_low, result.ratio, result.ratio_high) == (2.5, 3.0, 3.5)
    assert (result.ours_ms, result.baseline_ms) == (1000.0, 4000.0)


def test_each_pair_calls_both_once_and_alternates_who_is_first():
    calls = []
    times = bench.time_pairs(lambda: calls.append("ours"), lambda: calls.append("baseline"), pairs=3)
    assert len(times) == 3
    assert calls[2:] == ["ours", "baseline", "baseline", "ours", "ours", "baseline"]


def test_the_number_of_threads_is_restored():
    threads = torch.get_num_threads()
    bench.cpu_int8(4, 32, 16, pairs=2)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("pairs", ["1", "0"])
def test_a_spread_needs_two_pairs(pairs):
    assert CliRunner().invoke(bench.main, ["--cpu", "--pairs", pairs]).exit_code == 2


# --- timing on a GPU, by stand-ins


class Clock:
    """Stands in for CUDA: a graph's launches take as long as they say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.captured, self.replays = 0.0, None, []
        clock = self

        class Graph:
            def __init__(self) -> None:
                self.us: list[float] = []

            def replay(self) -> None:
                clock.now += sum(self.us)
                clock.replays.append(self)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) / 1e3

        @contextlib.contextmanager
        def graph(g: Graph):
            clock.captured = g
            yield
            clock.captured = None

        for name, value in {"CUDAGraph": Graph, "Event": Event, "graph": graph, "synchronize": lambda: None}.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def call(self, us: float) -> timing.Call:
        def launch() -> None:
            if self.captured is not None:
                self.captured.us.append(us)

        return launch


def test_graphs_hold_each_set_equally_often_and_last_long_enough(monkeypatch):
    clock = Clock(monkeypatch)
    fast = timing._graph([clock.call(1.0), clock.call(3.0), clock.call(5.0)])
    assert fast.launches % 3 == 0 and fast.launches * 3 >= timing.REPLAY_US
    assert sorted(set(fast.graph.us)) == [1, 3, 5] and fast.graph.us.count(1) == fast.graph.us.count(5)
    slow = timing._graph([clock.call(400.0), clock.call(400.0)])
    assert slow.launches == timing.LAUNCHES


def test_graphs_are_replayed_in_turns_in_a_rotating_order(monkeypatch):
    clock = Clock(monkeypatch)
    calls = {"a": [clock.call(30.0)], "b": [clock.call(60.0), clock.call(20.0)]}
    times = timing.measure(calls, torch.device("cuda"), repeats=4)
    assert times["a"] == timing.Times(30.0, 30.0, 30.0, 4) and times["b"].us == 40.0
    a, b = dict.fromkeys(clock.replays[-12:])
    assert clock.replays[-12:] == [a, a, b, b, b, a] * 2  # the first of each round is not timed


def test_operands_are_more_than_the_cache_holds(monkeypatch):
    class Properties:
        L2_cache_size = 60 * 2**20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    assert [timing.sets_of_operands(mb * 2**20, cuda) for mb in (1, 50, 60, 500)] == [120, 3, 2, 2]
    assert timing.sets_of_operands(1, CPU) == 1


@pytest.mark.gpu
def test_a_gpu_times_graphs():
    a = torch.randn(256, 256, device="cuda")
    times = timing.measure({"a": [lambda: a @ a] * 2, "b": [lambda: a + a]}, torch.device("cuda"), repeats=5)
    assert all(0 < t.low <= t.us <= t.high for t in times.values())
    assert describe(torch.device("cuda"))["gpu"] == torch.cuda.get_device_name()


def test_peaks_are_of_what_the_library_multiplies():
    found = timing.peaks(CPU, 2)
    assert {"bf16", "int8", "copy"} <= set(found) and all(value > 0 for value in found.values())


# --- cases and what is wrong with them


@pytest.mark.slow
def test_every_case_of_a_dry_run_is_right_and_reported(tmp_path):
    file = tmp_path / "bench.json"
    done = CliRunner().invoke(bench.main, ["--dry-run", "--json", str(file)], catch_exceptions=False)
    assert done.exit_code == 0 and "Dry run: no GPU" in done.output
    found = json.loads(file.read_text())
    assert found["complete"] and found["dry_run"] and not found["wrong"]
    assert {row["op"] for row in found["results"]} == set(workloads.BUILDERS)
    assert all(row["us_low"] <= row["us"] <= row["us_high"] for row in found["results"])
    assert {row["verdict"] for row in report.goals(found)} == {"not measured"}


@pytest.mark.slow
def test_there_is_no_report_of_wrong_results(tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "error", lambda work: 0.5)
    file = tmp_path / "bench.json"
    done = CliRunner().invoke(bench.main, ["--dry-run", "--json", str(file)])
    assert done.exit_code == 1 and "no report" in done.output and "| goal |" not in done.output
    found = json.loads(file.read_text())
    assert found["wrong"] and not found["results"] and "relative error 0.5" in found["wrong"][0]["reason"]


@pytest.mark.parametrize("chip", ["sm_90", "sm_100"])
def test_cases_find_the_tiles_of_many_tokens(chip):
    for case in workloads.LINEARS:
        with contextlib.suppress(NoTile):
            workloads.prepare(case, (528, 64, 128), CPU, chip)  # as the gate does on a GPU


def test_what_cannot_run_is_left_out_and_what_fails_is_wrong(monkeypatch):
    shape = (4, 8, 8)

    def verdict(case: Case, problem: Exception) -> list[str]:
        def prepare(*_: object) -> workloads.Work:
            raise problem

        monkeypatch.setattr(workloads, "prepare", prepare)
        return list(bench.checked(case, shape, CPU, "sm_90")[1])

    ours, library = Case("linear", "fp8-fp8", "scaled_matmul"), Case("linear", "fp8-fp8", "F.scaled_mm")
    assert verdict(ours, NoTile("no tile")) == ["left_out"]
    assert verdict(ours, RuntimeError("illegal memory access")) == ["wrong"]
    assert verdict(library, RuntimeError("not supported")) == ["left_out"]
    assert verdict(ours, torch.OutOfMemoryError("too much")) == ["left_out"]


def test_what_is_right_and_cannot_be_timed_is_left_out(monkeypatch):
    def measure(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "measure", measure)
    found = bench.measure_shape((4, 8, 8), (BASELINE,), CPU, "sm_90", 2, {})
    assert not found["wrong"] and "stream is capturing" in found["left_out"][0]["reason"]


def test_one_that_cannot_be_timed_takes_no_other_of_its_shape_with_it(monkeypatch):
    other, own = Case("linear", "16bit", "F.linear", shared=2), timing.measure

    def measure(calls: dict[str, Any], *rest: Any) -> Any:
        if other.name in calls:
            raise RuntimeError("operation not permitted when stream is capturing")
        return own(calls, *rest)

    monkeypatch.setattr(timing, "measure", measure)
    found = bench.measure_shape((4, 8, 8), (BASELINE, other), CPU, "sm_90", 2, {"copy": 1.0, "bf16": 1.0})
    assert [row["implementation"] for row in found["results"]] == ["F.linear"] and found["results"][0]["shared"] == 1
    assert [row["case"] for row in found["left_out"]] == [other.name]


@pytest.mark.slow
def test_rates_are_timed_in_turns_written_after_each_shape_and_of_what_is_proven(monkeypatch, tmp_path):
    ours, wrong = workloads.QUANTIZERS[:2]
    sweep = [((3, 64, 64), (BASELINE, wrong, ours)), ((3, 64, 64), (ours,))]
    turns, own = [], timing.measure
    monkeypatch.setattr(timing, "measure", lambda calls, *rest: turns.append([*calls]) or own(calls, *rest))
    monkeypatch.setattr(workloads, "tiny_sweep", lambda: sweep)
    rows = [{"case": ours.name, "ok": True, "error": 0.0}, {"case": wrong.name, "ok": False, "error": 0.5}]
    (tmp_path / "first.0.json").write_text(json.dumps({"cases": rows, "left": []}))
    notes: list[tuple[int, ...]] = []

    def note(summary: dict[str, Any]) -> None:
        notes.append(tuple(len(summary[part]) for part in ("peaks", "results", "left_out")))

    summary = bench.run(60, note, dry_run=True, rates=True, proofs=tmp_path)
    assert [taken[1:] for taken in notes] == [(0, 0), (0, 0), (2, 1), (3, 1)]
    assert turns[-2:] == [[BASELINE.name, ours.name], [ours.name]]
    assert not notes[0][0] and notes[1][0] and summary["complete"] and summary["kind"] != report.KIND
    assert summary["left_out"][0]["reason"] == f"{wrong.name} is not proven right: relative error 0.5"
    lines = list(bench.rate_lines(summary))
    assert "GB/s" in lines[1] and len(lines) == 5


def test_rates_are_those_that_a_step_is_modelled_by():
    swept = {(case.name, shape) for shape, cases in bench.swept(dry_run=False, rates=True) for case in cases}
    for name in ("F.scaled_mm", "F.scaled_mm exact", "scaled_matmul"):
        shapes = {shape for case, shape in swept if case == f"matmul fp8-fp8 {name}"}
        assert shapes == {(8192, 8192, 8192), *(shape for _, shape in workloads.FLUX_STEP if shape[0] > 512)}
    attention = {case.removeprefix("attention ") for case, shape in swept if shape == (4608, 3072, 3072)}
    sdpa = "16bit F.scaled_dot_product_attention"
    assert {f"{sdpa} cudnn", f"{sdpa} flash", "fp8 attention_fp8", "fp8 attention_fp8 warps apart"} <= attention
    assert ("act_quantize fp8 beside quantize_activation", (4608, 15360, 15360)) in swept


def test_exact_sums_are_asked_for_in_their_case_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(workloads, "library_product", lambda *_: seen.append(settings.accumulation()))
    for name in ("F.scaled_mm exact", "F.scaled_mm"):
        workloads.prepare(Case("matmul", "fp8-fp8", name), (4, 64, 64), CPU, "sm_90").call()
    assert seen == ["exact", "fast"]


@pytest.mark.slow
@pytest.mark.parametrize("case", workloads.GATED[-3:], ids=lambda case: case.name)
def test_gated_products_are_launched_with_what_follows_them(case, monkeypatch):
    """`gate_kernel` is behind the library's product of fp8, and ours of int8; of 4-bit codes a kernel adds itself."""
    monkeypatch.setattr(dispatch, "compiled_with", lambda: "3.6")
    dispatch.forget()
    launched = []
    with interpreting(), pytest.MonkeyPatch.context() as patch:
        own = JITFunction.run
        patch.setattr(JITFunction, "run", lambda k, *a, **options: launched.append(k.__name__) or own(k, *a, **options))
        assert workloads.error(workloads.prepare(case, (130, 64, 128), CPU, "sm_90")) <= workloads.TOLERANCE
    dispatch.forget()
    assert ("gate_kernel" in launched) == (case.implementation == "scaled_matmul"), launched


def test_a_result_that_is_not_finite_or_of_another_shape_is_wrong():
    for result in (torch.full((2, 2), torch.nan), torch.ones(2, 3), torch.full((2, 2), torch.inf)):
        work = workloads.Work(lambda result=result: result, lambda: torch.ones(2, 2), 0.0, 1, None)
        assert not workloads.error(work) <= workloads.TOLERANCE
    work = workloads.Work(lambda: torch.ones(2, 2).bfloat16(), lambda: torch.ones(2, 2), 0.0, 1, None)
    assert workloads.error(work) == 0


def test_cases_are_named_apart_and_the_sweep_holds_all_of_flux():
    names = [case.name for case in workloads.CASES]
    assert len(set(names)) == len(names)
    swept = {(case, shape) for shape, cases in workloads.sweep() for case in cases}
    assert {case for case, _ in swept} == set(workloads.CASES)
    assert {shape for case, shape in swept if case == BASELINE} >= {shape for _, shape in workloads.FLUX_STEP}
    assert {m for _, (m, _, _) in swept} == {1, 16, 512, 1024, 4096, 4608, 16384}
    first = {case for _, cases in workloads.first_sweep() for case in cases}
    libraries = (BASELINE, workloads.ATTENTIONS[0])  # of torch alone
    assert first == {case for case in workloads.CASES if case.shared == 1} - {*libraries}
    tiny = {case.op for _, cases in workloads.tiny_sweep() for case in cases}
    assert tiny == set(workloads.BUILDERS)


def test_the_share_of_the_roofline_is_of_the_later_of_both_floors():
    timed, peaks = timing.Times(10.0, 9.0, 11.0, 30), {"fp8": 100.0, "copy": 1000.0}
    work = workloads.Work(lambda: None, lambda: torch.ones(1), flops=5e8, bytes=2_000_000, arithmetic="fp8")
    row = bench._row(BASELINE, (1, 2, 3), work, timed, peaks)
    assert (row["roofline"], row["tflops"], row["gb_per_s"]) == (0.5, 50.0, 200.0)
    work = workloads.Work(lambda: None, lambda: torch.ones(1), flops=5e8, bytes=8_000_000, arithmetic="fp8")
    assert bench._row(BASELINE, (1, 2, 3), work, timed, peaks)["roofline"] == 0.8
    work = workloads.Work(lambda: None, lambda: torch.ones(1), flops=5e8, bytes=8_000_000, arithmetic="nvfp4")
    assert bench._row(BASELINE, (1, 2, 3), work, timed, peaks)["roofline"] is None


# --- goals and tables


def made_up(speed: dict[tuple[str, str, str], float]) -> dict[str, Any]:
    """A result in which a case takes 2 M N K / speed, and a kernel of memory that share of the bandwidth."""
    rows = []
    for shape, cases in workloads.sweep():
        for case in cases:
            m, n, k = shape
            key = (case.op, case.scheme, case.implementation)
            key = key if key in speed else (case.op, "", "")
            if key in speed:
                us = 2e-6 * case.shared * m * n * k / speed[key]
                row = {"op": case.op, "scheme": case.scheme, "implementation": case.implementation}
                row |= {"shared": case.shared, "m": m, "n": n, "k": k, "us": us, "us_low": us, "us_high": us}
                rows.append(row | {"tflops": speed[key], "gb_per_s": speed[key], "mb": 100.0, "roofline": None})
    device = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3"}
    found = {"kind": report.KIND, "dry_run": False, "commit": "c", "chip": "sm_90", "device": device, "complete": True}
    return found | {"peaks": {"copy": 1000.0}, "results": rows, "left_out": [], "wrong": []}


FAST = {
    ("linear", "16bit", "F.linear"): 1.0,
    ("matmul", "fp8-fp8", "F.scaled_mm"): 2.0,
    ("matmul", "fp8-fp8", "scaled_matmul"): 1.94,
    ("matmul", "nvfp4-fp8", "w4a8_matmul"): 1.5,
    ("linear", "fp8-fp8", "scaled_matmul"): 1.85,
    ("linear", "fp8-fp8", "F.scaled_mm"): 1.5,
    ("linear", "nvfp4-16bit", "weight_only_matmul"): 800.0,
    ("quantize_activation", "", ""): 850.0,
    ("dequantize", "", ""): 840.0,
}


def test_goals_are_reached_missed_or_not_measured():
    rows = {row["goal"]: row for row in report.goals(made_up(FAST))}
    assert len(rows) == len(GOALS)

    def of(start: str) -> tuple[str, float | None]:
        (row,) = [row for goal, row in rows.items() if goal.startswith(start)]
        return row["verdict"], round(row["figure"], 3) if "figure" in row else None

    assert of("fp8 product") == ("reached", 0.97)
    assert of("fp8: speed with quantization over without, FLUX.1") == ("reached", 0.954)
    assert of("fp8: speed with quantization over without, N") == ("reached", 0.954)
    assert of("fp8 Linear") == ("reached", 1.85)  # the faster of two
    assert of("int8 Linear") == ("not measured", None)
    assert of("nvfp4-fp8 (W4A8)") == ("missed", 0.773)
    assert of("quantizers") == ("reached", 0.85)
    assert of("dequantize") == ("missed", 0.84)
    assert of("weight-only") == ("reached", 0.8)
    assert of("adaln_quantize") == ("not measured", None)


def test_a_goal_over_a_step_needs_every_shape_of_it():
    found = made_up(FAST)
    found["results"] = [row for row in found["results"] if (row["m"], row["k"]) != (4608, 15360)]
    verdicts = {row["goal"]: row["verdict"] for row in report.goals(found)}
    assert verdicts["fp8: speed with quantization over without, FLUX.1"] == "not measured"


def test_the_dispatcher_chooses_by_what_was_measured(monkeypatch, tmp_path):
    file = report.measured(made_up(FAST))
    assert {row["op"] for row in file["rows"]} == {"scaled_matmul", "F.scaled_mm", "weight_only_matmul"}
    (tmp_path / "h200.json").write_text(json.dumps(file))
    monkeypatch.setattr(findings, "MEASURED", tmp_path)
    monkeypatch.setattr(dispatch, "refusal", lambda *_: "")
    findings.forget()
    dispatch.choose.cache_clear()
    choice = dispatch.choose(Scheme.parse("fp8-fp8"), "sm_90", 4000, 3072, 3072)
    findings.forget()
    dispatch.choose.cache_clear()
    assert choice.implementation == "scaled_matmul" and "NVIDIA H200" in choice.reason


def test_the_tables_name_each_case_once_and_the_speed_over_bf16():
    found = made_up(FAST)
    (line,) = [
        line
        for line in report.time_table(found).splitlines()
        if line.startswith("| linear fp8-fp8 scaled_matmul | 4096 x 9216 x 3072 |")
    ]
    assert line.endswith("| 1.85 |")
    (shared,) = [
        line
        for line in report.time_table(found).splitlines()
        if line.startswith("| linear fp8-fp8 scaled_matmul x3 | 4096 x 3072 x 3072 |")
    ]
    assert shared.endswith("| 1.85 |")
    assert len(Figures(found).rows) == len(found["results"])


def test_only_right_results_of_a_gpu_are_in_the_readme(tmp_path):
    assert "Not measured" in report.measured_tables(tmp_path)
    for name, changes in {"dry": {"dry_run": True}, "red": {"wrong": [{"case": "x"}]}, "other": {"kind": "x"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(made_up(FAST) | changes))
    (tmp_path / "list.json").write_text("[]")
    assert "Not measured" in report.measured_tables(tmp_path)
    (tmp_path / "h200.json").write_text(json.dumps(made_up(FAST)))
    text = report.measured_tables(tmp_path)
    assert "### NVIDIA H200 (h200.json)" in text and "reached" in text and "16384" not in text.split("\n\n")[-1]


@pytest.mark.skipif(not triton.__version__.startswith("3.9."), reason="the table is of the newest Triton's rows")
def test_the_tables_of_the_readme_are_the_generated_ones():
    text = report.README.read_text(encoding="utf-8")
    assert report.with_tables(text) == text, "python -m benchmarks.kernels.bench --write-tables"


def test_a_readme_without_a_place_for_tables_is_named():
    with pytest.raises(ValueError, match="no place for a table: <!-- kernels: begin -->"):
        report.with_tables("nothing")
