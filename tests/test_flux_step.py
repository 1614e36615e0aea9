"""The benchmark of one FLUX step, cut down: that every row is made, run and written, and its arithmetic."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "flux_step.py"
SMALL = "--device cpu --hidden 128 --blocks 1+1 --pixels 64 --batch 1 --text 16 --rounds 3".split()


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


def test_every_row_runs_without_a_compiler(script, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "as_mode", lambda model, mode: model)
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    done = run(script, tmp_path / "found.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["blocks"] == [1, 1] and found["commit"] and found["torch"] == torch.__version__
    rows = {row["row"]: row for row in found["rows"]}
    assert [row.name for row in script.ROWS if row.name != script.BASELINE] == list(rows)
    assert rows.pop("torchao fp8, compiled")["missing"] == "torchao is not installed"
    for row in rows.values():
        low, middle, high = row["over_compiled_16bit"]
        assert 0 < low <= middle <= high and row["seconds"][0] > 0, row


@pytest.mark.slow  # Inductor
def test_compiled_blocks_are_fused_ones(script, tmp_path: Path) -> None:
    done = run(script, tmp_path / "found.json", "--row", "nvfp4, optimized, compiled")
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["optimized"] and row["mode"] == "compiled" and "missing" not in row


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_the_quantized_model_is_the_recipe_s_and_optimizing_it_changes_no_bit(script, recipe: str) -> None:
    import fluxq

    shape, cpu = {"hidden": 128, "blocks": [1, 1], "text": 16}, torch.device("cpu")
    model = script.quantized(shape, recipe, cpu)
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
    monkeypatch.setattr(script, "seconds_of", lambda call, device: order.append(call()) or float(len(order)))
    seconds = script.in_turn({"a": lambda: "a", "b": lambda: "b"}, 2, torch.device("cpu"))
    assert "".join(order) == "abbaabba"
    assert seconds == {"a": [5.0, 8.0], "b": [6.0, 7.0]}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "products"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_TNT", "products"),
        ("scaled_matmul_fp8_kernel", "products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("adaln_quantize_kernel", "elementwise"),
        ("triton_poi_fused_add_mul_7", "elementwise"),
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


def test_the_modelled_tables_are_those_of_the_committed_file_and_of_the_model(script) -> None:
    found = json.loads(script.MODELLED_FILE.read_text(encoding="utf-8"))
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.with_tables(page, found) == page
    now = script.modelled_steps()
    assert (now["steps"], now["passes"]) == (found["steps"], found["passes"])
    other = found | {"steps": [row | {"fused": 1.0} for row in found["steps"]]}
    assert script.with_tables(page, other) != page
