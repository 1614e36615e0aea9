"""A diffusers pipeline folder on disk: found, checked to be safe to load, and loaded.

Only safetensors and JSON are read and no code of a model repository is ever run: a folder that would need either
pickle weights or remote code is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fluxq.base.console import did_you_mean, first_line, logger, say_once, without_loading_bars
from fluxq.base.download import download, require_hub_id
from fluxq.base.files import (
    INDEX,
    WEIGHT_STEMS,
    is_text,
    read_json,
    require_one_set,
    sets_of_weights,
    sha256_file,
    sha256_json,
    stamps,
)
from fluxq.base.output import PLAN_FILE as PLAN_FILE
from fluxq.base.tensors import TensorFile
from fluxq.base.untrusted_yaml import license_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

DEFAULT_MODEL = "tiny"
GENERATION_FILE = "fluxq_generation.json"
PROMPTS_FILE = "fluxq_prompts.txt"

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # of PEFT
_LIBRARIES = ("diffusers", "transformers")
HASHED_AT_ONCE = 4  # files; hashlib lets other threads run
_MOST_LAYERS = 8000
_LARGEST_NUMBER = 10**9  # of a size; a larger one, times a text in the place of another size, would fill the memory
_LARGEST_TABLE = 100_000  # a hundred times the steps that models are trained on
LARGEST = {  # argument of a call that is a count -> its largest useful value
    **{"height": 1 << 14, "width": 1 << 14, "num_inference_steps": 10_000},
    **{"num_frames": 10_000, "frames": 10_000, "video_length": 10_000},
    **{"max_sequence_length": 1 << 16, "num_images_per_prompt": 1, "num_videos_per_prompt": 1},  # each has its noise
}
_OURS = frozenset(  # arguments of a call that fluxq gives itself, and others that are no setting of a model
    "prompt generator latents output_type return_dict callback callback_on_step_end callback_on_step_end_tensor_inputs "
    "prompt_embeds pooled_prompt_embeds negative_prompt_embeds negative_pooled_prompt_embeds".split()
)
_LONGEST_NAME = 80  # of a component
_ATTENTION = "attn_implementation"
_SENTENCEPIECE = "spiece.model"  # of T5, as PixArt and LTX-Video have it
_CUT_PROMPT = "The following part of your input was truncated"  # by diffusers, of a prompt longer than CLIP reads
_LONG_PROMPT = "Token indices sequence length is longer"  # by transformers, of the same
_SNAPSHOTS = "snapshots"  # in the hub's cache: commit -> folder


@dataclass(frozen=True)
class ModelFolder:
    """A pipeline folder.

    name: for people.
    path: on disk.
    commit: of a hub model, where the download tells it.
    """

    name: str
    path: Path
    commit: str | None = None

    @property
    def is_one_model(self) -> bool:
        """True for the folder of one model, as its `save_pretrained` writes it, without a pipeline."""
        return not (self.path / "model_index.json").is_file() and (self.path / "config.json").is_file()

    @cached_property
    def index(self) -> dict[str, Any]:
        """`model_index.json`; for the folder of one model, that of a pipeline whose only component is ""."""
        if not self.is_one_model:
            return read_json(self.path / "model_index.json")
        config = self.config("")
        listed = config.get("architectures")
        first = listed[0] if isinstance(listed, list) and listed else None
        classes = {"diffusers": config.get("_class_name"), "transformers": first}
        for library, class_name in classes.items():
            if isinstance(class_name, str):
                return {"": [library, class_name]}
        raise ValueError(f"{self.path / 'config.json'}: names no class of diffusers or transformers; copy it again")

    @property
    def components(self) -> dict[str, str]:
        """Component -> class name, of those with weights or files of their own."""
        listed = {name: value for name, value in self.index.items() if _is_component(value)}
        return {name: value[1] for name, value in listed.items() if value[0] is not None}

    def require_component(self, component: str) -> None:
        """Raise ValueError for a name that no component of the pipeline has."""
        if component not in self.components:
            names, near = ", ".join(self.components), did_you_mean(component, self.components)
            raise ValueError(f"{self.name} has no component {component!r}{near}; it has {names}, says model_index.json")

    @property
    def pipeline_class(self) -> type | None:
        """The pipeline's class; None where this diffusers does not have it."""
        import diffusers

        pipeline = getattr(diffusers, self.index["_class_name"], None)
        return pipeline if isinstance(pipeline, type) and issubclass(pipeline, diffusers.DiffusionPipeline) else None

    def config(self, component: str) -> dict[str, Any]:
        """Return the component's `config.json`."""
        return read_json(self.path / component / "config.json")

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Arguments of a normal pipeline call that the folder carries; empty for most models.

        Raises ValueError naming the file and the argument for a value that no call takes.
        """
        path = self.path / GENERATION_FILE
        defaults = read_json(path) if path.is_file() else {}
        require_arguments(path, defaults)
        return defaults

    def weight_files(self, component: str) -> list[Path]:
        """Return the component's safetensors files as its library picks them: an index's shards, or the one file.

        Where both exist, diffusers takes the shards and transformers the file, and a warning names the others; in a
        quantized component two sets are an error. Other variants beside them (`….fp16.safetensors`) are left alone.

        Raises ValueError for pickle weights, for no weights, and for an index that names a missing file or one outside.
        """
        folder = self.path / component
        is_of_transformers = self._is_of_transformers(component)
        candidates = sets_of_weights(folder, is_of_transformers)
        if candidates:
            files = indexed_files(candidates[0]) if candidates[0].name.endswith(INDEX) else [candidates[0]]
            has_config = (folder / "config.json").is_file()
            if candidates[1:] and has_config and "quantization_config" in self.config(component):
                require_one_set(folder)
            for other in candidates[1:]:
                if other not in files:
                    _warn_of_second(other, candidates[0], self.name, component)
            return files
        variants = sorted(path.name for stem in WEIGHT_STEMS for path in folder.glob(f"{stem}.*.safetensors"))
        if variants:
            raise ValueError(f"{folder}: holds only a variant ({variants[0]}); save it again without `variant`")
        if parts := sorted(path.name for path in folder.glob("*-of-*.safetensors")):
            raise ValueError(
                f"{folder}: holds parts of weights ({parts[0]}) and no index of them; copy the folder again"
            )
        pickled = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
        cure = "convert them to safetensors first: unpickling a stranger's file runs its code"
        fault = f"holds pickle weights ({pickled[0]}); {cure}" if pickled else "holds no safetensors weights"
        raise ValueError(f"{folder}: {fault}")

    def _is_of_transformers(self, component: str) -> bool:
        """Tell whether transformers loads the component; for one model without a pipeline, its config.json tells."""
        if self.is_one_model:
            return "_class_name" not in self.config(component)
        entry = self.index.get(component) if (self.path / "model_index.json").is_file() else None
        return isinstance(entry, (list, tuple)) and entry[:1] == ["transformers"]

    def digest(self, component: str, read: Mapping[str, str] | None = None) -> str:
        """Return the SHA-256 of the component's config.json and its tensors' names, dtypes, shapes and fingerprints.

        How these are cut into files makes no difference. read: name -> `fingerprint_of` tensors that were read already;
        the others are read.
        """
        return sha256_json([sha256_file(self.path / component / "config.json"), self._described(component, read or {})])

    def tensors_digest(self, component: str) -> str:
        """Return `digest` without the config.json, and with the adapter that is loaded with the component, if any."""
        described: list[Any] = self._described(component, {})
        adapter = [[path.name, sha256_file(path)] for path in self.adapter_files(component)]
        return sha256_json([described, adapter] if adapter else described)

    def adapter_files(self, component: str) -> list[Path]:
        """List files beside the component's weights that transformers adds to them as it loads them; mostly none."""
        folder = self.path / component
        if not (folder / _ADAPTER[0]).is_file() or not self._is_of_transformers(component):
            return []
        return [folder / name for name in _ADAPTER if (folder / name).is_file()]

    def _described(self, component: str, fingerprints: Mapping[str, str]) -> list[list[Any]]:
        files = [TensorFile(path) for path in self.weight_files(component)]
        tensors = [(file, name) for file in files for name in file.keys()]

        def describe(of: tuple[TensorFile, str]) -> list[Any]:
            file, name = of
            stored = file.stored[name]
            return [name, stored.dtype, stored.shape, fingerprints.get(name) or file.fingerprint(name)]

        with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
            return sorted(pool.map(describe, tensors))

    def stamp(self, component: str) -> list[list[Any]]:
        """Return place and size of each of the component's files; nothing is read, and touching makes no difference."""
        return [[str(path.resolve()), path.stat().st_size] for path in self._files(component)]

    def stamps(self, component: str) -> list[Any]:
        """Return `stamps` of the component's files, which differ if one is replaced, touched or written to."""
        return stamps(self._files(component))

    def _files(self, component: str) -> list[Path]:
        return [self.path / component / "config.json", *self.weight_files(component)]

    @property
    def license(self) -> dict[str, str]:
        """`license`, `license_name` and `license_link` of the model card's front matter, those that are there."""
        return license_of(self.path / "README.md")


def resolve_model(
    model: str, *, revision: str | None = None, local_files_only: bool = False, one_model: bool = False
) -> ModelFolder:
    """Return the folder of a MODEL as users write it: a pipeline folder, a hub id, or `tiny` for the embedded pipeline.

    one_model: the folder of one model without its pipeline will do, too.

    Raises FileNotFoundError if nothing answers to that name, PermissionError for a gated model, OSError where the hub
    or the disk fails, and ValueError if it is no safe pipeline folder.
    """
    if model == "tiny":
        from fluxq import tiny

        return ModelFolder("tiny", Path(tiny.path()))
    path = Path(model).expanduser()
    is_local = path.is_dir()
    if not is_local:
        require_hub_id(model)
        path = download(model, revision, local_files_only)
    if not is_text(str(path.resolve())):
        raise ValueError(f"{str(path.resolve())!a}: a path that is no UTF-8, which no file can tell of; rename it")
    commit = path.name if not is_local and path.parent.name == _SNAPSHOTS else None
    folder = ModelFolder(path.resolve().name if is_local else model, path, commit)
    if one_model and folder.is_one_model:
        _require_safe_files(folder)
    else:
        require_safe(folder)
    return folder


def load_pipeline(
    folder: ModelFolder, dtype: str = "bfloat16", device: str = "cpu", models: Mapping[str, Any] | None = None
) -> DiffusionPipeline:
    """Load the stock diffusers pipeline of a folder, without its progress bar, from safetensors only.

    models: component -> model, for all components with weights; they are taken as and where they are.
    """
    import diffusers
    import torch

    check_weights(folder)
    _require_readers(folder)
    try:
        with without_loading_bars():
            pipeline = diffusers.DiffusionPipeline.from_pretrained(
                folder.path, dtype=getattr(torch, dtype), use_safetensors=True, local_files_only=True, **(models or {})
            )
    except (ImportError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # constructors and parsers raise all kinds at unexpected values
        raise ValueError(
            f"{folder.path}: cannot be loaded ({type(error).__name__}: {first_line(error)}); a file is damaged, copy "
            "the folder again"
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    say_once("diffusers", _CUT_PROMPT)
    say_once("transformers", _LONG_PROMPT)
    return pipeline.to(device) if models is None else pipeline


def _require_readers(folder: ModelFolder) -> None:
    """Raise RuntimeError for a tokenizer whose packages are absent, of which transformers would name another."""
    from transformers.utils import is_protobuf_available, is_sentencepiece_available

    for place in (folder.path / component for component in folder.components):
        is_alone = (place / _SENTENCEPIECE).is_file() and not (place / "tokenizer.json").is_file()
        if is_alone and not (is_sentencepiece_available() and is_protobuf_available()):
            raise RuntimeError(
                f"{place / _SENTENCEPIECE}: transformers reads it by packages that are not installed: pip install "
                "sentencepiece protobuf"
            )


def check_weights(folder: ModelFolder) -> None:
    """Open every weight file; ValueError naming the first that is missing, pickled, truncated or damaged."""
    for component in folder.components:
        if (folder.path / component / "config.json").is_file() and "scheduler" not in component:
            for path in folder.weight_files(component):
                TensorFile(path)


def require_safe(folder: ModelFolder) -> None:
    """Raise ValueError for a folder that asks for remote code or for files elsewhere."""
    if folder.is_one_model:
        raise ValueError(
            f"{folder.path}: one model without its pipeline (it has a config.json and no model_index.json); give the "
            "pipeline's folder"
        )
    if not (folder.path / "model_index.json").is_file():
        raise ValueError(
            f"{folder.path}: not a diffusers pipeline folder (it has no model_index.json); give the folder that has"
        )
    if not isinstance(folder.index.get("_class_name"), str):
        raise ValueError(
            f"{folder.path}: model_index.json asks for a pipeline class from remote code, which is never run"
        )
    for component, value in folder.index.items():
        if _is_component(value) and value != [None, None]:
            if len(value) != 2 or not isinstance(value[1], str):
                raise ValueError(f"{folder.path}: model_index.json says {value!r} of {component!r}, not its class")
            if module_of(value[0]) is None:
                raise ValueError(
                    f"{folder.path}: component {component!r} comes from {value[0]!r}; "
                    f"only {' and '.join(_LIBRARIES)} are loaded, and code of a model repository is never run"
                )
        if not component.isidentifier() or len(component) > _LONGEST_NAME:  # it is a folder here, an argument there
            raise ValueError(f"{folder.path}: component name {component[:80]!r} is no name of Python; correct it")
    _require_safe_files(folder)


def _is_component(value: object) -> bool:
    """Tell a component of `model_index.json` from a setting, which may be a list of numbers (Krea 2 has one)."""
    return isinstance(value, list) and not (value and all(isinstance(each, (int, float)) for each in value))


def _require_safe_files(folder: ModelFolder) -> None:
    """Raise ValueError for files of the components that are not safe; a part of `require_safe`."""
    for link in _links_out(folder.path):
        raise ValueError(f"{link}: a link that leads out of the folder; put the file itself there")
    for component in folder.components:
        config = folder.path / component / "config.json"
        if config.is_file():
            require_harmless(config)
        for file, key in (("scheduler_config.json", ""), ("tokenizer_config.json", "extra_ids")):
            if (folder.path / component / file).is_file():
                _require_moderate(folder.path / component / file, key)


def module_of(library: object) -> str | None:
    """Return the module of a component's class, by the first word of its entry in `model_index.json`.

    That is "diffusers", "transformers", or the folder of a pipeline inside diffusers, written without the rest of its
    path: Stable Diffusion's safety checker is of "stable_diffusion". None for anything else.
    """
    if not isinstance(library, str) or library in _LIBRARIES:
        return library if isinstance(library, str) else None
    import diffusers.pipelines

    path = f"{diffusers.pipelines.__name__}.{library}"
    module = getattr(diffusers.pipelines, library, None) if library.isidentifier() else None
    is_folder = isinstance(module, ModuleType) and module.__name__ == path and hasattr(module, "__path__")
    return path if is_folder else None


def require_harmless(config: Path) -> None:
    """Raise ValueError for a configuration that would harm whoever loads it, before it is loaded.

    That is attention under the name of a repository, whose code transformers would fetch and run; a number of layers
    above any model's, each of which may take entries; and a size that nothing has.
    """
    require_harmless_values(read_json(config), str(config))


def require_harmless_values(values: Mapping[str, Any], config: str) -> None:
    """Apply `require_harmless` to values of a configuration. config: its place, for messages."""
    listed = values.get("architectures")
    for class_name in (values.get("_class_name"), *(listed if isinstance(listed, list) else ())):
        if isinstance(class_name, str) and not class_name.isidentifier():
            raise ValueError(f"{config}: {class_name[:80]!r} is no name of a class; copy it again")
    left: list[tuple[str, Any]] = list(values.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(key if key.endswith(_ATTENTION) else inner, item) for inner, item in value.items()]
        elif key.endswith(_ATTENTION) and isinstance(value, str) and "/" in value:
            raise ValueError(f"{config}: asks for attention from {value!r}, whose code is never run; remove {key!r}")
        elif key.endswith(("layers", "depth")) and isinstance(value, (int, float)) and value > _MOST_LAYERS:
            raise ValueError(f"{config}: {key}: its numbers ask for more than {_MOST_LAYERS} modules")
        elif type(value) is int and value > _LARGEST_NUMBER and not key.endswith("theta"):
            raise ValueError(f"{config}: {key} is {str(value)[:80]}, expected a number up to {_LARGEST_NUMBER}")


def _require_moderate(config: Path, only: str) -> None:
    """Raise ValueError for a number that would become a table too large for memory. only: this key; "" for any."""
    for key, value in read_json(config).items():
        if only in ("", key) and isinstance(value, (int, float)) and value > _LARGEST_TABLE:
            raise ValueError(f"{config}: {key} is {str(value)[:80]}, expected a number up to {_LARGEST_TABLE}")


def require_arguments(file: Path, call: Mapping[str, Any]) -> None:
    """Raise ValueError naming the file and the argument for a value that no call takes."""
    for name, value in call.items():
        most = LARGEST.get(name)
        if most and not (type(value) is int and 1 <= value <= most):
            raise ValueError(f"{file}: {name} is {str(value)[:80]!r}, expected {whole_number(most)}")
        if name in _OURS or (name.endswith("_kwargs") and not isinstance(value, dict)) or value == []:
            raise ValueError(f"{file}: {name} is {str(value)[:80]!r}, which is not for this file to say; remove it")
        if not _is_plain(value):
            raise ValueError(f"{file}: {name} is {str(value)[:80]}, expected finite numbers or text; correct it")


def whole_number(most: int) -> str:
    """Return the values that a count may take, in words for people."""
    return "1" if most == 1 else f"a whole number from 1 to {most}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) and not isinstance(item, list) for item in value)
    return value is None or isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and abs(value) < inf)


def _links_out(folder: Path) -> Iterator[Path]:
    """Yield all links that lead out of a folder; a download of the hub's links into the `blobs` beside it."""
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == _SNAPSHOTS else [root]
    for path in sorted(root.rglob("*")):
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(place) for place in allowed):
            yield path


@cache
def _warn_of_second(other: Path, chosen: Path, model: str, component: str) -> None:
    """Warn of a second set of weights, once in a process: weights are looked up again and again."""
    logger.warning(
        "%s: its %s has two sets of weights: %s is read, as its library does, and %s is not; remove the one that is "
        "not meant",
        *(model, component or "folder", chosen.name, other.name),
    )


def indexed_files(index: Path) -> list[Path]:
    """Return the files that a set of weights is in, by its index; ValueError for a damaged index or a missing file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: names no weights; the file is damaged, copy it again")
    files = []
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index}: names files by something else than text; the file is damaged, copy it again")
    for name in sorted(set(weight_map.values())):
        if name == ".." or Path(name).name != name:
            raise ValueError(f"{index}: {name!r} leads out of the folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent / name}: missing, though {index.name} names it; copy the folder again")
        files.append(index.parent / name)
    return files
