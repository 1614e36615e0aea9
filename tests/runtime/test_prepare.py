"""A model laid out for one GPU: what its layers become, what that costs, and that saving writes what was loaded."""

import copy
import json
import re
import shutil
from pathlib import Path

import accelerate
import diffusers
import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared import quantization_of
from torch import Tensor, nn

import fluxq
from fluxq import tiny
from fluxq.kernels import dispatch, ops, tiles
from fluxq.kernels.linear import QuantLinear, quant_layers
from fluxq.kernels.tensor import QuantizedTensor, pack_named
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.recipe import shipped_recipes
from fluxq.runtime import prepare as integration
from fluxq.runtime.layout import StoredLayer, add_decoded, add_row_scale, as_stored, lay_out, reencode_layer, swizzle


def load(folder: Path) -> diffusers.FluxTransformer2DModel:
    return diffusers.FluxTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same_files(saved: Path, loaded: Path) -> None:
    found, expected = tensors_in(saved), tensors_in(loaded)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert quantization_of(saved) == quantization_of(loaded)


def layer_of(scheme: str, *, rank: int = 0, n: int = 96, k: int = 128) -> QuantLinear:
    """A layer with a weight whose rows differ in size, a bias, and a low-rank branch of `rank`."""
    noise = torch.Generator().manual_seed(3)
    parsed = Scheme.parse(scheme)
    w = torch.randn(n, k, generator=noise) * torch.logspace(-1, 0, n)[:, None]
    static = torch.tensor(0.01) if parsed.static_input else None
    q = QuantizedTensor.quantize(w, parsed.weights)
    layer = QuantLinear.from_quantized(q, torch.randn(n, generator=noise).bfloat16(), parsed, static)
    if rank:
        layer.append_low_rank(torch.randn(rank, k, generator=noise) / 8, torch.randn(n, rank, generator=noise) / 8)
    return layer


def with_decoded(layer: QuantLinear, decoded: torch.Tensor) -> torch.Tensor:
    """The op's result with this in the place of the decoded codes."""
    return ops.quantized_linear(X, *pack_named(layer.tensors._replace(decoded=decoded), layer.scheme))


X = torch.randn(3, 7, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


# --- one layer


@pytest.mark.parametrize("scheme", ["nvfp4-nvfp4-static", "mxfp4-mxfp4", "mxfp8-mxfp8", "int4-int4", "fp8-fp8"])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_layer_encoded_anew_computes_what_it_did_with_the_error_that_it_states(scheme: str, rank: int) -> None:
    layer = layer_of(scheme, rank=rank)
    plain = layer.dequantized(torch.float32).weight
    stored = layer.scheme
    reencode_layer(layer, ("int8", "fp8"))
    assert layer.prepared and layer.prepared.scheme == layer.stored_scheme == stored
    assert str(layer.scheme) in ("int8-int8", "fp8-fp8") and layer.scheme.activations is not None
    now = layer.dequantized(torch.float32).weight
    assert relative(now, plain) == pytest.approx(layer.prepared.added_error, rel=1e-4)
    assert 0 < layer.prepared.added_error < 0.03 or scheme == "fp8-fp8"
    expected = X.float() @ plain.T + layer.bias.float()
    assert relative(layer(X), expected) < 0.04
    assert sorted(name for name, _ in layer.named_parameters()) == ["bias", "weight", "weight_scale"]


def test_the_target_is_what_adds_less_error() -> None:
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(5))
    w[:, 0] = 1000.0  # int8 has no step left for the others
    layer = QuantLinear.from_quantized(QuantizedTensor.quantize(w, "nvfp4"), None, Scheme.parse("nvfp4-nvfp4"))
    chosen = copy.deepcopy(layer)
    reencode_layer(chosen, ("int8", "fp8"))
    reencode_layer(layer, ("int8",))
    assert chosen.scheme.weights is FORMATS["fp8"] and chosen.prepared and layer.prepared
    assert chosen.prepared.added_error < layer.prepared.added_error


@pytest.mark.parametrize("scheme", ["nvfp4-nvfp4-static", "mxfp4-mxfp4", "int4-int4"])
def test_weights_that_stay_in_4_bits_give_the_bits_of_the_layer_encoded_anew(scheme: str) -> None:
    kept, anew = layer_of(scheme), layer_of(scheme)
    before = {name: tensor.clone() for name, tensor in as_stored(kept).items()}
    add_row_scale(kept, ("int8",))
    reencode_layer(anew, ("int8",))
    assert torch.equal(kept(X), anew(X))
    assert kept.weight.numel() == before["weight"].numel()
    after = as_stored(kept)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("scheme", ["nvfp4-nvfp4-static", "mxfp8-mxfp8"])
def test_swizzled_scales_change_no_bit_and_come_back(scheme: str) -> None:
    layer, plain = layer_of(scheme, n=130), layer_of(scheme, n=130)
    swizzle(layer)
    assert layer.get_parameter("weight_scale").ndim == 1
    assert torch.equal(layer(X), plain(X))
    assert torch.equal(layer.dequantized(torch.float32).weight, plain.dequantized(torch.float32).weight)
    stored = as_stored(layer)["weight_scale"].view(torch.uint8)
    assert torch.equal(stored, plain.get_parameter("weight_scale").view(torch.uint8))


@pytest.mark.parametrize(
    "scheme", ["nvfp4-nvfp4-static", "mxfp4-mxfp4", "mxfp8-mxfp8", "int4-int4", "fp8-fp8", "fp8-16bit", "int8-16bit"]
)
@pytest.mark.parametrize("rank", [0, 5])
def test_a_decoded_weight_gives_the_bits_of_its_codes_which_are_what_is_stored(scheme: str, rank: int) -> None:
    layer, plain = layer_of(scheme, rank=rank), layer_of(scheme, rank=rank)
    add_decoded(layer)
    decoded = layer.get_parameter("weight_decoded")
    assert decoded.dtype == torch.float32 and torch.equal(decoded, plain.quantized_weight.dequantize())
    results = []
    for each in (layer, plain):
        x = X.clone().requires_grad_()
        y = each(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), x)))
    assert all(map(torch.equal, *results))
    after, before = as_stored(layer), as_stored(plain)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert layer.stored_scheme == layer.scheme == plain.scheme
    assert torch.equal(layer.dequantized(torch.float32).weight, plain.dequantized(torch.float32).weight)


def test_a_decoded_weight_is_what_is_multiplied(monkeypatch) -> None:
    layer = layer_of("fp8-fp8")
    add_decoded(layer)
    before = layer(X)
    monkeypatch.setattr(QuantizedTensor, "dequantize", lambda *_, **__: pytest.fail("the codes were decoded again"))
    assert torch.equal(layer(X), before)
    layer.get_parameter("weight_decoded").data.zero_()
    assert torch.equal(layer(X), layer.bias.expand_as(before))


def test_a_decoded_weight_stays_fp32_and_moves_with_its_layer() -> None:
    layer = layer_of("nvfp4-nvfp4", rank=5)
    add_decoded(layer)
    want = layer(X)
    layer.to("cpu", torch.bfloat16)  # the dtype that it computes in: a move
    assert layer.get_parameter("weight_decoded").dtype == torch.float32 and torch.equal(layer(X), want)
    with pytest.raises(ValueError, match=r"cannot be cast to torch\.float16"):
        layer.half()
    twin = copy.deepcopy(layer)
    layer.get_parameter("weight_decoded").data.zero_()
    assert torch.equal(twin(X), want)
    twin.append_low_rank(torch.randn(2, 128), torch.randn(96, 2))
    assert not torch.equal(twin(X), want) and twin.stored_scheme.rank == 7
    twin.drop_low_rank(2)
    assert torch.equal(twin(X), want)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), want)


def test_a_decoded_weight_that_does_not_fit_its_codes_is_named() -> None:
    layer = layer_of("nvfp4-nvfp4")
    with pytest.raises(ValueError, match=r"decoded is torch\.bfloat16 \(96, 128\), expected float32 \(96, 128\)"):
        with_decoded(layer, torch.zeros(96, 128, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"decoded is torch\.float32 \(96, 64\)"):
        with_decoded(layer, torch.zeros(96, 64))
    add_row_scale(layer, ("int8",))
    with pytest.raises(ValueError, match="takes decoded or row_scale, which is for other codes; got both"):
        with_decoded(layer, torch.zeros(96, 128))
    with pytest.raises(ValueError, match="int8-int8 multiplies its codes as they are: there is nothing to decode"):
        add_decoded(layer_of("int8-int8"))


def test_what_can_not_be_prepared_or_saved_is_named() -> None:
    layer = layer_of("nvfp4-nvfp4")
    reencode_layer(layer, ("int8",))
    with pytest.raises(ValueError, match=r"prepared already \(re-encoded to int8\)"):
        swizzle(layer)
    with pytest.raises(
        ValueError, match=r"unknown where its nvfp4-nvfp4 codes .* fluxq\.prepare\(\.\.\., source=FOLDER\)"
    ):
        as_stored(layer)
    with pytest.raises(ValueError, match=r"offloaded: call fluxq\.prepare first, then offload"):
        reencode_layer(layer_of("nvfp4-nvfp4").to("meta"), ("int8",))


def test_weights_encoded_anew_in_their_own_format_come_back_too(tmp_path: Path) -> None:
    """int8 weights and a low-rank branch under fp8 activations become int8 by int8, under other codes."""
    layer = layer_of("int8-fp8", rank=5)
    before, stored = {name: t.clone() for name, t in as_stored(layer).items()}, layer.scheme
    save_file({f"a.{name}": tensor for name, tensor in before.items()}, tmp_path / "x.safetensors")
    reencode_layer(layer, ("int8",), StoredLayer(tmp_path, "a"))
    assert str(layer.scheme) == "int8-int8" and layer.stored_scheme == stored
    after = as_stored(layer)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


# --- which of them a chip asks for


@pytest.fixture
def offers(monkeypatch):
    """offers(matmul=formats, …): only these matmuls are offered, whatever was compiled."""

    def use(**offered: tuple[str, ...]) -> None:
        def fake(op: str, name: str, chip: str) -> str:
            return "" if name in offered.get(op, ()) else "no unit"

        monkeypatch.setattr(dispatch, "refusal", fake)
        dispatch.choose.cache_clear()

    yield use
    dispatch.choose.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """gpu(chip): "cuda" is that chip, as far as `fluxq.prepare` asks."""
    return lambda chip: monkeypatch.setattr(tiles, "chip_of", lambda device: chip)


@pytest.mark.parametrize(
    ("prefer", "scheme", "runs_as"),
    [
        ("speed", "nvfp4-nvfp4-static", "int8-int8"),
        ("memory", "nvfp4-nvfp4-static", "nvfp4-int8"),
        ("memory", "mxfp8-mxfp8", "int8-int8"),  # 8 bits already
        ("speed", "int8-int8", "int8-int8"),
        ("speed", "nvfp4-16bit", "nvfp4-16bit"),  # asked for 16-bit activations
    ],
)
def test_a_chip_with_int8_alone(offers, prefer: str, scheme: str, runs_as: str) -> None:
    offers(scaled_matmul=("int8",), w4a8_matmul=("nvfp4-int8", "int4-int8"))
    layer = layer_of(scheme)
    changed = lay_out(layer, "sm_80", prefer, None)
    assert str(layer.scheme) == runs_as and changed == (scheme != runs_as)


def test_a_chip_that_knows_the_format_or_nothing_leaves_the_codes(offers) -> None:
    offers(block_scaled_matmul=("nvfp4",), scaled_matmul=("int8", "fp8"))
    layer = layer_of("nvfp4-nvfp4")
    lay_out(layer, "sm_120", "speed", None)
    assert str(layer.scheme) == "nvfp4-nvfp4"
    offers()
    layer = layer_of("nvfp4-nvfp4")
    assert not lay_out(layer, "sm_70", "speed", None) and layer.prepared is None


# --- a model from a folder


@pytest.fixture
def prepared(checkpoint, tmp_path):
    """The embedded transformer under nvfp4, prepared for the CPU; its folder, which a test may damage."""
    folder = tmp_path / "loaded" / "transformer"
    shutil.copytree(checkpoint("nvfp4") / "transformer", folder)
    model = load(folder)
    return model, fluxq.prepare(model, device="cpu"), folder


@pytest.mark.slow
def test_a_cpu_runs_4_bit_layers_as_int8_and_saves_what_was_loaded(prepared, tmp_path: Path) -> None:
    model, rows, folder = prepared
    kept = {row.name: re.findall("-(?:center|smooth)", row.stored) for row in rows}
    assert {row.name: row.runs_as for row in rows} == {n: "int8-int8" + "".join(words) for n, words in kept.items()}
    assert {row.how for row in rows} == {"re-encoded to int8"} and any(kept.values())
    assert all(0 < row.added_error < 0.03 for row in rows)
    four_bit = [name for name, scheme in json_schemes(folder).items() if scheme.startswith("nvfp4-nvfp4")]
    assert sorted(row.name for row in rows) == sorted(four_bit)
    model.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", folder)
    assert fluxq.prepare(model, device="cpu") == []  # there is nothing left to do
    twin = copy.deepcopy(model)
    twin.save_pretrained(tmp_path / "twin")
    assert_same_files(tmp_path / "twin", folder)


@pytest.mark.parametrize("recipe", ["nvfp4", "int8"])
def test_decoded_ahead_a_model_computes_the_same_bits_and_saves_what_was_loaded(
    checkpoint, tmp_path: Path, recipe: str
) -> None:
    folder = checkpoint(recipe) / "transformer"
    plain, model = load(folder), load(folder)
    rows = fluxq.prepare(model, device="cpu", prefer="decoded")
    decodes = [name for name, scheme in json_schemes(folder).items() if not scheme.startswith("int8-int8")]
    assert sorted(row.name for row in rows) == sorted(decodes) and decodes
    assert all(row.stored == row.runs_as and row.added_error == 0 and "beside its codes" in row.how for row in rows)
    for (name, layer), (_, before) in zip(quant_layers(model), quant_layers(plain), strict=True):
        tokens = torch.randn(5, layer.in_features).bfloat16()
        assert torch.equal(layer(tokens), before(tokens)), name
        assert (layer.prepared is not None) == (name in decodes)
    assert fluxq.prepare(model, device="cpu", prefer="decoded") == []
    with pytest.raises(ValueError, match=r"prepared already, for cpu and prefer='decoded' .* prefer='speed'"):
        fluxq.prepare(model, device="cpu")
    for number, each in enumerate((model, copy.deepcopy(model))):
        each.save_pretrained(tmp_path / str(number))
        assert_same_files(tmp_path / str(number), folder)
    model.dequantize()
    assert not quant_layers(model)


@pytest.mark.parametrize("offload", ["in_memory", "in_groups"])
def test_a_model_decoded_ahead_is_offloaded_as_any_other(checkpoint, offload: str) -> None:
    folder = checkpoint("nvfp4") / "transformer"
    model = load(folder)
    name, plain = next((name, layer) for name, layer in quant_layers(load(folder)) if layer.scheme.activations)
    fluxq.prepare(model, device="cpu", prefer="decoded")
    {"in_memory": in_memory, "in_groups": in_groups}[offload](model)
    tokens = torch.randn(5, plain.in_features).bfloat16()
    assert torch.equal(model.get_submodule(name)(tokens), plain(tokens))


def test_decoding_ahead_is_for_a_cpu_with_room(checkpoint, gpu, monkeypatch) -> None:
    model = load(checkpoint("nvfp4") / "transformer")
    gpu("sm_90")
    with pytest.raises(ValueError, match=r"kernels on cuda.* decode on their way: take 'speed' or .*device='cpu'"):
        fluxq.prepare(model, device="cuda", prefer="decoded")
    monkeypatch.setattr(integration, "free_bytes", lambda device: 1_000_000)
    with pytest.raises(
        ValueError, match=r"takes \d+\.\d GB beside the codes and 0\.0 GB are free: take prefer='memory'"
    ):
        fluxq.prepare(model, device="cpu", prefer="decoded")
    assert all(layer.prepared is None for _, layer in quant_layers(model))


def test_fused_blocks_leave_layers_that_are_decoded_ahead_alone(checkpoint) -> None:
    model = load(checkpoint("nvfp4") / "transformer")
    fluxq.prepare(model, device="cpu", prefer="decoded")
    parts = fluxq.optimize(model, device="cpu")
    assert not any(part.layers for part in parts)
    assert any("its weight is decoded already" in part.why_not for part in parts)


def json_schemes(folder: Path) -> dict[str, str]:
    layers = json.loads((folder / "config.json").read_text())["quantization_config"]["layers"]
    return {name: scheme for scheme, names in layers.items() for name in names}


@pytest.mark.slow
def test_images_of_a_prepared_model_are_as_near_to_16_bit_as_those_of_the_stored_one(checkpoint, pipe) -> None:
    stored = diffusers.FluxPipeline.from_pretrained(checkpoint("nvfp4"), torch_dtype=torch.bfloat16)
    prompt = {**tiny.CALL_KWARGS, "prompt": list(tiny.PROMPTS[:8]), "num_inference_steps": 4, "output_type": "latent"}

    def latents(pipeline) -> Tensor:
        return pipeline(**prompt, generator=torch.Generator().manual_seed(0)).images

    want, before = latents(pipe), latents(stored)
    assert fluxq.prepare(stored, device="cpu")
    after = latents(stored)
    assert not torch.equal(after, before)
    assert relative(after, want) < 1.1 * relative(before, want)


def test_files_that_are_gone_or_changed_are_named_when_saving(prepared, tmp_path: Path) -> None:
    model, rows, folder = prepared
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    name = f"{rows[0].name}.weight"
    save_file({**held, name: held[name] ^ 1}, file)
    with pytest.raises(ValueError, match=r"weight in .* is not what this model was loaded from"):
        model.save_pretrained(tmp_path / "saved")
    file.unlink()
    with pytest.raises(ValueError, match=r"is not in the safetensors files of .* put the files back"):
        model.save_pretrained(tmp_path / "saved")


def test_an_adapter_fused_afterwards_must_be_unfused_before_saving(prepared) -> None:
    model, _, folder = prepared
    name, layer = next((name, layer) for name, layer in quant_layers(model) if layer.prepared)
    layer.append_low_rank(torch.zeros(2, layer.in_features), torch.zeros(layer.out_features, 2))
    with pytest.raises(ValueError, match=rf"{name}: an adapter was fused after"):
        as_stored(layer)
    layer.drop_low_rank(2)
    with safe_open(next(folder.glob("*.safetensors")), "pt") as stream:
        assert torch.equal(as_stored(layer)["weight"], stream.get_tensor(f"{name}.weight"))


@pytest.mark.parametrize("rank", [0, 5])
def test_an_adapter_fused_before_is_not_left_out_of_what_is_saved(rank: int, tmp_path: Path) -> None:
    layer = layer_of("nvfp4-nvfp4", rank=rank)
    save_file({f"a.{name}": tensor for name, tensor in as_stored(layer).items()}, tmp_path / "x.safetensors")
    layer.append_low_rank(torch.zeros(2, layer.in_features), torch.zeros(layer.out_features, 2))
    reencode_layer(layer, ("int8",), StoredLayer(tmp_path, "a"))
    with pytest.raises(ValueError, match=r"a: an adapter was fused before fluxq\.prepare, .*: save before"):
        as_stored(layer)


def test_bad_calls_are_named(checkpoint, pipe) -> None:
    with pytest.raises(ValueError, match="prefer is 'size', expected 'speed', 'memory' or 'decoded'"):
        fluxq.prepare(pipe, prefer="size")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="this FluxPipeline holds no layer that fluxq quantized"):
        fluxq.prepare(pipe)


def test_what_a_cpu_computes_well_is_left_alone(checkpoint) -> None:
    model = load(checkpoint("int8") / "transformer")
    assert fluxq.prepare(model, device="cpu") == []
    assert all(layer.prepared is None for _, layer in quant_layers(model))


# --- what a model must be like


def in_memory(model: nn.Module) -> None:
    accelerate.cpu_offload(model, torch.device("cpu"))


def in_groups(model: nn.Module) -> None:
    model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")


@pytest.mark.parametrize("offload", [in_memory, in_groups])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_offloaded_model_is_refused(checkpoint, offload, device: str | None) -> None:
    model = load(checkpoint("nvfp4") / "transformer")
    offload(model)
    with pytest.raises(ValueError, match=r"Transformer2DModel is offloaded, .* fluxq\.prepare first, then offload"):
        fluxq.prepare(model, device=device)
    assert all(layer.prepared is None for _, layer in quant_layers(model))


@pytest.mark.often(1)
@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("chip", ["sm_80", "sm_100"])  # without the format, and with swizzled scales
def test_a_second_call_for_one_chip_changes_nothing_and_for_another_is_refused(
    checkpoint, tmp_path: Path, offers, gpu, chip: str, prefer
) -> None:
    folder = checkpoint("nvfp4") / "transformer"
    offers(
        scaled_matmul=("int8",),
        w4a8_matmul=("nvfp4-int8",),
        block_scaled_matmul=("nvfp4",) if chip == "sm_100" else (),
    )
    gpu(chip)
    model = load(folder)
    assert fluxq.prepare(model, device="cuda", prefer=prefer)
    held = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    assert fluxq.prepare(model, device="cuda", prefer=prefer) == []
    other = "speed" if prefer == "memory" else "memory"
    with pytest.raises(ValueError, match=rf"already, for {chip} and prefer='{prefer}' .* for {chip} and .*='{other}'"):
        fluxq.prepare(model, device="cuda", prefer=other)
    with pytest.raises(ValueError, match=rf"prepared already, for {chip} .* to prepare it for cpu"):
        fluxq.prepare(model, device="cpu", prefer=prefer)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == held
    model.save_pretrained(tmp_path)
    assert_same_files(tmp_path, folder)


def test_a_gpu_without_triton_is_refused(checkpoint, monkeypatch) -> None:
    model = load(checkpoint("nvfp4") / "transformer")
    monkeypatch.setattr(integration, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not there for cuda: install triton, or prepare for device='cpu'"):
        fluxq.prepare(model, device="cuda")
    assert fluxq.prepare(model, device="cpu")


def test_layers_that_nothing_can_be_done_for_are_warned_of(checkpoint, offers, gpu, caplog) -> None:
    model = load(checkpoint("nvfp4") / "transformer")
    offers()
    gpu("sm_70")
    assert fluxq.prepare(model, device="cuda") == []
    four_bit = [record for record in caplog.messages if " layers of nvfp4-nvfp4-static stay as they are" in record]
    (said,) = four_bit
    assert "on sm_70: torch reference (not block_scaled_matmul: no unit" in said
    caplog.clear()
    offers(block_scaled_matmul=("nvfp4",), scaled_matmul=("int8", "fp8"))
    assert fluxq.prepare(model, device="cuda") == [] and not caplog.messages


# --- from where its files are read again


@pytest.mark.slow
def test_a_component_of_another_folder_than_its_pipeline_is_found(checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("nvfp4") / "transformer"
    both = diffusers.FluxPipeline.from_pretrained(tiny.path(), transformer=load(folder), dtype=torch.bfloat16)
    assert {row.name.partition(".")[0] for row in fluxq.prepare(both, device="cpu")} == {"transformer"}
    both.transformer.save_pretrained(tmp_path)
    assert_same_files(tmp_path, folder)


@pytest.mark.slow
def test_a_folder_inside_a_downloaded_repository_is_found(checkpoint, tmp_path: Path, monkeypatch) -> None:
    folder = checkpoint("nvfp4") / "transformer"
    repository = tmp_path / "models--someone--some-model"
    shutil.copytree(folder, repository / "snapshots" / "abc" / "transformer")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = load(folder)
    model.register_to_config(_name_or_path="someone/some-model")  # what from_pretrained(…, subfolder=…) leaves there
    assert fluxq.prepare(model, device="cpu")
    model.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", folder)


@pytest.mark.slow
def test_compiled_models_and_blocks_are_looked_into(checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("nvfp4") / "transformer"
    model = load(folder)
    rows = fluxq.prepare(torch.compile(model), device="cpu")
    assert rows and not any("_orig_mod" in row.name for row in rows)
    model.save_pretrained(tmp_path)
    assert_same_files(tmp_path, folder)
    blocks = load(folder)
    blocks.transformer_blocks[0] = torch.compile(blocks.transformer_blocks[0])
    fluxq.prepare(blocks, device="cpu")
    inside = blocks.transformer_blocks[0]._orig_mod.attn.to_q
    want = tensors_in(folder)["transformer_blocks.0.attn.to_q.weight"]
    assert torch.equal(as_stored(inside)["weight"].view(torch.uint8), want.view(torch.uint8))


@pytest.mark.slow
def test_a_source_that_can_not_be_told_is_named_and_can_be_given(checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("nvfp4") / "transformer"
    models = load(folder), load(folder)
    for model in models:
        model.register_to_config(_name_or_path=str(tmp_path / "gone"))
    fluxq.prepare(models[0], device="cpu")
    with pytest.raises(ValueError, match=r"it is unknown where .* fluxq\.prepare\(\.\.\., source=FOLDER\)"):
        models[0].save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"source .* holds no checkpoint of fluxq for FluxTransformer2DModel: "):
        fluxq.prepare(models[1], device="cpu", source=tiny.path())
    assert all(layer.prepared is None for _, layer in quant_layers(models[1]))
    fluxq.prepare(models[1], device="cpu", source=folder.parent)  # the pipeline's folder serves too
    models[1].save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", folder)


def test_origin_says_which_tensor_it_lacks(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert StoredLayer(tmp_path, "a").read("weight").shape == (1,)
    with pytest.raises(ValueError, match=r"b\.weight is not in the safetensors files"):
        StoredLayer(tmp_path, "b").read("weight")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_recipe_comes_back_from_a_cpu(checkpoint, tmp_path: Path, recipe: str) -> None:
    folder = checkpoint(recipe) / "transformer"
    model = load(folder)
    fluxq.prepare(model, device="cpu")
    model.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", folder)
