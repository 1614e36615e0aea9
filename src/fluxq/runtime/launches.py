"""Launches that a model makes of fluxq's ops: of each kind of quantized layer, and of each kind of fused block.

Weights are random. A block of each kind is made, laid out for the chip and fused as `fluxq.prepare` and
`fluxq.optimize` would do, and computed once by the torch references, while its calls of ops are noted. The layers are
called by themselves too, as in a model that was not optimized. What layers of a group share in a checkpoint, mean,
factors and input scale, follows here from their number of inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fluxq.kernels.all_ops import ATTENTION_FP8
from fluxq.kernels.linear import QuantLinear, branch_shapes
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.computing import attention_by
from fluxq.recipes.family import Family, Maker, matches
from fluxq.recipes.formats import Scheme
from fluxq.recipes.fusable import FusableBlock
from fluxq.recipes.workloads import WORKLOADS, ForwardPass, stream_of
from fluxq.runtime import fused
from fluxq.runtime.attention_choice import codes_on
from fluxq.runtime.fused_calls import BlockInputs
from fluxq.runtime.fused_forms import at, form_of
from fluxq.runtime.layout import lay_out
from fluxq.runtime.warmup import AttentionKind, kinds_of

LINEAR = "quantized_linear"
TOKENS = (1, 512, 4096)  # of a layer that no family says the tokens of
LARGEST = 5.0  # of an activation; more are rare among normal numbers
VISION = 257  # tokens of the image that Wan's text encoder stands beside
INPUT_SEED = 7


@dataclass(frozen=True)
class Launch:
    """A call of an op. place: first block or layer that makes it."""

    op: str
    arguments: tuple[Any, ...]
    place: str


@dataclass(frozen=True)
class Machine:
    """Device that computes, chip that layers are laid out for, `prefer` of fluxq.prepare, dtype of activations."""

    device: torch.device
    chip: str
    prefer: str
    dtype: torch.dtype


def launches_of(
    model: nn.Module,
    family: Family | None,
    tokens: ForwardPass | None,
    machine: Machine,
    lacks: Callable[[QuantLinear, Maker], str] | None,
    counts: Sequence[int] = TOKENS,
) -> Iterator[Callable[[], list[Launch]]]:
    """Yield functions that make the launches of a layer or a block of a model on the meta device; each kind once.

    family: of the model; without one, or without its tokens, layers alone are launched, at `counts` tokens each.
    lacks: of `fused.optimize`; None leaves the blocks out.
    """
    seen: set[Any] = set()
    for name, layer, m in _layers(model, family, tokens, counts):
        kind = layer.scheme, layer.out_features, layer.in_features, layer.bias is not None, m
        if kind not in seen:
            seen.add(kind)
            yield partial(_of_layer, name, layer, m, machine)
    if family is None or tokens is None or lacks is None:
        return
    if not family.fusable:
        for attention in (kind for kind in kinds_of(model) if isinstance(kind, AttentionKind)):
            yield partial(_of_attention, attention, tokens, machine)
    for path, block, row in _blocks(model, family):
        kind = (
            row.block,
            tuple(
                (name, type(part), getattr(part, "scheme", None), attention_by(getattr(part, "processor", None)))
                for name, part in block.named_modules()
            ),
        )
        if kind not in seen:
            seen.add(kind)
            yield partial(_of_block, path, block, row, family, tokens, machine, lacks)


def random_layer(like: QuantLinear, device: torch.device, dtype: torch.dtype) -> QuantLinear:
    """Make a layer of the scheme and shape of another, with weights as after training and scales that fit them."""
    n, k, scheme = like.out_features, like.in_features, like.scheme
    noise = torch.Generator(device).manual_seed(k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, device=device)

    makers: dict[str, Callable[[], Tensor]] = {  # first those of the input, the same for all layers of k inputs
        "pre_quant_mean": lambda: normal(k) / 4,
        "pre_quant_scale": lambda: (normal(k) / 4).exp(),
        "deflate_basis": lambda: torch.linalg.qr(normal(k, scheme.deflate)).Q.T,
        "deflate_out": lambda: normal(n, scheme.deflate) * k**-0.5,
        "svdquant_lora_a": lambda: normal(scheme.rank, k) * k**-0.5,
        "svdquant_lora_b": lambda: normal(n, scheme.rank) / 8,
    }
    wanted = branch_shapes(scheme, n, k)
    branches = {name: make().to(dtype).contiguous() for name, make in makers.items() if name in wanted}
    noise.manual_seed((n << 32) + k)  # weights of one stream would be those of a norm's, which x would be aligned with
    w = QuantizedTensor.quantize(normal(n, k) * k**-0.5, scheme.weights)
    bias = normal(n).to(dtype) if like.bias is not None else None
    layer = QuantLinear.from_quantized(w, bias, scheme, _input_scale(scheme, device), branches)
    layer.compute_dtype = dtype
    return layer


def _input_scale(scheme: Scheme, device: torch.device) -> Tensor | None:
    row = scheme.activations
    if not scheme.static_input or row is None:
        return None
    largest = row.element.max * ((256 if scheme.four_over_six else 448) if row.two_level else 1)
    return torch.tensor(LARGEST / largest, device=device)


# --- layers by themselves


def _layers(
    model: nn.Module, family: Family | None, tokens: ForwardPass | None, counts: Sequence[int]
) -> Iterator[tuple[str, QuantLinear, int]]:
    """Yield (name, layer, tokens that it sees), of a layer whose tokens are not known for each of `counts`."""
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantLinear):
            continue
        if family is None or tokens is None or family.name not in WORKLOADS:
            yield from ((name, layer, m) for m in counts)
            continue
        located = family.locate(name)
        stream = stream_of(name, located[0].role if located else "", family.name)
        yield name, layer, max(1, round(tokens.batch * tokens.tokens(stream)))


def _of_layer(name: str, like: QuantLinear, m: int, machine: Machine) -> list[Launch]:
    layer = random_layer(like, machine.device, machine.dtype)
    lay_out(layer, machine.chip, machine.prefer, None)
    return [Launch(LINEAR, (_normal(machine, m, layer.in_features), *layer.operands), name)]


def _of_attention(kind: AttentionKind, tokens: ForwardPass, machine: Machine) -> list[Launch]:
    x = _normal(machine, tokens.batch, tokens.image, kind.heads, kind.head_size)
    codes, _ = codes_on(kind.attention, kind.head_size, machine.chip)
    return [Launch(ATTENTION_FP8.name, (x, x.flip(1), x.flip(2), None, codes), "attention")]


def _normal(machine: Machine, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    noise = torch.Generator(machine.device).manual_seed(INPUT_SEED)
    return torch.randn(*shape, generator=noise, device=machine.device).to(dtype or machine.dtype)


# --- fused blocks


def _blocks(model: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module, FusableBlock]]:
    for path, block in model.named_modules():
        row = next((row for row in family.fusable if matches(row.block, path)), None)
        if row is not None:
            yield path, block, row


@torch.no_grad()
def _of_block(
    path: str,
    block: nn.Module,
    row: FusableBlock,
    family: Family,
    tokens: ForwardPass,
    machine: Machine,
    lacks: Callable[[QuantLinear, Maker], str],
) -> list[Launch]:
    made: Any = _real(block, machine)
    holder = nn.Module()
    parent, _, name = path.rpartition(".")
    holder.add_module(parent, nn.ModuleDict({name: made}))
    try:
        fused.optimize(holder, family, machine.device.type, lacks, side_by_side=True)
    except ValueError:
        return []  # the block runs its own forward, which calls its layers one by one
    noted = _Noted(path)
    with noted:
        form_of(row)(made, made.__dict__[fused.FUSION_ATTRIBUTE], _inputs(made, row, tokens, machine))
    return [*{kind_of(launch): launch for launch in reversed(noted.launches)}.values()][::-1]


def _real(block: nn.Module, machine: Machine) -> nn.Module:
    """Return a copy of a block on the device, with random weights, laid out for the chip."""
    made = copy.deepcopy(block).to(machine.dtype).requires_grad_(False)
    for name, module in [*made.named_modules()]:
        if isinstance(module, QuantLinear):
            layer = random_layer(module, machine.device, machine.dtype)
            lay_out(layer, machine.chip, machine.prefer, None)
            made.set_submodule(name, layer)
            continue
        dtype = torch.float32 if type(module).__name__ in IN_FP32 else machine.dtype
        for key, parameter in [*module.named_parameters(recurse=False)]:
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            value = _normal(machine, *parameter.shape, dtype=torch.float32) * scale + (parameter.ndim == 1)
            setattr(module, key, nn.Parameter(value.to(dtype), requires_grad=False))
    return made.eval()


def _inputs(block: Any, row: FusableBlock, tokens: ForwardPass, machine: Machine) -> BlockInputs:
    """Return the inputs of a block's call, of random numbers, as the functions of fused_calls.py make them."""
    width, head = _widths(block, row)
    first = row.streams[0]
    counts = {"text": tokens.text, "image": tokens.image}
    if first.cross:
        counts = {"image": tokens.image, "text": first.cross.text_tokens}
        if at(block, first.cross.image_kv) is not None:
            counts["text"] += VISION
    elif first.name == "image":
        counts = {"image": tokens.image, "text": tokens.text}
    streams = {name: _normal(machine, tokens.batch, count, width) for name, count in counts.items()}
    dtype = torch.float32 if row.fp32_modulation else machine.dtype
    modulation = {
        stream.name: _normal(machine, tokens.batch, _embedded(block, stream, width), dtype=dtype)
        for stream in row.streams
    }
    rope = None
    if row.rotary:
        angles = _normal(machine, sum(counts.values()), head, dtype=torch.float32)
        angles = angles if row.per_head else angles[None, : counts["image"], None]
        rope = angles.cos(), angles.sin()
    return BlockInputs(streams=streams, modulation=modulation, rope=rope)


def _widths(block: Any, row: FusableBlock) -> tuple[int, int]:
    """Return (D, head): channels of the tokens, and of a head."""
    attention = at(block, row.attention)
    return at(block, row.streams[0].norm).normalized_shape[-1], attention.inner_dim // attention.heads


def _embedded(block: Any, stream: Any, width: int) -> int:
    """Return the channels of what a stream takes its shift, scale and gate from."""
    for path in stream.modulation:
        for module in at(block, path).modules():
            if isinstance(module, nn.Linear):
                return module.in_features
    return width * (6 if stream.up else 3)


class _References(TorchDispatchMode):
    """Computes fluxq's ops by their references, and those that a reference calls too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "fluxq":
            return func(*args, **(kwargs or {}))
        self.note(name := func._schema.name.removeprefix("fluxq::"), args)
        with _References():
            return REFERENCES[name](*args, **(kwargs or {}))

    def note(self, name: str, arguments: Any) -> None:
        """Note a call: here nothing is kept."""


class _Noted(_References):
    """Notes calls of fluxq's ops, but for those of references."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.launches: list[Launch] = []

    def note(self, name: str, arguments: Any) -> None:
        """Keep a call of a block."""
        self.launches.append(Launch(name, tuple(arguments), self.place))


def kind_of(launch: Launch) -> tuple[Any, ...]:
    """Return what launches of one kind have in common: op, settings, shapes and dtypes."""
    return launch.op, *map(_shape, launch.arguments)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (*value.shape,), value.stride(), value.dtype
    return tuple(map(_shape, value)) if isinstance(value, (list, tuple)) else value


IN_FP32 = ("FP32LayerNorm",)  # classes of modules whose weights stay in fp32
