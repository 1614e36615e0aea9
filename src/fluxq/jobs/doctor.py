"""Proof of the kernels on the GPU at hand: `fluxq doctor`.

Each launch that a checkpoint makes, or FLUX.1-dev under each shipped recipe, is compared with the torch reference and
timed beside the library and bf16. kernels/findings.py keeps what was found, for the dispatcher. In the interpreter the
same is proved without a GPU, and nothing is timed.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import fluxq
from fluxq.base import settings
from fluxq.base.console import first_line, logger, progress
from fluxq.base.devices import there_is_a_gpu
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.jobs.catalogue import CatalogueModel
from fluxq.jobs.making import quantized_components
from fluxq.jobs.memory import call_size, forward_pass_of
from fluxq.kernels import findings
from fluxq.kernels.adaln_quantize.op import NormTensors, modulated_norm
from fluxq.kernels.all_ops import ADALN_QUANTIZE, ATTENTION_FP8, OPS, QK_NORM_ROPE, QUANTIZE_ACTIVATION
from fluxq.kernels.attention.op import format_of
from fluxq.kernels.attention_peers import peers_for
from fluxq.kernels.compare import Sample, Verdict
from fluxq.kernels.findings import Cell, Keeper, launch_of, told
from fluxq.kernels.linear import placeholder
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.tensor import read_named, unpack_named
from fluxq.kernels.tiles import CHIPS, NoTile, chip_of
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.all_families import FAMILIES, find_published
from fluxq.recipes.family import Family
from fluxq.recipes.formats import BF16, Scheme
from fluxq.recipes.plan import LayerPlan
from fluxq.recipes.recipe import shipped_recipes
from fluxq.recipes.workloads import CallSize, ForwardPass, forward_pass
from fluxq.runtime.launches import LINEAR, TOKENS, Launch, Machine, kind_of, launches_of
from fluxq.runtime.optimize import lacks_on

if TYPE_CHECKING:  # it needs Triton
    from fluxq.kernels.dispatch import Choice

MODEL = "FLUX.1-dev"  # whose shapes are those of an examination without a checkpoint
COMPARED = 512  # tokens of a launch, at most
REPEATS = 10
MOST_OPERANDS = 2 << 30  # bytes of all sets of operands that a call is timed with
MOST_ENDS = 2  # runs that may end inside a launch before it counts as wrong


class Outside(NamedTuple):
    """A kernel that is not ours: the op that it computes, its name, and the function."""

    op: str
    name: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Request:
    """Order of a user, checked: the launches to prove, and the machine.

    output: the checkpoint, with its quantized components on the meta device; None for a model under every recipe.
    """

    machine: Machine
    output: str | None
    components: dict[str, nn.Module]
    outside: Outside | None


@dataclass
class Examination:
    """Findings of a run.

    machine: GPU, driver and versions.
    outside: name of the candidate.
    rows: of kernels/findings.py, one for each cell and shape, with `chosen` and `candidate`.
    left_out: what this chip has no kernel for, or could not be timed -> reason.
    uncompared: what was launched and could not be compared -> reason.
    file: that the dispatcher reads; None where nothing was kept, and `not_kept` says why.
    """

    machine: dict[str, str]
    outside: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    uncompared: dict[str, str] = field(default_factory=dict)
    file: str | None = None
    not_kept: str = ""

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """Rows of what was wrong."""
        return [row for row in self.rows if row["why"]]

    @property
    def our_rows(self) -> list[dict[str, Any]]:
        """Rows of what is not the candidate, and nothing about that in them."""
        return [
            row | {"beside": {name: us for name, us in row["beside"].items() if name != self.outside}}
            for row in self.rows
            if not row["candidate"]
        ]


def request_of(
    output: str | None,
    *,
    device: str = "cuda",
    chip: str | None = None,
    prefer: str = "speed",
    candidate: str | None = None,
    op: str | None = None,
) -> Request:
    """Check what a user asked for, before anything is computed.

    output: the checkpoint; None for the shapes of FLUX.1-dev, in the interpreter of the embedded model.
    device: the GPU.
    chip: to prove for it in the interpreter, instead of on the device.
    prefer: of fluxq.prepare.
    candidate, op: `module:function` of an outside kernel that takes the arguments of the op, to be judged beside ours.

    Raises ValueError without a GPU and without a chip, for an unknown chip, for a folder without a quantized component,
    and for a candidate that cannot be imported or called.
    """
    _require_candidate(candidate, op)
    machine = Machine(*_place(device, chip), prefer, torch.bfloat16)
    components = {} if output is None else quantized_components(output)
    outside = Outside(op, candidate, _imported(candidate)) if candidate and op else None
    return Request(machine, output, components, outside)


def examine(request: Request) -> Examination:
    """Prove the launches of a checkpoint, or of every shipped recipe, and time them; the dispatcher reads the outcome.

    Raises RuntimeError while another run examines the same kind of GPU.
    """
    from fluxq.kernels import dispatch
    from fluxq.kernels.interpreter import interpreting

    machine = request.machine
    outside = request.outside.name if request.outside else ""
    examination = Examination(findings.machine_of(machine.device, machine.chip), outside)
    with findings.keeping(examination.machine) as keeper:
        for what, times in keeper.unended.items():
            logger.warning("%s: %s", what, _ended(times))
        try:
            with findings.instead(), _unverified():  # what was wrong before is proved anew
                dispatch.forget()
                is_there = machine.device.type == "cuda"  # then Triton is to launch on that GPU
                with torch.cuda.device(machine.device) if is_there else interpreting(machine.chip):
                    choosers = _examined(request, examination, keeper)
            with findings.instead(findings.document(examination.machine, examination.our_rows)):
                dispatch.forget()
                _mark_chosen(examination, choosers)
            if request.outside and not any(row["candidate"] for row in examination.rows) and not examination.uncompared:
                examination.uncompared[outside] = f"no layer or block launches {request.outside.op}"
            if not _is_lost(machine.device):
                keeper.settle()
        except BaseException as error:
            keeper.end()
            if isinstance(error, KeyboardInterrupt) and keeper.inside:
                kept = "nothing is kept" if keeper.why_not else "what was found before is kept"
                error.add_note(f"{kept}, it was at {keeper.inside}")
            raise
        finally:
            keeper.write(examination.our_rows)
            dispatch.forget()
    examination.not_kept = keeper.why_not
    examination.file = None if keeper.why_not else str(findings.file_of(examination.machine))
    return examination


def _ended(times: int) -> str:
    """Return what is said of a launch that runs began and did not end."""
    if times < MOST_ENDS:
        return "the last run of doctor ended inside it, killed perhaps; it is tried once more"
    return f"{times} runs of doctor ended inside it; remove the file of findings to have it tried again"


def _place(device: str, chip: str | None) -> tuple[torch.device, str]:
    """Return the device and chip to prove for; ValueError where there is none."""
    if chip is not None:
        known = [name for name in CHIPS if name.startswith("sm_")]
        if chip not in known:
            raise ValueError(f"--chip {chip}: the interpreter knows {', '.join(known)}")
        return torch.device("cpu"), chip
    where = torch.device(device)
    if where.type != "cuda" or not there_is_a_gpu(where.index or 0):
        raise ValueError(
            f"--device {device}: torch finds no such CUDA or ROCm device, and only there doctor can tell whether "
            "kernels compute what they should, and how fast: run it on the GPU's machine. --chip sm_90 --interpret "
            "proves the arithmetic here, not what a compiler or a GPU makes of it"
        )
    return where, chip_of(where)


def _require_candidate(name: str | None, op: str | None) -> None:
    """Raise ValueError unless a candidate and its op are both named, or neither; nothing is imported."""
    if (name is None) != (op is None):
        raise ValueError("--candidate names a function and --op the op that it computes: give both")
    if op is not None and op not in REFERENCES:
        raise ValueError(f"--op {op}: expected one of {', '.join(sorted(REFERENCES))}")
    if name is not None and not all(name.partition(":")):
        raise ValueError(f"--candidate {name}: {CANDIDATE}")


def _imported(name: str) -> Callable[..., Any]:
    """Import a candidate, from the current folder too."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        kernel = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # of the module's own, too
        raise ValueError(f"--candidate {name}: {type(error).__name__}: {first_line(error)}; {CANDIDATE}") from None
    if not callable(kernel):
        raise ValueError(f"--candidate {name}: it is of type {type(kernel).__name__} and cannot be called; {CANDIDATE}")
    return kernel


# --- what is launched


def _launches(request: Request, left_out: dict[str, str]) -> Iterator[Callable[[], list[Launch]]]:
    """Yield functions that make the launches of a checkpoint, or of a model under every shipped recipe."""
    machine, lacks = request.machine, None
    try:
        lacks = lacks_on(machine.chip)
    except ValueError as error:
        left_out["fused blocks"] = first_line(error)
    subjects = _of_checkpoint(request.output, request.components) if request.output else _of_recipes(machine)
    for model, family, tokens, counts in subjects:
        yield from launches_of(model, family, tokens, machine, lacks, counts)


Subject = tuple[nn.Module, Family | None, ForwardPass | None, tuple[int, ...]]


def _of_checkpoint(output: str, components: dict[str, nn.Module]) -> Iterator[Subject]:
    """Yield (model on the meta device, family, tokens of a call, tokens of a layer otherwise) of each component."""
    folder = resolve_model(output, local_files_only=True, one_model=True)
    size = call_size(folder.generation_defaults)
    for component, model in components.items():
        family = next((row for row in FAMILIES.values() if row.model == type(model).__name__), None)
        reads_text = family is not None and family.kind == "text_encoder"
        counts = (size.text or PROMPT,) if reads_text else TOKENS
        yield model, family, _tokens(folder, component, size), counts


def _tokens(folder: ModelFolder, component: str, size: CallSize) -> ForwardPass | None:
    try:
        return forward_pass_of(folder, component, size)
    except ValueError:  # of a family that is not modelled
        return None


def _of_recipes(machine: Machine) -> Iterator[Subject]:
    """Yield FLUX.1-dev, in the interpreter the embedded model, under each recipe: plain, then with all it may try."""
    (row,) = find_published(MODEL)
    size, vae = CallSize(), row.vae
    if machine.device.type == "cpu":
        folder = resolve_model("tiny")
        config = {name: value for name, value in folder.config("transformer").items() if not name.startswith("_")}
        row = replace(row, name="tiny", config=config)
        size, vae = call_size(folder.generation_defaults), folder.config("vae")
    published = CatalogueModel(row)
    family = published.family
    tokens = forward_pass(family.name, dict(row.config), size, vae=vae)
    for recipe in progress([*shipped_recipes()], "Reading recipes"):
        plan = published.plan(recipe)
        for with_all in (False, True):
            model = build_on_meta(family.library, family.model, dict(row.config))
            for layer in plan.quantized:
                old = model.get_submodule(layer.name)
                model.set_submodule(layer.name, placeholder(old, _scheme_of(layer, with_all), torch.bfloat16))
            if plan.attention != "16bit":
                fluxq.set_attention(model, plan.attention)
            yield model, family, tokens, TOKENS


def _scheme_of(layer: LayerPlan, with_all: bool) -> Scheme:
    """Return the scheme of a quantized layer, plain or with every method that its recipe may try."""
    tried = layer.method
    if layer.scheme is None:
        raise RuntimeError(f"{layer.name} is not quantized")
    if not with_all:
        return layer.scheme
    return replace(
        layer.scheme,
        rank=tried.rank,
        center="center" in tried.transforms,
        smooth="smooth" in tried.transforms,
        hadamard=tried.hadamard or layer.scheme.hadamard,
        four_over_six=tried.activations_46,
    )


# --- proofs


@dataclass(frozen=True)
class Attempt:
    """One way to compute a launch.

    name: of the kernel, the library's function or the candidate.
    call: of the op's arguments.
    judge: function of its result -> cells, each with a verdict.
    cells: that are wrong if the call raises; those of the candidate have no format.
    is_library: whether torch's library computes it, which is left out if it raises on a CPU: it is a GPU's product.
    is_package: whether another package computes it, which is left out if it raises: it may lack a library or a shape.
    """

    name: str
    call: Callable[..., Any]
    judge: Callable[[Any], list[tuple[Cell, Verdict]]]
    cells: Sequence[Cell]
    is_library: bool = False
    is_package: bool = False

    @property
    def is_outside(self) -> bool:
        return not self.cells[0][1]


def _examined(
    request: Request, examination: Examination, keeper: Keeper
) -> dict[tuple[Any, ...], Callable[[], Choice]]:
    """Judge and time launches, each kind once; one that takes the GPU down is the last.

    Returns (scheme, m, n, k) of what the dispatcher chooses for -> function that asks it.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    choosers: dict[tuple[Any, ...], Callable[[], Choice]] = {}
    seen: set[Any] = set()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels of torch are not deterministic
        for make in progress([*_launches(request, examination.left_out)], "Proving layers and blocks"):
            for launch in make():
                if (kind := kind_of(launch)) in seen:
                    continue
                seen.add(kind)
                if scheme := _scheme(launch):
                    shape, choose = _chooser(launch, request.machine.chip)
                    choosers[scheme, *shape] = choose
                for row in _judged(launch, request, examination, keeper):
                    if launch_of(row) not in rows or (row["why"] and not rows[launch_of(row)]["why"]):
                        rows[launch_of(row)] = row  # of several the one that is wrong
                examination.rows = [*rows.values()]
                if _is_lost(request.machine.device):
                    examination.uncompared["all that would follow"] = "the GPU takes no more work of this process"
                    return choosers
    return choosers


def _chooser(launch: Launch, chip: str) -> tuple[tuple[int, ...], Callable[[], Choice]]:
    """Return (M, N, K) of a layer or an attention, and a function that asks the dispatcher what computes it."""
    from fluxq.kernels import dispatch, proofs
    from fluxq.kernels.launch import kind_of_linear

    if launch.op == LINEAR:
        how = kind_of_linear(*launch.arguments, chip=chip)
        return how[2:5], partial(dispatch.choose, *how)
    q = launch.arguments[0]
    shape = proofs.shape_of(launch.op, launch.arguments, (launch.op, "", chip))
    return shape, partial(dispatch.choose_attention, _codes(launch), q.shape[3], chip, *shape, q.dtype)


def _judged(launch: Launch, request: Request, examination: Examination, keeper: Keeper) -> list[dict[str, Any]]:
    """Return the rows of a launch; what cannot be judged is noted in the examination."""
    from fluxq.kernels.dispatch import WARPS_APART

    machine = request.machine
    rows: dict[str, list[dict[str, Any]]] = {}
    calls: dict[str, Callable[..., Any]] = {}
    alone: list[str] = []
    for attempt in _attempts(launch, request, examination.left_out):
        what = told(_about(launch, attempt.cells[-1]))
        if keeper.unended.get(what, 0) >= MOST_ENDS:
            verdicts = [(cell, math.inf, _ended(keeper.unended[what])) for cell in attempt.cells]
        else:
            keeper.begin(what, examination.our_rows, counted=not attempt.is_outside)
            verdicts = _verdicts(attempt, launch, machine, examination)
        rows[attempt.name] = [_row(launch, cell, share, why) for cell, share, why in verdicts]
        if _is_lost(machine.device):  # in this attempt, whose end is not noted
            calls.clear()
            break
        keeper.end()
        if verdicts and not any(why for *_, why in verdicts):
            calls[attempt.name] = attempt.call
            alone += [attempt.name] * (attempt.is_outside or attempt.is_package or attempt.name == WARPS_APART)
    what = f"timing of {launch.op} in {launch.place}"
    if keeper.unended.get(what, 0) >= MOST_ENDS:
        examination.left_out[what] = _ended(keeper.unended[what])
    elif machine.device.type == "cuda" and calls:
        keeper.begin(what, examination.our_rows)
        for name, us in _times(launch, calls, alone, machine.device, examination.left_out).items():
            for row in rows[name][-1:]:  # a layer's quantizer stands before its product
                row |= {"us": us["own"], "beside": {other: each for other, each in us.items() if other != "own"}}
        if not _is_lost(machine.device):
            keeper.end()
    return [row for each in rows.values() for row in each]


def _verdicts(
    attempt: Attempt, launch: Launch, machine: Machine, examination: Examination
) -> list[tuple[Cell, float, str]]:
    """Call and judge: (cell, share of its bound, what is wrong or empty); nothing of what was noted instead."""
    from fluxq.kernels import proofs
    from fluxq.kernels.dispatch import NoKernel

    place = f"{attempt.name} in {launch.place}"
    before = _copied(launch.arguments)
    try:
        with _poisoned():
            result = attempt.call(*tree_map_only(Tensor, lambda each: each, launch.arguments))  # in lists of its own
        if machine.device.type == "cuda":
            torch.cuda.synchronize(machine.device)  # so that a fault of the kernel is raised here
        why = proofs.unlike(launch.op, before, result)
    except torch.OutOfMemoryError as error:
        examination.uncompared[place] = first_line(error)
        return []
    except (Exception, SystemExit) as error:  # whatever a kernel raises is its result here
        has_none = isinstance(error, (NoTile, NoKernel)) or (machine.device.type == "cpu" and attempt.is_library)
        if has_none and not attempt.is_outside:  # no kernel, or a library on another device
            examination.left_out[place] = first_line(error)
            return []
        why = f"{type(error).__name__}: {first_line(error)}"
        if attempt.is_package and not _is_lost(machine.device):
            proofs.changed(launch.arguments, before)
            examination.left_out[place] = why
            return []
    if not _is_lost(machine.device):
        why = proofs.changed(launch.arguments, before) or why
    if why:
        return [(cell, math.inf, why) for cell in attempt.cells]
    try:
        return [(cell, each.share, each.what * each.is_wrong) for cell, each in attempt.judge(result)]
    except Exception as error:  # not of the kernel: it said nothing
        examination.uncompared[place] = first_line(error)
        return []


def _attempts(launch: Launch, request: Request, left_out: dict[str, str]) -> list[Attempt]:
    """List what computes a launch: our kernels and the library's products on this chip, then the candidate."""
    attempts = _own_attempts(launch, request.machine.chip, left_out)
    if request.outside is not None and request.outside.op == launch.op:
        attempts.append(_outside_attempt(request.outside, launch, request.machine.chip))
    return attempts


def _own_attempts(launch: Launch, chip: str, left_out: dict[str, str]) -> list[Attempt]:
    from fluxq.kernels import dispatch, proofs
    from fluxq.kernels.launch import kind_of_linear, launcher, linear_by

    arguments = launch.arguments
    if launch.op != LINEAR:
        judge = partial(proofs.judge, launch.op, arguments, chip=chip, sample=Sample(tokens=COMPARED))
        cells = proofs.cells_of(launch.op, arguments, chip)
        if not cells:
            left_out[f"{launch.op} in {launch.place}"] = f"{chip} has no kernel for it"
            return []
        attempt = Attempt(launch.op, partial(launcher(launch.op), chip=chip), judge, cells)
        return [attempt, *_instead_of_ours(launch, chip, left_out)]
    judged = dispatch.judged(*kind_of_linear(*arguments, chip=chip))
    offered = [choice for choice, why_not in judged if not why_not]
    if not offered:
        left_out[f"{launch.op} in {launch.place}"] = "; ".join(f"{c.implementation}: {why}" for c, why in judged)
    return [
        Attempt(
            choice.implementation,
            partial(linear_by, choice, chip=chip),
            partial(proofs.judge_linear, choice, arguments, chip=chip, sample=Sample(tokens=COMPARED)),
            [(*choice.cell, chip)],
            is_library=choice.implementation not in OPS,
        )
        for choice in offered
    ]


def _instead_of_ours(launch: Launch, chip: str, left_out: dict[str, str]) -> list[Attempt]:
    """List what may take a launch of attention from its kernel: the one with warps apart, and other packages."""
    if launch.op != ATTENTION_FP8.name:
        return []
    from fluxq.kernels import dispatch

    kernel = ATTENTION_FP8.kernel
    (q, k, v, scale), codes = launch.arguments[:4], _codes(launch)
    form = format_of(codes, q.shape[3])

    def attempt(name: str, call: Callable[..., Any], compare: Callable[..., Verdict], is_package: bool) -> Attempt:
        cell = name, form, chip

        def judge(result: Any) -> list[tuple[Cell, Verdict]]:
            return [(cell, compare(result[:, :COMPARED], q[:, :COMPARED], k, v, scale, codes))]

        return Attempt(name, partial(call, chip=chip), judge, [cell], is_package=is_package)

    packages = peers_for(codes, chip, q.dtype)
    attempts = [attempt(name, partial(kernel.by_peer, name), kernel.compare_peer, True) for name in packages]
    why_not = dispatch.warps_refusal(codes, q.shape[3], chip, q.dtype)
    if why_not and chip == "sm_90" and codes == "fp8":
        left_out[f"{dispatch.WARPS_APART} in {launch.place}"] = why_not
    if not why_not:
        attempts.insert(0, attempt(dispatch.WARPS_APART, kernel.by_warps_apart, kernel.compare_own, False))
    return attempts


def _outside_attempt(outside: Outside, launch: Launch, chip: str) -> Attempt:
    """Return the attempt of a candidate."""
    from fluxq.kernels import proofs

    cell = outside.name, "", chip

    def judge(result: Any) -> list[tuple[Cell, Verdict]]:
        return [(cell, proofs.judge_outside(launch.op, launch.arguments, result, chip, Sample(tokens=COMPARED)))]

    return Attempt(outside.name, outside.function, judge, [cell])


@contextmanager
def _unverified() -> Iterator[None]:
    """Compare no launches in the block but by this module."""
    before = settings.verification()
    settings.configure(verify="off")
    try:
        yield
    finally:
        settings.configure(verify=before)


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fill new tensors in the block with NaN, or the largest integer: what a kernel does not write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what torch.empty returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _is_lost(device: torch.device) -> bool:
    """Tell whether the GPU takes no more work, as after an access outside its memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _row(launch: Launch, cell: Cell, share: float, why: str) -> dict[str, Any]:
    """Return a row of kernels/findings.py, with `chosen` and `candidate` for people."""
    is_outside = not cell[1]
    return _about(launch, cell) | {
        "share": round(share, 4) if math.isfinite(share) else None,
        "why": why,
        "us": None,
        "beside": {},
        "chosen": not is_outside and not why,
        "candidate": is_outside,
    }


def _about(launch: Launch, cell: Cell) -> dict[str, Any]:
    """Return the part of a row that says what it is about."""
    from fluxq.kernels import proofs

    op, form, _ = cell
    shape = proofs.shape_of(launch.op, launch.arguments, cell)
    scheme = "" if op == QUANTIZE_ACTIVATION.name else _scheme(launch)
    return {"op": op, "format": form, "scheme": scheme, **dict(zip("mnk", shape, strict=True))}


def _scheme(launch: Launch) -> str:
    """Return weights and activations of a layer, or the format of an attention, as the dispatcher looks times up.

    Empty for other ops.
    """
    if launch.op == ATTENTION_FP8.name:
        return f"attention {format_of(_codes(launch), launch.arguments[0].shape[3])}"
    if launch.op != LINEAR:
        return ""
    scheme, _ = read_named(launch.arguments[2], Scheme.parse)
    return f"{scheme.weights.name}-{scheme.activations.name if scheme.activations else '16bit'}"


def _codes(launch: Launch) -> str:
    """Return the codes of an attention's call, which may leave them out."""
    return (*launch.arguments, "fp8")[4]


def _mark_chosen(examination: Examination, choosers: dict[tuple[Any, ...], Callable[[], Choice]]) -> None:
    """Mark the implementation that the dispatcher takes of each layer and attention, by what was found."""
    for row in examination.rows:
        key = row["scheme"], row["m"], row["n"], row["k"]
        if row["scheme"] and not row["candidate"]:
            row["chosen"] = not row["why"] and choosers[key]().implementation == row["op"]


# --- times


def _times(
    launch: Launch,
    calls: dict[str, Callable[..., Any]],
    alone: Sequence[str],
    device: torch.device,
    left_out: dict[str, str],
) -> dict[str, dict[str, float]]:
    """Return name of a call -> microseconds of its "own" and of the others, bf16 among them.

    alone: names of what is tried by itself first: one of them that cannot be timed is noted, and the others are timed.
    """
    from fluxq.kernels import timing

    size = sum(tensor.nbytes for tensor in tree_leaves(launch.arguments) if isinstance(tensor, Tensor))
    count = min(timing.sets_of_operands(size, device), max(2, MOST_OPERANDS // max(size, 1)))
    sets = [launch.arguments, *(_copied(launch.arguments) for _ in range(count - 1))]
    turns: dict[str, list[Callable[[], Any]]] = {}
    for name, call in calls.items():
        turns[name] = [partial(call, *operands) for operands in sets]
    if BF16 not in turns and (plain := [call for operands in sets if (call := _in_16_bit(launch, operands))]):
        turns[BF16] = plain
    for name in alone:
        try:
            timing.measure({name: turns[name]}, device, 2)
        except (Exception, SystemExit) as error:
            left_out[f"timing of {name} in {launch.place}"] = first_line(error)
            del turns[name]
    try:
        us = {name: round(each.us, 2) for name, each in timing.measure(turns, device, REPEATS).items()}
    except (Exception, SystemExit) as error:  # of what cannot be recorded in a graph
        left_out[f"timing of {launch.op} in {launch.place}"] = first_line(error)
        return {}
    timed = [name for name in calls if name in us]
    return {name: {"own": us[name]} | {other: us[other] for other in us if other != name} for name in timed}


def _copied(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.clone(), arguments)


def _in_16_bit(launch: Launch, arguments: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Return what a model in bf16 computes in the place of a launch; None where it computes nothing."""
    from fluxq.kernels import proofs

    x, *rest = arguments
    if proofs.is_product(launch.op):
        m, n, k = proofs.shape_of(launch.op, arguments, (launch.op, "", ""))
        how: dict[str, Any] = {"dtype": torch.bfloat16, "device": x.device}
        return partial(F.linear, torch.randn(m, k, **how), torch.randn(n, k, **how))
    if launch.op == ATTENTION_FP8.name:
        return partial(F.scaled_dot_product_attention, *(part.transpose(1, 2) for part in (x, *rest[:2])))
    if launch.op == QK_NORM_ROPE.name:
        return partial(REFERENCES[launch.op], *arguments)
    if launch.op == ADALN_QUANTIZE.name:
        tensors, rounding, norm, eps = rest
        given, _ = unpack_named(NormTensors, tensors, rounding)
        return partial(modulated_norm, x, given, norm, eps)
    return None


CANDIDATE = "give MODULE:FUNCTION, as python can import it from here"
PROMPT = 512  # tokens that a text encoder reads, where nothing says how many
