"""`quantization_config` of a model under fluxq, for diffusers and transformers.

One class serves both libraries. They ask for a dictionary, `quant_method` and a few methods, never for their own base
class, and one class may then stand in either's part of a pipeline.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxq.base.files import write_text
from fluxq.kernels.linear import QuantLinear
from fluxq.recipes.computing import QUANT_METHOD, QuantizationConfig, Steps, attention_of

if TYPE_CHECKING:
    from torch import nn


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
            return _layers_of(model, self._steps)
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
        config._stored, config._model = _layers_of(model, config._steps), weakref.ref(model)
        return config

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


def _layers_of(model: nn.Module, steps: Steps | None) -> QuantizationConfig:
    """Describe a model's layers; PEFT puts those that it adapts one level down."""
    attention = attention_of(model)
    layers = ((name, m.stored_scheme) for name, m in model.named_modules() if isinstance(m, QuantLinear))
    named = ((name.removesuffix(".base_layer"), scheme) for name, scheme in layers)
    return QuantizationConfig.of(named, attention, steps)
