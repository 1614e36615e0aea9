"""A quantized file of another program as a checkpoint of fluxq: codes as they are, under diffusers' names.

Joined tensors are split, rows in another order are put back, and the layout becomes ours; codes are never rounded.
Codes of which no format of ours is made become 16 bit where that is asked for. With a base each layer is proved first
(`proof.py`): a layer that is wrong in a known way is mended, one that is not the base's is refused.

One layer is in memory at a time. Nothing stands at the target until all of it does.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base import FLUXQ_VERSION, console
from fluxq.base.console import progress
from fluxq.base.files import sha256_file, sha256_json, write_json, write_text
from fluxq.base.model import ModelFolder, require_harmless, require_harmless_values, require_safe
from fluxq.base.output import Output, contents, job_digest, writing
from fluxq.base.tensors import save_weights
from fluxq.kernels.linear import linear_size, linears_of, placeholder
from fluxq.quantize.checkpoint import build_on_meta, copy_rest, library_of, names_in_model, write_shards
from fluxq.quantize.exchange.files import ModelFile, class_names, open_models
from fluxq.quantize.exchange.imported import Imported, record_of
from fluxq.quantize.exchange.inspect import Inspection, beside_weights, inspect_model
from fluxq.quantize.exchange.layer import CrossedBlocks, Decoded, Plain, QuantTensors, split
from fluxq.quantize.exchange.layouts import in_order
from fluxq.quantize.exchange.marks import NATIVE, PLAIN, FileLayer, json_object
from fluxq.quantize.exchange.proof import REPAIRS, Against, compare, mended
from fluxq.quantize.exchange.reference import Base, settled
from fluxq.quantize.exchange.rows import not_finite
from fluxq.quantize.record import Record, write_digests, write_record
from fluxq.quantize.verify import stored_fault
from fluxq.recipes.computing import QuantizationConfig, Steps, policy_steps
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymaps import Joined

_NAMED = 4  # layers in an error, before it says how many more


@dataclass(frozen=True)
class _Target:
    """Target of an import: a model of `library`, and the pipeline that the rest is copied from, if any.

    settings: config.json of the model in 16 bit.
    """

    component: str
    library: str
    class_name: str
    settings: dict[str, Any]
    pipeline: ModelFolder | None


def import_model(
    path: Path,
    output: Path,
    base: Path | ModelFolder | None = None,
    *,
    dequantize: bool = False,
    overwrite: bool = False,
    card: Callable[[Record], str] | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> list[Imported]:
    """Make a checkpoint of fluxq, at the folder `output`, of what another program quantized.

    path: a file, a component's folder or a pipeline's. base: the 16-bit model (a file or folder); a single file needs
    it for the configuration where its header has none, and where nothing says how codes and scales stand. The output
    is a pipeline's folder where `path` or `base` is one, else a component's; either has a plan file, and a README.md
    that `card` makes of what that says. dequantize: layers whose codes no format of ours holds become 16 bit. on_start:
    called when all is checked and writing begins.

    ValueError names the layers that cannot be read, or are not the base's, or would need `dequantize`. Errors of
    reading are those of `open_models`.
    """
    source = ModelFolder(base.name, base) if isinstance(base, Path) else base
    place = source.path if source else None
    models = {
        name: model
        for name, model in open_models(path).items()
        if model.unknown_method or model.dialect not in (PLAIN, NATIVE)
    }
    if not models:
        raise ValueError(f"{path}: nothing in it was quantized by another program; `fluxq inspect` says what it is")
    targets = {name: _target(path, place, name, model) for name, model in models.items()}
    unproved = list[str]()
    if place is not None:
        faults, unproved = beside_weights(path, place, models)
        if faults:
            wrong = {fault.layer: f"{fault.kind}: {fault.what}" for fault in faults}
            raise ValueError(f"{path}: {_several(wrong)}; copy the base's, or give the model that it was made from")
    hashes = {
        name: {file.name: sha256_file(file) for file in progress(model.files, "Hashing files")}
        for name, model in models.items()
    }
    read = [[name, hashes[name], sha256_json(model.config)] for name, model in models.items()]
    job = job_digest([FLUXQ_VERSION, dequantize, read, _contents(path), _contents(place)])
    Output(output).require_free(overwrite=overwrite, job=job)
    checked: dict[str, _Checked] = {}
    if overwrite or not Output(output).holds(job):
        checked = {name: _checked(model, targets[name], place, name, dequantize) for name, model in models.items()}
    on_start()
    reports = {
        name: Imported(target.component, models[name].dialect, str(output), target.class_name, target.library)
        for name, target in targets.items()
    }
    with writing(Output(output), job, overwrite=overwrite) as made:
        if made is None:
            return [replace(report, was_written=True) for report in reports.values()]
        for name, report in reports.items():
            target = targets[name]
            readable = checked.pop(name, None) or _checked(models[name], target, place, name, dequantize)
            _write(made / target.component, readable, target, report, dequantize)
            report.files = hashes[name]
        done = list(reports.values())
        done[0].unproved += unproved
        pipeline = next((target.pipeline for target in targets.values()), None)
        if pipeline is not None:
            copy_rest(made, pipeline, [report.component for report in done])
        write_digests(made)
        record = record_of(made, path, pipeline, source, done, job)
        write_record(made, record)
        if card is not None:
            write_text(made / "README.md", card(record))
    return done


def _contents(place: Path | None) -> Any:
    """SHA-256 of what an import reads of a folder, of a pipeline's its components; of a file; None without one."""
    if place is None or place.is_file():
        return sha256_file(place) if place else None
    is_pipeline = (place / "model_index.json").is_file()
    return contents(place, ModelFolder(place.name, place).components if is_pipeline else None)


def _target(path: Path, base: Path | None, component: str, model: ModelFile) -> _Target:
    """Find what the component becomes, by its own config.json, or else the base's."""
    if component:
        folder = ModelFolder(path.name, path)
        require_safe(folder)
        return _of_pipeline(folder, component)
    if base is not None and (base / "model_index.json").is_file():
        folder = ModelFolder(base.name, base)
        require_safe(folder)
        model_class = next(iter(class_names(model.config)), model.family.model if model.family else None)
        matches = [name for name, class_name in folder.components.items() if class_name == model_class]
        if len(matches) != 1:
            what = f"{len(matches)} of its components are a {model_class}" if model_class else "no family has its names"
            raise ValueError(f"{model.path}: {what}, of {base}; give the component's own folder as --base")
        return _of_pipeline(folder, matches[0])
    for folder in (path, base):
        if folder is not None and (folder / "config.json").is_file():
            require_harmless(folder / "config.json")
    config = dict(model.config)
    if not config and base is not None:
        config = dict(Base.of(base, component, model).model.config)
    key = model.rules.config_key if model.names == model.rules.names else ""
    if not config and key and model.family and key in model.metadata:  # which it has itself
        config = json_object(model.metadata[key], f"{model.path}: `{key}` in the header")
        require_harmless_values(config, f"{model.path}: `{key}` in the header")
        config["_class_name"] = model.family.model
    class_name = next(iter(class_names(config)), None)
    if class_name is None:
        cure = "give the 16-bit model as --base"
        if base is not None:
            cure = f"nor does {base}; give the folder of the 16-bit model, whose config.json says it, as --base"
        raise ValueError(f"{model.path}: does not say the model's configuration; {cure}")
    libraries = [name for name in ("diffusers", "transformers") if hasattr(importlib.import_module(name), class_name)]
    if not libraries:
        raise ValueError(
            f"{model.path}: {class_name} is no class of diffusers or transformers; give the 16-bit model in diffusers' "
            "layout as --base"
        )
    config.pop("quantization_config", None)
    return _Target(component, libraries[0], class_name, config, None)


def _of_pipeline(folder: ModelFolder, component: str) -> _Target:
    library, config = library_of(folder, component), folder.config(component)
    config.pop("quantization_config", None)
    return _Target(component, library, folder.components[component], config, folder)


@dataclass(frozen=True)
class _Checked:
    """A model in the dialect that it is read in. inspection: beside the base. network: of its target, on meta."""

    model: ModelFile
    base: Base | None
    inspection: Inspection | None
    network: nn.Module


def _checked(model: ModelFile, target: _Target, place: Path | None, component: str, dequantize: bool) -> _Checked:
    """Raise ValueError for all that can be said before a layer is written. place: of the base."""
    base = Base.of(place, component, model) if place else None
    if base is not None:
        model = settled(model, base)
    if model.undecided:
        raise ValueError(f"{model.path}: {model.contradictions[-1]}; without it `fluxq import` would guess")
    if model.unknown_method:
        raise ValueError(f"{model.path}: what {model.unknown_method} wrote is not read here; get the model in 16 bit")
    faults = {name: f"nothing here reads {', '.join(left)}" for name, left in model.unread.items()} | model.faults
    if faults:
        raise ValueError(f"{model.path}: {_several(faults)}; `fluxq inspect` says more")
    if not dequantize and not model.rules.rows:
        raise ValueError(
            f"{model.path}: no format of ours holds the codes of {model.dialect} ({len(model.layers)} layers); "
            "--dequantize makes them 16 bit"
        )
    if model.names != model.rules.names and (why := model.rules.refuse(model)):
        raise ValueError(f"{model.path}: {why}")
    if not model.layers:
        others = f" beside {', '.join(model.other_components())}, which are left out" if model.others else ""
        raise ValueError(
            f"{model.path}: has no quantized layer of the {target.class_name}{others}; take the 16-bit model"
        )
    try:
        # A copy: transformers changes nested settings in place.
        network = build_on_meta(target.library, target.class_name, deepcopy(target.settings))
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise ValueError(
            f"{model.path}: no {target.class_name} can be built from config.json ({type(error).__name__}: {error}); "
            "copy the file again"
        ) from error
    return _Checked(model, base, _proved(model, base) if base is not None else None, network)


def _write(folder: Path, checked: _Checked, target: _Target, report: Imported, dequantize: bool) -> None:
    """Write a component's weights and config.json into `folder`; fills in the report."""
    model, base, inspection, config = checked.model, checked.base, checked.inspection, dict(target.settings)
    report.dialect = model.dialect
    expected, linears = checked.network.state_dict(keep_vars=True), linears_of(checked.network)
    own_name = names_in_model(checked.network)
    refused: dict[str, str] = {}
    schemes: dict[str, Scheme] = {}
    written: set[str] = set()
    parts = folder / ".parts"
    parts.mkdir(parents=True)
    files: list[Path] = []

    def put(tensors: Mapping[str, Tensor], scheme: Scheme | None = None) -> None:
        for name, tensor in tensors.items():
            if bad := not_finite(tensor):
                raise ValueError(f"{name}: {bad} of {tensor.numel()} numbers are NaN or infinite; get the file again")
            if what := stored_fault(tensor, name.rpartition(".")[2], scheme):
                raise ValueError(f"{name}: {what}; get the file again")
        files.append(parts / f"{len(files)}.safetensors")
        save_weights({name: tensor.contiguous() for name, tensor in tensors.items()}, files[-1], {})
        written.update(tensors)

    joined = model.joined
    proved = {layer.name: layer.against for layer in inspection.layers} if inspection else {}
    report.unproved += inspection.unproved if inspection else []
    for name, layer in progress(list(model.layers.items()), f"Reading {model.path.name}"):
        whole = joined.get(f"{name}.weight")
        if whole is None or not whole.parts:
            report.notes.append(f"{name} is nothing of diffusers' model and was left out")
            continue
        modules = [own_name(part).removesuffix(".weight") for part in whole.parts]
        try:
            against = proved.get(name)
            read = _read(model, layer, whole, base, against)
            if against is not None:
                report.errors |= dict.fromkeys(modules, against.error)
            if against is not None and against.best:
                report.mended[name] = list(against.best)
            for module, split_off in zip(modules, _split(read, modules, expected), strict=True):
                part = _without_needless_bias(module, split_off, expected)
                why = part.why if isinstance(part, Plain) else _misfit(module, part, linears)
                if not why and isinstance(part, QuantTensors):
                    schemes[module] = part.scheme
                    tensors = {f"{module}.{end}": _of_16_bit(t, model.dtype) for end, t in part.tensors.items()}
                    put(tensors, part.scheme)
                    report.notes += [f"{name}: {_LEFT_OUT.get(what, what)}" for what in part.beside]
                    report.notes += [f"{name}: {note}" for note in part.notes]
                elif dequantize:
                    report.dequantized[module] = why
                    put(_dense(module, part, expected, model.dtype))
                else:
                    refused[module] = f"{why}; --dequantize makes it 16 bit"
        except ValueError as error:
            refused[name] = str(error)
    if refused:
        raise ValueError(f"{model.path}: {_several(refused)}")
    moved = _moved(model, joined, base, report)
    report.mended |= {name: [f"{', '.join(left)} put back"] for name, left in model.disabled.items()}
    for name in model.plain:
        whole = joined.get(name)
        if whole is None:  # a sign, which is no tensor of the model
            continue
        whole = whole._replace(parts=tuple(map(own_name, whole.parts)))
        tensor = model.read_plain(name)
        rows = moved.get(name.rpartition(".")[0])
        put(_plain(tensor if rows is None else tensor[rows], whole, expected, model))
    _require_all(model, expected, written, target.class_name)
    write_shards(folder, target.library, files, {f"{module}.weight" for module in schemes})
    shutil.rmtree(parts)
    report.quantized = {module: str(scheme) for module, scheme in schemes.items()}
    report.notes = _counted(report.notes)
    for other, (count, nbytes) in model.other_components().items():
        report.notes.append(f"{other}, {count} tensors of {console.size(nbytes)} beside the denoiser, was left out")
    if schemes:
        steps = _steps(model.quantization, report.notes)
        config["quantization_config"] = QuantizationConfig.of(schemes.items(), steps=steps).to_dict()
    write_json(folder / "config.json", config)


def _steps(quantization: Mapping[str, Any], notes: list[str]) -> Steps | None:
    """Return the steps at 16-bit activations that a file names; a policy of another kind is left out, with a note."""
    try:
        return policy_steps(quantization.get("runtime") or {})
    except (TypeError, ValueError) as error:
        notes.append(f"{error}; all steps are computed alike")
        return None


def _proved(model: ModelFile, base: Base) -> Inspection:
    """Compare the model with the base; ValueError for all that `inspect` calls wrong and nothing here mends."""
    report = inspect_model(model, base)
    wrong: dict[str, str] = {}
    for fault in report.faults:
        if fault.is_error and fault.kind not in _MENDED:
            wrong.setdefault(fault.layer or model.path.name, f"{fault.kind}: {fault.what}")
    if wrong:
        raise ValueError(f"{model.path}: {_several(wrong)}; `fluxq inspect --base` says more")
    return report


def _read(model: ModelFile, layer: FileLayer, whole: Joined, base: Base | None, against: Against | None) -> Decoded:
    """The layer with the rows of diffusers behind one another; ValueError where it cannot be."""
    best = against.best if against is not None else ()
    orders = base.rows(layer.shape, whole)[1] if base is not None and best else {}
    repairs = [name for name in best if name in REPAIRS]
    tensors = mended(model.read_layer(layer), repairs, model.rules, layer.shape)
    if tensors is None:
        raise ValueError(f"{' and '.join(repairs)} could not be mended in the whole layer")
    decoded = model.decode(layer, tensors)
    if "missing input_scale" in repairs and isinstance(decoded, QuantTensors):  # x takes its scale from each token then
        kept = {name: tensor for name, tensor in decoded.tensors.items() if name != "input_scale"}
        decoded = replace(decoded, tensors=kept, scheme=replace(decoded.scheme, static_input=False))
    for name in orders.keys() & set(best):
        decoded = _reordered(decoded, orders[name].argsort())
    if whole.order == "halves swapped":
        decoded = _reordered(decoded, in_order(torch.arange(layer.shape[0]), whole.order))
    return decoded


def _reordered(layer: Decoded, rows: Tensor) -> Decoded:
    try:
        return layer.reordered(rows)
    except CrossedBlocks as error:
        return Plain(*layer.collapsed(), str(error)).reordered(rows)


def _moved(model: ModelFile, joined: Mapping[str, Joined], base: Base | None, report: Imported) -> dict[str, Tensor]:
    """Module in 16 bit -> its rows in the order of `joined`, of those that have them in another; errors as `_read`."""
    rows: dict[str, Tensor] = {}
    for name, shape in model.linears_in_16_bit().items() if base is not None else ():
        whole = joined.get(f"{name}.weight")
        truth, orders, _ = base.rows(shape, whole) if whole and base else (None, {}, "")
        if truth is None:
            continue
        against = compare(model.read_plain(f"{name}.weight"), truth, orders)
        if against.best:
            rows[name] = orders[against.best[0]].argsort()
            report.mended[name] = list(against.best)
    return rows


def _split(layer: Decoded, modules: list[str], expected: Mapping[str, Tensor]) -> list[QuantTensors] | list[Plain]:
    """The layer of each module, by the sizes that the model's class asks for."""
    missing = [module for module in modules if f"{module}.weight" not in expected]
    if missing:
        raise ValueError(f"the model has no {missing[0]}; is its configuration that of another one?")
    sizes = [expected[f"{module}.weight"].shape[0] for module in modules]
    n, k = (tuple(layer.weight.shape) if isinstance(layer, Plain) else layer.shape)[:2]
    width = expected[f"{modules[0]}.weight"].numel() // max(1, sizes[0])
    if (sum(sizes), width) != (n, k):
        raise ValueError(f"is {n}×{k}, the model asks for {sum(sizes)}×{width}; is its configuration another's?")
    if isinstance(layer, QuantTensors):
        try:
            return split(layer, sizes)
        except CrossedBlocks as error:
            layer = Plain(*layer.collapsed(), str(error))
    biases = layer.bias.split(sizes) if layer.bias is not None else [None] * len(sizes)
    return [Plain(w, b, layer.why) for w, b in zip(layer.weight.split(sizes), biases, strict=True)]


def _without_needless_bias(
    module: str, layer: QuantTensors | Plain, expected: Mapping[str, Tensor]
) -> QuantTensors | Plain:
    """The layer without a bias that the model lacks, which some writers have for every Linear; ValueError if not 0."""
    bias = layer.bias if isinstance(layer, Plain) else layer.tensors.get("bias")
    if bias is None or f"{module}.bias" in expected:
        return layer
    if bias.any():
        raise ValueError(f"the model has no {module}.bias; is its configuration that of another one?")
    if isinstance(layer, Plain):
        return replace(layer, bias=None)
    return replace(layer, tensors={name: tensor for name, tensor in layer.tensors.items() if name != "bias"})


def _misfit(module: str, layer: QuantTensors, linears: Mapping[str, nn.Module]) -> str:
    """Return the reason why a quantized layer cannot be one in the model; "" if it can."""
    linear = linears.get(module)
    if linear is None:
        return "it is no Linear"
    if linear_size(linear) != layer.shape:
        return f"it is {layer.shape}, the model's {linear_size(linear)}"
    try:
        placeholder(linear, layer.scheme, torch.bfloat16)
    except ValueError as error:
        return str(error)
    return ""


def _dense(module: str, layer: Decoded, expected: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    weight, bias = layer.collapsed()
    tensors = {f"{module}.weight": weight.to(dtype).reshape(expected[f"{module}.weight"].shape)}
    return tensors | ({f"{module}.bias": bias.detach().to(dtype)} if bias is not None else {})


def _of_16_bit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the model's 16-bit dtype if it is in the other one."""
    return tensor.to(dtype) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _plain(tensor: Tensor, whole: Joined, expected: Mapping[str, Tensor], model: ModelFile) -> dict[str, Tensor]:
    """A tensor that is not quantized, under its names in diffusers."""
    if tensor.element_size() == 1 and tensor.is_floating_point():  # a plain cast to fp8
        tensor = tensor.to(model.dtype)
    tensor = _of_16_bit(tensor, model.dtype)
    if not tensor.is_floating_point() and any(expected[p].is_floating_point() for p in whole.parts if p in expected):
        raise ValueError(f"{model.path}: {whole.original} holds integers ({tensor.dtype}); get the file again")
    missing = [part for part in whole.parts if part not in expected]
    if missing:
        raise ValueError(f"{model.path}: the model has no {missing[0]}; is its configuration that of another one?")
    tensor = in_order(tensor, whole.order)
    if not whole.parts:
        return {}
    sizes = [expected[part].shape[0] if expected[part].ndim else 1 for part in whole.parts]
    shapes = [tuple(expected[part].shape) for part in whole.parts]
    is_turned = tensor.ndim == 2 and any(len(shape) == 2 and shape[1] != tensor.shape[1] for shape in shapes)
    if is_turned or tensor.numel() != sum(expected[part].numel() for part in whole.parts):
        size = "×".join(map(str, tensor.shape))
        raise ValueError(f"{model.path}: {whole.original} is {size}, the model asks for {shapes}; is it another model?")
    pieces = tensor.split(sizes) if len(sizes) > 1 else (tensor,)
    return {part: piece.reshape(shape) for part, piece, shape in zip(whole.parts, pieces, shapes, strict=True)}


def _require_all(model: ModelFile, expected: Mapping[str, Tensor], written: Collection[str], name: str) -> None:
    """ValueError unless every tensor of the model was written; tied ones count once."""
    tied = {id(expected[key]) for key in written if key in expected}
    missing = [key for key, tensor in expected.items() if key not in written and id(tensor) not in tied]
    if missing:
        raise ValueError(
            f"{model.path}: lacks {missing[0]} ({len(missing)} in all) that a {name} of the configuration given has; "
            "the file is not whole, or the configuration is of another model"
        )


def _several(faults: Mapping[str, str]) -> str:
    first = "; ".join(f"{name}: {why}" for name, why in list(faults.items())[:_NAMED])
    return first if len(faults) <= _NAMED else f"{first}; and {len(faults) - _NAMED} more"


def _counted(notes: list[str]) -> list[str]:
    """The first of each kind, with how many more layers it is true of."""
    kinds: dict[str, list[str]] = {}
    for note in notes:
        kinds.setdefault(note.partition(": ")[2] or note, []).append(note)
    return [f"{first} (and {len(rest)} more layers)" if rest else first for first, *rest in kinds.values()]


_MENDED = (*REPAIRS, "disabled", "rows in another order", "halves swapped", "ignored though quantized")  # faults
_LEFT_OUT = {
    "input_scale": "input_scale was left out, x takes its scale from each token here",
    "wzeros": "zero points were 7 scales, rounded to 16 bit; here they are exactly 7, at most 3 % of a step away",
}
