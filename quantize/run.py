"""Weights + plan + statistics -> quantized tensors, one input group at a time.

This version rounds to nearest: a layer needs its own weight only, and its group's amax where `input_scale` or a
shared global scale asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fluxq.calibrate.statistics import Statistics
from fluxq.quantize import encode
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.linear import QuantLinear
from fluxq.quantize.tensor import QuantizedTensor
from fluxq.recipes.formats import Format, Scheme
from fluxq.recipes.plan import LayerPlan, Plan
from fluxq.recipes.recipe import Component


def quantize_component(
    plan: Plan,
    source: SourceWeights,
    statistics: Statistics | None,
    dtype: torch.dtype,
    weight_sqnr: dict[str, float],
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the quantized component: codes and scales of planned layers, the rest cast to `dtype`.

    What the model's class keeps in fp32 stays as it is in the source.
    weight_sqnr is filled as layers are done: name -> dB.
    Raises ValueError naming the layer for NaN or infinity in a weight and for statistics that do not cover it.
    """
    taken = {f"{layer.name}.weight" for layer in plan.quantized}
    global_scales = _joined_global_scales(plan, source)
    input_scales = _input_scales(plan, statistics)
    for layer in plan.quantized:
        w = source[f"{layer.name}.weight"]
        q = quantize_weight(w, layer, global_scales.get(layer.name))
        weight_sqnr[layer.name] = sqnr(w.float(), q.dequantize())
        for name, tensor in q.tensors().items():
            yield f"{layer.name}.{name}", tensor
        if layer.scheme is not None and layer.scheme.static_input:
            yield f"{layer.name}.input_scale", input_scales[layer.name]
    for name in source.names:
        if name not in taken:
            tensor = source[name]
            _require_finite(name, tensor)
            cast = tensor.is_floating_point() and not source.stays_fp32(name)
            yield name, tensor.to(dtype) if cast else tensor


def joined_global_scale(weights: Sequence[Tensor], format: Format) -> Tensor:
    """The one global scale (fp32, ()) of weights that a fused layout concatenates along N."""
    return encode.global_scale_for(torch.stack([w.abs().amax().float() for w in weights]).amax(), format)


def require_finite_weights(source: SourceWeights) -> None:
    """ValueError naming the first tensor that holds NaN or infinity."""
    for name in source.names:
        _require_finite(name, source[name])


def quantize_weight(w: Tensor, layer: LayerPlan, global_scale: Tensor | None = None) -> QuantizedTensor:
    """Round one weight (N, K) as its plan says."""
    if layer.scheme is None:
        raise ValueError(f"{layer.name}: the plan keeps it in 16 bit")
    if tuple(w.shape) != (layer.n, layer.k):
        raise ValueError(f"{layer.name}: weight has shape {tuple(w.shape)}, config.json implies {(layer.n, layer.k)}")
    return QuantizedTensor.quantize(w, layer.scheme.weights, global_scale=global_scale, name=layer.name)


def quantize_linear(linear: nn.Linear, x: Tensor, recipe: Component | str) -> QuantLinear:
    """Try a recipe on one layer: `linear` (N, K) quantized as a recipe's main format, calibrated on x (…, K).

    recipe: a `Component`, or the name or path of a recipe, whose transformer component is taken. x decides nvfp4's
    `input_scale`. Returns a QuantLinear on the same device; compare its output with `linear(x)`.
    """
    if isinstance(recipe, str):
        from fluxq.recipes.recipe import load_recipe

        components = load_recipe(recipe)[1].components
        recipe = components.get("transformer") or next(iter(components.values()))
    activations = recipe.activations.row if recipe.activations else None
    scheme = Scheme(recipe.weights.row, activations, static_input=bool(activations and activations.two_level))
    n, k = linear.weight.shape
    layer = LayerPlan("linear", n, k, "", "linear", False, scheme, "tried on one layer")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} channels, the layer takes {k}")
    scale = None
    if activations is not None:
        activations.check_shape(1, k, "x")
        if scheme.static_input:
            scale = encode.global_scale_for(x.detach().float().abs().amax(), activations)
    q = quantize_weight(linear.weight.detach(), layer)
    bias = None if linear.bias is None else linear.bias.detach()
    return QuantLinear.from_quantized(q, bias, scheme, scale)


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise, 10·log10(Σ r² / Σ (a − r)²) in dB; infinite when nothing was lost."""
    noise = (approximation - reference).double().square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


def _require_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
        raise ValueError(f"{name}: holds NaN or infinity; get the source again")


def _joined_global_scales(plan: Plan, source: SourceWeights) -> dict[str, Tensor]:
    """Layer -> the global scale it shares: a fused layout concatenates these layers and has room for one."""
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.quantized:
        if layer.shares_global_scale:
            groups.setdefault(layer.group, []).append(layer)
    scales: dict[str, Tensor] = {}
    for members in groups.values():
        weights = [(f"{layer.name}.weight", source[f"{layer.name}.weight"]) for layer in members]
        for name, weight in weights:
            _require_finite(name, weight)
        first = members[0].scheme
        if first is not None:
            scales.update(_copies(members, joined_global_scale([weight for _, weight in weights], first.weights)))
    return scales


def _input_scales(plan: Plan, statistics: Statistics | None) -> dict[str, Tensor]:
    """Layer -> its calibrated `input_scale`, the same for all that read one input."""
    scales: dict[str, Tensor] = {}
    for group, members in plan.static_groups().items():
        if statistics is None:
            raise ValueError(
                f"{group}: its scheme has a static input scale, and there are no statistics to take it from"
            )
        scheme = members[0].scheme
        if scheme is not None and scheme.activations is not None:
            scale = encode.global_scale_for(statistics.amax(group), scheme.activations)
            scales.update(_copies(members, scale))
    return scales


def _copies(layers: Sequence[LayerPlan], scale: Tensor) -> dict[str, Tensor]:
    """One tensor each: safetensors refuses to store two names of the same memory."""
    return {layer.name: scale.clone() for layer in layers}
