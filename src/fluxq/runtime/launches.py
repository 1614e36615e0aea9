"""Launches that a model makes of fluxq's ops: of each kind of quantized layer, and of each kind of fused block.

Weights are random. A block of each kind is made, laid out for the chip and fused as `fluxq.prepare` and
`fluxq.optimize` would do, and computed once by the torch references, while its calls of ops are noted. The layers are
called by themselves too, as in a model that was not optimized. Layers of a group share mean, factors and input scale
in a checkpoint; here these follow from their number of inputs.
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
from fluxq.kernels.linear import QuantLinear, quant_layers
from fluxq.kernels.op import REFERENCES
from fluxq.recipes.computing import attention_by
from fluxq.recipes.family import Family, Maker
from fluxq.recipes.fusable import FusableBlock
from fluxq.recipes.workloads import WORKLOADS, ForwardPass, stream_of
from fluxq.runtime import fused
from fluxq.runtime.attention_choice import codes_on
from fluxq.runtime.fused_calls import BlockInputs
from fluxq.runtime.fused_forms import at, form_of
from fluxq.runtime.layout import lay_out
from fluxq.runtime.warmup import AttentionKind, LayerKind, Machine, kinds_of, random_layer

LINEAR = "quantized_linear"
TOKENS = (1, 512, 4096)  # of a layer that no family says the tokens of
VISION = 257  # tokens of the image that Wan's text encoder stands beside
INPUT_SEED = 7


@dataclass(frozen=True)
class Launch:
    """A call of an op. place: first block or layer that makes it."""

    op: str
    arguments: tuple[Any, ...]
    place: str


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
        kind = LayerKind.of(layer)
        if (kind, m) not in seen:
            seen.add((kind, m))
            yield partial(_of_layer, name, kind, m, machine)
    if family is None or tokens is None or lacks is None:
        return
    if not family.fusable:
        for attention in (kind for kind in kinds_of(model) if isinstance(kind, AttentionKind)):
            yield partial(_of_attention, attention, tokens, machine)
    for path, block, row in fused.fusable_blocks(model, family):
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


# --- layers by themselves


def _layers(
    model: nn.Module, family: Family | None, tokens: ForwardPass | None, counts: Sequence[int]
) -> Iterator[tuple[str, QuantLinear, int]]:
    """Yield (name, layer, tokens that it sees), of a layer whose tokens are not known for each of `counts`."""
    for name, layer in quant_layers(model):
        if family is None or tokens is None or family.name not in WORKLOADS:
            yield from ((name, layer, m) for m in counts)
            continue
        located = family.locate(name)
        stream = stream_of(name, located[0].role if located else "", family.name)
        yield name, layer, max(1, round(tokens.batch * tokens.tokens(stream)))


def _of_layer(name: str, kind: LayerKind, m: int, machine: Machine) -> list[Launch]:
    layer = random_layer(kind, machine.device, machine.dtype)
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
            layer = random_layer(LayerKind.of(module), machine.device, machine.dtype)
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
    first, attention = row.streams[0], at(block, row.attention)
    width, head = at(block, first.norm).normalized_shape[-1], attention.inner_dim // attention.heads
    text = tokens.text
    if first.cross:
        text = first.cross.text_tokens + (VISION if at(block, first.cross.image_kv) is not None else 0)
    counts = {"text": text, "image": tokens.image}
    if first.name == "image":
        counts = {"image": tokens.image, "text": text}
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


def _embedded(block: Any, stream: Any, width: int) -> int:
    """Return the channels of what a stream takes its shift, scale and gate from."""
    for path in stream.modulation:
        for module in at(block, path).modules():
            if isinstance(module, nn.Linear):
                return module.in_features
    return width * (6 if stream.up else 3)


class _Noted(TorchDispatchMode):
    """Computes fluxq's ops by their references, and notes the calls; not those that a reference makes."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "fluxq":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("fluxq::")
        self.launches.append(Launch(name, tuple(args), self.place))
        with _Noted(self.place):
            return REFERENCES[name](*args, **(kwargs or {}))


def kind_of(launch: Launch) -> tuple[Any, ...]:
    """Return what launches of one kind have in common: op, settings, shapes and dtypes."""
    return launch.op, *map(_shape, launch.arguments)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (*value.shape,), value.stride(), value.dtype
    return tuple(map(_shape, value)) if isinstance(value, (list, tuple)) else value


IN_FP32 = ("FP32LayerNorm",)  # classes of modules whose weights stay in fp32
