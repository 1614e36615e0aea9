"""Replay: a transformer's captured calls run through it block by block, each block once per pass.

Block b is run by the model's own forward, so that nothing here depends on a family's arithmetic between its blocks.
Blocks before b are replaced by their stored outputs, and b raises once it has its output, so nothing behind it is
computed.

    for block in replay:
        inputs = block.observe({group: path of a Linear, …})    # one pass
        …                                                       # quantize the block's Linears, keep them on disk
        block.advance()                                         # one pass, through the block as it is now

The earlier outputs that b depends on (the block before it; in models with refiners or skips also others) are read from
the autograd graph between the blocks, once. Only those are kept. In place of the others stands NaN of the right shape:
should one matter after all, `observe` refuses its inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.console import logger, without_cure
from fluxq.base.files import read_json, sha256_json, write_json
from fluxq.base.ranks import ALONE, Ranks
from fluxq.base.residence import device_of, residence_of
from fluxq.base.tensors import TensorFile, save_sealed
from fluxq.calibrate import nested
from fluxq.calibrate.calls import Call, Calls
from fluxq.calibrate.inputs import GroupInputs, InputsBuilder
from fluxq.calibrate.stand_ins import replaced_forwards
from fluxq.kernels.linear import channels_last, linear_size
from fluxq.recipes.family import Family, matches

_DONE = "done.json"
_HEADER = "fluxq_output"


def block_names(family: Family, model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks of the family's input groups. Modulation is not observed and has none."""
    patterns = {group.block for group in family.groups if group.role != "modulation"}
    return tuple(path for path, _ in model.named_modules() if any(matches(pattern, path) for pattern in patterns))


class Replay:
    """The blocks of `model`, one after the other, over captured calls.

    model: as it was captured, on any device; finished blocks have the weights that `LiveBlock.advance` is to run with.
    folder: place of the blocks' outputs.
    weights: denoising step -> weight of its tokens; 1 for a missing step.
    digest: hash of everything else that decides the outputs (recipe, profile), so that outputs of another job are not
        taken for this one's.
    ranks: processes with the same calls that share the folder: all of them go from block to block, and `advance` shares
        out the calls.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Calls,
        folder: Path,
        *,
        weights: Mapping[int, float] | None = None,
        digest: str = "",
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.model, self.calls, self.weights = model, calls, dict(weights or {})
        self.blocks = calls.blocks
        self.modules = [model.get_submodule(name) for name in self.blocks]
        self.device, self.residence = device_of(model), residence_of(model)
        self.needs = _dependencies(model, self.modules, calls.calls[0], self.device)
        self.current = calls.calls[0]
        self.turn = 0
        self.oldest: int | None = None  # block before the current one whose inputs are still wanted
        self._blank = nested.blank(self.device)
        digest = sha256_json([calls.digest, digest])
        self._outputs = _Outputs(folder, digest, len(calls.calls))

    def __iter__(self) -> Iterator[LiveBlock]:
        """Yield the blocks in the order in which they run. ValueError if one was left without `advance`."""
        while self.turn < len(self.blocks):
            block = LiveBlock(self, self.turn)
            if self.residence is not None:
                self.residence.focus(block.module)
            yield block
            if block.is_needed and not block.advanced:
                raise ValueError(f"{block.name}: was not advanced, and later blocks need its output; call advance()")
            self.turn += 1
            if self.residence is not None:
                for module in self.modules[: self._first_open]:
                    self.residence.drop(module)
            for old in range(self.turn):
                if self.ranks.leads and self.last_use(old) < self._first_open:
                    self._outputs.drop(old)

    def can_start(self, index: int) -> bool:
        """Tell whether the outputs of earlier blocks that block `index` and later ones need are stored."""
        return all(map(self._outputs.has, self._kept_for(index)))

    def skip_to(self, index: int) -> None:
        """Go on at block `index`; those before it do not run again. ValueError if their outputs are missing."""
        kept = sorted(self._kept_for(index)) if self.ranks.leads else ()  # others would look at all files again
        missing = [self.blocks[i] for i in kept if not self._outputs.has(i)]
        if missing:
            raise ValueError(f"{missing[0]}: its outputs are not there, or another job's; go on at an earlier block")
        self.turn = index

    def last_use(self, index: int) -> int:
        """Return the last block that needs the output of block `index`; itself if none does."""
        return max((later for later, needed in enumerate(self.needs) if index in needed), default=index)

    def weight(self, call: Call) -> float:
        """Return the weight of each token of a call."""
        return self.weights.get(call.step, 1.0)

    def run(self, at: int, index: int) -> Any:
        """Return the output of block `index` in call `at`, which is `current` meanwhile.

        ValueError if the block is not reached.
        """
        self.current = call = self.calls.calls[at]

        def earlier(i: int) -> Callable[..., Any]:
            if i in self.needs[index]:
                return lambda *_args, **_kwargs: self._outputs.load(i, at, self.device)
            return lambda *_args, **_kwargs: nested.unpack(call.outputs[self.blocks[i]], self._blank)

        forward = self.modules[index].forward

        def live(*args: Any, **kwargs: Any) -> Any:
            raise _Finished(forward(*args, **kwargs))

        stand_ins = {self.modules[i]: earlier(i) for i in range(index)} | {self.modules[index]: live}
        args, kwargs = call.load(self.device)
        with torch.no_grad(), replaced_forwards(stand_ins):
            try:
                self.model(*args, **kwargs)
            except _Finished as finished:
                return finished.output
        raise ValueError(f"{self.blocks[index]}: a captured call does not reach this block; capture again")

    def keep(self, index: int, calls: Sequence[int], outputs: Iterator[Any]) -> None:
        """Store the outputs of block `index`, call by call: those of `calls`, which other processes complete."""
        name = f"output of {self.blocks[index]}"
        if self.ranks.leads:
            self._outputs.begin(index)
        self.ranks.meet()
        for at, output in zip(calls, outputs, strict=True):
            self._outputs.save(index, at, output, name, self.device)
        self.ranks.meet()
        if self.ranks.leads:
            self._outputs.finish(index)

    def is_open(self, index: int) -> bool:
        """Tell whether the inputs of block `index` can be observed."""
        return self._first_open <= index <= self.turn

    @property
    def _first_open(self) -> int:
        """The first block whose inputs can be observed."""
        return self.turn if self.oldest is None else self.oldest

    def _kept_for(self, index: int) -> set[int]:
        """Return the blocks before `index` whose outputs it or a later one needs."""
        return {i for needed in self.needs[index:] for i in needed if i < index}


class LiveBlock:
    """The current block of a replay. name: its path. module: itself, in the model."""

    def __init__(self, replay: Replay, index: int) -> None:
        self.replay, self.index, self.name = replay, index, replay.blocks[index]
        self.advanced = False

    @property
    def module(self) -> nn.Module:
        return self.replay.modules[self.index]

    @property
    def is_needed(self) -> bool:
        """True if a later block needs its output."""
        return self.replay.last_use(self.index) > self.index

    def observe(
        self,
        groups: Mapping[str, str],
        *,
        segments: Mapping[str, tuple[int, ...]] | None = None,
        without_gram: Collection[str] = (),
        advance: bool = False,
        most_held: int = 1024,
    ) -> dict[str, GroupInputs]:
        """Run the calls through the block and gather the inputs of each group.

        `GroupInputs.tokens` runs the calls again, through the block as it is then, until the loop goes on to the next
        block. ValueError naming the group for NaN, infinity and inputs that never came.

        groups: group -> path of one of its Linears, from the model's root.
        segments: group -> sizes along K that its Gram is block-diagonal over.
        without_gram: groups that need none.
        advance: also keep the outputs, in the same pass, without the effect of later quantization. Where processes
            share out that pass, `advance` comes first instead, as it may for one.
        """
        layers: dict[str, Any] = {group: self.replay.model.get_submodule(path) for group, path in groups.items()}
        builders = {
            group: InputsBuilder(
                group,
                linear_size(layer)[1],
                (segments or {}).get(group, ()),
                device=self.replay.device,
                wants_gram=group not in without_gram,
                calls=self.replay.calls.counts,
                most_held=most_held,
            )
            for group, layer in layers.items()
        }

        def see(group: str, x: Tensor) -> None:
            call = self.replay.current
            builders[group].add(x, self.replay.weight(call), call.held_out, call.step)

        with _watched(layers, see):
            if advance and self.is_needed and not self.advanced and self.replay.ranks.world == 1:
                self.advance()
            elif groups:
                for at in range(len(self.replay.calls.calls)):
                    self.replay.run(at, self.index)
        if self.replay.residence is not None:
            self.replay.residence.rest()  # fitting the groups takes the room
        return {group: builder.finish(self._tokens(layers[group])) for group, builder in builders.items()}

    def advance(self) -> None:
        """Run the calls through the block as it is now and keep its outputs for the blocks to come."""
        if self.is_needed:
            calls = self.replay.ranks.share(range(len(self.replay.calls.calls)))
            self.replay.keep(self.index, calls, (self.replay.run(at, self.index) for at in calls))
        self.advanced = True

    def _tokens(self, layer: nn.Module) -> Callable[[], Iterator[tuple[Tensor, float]]]:
        def tokens() -> Iterator[tuple[Tensor, float]]:
            if not self.replay.is_open(self.index):
                raise ValueError(
                    f"{self.name}: its tokens cannot be had again, the replay has gone on to a later block"
                )
            for at, call in enumerate(self.replay.calls.calls):
                if not call.held_out:
                    seen: list[Tensor] = []
                    with _watched({"": layer}, lambda _, x, seen=seen: seen.append(x.flatten(0, -2))):
                        self.replay.run(at, self.index)
                    yield from ((x, self.replay.weight(call)) for x in seen)

        return tokens


class _Finished(Exception):
    """Exception that leaves the model's forward with the output of the live block."""

    def __init__(self, output: Any) -> None:
        super().__init__("the live block has run")
        self.output = output


def _dependencies(
    model: nn.Module, blocks: Sequence[nn.Module], call: Call, device: torch.device
) -> tuple[frozenset[int], ...]:
    """Return for each block the earlier blocks whose outputs its arguments were computed from.

    No block runs: each returns leaves of an autograd graph, and later ones look which leaves their arguments come from.
    """
    dependencies: list[frozenset[int]] = []
    layouts = list(call.outputs.values())
    leaves: dict[Tensor, int] = {}
    opaque: set[int] = set()  # blocks that return integers, which no graph follows: every later block may need them
    blank = nested.blank(device)

    def stand_in(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = nested.tensors_in([list(args), kwargs])
            dependencies.append(frozenset(opaque | {leaves[leaf] for leaf in _leaves_of(arguments) if leaf in leaves}))
            if index == len(blocks) - 1:
                raise _Finished(None)

            def leaf(entry: dict[str, Any]) -> Tensor:
                tensor = blank(entry).detach()
                if not tensor.is_floating_point():
                    opaque.add(index)
                    return tensor
                leaves[tensor.requires_grad_()] = index
                return tensor.clone()  # a leaf itself could not be written to in place

            return nested.unpack(layouts[index], leaf)

        return forward

    args, kwargs = call.load(device)
    with torch.enable_grad(), replaced_forwards({block: stand_in(i) for i, block in enumerate(blocks)}):
        try:
            model(*args, **kwargs)
        except _Finished:
            return tuple(dependencies)
    raise ValueError(f"{next(reversed(call.outputs))}: a captured call does not reach this block; capture again")


def _leaves_of(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Return the leaves of the autograd graph that the tensors come from."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    met = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for before, _ in node.next_functions:
            if before is not None and before not in met:
                met.add(before)
                waiting.append(before)


@contextmanager
def _watched(layers: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call see(group, x (…, K)) before a group's layer computes with x."""

    def hook(group: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: see(group, channels_last(module, args[0]))

    with ExitStack() as stack:
        for group, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(hook(group)))
        yield


class _Outputs:
    """Outputs of blocks, call by call, a folder per block; complete once done.json has their digest."""

    def __init__(self, folder: Path, digest: str, calls: int) -> None:
        self.folder, self.digest, self.calls = folder, digest, calls
        self.whole: set[int] = set()  # blocks whose files were looked at

    def begin(self, index: int) -> None:
        self.drop(index)
        self._of(index).mkdir(parents=True)

    def save(self, index: int, at: int, output: Any, name: str, device: torch.device) -> None:
        layout, tensors = nested.pack(output, name, device, "cpu")
        save_sealed(tensors, self._file(index, at), {_HEADER: json.dumps(layout)}, durable=False)

    def finish(self, index: int) -> None:
        write_json(self._of(index) / _DONE, {"digest": self.digest})
        self.whole.add(index)

    def load(self, index: int, at: int, device: torch.device) -> Any:
        with TensorFile(self._file(index, at)) as stream:
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}
        try:
            layout = json.loads(stream.metadata().get(_HEADER, ""))
            nested.require_sound(layout)
            return nested.unpack(layout, nested.stored(tensors, device))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{stream.path}: not what a block returned ({error}); remove {self.folder}, and start again"
            ) from None

    def has(self, index: int) -> bool:
        """Tell whether all outputs of a block are as they were written; if one is not, the log says so."""
        path = self._of(index) / _DONE
        if index in self.whole or not path.is_file():
            return index in self.whole
        try:
            if read_json(path).get("digest") != self.digest:
                return False
            for at in range(self.calls):
                TensorFile(self._file(index, at)).require_as_written()
        except (ValueError, FileNotFoundError) as error:
            logger.warning("%s: the outputs of this block are made again", without_cure(error))
            return False
        self.whole.add(index)
        return True

    def drop(self, index: int) -> None:
        self.whole.discard(index)
        shutil.rmtree(self._of(index), ignore_errors=True)

    def _of(self, index: int) -> Path:
        return self.folder / f"block-{index:03}"

    def _file(self, index: int, at: int) -> Path:
        return self._of(index) / f"{at:05}.safetensors"
