"""`fluxq.optimize(pipe)` and `fluxq.restore(pipe)`: a pipeline's transformer computes its blocks in fused forms.

runtime/fused.py says how a block is fused, and when it keeps its own form; here the models to fuse are found, and
the kernels of the device that will compute. With graphs=True the same call does what else makes a step fast: before it
it prepares, after it it hoists the modulation and captures the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn

from fluxq.base.console import logger
from fluxq.kernels import findings
from fluxq.kernels.all_ops import ADALN_QUANTIZE, QK_NORM_ROPE, QUANTIZE_ACTIVATION
from fluxq.kernels.linear import QuantLinear, quant_layers
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Maker
from fluxq.runtime import fused
from fluxq.runtime.fused import FusedPart
from fluxq.runtime.fused_forms import product_of
from fluxq.runtime.graphs import capture, hoisted_in, require_capturable, step_of
from fluxq.runtime.modulation import hoist_modulation
from fluxq.runtime.placed import called_of, models_of, target_device
from fluxq.runtime.prepare import MANY_TOKENS, Prefer, prepare


def optimize(model: Any, *, device: str | torch.device | None = None, graphs: bool = False) -> list[FusedPart]:
    """Fuse the blocks of a transformer, or of a pipeline's, in place; return what was done, part by part of each block.

    Images are the same, byte for byte on a CPU. Nothing of the model changes but the class of its blocks and, on a GPU,
    the place of weights that read the same input: they then lie side by side, and one product computes them. A block
    whose call the fused form does not know runs its own forward. Called again, it decides anew: after `fluxq.prepare`,
    a move to another device, or other weights.

    device: that will compute; by default where the weights are, or the first GPU if they are on the CPU.
    graphs: also `fluxq.prepare` what is not prepared, `fluxq.hoist_modulation` where that is supported, and
    `fluxq.capture`, with the defaults of each. Two more rows for each denoiser say so: "modulation" and "step".

    Raises ValueError for a model without a fused form, where no block can be fused, and for a GPU without the kernels;
    with graphs also for a denoiser that `fluxq.capture` refuses, all of it before anything is changed, and what
    `prepare` raises.
    """
    families = {family.model: family for family in FAMILIES.values() if family.fusable}
    models = models_of(model)
    denoisers = {name: part for name, part in models.items() if type(part).__name__ in families}
    if not denoisers:
        classes = ", ".join(type(part).__name__ for part in models.values()) or type(model).__name__
        raise ValueError(f"{classes}: no fused form is known, only of {fused.fusable_models()}")
    targets = {name: target_device(next(part.parameters()).device, device) for name, part in denoisers.items()}
    if graphs:
        require_capturable(model)
        for name, part in denoisers.items():
            if not _wrong_there(targets[name]):
                _lacks(targets[name])
                fused.require_fusable(part, families[type(part).__name__])
    _take_out_graphs(model)
    if graphs:
        _prepare_rest(model, [layer for part in models.values() for _, layer in quant_layers(part)], device)
    parts: list[FusedPart] = []
    for name, part in denoisers.items():
        target = targets[name]
        if why := _wrong_there(target):
            fused.restore(part)
            parts.append(FusedPart(name, "block", why_not=why))
            continue
        family, is_there = families[type(part).__name__], next(part.parameters()).device.type == "cuda"
        done = fused.optimize(part, family, target.type, _lacks(target), side_by_side=is_there)
        parts += [replace(row, block=f"{name}.{row.block}") if name else row for row in done]
    if graphs:
        parts += [_hoisted(model, name, part) for name, part in denoisers.items()]
        capture(model).tie_to_optimize()
        parts += [FusedPart(name, "step", "CUDA graphs") for name in denoisers]
    _report(parts)
    return parts


def restore(model: Any) -> int:
    """Give the blocks that `optimize` changed their own forward back; return how many there were. It always works.

    Graphs and tables of `optimize(graphs=True)` are taken out too; layers stay prepared.
    """
    _take_out_graphs(model)
    return sum(map(fused.restore, models_of(model).values()))


def _take_out_graphs(model: Any) -> None:
    """Take out what `optimize` captured and hoisted; what users did themselves stays."""
    for part in (*models_of(model).values(), *called_of(model).values()):
        for each in (step_of(part), hoisted_in(part.modules())):
            if each is not None and each.by_optimize:
                each.remove()


def _prepare_rest(model: Any, layers: list[QuantLinear], device: str | torch.device | None) -> None:
    """Prepare the layers that are not, in the way of those that are."""
    done = [layer.prepared for layer in layers if layer.prepared]
    if len(done) < len(layers):
        prepare(model, prefer=cast("Prefer", done[0].prefer) if done else "speed", device=device)


def _hoisted(pipe: Any, name: str, part: nn.Module) -> FusedPart:
    """Hoist a denoiser's modulation if it is not hoisted, and report it."""
    hoisted = hoisted_in(part.modules())
    try:
        if hoisted is None and getattr(pipe, "transformer", None) is not part:
            raise ValueError("only that of a pipeline's `transformer` can be hoisted, whose scheduler knows the steps")
        if hoisted is None:
            hoisted = hoist_modulation(pipe)
            hoisted.by_optimize = True
    except ValueError as why:
        return FusedPart(name, "modulation", why_not=str(why))
    return FusedPart(name, "modulation", "of all steps in one product", hoisted.layers)


def _wrong_there(device: torch.device) -> str:
    """Return the reason why blocks keep their own forward on a GPU: a kernel that all need was found wrong, or ""."""
    if device.type != "cuda":
        return ""
    from fluxq.kernels.tiles import chip_of

    reasons = ((op.name, findings.wrong(op.name, "16bit", chip_of(device))) for op in (ADALN_QUANTIZE, QK_NORM_ROPE))
    return next((f"{name} was wrong on this GPU: {why}" for name, why in reasons if why), "")


def _lacks(device: torch.device) -> Callable[[QuantLinear, Maker], str]:
    """Return a function of a layer and the maker of its input, which says why the device lacks a kernel for it, or "".

    Raises ValueError for a GPU that has no kernel for the norms, which every block needs.
    """
    if device.type != "cuda":
        return lambda layer, made_by: ""
    if find_spec("triton") is None:
        raise ValueError(f"fluxq.optimize needs kernels in Triton for {device}: install triton")
    from fluxq.kernels.tiles import chip_of

    return lacks_on(chip_of(device))


def lacks_on(chip: str) -> Callable[[QuantLinear, Maker], str]:
    """Return a function of a layer and the maker of its input: why a chip lacks a kernel for it, or empty.

    Raises ValueError for a chip without a kernel for the norms, which every block needs.
    """
    from fluxq.kernels import dispatch
    from fluxq.kernels.quantize_activation.kernel import LARGEST_RANK

    for op in (ADALN_QUANTIZE, QK_NORM_ROPE):
        if why := dispatch.refusal(op.name, "16bit", chip):
            raise ValueError(f"fluxq.optimize needs {op.name}, which is not to be had on {chip}: {why}")

    def lacks(layer: QuantLinear, made_by: Maker) -> str:
        scheme, layout = layer.scheme, layer.prepared.kind if layer.prepared else ""
        product = product_of(layer)
        if scheme.activations is None or product is None:
            return ""  # such a layer computes alone anyway
        choice = dispatch.choose(
            scheme, chip, MANY_TOKENS, layer.out_features, layer.in_features, layer.compute_dtype, layout
        )
        if choice.fallback:
            return f"{choice.implementation} on {chip} ({choice.reason})"
        activations = scheme.activations.name
        needed = [(ADALN_QUANTIZE, activations), (QUANTIZE_ACTIVATION, activations), product]
        if made_by == "concatenation":
            needed.append((QUANTIZE_ACTIVATION, f"{activations}-beside"))
        if made_by in ("activation", "concatenation") and layer.low_rank is not None:
            rank = len(layer.low_rank[0])
            if rank > LARGEST_RANK:
                return f"its low-rank branch has {rank} ranks, the quantizers take {LARGEST_RANK}"
            needed.append((QUANTIZE_ACTIVATION, "down"))
        return next(filter(None, (dispatch.refusal(op.name, name, chip) for op, name in needed)), "")

    return lacks


def _report(parts: list[FusedPart]) -> None:
    for (part, done, layers), count in Counter((row.part, row.fused, len(row.layers)) for row in parts).items():
        if done:
            logger.info("%d x %s: %s%s", count, part, done, f" for {layers} layers" if layers else "")
    for (part, why), count in Counter((row.part, row.why_not) for row in parts if row.why_not).items():
        logger.info("%d x %s is left in part: %s", count, part, why)
