"""The torch.library op that every quantized layer calls, with its torch reference; all_ops.py lists the others.

A quantized Linear is y = x W^T + b with x (…, K) and W (N, K); z is x after the steps of its scheme:

    int8 weights and activations   y = (float(zq · wq^T) · z_scale) · w_scale + b   exact integer product
    every other scheme             y = F.linear(dequantize(z), dequantize(W), b)    fp32

then one cast to x's dtype. A scheme may have these steps, in fp32 where nothing else is said:

    center, smooth                 z = (x - mean) · smooth
    deflate                        t = z · basis^T, both rounded to x's dtype;  z = z - t · basis;  y += t · out^T
    hadamard                       z = z · H / sqrt(size), on each block of columns; H Sylvester's or the regular one

A low-rank branch (A, B) adds (x A^T) B^T. This and t · out^T are computed in x's dtype, as a LoRA adapter beside the
layer would be, so that fusing an adapter changes nothing.

Activations are quantized per token row. `input_scale` () is the calibrated scale of all tokens: nvfp4's global one, or
fp8_tensor's, which clips larger values, infinity too. (M, 1) gives every token its own: nvfp4's global scale, or
that of fp8 and int8. Without one they follow from each token's amax, fp8_tensor's from that of all.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base import devices
from fluxq.base.settings import gradients
from fluxq.kernels import encode
from fluxq.kernels.op import launches_on_gpu
from fluxq.kernels.tensor import QuantizedTensor, quantize_blocks, read_named, round_blocks, row_chunks, unpack_named
from fluxq.recipes.formats import FORMATS, Format, Scheme


class LinearTensors(NamedTuple):
    """The tensors of a quantized Linear (N, K), in the op's order; those that a layer lacks are None.

    weight, weight_scale, weight_scale_2: as the scheme's format stores them.
    input_scale: as at the top of this file.
    bias: (N,).
    lora_a, lora_b: (R, K) and (N, R), the low-rank branch.
    row_scale: (N,) fp32; the 4-bit weight is multiplied as its 8-bit codes under this scale, which `reencode` gives.
    mean, smooth, basis, out: (K,), (K,), (d, K) and (N, d), of the steps at the top of this file.
    decoded: (N, K) fp32, the values of the codes where they are kept; then nothing decodes them.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor | None = None
    input_scale: Tensor | None = None
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    row_scale: Tensor | None = None
    mean: Tensor | None = None
    smooth: Tensor | None = None
    basis: Tensor | None = None
    out: Tensor | None = None
    decoded: Tensor | None = None

    @property
    def steps(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(mean, smooth, basis, out)."""
        return self.mean, self.smooth, self.basis, self.out


@torch.library.custom_op("fluxq::quantized_linear", mutates_args=())
def quantized_linear(x: Tensor, tensors: Sequence[Tensor], scheme: str) -> Tensor:
    """Multiply x (…, K) of a float dtype with a quantized weight (N, K), stored as `scheme`; returns (…, N).

    tensors, scheme: of `pack_named(LinearTensors(…), scheme)`.
    """
    with no_autocast(x):
        return quantized_linear_reference(x, tensors, scheme)


def quantized_linear_reference(x: Tensor, tensors: Sequence[Tensor], scheme: str) -> Tensor:
    """Compute the op with torch, on every device."""
    operands, parsed = unpack_named(LinearTensors, tensors, scheme, Scheme.parse)
    input_scale, row_scale, (mean, smooth, basis, out) = operands.input_scale, operands.row_scale, operands.steps
    if not x.is_floating_point() or x.element_size() < 2:
        raise ValueError(f"input is {x.dtype}, expected float16, bfloat16 or float32: something cast it to the codes'")
    rows = x.reshape(-1, x.shape[-1])  # (M, K)
    w = QuantizedTensor.stored(*operands[:3], parsed.weights).unswizzled()
    if rows.shape[1] != w.shape[1]:
        raise ValueError(f"input {(*x.shape,)} does not fit the weight (N, K) = {w.shape}: last axis must be K")
    check_steps_given(parsed, operands)
    check_decoded(operands.decoded, w, row_scale)
    if row_scale is not None and parsed.activations is not None:
        from fluxq.kernels.reencode import reencode  # only here: few layers are prepared so

        w = reencode(w, parsed.activations.name, row_scale)
    z, t, steps = rows, None, None
    if parsed.is_transformed and basis is None and _rounds_by_row(parsed, input_scale):
        rotation = parsed.hadamard, parsed.regular
        steps = functools.partial(_transform_rows, smooth=fp32(smooth), mean=fp32(mean), rotation=rotation)
    else:
        z, t = transformed(rows, parsed, mean, smooth, basis)
    if multiplies_codes(w.format, parsed.activations):
        y = _int8_linear(z, w, input_scale, operands.bias, steps)
    else:
        z = _through(z, parsed, input_scale, steps)
        y = F.linear(z, w.operand() if operands.decoded is None else operands.decoded, fp32(operands.bias))
    y = y.to(x.dtype)
    if t is not None and out is not None:
        y += F.linear(t, out.to(x.dtype))
    if operands.lora_a is not None and operands.lora_b is not None:
        y += F.linear(F.linear(rows, operands.lora_a.to(x.dtype)), operands.lora_b.to(x.dtype))
    return y.reshape(*x.shape[:-1], w.shape[0])


@quantized_linear.register_fake
def _(x, tensors, scheme):
    return x.new_empty(*x.shape[:-1], tensors[0].shape[0])


launches_on_gpu("quantized_linear", quantized_linear)


def _save_for_backward(ctx, inputs, output) -> None:
    _, tensors, scheme = inputs
    ctx.names = read_named(scheme)[1]
    operands, ctx.parsed = unpack_named(LinearTensors, tensors, scheme, Scheme.parse)
    ctx.save_for_backward(*operands._replace(input_scale=None, bias=None, row_scale=None, mean=None))


def _backward(ctx, grad):
    """Return dL/dx = dL/dy · dy/dx, with the weight that the codes stand for; rounding of z counts as the identity."""
    operands, scheme = LinearTensors(*ctx.saved_tensors), ctx.parsed
    lora_a, lora_b = operands.lora_a, operands.lora_b
    _, smooth, basis, out = operands.steps
    rows = grad.reshape(-1, grad.shape[-1])  # (M, N)
    grad_x = None
    if ctx.needs_input_grad[0]:
        with no_autocast(grad):
            # What steps follow is in fp32 to the end, so that it is rounded once.
            grad_z = _times_weight(rows, operands, scheme, torch.float32 if scheme.is_transformed else grad.dtype)
            grad_z = hadamard_transform(grad_z, scheme.hadamard, scheme.regular)  # H is its own transpose
            if basis is not None and out is not None:
                p = basis.float()
                grad_z = grad_z - (grad_z @ p.T) @ p + (rows.float() @ out.float()) @ p
            grad_x = (grad_z if smooth is None else grad_z * smooth.float()).to(grad.dtype)
            if lora_a is not None and lora_b is not None:
                grad_x += (rows @ lora_b.to(grad.dtype)) @ lora_a.to(grad.dtype)
            grad_x = grad_x.reshape(*grad.shape[:-1], grad_x.shape[1])
    needs = dict(zip(ctx.names, ctx.needs_input_grad[1], strict=True))
    grads = [rows.sum(0) if name == "bias" and needs[name] else None for name in ctx.names]
    return grad_x, grads, None


def _times_weight(grad: Tensor, operands: LinearTensors, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Return grad (M, N) times the weight (N, K) that the codes stand for: (M, K) of dtype, rounded once."""
    if operands.decoded is not None:
        return (grad.float() @ operands.decoded).to(dtype)
    op = importlib.import_module("fluxq.kernels.input_gradient.op")  # whose reference needs this file
    formats = op.formats_of(scheme.weights.name, in_8_bit=gradients() == "8bit")
    return op.input_gradient(grad, *operands[:3], formats, dtype)


quantized_linear.register_autograd(_backward, setup_context=_save_for_backward)


def check_steps_given(scheme: Scheme, operands: LinearTensors) -> None:
    """Raise ValueError unless exactly the tensors that the steps of a scheme need are given."""
    is_wanted_of = {"mean": scheme.center, "smooth": scheme.smooth, "basis": scheme.deflate, "out": scheme.deflate}
    for name, is_wanted in is_wanted_of.items():
        if (getattr(operands, name) is not None) != bool(is_wanted):
            raise ValueError(f"quantized_linear: scheme {scheme} {'needs' if is_wanted else 'takes no'} {name}")


def check_decoded(decoded: Tensor | None, w: QuantizedTensor, row_scale: Tensor | None) -> None:
    """Raise ValueError unless `decoded` can be the values of the codes of w."""
    if decoded is None:
        return
    if decoded.shape != w.shape or decoded.dtype != torch.float32:
        raise ValueError(
            f"quantized_linear: decoded is {decoded.dtype} {(*decoded.shape,)}, expected float32 {w.shape}, what the "
            "codes stand for"
        )
    if row_scale is not None:
        raise ValueError("quantized_linear: takes decoded or row_scale, which is for other codes; got both")


def transformed(
    x: Tensor, scheme: Scheme, mean: Tensor | None, smooth: Tensor | None, basis: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (z (M, K), t (M, d)) of x (M, K), of the formulas at the top of this file.

    z is fp32, or x itself where there are no steps; t, in x's dtype, is None without a basis.
    """
    if not scheme.is_transformed:
        return x, None
    z, t = transform(x, fp32(smooth), fp32(mean), 0), None
    if basis is not None:
        t = F.linear(z.to(x.dtype), basis.to(x.dtype))
        z -= t.float() @ basis.float()
    return hadamard_transform(z, scheme.hadamard, scheme.regular), t


def transform(a: Tensor, smooth: Tensor | None, mean: Tensor | None, hadamard: int, regular: bool = False) -> Tensor:
    """Return (a - mean) · smooth · H / sqrt(size) for a (M, K), in fp32; mean and smooth (K,) are fp32."""
    done = devices.scratch(a.shape, torch.float32, a.device)
    for start, part in row_chunks(a):
        _transform_rows(done[start : start + len(part)].copy_(part), smooth, mean, (hadamard, regular))
    return done


def _transform_rows(v: Tensor, smooth: Tensor | None, mean: Tensor | None, rotation: tuple[int, bool]) -> None:
    """Compute `transform` of fp32 rows (M, K), in place. rotation: size and kind of Hadamard's matrix."""
    for name, vector in (("mean", mean), ("smooth", smooth)):
        if vector is not None and (vector.shape != v.shape[1:] or vector.dtype != torch.float32):
            raise ValueError(f"{name} is {vector.dtype} {(*vector.shape,)}, expected float32 {(*v.shape[1:],)}")
    if mean is not None:
        v -= mean
    if smooth is not None:
        v *= smooth
    hadamard, regular = rotation
    if hadamard:
        v.copy_(_hadamard_rows(v, hadamard, regular))


def hadamard_transform(v: Tensor, size: int, regular: bool = False) -> Tensor:
    """Multiply each block of `size` columns with H / sqrt(size); 0 returns v.

    Sums of neighbours come first, then of pairs, fours, …: the order in which every device adds up. The regular matrix
    sums four at a time, a to d: (a + b) ± (c - d) and (c + d) ± (a - b).
    """
    if not size:
        return v
    rows, done = v.reshape(-1, v.shape[-1]), torch.empty(v.shape, device=v.device, dtype=torch.float32)
    for start, part in row_chunks(rows):
        done.view(rows.shape)[start : start + len(part)] = _hadamard_rows(part, size, regular)
    return done


def _hadamard_rows(v: Tensor, size: int, regular: bool) -> Tensor:
    columns = v.reshape(-1, size).t().contiguous()  # terms of a sum lie far apart, so that whole rows are added
    free, done = torch.empty_like(columns), 1
    step, butterfly = (4, _regular_butterfly) if regular else (2, _butterfly)
    while done < size:
        parts, both = (t.view(size // (step * done), step, done, -1) for t in (columns, free))
        butterfly(parts, both)
        columns, free, done = free, columns, step * done
    return columns.mul_(size**-0.5).t().reshape(v.shape)


def _butterfly(parts: Tensor, out: Tensor) -> None:
    """Compute out (…, 2, D, R) = (a + b, a - b) of parts (a, b)."""
    a, b = parts.unbind(1)
    torch.add(a, b, out=out[:, 0])
    torch.sub(a, b, out=out[:, 1])


def _regular_butterfly(parts: Tensor, out: Tensor) -> None:
    """Compute out (…, 4, D, R) of parts (a, b, c, d): their products with the rows of `transforms.REGULAR`."""
    a, b, c, d = parts.unbind(1)
    torch.add(a, b, out=out[:, 0])
    torch.add(c, d, out=out[:, 2])
    ab, cd = a - b, c - d
    torch.sub(out[:, 2], ab, out=out[:, 3])
    torch.add(out[:, 2], ab, out=out[:, 2])
    torch.sub(out[:, 0], cd, out=out[:, 1])
    torch.add(out[:, 0], cd, out=out[:, 0])


def quantize_activation(
    x: Tensor,
    format: Format,
    input_scale: Tensor | None = None,
    four_over_six: bool = False,
    steps: Callable[[Tensor], object] | None = None,
) -> QuantizedTensor:
    """Quantize x (M, K) to codes per token. input_scale: as at the top of this file; None takes each token's amax.

    four_over_six: nvfp4's choice between two scales for each block. steps: of `quantize_blocks`.
    """
    global_scale, row_scale = activation_scales(x, format, input_scale, four_over_six)
    return quantize_blocks(x, format, global_scale, "activation", row_scale, four_over_six, steps)


def activation_scales(
    x: Tensor, format: Format, input_scale: Tensor | None, four_over_six: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (global scale, scale of each row) to round x with; None where scales follow from blocks."""
    if not format.two_level:
        return None, input_scale
    if input_scale is None:
        input_scale = encode.global_scale_for(x.abs().amax(-1, keepdim=True), format, four_over_six)  # (M, 1)
    return input_scale, None


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast, which would make bf16 of the fp32 arithmetic in here."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_on else nullcontext()


def _rounds_by_row(scheme: Scheme, input_scale: Tensor | None) -> bool:
    """Tell whether rows of x can be transformed as they are rounded.

    A scale of the whole matrix needs all rows first, and a global scale without `input_scale` all of one.
    """
    row = scheme.activations
    return row is not None and row.block[0] != 0 and not (row.two_level and input_scale is None)


def _through(z: Tensor, scheme: Scheme, input_scale: Tensor | None, steps: Callable[[Tensor], object] | None) -> Tensor:
    """Return z (M, K) after rounding, in fp32."""
    if scheme.activations is None or z.shape[0] == 0:
        return z.float()
    global_scale, row_scale = activation_scales(z, scheme.activations, input_scale, scheme.four_over_six)
    return round_blocks(z, scheme.activations, global_scale, "activation", row_scale, scheme.four_over_six, steps)


def _int8_linear(
    x: Tensor,
    w: QuantizedTensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    steps: Callable[[Tensor], object] | None,
) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(0, w.shape[0], dtype=torch.float32)
    return scaled_int8_product(quantize_activation(x, FORMATS["int8"], input_scale, steps=steps), w, bias)


def scaled_int8_product(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Multiply x (M, K) with w (N, K), both int8 with a scale per row, and add bias (N,): (M, N) in fp32."""
    y = int8_product(x.codes, w.codes).float()
    y.mul_(x.scale.unsqueeze(1)).mul_(w.scale)
    return y if bias is None else y.add_(bias.float())


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply int8 (M, K) with (N, K) to int32 (M, N), exactly for every K below 2^17."""
    if _takes_int_mm(a.device.type) and (a.device.type == "cpu" or _fits_cuda_int_mm(a, b)):
        return torch._int_mm(a, b.t())
    return _product_of_columns(a, b)


def _product_of_columns(a: Tensor, b: Tensor) -> Tensor:
    """Compute `int8_product` by fp32 products of 1024 columns: sums below 2^24 are exact in fp32 too.

    On a CPU few rows of b are taken at a time, so that their fp32 form stays in its cache: integers add up to the same,
    however they are cut.
    """
    total = torch.empty(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    lefts = [left.float() for left in a.split(1024, dim=1)]
    for start, rows in row_chunks(b, 1024 * b.shape[1]):
        products = [F.linear(left, right.float()) for left, right in zip(lefts, rows.split(1024, dim=1), strict=True)]
        part = total[:, start : start + rows.shape[0]].copy_(products[0])
        for product in products[1:]:
            part += product.to(torch.int32)
    return total


def _takes_int_mm(device_type: str) -> bool:
    """Tell whether `torch._int_mm` multiplies codes: where it is exact, and on a CPU faster than fp32 products."""
    if not int_mm_is_exact(device_type):
        return False
    return device_type != "cpu" or int8_seconds()[0] <= int8_seconds()[1]


@functools.cache
def int_mm_is_exact(device_type: str) -> bool:
    """Tell whether `torch._int_mm` exists and adds up the largest codes: x86 without VNNI saturates int16."""
    if device_type == "cuda":
        return True
    largest = torch.full((32, 64), 127, dtype=torch.int8, device=device_type)
    try:
        return bool((torch._int_mm(largest, largest.t()) == 127 * 127 * 64).all())
    except RuntimeError:  # NotImplementedError is one: the device has no such op
        return False


@functools.cache
def int8_seconds() -> tuple[float, float]:
    """Return the seconds that a small product takes on this CPU by `torch._int_mm`, and by fp32 products.

    They are measured once for a process. Without an instruction for it `_int_mm` may be a plain loop, twenty times as
    slow as fp32. Both give the same integers: only time depends on the measurement, and every process may choose for
    itself.
    """
    m, n, k = _TIMED
    a, b = (torch.ones(rows, k, dtype=torch.int8, device="cpu") for rows in (m, n))
    ways = (lambda: torch._int_mm(a, b.t()), lambda: _product_of_columns(a, b))
    rounds = [[_seconds(way) for way in ways] for _ in range(1 + _ROUNDS)][1:]  # the first one prepares
    return min(each[0] for each in rounds), min(each[1] for each in rounds)


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _fits_cuda_int_mm(a: Tensor, b: Tensor) -> bool:
    return a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[0] % 8 == 0


def fp32(tensor: Tensor | None) -> Tensor | None:
    """Cast a tensor to fp32; None stays None."""
    return None if tensor is None else tensor.float()


def multiplies_codes(weights: Format, activations: Format | None) -> bool:
    """Tell whether the product is one of int8 codes, without decoding."""
    return weights is FORMATS["int8"] and activations is FORMATS["int8"]


def implementation(scheme: Scheme, device_type: str) -> tuple[str, str]:
    """Return the implementation of `quantized_linear` for a scheme and a type of device ("cpu", …), and why."""
    if not multiplies_codes(scheme.weights, scheme.activations):
        return TORCH, f"no kernel for {device_type}" + " without Triton" * (device_type == "cuda")
    if not int_mm_is_exact(device_type):
        cpu = device_type == "cpu"
        why = "this CPU's int8 dot product saturates" if cpu else f"no torch._int_mm for {device_type}"
        return COLUMNS, why
    if device_type == "cuda":
        return INT_MM, "exact; fp32 products below 17 tokens and where K or N is no multiple of 8"
    if device_type != "cpu":
        return INT_MM, f"exact integer product on this {device_type.upper()}"
    (m, n, k), (whole, columns) = _TIMED, (f"{1e3 * seconds:.2g} ms" for seconds in int8_seconds())
    faster = INT_MM if _takes_int_mm("cpu") else COLUMNS
    return faster, f"faster of two that are exact: ({m}, {k}) by ({n}, {k}) took {INT_MM} {whole}, {COLUMNS} {columns}"


TORCH, INT_MM, COLUMNS = "torch reference", "torch._int_mm", "fp32 products of 1024 columns"
_TIMED, _ROUNDS = (32, 64, 1024), 5  # M, N and K of the product that is timed, and how often
