"""A side of a comparison: one pipeline, and everything about it that decides the bits of its images.

The 16-bit model is a side, a checkpoint is one, and the same checkpoint in another arithmetic, with a step cache or
with another attention backend is another one. Sides are plain data, so that another process can open one.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fluxq.base.files import sha256_file, sha256_json, stamps
from fluxq.base.model import ModelFolder, load_pipeline
from fluxq.eval.images.denoiser import denoisers
from fluxq.kernels.linear import QuantLinear, quant_layers
from fluxq.quantize.lora import LoraFile, fuse_into, updates_of
from fluxq.runtime.layout import StoredLayer, reencode_layer
from fluxq.runtime.step_caches import FEWER, StepCache, enable_cache, naming


@dataclass(frozen=True)
class Side:
    """A pipeline to compare, as plain data.

    name: label in the report.
    folder: folder of the pipeline.
    digest: SHA-256 of all its weights, LoRA files included.
    loras: (file, weight, component) of adapters that are fused first.
    backend: key of BACKENDS.
    cache: step cache, list of steps or number of steps, None for all of the call's.
    attention: attention backend of diffusers by name, None for its default.
    source: folder of the 16-bit model, for the steps that a checkpoint keeps in 16 bit.
    offload: whether its parts take turns on a GPU, because they do not fit together.
    stamps: those of its files when the digest was taken, from `side_stamps`.
    """

    name: str
    folder: str
    digest: str
    dtype: str = "bfloat16"
    loras: tuple[tuple[str, float, str], ...] = ()
    backend: str = "native"
    cache: StepCache | None = None
    attention: str | None = None
    source: str | None = None
    offload: bool = False
    stamps: tuple[Any, ...] = ()

    @property
    def fewer(self) -> int | None:
        """Number of steps of a side that stands for fewer of them, all computed; None for others."""
        cache = self.cache
        return int(cache.value or 0) if cache is not None and cache.kind == FEWER else None

    def describe(self) -> dict[str, Any]:
        """Return the facts that decide the bits of its images, for hashing: neither its name nor its folders."""
        facts = asdict(self)
        del facts["name"], facts["folder"], facts["source"], facts["offload"], facts["stamps"]
        facts["cache"] = self.cache and self.cache.facts
        facts["loras"] = [[weight, component] for _, weight, component in self.loras]  # the files are in the digest
        return facts

    def open(self, device: str = "cpu", *, skips: bool = True) -> Any:
        """Open the pipeline, ready to be called.

        skips: whether steps are skipped by the checkpoint's list, where it has one; with a step cache they are not.

        Raises ValueError for a backend or attention that it cannot have, and RuntimeError for a cache that it cannot
        have, and for files that have changed since the digest was taken.
        """
        if self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r} is unknown; known: {', '.join(BACKENDS)}")
        from fluxq.runtime.skip import skip_recorded_steps  # these import torch's compiler
        from fluxq.runtime.steps import about_to_keep, keep_recorded_steps

        folder = ModelFolder(self.name, Path(self.folder))
        with about_to_keep():
            pipe: Any = load_pipeline(folder, self.dtype, "cpu" if self.offload else device)
        loras = (LoraFile(Path(file), weight, component) for file, weight, component in self.loras)
        for component, updates in updates_of(loras, folder).items():
            fuse_into(getattr(pipe, component), updates)
        is_here = self.stamps[:1] == (platform.node(),)  # another machine may have a copy of its own
        if is_here and side_stamps(folder.path, [file for file, _, _ in self.loras]) != self.stamps:
            raise RuntimeError(
                f"{self.folder} changed while it was judged; run the same command again when nothing writes there"
            )
        if BACKENDS[self.backend]:
            reencode_pipeline(pipe, BACKENDS[self.backend], folder)
        if self.attention is not None:
            set_attention(pipe, self.attention)
        if self.cache is not None:
            with naming(self.cache):
                enable_cache(pipe, self.cache)
        keep_recorded_steps(pipe, self.source)
        if skips and self.cache is None:
            skip_recorded_steps(pipe)
        return self.placed(pipe, device)

    def placed(self, pipe: Any, device: str) -> Any:
        """Return its pipeline where it is to run."""
        if self.offload and device != "cpu":
            pipe.enable_model_cpu_offload(device=device)
            return pipe
        return pipe.to(device)


def pipeline_digest(folder: ModelFolder) -> str:
    """Return the SHA-256 of all files that decide a pipeline's images, which are read for it."""
    return digest_of(folder, component_digests(folder))


def pipeline_digests(folder: ModelFolder) -> tuple[str, dict[str, str]]:
    """Return `pipeline_digest`, and component -> digest of its weights and configuration."""
    hashed = component_digests(folder)
    return digest_of(folder, hashed), hashed


def component_digests(folder: ModelFolder) -> dict[str, str]:
    """Return component -> digest of its weights and configuration, which are read for it."""
    with_weights = [name for name in folder.components if (folder.path / name / "config.json").is_file()]
    return {name: folder.digest(name) for name in with_weights}


def digest_of(folder: ModelFolder, hashed: Mapping[str, str]) -> str:
    """Return the SHA-256 of all files that decide a pipeline's images: weights, configurations and the scheduler's."""
    weights = {file for name in hashed for file in (folder.path / name / "config.json", *folder.weight_files(name))}
    others = sorted(
        path
        for name in folder.components
        for path in (folder.path / name).rglob("*")  # adapters too, which transformers loads by itself
        if path.is_file() and path not in weights
    )
    return sha256_json(
        [
            sha256_file(folder.path / "model_index.json"),
            *([name, digest] for name, digest in hashed.items()),
            *([str(path.relative_to(folder.path)), sha256_file(path)] for path in others),
        ]
    )


def side_stamps(folder: Path, loras: Sequence[str] = ()) -> tuple[Any, ...]:
    """Return this machine's name and the stamps of a pipeline's files, without reports, and of adapters beside it."""
    names = ModelFolder(folder.name, folder).components
    files = [path for name in sorted(names) for path in sorted((folder / name).rglob("*")) if path.is_file()]
    return platform.node(), *stamps([folder / "model_index.json", *files, *map(Path, loras)])


def variants(side: Side, backends: Sequence[str], caches: Sequence[StepCache]) -> list[Side]:
    """Return `side` in each arithmetic, and each again with every cache, named after the difference."""
    arithmetics = [
        side if backend == "native" else replace(side, name=f"{side.name} as {backend}", backend=backend)
        for backend in backends
    ]
    return [*arithmetics, *(shortened(each, cache) for each in arithmetics for cache in caches)]


def shortened(side: Side, cache: StepCache) -> Side:
    """Return a side with a step cache, or with fewer steps, named after it."""
    return replace(side, name=f"{side.name}, {cache.label}", cache=cache)


def quantized_layers(pipe: Any) -> dict[str, QuantLinear]:
    """Return `component.path` -> layer, of all components of a pipeline."""
    parts = {name: part for name, part in pipe.components.items() if hasattr(part, "named_modules")}
    return {f"{name}.{path}": layer for name, part in parts.items() for path, layer in quant_layers(part)}


def reencode_pipeline(pipe: Any, targets: tuple[str, ...], folder: ModelFolder) -> None:
    """Re-encode layers of quantized activations as `fluxq.prepare` does, for any device."""
    for name, layer in quantized_layers(pipe).items():
        activations = layer.scheme.activations
        if activations is not None and activations.name not in targets:
            component, _, path = name.partition(".")
            reencode_layer(layer, targets, StoredLayer(folder.path / component, path))


def set_attention(pipe: Any, backend: str) -> None:
    """Set the attention of these models alone: diffusers would make it the default of this process too.

    Its warning that choosing one is experimental is silenced: no user of fluxq chose that way.
    """
    from diffusers.models import attention_dispatch

    registry = attention_dispatch._AttentionBackendRegistry
    default = registry.get_active_backend()[0]
    log = logging.getLogger("diffusers.models.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        models: dict[str, Any] = denoisers(pipe)
        for model in models.values():
            model.set_attention_backend(backend)
    finally:
        log.setLevel(level)
        registry.set_active_backend(default)


def floor_attention(device: str) -> str:
    """Return diffusers' attention backend for the second 16-bit run: of PyTorch, but not its default."""
    return "_native_efficient" if device.startswith("cuda") else "_native_math"


NATIVE = "native"

# name -> 8-bit formats to re-encode layers to, each to the one of least error; none: computed as stored.
BACKENDS: dict[str, tuple[str, ...]] = {
    NATIVE: (),
    "int8": ("int8",),  # as fluxq.prepare does for Ampere
    "8bit": ("int8", "fp8"),  # for Ada and Hopper
}
