"""The benchmark at full size, cut down: that it runs what `fluxq quantize` runs, and says so."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from fluxq.recipes.recipe import load_recipe

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "full_size.py"
SMALL = "--device cpu --hidden 128 --blocks 1+1 --pixels 64 --text 16 --calls 16".split()


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.setattr("sys.path", [*sys.path])  # the script puts itself in front
    spec = importlib.util.spec_from_file_location("full_size", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_small_transformer_goes_all_the_way(script, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = CliRunner().invoke(script.main, [*SMALL, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["complete"] and found["bytes"] > 0 and found["peak_memory_bytes"] > 0
    assert set(found["seconds"]) == {"random weights", "capture", "noise levels", "running blocks", "fitting"}
    assert sum(found["seconds"].values()) == pytest.approx(found["seconds_in_all"], rel=0.2, abs=1)
    assert found["kept"]["gptq"] > 0 and found["sqnr_db"][1] > found["sqnr_db"][0]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory a process holds")
@pytest.mark.parametrize(("hidden", "most_gb"), [(256, 1.5), (3072, 2.5)])
def test_three_blocks_go_from_disk_to_disk(script, tmp_path: Path, hidden: int, most_gb: float) -> None:
    """At full width, too, what is held is the libraries and a few layers: a whole model takes no more."""
    out, work = tmp_path / "found.json", tmp_path / "work"
    command = ["--family", "flux", "--profile", "rtn", "--recipe", "nvfp4,fp8", "--work", work, "--out", out]
    shape = ["--hidden", hidden, "--blocks", "1+2"]
    done = CliRunner().invoke(script.main, [str(word) for word in command + shape], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert list(found["recipes"]) == ["nvfp4", "fp8"]
    for recipe, row in found["recipes"].items():
        assert all(0 < peak < most_gb * 1e9 for peak in row["peak_memory_bytes"].values())
        assert row["bytes"] < 0.7 * found["bytes"]
        assert (
            set(row["seconds"]) == set(row["cpu_seconds"]) == {"quantize", "copying alone", "rounding alone", "verify"}
        )
        decibels = row["block"]["output_sqnr_db"].values()
        assert len(decibels) == 6 and min(decibels) > {"nvfp4": 15, "fp8": 25}[recipe]
    assert [path.name for path in work.iterdir()] == [f"flux-{hidden}-1-2"]  # kept for the next time


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory a process holds")
def test_layers_of_a_model_on_disk_are_fitted(script, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = ["--family", "flux", "--hidden", "128", "--blocks", "1+1", "--out", str(out)]
    done = CliRunner().invoke(script.main, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())["recipes"]["nvfp4"]
    assert row["peak_memory_bytes"]["quantize"] > 0 and min(row["block"]["output_sqnr_db"].values()) > 15


@pytest.mark.slow
def test_the_random_model_is_the_same_each_time_and_loads(script, tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel

    for name in ("one", "two"):
        script.write_model(tmp_path / name, 128, 1, 1, runs=False)
    (one,), (two,) = (list((tmp_path / name / "transformer").glob("*.safetensors")) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    model = FluxTransformer2DModel.from_pretrained(tmp_path / "one" / "transformer", torch_dtype="auto")
    weight = model.transformer_blocks[0].attn.to_q.weight.float()
    assert abs(weight.std() - 0.02) < 0.001 and model.config.guidance_embeds


def test_without_a_gpu_the_script_says_what_to_do(script, monkeypatch) -> None:
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(script.main, [])
    assert done.exit_code == 2 and "--device cpu" in done.output


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process held")
def test_a_layer_is_timed_and_weighed(script) -> None:
    row = script.layer_time(load_recipe("nvfp4")[1], 96, 256, "adaln", "norm")
    assert (row["n"], row["k"], row["tokens"]) == (96, 256, 256)
    assert row["sqnr_db"][1] > row["sqnr_db"][0] and "gptq" in row["kept"]
    assert 0 <= row["cpu_seconds"] and 0 <= row["seconds"] < 60 and row["peak_over_inputs_in_grams"] >= 0
