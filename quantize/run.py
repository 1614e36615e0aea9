"""Weights, plan and calibration -> quantized tensors.

    fitted     block by block: the inputs of the block's Linears are gathered, each input group is quantized as well as
               its plan allows (group.py), and the next block is fitted to the outputs of the quantized one
    rounded    layers that need no data: to nearest, with their group's amax where `input_scale` or a shared global
               scale needs it (nearest.py)

Either way a finished block is one file, and is not made again; an interrupted run goes on from those that are there:

    0000.safetensors    a block's tensors under their names in the checkpoint; decisions on it in the header

Such a file appears complete or not at all. The caller has to know whose blocks are in a folder.

Several processes share the folder. Each rounds whole blocks. Fitted blocks depend on each other: each process fits some
of a block's groups and reads the other groups from files, and all make the block's outputs, some calls each. Where
blocks are fitted to 16-bit ones, each process fits a block of its own. No sum is split, so the files are those of one
process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from fluxq.base.console import blocks_progress, first_line, logger, without_cure
from fluxq.base.ranks import ALONE, Ranks
from fluxq.base.tensors import TensorFile, save_sealed
from fluxq.calibrate.blocks import LiveBlock, Replay
from fluxq.calibrate.inputs import GroupInputs, InputsBuilder
from fluxq.calibrate.statistics import Statistics
from fluxq.kernels import encode
from fluxq.kernels.linear import QuantLinear, channels_last, in_place_of, linear_size
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.group import FittedGroup, GroupLayer, GroupToFit, OutputSqnr, Stage, fit_group, fit_groups, price_on
from fluxq.quantize.nearest import Rounded, require_finite, round_units, sqnr, units_of, weight_matrix
from fluxq.recipes.devices import find_device
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan, Plan, rotated_by, sharing_vectors, with_method
from fluxq.recipes.recipe import Component, Gate, load_recipe

_FEW_TOKENS = 256  # for quantize_linear, worth a warning
_HEADER = "fluxq_block"


@dataclass(frozen=True)
class Fitting:
    """Inputs of fitting beside plan and weights.

    replay: the component's 16-bit model and its calls.
    gate: of the recipe.
    parallel: later blocks are fitted to outputs of 16-bit blocks.
    statistics: their amax counts for input scales too.
    """

    replay: Replay
    gate: Gate
    parallel: bool = False
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Block:
    """A part of a component that is finished as a whole: a block of the family, or all else under one first name.

    layers: its Linears that leave 16 bit.
    names, nbytes: of all its source tensors.
    file: for the finished block.
    """

    path: str
    layers: tuple[LayerPlan, ...]
    names: tuple[str, ...]
    nbytes: int
    file: Path


@dataclass(frozen=True)
class GroupOutcome:
    """Outcome of a fitted input group. rounded, fitted: held-out SQNR, rounded to nearest and as kept."""

    layers: tuple[str, ...]
    stages: tuple[Stage, ...]
    rounded: OutputSqnr | None
    fitted: OutputSqnr | None


@dataclass
class Outcome:
    """Outcome of a block, or of a component.

    schemes: layer -> final scheme, of fitted layers.
    weight_sqnr: layer -> dB.
    groups: name -> outcome, of fitted groups.
    fingerprints: of the source tensors that only rounding read, for `ModelFolder.digest`.
    """

    schemes: dict[str, Scheme] = field(default_factory=dict)
    weight_sqnr: dict[str, float] = field(default_factory=dict)
    groups: dict[str, GroupOutcome] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, files: Iterable[Path]) -> Self:
        """Read the headers of finished blocks together; ValueError naming a file whose header is damaged."""
        whole = cls()
        for file in files:
            header = _header_of(TensorFile(file))
            whole.schemes |= {name: Scheme.parse(text) for name, text in header.schemes.items()}
            whole.weight_sqnr |= header.weight_sqnr
            whole.groups |= header.groups
            whole.fingerprints |= header.fingerprints
        return whole

    def to_json(self) -> str:
        """Return the text that `read` reads."""
        header: dict[str, Any] = {
            "schemes": {name: str(scheme) for name, scheme in self.schemes.items()},
            "weight_sqnr": self.weight_sqnr,
            "groups": {name: asdict(group) for name, group in self.groups.items()},
            "fingerprints": self.fingerprints,
        }
        return json.dumps(header)

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with final schemes, and the stages that were kept among its reasons."""
        groups = {name: group for group in self.groups.values() for name in group.layers}
        layers = []
        for layer in plan.layers:
            kept = [stage.name for stage in groups[layer.name].stages if stage.kept] if layer.name in groups else []
            reason = f"{layer.reason}; kept: {', '.join(kept)}" if kept else layer.reason
            layers.append(replace(layer, scheme=self.schemes.get(layer.name, layer.scheme), reason=reason))
        return replace(plan, layers=tuple(layers))


def quantize_component(
    plan: Plan,
    source: SourceWeights,
    statistics: Statistics | None,
    dtype: torch.dtype,
    folder: Path,
    fitting: Fitting | None = None,
    workers: int | None = None,
    ranks: Ranks = ALONE,
) -> list[Path]:
    """Quantize every block of a component into a file of `folder`, unless the file is there; return all files.

    The files hold every tensor of the quantized component: those of its quantized layers, and the rest cast to `dtype`,
    except what the model's class keeps in fp32. `Outcome.read` reads what was decided of the layers. Raises ValueError
    naming the layer for NaN or infinity in a weight and for statistics that do not cover it.

    fitting: needed where the plan has layers to be fitted.
    workers: threads that round to nearest, see `round_units`.
    ranks: processes that call this with the same arguments and share the folder; it returns when all files are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = fitting.replay.blocks if fitting else ()
    blocks = blocks_of(plan, source, folder, first)
    fitted = {layer.name for block in blocks[: len(first)] for layer in block.layers if layer.is_observed}
    rest = replace(plan, layers=tuple(layer for layer in plan.layers if layer.name not in fitted))
    rounding = _Rounding(source, dtype, _input_scales(rest, statistics), workers)
    finished = set(ranks.agree([block.path for block in blocks if ranks.leads and is_finished(block.file, source)]))
    kept = [block.nbytes for block in blocks if block.path in finished]
    sizes = [block.nbytes for block in blocks]
    with blocks_progress(f"Quantizing {plan.component}", len(sizes), sum(sizes), len(kept), sum(kept)) as advance:
        if fitting is not None and not finished.issuperset(first):
            _Fitter(plan, blocks[: len(first)], source, dtype, fitting, rounding, ranks).fit(finished, advance)
        todo = [block for block in blocks[len(first) :] if block.path not in finished]
        share = ranks.share(todo)
        with closing(rounding.blocks([(block.layers, block.names) for block in share])) as done:
            for block, rounded in zip(share, done, strict=True):
                outcome = Outcome(weight_sqnr=rounded.weight_sqnr, fingerprints=rounded.fingerprints)
                finish(block.file, rounded.tensors, outcome)
                advance(block.nbytes)
        ranks.meet()
        for block in todo:
            if block not in share:
                advance(block.nbytes)
    return [block.file for block in blocks]


def blocks_of(plan: Plan, source: SourceWeights, folder: Path, first: Sequence[str] = ()) -> list[Block]:
    """List a component's blocks: at the paths `first`, then the family's others in the plan's order, then the rest."""
    paths = dict.fromkeys([*first, *(layer.block for layer in plan.layers if layer.block)])
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
            folder / f"{index:04}.safetensors",
        )
        for index, path in enumerate(paths)
    ]


def _block_with(name: str, paths: Collection[str]) -> str:
    """Return the innermost of the blocks at `paths` with a module or tensor; its first name where it is in none."""
    parts = name.split(".")
    above = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((path for path in above if path in paths), parts[0])


@dataclass(frozen=True)
class _Rounding:
    """Inputs of rounding to nearest beside a block. input_scales: by layer, of those that are not fitted."""

    source: SourceWeights
    dtype: torch.dtype
    input_scales: Mapping[str, Tensor]
    workers: int | None

    def blocks(self, parts: Sequence[tuple[Sequence[LayerPlan], Sequence[str]]]) -> Generator[Rounded, None, None]:
        """Round quantized layers and source tensors of each block; the next blocks are begun meanwhile."""
        unit_lists = [units_of(layers, names) for layers, names in parts]
        rounded = round_units(chain(*unit_lists), self.source, self.dtype, self.input_scales, self.workers)
        with closing(rounded):
            for part in unit_lists:
                done = [next(rounded) for _ in part]
                tensors = {name: tensor for unit in done for name, tensor in unit.tensors.items()}
                lost = {name: db for unit in done for name, db in unit.weight_sqnr.items()}
                read = {name: fingerprint for unit in done for name, fingerprint in unit.fingerprints.items()}
                yield Rounded(tensors, lost, read)


@dataclass(frozen=True)
class _Fitter:
    """Fits `blocks`, those of the replay in their order, and writes their files."""

    plan: Plan
    blocks: Sequence[Block]
    source: SourceWeights
    dtype: torch.dtype
    fitting: Fitting
    rounding: _Rounding
    ranks: Ranks

    def fit(self, finished: Collection[str], advance: Callable[[int], None]) -> None:
        """Fit all blocks that are not `finished`; each goes into the model from its file, as the finished ones do.

        Outputs of finished blocks are made again where they are gone. advance: is told the bytes of each block done.
        """
        replay = self.fitting.replay
        missing = [index for index, block in enumerate(self.blocks) if block.path not in finished]
        possible = [index for index in range(missing[0] + 1) if replay.can_start(index)] if self.ranks.leads else [0]
        start = self.ranks.agree(max(possible))
        replay.skip_to(start)
        waiting: list[LiveBlock] = []  # to be fitted to 16-bit blocks, one by each process
        for live in replay:
            block = self.blocks[live.index]
            if not self.fitting.parallel:
                if live.index in missing:
                    self._fit_block_together(live)
                    advance(block.nbytes)
                self._put_into_model(block)
                live.advance()
                continue
            if self.ranks.world > 1 or live.index not in missing:
                live.advance()
            if live.index in missing:
                waiting.append(live)
                replay.oldest = waiting[0].index
            else:
                self._put_into_model(block)
            if waiting and (len(waiting) == self.ranks.world or live.index == missing[-1]):
                for assigned in self.ranks.share(waiting):
                    self._finish(self.blocks[assigned.index], *self._fit_groups(assigned, self._groups_of(assigned)))
                self.ranks.meet()
                for each in waiting:
                    self._put_into_model(self.blocks[each.index])
                    advance(self.blocks[each.index].nbytes)
                waiting, replay.oldest = [], None

    def _fit_block_together(self, live: LiveBlock) -> None:
        """Fit some of a block's groups in each process; the first process writes the block when all are done."""
        block, groups = self.blocks[live.index], self._groups_of(live)
        owners = _owners(groups, self.ranks.world)
        share = {name: members for name, members in groups.items() if owners[name] == self.ranks.rank}
        tensors, outcome = self._fit_groups(live, share)
        if self.ranks.world > 1:
            parts = [block.file.with_name(f".{block.file.name}.{rank}.part") for rank in range(self.ranks.world)]
            finish(parts[self.ranks.rank], tensors, outcome)
            self.ranks.meet()
            if self.ranks.leads:
                tensors, outcome = read_parts(parts, list(groups))
        if self.ranks.leads:
            self._finish(block, tensors, outcome)
            for part in block.file.parent.glob(f".{block.file.name}.*.part"):
                part.unlink()
        self.ranks.meet()

    def _groups_of(self, live: LiveBlock) -> dict[str, tuple[LayerPlan, ...]]:
        prefix = f"{self.blocks[live.index].path}."
        return {name: members for name, members in self.plan.statistics_groups().items() if name.startswith(prefix)}

    def _fit_groups(
        self, live: LiveBlock, groups: Mapping[str, tuple[LayerPlan, ...]]
    ) -> tuple[dict[str, Tensor], Outcome]:
        """Fit these groups of a block, and return their tensors and outcome."""
        fitted = _fit_block(live, groups, self.source, self.dtype, self.fitting)
        layers = {name: layer for group in fitted.values() for name, layer in group.layers.items()}
        tensors = {f"{name}.{part}": t.data for name, layer in layers.items() for part, t in layer.named_parameters()}
        outcome = Outcome(
            {name: layer.scheme for name, layer in layers.items()},
            {
                name: sqnr(self.source[f"{name}.weight"].flatten(1), layer.collapsed()[0])
                for name, layer in layers.items()
            },
            {name: GroupOutcome(tuple(g.layers), g.stages, g.rounded, g.fitted) for name, g in fitted.items()},
        )
        return tensors, outcome

    def _finish(self, block: Block, tensors: Mapping[str, Tensor], outcome: Outcome) -> None:
        """Round the rest of a block whose groups are fitted, and write the block."""
        others = [layer for layer in block.layers if layer.name not in outcome.schemes]
        with closing(self.rounding.blocks([(others, [name for name in block.names if name not in tensors])])) as done:
            rounded = next(done)
        whole = replace(outcome, weight_sqnr={**outcome.weight_sqnr, **rounded.weight_sqnr})
        finish(block.file, {**tensors, **rounded.tensors}, whole)

    def _put_into_model(self, block: Block) -> None:
        """Put the fitted layers of a finished block into the model."""
        replay, schemes = self.fitting.replay, Outcome.read([block.file]).schemes
        shapes = {layer.name: (layer.n, layer.k) for layer in block.layers}
        tensors = layer_tensors(block.file, list(schemes))
        for name, scheme in schemes.items():
            layer = QuantLinear.from_tensors(tensors[name], shapes[name], scheme)
            layer = in_place_of(replay.model.get_submodule(name), layer)
            replay.model.set_submodule(name, layer.to(replay.device))


def _owners(groups: Mapping[str, Sequence[LayerPlan]], count: int) -> dict[str, int]:
    """Return group -> which of `count` processes fits it: the dearest first, each to the one with the least to do.

    Groups that share mean and factors are fitted by one process.
    """

    def cost(names: Sequence[str]) -> int:
        return sum(_cost(groups[name]) for name in names)

    load, owners = [0] * count, {}
    for names in sorted(sharing_vectors(groups), key=cost, reverse=True):
        owner = load.index(min(load))
        owners |= dict.fromkeys(names, owner)
        load[owner] += cost(names)
    return owners


def _cost(members: Sequence[LayerPlan]) -> int:
    n, k = sum(layer.n for layer in members), members[0].k
    return k * n if members[0].method.is_plain else k * k * (k + n)  # of the Gram and of error feedback


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
    fitted: dict[str, FittedGroup] = {}
    for names in sharing_vectors(groups):
        parts = [_to_fit(groups[name], inputs.pop(name), source, fitting, name) for name in names]
        done = fit_groups(parts, rate=fitting.gate.db_per_percent, dtype=dtype)
        fitted |= dict(zip(names, done, strict=True))
    for name, group in fitted.items():
        for stage in group.stages:
            logger.info("%s: %s %s: %s", name, stage.name, "kept" if stage.kept else "left out", stage.reason)
    return {name: fitted[name] for name in groups}


def _to_fit(
    members: Sequence[LayerPlan], inputs: GroupInputs, source: SourceWeights, fitting: Fitting, name: str
) -> GroupToFit:
    device, first = inputs.mean.device, members[0]
    if fitting.statistics is not None:
        seen = fitting.statistics.channel_amax(name).to(device)
        inputs = replace(inputs, amax=torch.maximum(inputs.amax, seen))
    layers = [
        GroupLayer(
            layer.name,
            weight_matrix(source[f"{layer.name}.weight"], layer).to(device),
            source[f"{layer.name}.bias"].to(device) if f"{layer.name}.bias" in source else None,
            layer.scheme,
            bool(layer.scale_group),
        )
        for layer in members
        if layer.scheme is not None
    ]
    shapes = [(layer.n, layer.k) for layer in members]
    price = price_on(find_device(fitting.gate.gpu), shapes, fitting.gate.tokens, first.made_by)
    return GroupToFit(layers, inputs, first.method, price)


def require_finite_weights(source: SourceWeights) -> None:
    """Raise ValueError naming the first tensor that holds NaN or infinity."""
    for name in source.names:
        require_finite(name, source[name])


def quantize_linear(linear: nn.Linear | nn.Conv2d, x: Tensor, recipe: Component | str) -> QuantLinear:
    """Try a recipe on one layer: `linear` (N, K) quantized in the recipe's main format, fitted to x (…, K).

    The layer may be a 1x1 convolution, with x (B, K, H, W). The last eighth of x's tokens decides what is kept. Returns
    a QuantLinear on the same device; compare its output with `linear(x)`.

    recipe: a `Component`, or the name or path of a recipe, whose transformer component is taken.
    """
    profile, gate, is_calibrated = "balanced", Gate(), True
    if isinstance(recipe, str):
        whole = load_recipe(recipe)[1]
        profile, gate = whole.profile, whole.gate
        recipe = whole.components.get("transformer") or next(iter(whole.components.values()))
        is_calibrated = whole.has_static_scales(recipe)
    activations = recipe.activations.row if recipe.activations else None
    is_static = is_calibrated and activations is not None and activations.has_tensor_scale
    scheme = Scheme(recipe.weights.row, activations, static_input=is_static)
    n, k = linear_size(linear)
    x = channels_last(linear, x)
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} channels, the layer takes {k}")
    if activations is not None:
        activations.check_shape(1, k, "x")
    planned = LayerPlan("linear", n, k, "", "linear", False, scheme, "tried on one layer", made_by="norm")
    planned = rotated_by(planned, recipe)
    scheme = planned.scheme or scheme
    method = with_method(planned, recipe, profile).method
    tokens = x.detach().reshape(-1, k)
    held_out = len(tokens) // 8
    if len(tokens) < _FEW_TOKENS:
        logger.warning(
            "%d tokens, of which %d decide: what is fitted to so few may not hold for others; give %d or more",
            *(len(tokens), held_out, _FEW_TOKENS),
        )
    builder = InputsBuilder("x", k, device=x.device, calls=(1, 1))
    builder.add(tokens[: len(tokens) - held_out])
    builder.add(tokens[len(tokens) - held_out :], held_out=True)
    bias = None if linear.bias is None else linear.bias.detach()
    group = fit_group(
        [GroupLayer("linear", linear.weight.detach().flatten(1), bias, scheme)],
        builder.finish(),
        method,
        price=price_on(find_device(gate.gpu), [(n, k)], gate.tokens, "norm"),
        rate=gate.db_per_percent,
        dtype=linear.weight.dtype,
    )
    return in_place_of(linear, group.layers["linear"])


def _input_scales(plan: Plan, statistics: Statistics | None) -> dict[str, Tensor]:
    """Return layer -> its calibrated `input_scale`, the same for all layers of one input."""
    scales: dict[str, Tensor] = {}
    for group, members in plan.static_groups().items():
        if statistics is None:
            raise ValueError(
                f"{group}: its scheme has a static input scale, and there are no statistics to take it from"
            )
        scheme = members[0].scheme
        if scheme is not None and scheme.activations is not None:
            scale = encode.input_scale_for(statistics.amax(group), scheme.activations)
            scales |= dict.fromkeys((layer.name for layer in members), scale)
    return scales


@dataclass(frozen=True)
class _BlockHeader:
    """Header of a block, as `Outcome.to_json` writes it."""

    schemes: dict[str, str]
    weight_sqnr: dict[str, float]
    groups: dict[str, GroupOutcome]
    fingerprints: dict[str, str]


_HEADER_ADAPTER = TypeAdapter(_BlockHeader)


def _header_of(file: TensorFile) -> _BlockHeader:
    try:
        header = _HEADER_ADAPTER.validate_json(file.metadata().get(_HEADER, ""), strict=True)
        for text in header.schemes.values():
            Scheme.parse(text)
    except ValueError as error:  # pydantic's is one
        why = f"{first_line(error)}; remove the file, and the same command makes it again"
        raise ValueError(f"{file.path}: the header of this finished block is damaged: {why}") from None
    return header


def finish(file: Path, tensors: Mapping[str, Tensor], outcome: Outcome) -> None:
    """Write a finished block, with a hash of all of it."""
    save_sealed(tensors, file, {_HEADER: outcome.to_json()})


def is_finished(file: Path, source: SourceWeights) -> bool:
    """Tell whether a block's file is as it was written, and `source` has the tensors that it was rounded from.

    If it is not, the block has to be made again, and the log says why.
    """
    if not file.is_file():
        return False
    try:
        stored = TensorFile(file)
        fingerprints = _header_of(stored).fingerprints
        stored.require_as_written()
        if source.differing(fingerprints):
            raise ValueError(f"{file}: made of other weights than the model has now")
    except ValueError as error:
        logger.warning("%s: this block is made again", without_cure(error))
        return False
    return True


def read_parts(files: Sequence[Path], groups: Sequence[str]) -> tuple[dict[str, Tensor], Outcome]:
    """Read a block whose groups were fitted in several files: tensors and outcome, in the order of `groups`."""
    stored, whole = [TensorFile(file) for file in files], Outcome.read(files)
    tensors = {key: part.get_tensor(key) for part in stored for key in part.keys()}
    layers = [name for group in groups for name in whole.groups[group].layers]
    schemes = {name: whole.schemes[name] for name in layers}
    lost = {name: whole.weight_sqnr[name] for name in layers}
    return tensors, Outcome(schemes, lost, {name: whole.groups[name] for name in groups})


def layer_tensors(file: Path, layers: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Read a finished block's tensors: layer -> name of the parameter -> tensor."""
    stored, tensors = TensorFile(file), {name: {} for name in layers}
    for key in stored.keys():
        name, _, parameter = key.rpartition(".")
        if name in tensors:
            tensors[name][parameter] = stored.get_tensor(key)
    return tensors
