"""comfy-kitchen's layers of 4-bit codes: decoded as comfy-kitchen does, in what of ours holds them, or refused."""

import json
from typing import Any

import pytest
import torch
from exchange_files import export, write_base, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluxq.base.model import resolve_model
from fluxq.kernels.transforms import rotate
from fluxq.quantize.exchange import comfy
from fluxq.quantize.exchange.export import plan_of
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.inspect import inspect_path
from fluxq.quantize.exchange.layer import Plain, QuantTensors, join
from fluxq.quantize.exchange.marks import Headers
from fluxq.quantize.exchange.native import NativeComponent
from tests.exchange.test_layers import golden, layer_of, quantized, relative, same_bytes

N, K = 160, 192
GOLDENS = {  # name -> the scheme that it becomes, and a word of the note
    "comfy_convrot_w4a4": ("int4-int4-hr64", "for each 64 columns here"),
    "comfy_w4a8": ("int8-int8-hr64", "held as the int8 codes"),
    "comfy_w6a8": ("int8-int8-hr64", "held as the int8 codes"),
    "comfy_svdquant_w4a4": ("int4-int4-smooth-r16", "4 bits without there"),
}


def said(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return json.loads(bytes(tensors["comfy_quant"].tolist()))


def marked(tensors: dict[str, Tensor], **entry: Any) -> dict[str, Tensor]:
    """The tensors of a layer whose marker says something more, or other; None takes a word out."""
    entry = {key: value for key, value in (said(tensors) | entry).items() if value is not None}
    return tensors | {"comfy_quant": torch.tensor(list(json.dumps(entry).encode()), dtype=torch.uint8)}


def file_of(name: str) -> dict[str, Tensor]:
    return layer_of(golden(name))


@pytest.mark.parametrize("name", GOLDENS)
def test_a_layer_of_comfy_kitchen_is_what_it_decodes_to(name: str) -> None:
    file, (scheme, note) = golden(name), GOLDENS[name]
    layer = comfy.decode(layer_of(file), (N, K))
    assert isinstance(layer, QuantTensors) and str(layer.scheme) == scheme and note in layer.notes[0]
    weight, bias = layer.collapsed()
    if "__x" in file:  # smoothing factors are the reciprocals of theirs, in 16 bit
        assert relative(weight[:32], file["__dequant_ref"]) < 2.0**-8
        ours = file["__x"] @ weight.T + (0 if bias is None else bias.float())
        assert relative(ours, file["__y"]) < 2.0**-7
    else:
        assert torch.equal(weight[:32], file["__dequant_ref"])
    widened = comfy.decode(marked(layer_of(file), full_precision_matrix_mult=True, act_unsigned=None), (N, K))
    assert isinstance(widened, QuantTensors) and widened.scheme.activations is None


def test_codes_of_rows_with_one_scale_go_back_as_they_were() -> None:
    file = file_of("comfy_convrot_w4a4")
    layer = comfy.decode(file, (N, K))
    assert isinstance(layer, QuantTensors)
    back = comfy.encode(layer)
    assert back.entry == said(file) and all(same_bytes(back.tensors[name], file[name]) for name in file)
    with pytest.raises(ValueError, match="convrot_w4a4 has one scale for each row, int4 here one for each 64 columns"):
        comfy.encode(quantized("int4-int4-hr64"))


def test_what_no_format_of_ours_holds_becomes_more_bits_or_a_weight() -> None:
    file = file_of("comfy_convrot_w4a4")
    codes = file["weight"].view(torch.uint8)
    own = torch.stack((codes & 15, codes >> 4), -1).flatten(1).view(torch.int8)
    own = torch.where(own > 7, own - 16, own)
    for changed in ({"linear_dtype": "int8"}, {}):
        scale = file["weight_scale"] * (1 if changed else 1.0001)
        layer = comfy.decode(marked(file | {"weight_scale": scale}, **changed), (N, K))
        assert isinstance(layer, QuantTensors) and str(layer.scheme) == "int8-int8-hr64"
        assert torch.equal(layer.tensors["weight"], own) and torch.equal(layer.tensors["weight_scale"], scale)
        assert ("x is rounded to int8 here, to int4 there" in layer.notes[0]) != bool(changed)
    for name, more, size in (("comfy_convrot_w4a4", 0, 4), ("comfy_w4a8", 0, 4), ("comfy_w4a8", 0.5, 64)):
        tensors = marked(file_of(name), convrot_groupsize=size)
        whole = comfy.decode(file_of(name), (N, K)).collapsed()[0]
        whole = rotate(rotate(whole, 64, True) + more, size, True)
        offset = {"weight_correction": torch.full((K // 16, N), more)} if more else {}
        layer = comfy.decode(tensors | offset, (N, K))
        assert isinstance(layer, Plain) and relative(layer.weight, whole) < 1e-6
        assert ("has an offset" if more else f"in blocks of {size}") in layer.why
    file = file_of("comfy_svdquant_w4a4")
    halves = {name: file[name].half() for name in file if name not in ("weight", "comfy_quant")}
    layer = comfy.decode(file | halves | {"weight_scale": halves["weight_scale"] * 1.01}, (N, K))
    assert isinstance(layer, Plain) and "torch.float16 numbers that bf16 does not hold" in layer.why
    assert relative(layer.weight, comfy.decode(file, (N, K)).collapsed()[0]) < 0.02


def test_a_low_rank_layer_is_the_same_in_tiles_and_by_other_names() -> None:
    layer = quantized("int4-int4-smooth-r32", 256, 192)
    tensors = comfy.encode(layer).tensors
    other = {name.replace("weight_proj", "proj").replace("weight_smooth", "smooth"): t for name, t in tensors.items()}
    weight, scale, up = (tensors[name] for name in ("weight", "weight_scale", "weight_proj_up"))
    at = torch.arange(256 * 96).reshape(2, 3, 32, 128)  # (N/128, K/64, 32, 128), 4 rows of 32 bytes to a line
    tile, group, quad, byte = at // (3 * 32 * 128), at // (32 * 128) % 3, at // 128 % 32, at % 128
    tiled = tensors | {"weight": weight[tile * 128 + quad * 4 + byte // 32, group * 32 + byte % 32]}
    tiled |= {"weight_scale": scale.reshape(3, 2, 128).movedim(0, 1).contiguous()}
    tiled |= {"weight_proj_up": up.reshape(2, 128, 32).movedim(1, 2).contiguous()}
    for read in (other, marked(tiled, layout="kitchen_tile_packed_w4a4"), tiled):
        back = comfy.decode(read, (256, 192))
        assert isinstance(back, QuantTensors) and back.scheme == layer.scheme and not back.notes
        assert all(same_bytes(back.tensors[name], layer.tensors[name]) for name in layer.tensors)
    with pytest.raises(ValueError, match=r"weight is torch.int8 \(256, 96\), expected .* \(2, 3, 32, 128\)"):
        comfy.decode(marked(tensors, layout="kitchen_tile_packed_w4a4"), (256, 192))


def holed(tensor: Tensor) -> Tensor:
    """With a NaN in it."""
    if tensor.dtype == torch.float8_e4m3fn:
        return torch.full_like(tensor.view(torch.uint8), 0x7F).view(tensor.dtype)
    return tensor.index_fill(0, torch.tensor([0]), torch.nan)


CONVROT, W4A8, W6A8, SVD = GOLDENS


@pytest.mark.parametrize(
    ("name", "entry", "changed", "words"),
    [
        (CONVROT, {"convrot_groupsize": 256}, {}, "convrot_groupsize 256 does not divide K = 192"),
        (CONVROT, {"convrot_groupsize": 128}, {}, "convrot_groupsize 128 is no power of 4"),
        (W4A8, {"convrot_groupsize": None}, {}, "convrot_groupsize 256 does not divide K = 192"),
        (CONVROT, {"convrot": False}, {}, "convrot is False, and every reader of convrot_w4a4 rotates x"),
        (W4A8, {"convrot": "yes"}, {}, "convrot is 'yes', and every reader of asym_w4a8_int8 rotates x"),
        (CONVROT, {"quant_group_size": 32}, {}, "has quant_group_size 64 dividing K, not 32 with K = 192"),
        (CONVROT, {"quant_group_size": 64.0}, {}, "has quant_group_size 64 dividing K, not 64.0"),
        (CONVROT, {"linear_dtype": "fp4"}, {}, "linear_dtype is 'fp4', convrot_w4a4 has int4 and int8"),
        (CONVROT, {}, {"weight_scale": holed}, "weight_scale holds NaN"),
        (CONVROT, {}, {"weight_scale": lambda t: t[:9]}, r"weight_scale is torch.float32 \(9,\), expected"),
        (CONVROT, {}, {"weight": lambda t: t[:, :90]}, r"weight is torch.int8 \(160, 90\), expected"),
        (CONVROT, {}, {"weight_codebook": lambda t: torch.ones(16)}, "nothing reads weight_codebook"),
        (CONVROT, {}, {"pre_quant_scale": lambda t: torch.ones(K)}, "convrot_w4a4 and has pre_quant_scale"),
        (W4A8, {"group_size": 3}, {}, "group_size 3 is none that asym_w4a8_int8 has"),
        (W4A8, {"group_size": True}, {}, "group_size True is none that asym_w4a8_int8 has"),
        (W4A8, {"group_size": 128}, {}, "group_size 128 does not divide K = 192"),
        (W4A8, {"group_size": 32}, {}, r"weight_s_rel is torch.float8_e4m3fn \(160, 12\), expected"),
        (W4A8, {}, {"weight_codebook": lambda t: t[:15]}, r"weight_codebook is torch.float32 \(15,\), expected"),
        (W4A8, {}, {"weight_codebook": holed}, "weight_codebook holds NaN or infinite numbers"),
        (W4A8, {}, {"weight_codebook": lambda t: t * 1e30}, r"weight_codebook is up to .*e\+\d\d, which no weight is"),
        (W4A8, {}, {"weight_correction": lambda t: torch.full((12, N), -1e38)}, r"weight_correction is up to 1e\+38"),
        (W4A8, {}, {"weight_s_rel": holed}, "weight_s_rel holds NaN"),
        (W4A8, {}, {"weight_s_channel": holed}, "weight_s_channel holds NaN"),
        (W4A8, {}, {"weight_s_channel": lambda t: -t}, "weight_s_channel holds NaN, infinite or negative"),
        (W4A8, {}, {"weight_s_channel": None}, "the layer has no weight_s_channel"),
        (W4A8, {}, {"weight": lambda t: t[:, :48]}, r"weight is torch.int8 \(160, 48\), expected"),
        (W6A8, {}, {"weight_codebook": lambda t: torch.ones(16)}, "6-bit codes have neither codebook nor correction"),
        (SVD, {"layout": "nunchaku"}, {}, "layout 'nunchaku' is none of svdquant_w4a4"),
        (SVD, {"layout": "kitchen_tile_packed_w4a4"}, {}, "has rows in tiles of 128, not N = 160"),
        (SVD, {"act_unsigned": 1}, {}, "act_unsigned is 1, expected true or false"),
        (SVD, {"full_precision_matrix_mult": True}, {}, "act_unsigned with full_precision_matrix_mult"),
        (SVD, {}, {"bias": None}, "act_unsigned, and the layer has no bias"),
        (SVD, {"lowrank_branch_input_basis": "post_smoothing"}, {}, "lowrank_branch_input_basis is 'post_smoothing'"),
        (SVD, {}, {"weight_proj_down": None}, "the layer has no weight_proj_down"),
        (SVD, {}, {"weight_proj_down": lambda t: t.T}, r"weight_proj_down is \(16, 192\), expected \(192, rank\)"),
        (SVD, {}, {"weight_proj_up": lambda t: t[:, :8]}, r"weight_proj_up is torch.bfloat16 \(160, 8\), expected"),
        (SVD, {}, {"proj_up": lambda t: torch.ones(N, 16)}, "nothing reads proj_up"),
        (SVD, {}, {"weight_proj_up": holed}, "numbers of the low-rank pair are NaN"),
        (SVD, {}, {"weight_smooth_factor": lambda t: t * 0}, "weight_smooth_factor holds zeros"),
        (SVD, {}, {"weight_scale": lambda t: t.T}, r"weight_scale is torch.bfloat16 \(160, 3\), expected"),
    ],
)
def test_a_layer_that_cannot_be_so_is_refused(name: str, entry: dict[str, Any], changed: Any, words: str) -> None:
    tensors = file_of(name)
    made = {key: change(tensors.get(key)) for key, change in changed.items() if change}
    tensors = {key: t for key, t in (tensors | made).items() if changed.get(key, True)}
    with pytest.raises(ValueError, match=words):
        comfy.decode(marked(tensors, **entry), (N, K))


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("weight_s_rel", (), "weight_s_rel is (), expected (N, K / group_size)"),
        ("weight_s_rel", (9, 12), "weight_s_rel is (9, 12), expected (N, K / group_size)"),
        ("weight_s_rel", (N, 1000), "weight is (160, 96), expected (160, 8000) or (160, 12000)"),
        ("weight_codebook", (1 << 20,), "weight_codebook is (1048576,), expected (16,)"),
        ("weight_correction", (N, 12), "weight_correction is (160, 12), expected (12, 160)"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_not_read(
    name: str, size: Any, words: str, tmp_path, monkeypatch
) -> None:
    tensors = file_of(W4A8) | {name: torch.full(size, torch.nan)}
    save_file({f"a.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "x.safetensors")
    read, really = [], Headers.read
    monkeypatch.setattr(Headers, "read", lambda model, name: (read.append(name), really(model, name))[1])
    (fault,) = [fault for fault in inspect_path(tmp_path / "x.safetensors")[""].faults if fault.is_error]
    assert fault.kind == "unreadable" and words in fault.what
    assert set(read) == {"a.comfy_quant"}


@pytest.mark.parametrize(("factor", "kind"), [(1e30, "too large"), (-1, "scales that are no numbers")])
def test_scales_of_rows_are_looked_at(factor: float, kind: str, tmp_path) -> None:
    tensors = file_of(W4A8)
    tensors["weight_s_channel"] = tensors["weight_s_channel"] * factor
    save_file({f"a.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "x.safetensors")
    assert kind in {fault.kind for fault in inspect_path(tmp_path / "x.safetensors")[""].faults if fault.is_error}


# --- a model of such layers


def rotated(module: str, tensors: dict[str, Tensor]) -> None:
    """Turn int8 codes into those of convrot_w4a4, as comfy-kitchen rounds, scales of bf16 in every other layer."""
    w = rotate(tensors["weight"].float() * tensors["weight_scale"], 64, True)
    scale = w.abs().amax(1).clamp(min=1e-10) / 7
    scale = scale.bfloat16().float() if len(module) % 2 else scale
    codes = (w / scale.unsqueeze(1)).round().clamp(-7, 7).int() & 15
    tensors["weight"] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    tensors["weight_scale"] = scale
    tensors |= marked(tensors, format="convrot_w4a4", convrot_groupsize=64)


def coded(module: str, tensors: dict[str, Tensor]) -> None:
    """Turn int8 codes into those of asym_w4a8_int8, in groups of 16 with a codebook."""
    w = rotate(tensors["weight"].float() * tensors.pop("weight_scale"), 64, True).unflatten(1, (-1, 16))
    book = torch.tensor([-0.98, -0.79, -0.64, -0.5, -0.38, -0.26, -0.16, -0.05]).repeat(2)
    book[8:] = -book[:8].flip(0)
    channel = w.abs().amax((1, 2)) / 127
    relative = (w.abs().amax(2) / channel.unsqueeze(1)).to(torch.float8_e4m3fn)
    levels = (book * relative.float().unsqueeze(-1)).round().clamp(-127, 127)
    codes = (w.unsqueeze(-1) / channel.reshape(-1, 1, 1, 1) - levels.unsqueeze(2)).abs().argmin(-1).flatten(1)
    tensors["weight"] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    tensors |= {"weight_s_rel": relative, "weight_s_channel": channel, "weight_codebook": book}
    tensors |= marked(tensors, format="asym_w4a8_int8", convrot_groupsize=64, group_size=16)


BOTH = {"int4-int4-hr64", "int8-int8-hr64"}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "schemes"), [(rotated, BOTH), (coded, {"int8-int8-hr64"})])
def test_a_model_of_rotated_4_bit_layers_is_proved_and_imported(change: Any, schemes: set[str], tmp_path) -> None:
    base = write_base(tmp_path / "base")
    path = write_model(tmp_path / "model.safetensors", "comfy", "int8-int8", change, header=False)
    (report,) = import_model(path, tmp_path / "made", base=base)
    assert set(report.quantized.values()) == schemes and not report.dequantized and not report.mended
    assert any("in more bits than the file has" in note for note in report.notes)
    worst = max(report.errors.values())
    assert 0.06 < worst < 0.2

    def damaged(module: str, tensors: dict[str, Tensor]) -> None:
        change(module, tensors)
        tensors["weight"] = tensors["weight"].roll(1, 0) if module.endswith("proj") else tensors["weight"]

    path = write_model(tmp_path / "damaged.safetensors", "comfy", "int8-int8", damaged, header=False)
    with pytest.raises(ValueError, match="proj: another model's layer"):
        import_model(path, tmp_path / "other", base=base)


@pytest.mark.slow
@pytest.mark.reader("comfy-kitchen", "comfy")
def test_comfy_kitchen_reads_a_whole_low_rank_file(checkpoint, tmp_path) -> None:
    """Modulation, in int4 with 16-bit x, stays so beside main layers that the same programs read."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    folder = resolve_model(str(checkpoint("int4-svd")))
    source = NativeComponent(folder, "transformer")
    done = export(folder, "comfy", tmp_path / "x.safetensors")
    assert done.formats == {"svdquant_w4a4": 16, "awq_w4a16": 6} and not done.requantized + done.dequantized
    tensors, layout = load_file(done.target), "TensorCoreSVDQuantW4A4Layout"
    for unit in [choice.unit for choice in plan_of(source, "comfy").choices]:
        layer = join([source.layer(part) for part in unit.parts])
        if not layer.scheme.activations:
            continue
        parts = {name: tensors[f"{unit.name}.weight_{name}"].float() for name in _PARTS}
        params = get_layout_class(layout).Params(**parts, orig_dtype=torch.float32, orig_shape=layer.shape)
        read = QuantizedTensor(tensors[f"{unit.name}.weight"], layout, params).dequantize()
        assert relative(read, layer.collapsed()[0]) < 2.0**-8, unit.name


_PARTS = ("scale", "proj_down", "proj_up", "smooth_factor")
