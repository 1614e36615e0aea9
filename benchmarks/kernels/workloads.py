"""Operations to measure, as a transformer of FLUX.1's size runs them, each with what its result must be.

A `Case` is an operation in a format by an implementation, `prepare` makes one set of random operands for it and returns
the call, its reference, and the work: FLOPs, and the fewest bytes that must move, every input read once and every
output written once. Everything is called as kernels/launch.py calls it, at the tile that kernels/tuned holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluxq.base import settings
from fluxq.kernels import dispatch, launch, ops
from fluxq.kernels.adaln_quantize import op as adaln
from fluxq.kernels.adaln_quantize.kernel import adaln_quantize
from fluxq.kernels.attention import op as attention
from fluxq.kernels.attention.kernel import attention_fp8, by_warps_apart
from fluxq.kernels.block_scaled_matmul.kernel import block_scaled_matmul
from fluxq.kernels.dequantize.kernel import dequantize
from fluxq.kernels.epilogue import Epilogue
from fluxq.kernels.library import IN_128S, library_product
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.products import ProductTensors
from fluxq.kernels.qk_norm_rope import op as rope
from fluxq.kernels.qk_norm_rope.kernel import qk_norm_rope
from fluxq.kernels.qk_norm_rope.kernel import tuned_name as qk_tile_name
from fluxq.kernels.quantize_activation import op as quantizer
from fluxq.kernels.quantize_activation.kernel import quantize_tuned
from fluxq.kernels.quantize_activation.op import Rounding, RoundingTensors
from fluxq.kernels.reencode import reencode, row_scales
from fluxq.kernels.scaled_matmul.kernel import scaled_matmul
from fluxq.kernels.tensor import QuantizedTensor, pack_named, swizzle_scales
from fluxq.kernels.tiles import NoTile, Tile, find_matmul_tile, find_tile, whole_row_tile
from fluxq.kernels.w4a8_matmul.kernel import w4a8_matmul
from fluxq.kernels.weight_only_matmul.kernel import weight_only_matmul
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, Format, Scheme

Shape = tuple[int, int, int]  # (M, N, K)
TOLERANCE = 1e-2  # |result - reference| / |reference|: bf16 rounds by .002, a wrong tile is many times this


@dataclass(frozen=True)
class Case:
    """op: "linear" takes 16-bit activations, with quantization and bias; "matmul" takes codes; the others are kernels.

    "gated" is a product's op with bias, gate and residual, as an optimized block calls it.

    scheme: of a Linear or product, as recipes spell it; of a gradient the op's formats; of other kernels the format,
    "16bit" for none. implementation:
    an op, a library's product, "F.linear", or the kernel; of a library's a way may follow: "F.scaled_mm exact". shared:
    Linears of one input, which is quantized once.
    """

    op: str
    scheme: str
    implementation: str
    shared: int = 1

    @property
    def name(self) -> str:
        return f"{self.op} {self.scheme} {self.implementation}" + f" x{self.shared}" * (self.shared > 1)


@dataclass(frozen=True)
class Work:
    """One set of operands. arithmetic: what multiplies them, a key of timing.peaks, None where nothing much does."""

    call: Callable[[], Any]
    expected: Callable[[], Tensor]
    flops: float
    bytes: int
    arithmetic: str | None


def prepare(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    """Random operands of a case. NoTile: kernels/tuned holds no tile for it."""
    return BUILDERS[case.op](case, shape, device, chip)


def error(work: Work) -> float:
    """|result - reference| / |reference| of one call; NaN if either is not finite."""
    actual, expected = as_matrix(work.call()).float(), work.expected().float()
    if actual.shape != expected.shape or not (actual.isfinite().all() and expected.isfinite().all()):
        return float("nan")
    return ((actual - expected).norm() / expected.norm()).item()


def as_matrix(result: Any) -> Tensor:
    """The numbers that the result of a call stands for."""
    if isinstance(result, QuantizedTensor):
        return result.dequantize()
    if isinstance(result, (tuple, list)):
        parts = [as_matrix(part) for part in result if part is not None]
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten().float() for part in parts])
    return result


def why_not(case: Case, chip: str) -> str:
    """Return why a case is not offered on a chip; empty if it is, and for what libraries and torch compute."""
    if case.op in ("linear", "matmul", "gated") and case.implementation.endswith("_matmul"):
        scheme = Scheme.parse(case.scheme)
        weights, activations = scheme.weights.name, scheme.activations and scheme.activations.name
        formats = weights if activations in (weights, None) else f"{weights}-{activations}"
        return dispatch.refusal(case.implementation, formats, chip)
    if case.op == "gradient":
        weights, _, codes = case.scheme.partition("-")
        refused = dispatch.refusal(case.implementation, weights, chip)
        return refused or (dispatch.refusal("scaled_matmul", codes, chip) if codes else "")
    if case.implementation == "attention_fp8":
        return dispatch.refusal("attention_fp8", "128", chip)
    if case.implementation == dispatch.WARPS_APART:
        return dispatch.warps_refusal("fp8", 128, chip, torch.bfloat16)
    return ""


def is_library(case: Case) -> bool:
    return case.implementation.startswith(("F.", "torch."))


def _linear(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    m, n, k = shape
    x, bias = _normal(m, k, device=device), _normal(n, device=device)
    layers = [_layer(case.scheme, n, k, device, chip) for _ in range(case.shared)]
    activations = None if case.scheme == "16bit" else Scheme.parse(case.scheme).activations

    def call() -> Any:
        if case.implementation == "F.linear":
            return [F.linear(x, w, bias) for w, _ in layers]
        if case.shared > 1 and activations:
            q, _ = quantize_tuned(x, RoundingTensors(), Rounding(activations.name), chip)
            return [MATMULS[case.implementation](q, w, row_scale, bias, chip)() for w, row_scale in layers]
        choice = dispatch.Choice(case.implementation, activations and activations.name, "")
        w, row_scale = layers[0]
        operands = ops.LinearTensors(w.codes, w.scale, w.global_scale, bias=bias, row_scale=row_scale)
        swizzled = bool(activations and activations.has_byte_scales) and w.scale.ndim == 1
        steps = RoundingTensors(), Rounding(activations.name if activations else "", swizzled=swizzled)
        return launch.computed(choice, x, w, operands, None, steps, chip)

    def expected() -> Tensor:
        seen = _quantized(x, activations.name).dequantize() if activations else x.float()
        return as_matrix([F.linear(seen, _multiplied(*layer, activations), bias.float()) for layer in layers])

    return _products(case, call, expected, shape, [x, bias, *(w for w, _ in layers)])


def _matmul(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    m, n, k = shape
    activations = Scheme.parse(case.scheme).activations
    x, bias = _normal(m, k, device=device), _normal(n, device=device)
    w, row_scale = _layer(case.scheme, n, k, device, chip)
    if activations is None:
        call = MATMULS[case.implementation](x, w, None, bias, chip)
        return _products(
            case, call, lambda: F.linear(x.float(), _multiplied(w, None, None), bias.float()), shape, [x, w, bias]
        )
    codes = q = _quantized(x, activations.name)
    if w.format.group_size and w.scale.ndim == 1:
        q = replace(codes, scale=swizzle_scales(codes.scale))

    def expected() -> Tensor:
        if case.implementation == "torch._int_mm":  # the product alone: scales and bias are passes of their own there
            return F.linear(codes.codes.float(), w.codes.float())
        return F.linear(codes.dequantize(), _multiplied(w, row_scale, activations), bias.float())

    call = MATMULS[case.implementation](q, w, row_scale, bias, chip)
    return _products(case, call, expected, shape, [q, w, bias])


def _gated(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    m, n, k = shape
    weights, _, activations = case.scheme.partition("-")
    w, row_scale = _layer(case.scheme, n, k, device, chip)
    q = _quantized(_normal(m, k, device=device), activations)
    if w.is_swizzled:
        q = replace(q, scale=swizzle_scales(q.scale))
    bias, gate, residual = _normal(n, device=device), _normal(1, n, device=device), _normal(m, n, device=device)
    scales = w.scale, q.scale, w.global_scale, q.global_scale, row_scale
    tensors = ProductTensors(w.codes, *scales, bias, gate=gate, residual=residual)
    formats = weights if weights == activations else case.scheme
    given = q.codes, *pack_named(tensors, formats), False, torch.bfloat16

    def call() -> Tensor:
        return launch.launcher(case.implementation)(*given, chip=chip)

    read = [q, w, bias, gate, residual]
    return _products(case, call, lambda: REFERENCES[case.implementation](*given), shape, read)


def _scaled(q: QuantizedTensor, w: QuantizedTensor, row_scale: Any, bias: Tensor, chip: str) -> Callable[[], Tensor]:
    name = q.format.name if q.format == w.format else f"{w.format.name}-{q.format.name}"
    tile = find_matmul_tile("scaled_matmul", name, chip, q.shape[0], w.codes, plain=True)
    return lambda: scaled_matmul(q, w, epilogue=Epilogue(bias=bias), tile=tile)


def _block_scaled(q, w, row_scale, bias, chip) -> Callable[[], Tensor]:
    tile = find_matmul_tile("block_scaled_matmul", q.format.name, chip, q.shape[0], w.codes)
    return lambda: block_scaled_matmul(q, w, epilogue=Epilogue(bias=bias), tile=tile)


def _w4a8(q, w, row_scale, bias, chip) -> Callable[[], Tensor]:
    name = f"{w.format.name}-{q.format.name}"
    tile = find_matmul_tile("w4a8_matmul", name, chip, q.shape[0], w.codes)
    return lambda: w4a8_matmul(q, w, row_scale, epilogue=Epilogue(bias=bias), tile=tile)


def _weight_only(x, w, row_scale, bias, chip) -> Callable[[], Tensor]:
    tile = find_tile("weight_only_matmul", w.format.name, chip, x.shape[0])
    return lambda: weight_only_matmul(x, w, epilogue=Epilogue(bias=bias), tile=tile)


def _library(q, w, row_scale, bias, chip) -> Callable[[], Tensor]:
    return lambda: library_product(q, w, bias, torch.bfloat16)


def _library_exact(q, w, row_scale, bias, chip) -> Callable[[], Tensor]:
    def call() -> Tensor:
        before = settings.accumulation()
        settings.configure(accumulate="exact")
        try:
            return library_product(q, w, bias, torch.bfloat16)
        finally:
            settings.configure(accumulate=before)

    return call


def _library_int8(q, w, row_scale, bias, chip) -> Callable[[], Tensor]:
    return lambda: torch._int_mm(q.codes, w.codes.t())


MATMULS: dict[str, Callable[..., Callable[[], Tensor]]] = {
    "scaled_matmul": _scaled,
    "block_scaled_matmul": _block_scaled,
    "w4a8_matmul": _w4a8,
    "weight_only_matmul": _weight_only,
    "F.scaled_mm": _library,
    "F.scaled_mm exact": _library_exact,
    "torch._int_mm": _library_int8,
}


def _layer(scheme: str, n: int, k: int, device: torch.device, chip: str) -> tuple[Any, Tensor | None]:
    """A weight (N, K) as `lay_out` leaves it, and the scale per row of 4-bit weights that become 8-bit."""
    plain = _normal(n, k, device=device) * k**-0.5
    if scheme == "16bit":
        return plain, None
    parsed = Scheme.parse(scheme)
    w = QuantizedTensor.quantize(plain, parsed.weights)
    if parsed.activations is None or parsed.weights.element == parsed.activations.element:
        swizzled = parsed.activations is not None and parsed.weights.group_size and chip in dispatch.SWIZZLED
        return replace(w, scale=swizzle_scales(w.scale)) if swizzled else w, None
    return w, row_scales(w, parsed.activations.name)


def _multiplied(w: Any, row_scale: Tensor | None, activations: Format | None) -> Tensor:
    """The matrix that a product multiplies with, fp32."""
    if isinstance(w, Tensor):
        return w.float()
    if row_scale is not None and activations is not None:
        return reencode(w, activations.name, row_scale).dequantize()
    return w.unswizzled().dequantize()


def _products(
    case: Case, call: Callable[[], Any], expected: Callable[[], Tensor], shape: Shape, read: list[Any]
) -> Work:
    m, n, k = shape
    activations = None if case.scheme == "16bit" else Scheme.parse(case.scheme).activations
    written = 2 * case.shared * m * n
    return Work(
        call,
        expected,
        2.0 * case.shared * m * n * k,
        _size(*read) + written,
        activations.name if activations else "bf16",
    )


def _quantize(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    """Of x (M, K), or for act_quantize of gelu(x); "beside" attention, about a fifth of the K columns, 640 or more."""
    (m, _, k), (name, *word) = shape, case.scheme.split()
    row = FORMATS[name]
    attended = k // 640 * 128 if word == ["beside"] else 0
    x = _normal(m, k - attended, device=device)
    beside = _normal(m, attended, device=device) if attended else None
    act = "gelu_tanh" if case.op == "act_quantize" else ""
    input_scale = torch.tensor(4.0 / (6 * 448), device=device) if word == ["static"] else None

    def expected() -> Tensor:
        a = quantizer.ACTS[act](x) if act else x
        a = a if beside is None else torch.cat([beside, a], 1)
        return ops.quantize_activation(a, row, input_scale).dequantize()

    def call() -> QuantizedTensor:
        how = Rounding(row.name, act)
        return quantize_tuned(x, RoundingTensors(input_scale, beside=beside), how, chip)[0]

    return Work(call, expected, 0.0, _size(x, beside, call()), None)


def _adaln(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    """Gated residual, LayerNorm and modulation of x (M, K)."""
    (m, _, d), row = shape, FORMATS.get(case.scheme)
    x, branch = _normal(m, d, device=device), _normal(m, d, device=device)
    scale, shift, gate = (_normal(1, d, device=device) for _ in range(3))
    tile = whole_row_tile(d, chip, many=bool(row and row.group_size))
    operands, how = adaln.NormTensors(scale, shift, branch, gate), Rounding(row.name if row else "")

    def call() -> tuple[Any, Tensor | None]:
        return adaln_quantize(x, operands, how, eps=1e-6, tile=tile)

    def expected() -> Tensor:
        v, n = adaln.modulated_norm(x, operands, "layer", 1e-6)
        return as_matrix([v if row is None else ops.quantize_activation(v, row), n])

    return Work(call, expected, 0.0, _size(x, branch, scale, shift, gate, call()), None)


def _qk(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    """Heads of 128 of M tokens, as many as K holds, with v: of two streams, as FLUX has 512 of text and 4096."""
    m, _, width = shape
    d = min(128, width)
    counts = [count for count in (m // 9, m - m // 9) if count]
    (q, k, v), *others = ([_normal(1, count, width // d, d, device=device) for _ in "qkv"] for count in counts)
    weights = _normal(d, device=device), _normal(d, device=device)
    angle = torch.randn(m, d, device=device)
    tile = _plain_tile("qk_norm_rope", qk_tile_name(d), chip, m)
    second = (*others[0], *weights) if others else ()
    operands = rope.RopeTensors(angle.cos(), angle.sin(), *weights, v, *second)

    def call() -> tuple[Tensor, Tensor, Tensor | None]:
        return qk_norm_rope(q, k, operands, eps=1e-6, tile=tile)

    def expected() -> Tensor:
        return as_matrix(rope.qk_norm_rope(q, k, *pack_named(operands), 1e-6, True, False))

    return Work(call, expected, 0.0, _size(q, k, operands, call()), None)


def _attention(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    """Self-attention of M tokens, with heads of 128 as many as K holds."""
    m, _, width = shape
    d = min(128, width)
    q, k, v = (_normal(1, m, width // d, d, device=device) for _ in range(3))
    flops, size = 4.0 * m * m * width, _size(q, k, v, q)
    if case.scheme == "16bit":
        backend = SDPA.get(case.implementation.partition(" ")[2])

        def exact(dtype: torch.dtype) -> Tensor:
            by_head = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(next(by_head), next(by_head), next(by_head)).transpose(1, 2)

        def call() -> Tensor:
            with sdpa_kernel(backend) if backend else nullcontext():
                return exact(q.dtype)

        return Work(call, lambda: exact(torch.float32), flops, size, "bf16")
    tile = find_matmul_tile("attention", str(d), chip, m)
    quantize_tile = _plain_tile("attention", f"quantize {d}", chip, m)

    def in_fp8() -> Tensor:
        if case.implementation == dispatch.WARPS_APART:
            return by_warps_apart(q, k, v, None, chip=chip)
        return attention_fp8(q, k, v, None, tile=tile, quantize_tile=quantize_tile)

    def expected() -> Tensor:
        codes = attention.quantize_operands(q, k, v)
        return attention.attend(codes, m, m, attention.logit_scale(q, None), torch.float32)

    return Work(in_fp8, expected, flops, size, "fp8")


def _dequantize(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    _, n, k = shape
    w = QuantizedTensor.quantize(_normal(n, k, device=device), case.scheme)
    tile = _plain_tile("dequantize", case.scheme, chip, n)

    def call() -> Tensor:
        return dequantize(w, torch.bfloat16, tile=tile)

    return Work(call, lambda: w.dequantize(), 0.0, _size(w, call()), None)


def _gradient(case: Case, shape: Shape, device: torch.device, chip: str) -> Work:
    """With respect to the input of a Linear, of gradients (M, N) in 16 bit or as codes."""
    m, n, k = shape
    weights, _, codes = case.scheme.partition("-")
    grad, w = _normal(m, n, device=device), QuantizedTensor.quantize(_normal(n, k, device=device) * k**-0.5, weights)
    given = grad, w.codes, w.scale, w.global_scale, case.scheme, torch.bfloat16

    def call() -> Tensor:
        return launch.launcher(case.implementation)(*given, chip=chip)

    def expected() -> Tensor:
        if not codes:
            return grad.float() @ w.dequantize()
        return _quantized(grad.float() * w.scale, codes).dequantize() @ w.codes.float()

    return Work(call, expected, 2.0 * m * n * k, _size(grad, w) + 2 * m * k, codes or "bf16")


def _plain_tile(kernel: str, name: str, chip: str, m: int) -> Tile:
    tile = find_tile(kernel, name, chip, m)
    if not isinstance(tile, Tile):
        raise NoTile(f"kernels/tuned/{kernel}.json: the tile of {name} is one of a matmul")
    return tile


def _quantized(x: Tensor, format: str) -> QuantizedTensor:
    return ops.quantize_activation(x, FORMATS[format])


def _normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _size(*values: Any) -> int:
    """Bytes of all tensors in there."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.nbytes
        elif isinstance(value, QuantizedTensor):
            total += _size(*value.tensors().values())
        elif isinstance(value, (tuple, list)):
            total += _size(*value)
    return total


BUILDERS: dict[str, Callable[[Case, Shape, torch.device, str], Work]] = {
    "linear": _linear,
    "matmul": _matmul,
    "gated": _gated,
    "quantize_activation": _quantize,
    "act_quantize": _quantize,
    "adaln_quantize": _adaln,
    "qk_norm_rope": _qk,
    "attention": _attention,
    "dequantize": _dequantize,
    "gradient": _gradient,
}

BASELINE = Case("linear", "16bit", "F.linear")
PRODUCTS = (
    ("fp8-fp8", "scaled_matmul"),
    ("fp8-fp8", "F.scaled_mm"),
    ("int8-int8", "scaled_matmul"),
    ("int8-int8", "torch._int_mm"),
    ("nvfp4-fp8", "w4a8_matmul"),
    ("nvfp4-int8", "w4a8_matmul"),
    ("int4-int8", "w4a8_matmul"),
    ("nvfp4-nvfp4", "block_scaled_matmul"),
    ("mxfp8-mxfp8", "block_scaled_matmul"),
    ("mxfp4-mxfp4", "block_scaled_matmul"),
    ("fp8-fp8_1x128", "scaled_matmul"),
    ("fp8-fp8_1x128", "F.scaled_mm"),
)
LINEARS = (
    BASELINE,
    *(Case(op, *product) for product in PRODUCTS for op in ("matmul", "linear")),
    *(Case("linear", f"{name}-16bit", "weight_only_matmul") for name in ("nvfp4", "int4", "fp8", "int8")),
)
GATED = (*(Case("gated", *product) for product in reversed(PRODUCTS) if product[1].endswith("_matmul")),)
SHARED = (
    replace(BASELINE, shared=3),
    *(Case("linear", *product, shared=3) for product in PRODUCTS[:6] if product[1] != "torch._int_mm"),
)
QUANTIZERS = tuple(
    Case("quantize_activation", name, "quantize_activation")
    for name in ("int8", "fp8", "fp8_tensor", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4 static")
)
ACTS = tuple(
    Case("act_quantize", name, "quantize_activation") for name in ("int8", "fp8", "fp8_1x128", "mxfp8", "nvfp4")
)
BESIDE = tuple(replace(case, scheme=f"{case.scheme} beside") for case in ACTS)  # attention, in FLUX's single blocks
NORMS = (
    *(
        Case("adaln_quantize", name, "adaln_quantize")
        for name in ("16bit", "int8", "fp8", "fp8_1x128", "mxfp8", "nvfp4")
    ),
    Case("qk_norm_rope", "16bit", "qk_norm_rope"),
)
ATTENTIONS = (
    Case("attention", "16bit", "F.scaled_dot_product_attention"),
    Case("attention", "fp8", "attention_fp8"),
)
APART = Case("attention", "fp8", dispatch.WARPS_APART)
DECODERS = (*(Case("dequantize", name, "dequantize") for name in KERNEL_FORMATS),)
GRADIENTS = tuple(Case("gradient", name, "input_gradient") for name in ("fp8-fp8", "int8-int8", "fp8", "int4", "nvfp4"))
CASES = (
    *(*LINEARS, *GATED, *SHARED, *QUANTIZERS, *ACTS, *BESIDE, *NORMS, *ATTENTIONS, APART),
    *(*DECODERS, *GRADIENTS),
)
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}  # the faster first, where both are
RATED_PRODUCTS = (
    BASELINE,
    Case("matmul", "fp8-fp8", "F.scaled_mm"),
    Case("matmul", "fp8-fp8", "F.scaled_mm exact"),
    *(Case("matmul", *product) for product in PRODUCTS[:4] if product[1] != "F.scaled_mm"),
)
RATED_ATTENTIONS = (*(replace(ATTENTIONS[0], implementation=f"{ATTENTIONS[0].implementation} {n}") for n in SDPA),)

TOKENS = (4096, 4608, 16384, 512, 1024, 1, 16)  # what matters most first: time may run out
LAYERS = (  # (N, K) of FLUX.1
    (3072, 3072),  # attention out
    (9216, 3072),  # q, k and v
    (12288, 3072),  # feed-forward up
    (3072, 12288),  # and down
    (18432, 3072),  # modulation
    (21504, 3072),  # q, k, v and feed-forward up of a single block
    (3072, 15360),  # out of a single block
)


def sweep() -> Iterator[tuple[Shape, tuple[Case, ...]]]:
    """Shapes of FLUX.1, each with the cases to compare there."""
    for m in TOKENS:
        yield (m, 3072, 3072), (*LINEARS, *SHARED, *GRADIENTS)
        for n, k in LAYERS[1:]:
            yield (m, n, k), (*LINEARS, *(GATED if k > n else ()))
        for k in (3072, 12288):
            yield (m, k, k), (*QUANTIZERS, *ACTS)
        yield (m, 15360, 15360), BESIDE
        yield (m, 3072, 3072), (*NORMS, *ATTENTIONS, APART)
        if m == TOKENS[0]:
            yield (m, 18432, 3072), DECODERS


def first_sweep() -> Iterator[tuple[Shape, tuple[Case, ...]]]:
    """Every kernel, and library's product that the dispatcher may choose, at shapes of FLUX.1-dev; fp8 comes first."""
    products = (*(case for case in LINEARS if case != BASELINE),)
    sweep = (
        ((4608, 12288, 3072), (*products, *GRADIENTS)),
        ((4608, 3072, 15360), GATED),
        ((1, 18432, 3072), (*(case for case in products if takes_a_token(case)),)),
        ((4608, 3072, 3072), (*NORMS, ATTENTIONS[1], APART, *QUANTIZERS)),
        ((4608, 12288, 12288), ACTS),
        ((4608, 15360, 15360), BESIDE),
    )
    for is_first in (True, False):
        for shape, cases in sweep:
            yield shape, (*(case for case in cases if ("fp8" in case.scheme) == is_first),)
    yield (1, 18432, 3072), DECODERS


def takes_a_token(case: Case) -> bool:
    """Tell whether what computes a case takes a single token: two of the library's products do not."""
    return case.implementation != ops.INT_MM and not (case.scheme == IN_128S and is_library(case))


def rates_sweep() -> Iterator[tuple[Shape, tuple[Case, ...]]]:
    """Parts of a step of FLUX.1-dev: products, attention, passes over memory."""
    for shape in ((8192, 8192, 8192), *(shape for _, shape in FLUX_STEP if shape[0] > 512)):
        yield shape, RATED_PRODUCTS
    yield (4608, 3072, 3072), (*RATED_ATTENTIONS, ATTENTIONS[1], APART)
    for name in ("fp8", "int8"):
        yield (4608, 3072, 3072), (Case("adaln_quantize", name, "adaln_quantize"),)
        yield (4096, 3072, 3072), (Case("quantize_activation", name, "quantize_activation"),)
        yield (4096, 12288, 12288), (Case("act_quantize", name, "quantize_activation"),)
        yield (4608, 15360, 15360), (Case("act_quantize", f"{name} beside", "quantize_activation"),)
    yield (4608, 3072, 3072), (NORMS[-1],)


def gate_sweep() -> Iterator[tuple[Shape, tuple[Case, ...]]]:
    """All cases at a shape for which nothing is compiled that is not timed later."""
    yield (528, 3072, 3072), CASES


def ragged_sweep() -> Iterator[tuple[Shape, tuple[Case, ...]]]:
    """One case of each kind, where no tile is full."""
    products, others = _kinds()
    yield (130, 528, 576), products
    yield (130, 768, 768), (*others, BESIDE[0])


def tiny_sweep() -> Iterator[tuple[Shape, tuple[Case, ...]]]:
    """One case of each kind, where they take no time: of a dry run."""
    products, others = _kinds()
    yield (3, 64, 64), (BASELINE, *products, *SHARED[:2])
    yield (3, 64, 64), others
    yield (3, 640, 640), BESIDE[:1]


def _kinds() -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """One case of each operation and implementation: of products, of the others."""
    products = {(case.op, case.implementation): case for case in reversed(LINEARS) if case != BASELINE}
    others = {case.op: case for case in (*GATED, *QUANTIZERS, *ACTS, *NORMS, *ATTENTIONS, *DECODERS, *GRADIENTS)}
    return tuple(products.values()), tuple(others.values())


# A step of FLUX.1-dev at 1024 x 1024: how many Linears of which (M, N, K), q, k and v one by one.
FLUX_STEP = (
    *(
        (layers, (m, n, k))
        for m in (4096, 512)
        for layers, n, k in ((76, 3072, 3072), (19, 12288, 3072), (19, 3072, 12288))
    ),
    (114, (4608, 3072, 3072)),
    (38, (4608, 12288, 3072)),
    (38, (4608, 3072, 15360)),
)
