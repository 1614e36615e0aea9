"""State how a component computes: its layers' schemes, its attention, and the steps that are kept in 16 bit.

Recipes choose it, and checkpoints record it as `quantization_config`, from which alone they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fluxq.base.console import did_you_mean, without_cure
from fluxq.recipes.formats import FEATURES, Scheme
from fluxq.recipes.step_policy import MOST_KEPT, POLICY, ends_of, policy_of

if TYPE_CHECKING:
    from fluxq.recipes.step_list import StepList

Attention = Literal["16bit", "fp8", "int8"]
Coded = Literal["fp8", "int8"]
Attentions = Attention | dict[Coded, list[str]]  # of all self-attention; or of some modules, the others in 16 bit
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
BACKENDS: dict[Coded, str] = {"fp8": "fluxq_fp8", "int8": "fluxq_int8"}  # names in diffusers' attention dispatcher
QUANT_METHOD = "fluxq"
FORMAT_VERSION = 1


class Strict(BaseModel):
    """A mapping whose unknown keys are errors with a suggestion.

    keys_before: keys that a file may have beside the fields, because they are gone when it is checked.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    keys_before: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    known = (*cls.keys_before, *cls.model_fields)
                    hint = did_you_mean(str(key), known) or f"; keys here: {', '.join(known)}"
                    raise PydanticCustomError(
                        "unknown_key", "unknown key {key}{hint}", {"key": repr(key), "hint": hint}
                    )
        return value


class Steps(Strict):
    """Denoising steps that transformers compute in 16 bit: the first and the last of each call.

    components: "16bit" with their 16-bit weights, "a16" with their codes and 16-bit activations. A checkpoint records
        this, `fluxq.keep_steps` does it in a pipeline.
    compute: share of the steps of a call that are computed at all, by a list (step_list.py) that `fluxq quantize` makes
        and the checkpoint records. Those that are kept are among them.
    of: number of steps of that call; None for what the model, or the user, says.
    """

    first: int = Field(default=0, ge=0, le=MOST_KEPT)
    last: int = Field(default=0, ge=0, le=MOST_KEPT)
    components: Literal["16bit", "a16"] = "16bit"
    compute: float | None = Field(default=None, gt=0, le=1)
    of: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _some(self) -> Steps:
        if self.of is not None and self.compute is None:
            raise ValueError("`of` says of how many steps `compute` is a share: write that too, or leave out `of`")
        if not self.first and not self.last and self.compute is None:
            raise ValueError(
                "neither `first` nor `last` names a step to keep, nor does `compute` say how many to compute; write "
                "{first: 1} or {compute: 0.5}, or leave out `steps`"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_nothing(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an `of` that is not given: recipes and checkpoints from before it stay what they are."""
        return {name: value for name, value in dump(self).items() if name != "of" or value is not None}

    @property
    def kept(self) -> Steps | None:
        """The same without `compute` and `of`; None if no step is kept."""
        return self.model_copy(update={"compute": None, "of": None}) if self.first or self.last else None

    def kept_of(self, total: int) -> frozenset[int]:
        """Return the steps that are kept of a call of `total`."""
        return frozenset(step for step in range(total) if step < self.first or step >= total - self.last)

    def __str__(self) -> str:
        """Return the kept steps for people, of which there are some: `the first step and the last 2`."""
        parts = [f"the {end} {count}" if count > 1 else f"the {end}" for end, count in self._ends]
        return " and ".join([f"{parts[0]} step{'s' if self._ends[0][1] > 1 else ''}", *parts[1:]])

    @property
    def how(self) -> str:
        """Words for the way in which they are kept."""
        return "in 16 bit" if self.components == "16bit" else "at 16-bit activations"

    @property
    def _ends(self) -> list[tuple[str, int]]:
        return [(end, count) for end, count in (("first", self.first), ("last", self.last)) if count]


@dataclass(frozen=True)
class QuantizationConfig:
    """`quantization_config` of a component's config.json.

    layers: scheme -> full module names.
    attention: arithmetic of self-attention, of single modules by their paths.
    steps: those kept in 16 bit (runtime/steps.py); at 16-bit activations they are stored as `runtime`'s policy.
    runtime: what a pipeline may do with the model. `steps`: number of steps of a call, as text -> list of those that
        are computed (step_list.py), the same of all denoisers of a pipeline. Other keys are kept as they are.

    Loading requires neither attention nor steps nor runtime: where its codes cannot be had 16 bit is nearer to the
    original, and a model alone has no steps.
    """

    layers: dict[str, list[str]]
    required_features: tuple[str, ...]
    format_version: int = FORMAT_VERSION
    attention: Attentions = "16bit"
    steps: Steps | None = None
    runtime: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        schemes: Iterable[tuple[str, Scheme]],
        attention: Attentions = "16bit",
        steps: Steps | None = None,
        runtime: Mapping[str, Any] | None = None,
    ) -> QuantizationConfig:
        """Return the configuration of a checkpoint with these layers (module name, scheme)."""
        layers: dict[str, list[str]] = {}
        features: set[str] = set()
        for name, scheme in schemes:
            layers.setdefault(str(scheme), []).append(name)
            features.update(scheme.features)
        return cls(layers, tuple(sorted(features)), attention=attention, steps=steps, runtime=dict(runtime or {}))

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Read and check; ValueError if a newer fluxq is needed or the dictionary is malformed."""
        if not isinstance(config, dict):
            raise ValueError("quantization_config is no JSON object; the checkpoint's config.json is damaged")
        version, listed = config.get("format_version"), config.get("required_features")
        if type(version) is not int or version < 1:
            raise ValueError(
                f"checkpoint has format version {version!r}, expected a whole number from 1: config.json is damaged"
            )
        if version > FORMAT_VERSION:
            raise ValueError(
                f"checkpoint has format version {version}, this fluxq reads up to {FORMAT_VERSION}: update fluxq"
            )
        if not isinstance(listed, (list, tuple)):
            raise ValueError(f"required_features is {listed!r:.80}, no list; the checkpoint's config.json is damaged")
        features = tuple(map(str, listed))
        unknown = sorted(set(features) - FEATURES.keys())
        if unknown:
            raise ValueError(f"checkpoint requires {', '.join(unknown)}, unknown to this version: update fluxq")
        layers = config.get("layers")
        if not isinstance(layers, dict) or not all(isinstance(m, list) for m in layers.values()):
            raise ValueError("quantization_config names no layers; the checkpoint's config.json is damaged")
        names = [name for members in layers.values() for name in members]
        if not names:
            raise ValueError("quantization_config names no layers; the checkpoint's config.json is damaged")
        if not all(isinstance(name, str) for name in names):
            raise ValueError("quantization_config names layers by something else than text; config.json is damaged")
        if len(names) != len(set(names)):
            raise ValueError("quantization_config names a layer under two schemes; config.json is damaged")
        attention = config.get("attention", "16bit")
        if why := why_no_attention(attention):
            raise ValueError(f"checkpoint computes attention in {why}, unknown to this version: update fluxq")
        named = {str(scheme): list(members) for scheme, members in layers.items()}
        runtime = config.get("runtime", {})
        _step_lists(runtime)
        steps = _steps(config.get("steps")) or policy_steps(runtime)
        read = cls(named, features, version, attention, steps, runtime)
        needed = list(cls.of(read.schemes.items()).required_features)
        if needed != sorted(features):
            raise ValueError(
                f"required_features are {sorted(features)}, the layers need {needed}: copy config.json again"
            )
        return read

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, `quant_method` included.

        Attention is there only if it is not in 16 bit, steps if some are kept, runtime if it says something.
        """
        chosen: dict[str, Any] = {} if self.attention == "16bit" else {"attention": self.attention}
        runtime = dict(self.runtime)
        if self.steps is not None and self.steps.components == "a16":
            if policy_steps(runtime) != self.steps:
                runtime[POLICY] = policy_of(self.steps.first, self.steps.last)
        elif self.steps is not None:
            chosen["steps"] = self.steps.model_dump(mode="json", exclude={"compute", "of"})
        if runtime:
            chosen["runtime"] = runtime
        return {
            "quant_method": QUANT_METHOD,
            "format_version": self.format_version,
            "required_features": list(self.required_features),
            **chosen,
            "layers": self.layers,
        }

    @property
    def step_lists(self) -> dict[int, StepList]:
        """Number of steps of a call -> list of those that are computed."""
        return _step_lists(self.runtime)

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Module name -> scheme."""
        return {name: Scheme.parse(text) for text, members in self.layers.items() for name in members}


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `quantization_config` of a config.json, if it is fluxq's."""
    value = config.get("quantization_config")
    return value if isinstance(value, dict) and value.get("quant_method") == QUANT_METHOD else None


def _steps(value: Any) -> Steps | None:
    """Return the kept steps of a config.json; ValueError for a value that this version does not know."""
    if value is None:
        return None
    try:
        return Steps.model_validate(value).kept
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ValueError(
            f"checkpoint keeps steps {str(value)[:80]}, which this version does not know ({why}): update fluxq"
        ) from None


def policy_steps(runtime: Mapping[str, Any]) -> Steps | None:
    """Return the steps at 16-bit activations of a config.json's `runtime`; ValueError for a policy of another kind."""
    if POLICY not in runtime:
        return None
    try:
        first, last = ends_of(runtime[POLICY])
    except ValueError as error:
        raise ValueError(
            f"quantization_config.runtime in config.json: {error}: update fluxq, or remove {POLICY} from it to compute "
            "every step alike"
        ) from None
    return Steps(first=first, last=last, components="a16") if first or last else None


def _step_lists(runtime: Any) -> dict[int, StepList]:
    """Return the lists of steps of a config.json's `runtime`; ValueError for one that is malformed."""
    try:
        recorded = runtime.get("steps", {}) if isinstance(runtime, Mapping) else None
        if not isinstance(recorded, Mapping) or not all(isinstance(each, Mapping) for each in recorded.values()):
            raise ValueError(f"got {str(runtime)[:80]}, expected {{steps: {{number of steps: list}}}}")
        if not recorded:
            return {}
        from fluxq.recipes.step_list import StepList

        lists = [StepList.from_dict(each) for each in recorded.values()]
        if list(recorded) != [str(each.total) for each in lists]:
            raise ValueError(f"lists of {[each.total for each in lists]} steps stand under {[*recorded]}")
    except ValueError as error:
        raise ValueError(
            f"quantization_config.runtime in config.json is damaged ({without_cure(error)}): copy the file again, or "
            "remove `runtime` from it to compute every step"
        ) from None
    return {each.total: each for each in lists}


def why_no_attention(value: Any) -> str:
    """Return what of a value is no arithmetic of attention, shortened; "" if all is known."""
    if isinstance(value, dict) and value:
        named = {word: paths for word, paths in value.items() if word in BACKENDS and isinstance(paths, list) and paths}
        paths = [path for each in named.values() for path in each]
        return "" if len(named) == len(value) and all(isinstance(p, str) for p in paths) else repr(value)[:80]
    return "" if value in ATTENTIONS else repr(value)[:80]


def gathered(words: Mapping[str, Attention]) -> Attentions:
    """Return the arithmetic of all attention modules, of which each is given: one word where they agree."""
    kinds: list[Attention] = list(dict.fromkeys(words.values()))
    if len(kinds) < 2:
        return kinds[0] if kinds else "16bit"
    return {word: paths for word in BACKENDS if (paths := [path for path, of_it in words.items() if of_it == word])}


def attention_at(attention: Attentions, path: str) -> Attention:
    """Return the arithmetic of the attention module at a path."""
    if isinstance(attention, str):
        return attention
    words: list[Attention] = [word for word, paths in attention.items() if path in paths]
    return words[0] if words else "16bit"


def attention_in_words(attention: Attentions | Mapping[str, Sequence[str]] | str) -> str:
    """Return the text for people: `fp8`, or `fp8 (3 of its modules)`."""
    if isinstance(attention, str):
        return attention
    return ", ".join(f"{word} ({len(paths)} of its modules)" for word, paths in attention.items())


def attention_by(processor: Any) -> Coded | None:
    """Return the arithmetic whose backend an attention processor has; None if it has none of BACKENDS."""
    backend = getattr(processor, "_attention_backend", None)
    return next((attention for attention, name in BACKENDS.items() if name == backend), None)
