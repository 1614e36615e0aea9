"""Verification of a checkpoint, a pipeline's folder or one model's. Nothing runs; one tensor is in memory at a time.

The plan file says what was written (layers, sizes, a hash of every file), config.json what a loader will build. Both
are compared with the files by the CHECKS at the end of this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.console import progress
from fluxq.base.files import sha256_file
from fluxq.base.model import GENERATION_FILE, PICKLES, ModelFolder, resolve_model
from fluxq.base.tensors import TensorFile, by_tensor
from fluxq.kernels.linear import SCALE_NAMES, QuantLinear
from fluxq.quantize.checkpoint import (
    ACTIVATIONS,
    LARGEST,
    PLAN_FILE,
    filed_shape,
    library_of,
    quantized_on_meta,
    read_plan_file,
)
from fluxq.quantize.record import CONFIG_DIGEST, CONFIG_DIGESTS, DIGEST, DIGESTS, config_digest, is_as_written
from fluxq.quantize.structure import shapes_of
from fluxq.recipes.computing import QuantizationConfig, quantization_of
from fluxq.recipes.formats import ELEMENTS, Element, Scheme


@dataclass(frozen=True)
class Finding:
    """A fault. where: a file, layer or tensor. what: the value, the expected one and the cure."""

    where: str
    what: str


@dataclass(frozen=True)
class Result:
    """Result of a row of CHECKS for a checkpoint.

    status: "ok", "failed", "not recorded" (nothing to compare the files with) or "not made" (a file cannot be read: the
    finding of this check or of an earlier one says why).
    measured: by-product of a check that is ok, or "".
    """

    check: str
    about: str
    status: str
    findings: tuple[Finding, ...] = ()
    measured: str = ""

    def describe(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return asdict(self)


def verify(path: Path) -> list[Result]:
    """Make every check on a checkpoint folder. FileNotFoundError if there is none; all else is a finding.

    Trouble of a disk, or too many open files, is no damage: that check is not made.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; give one that `fluxq quantize` wrote")
    checkpoint, reported = _Checkpoint(path), set[str]()
    return [_checked(name, checkpoint, reported) for name in CHECKS]


def _checked(name: str, checkpoint: _Checkpoint, reported: set[str]) -> Result:
    """Make one check. reported: errors of earlier checks, to which this one's is added."""
    about, check = CHECKS[name]
    findings, unread, status = list[Finding](), list[Finding](), "ok"
    try:
        for finding in check(checkpoint):  # findings before an unreadable file count
            findings.append(finding)
    except _NotRecorded:
        status = "not recorded"
    except (ValueError, OSError) as error:
        is_trouble = isinstance(error, OSError) and not isinstance(error, _OF_THE_FOLDER)
        is_reported = str(error) in reported
        status = "not made" if is_trouble or is_reported else status
        if not is_reported:
            (unread if is_trouble else findings).append(Finding(checkpoint.path.name, str(error)))
        reported.add(str(error))
    status = "failed" if findings else status
    measured = _bits(checkpoint) if name == "plan" and status == "ok" else ""
    return Result(name, about, status, (*findings, *unread), measured)


class _NotRecorded(Exception):
    """The checkpoint records nothing for a check to compare; diffusers saves no plan file, for example."""


class _Checkpoint:
    """A checkpoint's folder, and everything that is read from it more than once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._on_meta: dict[str, nn.Module] = {}

    @cached_property
    def folder(self) -> ModelFolder:
        return resolve_model(str(self.path.resolve()), one_model=True)

    @cached_property
    def record(self) -> dict[str, Any]:
        record = read_plan_file(self.path)
        if record is None:
            raise _NotRecorded
        return record

    @cached_property
    def classes(self) -> dict[str, type]:
        """Component -> its class."""
        classes = {}
        for component, class_name in self.folder.components.items():
            library = importlib.import_module(library_of(self.folder, component))
            classes[component] = getattr(library, class_name, None)
            if classes[component] is None:
                what = f"{component or 'config.json'}: {class_name}"
                raise ValueError(f"{what} is no class of this {library.__name__}; update it")
        return classes

    @property
    def models(self) -> list[str]:
        """The components that have weights."""
        return [name for name, component_class in self.classes.items() if issubclass(component_class, nn.Module)]

    @property
    def configured(self) -> list[str]:
        """Models whose config.json is there; the others are a finding of `_files`."""
        return [name for name in self.models if (self.path / _file(name)).is_file()]

    @property
    def vocabularies(self) -> dict[str, tuple[str, ...]]:
        """Component -> alternative files of its tokenizer, one of which is enough."""
        vocabularies = {name: getattr(kind, "vocab_files_names", None) for name, kind in self.classes.items()}
        return {component: tuple(sorted(set(files.values()))) for component, files in vocabularies.items() if files}

    @cached_property
    def quantized(self) -> dict[str, QuantizationConfig]:
        """Component -> its quantization_config, for those that fluxq quantized."""
        configs = {}
        for component in self.configured:
            if (config := quantization_of(self.folder.config(component))) is not None:
                try:
                    configs[component] = QuantizationConfig.from_dict(config)
                    _ = configs[component].schemes  # ValueError for one that this version does not know
                except ValueError as error:
                    raise ValueError(f"{_file(component)}: {error}") from None
        return configs

    def weights(self, component: str) -> dict[str, TensorFile]:
        """Return tensor name -> its file; ValueError for a name in two files."""
        return by_tensor(map(TensorFile, self.folder.weight_files(component)))

    def on_meta(self, component: str) -> nn.Module:
        """Build the model that a loader will build, without its weights."""
        if component not in self._on_meta:
            self._on_meta[component] = quantized_on_meta(self.folder, component)
        return self._on_meta[component]

    def bits_per_weight(self, component: str) -> float:
        """Return the bits that the schemes of its layers store, over the weights of all its Linears."""
        schemes, stored, weights = self.quantized[component].schemes, 0, 0
        for linear in shapes_of(self.on_meta(component)):
            scheme, count = schemes.get(linear.name), linear.n * linear.k
            stored += scheme.stored_bits(linear.n, linear.k) if scheme else 16 * count
            weights += count
        return stored / weights

    def expected(self, component: str) -> dict[str, _Expected]:
        """Return every tensor of the model that a loader will build, QuantLinears included."""
        library = library_of(self.folder, component)
        model = self.on_meta(component)
        tensors = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            parent, _, parameter = name.rpartition(".")
            layer = model.get_submodule(parent)
            scheme = layer.scheme if isinstance(layer, QuantLinear) else None
            is_stored = isinstance(layer, QuantLinear) and parameter in layer.stored_names
            dtypes = _PLAIN if tensor.is_floating_point() and not is_stored else (tensor.dtype,)
            shape = tuple(tensor.shape)
            shape = filed_shape(library, shape) if is_stored and parameter == "weight" else shape
            tensors[name] = _Expected(shape, dtypes, parameter, scheme, id(tensor))
        return tensors


@dataclass(frozen=True)
class _Expected:
    """A tensor that a file must hold. parameter, scheme: as `_rule` takes them. identity: the same for tied names."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    parameter: str
    scheme: Scheme | None
    identity: int


def _file(component: str) -> str:
    return f"{component}/config.json" if component else "config.json"


def _tensor(component: str, name: str) -> str:
    return f"{component}: {name}" if component else name


def _safe(checkpoint: _Checkpoint) -> Iterator[Finding]:
    root = checkpoint.path.resolve()
    for file in sorted(root.rglob("*")):
        if file.suffix.lower() in PICKLES:
            name = file.relative_to(root).as_posix()
            yield Finding(name, "a pickle, which runs code as it is read; a checkpoint has none: remove it")
    _ = checkpoint.folder.components  # ValueError for remote code, and for files elsewhere


def _hashes(checkpoint: _Checkpoint) -> Iterator[Finding]:
    recorded = (read_plan_file(checkpoint.path) or {}).get("files")
    if recorded is None:
        yield from _needless(checkpoint)
        raise _NotRecorded
    if not isinstance(recorded, dict) or not all(isinstance(digest, str) for digest in recorded.values()):
        raise ValueError(f"{checkpoint.path / PLAN_FILE}: its `files` are no names and hashes; copy it again")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in recorded):
        raise ValueError(f"{checkpoint.path / PLAN_FILE}: its `files` lead out of the folder; copy it again")
    for name, expected in progress(recorded.items(), "Hashing files"):
        file = checkpoint.path / name
        if not file.is_file():
            yield Finding(name, "missing; copy the checkpoint again")
        elif (sha256 := sha256_file(file)) != expected:
            yield Finding(name, f"SHA-256 is {sha256[:16]}…, {expected[:16]}… was recorded; copy the file again")
    for name in _readable(checkpoint):
        if name not in recorded:
            yield Finding(name, "recorded by nobody, and a loader may read it: remove it, or copy the checkpoint again")


def _needless(checkpoint: _Checkpoint) -> Iterator[Finding]:
    """Find weights, adapters and code beside the files that a component's loader takes, where nothing is recorded."""
    folder = checkpoint.folder
    loaded = {file for component in checkpoint.models for file in folder.weight_files(component)}
    recorded = _recorded(checkpoint, DIGEST, DIGESTS, checkpoint.models)
    loaded |= {file for component in recorded for file in folder.adapter_files(component)}
    adapters = {file for component in folder.components for file in folder.adapter_files(component)} - loaded
    for name in _readable(checkpoint):
        file = folder.path / name  # resolved, as `loaded` is
        if file.suffix == ".py":
            yield Finding(name, "code, of which a checkpoint has none: remove it")
        elif file in adapters:
            what = "an adapter, which changes the model that is loaded, and nothing records it"
            yield Finding(name, f"{what}: copy the checkpoint again; remove it if the 16-bit model has none")
        elif file not in loaded and (file.name == "adapter_config.json" or file.suffix == ".safetensors"):
            yield Finding(name, "beside the model's own weights, and a loader may read it: remove it")


def _readable(checkpoint: _Checkpoint) -> Iterator[str]:
    """Yield the files that diffusers or transformers might read: those of components, and those that name them."""
    components = {name for name in checkpoint.folder.components if name}
    for file in sorted(path for path in checkpoint.path.rglob("*") if path.is_file() or path.is_symlink()):
        name = file.relative_to(checkpoint.path)
        is_weights = name.name.endswith((".safetensors", ".safetensors.index.json"))
        at_root = len(name.parts) == 1 and (is_weights or name.name in _AT_ROOT)
        if at_root or name.parts[0] in components or (not components and is_weights):
            yield name.as_posix()


_AT_ROOT = ("model_index.json", "config.json", "adapter_config.json", "generation_config.json", GENERATION_FILE)


def _digests(checkpoint: _Checkpoint) -> Iterator[Finding]:
    if not checkpoint.quantized and checkpoint.record.get("files"):  # nothing has a place for digests; hashes tell
        return
    settings = _recorded(checkpoint, CONFIG_DIGEST, CONFIG_DIGESTS, checkpoint.folder.components)
    for component, (file, digest) in settings.items():
        if config_digest(checkpoint.folder, component) != digest:
            yield Finding(component or "the model", f"other settings than {file} records; copy its files again")
    digests = _recorded(checkpoint, DIGEST, DIGESTS, checkpoint.models)
    for component, (file, digest) in progress(digests.items(), "Hashing tensors"):
        if checkpoint.folder.tensors_digest(component) != digest:
            yield Finding(component or "the model", f"other tensors than {file} records; copy the weights again")
    if set(checkpoint.models) - (digests.keys() & settings.keys()):
        raise _NotRecorded


def _recorded(checkpoint: _Checkpoint, mine: str, theirs: str, of: Container[str]) -> dict[str, tuple[str, object]]:
    """Return component -> (config.json with its digest, digest).

    mine, theirs: keys of the digest of a config.json's own component, and of other components.
    """
    digests: dict[str, tuple[str, object]] = {}
    for component in checkpoint.quantized:
        config = checkpoint.folder.config(component)["quantization_config"]
        others = config.get(theirs, {})
        for name, digest in [(component, config.get(mine)), *(others.items() if isinstance(others, dict) else ())]:
            if name in of and digest is not None:
                digests.setdefault(name, (_file(component), digest))
    return digests


def _files(checkpoint: _Checkpoint) -> Iterator[Finding]:
    for component in checkpoint.models:
        if component not in checkpoint.configured:
            yield Finding(_file(component), "missing, though model_index.json names the model; copy it again")
        else:
            checkpoint.weights(component)
    for component, names in checkpoint.vocabularies.items():
        if not any((checkpoint.path / component / name).is_file() for name in names):
            yield Finding(component, f"none of {', '.join(names)}, though model_index.json names it; copy it again")


def _config(checkpoint: _Checkpoint) -> Iterator[Finding]:
    is_dequantized = "imported" in (read_plan_file(checkpoint.path) or {})  # by `fluxq import --dequantize`
    is_whole = checkpoint.configured == checkpoint.models
    if not checkpoint.quantized and not is_dequantized and is_whole:
        yield Finding("config.json", "no component has a quantization_config of fluxq; `fluxq quantize` writes one")


def _tensors(checkpoint: _Checkpoint) -> Iterator[Finding]:
    for component in checkpoint.quantized:
        expected, files = checkpoint.expected(component), checkpoint.weights(component)
        tied = {expected[name].identity for name in expected.keys() & files.keys()}
        for name in sorted(expected.keys() - files.keys()):
            if expected[name].identity not in tied:
                what = "missing, though config.json implies it; copy the weights again"
                yield Finding(_tensor(component, name), what)
        for name in sorted(files.keys() - expected.keys()):
            what = "config.json implies no such tensor, and no loader would read it; copy both files again"
            yield Finding(_tensor(component, name), what)
        if what := _mixed(
            {n: files[n].stored[n].dtype for n, e in expected.items() if n in files and e.dtypes == _PLAIN}
        ):
            yield Finding(component or "the model", f"{what}; copy the weights again, or quantize again")
        for name in progress(sorted(expected.keys() & files.keys()), f"Reading {component or checkpoint.path.name}"):
            what = _fault(files[name].get_tensor(name), expected[name])
            if what:
                yield Finding(_tensor(component, name), f"{what}; copy the weights again, or quantize again")


def _mixed(dtypes: Mapping[str, str]) -> str:
    """Return the fault of a model that has tensors of both 16-bit dtypes; "" if it has not."""
    first = {dtype: min(name for name, stored in dtypes.items() if stored == dtype) for dtype in set(dtypes.values())}
    if not first.keys() >= {"BF16", "F16"}:
        return ""
    return f"{first['BF16']} is BF16 and {first['F16']} is F16, of which a model has one"


def _fault(tensor: Tensor, expected: _Expected) -> str:
    if tensor.dtype not in expected.dtypes or tuple(tensor.shape) != expected.shape:
        dtypes = " or ".join(map(str, expected.dtypes))
        return f"{tensor.dtype} {(*tensor.shape,)}, expected {dtypes} {expected.shape}"
    return stored_fault(tensor, expected.parameter, expected.scheme)


def stored_fault(tensor: Tensor, parameter: str, scheme: Scheme | None) -> str:
    """Return the fault in the values of a tensor; "" if none. scheme: of its quantized layer, None for others."""
    name, most = _rule(tensor, parameter, scheme)
    if name is None:
        return ""
    is_sound, words = RULES[name]
    sound = is_sound(tensor)
    if not sound.all():
        return _first_of(~sound, tensor, f"not {words}")
    if most is None:
        return ""
    values = torch.exp2(tensor.float() - 127) if tensor.dtype == torch.uint8 else tensor.float()  # of E8M0, or as it is
    beyond = values.abs() > most
    return _first_of(beyond, tensor, f"larger than {most:.4g}, which no model needs") if beyond.any() else ""


def _first_of(bad: Tensor, tensor: Tensor, words: str) -> str:
    places = bad.nonzero()
    first = tuple(places[0].tolist())
    return f"{len(places)} of {tensor.numel()} values are {words}: {tensor[first].item()} at {first}"


def _plan(checkpoint: _Checkpoint) -> Iterator[Finding]:
    try:
        parts = {str(part["component"]): part for part in checkpoint.record["components"]}
        planned = {c: {str(layer["name"]): layer["scheme"] for layer in part["layers"]} for c, part in parts.items()}
        sizes = {c: part["bytes_after"] for c, part in parts.items()}
    except (KeyError, TypeError) as error:
        path = checkpoint.path / PLAN_FILE
        raise ValueError(f"{path}: does not list components with layers ({error!r}); copy it again") from None
    bits = {c: part.get("bits_per_weight") for c, part in parts.items()}
    in_16_bit = {component for component, layers in planned.items() if set(layers.values()) == {"16bit"}}
    missing = set(checkpoint.models) - set(checkpoint.configured)
    for component in sorted(((planned.keys() - in_16_bit) ^ checkpoint.quantized.keys()) - missing):
        says, other = (PLAN_FILE, "config.json") if component in planned else ("config.json", PLAN_FILE)
        yield Finding(component or "the model", f"{says} says it is quantized, {other} does not; copy both files again")
    for component in sorted(planned.keys() & checkpoint.quantized.keys()):
        written = {name: str(scheme) for name, scheme in checkpoint.quantized[component].schemes.items()}
        for name in sorted(planned[component].keys() | written.keys()):
            plan, config = planned[component].get(name, "16bit"), written.get(name, "16bit")
            if plan != config:
                what = f"{PLAN_FILE} says {plan}, config.json {config}; copy both files again"
                yield Finding(_tensor(component, name), what)
        size = sum(TensorFile(path).nbytes for path in checkpoint.folder.weight_files(component))
        if size != sizes[component]:
            what = f"its tensors take {size} bytes, {PLAN_FILE} says {sizes[component]}; copy the weights again"
            yield Finding(component or "the model", what)
        stored = checkpoint.bits_per_weight(component)
        if not isinstance(bits[component], float | int) or not abs(bits[component] - stored) <= _ROUNDED:
            what = f"its Linears take {stored:.4f} bits per weight, {PLAN_FILE} says {bits[component]}; copy it again"
            yield Finding(component or "the model", what)
    if not is_as_written(checkpoint.record):
        yield Finding(PLAN_FILE, "changed since fluxq wrote it; copy it again")


def _bits(checkpoint: _Checkpoint) -> str:
    measured = {component: checkpoint.bits_per_weight(component) for component in checkpoint.quantized}
    return ", ".join(f"{component or 'the model'} {bits:.2f} bits per weight" for component, bits in measured.items())


def _rule(tensor: Tensor, parameter: str, scheme: Scheme | None) -> tuple[str | None, float | None]:
    """Return the rule for the values of a tensor: a key of RULES, None where every byte is a code; and the largest.

    scheme: of its quantized layer, None for others. With the largest scale, the largest code is `LARGEST`.
    """
    if scheme is None or parameter not in ("weight", *SCALE_NAMES):
        name = "positive" if parameter == "pre_quant_scale" else "finite"
        return (name, LARGEST) if tensor.is_floating_point() else (None, None)
    weights, element = scheme.weights, scheme.weights.element
    if parameter == "weight":
        return (element.name if element.name in RULES else None), None
    if parameter == "input_scale":
        return "activations", None
    if parameter == "weight_scale_2":
        return "positive", LARGEST / element.max / torch.finfo(torch.float8_e4m3fn).max
    return ("e8m0" if weights.scale == "e8m0" else "positive"), None if weights.two_level else LARGEST / element.max


def _are_numbers(element: Element, codes: Tensor) -> Tensor:
    """Tell which codes of a float element of 8 bits are numbers, not infinity or NaN."""
    return (codes.view(torch.uint8) & 0x7F) < len(element.magnitudes)


_OF_THE_FOLDER = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # errors that remain at a second look
_ROUNDED = 1e-3  # bits per weight are recorded to four digits
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)

RULES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "finite": (torch.isfinite, "finite"),
    "positive": (lambda t: torch.isfinite(t.float()) & (t.float() > 0), "finite and above 0"),
    "activations": (lambda t: (t >= 1 / ACTIVATIONS) & (t <= ACTIVATIONS), "a scale of any activations"),
    **{e.name: (partial(_are_numbers, e), "numbers") for e in ELEMENTS.values() if e.has_nan},
    "e8m0": (lambda t: (t >= 1) & (t <= 254), "exponent bytes in [1, 254]"),
}

# name -> the statement, and a function that finds where it does not hold
CHECKS: dict[str, tuple[str, Callable[[_Checkpoint], Iterator[Finding]]]] = {
    "safe": ("no pickles, no links out of the folder, no remote code", _safe),
    "hashes": (f"every file has the SHA-256 that {PLAN_FILE} records", _hashes),
    "files": ("every model has its config.json and whole weight files", _files),
    "config": ("formats and features that this fluxq knows, and just those that the layers need", _config),
    "tensors": ("just those that config.json implies, in its dtypes and shapes; scales positive, no NaN", _tensors),
    "digests": ("every model has the tensors and settings whose digest a config.json records", _digests),
    "plan": (f"{PLAN_FILE} and config.json tell of the same layers and sizes", _plan),
}
