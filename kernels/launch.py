"""Launches of fluxq's ops on a GPU, in place of their torch references; op.py registers them.

`quantized_linear` takes the choice of dispatch.py, which always has one. The other ops are one kernel each, or for a
product of codes the library's, and raise ValueError on a chip that has none, unless their row says `or_reference`.
Called with a chip, all of them also run on an interpreter.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from fluxq.base import settings
from fluxq.base.console import logger
from fluxq.base.settings import is_strict
from fluxq.kernels import ops
from fluxq.kernels.all_ops import OPS
from fluxq.kernels.dispatch import TORCH, Choice, NoKernel, choose, layout_of
from fluxq.kernels.epilogue import LARGEST_RANK, Epilogue
from fluxq.kernels.library import library_product
from fluxq.kernels.op import REFERENCES, kind_of
from fluxq.kernels.plans import Plan, watched, watching
from fluxq.kernels.quantize_activation.kernel import quantize_tuned
from fluxq.kernels.quantize_activation.op import Rounding, RoundingTensors
from fluxq.kernels.tensor import QuantizedTensor, read_named, unpack_named
from fluxq.kernels.tiles import chip_of, rows_are_at
from fluxq.recipes.formats import FORMATS, Scheme


def run(name: str, *arguments: Any) -> Any:
    """Run the op of that name for tensors on a GPU; kernels are launched on the one that holds the tensors."""
    first = arguments[0]
    if name != "quantized_linear" and first.shape[0] == 0:  # nothing to launch
        on_cpu = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, arguments)
        return tree_map(lambda value: value.to(first.device), getattr(torch.ops.fluxq, name)(*on_cpu))
    device = first.device
    is_elsewhere = first.is_cuda and device.index != torch.cuda.current_device()
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device(device) if is_elsewhere else nullcontext():
        return _planned(name, arguments, chip_of(device))


def _planned(name: str, arguments: Sequence[Any], chip: str) -> Any:
    """Launch an op by the plan of an earlier call with operands of the same kind, if there is one.

    Where the call is part of one that is watched, its steps are noted there.
    """
    if (watch := watching()) is not None:
        with watch.within():
            result = computed_by(name, arguments, chip)
        return _proofs().verified(name, arguments, result, chip)
    operands: list[Tensor] = []
    key = name, chip, arguments[0].get_device(), settings.changes(), kind_of(arguments, operands)
    plan = PLANS.get(key, UNSEEN)
    is_twice = plan is UNSEEN and len({*map(id, operands)}) < len(operands)  # one tensor for two would stay one
    if plan is None or is_twice or torch.is_autocast_enabled(arguments[0].device.type):  # which changes the steps
        return _proofs().verified(name, arguments, computed_by(name, arguments, chip), chip)
    if plan is UNSEEN:
        if len(PLANS) >= MOST_PLANS:
            PLANS.clear()
        result, plan = watched(functools.partial(computed_by, name, arguments, chip), operands)
        PLANS[key] = None if settings.verification() == "always" else plan  # a plan compares nothing
        return _proofs().verified(name, arguments, result, chip)
    return plan(operands)


def computed_by(name: str, arguments: Sequence[Any], chip: str) -> Any:
    """Launch an op; where only a kernel that was found wrong could compute it, its torch reference does.

    So it does for an op that says so of chips without a kernel.
    """
    try:
        return launcher(name)(*arguments, chip=chip)
    except NoKernel as error:
        if is_strict() or not (error.was_wrong or (name in OPS and OPS[name].or_reference)):
            raise
        _say_reference(name, str(error))
    return REFERENCES[name](*arguments)


def _proofs() -> Any:
    return importlib.import_module("fluxq.kernels.proofs")  # which launches too


def launcher(name: str) -> Callable[..., Any]:
    """Return the function that launches an op's kernel; it takes the op's arguments and `chip`."""
    return quantized_linear if name == "quantized_linear" else OPS[name].kernel.launch


def quantized_linear(x: Tensor, tensors: Sequence[Tensor], scheme: str, *, chip: str) -> Tensor:
    """Compute `ops.quantized_linear` as on this chip.

    Kernels read the codes: `decoded` is for the torch reference alone.

    The quantizer does in fp32 what the scheme does to x, but for deflation, which library products compute: then z is
    rounded to x's dtype before them and after them. The same holds for decoded weights, whose kernel takes 16 bit.
    Raises ValueError for operands that do not fit, and where fluxq is strict and the chip lacks the scheme.
    """
    kind = kind_of_linear(x, tensors, scheme, chip=chip)
    _, _, m, n, k, *_ = kind
    if not x.is_floating_point() or x.element_size() < 2 or x.shape[-1] != k:
        raise ValueError(f"input is {x.dtype} {(*x.shape,)}, expected 16 or 32 bit and K = {k} as the last axis")
    if m == 0:
        return x.new_empty(*x.shape[:-1], n)
    choice = choose(*kind)
    announce(read_named(scheme)[0], chip, choice)
    return linear_by(choice, x, tensors, scheme, chip=chip)


def kind_of_linear(
    x: Tensor, tensors: Sequence[Tensor], scheme: str, *, chip: str
) -> tuple[Scheme, str, int, int, int, torch.dtype, str, bool]:
    """Return the arguments of `dispatch.choose` for a call of `quantized_linear`."""
    operands, parsed = unpack_named(ops.LinearTensors, tensors, scheme, Scheme.parse)
    w = QuantizedTensor.stored(*operands[:3], parsed.weights)
    layout, library = layout_of(w, operands.row_scale), rows_are_at(w.codes, 16)
    return parsed, chip, x.numel() // w.shape[1], *w.shape, x.dtype, layout, library


def linear_by(choice: Choice, x: Tensor, tensors: Sequence[Tensor], scheme: str, *, chip: str) -> Tensor:
    """Compute `quantized_linear` of some tokens as a choice of dispatch.py says."""
    operands, parsed = unpack_named(ops.LinearTensors, tensors, scheme, Scheme.parse)
    w = QuantizedTensor.stored(*operands[:3], parsed.weights)
    n, k = w.shape
    with ops.no_autocast(x):
        rows = x.reshape(-1, k)
        if choice.implementation == TORCH:
            y = ops.quantized_linear_reference(rows, tensors, scheme)
        else:
            ops.check_steps_given(parsed, operands)
            z, low_rank, steps = steps_before(rows, parsed, choice.activations, operands)
            y = computed(choice, z, w, operands, low_rank, steps, chip)
    return y.reshape(*x.shape[:-1], n)


def steps_before(
    x: Tensor, scheme: Scheme, activations: str | None, operands: ops.LinearTensors
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, tuple[RoundingTensors, Rounding]]:
    """Return (input of the quantizer, or of the product where nothing is quantized; branch (h, up); quantizer's steps).

    x: (M, K).
    """
    z, t, steps = _steps_before(x, scheme, activations, operands)
    h = None if operands.lora_a is None else F.linear(x, operands.lora_a.to(x.dtype))
    return z, _joined((t, operands.out), (h, operands.lora_b)), steps


def _steps_before(
    x: Tensor, scheme: Scheme, activations: str | None, operands: ops.LinearTensors
) -> tuple[Tensor, Tensor | None, tuple[RoundingTensors, Rounding]]:
    """Return (input of the quantizer, or of the product where nothing is quantized; t; steps of the quantizer)."""
    mean, smooth = ops.fp32(operands.mean), ops.fp32(operands.smooth)
    swizzled = activations is not None and FORMATS[activations].has_byte_scales and operands.weight_scale.ndim == 1
    how = Rounding(activations or "", "", scheme.hadamard, scheme.four_over_six, swizzled, scheme.regular)
    basis, t = operands.basis, None
    if basis is not None:
        z, p = ops.transform(x, smooth, mean, 0).to(x.dtype), basis.to(x.dtype)
        t = F.linear(z, p)
        x, mean, smooth = torch.addmm(z, t, p, alpha=-1), None, None
    if activations is None and scheme.is_transformed:
        x = ops.transform(x, smooth, mean, scheme.hadamard, scheme.regular).to(x.dtype)
    return x, t, (RoundingTensors(operands.input_scale, smooth, mean), how)


def _joined(*branches: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor] | None:
    """Join branches (h (M, R), up (N, R)) of a layer to one, of the sum of their ranks."""
    pairs = [(h, up.to(h.dtype)) for h, up in branches if h is not None and up is not None]
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    hs, ups = zip(*pairs, strict=True)
    return torch.cat(hs, 1), torch.cat(ups, 1)


def computed(
    choice: Choice,
    z: Tensor,
    w: QuantizedTensor,
    operands: ops.LinearTensors,
    low_rank: tuple[Tensor, Tensor] | None,
    steps: tuple[RoundingTensors, Rounding],
    chip: str,
) -> Tensor:
    """Return z (M, K), after these steps, times w (N, K) by the implementation; plus bias and branch (h, up)."""
    x: Any = z.contiguous()
    if choice.activations is None:
        w = w.unswizzled()  # which other matrix units than those of block scales do not read
    else:
        x, _ = quantize_tuned(z if z.stride(-1) == 1 else x, *steps, chip)
    added = None
    if choice.implementation not in OPS:
        y = library_product(x, w, operands.bias, z.dtype)
    else:
        # A kernel adds the branch itself where there are few ranks, in 16 bit.
        if low_rank is not None and low_rank[0].shape[1] <= LARGEST_RANK and z.dtype != torch.float32:
            added = low_rank
        epilogue = Epilogue(bias=operands.bias, low_rank=added, dtype=z.dtype)
        y = OPS[choice.implementation].kernel.multiply(x, w, operands.row_scale, epilogue, chip)
    return y if low_rank is None or added is not None else y + F.linear(*low_rank)


def announce(scheme: str, chip: str, choice: Choice) -> None:
    """Log once the implementation of a scheme on a chip; raise if it is a fallback and fluxq is strict."""
    if choice.fallback and is_strict():
        raise ValueError(
            f"{scheme} on {chip}: {choice.implementation} ({choice.reason}). Strict mode takes only a kernel of the "
            "scheme's own arithmetic: prepare the model for this GPU with fluxq.prepare, quantize it to fp8 or int8, "
            "or leave strict mode"
        )
    _say(scheme, chip, choice)


@functools.lru_cache(1024)
def _say(scheme: str, chip: str, choice: Choice) -> None:
    text = f"{scheme} on {chip}: {choice.implementation} ({choice.reason})"
    if choice.fallback:
        logger.warning("%s; fluxq.prepare encodes such layers anew for this GPU, if it can", text)
    else:
        logger.info(text)


@functools.lru_cache(1024)
def _say_reference(name: str, why: str) -> None:
    logger.warning("%s: torch reference (%s)", name, why)


UNSEEN: Any = object()
PLANS: dict[Any, Plan | None] = {}  # by op, GPU, settings and kind of operands; None: such calls cannot be planned
MOST_PLANS = 4096
