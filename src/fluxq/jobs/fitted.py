"""Checkpoints of one model whose fitted layers a search chooses from, read and checked.

All that fitting gave a layer (codes, scales, mean and factors of its input, rotation, branches, bias) is in that
layer's own tensors: a checkpoint of fluxq folds nothing into a norm or another Linear, only exports do. So layers of
several checkpoints can stand side by side. Layers that read one input stay together, and so do input groups that
were given one mean and one set of factors, so that an export can fold these into what makes both inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fluxq.base.files import sha256_json
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.base.tensors import Stored
from fluxq.jobs.job import Job
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.exchange.native import NativeComponent
from fluxq.quantize.record import DIGEST, Record, read_record
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import Scheme

_VECTORS = ("pre_quant_mean", "pre_quant_scale")


@dataclass(frozen=True)
class Fitted:
    """A checkpoint whose layers may be chosen.

    option: format of most of its weights, by which menus call it.
    formats: the same with that of the activations, as `Scheme.formats` has them.
    path: as given.
    components: transformers.
    digest: of their tensors.
    stamps: of their files, as they were read.
    """

    option: str
    formats: tuple[str, str | None]
    path: str
    folder: ModelFolder
    record: Record
    components: Mapping[str, NativeComponent]
    digest: str
    stamps: list[Any]

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """Layer "component.path" -> its final scheme."""
        return {f"{name}.{path}": s for name, part in self.components.items() for path, s in part.schemes.items()}

    def require_unchanged(self) -> None:
        """Raise RuntimeError if files of the checkpoint are others than those that were read first."""
        if self.stamps != _stamps(self.folder, self.components):
            raise RuntimeError(f"{self.path}: changed since the search began; start again when nothing writes there")

    def tensors(self, name: str) -> dict[str, tuple[Path, Stored]]:
        """Return tensor of the component -> its place, of all tensors of a layer "component.path"."""
        component, _, path = name.partition(".")
        part = self.components[component]
        return {key: (part.file_of(key).path, stored) for key, stored in part.stored.items() if _layer(key) == path}

    def nbytes(self, name: str) -> int:
        """Return the bytes that a layer "component.path" takes."""
        return sum(stored.nbytes for _, stored in self.tensors(name).values())

    def layer(self, name: str) -> QuantLinear:
        """Return a layer "component.path" as it was fitted."""
        component, _, path = name.partition(".")
        part = self.components[component]
        tensors = {key.rpartition(".")[2]: part.file_of(key).get_tensor(key) for key in self.tensors(name)}
        codes = tensors["weight"]
        tensors["weight"] = codes.squeeze(-1) if codes.ndim > 2 else codes  # as text encoders store them
        return QuantLinear.from_tensors(tensors, part.shapes[path], part.schemes[path])


def _stamps(folder: ModelFolder, components: Iterable[str]) -> list[Any]:
    return [folder.stamps(component) for component in components]


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def fitted_of(job: Job, paths: Sequence[str]) -> dict[str, Fitted]:
    """Return option -> checkpoint; ValueError for one that cannot be mixed with the others.

    job: of the first one's recipe.
    """
    fitted: dict[str, Fitted] = {}
    for path in paths:
        one = _fitted(job, path)
        if one.option in fitted:
            raise ValueError(
                f"--from: {fitted[one.option].path} and {path} are both {one.option}, by which a menu calls them; "
                "leave out one"
            )
        fitted[one.option] = one
    checkpoints = list(fitted.values())
    for other in checkpoints[1:]:
        _require_alike(checkpoints[0], other)
    return fitted


def _fitted(job: Job, path: str) -> Fitted:
    """Read a checkpoint; ValueError for one that fluxq did not fit, or fitted to something else."""
    folder = resolve_model(str(Path(path).expanduser()), local_files_only=True)
    record = read_record(folder.path)
    if record.imported is not None:
        raise ValueError(f"{path}: imported from another program, nothing says of which weights; quantize the model")
    if record.loras:
        raise ValueError(f"{path}: a LoRA is fused into it, and the model has none; quantize without --lora")
    if record.identity.dtype != job.options.dtype:
        raise ValueError(
            f"{path}: fitted in {record.identity.dtype}, and plans would run in {job.options.dtype}; give --dtype "
            f"{record.identity.dtype}"
        )
    for component in job.calibrated:
        _require_of_model(job, path, record, component)
    stamps = _stamps(folder, job.calibrated)
    components = {name: NativeComponent(folder, name) for name in job.calibrated}
    for name, part in components.items():
        _require_layers_of_plan(job, path, name, part)
    digests = {name: folder.tensors_digest(name) for name in components}
    for name, part in components.items():
        if part.quantization.get(DIGEST) not in (None, digests[name]):
            raise ValueError(f"{path}: tensors of its {name} changed since they were written; copy it again")
    formats = _main_formats(job, components)
    return Fitted(formats[0], formats, path, folder, record, components, sha256_json(digests), stamps)


def _require_of_model(job: Job, path: str, record: Record, component: str) -> None:
    if component not in [part.component for part in record.components]:
        raise ValueError(f"{path}: its {component} is in 16 bit; quantize it with that, or leave the checkpoint out")
    if record.model.digests.get(component) != job.digest(component):
        raise ValueError(
            f"{path}: its {component} was made of other weights than those of {job.folder.name}; give the model that "
            f"it was made of{f', {record.model.source}' if record.model.source else ''}"
        )


def _require_layers_of_plan(job: Job, path: str, component: str, part: NativeComponent) -> None:
    """Raise ValueError for layers that the first recipe quantizes and the checkpoint does not, or the other way."""
    planned = {layer.name: layer for layer in job.calibrated[component].layers if layer.is_observed}
    differing = [name for name, layer in planned.items() if (layer.scheme is None) is (name in part.schemes)]
    if differing:
        which = "does not quantize" if planned[differing[0]].scheme else "quantizes"
        raise ValueError(
            f"{path}: {which} {component}.{differing[0]} ({len(differing)} layers), unlike the recipe of the first "
            "checkpoint; quantize both with the same --exclude and --include"
        )


def _main_formats(job: Job, components: Mapping[str, NativeComponent]) -> tuple[str, str | None]:
    """Return the formats of most of the weights, of layers whose input calibration observes."""
    weights: Counter[tuple[str, str | None]] = Counter()
    for name, part in components.items():
        for layer in job.calibrated[name].quantized:
            if layer.is_observed:
                weights[part.schemes[layer.name].formats] += layer.n * layer.k
    return weights.most_common(1)[0][0]


def _require_alike(first: Fitted, other: Fitted) -> None:
    """Raise ValueError for checkpoints that compute attention or keep steps in different ways."""
    for name in first.components:
        settings = [QuantizationConfig.from_dict(one.components[name].quantization) for one in (first, other)]
        for what in ("attention", "steps"):
            one, two = (getattr(each, what) for each in settings)
            if one != two:
                raise ValueError(
                    f"--from: {what} of the {name} is {one or 'all alike'} in {first.path} and {two or 'all alike'} in "
                    f"{other.path}; quantize both with the same `{what}` in the recipe"
                )


def tied_layers(job: Job, fitted: Mapping[str, Fitted]) -> list[list[str]]:
    """Return layers "component.path" of several input groups that a checkpoint gave one mean and one set of factors."""
    together: dict[tuple[str, ...], list[str]] = {}
    for one in fitted.values():
        for component, plan in job.calibrated.items():
            for layer in plan.quantized:
                if layer.is_observed and (vectors := _vectors(one.components[component], layer.name)):
                    key = (one.option, component, layer.block, *vectors)
                    together.setdefault(key, []).append(f"{component}.{layer.name}")
    return list(together.values())


def _vectors(part: NativeComponent, layer: str) -> tuple[str, ...]:
    """Return fingerprints of a layer's mean and factors; none if it has neither."""
    names = [f"{layer}.{vector}" for vector in _VECTORS if f"{layer}.{vector}" in part.stored]
    return tuple(part.file_of(name).fingerprint(name) for name in names)
