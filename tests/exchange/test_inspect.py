"""Tests of `fluxq inspect` on files in every dialect, and on faults that such files are known to have."""

import json
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from exchange_files import Tensors, base_state, write_base, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluxq.cli import cli
from fluxq.quantize.exchange.dialects import WRITERS
from fluxq.quantize.exchange.files import open_model, open_models
from fluxq.quantize.exchange.gguf_file import GGUFFile
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.inspect import FAULTS, Inspection, inspect_path
from fluxq.quantize.exchange.layouts import block_scales, swap_nibbles, unblock_scales
from fluxq.quantize.exchange.reference import Base, settled

GOLDEN = Path(__file__).parents[1] / "golden"
NVFP4, FP8, STATIC = "nvfp4-nvfp4-static", "fp8-fp8", "fp8_tensor-fp8_tensor-static"
QKV = "double_blocks.0.img_attn.qkv"

Break = Callable[[str, Tensors], None]


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "transformer")


def kinds(report: Inspection, *, notes: bool = False) -> Counter[str]:
    """Errors, and with `notes` all else, by kind."""
    return Counter(fault.kind for fault in report.faults if fault.is_error or notes)


def made(folder: Path, dialect: str, scheme: str, broken: Break | None = None, **how) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = "model.safetensors" if WRITERS[dialect].is_file else "model"
    return write_model(folder / name, dialect, scheme, broken, **how)


def change(name: str, by: Callable[[Tensor], Tensor], only: str = "") -> Break:
    """Changes one tensor of each layer, or of the layer `only`."""

    def broken(module: str, tensors: Tensors) -> None:
        if only in ("", module) and name in tensors:
            tensors[name] = by(tensors[name])

    return broken


def drop(name: str) -> Break:
    def broken(module: str, tensors: Tensors) -> None:
        tensors.pop(name, None)

    return broken


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("dialect", "scheme"),
    [
        *(("bfl", scheme) for scheme in (NVFP4, FP8)),
        *(("comfy", scheme) for scheme in (NVFP4, "mxfp8-mxfp8", "int8-int8", STATIC)),
        *(("modelopt", scheme) for scheme in (NVFP4, "mxfp8-mxfp8", STATIC, "int8-16bit")),
        *(("torchao", scheme) for scheme in ("nvfp4-nvfp4", "mxfp8-mxfp8", "int8-int8", FP8)),
        *(("compressed_tensors", scheme) for scheme in (NVFP4, "int8-16bit", FP8, "mxfp4-mxfp4")),
        *(("nunchaku_lite", scheme) for scheme in ("int4-int4", "nvfp4-nvfp4")),
    ],
)
def test_what_is_right_is_told_and_proved(dialect, scheme, base, tmp_path) -> None:
    report = inspect_path(made(tmp_path, dialect, scheme), base)[""]
    assert (report.dialect, report.contradictions) == (dialect, ())
    assert (report.family, report.is_sound, kinds(report)) == ("flux", True, Counter())
    for layer in report.layers:
        assert layer.scheme == scheme and layer.role
        assert layer.against is not None and layer.against.plausible and not layer.against.best
        assert layer.against.error < (0.13 if "4" in scheme else 0.04)
        other = [error for name, error in layer.against.errors.items() if name != "as declared"]
        assert all(error > 0.25 for error in other)
    assert any("as declared" in words for words in report.proofs)
    proved = " ".join(report.proofs)
    assert ("no swapped nibbles: proved" in proved) == ("4" in scheme and dialect != "nunchaku_lite")
    assert 4 < report.bits_per_weight < 12 and report.in_16_bit


# --- what else is wrong with files; the fifteen traps are in test_traps.py


@pytest.mark.slow
def test_rows_of_a_fused_layer_in_another_order(base, tmp_path) -> None:
    state = base_state()
    for order, said in (("kqv", "to_k, to_q, to_v"), ("qvk", "to_q, to_v, to_k")):
        names = {letter: f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"}
        moved = dict(state)
        for place, letter in zip("qkv", order, strict=True):
            moved |= {f"{names[place]}.{part}": state[f"{names[letter]}.{part}"] for part in ("weight", "bias")}
        report = inspect_path(made(tmp_path, "comfy", NVFP4, state=moved), base)[""]
        (fault,) = [fault for fault in report.faults if fault.is_error]
        assert (fault.kind, fault.layer) == ("rows in another order", QKV) and said in fault.what


@pytest.mark.slow
def test_halves_of_the_last_modulation_swapped(base, tmp_path) -> None:
    state = base_state()
    name = "norm_out.linear.weight"
    moved = state | {name: torch.cat(list(state[name].chunk(2))[::-1])}
    for also in ((), ("norm_out",)):  # in 16 bit, or quantized
        report = inspect_path(made(tmp_path, "comfy", NVFP4, state=moved, keep=("norm1", "norm."), also=also), base)[""]
        assert [(fault.kind, fault.layer) for fault in report.faults if fault.is_error] == [
            ("halves swapped", "final_layer.adaLN_modulation.1")
        ]


@pytest.mark.slow
def test_one_layer_of_another_model(base, tmp_path) -> None:
    name = "transformer_blocks.0.ff.net.2.weight"
    report = inspect_path(made(tmp_path, "comfy", NVFP4, state=base_state() | {name: base_state(1)[name]}), base)[""]
    (fault,) = [fault for fault in report.faults if fault.is_error]
    assert (fault.kind, fault.layer) == ("another model's layer", "double_blocks.0.img_mlp.2")
    other = inspect_path(made(tmp_path, "comfy", NVFP4, state=base_state(1)), base)[""]
    assert kinds(other)["another base"] == 1


@pytest.mark.slow
def test_a_layer_of_the_right_weight_that_rounding_does_not_explain(base, tmp_path) -> None:
    name, state = "transformer_blocks.0.ff.net.2.weight", base_state()
    weight = state[name].float()

    def report(changed: Tensor, **how) -> dict[str, str]:
        path = made(tmp_path, "modelopt", FP8, state=state | {name: changed.bfloat16()}, **how)
        return {fault.kind: fault.layer for fault in inspect_path(path, base)[""].faults if fault.kind in FAULTS}

    layer = name.removesuffix(".weight")
    assert report(1.5 * weight)["scale off by a factor"] == layer
    assert report(weight * torch.linspace(0.3, 3, weight.shape[1]))["lost scale"] == layer
    tuned = weight + 0.4 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    assert report(tuned)["damaged"] == layer
    assert not {"damaged", "folded factors", "lost scale", "scale off by a factor"} & report(weight).keys()
    for axis in (0, 1):  # so little that one factor for the whole layer would do nearly as well
        sizes = [-1 if i == axis else 1 for i in range(2)]
        mild = report(weight * torch.linspace(0.7, 1.1, weight.shape[axis]).view(sizes))
        assert mild.get("lost scale") == layer and "scale off by a factor" not in mild


ATTENTION = "transformer_blocks.0.attn"


def folded_state(factors: Tensor) -> Tensors:
    """Return a state with the values of an attention divided by factors, which both output projections take back."""
    state, changed = base_state(), {}
    for name in ("to_v", "add_v_proj"):
        path = f"{ATTENTION}.{name}"
        changed[f"{path}.weight"] = state[f"{path}.weight"].float() / factors[:, None]
        changed[f"{path}.bias"] = state[f"{path}.bias"].float() / factors
    for name in ("to_out.0", "to_add_out"):
        changed[f"{ATTENTION}.{name}.weight"] = state[f"{ATTENTION}.{name}.weight"].float() * factors
    return state | {name: value.bfloat16() for name, value in changed.items()}


@pytest.mark.often(1)
@pytest.mark.parametrize("scheme", [FP8, NVFP4])
def test_factors_are_folding_where_another_layer_takes_them_back(scheme, base, tmp_path) -> None:
    factors = torch.linspace(0.3, 3, 128)
    report = inspect_path(made(tmp_path, "modelopt", scheme, state=folded_state(factors)), base)[""]
    assert report.is_sound and kinds(report, notes=True)["folded factors"] == 4
    half = folded_state(factors) | {
        name: value for name, value in base_state().items() if name == f"{ATTENTION}.to_v.weight"
    }
    report = inspect_path(made(tmp_path, "modelopt", scheme, state=half), base)[""]
    wrong = [fault for fault in report.faults if fault.is_error]  # its bias alone is divided, and the text's values
    assert {fault.layer for fault in wrong} == {f"{ATTENTION}.to_v"}


def other_rows(scale: Tensor) -> Tensor:
    return scale[torch.randperm(len(scale), generator=torch.Generator().manual_seed(0))]


def one_row(scale: Tensor) -> Tensor:
    return torch.cat([scale[:1] * 100, scale[1:]])


# What is wrong with every layer, or tensor -> the format, the change, and what it is called.
UNLIKE: dict[str, tuple[str, Break, str]] = {
    "scales are lost": (FP8, change("weight_scale", torch.ones_like), "lost scale"),
    "scales of other rows": (FP8, change("weight_scale", other_rows), "lost scale"),
    "scales of ten times the size": (FP8, change("weight_scale", lambda t: t * 10), "scale off by a factor"),
    "scales a little too large": (FP8, change("weight_scale", lambda t: t * 1.01), "scale off by a factor"),
    "global scales a little too large": (NVFP4, change("weight_scale_2", lambda t: t * 1.09), "scale off by a factor"),
    "one row far too large": (FP8, change("weight_scale", one_row), "lost scale"),
    "biases are lost": (FP8, change("bias", torch.zeros_like), "another value"),
    "biases of ten times the size": (NVFP4, change("bias", lambda t: t * 10), "another value"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNLIKE)
def test_what_is_not_the_bases_is_wrong_and_is_not_imported(case, base, tmp_path) -> None:
    scheme, broken, kind = UNLIKE[case]
    path = made(tmp_path, "bfl", scheme, broken)
    report = inspect_path(path, base)[""]
    assert {fault.layer for fault in report.faults if fault.is_error} == {layer.name for layer in report.layers}
    assert kinds(report)[kind] > 20 and report.proofs[0].startswith("0 of 22 layers are as declared")
    with pytest.raises(ValueError, match=f"{report.layers[0].name}: {kind}"):
        import_model(path, tmp_path / "out", base)
    assert not (tmp_path / "out").exists()


# --- what other programs write, and is not read


def cast_to_fp8(only: str = "") -> Tensors:
    return {name: value.to(torch.float8_e4m3fn) if only in name else value for name, value in base_state().items()}


def folder_of(folder: Path, tensors: Tensors, **said) -> Path:
    write_base(folder)
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": said} if said else {})))
    return folder


@pytest.mark.parametrize("beside", ["scale", "weight_order", "weight._scale", "g_idx"])
def test_a_tensor_that_nothing_reads_is_named_whatever_it_is_called(beside, base, tmp_path) -> None:
    layer = "transformer_blocks.0.attn.to_q"
    tensors = cast_to_fp8("transformer_blocks.0.attn.to_q.weight") | {f"{layer}.{beside}": torch.ones(4)}
    folder = folder_of(tmp_path / "theirs", tensors)
    report = inspect_path(folder)[""]
    assert [(fault.kind, fault.layer) for fault in report.faults if fault.is_error] == [("unread", layer)]
    assert f"nothing reads {beside}" in report.faults[-1].what
    with pytest.raises(ValueError, match=f"{layer}: nothing here reads {beside}"):
        import_model(folder, tmp_path / "out", base)


@pytest.mark.parametrize("method", ["quanto", "sdnq", "gptq", "awq"])
def test_another_programs_folder_is_called_by_its_name(method, base, tmp_path) -> None:
    folder = folder_of(tmp_path / "theirs", cast_to_fp8("attn"), quant_method=method)
    report = inspect_path(folder)[""]
    assert not report.is_sound and kinds(report)["another program's"] == 1
    assert report.dialect == method and method in report.about and not report.evidence
    assert "nothing in it is quantized" not in report.about
    with pytest.raises(ValueError, match=f"what {method} wrote is not read here"):
        import_model(folder, tmp_path / "out", base)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"modules_to_not_convert": ["proj_out", "transformer_blocks.0.attn.to_k"], "fmt": "e4m3"}, ""),
        ({"modules_to_not_convert": ["transformer_blocks.0.attn.to_q"]}, "names 'transformer_blocks.0.attn.to_q', and"),
        ({"modules_to_not_convert": ["transformer_blocks"]}, "names 'transformer_blocks'"),
        ({"modules_to_not_convert": ["attn.to_q"]}, "names 'attn.to_q', and the layer has codes"),
        ({"modules_to_not_convert": "to_k"}, "modules_to_not_convert is to_k, expected a list of names"),
        ({"modules_to_not_convert": [None]}, r"modules_to_not_convert is \[None\], expected a list of names"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not read here, e4m3 is"),
    ],
)
def test_what_a_configuration_of_blocks_says_of_layers_with_codes(said, words, base, tmp_path) -> None:
    layers = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out")
    codes = {f"{layer}.weight": base_state()[f"{layer}.weight"].to(torch.float8_e4m3fn) for layer in layers}
    sizes = {name: [-(-size // 128) for size in tensor.shape] for name, tensor in codes.items()}
    scales = {f"{name}_scale_inv": torch.ones(size) for name, size in sizes.items()}
    folder = folder_of(tmp_path / "theirs", base_state() | codes | scales, quant_method="fp8", **said)
    found = [fault for fault in inspect_path(folder)[""].faults if fault.is_error]
    assert {fault.kind for fault in found} == ({"unreadable"} if words else set())
    assert all(re.search(words, fault.what) for fault in found)
    if words:
        with pytest.raises(ValueError, match=words):
            import_model(folder, tmp_path / "out", base)


def test_a_file_in_which_all_was_cast_to_fp8_is_read(base, tmp_path) -> None:
    folder = folder_of(tmp_path / "theirs", cast_to_fp8())
    report = inspect_path(folder, base)[""]
    assert report.is_sound, report.faults
    (done,) = import_model(folder, tmp_path / "out", base, dequantize=True)
    assert done.dialect == "legacy"
    bias = "transformer_blocks.0.attn.to_q.bias"
    held = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(held[bias], base_state()[bias].to(torch.float8_e4m3fn).bfloat16())


def test_a_scale_for_each_row_of_the_old_fp8_files_is_read_in_16_bit(base, tmp_path) -> None:
    def by_rows(module: str, tensors: Tensors) -> None:
        scale = tensors["weight"].float().abs().amax(1, keepdim=True) / 448
        tensors |= {"weight": (tensors["weight"].float() / scale).to(torch.float8_e4m3fn), "scale_weight": scale}

    name, state = "transformer_blocks.0.attn.to_q", base_state()
    tensors = {"weight": state[f"{name}.weight"]}
    by_rows(name, tensors)
    folder = folder_of(tmp_path / "theirs", state | {f"{name}.{part}": value for part, value in tensors.items()})
    assert inspect_path(folder, base)[""].is_sound
    (done,) = import_model(folder, tmp_path / "out", base, dequantize=True)
    assert list(done.dequantized) == [name] and "a scale for each row" in done.dequantized[name]


def modelopts(folder: Path) -> Path:
    """ModelOpt's folder in ComfyUI's layout: its mark in the header, tiles, and low nibbles first."""
    file = made(folder / "comfy", "comfy", NVFP4, original=False)
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))["__metadata__"]
    tensors = {name: value for name, value in load_file(file).items() if not name.endswith("comfy_quant")}
    codes = {name: swap_nibbles(value) for name, value in tensors.items() if value.dtype == torch.uint8}
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.47.0"}}
    done = folder_of(folder / "modelopt", tensors | codes, **said)
    save_file(tensors | codes, done / "diffusion_pytorch_model.safetensors", header)
    return done


@pytest.mark.slow
def test_what_marks_contradict_is_decided_by_the_base_or_refused(base, tmp_path) -> None:
    folder = modelopts(tmp_path)
    with pytest.raises(ValueError, match="`--base` proves them; without it `fluxq import` would guess"):
        import_model(folder, tmp_path / "out")
    (done,) = import_model(folder, tmp_path / "out", base)
    assert len(done.mended) == len(done.quantized) and set(map(tuple, done.mended.values())) == {("swapped nibbles",)}


@pytest.mark.often(1)
@pytest.mark.parametrize("rank", [0, 4])
def test_what_modelopt_took_out_of_a_weight_in_16_bit_is_put_back(rank, base, tmp_path) -> None:
    """Embedders that were calibrated with the rest, and disabled then."""
    name, state, g = "context_embedder", base_state(), torch.Generator().manual_seed(0)
    weight = state[f"{name}.weight"].float()
    factors = torch.rand(weight.shape[1], generator=g) + 0.5
    a, b = (torch.randn(size, generator=g).bfloat16() * 0.02 for size in ((4, len(factors)), (len(weight), 4)))
    taken = {f"{name}.pre_quant_scale": factors}
    taken |= {f"{name}.svdquant_lora_a": a, f"{name}.svdquant_lora_b": b} if rank else {}
    left = weight / factors - (b.float() @ a.float() if rank else 0)
    folder = made(tmp_path, "modelopt", FP8)
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | taken | {f"{name}.weight": left.bfloat16()}, file, {"format": "pt"})
    assert kinds(inspect_path(folder, base)[""])["disabled"] == 1
    (done,) = import_model(folder, tmp_path / "out", base)
    assert "pre_quant_scale" in done.mended[name][0]
    held = load_file(tmp_path / "out" / file.name)[f"{name}.weight"].float()
    assert (held - weight).norm() < 0.01 * weight.norm()


def test_smoothed_layers_decide_about_marks_too(tmp_path) -> None:
    model = open_model(modelopts(tmp_path))
    base, g = write_base(tmp_path / "unsmoothed"), torch.Generator().manual_seed(0)
    file, state = base / "diffusion_pytorch_model.safetensors", dict(base_state())
    for name, value in state.items():
        if value.ndim == 2:
            state[name] = value * torch.exp(0.4 * torch.randn(value.shape[1], generator=g))
    save_file(state, file)
    assert model.undecided and not settled(model, Base.of(base, "transformer", model)).undecided


def with_wide_tiles(tensors: Tensors) -> Tensors:
    """Block scales in tiles over 16 columns, as ModelOpt's row_col padding makes them."""
    found = dict(tensors)
    for name, scale in tensors.items():
        codes = tensors.get(name.removesuffix("_scale"))
        if name.endswith(".weight_scale") and codes is not None and codes.dtype == torch.uint8:
            n, groups = codes.shape[0], codes.shape[1] // 8
            linear = unblock_scales(scale.contiguous(), n, groups).view(torch.uint8)
            wide = torch.zeros(-(-n // 128) * 128, -(-groups // 16) * 16, dtype=torch.uint8)
            wide[:n, :groups] = linear
            found[name] = block_scales(wide.view(scale.dtype))
    return found


def test_padded_tiles_and_swapped_nibbles_together_are_mended(base, tmp_path) -> None:
    file = made(tmp_path / "a", "comfy", NVFP4)
    tensors = with_wide_tiles(load_file(file))
    assert any(tensors[name].shape != value.shape for name, value in load_file(file).items())
    swapped = {name: swap_nibbles(value) for name, value in tensors.items() if value.dtype == torch.uint8}
    kept = {name: value for name, value in swapped.items() if not name.endswith("comfy_quant")}
    save_file(tensors | kept, tmp_path / "both.safetensors")
    (done,) = import_model(tmp_path / "both.safetensors", tmp_path / "out", base)
    both = ("swapped nibbles", "scales padded to 16 columns")  # where 16 columns are no more than there were, one
    assert set(map(tuple, done.mended.values())) == {both, both[:1]} and max(done.errors.values()) < 0.2


@pytest.mark.slow
def test_a_mend_that_leaves_another_weight_is_refused(base, tmp_path) -> None:
    file = made(tmp_path / "a", "comfy", NVFP4)
    narrow, g = load_file(file), torch.Generator().manual_seed(0)
    tensors = with_wide_tiles(narrow)
    for name, value in narrow.items():
        scale = f"{name}_scale"
        if scale in narrow and narrow[scale].shape != tensors[scale].shape:
            tensors[name] = value.flatten()[torch.randperm(value.numel(), generator=g)].reshape(value.shape)
    save_file(tensors, tmp_path / "noise.safetensors")
    (found,) = inspect_path(tmp_path / "noise.safetensors", base).values()
    assert "another model's layer" in kinds(found) or "another base" in kinds(found)
    with pytest.raises(ValueError, match="inspect --base` says more"):
        import_model(tmp_path / "noise.safetensors", tmp_path / "out", base)


def test_double_quantized_scales_are_an_index_and_no_fault(tmp_path) -> None:
    meta = GOLDEN / "bnb_nf4.safetensors"
    tensors = {name: value for name, value in load_file(meta).items() if not name.startswith("__")}
    name = next(name for name in tensors if name.endswith("weight.absmax"))
    tensors[name] = torch.full_like(tensors[name], 255, dtype=torch.uint8)
    tensors[f"{name.removesuffix('absmax')}nested_absmax"] = torch.ones(1)
    tensors[f"{name.removesuffix('absmax')}nested_quant_map"] = torch.ones(256)
    save_file(tensors, tmp_path / "nf4.safetensors")
    assert "scales that are no numbers" not in kinds(inspect_path(tmp_path / "nf4.safetensors")[""])


def test_an_index_names_the_files_of_its_model(tmp_path) -> None:
    index = tmp_path / "flux[dev].safetensors.index.json"
    for name in ("1", "2", "old"):
        save_file({f"a.{name}": torch.ones(2)}, tmp_path / f"flux[dev]-{name}.safetensors")
    index.write_text(json.dumps({"weight_map": {f"a.{name}": f"flux[dev]-{name}.safetensors" for name in "12"}}))
    (model,) = open_models(index).values()
    assert sorted(model.stored) == ["a.1", "a.2"]


def test_a_type_of_gguf_that_is_not_read_is_no_damage(tmp_path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes({"a.weight": (39, (32, 32), bytes(17 * 32))}))
    with pytest.raises(ValueError, match=r"'a\.weight' is of type MXFP4, which is not read here"):
        open_models(tmp_path / "model.gguf")


@pytest.mark.slow
def test_norms_and_tables_are_held_against_the_base_too(base, tmp_path) -> None:
    for name in ("transformer_blocks.0.attn.norm_q.weight", "x_embedder.bias", "x_embedder.weight"):
        state = base_state()
        path = made(tmp_path, "modelopt", FP8, state=state | {name: -2 * state[name]})
        report = inspect_path(path, base)[""]
        (fault,) = [fault for fault in report.faults if fault.is_error]
        assert fault.layer == name.removesuffix(".weight").removesuffix(".bias") or fault.layer == name
        with pytest.raises(ValueError, match=fault.layer):
            import_model(path, tmp_path / "out", base)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
def test_scales_that_are_no_numbers(value, tmp_path) -> None:
    for dialect, scheme, name in (("bfl", FP8, "weight_scale"), ("modelopt", NVFP4, "weight_scale_2")):
        report = inspect_path(made(tmp_path, dialect, scheme, change(name, lambda t: torch.full_like(t, value))))[""]
        assert kinds(report)["scales that are no numbers"] == len(report.layers)


def test_a_bias_without_numbers_is_unreadable(tmp_path) -> None:
    report = inspect_path(made(tmp_path, "bfl", FP8, change("bias", lambda t: t[:0])))[""]
    assert kinds(report)["unreadable"] == len(report.layers)


def test_codes_that_are_nan(tmp_path) -> None:
    def nan(codes: Tensor) -> Tensor:
        return codes.view(torch.uint8).masked_fill(torch.eye(*codes.shape).bool(), 0x7F).view(codes.dtype)

    report = inspect_path(made(tmp_path, "bfl", FP8, change("weight", nan)))[""]
    assert kinds(report)["codes that are NaN"] == len(report.layers)


@pytest.mark.parametrize("scheme", [NVFP4, FP8])
def test_bfls_header_tells_its_files_from_modelopts(scheme, base, tmp_path) -> None:
    """Layers and names are the very same."""
    path = made(tmp_path, "modelopt", scheme) / "diffusion_pytorch_model.safetensors"
    report = inspect_path(path)[""]
    assert report.dialect == "modelopt" and kinds(report, notes=True)["nothing says the format"] == 1
    said = {"quantization": "nvfp4" if scheme == NVFP4 else "fp8r"}
    save_file(load_file(path), path, said)
    report = inspect_path(path, base)[""]
    assert (report.dialect, report.evidence) == ("bfl", (f"the header says {said['quantization']}",))
    assert report.is_sound and not kinds(report, notes=True)["nothing says the format"]
    beside = inspect_path(path.parent)[""]  # config.json weighs more than a header
    assert beside.dialect == "modelopt" and "as bfl has it" in beside.contradictions[0]


def test_bfls_word_in_the_header_of_a_file_for_comfyui_does_not_make_it_bfls(base, tmp_path) -> None:
    path = made(tmp_path, "comfy", NVFP4, marked=False)
    save_file(load_file(path), path, {"quantization": "nvfp4", "format": "pt"})
    for report in (inspect_path(path)[""], inspect_path(path, base)[""]):
        assert report.dialect == "comfy" and report.is_sound


INT8 = {"format": "int8_tensorwise"}
ROTATED = {**INT8, "convrot": True, "convrot_groupsize": 64}


@pytest.mark.parametrize(
    ("tensor", "header", "found"),  # JSON of the layer's comfy_quant and of its entry in the header, "" for none
    [
        (ROTATED, ROTATED, ROTATED),
        (ROTATED, "", ROTATED),
        ("", ROTATED, ROTATED),
        ("", {**INT8, "params": {"convrot": True, "convrot_groupsize": 64}}, ROTATED),
        (ROTATED, INT8, "comfy_quant says convrot True, and the header None"),
        (INT8, ROTATED, "comfy_quant says convrot None, and the header True"),
        (ROTATED, {**ROTATED, "convrot_groupsize": 16}, "convrot_groupsize 64, and the header 16"),
        (INT8, {"format": "nvfp4"}, "format 'int8_tensorwise', and the header 'nvfp4'"),
        (ROTATED, None, ROTATED),
        (ROTATED, [], r"_quantization_metadata says \[\] of it"),
        ("", "int8_tensorwise", "_quantization_metadata says 'int8_tensorwise' of it"),
        ("", "", "nothing says the layer's format, and other layers have theirs"),
        ("", {**ROTATED, "full_precision_matrix_mult": 1}, "full_precision_matrix_mult 1, expected true or false"),
        (torch.zeros(4), "", r"comfy_quant is torch.float32 \(4,\), expected up to 4096 bytes of JSON"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])  # which names in the header lack
def test_what_tensor_and_header_of_comfyui_say_of_a_layer(tensor, header, found, prefix, tmp_path) -> None:
    layer = {"weight": torch.ones(8, 64, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
    held = {f"{prefix}{name}.{part}": value.clone() for name in "ab" for part, value in layer.items()}
    for name, said in (("a", tensor), ("b", INT8)):
        if isinstance(said, dict):
            said = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
        held |= {f"{prefix}{name}.comfy_quant": said} if isinstance(said, Tensor) else {}
    layers = {"b": INT8} | ({} if header == "" else {"a": header})
    save_file(held, tmp_path / "x.safetensors", {"_quantization_metadata": json.dumps({"layers": layers})})
    model = open_model(tmp_path / "x.safetensors")
    if isinstance(found, str):
        assert [*model.faults] == [f"{prefix}a"] and re.search(found, model.faults[f"{prefix}a"])
    else:
        assert not model.faults and {**found, **model.layers[f"{prefix}a"].entry} == model.layers[f"{prefix}a"].entry


# --- files


LAYERS = [path.stem for path in GOLDEN.glob("*.safetensors") if not path.name.startswith(("gguf", "flux", "input"))]


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_golden_files_are_told_by_what_is_in_them(name, tmp_path) -> None:
    meta = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = {
        key: value for key, value in load_file(GOLDEN / f"{name}.safetensors").items() if not key.startswith("__")
    }
    with (GOLDEN / f"{name}.safetensors").open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size)).get("__metadata__") or {}
    save_file(tensors, tmp_path / "model.safetensors", header)
    config = meta.get("config") or {}
    (tmp_path / "config.json").write_text(json.dumps(config if "quantization_config" in config else {}))
    model = open_model(tmp_path)
    expected = {"ct": "compressed_tensors", "bnb": "bnb"}.get(name.split("_")[0], name.split("_")[0])
    if name == "bfl_nvfp4":
        expected = "modelopt"  # the very same layer, and nothing says whose
    if name == "comfy_fp8_e4m3":
        assert header
    assert model.dialect == expected, model.evidence
    (layer,) = model.layers.values()
    assert layer.shape == (160, 192)
    model.decode(layer, model.read_layer(layer))


@pytest.mark.slow
def test_a_checkpoint_of_fluxq_is_inspected_like_any_other(plain_checkpoint) -> None:
    for recipe in ("nvfp4", "fp8"):
        found = inspect_path(plain_checkpoint(recipe), plain_checkpoint("16 bit"))
        report = found["transformer"]
        assert (report.dialect, report.is_sound, report.family) == ("fluxq", True, "flux")
        assert all(layer.scheme for layer in report.layers) and report.proofs


@pytest.mark.slow
def test_the_command_prints_a_report_and_ends_with_1_where_images_would_be_wrong(base, tmp_path) -> None:
    right = made(tmp_path / "a", "comfy", NVFP4)
    wrong = made(tmp_path / "b", "comfy", NVFP4, change("weight", swap_nibbles))
    done = CliRunner().invoke(cli, ["inspect", str(right), "--base", str(base), "--layers"])
    assert done.exit_code == 0, done.output
    assert "nothing is wrong" in done.output and f"{QKV} " in done.output and "proved" in done.output
    for arguments in ([], ["--json"]):
        done = CliRunner().invoke(cli, ["inspect", str(wrong), "--base", str(base), *arguments])
        assert done.exit_code == 1 and "swapped nibbles" in done.output
    done = CliRunner().invoke(cli, ["inspect", str(right), "--base", str(base), "--json"])
    report = json.loads(done.output)[""]
    assert report["dialect"] == "comfy" and len(report["layers"]) == 12
    assert report["layers"][0]["against"]["error"] < 0.2


def test_a_base_with_two_denoisers_is_asked_which_of_them_it_is(base, tmp_path) -> None:
    index = {"_class_name": "FluxPipeline"}
    for name in ("transformer", "transformer_2"):
        shutil.copytree(base, tmp_path / "base" / name)
        index |= {name: ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "base" / "model_index.json").write_text(json.dumps(index))
    path = made(tmp_path, "comfy", NVFP4)
    with pytest.raises(ValueError, match="it may be transformer or transformer_2; give the component's own folder"):
        inspect_path(path, tmp_path / "base")


def test_bad_input_is_refused(base, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        inspect_path(tmp_path / "none")
    pickle = tmp_path / "model.ckpt"
    pickle.write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match="pickle"):
        inspect_path(pickle)
    quantized = made(tmp_path, "comfy", NVFP4)
    with pytest.raises(ValueError, match="quantized itself"):
        inspect_path(quantized, quantized)
    data = bytearray(quantized.read_bytes())
    (tmp_path / "cut.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="truncated or damaged"):
        inspect_path(tmp_path / "cut.safetensors")
    outside = tmp_path / "elsewhere.safetensors"
    shutil.copyfile(base / "diffusion_pytorch_model.safetensors", outside)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "diffusion_pytorch_model.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of the folder"):
        open_models(folder)


# --- GGUF


def gguf_bytes(tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3) -> bytes:
    """A GGUF file. tensors: name -> (ggml's type, shape with N first, data)."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 2)
    head += text("general.architecture") + struct.pack("<I", 8) + text("flux")
    head += text("numbers") + struct.pack("<IIQ3i", 9, 5, 3, 1, 2, 3)
    data = b""
    for name, (kind, shape, own) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += own + b"\0" * (-len(own) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def test_a_gguf_file_is_read_without_its_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    weight = load_file(GOLDEN / "gguf_q8_0.safetensors")["layer.weight"]
    norm = torch.randn(7)
    path = tmp_path / "model.gguf"
    data = weight.numpy().tobytes()
    tensors = {"blk.0.weight": (8, (32, 192), data), "norm.scale": (0, (7,), norm.numpy().tobytes())}
    path.write_bytes(gguf_bytes(tensors))
    file = GGUFFile(path)
    assert file.entries == {"general.architecture": "flux", "numbers": [1, 2, 3]}
    assert file.stored["blk.0.weight"].shape == (32, 192) and file.stored["blk.0.weight"].dtype == "Q8_0"
    assert file.get_tensor("blk.0.weight").numpy().tobytes() == data
    assert torch.equal(file.get_tensor("norm.scale"), norm)
    report = inspect_path(path)[""]
    assert report.dialect == "gguf" and report.layers[0].format == "Q8_0"
    assert report.layers[0].bits_per_weight == 8.5
    assert [(fault.kind, fault.is_error) for fault in report.faults if fault.layer] == [("not decoded", False)]
    path.with_name("model.config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    assert open_models(path)[""].config == {"_class_name": "FluxTransformer2DModel"}


def test_a_damaged_gguf_file_is_a_value_error(tmp_path) -> None:
    whole = gguf_bytes({"a.weight": (0, (4, 8), b"\1" * 128), "b.weight": (8, (1, 32), b"\2" * 34)})
    path = tmp_path / "model.gguf"
    refused = 0
    for at in range(4, len(whole) - 162):  # the header, byte by byte
        for value in (0, 0xFF, whole[at] ^ 0x80):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                GGUFFile(path).get_tensor("a.weight")
            except ValueError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused > 200
    for size in range(0, len(whole) - 34, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"copy it again"):
            GGUFFile(path)


@pytest.mark.long
def test_memory_is_that_of_a_layer(tmp_path) -> None:
    """A model of 0.6 GB and its base of 1.2 GB are compared within 0.5 GB beside the program itself."""
    n, count = 4096, 36
    codes = torch.full((n, n), 56, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 56 is E4M3's 1
    state = {f"blocks.{i}.weight": codes.clone() for i in range(count)}
    state |= {f"blocks.{i}.weight_scale": torch.full((n,), 0.01) for i in range(count)}
    save_file(state, tmp_path / "model.safetensors", {"quantization": "fp8r"})
    del state
    weight = torch.full((n, n), 0.01, dtype=torch.bfloat16)
    save_file({f"blocks.{i}.weight": weight.clone() for i in range(count)}, tmp_path / "base.safetensors")
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from fluxq.quantize.exchange.inspect import inspect_path\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "report = inspect_path(Path(sys.argv[1]), Path(sys.argv[2]))['']\n"
        "assert report.is_sound and len(report.layers) == 36, report.faults[:3]\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    paths = [str(tmp_path / name) for name in ("model.safetensors", "base.safetensors")]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 0.5e9


@pytest.mark.parametrize(
    ("suffixes", "program"),
    [((".qweight", ".qzeros", ".scales"), "GPTQ or AWQ"), ((".weight._data", ".weight._scale"), "quanto")],
)
def test_another_programs_file_without_its_configuration_is_called_by_its_name(
    suffixes, program, base, tmp_path
) -> None:
    layer, state = "transformer_blocks.0.attn.to_q", dict(base_state())
    del state[f"{layer}.weight"]
    path = tmp_path / "theirs.safetensors"
    save_file(state | {layer + suffix: torch.ones(8, 8, dtype=torch.int32) for suffix in suffixes}, path)
    report = inspect_path(path)[""]
    assert not report.is_sound and report.dialect == program and kinds(report)["another program's"] == 1
    with pytest.raises(ValueError, match=f"what {program} wrote is not read here"):
        import_model(path, tmp_path / "out", base)


@pytest.mark.parametrize("name", ["int4-16bit", "fp8-fp8", "nvfp4-nvfp4-static"])
def test_a_bare_file_of_compressed_tensors_says_that_its_configuration_is_missing(name, base, tmp_path) -> None:
    folder = made(tmp_path, "compressed_tensors", name)
    bare = tmp_path / "bare.safetensors"
    shutil.copy(next(folder.glob("*.safetensors")), bare)
    report = inspect_path(bare)[""]
    assert report.dialect == "compressed_tensors" and not report.layers
    assert sum("config.json says how it is quantized, and is not there" in f.what for f in report.faults) == 22
    with pytest.raises(ValueError, match="nor does a base say it; get the folder, not the file alone"):
        import_model(bare, tmp_path / "out", base)


def test_a_bare_file_of_4_bits_whose_activations_are_in_16_has_no_scale_of_them(base, tmp_path) -> None:
    folder = made(tmp_path, "modelopt", "nvfp4-16bit")
    bare = tmp_path / "bare.safetensors"
    shutil.copy(next(folder.glob("*.safetensors")), bare)
    report = inspect_path(bare, base)[""]
    assert report.is_sound and {layer.format for layer in report.layers} == {"W4A16_NVFP4"}, report.faults
