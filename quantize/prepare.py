"""How a QuantLinear's tensors are laid out for one GPU, once, at load, and how its stored form comes back for saving.

    swizzle            block scales in the order that Blackwell's matrix units read; the inverse is a permutation
    add_row_scale      4-bit weights stay, with the 8-bit scale per row that W4A8 decodes them to; dropped for saving
    reencode_layer     the weight becomes int8 or fp8 for good, low-rank branch included; saving reads the files again

Which of them a chip needs is kernels/dispatch.py's choice. The new tensors take the place of the layer's Parameters, so
that offload, moves and copies need to know nothing of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fluxq.quantize import ops
from fluxq.quantize.linear import SCALE_NAMES, Prepared, QuantLinear
from fluxq.quantize.reencode import choose_target, collapsed_weight, reencode, row_scales
from fluxq.quantize.tensor import QuantizedTensor, stored_shapes, swizzle_scales
from fluxq.recipes.formats import FORMATS, Scheme

LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
ROW_SCALE = "weight_row_scale"


@dataclass(frozen=True)
class Origin:
    """Where a layer's stored tensors can be read again. folder: of safetensors files; layer: its name in them."""

    folder: Path
    layer: str

    def read(self, name: str) -> Tensor:
        """The tensor `layer.name`, as filed; ValueError naming what is not there."""
        from safetensors import safe_open  # here: the kernels import this file where only torch and Triton are

        for file in sorted(self.folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stream:
                if f"{self.layer}.{name}" in stream.keys():
                    return stream.get_tensor(f"{self.layer}.{name}")
        raise ValueError(
            f"{self.layer}.{name} is not in the safetensors files of {self.folder}, from where this model was loaded. "
            "It was prepared for one GPU, and to save it its stored form is read from there: put the files back, or "
            "load the checkpoint and save it without fluxq.prepare"
        )


def swizzle(layer: QuantLinear) -> None:
    """Block scales (N, G) into the flat 128x4 layout."""
    stored = _scheme_to_prepare(layer)
    _set(layer, "weight_scale", swizzle_scales(layer.quantized_weight.scale))
    layer.prepared = Prepared(stored, "scales swizzled")


def add_row_scale(layer: QuantLinear, targets: tuple[str, ...]) -> None:
    """Hold the scale per row with which W4A8 decodes the 4-bit weight, to whichever target adds the least error."""
    stored = _scheme_to_prepare(layer)
    w = layer.quantized_weight
    target, errors = choose_target(w, targets)
    layer.scheme = Scheme(stored.weights, FORMATS[target], rank=stored.rank)
    _set(layer, ROW_SCALE, row_scales(w, target))
    layer.scale_names = (*layer.scale_names, ROW_SCALE)
    layer.prepared = Prepared(stored, f"decoded to {target} in the kernel", errors[target])


def reencode_layer(layer: QuantLinear, targets: tuple[str, ...], origin: Origin | None = None) -> None:
    """The weight in whichever of `targets` ("int8", "fp8") adds the least error, the low-rank branch merged into it.

    origin: from where `as_stored` reads the stored tensors again; None where they were never in a file.
    """
    stored = _scheme_to_prepare(layer)
    digest = digest_of(layer.quantized_weight.codes) if origin else ""
    w: QuantizedTensor | Tensor = layer.quantized_weight
    if layer.low_rank is not None:
        w = collapsed_weight(layer.quantized_weight, layer.low_rank)
    target, errors = choose_target(w, targets)
    q = QuantizedTensor.quantize(w, target) if isinstance(w, Tensor) else reencode(w, target)
    for name in (*SCALE_NAMES, *LOW_RANK):
        if getattr(layer, name, None) is not None:
            delattr(layer, name)
    layer.scheme, layer.scale_names = Scheme(FORMATS[target], FORMATS[target]), ("weight_scale",)
    for name, tensor in q.tensors().items():
        _set(layer, name, tensor)
    layer.prepared = Prepared(stored, f"re-encoded to {target}", errors[target], origin, digest)


def targets_on_cpu(scheme: Scheme) -> tuple[str, ...]:
    """What a CPU multiplies faster than 16 bit: int8, where it does so exactly; nothing for what is int8 already."""
    is_slow = scheme.activations is not None and scheme.activations.name != "int8"
    return ("int8",) if is_slow and ops.int_mm_is_exact("cpu") else ()


def as_stored(layer: QuantLinear) -> dict[str, Tensor]:
    """The layer's tensors by name as its checkpoint stores them, whatever was made of them for a GPU.

    Raises ValueError where that needs files that are gone or have changed, or an adapter was fused since.
    """
    held = {name: tensor.data for name, tensor in layer.named_parameters(recurse=False)}
    prepared = layer.prepared
    if prepared is None:
        return held
    if ROW_SCALE in held:
        return {name: tensor for name, tensor in held.items() if name != ROW_SCALE}
    if prepared.scheme.weights == layer.scheme.weights:
        return held | {"weight_scale": layer.quantized_weight.scale}
    if prepared.origin is None:
        raise ValueError(
            f"a layer of this model was {prepared.how} for one GPU, and its {prepared.scheme} codes were never in a "
            "file: save the model before fluxq.prepare"
        )
    if layer.scheme.rank:
        raise ValueError(f"{prepared.origin.layer}: an adapter was fused after fluxq.prepare; unfuse it before saving")
    names = [*stored_shapes(prepared.scheme.weights, layer.out_features, layer.in_features)]
    names += [name for name in ("input_scale",) if prepared.scheme.static_input]
    names += [name for name in LOW_RANK if prepared.scheme.rank]
    found = {name: prepared.origin.read(name) for name in names}
    if digest_of(found["weight"]) != prepared.digest:
        raise ValueError(
            f"{prepared.origin.layer}.weight in {prepared.origin.folder} is not what this model was loaded from: put "
            "the original files back, or load the checkpoint again"
        )
    return found | {name: tensor for name, tensor in held.items() if name == "bias"}


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _scheme_to_prepare(layer: QuantLinear) -> Scheme:
    """The scheme of a layer that was not prepared yet and holds its weight."""
    if layer.prepared is not None:
        raise ValueError(f"this layer is prepared already ({layer.prepared.how}): load the checkpoint again")
    if layer.weight.is_meta:
        raise ValueError("this layer is offloaded: call fluxq.prepare before offloading")
    return layer.scheme


def _set(layer: QuantLinear, name: str, tensor: Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
