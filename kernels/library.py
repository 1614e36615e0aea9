"""Products of torch's library for codes with scales: what each takes, and its call.

    torch._int_mm    int8, exactly; scales and bias follow in fp32
    F.scaled_mm      fp8 with a scale per row, fp8_tensor with one for all; on Hopper fp8 by fp8_1x128, each row of
                     the weight with its scale once for each 128 columns; on Blackwell mxfp8, and nvfp4 with one
                     global scale for all tokens, both with block scales in the 128x4 layout

fluxq.configure(accumulate="fast") lets F.scaled_mm keep sums of fp8 products in Hopper's matrix unit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base.settings import accumulation
from fluxq.kernels.ops import INT_MM, scaled_int8_product
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import rows_are_at
from fluxq.recipes.formats import FORMATS


class LibraryProduct(NamedTuple):
    """Product of codes of one format, or of weights and activations in two, "fp8-fp8_1x128".

    function: of torch, as a Choice names it.
    what: it is, in words.
    unit: that N and K are multiples of.
    chips: that have it; empty for all of NVIDIA's.
    scaling: name of its scales in F.ScalingType.
    comes_first: whether it is preferred to our kernel where neither was timed.
    """

    function: str
    what: str
    unit: int
    chips: tuple[str, ...] = ()
    scaling: str = ""
    comes_first: bool = False


def library_refusal(format: str, layout: str, chip: str, m: int, n: int, k: int, dtype: torch.dtype) -> str:
    """Return why the library does not multiply codes of a format on a chip; empty if it does.

    layout: of the weight, "swizzled" if its block scales are. m, n, k: tokens, outputs, inputs. dtype: of the result.
    """
    row = LIBRARY[format]
    if not chip.startswith("sm_") or (row.chips and chip not in row.chips):
        return f"the library has no {format} product for {chip}"
    if n % row.unit or k % row.unit:
        return f"N and K must be multiples of {row.unit}, they are {n} and {k}"
    if format == "int8":
        return "" if m > 16 else f"the library's integer product takes more than 16 tokens, not {m}"
    if dtype == torch.float32 or (format in ("fp8", IN_128S) and dtype != torch.bfloat16):
        return f"the library's product is not for {dtype} tokens"
    if format == "fp8" and chip != "sm_90" and _numbers(torch.__version__) < ROWS_ON_BLACKWELL:
        return f"torch {torch.__version__} launches the library's product on another stream there"
    if format == IN_128S and m % TOKENS_IN_128S:
        return f"the library's product with scales per 128 columns takes multiples of {TOKENS_IN_128S} tokens, not {m}"
    if format == IN_128S and torch.version.cuda and _numbers(torch.version.cuda) < CUDA_IN_128S:
        return (
            f"torch {torch.__version__} is built on CUDA {torch.version.cuda}, whose library has no {format} product: "
            f"install one built on {'.'.join(map(str, CUDA_IN_128S))} or later"
        )
    if FORMATS[format.partition("-")[0]].has_byte_scales and layout != "swizzled":
        return "the library takes block scales in the 128x4 layout: call fluxq.prepare"
    return ""


def library_takes(x: QuantizedTensor, w: QuantizedTensor) -> bool:
    """Tell whether the library's product knows the scales of these operands, and their place."""
    if not (rows_are_at(x.codes, 16) and rows_are_at(w.codes, 16)):
        return False
    axes = {"fp8_tensor": (0, 0), "fp8_1x128": (2, 1)}.get(x.format.name, (1, 1))
    return (x.scale.ndim, w.scale.ndim) == axes and (x.global_scale is None or x.global_scale.ndim == 0)


def library_product(x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x (M, K) times w (N, K), plus bias (N,): (M, N) of dtype."""
    name = x.format.name
    if name == "int8":
        return scaled_int8_product(x, w, bias).to(dtype)
    formats = name if x.format == w.format else f"{w.format.name}-{name}"
    recipe: Any = [getattr(F.ScalingType, LIBRARY[formats].scaling)]
    left, right, scales_of_x, scales_of_w = x.codes, w.codes, [x.scale], [w.scale]
    options: dict[str, Any] = {"bias": None if bias is None else bias.to(dtype), "output_dtype": dtype}
    if name == "fp8":
        scales_of_x, scales_of_w = [x.scale.unsqueeze(1)], [w.scale.unsqueeze(0)]
    elif name == "fp8_1x128":  # both (rows, K/128), rows adjacent: a row of w has its one scale for each block
        scales_of_x = [x.scale.t().clone(memory_format=torch.contiguous_format).t()]
        scales_of_w = [w.scale.repeat(x.scale.shape[1], 1).t()]
    elif name == "nvfp4" and x.global_scale is not None and w.global_scale is not None:
        left, right = left.view(torch.float4_e2m1fn_x2), right.view(torch.float4_e2m1fn_x2)
        scales_of_x, scales_of_w = [x.scale, x.global_scale], [w.scale, w.global_scale]
        recipe += [F.ScalingType.TensorWise]
    elif name == "mxfp8":
        scales_of_x, scales_of_w = ([scale.view(torch.float8_e8m0fnu)] for scale in (x.scale, w.scale))
    if x.format.has_byte_scales:
        swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE][: len(recipe)]
        options |= {"swizzle_a": swizzles, "swizzle_b": swizzles}
    elif not x.format.group_size:  # whose sums move to fp32 with each scale
        options["use_fast_accum"] = accumulation() == "fast"
    return F.scaled_mm(left, right.t(), scales_of_x, recipe, scales_of_w, recipe, **options)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


SCALED_MM, IN_128S = "F.scaled_mm", "fp8-fp8_1x128"
_BLACKWELL = ("sm_100", "sm_103")
LIBRARY = {
    "int8": LibraryProduct(INT_MM, "the library's exact integer product", 8),
    "fp8": LibraryProduct(
        *(SCALED_MM, "the library's product with a scale per row", 16),
        chips=("sm_90", *_BLACKWELL),
        scaling="RowWise",
        comes_first=True,
    ),
    "fp8_tensor": LibraryProduct(
        *(SCALED_MM, "the library's product with one scale", 16),
        chips=("sm_89", "sm_90", *_BLACKWELL, "sm_120"),
        scaling="TensorWise",
        comes_first=True,
    ),
    IN_128S: LibraryProduct(
        SCALED_MM, "the library's product with a scale per 128 columns", 16, ("sm_90",), "BlockWise1x128"
    ),
    "mxfp8": LibraryProduct(SCALED_MM, "the library's block-scaled product", 32, _BLACKWELL, "BlockWise1x32"),
    "nvfp4": LibraryProduct(SCALED_MM, "the library's block-scaled product", 32, _BLACKWELL, "BlockWise1x16"),
}
ROWS_ON_BLACKWELL = (2, 12)  # torch before it launched that product on another stream: pytorch/pytorch#177651
TOKENS_IN_128S = 4  # fp32 scales of so many are 16 bytes; an H200 refuses one token: CUBLAS_STATUS_NOT_SUPPORTED
CUDA_IN_128S = (12, 9)  # torch built on one before it raises NotImplementedError
