"""Runs Triton kernels on the CPU, with the arithmetic of the GPU's low-precision types.

Stock Triton's interpreter is wrong below 32 bits: f32 -> bf16 truncates, f32 -> fp8 rounds and overflows wrongly,
`tl.dot` and `+` on bf16 take the raw bits for integers, `tl.dot_scaled` reads every scale byte as E8M0. It also has to
be chosen by an environment variable before Triton is imported. Here a block of code chooses it:

    with interpreting():
        kernel[grid](x, y, BLOCK=128)  # tensors on the CPU (or on a GPU: copied there and back)

and nothing stays changed after the block, so the same process can also compile the same kernels. A kernel that asks for
its chip is told the block's, an H100: `interpreting("sm_80")` takes the other way. A test file of kernels holds:

    @pytest.fixture(autouse=True, scope="module")
    def on_the_interpreter():
        with interpreting():
            yield

It uses private names of Triton, and knows the versions in PROVEN. As tests/kernels/test_interpreter.py proves for every
value, it computes so:
- casts round once, to nearest even; casts to fp8 saturate at the largest finite value, NaN stays NaN (PTX
  `cvt.rn.satfinite`); NaN payloads are unspecified; of PTX in a kernel's text it knows what codes.py has;
- `tl.dot` and `tl.dot_scaled` decode both operands exactly and accumulate in fp32 (int32 for int8), in no order that a
  test may rely on; Hopper's shorter fp8 accumulator is not modelled, and fp32 operands are not cut to tf32;
- bf16 arithmetic is fp32 arithmetic, rounded.

Code that would compute otherwise on a GPU, or corrupt its memory, is an error here with the cure in its text: an access
outside every argument tensor, `/` in fp32 (an approximation there: `tl.div_rn`), sums in bf16, arithmetic on fp8, other
fp8 types. Not seen here: unless a launch says `enable_fp_fusion=False`, `a * b + c` becomes one fused multiply-add on a
GPU; `tl.exp` and its like are approximations there; the programs of a grid run one after the other here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.backends.compiler import GPUTarget
from triton.language import target_info
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

from fluxq.kernels.codes import (
    CODE_E2M1,
    CODE_E4M3,
    RECIPROCAL,
    ROUND_BF16,
    ROUND_E2M1,
    ROUND_FP16,
    WIDEN_BF16,
)
from fluxq.kernels.dispatch import PROVEN, minor


@contextmanager
def interpreting(chip: str = "sm_90") -> Iterator[None]:
    """Inside the block, `kernel[grid](...)` of every `@triton.jit` function runs on the CPU; blocks may nest.

    chip: that a kernel is told it runs on, of NVIDIA. Not for several threads: what the block changes in Triton, it
    changes for the process.

    Raises:
        RuntimeError: this Triton is none of PROVEN.
    """
    check_version(triton.__version__)
    with _Replacements() as replace:
        target = GPUTarget("cuda", int(chip.removeprefix("sm_")), 32)
        replace(target_info, "current_target", lambda: target)
        if isinstance(stock.interpreter_builder, _Builder):
            yield
            return
        # Every name is patched once, here: stock does so at each launch, and at each call of a function, not undone.
        replace.later(stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})).restore)
        replace(stock, "_patch_lang", lambda fn: SimpleNamespace(restore=lambda: None))
        # NumPy >= 2.4 refuses int(array of one element), which is what Triton 3.6 does here.
        replace(tl.core.tensor, "__index__", lambda self: int(self.handle.data.item()))
        replace(stock.interpreter_builder, "__class__", _Builder)
        if triton.__version__.startswith("3.6."):
            replace(stock.TritonSemantic, "dot_scaled", _dot_scaled_of_3_6)
        replace(stock.ReduceScanOpInterface, "check_tensor", _check_reduction)
        replace(stock.ReduceOps, "generic_reduce", _reduce)
        replace(JITFunction, "run", _launch)
        replace(JITFunction, "__call__", _call)
        replace(JITFunction, "__get__", _bind)
        yield


def check_version(version: str) -> None:
    """Raise RuntimeError unless the patch was proven on this version of Triton."""
    if minor(version) not in PROVEN:
        raise RuntimeError(
            f"the interpreter of Triton {version} was never compared with exact arithmetic, only those of "
            f"{', '.join(PROVEN[:-1])} and {PROVEN[-1]} were: install one of these, or add the version to PROVEN in "
            "kernels/dispatch.py once `pytest tests/kernels/test_interpreter.py` passes"
        )


class _Replacements:
    """Sets attributes, and on exit puts back what was there, last first."""

    def __enter__(self) -> _Replacements:
        self.undo: list[Callable[[], None]] = []
        return self

    def __call__(self, owner: Any, name: str, value: object) -> None:
        inherited = name not in vars(owner) and name != "__class__"
        self.later(partial(delattr, owner, name) if inherited else partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def later(self, call: Callable[[], None]) -> None:
        self.undo.append(call)

    def __exit__(self, *error: object) -> None:
        while self.undo:
            self.undo.pop()()


def _launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Run a kernel as `kernel[grid](...)` does; compile options such as num_warps are ignored."""
    if kernel.is_gluon():
        from fluxq.kernels import gluon_interpreter  # needs Gluon, which may be another in Tritons not in PROVEN

        return gluon_interpreter.launch(kernel, *args, grid=grid, **options)
    function = stock.InterpretedFunction(kernel.fn)
    function.add_pre_run_hook(_note_memory)
    function.run(*args, grid=grid, warmup=warmup, **options)


def _call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Run another `@triton.jit` function that a kernel calls."""
    return stock.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


def _bind(function: JITFunction, instance: object, owner: type | None = None) -> Any:
    """`x.sum(axis)` for x of tl.tensor: `sum` is a `@triton.jit` function stored in the class."""
    return function if instance is None else partial(function, instance)


def _note_memory(*args: Any, **kwargs: Any) -> None:
    """Remember which addresses the kernel about to run was given."""
    _Builder.memory = [_extent(t) for t in _tensors([*args, *kwargs.values()])]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, stock.TensorDescriptor):
            yield from _tensors([value.base])
        elif hasattr(value, "data_ptr"):
            yield stock._unwrap_tensor(value)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor and the one after its last."""
    elements = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (elements * tensor.element_size() if tensor.numel() else 0)


def _dot_scaled_of_3_6(self: Any, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any,
                       rhs_format: Any, *rest: Any) -> Any:  # fmt: skip
    """Triton 3.6 asks the formats for their `.value`, which its own interpreter does not give them."""
    formats = (f if isinstance(f, tl.constexpr) else tl.constexpr(f) for f in (lhs_format, rhs_format))
    return _stock_dot_scaled(self, lhs, lhs_scale, next(formats), rhs, rhs_scale, next(formats), *rest)


_stock_dot_scaled: Callable = stock.TritonSemantic.dot_scaled
_stock_reduce = stock.ReduceOps.generic_reduce
_stock_check_tensor = stock.ReduceScanOpInterface.check_tensor


def _reduce(self: Any, inputs: Any) -> Any:
    """Reduce a tensor by a kernel's own function as stock does, but whole slices at a time, not numbers."""
    if len(inputs) > 1 or self.axis is None:
        return _stock_reduce(self, inputs)
    slices = np.moveaxis(inputs[0].handle.data, self.axis, 0)
    total = functools.reduce(self.combine_fn.fn, (self.to_tensor(each, inputs[0].dtype) for each in slices))
    data = total.handle.data
    return self.to_tensor(np.expand_dims(data, self.axis) if self.keep_dims else data, inputs[0].dtype)


def _check_reduction(self: Any, inputs: Any) -> None:
    for tensor in inputs:
        if _is_packed(tensor.dtype):
            raise NotImplementedError(f"a reduction or scan of {tensor.dtype}: cast to tl.float32 first")
    _stock_check_tensor(self, inputs)


def _through_float32(name: str) -> Callable[..., TensorHandle]:
    """The stock builder's method `name`, which on bf16 computes with the decoded values."""

    def method(self: _Builder, *args: Any) -> TensorHandle:
        compute = partial(getattr(stock.InterpreterBuilder, name), self)
        dtype = args[0].dtype.scalar
        if not _is_packed(dtype):
            return compute(*args)
        if dtype != tl.bfloat16:
            raise NotImplementedError(f"arithmetic on {dtype}: cast to tl.float32 first")
        result = compute(*(self.cast_impl(a, tl.float32) if isinstance(a, TensorHandle) else a for a in args))
        return result if result.data.dtype == np.bool_ else self.cast_impl(result, tl.bfloat16)

    return method


class _Builder(stock.InterpreterBuilder):
    """Triton's interpreter executes a kernel by calling these methods on NumPy arrays."""

    memory: list[tuple[int, int]]

    binary_op = _through_float32("binary_op")  # type: ignore[assignment]
    unary_op = _through_float32("unary_op")  # type: ignore[assignment]
    create_clampf = _through_float32("create_clampf")  # type: ignore[assignment]

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        """`tl.maximum` that lets no NaN through, which Triton 3.6 lets."""
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        values = decode(src.data, source) if _is_packed(source) else src.data
        if _is_packed(target):
            return TensorHandle(encode(values.astype(np.float32), target), target)
        with np.errstate(over="ignore", invalid="ignore"):
            return TensorHandle(values.astype(stock._get_np_dtype(target)), target)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if rounding_mode == stock._ir.ROUNDING_MODE.RTZ:
            raise NotImplementedError("fp_downcast_rounding='rtz': only 'rtne' is implemented")
        return self.cast_impl(src, dst_type)

    def create_inline_asm(self, text: str, constraints: str, values: Any, types: Any, *how: Any) -> Any:
        """Compute what the PTX of codes.py does."""
        if text not in _PTX:
            raise NotImplementedError(f"inline assembly {text!r}: only {', '.join(map(repr, _PTX))} is known")
        result = _PTX[text](self, *values)
        return SimpleNamespace(get_result=lambda place: result)

    def create_fdiv(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        if lhs.dtype.scalar == tl.float32:
            raise NotImplementedError("`/` in fp32 is off by up to 2 ulp on a GPU: use tl.div_rn(x, y)")
        return self.binary_op(lhs, rhs, np.divide)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        dtype = z.dtype.scalar
        if dtype == tl.float64:
            return super().create_fma(x, y, z)
        a, b, c = (self.cast_impl(h, tl.float64).data for h in (x, y, z))
        return self.cast_impl(TensorHandle(_add_to_odd(a * b, c), tl.float64), dtype)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
        if d.dtype.scalar.is_int():
            product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
            return TensorHandle(product + d.data, d.dtype.scalar)
        x, y, total = (self.cast_impl(h, tl.float32).data for h in (a, b, d))
        return self.cast_impl(TensorHandle(np.matmul(x, y) + total, tl.float32), d.dtype.scalar)

    def create_dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *how) -> TensorHandle:
        _, lhs_k_pack, rhs_k_pack, acc = how
        x = _operand(lhs, lhs_scale, lhs_format, -1 if lhs_k_pack else -2)  # (M, K)
        # The right operand is (K, N), its scales are (N, K / block).
        transposed = TensorHandle(np.swapaxes(rhs.data, -1, -2), rhs.dtype)
        y = _operand(transposed, rhs_scale, rhs_format, -1 if rhs_k_pack else -2)  # (N, K)
        with np.errstate(over="ignore", invalid="ignore"):
            return TensorHandle(np.matmul(x, np.swapaxes(y, -1, -2)) + acc.data, tl.float32)

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: Any, *policy: Any, **of_descriptor: Any
    ) -> TensorHandle:
        self.check_access("load", ptrs, mask)
        return super().create_masked_load(ptrs, mask, other, *policy, **of_descriptor)

    def create_masked_store(
        self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *policy: Any, **of_descriptor: Any
    ) -> None:
        self.check_access("store", ptrs, mask)
        super().create_masked_store(ptrs, value, mask, *policy, **of_descriptor)

    def check_access(self, access: str, ptrs: TensorHandle, mask: TensorHandle) -> None:
        """Raise IndexError unless every address lies in one of the kernel's argument tensors."""
        addresses = ptrs.data.astype(np.int64)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        outside = np.broadcast_to(mask.data, addresses.shape).copy()
        for begin, end in self.memory:
            outside &= (addresses < begin) | (addresses + size > end)
        if outside.any():
            where = np.argwhere(outside)
            past = min((int(addresses[tuple(where[0])]) - end for _, end in self.memory), key=abs)
            raise IndexError(
                f"{access} outside every argument tensor: {len(where)} of {addresses.size} elements in program "
                f"{self.grid_idx}, first at {where[0].tolist()} of the block, {past} bytes after the end of the tensor "
                "nearest to it; mask it"
            )


def _operand(codes: TensorHandle, scale: TensorHandle | None, format: Any, packed_axis: int) -> np.ndarray:
    """An operand of tl.dot_scaled as float32 (rows, K), times its scales (rows, K / block)."""
    if format == stock._ir.ScaleDotElemTypeTY.E2M1:
        pairs = np.moveaxis(codes.data.view(np.uint8), packed_axis, -1)
        values = np.stack([E2M1[pairs & 15], E2M1[pairs >> 4]], axis=-1)  # the low nibble is the even element
        values = np.moveaxis(values.reshape(*pairs.shape[:-1], -1), -1, packed_axis)
    else:
        dtype = next(t for name, t in _DOT_SCALED.items() if format == getattr(stock._ir.ScaleDotElemTypeTY, name))
        raw = codes.data.view(stock._get_np_dtype(dtype))
        values = decode(raw, dtype) if _is_packed(dtype) else raw.astype(np.float32)
    if scale is None:
        return values
    packed = _is_packed(scale.dtype.scalar)
    factors = decode(scale.data, scale.dtype.scalar) if packed else decode_e8m0(scale.data.view(np.uint8))
    with np.errstate(over="ignore", invalid="ignore"):
        return values * np.repeat(factors, values.shape[-1] // factors.shape[-1], axis=-1)


def decode(codes: np.ndarray, dtype: Any) -> np.ndarray:
    """Values of bf16 (uint16) or fp8 (uint8) codes, exact, as float32 of the same shape."""
    bits = torch.from_numpy(np.array(codes, order="C"))
    return bits.view(_torch_dtype(dtype)).to(torch.float32).numpy()


def encode(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Codes of float32 values in bf16 (uint16) or fp8 (uint8): nearest, ties to even; fp8 saturates."""
    x = torch.from_numpy(np.array(values, order="C"))
    target = _torch_dtype(dtype)
    if target.itemsize == 1:
        largest = torch.finfo(target).max
        x = torch.where(x.isnan(), torch.nan, x.clamp(-largest, largest))
    return x.to(target).view(torch.uint8 if target.itemsize == 1 else torch.uint16).numpy()


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """2^(code - 127) of E8M0 codes (uint8), NaN for 255, as float32 of the same shape."""
    powers = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
    return np.where(codes == 255, np.float32(np.nan), powers)


def _add_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float64, where an inexact sum gets an odd last bit: rounding it again is then rounding once."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = a + b
        late = total - a
        error = (a - (total - late)) + (b - late)  # exact (Knuth's TwoSum)
    inexact = np.isfinite(total) & (error != 0)
    even = total.view(np.int64) % 2 == 0
    neighbour = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, neighbour, total)


def _is_packed(dtype: Any) -> bool:
    """Tell whether the interpreter holds values of this type as their bits, for want of a NumPy type."""
    scalar = dtype.scalar
    return scalar == tl.bfloat16 or (scalar.is_floating() and scalar.primitive_bitwidth == 8)


def _torch_dtype(dtype: Any) -> torch.dtype:
    for ours, theirs in _PACKED:
        if dtype.scalar == ours:
            return theirs
    raise NotImplementedError(f"{dtype} in the interpreter: only tl.float8e4nv, tl.float8e5 and tl.bfloat16 are exact")


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)  # by code


def _through(dtype: Any) -> Callable[..., TensorHandle]:
    return lambda builder, v: builder.cast_impl(builder.cast_impl(v, dtype), tl.float32)


def _e2m1(values: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 (int32) of float32 values in E2M1, as PTX's `cvt.rn.satfinite` has them: NaN is 7."""
    distance = np.abs(np.minimum(np.abs(values), 6)[..., None].astype(np.float64) - E2M1[:8])
    even = np.arange(8) % 2 == 0
    code = np.where(
        np.isnan(values), 7, np.argmin(distance - 1e-9 * even * (distance == distance.min(-1, keepdims=True)), -1)
    )
    return (code | np.where(np.signbit(values) & ~np.isnan(values), 8, 0)).astype(np.int32)


def _reciprocal(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.float32(1) / values


_PTX = {
    ROUND_BF16.value: _through(tl.bfloat16),
    ROUND_FP16.value: _through(tl.float16),
    WIDEN_BF16.value: lambda builder, v: builder.cast_impl(v, tl.float32),
    RECIPROCAL.value: lambda builder, v: TensorHandle(_reciprocal(v.data), tl.float32),
    CODE_E4M3.value: lambda builder, v: TensorHandle(encode(v.data, tl.float8e4nv).astype(np.uint8), tl.uint8),
    CODE_E2M1.value: lambda builder, low, high: TensorHandle(_e2m1(low.data) | _e2m1(high.data) << 4, tl.int32),
    ROUND_E2M1.value: lambda builder, v: TensorHandle(E2M1[_e2m1(v.data)], tl.float32),
}
_PACKED = ((tl.bfloat16, torch.bfloat16), (tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2))
_DOT_SCALED = {"E4M3": tl.float8e4nv, "E5M2": tl.float8e5, "BF16": tl.bfloat16, "FP16": tl.float16}
