"""A recipe: the YAML file with the settings for a model, read strictly.

Every error names file and line, and for a misspelt key or name the nearest known one. YAML is read with the safe
loader; anchors and aliases are refused, because a recipe needs none and a few lines of them can fill any memory.
`extends` stays in the folder of the first recipe, or takes a shipped one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fluxq.base.console import bytes_of, did_you_mean, first_fault, path_near
from fluxq.base.files import read_json, sha256_json
from fluxq.base.output import PLAN_FILE
from fluxq.base.untrusted_yaml import require_modest
from fluxq.recipes.computing import ATTENTIONS, Attentions, Steps, Strict, why_no_attention
from fluxq.recipes.devices import find_device
from fluxq.recipes.formats import Format, find_format, for_tokens, hadamards

Profile = Literal["rtn", "fast", "balanced", "best"]
Compat = Literal["portable", "comfy", "nunchaku", "full"]
Transform = Literal["center", "smooth", "hadamard"]

_MAX_BYTES = 1 << 16  # parsed in a second
_MAX_DEPTH = 32
_MAX_DIGITS = 40  # of an integer; a count or a seed has fewer
_MAX_CHAIN = 8  # recipes, each extending the next
_MAX_SHOWN = 80  # characters of a value in a message
_INTEGER = "tag:yaml.org,2002:int"
_WORD, _NUMBER = r"[a-z][a-z0-9_]*", r"-?\d+(?:\.\d+)?"
_RANK_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "string", "pattern": r"^\d{1,9}/[1-9]\d{0,8}$"},
    ]
}
_SIZE_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return the validator of a field that a function raises ValueError for, or does not."""

    def checked(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(checked)


class Operand(Strict):
    """A number format for weights or activations: `{format: int4, group_size: 128}`.

    four_over_six: nvfp4 blocks choose between two scales, of which one maps their largest value to 6 and one to 4.
    """

    format: str
    group_size: int | None = None
    four_over_six: bool = False

    @model_validator(mode="after")
    def _known_format(self) -> Operand:
        row = find_format(self.format).with_group_size(self.group_size)
        if self.four_over_six and not row.two_level:
            raise ValueError(
                f"four_over_six is a choice between two scales of an nvfp4 block; {row.name} has none: write "
                "`four_over_six: false`"
            )
        return self

    @property
    def row(self) -> Format:
        """The format row, with the operand's group size."""
        return find_format(self.format).with_group_size(self.group_size)


def _require_of_tokens(operand: Operand) -> None:
    """Raise ValueError for a format of activations whose scales tokens would have to share."""
    row = operand.row
    if row.spans_rows:
        instead = for_tokens(row).name
        raise ValueError(f"{row.name} has scales for blocks of rows, which tokens do not share: take {instead}")


class Rounding(Strict):
    """Choice of codes and scales.

    method: rtn rounds each weight to nearest, gptq lets later columns of a row make up for the error of earlier ones.
    scales: amax takes them from the largest weight of a block, search tries several and keeps the least output error.
    """

    method: Literal["rtn", "gptq"] = "rtn"
    scales: Literal["amax", "search"] = "amax"


class LowRank(Strict):
    """A 16-bit branch of low rank beside the quantized weight: `{rank: 32}`, or `{rank: 1/96}` of the smaller of N, K.

    rank: an integer, or a share as "1/96" or 0.01. deflate: where the input is normalised, part of the rank may take
    the input's principal directions out before x is quantized.
    """

    rank: int | float | str = Field(json_schema_extra=_RANK_SCHEMA)
    deflate: bool = False

    @field_validator("rank", mode="before")
    @classmethod
    def _rank_or_share(cls, value: Any) -> Any:
        is_rank = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        share = _share(value)
        if not is_rank and (share is None or not 0 < share < 1):
            raise ValueError("write a rank as an integer from 1 on, or as a share such as 1/96 or 0.01, below 1")
        return value

    def rank_of(self, n: int, k: int) -> int:
        """Return the rank for a weight (n, k): a share to the nearest whole one, at least 1."""
        share = _share(self.rank)
        return int(self.rank) if share is None else max(1, int(share * min(n, k) + Fraction(1, 2)))


class Rotation(Strict):
    """Hadamard rotation of every quantized input and its weights, tried or not: `{kind: regular, size: 256}`.

    kind: regular, whose rows have one sum, or sylvester.
    size: of its blocks; a layer whose K is no multiple takes the next smaller one of the kind that divides K.
    """

    kind: Literal["regular", "sylvester"] = "regular"
    size: int

    @model_validator(mode="after")
    def _known_size(self) -> Rotation:
        sizes = hadamards(self.is_regular)
        if self.size not in sizes:
            raise ValueError(f"blocks of the {self.kind} matrix have {', '.join(map(str, sizes))} columns")
        return self

    @property
    def is_regular(self) -> bool:
        """True for the regular matrix, False for Sylvester's."""
        return self.kind == "regular"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that a layer may take, rising."""
        return tuple(size for size in hadamards(self.is_regular) if size <= self.size)


class Override(Strict):
    """Other formats for the layers of a role, or whose path matches a pattern; the last one that matches wins.

    match: a pattern, or a list of some.
    """

    role: str | None = None
    match: str | list[str] | None = None
    weights: Operand | None = None
    activations: Annotated[Operand, _checked(_require_of_tokens)] | None = None
    reason: str

    @model_validator(mode="after")
    def _one_selector(self) -> Override:
        if (self.role is None) == (self.match is None):
            raise ValueError("an override names either `role` or `match`")
        if self.weights is None and self.activations is not None:
            raise ValueError("activations cannot be quantized where the weights stay in 16 bit")
        return self

    @property
    def patterns(self) -> list[str]:
        """The patterns of `match`, none where it names a role."""
        return [self.match] if isinstance(self.match, str) else self.match or []


class Component(Strict):
    """Settings for one pipeline component.

    transforms: what is tried, of an input. hadamard: a rotation that is not tried but made, and needs no data.
    attention: fp8 computes self-attention, q k^T and its product with v, from fp8 codes that are made at run time; int8
        takes q and k in int8. A mapping names modules by patterns, and leaves the others in 16 bit.
    """

    weights: Operand
    activations: Annotated[Operand, _checked(_require_of_tokens)] | None = None
    transforms: list[Transform] = []
    hadamard: Rotation | None = None
    low_rank: LowRank | None = None
    rounding: Rounding = Rounding()
    modulation: Operand | None = None
    attention: Attentions = "16bit"
    overrides: list[Override] = []
    exclude: list[str] = []

    @property
    def inputs(self) -> list[Operand]:
        """Operands of activations, those of overrides too."""
        operands = (self.activations, *(override.activations for override in self.overrides))
        return [operand for operand in operands if operand is not None]

    def without(self, patterns: Iterable[str]) -> Component:
        """Return the entry with more layers excluded."""
        return self.model_copy(update={"exclude": [*self.exclude, *patterns]})

    @field_validator("transforms", mode="before")
    @classmethod
    def _known_transforms_in_order(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for name in value:
            if name not in TRANSFORMS:
                hint = did_you_mean(str(name), TRANSFORMS)
                raise ValueError(f"unknown transform {name!r}{hint}; transforms: {', '.join(TRANSFORMS)}")
        in_order = [name for name in TRANSFORMS if name in value]
        if value != in_order:
            raise ValueError(f"transforms are applied in one order, each once: write [{', '.join(in_order)}]")
        return value

    @model_validator(mode="after")
    def _rotates_what_is_rounded(self) -> Component:
        if self.hadamard is None:
            return self
        if "hadamard" in self.transforms:
            raise _mistake(("hadamard",), "it rotates every input: take hadamard out of transforms, which tries one")
        if self.activations is None:
            raise _mistake(("hadamard",), "it rotates inputs that are quantized: give activations, or leave it out")
        for operand in self.inputs:
            if operand.row.has_tensor_scale:
                cure = "take formats with a scale for each token or block"
                name = operand.row.name
                raise _mistake(("hadamard",), f"{name} activations have one scale, calibrated before rotation; {cure}")
        return self

    @field_validator("attention", mode="before")
    @classmethod
    def _known_attention(cls, value: Any) -> Any:
        if why := why_no_attention(value):
            words = ", ".join(ATTENTIONS)
            raise ValueError(f"expected one of {words}, or patterns as in {{fp8: [blocks.*.attn]}}, got {why}")
        return value

    @field_validator("modulation")
    @classmethod
    def _plain_modulation(cls, value: Operand | None) -> Operand | None:
        if value is not None and value.four_over_six:
            raise ValueError("modulation is rounded plainly: leave out four_over_six")
        return value


class Calibration(Strict):
    """Images that are generated to see the activations.

    prompts: "default" (the model's own `fluxq_prompts.txt`, else the bundled set), a file, or a datasets id.
    count: prompts used. steps: denoising steps looked at, spread evenly over the schedule.
    """

    prompts: str = "default"
    count: int = Field(default=64, ge=1, le=1 << 20)
    steps: int = Field(default=8, ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)


class Gate(Strict):
    """Gain that keeps a stage for an input group: dB of held-out error for each percent of modelled time.

    gpu, tokens: where and for how many tokens the group's time is modelled. db_per_percent: 0 asks only for less error.
    """

    db_per_percent: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    gpu: Annotated[str, _checked(find_device)] = "b200"
    tokens: int = Field(default=4608, ge=1)


class Auto(Strict):
    """A search for formats before layers are fitted: `{bits: 5.5}`, with the words of `fluxq auto`.

    bits, size, vram, ms, gate: the budget, one of them. size, vram: bytes, or a size with its unit, as "9GB".
    gpu: of modelled times.
    menu: formats to choose from, and "16bit".
    dialect: format of `fluxq export` that has to hold what is chosen; the option --for.
    measure: the only way to measure errors.
    count: images that errors are measured on.
    modulation, attention: whether formats of modulation, and the arithmetic of each block's attention, are chosen.
    steps: whether the number of computed steps is, under a budget of time.
    """

    bits: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    size: int | None = Field(default=None, gt=0, json_schema_extra=_SIZE_SCHEMA)
    vram: int | None = Field(default=None, gt=0, json_schema_extra=_SIZE_SCHEMA)
    ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    gate: Annotated[str, _checked(lambda gate: parse_gate(gate))] | None = None
    gpu: Annotated[str, _checked(find_device)] | None = None
    menu: Annotated[list[str], _checked(lambda names: [find_format(name) for name in names if name != "16bit"])] = []
    dialect: str | None = None
    measure: Literal["velocity", "adjoint"] | None = None
    count: int = Field(default=8, ge=1, le=10_000)
    modulation: bool = False
    attention: bool = False
    steps: bool = False

    @field_validator("size", "vram", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if isinstance(value, str) and not bytes_of(value):
            raise ValueError("write a size with its unit, as in 9GB or 800MB")
        return bytes_of(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_budget(self) -> Auto:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if not given:
            raise ValueError(f"a search has one budget; write one of {', '.join(BUDGETS)}, as in {{bits: 5.5}}")
        if len(given) > 1:
            cure = "leave out all but one, or write null for that of the recipe in `extends`"
            raise ValueError(f"a search has one budget, and {' and '.join(given)} are {len(given)}: {cure}")
        if self.ms is not None and self.gpu is None:
            raise ValueError("ms is modelled time on a GPU: write gpu too, as in {ms: 70, gpu: h200}")
        if self.steps and self.ms is None and not (self.gate and self.gpu):
            raise ValueError(
                "steps that are left out save time alone: write ms and gpu, or gate and gpu, as the budget"
            )
        return self

    def __str__(self) -> str:
        """Return the budget for people: `bits: 5.5`."""
        return next(f"{name}: {value}" for name in BUDGETS if (value := getattr(self, name)) is not None)


class Recipe(Strict):
    """The whole file. `name` is the file's stem and is not a key."""

    keys_before: ClassVar[tuple[str, ...]] = ("extends",)
    version: Literal[1] = 1
    components: dict[str, Component] = Field(min_length=1)
    calibration: Calibration | None = None
    model: str | None = None
    profile: Profile = "balanced"
    compat: Compat = "portable"
    steps: Steps | None = None
    gate: Gate = Gate()
    gates: Annotated[list[str], _checked(lambda gates: [parse_gate(gate) for gate in gates])] = []
    auto: Auto | None = None

    @model_validator(mode="after")
    def _fits_compat(self) -> Recipe:
        for name, component in self.components.items():
            for at, what, cure in _beyond_compat(component, self.compat):
                limit = f"`compat: {self.compat}` allows, which is {COMPATS[self.compat]}"
                raise _mistake(("components", name, *at), f"{what} is more than {limit}; {cure}")
        return self

    @model_validator(mode="after")
    def _has_data(self) -> Recipe:
        for name, component in self.components.items():
            if self.calibration is None and self._fits_to_data(component):
                cure = "give {count: 64, steps: 8}, or write `profile: rtn`, which only rounds"
                raise _mistake(("calibration",), f"what {name} says is fitted to data, and there is none; {cure}")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the settings; comments, key order, `extends` and a wish for other formats do not change it."""
        return sha256_json(self.model_dump(mode="json", exclude={"auto"}))

    def needs_data(self, component: Component) -> bool:
        """Tell whether one entry needs calibration: to fit transforms, codes or scales, or for static scales."""
        return self._fits_to_data(component) or self.has_static_scales(component)

    def has_static_scales(self, component: Component) -> bool:
        """Tell whether activations of one entry have one scale for all tokens, and get it from calibration."""
        has_scale = any(operand.row.has_tensor_scale for operand in component.inputs)
        return self.profile != "rtn" and self.calibration is not None and has_scale

    def _fits_to_data(self, component: Component) -> bool:
        """Tell whether quantizing an entry fits anything to its inputs, as far as the profile lets it."""
        rounding = component.rounding
        gptq = rounding.method == "gptq" and self.profile != "fast"
        judged = any(operand.four_over_six for operand in component.inputs)
        fits = bool(component.transforms or component.low_rank or gptq or rounding.scales == "search" or judged)
        return fits and self.profile != "rtn"


def load_recipe(name_or_path: str, *, profile: Profile | None = None) -> tuple[str, Recipe]:
    """Return (name, recipe) of a file, or of a shipped recipe with or without `.yaml`. `profile` overrides the file's.

    The file may be the record of a checkpoint (`fluxq_plan.json`), whose recipe it is then. Raises FileNotFoundError
    with the shipped names, ValueError with file and line for everything inside the file.
    """
    path = find_recipe(name_or_path)
    overrides = {"profile": profile} if profile else {}
    if path.name == PLAN_FILE:
        return _recorded(path, overrides)
    document = _read(path)
    try:
        recipe = Recipe.model_validate({**document.value, **overrides})
    except ValidationError as error:
        raise ValueError("\n".join(_explain(error, document))) from None
    return path.stem, recipe


def faults_in(name_or_path: str) -> list[str]:
    """Return all that reading a recipe refuses, `file:line: what it is` each; none if it loads.

    Behind an unknown key, at which reading ends, it looks for more. FileNotFoundError where there is no such recipe.
    """
    path = find_recipe(name_or_path)
    try:
        if path.name == PLAN_FILE:
            load_recipe(name_or_path)
            return []
        document = _read(path)
    except ValueError as error:
        return str(error).splitlines()
    value, faults = deepcopy(document.value), dict[str, None]()
    while True:
        try:
            Recipe.model_validate(value)
            return [*faults]
        except ValidationError as error:
            faults |= dict.fromkeys(_explain(error, document))
            unknown: list[Any] = [each for each in error.errors() if each["type"] == "unknown_key"]
            if not unknown:
                return [*faults]
            for each in unknown:
                mapping: Any = value
                for key in each["loc"]:
                    mapping = mapping[key]
                del mapping[next(key for key in mapping if repr(key) == each["ctx"]["key"])]


def line_of(name_or_path: str, location: tuple[str | int, ...]) -> str:
    """Return `file:line` of a key of a recipe that loads, or of the nearest key above it; maybe of an extended file.

    A checkpoint's record has no lines.
    """
    path = find_recipe(name_or_path)
    return str(path) if path.name == PLAN_FILE else _read(path).where(location)


def _recorded(record: Path, overrides: Mapping[str, Any]) -> tuple[str, Recipe]:
    """Return name and recipe of a checkpoint's record."""
    recorded = read_json(record).get("recipe")
    try:
        settings = dict(recorded) if isinstance(recorded, dict) else {}
        return str(settings.pop("name", "")), Recipe.model_validate({**settings, **overrides})
    except ValidationError as error:
        raise ValueError(f"{record}: holds no recipe ({first_fault(error)}); quantize the model again") from None


def find_recipe(name_or_path: str, relative_to: Path | None = None) -> Path:
    """Return the file of `name_or_path`: a path first, then the name of a shipped recipe in any case."""
    path = Path(name_or_path)
    if not path.name:
        raise FileNotFoundError(f"recipe {name_or_path!r} is no file; shipped: {', '.join(shipped_recipes())}")
    candidates = [path if relative_to is None else relative_to / path]
    if len(path.parts) == 1 and name_or_path == path.name:  # ./nvfp4.yaml is a file and nothing else
        candidates.append(_shipped_folder() / f"{name_or_path.lower().removesuffix('.yaml')}.yaml")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"recipe {name_or_path!r} is neither a file nor a shipped recipe"
        f"{did_you_mean(path.name.removesuffix('.yaml'), shipped_recipes()) or path_near(path)}"
        f"; shipped: {', '.join(shipped_recipes())}"
    )


def shipped_recipes() -> list[str]:
    """Return the names of the recipes in the package."""
    return sorted(path.stem for path in _shipped_folder().glob("*.yaml"))


class Condition(NamedTuple):
    """A parsed gate.

    bounds: one or two (operator, value) that the metric has to satisfy.
    """

    metric: str
    bounds: tuple[tuple[str, float], ...]


def parse_gate(text: str) -> Condition:
    """Parse `psnr>=20`, or a window such as `23.01<=fid<=23.95`; ValueError for other texts and empty windows."""
    one = re.fullmatch(rf"\s*({_WORD})\s*(>=|<=|>|<)\s*({_NUMBER})\s*", text)
    window = re.fullmatch(rf"\s*({_NUMBER})\s*(<=?)\s*({_WORD})\s*(<=?)\s*({_NUMBER})\s*", text)
    bounds: tuple[tuple[str, float], ...]
    if one:
        metric, bounds = one[1], ((one[2], float(one[3])),)
    elif window:
        metric, low, high = window[3], float(window[1]), float(window[5])
        if not low < high:
            raise ValueError(f"gate {text!r} lets nothing by: a window goes from its lower to its higher number")
        bounds = ((window[2].replace("<", ">"), low), (window[4], high))
    else:
        raise ValueError(
            f"gate {text!r}: write metric, comparison and number as in 'psnr>=20', or a window as in "
            f"'23.01<=fid<=23.95'; metrics: {', '.join(GATE_METRICS)}"
        )
    if metric not in GATE_METRICS:
        hint = did_you_mean(metric, GATE_METRICS)
        raise ValueError(f"gate {text!r}: unknown metric {metric!r}{hint}; metrics: {', '.join(GATE_METRICS)}")
    return Condition(metric, bounds)


def latent_bound(gate: str) -> float:
    """Return the dB of a gate that runs up to the final latents can judge; ValueError for any other gate."""
    condition = parse_gate(gate)
    ((comparison, bound), *others) = condition.bounds
    if condition.metric != "latent_sqnr" or others or comparison not in (">", ">="):
        raise ValueError(f"--gate {gate!r}: runs measure the final latents alone; write 'latent_sqnr>=30', say")
    if bound < 0:
        raise ValueError(f"--gate {gate!r}: below 0 dB all is error; write 'latent_sqnr>=30', say")
    return bound


def gate_holds(text: str, measured: Mapping[str, float | None]) -> bool:
    """Tell whether a measured value satisfies the gate; NaN, None and a missing metric never do."""
    condition = parse_gate(text)
    value = measured.get(condition.metric)
    return value is not None and all(GATE_OPERATORS[operator](value, bound) for operator, bound in condition.bounds)


def split_gates(gates: Iterable[str], metrics: Container[str]) -> tuple[list[str], list[str]]:
    """Return the gates on `metrics`, which can be judged, and the others, which `fluxq eval` has to judge."""
    gates = list(gates)
    now = [gate for gate in gates if parse_gate(gate).metric in metrics]
    return now, [gate for gate in gates if gate not in now]


class _Document:
    """A YAML mapping with the position of every key, `extends` resolved."""

    def __init__(self, value: dict[str, Any], lines: dict[tuple[str, ...], str]) -> None:
        self.value, self.lines = value, lines

    def where(self, location: tuple[str | int, ...]) -> str:
        """Return `file:line` of a key, or of the nearest key above it."""
        keys = tuple(map(str, location))
        while keys not in self.lines and keys:
            keys = keys[:-1]
        return self.lines[keys]


def _read(path: Path, seen: tuple[Path, ...] = ()) -> _Document:
    """Read a file and those it extends. seen: the files that extend this one, the first one included."""
    if path.resolve() in seen:
        raise ValueError(f"{path}: `extends` leads back to this file")
    if len(seen) == _MAX_CHAIN:
        raise ValueError(f"{path}: the {_MAX_CHAIN + 1}th recipe of a chain of `extends`; put some of them together")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path}: larger than {_MAX_BYTES} bytes; this is not a recipe")
        document = _parse(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or error
        raise ValueError(f"{path}{line}: {why}; mend brackets, quotes or indentation there, or above") from None
    base_name = document.value.pop("extends", None)
    if base_name is None:
        return document
    if not isinstance(base_name, str):
        raise ValueError(f"{document.where(('extends',))}: `extends` takes the name of one recipe")
    try:
        base_path = find_recipe(base_name, path.parent)
    except FileNotFoundError as error:
        raise ValueError(f"{document.where(('extends',))}: {error}") from None
    seen = (*seen, path.resolve())
    if base_path.parent != _shipped_folder() and not base_path.resolve().is_relative_to(seen[0].parent):
        raise ValueError(
            f"{document.where(('extends',))}: {base_name!r} leads out of {seen[0].parent}; a recipe extends a shipped "
            "one or a file in its own folder: put the file there"
        )
    base = _read(base_path, seen)
    merged = _merge(base.value, document.value)
    kept = {keys: line for keys, line in base.lines.items() if not _replaced(keys, base.value, document.value)}
    return _Document(merged, {**kept, **document.lines})


def _parse(path: Path) -> _Document:
    text = path.read_text(encoding="utf-8")
    require_modest(text, _MAX_BYTES, _MAX_DEPTH, aliases=False)
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path}:1: a recipe is a mapping, for example `extends: nvfp4`")
    lines = {keys: f"{path}:{line}" for keys, line in _positions(node, (), path)}
    try:
        value = yaml.SafeLoader("").construct_document(node)
    except ValueError as error:  # not a date
        raise ValueError(f"{path}: {error}") from None
    return _Document(value, lines)


def _positions(node: yaml.Node, at: tuple[str, ...], path: Path) -> Iterator[tuple[tuple[str, ...], int]]:
    yield at, node.start_mark.line + 1
    if node.tag == _INTEGER and len(node.value) > _MAX_DIGITS:
        raise ValueError(f"{path}:{node.start_mark.line + 1}: a number of {len(node.value)} digits")
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{path}:{key.start_mark.line + 1}: a key is a word")
            if key.value in seen:
                raise ValueError(f"{path}:{key.start_mark.line + 1}: key {key.value!r} is given twice")
            seen.add(key.value)
            yield from _positions(value, (*at, str(key.value)), path)
            yield from _positions(key, (*at, str(key.value)), path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _positions(value, (*at, str(index)), path)


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Merge `top` over `base`: mappings key by key, other values are replaced."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _replaced(keys: tuple[str, ...], base: Any, top: Any) -> bool:
    """Tell whether the value of `base` at `keys` gives way to `top`: one of the two on the way is no mapping."""
    for key in keys:
        if not isinstance(base, dict) or not isinstance(top, dict):
            return True
        if key not in top:
            return False
        base, top = base.get(key), top[key]
    return False


def _share(rank: Any) -> Fraction | None:
    """Return the share of a rank written as "1/96" or 0.01; None for another rank."""
    if isinstance(rank, float) and math.isfinite(rank):
        return Fraction(rank)
    match = re.fullmatch(r"(\d{1,9})/([1-9]\d{0,8})", rank) if isinstance(rank, str) else None
    return Fraction(int(match[1]), int(match[2])) if match else None


def _beyond_compat(component: Component, compat: Compat) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (key below the component, its subject, cure) of each setting that the target of `compat` cannot hold."""
    if compat == "full":
        return
    for index, transform in enumerate(component.transforms):
        if transform not in COMPAT_TRANSFORMS[compat]:
            yield ("transforms", str(index)), transform, f"leave it out, or {_SAY_FULL}"
    if component.hadamard is not None and not (compat == "comfy" and component.hadamard.is_regular):
        what = "a rotation" if component.hadamard.is_regular else "a rotation by Sylvester's matrix"
        also = ", `compat: comfy`" if component.hadamard.is_regular else ""
        yield ("hadamard",), what, f"write `hadamard: null`{also}, or {_SAY_FULL}"
    low_rank = component.low_rank
    if low_rank is not None and compat in FOLDING:
        yield ("low_rank",), "a low-rank branch", f"write `low_rank: null`, or {_SAY_FULL}"
    elif low_rank is not None and low_rank.deflate:
        yield ("low_rank", "deflate"), "deflation", f"write `deflate: false`, or {_SAY_FULL}"
    operands = [(("activations",), component.activations)]
    operands += [(("overrides", str(i), "activations"), o.activations) for i, o in enumerate(component.overrides)]
    for at, operand in operands:
        if operand is not None and operand.four_over_six:
            yield (*at, "four_over_six"), "four_over_six of activations", f"leave it out, or {_SAY_FULL}"


def _mistake(at: tuple[str, ...], message: str) -> PydanticCustomError:
    """Return the error of a key further down than the mapping which is checked."""
    return PydanticCustomError("mistake", "{message}", {"message": message, "at": at})


def _explain(error: ValidationError, document: _Document) -> Iterator[str]:
    for problem in error.errors():
        location, context = tuple(problem["loc"]), problem.get("ctx", {})
        if problem["type"] == "unknown_key":
            location += (context["key"].strip("'"),)
        if problem["type"] == "mistake":
            location += context["at"]
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] in ("model_type", "dict_type"):
            message = "expected a mapping, for example {format: nvfp4}"
        if problem["type"] == "missing":
            message += f"; write {_EXAMPLES.get(str(location[-1]), 'it')}"
        key = ".".join(map(str, location))
        shown = "" if problem["type"] == "unknown_key" or not key else f"{key}: "
        came = (
            ""
            if problem["type"] in ("unknown_key", "mistake", "value_error", "missing")
            else f", got {_shortened(repr(problem['input']))}"
        )
        yield f"{document.where(location)}: {shown}{message}{came}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _shipped_folder() -> Path:
    return Path(__file__).parent  # the folder has no __init__.py, so importlib.resources sees several places


PROFILES = get_args(Profile)
BUDGETS = ("bits", "size", "vram", "ms", "gate")  # of a search
TRANSFORMS: tuple[Transform, ...] = get_args(Transform)  # in the order in which they are applied
GATE_METRICS = (  # of an evaluation
    "psnr",
    "ssim",
    "worst_frame_psnr",
    "temporal_psnr",
    "flicker",
    "latent_sqnr",
    "latent_cosine",
    "velocity_error",
    "feature_distance",
    "lpips",
    "fid",
    "fid_to_16bit",
    "fid_infinity",
    "kid",
    "cmmd",
    "video_distance",
    "clip_score",
    "image_reward",
    "hpsv2",
)
GATE_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

# Limit of a checkpoint, so that the programs it is exported to can run it.
COMPATS = {
    "portable": "what every export target can hold",
    "comfy": "what ComfyUI's file can hold",
    "nunchaku": "what nunchaku's file can hold",
    "full": "everything",
}
COMPAT_TRANSFORMS = {"portable": ("center", "smooth"), "comfy": ("center", "smooth"), "nunchaku": ("smooth",)}
FOLDING = ("portable", "comfy")  # whose files have no place for a mean or factors: they fold into what makes the input
_EXAMPLES = {  # of keys that are required
    "components": "`extends: nvfp4`, or components of its own",
    "weights": "`weights: {format: nvfp4}`",
    "rank": "`rank: 1/96`",
    "size": "`size: 256`",
    "reason": "`reason: …`, for those who read the plan",
}
_SAY_FULL = "write `compat: full`"
