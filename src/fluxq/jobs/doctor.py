"""Proof of the kernels on the GPU at hand: `fluxq doctor`.

Each launch that a checkpoint makes, or FLUX.1-dev under each shipped recipe, is compared with the torch reference and
timed beside the library and bf16. kernels/findings.py keeps what was found, for the dispatcher. In the interpreter the
same is proved without a GPU, and nothing is timed.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import fluxq
from fluxq.base import settings
from fluxq.base.console import first_line
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.jobs.catalogue import CatalogueModel
from fluxq.jobs.making import quantized_components
from fluxq.jobs.memory import forward_pass_of
from fluxq.kernels.adaln_quantize.op import NormTensors, modulated_norm
from fluxq.kernels.all_ops import ADALN_QUANTIZE, ATTENTION_FP8, OPS, QK_NORM_ROPE
from fluxq.kernels.linear import placeholder
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.tensor import read_named, unpack_named
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.all_families import FAMILIES, find_published
from fluxq.recipes.family import Family
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan
from fluxq.recipes.recipe import shipped_recipes
from fluxq.recipes.workloads import CallSize, ForwardPass, forward_pass
from fluxq.runtime.launches import LINEAR, TOKENS, Launch, Machine, kind_of, launches_of
from fluxq.runtime.optimize import lacks_on

if TYPE_CHECKING:  # they need Triton
    from fluxq.kernels.compare import Sample, Verdict
    from fluxq.kernels.findings import Cell

MODEL = "FLUX.1-dev"  # whose shapes are those of an examination without a checkpoint
COMPARED = 512  # tokens of a launch, at most
REPEATS = 10
MOST_OPERANDS = 2 << 30  # bytes of all sets of operands that a call is timed with
_PATHS = re.compile(r"\S*[/\\]\S*")


class Outside(NamedTuple):
    """A kernel that is not ours: the op that it computes, its name, and the function."""

    op: str
    name: str
    function: Callable[..., Any]


@dataclass
class Examination:
    """Findings of a run.

    machine: GPU, driver and versions.
    rows: of kernels/findings.py, one for each cell and shape, with `chosen` and `candidate`.
    left_out: what was not judged -> reason.
    file: that the dispatcher reads; None of the interpreter.
    """

    machine: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    file: Path | None = None

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """Rows of what was wrong."""
        return [row for row in self.rows if row["why"]]

    @property
    def document(self) -> dict[str, Any]:
        """Content of a file: rows of our own kernels alone."""
        from fluxq.kernels import findings

        return findings.document(self.machine, [row for row in self.rows if not row["candidate"]])

    def describe(self) -> dict[str, Any]:
        """Return the examination as JSON."""
        file = None if self.file is None else str(self.file)
        return {"machine": self.machine, "rows": self.rows, "left_out": self.left_out, "file": file}


def examine(
    output: str | None,
    *,
    device: str = "cuda",
    chip: str | None = None,
    prefer: str = "speed",
    candidate: str | None = None,
    op: str | None = None,
) -> Examination:
    """Prove the launches of a checkpoint, or of every shipped recipe, and time them; the dispatcher reads the outcome.

    device: the GPU.
    chip: to prove for it in the interpreter, instead of on the device.
    prefer: of fluxq.prepare.
    candidate, op: `module:function` of an outside kernel that takes the arguments of the op, to be judged beside ours.

    Raises ValueError without a GPU and without a chip, for an unknown chip, and for a candidate that cannot be called.
    """
    machine = Machine(*_place(device, chip), prefer, torch.bfloat16)
    outside = _outside(candidate, op)
    from fluxq.kernels import dispatch, findings
    from fluxq.kernels.interpreter import interpreting

    examination = Examination(findings.machine_of(machine.device, machine.chip))
    with findings.instead(), _unverified():  # what was wrong before is proved anew
        dispatch.forget()
        with interpreting(machine.chip) if chip else nullcontext():
            launches = _launches(output, machine, examination.left_out)
            linears = _examined(launches, machine, examination, outside)
    with findings.instead(examination.document):
        dispatch.forget()
        _mark_chosen(examination, linears)
    if chip is None:
        examination.file = findings.keep(examination.machine, examination.document["rows"])
    dispatch.forget()
    return examination


def share(examination: Examination, file: Path) -> None:
    """Write what was found to a file for a bug report: GPU, driver, versions and rows; no names, no paths."""
    document = examination.document
    rows = [row | {"why": _PATHS.sub("…", row["why"])} for row in document["rows"]]
    write_json(file, document | {"rows": rows})


def _place(device: str, chip: str | None) -> tuple[torch.device, str]:
    """Return the device and chip to prove for; ValueError where there is none."""
    from fluxq.kernels.tiles import CHIPS, chip_of

    if chip is not None:
        known = [name for name in CHIPS if name.startswith("sm_")]
        if chip not in known:
            raise ValueError(f"--chip {chip}: the interpreter knows {', '.join(known)}")
        return torch.device("cpu"), chip
    where = torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: torch finds no such CUDA or ROCm device, and only there doctor can tell whether "
            "kernels compute what they should, and how fast: run it on the GPU's machine. --chip sm_90 --interpret "
            "proves the arithmetic here, not what a compiler or a GPU makes of it"
        )
    return where, chip_of(where)


def _outside(name: str | None, op: str | None) -> Outside | None:
    """Import a candidate, from the current folder too."""
    if name is None and op is None:
        return None
    if name is None or op is None:
        raise ValueError("--candidate names a function and --op the op that it computes: give both")
    if op not in REFERENCES:
        raise ValueError(f"--op {op}: expected one of {', '.join(sorted(REFERENCES))}")
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        return Outside(op, name, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--candidate {name}: {error}; give MODULE:FUNCTION, as python can import it from here"
        ) from None


# --- what is launched


def _launches(output: str | None, machine: Machine, left_out: dict[str, str]) -> Iterator[list[Launch]]:
    """Yield the launches of a checkpoint, or of a model under every shipped recipe."""
    lacks = None
    try:
        lacks = lacks_on(machine.chip)
    except ValueError as error:
        left_out["fused blocks"] = first_line(error)
    for model, family, tokens, counts in _of_checkpoint(output) if output else _of_recipes(machine):
        yield from launches_of(model, family, tokens, machine, lacks, counts)


Subject = tuple[nn.Module, Family | None, ForwardPass | None, tuple[int, ...]]


def _of_checkpoint(output: str) -> Iterator[Subject]:
    """Yield (model on the meta device, family, tokens of a call, tokens of a layer otherwise) of each component."""
    folder = resolve_model(output, local_files_only=True, one_model=True)
    defaults = folder.generation_defaults
    names = ("height", "width", "num_frames", "max_sequence_length")
    size = CallSize(1, *(defaults.get(name) for name in names))
    for component, model in quantized_components(output).items():
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
        defaults, vae = folder.generation_defaults, folder.config("vae")
        size = CallSize(1, defaults["height"], defaults["width"], None, defaults["max_sequence_length"])
    published = CatalogueModel(row)
    family = published.family
    tokens = forward_pass(family.name, dict(row.config), size, vae=vae)
    for recipe in shipped_recipes():
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
        hadamard=tried.hadamard,
        four_over_six=tried.activations_46,
    )


# --- proofs


@dataclass(frozen=True)
class Attempt:
    """One way to compute a launch.

    name: of the kernel, the library's function or the candidate.
    call: of the op's arguments.
    judge: function of its result -> cells, each with a verdict.
    cells: that are wrong if the call raises.
    """

    name: str
    call: Callable[..., Any]
    judge: Callable[[Any], list[tuple[Cell, Verdict]]]
    cells: Sequence[Cell]


def _examined(
    groups: Iterable[list[Launch]], machine: Machine, examination: Examination, outside: Outside | None
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Judge and time launches, each kind once; one that takes the GPU down is the last.

    Returns (scheme, m, n, k) of layers -> arguments of `dispatch.choose`.
    """
    from fluxq.kernels.launch import kind_of_linear

    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    linears: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    seen: set[Any] = set()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels of torch are not deterministic
        for launch in (launch for group in groups for launch in group):
            if (kind := kind_of(launch)) in seen:
                continue
            seen.add(kind)
            if launch.op == LINEAR:
                linears[_scheme(launch), *_size(launch)] = kind_of_linear(*launch.arguments, chip=machine.chip)
            for row in _judged(launch, machine, examination.left_out, outside):
                key = tuple(row[name] for name in ("op", "format", "scheme", "m", "n", "k"))
                if key not in rows or (row["why"] and not rows[key]["why"]):  # of several the one that is wrong
                    rows[key] = row
            if _is_lost(machine.device):
                examination.left_out["all that would follow"] = "the GPU takes no more work of this process"
                break
    examination.rows = [*rows.values()]
    return linears


def _judged(
    launch: Launch, machine: Machine, left_out: dict[str, str], outside: Outside | None
) -> list[dict[str, Any]]:
    """Return the rows of a launch; what cannot be judged is noted in left_out."""
    from fluxq.kernels.dispatch import NoKernel
    from fluxq.kernels.tiles import NoTile

    rows: dict[str, list[dict[str, Any]]] = {}
    calls: dict[str, Callable[..., Any]] = {}
    attempts = _attempts(launch, machine.chip, left_out)
    if outside is not None and outside.op == launch.op:
        attempts.append(_outside_attempt(outside, launch, machine.chip))
    for attempt in attempts:
        place = f"{attempt.name} in {launch.place}"
        try:
            with _poisoned():
                found = attempt.call(*launch.arguments)
            if machine.device.type == "cuda":
                torch.cuda.synchronize(machine.device)  # so that a fault of the kernel is raised here
        except (NoTile, NoKernel, torch.OutOfMemoryError) as error:
            left_out[place] = first_line(error)
            continue
        except Exception as error:  # whatever a kernel raises is its result here
            if machine.device.type == "cpu" and attempt.name not in OPS and attempt.cells[0][1]:
                left_out[place] = first_line(error)  # a library, on another device
                continue
            verdicts = [(cell, math.inf, f"{type(error).__name__}: {first_line(error)}") for cell in attempt.cells]
        else:
            try:
                verdicts = [(cell, each.share, each.what * each.is_wrong) for cell, each in attempt.judge(found)]
            except Exception as error:  # not of the kernel: it said nothing
                left_out[place] = f"could not be compared: {first_line(error)}"
                continue
        rows[attempt.name] = [_row(launch, cell, share, why) for cell, share, why in verdicts]
        if not any(why for *_, why in verdicts):
            calls[attempt.name] = attempt.call
    if machine.device.type == "cuda" and calls and not _is_lost(machine.device):
        for name, us in _times(launch, calls, machine.device, left_out).items():
            for row in rows.get(name, ())[-1:]:  # a layer's quantizer stands before its product
                row |= {"us": us["own"], "beside": {other: each for other, each in us.items() if other != "own"}}
    return [row for each in rows.values() for row in each]


def _attempts(launch: Launch, chip: str, left_out: dict[str, str]) -> list[Attempt]:
    """List the kernels, and of a layer the library's products too, that the chip has for a launch."""
    from fluxq.kernels import dispatch, proofs
    from fluxq.kernels.launch import kind_of_linear, launcher, linear_by

    given = launch.arguments
    if launch.op != LINEAR:
        judge = partial(proofs.judge, launch.op, given, chip=chip, sample=_sample())
        cells = proofs.cells_of(launch.op, given, chip)
        return [Attempt(launch.op, partial(launcher(launch.op), chip=chip), judge, cells)]
    judged = dispatch.judged(*kind_of_linear(*given, chip=chip))
    offered = [choice for choice, why_not in judged if not why_not]
    if not offered:
        left_out[f"{launch.op} in {launch.place}"] = "; ".join(f"{c.implementation}: {why}" for c, why in judged)
    return [
        Attempt(
            choice.implementation,
            partial(linear_by, choice, chip=chip),
            partial(proofs.judge_linear, choice, given, chip=chip, sample=_sample()),
            [(*choice.cell, chip)],
        )
        for choice in offered
    ]


def _outside_attempt(outside: Outside, launch: Launch, chip: str) -> Attempt:
    """Return the attempt of a candidate."""
    from fluxq.kernels import proofs

    cell = outside.name, "", chip

    def judge(found: Any) -> list[tuple[Cell, Verdict]]:
        return [(cell, proofs.judge_outside(launch.op, launch.arguments, found, chip, _sample()))]

    return Attempt(outside.name, outside.function, judge, [cell])


def _sample() -> Sample:
    from fluxq.kernels.compare import Sample

    return Sample(tokens=COMPARED)


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
    op, form, _ = cell
    is_quantizer = launch.op == LINEAR and form and op in OPS and OPS[op].how == "memory"
    m, n, k = _size(launch)
    return {
        "op": op,
        "format": form,
        "scheme": _scheme(launch) if launch.op == LINEAR and not is_quantizer else "",
        "m": m,
        "n": k if is_quantizer else n,
        "k": k,
        "share": round(share, 4) if math.isfinite(share) else None,
        "why": why,
        "us": None,
        "beside": {},
        "chosen": bool(form) and not why,
        "candidate": not form,
    }


def _scheme(launch: Launch) -> str:
    """Return weights and activations of a layer, as the dispatcher looks its times up."""
    scheme, _ = read_named(launch.arguments[2], Scheme.parse)
    return f"{scheme.weights.name}-{scheme.activations.name if scheme.activations else '16bit'}"


def _size(launch: Launch) -> tuple[int, int, int]:
    """Return (M, N, K): tokens, outputs and inputs; of attention tokens, channels and keys."""
    x, *rest = launch.arguments
    if x.ndim == 4 and launch.op != LINEAR:
        width = x.shape[2] * x.shape[3]
        return x.shape[0] * x.shape[1], width, rest[0].shape[1] if launch.op == ATTENTION_FP8.name else width
    m, k = x.numel() // x.shape[-1], x.shape[-1] * (2 if x.dtype == torch.uint8 else 1)  # 4-bit codes: two to a byte
    return m, rest[0][0].shape[0] if _is_product(launch) else k, k


def _is_product(launch: Launch) -> bool:
    return launch.op == LINEAR or hasattr(OPS[launch.op].kernel, "multiply")


def _mark_chosen(examination: Examination, linears: dict[tuple[Any, ...], tuple[Any, ...]]) -> None:
    """Mark the implementation that the dispatcher takes of each layer, by what was found."""
    from fluxq.kernels import dispatch

    for row in examination.rows:
        key = row["scheme"], row["m"], row["n"], row["k"]
        if row["scheme"] and not row["candidate"]:
            row["chosen"] = dispatch.choose(*linears[key]).implementation == row["op"]


# --- times


def _times(
    launch: Launch, calls: dict[str, Callable[..., Any]], device: torch.device, left_out: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Return name of a call -> microseconds of its "own" and of the others, bf16 among them."""
    from fluxq.kernels import timing

    size = sum(tensor.nbytes for tensor in tree_leaves(launch.arguments) if isinstance(tensor, Tensor))
    count = min(timing.sets_of_operands(size, device), max(2, MOST_OPERANDS // max(size, 1)))
    sets = [launch.arguments, *(_copied(launch.arguments) for _ in range(count - 1))]
    turns: dict[str, list[Callable[[], Any]]] = {}
    for name, call in calls.items():
        turns[name] = [partial(call, *operands) for operands in sets]
    if BF16 not in turns and (plain := [call for operands in sets if (call := _in_16_bit(launch, operands))]):
        turns[BF16] = plain
    try:
        us = {name: round(each.us, 2) for name, each in timing.measure(turns, device, REPEATS).items()}
    except RuntimeError as error:  # of what cannot be recorded in a graph
        left_out[f"times of {launch.op} in {launch.place}"] = first_line(error)
        return {}
    return {name: {"own": us[name]} | {other: us[other] for other in us if other != name} for name in calls}


def _copied(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.clone(), arguments)


def _in_16_bit(launch: Launch, arguments: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Return what a model in bf16 computes in the place of a launch; None where it computes nothing."""
    x, *rest = arguments
    if _is_product(launch):
        (m, n, k), how = _size(launch), {"dtype": torch.bfloat16, "device": x.device}
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


BF16 = "bf16"
PROMPT = 512  # tokens that a text encoder reads, where nothing says how many
