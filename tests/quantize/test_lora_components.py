"""LoRA files of pipelines whose denoiser is a UNet, or two transformers: into what their keys or the user names."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import save_file
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

from fluxq import tiny
from fluxq.base.model import resolve_model
from fluxq.eval.images.sides import Side
from fluxq.jobs import judge, making
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.lora import FusedWeights, LoraFile, of_component, updates_of
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.all_families import FAMILIES

CALL = {"num_inference_steps": 2, "height": 16, "width": 16}


def encoder(name: str, **changed) -> nn.Module:
    row = FAMILIES[name]
    model = getattr(transformers, row.model)
    return model(model.config_class.from_dict({**TINY_CONFIGS[row.name], "vocab_size": 2048, **changed}))


def tokenizer(name: str):
    return transformers.AutoTokenizer.from_pretrained(Path(tiny.path()) / name)


def save(pipe: diffusers.DiffusionPipeline, folder: Path, call: dict) -> Path:
    pipe.to(torch.bfloat16).save_pretrained(folder)
    (folder / "fluxq_generation.json").write_text(json.dumps(call))
    return folder


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    row = FAMILIES["unet"]
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=diffusers.AutoencoderKL.from_config({**TINY_CONFIGS["kl"], "latent_channels": 4}),
        text_encoder=encoder("clip"),
        text_encoder_2=encoder("clip_projection"),
        tokenizer=tokenizer("tokenizer"),
        tokenizer_2=tokenizer("tokenizer"),
        unet=diffusers.UNet2DConditionModel.from_config(TINY_CONFIGS[row.name]),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )
    return save(pipe, tmp_path_factory.mktemp("sdxl") / "model", CALL)


@pytest.fixture(scope="module")
def wan(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = {**TINY_CONFIGS["wan"], "image_dim": None, "added_kv_proj_dim": None, "text_dim": 128}
    pipe = diffusers.WanPipeline(
        tokenizer=tokenizer("tokenizer_2"),
        text_encoder=encoder("umt5"),
        transformer=diffusers.WanTransformer3DModel(**config),
        transformer_2=diffusers.WanTransformer3DModel(**config),
        vae=diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, num_res_blocks=1),
        scheduler=diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        boundary_ratio=0.5,
    )
    return save(pipe, tmp_path_factory.mktemp("wan") / "model", {**CALL, "num_frames": 1, "guidance_scale": 1.0})


def factors(model: nn.Module, layers: tuple[str, ...], rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """A and B of Linears and convolutions, as PEFT shapes them, under the names of the model."""
    noise = torch.Generator().manual_seed(seed)
    made = {}
    for name in layers:
        module = model.get_submodule(name)
        n, k, *kernel = module.weight.shape
        made[f"{name}.lora_A.weight"] = torch.randn(rank, k, *kernel, generator=noise) / k**0.5
        made[f"{name}.lora_B.weight"] = torch.randn(n, rank, *[1] * len(kernel), generator=noise) / n**0.5
    return made


def kohya(factors: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The same under the names of kohya's trainer, which writes paths with underscores."""
    renamed = {}
    for key, tensor in factors.items():
        layer, side = key.removesuffix(".weight").rsplit(".", 1)
        stem = f"lora_unet_{layer.replace('.', '_')}"
        renamed[f"{stem}.lora_{'down' if side == 'lora_A' else 'up'}.weight"] = tensor
        renamed[f"{stem}.alpha"] = torch.tensor(alpha)
    return renamed


def fused_by_diffusers(folder: Path, component: str, *files: tuple[Path, float], **how) -> dict[str, Tensor]:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    for index, (file, _) in enumerate(files):
        pipe.load_lora_weights(file, adapter_name=str(index), **how)
    model = getattr(pipe, component)
    model.set_adapters([str(index) for index in range(len(files))], [weight for _, weight in files])
    model.fuse_lora()
    model.unload_lora()
    return model.state_dict()


def fused(folder: Path, component: str, *texts: str) -> FusedWeights:
    model = resolve_model(str(folder))
    loras = [of_component(LoraFile.parse(text), model, denoisers_of(model)) for text in texts]
    return FusedWeights(model, component, updates_of(loras, model)[component])


def require_same(weights: FusedWeights, want: dict[str, Tensor], plain: SourceWeights, changed: int) -> None:
    assert sum(not torch.equal(weights[name], plain[name]) for name in weights.names) == changed
    for name in weights.names:
        torch.testing.assert_close(weights[name].float(), want[name], rtol=1e-5, atol=1e-6)


BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"
UNET_LAYERS = (
    f"{BLOCK}.attn1.to_q",
    f"{BLOCK}.ff.net.2",
    "down_blocks.1.attentions.0.proj_in",
    "time_embedding.linear_1",
)
CONVOLUTIONS = ("down_blocks.1.resnets.0.conv1", "down_blocks.1.resnets.0.conv2")


def unet_of(folder: Path) -> nn.Module:
    return diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")


@pytest.mark.slow
def test_a_file_for_a_unet_is_fused_as_diffusers_fuses_it_convolutions_too(sdxl, tmp_path):
    held = factors(unet_of(sdxl), UNET_LAYERS + CONVOLUTIONS)
    file = tmp_path / "style.safetensors"
    save_file({f"unet.{name}": tensor for name, tensor in held.items()}, file)
    want = fused_by_diffusers(sdxl, "unet", (file, 0.7))
    require_same(fused(sdxl, "unet", f"{file}:0.7"), want, SourceWeights(resolve_model(str(sdxl)), "unet"), 6)


@pytest.mark.slow
def test_names_of_another_trainer_that_count_blocks_otherwise_are_read_as_diffusers_reads_them(sdxl, tmp_path):
    held = kohya(factors(unet_of(sdxl), UNET_LAYERS[:2]), alpha=2.0)
    ours = tmp_path / "ours.safetensors"
    save_file(held, ours)
    original = {name.replace("down_blocks_1_attentions_0", "input_blocks_3_1"): held[name] for name in held}
    theirs = tmp_path / "theirs.safetensors"
    save_file(original, theirs)
    plain = SourceWeights(resolve_model(str(sdxl)), "unet")
    want = fused_by_diffusers(sdxl, "unet", (theirs, 1.0))
    for file in (ours, theirs):
        require_same(fused(sdxl, "unet", str(file)), want, plain, 2)


def test_the_part_of_a_text_encoder_is_refused_with_the_way_out(sdxl, tmp_path):
    layer = "text_model.encoder.layers.0.self_attn.q_proj"
    held = factors(unet_of(sdxl), UNET_LAYERS[:1])
    both = {f"unet.{name}": tensor for name, tensor in held.items()}
    both |= {f"text_encoder.{layer}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(
        ValueError, match=r"keys text_encoder\.\S+q_proj.* adapt a text encoder.* let diffusers fuse it"
    ):
        fused(sdxl, "unet", str(tmp_path / "both.safetensors"))


@pytest.mark.slow
def test_a_checkpoint_of_a_unet_holds_the_fused_weights_and_is_judged_against_them(sdxl, tmp_path):
    file = tmp_path / "style.safetensors"
    save_file({f"unet.{name}": t for name, t in factors(unet_of(sdxl), UNET_LAYERS).items()}, file)
    options = making.JobOptions(
        model=str(sdxl), recipe="int8", profile="rtn", output=str(tmp_path / "out"), lora=(f"{file}:0.5",), check=False
    )
    record = making.quantize(making.job_of(options))
    assert [lora.component for lora in record.loras] == ["unet"]
    assert "`style.safetensors` at weight 0.5 in `unet`" in (tmp_path / "out" / "README.md").read_text()
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    weights = fused(sdxl, "unet", f"{file}:0.5")
    kept = "time_embedding.linear_1.weight"
    assert torch.equal(pipe.unet.state_dict()[kept], weights[kept].bfloat16())
    reference = judge.subject_of(tmp_path / "out", judge.JudgeOptions(count=1)).reference
    assert reference.loras == ((str(file), 0.5, "unet"),)
    sixteen = reference.open().unet.state_dict()
    assert all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in sixteen.items())


# Two transformers

WAN_LAYERS = ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2")


@pytest.fixture
def motion(wan, tmp_path) -> Path:
    """A file as diffusers and trainers save them: `transformer`, whichever of the two it was trained on."""
    model = diffusers.WanTransformer3DModel.from_pretrained(wan / "transformer")
    config = LoraConfig(r=4, lora_alpha=2, target_modules=list(WAN_LAYERS)).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    diffusers.WanPipeline.save_lora_weights(
        tmp_path,
        factors(model, WAN_LAYERS),
        weight_name="motion.safetensors",
        transformer_lora_adapter_metadata=config,
    )
    return tmp_path / "motion.safetensors"


@pytest.mark.slow
def test_of_two_experts_a_file_changes_the_first_or_the_one_that_is_named(wan, motion):
    folder = resolve_model(str(wan))
    for component, text, how in (
        ("transformer", f"{motion}:0.8", {}),
        ("transformer_2", f"transformer_2={motion}:0.8", {"load_into_transformer_2": True}),
    ):
        want = fused_by_diffusers(wan, component, (motion, 0.8), **how)
        require_same(fused(wan, component, text), want, SourceWeights(folder, component), 2)


@pytest.mark.slow
def test_each_expert_takes_its_own_files_and_the_checkpoint_tells_them_apart(wan, motion, tmp_path):
    def options(*loras: str, output: str = "out") -> making.JobOptions:
        return making.JobOptions(
            model=str(wan), recipe="fp8", output=str(tmp_path / output), lora=loras, check=False, profile="rtn"
        )

    both = (f"{motion}:1", f"transformer_2={motion}:0.5")
    record = making.quantize(making.job_of(options(*both)))
    assert [(lora.component, lora.weight) for lora in record.loras] == [
        ("transformer", 1),
        ("transformer_2", 0.5),
    ]
    prepared = making.job_of(options(*both))
    assert prepared.finished
    plain = making.job_of(options(output="other"))
    one = making.job_of(options(both[1], output="other"))
    assert one.digest("transformer") == plain.digest("transformer")
    assert one.digest("transformer_2") != plain.digest("transformer_2")
    weaker = making.job_of(options(both[0], f"transformer_2={motion}:0.4", output="other"))
    assert weaker.digest("transformer") == prepared.digest("transformer") != plain.digest("transformer")
    with pytest.raises(ValueError, match="differs in loras"):
        making.job_of(options(f"{motion}:1", f"{motion}:0.5"))
    side = Side(
        "16-bit",
        str(wan),
        "d",
        "float32",
        tuple((str(motion), w, c) for w, c in ((1.0, "transformer"), (0.5, "transformer_2"))),
    )
    opened = side.open()
    for component, text in zip(("transformer", "transformer_2"), both, strict=True):
        weights = fused(wan, component, text)
        held = getattr(opened, component).state_dict()
        assert all(torch.equal(held[name], weights[name]) for name in held)
    assert side.describe() != Side("16-bit", str(wan), "d", "float32", ((str(motion), 1.0, "transformer"),)).describe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text_encoder={file}", r"'text_encoder' cannot take it; model computes with transformer, transformer_2"),
        ("transformer_3={file}:1", "'transformer_3' cannot take it"),
    ],
)
def test_a_component_that_runs_once_takes_no_file(wan, motion, text, message):
    with pytest.raises(ValueError, match=message):
        fused(wan, "transformer", text.format(file=motion))


def test_a_file_for_what_is_not_quantized_is_refused(wan, motion, tmp_path):
    options = {"model": str(wan), "recipe": "fp8", "check": False, "output": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=r"motion\.safetensors: changes the transformer, which is not among"):
        making.job_of(making.JobOptions(lora=(str(motion),), components=("transformer_2",), **options))


def test_a_file_with_keys_of_both_is_refused(wan, motion, tmp_path):
    model = diffusers.WanTransformer3DModel.from_pretrained(wan / "transformer")
    held = factors(model, WAN_LAYERS)
    both = {f"{part}.{name}": t.clone() for part in ("transformer", "transformer_2") for name, t in held.items()}
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(ValueError, match="has keys of transformer and transformer_2; save the LoRA of each"):
        fused(wan, "transformer", str(tmp_path / "both.safetensors"))


def test_an_equals_sign_in_a_path_names_no_component(motion):
    odd = motion.rename(motion.with_name("a=b.safetensors"))
    assert LoraFile.parse(str(odd)) == LoraFile(odd, 1.0)
    assert LoraFile.parse(f"transformer_2={odd}:0.5") == LoraFile(odd, 0.5, "transformer_2")
