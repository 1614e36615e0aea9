"""The fifteen traps: what makes a file load and draw noise, or stops a reader, each by the number that comments name.

    1  order of nibbles                     6  marks in the header alone       11  a folder of ModelOpt's in diffusers
    2  ModelOpt's export for ComfyUI        7  reciprocal global scale         12  one scale where rows have theirs
    3  scales padded out of step            8  scales computed in bf16         13  missing input_scale
    4  swapped nibbles, linear scales       9  proj_out left in 16 bit         14  scales of blocks of zeros
    5  swizzled or linear scales           10  patterns of layers to ignore    15  E8M0 byte 0

Of each: what it does to a layer, what `inspect` says of a file made with it, and that `export` never writes it, which
`test_what_export_writes_falls_into_none` asks of whole files as well.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.quantizers.bfl.bfl_quantizer import BFLQuantizer
from diffusers.quantizers.bfl.utils import _dequantize_weight
from diffusers.quantizers.quantization_config import BFLQuantizationConfig
from exchange_files import Tensors, export, write_base
from safetensors.torch import load_file
from torch import Tensor

from fluxq.base.model import resolve_model
from fluxq.quantize.exchange import bfl, comfy, compressed_tensors, modelopt
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.exchange.inspect import FAULTS, inspect_path
from fluxq.quantize.exchange.layer import QuantTensors
from fluxq.quantize.exchange.layouts import block_scales, pad, swap_nibbles, unblock_scales
from tests.exchange.test_inspect import Break, change, drop, kinds, made
from tests.exchange.test_layers import (
    GOLDEN,
    K,
    N,
    codes_alone,
    effective,
    golden,
    layer_of,
    quantized,
    relative,
    same_bytes,
    there_and_back,
)

NVFP4, FP8, MXFP8 = "nvfp4-nvfp4-static", "fp8-fp8", "mxfp8-mxfp8"
QKV = "double_blocks.0.img_attn.qkv"
BLOCKED = ("bfl", "comfy", "modelopt", "torchao", "compressed_tensors")
of_that_diffusers = pytest.mark.skipif(
    not diffusers.__version__.startswith("0.42."), reason="says what diffusers 0.42 does"
)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "transformer")


# --- every trap that a layer's tensors can hold, as `inspect` names it


def linear_scales(module: str, tensors: Tensors) -> None:
    n, k = tensors["bias"].shape[0], tensors["weight"].shape[1] * (2 if tensors["weight"].dtype == torch.uint8 else 1)
    scale = tensors["weight_scale"]
    groups = k // (16 if "weight_scale_2" in tensors else 32)
    tensors["weight_scale"] = pad(unblock_scales(scale.view(torch.uint8), n, groups), 128, 4).view(scale.dtype)


def row_col(module: str, tensors: Tensors) -> None:
    """Pad block scales as ModelOpt does: columns in multiples of 16, and tiles over those."""
    n, groups = tensors["bias"].shape[0], tensors["weight"].shape[1] // 8
    scale = unblock_scales(tensors["weight_scale"], n, groups)
    tensors["weight_scale"] = block_scales(pad(scale, 1, 16))


def to_bf16(scale: Tensor) -> Tensor:
    return scale.bfloat16().float()


def inverted(scale: Tensor) -> Tensor:
    return 1 / scale


def one_scale(module: str, tensors: Tensors) -> None:
    """The codes of one scale for the whole layer."""
    weight = tensors["weight"].float() * tensors["weight_scale"].float().unsqueeze(1)
    scale = weight.abs().max() / 448
    tensors |= {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


CT = "compressed_tensors"
TRAPS: dict[str, tuple[str, str, Break, str, dict[str, Any]]] = {
    "1 nibbles, ModelOpt": ("modelopt", NVFP4, change("weight", swap_nibbles), "swapped nibbles", {}),
    "1 nibbles, torchao": ("torchao", "nvfp4-nvfp4", change("_weight_qdata", swap_nibbles), "swapped nibbles", {}),
    "1 nibbles, one layer": ("comfy", NVFP4, change("weight", swap_nibbles, QKV), "swapped nibbles", {}),
    "2 ModelOpt's ComfyUI export": (
        "comfy",
        NVFP4,
        change("weight", swap_nibbles),
        "swapped nibbles",
        {"only_header": True},
    ),
    "3 row_col padding": ("comfy", NVFP4, row_col, "scales padded to 16 columns", {}),
    "4 nibbles under linear scales": (
        "bfl",
        NVFP4,
        change("weight", swap_nibbles),
        "swapped nibbles",
        {"marked": False},
    ),
    "5 swizzle, comfy": ("comfy", NVFP4, linear_scales, "missing swizzle", {}),
    "5 swizzle, mxfp8": ("comfy", MXFP8, linear_scales, "missing swizzle", {}),
    "5 swizzle, ModelOpt": ("modelopt", NVFP4, change("weight_scale", block_scales), "swizzled scales", {}),
    "7 global scale": ("modelopt", NVFP4, change("weight_scale_2", inverted), "reciprocal global scale", {}),
    "7 global scale, c-t": (CT, NVFP4, change("weight_global_scale", inverted), "reciprocal global scale", {}),
    "7 scale": ("comfy", "int8-int8", change("weight_scale", inverted), "reciprocal scale", {}),
    "8 dtype of scales": ("modelopt", FP8, change("weight_scale", Tensor.bfloat16), "scale of another dtype", {}),
    "12 one scale": ("bfl", FP8, one_scale, "one scale per tensor", {}),
    "13 input_scale, BFL": (
        "bfl",
        NVFP4,
        drop("input_scale"),
        "missing input_scale",
        {"marked": False, "original": True},
    ),
    "13 input_scale, ModelOpt": ("modelopt", NVFP4, drop("input_scale"), "missing input_scale", {}),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_named_and_nothing_else_is(trap, base, tmp_path) -> None:
    dialect, scheme, broken, kind, how = TRAPS[trap]
    report = inspect_path(made(tmp_path, dialect, scheme, broken, **how), base)[""]
    expected = {kind}
    if trap.startswith("12"):  # and rounded for other scales
        expected |= {fault.kind for fault in report.faults if fault.kind == "scale off by a factor"}
    assert set(kinds(report)) == expected
    count = sum(fault.kind == kind for fault in report.faults)
    assert count == (1 if "one layer" in trap else len(report.layers) if not trap.startswith("3") else count) and count
    assert FAULTS[kind].is_error
    if scheme != FP8 and "input_scale" not in trap:
        proved = [layer.against for layer in report.layers if layer.against and kind in layer.against.best]
        assert proved and all(against.plausible for against in proved)


SHAPES = ("3 row_col padding", "7 global scale", "8 dtype of scales", "12 one scale", "13 input_scale, ModelOpt")


@pytest.mark.parametrize("trap", SHAPES)
def test_what_shapes_and_numbers_tell_needs_no_base(trap, tmp_path) -> None:
    dialect, scheme, broken, kind, how = TRAPS[trap]
    report = inspect_path(made(tmp_path, dialect, scheme, broken, **how))[""]
    assert set(kinds(report)) == {kind}


@pytest.mark.slow
def test_two_traps_at_once_are_both_named(base, tmp_path) -> None:
    def broken(module: str, tensors: Tensors) -> None:
        tensors["weight"] = swap_nibbles(tensors["weight"])
        linear_scales(module, tensors)

    path = made(tmp_path, "comfy", NVFP4, broken)
    report = inspect_path(path, base)[""]
    assert set(kinds(report)) == {"swapped nibbles", "missing swizzle"}
    unmarked = inspect_path(made(tmp_path, "comfy", NVFP4, broken, marked=False), base)[""]
    assert unmarked.is_sound and unmarked.dialect in ("bfl", "modelopt")  # which is what such a file is
    assert "proved against the base" in unmarked.evidence


# --- what `export` writes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "dialect"),
    [
        *(("nvfp4", dialect) for dialect in ("bfl", "modelopt", "comfy")),
        *(pytest.param("nvfp4", dialect, marks=pytest.mark.slow) for dialect in ("torchao", "nunchaku_lite")),
        *(pytest.param("mxfp8", dialect, marks=pytest.mark.slow) for dialect in ("modelopt", "torchao")),
        ("mxfp8", "comfy"),
        *(pytest.param("fp8", dialect, marks=pytest.mark.slow) for dialect in ("modelopt", "torchao")),
        ("fp8", "bfl"),
        pytest.param("int8", "comfy", marks=pytest.mark.slow),
    ],
)
def test_what_export_writes_falls_into_none(recipe, dialect, plain_checkpoint, tmp_path) -> None:
    """Proved against the 16-bit model: nothing is wrong, and nothing is worth a note but what no file can help."""
    suffix = ".safetensors" if WRITERS[dialect].is_file else ""
    done = export(resolve_model(str(plain_checkpoint(recipe))), dialect, tmp_path / f"model{suffix}")
    model = plain_checkpoint("16 bit")
    path = Path(done.target) if suffix else Path(done.target, "transformer")
    report = inspect_path(path, model / "transformer")[""]
    known = {"modelopt": {"not for diffusers"}}  # trap 11: the format's own
    in_16_bit = {"widened", "left in 16 bit"} if done.dequantized else set()
    assert set(kinds(report, notes=True)) <= known.get(dialect, set()) | in_16_bit
    assert all(".norm" in fault.layer for fault in report.faults if fault.kind == "left in 16 bit")  # modulation
    assert report.contradictions == () and report.layers and report.is_sound
    for layer in report.layers:
        assert layer.against is not None and layer.against.plausible and not layer.against.best, layer.name
    if recipe == "nvfp4" and dialect != "nunchaku_lite":
        assert any(words.startswith("no swapped nibbles: proved") for words in report.proofs)


@pytest.mark.slow
def test_factors_that_export_folds_are_no_fault(checkpoint, tiny_folder, tmp_path) -> None:
    """nvfp4 as shipped: weights are W / factor, modulations take the factors. No layer has a wrong scale for it."""
    done = export(resolve_model(str(checkpoint("nvfp4"))), "bfl", tmp_path / "model.safetensors")
    report = inspect_path(Path(done.target), Path(tiny_folder))[""]
    found = {fault.layer for fault in report.faults if fault.kind == "folded factors"}
    assert found & done.folded.keys() and found - done.folded.keys()  # rows of modulations, columns of their readers
    assert set(kinds(report, notes=True)) == {"folded factors"} and report.is_sound
    assert report.evidence == ("the header says nvfp4+fp8r",)


# --- 1 to 5: where codes and scales stand


def in_comfy(**planted: Tensor) -> tuple[Any, Tensor]:
    source = golden("input_linear")["weight"]
    encoded = comfy.encode(quantized(NVFP4, weight=source))
    return encoded.tensors | planted, source


def error_in_comfy(tensors: dict[str, Tensor], source: Tensor) -> float:
    return relative(effective(comfy.decode(tensors, (N, K))), source)


def test_trap_1_nibble_order() -> None:
    """No field of any file says it. ComfyUI has the even column high, all others low; the rows of both are these."""
    tensors, source = in_comfy()
    assert error_in_comfy(tensors, source) == pytest.approx(0.0924, abs=1e-4)
    low_first = tensors | {"weight": swap_nibbles(tensors["weight"])}
    assert error_in_comfy(low_first, source) == pytest.approx(1.554, abs=2e-3)
    high_first = layer_of(golden("modelopt_nvfp4"))
    high_first["weight"] = swap_nibbles(high_first["weight"])
    assert relative(effective(modelopt.decode(high_first, (N, K), {"quant_algo": "NVFP4"})), source) > 1.5
    own = quantized(NVFP4)
    codes = {dialect: encoded(dialect, own) for dialect in BLOCKED}
    assert same_bytes(codes["comfy"]["weight"], swap_nibbles(own.tensors["weight"]))
    names = {"torchao": "_weight_qdata", "compressed_tensors": "weight_packed"}
    for dialect in set(BLOCKED) - {"comfy"}:
        assert same_bytes(codes[dialect][names.get(dialect, "weight")], own.tensors["weight"]), dialect


def encoded(dialect: str, layer: QuantTensors) -> dict[str, Tensor]:
    encode = DIALECTS[dialect].encode
    assert encode is not None
    return encode(layer).tensors


def test_trap_2_modelopts_own_comfy_export_swizzles_without_swapping() -> None:
    """`enable_swizzle_layout` with its metadata in the header. `export` writes what the third reading here has."""
    file, source = layer_of(golden("modelopt_nvfp4")), golden("input_linear")["weight"]
    as_exported = file | {"weight_scale": block_scales(file["weight_scale"])}
    entry = {"format": "nvfp4"}
    assert relative(effective(comfy.decode(as_exported, (N, K), entry)), source) > 1.5
    as_exported["weight"] = swap_nibbles(file["weight"])
    assert relative(effective(comfy.decode(as_exported, (N, K), entry)), source) < 0.0925
    ours = comfy.encode(modelopt.decode(file, (N, K), {"quant_algo": "NVFP4"})).tensors
    assert same_bytes(ours["weight"], as_exported["weight"])
    assert same_bytes(ours["weight_scale"], as_exported["weight_scale"])


def test_trap_3_scale_columns_padded_out_of_step() -> None:
    """ModelOpt's `row_col` padding: 16 columns of scales where the weight has two."""
    ours = comfy.encode(quantized(NVFP4, 48, 32)).tensors
    assert ours["weight_scale"].shape == (128, 4)
    padded = pad(ours["weight_scale"], 1, 16)
    with pytest.raises(ValueError, match=r"swizzled scales have 2048 elements, \(48, 2\) block scales .* take 512"):
        comfy.decode(ours | {"weight_scale": padded}, (48, 32))


@of_that_diffusers
def test_trap_4_diffusers_loads_swapped_nibbles_under_linear_scales_and_says_nothing() -> None:
    layer = quantized(NVFP4)

    def as_diffusers_reads(tensors: dict[str, Tensor]) -> Tensor:
        state = {f"block.{name}": tensor for name, tensor in tensors.items()}
        read = BFLQuantizer(BFLQuantizationConfig()).maybe_update_state_dict(state)
        return _dequantize_weight(read["block.weight"])

    ours = bfl.encode(layer).tensors
    assert torch.equal(as_diffusers_reads(ours), codes_alone(layer))
    swapped = ours | {"weight": swap_nibbles(ours["weight"])}
    assert relative(as_diffusers_reads(swapped), codes_alone(layer)) > 1


def test_trap_5_scales_that_are_linear_where_swizzled_ones_have_the_same_shape() -> None:
    """The shape tells nothing where N is a multiple of 128 and K of 64."""
    layer = quantized(NVFP4, 128, 64)
    layer.tensors["weight_scale"] = (torch.rand(128, 4) * 100 + 1).to(torch.float8_e4m3fn)
    ours = comfy.encode(layer).tensors
    linear = layer.tensors["weight_scale"]
    assert linear.shape == ours["weight_scale"].shape and not same_bytes(linear, ours["weight_scale"])
    assert relative(effective(comfy.decode(ours, (128, 64))), effective(layer)) == 0
    wrong = comfy.decode(ours | {"weight_scale": linear}, (128, 64))
    assert relative(effective(wrong), effective(layer)) > 0.3
    swizzled = dict(layer.tensors) | {"weight_scale": ours["weight_scale"]}
    assert relative(effective(DIALECTS["bfl"].decode(swizzled, (128, 64), {})), effective(layer)) > 0.3
    assert same_bytes(bfl.encode(layer).tensors["weight_scale"], linear)


# --- 6: marks


def test_trap_6_the_format_stands_in_the_tensor_and_in_the_header(tmp_path) -> None:
    """SGLang-Diffusion looks for the tensors alone and else reads linear scales, low nibbles first."""
    one = comfy.encode(quantized("nvfp4-16bit"))
    assert comfy.read_entry(one.tensors["comfy_quant"]) == one.entry
    assert one.entry == {"format": "nvfp4", "full_precision_matrix_mult": True}
    header = json.loads(comfy.metadata({"blocks.0.qkv": one.entry})["_quantization_metadata"])
    assert header == {"format_version": "1.0", "layers": {"blocks.0.qkv": one.entry}}
    both = inspect_path(made(tmp_path, "comfy", NVFP4))[""]
    assert both.contradictions == ()
    alone = inspect_path(made(tmp_path, "comfy", NVFP4, only_header=True))[""]
    assert alone.dialect == "comfy" and "no comfy_quant tensors" in alone.contradictions[0]
    assert [layer.scheme for layer in alone.layers] == [layer.scheme for layer in both.layers]


# --- 7 and 8: scales


def test_trap_7_reciprocal_global_scale() -> None:
    """compressed-tensors divides by what all others multiply by."""
    layer = quantized(NVFP4)
    one = compressed_tensors.encode(layer)
    stored = one.tensors["weight_global_scale"]
    assert stored.shape == (1,) and torch.equal(stored[0], 1 / layer.tensors["weight_scale_2"])
    assert torch.equal(one.tensors["input_global_scale"][0], 1 / layer.tensors["input_scale"])
    planted = one.tensors | {"weight_global_scale": 1 / stored}
    wrong = compressed_tensors.decode(planted, (N, K), one.entry)
    assert relative(effective(wrong), effective(layer)) > 1e3
    names = {"torchao": "_weight_per_tensor_scale"}
    for dialect in set(BLOCKED) - {"compressed_tensors"}:
        ours = encoded(dialect, layer)[names.get(dialect, "weight_scale_2")]
        assert torch.equal(ours, layer.tensors["weight_scale_2"]), dialect


def test_trap_8_scales_are_written_in_fp32() -> None:
    """comfy-kitchen and compressed-tensors compute them in the weight's dtype, up to 0.4 % off."""
    source = golden("input_linear")["weight"]
    amax = source.float().abs().max()
    for dialect, text, name, expected in (
        ("comfy", "fp8_tensor-fp8_tensor", "weight_scale", amax / 448),
        ("comfy", NVFP4, "weight_scale_2", amax / 2688),
        ("torchao", "fp8_tensor-fp8_tensor", "_weight_scale", (amax / 448).reshape(1, 1)),
    ):
        written = encoded(dialect, quantized(text, weight=source))[name]
        assert same_bytes(written, expected) and to_bf16(written) != written
    scales = compressed_tensors.encode(quantized("fp8-16bit", weight=source)).tensors["weight_scale"]
    assert scales.dtype == torch.float32 and (to_bf16(scales) != scales).any()


def test_trap_8_scales_of_bf16_are_told(tmp_path) -> None:
    for name in ("weight_scale_2", "weight_scale"):
        scheme = NVFP4 if name == "weight_scale_2" else FP8
        rounded = inspect_path(made(tmp_path / name, "bfl", scheme, change(name, to_bf16)))[""]
        assert kinds(rounded, notes=True)["scale rounded to bf16"] == 1
        exact = inspect_path(made(tmp_path / name, "bfl", scheme))[""]
        assert kinds(exact, notes=True)["scale rounded to bf16"] == 0
        one = inspect_path(made(tmp_path / name, "bfl", scheme, change(name, to_bf16, "transformer_blocks.0.ff.net.2")))
        assert kinds(one[""], notes=True)["scale rounded to bf16"] == 0
    file = inspect_path(GOLDEN / "comfy_nvfp4.safetensors")[""]
    assert kinds(file, notes=True)["scale rounded to bf16"] == 1  # as comfy-kitchen computes it
    assert kinds(inspect_path(GOLDEN / "modelopt_nvfp4.safetensors")[""], notes=True)["scale rounded to bf16"] == 0


# --- 9 to 11: ModelOpt's configurations


def test_trap_9_a_kind_of_layers_left_in_16_bit_is_named(tmp_path) -> None:
    """ModelOpt's general presets leave out `*proj_out*`, which in FLUX is a large matrix of every single block."""

    def left(keep: tuple[str, ...]) -> dict[str, str]:
        report = inspect_path(made(tmp_path, "modelopt", NVFP4, keep=keep))[""]
        return {fault.layer: fault.what for fault in report.faults if fault.kind == "left in 16 bit"}

    found = left(("norm", "proj_out"))
    assert "presets leave out whatever is called proj_out" in found["single_transformer_blocks.*.proj_out"]
    assert "single_transformer_blocks.*.proj_out" not in left(("norm",))


def test_trap_10_an_ignore_pattern_that_matches_quantized_layers(tmp_path) -> None:
    """SGLang-Diffusion holds each pattern against the path and against its first name; the rule is repeated here."""
    for ignore, count in ((["norm_out*", "proj_out*"], 0), (["single_transformer_blocks*"], 1), (["*proj_out*"], 1)):
        report = inspect_path(made(tmp_path, "modelopt", NVFP4, config={"ignore": ignore}))[""]
        assert kinds(report)["ignored though quantized"] == count


def test_traps_9_and_10_what_is_ignored_is_what_is_in_16_bit(plain_checkpoint, tmp_path) -> None:
    done = export(resolve_model(str(plain_checkpoint("nvfp4"))), "modelopt", tmp_path / "out")
    said = json.loads(Path(done.target, "transformer", "config.json").read_text())["quantization_config"]
    tensors, ignored = load_file(Path(done.target, "transformer/diffusion_pytorch_model.safetensors")), said["ignore"]
    held = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    assert "single_transformer_blocks.3.proj_out" in held and any(fnmatchcase("proj_out", p) for p in ignored)
    for name in held:  # vLLM and SGLang also look for each anywhere in the path
        assert not [p for p in ignored if fnmatchcase(name, p) or fnmatchcase(name.split(".")[0], p) or p in name], name


@of_that_diffusers
def test_trap_11_stock_diffusers_does_not_load_a_folder_of_modelopt(plain_checkpoint, tmp_path) -> None:
    """That is diffusers', whatever the folder holds: `export` has bfl and torchao for it, `inspect` says so."""
    done = export(resolve_model(str(plain_checkpoint("fp8"))), "modelopt", tmp_path / "out")
    with pytest.raises(TypeError, match="quant_type"):
        FluxTransformer2DModel.from_pretrained(f"{done.target}/transformer")
    folder = inspect_path(Path(done.target, "transformer"))[""]
    assert kinds(folder, notes=True)["not for diffusers"] == 1
    assert kinds(inspect_path(made(tmp_path / "t", "torchao", FP8))[""], notes=True)["not for diffusers"] == 0


# --- 12 and 13: what readers ask for


@of_that_diffusers
def test_trap_12_a_scale_per_tensor_is_no_scale_per_row() -> None:
    """ModelOpt's FP8 under BFL's names: diffusers ends in an IndexError, which says nothing of the file."""
    layer = quantized("fp8-fp8")
    ours = bfl.encode(layer).tensors
    assert ours["weight_scale"].shape == (N,)
    one = ours | {"weight_scale": torch.tensor(0.5)}
    with pytest.raises(ValueError, match=r"weight_scale is torch.float32 \(\), expected"):
        DIALECTS["bfl"].decode(one, (N, K), {})
    with pytest.raises(IndexError):
        state = {f"block.{name}": tensor for name, tensor in one.items()}
        _dequantize_weight(BFLQuantizer(BFLQuantizationConfig()).maybe_update_state_dict(state)["block.weight"])


def test_trap_13_missing_input_scale() -> None:
    """Of BFL's own FLUX.2 "mixed" file, which ComfyUI reads and diffusers refuses."""
    ours = bfl.encode(quantized(NVFP4)).tensors
    assert ours["input_scale"].shape == ()
    del ours["input_scale"]
    with pytest.raises(ValueError, match="no input_scale, which diffusers requires"):
        DIALECTS["bfl"].decode(ours, (N, K), {})
    with pytest.raises(ValueError, match="needs a calibrated input_scale"):
        bfl.encode(quantized("nvfp4-nvfp4"))
    flux2_mixed, _ = in_comfy()
    del flux2_mixed["input_scale"]
    read = comfy.decode(flux2_mixed, (N, K))
    assert isinstance(read, QuantTensors) and str(read.scheme) == "nvfp4-nvfp4"


# --- 14 and 15: zeros among scales


@pytest.mark.parametrize(
    ("dialect", "scheme", "name", "kind"),
    [
        ("modelopt", NVFP4, "weight_scale", "scales of 0"),  # trap 14
        ("bfl", NVFP4, "weight_scale", "scales of 0"),
        ("bfl", "fp8-fp8", "weight_scale", "scales of 0"),
        ("comfy", NVFP4, "weight_scale", "scales of 0"),
        ("comfy", "mxfp8-mxfp8", "weight_scale", "scales of 0"),
        ("torchao", "int8-int8", "_weight_scale", "scales of 0"),
        ("compressed_tensors", "int4-16bit", "weight_scale", "scales of 0"),
        ("nunchaku_lite", "int4-int4", "wscales", "scales of 0"),
        ("modelopt", MXFP8, "weight_scale", "E8M0 byte 0"),  # trap 15
        ("modelopt", NVFP4, "weight_scale_2", "global scale of 0"),
    ],
)
def test_traps_14_and_15_zeros_among_scales(dialect, scheme, name, kind, tmp_path) -> None:
    def zero(scale: Tensor) -> Tensor:
        scale = scale.clone()
        scale.reshape(-1).view(torch.uint8)[:4] = 0
        return scale

    report = inspect_path(made(tmp_path, dialect, scheme, change(name, zero)))[""]
    found = kinds(report, notes=True)
    assert found[kind] == len(report.layers)
    assert kind != "scales of 0" or "zero scales" not in found, "the same said twice"


def block_scales_of(dialect: str, layer: QuantTensors) -> Tensor:
    """Bytes (N, G) of the block scales that a dialect writes of a layer, in the order of the matrix."""
    (n, k), tensors = layer.shape, encoded(dialect, layer)
    scale = tensors["_weight_scale" if dialect == "torchao" else "weight_scale"].view(torch.uint8)
    groups = k // layer.scheme.weights.group_size
    return unblock_scales(scale, n, groups) if dialect in ("comfy", "torchao") else scale


def test_trap_14_blocks_of_zeros() -> None:
    """Every program writes another scale over them; a byte of 0 over codes that are not is what `export` never writes.

    The golden weight has blocks of zeros, and two so far below the rest that their scale rounds to 0 elsewhere.
    """
    layer = comfy.decode(layer_of(golden("comfy_nvfp4")), (N, K))
    assert isinstance(layer, QuantTensors)
    scale = layer.tensors["weight_scale"].float()
    assert (scale > 0).all() and scale[:2, :2].eq(1).all()  # bytes 0 in the file
    zeroed = quantized(NVFP4)
    zeroed.tensors["weight_scale"][3, 5] = 0  # over codes that are not zero
    for dialect in BLOCKED:
        with pytest.raises(ValueError, match="scales of 0 over codes that are not, in 8 of"):
            there_and_back(dialect, zeroed)
    zeroed.tensors["weight"][3, 40:48] = 0x80  # -0 and 0
    for dialect in BLOCKED:
        assert effective(there_and_back(dialect, zeroed))[3, 80:96].eq(0).all()
    tiny = quantized(NVFP4, weight=golden("input_linear")["weight"])
    for dialect in BLOCKED:
        assert block_scales_of(dialect, tiny).all(), dialect
        assert same_bytes(there_and_back(dialect, tiny).tensors["weight_scale"], tiny.tensors["weight_scale"])


def test_trap_15_e8m0_byte_zero() -> None:
    """0 in ComfyUI and 2^-127 elsewhere: the same over codes of zero alone, and `export` writes no such byte there."""
    layer = quantized(MXFP8)
    layer.tensors["weight_scale"][2, 3] = 0
    for dialect in ("comfy", "modelopt", "torchao", "compressed_tensors"):
        with pytest.raises(ValueError, match="scales of 0 over codes that are not"):
            there_and_back(dialect, layer)
    layer.tensors["weight"][2, 96:128] = -0.0
    assert there_and_back("torchao", layer).tensors["weight_scale"][2, 3] == 127
    zeros = quantized(MXFP8, weight=torch.zeros(N, K).bfloat16())
    for dialect in ("comfy", "modelopt", "torchao", "compressed_tensors"):
        assert block_scales_of(dialect, zeros).all(), dialect
