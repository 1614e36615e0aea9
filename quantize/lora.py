"""LoRA files that are fused before quantizing: W + Σ weight · scaling · B A, in fp32, one tensor at a time.

diffusers reads the file (it knows the key names of every trainer) and PEFT finds the layers and their scaling, both
on a model without weights. What neither of them takes is an error here: a key that changes nothing is a typing error
or a LoRA of another model.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.files import sha256_file
from fluxq.base.model import ModelFolder
from fluxq.base.tensors import TensorFile
from fluxq.quantize.checkpoint import SourceWeights, model_on_meta


@dataclass(frozen=True)
class LoraFile:
    """A safetensors file and the weight of its adapter."""

    path: Path
    weight: float

    @classmethod
    def parse(cls, text: str) -> LoraFile:
        """`FILE` or `FILE:weight`; ValueError or FileNotFoundError for anything else."""
        name, colon, weight = text.rpartition(":")
        if not colon or Path(text).is_file():
            name, weight = text, "1"
        try:
            lora = cls(Path(name).expanduser(), float(weight))
        except ValueError:
            example = "write FILE:weight with a number as weight, as in style.safetensors:0.8"
            raise ValueError(f"LoRA {text!r}: {example}") from None
        if not lora.path.is_file():
            raise FileNotFoundError(f"LoRA file {lora.path} does not exist")
        if lora.path.suffix != ".safetensors":
            raise ValueError(f"{lora.path}: is no safetensors file by its name; convert it first, pickles are not read")
        if not abs(lora.weight) < float("inf"):
            raise ValueError(f"LoRA {text!r}: weight {weight} is no finite number")
        TensorFile(lora.path)  # ValueError for one that is damaged
        return lora

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's bytes."""
        return sha256_file(self.path)

    def describe(self) -> dict[str, Any]:
        """As it is recorded in the checkpoint."""
        return {"file": str(self.path.resolve()), "weight": self.weight, "sha256": self.digest}


@dataclass(frozen=True)
class LowRankUpdate:
    """What a LoRA adds to one layer's weight (N, K): scale · b a, with a (r, K) and b (N, r)."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def delta(self) -> Tensor:
        """(N, K) fp32."""
        return self.scale * (self.b.float() @ self.a.float())


Updates = dict[str, LowRankUpdate]  # module path -> update


class FusedWeights(SourceWeights):
    """Source weights with LoRA updates added: matrices that one touches come in fp32."""

    def __init__(self, folder: ModelFolder, component: str, updates: Sequence[Updates]) -> None:
        super().__init__(folder, component)
        self._updates = {f"{layer}.weight": [u[layer] for u in updates if layer in u] for u in updates for layer in u}

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        for update in self._updates.get(name, ()):
            tensor = tensor.float() + update.delta
        return tensor


def fuse_into(model: nn.Module, updates: Sequence[Updates]) -> None:
    """Add updates to the weights of a loaded 16-bit model, each sum rounded once to the weight's dtype."""
    for layer in {layer for found in updates for layer in found}:
        weight = model.get_submodule(layer).get_parameter("weight")
        deltas = [found[layer].delta.to(weight.device) for found in updates if layer in found]
        weight.data = (weight.data.float() + sum(deltas)).to(weight.dtype)


def read_updates(lora: LoraFile, folder: ModelFolder, component: str) -> Updates:
    """Module path -> update of every Linear of `component` that the file adapts.

    Raises ValueError naming the keys for those that match no Linear of the component, that belong to another
    component, and for what is no plain LoRA (DoRA magnitudes, biases, norms).
    """
    from peft.tuners.lora import Linear as AdaptedLinear

    state, scaling = _read(lora, folder)
    foreign = sorted(key for key in state if not key.startswith(f"{component}."))
    _refuse(lora, foreign, f"belong to no part of {component}, the component that is quantized")
    model: Any = model_on_meta(folder, component)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = {key: key.removeprefix(f"{component}.").rsplit(".", 2)[0] for key in state}
    strange = sorted(key for key, layer in layers.items() if layer not in linears)
    _refuse(lora, strange, f"match no Linear of {folder.name}'s {component}")  # PEFT would read them as expressions
    if "metadata" in scaling:
        scaling["metadata"] = _scaling(lora, scaling["metadata"], component, set(layers.values()))
    try:
        model.load_lora_adapter(state, prefix=component, adapter_name="fused", low_cpu_mem_usage=True, **scaling)
    except Exception as error:  # whatever PEFT makes of values that it did not expect
        raise ValueError(f"{lora.path}: does not fit {folder.name}'s {component}: {error}") from None
    updates: Updates = {}
    taken = set()
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            a, b = (f"{component}.{name}.lora_{letter}.weight" for letter in "AB")
            if a in state and b in state:
                taken |= {a, b}
                updates[name] = LowRankUpdate(state[a], state[b], lora.weight * float(module.scaling["fused"]))
                if not (torch.isfinite(state[a]).all() and torch.isfinite(state[b]).all()):
                    raise ValueError(f"{lora.path}: {name}: holds NaN or infinity; get the file again")
    _refuse(lora, sorted(state.keys() - taken), f"match no Linear of {folder.name}'s {component}")
    return updates


def _read(lora: LoraFile, folder: ModelFolder) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors under diffusers' names, the alphas or metadata that give their scaling)."""
    import diffusers

    pipeline: Any = getattr(diffusers, folder.index["_class_name"])
    if not hasattr(pipeline, "lora_state_dict"):
        raise ValueError(f"{pipeline.__name__} takes no LoRA in this diffusers ({diffusers.__version__})")
    wants_alphas = "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters
    options = {"return_alphas": True} if wants_alphas else {}
    try:
        with _warnings_are_errors():
            state, *rest = pipeline.lora_state_dict(
                str(lora.path.parent.resolve()),
                weight_name=lora.path.name,
                use_safetensors=True,
                local_files_only=True,
                return_lora_metadata=True,
                **options,
            )
    except Exception as error:  # whatever a converter makes of keys and shapes that it did not expect
        raise ValueError(f"{lora.path}: diffusers cannot read this LoRA ({error}); is it one for this model?") from None
    alphas, metadata = rest if wants_alphas else (None, *rest)
    given = {"network_alphas": alphas, "metadata": metadata}
    return state, {key: value for key, value in given.items() if value}


def _scaling(lora: LoraFile, metadata: dict[str, Any], component: str, layers: Iterable[str]) -> dict[str, Any]:
    """The part of a file's PEFT configuration that scaling depends on, for just these layers.

    PEFT would import a module that the rest may name, and takes a text in it for an expression over module paths.
    Raises ValueError for what is no plain number or name.
    """
    said = {key: metadata[f"{component}.{key}"] for key in _SCALING if f"{component}.{key}" in metadata}
    for key, value in said.items():
        if not _SCALING[key](value):
            raise ValueError(f"{lora.path}: says {key} is {str(value)[:80]!r}; save it again as a plain LoRA")
    said["target_modules"] = sorted(layers)
    return {f"{component}.{key}": value for key, value in said.items()}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _numbers_by_layer(value: Any) -> bool:
    return isinstance(value, dict) and all(
        re.fullmatch(r"\^?[\w.-]+\$?", name) and _is_number(number) for name, number in value.items()
    )


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    """diffusers drops keys that its converters do not know with a warning; here nothing is dropped."""
    logger = logging.getLogger("diffusers.loaders")
    handler, level = _Raise(level=logging.WARNING), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Raise(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError(record.getMessage())


def _refuse(lora: LoraFile, keys: list[str], why: str) -> None:
    if keys:
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        raise ValueError(f"{lora.path}: keys {', '.join(keys[:3])}{more} {why}; nothing of a LoRA is left out silently")


_LARGEST = 1e9  # of a rank or an alpha

# Key of a PEFT configuration that scaling depends on -> what its value has to be.
_SCALING: dict[str, Callable[[Any], bool]] = {
    "r": _is_number,
    "lora_alpha": _is_number,
    "rank_pattern": _numbers_by_layer,
    "alpha_pattern": _numbers_by_layer,
    "use_rslora": lambda value: isinstance(value, bool),
}
