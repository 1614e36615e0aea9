"""Files of other programs with names, containers or companions of their own, as checkpoints of fluxq."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from exchange_files import base_state, export, write_base, write_model
from safetensors.torch import load_file, save_file
from tiny_configs import TINY_CONFIGS
from torch import Tensor

from fluxq import tiny
from fluxq.base.files import sha256_file
from fluxq.base.model import ModelFolder
from fluxq.cli import cli
from fluxq.jobs import judge
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.checkpoint import PLAN_FILE
from fluxq.quantize.exchange import comfy, nunchaku, nunchaku_file
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.files import open_model
from fluxq.quantize.exchange.gguf import TYPES
from fluxq.quantize.exchange.gguf_file import GGUFFile
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.inspect import inspect_path
from fluxq.quantize.exchange.layer import Plain, QuantTensors
from fluxq.quantize.exchange.native import NativeComponent
from fluxq.quantize.exchange.proof import window
from fluxq.quantize.record import read_record
from fluxq.quantize.structure import list_linears
from fluxq.quantize.verify import verify
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.keymaps import CHECKPOINT_PREFIX, original_names
from tests.exchange.test_import import q8_0
from tests.exchange.test_inspect import gguf_bytes
from tests.exchange.test_layers import same_bytes
from tests.recipes.test_families import on_meta

TINY = Path(tiny.path())
WEIGHTS = "diffusion_pytorch_model.safetensors"
NVFP4 = "nvfp4-nvfp4-static"
Tensors = dict[str, Tensor]


def tiny_state() -> Tensors:
    return load_file(TINY / "transformer" / WEIGHTS)


def checked(folder: Path) -> dict[str, str]:
    """Every check of `fluxq verify`; ends with what was found where one fails."""
    results = verify(folder)
    assert not [result.findings for result in results if result.status == "failed"]
    return {result.check: result.status for result in results}


# --- nunchaku


def native(folder: Path, main: str, draw: Callable[[int, torch.Generator], Tensor]) -> Path:
    """The embedded pipeline with nunchaku's Linears rounded to nearest, factors and a low-rank branch included.

    draw: (K, generator) -> the factors that Linears of one input share. The base, whose modulations have biases of 0
    because nunchaku adds 1 to those of scales, is made beside `folder`.
    """
    shutil.copytree(TINY, folder)
    shutil.copytree(TINY, folder.with_name("base"))
    state, schemes, zero = tiny_state(), dict[str, Scheme](), list[str]()
    names = [linear.name for linear in list_linears(ModelFolder("tiny", TINY), "transformer")]
    for index, (_, modules, row) in enumerate(nunchaku_file.rows_of(names)):
        g = torch.Generator().manual_seed(index)
        k = state[f"{modules[0]}.weight"].shape[1]
        factors, a = draw(k, g).bfloat16(), torch.randn(16, k, generator=g).bfloat16() * 0.01
        for module in modules if row.columns != "rest" else ():
            weight = state.pop(f"{module}.weight").float()
            schemes[module] = scheme = Scheme.parse("int4-16bit" if row.chunks else main)
            if row.chunks:
                state[f"{module}.bias"] = torch.zeros_like(state[f"{module}.bias"])
                zero.append(f"{module}.bias")
            else:
                b = torch.randn(len(weight), 16, generator=g).bfloat16() * 0.01
                weight = (weight - b.float() @ a.float()) / factors.float()
                state |= {f"{module}.pre_quant_scale": factors.clone(), f"{module}.svdquant_lora_a": a.clone()}
                state[f"{module}.svdquant_lora_b"] = b
            scale = torch.tensor(2.0**-9) if scheme.weights.two_level else None
            made = QuantizedTensor.quantize(weight, scheme.weights, global_scale=scale)
            state |= {f"{module}.{name}": tensor.contiguous() for name, tensor in made.tensors().items()}
    save_file(state, folder / "transformer" / WEIGHTS, {"format": "pt"})
    plain = tiny_state() | {name: torch.zeros_like(state[name]) for name in zero}
    save_file(plain, folder.with_name("base") / "transformer" / WEIGHTS, {"format": "pt"})
    config = json.loads((TINY / "transformer" / "config.json").read_text())
    config["quantization_config"] = QuantizationConfig.of(schemes.items()).to_dict()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    return folder


def powers_of_two(k: int, g: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(0, 2, (k,), generator=g).float())


def arbitrary(k: int, g: torch.Generator) -> Tensor:
    return torch.rand(k, generator=g) + 0.5


BEHIND_GELU = ("ff.net.2.bias", "ff_context.net.2.bias", "proj_out.bias")  # GELU's shift leaves and comes back


@pytest.mark.slow
@pytest.mark.parametrize("main", ["int4-int4-smooth-r16", "nvfp4-nvfp4-smooth-r16"])
def test_nunchakus_single_file_comes_back_byte_for_byte(main, tmp_path) -> None:
    folder, file = native(tmp_path / "native", main, powers_of_two), tmp_path / "there.safetensors"
    export(ModelFolder("tiny", folder), "nunchaku", file)
    assert {"transformer_blocks.0.qkv_proj.qweight", "single_transformer_blocks.0.mlp_fc2.smooth"} <= load_file(
        file
    ).keys()
    (report,) = import_model(file, tmp_path / "back", tmp_path / "base")
    assert report.mended == report.dequantized == {}
    before, after = load_file(folder / "transformer" / WEIGHTS), load_file(tmp_path / "back/transformer" / WEIGHTS)
    assert before.keys() == after.keys()
    differ = {name for name in before if not same_bytes(before[name], after[name])}
    allowed = {name for name in before if name.endswith(BEHIND_GELU)} if main.startswith("int4") else set()
    assert differ <= allowed, sorted(differ - allowed)[:5]
    source = NativeComponent(ModelFolder("x", folder), "transformer")
    for name in differ:
        weight, _ = source.layer(name.removesuffix(".bias")).linear().collapsed()
        behind = weight[:, len(weight) :] if name.endswith("proj_out.bias") else weight
        largest = before[name].float().abs() + (nunchaku.GELU_SHIFT * behind.sum(1)).abs()
        assert ((after[name].float() - before[name].float()).abs() <= 2**-8 * largest).all(), name
    schemes = [NativeComponent(ModelFolder("x", f), "transformer").schemes for f in (folder, tmp_path / "back")]
    assert schemes[0] == schemes[1] and len(schemes[0]) == 38
    assert set(checked(tmp_path / "back").values()) == {"ok"}


@pytest.mark.slow
def test_what_nunchaku_rounds_to_16_bit_is_all_that_differs(tmp_path) -> None:
    folder, file = native(tmp_path / "native", "nvfp4-nvfp4-smooth-r16", arbitrary), tmp_path / "there.safetensors"
    weights = folder / "transformer" / WEIGHTS
    state = load_file(weights)
    for name in state:
        if name.endswith("weight_scale_2"):
            state[name] = state[name] * 1.2345  # all of them, so that joined layers still share theirs
    save_file(state, weights, {"format": "pt"})
    export(ModelFolder("tiny", folder), "nunchaku", file)
    import_model(file, tmp_path / "back")  # the file's header has the configuration
    before, after = state, load_file(tmp_path / "back" / WEIGHTS)
    differ = {name for name in before if not same_bytes(before[name], after[name])}
    assert {name.rpartition(".")[2] for name in differ} == {"pre_quant_scale", "weight_scale_2"}
    for name in differ:
        bound = 2**-7 if name.endswith("pre_quant_scale") else 2**-12
        assert (after[name].float() / before[name].float() - 1).abs().max() < bound, name


@pytest.mark.slow
def test_a_nunchaku_file_is_inspected_like_any_other(tmp_path) -> None:
    folder, file = native(tmp_path / "native", "int4-int4-smooth-r16", arbitrary), tmp_path / "there.safetensors"
    export(ModelFolder("tiny", folder), "nunchaku", file)
    report = inspect_path(file, tmp_path / "base")[""]
    assert (report.dialect, report.family, report.names, report.is_sound) == ("nunchaku", "flux", "nunchaku", True)
    found = {layer.name: layer for layer in report.layers}
    pair = found["single_transformer_blocks.0.out_proj+mlp_fc2"]
    assert pair.modules == ("single_transformer_blocks.0.proj_out",) and pair.role == "mixed_out"
    assert found["transformer_blocks.0.qkv_proj"].modules[2] == "transformer_blocks.0.attn.to_v"
    assert found["transformer_blocks.0.norm1.linear"].format == "awq_w4a16"
    assert all(layer.against and layer.against.plausible and not layer.against.best for layer in report.layers)
    state = load_file(file)
    one, other = (f"single_transformer_blocks.{i}.mlp_fc2.qweight" for i in (0, 1))
    state[one], state[other] = state[other].clone(), state[one].clone()
    with_header(file, state)
    wrong = inspect_path(file, tmp_path / "base")[""]
    assert {fault.layer.split(".")[1] for fault in wrong.faults if fault.is_error} == {"0", "1"}
    with pytest.raises(ValueError, match=r"single_transformer_blocks\.0\.out_proj\+mlp_fc2: another model's layer"):
        import_model(file, tmp_path / "out", tmp_path / "base")


def with_header(file: Path, state: Tensors) -> None:
    """The file with other tensors."""
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        header = stream.metadata()
    save_file(state, file, header)


def test_a_nunchaku_file_that_is_not_flux_or_lacks_a_side_is_refused_by_name(tmp_path) -> None:
    folder, file = native(tmp_path / "native", "int4-int4-smooth-r16", powers_of_two), tmp_path / "there.safetensors"
    export(ModelFolder("tiny", folder), "nunchaku", file)
    state = load_file(file)
    half = {name: tensor for name, tensor in state.items() if "single_transformer_blocks.1.mlp_fc2" not in name}
    with_header(file, half)
    with pytest.raises(ValueError, match=r"single_transformer_blocks\.1\.out_proj: is a part of proj_out without"):
        import_model(file, tmp_path / "out", TINY)
    other = {name.replace("qkv_proj.", "attn.to_qkv."): tensor for name, tensor in state.items()}
    with_header(file, other)
    with pytest.raises(ValueError, match=r"to_qkv is no layer of nunchaku's FLUX\.1.*nunchaku_lite"):
        import_model(file, tmp_path / "out", TINY / "transformer")
    assert not (tmp_path / "out").exists()


def test_zero_points_of_7_as_deepcompressor_writes_them_keep_their_codes() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    own = QuantizedTensor.quantize(weight, "int4").tensors() | {"bias": torch.zeros(64).bfloat16()}
    encoded = nunchaku.encode(QuantTensors(own, (64, 128), Scheme.parse("int4-16bit"))).tensors
    lower = encoded["qweight"] - 0x11111111  # every code + 8 becomes code + 7: none is below -7
    theirs = encoded | {"qweight": lower, "wzeros": encoded["wscales"] * -7}
    back = nunchaku.decode(theirs, (64, 128))
    assert isinstance(back, QuantTensors) and "wzeros" in back.beside
    assert all(same_bytes(back.tensors[name], own[name]) for name in own)
    highest = lower.clone()
    highest[0, 0] = -1  # codes of 15, which stand for 8
    for wrong in ({"qweight": highest}, {"wzeros": encoded["wscales"] * -6.5}):
        assert isinstance(nunchaku.decode(theirs | wrong, (64, 128)), Plain)


@pytest.mark.parametrize("kind", ["scales", "low rank"])
def test_sides_that_no_layer_of_ours_joins_are_still_read_exactly(kind) -> None:
    g = torch.Generator().manual_seed(0)
    scheme = Scheme.parse("nvfp4-nvfp4-r16")

    def side(k: int) -> QuantTensors:
        made = QuantizedTensor.quantize(torch.randn(128, k, generator=g), scheme.weights).tensors()
        if kind == "low rank":
            made["weight_scale_2"] = torch.tensor(2.0**-9)
        a, b = torch.randn(16, k, generator=g).bfloat16(), torch.randn(128, 16, generator=g).bfloat16()
        made |= {"svdquant_lora_a": a, "svdquant_lora_b": b, "bias": torch.randn(128, generator=g).bfloat16()}
        return QuantTensors(made, (128, k), scheme)

    first, rest = side(128), side(256)
    whole = nunchaku_file.side_by_side(first, rest)
    parts = [layer.linear().collapsed() for layer in (first, rest)]
    if kind == "scales":
        assert isinstance(whole, Plain) and "two global scales" in whole.why
        weight, bias = whole.weight, whole.bias
    else:
        assert isinstance(whole, QuantTensors) and whole.scheme.rank == 32
        weight, bias = whole.linear().collapsed()
    assert torch.allclose(weight, torch.cat([weight for weight, _ in parts], dim=1), rtol=1e-6, atol=1e-6)
    total = first.tensors["bias"].float() + rest.tensors["bias"].float()
    assert bias is not None and torch.equal(bias, total.bfloat16())


def test_scales_in_fp16_that_bf16_lacks_become_16_bit_weights() -> None:
    g = torch.Generator().manual_seed(0)
    own = QuantizedTensor.quantize(torch.randn(128, 128, generator=g), "int4").tensors()
    own |= {"bias": torch.randn(128, generator=g).half(), "pre_quant_scale": powers_of_two(128, g).half()}
    layer = QuantTensors(own, (128, 128), Scheme.parse("int4-int4-smooth"))
    tensors = nunchaku.encode(layer, dtype=torch.float16).tensors
    same = nunchaku.decode(tensors, (128, 128))
    assert isinstance(same, QuantTensors)  # bf16 holds all of these
    finer = tensors | {"wscales": (tensors["wscales"].float() * (1 + 2**-9)).half()}
    found = nunchaku.decode(finer, (128, 128))
    assert isinstance(found, Plain) and "fp16" in found.why
    ratio = found.weight / layer.linear().collapsed()[0]
    assert (ratio.nan_to_num(1 + 2**-9) - 1 - 2**-9).abs().max() <= 2**-10  # an fp16 step of the scale
    shifted = nunchaku.decode(finer, (128, 128), {"act_unsigned": True})
    assert isinstance(shifted, Plain) and shifted.bias is not None
    moved = nunchaku.GELU_SHIFT * shifted.weight.sum(1)
    assert torch.allclose(shifted.bias.float(), own["bias"].float() + moved, rtol=1e-5, atol=1e-5)


# --- whole checkpoints


def whole(path: Path, extra: Tensors, dialect: str = "comfy") -> Path:
    """A denoiser's file with ComfyUI's prefix, beside what else a whole checkpoint holds."""
    alone = write_model(path.with_name("alone.safetensors"), dialect, NVFP4, state=tiny_state())
    state = {CHECKPOINT_PREFIX + name: tensor for name, tensor in load_file(alone).items()}
    save_file(state | extra, path)
    return path


VAE = {"vae.decoder.conv_in.weight": torch.randn(8, 4, 3, 3), "vae.decoder.conv_in.bias": torch.zeros(8)}
T5 = "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention"


def encoder() -> Tensors:
    """A text encoder's tensors in fp8, as ComfyUI has them."""
    codes = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    sign = {"text_encoders.t5xxl.transformer.scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn)}
    return sign | {f"{T5}.q.weight": codes, f"{T5}.q.scale_weight": torch.ones(()), f"{T5}.k.weight": codes.clone()}


@pytest.mark.slow
def test_the_denoiser_of_a_whole_checkpoint_is_imported_and_the_rest_named(tmp_path) -> None:
    file = whole(tmp_path / "whole.safetensors", VAE | encoder())
    (report,) = import_model(file, tmp_path / "out", TINY)
    assert report.dialect == "comfy" and report.component == "transformer" and len(report.quantized) == 32
    assert [note.partition(" tensors")[0] for note in report.notes] == ["text_encoders.t5xxl, 4", "vae, 2"]
    alone = import_model(tmp_path / "alone.safetensors", tmp_path / "alone", TINY)[0]
    assert alone.quantized == report.quantized and not alone.notes
    both = [load_file(folder / "transformer" / WEIGHTS) for folder in (tmp_path / "out", tmp_path / "alone")]
    assert both[0].keys() == both[1].keys() and all(same_bytes(both[0][name], both[1][name]) for name in both[0])
    told = inspect_path(file, TINY)[""]
    assert (
        told.is_sound
        and "text_encoders.t5xxl, vae beside" in told.container
        and len(told.layers) == len(inspect_path(tmp_path / "alone.safetensors")[""].layers)
    )


def test_the_dtype_of_a_denoiser_is_none_of_what_lies_beside_it(tmp_path) -> None:
    cast = {f"{CHECKPOINT_PREFIX}img_in.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    save_file(cast | {f"{T5}.q.bias": torch.ones(4).half()}, tmp_path / "x.safetensors")
    assert open_model(tmp_path / "x.safetensors").dtype == torch.bfloat16


def test_a_whole_checkpoint_of_which_only_another_component_is_quantized_is_refused(tmp_path) -> None:
    state = {CHECKPOINT_PREFIX + whole: torch.zeros(4, 4).bfloat16() for whole in ("img_in.weight", "txt_in.weight")}
    save_file(state | encoder(), tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="nothing in it was quantized by another program"):
        import_model(tmp_path / "x.safetensors", tmp_path / "out", TINY)
    said = {"_quantization_metadata": json.dumps({"layers": {f"{T5}.q": {"format": "float8_e4m3fn"}}})}
    save_file(state | encoder(), tmp_path / "x.safetensors", said)
    with pytest.raises(
        ValueError, match=r"no quantized layer of the FluxTransformer2DModel beside text_encoders\.t5xxl"
    ):
        import_model(tmp_path / "x.safetensors", tmp_path / "out", TINY / "transformer")


@pytest.mark.slow
def test_a_whole_checkpoint_of_a_family_that_comfyui_gives_its_own_names(tmp_path) -> None:
    """Qwen-Image, whose names are diffusers' behind the prefix."""
    base, state = write_family(tmp_path / "base", "qwen_image")
    tensors = {CHECKPOINT_PREFIX + name: tensor for name, tensor in encoded("qwen_image", "legacy", state)[0].items()}
    save_file(tensors | VAE, tmp_path / "whole.safetensors")
    (report,) = import_model(tmp_path / "whole.safetensors", tmp_path / "out", base)
    assert report.quantized and report.notes == ["vae, 2 tensors of 1.18 kB beside the denoiser, was left out"]


# --- several components


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    """The embedded pipeline with its transformer and both text encoders in fp8."""
    from tests.quantize.test_components import quantized

    out = tmp_path_factory.mktemp("three") / "out"
    return quantized("fp8", out, ("transformer", "text_encoder_2", "text_encoder"))


@pytest.mark.slow
def test_a_pipeline_of_several_quantized_components_becomes_one_checkpoint(three, tmp_path) -> None:
    there, te = tmp_path / "there", tmp_path / "te"
    export(ModelFolder("three", three), "torchao", there, component="transformer")
    export(ModelFolder("three", three), "compressed_tensors", te, component="text_encoder_2")
    for source, component in ((te, "text_encoder_2"), (three / "text_encoder", "text_encoder")):
        shutil.rmtree(there / component)
        shutil.copytree(source, there / component)
    reports = import_model(there, tmp_path / "back", TINY)
    assert {report.component: report.dialect for report in reports} == {
        "transformer": "torchao",
        "text_encoder_2": "compressed_tensors",
    }
    for component in ("transformer", "text_encoder_2", "text_encoder"):  # the last was ours already
        files = [next((folder / component).glob("*.safetensors")) for folder in (three, tmp_path / "back")]
        before, after = (load_file(file) for file in files)
        assert files[0].name == files[1].name and before.keys() == after.keys()
        assert all(same_bytes(before[name], after[name]) for name in before), component
    assert set(checked(tmp_path / "back").values()) == {"ok"}
    parts = {part.component for part in read_record(tmp_path / "back").components}
    assert parts == {"transformer", "text_encoder_2", "text_encoder"}
    pipe: Any = DiffusionPipeline.from_pretrained(tmp_path / "back", torch_dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a red circle", num_inference_steps=1, height=64, width=64, output_type="pt").images
    assert torch.isfinite(image).all()


def test_a_text_encoder_alone_goes_into_its_place_in_the_base(three, tmp_path) -> None:
    export(ModelFolder("three", three), "compressed_tensors", tmp_path / "te", component="text_encoder_2")
    (report,) = import_model(tmp_path / "te", tmp_path / "out", TINY)
    assert report.component == "text_encoder_2" and (tmp_path / "out" / "model_index.json").is_file()
    (alone,) = import_model(tmp_path / "te", tmp_path / "alone")
    assert alone.component == "" and alone.quantized == report.quantized
    assert json.loads((tmp_path / "alone" / PLAN_FILE).read_text())["components"][0]["family"] == "t5"


# --- the plan file


@pytest.mark.slow
def test_an_imported_checkpoint_says_where_it_is_from_and_every_reader_takes_it(tmp_path, monkeypatch) -> None:
    file = write_model(tmp_path / "model.safetensors", "comfy", NVFP4, state=tiny_state())
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["import", str(file), "--base", "tiny"])
    assert done.exit_code == 0, done.output
    out = tmp_path / "model-fluxq"
    assert set(checked(out).values()) == {"ok"}
    record = read_record(out)
    (said,) = record.imported
    assert said.files == {"model.safetensors": sha256_file(file)} and said.dialect == "comfy"
    (part,) = record.components
    layers = {layer.name: layer for layer in part.layers}
    layer = layers["transformer_blocks.0.attn.to_q"]
    assert (layer.scheme, layer.role) == (NVFP4, "qkv") and 18 < layer.weight_sqnr_db < 24
    assert "codes as comfy had them" in layer.reason
    assert layers["x_embedder"].scheme == "16bit" and layers["x_embedder"].weight_sqnr_db is None
    assert part.bytes_before == 2 * sum(tensor.numel() for tensor in tiny_state().values())
    card = (out / "README.md").read_text()
    assert "imported from comfy" in card and sha256_file(file)[:16] in card and "32 of" in card
    subject = judge.subject_of(out, judge.JudgeOptions())  # what `fluxq eval` begins with
    assert subject.folder.path == TINY
    verified = CliRunner().invoke(cli, ["verify", str(out)])
    assert verified.exit_code == 0, verified.output
    weights = out / "transformer" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert {result.status for result in verify(out) if result.check == "hashes"} == {"failed"}


@pytest.mark.slow
def test_without_a_base_the_record_names_none_and_says_how_to_give_it(three, tmp_path) -> None:
    export(ModelFolder("three", three), "modelopt", tmp_path / "there", component="transformer")
    import_model(tmp_path / "there", tmp_path / "out")
    record = read_record(tmp_path / "out")
    assert record.model.source is None and record.model.digests == {}
    assert set(checked(tmp_path / "out").values()) == {"ok"}
    with pytest.raises(ValueError, match=r"imported without a base.*give it as --model"):
        judge.subject_of(tmp_path / "out", judge.JudgeOptions())
    assert judge.subject_of(tmp_path / "out", judge.JudgeOptions(model="tiny")).folder.path == TINY


# --- original names, in every dialect that has them


def write_family(folder: Path, family: str) -> tuple[Path, Tensors]:
    """The 16-bit component of a family's tiny configuration, of random weights."""
    row, g = FAMILIES[family], torch.Generator().manual_seed(0)
    state = {
        name: (torch.randn(meta.shape, generator=g) * 0.05).bfloat16()
        for name, meta in on_meta(row, dict(TINY_CONFIGS[row.name])).state_dict().items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": row.model, **TINY_CONFIGS[row.name]}, default=list))
    save_file(state, folder / WEIGHTS)
    return folder, state


NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407]
NF4 += [0.5626, 0.7230, 1.0]


def nf4(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """bitsandbytes' tensors of a weight, by their definition, and what they stand for."""
    table, blocks = torch.tensor(NF4), weight.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = ((blocks / absmax.unsqueeze(1)).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8).reshape(-1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {
        "weight": (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    values = (table[codes.int()].reshape(-1, 64) * absmax.unsqueeze(1)).reshape(weight.shape)
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}, values


def encoded(family: str, dialect: str, state: Tensors) -> tuple[Tensors, dict[str, Any], Tensors]:
    """(tensors under original names, GGUF's, what of diffusers each quantized weight stands for)."""
    row, held, blocks, exact = FAMILIES[family], Tensors(), dict[str, Any](), Tensors()
    linears = {name.removesuffix(".weight") for name, tensor in state.items() if tensor.ndim == 2}
    for original, parts, order in original_names(family, list(state)):
        if not parts:
            continue
        rows = torch.cat([state[part] for part in parts]) if len(parts) > 1 else state[parts[0]]
        rows = torch.cat(rows.chunk(2)[::-1]) if order == "halves swapped" else rows
        modules = [part.removesuffix(".weight") for part in parts]
        is_main = all(module in linears and row.locate(module) for module in modules)
        name = original.removesuffix(".weight")
        if not (original.endswith(".weight") and is_main and rows.shape[1] % 64 == 0):
            held[original] = rows
            blocks[original] = (0, tuple(rows.shape) or (1,), rows.float().numpy().tobytes())
            continue
        if dialect == "gguf":
            data, values = q8_0(rows)
            blocks[original] = (8, tuple(rows.shape), data)
        elif dialect == "bnb":
            tensors, values = nf4(name, rows)
            held |= tensors
        else:
            text = "fp8-fp8" if dialect == "bfl" else "fp8_tensor-fp8_tensor"
            made = QuantizedTensor.quantize(rows, Scheme.parse(text).weights)
            values, tensors = made.dequantize(), made.tensors()
            if dialect == "legacy":
                tensors = {"weight": tensors["weight"], "scale_weight": tensors["weight_scale"]}
            elif dialect == "comfy":
                layer = QuantTensors(tensors, (rows.shape[0], rows.shape[1]), Scheme.parse(text))
                tensors = comfy.encode(layer).tensors
            held |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        values = torch.cat(values.chunk(2)[::-1]) if order == "halves swapped" else values
        exact |= dict(zip(parts, values.split([len(state[part]) for part in parts]), strict=True))
    if dialect == "legacy":
        held["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    return held, blocks, exact


DIALECTS_OF_ORIGINALS = ("comfy", "bfl", "legacy", "gguf", "bnb")
OFTEN = [("sd3", "gguf"), ("wan", "comfy"), ("qwen_image", "gguf"), ("flux", "bnb"), ("wan", "gguf"), ("sd3", "legacy")]
CASES = [
    pytest.param(family, dialect, marks=() if (family, dialect) in OFTEN else pytest.mark.slow)
    for family in ("flux", "flux2", "sd3", "wan", "qwen_image", "chroma", "hidream", "ltx", "hunyuan_video", "z_image")
    for dialect in DIALECTS_OF_ORIGINALS
]


@pytest.mark.often(1)
@pytest.mark.parametrize(("family", "dialect"), CASES)
def test_original_names_of_a_family_are_found_in_every_dialect(family, dialect, tmp_path) -> None:
    if dialect == "gguf":
        pytest.importorskip("gguf", reason="gguf is not installed")
    base, state = write_family(tmp_path / "base", family)
    held, blocks, exact = encoded(family, dialect, state)
    path = tmp_path / ("model.gguf" if dialect == "gguf" else "model.safetensors")
    if dialect == "gguf":
        path.write_bytes(gguf_bytes(blocks))
    else:
        save_file(held, path, {"quantization": "fp8r"} if dialect == "bfl" else {})
    (report,) = import_model(path, tmp_path / "out", base, dequantize=dialect in ("gguf", "bnb"))
    modules = {name.removesuffix(".weight") for name in exact}
    assert report.dialect == dialect and report.mended == {}
    assert modules == report.quantized.keys() | report.dequantized.keys() and len(modules) > 3
    written = load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in state.items():
        if name not in exact:
            assert torch.equal(written[name].bfloat16(), tensor), name
        elif report.dequantized:
            assert torch.equal(written[name], exact[name].bfloat16().reshape(tensor.shape)), name
        else:
            scale = written[name.replace(".weight", ".weight_scale")].float()
            values = written[name].float() * (scale.unsqueeze(1) if scale.ndim else scale)
            assert torch.equal(values, exact[name]), name


@pytest.mark.slow
def test_a_dequantized_import_is_verified_too(tmp_path) -> None:
    """A pipeline in which nothing is quantized any more."""
    held, _, exact = encoded("flux", "bnb", tiny_state())
    save_file(held, tmp_path / "model.safetensors")
    (report,) = import_model(tmp_path / "model.safetensors", tmp_path / "out", TINY, dequantize=True)
    assert report.dequantized.keys() == {name.removesuffix(".weight") for name in exact} and not report.quantized
    assert set(checked(tmp_path / "out").values()) == {"ok"}
    (part,) = read_record(tmp_path / "out").components
    assert {layer.scheme for layer in part.layers} == {"16bit"}
    assert sum("nf4 has a table of its own" in layer.reason for layer in part.layers) == len(exact)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["legacy", "bnb"])
def test_a_bias_that_the_model_lacks_is_left_out_where_it_is_0_and_else_refused(of, tmp_path) -> None:
    folder, state = write_family(tmp_path / "model", "flux2")
    tensors = encoded("flux2", of, state)[0]
    extra = {"double_blocks.0.img_attn.qkv.bias": torch.zeros(384).bfloat16()}
    save_file(tensors | extra, folder / WEIGHTS)
    import_model(folder, tmp_path / "out", dequantize=of == "bnb")
    assert not any(name.endswith("bias") for name in load_file(tmp_path / "out" / WEIGHTS))
    assert checked(tmp_path / "out")["tensors"] == "ok"
    save_file(tensors | {name: tensor + 1 for name, tensor in extra.items()}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"qkv: the model has no transformer_blocks\.0\.attn\.to_q\.bias"):
        import_model(folder, tmp_path / "other", dequantize=of == "bnb")


@pytest.mark.slow
def test_a_text_encoder_for_comfyui_may_carry_its_tokenizer(tmp_path) -> None:
    base = TINY / "text_encoder_2"
    tensors = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn), "spiece_model": torch.zeros(9, dtype=torch.uint8)}
    tensors["logit_scale"] = torch.tensor(4.6055)  # which ComfyUI saves with every text encoder
    for name, tensor in load_file(base / "model.safetensors").items():
        is_main = name.endswith(("SelfAttention.q.weight", "wo.weight"))
        tensors |= {name: tensor.to(torch.float8_e4m3fn) if is_main else tensor}
        tensors |= {name.replace("weight", "scale_weight"): torch.ones(())} if is_main else {}
    save_file(tensors, tmp_path / "t5.safetensors")
    (report,) = import_model(tmp_path / "t5.safetensors", tmp_path / "out", base)
    assert report.quantized and checked(tmp_path / "out")["tensors"] == "ok"


# --- bitsandbytes and GGUF by their own libraries


@pytest.mark.parametrize(("kind", "double"), [("file", False), ("folder", True), ("whole", True)])
def test_bitsandbytes_own_nf4_is_read(kind, double, tmp_path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    base, state = write_family(tmp_path / "base", "flux")
    named = [(name, (name,), "as they are") for name in state] if kind == "folder" else original_names("flux", state)
    held, exact = Tensors(), Tensors()
    for whole_name, parts, order in named:
        rows = torch.cat([state[part] for part in parts]) if len(parts) > 1 else state[parts[0]]
        rows = torch.cat(rows.chunk(2)[::-1]) if order == "halves swapped" else rows
        if rows.ndim != 2 or "block" not in whole_name or "mod" in whole_name or "norm" in whole_name:
            held[whole_name] = rows
            continue
        codes, told = functional.quantize_4bit(rows, blocksize=64, compress_statistics=double, quant_type="nf4")
        values = functional.dequantize_4bit(codes, told).to(torch.bfloat16)
        exact |= dict(zip(parts, values.split([len(state[part]) for part in parts]), strict=True))
        held |= {whole_name: codes} | {f"{whole_name}.{k}": v for k, v in told.as_dict(packed=True).items()}
    assert exact
    path = tmp_path / "model.safetensors"
    if kind == "folder":
        path = tmp_path / "model"
        shutil.copytree(base, path)
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (path / "config.json").write_text(json.dumps(config))
        save_file(held, path / WEIGHTS)
    elif kind == "whole":
        save_file({CHECKPOINT_PREFIX + name: tensor for name, tensor in held.items()} | VAE | encoder(), path)
    else:
        save_file(held, path)
    with pytest.raises(ValueError, match=r"codes of bnb.*--dequantize makes them 16 bit"):
        import_model(path, tmp_path / "out", base)
    (report,) = import_model(path, tmp_path / "out", base, dequantize=True)
    assert report.dialect == "bnb" and f"{len(report.notes)}" == ("2" if kind == "whole" else "0")
    written = load_file(tmp_path / "out" / WEIGHTS)
    for name, tensor in state.items():
        assert torch.equal(written[name], exact.get(name, tensor)), name


def test_8_bit_layers_of_bitsandbytes_are_refused_by_name(tmp_path) -> None:
    base, state = write_family(tmp_path / "base", "flux")
    name = "transformer_blocks.0.attn.to_q"
    table, _ = nf4(f"{name[:-1]}k", state[f"{name[:-1]}k.weight"])
    codes = {f"{name}.weight": torch.zeros(128, 128, dtype=torch.int8), f"{name}.SCB": torch.ones(128)}
    save_file(state | table | codes, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name}: has codes and no quant_state; 8-bit layers"):
        import_model(tmp_path / "model.safetensors", tmp_path / "out", base, dequantize=True)


def test_every_type_of_gguf_decodes_as_its_package_decodes_it(tmp_path) -> None:
    """A file by the package's writer, of random bytes whose scales are numbers, read by our reader and by its own."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    import numpy as np
    from gguf import quants

    rng, path = np.random.default_rng(0), tmp_path / "model.gguf"
    writer, expected = gguf.GGUFWriter(path, "flux"), {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (4096, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            sound = np.isfinite(quants.dequantize(raw, kind)).all(axis=1)
        raw = raw[sound][: 2048 // elements * 4].reshape(8, -1) if elements > 1 else raw[sound][:512].reshape(8, -1)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
        expected[name] = quants.dequantize(raw, kind).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert {kind for kind in TYPES if f"{kind}.weight" in file.stored} == set(TYPES)
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.tensor_type.name
        stored = file.stored[tensor.name]
        assert (stored.dtype, stored.shape) == (name, tuple(int(size) for size in tensor.shape[::-1]))
        data = file.get_tensor(tensor.name)
        assert data.contiguous().view(torch.uint8).numpy().tobytes() == tensor.data.tobytes(), name
        raw = data.contiguous().view(torch.uint8).reshape(8, -1)
        found = DIALECTS["gguf"].decode({"weight": raw}, stored.shape, {"type": name})
        assert isinstance(found, Plain) and found.weight.numpy().tobytes() == expected[name].tobytes(), name
    quantized = {layer.name for layer in open_model(path).layers.values()}
    assert quantized == set(TYPES) - {"F32", "F16", "BF16"}


# --- decoded to 16 bit


def asymmetric(weight: Tensor, group: int = 32) -> tuple[Tensors, Tensor, dict]:
    """compressed-tensors' W4A16 with zero points, packed along N as the codes are along K."""
    n, k = weight.shape
    low, high = (f(weight.float().reshape(n, -1, group), -1).values for f in (torch.min, torch.max))
    scale = ((high - low).clamp(min=1e-6) / 15).bfloat16()
    zero = (-8 - low / scale.float()).round().clamp(-8, 7)
    of = torch.arange(k) // group
    codes = (weight.float() / scale.float()[:, of] + zero[:, of]).round().clamp(-8, 7)
    held = {"weight_packed": int32(codes), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    held["weight_zero_point"] = int32(zero.T).T.contiguous()
    return held, (codes - zero[:, of]) * scale.float()[:, of], _WORDS | {"symmetric": False, "group_size": group}


def in_act_order(weight: Tensor, group: int = 32) -> tuple[Tensors, Tensor, dict]:
    """compressed-tensors' W4A16 whose groups are of columns of like size."""
    n, k = weight.shape
    of = torch.empty(k, dtype=torch.long)
    of[weight.float().abs().amax(0).argsort()] = torch.arange(k) // group
    amax = torch.stack([weight.float()[:, of == index].abs().amax(1) for index in range(k // group)], 1)
    scale = (amax / 7).bfloat16()
    codes = (weight.float() / scale.float()[:, of]).round().clamp(-8, 7)
    held = {"weight_packed": int32(codes), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    return held | {"weight_g_idx": of.int()}, codes * scale.float()[:, of], _WORDS | {"actorder": "group"}


def int32(codes: Tensor) -> Tensor:
    """(rows, columns) of -8 to 7 as code + 8, eight to a word, the first lowest."""
    rows, columns = codes.shape
    halves = torch.nn.functional.pad(codes + 8, (0, -columns % 8)).to(torch.int64).reshape(rows, -1, 8)
    words = (halves << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def in_blocks(weight: Tensor, size: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3, the scale of each block of 128 by 128, and what they stand for."""
    n, k = weight.shape
    tiles = torch.nn.functional.pad(weight.float(), (0, -k % size, 0, -n % size)).unflatten(1, (-1, size))
    scale = tiles.unflatten(0, (-1, size)).abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:n, :k]
    codes = (weight.float() / wide).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * wide


_WORDS = {"num_bits": 4, "type": "int", "strategy": "group"}
SOURCES = ("asymmetric", "act order", "weight_scale_inv", "weight_scale_inv, bare", "fp8_pb_wo")
OF_BLOCKS = dict.fromkeys(SOURCES[2:4], "fp8_128x128-fp8_1x128") | {"fp8_pb_wo": "fp8_128x128-16bit"}


def of_source(source: str, weight: Tensor) -> tuple[Tensors, Tensor, dict]:
    """(tensors, weight that they stand for, quantization_config) of a layer as its producer writes it."""
    if source in ("asymmetric", "act order"):
        held, dense, words = (asymmetric if source == "asymmetric" else in_act_order)(weight)
        group = {"targets": ["Linear"], "weights": words, "input_activations": None}
        said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
        return held, dense, said
    codes, scale, dense = in_blocks(weight)
    if source == "fp8_pb_wo":
        producer = {"quant_method": "modelopt", "quant_algo": source, "producer": {"name": "modelopt"}}
        return (
            {"weight": codes, "weight_scale": scale[:, None, :, None] if scale.numel() > 1 else scale[0, 0]},
            dense,
            producer,
        )
    marked = {"quant_method": "fp8", "weight_block_size": [128, 128]} if source == "weight_scale_inv" else {}
    return {"weight": codes, "weight_scale_inv": scale}, dense, marked


def written(source: str, tmp_path: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """(base, folder as a producer writes it, weights that its codes stand for)."""
    base, tensors, dense, said = write_base(tmp_path / "base"), {}, {}, {}
    for name, value in base_state().items():
        module = name.removesuffix(".weight")
        if value.ndim != 2 or "transformer_blocks" not in name or module == name:
            tensors[name] = value
            continue
        held, dense[name], said = of_source(source, value)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in held.items()}
    folder = write_base(tmp_path / "theirs")
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    if said:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return base, folder, dense


@pytest.mark.slow
@pytest.mark.parametrize(("source", "scheme"), [(source, OF_BLOCKS[source]) for source in OF_BLOCKS])
def test_blocks_are_imported_with_their_codes(source, scheme, tmp_path) -> None:
    base, folder, dense = written(source, tmp_path)
    report = inspect_path(folder, base)[""]
    assert report.is_sound and len(report.layers) == len(dense), report.faults
    theirs = load_file(folder / "diffusion_pytorch_model.safetensors")
    (done,) = import_model(folder, tmp_path / "out", base)
    assert set(done.quantized.values()) == {scheme} and len(done.quantized) == len(dense) and not done.dequantized
    found = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    for name, weight in dense.items():
        scale = found[f"{name}_scale"]
        q = QuantizedTensor(found[name], scale, None, (weight.shape[0], weight.shape[1]), FORMATS["fp8_128x128"])
        assert torch.equal(found[name].view(torch.uint8), theirs[name].view(torch.uint8))
        assert torch.equal(q.dequantize(), weight)


@pytest.mark.slow
@pytest.mark.parametrize("source", [source for source in SOURCES if source not in OF_BLOCKS])
def test_what_no_format_of_ours_holds_is_decoded_to_16_bit(source, tmp_path) -> None:
    base, folder, dense = written(source, tmp_path)
    report = inspect_path(folder, base)[""]
    assert report.is_sound and len(report.layers) == len(dense), report.faults
    with pytest.raises(ValueError, match=r"--dequantize makes (it|them) 16 bit"):
        import_model(folder, tmp_path / "out", base)
    (done,) = import_model(folder, tmp_path / "out", base, dequantize=True)
    found = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert not done.quantized and len(done.dequantized) == len(dense)
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in dense.items())


@pytest.mark.parametrize("n", [130, 1000])
@pytest.mark.parametrize("source", [source for source in SOURCES if "bare" not in source])
def test_readings_of_a_large_layer_are_tried_on_windows(source, n) -> None:
    """Zero points and blocks have to be cut as the codes are."""
    g = torch.Generator().manual_seed(0)
    weight = (torch.randn(n, 256, generator=g) * torch.exp(torch.randn(n, 1, generator=g))).bfloat16()
    held, dense, said = of_source(source, weight)
    for start in range(0, n, 128):
        stop = min(start + 128, n)
        entry = {"quant_algo": "fp8_pb_wo", "format": "pack-quantized"} | said.get("config_groups", {}).get(
            "group_0", {}
        )
        dialect = {"fp8_pb_wo": "modelopt"}.get(source, "fp8_blocks" if "inv" in source else "compressed_tensors")
        part = DIALECTS[dialect].decode(window(held, n, start, stop), (stop - start, 256), entry)
        assert isinstance(part, Plain) == (source not in OF_BLOCKS)
        assert torch.equal(part.collapsed()[0], dense[start:stop])
