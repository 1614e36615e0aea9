"""Files of other programs as checkpoints of fluxq: every code as it was, in models that diffusers loads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from exchange_files import base_state, export, write_base, write_model
from safetensors.torch import load_file, save_file

import fluxq
from fluxq.base.model import ModelFolder
from fluxq.cli import cli
from fluxq.eval.report.card import model_card
from fluxq.jobs import judge
from fluxq.jobs.exchange import import_
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.inspect import inspect_path
from fluxq.quantize.exchange.layouts import swap_nibbles
from fluxq.quantize.verify import CHECKS, verify
from fluxq.recipes.keymaps import original_names
from tests.exchange.test_inspect import change, drop, gguf_bytes, made
from tests.exchange.test_layers import same_bytes

NVFP4, FP8 = "nvfp4-nvfp4-static", "fp8-fp8"


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "transformer")


def loaded(folder: Path) -> FluxTransformer2DModel:
    """As anybody loads it, with `import fluxq` above."""
    assert fluxq.__version__
    return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)


def layers(model: torch.nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "scheme"),
    [
        *(("bfl", scheme) for scheme in (NVFP4, FP8)),
        *(("comfy", scheme) for scheme in (NVFP4, "mxfp8-mxfp8", "int8-int8", "fp8_tensor-fp8_tensor")),
        *(("modelopt", scheme) for scheme in (NVFP4, "mxfp8-mxfp8")),
        *(("torchao", scheme) for scheme in ("nvfp4-nvfp4", "int8-int8", FP8)),
        *(("compressed_tensors", scheme) for scheme in ("mxfp4-mxfp4", "int8-16bit", FP8)),
        *(("nunchaku_lite", scheme) for scheme in ("int4-int4", "nvfp4-nvfp4")),
    ],
)
def test_codes_stay_and_diffusers_loads_them(dialect, scheme, base, tmp_path) -> None:
    path, out = made(tmp_path, dialect, scheme), tmp_path / "out"
    (report,) = import_model(path, out, base)
    read = scheme + "-static" * (scheme == "fp8_tensor-fp8_tensor")  # the file has a scale for x
    assert report.mended == report.dequantized == {} and set(report.quantized.values()) == {read}
    model, state = loaded(out), base_state()
    held = layers(model)
    assert held.keys() == report.quantized.keys() and len(held) == 22
    for name, layer in held.items():
        own = QuantizedTensor.quantize(
            state[f"{name}.weight"], layer.scheme.weights, global_scale=_global(layer, dialect)
        )
        if layer.scheme.weights.name not in ("fp8_tensor",):  # whose one scale is that of q, k and v together
            assert same_bytes(layer.quantized_weight.codes, own.codes), name
        error = (layer.quantized_weight.dequantize() - state[f"{name}.weight"].float()).norm()
        assert error < 0.13 * state[f"{name}.weight"].float().norm()
        assert torch.equal(layer.bias, state[f"{name}.bias"])
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in held:
            assert torch.equal(tensor, state[name]), name


def _global(layer: QuantLinear, dialect: str) -> torch.Tensor | None:
    """Return the global scale that the codes were made with; None without one, and for nunchaku, which rounds it.

    q, k and v of one file share theirs.
    """
    return layer.stored("weight_scale_2") if layer.scheme.weights.two_level and "nunchaku" not in dialect else None


@pytest.mark.slow
def test_a_pipeline_as_base_makes_a_whole_pipeline(plain_checkpoint, tmp_path) -> None:
    tiny = plain_checkpoint("16 bit")
    state = load_file(tiny / "transformer" / "diffusion_pytorch_model.safetensors")
    config = json.loads((tiny / "transformer" / "config.json").read_text())
    path = write_model(tmp_path / "model.safetensors", "comfy", NVFP4, state=state)
    (report,) = import_model(path, tmp_path / "out", tiny)
    assert report.component == "transformer" and report.quantized
    assert json.loads((tmp_path / "out/transformer/config.json").read_text()) | {"quantization_config": 0} == config | {
        "quantization_config": 0
    }
    assert {result.status for result in verify(tmp_path / "out")} <= {"ok", "not recorded"}
    pipe: Any = DiffusionPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a red circle", num_inference_steps=1, height=64, width=64, output_type="pt").images
    assert torch.isfinite(image).all()


@pytest.mark.slow
def test_an_imported_pipeline_is_evaluated_like_any_other(plain_checkpoint, tmp_path) -> None:
    made = export(ModelFolder("tiny", plain_checkpoint("fp8")), "bfl", tmp_path / "fp8.safetensors")
    import_model(Path(made.target), tmp_path / "out", plain_checkpoint("16 bit"))
    call = {"height": 16, "width": 16, "num_inference_steps": 1}
    options = judge.JudgeOptions(
        count=1, seeds=1, backends=("native",), metrics=("psnr",), call=call, images=tmp_path / "i"
    )
    report = judge.evaluate(judge.subject_of(tmp_path / "out", options))
    assert report is not None and report.runs[0].recipe == "imported from bfl"
    assert report.runs[0].provenance["imported files (SHA-256)"].startswith("fp8.safetensors (")


def test_a_link_into_the_hubs_cache_gives_its_own_name(tmp_path, monkeypatch) -> None:
    (tmp_path / ("0" * 64)).write_bytes(b"")
    (tmp_path / "flux-nvfp4.safetensors").symlink_to(tmp_path / ("0" * 64))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fluxq.jobs.exchange.import_model", lambda source, target, *_, **__: target)
    assert import_("flux-nvfp4.safetensors") == Path("flux-nvfp4-fluxq")


@pytest.mark.slow
def test_faults_are_mended_where_the_base_proves_them(base, tmp_path) -> None:
    right = made(tmp_path / "right", "comfy", NVFP4)
    wrong = made(tmp_path / "wrong", "comfy", NVFP4, change("weight", swap_nibbles))
    import_model(right, tmp_path / "a", base)
    (report,) = import_model(wrong, tmp_path / "b", base)
    assert len(report.mended) == 12 and set(map(tuple, report.mended.values())) == {("swapped nibbles",)}
    a, b = (load_file(tmp_path / name / "diffusion_pytorch_model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(same_bytes(a[name], b[name]) for name in a)


@pytest.mark.often(1)
@pytest.mark.parametrize("also", [(), ("norm_out",)], ids=["16 bit", "quantized"])
def test_rows_in_another_order_are_put_back(also, base, tmp_path) -> None:
    state, name = base_state(), "transformer_blocks.0.attn.to_"
    moved = dict(state)
    for place, letter in zip("qkv", "vqk", strict=True):
        moved |= {f"{name}{place}.{part}": state[f"{name}{letter}.{part}"] for part in ("weight", "bias")}
    last = "norm_out.linear.weight"
    moved |= {last: torch.cat(list(state[last].chunk(2))[::-1])}
    moved |= {"norm_out.linear.bias": state["norm_out.linear.bias"].roll(128)}
    (report,) = import_model(made(tmp_path, "comfy", NVFP4, state=moved, also=also), tmp_path / "out", base)
    assert report.mended["final_layer.adaLN_modulation.1"] == ["halves swapped"] and len(report.mended) == 2
    model = loaded(tmp_path / "out")
    assert ("norm_out.linear" in layers(model)) == bool(also)
    for module in (*(f"{name}{letter}" for letter in "qkv"), "norm_out.linear"):
        layer: Any = model.get_submodule(module)
        truth = state[f"{module}.weight"].float()
        weight = layer.quantized_weight.dequantize() if isinstance(layer, QuantLinear) else layer.weight.float()
        assert (weight - truth).norm() < 0.13 * truth.norm(), module
        assert torch.equal(layer.bias, state[f"{module}.bias"]), module


def test_what_is_not_the_bases_is_refused_by_name_and_nothing_is_left(base, tmp_path) -> None:
    name = "transformer_blocks.0.ff.net.2.weight"
    path = made(tmp_path, "comfy", NVFP4, state=base_state() | {name: base_state(1)[name]})
    with pytest.raises(ValueError, match=r"double_blocks\.0\.img_mlp\.2: another model's layer"):
        import_model(path, tmp_path / "out", base)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors"]


def test_a_link_in_the_base_that_leads_nowhere_is_no_reason_to_stop(tmp_path) -> None:
    mine = write_base(tmp_path / "base")
    (mine / "dangling").symlink_to(tmp_path / "nowhere")
    (report,) = import_model(made(tmp_path, "modelopt", "fp8-fp8"), tmp_path / "out", mine)
    assert len(report.quantized) == 22


def test_a_file_that_says_nothing_needs_a_base(base, tmp_path) -> None:
    marked, bare = made(tmp_path / "a", "comfy", NVFP4), made(tmp_path / "b", "comfy", NVFP4, marked=False)
    with pytest.raises(ValueError, match="does not say the model's configuration; give the 16-bit model as --base"):
        import_model(marked, tmp_path / "out")
    with pytest.raises(ValueError, match=r"nor does .*pytorch_model\.safetensors; give .* whose config\.json says it"):
        import_model(marked, tmp_path / "out", base / "diffusion_pytorch_model.safetensors")
    original = write_base(tmp_path / "original")
    (original / "config.json").write_text('{"_class_name": "WanModel"}')  # as the authors' repository has it
    with pytest.raises(ValueError, match="WanModel is no class of diffusers or transformers; give the 16-bit model in"):
        import_model(marked, tmp_path / "out", original)
    (bare.parent / "config.json").write_text((base / "config.json").read_text())
    with pytest.raises(ValueError, match="`--base` proves them; without it `fluxq import` would guess"):
        import_model(bare.parent, tmp_path / "out")
    (report,) = import_model(bare.parent, tmp_path / "out", base)
    assert report.dialect == "comfy" and len(report.quantized) == 22


def q8_0(weight: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """llama.cpp's blocks of 32 with an fp16 scale, and the weight that they stand for."""
    blocks = weight.float().reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    data = torch.cat([scale.view(torch.int8), codes], dim=1).numpy().tobytes()
    return data, (codes * scale.float()).reshape(weight.shape)


def test_codes_that_no_format_holds_become_16_bit_only_where_asked(base, tmp_path) -> None:
    state, tensors, exact = base_state(), {}, {}
    for whole, parts, order in original_names("flux", state.keys()):
        rows = torch.cat([state[part] for part in parts])
        rows = torch.cat(rows.chunk(2)[::-1]) if order == "halves swapped" else rows
        if rows.ndim == 2 and "blocks" in whole and "mod" not in whole:
            tensors[whole] = (8, tuple(rows.shape), q8_0(rows)[0])
            exact |= {part: q8_0(state[part])[1].bfloat16() for part in parts}
        else:
            tensors[whole] = (0, tuple(rows.shape), rows.float().numpy().tobytes())
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(tensors))
    with pytest.raises(ValueError, match=r"codes of gguf \(12 layers\); --dequantize makes them 16 bit"):
        import_model(path, tmp_path / "out", base, on_start=lambda: pytest.fail("work was said to have started"))
    pytest.importorskip("gguf", reason="gguf is not installed")
    (report,) = import_model(path, tmp_path / "out", base, dequantize=True)
    assert len(report.dequantized) == 22 and report.quantized == {} and report.mended == {}
    assert set(report.dequantized.values()) == {"Q8_0 has blocks of 32"}
    for name, tensor in loaded(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, exact.get(name, state[name])), name


def test_a_missing_input_scale_leaves_the_scale_to_each_token(base, tmp_path) -> None:
    path = made(tmp_path, "bfl", NVFP4, drop("input_scale"), original=True, marked=False)
    (report,) = import_model(path, tmp_path / "out", base)
    assert report.dialect == "bfl" and set(report.quantized.values()) == {"nvfp4-nvfp4"}
    assert all(faults == ["missing input_scale"] for faults in report.mended.values())
    assert "input_scale" not in "".join(load_file(tmp_path / "out/diffusion_pytorch_model.safetensors"))


def test_a_model_that_is_not_whole_is_refused(tmp_path) -> None:
    weights = made(tmp_path, "modelopt", FP8) / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    state.pop("proj_out.weight")
    save_file(state, weights)
    with pytest.raises(
        ValueError, match=r"lacks proj_out\.weight \(1 in all\) that a FluxTransformer2DModel of the configuration"
    ):
        import_model(weights.parent, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def with_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A file or folder once its tensors are changed."""
    weights = path / "diffusion_pytorch_model.safetensors" if path.is_dir() else path
    change(state := load_file(weights))
    save_file(state, weights)
    return path


@pytest.mark.slow
def test_what_is_no_code_has_one_dtype_of_16_bit(tmp_path) -> None:
    def halves(state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            if tensor.dtype == torch.bfloat16 and name not in ("proj_out.bias", "transformer_blocks.0.attn.to_q.bias"):
                state[name] = tensor.to(torch.float8_e4m3fn if "norm_q" in name else torch.float16)

    import_model(with_tensors(made(tmp_path, "modelopt", FP8), halves), tmp_path / "out")
    written = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert torch.bfloat16 not in {tensor.dtype for tensor in written.values()}
    assert {result.status for result in verify(tmp_path / "out")} == {"ok"}


def test_a_matrix_that_stands_on_its_side_is_refused(tmp_path) -> None:
    def turned(state: dict[str, torch.Tensor]) -> None:
        state["x_embedder.weight"] = state["x_embedder.weight"].T.contiguous()

    path = with_tensors(made(tmp_path, "modelopt", FP8), turned)
    with pytest.raises(ValueError, match=r"x_embedder\.weight is 16×128, the model asks for \[\(128, 16\)\]"):
        import_model(path, tmp_path / "out")


@pytest.mark.slow
def test_the_command_imports_a_folder_by_itself(tmp_path) -> None:
    made(tmp_path, "modelopt", NVFP4)
    out = tmp_path / "out"
    done = CliRunner().invoke(cli, ["import", str(tmp_path / "model"), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "22 Linears with their codes as they were, 0 made 16 bit" in done.output
    assert len(layers(loaded(out))) == 22
    again = CliRunner().invoke(cli, ["import", str(tmp_path / "model"), "-o", str(out)])
    assert again.exit_code == 0 and "written before" in again.output
    again = CliRunner().invoke(cli, ["import", str(tmp_path / "model"), "-o", str(out), "--dequantize"])
    assert again.exit_code == 2 and "exists" in again.output
    done = CliRunner().invoke(cli, ["import", str(tmp_path / "model"), "-o", str(out), "--overwrite", "--json"])
    assert done.exit_code == 0 and len(json.loads(done.output)[0]["quantized"]) == 22
    native = CliRunner().invoke(cli, ["import", str(out), "-o", str(tmp_path / "third")])
    assert native.exit_code == 2 and "nothing in it was quantized by another program" in native.output


@pytest.mark.slow
def test_one_model_without_its_pipeline_is_a_checkpoint_too(base, tmp_path) -> None:
    """Check what is typed next: verify, export to a file and a folder, import of those; eval says what it lacks."""
    out = tmp_path / "out"
    import_model(made(tmp_path, "comfy", NVFP4), out, base, card=model_card)
    assert [(result.check, result.status) for result in verify(out)] == [(check, "ok") for check in CHECKS]
    (loading,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    exec(loading.replace("path/to/this/folder", str(out)), names := {})
    assert len(layers(names["model"])) == 22 and "of the model are quantized" in (out / "README.md").read_text()
    for dialect, target in (("bfl", "file.safetensors"), ("comfy", "file.safetensors"), ("modelopt", "folder")):
        at = tmp_path / dialect / target
        at.parent.mkdir()
        done = CliRunner().invoke(cli, ["export", str(out), "--format", dialect, "-o", str(at)])
        assert done.exit_code == 0 and f"{dialect} of the model" in done.output, done.output
        assert not list(at.parent.rglob("fluxq_plan.json")) and not list(at.parent.rglob("model_index.json"))
        back = tmp_path / f"back from {dialect}"
        (report,) = import_model(at, back, base if dialect == "comfy" else None)  # its configuration is beside it
        assert (report.dialect, report.component) == (dialect, "") and {r.status for r in verify(back)} == {"ok"}
        held = [load_file(folder / "diffusion_pytorch_model.safetensors") for folder in (out, back)]
        assert held[0].keys() == held[1].keys() and all(same_bytes(held[0][name], held[1][name]) for name in held[0])
    for command in ("eval", "bench", "debug"):
        done = CliRunner().invoke(cli, [command, str(out)])
        assert done.exit_code == 2 and "one model without its pipeline" in done.output and "--base" in done.output
    done = CliRunner().invoke(cli, ["quantize", str(out), "--recipe", "fp8"])
    assert done.exit_code == 2 and "give the pipeline's folder" in done.output


def test_what_is_damaged_in_one_models_folder_is_named(base, tmp_path) -> None:
    out, layer = tmp_path / "out", "transformer_blocks.0.attn.to_k.weight_scale"
    weights = out / "diffusion_pytorch_model.safetensors"
    import_model(made(tmp_path, "bfl", FP8), out, base)
    tensors = load_file(weights)
    save_file(tensors | {layer: tensors[layer] * 0}, weights, {"format": "pt"})
    found = {result.check: [finding.where for finding in result.findings] for result in verify(out)}
    assert found["tensors"] == [layer] and found["hashes"] == [weights.name]
    config = json.loads((out / "config.json").read_text())
    for class_name, what in ((None, "names no class"), ("Absent", "config.json: Absent")):
        (out / "config.json").write_text(json.dumps(config | {"_class_name": class_name}))
        assert any(what in finding.what for result in verify(out) for finding in result.findings)


def test_a_configuration_beside_a_file_is_checked_like_any_other(base, tmp_path) -> None:
    path = made(tmp_path, "bfl", FP8)
    beside = path.with_name("model.config.json")
    with pytest.raises(ValueError, match="give the 16-bit model as --base"):
        import_model(path, tmp_path / "out")
    config = json.loads((base / "config.json").read_text())
    beside.write_text(json.dumps(config | {"num_layers": 10**6}))
    with pytest.raises(ValueError, match=r"model\.config\.json: num_layers"):
        import_model(path, tmp_path / "out")
    beside.unlink()
    beside.symlink_to(base / "config.json")
    with pytest.raises(ValueError, match="leads out of the folder"):
        inspect_path(path)
    beside.unlink()
    beside.write_text('{"no": "class"}')  # some other program's
    assert inspect_path(path)[""].container == "single safetensors file"


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["bfl", "modelopt", "torchao"])
def test_a_checkpoint_comes_back_from_another_program_byte_for_byte(dialect, plain_checkpoint, tmp_path) -> None:
    checkpoint, name = plain_checkpoint("fp8"), "transformer/diffusion_pytorch_model.safetensors"
    target = tmp_path / ("there.safetensors" if dialect == "bfl" else "there")
    export(ModelFolder("tiny", checkpoint), dialect, target)
    (report,) = import_model(target, tmp_path / "back", plain_checkpoint("16 bit"))
    configs = [json.loads((f / "transformer/config.json").read_text()) for f in (checkpoint, tmp_path / "back")]
    layers, found = ({key: set(names) for key, names in c["quantization_config"]["layers"].items()} for c in configs)
    widened = layers.pop("fp8-16bit") if dialect == "modelopt" else set()  # modulation, which it has in 16 bit
    if dialect == "bfl":  # which does not say that x is not rounded
        layers = {"fp8-fp8": layers["fp8-fp8"] | layers["fp8-16bit"]}
    assert layers == found
    before, after = (
        {key: tensor for key, tensor in load_file(folder / name).items() if key.rpartition(".")[0] not in widened}
        for folder in (checkpoint, tmp_path / "back")
    )
    assert report.mended == report.dequantized == {} and before.keys() == after.keys() and before
    assert all(same_bytes(before[key], after[key]) for key in before)


def test_a_weight_that_was_dequantized_is_told_from_one_that_was_trained_on(base, tmp_path) -> None:
    name, state = "transformer_blocks.0.norm1.linear.weight", base_state()
    rounded = QuantizedTensor.quantize(state[name], "fp8").dequantize(torch.bfloat16)
    path = made(tmp_path, "comfy", NVFP4, state=state | {name: rounded})
    report = inspect_path(path, base)[""]
    assert [fault.layer for fault in report.faults if fault.kind == "widened"] == ["double_blocks.0.img_mod.lin"]
    assert report.is_sound
