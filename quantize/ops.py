"""Every torch.library op of fluxq with its torch reference; device code registers faster forms of them.

The reference of a quantized Linear, y = x W^T + b with x (…, K) and W (N, K):

    int8 weights and activations   y = (float(xq · wq^T) · x_scale) · w_scale + b   exact integer product
    every other scheme             y = F.linear(dequantize(x), dequantize(W), b)    fp32

then one cast to x's dtype. A low-rank branch (A, B) adds (x A^T) B^T, computed in x's dtype as a LoRA adapter beside
the layer would be, so that fusing an adapter changes nothing.

Activations are quantized per token row. `input_scale` () is nvfp4's calibrated global scale; (M, 1) gives every token
its own: nvfp4's global scale, or the scale of fp8 and int8. Without one they follow from each token's amax.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.quantize import encode
from fluxq.quantize.reencode import reencode
from fluxq.quantize.tensor import QuantizedTensor, quantize_blocks, unswizzle_scales
from fluxq.recipes.formats import FORMATS, Format, Scheme


@torch.library.custom_op("fluxq::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    scheme: str,
    row_scale: Tensor | None = None,
) -> Tensor:
    """x (…, K) of a float dtype times a quantized weight (N, K), stored as `scheme` says; returns (…, N).

    lora_a (R, K) and lora_b (N, R): the low-rank branch of a scheme that has one. row_scale (N,) fp32: the 4-bit weight
    is multiplied as the 8-bit codes that it has under this scale per row, which `reencode` gives.
    """
    with no_autocast(x):
        return quantized_linear_reference(
            x, weight, weight_scale, weight_scale_2, input_scale, bias, lora_a, lora_b, scheme, row_scale
        )


def quantized_linear_reference(
    x, weight, weight_scale, weight_scale_2, input_scale, bias, lora_a, lora_b, scheme, row_scale
) -> Tensor:
    """The torch form of the op, for every device."""
    parsed = Scheme.parse(scheme)
    if not x.is_floating_point() or x.element_size() < 2:
        raise ValueError(f"input is {x.dtype}, expected float16, bfloat16 or float32: something cast it to the codes'")
    rows = x.reshape(-1, x.shape[-1])  # (M, K)
    w = stored_weight(weight, weight_scale, weight_scale_2, parsed.weights)
    if rows.shape[1] != w.shape[1]:
        raise ValueError(f"input {(*x.shape,)} does not fit the weight (N, K) = {w.shape}: last axis must be K")
    if row_scale is not None and parsed.activations is not None:
        w = reencode(w, parsed.activations.name, row_scale)
    if _multiplies_codes(w.format, parsed.activations):
        y = _int8_linear(rows, w, input_scale, bias)
    else:
        y = F.linear(_through(rows, parsed.activations, input_scale), w.dequantize(), _fp32(bias))
    y = y.to(x.dtype)
    if lora_a is not None and lora_b is not None:
        y += F.linear(F.linear(rows, lora_a.to(x.dtype)), lora_b.to(x.dtype))
    return y.reshape(*x.shape[:-1], w.shape[0])


@quantized_linear.register_fake
def _(x, weight, weight_scale, weight_scale_2, input_scale, bias, lora_a, lora_b, scheme, row_scale=None):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save_for_backward(ctx, inputs, output) -> None:
    _x, weight, weight_scale, weight_scale_2, _input_scale, bias, lora_a, lora_b, ctx.scheme, _row_scale = inputs
    ctx.save_for_backward(weight, weight_scale, weight_scale_2, lora_a, lora_b)
    ctx.has_bias = bias is not None


def _backward(ctx, grad):
    """dL/dx = dL/dy · (W + B A), with the weight that the codes stand for; rounding of x is taken as the identity."""
    weight, weight_scale, weight_scale_2, lora_a, lora_b = ctx.saved_tensors
    w = stored_weight(weight, weight_scale, weight_scale_2, Scheme.parse(ctx.scheme).weights)
    grad_x = None
    if ctx.needs_input_grad[0]:
        with no_autocast(grad):
            grad_x = (grad.float() @ w.dequantize()).to(grad.dtype)
            if lora_a is not None:
                grad_x += (grad @ lora_b.to(grad.dtype)) @ lora_a.to(grad.dtype)
    grad_bias = grad.reshape(-1, w.shape[0]).sum(0) if ctx.has_bias and ctx.needs_input_grad[5] else None
    return grad_x, None, None, None, None, grad_bias, None, None, None, None


quantized_linear.register_autograd(_backward, setup_context=_save_for_backward)


def quantize_activation(x: Tensor, format: Format, input_scale: Tensor | None = None) -> QuantizedTensor:
    """x (M, K) to codes per token; input_scale as at the top of this file, None takes each token's amax."""
    if not format.two_level:
        return quantize_blocks(x, format, None, "activation", row_scale=input_scale)
    if input_scale is None:
        input_scale = encode.global_scale_for(x.abs().amax(-1, keepdim=True), format)  # (M, 1)
    return quantize_blocks(x, format, input_scale, "activation")


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast would make bf16 of the fp32 arithmetic in here."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def stored_weight(weight: Tensor, scale: Tensor, global_scale: Tensor | None, format: Format) -> QuantizedTensor:
    """The op's weight tensors as one matrix (N, K); 4-bit codes are two to a byte, block scales may be swizzled."""
    n, columns = weight.shape
    k = columns * 8 // format.element.bits
    if format.group_size and scale.ndim == 1:
        scale = unswizzle_scales(scale, n, k // format.group_size)
    return QuantizedTensor(weight, scale, global_scale, (n, k), format)


def _through(x: Tensor, format: Format | None, input_scale: Tensor | None) -> Tensor:
    """x (M, K) as the multiplication sees it, in fp32."""
    if format is None or x.shape[0] == 0:
        return x.float()
    return quantize_activation(x, format, input_scale).dequantize()


def _int8_linear(x: Tensor, w: QuantizedTensor, input_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(0, w.shape[0], dtype=torch.float32)
    q = quantize_activation(x, FORMATS["int8"], input_scale)
    y = int8_product(q.codes, w.codes).float()
    y.mul_(q.scale.unsqueeze(1)).mul_(w.scale)
    return y if bias is None else y.add_(bias.float())


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 (M, K) by (N, K) to int32 (M, N), exact for every K below 2^17.

    Where `torch._int_mm` cannot serve, fp32 products of 1024 columns: sums below 2^24 are exact too.
    """
    if int_mm_is_exact(a.device.type) and (a.device.type == "cpu" or _fits_cuda_int_mm(a, b)):
        return torch._int_mm(a, b.t())
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for left, right in zip(a.split(1024, dim=1), b.split(1024, dim=1), strict=True):
        total += F.linear(left.float(), right.float()).to(torch.int32)
    return total


@functools.cache
def int_mm_is_exact(device_type: str) -> bool:
    """Whether `torch._int_mm` is there and adds up the largest codes: x86 without VNNI saturates int16."""
    if device_type == "cuda":
        return True
    largest = torch.full((32, 64), 127, dtype=torch.int8, device=device_type)
    try:
        return bool((torch._int_mm(largest, largest.t()) == 127 * 127 * 64).all())
    except RuntimeError:  # NotImplementedError is one: the device has no such op
        return False


def _fits_cuda_int_mm(a: Tensor, b: Tensor) -> bool:
    return a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[0] % 8 == 0


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _multiplies_codes(weights: Format, activations: Format | None) -> bool:
    return weights is FORMATS["int8"] and activations is FORMATS["int8"]


def implementation(scheme: Scheme, device_type: str) -> tuple[str, str]:
    """What of this file computes `quantized_linear` under a scheme on a type of device ("cpu", "cuda", …), and why."""
    if not _multiplies_codes(scheme.weights, scheme.activations):
        return "torch reference", f"no kernel for {device_type}" + " without Triton" * (device_type == "cuda")
    if not int_mm_is_exact(device_type):
        cpu = device_type == "cpu"
        why = "this CPU's int8 dot product saturates" if cpu else f"no torch._int_mm for {device_type}"
        return "fp32 products of 1024 columns", why
    if device_type == "cuda":
        return "torch._int_mm", "exact; fp32 products below 17 tokens and where K or N is no multiple of 8"
    return "torch._int_mm", f"exact integer product on this {device_type.upper()}"
