"""Inspection of a quantized file: what it is, and whether it is right, by layer, with the 16-bit model or without.

Without `base` the report says what the file says, what its shapes and numbers contradict, and what readers stop at.
With it, every layer is compared with the weight it was rounded from (`proof.py`), which decides what no field of a file
records. One layer is in memory at a time, and the base's rows for it.

FAULTS, at the end, has a row for everything that is found wrong: what it is called, what it means, and the cure.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.console import progress
from fluxq.base.model import ModelFolder
from fluxq.base.tensors import Stored
from fluxq.quantize.checkpoint import ACTIVATIONS, LARGEST
from fluxq.quantize.exchange.beside import other_settings, other_small_files, shown
from fluxq.quantize.exchange.files import ModelFile, open_component, open_models
from fluxq.quantize.exchange.folding import Linear, Vector, differ, has_strays, not_taken_back
from fluxq.quantize.exchange.layer import Plain
from fluxq.quantize.exchange.layouts import LostScales, NeedsPackage, unblock_scales
from fluxq.quantize.exchange.marks import GLOBAL_SCALES, PLAIN, FileLayer
from fluxq.quantize.exchange.proof import CASTS, DECLARED, FAR, REPAIRS, Against, compare, prove
from fluxq.quantize.exchange.reference import Base, settled
from fluxq.quantize.exchange.rows import not_finite
from fluxq.recipes.keymaps import Joined


@dataclass(frozen=True)
class Fault:
    """kind: a key of FAULTS. layer: "" for the whole file. what: what was found, and expected."""

    kind: str
    layer: str
    what: str

    @property
    def is_error(self) -> bool:
        """True if images are wrong, or a reader stops."""
        return FAULTS[self.kind].is_error


@dataclass(frozen=True)
class LayerReport:
    """A quantized layer. modules: of diffusers, several where the file joins them. format: the dialect's word. scheme:
    ours, "" where none of ours holds the codes. bits_per_weight: all that is stored for it, as a plan counts it.
    """

    name: str
    modules: tuple[str, ...]
    role: str
    format: str
    scheme: str
    shape: tuple[int, int]
    bits_per_weight: float
    against: Against | None = None


@dataclass
class Inspection:
    """Report of `inspect` on one model.

    scope: role -> format -> layers. in_16_bit: Linears by module. plain: count of the other tensors. proofs: what the
    base proved, in words; unproved: what it cannot. base: its path, "" without.
    """

    path: str
    container: str
    dialect: str
    about: str
    evidence: tuple[str, ...]
    contradictions: tuple[str, ...]
    family: str
    names: str
    nbytes: int
    bits_per_weight: float
    metadata: dict[str, str]
    quantization: dict[str, Any]
    layers: list[LayerReport] = field(default_factory=list)
    in_16_bit: dict[str, tuple[int, int]] = field(default_factory=dict)
    scope: dict[str, dict[str, int]] = field(default_factory=dict)
    plain: int = 0
    faults: list[Fault] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    base: str = ""

    @property
    def is_sound(self) -> bool:
        """True if nothing was found that makes images wrong or stops a reader."""
        return not any(fault.is_error for fault in self.faults)

    def describe(self) -> dict[str, Any]:
        """The report as JSON."""
        document = asdict(replace(self, layers=[replace(layer, against=None) for layer in self.layers]))
        for layer, entry in zip(self.layers, document["layers"], strict=True):
            if layer.against is not None:
                entry["against"] = layer.against.describe()
        for fault, entry in zip(self.faults, document["faults"], strict=True):
            entry |= {"is_error": fault.is_error, "about": FAULTS[fault.kind].about, "cure": FAULTS[fault.kind].cure}
        # JSON has no infinite numbers and no NaN: here they are text.
        return json.loads(json.dumps(document), parse_constant=lambda number: str(float(number)))


def inspect_path(path: Path, base: Path | None = None) -> dict[str, Inspection]:
    """Inspect a file, a component's folder or a pipeline's; by component, "" where there is just one.

    base: the 16-bit model, likewise. Errors as `open_models` has them, and ValueError for a base that is quantized or
    has no such component.
    """
    models = open_models(path)
    if base is None:
        return {name: inspect_model(model) for name, model in models.items()}
    models = {name: model for name, model in models.items() if model.dialect != PLAIN} or models
    inspections = {name: inspect_model(model, Base.of(base, name, model)) for name, model in models.items()}
    first = next(iter(inspections.values()), None)
    if first is not None:
        faults, unproved = beside_weights(path, base, inspections)
        first.faults += faults
        first.unproved += unproved
    return inspections


def beside_weights(path: Path, base: Path, looked_at: Mapping[str, object]) -> tuple[list[Fault], list[str]]:
    """Find faults in a pipeline's other components, compared with the base's, and what could not be compared.

    looked_at: components that are inspected themselves.
    """
    if not (path / "model_index.json").is_file():
        return [], []
    pipeline = ModelFolder(path.name, path)
    others = [name for name in pipeline.components if name not in looked_at and (path / name).is_dir()]
    if not (base / "model_index.json").is_file():
        sentence = f"{', '.join(others)}: the base is no pipeline's folder, so they were not compared"
        return [], [sentence] if others else []
    whole, differences = ModelFolder(base.name, base), list[tuple[str, str]]()
    for key in ("_class_name", *pipeline.components):
        mine, bases = (folder.index.get(key) for folder in (pipeline, whole))
        if mine != bases and bases is not None:
            differences.append((key, f"model_index.json has {shown(mine)}, the base's {shown(bases)}"))
    lacking = [name for name in others if not (base / name).is_dir()]
    for name in others:
        if name not in lacking:
            differences += [(name, what) for what in _other_component(pipeline, whole, name)]
    faults = [Fault("another component", name, what) for name, what in differences]
    return faults, [f"{', '.join(lacking)}: the base has none, so they were not compared"] if lacking else []


def _other_component(pipeline: ModelFolder, base: ModelFolder, name: str) -> Iterator[str]:
    yield from other_small_files(pipeline, base, name)
    ours, theirs = pipeline.path / name, base.path / name
    if not all((folder / "config.json").is_file() and any(folder.glob("*.safetensors")) for folder in (ours, theirs)):
        return
    yield from other_settings(pipeline.config(name), base.config(name))
    if pipeline.tensors_digest(name) == base.tensors_digest(name):
        return
    mine, bases = (open_component(folder, "component of a pipeline folder") for folder in (ours, theirs))
    if bases.dialect != PLAIN:
        yield f"the base's is quantized itself ({bases.dialect}), so they could not be compared; give the 16-bit model"
        return
    wrong = [fault for fault in inspect_model(mine, Base(bases)).faults if fault.is_error]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        yield f"{wrong[0].layer}: {wrong[0].what}{more}"


def inspect_model(model: ModelFile, base: Base | None = None) -> Inspection:
    """Inspect one model; layers are read one at a time."""
    model = settled(model, base) if base is not None else model
    in_16_bit = model.linears_in_16_bit()
    stored = sum(layer.nbytes for layer in model.layers.values()) + sum(2 * n * k for n, k in in_16_bit.values())
    count = sum(n * k for n, k in (*(layer.shape for layer in model.layers.values()), *in_16_bit.values()))
    done = Inspection(
        str(model.path),
        model.container,
        model.unknown_method or model.dialect,
        f"what {model.unknown_method} wrote is not read here" if model.unknown_method else model.rules.about,
        () if model.unknown_method else model.evidence,
        model.contradictions,
        model.family.name if model.family else "",
        model.names,
        sum(stored.nbytes for stored in model.stored.values()),
        8 * stored / count if count else 0.0,
        model.metadata,
        model.quantization,
        in_16_bit=in_16_bit,
        plain=len(model.plain) - len(in_16_bit),
        base=str(base.model.path) if base else "",
    )
    done.faults += [Fault("unreadable", name, what) for name, what in model.faults.items()]
    joined, compared = dict[str, Joined](), dict[str, Linear]()
    try:
        joined = model.joined
    except ValueError as error:
        done.faults.append(Fault("unknown names", "", str(error)))
    for name, layer in progress(list(model.layers.items()), f"Reading {model.path.name}"):
        parts = joined.get(f"{name}.weight", Joined(name, (f"{name}.weight",)))
        report, faults = _layer(model, layer, parts, base)
        done.layers.append(report)
        done.faults += faults
        if base is not None and report.against is not None:
            compared[name] = _linear(model, report.against, layer.shape, layer.stored.get("bias"), parts, base)
    scope: dict[str, Counter[str]] = defaultdict(Counter)
    for report in done.layers:
        scope[report.role or "unknown"][report.format] += 1
    for name in in_16_bit:
        modules = _modules(joined.get(f"{name}.weight", Joined(name, (name,))))
        scope[_role(model, modules) or "unknown"]["16 bit"] += 1
    done.scope = {role: dict(formats) for role, formats in sorted(scope.items())}
    done.faults += [*_narrow_scales(model), *_left_out(model, joined)]
    done.faults += [Fault(*fault) for fault in model.rules.faults(model)]
    done.faults += [Fault("unread", name, f"nothing reads {', '.join(left)}") for name, left in model.unread.items()]
    done.faults += _disabled(model)
    unreadable = {fault.layer for fault in done.faults if fault.kind == "unreadable"}
    done.faults += _plain_numbers(model, unreadable)
    if model.unknown_method:
        done.faults.append(Fault("another program's", "", f"it is {model.unknown_method}'s"))
    if count := sum(any(suffix in _OF_X for suffix in layer.parts) for layer in model.layers.values()):
        what = f"input scales of {count} layers, which are of activations: no base tells whether they are right"
        done.unproved.append(what)
    if base is not None:
        _hold_against(base, model, done, joined, compared)
    return done


def _hold_against(
    base: Base, model: ModelFile, done: Inspection, joined: Mapping[str, Joined], compared: dict[str, Linear]
) -> None:
    """Add to a report what the base says of all but the quantized layers, and what it proves. compared: is added to."""
    for name, shape in progress(list(done.in_16_bit.items()), "Reading 16-bit Linears"):
        parts = joined.get(f"{name}.weight")
        if parts is None or name in {fault.layer for fault in done.faults}:
            continue
        if (linear := _compared_16_bit(model, name, shape, parts, base)) is not None:
            compared[name] = linear
            done.faults += _verdict(name, linear.against)
    done.faults = _with_folding(model, done.faults, compared, joined, base)
    done.faults += [Fault("other settings", "", what) for what in other_settings(model.config, base.model.config)]
    if model.config and not base.model.config:
        done.unproved.append("config.json: the base has none, so its settings were not compared")
    if base.model.config and not model.config:
        done.unproved.append("config.json: the file has none, so the base's settings are taken for its own")
    done.proofs += _proofs(done)
    foreign = {fault.layer for fault in done.faults if fault.kind == "another model's layer"}
    if done.layers and len(foreign) > len(done.layers) / 2:
        what = f"{len(foreign)} of {len(done.layers)} layers are nothing like the base's"
        done.faults.append(Fault("another base", "", what))


def _layer(model: ModelFile, layer: FileLayer, joined: Joined, base: Base | None) -> tuple[LayerReport, list[Fault]]:
    tensors, modules = model.read_layer(layer), _modules(joined)
    faults = [Fault(kind, layer.name, what) for kind, what in _numbers(model, layer, tensors)]
    faults += _missing_input_scale(model, layer)
    n, k = layer.shape
    scheme, error, is_lost = "", "", False
    try:
        decoded = model.decode(layer, tensors)
        scheme = "" if isinstance(decoded, Plain) else str(decoded.scheme)
        del decoded
    except NeedsPackage as why:
        if base is not None:
            raise
        faults.append(Fault("not decoded", layer.name, str(why)))
    except ValueError as wrong:
        error, is_lost = str(wrong), isinstance(wrong, LostScales)
        if is_lost:  # which says more than that there are some
            faults = [fault for fault in faults if fault.kind != "zero scales"]
    against = None
    if base is not None:
        truth, orders, why = base.rows(layer.shape, joined)
        if truth is None:
            faults.append(Fault("not in the base", layer.name, why))
        else:
            against = prove(model, layer, tensors, truth, orders, _base_bias(base, joined, layer.shape))
            is_said = bool(faults) and against is not None and math.isnan(against.cosine)  # what is no number
            faults += [] if against is None or is_said else _verdict(layer.name, against)
    if error and (against is None or not against.best):  # else it is known what mends it
        faults.append(Fault("scales of 0", layer.name, error) if is_lost else _cured_by(model, layer, tensors, error))
    bits = 8 * layer.nbytes / max(n * k, 1)
    role = _role(model, modules)
    report = LayerReport(layer.name, modules, role, model.rules.format_of(layer), scheme, layer.shape, bits, against)
    return report, list({fault.kind: fault for fault in faults}.values())  # what the base says of a kind comes last


def _modules(joined: Joined) -> tuple[str, ...]:
    return tuple(part.removesuffix(".weight") for part in joined.parts)


def _bias_of(joined: Joined) -> Joined:
    return joined._replace(parts=tuple(f"{part.removesuffix('weight')}bias" for part in joined.parts))


def _base_bias(base: Base, joined: Joined, shape: tuple[int, int]) -> Tensor:
    """The base's bias (N,); zeros where it has none, so that a file's own must be too."""
    truth = base.other(_bias_of(joined), shape[1])
    return truth if truth is not None and truth.shape == shape[:1] else torch.zeros(shape[0], dtype=torch.float32)


def _linear(
    model: ModelFile, against: Against, shape: tuple[int, int], bias: Stored | None, joined: Joined, base: Base
) -> Linear:
    """A Linear for `not_taken_back`."""
    modules = _modules(joined)
    module = modules[0] if modules else joined.original
    located = model.family.locate(module) if model.family else None
    x = f"{located[1]}: {', '.join(located[0].members)}" if located else module
    by = located[0].modulation if located else None
    makers = located[0].producers if located and by is None else ()
    windows = located[0].segments(*shape) if located else (shape[1],)
    ends = list(accumulate(windows))
    return Linear(
        against,
        shape,
        _block(module),
        x,
        lambda: _truth(base, shape, joined),
        _cast_error(bias.dtype if bias else "", _base_bias(base, joined, shape)),
        modules,
        (f"{located[1]}.{by.linear}", by) if located and by else None,
        tuple(slice(end - width, end) for width, end in zip(windows, ends, strict=True)),
        tuple((f"{located[1]}.{maker.linear}", maker) for maker in makers) if located else (),
    )


def _block(name: str) -> str:
    """The block that a module of diffusers stands in, "" for none."""
    match = _IN_BLOCK.match(name)
    return match[1] if match else ""


def _cast_error(dtype: str, truth: Tensor) -> float:
    """The relative error of the base's tensor by rounding to a dtype, at most: in fp8 small numbers lose much of it."""
    if dtype not in CASTS:
        return _CAST
    cast = truth.float().to(CASTS[dtype]).float()
    return float((cast - truth).norm() / truth.norm().clamp(min=1e-30)) + _CAST


def _truth(base: Base, shape: tuple[int, int], joined: Joined) -> Tensor:
    weight, _, why = base.rows(shape, joined)
    if weight is None:
        raise ValueError(why)
    return weight.float()


def _compared_16_bit(model: ModelFile, name: str, shape: tuple[int, int], joined: Joined, base: Base) -> Linear | None:
    """A Linear that is not quantized beside the base's; None where that has none."""
    truth, orders, _ = base.rows(shape, joined)
    if truth is None:
        return None
    stored, bias = model.stored.get(f"{name}.bias"), torch.zeros(shape[0], dtype=torch.float32)
    bias = model.read(f"{name}.bias").float() if stored else bias
    truth_of_bias = _base_bias(base, joined, shape)
    pair = (bias, truth_of_bias) if bias.shape == truth_of_bias.shape else None
    against = compare(model.read_plain(f"{name}.weight"), truth, orders, pair)
    return _linear(model, against, shape, stored, joined, base)


def _with_folding(
    model: ModelFile, faults: list[Fault], compared: Mapping[str, Linear], joined: Mapping[str, Joined], base: Base
) -> list[Fault]:
    """The faults once it is known what other layers take back, and those of all other tensors."""
    all_faults, vectors = list(faults), dict[str, Vector]()
    wrong = {fault.layer for fault in faults}
    for name in model.plain:
        module = name.rpartition(".")[0]
        if module in compared or name not in joined or name in wrong or module in wrong:
            continue
        truth, tensor = base.other(joined[name], 0), model.read(name)
        if not tensor.is_floating_point() or not joined[name].parts:  # positions, which classes make themselves
            continue
        tensor, most = tensor.float(), _CAST if truth is None else _cast_error(model.stored[name].dtype, truth)
        if truth is None:
            all_faults.append(Fault("not in the base", name, f"the base has no {joined[name].parts[0]}"))
        elif truth.numel() != tensor.numel():
            all_faults.append(Fault("another value", name, f"it is {(*tensor.shape,)}, the base's {(*truth.shape,)}"))
        elif not (has_strays if tensor.ndim == 1 else differ)(tensor.reshape(-1), truth.reshape(-1), most):
            continue
        elif tensor.ndim == 1:
            vectors[name] = Vector(tensor, truth.reshape(-1), _block(joined[name].parts[0]), most)
        else:
            rows = tensor.shape[0] if tensor.ndim else 1
            against = compare(tensor.reshape(rows, -1), truth.reshape(rows, -1), {})
            shown = _verdict(name, against)
            all_faults += [replace(f, kind="lost scale") if f.kind == "folded factors" else f for f in shown]
    left, folded = not_taken_back(compared, vectors)
    for at, fault in enumerate(all_faults):
        if fault.kind == "scale off by a factor" and fault.layer in folded:
            all_faults[at] = replace(fault, kind="folded factors")
        elif fault.kind == "folded factors" and fault.layer in left:
            all_faults[at] = replace(fault, kind="lost scale", what=f"{fault.what}; {left[fault.layer]}")
    faulty_layers = {fault.layer for fault in all_faults}
    tuned = {fault.layer for fault in all_faults if fault.kind == "differs"}
    for name, what in left.items():
        if name in vectors:
            each = vectors[name]
            alike = float(each.tensor @ each.base) > _ALIKE * float(each.tensor.norm() * each.base.norm())
            share = float((each.tensor - each.base).norm() / each.base.norm().clamp(min=1e-30))
            what = f"it differs from the base's by {share:.3g} of it"
            all_faults.append(Fault("differs" if alike else "another value", name, what))
        elif name not in faulty_layers or name in tuned:
            all_faults.append(Fault("differs" if name in tuned else "another value", name, what))
    all_faults += _missing(model, joined, base)
    if len(tuned & compared.keys()) > len(compared) / 2:
        return all_faults
    few = f"{len(tuned & compared.keys())} of {len(compared)} Linears differ so"
    return [replace(f, kind="damaged", what=f"{f.what}; {few}") if f.kind == "differs" else f for f in all_faults]


def _missing(model: ModelFile, joined: Mapping[str, Joined], base: Base) -> Iterator[Fault]:
    """Tensors of the base that the file lacks, but for those that are tied to one that it has.

    A layer's bias that it lacks is compared as zeros.
    """
    names = {part for each in joined.values() for part in each.parts}
    layers = [joined[f"{name}.weight"] for name in model.layers if f"{name}.weight" in joined]
    names |= {part for each in layers for part in _bias_of(each).parts}
    for name in base.lacking(names) if names else ():
        yield Fault("missing", name, "the base has it, and the file does not")


def _plain_numbers(model: ModelFile, unreadable: set[str]) -> Iterator[Fault]:
    """Numbers of tensors that are not quantized which no model has.

    unreadable: layers that are faults already, whose tensors are not read: they may be of any size.
    """
    integers, left = [], {name for layer in unreadable for name in model.groups.get(layer, {}).values()}
    for name in (name for name in model.plain if name not in left):
        tensor, dtype, what = model.read(name), model.stored[name].dtype, name.rpartition(".")[2]
        if bad := not_finite(tensor):
            yield Fault("no numbers", name, f"{bad} are NaN or infinite")
        elif tensor.is_floating_point() and tensor.numel() and float(tensor.float().abs().max()) > LARGEST:
            yield Fault("too large", name, f"up to {float(tensor.float().abs().max()):.3g}, which no model needs")
        elif not dtype.startswith(("F", "BF")) and what in ("weight", "bias", "scale"):
            integers.append(Fault("integers", name, f"it holds {dtype}"))  # of positions, which classes make, they may
    yield from integers


def _disabled(model: ModelFile) -> Iterator[Fault]:
    for name, left in model.disabled.items():
        try:
            model.read_plain(f"{name}.weight")
            yield Fault("disabled", name, f"it has {', '.join(left)} beside")
        except ValueError as error:
            yield Fault("unreadable", name, str(error))


def _cured_by(model: ModelFile, layer: FileLayer, tensors: dict[str, Tensor], error: str) -> Fault:
    """Find the fault for which `decode` refused a layer: a change of shape or dtype cures it, or it is "unreadable"."""
    for name, repair in REPAIRS.items():
        if not repair.cures_shape:
            continue
        try:
            mended = repair.mend(tensors, model.rules, layer.shape)
            if mended is not None:
                model.decode(layer, mended)
                return Fault(name, layer.name, error)
        except ValueError:
            continue
    return Fault("unreadable", layer.name, error)


def _verdict(name: str, against: Against) -> Iterator[Fault]:
    """Yield the faults that the comparison of a layer with the base's shows."""
    if against.widened:
        bits = 8 if against.error < 0.05 else 4
        yield Fault("widened", name, f"error {against.error:.3g}, as codes of {bits} bits have")
        return
    declared = against.errors.get(DECLARED)
    if against.best and (against.plausible or against.error < 0.6 * (declared or torch.inf)):
        outcome = "cannot be read" if declared is None else f"has an error of {declared:.3g}"
        what = f"as declared it {outcome}, with {' and '.join(against.best)} {against.error:.3g}"
        for order in against.best:
            yield Fault(order if order in FAULTS else "rows in another order", name, what)
    if against.strays:
        what = f"{against.strays.words} are further off than rounding takes them"
        yield Fault("lost scale" if against.strays.lost else "differs", name, what)
    elif not against.plausible:
        left = max(0.0, 1 - against.cosine**2) ** 0.5  # once all of the layer takes one factor
        if against.factors is not None:
            factors, left = against.factors, against.factors.left
            once = f"once each of its {factors.axes} takes a factor"
            if factors.few and factors.columns is not None:
                once = f"with a factor for {int((factors.columns != 1).sum())} of its columns"
            what = f"error {against.error:.3g}, and {left:.3g} {once}"
            yield Fault("folded factors", name, what)
        elif against.scaled and left <= against.bound and against.cosine > 0:
            what = f"{against.factor:.4g} times what was read comes nearest to the base"
            yield Fault("scale off by a factor", name, what)
        elif not against.cosine >= _ALIKE:
            what = f"its cosine with the base's weight is {against.cosine:.2g}, no reading has an error below "
            yield Fault("another model's layer", name, f"{what}{min(against.errors.values()):.3g}")
        else:
            what = f"error {against.error:.3g}, cosine {against.cosine:.3f}: no rounding of this weight alone"
            yield Fault("differs", name, what)


# --- numbers


def _numbers(model: ModelFile, layer: FileLayer, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """NaN, infinity, zeros and signs among scales and codes, and global scales that no weight has."""
    for suffix, tensor in tensors.items():
        if suffix == "weight.absmax" and "weight.nested_absmax" in tensors:
            continue  # an index into a table
        if suffix in _SCALES:
            yield from _scale_numbers(model, layer, suffix, tensor, tensors)
        elif bad := not_finite(tensor):
            kind = "codes that are NaN" if tensor.element_size() == 1 else "scales that are no numbers"
            yield "no numbers" if suffix == "bias" else kind, f"{bad} of {tensor.numel()} in {suffix}"
        elif suffix == "bias" and tensor.numel() and float(tensor.float().abs().max()) > LARGEST:
            yield "too large", f"{suffix} is up to {float(tensor.float().abs().max()):.3g}"


def _scale_numbers(
    model: ModelFile, layer: FileLayer, suffix: str, scale: Tensor, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    n, k = layer.shape
    is_nvfp4 = any(name in tensors for name in GLOBAL_SCALES)
    e8m0 = scale.dtype == torch.float8_e8m0fnu or (scale.dtype == torch.uint8 and not is_nvfp4)
    is_tiled = suffix in ("weight_scale", "_weight_scale") and model.rules.tiles is not None
    if is_tiled and scale.ndim == 2 and scale.element_size() == 1:
        try:
            scale = unblock_scales(scale.contiguous(), n, k // (32 if e8m0 else 16))
        except ValueError:
            return  # of another shape, which is reported as such
    if e8m0:
        codes = scale.view(torch.uint8)
        if (codes == 255).any():
            yield "scales that are no numbers", f"{int((codes == 255).sum())} of {suffix} are NaN (E8M0 byte 255)"
        if (codes == 0).any():
            yield "E8M0 byte 0", f"{int((codes == 0).sum())} of {codes.numel()} in {suffix}"
        if ((codes > _E8M0_LARGEST) & (codes < 255)).any():
            yield "too large", f"{suffix} is up to 2^{int(codes[codes < 255].max()) - 127}"
        return
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e4m3fn)
    values = scale.float()
    for words, wrong in (("NaN or infinite", ~torch.isfinite(values)), ("negative", values < 0)):
        if wrong.any():
            yield "scales that are no numbers", f"{int(wrong.sum())} of {values.numel()} in {suffix} are {words}"
    zeros = int((values == 0).sum())
    if zeros and (suffix in GLOBAL_SCALES or values.numel() == 1):
        yield "global scale of 0", f"{suffix} is 0: every weight would be"
    elif zeros:
        yield "zero scales", f"{zeros} of {values.numel()} in {suffix}: their blocks are zeros"
    sound = bool(values.numel()) and bool((torch.isfinite(values) & (values > 0)).all())
    if suffix in _INPUT_SCALES and sound:
        low, high = (float(v) for v in (values.min(), values.max()))
        least, most = (1 / high, 1 / low) if suffix == "input_global_scale" else (low, high)
        if least < 1 / ACTIVATIONS or most > ACTIVATIONS:
            yield "no activations'", f"{suffix} is {high:.3g}"
    elif sound and suffix not in GLOBAL_SCALES and float(values.max()) > LARGEST:
        yield "too large", f"{suffix} is up to {float(values.max()):.3g}"
    if suffix in GLOBAL_SCALES and values.numel() and torch.isfinite(values).all():
        decoder = 1 / values.max() if suffix == "weight_global_scale" else values.max()
        largest = float(decoder) * 2688  # 448 · 6, the largest weight where scales are as nvfp4 has them
        if largest > _LARGEST_WEIGHT:
            yield "reciprocal global scale", f"{suffix} is {float(values.max()):.4g}: weights would reach {largest:.3g}"


def _narrow_scales(model: ModelFile) -> Iterator[Fault]:
    """fp32 scales that all are numbers of bf16: they were computed in that, 0.4 % off at most, and values saturate."""
    narrow: dict[str, int] = {}
    for layer in model.layers.values():
        for suffix, stored in layer.stored.items():
            if suffix not in ("weight_scale", "weight_scale_2", "_weight_per_tensor_scale") or stored.dtype != "F32":
                continue
            bits = model.read(layer.parts[suffix]).contiguous().view(torch.int32)
            if not narrow.get(suffix, 1) or bool((bits & 0xFFFF).any()):
                narrow[suffix] = 0
            elif bool((bits & 0x7F0000).any()):  # no power of two, which are numbers of bf16 anyway
                narrow[suffix] = narrow.get(suffix, 0) + 1
    for suffix, count in narrow.items():
        if count:
            yield Fault("scale rounded to bf16", "", f"every {suffix} of {count} layers is a number of bf16")


# --- what readers ask for


def _missing_input_scale(model: ModelFile, layer: FileLayer) -> Iterator[Fault]:
    row = model.rules.row(layer)
    if row is None or not layer.parts.keys().isdisjoint(_OF_X):
        return
    if row.input_scale == "required" or "input_scale" in row.needs:
        what = f"{row.name} of {model.dialect} needs one ({row.read_by or 'its readers'})"
        yield Fault("missing input_scale", layer.name, what)


def _left_out(model: ModelFile, joined: Mapping[str, Joined]) -> Iterator[Fault]:
    """Kinds of Linears that the family quantizes and this file leaves in 16 bit throughout, where they matter."""
    family = model.family
    if family is None or not model.layers:
        return
    kinds: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    sizes = {name: (layer.shape, True) for name, layer in model.layers.items()}
    sizes |= {name: (shape, False) for name, shape in model.linears_in_16_bit().items()}
    for name, ((n, k), quantized) in sizes.items():
        modules = _modules(joined[f"{name}.weight"]) if f"{name}.weight" in joined else ()
        for module in modules:
            located = family.locate(module)
            if located is not None and not family.kept(module):
                group, block = located
                kind = f"{group.block}{module.removeprefix(block)}"
                kinds[kind].append((n * k // len(modules), quantized))
    total = sum(size for members in kinds.values() for size, _ in members) or 1
    for kind, members in kinds.items():
        share = sum(size for size, _ in members) / total
        if share >= _MATTERS and not any(quantized for _, quantized in members):
            why = model.rules.left_out.get(kind.rpartition(".")[2])
            what = f"{len(members)} Linears, {share:.0%} of the weights"
            yield Fault("left in 16 bit", kind, f"{what}; {why}" if why else what)


def _role(model: ModelFile, modules: tuple[str, ...]) -> str:
    if model.family is None or not modules:
        return ""
    located = model.family.locate(modules[0])
    return located[0].role if located else "kept" if model.family.kept(modules[0]) else ""


# --- the base


def _proofs(done: Inspection) -> list[str]:
    """Return what the errors of all layers decided, in words."""
    compared = [(layer.name, layer.against) for layer in done.layers if layer.against is not None]
    if not compared:
        return []
    wrong = {fault.layer for fault in done.faults if fault.is_error}
    right = [against for name, against in compared if against.plausible and not against.best and name not in wrong]
    sentence = f"{len(right)} of {len(done.layers)} layers are as declared, in all of their rows"
    folded = [name for name, against in compared if against.factors is not None and name not in wrong]
    proofs = [sentence + (f"; {len(folded)} more have folded factors that other layers take back" if folded else "")]
    tried = dict.fromkeys(name for against in right for name in against.errors)
    rows = tuple(name for name in tried if name.startswith("rows ordered"))
    kinds = {f"no {name}": (name,) for name in (*REPAIRS, "halves swapped") if name in tried}
    for words, names in (kinds | {"rows of q, k and v in their order": rows}).items():
        others = [[against.errors[name] for name in names if name in against.errors] for against in right]
        pairs = [(against.error, min(other)) for against, other in zip(right, others, strict=True) if other]
        proved = [(error, other) for error, other in pairs if other > FAR * error]
        if proved:
            most, least = max(error for error, _ in proved), min(other for _, other in proved)
            more = f"; {len(pairs) - len(proved)} layers look the same either way" if len(pairs) > len(proved) else ""
            proofs.append(
                f"{words}: proved on {len(proved)} layers (error {most:.3g} at most, {least:.3g} otherwise){more}"
            )
    return proofs


# --- what can be wrong


@dataclass(frozen=True)
class Kind:
    """A row of FAULTS. is_error: images are wrong, or a reader stops; otherwise it is worth knowing."""

    about: str
    cure: str
    is_error: bool = True


def _note(about: str, cure: str = "none is needed") -> Kind:
    return Kind(about, cure, is_error=False)


_AGAIN = "get the file again"
_CONVERT = "write it again with a converter that does, or read it with `fluxq import --base`"
_LARGEST_WEIGHT = 1e4  # that any model has; outliers are some tens
_MATTERS = 0.05  # of the weights
_ALIKE = 0.9  # the least cosine of a weight that was tuned
_CAST = 0.004  # error of a bias or norm that was in another 16-bit dtype: twice that of bf16
_IN_BLOCK = re.compile(r"(.*?\.\d+)\.")
_E8M0_LARGEST = 127 + 20  # 2^20, as LARGEST
_INPUT_SCALES = ("input_scale", "input_global_scale", "scale_input")
_OF_X = (*_INPUT_SCALES, "activation_scale", "_weight_act_per_tensor_scale")
_SCALES = (
    *("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale", "input_global_scale"),
    *("scale_weight", "scale_input", "_weight_scale", "_weight_per_tensor_scale", "wscales", "wcscales", "wtscale"),
    *("weight.absmax", "weight_s_channel"),
)
FAULTS: dict[str, Kind] = {
    **{name: Kind(repair.about, _CONVERT) for name, repair in REPAIRS.items()},
    "rows in another order": Kind("parts of a fused layer, or shift and scale, are the other way round", _CONVERT),
    "halves swapped": Kind("shift and scale of a modulation are the other way round", _CONVERT),
    "another model's layer": Kind("the weight has nothing to do with the base's", _AGAIN),
    "another base": Kind("most layers are of another model than the base", "give the model that it was made from"),
    "scale off by a factor": Kind("all weights are too large or too small by the same factor", _AGAIN),
    "folded factors": _note("rows or columns carry factors that other layers take back: smoothing was folded"),
    "lost scale": Kind("rows or columns carry factors that no layer takes back: a scale is lost or wrong", _AGAIN),
    "another value": Kind("a bias, norm or table is not the base's", _AGAIN),
    "differs": Kind(
        "near the base's, further off than rounding takes it, and so are most Linears: rounded from another training "
        "(a fine-tune, a LoRA), or damaged throughout",
        "give the model that it was made from as base; if that is this one, get the file again",
    ),
    "damaged": Kind(
        "near the base's and further off than rounding takes it, while most Linears are not",
        f"{_AGAIN}; where a LoRA is fused into it, give the model with the LoRA as base",
    ),
    "other settings": Kind(
        "config.json has settings that are not the base's: a loader would build another model",
        "copy the base's config.json, without what it says of quantization, or give the model that it was made from",
    ),
    "another component": Kind(
        "a component beside the quantized ones is not the base's", "copy the base's, or give the model that it is from"
    ),
    "missing": Kind("the base has a tensor that the file lacks", _AGAIN),
    "no numbers": Kind("a weight, bias or norm in 16 bit is NaN or infinite", _AGAIN),
    "integers": Kind("a weight or bias that is not quantized holds integers", _AGAIN),
    "too large": Kind("a weight, bias or scale is larger than those of any model", _AGAIN),
    "no activations'": Kind("an input scale is of activations that no model has", _AGAIN),
    "widened": _note("in 16 bit, and as far from the base's as if it had been in codes"),
    "not in the base": Kind("the base has no such weight", "give the model that it was made from"),
    "unread": Kind("a tensor beside codes that no reader of the dialect knows: the weights may be others", _AGAIN),
    "disabled": Kind(
        "ModelOpt calibrated this layer and left it in 16 bit, without what it had taken out of the weight",
        "`fluxq import` puts it back; other readers would compute with a part of the weight",
    ),
    "another program's": Kind(
        "a quantization that is not read here, of which nothing else was looked at", "get the model in 16 bit"
    ),
    "unreadable": Kind("no reader of the dialect takes the layer", _AGAIN),
    "not decoded": _note("codes that were not looked at: a package is not installed", "install it"),
    "unknown names": _note("no row of recipes/families knows a tensor's name", "is it another model?"),
    "codes that are NaN": Kind("weights that are NaN", _AGAIN),
    "scales that are no numbers": Kind("NaN, infinite or negative scales", _AGAIN),
    "global scale of 0": Kind("all weights of the layer would be 0", _AGAIN),
    "scales of 0": Kind("scales of 0 over codes that are not: these weights would be gone", _AGAIN),
    "zero scales": _note("blocks of zeros: writers differ in how they store them, readers do not"),
    "E8M0 byte 0": _note(
        "ComfyUI reads 0, others 2^-127: the same only over codes of 0", "none is needed where they are"
    ),
    "scale rounded to bf16": _note(
        "scales were computed in bf16, up to 0.4 % off, and the largest values saturate", "quantize with scales in fp32"
    ),
    "ignored though quantized": Kind(
        "readers that match `ignore` would load codes as if they were weights", "make the pattern exact"
    ),
    "left in 16 bit": _note("Linears that recipes quantize stay in 16 bit", "none is needed; it costs memory and time"),
    "not for diffusers": _note(
        "stock diffusers' from_pretrained does not load it", "`fluxq import`, or `fluxq export --format bfl`"
    ),
    "nothing says the format": _note(
        "formats were told from names and shapes alone", "give the folder with config.json"
    ),
}
