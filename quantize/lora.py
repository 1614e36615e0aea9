"""LoRA files that are fused before quantizing: W + Σ weight · scaling · B A, in fp32, one tensor at a time.

diffusers reads the file (it knows the key names of every trainer) and PEFT finds the layers and their scaling, both
on a model without weights. A key that neither of them takes is an error here: it is a typing error, or the LoRA is of
another model.

A file's keys say which denoiser it changes (`transformer.…`, `unet.…`). Where a pipeline has two, files name the first
one, as in diffusers; `transformer_2=FILE` stands for diffusers' `load_into_transformer_2`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.model import ModelFolder
from fluxq.base.tensors import TensorFile
from fluxq.kernels.linear import is_linear
from fluxq.quantize.checkpoint import SourceWeights, model_on_meta
from fluxq.quantize.lora_file import LoraFile
from fluxq.quantize.record import Lora


@dataclass(frozen=True)
class LowRankUpdate:
    """Update of one layer's weight (N, K) by a LoRA: scale · b a, with a (r, K) and b (N, r).

    Of a convolution K is the channels times the kernel's elements, as its weight holds them.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def delta(self) -> Tensor:
        """(N, K) fp32."""
        return self.scale * (self.b.float() @ self.a.float())


Updates = dict[str, LowRankUpdate]  # module path -> update


class FusedWeights(SourceWeights):
    """Source weights with LoRA updates added: matrices with an update come in fp32."""

    def __init__(self, folder: ModelFolder, component: str, updates: Sequence[Updates]) -> None:
        super().__init__(folder, component)
        self._updates = {f"{layer}.weight": [u[layer] for u in updates if layer in u] for u in updates for layer in u}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the fingerprints of tensors without an update: a fused one is not as the file has it."""
        return super().fingerprints({name: tensor for name, tensor in tensors.items() if name not in self._updates})

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        for update in self._updates.get(name, ()):
            tensor = tensor.float() + update.delta.view_as(tensor)
        return tensor


def fuse_into(model: nn.Module, updates: Sequence[Updates]) -> None:
    """Add updates to the weights of a loaded 16-bit model, each sum rounded once to the weight's dtype."""
    for layer in {layer for by_layer in updates for layer in by_layer}:
        weight = model.get_submodule(layer).get_parameter("weight")
        weight.data = fused(weight.data, [by_layer[layer] for by_layer in updates if layer in by_layer])


def fused(weight: Tensor, updates: Sequence[LowRankUpdate]) -> Tensor:
    """Add updates of a layer to its weight, and round the sum once to the weight's dtype."""
    deltas = [update.delta.to(weight.device).view_as(weight) for update in updates]
    return (weight.float() + sum(deltas)).to(weight.dtype)


def of_component(lora: LoraFile, folder: ModelFolder, denoisers: Sequence[str]) -> LoraFile:
    """Complete a file with the component that it changes: the one asked for, else the one that its keys name.

    denoisers: the components that can be adapted. ValueError for another one, and for keys of several.
    """
    if lora.component and lora.component not in denoisers:
        raise ValueError(
            f"{lora.path}: {lora.component!r} cannot take it; {folder.name} computes with {', '.join(denoisers)} at "
            "every step: name one of these, or none"
        )
    if lora.component:
        return lora
    prefixes = {key.partition(".")[0] for key in _read(lora, folder)[0]}
    named = [name for name in denoisers if name in prefixes]
    if len(named) > 1:
        raise ValueError(f"{lora.path}: has keys of {' and '.join(named)}; save the LoRA of each in a file of its own")
    return replace(lora, component=(named or [*denoisers, "transformer"])[0])


def updates_of(loras: Iterable[LoraFile], folder: ModelFolder) -> dict[str, tuple[Updates, ...]]:
    """Read files, each of a known component: component -> updates of its weights; see `read_updates`."""
    updates: dict[str, tuple[Updates, ...]] = {}
    for lora in loras:
        layer_updates = read_updates(lora, folder, lora.component)
        updates[lora.component] = (*updates.get(lora.component, ()), layer_updates)
    return updates


def read_updates(lora: LoraFile, folder: ModelFolder, component: str) -> Updates:
    """Read module path -> update of every Linear and convolution of `component` that the file adapts.

    Raises ValueError naming keys that match none of the component, belong to another one, or are no plain LoRA (DoRA
    magnitudes, biases, norms, grouped convolutions).
    """
    from peft.tuners.lora import Conv2d as AdaptedConvolution
    from peft.tuners.lora import Linear as AdaptedLinear

    state, scaling = _for_component(*_read(lora, folder), component)
    _refuse(lora, sorted(key for key in state if key.startswith("text_encoder")), _TEXT_ENCODERS)
    foreign = sorted(key for key in state if not key.startswith(f"{component}."))
    _refuse(lora, foreign, f"belong to no part of {component}, the component that is quantized")
    model: Any = model_on_meta(folder, component)
    adaptable = {name for name, module in model.named_modules() if _is_adaptable(module)}
    layers = {key: key.removeprefix(f"{component}.").rsplit(".", 2)[0] for key in state}
    strange = sorted(key for key, layer in layers.items() if layer not in adaptable)
    nothing = f"match no Linear or convolution of {folder.name}'s {component}"
    _refuse(lora, strange, nothing)  # PEFT would read them as expressions
    if "metadata" in scaling:
        scaling["metadata"] = _scaling(lora, scaling["metadata"], component, set(layers.values()))
    try:
        model.load_lora_adapter(state, prefix=component, adapter_name="fused", low_cpu_mem_usage=True, **scaling)
    except Exception as error:  # whatever PEFT makes of values that it did not expect
        raise ValueError(f"{lora.path}: does not fit {folder.name}'s {component}: {error}") from None
    updates: Updates = {}
    used = set()
    for name, module in model.named_modules():
        if isinstance(module, (AdaptedLinear, AdaptedConvolution)):
            a, b = (f"{component}.{name}.lora_{letter}.weight" for letter in "AB")
            if a in state and b in state:
                used |= {a, b}
                down, up = state[a].flatten(1), state[b].flatten(1)  # of a convolution (r, C, h, w) and (N, r, 1, 1)
                updates[name] = LowRankUpdate(down, up, lora.weight * float(module.scaling["fused"]))
                if not (torch.isfinite(state[a]).all() and torch.isfinite(state[b]).all()):
                    raise ValueError(f"{lora.path}: {name}: holds NaN or infinity; get the file again")
    _refuse(lora, sorted(state.keys() - used), nothing)
    return updates


def _is_adaptable(module: nn.Module) -> bool:
    return is_linear(module) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _for_component(
    state: dict[str, Tensor], scaling: dict[str, Any], component: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rename keys to PEFT's names; files say `transformer` of a second one too, which gets its own name."""
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    if not any(".lora_A." in key for key in state):  # names that diffusers gave a UNet's layers before it took PEFT's
        state = convert_unet_state_dict_to_peft(state)
    if component == _FIRST or not component.startswith(_FIRST) or any(key.startswith(f"{component}.") for key in state):
        return state, scaling

    def renamed(entries: dict[str, Any]) -> dict[str, Any]:
        return {re.sub(rf"^{_FIRST}\.", f"{component}.", key): value for key, value in entries.items()}

    return renamed(state), {kind: renamed(entries) for kind, entries in scaling.items()}


def recorded_loras(loras: Sequence[Lora]) -> Iterator[LoraFile]:
    """Yield the LoRA files that were fused into a checkpoint; ValueError for one that is gone or has changed."""
    for recorded in loras:
        lora = LoraFile(Path(recorded.file), recorded.weight, recorded.component)
        if not lora.path.is_file() or lora.digest != recorded.sha256:
            raise ValueError(
                f"{lora.path}: this LoRA was fused into the checkpoint, so the 16-bit images need it; the file is gone "
                f"or another one (SHA-256 {recorded.sha256[:16]}…): put it back"
            )
        yield lora


def _read(lora: LoraFile, folder: ModelFolder) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read (tensors under diffusers' names, alphas or metadata with their scaling)."""
    import diffusers

    file = TensorFile(lora.path)
    for pattern, why in _REFUSED.items():
        keys = (key for key in file.keys() if re.search(pattern, key))
        _refuse(lora, sorted(key for key in keys if file.get_tensor(key).any()), why)
    pipeline: Any = getattr(diffusers, folder.index["_class_name"])
    if not hasattr(pipeline, "lora_state_dict"):
        raise ValueError(f"{pipeline.__name__} takes no LoRA in this diffusers ({diffusers.__version__})")
    wants_alphas = "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters
    options: dict[str, Any] = {"return_alphas": True} if wants_alphas else {}
    if "unet" in folder.components:  # to read names that count blocks in another way
        options["unet_config"] = model_on_meta(folder, "unet").config
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
    alphas, metadata = rest if len(rest) > 1 else (None, *rest)  # pipelines with a UNet return alphas unasked
    scaling = {"network_alphas": alphas, "metadata": metadata}
    return state, {key: value for key, value in scaling.items() if value}


def _scaling(lora: LoraFile, metadata: dict[str, Any], component: str, layers: Iterable[str]) -> dict[str, Any]:
    """Return the part of a file's PEFT configuration that scaling depends on, for just these layers.

    PEFT would import a module that the rest may name, and takes a text in it for an expression over module paths.
    Raises ValueError for a value that is no plain number or name.
    """
    settings = {key: metadata[f"{component}.{key}"] for key in _SCALING if f"{component}.{key}" in metadata}
    for key, value in settings.items():
        if not _SCALING[key](value):
            raise ValueError(f"{lora.path}: says {key} is {str(value)[:80]!r}; save it again as a plain LoRA")
    settings["target_modules"] = sorted(layers)
    return {f"{component}.{key}": value for key, value in settings.items()}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST


def _numbers_by_layer(value: Any) -> bool:
    return isinstance(value, dict) and all(
        re.fullmatch(r"\^?[\w.-]+\$?", name) and _is_number(number) for name, number in value.items()
    )


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    """Raise for keys that diffusers' converters do not know, which it drops with a warning."""
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


_FIRST = "transformer"
_TEXT_ENCODERS = (
    "adapt a text encoder, whose part fluxq does not fuse: leave these keys out of the file, or let diffusers fuse it "
    "(load_lora_weights, fuse_lora, unload_lora_weights, save_pretrained) and quantize what it saved"
)
_LARGEST = 1e9  # of a rank or an alpha

# Pattern of keys that are refused as the file has them -> why: diffusers' converters leave some out without a warning.
_REFUSED = {
    r"\.diff(_b)?$|\.lora_B\.bias$": (
        "change norms, biases or whole weights, which fluxq does not fuse: leave them out of the file"
    ),
    r"\.lora_magnitude_vector|\.dora_scale$": (
        "are a DoRA's, which fluxq does not fuse: fuse it into the 16-bit model and quantize that"
    ),
    r"^text_encoders\.|^lora_te\d?_": _TEXT_ENCODERS,
}

# Key of a PEFT configuration that scaling depends on -> what its value has to be.
_SCALING: dict[str, Callable[[Any], bool]] = {
    "r": _is_number,
    "lora_alpha": _is_number,
    "rank_pattern": _numbers_by_layer,
    "alpha_pattern": _numbers_by_layer,
    "use_rslora": lambda value: isinstance(value, bool),
}
