"""The benchmark of one FLUX step, cut down: that every row is made, run and written, and its arithmetic."""

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
import transformers
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fluxq.kernels.products import ProductTensors
from fluxq.kernels.tensor import unpack_named
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.cost import ForwardPass
from fluxq.recipes.formats import Scheme

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "flux_step.py"
TINY: dict[str, Any] = {"hidden": 128, "blocks": [1, 1], "text": 16}
CPU = torch.device("cpu")
SMALL = "--device cpu --hidden 128 --blocks 1+1 --pixels 64 --batch 1 --text 16 --rounds 2".split()


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.setattr("sys.path", [*sys.path])  # the script puts folders in front
    spec = importlib.util.spec_from_file_location("flux_step", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "flux_step", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, out: Path, *arguments: str):
    return CliRunner().invoke(script.main, [*SMALL, "--out", str(out), *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_every_row_runs_without_a_compiler(script, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    done = run(script, tmp_path / "found.json", "--uncompiled")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["blocks"] == [1, 1] and found["commit"] and found["torch"] == torch.__version__ and found["sources"]
    assert not found["complete"]  # for want of graphs; what is not installed would not count
    rows = {row["row"]: row for row in found["rows"]}
    assert [row.name for row in script.ROWS if row.name != script.BASELINE] == list(rows)
    assert rows.pop("torchao fp8, compiled")["missing"] == "torchao is not installed"
    for row in rows.values():
        if row["graph"]:
            assert "CUDA" in row["missing"], row
        else:
            low, middle, high = row["over_compiled_16bit"]
            assert 0 < low <= middle <= high and row["seconds"][0] > 0, row
    assert [goal["met"] for goal in found["goals"]] == [None, None]  # of another size, so not measured
    assert found["attention"] == script.ON_CPU


def test_rows_that_share_a_model_are_computed_as_they_say(script, tmp_path: Path) -> None:
    """Fused blocks and attention of the row before do not stay."""
    from fluxq.recipes.computing import BACKENDS

    bench = script.Bench(torch.device("cpu"), TINY, 1, tmp_path / "x", {"uncompiled": True})
    made, seen = [], []
    for row in script.ROWS:
        if row.recipe == "int8" and not row.graph and row.mode == "eager":
            with bench._ready(row) as (model, graphs, _):
                assert graphs is None
                block = model.transformer_blocks[0]
                backend = block.attn.processor._attention_backend
                seen.append((row.optimized, row.attention))
                assert hasattr(type(block), "fused_from") == row.optimized
                assert (backend is not None and backend.value == BACKENDS["fp8"]) == (row.attention == "fp8")
                made.append(model)
    assert seen == [(False, "16bit"), (True, "16bit"), (True, "fp8")] and len(set(map(id, made))) == 1


@pytest.mark.long
def test_what_is_there_is_kept_and_time_is_kept_too(script, monkeypatch, tmp_path: Path) -> None:
    out, timed = tmp_path / "found.json", []
    took = {"seconds": [1.0] * 3, "over_compiled_16bit": [1.0] * 3}
    keep = script.Bench._keep
    monkeypatch.setattr(script.Bench, "_time", lambda *_: dict(took))
    monkeypatch.setattr(
        script.Bench, "_keep", lambda self, row, **facts: timed.append(row.name) or keep(self, row, **facts)
    )
    monkeypatch.setattr(script, "sources", lambda: "these")
    assert run(script, out, "--row", "fp8").exit_code == 0
    assert run(script, out, "--resume", "--row", "fp8", "--row", "int8").exit_code == 0
    found = json.loads(out.read_text())
    assert timed == ["fp8", "int8"] and [row["row"] for row in found["rows"]] == timed and found["complete"]
    without = [row | {"over_compiled_16bit": None} for row in found["rows"]]
    for changed in ({"sources": "others"}, {"rounds": 5}, {"rows": without}):
        out.write_text(json.dumps(found | changed))
        del timed[:]
        assert run(script, out, "--resume", "--row", "fp8").exit_code == 0 and timed == ["fp8"], changed


def test_an_earlier_run_counts_whatever_the_clocks_were(script, tmp_path: Path) -> None:
    about = {"uncompiled": True, "attention": {}, "gpu": "NVIDIA H200", "clocks.sm": "345 MHz", "power.draw": "75 W"}
    earlier = about | {"clocks.sm": "1980 MHz", "power.draw": "690 W"}
    earlier |= {"rows": [{"row": "fp8", "over_compiled_16bit": [1.0] * 3}]}
    (tmp_path / "x").write_text(json.dumps(earlier))
    for gpu, rows in {"NVIDIA H200": earlier["rows"], "NVIDIA B200": []}.items():
        bench = script.Bench(torch.device("cpu"), TINY, 1, tmp_path / "x", about | {"gpu": gpu})
        bench.resume()
        assert bench.found["rows"] == rows


def test_goal_rows_come_first_and_what_is_done_but_once_stops_none(script, monkeypatch, tmp_path: Path) -> None:
    """The first row takes 100 s to make a model, compile and record, and 5 s to time; others as long to time."""
    now, timed = [0.0], []

    def spend(seconds: float) -> None:
        now[0] += seconds

    class Clocked(script.Bench):
        def _ready(self, row):
            spend(0 if timed else 60)
            return script.nullcontext((lambda **_: spend(0) if timed else spend(40), None, []))

    def in_turn(calls: dict, *_: Any) -> tuple[dict[str, list[float]], dict]:
        timed.append(rows[len(timed)].name)
        spend(5)
        return {name: [1.0, 1.0] for name in calls}, {}

    monkeypatch.setattr(script.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(script, "in_turn", in_turn)
    bench = Clocked(torch.device("cpu"), TINY, 2, tmp_path / "x", {"uncompiled": True, "attention": script.ON_CPU})
    bench.baseline = lambda **_: None
    rows = [row for row in script.ROWS if row.name != script.BASELINE]
    bench.run(rows, [(64, 1)], deadline=118.0)
    assert timed == ["fp8, optimized, graph", "fp8, optimized, attention in fp8, graph", "fp8"]
    assert not bench.found["complete"] and now[0] == 115
    bench.run(rows[:3], [(64, 1)], deadline=0.0)  # nothing is left of these
    assert bench.found["complete"]


def test_every_row_is_there_once(script) -> None:
    names = [row.name for row in script.ROWS]
    assert len(set(names)) == len(names) and names[1:3] == list(script.GOAL_ROWS)
    goals = {("fp8", row.attention) for row in script.ROWS if row.name in script.GOAL_ROWS}
    assert goals == {("fp8", attention) for attention, _ in script.flux_modelled.GOALS.values()}


def row(
    name: str,
    attention: str,
    ratio: float,
    kernel: str = "cudnn_sdpa_sm90_flash_fprop",
    pixels: int = 1024,
    own: str | None = None,
) -> dict:
    """Of a baseline whose attention was this kernel; own: that of the row, by default what it should be."""
    about = {"row": name, "recipe": "fp8", "attention": attention, "pixels": pixels, "batch": 1}
    own = own or {"fp8": "attention_fp8_kernel", "16bit": kernel}[attention]
    kernels = {"row": [own] if own else [], "baseline": [kernel] if kernel else []}
    return about | {"seconds": [1.0] * 3, "over_compiled_16bit": [0.0, ratio, 9.0], "attention_kernels": kernels}


CUDNN, FLASH = ({"backend": backend, "why": ""} for backend in ("cudnn", "flash"))


H200 = "NVIDIA H200"


def test_goals_take_the_best_row_of_their_attention(script) -> None:
    rows = [row("a", "16bit", 1.4), row("b", "16bit", 1.6), row("c", "fp8", 1.7), row("d", "fp8", 2.0, pixels=512)]
    missing = {"row": "e", "recipe": "fp8", "attention": "fp8", "missing": "memory"}
    plain, with_fp8 = script.goals([*rows, missing], CUDNN, H200)
    assert (plain["row"], plain["measured"], plain["met"]) == ("b", 1.6, True)
    assert (with_fp8["row"], with_fp8["at_least"], with_fp8["met"]) == ("c", 1.8, False)


@pytest.mark.parametrize(
    ("kernel", "attention", "why"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Traits>", FLASH, ""),
        ("void pytorch_flash::flash_fwd_kernel<Traits>", CUDNN, "should be cudnn, and void pytorch_flash"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", FLASH, "should be flash_fwd, and cudnn_gen"),
        ("fmha_cutlassF_bf16_aligned", CUDNN, "the baseline's attention should be cudnn, and fmha_cutlassF"),
        ("", CUDNN, "the profiler saw no kernel of the baseline"),
        ("cudnn_sdpa", {"backend": None, "why": "on cpu"}, "is not pinned: on cpu"),
    ],
)
def test_no_ratio_counts_without_the_attention_that_was_pinned(script, kernel, attention, why) -> None:
    goal, _ = script.goals([row("a", "16bit", 1.6, kernel)], attention, H200)
    assert goal["row"] == "a" and (goal["measured"], goal["met"]) == ((None, None) if why else (1.6, True))
    assert why in goal.get("refused", "")
    unseen = row("a", "16bit", 1.6) | {"attention_kernels": {}}  # where the profiler does not run
    assert "saw no kernel" in script.goals([unseen], CUDNN, H200)[0]["refused"]


@pytest.mark.parametrize("attention", ["16bit", "fp8"])
def test_none_counts_whose_own_attention_is_another_and_what_counts_comes_before_what_is_better(
    script, attention
) -> None:
    own = {"16bit": "flash_fwd_kernel", "fp8": "cudnn_sdpa_sm90"}[attention]
    rows = [row("good", attention, 1.7), row("better", attention, 1.9, own=own)]
    number = ["16bit", "fp8"].index(attention)
    assert script.goals(rows, CUDNN, H200)[number]["row"] == "good"
    refused = script.goals(rows[1:], CUDNN, H200)[number]
    assert refused["measured"] is None and "the row's attention should be" in refused["refused"]
    assert own in refused["refused"]


def test_the_goals_are_those_of_one_gpu(script) -> None:
    (goal, _) = script.goals([row("a", "16bit", 1.6)], CUDNN, "NVIDIA H100 80GB HBM3")
    assert goal["met"] is None and "H200" in goal["refused"] and "H100 80GB" in goal["refused"]


def test_attention_is_pinned_to_the_first_library_that_takes_it(script, monkeypatch) -> None:
    assert script.pinned_attention(torch.device("cpu")) == script.ON_CPU
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, dtype: torch.ones(shape, dtype=dtype))
    assert script.pinned_attention(torch.device("cuda"))["backend"] == "flash"  # a CPU has no cuDNN, and a flash

    def none(*_: object) -> None:
        raise RuntimeError("No available kernel")

    monkeypatch.setattr(script.F, "scaled_dot_product_attention", none)
    with pytest.raises(RuntimeError, match="could be pinned to: not cudnn: No available kernel; not flash: No avail"):
        script.pinned_attention(torch.device("cuda"))


def test_a_profiler_that_does_not_run_or_sees_nothing_takes_no_time_away(script, monkeypatch) -> None:
    spent = {"flash_fwd_kernel": 0.25, "nvjet_qqtst": 0.5, "triton_poi": 0.125}
    monkeypatch.setattr(script, "kernels_of", lambda call: call())
    calls = {"row": lambda: spent, "baseline": lambda: {"cudnn_sdpa": 1.0}}
    found = script.taken_apart(calls, {"row": 1.0, "baseline": 2.0})
    assert found["parts"] == {"attention": 0.25, "products": 0.5, "passes": 0.125, "gaps": 0.125}
    assert found["baseline_parts"]["gaps"] == 0.5
    assert found["attention_kernels"] == {"row": ["flash_fwd_kernel"], "baseline": ["cudnn_sdpa"]}

    def fails() -> dict:
        raise AssertionError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    for call, why in ((fails, "CUPTI"), (dict, "saw no kernel")):
        found = script.taken_apart({"row": call, "baseline": call}, {"row": 1.0, "baseline": 1.0})
        assert found["parts"] is None and why in found["unseen"]


@pytest.mark.slow
def test_a_profiler_is_tried_before_it_is_needed(script, monkeypatch, tmp_path: Path) -> None:
    def never(*_: Any, seconds: float) -> None:
        raise RuntimeError(f"no result after {seconds:g} s")

    for apart, why in ((never, "no result after 90 s"), (lambda *_, seconds: {}, "the profiler saw no kernel")):
        monkeypatch.setattr(script, "apart", apart)
        assert script.why_unseen(torch.device("cuda")) == why
    monkeypatch.setattr(script, "apart", lambda *_, seconds: {"gemm": 1.0})
    assert script.why_unseen(torch.device("cuda")) == ""
    monkeypatch.setattr(script, "taken_apart", lambda *_: 1 / 0)
    bench = bench_of(script, tmp_path / "x")
    bench.run(rows_of(script, "fp8"), [(64, 1)], float("inf"))
    assert "GPU" in bench.found["unseen"] and bench.found["rows"][0]["seconds"]


def bench_of(script: ModuleType, out: Path, uncompiled: bool = True) -> Any:
    return script.Bench(CPU, TINY, 2, out, {"uncompiled": uncompiled, "attention": script.ON_CPU})


def rows_of(script: ModuleType, *names: str) -> list[Any]:
    return [row for row in script.ROWS if row.name in names]


@pytest.mark.slow
def test_a_row_is_kept_before_it_is_taken_apart(script, monkeypatch, tmp_path: Path) -> None:
    """A profiler that never ends takes the rest of a run, and no row."""

    class Hung(BaseException):
        pass

    def taken_apart(*_: Any) -> None:
        assert json.loads((tmp_path / "x").read_text())["rows"][0]["seconds"]
        raise Hung

    monkeypatch.setattr(script, "taken_apart", taken_apart)
    monkeypatch.setattr(script.Bench, "_begin", lambda self, _: self.found.update(unseen=""))
    with pytest.raises(Hung):
        bench_of(script, tmp_path / "x").run(rows_of(script, "fp8"), [(64, 1)], float("inf"))
    assert json.loads((tmp_path / "x").read_text())["rows"][0]["row"] == "fp8"
    monkeypatch.setattr(script, "taken_apart", lambda *_: {"parts": {"products": 1.0}})
    bench = bench_of(script, tmp_path / "x")
    bench.run(rows_of(script, "fp8"), [(64, 1)], float("inf"))
    assert [row["parts"] for row in bench.found["rows"]] == [{"products": 1.0}]


@pytest.mark.slow
def test_a_row_that_is_to_be_a_graph_is_none_without_one(script, monkeypatch, tmp_path: Path) -> None:
    from recorder import Recorder

    from fluxq.runtime import graphs

    class Broken(Recorder):
        def record(self, call, beside):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "why_not", lambda model: "")
    for device in (Broken, Recorder):
        monkeypatch.setattr(graphs, "CudaGraphs", device)
        bench = bench_of(script, tmp_path / "x")
        bench.run(rows_of(script, "fp8, optimized, graph"), [(64, 1)], float("inf"))
        (found,) = bench.found["rows"]
        assert ("seconds" in found) == (device is Recorder), found
        assert device is Recorder or found["missing"].startswith("0 of 12 calls were replays of a graph")
        assert bench.found["complete"] == (device is Recorder)


@pytest.mark.slow
def test_a_row_says_what_was_not_fused_and_which_kernels_were_withdrawn(script, monkeypatch, tmp_path: Path) -> None:
    import fluxq
    from fluxq.runtime.fused import FusedPart

    own = fluxq.optimize
    lacking = [FusedPart("single_transformer_blocks.0", "norm", why_not="no kernel for fp8")] * 2
    monkeypatch.setattr(fluxq, "optimize", lambda *args, **named: [*own(*args, **named), *lacking])
    monkeypatch.setattr(script.findings, "_withdrawn", {("scaled_matmul", "fp8", "sm_90"): "wrong"})
    bench = bench_of(script, tmp_path / "x")
    bench.run(rows_of(script, "fp8", "fp8, optimized"), [(64, 1)], float("inf"))
    plain, optimized = bench.found["rows"]
    assert "unfused" not in plain and optimized["unfused"] == ["norm: no kernel for fp8"]
    assert optimized["withdrawn"] == ["scaled_matmul fp8 sm_90"]


@pytest.mark.slow
def test_without_a_baseline_rows_keep_their_seconds_and_it_is_tried_once(script, monkeypatch, tmp_path: Path) -> None:
    tried = []

    def fails(**_: Any) -> None:
        tried.append(1)
        raise RuntimeError("BackendCompilerFailed")

    bench = bench_of(script, tmp_path / "x")
    bench.baseline = fails
    bench.run(rows_of(script, "fp8", "fp8, optimized"), [(64, 1)], float("inf"))
    assert len(tried) == 1 and not bench.found["complete"]
    assert bench.found["baseline"] == [{"pixels": 64, "batch": 1, "missing": "BackendCompilerFailed"}]
    for found in bench.found["rows"]:
        assert found["seconds"] and "over_compiled_16bit" not in found
    again = bench_of(script, tmp_path / "x")
    again.resume()
    assert not again.found["rows"]  # they are timed again, for the ratio


@pytest.mark.slow
def test_a_package_that_is_not_there_costs_no_model(script, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    bench = bench_of(script, tmp_path / "x")
    made, own = [], script.Bench._made
    monkeypatch.setattr(script.Bench, "_made", lambda self, row: made.append(row.name) or own(self, row))
    peer, *plain = rows_of(script, "torchao fp8, compiled", "fp8", "fp8, optimized")[::-1]
    bench.run([plain[0], peer, plain[1]], [(64, 1)], float("inf"))
    assert len(made) == 1 and bench.found["complete"]
    assert bench.found["rows"][1]["missing"] == "torchao is not installed"


@pytest.mark.slow
def test_every_size_and_row_is_compiled_by_itself(script, monkeypatch, tmp_path: Path) -> None:
    """No graph has a size that varies, and no row meets a limit that others have used up."""
    compiled: list[bool] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes = [size for each in inputs for size in (each.shape if isinstance(each, torch.Tensor) else [each])]
        compiled.append(all(isinstance(size, int) for size in sizes))
        return graph.forward

    own = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **named: own(self, **named, backend=backend))
    torch.compiler.reset()
    bench = bench_of(script, tmp_path / "x", uncompiled=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        bench.run(rows_of(script, "fp8, optimized, compiled"), [(32, 1), (64, 1)], float("inf"))
    assert [found.get("missing") for found in bench.found["rows"]] == [None] * 2
    assert len(compiled) >= 8 and all(compiled)  # two kinds of block, of row and baseline, at two sizes


@pytest.mark.slow
def test_a_row_with_a_kernel_that_is_not_proven_is_not_timed(script, monkeypatch, tmp_path: Path) -> None:
    took = {"seconds": [1.0] * 3, "over_compiled_16bit": [1.0] * 3}
    monkeypatch.setattr(script.Bench, "_time", lambda *_: dict(took))
    out, cases = tmp_path / "found.json", [case for _, group in script.workloads.tiny_sweep() for case in group]

    def missing(row: str, **wrong: str) -> str:
        rows = [{"case": case.name, "ok": case.op not in wrong, "reason": wrong.get(case.op, "")} for case in cases]
        (tmp_path / "first.0.json").write_text(json.dumps({"cases": rows, "left": []}))
        assert run(script, out, "--row", row, "--proofs", str(tmp_path), "--uncompiled").exit_code == 0
        return json.loads(out.read_text())["rows"][0].get("missing", "")

    assert missing("fp8") == missing("fp8", attention="boom", dequantize="boom") == ""
    assert missing("fp8, optimized, attention in fp8", attention="boom").endswith("is not proven right: boom")
    assert missing("fp8", qk_norm_rope="boom") == ""  # which optimized blocks alone launch
    assert missing("fp8, optimized", qk_norm_rope="boom") == "qk_norm_rope 16bit qk_norm_rope is not proven right: boom"
    del cases[:]
    assert "is not proven right: it was not tried" in missing("fp8")


def test_proofs_are_asked_of_what_a_row_launches(script, monkeypatch) -> None:
    """On Hopper fp8 is the library's product and int8 ours; the modulation is decoded."""
    monkeypatch.setattr(script.dispatch, "compiled_with", lambda: "3.6")
    script.dispatch.forget()
    model = script.random_model({"hidden": 3072, "blocks": [1, 1]}, torch.device("meta"))
    swept = [case for _, group in script.workloads.first_sweep() for case in group]

    def launched(name: str, op: str) -> set[str]:
        (row,) = rows_of(script, name)
        products = script.products_of(row, script.plan_of(model, row.recipe), "sm_90")
        cases = [case for case in swept if case.op == op and script.is_part(case, row, products)]
        assert op != "linear" or {(case.scheme, case.implementation) for case in cases} == products
        return {f"{case.scheme} {case.implementation}" for case in cases}

    decoded = "int8-16bit weight_only_matmul"
    goal = script.GOAL_ROWS[0]
    assert launched(goal, "linear") == {"fp8-fp8 F.scaled_mm", "fp8-16bit weight_only_matmul"}
    assert launched(goal, "gated") == {"fp8-fp8 scaled_matmul"}  # the op, which takes the library's product here
    assert launched("fp8", "gated") == launched("fp8", "adaln_quantize") == launched(goal, "dequantize") == set()
    assert launched(goal, "quantize_activation") == {"fp8 quantize_activation"}
    assert launched("int8, optimized", "linear") == {"int8-int8 scaled_matmul", decoded}
    ours = {f"nvfp4-{name} w4a8_matmul" for name in ("fp8", "int8")}
    assert launched("nvfp4 in 4 bits", "linear") == {*ours, decoded}
    assert launched("nvfp4", "linear") == {"fp8-fp8 F.scaled_mm", "int8-int8 scaled_matmul", decoded}
    assert launched("16 bit, optimized", "linear") == set()
    assert launched("16 bit, optimized", "adaln_quantize") == {"16bit adaln_quantize"}
    script.dispatch.forget()


@pytest.mark.slow  # Inductor
def test_compiled_blocks_are_fused_ones(script, tmp_path: Path) -> None:
    done = run(script, tmp_path / "found.json", "--row", "nvfp4, optimized, compiled")
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["optimized"] and row["mode"] == "compiled" and "missing" not in row


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_the_quantized_model_is_the_recipe_s_and_optimizing_it_changes_no_bit(script, recipe: str) -> None:
    import fluxq

    cpu = torch.device("cpu")
    model = script.quantized(TINY, recipe, cpu)
    schemes = {str(part.scheme) for part in model.modules() if isinstance(part, fluxq.QuantLinear)}
    assert any(scheme.startswith(f"{recipe}-{recipe}") for scheme in schemes)
    assert ("nvfp4-nvfp4-static" in schemes) == (recipe == "nvfp4")
    inputs = script.step_inputs(model, 64, 2, 16, cpu)
    with torch.no_grad():
        (plain,) = model(**inputs)
        fluxq.optimize(model)
        (fused,) = model(**inputs)
    assert torch.equal(plain, fused) and plain.isfinite().all()


def test_rounds_take_turns_and_the_first_two_do_not_count(script, monkeypatch) -> None:
    order = []
    said = frozenset({"the power limit"})
    machine = script.machine_of("cpu")
    monkeypatch.setattr(
        script, "seconds_of", lambda call, device: order.append(call()) or (float(len(order)), said, 1980.0)
    )
    seconds, conditions = script.in_turn({"a": lambda: "a", "b": lambda: "b"}, 2, machine)
    assert "".join(order) == "abbaabba"
    assert seconds == {"a": [5.0, 8.0], "b": [6.0, 7.0]}
    assert conditions == {"slowdowns": ["the power limit"], "megahertz": [1980.0] * 3, "watts": None}


def test_no_step_that_counts_begins_on_an_idle_device(script) -> None:
    """A device that computes behind the host: a mark is where its work ends, or where it has to wait for the host."""
    host, device = [0.0], [0.0]

    class Clock(script.Machine):
        def mark(self) -> float:
            return max(host[0], device[0])

        def wait(self) -> None:
            host[0] = max(host[0], device[0])

        def slowdowns(self) -> frozenset[str]:
            assert device[0] > host[0]  # it computes
            return frozenset()

    def step() -> None:
        host[0] += 2.0  # before the first kernel
        device[0] = max(host[0], device[0]) + 10.0

    assert script.seconds_of(step, Clock(CPU, ""))[0] == 10.0


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "products"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_TNT", "products"),
        ("scaled_matmul_fp8_kernel", "products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("adaln_quantize_kernel", "passes"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("attention_fp8_kernel", "attention"),
        ("attention_warps_kernel", "attention"),
        ("quantize_tokens_kernel", "attention"),
        ("key_statistics_kernel", "attention"),
        ("quantize_values_kernel", "attention"),
        ("quantize_rows_kernel", "passes"),
        ("triton_poi_fused_add_mul_7", "passes"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_cat_3", "passes"),
    ],
)
def test_a_kernel_belongs_to_a_part_by_its_name(script, kernel: str, part: str) -> None:
    assert script.part_of(kernel) == part


def test_what_cannot_be_asked_is_named(script, tmp_path: Path, monkeypatch) -> None:
    done = run(script, tmp_path / "found.json", "--row", "fp4")
    assert done.exit_code == 2 and "'fp4'" in done.output and "nvfp4, optimized" in done.output
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(script.main, [])
    assert done.exit_code == 2 and "--device cpu" in done.output


def test_an_h200_is_priced_by_what_was_measured(script) -> None:
    model, found = script.flux_modelled, script.flux_modelled.rates_of_a_step()
    device = model.find_device("h200")
    for efficiency, key, peak in (
        (device.matmul["bf16"], ("16bit", "F.linear"), device.peaks["bf16"]),
        (device.matmul["fp8"], ("fp8-fp8", "F.scaled_mm"), device.peaks["fp8"]),
        (device.matmul["int8"], ("int8-int8", "scaled_matmul"), device.peaks["int8"]),
        (device.attention, ("16bit", f"{model.SDPA} cudnn"), device.peaks["bf16"]),
        (device.attention_fp8, ("fp8", "attention_fp8 warps apart"), device.peaks["fp8"]),
        (device.streaming, ("passes", "fp8"), device.bandwidth),
    ):
        assert efficiency.fraction == pytest.approx(found[key] / peak, abs=5e-4), key
        rate = f"{found[key] / 1e3:.2f} TB/s" if key[0] == "passes" else f"{found[key]:.0f} T"
        assert efficiency.measured.startswith(rate) and model.RATES_FILE.name in efficiency.measured


@pytest.mark.slow
def test_the_modelled_tables_are_those_of_the_committed_file_and_of_the_model(script) -> None:
    found = json.loads(script.MODELLED_FILE.read_text(encoding="utf-8"))
    page, with_tables = script.PAGE.read_text(encoding="utf-8"), script.flux_modelled.with_tables
    assert with_tables(page, found) == page
    now = script.modelled_steps()
    for part in ("steps", "passes", "switches", "parts", "goals", "small", "images"):
        assert now[part] == found[part], part
        changed = [_with_other_numbers(row) for row in found[part]]
        assert with_tables(page, found | {part: changed}) != page, part


@pytest.mark.parametrize("state", ["compiled", "optimized", "every fusion"])
def test_a_pass_takes_its_bytes_time_or_that_of_its_instructions(script, state: str) -> None:
    model = script.flux_modelled
    device = model.find_device("h200")
    second = device.bytes_per_second  # bytes
    begun = device.instructions_per_second
    few, many = (
        model.Pass("", {state: 2 * second}, instructions=n * begun, alone=(second, n * begun)) for n in (0.5, 3)
    )
    assert few.seconds(device, state) == pytest.approx(2)
    assert many.seconds(device, state) == pytest.approx({"compiled": 4, "optimized": 3, "every fusion": 2}[state])


def test_an_image_takes_the_lists_steps_and_what_runs_once(script) -> None:
    model = script.flux_modelled
    device, parts = model.find_device("h200"), {"products": 40.0, "modulation": 1.0, "passes": 8.0}
    found = model._images(parts, device)
    assert found["28"] - found["9"] == pytest.approx(19 * 48.0)
    counted = sum(flops / device.flops("bf16") + size / device.bytes_per_second for flops, size in model.ONCE.values())
    assert found["28"] - 28 * 48.0 == pytest.approx(found["once"])
    assert found["once"] == pytest.approx(28 * 1.0 + 1e3 * counted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T5-XXL", "CLIP-L", "FLUX.1 VAE"])
def test_what_runs_once_is_counted_in_its_operators(script, name: str) -> None:
    row, config = next((row, each.config) for row in FAMILIES.values() for each in row.published if each.name == name)
    model: Any
    with torch.device("meta"):
        if row.kind == "vae":
            model = diffusers.AutoencoderKL.from_config(dict(config))
            model.to(torch.bfloat16)
            run = partial(model.decode, torch.empty(1, 16, 128, 128, dtype=torch.bfloat16))
        else:
            kind = getattr(transformers, row.model)
            model = kind(kind.config_class.from_dict(dict(config))).to(torch.bfloat16)
            run = partial(model, torch.zeros(1, 512 if name == "T5-XXL" else 77, dtype=torch.long))
    with torch.no_grad(), Operators() as counted:
        run()
    assert script.flux_modelled.ONCE[name] == pytest.approx((counted.flops, counted.bytes), rel=0.01)


class Operators(TorchDispatchMode):
    """FLOPs of products and convolutions, and bytes that the other operators read and write; of tables one row."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
            return out
        read, written = ([x for x in tree_leaves(v) if isinstance(x, torch.Tensor)] for v in ((args, kwargs), out))
        places = {x.untyped_storage()._cdata for x in read}
        if not all(x.untyped_storage()._cdata in places for x in written):  # else it is a view
            read = written if func._schema.name == "aten::embedding" else read
            self.bytes += sum(x.nbytes for x in (*read, *written))
        return out


def _with_other_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_other_numbers(each) for name, each in value.items()}
    return value + 77 if isinstance(value, float) else value


# --- the passes that are modelled, against the operators of real blocks


class Bytes(TorchDispatchMode):
    """Bytes that the operators of a block read and write, but for products, attention and the tables of angles.

    Of a product only what it adds its own to counts.

    A quantized layer that rounds its own input is a pass that rounds, and a product. paused: inside an operator.
    """

    def __init__(self, tables: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.tables = {table.untyped_storage().data_ptr() for table in tables}
        self.total, self.paused = 0.0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before, self.paused = self.paused, True
        out = func(*args, **(kwargs or {}))
        self.paused = before
        name = func._schema.name.partition("::")[2]
        if name.endswith("_matmul"):
            residual = unpack_named(ProductTensors, args[1], args[2])[0].residual
            self.total += 0 if residual is None else residual.nbytes
            return out
        if self.paused or name in ("matmul", "mm", "addmm", "bmm") or "scaled_dot_product" in name:
            return out
        if name == "quantized_linear":
            x, scheme = args[0], Scheme.parse(args[2].split()[0])
            rounded_to = scheme.activations
            if rounded_to is not None:
                self.total += x.nbytes + rounded_to.stored_bits(x.numel() // x.shape[-1], x.shape[-1]) / 8
            return out
        read, written = (self.tensors(values) for values in ((args, kwargs), out))
        if not written.keys() <= read.keys():  # else it is a view
            self.total += sum(tensor.nbytes for tensors in (read, written) for tensor in tensors.values())
        return out

    def tensors(self, values: Any) -> dict[int, torch.Tensor]:
        tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
        held = ((tensor.untyped_storage().data_ptr(), tensor) for tensor in tensors)
        return {place: tensor for place, tensor in held if place not in self.tables}


@pytest.mark.often(1)
@pytest.mark.parametrize("state", ["eager", "optimized"])
@pytest.mark.parametrize("recipe", [None, "fp8", "nvfp4"])
def test_modelled_passes_move_the_bytes_that_blocks_do(script, recipe: str | None, state: str, monkeypatch) -> None:
    import fluxq

    shape, tokens = {"hidden": 256, "blocks": [1, 1], "text": 64}, {"image": 192, "text": 64}
    cpu = torch.device("cpu")
    model = script.random_model(shape, cpu)
    passes = script.flux_modelled.passes(
        script.plan_of(model, recipe), ForwardPass("flux", tokens["image"], tokens["text"]), "sm_120"
    )
    expected = sum(each.bytes[state] for each in passes)
    if recipe:
        model = script.quantized(shape, recipe, cpu)
    if state == "optimized":
        fluxq.optimize(model)
    noise = {stream: torch.randn(1, count, 256).bfloat16() for stream, count in tokens.items()}
    rope = model.pos_embed(torch.arange(3 * sum(tokens.values())).reshape(-1, 3))
    counted = Bytes(rope)
    one_kernel_on_a_gpu(monkeypatch, counted)
    with torch.no_grad(), counted:
        for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
            block(noise["image"], noise["text"], torch.randn(1, 256).bfloat16(), rope)
    assert counted.total == pytest.approx(expected, rel=0.01)


def one_kernel_on_a_gpu(monkeypatch, counted: Bytes) -> None:
    """RMSNorm, which a CPU computes in several operators."""
    own = torch.nn.functional.rms_norm

    def rms_norm(x, *rest, **named):
        if counted.paused:
            return own(x, *rest, **named)
        counted.paused = True
        y = own(x, *rest, **named)
        counted.paused = False
        counted.total += x.nbytes + y.nbytes
        return y

    monkeypatch.setattr(torch.nn.functional, "rms_norm", rms_norm)
