"""A recipe that keeps some layers in a better format, where a few more bits bring most.

Layers that share an input change together: what rounds one input in two ways can be neither transformed nor fused. The
groups are chosen that together do most damage and add no more bits than allowed:

    maximize Σ damage of a group, over sets of groups with Σ bits that a group adds <= growth · all that is stored

That is a knapsack, solved exactly, of groups that bring at least half as much for a bit as all do on average: room that
is left is not filled with what does no harm. A single bad layer may be left out, where those that share its input make
it dear, and a harmless one be taken with the others of its group; the findings say so.

    predicted error = floor + (error - floor) · (1 - damage of the chosen / damage of all)
    measured error  = that of a run with the chosen layers rounded to nearest in the better format

Damages of single layers do not add up exactly, so the two differ by some dB. The recipe's checkpoint is calibrated and
fitted anew, and other prompts weigh layers otherwise: what was measured says roughly what to expect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fluxq.calibrate.stand_ins import module_of
from fluxq.eval.debug.damage import Damages, locate
from fluxq.eval.debug.trace import decibels
from fluxq.eval.metrics.schema import Patch
from fluxq.eval.speed.served import stored_bits
from fluxq.kernels.linear import QuantLinear, in_place_of
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.transforms import rotate
from fluxq.quantize.structure import model_family
from fluxq.recipes.budget import best
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.recipe import Operand, Recipe
from fluxq.recipes.writing import override_of, recipe_with

BETTER = FORMATS["fp8"]  # for layers of less than 8 bits; its input scales follow from each token: nothing to calibrate
SIXTEEN_BIT = "16 bit"
_LEAST_WORTH = 0.5  # of the mean damage per added bit


@dataclass(frozen=True)
class Promotion:
    """Group of quantized layers that share an input, and better schemes. schemes: layer -> scheme, None for 16 bit."""

    schemes: Mapping[str, Scheme | None]
    damage: float
    extra_bits: int


def make_patch(
    reference: Any,
    quantized: Any,
    layers: Mapping[str, QuantLinear],
    damages: Damages,
    recipe: tuple[str, Recipe],
    growth: float,
    error: Callable[[Mapping[str, nn.Linear | nn.Conv2d]], float],
) -> Patch:
    """Choose layers, write the recipe, and measure its gain.

    layers: quantized layers of the denoiser and text encoders, "component.path".
    recipe: name and content of the checkpoint's recipe.
    growth: bits that may be added, as a share of all that is stored for Linears.
    error: function from layer -> module in its place to the squared error of the latents.

    ValueError where no group of layers fits, or the recipe cannot hold such layers.
    """
    before, weights = stored_bits(quantized)
    groups = promotions(quantized, layers, damages)
    chosen = choose(groups, growth * before)
    if not chosen:
        raise ValueError(f"no layers that do damage can be kept in a better format for {growth:.1%} more bits")
    schemes = {name: scheme for group in chosen for name, scheme in group.schemes.items()}
    reasons = {name: _reason(name, group, damages) for group in chosen for name in group.schemes}
    about = f"with the layers in a better format that bring most for {growth:.1%} more bits"
    text = patched_recipe(*recipe, quantized, schemes, reasons, about)
    share = math.fsum(group.damage for group in chosen) / damages.sum_of_damages
    improved_layers = {name: improved(module_of(reference, name), scheme) for name, scheme in schemes.items()}
    measured = error(improved_layers)
    return Patch(
        layers=tuple(schemes),
        format=", ".join(sorted({scheme.weights.name if scheme else SIXTEEN_BIT for scheme in schemes.values()})),
        growth=growth,
        damage=math.fsum(group.damage for group in chosen),
        left_out=_left_out(groups, chosen, layers, damages, before),
        bits_before=before / weights,
        bits_after=(before + sum(group.extra_bits for group in chosen)) / weights,
        predicted_sqnr_db=decibels((damages.floor + damages.above_floor * (1 - share)) / damages.signal),
        measured_sqnr_db=decibels(measured / damages.signal),
        before_sqnr_db=decibels(damages.total / damages.signal),
        recipe=text,
    )


def promotions(pipe: Any, layers: Mapping[str, QuantLinear], damages: Damages) -> list[Promotion]:
    """Return the groups of transformers whose layers were all measured and do damage."""
    groups: dict[str, list[str]] = {}
    for name in layers:
        if model_family(getattr(pipe, name.partition(".")[0])).kind == "transformer":
            groups.setdefault(locate(pipe, name)[2], []).append(name)
    promotable = []
    for names in groups.values():
        shares = [damages.damage((name,)) for name in names]
        measured = [share for share in shares if share is not None]
        if len(measured) < len(names) or not math.fsum(measured) > 0:
            continue
        schemes = {name: better_scheme(layers[name]) for name in names}
        extra = (_bits(layers[name], schemes[name]) - _bits(layers[name], layers[name].stored_scheme) for name in names)
        promotable.append(Promotion(schemes, math.fsum(measured), sum(extra)))
    return promotable


def better_scheme(layer: QuantLinear) -> Scheme | None:
    """Return an 8-bit scheme for a layer of fewer bits; None (16 bit) for one of 8."""
    if layer.stored_scheme.weights.element.bits >= BETTER.element.bits:
        return None
    return Scheme(BETTER, BETTER if layer.stored_scheme.activations else None)


def choose(groups: Sequence[Promotion], bits: float) -> list[Promotion]:
    """Choose the groups that together do most damage and add at most `bits`; the most damage per bit comes first."""
    groups = _worthwhile(groups)
    damages = {str(index): {"kept": group.damage, "better": 0.0} for index, group in enumerate(groups)}
    added = {str(index): {"kept": 0, "better": group.extra_bits} for index, group in enumerate(groups)}
    choice = best(damages, added, bits) or {}
    return sorted((groups[int(index)] for index, is_ in choice.items() if is_ == "better"), key=_worth, reverse=True)


def _worthwhile(groups: Sequence[Promotion]) -> list[Promotion]:
    average = math.fsum(group.damage for group in groups) / max(sum(group.extra_bits for group in groups), 1)
    return [group for group in groups if _worth(group) >= _LEAST_WORTH * average]


def _worth(group: Promotion) -> float:
    return group.damage / max(group.extra_bits, 1)


def _left_out(
    groups: Sequence[Promotion],
    chosen: Sequence[Promotion],
    layers: Mapping[str, QuantLinear],
    damages: Damages,
    stored: float,
) -> str:
    """Return the reason why the layer that does most damage is not among the chosen; "" if it is."""
    shares = {name: share for name in layers if (share := damages.damage((name,))) is not None}
    worst = max(shares, key=shares.__getitem__)
    if any(worst in group.schemes for group in chosen):
        return ""
    opening = f"{worst}, the worst single layer ({shares[worst]:.1%} of the error), is not among them: "
    group = next((group for group in groups if worst in group.schemes), None)
    if group is None:
        return f"{opening}not all layers that share its input were measured"
    added = sum(each.extra_bits for each in chosen)
    total = math.fsum(each.damage for each in chosen)
    cost = f"{_with_others(group, 'makes')} and would add {group.extra_bits / stored:.1%} more bits"
    if group not in _worthwhile(groups):
        return f"{opening}{cost}, for each of which it brings less than half as much as layers do on average"
    enough = math.ceil(1000 * (added + group.extra_bits) / stored) / 1000
    return (
        f"{opening}{cost}, those taken make {total:.1%} and add {added / stored:.1%}; --growth {enough:g} has room for "
        "both"
    )


def _with_others(group: Promotion, makes: str) -> str:
    others = len(group.schemes) - 1
    company = "" if not others else f"with the {others} that share{'s' * (others == 1)} its input "
    return f"{company}it {makes} {group.damage:.1%}"


def _reason(name: str, group: Promotion, damages: Damages) -> str:
    alone = f"quantized alone it made {damages.damage((name,)) or 0.0:.1%} of the error"
    return f"{alone}; {_with_others(group, 'made')}" if len(group.schemes) > 1 else alone


def improved(linear: nn.Linear | nn.Conv2d, scheme: Scheme | None) -> nn.Linear | nn.Conv2d:
    """Return a 16-bit layer rounded to nearest under a scheme; itself under None."""
    if scheme is None:
        return linear
    w = rotate(linear.weight.detach().flatten(1), scheme.hadamard, scheme.regular)
    weight = QuantizedTensor.quantize(w, scheme.weights)
    bias = None if linear.bias is None else linear.bias.detach()
    return in_place_of(linear, QuantLinear.from_quantized(weight, bias, scheme))


def patched_recipe(
    recipe_name: str,
    recipe: Recipe,
    pipe: Any,
    schemes: Mapping[str, Scheme | None],
    reasons: Mapping[str, str],
    about: str,
) -> str:
    """Return the recipe in YAML, with an override and its reason for each layer ("component.path").

    about: as `recipe_with` has it, and ValueError too.
    """
    overrides: dict[str, list[dict[str, Any]]] = {}
    for layer, scheme in schemes.items():
        component, _, path = layer.partition(".")
        formats = (scheme.weights, scheme.activations) if scheme else (None, None)
        operands = [each and Operand(format=each.name) for each in formats]
        overrides.setdefault(component, []).append(override_of({"match": path}, operands, reasons[layer]))
    families = {component: model_family(getattr(pipe, component)) for component in overrides}
    changes = {component: {"overrides": added} for component, added in overrides.items()}
    return recipe_with(recipe_name, recipe, changes, families, about)


def _bits(layer: nn.Linear, scheme: Scheme | None) -> int:
    shape = layer.out_features, layer.in_features
    return 16 * math.prod(shape) if scheme is None else scheme.stored_bits(*shape)
