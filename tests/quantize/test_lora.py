"""LoRA files fused before quantizing: the right sum, recorded, and no key left out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxq import tiny
from fluxq.base.model import resolve_model
from fluxq.jobs import judge, making
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize import run as run_module
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.lora import FusedWeights, LoraFile, fuse_into, read_updates

LAYERS = ("to_q", "ff.net.2", "norm1.linear", "x_embedder")
TINY = resolve_model("tiny")


def fused(*specs: str) -> FusedWeights:
    return FusedWeights(TINY, "transformer", [read_updates(LoraFile.parse(s), TINY, "transformer") for s in specs])


def test_the_sum_is_what_diffusers_fuses_into_a_16_bit_model(lora_file):
    one, two = lora_file("one.safetensors", LAYERS, alpha=3), lora_file("two.safetensors", ("to_q",), rank=8, seed=1)
    weights = fused(f"{one}:0.8", f"{two}:-0.5")
    reference = tiny.load()
    reference.transformer.float()
    reference.load_lora_weights(one, adapter_name="one")
    reference.load_lora_weights(two, adapter_name="two")
    reference.set_adapters(["one", "two"], [0.8, -0.5])
    reference.fuse_lora()
    reference.unload_lora_weights()
    want, plain = reference.transformer.state_dict(), SourceWeights(TINY, "transformer")
    assert weights.names == plain.names
    assert sum(not torch.equal(weights[name], plain[name]) for name in weights.names) == 5 + 1 + 1 + 1
    for name in weights.names:
        torch.testing.assert_close(weights[name].float(), want[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_loaded_model_gets_the_same_sum_in_its_own_dtype(lora_file):
    file = lora_file("one.safetensors", LAYERS)
    updates = [read_updates(LoraFile(file, 0.7), TINY, "transformer")]
    model, weights = tiny.load().transformer, FusedWeights(TINY, "transformer", updates)
    fuse_into(model, updates)
    assert all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in model.state_dict().items())


def test_two_files_that_change_one_layer_add_up(lora_file):
    one, two = (f"{lora_file(f'{seed}.safetensors', LAYERS, seed=seed)}:0.7" for seed in range(2))
    model, weights = tiny.load().transformer, fused(one, two)
    fuse_into(model, [read_updates(LoraFile.parse(each), TINY, "transformer") for each in (one, two)])
    for name, tensor in model.state_dict().items():  # the order in which they add up is another one
        torch.testing.assert_close(tensor.float(), weights[name].float(), rtol=2**-7, atol=1e-5)


def kohya(tensors: dict[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """The same LoRA under the names that kohya's trainer gives single blocks."""
    renamed = {}
    for name, tensor in tensors.items():
        layer, _, side = name.removeprefix("transformer.").removesuffix(".weight").rpartition(".")
        stem = "lora_unet_" + layer.replace("single_transformer_blocks.", "single_blocks_").replace(
            ".proj_out", "_linear2"
        )
        renamed[f"{stem}.lora_{'down' if side == 'lora_A' else 'up'}.weight"] = tensor
        renamed[f"{stem}.alpha"] = torch.tensor(alpha)
    return renamed


def test_files_of_other_trainers_are_read_as_diffusers_reads_them(lora_file, tmp_path):
    file = lora_file("own.safetensors", ("single_transformer_blocks.*.proj_out",), alpha=2)
    save_file(kohya(load_file(file), 2.0), tmp_path / "kohya.safetensors")
    own, other = fused(str(file)), fused(str(tmp_path / "kohya.safetensors"))
    name = "single_transformer_blocks.2.proj_out.weight"
    assert not torch.equal(own[name], SourceWeights(TINY, "transformer")[name])
    for name in own.names:
        torch.testing.assert_close(other[name].float(), own[name].float(), rtol=1e-2, atol=1e-3)


def damaged(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(file)
    change(tensors)
    path = file.with_name("damaged.safetensors")
    save_file(tensors, path)
    return path


A, B = "transformer.x_embedder.lora_A.weight", "transformer.x_embedder.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({A.replace("x_emb", "y_emb"): t[A].clone(), B.replace("x_emb", "y_emb"): t[B].clone()}),
            "y_emb",
        ),
        (
            lambda t: t.update({"vae.q.lora_A.weight": t[A].clone()}),
            r"vae\.q.* no part of transformer",
        ),
        (
            lambda t: t.update({"text_encoder.q.lora_A.weight": t[A].clone()}),
            r"text_encoder\.q.* adapt a text encoder.* let diffusers fuse it",
        ),
        (lambda t: t.update({B: t[B][1:].clone()}), r"(?s)does not fit .*x_embedder"),
        (lambda t: t.update({A: t[A][:, 1:].clone()}), r"(?s)does not fit .*x_embedder"),
        (lambda t: t[A].fill_(float("nan")), "x_embedder: holds NaN"),
        (
            lambda t: t.update({"transformer.x_embedder.lora_magnitude_vector": torch.ones(128)}),
            "x_embedder.lora_magnitude_vector are a DoRA's",
        ),
        (lambda t: t.pop(B), "x_embedder"),
    ],
)
def test_nothing_is_left_out_silently(lora_file, change, message):
    file = lora_file("l.safetensors", ("x_embedder", "to_q"))
    with pytest.raises(ValueError, match=message):
        read_updates(LoraFile(damaged(file, change), 1.0), TINY, "transformer")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lora_unet_nowhere.lora_down.weight", "nowhere"),
        ("lora_unet_single_blocks_0_linear2.diff_b", r"keys \S+linear2\.diff_b change norms, biases"),
        ("diffusion_model.single_blocks.0.norm.query_norm.diff", r"keys \S+norm\.diff change norms, biases"),
        ("lora_te3_encoder_block_0_layer_0_SelfAttention_q.lora_up.weight", "keys lora_te3.* adapt a text encoder"),
        ("text_encoders.t5xxl.transformer.shared.lora_up.weight", r"keys \S+t5xxl.* adapt a text encoder"),
    ],
)
def test_keys_that_a_converter_would_drop_are_an_error(key, message, lora_file, tmp_path):
    file = lora_file("own.safetensors", ("single_transformer_blocks.*.proj_out",), alpha=2)
    save_file(kohya(load_file(file), 2.0) | {key: torch.ones(4, 4)}, tmp_path / "kohya.safetensors")
    with pytest.raises(ValueError, match=message):
        fused(str(tmp_path / "kohya.safetensors"))


def test_keys_of_zeros_that_a_converter_drops_change_nothing(lora_file, tmp_path):
    file = lora_file("own.safetensors", ("single_transformer_blocks.0.proj_out",), alpha=2)
    zeros = {"lora_unet_single_blocks_0_linear2.diff_b": torch.zeros(4)}
    save_file(kohya(load_file(file), 2.0) | zeros, tmp_path / "kohya.safetensors")
    updates = read_updates(LoraFile(tmp_path / "kohya.safetensors", 1.0), TINY, "transformer")
    assert updates.keys() == {"single_transformer_blocks.0.proj_out"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{file}:x", "number as weight"),
        ("{file}:inf", "no finite number"),
        ("nowhere.safetensors:1", "does not exist"),
        ("{file.parent}:1", "is a folder: name the .safetensors file in it"),
        ("{file}.bin:1", "no safetensors"),
    ],
)
def test_what_is_no_file_with_a_weight_is_refused(lora_file, text, error):
    file = lora_file("l.safetensors", ("to_q",))
    file.with_name("l.safetensors.bin").write_bytes(b"unpickled by whoever trusts a suffix")
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        LoraFile.parse(text.format(file=file))


def test_a_file_alone_has_weight_one_also_with_a_colon_in_its_name(lora_file, tmp_path):
    file = lora_file("l.safetensors", ("to_q",))
    assert LoraFile.parse(str(file)).weight == 1
    odd = file.rename(tmp_path / "style:2.safetensors")
    assert LoraFile.parse(str(odd)) == LoraFile(odd, 1.0)
    assert LoraFile.parse(f"{odd}:0.5") == LoraFile(odd, 0.5)


def options(tmp_path: Path, **how) -> making.JobOptions:
    return making.JobOptions(
        **{"model": "tiny", "recipe": "int8", "profile": "rtn", "output": str(tmp_path / "out"), **how}
    )


@pytest.mark.slow
def test_the_checkpoint_holds_the_fused_weights_and_says_so(lora_file, tmp_path):
    file = lora_file("l.safetensors", LAYERS)
    record = making.quantize(making.job_of(options(tmp_path, lora=(f"{file}:0.8",), check=False)))
    (lora,) = record.loras
    assert lora.model_dump() == {
        "file": str(file),
        "weight": 0.8,
        "sha256": LoraFile(file, 0.8).digest,
        "component": "transformer",
    }
    assert "`l.safetensors` at weight 0.8 in `transformer`" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "fluxq_plan.json").read_text())["loras"] == [lora.model_dump()]
    stored = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    weights, layer = fused(f"{file}:0.8"), "transformer_blocks.0.attn.to_q"
    want = QuantizedTensor.quantize(weights[f"{layer}.weight"], "int8")
    assert torch.equal(stored[f"{layer}.weight"], want.codes)
    assert torch.equal(stored["x_embedder.weight"], weights["x_embedder.weight"].bfloat16())


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_blocks_that_a_lora_changed(lora_file, tmp_path, monkeypatch, caplog):
    asked = options(tmp_path, lora=(f"{lora_file('l.safetensors', LAYERS)}:0.8",), check=False)
    finish, made = run_module.finish, []

    def stops(file, *rest):
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(file.name)
        finish(file, *rest)

    monkeypatch.setattr(run_module, "finish", stops)
    with pytest.raises(KeyboardInterrupt):
        making.quantize(making.job_of(asked))
    again = []
    monkeypatch.setattr(run_module, "finish", lambda file, *rest: again.append(file.name) or finish(file, *rest))
    making.quantize(making.job_of(asked))
    assert len(made) == 4 and not {*made} & {*again} and "other weights" not in caplog.text


@pytest.mark.long
def test_layers_are_fitted_to_and_checked_against_the_16_bit_model_that_has_the_lora(lora_file, quick_recipe, tmp_path):
    file = lora_file("l.safetensors", (*LAYERS, "proj_out", "to_v"))
    fitted = {"recipe": str(quick_recipe("int8")), "profile": None}
    record = making.quantize(making.job_of(options(tmp_path, lora=(f"{file}:1.5",), **fitted)))
    assert all(group.sqnr_db > 30 for group in record.components[0].groups)
    assert record.check.mean_psnr_db > 40
    how = judge.JudgeOptions(count=2, metrics=("psnr",), backends=("native",), call={"num_inference_steps": 2})
    (run,) = judge.evaluate(judge.subject_of(tmp_path / "out", how)).runs
    assert run.metrics["psnr"].value.mean > 40


def test_a_checkpoint_with_another_lora_is_another_checkpoint(lora_file, tmp_path):
    file = lora_file("l.safetensors", ("to_q",))
    making.quantize(making.job_of(options(tmp_path, lora=(str(file),), check=False)))
    assert making.job_of(options(tmp_path, lora=(str(file),), check=False)).finished
    for other in ((), (f"{file}:0.5",)):
        with pytest.raises(ValueError, match="differs in loras"):
            making.job_of(options(tmp_path, lora=other, check=False))


def test_statistics_of_the_model_without_the_lora_are_refused(lora_file, tmp_path, statistics_file):
    how = {"statistics": str(statistics_file), "check": False}
    with pytest.raises(ValueError, match="were gathered on another model"):
        making.job_of(
            making.JobOptions(model="tiny", recipe="nvfp4", lora=(str(lora_file("l.safetensors", ("to_q",))),), **how)
        )


def test_evaluating_needs_the_lora_that_was_fused(lora_file, tmp_path):
    file = lora_file("l.safetensors", ("to_q",))
    making.quantize(making.job_of(options(tmp_path, lora=(str(file),), check=False)))
    lora_file("l.safetensors", ("to_q",), seed=5)
    with pytest.raises(ValueError, match=r"l\.safetensors: this LoRA was fused .* put it back"):
        judge.subject_of(tmp_path / "out", judge.JudgeOptions())
