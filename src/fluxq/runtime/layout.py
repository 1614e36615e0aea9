"""Layout of a QuantLinear's tensors for one GPU, made once, at load, and the way back to its stored form for saving.

    swizzle            block scales in the order that Blackwell's matrix units read; the inverse is a permutation
    add_row_scale      4-bit weights stay, with the 8-bit scale per row that W4A8 decodes them to; dropped for saving
    add_decoded        the codes stay, with their decoded fp32 matrix beside them; dropped for saving
    reencode_layer     the weight becomes int8 or fp8 for good; rotation, deflated directions and low-rank branch go
                       into it, centering and smoothing stay; saving reads the files again

`lay_out` chooses by the layer and the chip. The new tensors take the place of the layer's Parameters, so that offload,
moves and copies need to know nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fluxq.base.tensors import fingerprint_of
from fluxq.kernels import ops
from fluxq.kernels.all_ops import BLOCK_SCALED_MATMUL, SCALED_MATMUL, W4A8_MATMUL, product_of
from fluxq.kernels.linear import BRANCHES, SCALE_NAMES, Layout, QuantLinear, StoredLayer, branch_shapes
from fluxq.kernels.reencode import choose_target, reencode, row_scales
from fluxq.kernels.tensor import QuantizedTensor, stored_shapes, swizzle_scales
from fluxq.recipes.formats import FORMATS, Scheme

ROW_SCALE, DECODED = "weight_row_scale", "weight_decoded"
KEPT = ("pre_quant_mean", "pre_quant_scale")  # what a re-encoded layer still has of its transforms


def lay_out(layer: QuantLinear, chip: str, prefer: str, origin: StoredLayer | None) -> bool:
    """Lay a layer's tensors out for a chip, once; return whether anything was to be done.

    prefer: "speed" encodes formats that the chip's matrix units do not know anew, as int8 or fp8, with the least added
    error; "memory" keeps 4-bit weights in 4 bits. origin: where the stored tensors can be read again, for saving.
    """
    from fluxq.kernels.dispatch import SWIZZLED, refusal  # only here: it needs Triton

    scheme = layer.scheme
    if scheme.activations is None:
        return False  # the recipe asked for 16-bit activations
    weights = scheme.weights.name
    op, formats = product_of(weights, scheme.activations.name, row_scale=False) or (None, "")
    if op and not refusal(op.name, formats, chip):
        swizzled = op is BLOCK_SCALED_MATMUL and chip in SWIZZLED
        if swizzled:
            swizzle(layer)
        return swizzled
    targets = tuple(name for name in ("int8", "fp8") if not refusal(SCALED_MATMUL.name, name, chip))
    decodable = tuple(name for name in targets if not refusal(W4A8_MATMUL.name, f"{weights}-{name}", chip))
    if prefer == "memory" and decodable:
        add_row_scale(layer, decodable)
    elif targets:
        reencode_layer(layer, targets, origin)
    return bool(targets)


def swizzle(layer: QuantLinear) -> None:
    """Swizzle block scales (N, G) into the flat 128x4 layout."""
    stored = _scheme_to_prepare(layer)
    _set(layer, "weight_scale", swizzle_scales(layer.quantized_weight.scale))
    layer.prepared = Layout(stored, "swizzled", "scales swizzled")


def add_row_scale(layer: QuantLinear, targets: tuple[str, ...]) -> None:
    """Add the scale per row with which W4A8 decodes the 4-bit weight, to whichever target adds the least error."""
    stored = _scheme_to_prepare(layer)
    w = layer.quantized_weight
    target, errors = choose_target(w, targets)
    layer.scheme = replace(stored, activations=FORMATS[target], static_input=False, four_over_six=False)
    _set(layer, ROW_SCALE, row_scales(w, target))
    layer.scale_names = (*layer.scale_names, ROW_SCALE)
    layer.prepared = Layout(stored, "row scale", f"decoded to {target} in the kernel", errors[target])


def add_decoded(layer: QuantLinear) -> None:
    """Add the weight in fp32 beside its codes, 32 bits more for each: a product need not decode them, bit for bit.

    The codes remain for saving, moving, fusing and dequantizing.
    """
    stored = _scheme_to_prepare(layer)
    if ops.multiplies_codes(stored.weights, stored.activations):
        raise ValueError(f"{stored} multiplies its codes as they are: there is nothing to decode ahead")
    _set(layer, DECODED, layer.quantized_weight.dequantize())
    layer.scale_names = (*layer.scale_names, DECODED)
    layer.prepared = Layout(stored, "decoded", "decoded to fp32 beside its codes")


def reencode_layer(layer: QuantLinear, targets: tuple[str, ...], origin: StoredLayer | None = None) -> None:
    """Encode the weight, merged with its transforms, in whichever of `targets` ("int8", "fp8") adds the least error.

    Centering and smoothing stay steps of the layer: 8-bit activations need them, and the quantizer does them on its
    way. origin: from where `as_stored` reads the stored tensors again; without one the layer cannot be saved any more.
    """
    stored = _scheme_to_prepare(layer)
    digest = fingerprint_of(layer.quantized_weight.codes) if origin else ""
    w: QuantizedTensor | Tensor = layer.quantized_weight
    if stored.deflate or stored.hadamard or stored.rank:
        w, bias = layer.merged()
        if bias is not None and _changes_bias(stored):
            _set(layer, "bias", bias.to(layer.bias.dtype))
    target, errors = choose_target(w, targets)
    q = QuantizedTensor.quantize(w, target) if isinstance(w, Tensor) else reencode(w, target)
    for name in {*SCALE_NAMES, *BRANCHES} - {*KEPT}:
        if getattr(layer, name, None) is not None:
            delattr(layer, name)
    layer.scheme = Scheme(FORMATS[target], FORMATS[target], center=stored.center, smooth=stored.smooth)
    layer.scale_names = ("weight_scale",)
    for name, tensor in q.tensors().items():
        _set(layer, name, tensor)
    layer.prepared = Layout(stored, "re-encoded", f"re-encoded to {target}", errors[target], origin, digest)


def targets_on_cpu(scheme: Scheme) -> tuple[str, ...]:
    """Return the formats that a CPU multiplies without decoding: int8, where its product is exact.

    Empty for what is int8 already, or weight-only.
    """
    is_slow = scheme.activations is not None and scheme.activations.name != "int8"
    return ("int8",) if is_slow and ops.int_mm_is_exact("cpu") else ()


def as_stored(layer: QuantLinear) -> dict[str, Tensor]:
    """Return the layer's tensors by name as its checkpoint stores them, however they were prepared for a GPU.

    Raises ValueError where that needs files that are gone or have changed, or an adapter was fused since.
    """
    tensors = {name: value.data for name, value in layer.named_parameters(recurse=False)}
    prepared = layer.prepared
    if prepared is None:
        return tensors
    if prepared.kind in ("row scale", "decoded"):
        return {name: value for name, value in tensors.items() if name not in (ROW_SCALE, DECODED)}
    if prepared.kind == "swizzled":
        return tensors | {"weight_scale": layer.quantized_weight.scale}
    if prepared.origin is None:
        raise ValueError(
            f"a layer of this model was {prepared.how} for one GPU, and it is unknown where its {prepared.scheme} "
            "codes can be read again. Load the model once more and name its folder, fluxq.prepare(..., source=FOLDER); "
            "one that was quantized while loading must be saved before fluxq.prepare"
        )
    if layer.scheme.rank:
        raise ValueError(f"{prepared.origin.layer}: an adapter was fused after fluxq.prepare; unfuse it before saving")
    names = [*stored_shapes(prepared.scheme.weights, layer.out_features, layer.in_features)]
    names += [name for name in ("input_scale",) if prepared.scheme.static_input]
    names += branch_shapes(prepared.scheme, layer.out_features, layer.in_features)
    if _changes_bias(prepared.scheme):
        names.append("bias")
    stored = {"weight": prepared.origin.read("weight")}
    if fingerprint_of(stored["weight"]) != prepared.digest:
        raise ValueError(
            f"{prepared.origin.layer}.weight in {prepared.origin.folder} is not what this model was loaded from: put "
            "the original files back, or load the model again and name its folder, fluxq.prepare(..., source=FOLDER)"
        )
    if (rank := prepared.scheme.rank) and rank > prepared.origin.rank:
        raise ValueError(
            f"{prepared.origin.layer}: an adapter was fused before fluxq.prepare, and only the codes for this GPU hold "
            "it: save before fluxq.prepare, or load the checkpoint again"
        )
    stored |= {name: prepared.origin.read(name) for name in names if name != "weight"}
    return {name: value for name, value in tensors.items() if name == "bias"} | stored


def _changes_bias(stored: Scheme) -> bool:
    """Tell whether re-encoding gives a layer another bias: the low-rank branch's product with the mean goes into it."""
    return bool(stored.center and stored.rank)


def _scheme_to_prepare(layer: QuantLinear) -> Scheme:
    """Return the scheme of a layer that is not offloaded; ValueError for one that is prepared already or offloaded."""
    if layer.prepared is not None:
        raise ValueError(f"this layer is prepared already ({layer.prepared.how}): load the checkpoint again")
    if layer.weight.is_meta:
        raise ValueError("this layer is offloaded: call fluxq.prepare first, then offload")
    return layer.scheme


def _set(layer: QuantLinear, name: str, tensor: Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
