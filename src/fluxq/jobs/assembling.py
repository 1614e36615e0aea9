"""Put the checkpoint of a search together of layers that other checkpoints have, without fitting or rounding any.

units in a format    tensors of that checkpoint's layers, byte for byte
units in 16 bit      the model's own weights
all else             of the first checkpoint: modulation, norms, text encoders, VAE, scheduler
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fluxq
from fluxq.base.devices import versions
from fluxq.base.files import write_json, write_text
from fluxq.base.output import Output, job_digest, writing
from fluxq.base.tensors import Stored, TensorFile, save_weights
from fluxq.calibrate.errors import SIXTEEN_BIT
from fluxq.eval.images.generate import generate
from fluxq.eval.report.card import model_card
from fluxq.jobs.fitted import Fitted
from fluxq.jobs.making import closing_check
from fluxq.jobs.requirements import makes_pictures
from fluxq.jobs.search import Search
from fluxq.quantize.checkpoint import copy_rest, join_shards
from fluxq.quantize.record import (
    Identity,
    Layer,
    MixedFrom,
    Record,
    RecordedComponent,
    RecordedRecipe,
    hash_files,
    read_record,
    write_digests,
    write_record,
)
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import Scheme
from fluxq.recipes.recipe import load_recipe

_PARTS = ".parts"


def assemble(search: Search, result: Mapping[str, Any]) -> Record:
    """Write the checkpoint that a finished search chose, and return its record; of one that stands already that.

    result: of the search, as `choose` returns it.

    RuntimeError for checkpoints that changed meanwhile.
    """
    options = {layer: each["option"] for each in result["units"] for layer in each["layers"]}
    folder, fitted = Path(str(search.options.assemble)), search.offer.fitted
    digests = [[option, one.digest] for option, one in fitted.items()]
    rest = next(iter(fitted.values())).record.files
    digest = job_digest([fluxq.__version__, search.job.output.stem, digests, rest, options])
    with writing(Output(folder), digest, overwrite=search.job.options.overwrite) as part:
        if part is not None:
            _write(part, search, options, digest)
    return read_record(folder)


def _write(part: Path, search: Search, options: Mapping[str, str], digest: str) -> None:
    job, fitted = search.job, search.offer.fitted
    first, hashes = next(iter(fitted.values())), dict[Path, str]()
    reference = None
    if makes_pictures(job.folder):
        reference = generate(job.load_reference(), job.check_items, job.check_call, description="16-bit pipeline")
    components = [_component(part, search, name, options, hashes) for name in first.components]
    kept = [each for each in first.record.components if each.component not in first.components]
    copy_rest(part, first.folder, first.components)
    for one in fitted.values():
        one.require_unchanged()
    write_digests(part)
    name, recipe = load_recipe(str(job.output))
    identity = {"job": digest, "fluxq": fluxq.__version__, "model": first.record.model.digests, "mixed": options}
    record = Record(
        fluxq_version=fluxq.__version__,
        identity=Identity.model_validate({"recipe": recipe.digest, "dtype": job.options.dtype, **identity}),
        model=first.record.model,
        recipe=RecordedRecipe.model_validate({"name": name, **recipe.model_dump(mode="json")}),
        mixed=[_origin(one, options) for one in fitted.values()],
        prompts=first.record.prompts,
        trajectory=first.record.trajectory,
        statistics_digest=first.record.statistics_digest,
        components=[*components, *kept],
        versions=versions(),
        check=None,
    )
    record.files = hash_files(part, hashes)
    _require_copied(first, record)
    if reference is not None:
        record.check = closing_check(part, replace(job, recipe=recipe), reference)
    write_record(part, record)
    write_text(part / "README.md", model_card(record))


def _component(
    part: Path, search: Search, name: str, options: Mapping[str, str], hashes: dict[Path, str]
) -> RecordedComponent:
    """Write a transformer, and return its record. hashes: takes those of its files."""
    job, fitted = search.job, search.offer.fitted
    first = next(iter(fitted.values()))
    native, target = first.components[name], part / name
    target.mkdir(parents=True)
    tensors: dict[str, tuple[Path, Stored]] = {}
    for tensor in native.stored:
        layer = f"{name}.{tensor.rpartition('.')[0]}"
        if layer not in options:
            tensors[tensor] = native.file_of(tensor).path, native.stored[tensor]
        elif options[layer] != SIXTEEN_BIT:
            tensors |= fitted[options[layer]].tensors(layer)
        elif tensor.endswith(".weight"):
            tensors |= _plain(search, layer, part / _PARTS)
    size = join_shards(target, native.library, tensors, {"format": "pt"}, written=hashes.__setitem__)
    if (part / _PARTS).exists():
        shutil.rmtree(part / _PARTS)
    plan = job.calibrated[name]
    schemes = {layer.name: _scheme(search, options, f"{name}.{layer.name}") for layer in plan.layers}
    config = QuantizationConfig.from_dict(native.quantization)
    quantized = [(path, scheme) for path, scheme in schemes.items() if scheme is not None]
    config = QuantizationConfig.of(quantized, config.attention, config.steps, config.runtime)
    write_json(target / "config.json", {**native.config, "quantization_config": config.to_dict()})
    plan = replace(plan, layers=tuple(replace(layer, scheme=schemes[layer.name]) for layer in plan.layers))
    records = {option: _recorded(one, name) for option, one in fitted.items()}
    whole = _recorded(first, name)
    of_layers = {option: {layer.name: layer for layer in each.layers} for option, each in records.items()}
    layers = []
    for layer in whole.layers:
        option = options.get(f"{name}.{layer.name}", first.option)
        layers.append(_in_16_bit(layer) if option == SIXTEEN_BIT else of_layers[option][layer.name])
    groups = [
        group
        for option, each in records.items()
        for group in each.groups
        if {options.get(f"{name}.{layer}", first.option) for layer in group.layers} == {option}
    ]
    changes = {"bytes_after": size, "bits_per_weight": round(plan.bits_per_weight, 4), "seconds": 0.0}
    return whole.model_copy(update={**changes, "layers": layers, "groups": groups})


def _scheme(search: Search, options: Mapping[str, str], layer: str) -> Scheme | None:
    """Return the final scheme of a layer "component.path", None for 16 bit."""
    fitted = search.offer.fitted
    option = options.get(layer, next(iter(fitted)))
    return None if option == SIXTEEN_BIT else fitted[option].schemes.get(layer)


def _plain(search: Search, layer: str, folder: Path) -> dict[str, tuple[Path, Stored]]:
    """Write a layer's 16-bit tensors into a file, and return their places."""
    component, _, path = layer.partition(".")
    source, dtype = search.job.weights(component), getattr(torch, search.job.options.dtype)
    names = [name for name in source.names if name.rpartition(".")[0] == path]
    tensors = {name: source[name] if source.stays_fp32(name) else source[name].to(dtype) for name in names}
    folder.mkdir(exist_ok=True)
    file = folder / f"{layer}.safetensors"
    save_weights(tensors, file, {})
    return {name: (file, stored) for name, stored in TensorFile(file).stored.items()}


def _recorded(one: Fitted, component: str) -> RecordedComponent:
    return next(each for each in one.record.components if each.component == component)


def _in_16_bit(layer: Layer) -> Layer:
    chosen = {"scheme": "16bit", "may_try": "", "bits_per_weight": 16.0, "weight_sqnr_db": None}
    return layer.model_copy(update={**chosen, "reason": f"16 bit: chosen by `fluxq auto` for its role, {layer.role}"})


def _origin(one: Fitted, options: Mapping[str, str]) -> MixedFrom:
    layers = [layer for layer, option in options.items() if option == one.option]
    return MixedFrom(format=one.option, checkpoint=one.folder.path.resolve().name, digest=one.digest, layers=layers)


def _require_copied(first: Fitted, record: Record) -> None:
    """Raise RuntimeError for copies of other files than the first checkpoint was written with."""
    for file, digest in first.record.files.items():
        component, _, name = file.rpartition("/")
        if component not in first.components and name != "config.json" and record.files.get(file) != digest:
            raise RuntimeError(f"{first.path}: {file} is not as it was written; copy the checkpoint again")
