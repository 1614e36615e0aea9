"""Code that the loaders of diffusers and transformers share.

One class is `quantization_config` in both libraries. They ask for a dictionary, `quant_method` and a few methods, never
for their own base class, and it may then stand in either's part of a pipeline.

A stored checkpoint: QuantLinears are put in place on the meta device, and every tensor that comes for one must have
the dtype and shape of its placeholder. Nothing here makes a checkpoint; on_the_fly.py rounds 16-bit weights while they
are loaded, and only a configuration with a recipe imports it.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.files import INDEX, read_json, require_one_set, sets_of_weights, write_text
from fluxq.base.modules import path_in_file
from fluxq.base.tensors import TensorFile, by_tensor
from fluxq.integrations.whole import guard_fusing
from fluxq.kernels.linear import BRANCHES, SCALE_NAMES, QuantLinear, is_linear, linear_size, placeholder, quant_layers
from fluxq.recipes.computing import QUANT_METHOD, Attentions, QuantizationConfig, Steps, attention_by
from fluxq.recipes.formats import Scheme


class Method(StrEnum):
    """Value of `quant_method`; both libraries read its `.value`, so a plain string will not do."""

    FLUXQ = QUANT_METHOD


class FluxqConfig:
    """Quantize a 16-bit model while it loads: `quantization_config=FluxqConfig(recipe="fp8")`.

    recipe: a shipped recipe's name or the path of a file.
    profile: "rtn" needs no calibration whatever the recipe says.
    include, exclude: patterns of module paths, as `fluxq quantize` takes them.
    component: the pipeline's name of the model, where the recipe has an entry of that name; otherwise a transformer
    gets the recipe's formats and a text encoder the same weight format with 16-bit activations.

    A stored checkpoint's `quantization_config` is the same class without a recipe. Raises ValueError if it is given
    neither, and TypeError for an unknown argument.
    """

    def __init__(
        self,
        recipe: str | PathLike[str] | None = None,
        profile: str | None = None,
        include: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        component: str | None = None,
        **stored: Any,
    ) -> None:
        stored.pop("quant_method", None)
        if recipe is not None and stored:
            raise TypeError(f"FluxqConfig takes no {', '.join(stored)} beside a recipe")
        if recipe is None and not stored:
            raise ValueError("FluxqConfig needs a recipe, for example FluxqConfig(recipe='fp8')")
        self.quant_method = Method.FLUXQ
        self.recipe, self.profile = None if recipe is None else str(recipe), profile
        self.include, self.exclude, self.component = _patterns(include), _patterns(exclude), component
        self._stored = QuantizationConfig.from_dict(stored) if stored else None
        self._steps = self._stored.steps if self._stored else None
        self._runtime = self._stored.runtime if self._stored else {}
        self._model: weakref.ref[nn.Module] | None = None

    @classmethod
    def from_dict(cls, config: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read the dictionary form; the libraries pass arguments of their own along, which are handed back."""
        parsed = cls(**config)
        return (parsed, kwargs) if return_unused_kwargs else parsed

    @property
    def model(self) -> nn.Module | None:
        """The model that this config describes, once there is one."""
        return self._model() if self._model else None

    @property
    def stored(self) -> QuantizationConfig:
        """Configuration that a checkpoint of the model would hold: of its present layers, once there is a model."""
        model = self.model
        if model is not None:
            return _layers_of(model, self._steps, self._runtime)
        if self._stored is None:
            raise ValueError(f"recipe {self.recipe} has not been applied to a model yet")
        return self._stored

    def describing(self, model: nn.Module, steps: Steps | None = None) -> FluxqConfig:
        """Return a config for this model alone, which from now on describes its layers.

        steps: that are kept in 16 bit, where a recipe was applied; a stored config has its own.
        """
        config = FluxqConfig.__new__(FluxqConfig)
        config.__dict__.update(self.__dict__, recipe=None)
        config._steps = self._steps or steps
        config._stored, config._model = _layers_of(model, config._steps, config._runtime), weakref.ref(model)
        return config

    def describe_again(self, model: nn.Module) -> None:
        """Describe the layers of a model that came out of a pickle with this config, of which its parts come first."""
        if self.recipe is None and (self.model is None or any(part is self.model for part in model.modules())):
            self._model = weakref.ref(model)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: a recipe until that has been applied to a model, and from then on layers."""
        if self.recipe is None:
            return self.stored.to_dict()
        options = ("recipe", "profile", "include", "exclude", "component")
        return {"quant_method": QUANT_METHOD, **{name: getattr(self, name) for name in options}}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | PathLike[str]) -> None:
        write_text(Path(json_file_path), self.to_json_string())

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Take none of the loading arguments that the libraries offer to a config."""
        return kwargs

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def __repr__(self) -> str:
        return f"FluxqConfig {self.to_json_string()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> FluxqConfig:
        """Copy it with a model, to describe the model's copy, or alone, to say what this one says now."""
        config = FluxqConfig.__new__(FluxqConfig)
        config.__dict__.update(self.__getstate__())
        twin = memo.get(id(self.model)) if self._model else None
        config._model = weakref.ref(twin) if twin is not None else None
        return config

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, which cannot hold the reference to the model."""
        state = {**self.__dict__, "include": list(self.include), "exclude": list(self.exclude), "_model": None}
        return state if self.recipe else {**state, "_stored": self.stored}


def _patterns(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _layers_of(model: nn.Module, steps: Steps | None, runtime: Mapping[str, Any]) -> QuantizationConfig:
    """Describe a model's layers; PEFT and torch.compile put those that they wrap one level down."""
    attention = attention_in(model)
    layers = ((name, m.stored_scheme) for name, m in model.named_modules() if isinstance(m, QuantLinear))
    named = ((path_in_file(name), scheme) for name, scheme in layers)
    return QuantizationConfig.of(named, attention, steps, runtime)


def attention_in(model: nn.Module) -> Attentions:
    """Return the arithmetic of a model's self-attention; families' rows are imported only if some is not in 16 bit."""
    if not any(attention_by(getattr(module, "processor", None)) for module in model.modules()):
        return "16bit"
    from fluxq.quantize.structure import attention_of

    return attention_of(model)


def put_layers(model: nn.Module, schemes: Mapping[str, Scheme], dtype: torch.dtype) -> dict[str, Tensor]:
    """Replace Linears by QuantLinears on the meta device.

    Returns the full name of every tensor that no loader may cast, with a meta tensor of its stored dtype and shape.
    Raises ValueError for a name that is no Linear of this model.
    """
    exact: dict[str, Tensor] = {}
    for name, scheme in schemes.items():
        old = submodule(model, name)
        if old is None or not is_linear(old):
            raise ValueError(f"checkpoint quantizes {name!r}, which is no Linear of this {type(model).__name__}")
        scheme.weights.check_shape(*linear_size(old), name)
        new = placeholder(old, scheme, dtype)
        exact.update({f"{name}.{tensor}": new.get_parameter(tensor).data for tensor in new.stored_names})
        model.set_submodule(name, new)
    guard_fusing(model)
    return exact


def check_tensor(name: str, dtype: torch.dtype, shape: Iterable[int], expected: Tensor) -> None:
    """Raise ValueError unless a file's tensor has the dtype and shape that config.json implies."""
    if dtype != expected.dtype:
        raise ValueError(f"{name}: {dtype} in the file, {expected.dtype} by config.json")
    if tuple(shape) != tuple(expected.shape):
        raise ValueError(f"{name}: shape {tuple(shape)} in the file, {tuple(expected.shape)} by config.json")


def lacking(name: str) -> ValueError:
    """Return the error for a tensor that the weight files lack."""
    return ValueError(f"the weight files lack {name!r}, which config.json names: copy them again")


def require_whole_set(files: Iterable[str | PathLike[str]]) -> None:
    """Raise ValueError unless weight files are the only set of their folder, and an index is of just their tensors.

    Libraries read all files that an index names, and of a tensor in two of them they take the later one.
    """
    paths = [Path(file) for file in files]
    files_of = by_tensor(map(TensorFile, paths)) if len(paths) > 1 else {}
    weight_map = {name: file.path.name for name, file in files_of.items()}
    for folder in {path.parent for path in paths}:
        require_one_set(folder)
        for index in sets_of_weights(folder, False) if weight_map else ():
            if index.name.endswith(INDEX) and read_json(index).get("weight_map") != weight_map:
                raise ValueError(f"{index}: is not the index of these weight files: copy it and them again")


def refuse_unannounced(dtypes: Mapping[str, torch.dtype], model: nn.Module) -> None:
    """Raise ValueError for quantized tensors of files that would be left over, or be taken for 16-bit weights.

    dtypes: name in the model -> dtype in the file. Other names that no module takes are the library's to judge.
    """
    strays = set()
    for name, dtype in dtypes.items():
        path, _, part = name.rpartition(".")
        layer = submodule(model, path)
        if isinstance(layer, QuantLinear):
            if part in QUANTIZED and part not in layer._parameters:
                strays.add(name)
        elif layer is not None and is_linear(layer):
            if part in QUANTIZED or (part == "weight" and dtype in CODES):
                strays.add(name)
    if strays:
        named = ", ".join(sorted(strays)[:3]) + (f" and {len(strays) - 3} more" if len(strays) > 3 else "")
        raise ValueError(
            f"the weight files hold quantized tensors that config.json does not announce: {named}. The two are not of "
            "one checkpoint: copy config.json and the weights again, from the same place"
        )


def require_present(model: nn.Module, device_map: object = None) -> None:
    """Raise ValueError for tensors that loading left on the meta device, unless a device map keeps some elsewhere.

    device_map: as the caller gave it; the library's own is on the model if it has several devices.
    """
    maps = (getattr(model, "hf_device_map", None), device_map if isinstance(device_map, dict) else {"": device_map})
    places = [{str(place) for place in (places or {}).values()} for places in maps]
    if any(len(devices) > 1 or devices & {"disk", "meta"} for devices in places):
        return
    absent = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if absent:
        named = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise ValueError(
            f"loading left tensors without values, on the meta device: {named}. Something else made modules on that "
            "device meanwhile (accelerate.init_empty_weights, torch.device): load the model again, outside of it"
        )


def with_stored_tensors(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state dict with stored tensors of layers that were prepared for a GPU."""
    tensors = dict(state_dict)
    for name, layer in quant_layers(model):
        if layer.prepared is not None:
            from fluxq.runtime.layout import as_stored  # only here: nothing is prepared while it is loaded

            for parameter, _ in layer.named_parameters(recurse=False):
                del tensors[f"{name}.{parameter}"]
            tensors.update({f"{name}.{part}": tensor for part, tensor in as_stored(layer).items()})
    return tensors


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every QuantLinear by the plain Linear that it stands for."""
    layers = quant_layers(model)
    if any(name.endswith(".base_layer") for name, _ in layers):
        raise ValueError("adapters are attached to this model: unload them (unload_lora_weights) before dequantizing")
    for name, layer in layers:
        model.set_submodule(name, layer.dequantized(dtype))


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module called `name`, None if there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


QUANTIZED = (*SCALE_NAMES, *BRANCHES)  # parts of a quantized layer that no 16-bit layer has
CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
