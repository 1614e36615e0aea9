"""QuantLinear: an nn.Linear whose weight is stored in a number format; QuantPointwise in place of a 1x1 convolution.

It is a subclass of nn.Linear because PEFT and diffusers look for that, and all its tensors are Parameters, never
buffers: accelerate's disk offload leaves buffers behind on the meta device.

A convolution of single pixels is a Linear over the channels, and "Linear" means both everywhere:

    y[b, n, h, w] = Σ_k W[n, k] · x[b, k, h, w] + bias[n]

SANA's feed-forward is made of those. Each pixel is a token, of K channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from fluxq.base.tensors import TensorFile
from fluxq.kernels import ops
from fluxq.kernels.encode import SCALE_DTYPES
from fluxq.kernels.quantize_activation.op import Rounding, RoundingTensors
from fluxq.kernels.tensor import QuantizedTensor, pack_named, stored_shapes
from fluxq.kernels.transforms import rotate
from fluxq.recipes.formats import Scheme

PIXELS = -3  # axis of the channels in (B, K, H, W), and in (K, H, W)


def is_pixelwise(module: nn.Module) -> bool:
    """Tell whether a module is a convolution with a 1x1 kernel over every pixel once and all channels.

    A subclass of nn.Conv2d is none: its forward may do more.
    """
    if type(module) is not nn.Conv2d or module.kernel_size != (1, 1):
        return False
    return module.stride == (1, 1) and module.groups == 1 and module.padding in ((0, 0), "valid", "same")


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a Linear, in the sense of this file."""
    return isinstance(module, nn.Linear) or is_pixelwise(module)


def linears_of(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return path -> module of every Linear, in the model's order."""
    return {name: module for name, module in model.named_modules() if is_linear(module)}  # pyright: ignore[reportReturnType]


def linear_size(module: nn.Module) -> tuple[int, int]:
    """Return (N, K): out features and in features, or channels; ValueError for a module that is no Linear."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Conv2d) and is_pixelwise(module):
        return module.out_channels, module.in_channels
    what = module if isinstance(module, nn.Module) else f"a {type(module).__name__}"
    raise ValueError(f"{what} is no Linear: expected nn.Linear, or nn.Conv2d of single pixels")


def channels_last(module: nn.Module, x: Tensor) -> Tensor:
    """Return an input or output of a Linear as (…, K): an image (B, K, H, W) becomes (B, H, W, K), a view."""
    return x.movedim(channel_axis(module), -1)


def channel_axis(module: nn.Module) -> int:
    """Return the axis of the channels in a Linear's inputs and outputs; a quantized one has it as an attribute."""
    return PIXELS if is_pixelwise(module) else getattr(module, "channel_axis", -1)


@dataclass(frozen=True)
class StoredLayer:
    """Place of a layer's stored tensors, to read them again.

    folder: with safetensors files.
    layer: its name in them.
    """

    folder: Path
    layer: str

    def read(self, name: str) -> Tensor:
        """Return the stored tensor `layer.name`; ValueError naming one that is missing."""
        if (file := self._file_of(name)) is not None:
            return file.get_tensor(f"{self.layer}.{name}")
        raise ValueError(
            f"{self.layer}.{name} is not in the safetensors files of {self.folder}, from where this model was loaded. "
            "It was prepared for one GPU, and to save it its stored form is read from there: put the files back, or "
            "load the checkpoint and save it without fluxq.prepare"
        )

    @property
    def rank(self) -> int:
        """Rank of the stored low-rank branch."""
        file = self._file_of(LOW_RANK[0])
        return 0 if file is None else file.stored[f"{self.layer}.{LOW_RANK[0]}"].shape[0]

    def _file_of(self, name: str) -> TensorFile | None:
        files = map(TensorFile, sorted(self.folder.glob("*.safetensors")))
        return next((file for file in files if f"{self.layer}.{name}" in file.stored), None)


@dataclass(frozen=True)
class Layout:
    """Change of a layer for one GPU by runtime/layout.py, and the layer's scheme as stored.

    kind: block scales were reordered ("swizzled"), scales per row or the decoded weight were added ("row scale",
        "decoded"), or the weight was replaced ("re-encoded").
    how: the same in words.
    added_error: of the 8-bit weight, relative to the stored one, ||w' - w|| / ||w||, both as z multiplies them.
    origin, digest: place of the stored tensors and fingerprint of the codes, for a re-encoded layer.
    chip, prefer: arguments of `fluxq.prepare`; without a GPU, chip is the type of device.
    """

    scheme: Scheme
    kind: Literal["swizzled", "row scale", "decoded", "re-encoded"]
    how: str
    added_error: float = 0.0
    origin: StoredLayer | None = None
    digest: str = ""
    chip: str = ""
    prefer: str = ""


class QuantLinear(nn.Linear):
    """A Linear (K in, N out) under a Scheme; forward takes and returns 16-bit or fp32 activations.

    Parameters, none of which needs a gradient:

        weight, weight_scale                                codes, scales of the format
        weight_scale_2, input_scale                         fp32 scalars, where the scheme has them
        bias (N,)                                           always there in a layer that centers
        pre_quant_mean, pre_quant_scale (K,)                of the steps before x is rounded
        deflate_basis (d, K), deflate_out (N, d)            of deflation
        svdquant_lora_a (R, K), svdquant_lora_b (N, R)      the low-rank branch, which adds B A to W

    All from `bias` on are in the compute dtype; ops.py computes with them. `scheme` is the present one, `prepared` the
    change for one GPU. `instead` computes for the layer, from it and its input, in the steps that runtime/steps.py
    keeps.
    """

    prepared: Layout | None = None
    instead: Callable[[QuantLinear, Tensor], Tensor] | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: Scheme, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a full-size float weight
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.compute_dtype = dtype  # PEFT gives adapters this dtype, not that of the codes
        self.weights = out_features * (in_features + bias)  # of the plain Linear
        scheme.weights.check_shape(out_features, in_features, "QuantLinear")
        _check_transforms(scheme, in_features)
        stored = dict(stored_shapes(scheme.weights, out_features, in_features))
        if scheme.static_input:
            stored["input_scale"] = ((), torch.float32)
        self.scale_names = tuple(name for name in SCALE_NAMES if name in stored)
        for name, (shape, stored_dtype) in stored.items():
            self.register_parameter(name, _frozen(torch.empty(shape, dtype=stored_dtype)))
        for name, shape in branch_shapes(scheme, out_features, in_features).items():
            self.register_parameter(name, _frozen(torch.empty(shape, dtype=dtype)))
        has_bias = bias or scheme.center  # centering moves W mean into it
        self.register_parameter("bias", _frozen(torch.empty(out_features, dtype=dtype)) if has_bias else None)

    @property
    def rounding_tensors(self) -> RoundingTensors:
        """Calibrated scale and vectors of its input, for the steps of `rounding`."""
        input_scale = self.stored("input_scale") if self.scheme.static_input else None
        smooth, mean = self._parameters.get("pre_quant_scale"), self._parameters.get("pre_quant_mean")
        return RoundingTensors(input_scale, ops.fp32(smooth), ops.fp32(mean))

    @property
    def scheme(self) -> Scheme:
        """The present scheme. Values that ops derive from it are computed once, when it is set."""
        return self._scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        self._scheme, self._scheme_text, self._roundings = scheme, str(scheme), _roundings(scheme)
        self._weight_only_text = str(scheme.weight_only)

    @classmethod
    def from_quantized(
        cls,
        weight: QuantizedTensor,
        bias: Tensor | None,
        scheme: Scheme,
        input_scale: Tensor | None = None,
        branches: Mapping[str, Tensor] | None = None,
    ) -> QuantLinear:
        """Make a layer around a quantized weight; it computes in the dtype of its bias, or of `branches` without one.

        input_scale: needed exactly when the scheme is static.
        branches: parameter name -> tensor, for the transforms and the rank of a scheme; cast to the dtype of the bias.
        """
        if weight.format != scheme.weights:
            raise ValueError(f"scheme {scheme} needs a weight in {scheme.weights.name}, got {weight.format.name}")
        n, k = weight.shape
        extras = {"bias": bias, "input_scale": input_scale, **(branches or {})}
        tensors = {name: tensor for name, tensor in extras.items() if tensor is not None}
        dtype = next((t.dtype for name, t in tensors.items() if name != "input_scale"), torch.bfloat16)
        shapes = branch_shapes(scheme, n, k) | ({"input_scale": ()} if scheme.static_input else {})
        if bias is not None or scheme.center:
            shapes["bias"] = (n,)
        wrong = sorted(shapes.keys() ^ tensors.keys())
        if wrong:
            raise ValueError(f"scheme {scheme} {'needs' if wrong[0] in shapes else 'takes no'} {wrong[0]}")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"scheme {scheme}: {name} is {(*tensor.shape,)}, expected {shapes[name]}")
        with torch.device("meta"):
            layer = cls(k, n, bias is not None, scheme, dtype)
        for name, tensor in (weight.tensors() | tensors).items():
            layer.register_parameter(name, _frozen(tensor.to(dtype) if name in BRANCHES else tensor))
        return layer

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme) -> QuantLinear:
        """Make a layer of the weight's shape (N, K) around tensors under the names that checkpoints use."""
        rest = dict(tensors)
        weight, scale, global_scale = rest.pop("weight"), rest.pop("weight_scale"), rest.pop("weight_scale_2", None)
        q = QuantizedTensor(weight, scale, global_scale, shape, scheme.weights)
        return cls.from_quantized(q, rest.pop("bias", None), scheme, rest.pop("input_scale", None), rest)

    def stored(self, name: str) -> Tensor | None:
        """Return a stored tensor in its own dtype, None if the scheme has none of that name.

        Tensors that a loader must not cast, and codes of text encoders, are kept as integers of the same bits.
        """
        tensor = self._parameters.get(name)  # a module's attributes take long to look up, and most are not there
        if tensor is None or name not in self.stored_names:
            return tensor
        dtype = stored_dtype(self.scheme, name)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    @property
    def stored_scheme(self) -> Scheme:
        """Scheme under which a checkpoint stores this layer, fused adapters included."""
        if self.prepared is None:
            return self.scheme
        merged = self.prepared.kind == "re-encoded"  # its low-rank branch went into the new codes
        return self.prepared.scheme if merged else replace(self.prepared.scheme, rank=self.scheme.rank)

    @property
    def quantized_weight(self) -> QuantizedTensor:
        """The weight (N, K) as a QuantizedTensor that shares this layer's tensors."""
        shape = (self.out_features, self.in_features)
        codes, scale = self.weight.data, self.get_parameter("weight_scale").data
        codes = codes.view(stored_dtype(self.scheme, "weight"))
        scale = scale.view(stored_dtype(self.scheme, "weight_scale"))
        return QuantizedTensor(codes, scale, self.stored("weight_scale_2"), shape, self.scheme.weights).unswizzled()

    @property
    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """The low-rank branch (A (R, K), B (N, R)), None if there is none."""
        if not self.scheme.rank:
            return None
        a, b = (self.get_parameter(name) for name in LOW_RANK)
        return a.detach(), b.detach()

    @property
    def branches(self) -> dict[str, Tensor]:
        """16-bit tensors beside the weight, by name: vectors and matrices of its transforms, the low-rank pair."""
        names = branch_shapes(self.scheme, self.out_features, self.in_features)
        return {name: self.get_parameter(name).data for name in names}

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of this weight in a checkpoint, over the number of weights."""
        bits = self.stored_scheme.stored_bits(self.out_features, self.in_features)
        return bits / (self.out_features * self.in_features)

    def append_low_rank(self, a: Tensor, b: Tensor) -> None:
        """Add b a to the layer's product, exactly: a (r, K) and b (N, r) become the branch's last r ranks."""
        self.require_present()
        r, k = a.shape
        if k != self.in_features or tuple(b.shape) != (self.out_features, r):
            raise ValueError(
                f"low-rank pair {(*a.shape,)}, {(*b.shape,)} does not fit a layer of {self.in_features} inputs and "
                f"{self.out_features} outputs: expected (r, K) and (N, r)"
            )
        old_a, old_b = self.low_rank or (a[:0], b[:, :0])
        with torch.no_grad():
            self._set_low_rank(torch.cat([old_a, a.to(old_a)]), torch.cat([old_b, b.to(old_b)], dim=1))

    def drop_low_rank(self, r: int) -> None:
        """Remove the last r ranks of the branch; the ranks before them keep their bits."""
        if not 0 <= r <= self.scheme.rank:
            raise ValueError(f"cannot drop {r} ranks: the low-rank branch has {self.scheme.rank}")
        self.require_present()
        if r and self.low_rank is not None:
            a, b = self.low_rank
            self._set_low_rank(a[:-r].clone(), b[:, :-r].clone())

    def require_present(self) -> None:
        """Raise ValueError for a layer whose weight is elsewhere, so that a change of its branch would be lost."""
        if self.weight.is_meta:
            raise ValueError(
                "this layer is offloaded, and a changed one would not come back: fuse and unfuse before offloading"
            )

    def _set_low_rank(self, a: Tensor, b: Tensor) -> None:
        self.scheme = replace(self.scheme, rank=a.shape[0])
        for name, tensor in (("svdquant_lora_a", a), ("svdquant_lora_b", b)):
            if self.scheme.rank:
                self.register_parameter(name, _frozen(tensor.to(self.compute_dtype)))
            else:
                delattr(self, name)

    def dequantized(self, dtype: torch.dtype) -> nn.Linear | nn.Conv2d:
        """Return a plain Linear that computes the same without rounding x; its weight has transforms and branch.

        Weight and bias are rounded to `dtype`.
        """
        weight, bias = self.collapsed()
        plain = self.plain(bias is not None, dtype)
        plain.weight = _frozen(weight.reshape(plain.weight.shape).to(dtype))
        if bias is not None:
            plain.bias = _frozen(bias.data.to(dtype))
        return plain

    def plain(self, bias: bool, dtype: torch.dtype) -> nn.Linear | nn.Conv2d:
        """Return a module of the kind that this layer stands for, on the meta device."""
        return nn.Linear(self.in_features, self.out_features, bias, dtype=dtype, device="meta")

    def collapsed(self) -> tuple[Tensor, Tensor | None]:
        """Return (W (N, K) in fp32, bias) of y = x W^T + b, the layer's function without the rounding of x.

        The bias is the layer's own, or where it centers x a new one in fp32.
        """
        weight, bias = self.merged()
        mean, smooth = getattr(self, "pre_quant_mean", None), getattr(self, "pre_quant_scale", None)
        if smooth is not None:
            weight = weight * smooth.data.float()
        if mean is not None and bias is not None:
            bias = bias.data.float() - weight @ mean.data.float()
        return weight, bias

    def merged(self) -> tuple[Tensor, Tensor | None]:
        """Return (V (N, K) in fp32, bias) of y = z V^T + b with z = (x - mean) · smooth, without the rounding of z.

        V includes rotation, deflated directions and low-rank branch. That branch reads x itself, z / smooth + mean:
        where the layer centers too, the bias is a new one in fp32, otherwise its own.
        """
        mean, smooth, basis, out = (getattr(self, name, None) for name in TRANSFORMS)
        weight = rotate(
            self.quantized_weight.dequantize(), self.scheme.hadamard, self.scheme.regular
        )  # H is its own transpose
        if basis is not None and out is not None:
            weight = weight + (out.data.float() - weight @ basis.data.float().T) @ basis.data.float()
        bias = self.bias
        if self.low_rank is not None:
            a, b = self.low_rank
            branch = b.float() @ a.float()
            weight = weight + (branch if smooth is None else branch / smooth.data.float())
            if mean is not None and bias is not None:
                bias = bias.data.float() + branch @ mean.data.float()
        return weight, bias

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the parameters that must be kept exactly as stored, whatever dtype a model is cast to."""
        return ("weight", *self.scale_names)

    @property
    def operands(self) -> tuple[list[Tensor], str]:
        """Arguments of `fluxq::quantized_linear` beside x."""
        return pack_named(self.tensors, self._scheme_text)

    @property
    def rounding(self) -> Rounding:
        """Steps from its input to codes, as the ops that quantize take them."""
        scale = self._parameters["weight_scale"]
        swizzled = bool(self._scheme.weights.group_size) and scale is not None and scale.ndim == 1
        return self._roundings[int(swizzled)]  # torch.compile of 2.11 takes no bool for an index

    @property
    def tensors(self) -> ops.LinearTensors:
        """Stored tensors of the layer, under the names of its op."""
        tensors: Any = [self.stored(name) for name in OPERANDS]
        named = ops.LinearTensors(*tensors)
        return named if self.scheme.static_input else named._replace(input_scale=None)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Compute (…, N) of x (…, K), whatever input `forward` takes."""
        if self.instead is not None:
            return self.instead(self, x)
        return ops.quantized_linear(x, *self.operands)

    def without_rounding(self, x: Tensor) -> Tensor:
        """Compute (…, N) of x (…, K), whose 16 bit stay: the bits of a weight-only layer of the same codes."""
        tensors = self.tensors._replace(input_scale=None, row_scale=None)
        return ops.quantized_linear(x, *pack_named(tensors, self._weight_only_text))

    def forward(self, input: Tensor) -> Tensor:
        return self.of_tokens(input)

    def _apply(self, fn, recurse: bool = True):
        stored = self.require_kept(fn)
        return super()._apply(lambda t: t.to(stored[id(t)]) if id(t) in stored else fn(t), recurse)

    def require_kept(self, fn: Callable[[Tensor], Tensor]) -> dict[int, torch.device]:
        """Raise ValueError for an `fn` of `_apply` that would turn codes and scales into other numbers.

        Moves between devices pass, and so does a cast to the dtype that the layer computes in: libraries ask for it
        along with a move. Returns id of a tensor -> device, for the tensors that such a cast must only move.
        """
        # Codes and scales may all be integers, which casts pass over: 16-bit numbers, which change, tell a cast.
        targets = {fn(torch.empty(0, dtype=dtype)).dtype for dtype in (torch.float16, torch.bfloat16)}
        if len(targets) == 1 and self.compute_dtype not in targets:
            self._refuse_cast(targets.pop(), "weight")
        stored: dict[int, torch.device] = {}  # id of a tensor that must only be moved -> its device
        for name in self.stored_names:
            tensor = getattr(self, name)
            probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if probe.dtype == self.compute_dtype != tensor.dtype:
                stored[id(tensor)] = probe.device
            elif probe.dtype != tensor.dtype:
                self._refuse_cast(probe.dtype, name)
        return stored

    def _refuse_cast(self, dtype: torch.dtype, name: str) -> NoReturn:
        raise ValueError(
            f"a layer quantized as {self.scheme} cannot be cast to {dtype}: its {name} is stored as it must be read. "
            "Load the checkpoint with another dtype, and leave out layerwise casting"
        )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, scheme={self.scheme}"


class QuantPointwise(QuantLinear):
    """A 1x1 convolution (K channels in, N out) under a Scheme; forward takes (B, K, H, W), or (K, H, W).

        y (B, N, H, W) = QuantLinear of the pixels of x (B, K, H, W)

    An image with its channels last in memory, as in SANA's feed-forward, is a matrix of pixels already: nothing is
    copied, and the output has them last too. Attributes are those that libraries read of a convolution (PEFT does, to
    make adapters of the same kind).
    """

    channel_axis = PIXELS
    kernel_size = stride = dilation = (1, 1)
    padding, groups = (0, 0), 1

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim not in (3, 4):
            raise ValueError(f"input {(*input.shape,)} is no image: expected (B, {self.in_features}, H, W)")
        return self.of_tokens(input.movedim(PIXELS, -1)).movedim(-1, PIXELS)

    def plain(self, bias: bool, dtype: torch.dtype) -> nn.Linear | nn.Conv2d:
        return nn.Conv2d(self.in_features, self.out_features, 1, bias=bias, dtype=dtype, device="meta")


def placeholder(old: nn.Module, scheme: Scheme, dtype: torch.dtype) -> QuantLinear:
    """Return a layer on the meta device for the place of a Linear (N, K), in the sense of this file.

    dtype: of its computation. ValueError for other modules, and for shapes that the scheme does not hold.
    """
    n, k = linear_size(old)
    with torch.device("meta"):
        return _class_for(old)(k, n, old.bias is not None, scheme, dtype)


def in_place_of(old: nn.Module, layer: QuantLinear) -> QuantLinear:
    """Return `layer` itself, from now on called with tokens or images, as `old` is."""
    layer.__class__ = _class_for(old)
    return layer


def _class_for(old: nn.Module) -> type[QuantLinear]:
    return QuantPointwise if is_pixelwise(old) or isinstance(old, QuantPointwise) else QuantLinear


@functools.lru_cache(1024)
def _roundings(scheme: Scheme) -> tuple[Rounding, Rounding]:
    """Return the steps to codes whose block scales are (M, G), and to those with swizzled scales."""
    name = scheme.activations.name if scheme.activations else ""
    plain = Rounding(name, "", scheme.hadamard, scheme.four_over_six, regular=scheme.regular)
    return plain, replace(plain, swizzled=True)


def stored_dtype(scheme: Scheme, name: str) -> torch.dtype:
    """Return the dtype in which the codes (`weight`) or the scale called `name` are stored."""
    if name == "weight":
        return getattr(torch, scheme.weights.element.storage)
    return SCALE_DTYPES[scheme.weights.scale] if name == "weight_scale" else torch.float32


def branch_shapes(scheme: Scheme, n: int, k: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of an (n, k) layer's tensors in the compute dtype, but for the bias."""
    shapes: dict[str, tuple[int, ...]] = {}
    if scheme.center:
        shapes["pre_quant_mean"] = (k,)
    if scheme.smooth:
        shapes["pre_quant_scale"] = (k,)
    if scheme.deflate:
        shapes |= {"deflate_basis": (scheme.deflate, k), "deflate_out": (n, scheme.deflate)}
    if scheme.rank:
        shapes |= {"svdquant_lora_a": (scheme.rank, k), "svdquant_lora_b": (n, scheme.rank)}
    return shapes


def _check_transforms(scheme: Scheme, k: int) -> None:
    if scheme.hadamard and k % scheme.hadamard:
        raise ValueError(f"scheme {scheme}: K = {k} is no multiple of its Hadamard blocks of {scheme.hadamard} columns")
    if scheme.deflate > k:
        raise ValueError(f"scheme {scheme}: deflates {scheme.deflate} directions of an input that has {k}")


SCALE_NAMES = ("weight_scale", "weight_scale_2", "input_scale")
TRANSFORMS = ("pre_quant_mean", "pre_quant_scale", "deflate_basis", "deflate_out")  # in the order of the op
LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
BRANCHES = (*TRANSFORMS, *LOW_RANK)
# Parameters, whether a layer has them or not, in the order of `ops.LinearTensors`.
OPERANDS = ("weight", *SCALE_NAMES, "bias", *LOW_RANK, "weight_row_scale", *TRANSFORMS, "weight_decoded")


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def quant_layers(model: nn.Module) -> list[tuple[str, QuantLinear]]:
    """Return (name, layer) of every QuantLinear."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear)]
