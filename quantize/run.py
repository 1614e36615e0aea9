"""Weights + plan + what calibration saw -> quantized tensors.

    fitted     block by block: what flows into the block's Linears is gathered, each input group is quantized as well
               as its plan allows (group.py), and what the quantized block returns is what the next one is fitted to
    rounded    layers that no data is needed for: to nearest, with their group's amax where `input_scale` or a shared
               global scale asks for it

Finished blocks are kept on disk until the checkpoint stands, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.base.files import atomic_path
from fluxq.base.model import open_weights, save_weights
from fluxq.calibrate.blocks import LiveBlock, Replay
from fluxq.calibrate.inputs import GroupInputs, InputsBuilder
from fluxq.calibrate.statistics import Statistics
from fluxq.quantize import encode
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.group import FittedGroup, GroupLayer, Stage, fit_group, price_on
from fluxq.quantize.linear import QuantLinear
from fluxq.quantize.tensor import QuantizedTensor
from fluxq.recipes.devices import find_device
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan, Plan, with_method
from fluxq.recipes.recipe import Component, Gate, load_recipe

_HEADER = "fluxq_block"
_SQNR_ROWS = 1024


@dataclass
class Outcome:
    """What became of a component, filled as layers are done.

    schemes: final ones, by layer. weight_sqnr: dB, by layer. groups: of those that were fitted, by name.
    """

    schemes: dict[str, Scheme] = field(default_factory=dict)
    weight_sqnr: dict[str, float] = field(default_factory=dict)
    groups: dict[str, FittedGroup] = field(default_factory=dict)

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with final schemes, and what was decided among the reasons."""
        groups = {name: group for group in self.groups.values() for name in group.layers}
        layers = []
        for layer in plan.layers:
            kept = [stage.name for stage in groups[layer.name].stages if stage.kept] if layer.name in groups else []
            reason = f"{layer.reason}; kept: {', '.join(kept)}" if kept else layer.reason
            layers.append(replace(layer, scheme=self.schemes.get(layer.name, layer.scheme), reason=reason))
        return replace(plan, layers=tuple(layers))


@dataclass(frozen=True)
class Fitting:
    """What fitting needs beside plan and weights.

    replay: the component's 16-bit model and its calls. gate: of the recipe. folder: for finished blocks. parallel:
    later blocks are fitted to what 16-bit blocks return. statistics: their amax counts for input scales too.
    """

    replay: Replay
    gate: Gate
    folder: Path
    parallel: bool = False
    statistics: Statistics | None = None


def quantize_component(
    plan: Plan,
    source: SourceWeights,
    statistics: Statistics | None,
    dtype: torch.dtype,
    outcome: Outcome,
    fitting: Fitting | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the quantized component: those of its quantized layers, the rest cast to `dtype`.

    What the model's class keeps in fp32 stays as it is in the source. fitting: needed where the plan has layers to be
    fitted. Raises ValueError naming the layer for NaN or infinity in a weight and for statistics that do not cover it.
    """
    taken = set()
    if fitting is not None:
        for fitted in _fitted_groups(plan, source, dtype, fitting):
            outcome.groups.update(fitted)
            for name, layer in (item for group in fitted.values() for item in group.layers.items()):
                outcome.schemes[name] = layer.scheme
                outcome.weight_sqnr[name] = sqnr(source[f"{name}.weight"], layer.collapsed()[0])
                for part, tensor in layer.named_parameters():
                    taken.add(f"{name}.{part}")
                    yield f"{name}.{part}", tensor.data.cpu()
    rest = replace(plan, layers=tuple(la for la in plan.layers if la.name not in outcome.schemes))
    taken |= {f"{layer.name}.weight" for layer in rest.quantized}
    yield from _rounded_layers(rest, source, statistics, outcome)
    for name in source.names:
        if name not in taken:
            tensor = source[name]
            _require_finite(name, tensor)
            if tensor.is_floating_point() and not source.stays_fp32(name):
                tensor = tensor.to(dtype)
                if dtype == torch.float16 and not torch.isfinite(tensor).all():
                    raise ValueError(f"{name}: holds numbers beyond {dtype}; choose another --dtype")
            yield name, tensor


def _fitted_groups(
    plan: Plan, source: SourceWeights, dtype: torch.dtype, fitting: Fitting
) -> Iterator[dict[str, FittedGroup]]:
    """The fitted groups of each block; finished ones are read from disk."""
    replay, groups = fitting.replay, plan.statistics_groups()
    own = {
        block: {name: members for name, members in groups.items() if name.startswith(f"{block}.")}
        for block in replay.blocks
    }
    done = _finished_blocks(fitting)
    for index in range(done):
        fitted = _load_block(_block_file(fitting.folder, index), own[replay.blocks[index]])
        _put_into(replay, fitted)
        yield fitted
    if done == len(replay.blocks):
        return
    replay.skip_to(done)
    for block in replay:
        fitted = _fit_block(block, own[block.name], source, dtype, fitting)
        _put_into(replay, fitted)
        _save_block(_block_file(fitting.folder, block.index), fitted)
        if not block.advanced:
            block.advance()
        yield fitted


def _fit_block(
    block: LiveBlock,
    groups: Mapping[str, tuple[LayerPlan, ...]],
    source: SourceWeights,
    dtype: torch.dtype,
    fitting: Fitting,
) -> dict[str, FittedGroup]:
    inputs = block.observe(
        {name: members[0].name for name, members in groups.items()},
        segments={name: members[0].segments for name, members in groups.items()},
        without_gram=[name for name, members in groups.items() if all(layer.method.is_plain for layer in members)],
        advance=fitting.parallel,
    )
    return {name: _fit(members, inputs.pop(name), source, dtype, fitting, name) for name, members in groups.items()}


def _fit(
    members: Sequence[LayerPlan],
    inputs: GroupInputs,
    source: SourceWeights,
    dtype: torch.dtype,
    fitting: Fitting,
    name: str,
) -> FittedGroup:
    device, first = inputs.mean.device, members[0]
    if fitting.statistics is not None:
        seen = fitting.statistics.channel_amax(name).to(device)
        inputs = replace(inputs, amax=torch.maximum(inputs.amax, seen))
    layers = [
        GroupLayer(
            layer.name,
            _weight(source, layer).to(device),
            source[f"{layer.name}.bias"].to(device) if f"{layer.name}.bias" in source else None,
            layer.scheme,
            layer.shares_global_scale,
        )
        for layer in members
        if layer.scheme is not None
    ]
    shapes = [(layer.n, layer.k) for layer in members]
    price = price_on(find_device(fitting.gate.gpu), shapes, fitting.gate.tokens, first.made_by)
    fitted = fit_group(layers, inputs, first.method, price=price, rate=fitting.gate.db_per_percent, dtype=dtype)
    for stage in fitted.stages:
        logger.info("%s: %s %s: %s", name, stage.name, "kept" if stage.kept else "left out", stage.reason)
    return fitted


def _put_into(replay: Replay, fitted: Mapping[str, FittedGroup]) -> None:
    for group in fitted.values():
        for name, layer in group.layers.items():
            replay.model.set_submodule(name, layer.to(replay.device))


def _finished_blocks(fitting: Fitting) -> int:
    """How many blocks, from the first on, need not be fitted again: all, or those whose outputs are still there."""
    there = [_block_file(fitting.folder, index).is_file() for index in range(len(fitting.replay.blocks))]
    return len(there) if all(there) else min(there.index(False), fitting.replay.resumable)


def _block_file(folder: Path, index: int) -> Path:
    return folder / f"fitted-{index:03}.safetensors"


def _save_block(path: Path, fitted: Mapping[str, FittedGroup]) -> None:
    tensors, groups = {}, {}
    for name, group in fitted.items():
        layers = group.layers.items()
        tensors.update({f"{la}/{part}": t.data.cpu() for la, layer in layers for part, t in layer.named_parameters()})
        groups[name] = {
            "schemes": {la: str(layer.scheme) for la, layer in layers},
            "stages": [asdict(stage) for stage in group.stages],
            "plain_db": group.plain_db,
            "db": group.db,
        }
    with atomic_path(path) as part:
        save_weights(tensors, part, {_HEADER: json.dumps(groups)})


def _load_block(path: Path, planned: Mapping[str, tuple[LayerPlan, ...]]) -> dict[str, FittedGroup]:
    with open_weights(path) as stream:
        groups: dict[str, Any] = json.loads((stream.metadata() or {})[_HEADER])
        tensors = {key: stream.get_tensor(key) for key in stream.keys()}
    fitted = {}
    for name, members in planned.items():
        recorded, layers = groups[name], {}
        for layer in members:
            scheme = Scheme.parse(recorded["schemes"][layer.name])
            held = {key.rpartition("/")[2]: t for key, t in tensors.items() if key.rpartition("/")[0] == layer.name}
            layers[layer.name] = QuantLinear.from_tensors(held, (layer.n, layer.k), scheme)
        stages = tuple(Stage(**stage) for stage in recorded["stages"])
        fitted[name] = FittedGroup(layers, stages, recorded["plain_db"], recorded["db"])
    return fitted


def _rounded_layers(
    plan: Plan, source: SourceWeights, statistics: Statistics | None, outcome: Outcome
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of layers that are rounded to nearest."""
    global_scales = _joined_global_scales(plan, source)
    input_scales = _input_scales(plan, statistics)
    for layer in plan.quantized:
        w = source[f"{layer.name}.weight"]
        q = quantize_weight(w, layer, global_scales.get(layer.name))
        outcome.weight_sqnr[layer.name] = sqnr(w, q.dequantize())
        for name, tensor in q.tensors().items():
            yield f"{layer.name}.{name}", tensor
        if layer.scheme is not None and layer.scheme.static_input:
            yield f"{layer.name}.input_scale", input_scales[layer.name]


def joined_global_scale(weights: Sequence[Tensor], layers: Sequence[LayerPlan]) -> Tensor:
    """The one global scale (fp32, ()) of weights that a fused layout concatenates along N."""
    amax = torch.stack([w.abs().amax().float() for w in weights]).amax()
    row = next(layer.scheme.weights for layer in layers if layer.scheme is not None)
    return encode.global_scale_for(amax, row, any(layer.method.weights_46 for layer in layers))


def require_finite_weights(source: SourceWeights) -> None:
    """ValueError naming the first tensor that holds NaN or infinity."""
    for name in source.names:
        _require_finite(name, source[name])


def quantize_weight(w: Tensor, layer: LayerPlan, global_scale: Tensor | None = None) -> QuantizedTensor:
    """Round one weight (N, K) as its plan says."""
    if layer.scheme is None:
        raise ValueError(f"{layer.name}: the plan keeps it in 16 bit")
    _require_shape(w, layer)
    return QuantizedTensor.quantize(
        w,
        layer.scheme.weights,
        global_scale=global_scale,
        four_over_six=layer.method.weights_46,
        name=layer.name,
    )


def quantize_linear(linear: nn.Linear, x: Tensor, recipe: Component | str) -> QuantLinear:
    """Try a recipe on one layer: `linear` (N, K) quantized as a recipe's main format, fitted to x (…, K).

    recipe: a `Component`, or the name or path of a recipe, whose transformer component is taken. The last eighth of x's
    tokens decides what is kept. Returns a QuantLinear on the same device; compare its output with `linear(x)`.
    """
    profile, gate = "balanced", Gate()
    if isinstance(recipe, str):
        whole = load_recipe(recipe)[1]
        profile, gate = whole.profile, whole.gate
        recipe = whole.components.get("transformer") or next(iter(whole.components.values()))
    activations = recipe.activations.row if recipe.activations else None
    scheme = Scheme(recipe.weights.row, activations, static_input=bool(activations and activations.two_level))
    n, k = linear.weight.shape
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} channels, the layer takes {k}")
    if activations is not None:
        activations.check_shape(1, k, "x")
    planned = LayerPlan("linear", n, k, "", "linear", False, scheme, "tried on one layer", made_by="norm")
    method = with_method(planned, recipe, profile, None).method
    tokens = x.detach().reshape(-1, k)
    held = len(tokens) // 8
    builder = InputsBuilder("x", k, device=x.device, calls=(1, 1))
    builder.add(tokens[: len(tokens) - held])
    builder.add(tokens[len(tokens) - held :], held=True)
    bias = None if linear.bias is None else linear.bias.detach()
    group = fit_group(
        [GroupLayer("linear", linear.weight.detach(), bias, scheme)],
        builder.finish(),
        method,
        price=price_on(find_device(gate.gpu), [(n, k)], gate.tokens, "norm"),
        rate=gate.db_per_percent,
        dtype=linear.weight.dtype,
    )
    return group.layers["linear"]


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise, 10·log10(Σ r² / Σ (a − r)²) in dB; infinite when nothing was lost.

    A few rows at a time, in double where the approximation lies.
    """
    signal, noise = torch.zeros(2, dtype=torch.float64, device=approximation.device)
    for r, a in zip(reference.split(_SQNR_ROWS), approximation.split(_SQNR_ROWS), strict=True):
        r = r.to(a)
        signal += r.double().square().sum()
        noise += (a - r).double().square().sum()
    return float(10 * torch.log10(signal / noise))


def _weight(source: SourceWeights, layer: LayerPlan) -> Tensor:
    w = source[f"{layer.name}.weight"]
    _require_shape(w, layer)
    return w


def _require_shape(w: Tensor, layer: LayerPlan) -> None:
    if tuple(w.shape) != (layer.n, layer.k):
        raise ValueError(f"{layer.name}: weight has shape {tuple(w.shape)}, config.json implies {(layer.n, layer.k)}")


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
        scales.update(_copies(members, joined_global_scale([weight for _, weight in weights], members)))
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
