"""A native checkpoint in the layout of another program: what becomes of each layer, and the tensors of it.

    plan      every layer is held against the dialect's formats by its scheme and shape; nothing is written yet
    write     one fused tensor at a time goes to a file of parts, and the parts are joined into what the program reads

A layer moves as it is (codes and scales keep their bits) where the dialect has its scheme. Otherwise a side layer,
modulation or one that a recipe gave another format than most, is rounded again, from what its codes stand for, into
that 8-bit format of the dialect which adds the least error; where it adds more than MOST_ADDED, or there is none, it is
written in 16 bit. A main layer makes the export fail, or with `requantize` is rounded again into the nearest format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fluxq.base import FLUXQ_VERSION
from fluxq.base.console import progress
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder
from fluxq.base.output import EXPORT_FILE, VERSION, Output, contents, job_digest, remove, writing
from fluxq.base.tensors import Stored, TensorFile, save_weights
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.checkpoint import MAX_SHARD_BYTES, library_of
from fluxq.quantize.exchange.containers import Contents
from fluxq.quantize.exchange.dialect import Unit, Units
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS, misfit
from fluxq.quantize.exchange.layer import Encoded, QuantTensors, all_equal, join, stacked
from fluxq.quantize.exchange.layouts import in_order, padded
from fluxq.quantize.exchange.native import NativeComponent
from fluxq.quantize.exchange.rows import Row, row_for
from fluxq.quantize.record import hash_files
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.computing import quantization_of
from fluxq.recipes.family import compact
from fluxq.recipes.formats import Scheme, find_format
from fluxq.recipes.keymaps import Joined, original_names
from fluxq.recipes.plan import MODULATION_ROLE, scheme_of
from fluxq.recipes.recipe import Recipe, load_recipe, shipped_recipes
from fluxq.recipes.step_policy import POLICY

SideLayers = Literal["8bit", "16bit"]
MOST_ADDED = 0.03  # ‖W' - W‖ / ‖W‖ that rounding a side layer again may add: what E4M3 has on any weight is 0.027


@dataclass(frozen=True)
class Choice:
    """Decision on a Unit.

    schemes: that it may be written in, of which it takes the one that adds the least error; none for 16 bit. why: it
    does not move as it is, and is rounded again; empty where its codes move. is_side: modulation, or one of another
    format than most; where rounding it again adds more than MOST_ADDED, it is written in 16 bit.
    """

    unit: Unit
    schemes: tuple[Scheme, ...] = ()
    why: str = ""
    is_side: bool = False


@dataclass(frozen=True)
class Changed:
    """A layer that did not keep its codes. nbytes: as written. added_error: ‖W' - W‖ / ‖W‖ of what its codes stood for.

    was, now: scheme, "16bit" for none.
    """

    name: str
    shape: tuple[int, int]
    was: str
    now: str
    nbytes: int
    added_error: float
    why: str


@dataclass
class Exported:
    """Report of what was written.

    formats: the dialect's name -> layers. folded: Linear -> those whose means and factors it took. notes: what
    the program computes otherwise than the checkpoint says -> layers. in_16_bit: other components that were quantized.
    checkpoint_bytes, weight_bytes: all tensors of `components`, there and as written. hint: where the latter are more,
    why and what helps. was_written: before, by the same command.
    """

    dialect: str
    target: str
    components: list[str]
    files: list[str] = field(default_factory=list)
    nbytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    dequantized: list[Changed] = field(default_factory=list)
    requantized: list[Changed] = field(default_factory=list)
    folded: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    in_16_bit: list[str] = field(default_factory=list)
    checkpoint_bytes: int = 0
    weight_bytes: int = 0
    hint: str = ""
    was_written: bool = False

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class PlannedExport:
    """An export of which everything is checked and nothing is written. job: what decides its bytes.

    read: SHA-256 of the checkpoint's files.
    """

    checkpoint: ModelFolder
    dialect: str
    output: Output
    plans: list[ComponentPlan]
    overwrite: bool
    max_shard_bytes: int
    job: str
    read: Mapping[str, str]
    side_layers: SideLayers

    def write(self) -> Exported:
        """Write the files, or find that they are there already."""
        writer, output, plans = WRITERS[self.dialect], self.output, self.plans
        names = [plan.source.component for plan in plans if plan.dialect]
        others = [plan.source.component for plan in plans if not plan.dialect]
        done = Exported(self.dialect, str(output.target), names, in_16_bit=others)
        hashes = dict[Path, str]()
        with writing(output, self.job, overwrite=self.overwrite) as made:
            if made is None:
                done.was_written = True
                return done
            parts = made / ".parts"
            written = [plan.write(parts, done, self.max_shard_bytes) for plan in plans]
            of_job = [replace(each, job=self.job, written=hashes.__setitem__) for each in written]
            writer.write(made, output.place.name, self.checkpoint, of_job)
            exports = [(plan, contents) for plan, contents in zip(plans, written, strict=True) if plan.dialect]
            done.checkpoint_bytes = sum(stored.nbytes for plan, _ in exports for stored in plan.source.stored.values())
            done.weight_bytes = sum(stored.nbytes for _, contents in exports for _, stored in contents.parts.values())
            done.hint = _hint(done, self.side_layers)
            remove(parts)
            if not writer.is_file:
                sources = {made / name: (self.checkpoint.path / name, digest) for name, digest in self.read.items()}
                copied = {file: digest for file, (source, digest) in sources.items() if _is_copy(file, source)}
                record = {VERSION: FLUXQ_VERSION, "format": self.dialect, "job": self.job}
                write_json(made / EXPORT_FILE, record | {"files": hash_files(made, copied | hashes)})
            files = sorted(path for path in made.rglob("*") if path.is_file())
            done.nbytes = sum(path.stat().st_size for path in files)
            done.files = [path.relative_to(made).as_posix() for path in files]
        return done


def plan_export(
    checkpoint: ModelFolder,
    dialect: str,
    target: Path,
    *,
    component: str | None = None,
    requantize: bool = False,
    side_layers: SideLayers = "8bit",
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
) -> PlannedExport:
    """Check and decide all that an export needs.

    dialect: a key of WRITERS. component: by default the denoisers, for compressed_tensors the text encoder.
    side_layers: "16bit" writes all of them in 16 bit, those too that could move as they are. max_shard_bytes: of the
    files of a folder, by default MAX_SHARD_BYTES. ValueError for what the dialect cannot hold, naming the layers; where
    `target` exists, without `overwrite`; and for a shard size of a dialect that is one file.
    """
    writer = WRITERS[dialect]
    output = Output(target, writer.is_file, writer.beside)
    if max_shard_bytes is not None and writer.is_file:
        raise ValueError(f"{dialect} is one file, whatever its size; shards are for formats that are folders")
    names = _components(checkpoint, dialect, component)
    stay = {(row.weights, row.activations) for row in DIALECTS[dialect].rows if row.factors_stay}
    sources = (NativeComponent(checkpoint, name, lambda scheme: scheme.formats in stay) for name in names)
    plans = [plan_of(source, dialect, requantize, side_layers) for source in sources]
    if writer.is_pipeline:
        plans += [plan_of(NativeComponent(checkpoint, name), "") for name in _other_quantized(checkpoint, names)]
    options = [dialect, names, requantize, side_layers, max_shard_bytes]
    read = contents(checkpoint.path)
    job = job_digest([FLUXQ_VERSION, options, read])
    output.require_free(overwrite=overwrite, job=job)
    most = max_shard_bytes or MAX_SHARD_BYTES
    return PlannedExport(checkpoint, dialect, output, plans, overwrite, most, job, read, side_layers)


def _is_copy(made: Path, source: Path) -> bool:
    """Tell whether a weights file can be taken for a copy, by its size; files written here have known SHA-256s."""
    return made.suffix == ".safetensors" and made.is_file() and made.stat().st_size == source.stat().st_size


@dataclass
class ComponentPlan:
    """All that is written of a component. plain: tensors that are joined or copied."""

    source: NativeComponent
    dialect: str  # "" for 16 bit
    choices: list[Choice]
    plain: list[Joined]

    def write(self, folder: Path, done: Exported, max_shard_bytes: int) -> Contents:
        """Encode every unit into a file of its own in `folder`; what came of it is added to `done`."""
        folder = folder / self.source.component
        folder.mkdir(parents=True)
        source, parts, entries = self.source, dict[str, tuple[Path, Stored]](), dict[str, Mapping[str, Any]]()
        plain: list[str] = []
        notes, formats = Counter(done.notes), Counter(done.formats)

        def keep(tensors: Mapping[str, Tensor], prefix: str = "") -> None:
            file = folder / f"{len(parts):06d}.safetensors"
            save_weights(tensors, file, {})
            parts.update((prefix + name, (file, stored)) for name, stored in TensorFile(file).stored.items())

        rules = DIALECTS.get(self.dialect)
        ranks = [_rank(source, choice) for choice in self.choices] if rules and rules.ranks else []
        for choice in progress(self.choices, f"exporting {source.component or source.folder.name}"):
            unit = choice.unit
            layers = [source.layer(name) for name in unit.parts]
            layer = join(layers) if choice.schemes and not choice.why else None
            if choice.schemes and choice.why:
                tried = [_rounded(source, layers, choice, scheme) for scheme in choice.schemes]
                layer, changed = min(tried, key=lambda one: one[1].added_error)
                if choice.is_side and changed.added_error > MOST_ADDED:
                    why = f"{choice.why}; {changed.now} would add an error of {changed.added_error:.1%}"
                    layer, choice = None, replace(choice, schemes=(), why=why)
                else:
                    done.requantized.append(changed)
            if layer is None or rules is None:
                tensors, changed = _dequantized(source, layers, choice)
                done.dequantized += [changed] if self.dialect else []
                keep(tensors, f"{unit.name}.")
                plain += [f"{unit.name}.{suffix}" for suffix in tensors]
                continue
            if unit.order != "as they are":
                layer = layer.reordered(in_order(torch.arange(layer.shape[0]), unit.order))
            encoded = _encode(self, layer, unit, padded(max(1, *ranks), rules.ranks) if ranks else 0)
            keep(encoded.tensors, f"{unit.name}.")
            entries[unit.name] = encoded.entry
            plain += [f"{unit.name}.bias"] * ("bias" in encoded.tensors)
            formats[str(encoded.entry.get(rules.format_key, layer.scheme))] += 1
            notes.update(encoded.notes)
            if note := rules.note(layer.scheme, source.class_name):
                notes[note] += 1
        for name, members, order in self.plain:
            plain.append(name)
            if len(members) == 1 and order == "as they are" and not source.is_changed(members[0]):
                parts[name] = source.file_of(members[0]).path, source.stored[members[0]]
            else:
                keep({name: in_order(torch.cat([source.tensor(member) for member in members]), order)})
        for maker, folds in source.folds.items():
            done.folded[maker] = [reader for fold in folds for reader in fold.vectors.readers]
        runtime = source.quantization.get("runtime", {})
        config = source.quantization | {"list": runtime.get("steps")}
        for key, words in _NOT_CARRIED.items():
            if self.dialect and config.get(key):
                notes[words] += len(self.choices)
        if rules is not None and POLICY in runtime:
            notes[rules.steps] += len(self.choices)
        done.notes, done.formats = dict(notes), dict(formats)
        in_16_bit = [name for name in source.linears if name not in entries]
        return Contents(source, parts, entries, plain, in_16_bit, max_shard_bytes)


def plan_of(
    source: NativeComponent, dialect: str, requantize: bool = False, side_layers: SideLayers = "8bit"
) -> ComponentPlan:
    """Decide on every layer; ValueError naming all that cannot be written. dialect: "" for 16 bit."""
    units, plain = _units(source, dialect)
    if not dialect:
        return ComponentPlan(source, dialect, [Choice(unit) for unit in units], plain)
    main = _main_scheme(source)
    choices, problems = [], dict[str, dict[str, None]]()  # why -> modules; nunchaku has two layers of some
    for unit in units:
        choice = _choice(source, unit, dialect, main, requantize, side_layers)
        if isinstance(choice, str):
            problems.setdefault(choice, {}).update(dict.fromkeys(unit.parts))
        else:
            choices.append(choice)
    if problems:
        lines = [f"  {compact(names)} ({len(names)} layers): {why}" for why, names in problems.items()]
        count = len({name for names in problems.values() for name in names})
        cure = "" if requantize else "; --requantize rounds them again, into the nearest format that fits"
        cure += f"; recipes that fit: {', '.join(fits)}" if (fits := _recipes_that_fit(dialect, main)) else ""
        raise ValueError(f"{dialect} cannot hold {count} of {len(source.schemes)} layers{cure}:\n" + "\n".join(lines))
    choices = _readable_together(source, choices, dialect)
    if not any(choice.schemes for choice in choices):
        raise ValueError(
            f"{dialect} holds no layer of {source.component or 'the model'}: everything would be in 16 bit"
        )
    return ComponentPlan(source, dialect, choices, plain)


def _units(source: NativeComponent, dialect: str) -> Units:
    """Quantized Linears of the file, and its other tensors. dialect: "" for 16 bit."""
    rules = DIALECTS.get(dialect)
    if rules is not None and rules.units is not None:
        return rules.units(source)
    if rules is None or rules.names == "diffusers":
        return [Unit(name, (name,)) for name in source.schemes], [Joined(name, (name,)) for name in source.plain]
    tensors = list(source.plain)
    for name in source.schemes:
        tensors += [f"{name}.weight"] + [f"{name}.bias"] * (name in source.biases)
    units, plain = [], []
    for joined in original_names(source.family.name, tensors):
        modules = tuple(part.rpartition(".")[0] for part in joined.parts)
        if not any(module in source.schemes for module in modules):
            plain.append(joined)
        elif joined.original.endswith(".weight"):
            units.append(Unit(joined.original.removesuffix(".weight"), modules, joined.order))
    return units, plain


def _choice(
    source: NativeComponent,
    unit: Unit,
    dialect: str,
    main: tuple[str, str | None],
    requantize: bool,
    side_layers: SideLayers,
) -> Choice | str:
    """Decide on a unit, or return the reason why nothing can be done with it."""
    formats = (row.name for row in DIALECTS[dialect].rows if (row.weights, row.activations) == main and not row.unread)
    why = _why_not_as_it_is(source, unit, dialect, next(formats, ""))
    if any(name not in source.schemes for name in unit.parts):
        return why  # its 16-bit parts would have to be rounded too
    has_16_bit = not unit.block_linear.parts  # nunchaku's own blocks have no other Linears
    is_side = has_16_bit and all(
        _is_modulation(source, name) or source.schemes[name].formats != main for name in unit.parts
    )
    if is_side and side_layers == "16bit":
        return Choice(unit, (), why or "--side-layers 16bit asks for it", is_side)
    if not why:
        return Choice(unit, (source.scheme(unit.parts[0]),), "", is_side)
    if not (is_side or requantize):
        return why
    nearest = _nearest(source, unit, dialect)
    small = [scheme for scheme in nearest if scheme.weights.element.bits == 8]
    if is_side and small:
        alike = (scheme for scheme in small if (scheme.activations is None) == (small[0].activations is None))
        return Choice(unit, tuple(alike), why, is_side)
    if nearest and not is_side:
        return Choice(unit, nearest[:1], why)
    return Choice(unit, (), why, is_side) if has_16_bit else why


def _readable_together(source: NativeComponent, choices: list[Choice], dialect: str) -> list[Choice]:
    """The same, with side layers in 16 bit that no reader of the dialect takes beside the main ones."""
    rules = DIALECTS[dialect]
    if rules.unreadable is None:
        return choices

    def format_of(choice: Choice) -> str:
        if not choice.schemes:
            return ""
        layer = QuantTensors({}, _shape(source, choice.unit), choice.schemes[0])
        return row_for(layer, rules.rows, dialect)[0].name

    mains = {format_of(choice) for choice in choices if not choice.is_side}
    done = []
    for choice in choices:
        name, is_modulation = format_of(choice), any(_is_modulation(source, part) for part in choice.unit.parts)
        why = rules.unreadable(name, mains, is_modulation) if name and choice.is_side else ""
        done.append(replace(choice, schemes=(), why=why) if why else choice)
    return done


def _why_not_as_it_is(source: NativeComponent, unit: Unit, dialect: str, main: str) -> str:
    """Return the reason why a unit's codes cannot move; empty if they can. Reads nothing but scalars.

    main: the dialect's format of the main layers.
    """
    missing = [name for name in unit.parts if name not in source.schemes]
    if missing:
        lacking, whole = (name.rpartition(".")[2] for name in (missing[0], unit.name))
        return f"{lacking} is in 16 bit, and the file has one format for {whole}"
    schemes = [source.scheme(name) for name in unit.parts]
    if len({str(replace(scheme, rank=0)) for scheme in schemes}) > 1:
        return f"the file joins layers of {' and '.join(sorted({str(s) for s in schemes}))}"
    if any(name in source.pixelwise for name in unit.parts):
        return "a 1x1 convolution, of which the program quantizes none"
    if any(f"{name}.bias" in source.stored and name not in source.biases for name in unit.parts):
        return "centring gave it a bias, which the model itself has not"
    of_layers = ("weight_scale_2", "input_scale", *(["weight_scale"] * (not schemes[0].weights.block[0])))
    for suffix in of_layers:
        values = [source.small(name, suffix) for name in unit.parts]
        if any(value is not None and values[0] is not None and not torch.equal(value, values[0]) for value in values):
            return f"the file joins layers whose {suffix} differ"
    shape = _shape(source, unit)
    why = misfit(schemes[0], shape, dialect, main=main)
    if not why and unit.block_linear.chunks and schemes[0].activations:
        return f"a modulation, which has 16-bit activations there and here is {schemes[0]}"
    if not why and unit.block_linear.parts and not unit.block_linear.chunks and not schemes[0].activations:
        return f"{dialect} computes it with rounded activations, not as {schemes[0]}"
    if why and not misfit(replace(schemes[0], center=False, smooth=False), shape, dialect):
        kept = source.why_not_folded.get(unit.parts[0], "")
        return f"{why}; it was not folded: {re.sub(r'[.][0-9]+[.]', '.*.', kept)}"
    return why


def _shape(source: NativeComponent, unit: Unit) -> tuple[int, int]:
    n, k = sum(source.shapes[name][0] for name in unit.parts), source.shapes[unit.parts[0]][1]
    return n, {"": k, "first": n, "rest": k - n}[unit.block_linear.columns]


def _main_scheme(source: NativeComponent) -> tuple[str, str | None]:
    """Weights and activations of most weights, modulation apart."""
    sizes: Counter[tuple[str, str | None]] = Counter()
    for name, (n, k) in source.shapes.items():
        weight = 0 if _is_modulation(source, name) else n * k
        sizes[source.schemes[name].formats] += weight
    return sizes.most_common(1)[0][0]


def _is_modulation(source: NativeComponent, name: str) -> bool:
    location = source.family.locate(name)
    return location is not None and location[0].role == MODULATION_ROLE


def _nearest(source: NativeComponent, unit: Unit, dialect: str) -> tuple[Scheme, ...]:
    """Schemes of the dialect that hold a unit's shape, those most like its own first.

    An input_scale is kept where x is as it was calibrated: not where mean, factors or a rotation leave it.
    """
    if any(name in source.pixelwise for name in unit.parts):
        return ()
    source_scheme = source.scheme(unit.parts[0])
    scales = [source.small(name, "input_scale") for name in unit.parts]
    has_scale = all_equal(scales) and not any(source.scheme(name).is_transformed for name in unit.parts)
    (n, k), schemes = _shape(source, unit), []
    rows = [
        row
        for row in DIALECTS[dialect].rows
        if not (row.unread or row.only_moved)
        and (not unit.block_linear.parts or (row.activations is None) == bool(unit.block_linear.chunks))
    ]
    for row in sorted(rows, key=partial(_distance, source_scheme=source_scheme)):
        same_input = source_scheme.static_input and row.activations == source_scheme.formats[1]
        scheme = row.scheme(static_input=same_input and has_scale and row.input_scale != "none")
        if source_scheme.activations is None and None in row.also:
            scheme = replace(scheme, activations=None)
        if k % scheme.weights.unit == 0 and not misfit(scheme, (n, k), dialect, [row]):
            schemes.append(scheme)
    return tuple(schemes)


def _distance(row: Row, source_scheme: Scheme) -> tuple[Any, ...]:
    weights = find_format(row.weights)
    return (
        row.weights != source_scheme.weights.name,
        weights.element.bits < source_scheme.weights.element.bits,
        weights.element.bits - source_scheme.weights.element.bits,
        (row.activations is None) != (source_scheme.activations is None),
        weights.element.name != source_scheme.weights.element.name,
    )


def _rounded(
    source: NativeComponent, layers: Sequence[QuantTensors], choice: Choice, scheme: Scheme
) -> tuple[QuantTensors, Changed]:
    """One layer of all parts, rounded from what their codes stand for."""
    weight, bias = stacked([layer.collapsed() for layer in layers])
    made = QuantizedTensor.quantize(weight, scheme.weights, name=choice.unit.name)
    tensors = made.tensors()
    if bias is not None and all(name in source.biases for name in choice.unit.parts):
        tensors["bias"] = bias.to(layers[0].dtype)
    if scheme.static_input:
        tensors["input_scale"] = layers[0].tensors["input_scale"]
    changed = _changed(choice, layers, tensors, made.dequantize(), weight, str(scheme))
    return QuantTensors(tensors, changed.shape, scheme), changed


def _dequantized(
    source: NativeComponent, layers: Sequence[QuantTensors], choice: Choice
) -> tuple[dict[str, Tensor], Changed]:
    """Weight and bias of a unit in 16 bit; a 1x1 convolution's has its own shape."""
    weight, bias = stacked([layer.collapsed() for layer in layers])
    rounded = weight.to(source.dtype)
    is_pixelwise = any(name in source.pixelwise for name in choice.unit.parts)
    tensors = {"weight": rounded.reshape(*rounded.shape, 1, 1) if is_pixelwise else rounded}
    if bias is not None and all(name in source.biases for name in choice.unit.parts):
        tensors["bias"] = bias.to(source.dtype)
    tensors = {name: in_order(tensor, choice.unit.order) for name, tensor in tensors.items()}
    return tensors, _changed(choice, layers, tensors, rounded.float(), weight, "16bit")


def _changed(
    choice: Choice,
    layers: Sequence[QuantTensors],
    tensors: Mapping[str, Tensor],
    now: Tensor,
    before: Tensor,
    scheme: str,
) -> Changed:
    was = " + ".join(dict.fromkeys(str(layer.scheme) for layer in layers))
    norm, (n, k) = before.norm().item(), before.shape
    error = (now - before).norm().item() / norm if norm else 0.0
    nbytes = sum(tensor.nbytes for name, tensor in tensors.items() if name != "bias")
    return Changed(choice.unit.name, (n, k), was, scheme, nbytes, error, choice.why)


def _encode(plan: ComponentPlan, layer: QuantTensors, unit: Unit, rank: int) -> Encoded:
    """A layer in the plan's dialect, which may want to know more of the model. rank: of all low-rank pairs."""
    dialect = DIALECTS[plan.dialect]
    if dialect.encode is None:
        raise ValueError(f"{unit.name}: {plan.dialect} is only read")
    known: dict[str, Any] = {"dtype": plan.source.dtype} if dialect.takes_dtype else {}
    known |= {"rank": rank} if dialect.ranks else {}
    is_shifted = unit.block_linear.after_gelu and layer.scheme.weights.name == "int4"
    known |= {"after_gelu": True} if is_shifted else {}
    return dialect.encode(dialect.arrange(layer, unit.block_linear), **known)


def _rank(source: NativeComponent, choice: Choice) -> int:
    """Of the low-rank branch of a unit: parts that read x by other matrices have theirs side by side."""
    if choice.why or not choice.schemes:
        return 0
    ranks = [source.scheme(name).rank for name in choice.unit.parts]
    matrices = [source.small(name, "svdquant_lora_a") for name in choice.unit.parts] if max(ranks) else []
    return ranks[0] if matrices and all_equal(matrices) else sum(ranks)


def _components(checkpoint: ModelFolder, dialect: str, component: str | None) -> list[str]:
    """Names of the components to export; ValueError where they are not to be told, or not for the dialect."""
    writer = WRITERS[dialect]
    quantized = _other_quantized(checkpoint, [])
    if component is not None:
        names = [component]
    elif checkpoint.is_one_model:
        names = quantized
    elif writer.library == "transformers":
        names = [name for name in quantized if library_of(checkpoint, name) == "transformers"]
    else:
        names = [name for name in denoisers_of(checkpoint) if name in quantized]
    listing = ", ".join(name or "the model itself" for name in quantized) or "none"
    if not quantized:
        raise ValueError(f"{checkpoint.name} holds no quantized component; give a folder that `fluxq quantize` wrote")
    if not names:
        raise ValueError(f"{checkpoint.name} has no component for {dialect}; quantized are {listing}")
    if len(names) > 1 and not writer.is_pipeline:
        raise ValueError(f"{dialect} is a file of one component; give --component, one of {', '.join(names)}")
    for name in names:
        if name not in quantized:
            raise ValueError(f"{checkpoint.name} has no quantized component {name!r}; quantized are {listing}")
        if library_of(checkpoint, name) != writer.library:
            raise ValueError(
                f"{name or checkpoint.name}: {dialect} is for models of {writer.library}, this one is of "
                f"{library_of(checkpoint, name)}"
            )
    return names


def _other_quantized(checkpoint: ModelFolder, names: Sequence[str]) -> list[str]:
    """Components that fluxq quantized, but for `names`."""
    others = (name for name in checkpoint.components if name not in names)
    models = (name for name in others if (checkpoint.path / name / "config.json").is_file())
    return [name for name in models if quantization_of(checkpoint.config(name))]


def _hint(done: Exported, side_layers: SideLayers) -> str:
    """Return the reason why a file is larger than the checkpoint, and what makes a smaller one; empty if it is not."""
    if done.weight_bytes <= 1.01 * done.checkpoint_bytes:
        return ""
    if side_layers == "16bit":
        return "larger than the checkpoint: --side-layers 8bit, the default, makes it smaller"
    if why := DIALECTS[done.dialect].why_larger:
        return f"larger than the checkpoint: {why}"
    if not done.dequantized:
        rounded, beside = "layers were rounded into formats of more bits", "what goes with codes is larger there"
        wider = rounded if done.requantized else beside
        return f"larger than the checkpoint: {wider}"
    rows = [row for row in DIALECTS[done.dialect].rows if None in (row.activations, *row.also) and not row.unread]
    formats = ", ".join(dict.fromkeys(row.weights for row in rows))
    cure = f"where x keeps 16 bit {done.dialect} holds {formats}: `modulation: {{format: {rows[0].weights}}}`"
    return f"larger than the checkpoint: {len(done.dequantized)} layers are in 16 bit; {cure}"


def _recipes_that_fit(dialect: str, main: tuple[str, str | None]) -> list[str]:
    """Shipped recipes of as many bits of whose layers the dialect moves all as they are, most like `main` first."""
    main_element, recipes = find_format(main[0]).element, []
    for name in shipped_recipes():
        schemes = _schemes_of(load_recipe(name)[1])
        element = schemes[0].weights.element
        if element.bits == main_element.bits and not any(misfit(scheme, (3072, 3072), dialect) for scheme in schemes):
            recipes.append((element != main_element, name))
    return [name for _, name in sorted(recipes)]


def _schemes_of(recipe: Recipe) -> list[Scheme]:
    """Return the schemes that a recipe gives a denoiser's core and modulation, without what it tries."""
    part = recipe.components["transformer"]
    core = scheme_of(part.weights, part.activations, recipe.has_static_scales(part))
    if core is not None and part.hadamard is not None:
        core = replace(core, hadamard=part.hadamard.size, regular=part.hadamard.is_regular)
    return [scheme for scheme in (core, scheme_of(part.modulation, None, False)) if scheme is not None]


_NOT_CARRIED = {  # keys of quantization_config, and the list of steps in its `runtime`
    "attention": "attention is computed in 16 bit there, here in 8",
    "steps": "every step is computed with these codes there, here some are kept in 16 bit",
    "list": "every step is computed there, here some are skipped by the checkpoint's list",
}
