"""Weights + plan + what calibration saw -> quantized tensors.

    fitted     block by block: what flows into the block's Linears is gathered, each input group is quantized as well
               as its plan allows (group.py), and what the quantized block returns is what the next one is fitted to
    rounded    layers that no data is needed for: to nearest, with their group's amax where `input_scale` or a shared
               global scale asks for it (nearest.py)

Either way a block is one file as soon as it is done (finished.py), and what is done is not done again.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from fluxq.base.console import blocks_progress, logger
from fluxq.calibrate.blocks import LiveBlock, Replay
from fluxq.calibrate.inputs import GroupInputs, InputsBuilder
from fluxq.calibrate.statistics import Statistics
from fluxq.quantize import encode
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.finished import GroupOutcome, Outcome, block_files, finish, is_finished, layer_tensors
from fluxq.quantize.group import FittedGroup, GroupLayer, fit_group, price_on
from fluxq.quantize.linear import QuantLinear
from fluxq.quantize.nearest import Rounded, pieces_of, require_finite, require_shape, round_pieces, sqnr
from fluxq.recipes.devices import find_device
from fluxq.recipes.families import FAMILIES
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan, Plan, with_method
from fluxq.recipes.recipe import Component, Gate, load_recipe


@dataclass(frozen=True)
class Fitting:
    """What fitting needs beside plan and weights.

    replay: the component's 16-bit model and its calls. gate: of the recipe. parallel: later blocks are fitted to what
    16-bit blocks return. statistics: their amax counts for input scales too.
    """

    replay: Replay
    gate: Gate
    parallel: bool = False
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Block:
    """A part of a component that is finished as a whole: a block of the family, or what else has one first name.

    layers: its Linears that leave 16 bit. names, nbytes: of all its source tensors. file: for it once it is done.
    """

    path: str
    layers: tuple[LayerPlan, ...]
    names: tuple[str, ...]
    nbytes: int
    file: Path


def quantize_component(
    plan: Plan,
    source: SourceWeights,
    statistics: Statistics | None,
    dtype: torch.dtype,
    folder: Path,
    fitting: Fitting | None = None,
    workers: int | None = None,
) -> list[Path]:
    """Quantize every block of a component into a file of `folder`, those excepted that are there; returns all files.

    They hold every tensor of the quantized component: those of its quantized layers, the rest cast to `dtype`, but for
    what the model's class keeps in fp32, which stays as it is in the source. `Outcome.read` says what became of the
    layers. fitting: needed where the plan has layers to be fitted. workers: that round to nearest, see `round_pieces`.
    Raises ValueError naming the layer for NaN or infinity in a weight and for statistics that do not cover it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = fitting.replay.blocks if fitting else ()
    blocks = blocks_of(plan, source, folder, first)
    fitted = {layer.name for block in blocks[: len(first)] for layer in block.layers if layer.is_observed}
    rest = replace(plan, layers=tuple(layer for layer in plan.layers if layer.name not in fitted))
    rounding = _Rounding(source, dtype, _input_scales(rest, statistics), workers)
    there = {block.path for block in blocks if is_finished(block.file)}
    known = [block.nbytes for block in blocks if block.path in there]
    sizes = [block.nbytes for block in blocks]
    with blocks_progress(f"Quantizing {plan.component}", len(sizes), sum(sizes), len(known), sum(known)) as advance:
        if fitting is not None and not there.issuperset(first):
            for block, groups in _fitted(plan, blocks[: len(first)], there, source, dtype, fitting):
                _finish_fitted(block, groups, source, rounding)
                advance(block.nbytes)
        todo = [block for block in blocks[len(first) :] if block.path not in there]
        with closing(rounding.blocks([(block.layers, block.names) for block in todo])) as done:
            for block, rounded in zip(todo, done, strict=True):
                finish(block.file, rounded.tensors, Outcome(weight_sqnr=rounded.weight_sqnr))
                advance(block.nbytes)
    return [block.file for block in blocks]


def blocks_of(plan: Plan, source: SourceWeights, folder: Path, first: Sequence[str] = ()) -> list[Block]:
    """The blocks of a component: those at the paths `first`, the family's others in the plan's order, then the rest."""
    located = (FAMILIES[plan.family].locate(layer.name) for layer in plan.layers)
    paths = dict.fromkeys([*first, *(found[1] for found in located if found)])
    names: dict[str, list[str]] = {path: [] for path in paths}
    layers: dict[str, list[LayerPlan]] = {}
    for name in source.names:
        names.setdefault(_block_with(name, paths), []).append(name)
    for layer in plan.quantized:
        layers.setdefault(_block_with(layer.name, paths), []).append(layer)
    paths = dict.fromkeys([*names, *layers])  # a layer that the source lacks is missed when it is its turn
    return [
        Block(
            path,
            tuple(layers.get(path, ())),
            tuple(names.get(path, ())),
            sum(source.stored(name).nbytes for name in names.get(path, ())),
            file,
        )
        for path, file in zip(paths, block_files(folder, len(paths)), strict=True)
    ]


def _block_with(name: str, paths: Collection[str]) -> str:
    """The innermost of the blocks at `paths` that a module or tensor lies in; its first name where it lies in none."""
    parts = name.split(".")
    above = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((path for path in above if path in paths), parts[0])


@dataclass(frozen=True)
class _Rounding:
    """What rounding to nearest needs beside a block. input_scales: by layer, of those that are not fitted."""

    source: SourceWeights
    dtype: torch.dtype
    input_scales: Mapping[str, Tensor]
    workers: int | None

    def blocks(self, parts: Sequence[tuple[Sequence[LayerPlan], Sequence[str]]]) -> Generator[Rounded, None, None]:
        """Quantized layers and source tensors of each block -> all of it rounded; the next ones are begun meanwhile."""
        pieces = [pieces_of(layers, names) for layers, names in parts]
        rounded = round_pieces(chain(*pieces), self.source, self.dtype, self.input_scales, self.workers)
        with closing(rounded):
            for part in pieces:
                done = [next(rounded) for _ in part]
                tensors = {name: tensor for piece in done for name, tensor in piece.tensors.items()}
                yield Rounded(tensors, {name: db for piece in done for name, db in piece.weight_sqnr.items()})


def _fitted(
    plan: Plan,
    blocks: Sequence[Block],
    there: Collection[str],
    source: SourceWeights,
    dtype: torch.dtype,
    fitting: Fitting,
) -> Iterator[tuple[Block, dict[str, FittedGroup]]]:
    """The fitted groups of each block that has no file yet; those that have one are put into the model from it.

    Where outputs of finished blocks are gone, they are made again.
    """
    replay, groups = fitting.replay, plan.statistics_groups()
    done = next(index for index, block in enumerate(blocks) if block.path not in there)
    known = min(done, replay.resumable)
    for block in blocks[:known]:
        _put_into(replay, _read_layers(block))
    replay.skip_to(known)
    for live in replay:
        block = blocks[live.index]
        if live.index < done:
            if fitting.parallel:
                live.advance()
            _put_into(replay, _read_layers(block))
        else:
            own = {name: members for name, members in groups.items() if name.startswith(f"{block.path}.")}
            fitted = _fit_block(live, own, source, dtype, fitting)
            _put_into(replay, {name: layer for group in fitted.values() for name, layer in group.layers.items()})
            yield block, fitted
        if not live.advanced:
            live.advance()


def _finish_fitted(block: Block, groups: Mapping[str, FittedGroup], source: SourceWeights, rounding: _Rounding) -> None:
    """Write a block whose groups are fitted; what else is in it is rounded."""
    layers = {name: layer for group in groups.values() for name, layer in group.layers.items()}
    tensors = {f"{name}.{part}": t.data for name, layer in layers.items() for part, t in layer.named_parameters()}
    others = [layer for layer in block.layers if layer.name not in layers]
    with closing(rounding.blocks([(others, [name for name in block.names if name not in tensors])])) as done:
        rounded = next(done)
    lost = {name: sqnr(source[f"{name}.weight"], layer.collapsed()[0]) for name, layer in layers.items()}
    outcome = Outcome(
        {name: layer.scheme for name, layer in layers.items()},
        {**lost, **rounded.weight_sqnr},
        {name: GroupOutcome.of(group) for name, group in groups.items()},
    )
    finish(block.file, {**tensors, **rounded.tensors}, outcome)


def _fit_block(
    block: LiveBlock,
    groups: Mapping[str, tuple[LayerPlan, ...]],
    source: SourceWeights,
    dtype: torch.dtype,
    fitting: Fitting,
) -> dict[str, FittedGroup]:
    inputs = block.observe(
        {name: members[0].name for name, members in groups.items()},
        segments={name: members[0].segments for name, members in groups.items()},
        without_gram=[name for name, members in groups.items() if all(layer.method.is_plain for layer in members)],
        advance=fitting.parallel,
    )
    return {name: _fit(members, inputs.pop(name), source, dtype, fitting, name) for name, members in groups.items()}


def _fit(
    members: Sequence[LayerPlan],
    inputs: GroupInputs,
    source: SourceWeights,
    dtype: torch.dtype,
    fitting: Fitting,
    name: str,
) -> FittedGroup:
    device, first = inputs.mean.device, members[0]
    if fitting.statistics is not None:
        seen = fitting.statistics.channel_amax(name).to(device)
        inputs = replace(inputs, amax=torch.maximum(inputs.amax, seen))
    layers = [
        GroupLayer(
            layer.name,
            _weight(source, layer).to(device),
            source[f"{layer.name}.bias"].to(device) if f"{layer.name}.bias" in source else None,
            layer.scheme,
            layer.shares_global_scale,
        )
        for layer in members
        if layer.scheme is not None
    ]
    shapes = [(layer.n, layer.k) for layer in members]
    price = price_on(find_device(fitting.gate.gpu), shapes, fitting.gate.tokens, first.made_by)
    fitted = fit_group(layers, inputs, first.method, price=price, rate=fitting.gate.db_per_percent, dtype=dtype)
    for stage in fitted.stages:
        logger.info("%s: %s %s: %s", name, stage.name, "kept" if stage.kept else "left out", stage.reason)
    return fitted


def _put_into(replay: Replay, layers: Mapping[str, QuantLinear]) -> None:
    for name, layer in layers.items():
        replay.model.set_submodule(name, layer.to(replay.device))


def _read_layers(block: Block) -> dict[str, QuantLinear]:
    """The fitted layers of a finished block."""
    schemes, shapes = Outcome.read([block.file]).schemes, {layer.name: (layer.n, layer.k) for layer in block.layers}
    held = layer_tensors(block.file, list(schemes))
    return {name: QuantLinear.from_tensors(held[name], shapes[name], scheme) for name, scheme in schemes.items()}


def require_finite_weights(source: SourceWeights) -> None:
    """ValueError naming the first tensor that holds NaN or infinity."""
    for name in source.names:
        require_finite(name, source[name])


def quantize_linear(linear: nn.Linear, x: Tensor, recipe: Component | str) -> QuantLinear:
    """Try a recipe on one layer: `linear` (N, K) quantized as a recipe's main format, fitted to x (…, K).

    recipe: a `Component`, or the name or path of a recipe, whose transformer component is taken. The last eighth of x's
    tokens decides what is kept. Returns a QuantLinear on the same device; compare its output with `linear(x)`.
    """
    profile, gate = "balanced", Gate()
    if isinstance(recipe, str):
        whole = load_recipe(recipe)[1]
        profile, gate = whole.profile, whole.gate
        recipe = whole.components.get("transformer") or next(iter(whole.components.values()))
    activations = recipe.activations.row if recipe.activations else None
    scheme = Scheme(recipe.weights.row, activations, static_input=bool(activations and activations.two_level))
    n, k = linear.weight.shape
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} channels, the layer takes {k}")
    if activations is not None:
        activations.check_shape(1, k, "x")
    planned = LayerPlan("linear", n, k, "", "linear", False, scheme, "tried on one layer", made_by="norm")
    method = with_method(planned, recipe, profile, None).method
    tokens = x.detach().reshape(-1, k)
    held = len(tokens) // 8
    builder = InputsBuilder("x", k, device=x.device, calls=(1, 1))
    builder.add(tokens[: len(tokens) - held])
    builder.add(tokens[len(tokens) - held :], held=True)
    bias = None if linear.bias is None else linear.bias.detach()
    group = fit_group(
        [GroupLayer("linear", linear.weight.detach(), bias, scheme)],
        builder.finish(),
        method,
        price=price_on(find_device(gate.gpu), [(n, k)], gate.tokens, "norm"),
        rate=gate.db_per_percent,
        dtype=linear.weight.dtype,
    )
    return group.layers["linear"]


def _weight(source: SourceWeights, layer: LayerPlan) -> Tensor:
    w = source[f"{layer.name}.weight"]
    require_shape(w, layer)
    return w


def _input_scales(plan: Plan, statistics: Statistics | None) -> dict[str, Tensor]:
    """Layer -> its calibrated `input_scale`, the same for all that read one input."""
    scales: dict[str, Tensor] = {}
    for group, members in plan.static_groups().items():
        if statistics is None:
            raise ValueError(
                f"{group}: its scheme has a static input scale, and there are no statistics to take it from"
            )
        scheme = members[0].scheme
        if scheme is not None and scheme.activations is not None:
            scale = encode.global_scale_for(statistics.amax(group), scheme.activations)
            scales |= dict.fromkeys((layer.name for layer in members), scale)
    return scales
