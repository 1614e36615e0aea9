"""The native checkpoint: a diffusers pipeline folder whose quantized components say all that loading needs.

    <component>/config.json      quantization_config = {quant_method, format_version, required_features, layers, …}
    <component>/*.safetensors    the tensors of QuantizedTensor, under the names NVIDIA ModelOpt gave the field
    fluxq_plan.json              for people: plan, reasons, trajectory, hashes, versions, the closing check

A transformers that does not know `quant_method` only warns and would load codes as if they were weights. So the codes
of its components are stored as [N, K', 1]: no module has a weight of that shape, and loading fails (`filed_shape`).

Source weights are read lazily, one tensor at a time; nothing here holds a whole model.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from fluxq.base.devices import free_bytes
from fluxq.base.files import read_json, sha256_file, sha256_json, write_json
from fluxq.base.model import HASHED_AT_ONCE, PICKLES, PLAN_FILE, ModelFolder, module_of
from fluxq.base.output import EXPORT_FILE
from fluxq.base.tensors import Stored, TensorFile, fingerprint_of, join_weights
from fluxq.kernels.linear import linears_of, placeholder
from fluxq.recipes.computing import QuantizationConfig

if TYPE_CHECKING:
    from fluxq.recipes.plan import Plan

LARGEST = 2.0**20  # of a weight, a bias or a factor: sixteen times what fp16 holds
ACTIVATIONS = 2.0**30  # scales of activations lie between the inverse of this and this

MAX_SHARD_BYTES = 10 * 10**9  # diffusers' own
_CACHED = 0.5  # of the free memory: larger models are not left in the system's cache
_MOST_MODULES = 8_000  # of a model; the largest known have a third

WEIGHTS_NAME = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


class SourceWeights:
    """Tensors of a component's safetensors files, read one at a time by their name in the model.

    That is their name in the file, but for old checkpoints whose tensors transformers renames as it loads them.
    """

    def __init__(self, folder: ModelFolder, component: str) -> None:
        self.folder = folder.path / component
        self._files: dict[str, tuple[TensorFile, str]] = {}
        model_class = model_class_of(library_of(folder, component), folder.components[component])
        self._fp32_modules = frozenset(getattr(model_class, "_keep_in_fp32_modules", None) or ())
        names_in = names_in_model(model_on_meta(folder, component)) if _is_of_transformers(model_class) else None
        for path in folder.weight_files(component):
            stream = TensorFile(path)
            for name_in_file in stream.keys():
                name = names_in(name_in_file) if names_in else name_in_file
                if name in self._files:
                    raise ValueError(f"{path}: tensor {name!r} is in two files; remove the copy that is not meant")
                self._files[name] = (stream, name_in_file)

    @property
    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self.folder}: the weights lack {name!r}, which the model's config.json implies")
        stream, name_in_file = self._files[name]
        return stream.get_tensor(name_in_file)

    def let_go(self, names: Iterable[str]) -> None:
        """Drop what was read from the system's cache, if the model is too large for it: writing finds room sooner."""
        if self._is_beyond_memory:
            for name in names:
                stream, name_in_file = self._files[name]
                stream.let_go(name_in_file)

    @cached_property
    def _is_beyond_memory(self) -> bool:
        free = free_bytes(torch.device("cpu"))
        return free is not None and self.nbytes > _CACHED * free

    def stored(self, name: str) -> Stored:
        """Return dtype, shape and place of a tensor, from its file's header."""
        stream, name_in_file = self._files[name]
        return stream.stored[name_in_file]

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return name in the file -> fingerprint of tensors that were read here just now, for `ModelFolder.digest`."""
        return {self._files[name][1]: fingerprint_of(tensor) for name, tensor in tensors.items()}

    def differing(self, fingerprints: Mapping[str, str]) -> list[str]:
        """Return the names, in the file, of tensors that are gone or have another fingerprint now."""
        files = {name: file for file, name in self._files.values()}
        return [name for name, was in fingerprints.items() if name not in files or files[name].fingerprint(name) != was]

    def stays_fp32(self, name: str) -> bool:
        """Tell whether the 16-bit model computes with this tensor in fp32, as its class asks for (Wan's norms do)."""
        return not self._fp32_modules.isdisjoint(name.split("."))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, from the files' headers."""
        return sum(self.stored(name).nbytes for name in self._files)


def is_model(folder: ModelFolder, component: str) -> bool:
    """Tell whether a component has weights: tokenizers and schedulers have none."""
    try:
        model_class_of(library_of(folder, component), folder.components[component])
    except ValueError:
        return False
    return True


def library_of(folder: ModelFolder, component: str) -> str:
    """Return the module of diffusers or transformers with a component's class; ValueError if there is none."""
    folder.require_component(component)
    module = module_of(folder.index[component][0])
    if module is None:
        raise ValueError(f"{folder.path}: component {component!r} is of neither diffusers nor transformers")
    return module


def build_on_meta(library: str, class_name: str, config: dict[str, Any]) -> nn.Module:
    """Build the model that a configuration implies, without weights.

    ValueError if the library lacks the class, and for more than `_MOST_MODULES`: two digits more in a config.json would
    otherwise fill any memory.
    """
    model_class = model_class_of(library, class_name)
    with _few_modules(), torch.device("meta"):
        if _is_of_transformers(model_class):
            return model_class(model_class.config_class.from_dict(config))
        return model_class.from_config(config)


@contextmanager
def _few_modules() -> Iterator[None]:
    counted = count(1)

    def add(*_: object) -> None:
        if next(counted) > _MOST_MODULES:
            raise ValueError(f"its numbers ask for more than {_MOST_MODULES} modules")

    with register_module_module_registration_hook(add):
        yield


def filed_shape(library: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a component of `library` stores the codes (N, K') of a quantized `weight`.

    In transformers (N, K', 1): the same bytes, and a loader that does not know fluxq stops at the shape.
    """
    return (*shape, 1) if library == "transformers" else shape


def write_component(
    target: Path,
    source: ModelFolder,
    plan: Plan,
    files: Iterable[Path],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    written: Callable[[Path, str], None] | None = None,
) -> int:
    """Write a quantized component's weight shards and config into the folder `target`; return bytes of tensors.

    A shard takes tensors in the order of the blocks until the next one does not fit; a larger tensor has a shard of its
    own. Shards have the names that the component's library gives them.

    plan: with the schemes that layers ended with.
    files: finished blocks, whose bytes are copied.
    written: function that is called with each file and its SHA-256.
    """
    library, codes = library_of(source, plan.component), {f"{layer.name}.weight" for layer in plan.quantized}
    total = write_shards(target, library, files, codes, max_shard_bytes, written)
    quantization = QuantizationConfig.of(plan.schemes(), plan.attention, plan.steps).to_dict()
    write_json(target / "config.json", {**source.config(plan.component), "quantization_config": quantization})
    return total


def add_runtime(component: Path, added: Mapping[str, Any]) -> None:
    """Add entries to what the config.json of a quantized component says of pipelines, before it has its digest."""
    config = read_json(component / "config.json")
    quantization = config["quantization_config"]
    runtime = {**quantization.get("runtime", {}), **added}
    write_json(component / "config.json", {**config, "quantization_config": {**quantization, "runtime": runtime}})


def write_shards(
    target: Path,
    library: str,
    files: Iterable[Path],
    codes: Collection[str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    written: Callable[[Path, str], None] | None = None,
) -> int:
    """Write the shards of `write_component`, without its config. codes: tensors that are stored in `filed_shape`."""
    parts: dict[str, tuple[Path, Stored]] = {}
    for file in files:
        for name, stored in TensorFile(file).stored.items():
            shape = filed_shape(library, stored.shape) if name in codes else stored.shape
            parts[name] = file, replace(stored, shape=shape)
    target.mkdir(parents=True, exist_ok=True)
    return join_shards(target, library, parts, {"format": "pt"}, max_shard_bytes, written)


def join_shards(
    target: Path,
    library: str,
    parts: Mapping[str, tuple[Path, Stored]],
    metadata: Mapping[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    written: Callable[[Path, str], None] | None = None,
) -> int:
    """Join tensors of other files to shards in a folder that exists, with an index if there are several.

    metadata: of every shard, as diffusers has it. Returns bytes of tensors.
    """
    stem = WEIGHTS_NAME[library]
    shards: list[dict[str, tuple[Path, Stored]]] = [{}]
    total = size = 0
    for name, (file, stored) in parts.items():
        if shards[-1] and size + stored.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = file, stored
        size += stored.nbytes
        total += stored.nbytes
    several = len(shards) > 1
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for shard, name in zip(shards, names if several else [f"{stem}.safetensors"], strict=True):
        sha256 = join_weights(shard, target / name, metadata)
        if written is not None:
            written(target / name, sha256)
    if several:
        weight_map = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(target / f"{stem}.safetensors.index.json", index)
    return total


def copy_rest(target: Path, source: ModelFolder, components: Iterable[str]) -> None:
    """Copy everything of a pipeline folder that is not quantized: other components, index, licences, defaults."""
    for component in _others(source, components):
        _copy(source.path / component, target / component)
    for path in _copied_files(source):
        shutil.copyfile(path, target / path.name)


def _others(source: ModelFolder, components: Iterable[str]) -> list[str]:
    """List the components that have a folder and are not among `components`."""
    quantized = set(components)
    return [name for name in source.components if name not in quantized and (source.path / name).is_dir()]


def _copy(source: Path, target: Path) -> None:
    """Copy a component's folder; the modes are those of new files, whatever the source's are."""
    target.mkdir()
    for file in _files_of(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a component's folder to copy, links followed; ValueError for a pipe or a device."""
    for path in sorted(path for path in folder.iterdir() if not path.name.endswith((*PICKLES, ".py"))):
        if path.is_dir():
            yield from _files_of(path)
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path}: neither a file nor a folder; remove it from the model")


def digest_rest(
    source: ModelFolder, components: Iterable[str], hashes: dict[Path, str] | None = None
) -> dict[str, str]:
    """Return component or file -> SHA-256 of its copy by `copy_rest`; ValueError where it cannot copy.

    hashes: is given those of the files, without configurations, into which digests are written later.
    """
    files = {path.name: [path] for path in _copied_files(source)}
    for component in _others(source, components):
        files[component] = list(_files_of(source.path / component))
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        pending = {name: pool.map(sha256_file, paths) for name, paths in files.items()}
        digests = {name: dict(zip(files[name], hashed, strict=True)) for name, hashed in pending.items()}
    if hashes is not None:
        hashes |= {file: one for part in digests.values() for file, one in part.items() if file.name != "config.json"}
    return {
        name: sha256_json([(str(file.relative_to(source.path)), one) for file, one in part.items()])
        for name, part in digests.items()
    }


def _copied_files(source: ModelFolder) -> Iterator[Path]:
    """Yield the files beside the components that a checkpoint has too."""
    for path in sorted(source.path.iterdir()):
        is_copied = path.name == "model_index.json" or path.name.lower().startswith(("license", "notice", "fluxq_"))
        if is_copied and path.is_file() and path.name not in (PLAN_FILE, EXPORT_FILE):
            yield path


def read_plan_file(folder: Path) -> dict[str, Any] | None:
    """Read `fluxq_plan.json` of a checkpoint folder; None if it has none."""
    path = folder / PLAN_FILE
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{path} is no regular file; copy it again")
    return read_json(path) if path.is_file() else None


def model_class_of(library: str, class_name: str) -> Any:
    """Return a model class of a module that `library_of` named; ValueError for a class that is no model's."""
    package = importlib.import_module(library)
    model_class = getattr(package, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        version = importlib.import_module(library.partition(".")[0]).__version__
        raise ValueError(
            f"model_index.json: {class_name} is no model class of this {library} ({version}): it is a "
            f"component without weights, or one that a newer {library} has"
        )
    return model_class


def _is_of_transformers(model_class: type) -> bool:
    """Tell whether transformers makes and loads the class; some of those are defined in pipelines of diffusers."""
    from transformers import PreTrainedModel

    return issubclass(model_class, PreTrainedModel)


def model_on_meta(folder: ModelFolder, component: str) -> nn.Module:
    """Build a component's 16-bit model on the meta device; ValueError naming the file that is at fault."""
    library, class_name = library_of(folder, component), folder.components[component]
    model_class_of(library, class_name)  # so that its error is not taken for one of the file
    config = folder.config(component)
    if "quantization_config" in config:
        raise ValueError(f"{folder.path / component} is already quantized; start from the 16-bit model")
    try:
        return build_on_meta(library, class_name, config)
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise ValueError(
            f"{folder.path / component / 'config.json'}: no {class_name} can be built from it "
            f"({type(error).__name__}: {error}); the file is damaged, copy it again"
        ) from error


def quantized_on_meta(folder: ModelFolder, component: str) -> nn.Module:
    """Build the model that a loader makes of a quantized component, with its QuantLinears, on the meta device.

    Raises ValueError naming the layer or setting where config.json and the class disagree.
    """
    library, class_name = library_of(folder, component), folder.components[component]
    where = folder.path / component / "config.json"
    config = folder.config(component)
    try:
        schemes = QuantizationConfig.from_dict(config.pop("quantization_config", {})).schemes
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    try:
        model = build_on_meta(library, class_name, config)
    except Exception as error:  # whatever a constructor makes of values that it did not expect
        raise ValueError(f"{where}: no {class_name} can be built from it ({error}); copy it again") from error
    linears = linears_of(model)
    for name, scheme in schemes.items():
        old = linears.get(name)
        if old is None:
            raise ValueError(f"{where}: quantizes {name!r}, which is no Linear of {class_name}; copy it again")
        try:
            new = placeholder(old, scheme, torch.bfloat16)
        except ValueError as error:
            raise ValueError(f"{where}: {name}: {error}") from None
        model.set_submodule(name, new)
    return model


def names_in_model(model: Any) -> Callable[[str], str]:
    """Return a function from name in a file to name in the model, by the rules of transformers' own loader.

    Models of other libraries have the same names in both.
    """
    if not _is_of_transformers(type(model)):
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    tensors = model.state_dict()
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]

    def name_in_model(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, tensors)
        return renamed if renamed in tensors else name  # a name that the model lacks stays as it is

    return name_in_model
