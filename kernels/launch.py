"""Ops of fluxq on a GPU, in the place of their torch references (device.py sees to that).

`quantized_linear` asks dispatch.py, which always finds a way. The other ops are one kernel each, and ValueError names
the chip that it is not for. Called with `chip`, all of them also run on the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from fluxq.base.console import logger
from fluxq.base.settings import is_strict
from fluxq.kernels import dispatch, ops
from fluxq.kernels.adaln_quantize import kernel as adaln
from fluxq.kernels.attention import kernel as attention
from fluxq.kernels.attention.op import check_attention
from fluxq.kernels.block_scaled_matmul.kernel import block_scaled_matmul
from fluxq.kernels.chips import chip_of
from fluxq.kernels.dequantize.kernel import dequantize
from fluxq.kernels.dispatch import Choice, choose
from fluxq.kernels.epilogue import LARGEST_RANK, Epilogue
from fluxq.kernels.norms import NormTensors, RopeTensors
from fluxq.kernels.packing import names_in
from fluxq.kernels.producers import Rounding, RoundingTensors
from fluxq.kernels.products import ProductTensors
from fluxq.kernels.qk_norm_rope import kernel as rope
from fluxq.kernels.quantize_activation.kernel import quantize_activation as quantizer
from fluxq.kernels.quantize_activation.kernel import tuned_name
from fluxq.kernels.reencode.kernel import reencode
from fluxq.kernels.reencode.op import stored_matrix
from fluxq.kernels.scaled_matmul.kernel import scaled_matmul
from fluxq.kernels.swizzle_scales.kernel import swizzle_scales
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import MatmulTile, Tile, find_matmul_tile, find_memory_tile, find_tile
from fluxq.kernels.w4a8_matmul.kernel import w4a8_matmul
from fluxq.kernels.weight_only_matmul.kernel import LARGEST_GEMV, weight_only_matmul
from fluxq.recipes.formats import FORMATS, Scheme, find_format


def run(name: str, *arguments: Any) -> Any:
    """Run the op of that name for tensors on a GPU; kernels are launched on the one that holds the tensors."""
    first = arguments[0]
    if name != "quantized_linear" and first.shape[0] == 0:  # nothing to launch
        on_cpu = [value.cpu() if isinstance(value, Tensor) else value for value in arguments]
        return tree_map(lambda value: value.to(first.device), getattr(torch.ops.fluxq, name)(*on_cpu))
    # Triton launches on the current device, whatever the tensors are on.
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        return ON_GPU[name](*arguments)


def quantized_linear(x: Tensor, tensors: Sequence[Tensor], scheme: str, *, chip: str | None = None) -> Tensor:
    """As `ops.quantized_linear`. chip: compute as on this one; by default on the one that holds x.

    Kernels read the codes: `decoded` is for the torch reference alone.

    The quantizer does in fp32 what the scheme does to x, but for deflation, which library products compute: then z is
    rounded to x's dtype before them and after them. So it is for weights that are decoded, whose kernel takes 16 bit.
    Raises ValueError for operands that do not fit, and where fluxq is strict and the chip lacks the scheme.
    """
    given, parsed = ops.LinearTensors.of(tensors, scheme)
    weight, weight_scale, weight_scale_2, *_ = given
    w = QuantizedTensor(weight, weight_scale, weight_scale_2, _shape(weight, parsed), parsed.weights)
    n, k = w.shape
    if not x.is_floating_point() or x.element_size() < 2 or x.shape[-1] != k:
        raise ValueError(f"input is {x.dtype} {(*x.shape,)}, expected 16 or 32 bit and K = {k} as the last axis")
    m = x.numel() // k
    if m == 0:
        return x.new_empty(*x.shape[:-1], n)
    chip = chip or chip_of(x.device)
    choice = choose(parsed, chip, m, n, k, x.dtype, given.row_scale is not None)
    announce(names_in(scheme)[0], chip, choice)
    with ops.no_autocast(x):
        rows = x.reshape(m, k)
        if choice.implementation == "torch reference":
            y = ops.quantized_linear_reference(rows, tensors, scheme)
        else:
            ops.check_steps_given(parsed, given)
            z, t, steps = _steps_before(rows, parsed, choice.activations, given)
            h = None if given.lora_a is None else F.linear(rows, given.lora_a.to(x.dtype))
            low_rank = _joined((t, given.out), (h, given.lora_b))
            y = LAUNCH[choice.implementation](z, w, choice, given, low_rank, chip, steps)
    return y.reshape(*x.shape[:-1], n)


@dataclass(frozen=True)
class Steps:
    """Steps of the quantizer before it rounds its input: `mean` and `smooth` (K,) fp32, blocks of Hadamard."""

    mean: Tensor | None = None
    smooth: Tensor | None = None
    hadamard: int = 0
    four_over_six: bool = False


NO_STEPS = Steps()


def _steps_before(
    x: Tensor, scheme: Scheme, activations: str | None, given: ops.LinearTensors
) -> tuple[Tensor, Tensor | None, Steps]:
    """(what the quantizer takes, or the product itself where nothing is quantized; t; what the quantizer has to do)."""
    mean, smooth = (None if vector is None else vector.float() for vector in (given.mean, given.smooth))
    basis = given.basis
    t, steps = None, Steps(mean, smooth, scheme.hadamard, scheme.four_over_six)
    if basis is not None:
        z, p = ops.transform(x, smooth, mean, 0).to(x.dtype), basis.to(x.dtype)
        t = F.linear(z, p)
        x, steps = torch.addmm(z, t, p, alpha=-1), replace(steps, mean=None, smooth=None)
    if activations is None and scheme.is_transformed:
        x = ops.transform(x, steps.smooth, steps.mean, steps.hadamard).to(x.dtype)
    return x, t, steps


def _joined(*branches: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor] | None:
    """Branches (h (M, R), up (N, R)) of a layer as one, of the sum of their ranks."""
    there = [(h, up.to(h.dtype)) for h, up in branches if h is not None and up is not None]
    if len(there) < 2:
        return there[0] if there else None
    hs, ups = zip(*there, strict=True)
    return torch.cat(hs, 1), torch.cat(ups, 1)


def announce(scheme: str, chip: str, choice: Choice) -> None:
    """Say once what computes a scheme on a chip; raise if that is a fallback and fluxq is strict."""
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


def quantize_rows(
    x: Tensor,
    activations: str,
    input_scale: Tensor | None,
    chip: str,
    steps: Steps = NO_STEPS,
    *,
    swizzled: bool = False,
) -> QuantizedTensor:
    """x (M, K) as the matmul kernels of a format take it."""
    row = FORMATS[activations]
    x = x if x.stride(-1) == 1 else x.contiguous()
    tile = find_memory_tile("quantize_activation", tuned_name(row, input_scale, None), chip, x.shape[0])
    given = RoundingTensors(input_scale, steps.smooth, steps.mean)
    how = Rounding(activations, "", steps.hadamard, steps.four_over_six, swizzled)
    q, _ = quantizer(x, given, how, tile=tile)
    return q


def matmul_tile(kernel: str, name: str, chip: str, m: int, codes: Tensor) -> MatmulTile:
    """The tuned tile; without the copy engine where rows of the weight's codes are not at multiples of 16 bytes."""
    tile = find_matmul_tile(kernel, name, chip, m)
    return tile if not tile.descriptors or _rows_are_at(codes, 16) else replace(tile, descriptors=False)


def weight_only_tile(w: QuantizedTensor, chip: str, m: int, dtype: torch.dtype) -> MatmulTile | Tile:
    """The tuned tile; float32 takes that of one token, which multiplies in fp32.

    That form reads words of 4 bytes: where rows of codes are at no multiple of those, few tokens are taken for many.
    """
    if not _rows_are_at(w.codes, 4):
        m = LARGEST_GEMV + 1
    elif dtype == torch.float32 and m <= LARGEST_GEMV:
        m = 1
    return find_tile("weight_only_matmul", w.format.name, chip, m)


def _rows_are_at(codes: Tensor, multiple: int) -> bool:
    return codes.shape[1] % multiple == 0 and codes.data_ptr() % multiple == 0


def _shape(weight: Tensor, scheme: Scheme) -> tuple[int, int]:
    n, columns = weight.shape
    return n, columns * 8 // scheme.weights.element.bits


def _epilogue(x: Tensor, bias: Tensor | None, low_rank: tuple[Tensor, Tensor] | None) -> Epilogue:
    return Epilogue(bias=bias, low_rank=low_rank if _fits(low_rank) else None, dtype=x.dtype)


def _fits(low_rank: tuple[Tensor, Tensor] | None) -> bool:
    """Tell whether a matmul kernel can add the branch: few ranks, 16 bit."""
    return low_rank is not None and low_rank[0].shape[1] <= LARGEST_RANK and low_rank[0].dtype != torch.float32


def _with_branch(y: Tensor, low_rank: tuple[Tensor, Tensor] | None) -> Tensor:
    """Add a low-rank branch that no epilogue added."""
    return y if low_rank is None or _fits(low_rank) else y + F.linear(*low_rank)


def _scaled(x, w, choice, given, low_rank, chip, steps=NO_STEPS) -> Tensor:
    q = quantize_rows(x, choice.activations, given.input_scale, chip, steps)
    tile = matmul_tile("scaled_matmul", choice.activations, chip, x.shape[0], w.codes)
    return _with_branch(scaled_matmul(q, w, epilogue=_epilogue(x, given.bias, low_rank), tile=tile), low_rank)


def _block_scaled(x, w, choice, given, low_rank, chip, steps=NO_STEPS) -> Tensor:
    swizzled = w.scale.ndim == 1
    q = quantize_rows(x, choice.activations, given.input_scale, chip, steps, swizzled=swizzled)
    tile = matmul_tile("block_scaled_matmul", choice.activations, chip, x.shape[0], w.codes)
    return _with_branch(block_scaled_matmul(q, w, epilogue=_epilogue(x, given.bias, low_rank), tile=tile), low_rank)


def _w4a8(x, w, choice, given, low_rank, chip, steps=NO_STEPS) -> Tensor:
    q = quantize_rows(x, choice.activations, given.input_scale, chip, steps)
    name = f"{w.format.name}-{choice.activations}"
    tile = matmul_tile("w4a8_matmul", name, chip, x.shape[0], w.codes)
    y = w4a8_matmul(q, w, given.row_scale, epilogue=_epilogue(x, given.bias, low_rank), tile=tile)
    return _with_branch(y, low_rank)


def _weight_only(x, w, choice, given, low_rank, chip, steps=NO_STEPS) -> Tensor:
    tile = weight_only_tile(w, chip, x.shape[0], x.dtype)
    y = weight_only_matmul(x.contiguous(), w, epilogue=_epilogue(x, given.bias, low_rank), tile=tile)
    return _with_branch(y, low_rank)


def _int_mm(x, w, choice, given, low_rank, chip, steps=NO_STEPS) -> Tensor:
    q = quantize_rows(x, "int8", given.input_scale, chip, steps)
    y = torch._int_mm(q.codes, w.codes.t()).float()
    y.mul_(q.scale.unsqueeze(1)).mul_(w.scale)
    y = y if given.bias is None else y.add_(given.bias.float())
    return y.to(x.dtype) if low_rank is None else y.to(x.dtype) + F.linear(*low_rank)


def _library_fp8(x, w, choice, given, low_rank, chip, steps=NO_STEPS) -> Tensor:
    q = quantize_rows(x, "fp8", given.input_scale, chip, steps)
    per_row = F.ScalingType.RowWise
    y = F.scaled_mm(
        q.codes,
        w.codes.t(),
        q.scale.unsqueeze(1),
        per_row,
        w.scale.unsqueeze(0),
        per_row,
        bias=None if given.bias is None else given.bias.to(torch.bfloat16),
        output_dtype=torch.bfloat16,
    )
    return y if low_rank is None else y + F.linear(*low_rank)


LAUNCH: dict[str, Callable[..., Tensor]] = {
    "scaled_matmul": _scaled,
    "block_scaled_matmul": _block_scaled,
    "w4a8_matmul": _w4a8,
    "weight_only_matmul": _weight_only,
    "torch._int_mm": _int_mm,
    "F.scaled_mm": _library_fp8,
}


# --- the ops that are one kernel each, in the order of their arguments; the torch references say what these are


def quantize_activation(x, tensors, rounding, *, chip=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (given, how), chip = RoundingTensors.of(tensors, rounding), chip or chip_of(x.device)
    name = tuned_name(find_format(how.format), given.input_scale, given.down, given.beside)
    require("quantize_activation", "down" if given.down is not None else how.format, chip)
    if given.beside is not None:
        require("quantize_activation", f"{how.format}-beside", chip)
    q, h = quantizer(x, given, how, tile=find_memory_tile("quantize_activation", name, chip, x.shape[0]))
    return *_made(q, given.input_scale), x.new_empty(0) if h is None else h


def adaln_quantize(x, tensors, rounding, norm, eps, *, chip=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (given, how), chip = NormTensors.of(tensors, rounding), chip or chip_of(x.device)
    require("adaln_quantize", how.format or "16bit", chip)
    tile = find_memory_tile("adaln_quantize", adaln.tuned_name(x.shape[-1]), chip, x.shape[0])
    q, new = adaln.adaln_quantize(x, given, how, norm=norm, eps=eps, tile=tile)
    new = x.new_empty(0) if new is None else new
    if isinstance(q, Tensor):
        return q, x.new_empty(0), x.new_empty(0), new
    return *_made(q, given.input_scale), new


def qk_norm_rope(q, k, tensors, names, *how, chip=None):
    eps, interleaved, round_before_weight, position = how
    chip, name = chip or chip_of(q.device), rope.tuned_name(q.shape[-1])
    require("qk_norm_rope", "16bit", chip)
    tile = find_memory_tile("qk_norm_rope", name, chip, q.shape[0] * q.shape[1] * q.shape[2])
    given, twice = RopeTensors.of(tensors, names), round_before_weight
    return rope.qk_norm_rope(
        q, k, given, eps=eps, interleaved=interleaved, round_before_weight=twice, position=position, tile=tile
    )


def attention_fp8(q, k, v, scale, *, chip=None) -> Tensor:
    check_attention(q, k, v)
    if not q.numel():
        return q.new_empty(q.shape)
    chip, d = chip or chip_of(q.device), str(q.shape[3])
    offered = dispatch.offer("attention_fp8", d, chip)
    if not offered.how:
        raise ValueError(
            f"attention_fp8: no kernel for heads of {d} elements on {chip} ({offered.reason}); compute attention in "
            "16 bit: fluxq.set_attention(model, '16bit')"
        )
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    tile = find_matmul_tile("attention", d, chip, q.shape[1])
    quantize_tile = find_memory_tile("attention", f"quantize {d}", chip, q.shape[1])
    return attention.attention_fp8(q, k, v, scale, tile=tile, quantize_tile=quantize_tile)


def scaled_matmul_op(x, tensors, formats, gelu, dtype, *, chip=None) -> Tensor:
    given, name = ProductTensors.of(tensors, formats)
    x_scale: Any = given.x_scale
    left, right = stored_matrix(x, x_scale, None, name), stored_matrix(given.w, given.w_scale, None, name)
    tile = required_tile("scaled_matmul", name, chip or chip_of(x.device), right, x.shape[0])
    return scaled_matmul(left, right, epilogue=_what_follows(given, gelu, dtype), tile=tile)


def block_scaled_matmul_op(x, tensors, formats, gelu, dtype, *, chip=None) -> Tensor:
    given, name = ProductTensors.of(tensors, formats)
    x_scale: Any = given.x_scale
    left = stored_matrix(x, x_scale, given.x_scale_2, name)
    right = stored_matrix(given.w, given.w_scale, given.w_scale_2, name)
    tile = required_tile("block_scaled_matmul", name, chip or chip_of(x.device), right, x.shape[0])
    return block_scaled_matmul(left, right, epilogue=_what_follows(given, gelu, dtype), tile=tile)


def w4a8_matmul_op(x, tensors, formats, gelu, dtype, *, chip=None) -> Tensor:
    given, names = ProductTensors.of(tensors, formats)
    weights, _, activations = names.partition("-")
    x_scale: Any = given.x_scale
    row_scale: Any = given.row_scale
    left = stored_matrix(x, x_scale, None, activations)
    right = stored_matrix(given.w, given.w_scale, given.w_scale_2, weights)
    tile = required_tile("w4a8_matmul", names, chip or chip_of(x.device), right, x.shape[0])
    return w4a8_matmul(left, right, row_scale, epilogue=_what_follows(given, gelu, dtype), tile=tile)


def weight_only_matmul_op(x, tensors, formats, gelu, dtype, *, chip=None) -> Tensor:
    given, weights = ProductTensors.of(tensors, formats)
    right, chip = stored_matrix(given.w, given.w_scale, given.w_scale_2, weights), chip or chip_of(x.device)
    require("weight_only_matmul", weights, chip)
    tile = weight_only_tile(right, chip, x.shape[0], x.dtype)
    return weight_only_matmul(x, right, epilogue=_what_follows(given, gelu, dtype), tile=tile)


def dequantize_op(w, w_scale, w_scale_2, format, dtype, *, chip=None) -> Tensor:
    chip = chip or chip_of(w.device)
    require("dequantize", format, chip)
    q = stored_matrix(w, w_scale, w_scale_2, format)
    return dequantize(q, dtype, tile=find_memory_tile("dequantize", format, chip, w.shape[0]))


def reencode_op(w, w_scale, w_scale_2, source, target, *, chip=None) -> tuple[Tensor, Tensor]:
    chip = chip or chip_of(w.device)
    require("reencode", f"{source}-{target}", chip)
    tile = find_memory_tile("reencode", f"{source}-{target}", chip, w.shape[0])
    q = reencode(stored_matrix(w, w_scale, w_scale_2, source), target, tile=tile)
    return q.codes, q.scale


def swizzle_scales_op(scale, *, chip=None) -> Tensor:
    chip = chip or chip_of(scale.device)
    require("swizzle_scales", "8bit", chip)
    return swizzle_scales(scale, tile=find_memory_tile("swizzle_scales", "8bit", chip, scale.shape[0]))


def require(op: str, name: str, chip: str) -> None:
    """ValueError unless dispatch.py offers an op's kernel for what its tiles are called by."""
    found = dispatch.offer(op, name, chip)
    if not found.how:
        raise ValueError(
            f"{op}: no kernel for {name} on {chip} ({found.reason}); encode the operands anew with fluxq.prepare, or "
            "compute with their dequantized form"
        )


def required_tile(kernel: str, name: str, chip: str, w: QuantizedTensor, m: int) -> MatmulTile:
    require(kernel, name, chip)
    return matmul_tile(kernel, name, chip, m, w.codes)


def _made(q: QuantizedTensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, global scale); what was given is not returned: an op's results may not alias its arguments."""
    nothing = torch.empty(0, dtype=torch.float32, device=q.codes.device)
    given = input_scale is not None
    scale = nothing if given and not q.format.two_level else q.scale
    return q.codes, scale, nothing if given or q.global_scale is None else q.global_scale


def _what_follows(given: ProductTensors, gelu: bool, dtype: torch.dtype) -> Epilogue:
    low_rank = None if given.h is None or given.up is None else (given.h, given.up)
    return Epilogue(
        bias=given.bias, low_rank=low_rank, gelu=gelu, gate=given.gate, residual=given.residual, dtype=dtype
    )


ON_GPU: dict[str, Callable[..., object]] = {
    "quantized_linear": quantized_linear,
    "quantize_activation": quantize_activation,
    "adaln_quantize": adaln_quantize,
    "qk_norm_rope": qk_norm_rope,
    "attention_fp8": attention_fp8,
    "scaled_matmul": scaled_matmul_op,
    "block_scaled_matmul": block_scaled_matmul_op,
    "w4a8_matmul": w4a8_matmul_op,
    "weight_only_matmul": weight_only_matmul_op,
    "dequantize": dequantize_op,
    "reencode": reencode_op,
    "swizzle_scales": swizzle_scales_op,
}
