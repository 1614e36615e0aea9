"""Findings of `debug` in sentences, the most severe first: faults, layers that make the error, its start, and cures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fluxq.eval.debug.damage import Damages
from fluxq.eval.metrics.schema import LayerDamage, Patch

ADDITIVE = 0.5, 2.0  # bounds of the sum of damages within which single damages can be added
_UNDERFLOW = 0.75  # share of a layer's input that is worth a finding; half is usual behind a GELU
_NAMED = 5  # layers in one finding


def findings(
    rows: Sequence[LayerDamage],
    faults: Mapping[str, str],
    damages: Damages,
    steps: Sequence[int],
    first_divergence: str | None,
    patch: Patch | None,
) -> list[str]:
    """Return the findings. rows: layers, the worst first. faults: layer -> what is wrong with it beyond rounding."""
    sentences = [f"{name}: {fault}" for name, fault in faults.items()]
    sentences += _who_makes_it(rows, damages)
    sentences += _lost(rows, steps)
    if first_divergence:
        sentences.append(f"the noise floor is left first at {first_divergence}")
    sentences += _additivity(damages)
    if patch:
        sentences += about_patch(patch)
    return sentences


def about_patch(patch: Patch) -> list[str]:
    """Return sentences about a patch: what it changes, how its layers were chosen, its predicted and measured gain."""
    several = len(patch.layers) > 1
    sentences = [
        f"{len(patch.layers)} layer{'s' * several} in {patch.format}, {patch.bits_before:.2f} -> "
        f"{patch.bits_after:.2f} bits per weight: of what fits into {patch.growth:.1%} more bits, "
        f"{'these together do' if several else 'this one does'} most damage ({patch.damage:.1%} of the error); layers "
        "that share an input change together",
        f"tried on these prompts, with {'them' if several else 'it'} rounded to nearest, the final latents go from "
        f"{_decibels(patch.before_sqnr_db)} to {_decibels(patch.measured_sqnr_db)}; "
        f"{_decibels(patch.predicted_sqnr_db)} was predicted, by adding up damages of single layers as if they did not "
        "interact; the recipe's own checkpoint is fitted anew",
    ]
    return sentences + [patch.left_out] * bool(patch.left_out)


def about_shares(rows: Sequence[LayerDamage]) -> str:
    """Return the meaning of the columns of a table of layers, and of a gain below 0 where there is one."""
    meaning = (
        "damage alone: share of the final latents' error that the layer makes when only it is quantized; gone if kept: "
        "share that goes when only it stays in 16 bit"
    )
    if all(row.gain is None or row.gain >= 0 for row in rows):
        return meaning
    return (
        f"{meaning}. Below 0 the error grows instead: on these prompts the layer's error happens to cancel part of "
        "others', which says that they interact and not that it is better off in fewer bits"
    )


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _who_makes_it(rows: Sequence[LayerDamage], damages: Damages) -> list[str]:
    if not damages.total:
        return ["the final latents are those of the 16-bit model, bit for bit"]
    if math.isinf(damages.total):
        cures = [row.name for row in rows if row.gain]
        which = f"{listed(cures)}: kept in 16 bit, this layer alone" if cures else "no single layer, kept in 16 bit,"
        return [f"the final latents are not finite; {which} makes them so"]
    if not damages.above_floor:
        return ["the error of the final latents is no larger than between two 16-bit runs"]
    measured = sorted(rows, key=lambda row: row.damage or 0.0, reverse=True)
    half, total, most = damages.sum_of_damages / 2, 0.0, []
    for row in measured:
        if total < half:
            most.append(row)
            total += row.damage or 0.0
    if not most or total < half:
        return []
    if len(most) == 1:
        row = most[0]
        gain = "" if row.gain is None else f"; kept in 16 bit, {row.gain:.1%} of it goes"
        return [f"{row.name}: quantized alone it makes {row.damage:.1%} of the whole error{gain}"]
    weights = sum(row.weights for row in most) / sum(row.weights for row in rows)
    names = listed([row.name for row in most])
    return [f"{len(most)} of {len(rows)} layers, {weights:.1%} of the weights, make half of the error: {names}"]


def _lost(rows: Sequence[LayerDamage], steps: Sequence[int]) -> list[str]:
    shares = [
        (value, row.name, step)
        for row in rows
        if "underflow" in row.health
        for value, step in zip(row.health["underflow"], steps, strict=True)
    ]
    share, name, step = max(shares, default=(0.0, "", 0))
    return [f"{name}: at step {step} {share:.1%} of its input becomes 0"] if share > _UNDERFLOW else []


def _additivity(damages: Damages) -> list[str]:
    if not damages.above_floor or math.isinf(damages.total):
        return []
    (low, high), ratio = ADDITIVE, damages.sum_of_damages
    sentence = f"damages of {len(damages.finest)} units add up to {ratio:.2f} of the whole error"
    if low <= ratio <= high:
        return [sentence]
    return [f"{sentence}, far from 1: errors cancel or feed on one another, and shares of it mean little"]


def _decibels(value: float | None) -> str:
    return "an unknown SQNR" if value is None else f"{value:.1f} dB"
