"""Modulation of all denoising steps in one product: adaLN's weights are read once for an image, not once a step.

The Linears that make shift, scale and gate (role "modulation" of a family, and the last norm's) see one row
per image and step s,

    y_s = W silu(e_s) + b,      e_s = embedder(t_s, guidance, pooled text),

so each step reads all of W to multiply one row: 3.2 of FLUX.1-dev's 11.9 billion weights. Nothing in e_s depends on
the image so far, and the scheduler knows every t_s beforehand. At the first step of a call the model's own embedder
therefore makes e_s of all steps, and each Linear multiplies them together when it is first called; later steps look up.

A row of another prompt or step is never looked up. A step is found by comparing its e_s with those of the table,
which waits for the device once a step; a Linear takes a row only where its input lies in the very memory of that step's
silu(e_s). In all other cases it computes plainly, and the log says once why. One product of many rows sums in another
order than products of one row do: sums agree to 2^-20 sum |a| |b|, and a bfloat16 output whose sum lies beside a tie
goes to the next number, which is 2^-7 |y| away at most.

A step that was recorded as a CUDA graph (graphs.py) compares on the device, and takes its row by the index that it
finds there. The host reads while the rest of the step runs if a row was found, and computes the step anew if none was.

Tables live for one call: when the scheduler makes new timesteps they are dropped. Nothing of this is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.recipes.all_families import FAMILIES, family_of
from fluxq.recipes.family import Family
from fluxq.recipes.plan import MODULATION_ROLE
from fluxq.runtime.placed import Handle, Placed, is_offloaded

MAX_ROWS = 256  # of tables, by default


def hoist_modulation(pipe: Any, *, max_rows: int = MAX_ROWS, offload: bool = False) -> HoistedModulation:
    """Let a pipeline's transformer make the modulation of all steps at the first step of each call.

    Stays until `remove()` of what is returned, or the end of its `with` block. Works with quantized and 16-bit layers,
    any batch, guidance with several prompts a step, adapters, and diffusers' or accelerate's offloading.

    max_rows: rows that tables may hold at once; a call takes steps x images, and as many again for each further prompt
    that guidance needs. A row of FLUX.1-dev is 1,056,768 numbers: 59 MB for 28 steps in 16 bit, 541 MB for 256 rows. A
    prompt whose rows find no room is computed plainly. offload: keep these Linears' weights on the CPU, wherever the
    model goes; each comes to its device for one product a call, and for every row that is computed plainly. Weights
    that are edited by hand, through `.data`, in the middle of a call are seen by the next one; merged adapters are seen
    at once.

    A transformer that is compiled while this is in place computes plainly. Under `fluxq.capture` each graph has tables
    of its own, of max_rows at most; a call whose rows find no room, or whose timestep is none of the scheduler's, has a
    graph that computes the modulation.

    Raises ValueError for a pipeline without transformer and scheduler, a model without such Linears, one that is
    compiled or hoisted already, and offload of what is offloaded already.
    """
    transformer = getattr(pipe, "transformer", None)
    if not isinstance(transformer, nn.Module) or getattr(pipe, "scheduler", None) is None:
        raise ValueError(f"hoist_modulation needs a pipeline with transformer and scheduler, got {type(pipe).__name__}")
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}, expected at least 1")
    layers, embedded_timestep = modulation_of(transformer)
    if hoisted_in(linear for linear, _ in layers.values()) is not None:
        raise ValueError(f"the modulation of this {type(transformer).__name__} is hoisted already: remove() it first")
    if offload:
        _require_not_offloaded(transformer, [linear for linear, _ in layers.values()])
    return HoistedModulation(pipe, layers, embedded_timestep, max_rows, offload)


def modulation_of(
    transformer: nn.Module,
) -> tuple[dict[str, tuple[nn.Linear, nn.SiLU]], Callable[[Tensor, torch.dtype], Tensor]]:
    """Return the modulation that can be hoisted, path -> (Linear, silu), and what its embedder gets for a timestep.

    Raises ValueError for a model whose modulation cannot be hoisted, and for one that is compiled.
    """
    _require_eager(transformer)
    family = family_of(type(transformer).__name__)
    if family.embedded_timestep is None:
        families = ", ".join(name for name, row in FAMILIES.items() if row.embedded_timestep)
        raise ValueError(
            f"the modulation of a {type(transformer).__name__} cannot be hoisted, only that of "
            f"{families}: all its blocks share it, or what its embedder gets is not known here"
        )
    return dict(_modulations(transformer, family)), family.embedded_timestep


class HoistedModulation(Handle):
    """Handle of what `hoist_modulation` put into a pipeline; `remove()`, or leaving its `with` block, takes it out."""

    def __init__(
        self,
        pipe: Any,
        layers: dict[str, tuple[nn.Linear, nn.SiLU]],
        embedded_timestep: Callable[[Tensor, torch.dtype], Tensor],
        max_rows: int,
        offload: bool,
    ) -> None:
        transformer = pipe.transformer
        self.layers = tuple(layers)
        self.max_rows, self.offload, self.on = max_rows, offload, True
        self.step: _Step | None = None
        self.by_optimize = False  # then fluxq.restore takes it out
        self._timesteps = lambda: pipe.scheduler.timesteps
        self._embedded_timestep = embedded_timestep
        self._schedule: Tensor | None = None
        self._tables: list[_Table] = []
        self._choose: Choice = self._look_up
        self._logged: set[str] = set()
        self._embedder: nn.Module = transformer.time_text_embed
        self._hook = self._embedder.register_forward_hook(self._at_step, with_kwargs=True)
        self._placed: list[_Activation | _Modulation | _Stay] = []
        for path, (linear, activation) in layers.items():
            self._placed += [_Activation(self, activation), _Modulation(self, linear, transformer, path)]
            if offload:
                _move(linear, torch.device("cpu"))
                self._placed.append(_Stay(linear, "_apply"))

    def remove(self) -> None:
        """Give every module its own forward again, and weights that were moved to the CPU the model's device."""
        if not self.on:
            return
        self.on, self.step = False, None
        self._tables.clear()
        self._hook.remove()
        device = next(self._embedder.parameters()).device
        for placed in self._placed:
            placed.remove()
            if self.offload and isinstance(placed, _Modulation):
                _move(placed.module, device)

    def say(self, why: str, *values: object) -> None:
        """Log why Linears compute plainly, each reason once, with the values of the first time."""
        if why not in self._logged:
            self._logged.add(why)
            logger.warning(f"modulation is computed step by step: {why}", *values)

    @property
    def schedule(self) -> Tensor | None:
        """The scheduler's timesteps; every call of a pipeline makes a new tensor."""
        return self._timesteps()

    def weight_states(self) -> list[tuple]:
        """Return values that change with the weights that tables are made with."""
        return [layer.weight_state() for layer in self._linears()]

    @contextmanager
    def choosing(self, choose: Choice) -> Iterator[None]:
        """Let a function of the embedder's args, kwargs and output choose the step of each call."""
        self._choose = choose
        try:
            yield
        finally:
            self._choose, self.step = self._look_up, None

    def rows_of(self, call: Callable[[], Any], rows: Rows | None) -> Rows | None:
        """Return rows that hold those of a call of the model: these, if there is room in them, or new ones.

        None, with the reason logged, if there can be none. The call runs as far as its embedder, all Linears multiply,
        and the device is waited for.
        """
        try:
            with self.choosing(_stop):
                call()
        except _Stopped as stopped:
            args, kwargs, temb = stopped.given
            steps = rows.step_count if rows else 0
            table = self._table(args, kwargs, temb, steps * len(temb)) if self._can_hold(args, temb) else None
        else:
            self.say("the call does not run the embedder")  # it was compiled since
            return None
        if table is None:
            return None
        if table.index(temb) is None:
            self.say(_DRIFTS)
            return None
        for layer in self._linears():
            dtype = layer.outputs(table).dtype
            if dtype != table.inputs.dtype:
                self.say("%s makes %s of %s", layer.path, dtype, table.inputs.dtype)
                return None
        if rows is None or not rows.take(table):
            rows = Rows(self, table, steps + len(table.embeddings))
        return rows

    def _linears(self) -> Iterator[_Modulation]:
        return (placed for placed in self._placed if isinstance(placed, _Modulation))

    def _at_step(self, _embedder: nn.Module, args: tuple, kwargs: dict[str, Any], temb: Tensor) -> None:
        """Choose the step of this call: a forward hook of the embedder, whose output (B, K) every modulation reads."""
        if not torch.compiler.is_compiling():
            self.step = None
            self.step = self._choose(args, kwargs, temb)

    def _look_up(self, args: tuple, kwargs: dict[str, Any], temb: Tensor) -> _Step | None:
        """Return the step of one of the tables, which wait for the device, or of a new one."""
        if self.schedule is not self._schedule:
            self._schedule = self.schedule
            self._tables.clear()
        if not self._can_hold(args, temb):
            return None
        step = next(filter(None, (table.step(temb) for table in reversed(self._tables))), None)
        if step is None:
            table = self._table(args, kwargs, temb, sum(len(table.inputs) for table in self._tables))
            step = table.step(temb) if table else None
            if table and step:
                self._tables.append(table)
            elif table:
                self.say(_DRIFTS)
        return step

    def _can_hold(self, args: tuple, temb: Tensor) -> bool:
        """Tell whether a table can hold this call's rows; if not, the reason is logged."""
        if torch.is_grad_enabled():
            self.say("gradients are on, and a table would keep the graph of its first step; call under torch.no_grad()")
        elif temb.is_inference():
            self.say("torch.inference_mode() does not count changes of a tensor; call under torch.no_grad()")
        elif self.schedule is None or temb.ndim != 2 or args[0].ndim != 1:
            self.say("expected timesteps (B,) of a scheduler that knows its own, got %s", (*args[0].shape,))
        else:
            return True
        return False

    def _table(self, args: tuple, kwargs: dict[str, Any], temb: Tensor, rows_in_use: int) -> _Table | None:
        """Make a table of all steps for this call's other arguments; None, with the reason logged, if it cannot be.

        The embedder runs once for each step, on as many rows as it will then: in one product its bits would differ.
        """
        times, *rest = args
        schedule: Any = self.schedule
        values = self._embedded_timestep(schedule.to(times.device), times.dtype).unique()
        now = times[0]
        if not bool((values == now).any()):
            self.say("timestep %g is none that the scheduler makes", float(now))
            return None
        rows = len(values) * len(temb) + rows_in_use
        if rows > self.max_rows:
            self.say("%d rows are more than max_rows=%d; raise it where memory allows", rows, self.max_rows)
            return None
        # Edit models embed a 0 beside each timestep; it stays.
        steps = [self._embedder.forward(torch.where(times == now, value, times), *rest, **kwargs) for value in values]
        return _Table(torch.stack(steps))


@dataclass
class _Table:
    """Embeddings (S, B, K) of all S steps and one prompt's B rows.

    by_layer: outputs (S, B, N) that layers made of them, and what `weight_state` said meanwhile.
    """

    embeddings: Tensor
    inputs: Tensor = field(init=False)  # (S B, K)
    by_layer: dict[str, tuple[Tensor, tuple]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = nn.functional.silu(self.embeddings).flatten(0, 1)

    def index(self, temb: Tensor) -> int | None:
        """Return the step whose embedding (B, K) this is, element for element."""
        embeddings = self.embeddings
        if (embeddings.shape[1:], embeddings.dtype, embeddings.device) != (temb.shape, temb.dtype, temb.device):
            return None
        equal = _equal(embeddings, temb).tolist()  # the one wait for the device
        return equal.index(True) if True in equal else None

    def step(self, temb: Tensor) -> _Step | None:
        index = self.index(temb)
        if index is None:
            return None
        activated = self.inputs.unflatten(0, self.embeddings.shape[:2])[index]
        return _Step(temb, activated, lambda layer: layer.outputs(self)[index])


class Rows:
    """Rows of tables in memory that stays, from which a recorded step takes its own by an index found on the device.

    room: number of steps that there is memory for, those of all prompts together.
    """

    def __init__(self, hoisted: HoistedModulation, table: _Table, room: int) -> None:
        rows = _side_by_side(table)
        self._room, self._used, self._hoisted = room, 0, hoisted
        self._shapes = [table.embeddings.shape[1:], *(outputs.shape[1:] for outputs, _ in table.by_layer.values())]
        self._paths = [*table.by_layer]
        self._embeddings = table.embeddings.new_empty((room, *table.embeddings.shape[1:]))  # (E, B, K)
        self._rows = rows.new_zeros((room, rows.shape[1]))  # (E, B K + the B N of all layers)
        self.take(table)

    @property
    def are_current(self) -> bool:
        """True where scheduler and weights are those that the rows were made with."""
        return self._hoisted.schedule is self._schedule and self._hoisted.weight_states() == self._states

    @property
    def step_count(self) -> int:
        """Number of steps that are held and current."""
        return self._used if self._used and self.are_current else 0

    def take(self, table: _Table) -> bool:
        """Copy a table's rows behind those that are current; tell whether there was room."""
        start = self.step_count
        end = start + len(table.embeddings)
        if end > self._room:
            return False
        if start == 0:
            self._schedule, self._states = self._hoisted.schedule, self._hoisted.weight_states()
            self._embeddings.fill_(torch.nan)  # which equals nothing
        self._embeddings[start:end] = table.embeddings
        self._rows[start:end] = _side_by_side(table)
        self._used = end
        return True

    def step(self, temb: Tensor, tell: Callable[[Tensor], None]) -> _Step:
        """Return this embedding's (B, K) step, its rows chosen on the device, which also tells whether it has them."""
        equal = _equal(self._embeddings, temb)  # (E,)
        tell(equal.any())
        row = self._rows.index_select(0, equal.int().argmax(0, keepdim=True))[0]
        parts = row.split([shape.numel() for shape in self._shapes])
        activated, *outputs = (part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))
        by_path = dict(zip(self._paths, outputs, strict=True))
        return _Step(temb, activated, lambda layer: by_path[layer.path])


def _equal(embeddings: Tensor, temb: Tensor) -> Tensor:
    """Tell of each step (S,) whether its embeddings, of (S, B, K), are temb (B, K), element for element."""
    return (embeddings == temb).flatten(1).all(1)


def _side_by_side(table: _Table) -> Tensor:
    """Return all that is looked up in a table, in one row for each step: one copy then fetches all of it."""
    looked_up = table.inputs.unflatten(0, table.embeddings.shape[:2]), *(each for each, _ in table.by_layer.values())
    return torch.cat([each.flatten(1) for each in looked_up], 1)


class _Stopped(Exception):
    """Carries an embedder's args, kwargs and output out of a call that goes no further."""

    def __init__(self, *given: Any) -> None:
        super().__init__("this call of the model was to go as far as its embedder")
        self.given = given


def _stop(*given: Any) -> NoReturn:
    raise _Stopped(*given)


class _Step:
    """The embedding that this step's modulations read, kept so that its memory becomes nothing else's.

    outputs: function of a modulation Linear, which returns its output (B, N) for all rows of this step.
    """

    def __init__(self, temb: Tensor, activated: Tensor, outputs: Callable[[_Modulation], Tensor]) -> None:
        self.temb, self.activated, self.outputs = temb, activated, outputs
        self._versions = temb._version, activated._version

    def rows(self, x: Tensor, of: Tensor) -> slice | None:
        """Find the rows of `of`, this step's temb or activated (B, K), that x is: the same memory, not changed since.

        None if x is anything else.
        """
        if (self.temb._version, self.activated._version) != self._versions:
            return None
        k = of.shape[1]
        if x.ndim != 2 or x.shape[1] != k or x.dtype != of.dtype or x.device != of.device or not x.is_contiguous():
            return None
        if x.untyped_storage().data_ptr() != of.untyped_storage().data_ptr():
            return None
        start, rest = divmod(int(x.storage_offset()) - int(of.storage_offset()), k)
        fits = not rest and 0 <= start and start + len(x) <= len(of)
        return slice(start, start + len(x)) if fits else None


class _Stay(Placed):
    """Lets a Linear stay where it is when the model around it is moved; casts go on to it."""

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        weight: Any = self.module.weight
        is_move = fn(weight.new_empty(0)).dtype == weight.dtype
        return self.module if is_move else self.plain(fn, recurse)


class _Activation(Placed):
    """silu in front of a modulation: of this step's embedding it gives the table's rows. Copies of it get copies."""

    def __init__(self, hoisted: HoistedModulation, module: nn.Module) -> None:
        super().__init__(module)
        self.hoisted = hoisted

    def __call__(self, input: Tensor) -> Tensor:
        step = None if torch.compiler.is_compiling() else self.hoisted.step
        rows = step.rows(input, step.temb) if step else None
        return self.plain(input) if step is None or rows is None else step.activated[rows]


class _Modulation(Placed):
    """A modulation Linear: of the table's rows it gives its outputs in the product of all steps."""

    def __init__(self, hoisted: HoistedModulation, module: nn.Linear, model: nn.Module, path: str) -> None:
        super().__init__(module)
        self.hoisted, self.model, self.path = hoisted, model, path.removesuffix(".base_layer")

    def __call__(self, input: Tensor) -> Tensor:
        step = None if torch.compiler.is_compiling() else self.hoisted.step
        if step is None:
            return self._product(input)
        rows = step.rows(input, step.activated)
        if rows is None:
            self.hoisted.say("%s reads something else than the activated embedding of this step", self.path)
            return self._product(input)
        return step.outputs(self)[rows]

    def outputs(self, table: _Table) -> Tensor:
        """Return (S, B, N), made at this layer's first call: its weights are there then, wherever they are kept."""
        state = self.weight_state()
        outputs, made_with = table.by_layer.get(self.path, (None, ()))
        if outputs is None or made_with != state:
            outputs = self._product(table.inputs).unflatten(0, table.embeddings.shape[:2])
            table.by_layer[self.path] = outputs, state
        return outputs

    def _product(self, x: Tensor) -> Tensor:
        with _brought(self.module, x.device) if self.hoisted.offload and self.hoisted.on else nullcontext():
            return self.plain(x)

    def weight_state(self) -> tuple:
        """Return values that change with weight, bias and scales: when one is written or replaced, or adapters merged.

        Merging goes through `.data`, which counts nothing. Tensors are compared as objects, and held, so that none that
        comes later is taken for one that is gone. Of weights that accelerate brings anew for each call versions count.
        """
        parameters = self.module._parameters
        versions = tuple(0 if t is None or t.is_inference() or t.is_meta else t._version for t in parameters.values())
        around = [*accumulate(self.path.split("."), getattr, initial=self.model)]
        is_brought = any(hasattr(module, "_hf_hook") for module in (*around, self.module))
        objects = frozenset() if is_brought else frozenset(parameters.items())  # a set compares tensors by identity
        adapted = around[-1]  # by now something of PEFT's, if adapters were loaded
        in_16_bit = getattr(self.module, "instead", None) is not None  # at steps that are kept so
        return versions, objects, tuple(getattr(adapted, "merged_adapters", ())), in_16_bit


def _modulations(transformer: nn.Module, family: Family) -> Iterator[tuple[str, tuple[nn.Linear, nn.SiLU]]]:
    """Yield path -> (Linear, the silu in front of it) of every Linear that reads silu(temb) and nothing else.

    An adapter's own Linears are left alone: where one is loaded, the table has outputs of the layer inside it.
    """
    for path, module in transformer.named_modules():
        name = path.removesuffix(".base_layer")
        located = family.locate(name)
        is_modulation = located[0].role == MODULATION_ROLE if located else name == _LAST_NORM
        if not is_modulation or not isinstance(module, nn.Linear):
            continue
        beside = transformer.get_submodule(name.rpartition(".")[0]).children()
        activation = next((child for child in beside if isinstance(child, nn.SiLU)), None)
        if activation is not None:
            yield path, (module, activation)


def hoisted_in(modules: Iterable[nn.Module]) -> HoistedModulation | None:
    """Return what hoisted the modulation of a model, if anything did."""
    for module in modules:
        hoisted = getattr(vars(module).get("forward"), "hoisted", None)
        if isinstance(hoisted, HoistedModulation) and hoisted.on:
            return hoisted
    return None


def _require_eager(transformer: nn.Module) -> None:
    compiled = hasattr(transformer, "_orig_mod") or any(
        m._compiled_call_impl is not None for m in transformer.modules()
    )
    if compiled:
        raise ValueError(
            "this transformer is compiled, and a compiled graph has the modulation's products in it: hoist the "
            "modulation of an uncompiled one, or compile without hoisting"
        )


def _require_not_offloaded(transformer: nn.Module, linears: list[nn.Linear]) -> None:
    if is_offloaded(transformer) or any(linear.weight.is_meta for linear in linears):
        raise ValueError(
            f"this {type(transformer).__name__} is offloaded already, and two would move the same weights: hoist its "
            "modulation with offload=False, which works with it"
        )


@contextmanager
def _brought(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Bring the module's tensors to `device` for one product, and back to the CPU, whoever moved them meanwhile."""
    _move(module, torch.device("cpu"))
    parameters = dict(module.named_parameters(recurse=False))
    try:
        _move(module, device)
        yield
    finally:
        for name, parameter in parameters.items():
            module.register_parameter(name, parameter)


def _move(module: nn.Module, device: torch.device) -> None:
    """Replace parameters that are on another device; the others stay the objects they are."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.device != device:
            moved = nn.Parameter(parameter.data.to(device), requires_grad=parameter.requires_grad)
            module.register_parameter(name, moved)


_DRIFTS = "the embedder does not give the same bits twice"
Choice = Callable[[tuple, dict[str, Any], Tensor], _Step | None]
_LAST_NORM = "norm_out.linear"  # kept in 16 bit by every row, so it has no role, but it reads what modulations read
