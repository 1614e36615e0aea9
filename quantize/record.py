"""The record of a checkpoint, and the digests that it stores of its own bytes, for `verify`.

    fluxq_plan.json             the record; `files`: the SHA-256 of every file
    <component>/config.json     in its quantization_config
        digest                      of the component's tensors, however they are cut into files
        config_digest               of the config.json, without digests
        digests, config_digests     the same of the other components, and of a scheduler's or tokenizer's files; only
                                    where fluxq wrote the whole checkpoint

Unlike the record, the digests outlive `save_pretrained` and a download of just the files that a loader needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from fluxq.base.console import first_fault
from fluxq.base.files import read_json, sha256_file, sha256_json, write_json
from fluxq.base.model import HASHED_AT_ONCE, PLAN_FILE, ModelFolder, resolve_model
from fluxq.quantize.checkpoint import is_model, read_plan_file
from fluxq.recipes.computing import Attentions, quantization_of

if TYPE_CHECKING:
    from fluxq.recipes.plan import LayerPlan


_SEAL = "sha256"  # key of the record
_NOT_HASHED = (_SEAL, "seconds", "source", "file")
_DIGEST_KEYS = DIGEST, DIGESTS, CONFIG_DIGEST, CONFIG_DIGESTS = "digest", "digests", "config_digest", "config_digests"
_NO_SETTINGS = ("transformers_version", "torch_dtype", "dtype")  # saving changes them, no number depends on them
_SETTINGS_SUFFIXES = (".json", ".txt", ".model")  # of files that schedulers and tokenizers are loaded from


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Layer(_Part):
    """A Linear (N, K) of a component. scheme: "16bit" where it is not quantized; weight_sqnr_db: None if exact."""

    name: str
    shape: list[int] = Field(min_length=2, max_length=2)
    role: str = ""
    scheme: str
    may_try: str = ""
    bits_per_weight: float
    reason: str = ""
    weight_sqnr_db: float | None = None

    @classmethod
    def of(cls, layer: LayerPlan, weight_sqnr_db: float | None) -> Self:
        """Return the record of a planned layer."""
        fields = {**layer.describe(), "bits_per_weight": round(layer.bits_per_weight, 4)}
        return cls(**fields, weight_sqnr_db=weight_sqnr_db)

    @property
    def weights(self) -> int:
        """Number of weights, N·K."""
        return self.shape[0] * self.shape[1]


class RecordedStage(_Part):
    """A stage of fitting that was tried, and why it was kept or left out. percent: more modelled time."""

    model_config = ConfigDict(allow_inf_nan=True)

    name: str
    kept: bool
    gain_db: float
    percent: float
    reason: str


class Group(_Part):
    """A fitted input group: held-out SQNR of its layers' outputs, rounded to nearest and as fitted, in dB.

    sqnr: of all tokens together. median, low: of single tokens by their own power, the median and the 10th percentile.
    """

    group: str
    layers: list[str]
    sqnr_before_db: float | None
    sqnr_db: float | None
    median_before_db: float | None = None
    median_db: float | None = None
    low_before_db: float | None = None
    low_db: float | None = None
    stages: list[RecordedStage]


class RecordedComponent(_Part):
    """A quantized component. bytes: of all its tensors. library, class_name: of an imported one."""

    component: str
    library: str | None = None
    class_name: str | None = None
    family: str = ""
    notes: list[str] = []
    attention: Attentions = "16bit"
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    seconds: float = 0.0
    layers: list[Layer]
    groups: list[Group] = []

    @property
    def quantized(self) -> list[Layer]:
        """Layers that are not in 16 bit."""
        return [layer for layer in self.layers if layer.scheme != "16bit"]


class RecordedModel(_Part):
    """The 16-bit model. source: None for one in memory, or another program's file imported without its base."""

    name: str = ""
    source: str | None
    revision: str | None
    license: dict[str, str] = {}
    digests: dict[str, str]


class RecordedRecipe(_Part):
    """The recipe: its name, and its fields as its file has them."""

    model_config = ConfigDict(extra="allow")

    name: str
    profile: str | None = None
    steps: dict[str, Any] | None = None
    gates: list[str] = []


class Origin(_Part):
    """Origin of an imported component. files: name -> SHA-256; mended: layer -> faults; dequantized: layer -> why."""

    component: str
    origin: str = Field("", validation_alias=AliasChoices("origin", "from"), serialization_alias="from")
    dialect: str = ""
    about: str
    files: dict[str, str]
    base: str | None = None
    mended: dict[str, list[str]]
    dequantized: dict[str, str] = {}
    notes: list[str] = []


class Lora(_Part):
    """A LoRA file that was fused into a component."""

    file: str
    weight: float
    sha256: str
    component: str = "transformer"


class MixedFrom(_Part):
    """A checkpoint that gave some of its layers. checkpoint: its folder's name; digest: of its transformers."""

    format: str
    checkpoint: str
    digest: str
    layers: list[str]


class Prompts(_Part):
    """Calibration prompts."""

    source: str
    digest: str


class Identity(_Part):
    """Everything that decides a checkpoint's bytes; `recipe` is a SHA-256."""

    model_config = ConfigDict(extra="allow")

    recipe: str
    dtype: str = "bfloat16"


class Check(_Part):
    """The closing check: a few images or videos against the 16-bit pipeline's, with the same prompts and noise.

    frames: of a video, None for images.
    flat: number of images of one colour.
    listed: list of steps that it ran with, in words; None if every step was computed.
    gates_for_eval: gates that only `fluxq eval` measures.
    missed: gates that did not hold.
    A value in dB that is None stands for infinity.
    """

    images: int
    frames: int | None = None
    seeds: list[int] = []
    steps: int
    listed: str | None = None
    finite: bool
    flat: int = 0
    psnr_db: list[float | None] = []
    mean_psnr_db: float | None
    mean_latent_sqnr_db: float | None = None
    gates: list[str]
    gates_for_eval: list[str] = []
    missed: list[str]
    passed: bool


class Record(_Part):
    """Origin, content and closing check of a checkpoint.

    imported: origins of a checkpoint from `fluxq import`.
    mixed: checkpoints whose fitted layers it was put together of, the first of which gave all else, too.
    trajectory: the calls that were captured, None where no data was needed.
    files: name -> SHA-256.
    """

    fluxq_version: str = ""
    identity: Identity
    model: RecordedModel
    recipe: RecordedRecipe
    imported: list[Origin] | None = None
    mixed: list[MixedFrom] = []
    loras: list[Lora] = []
    prompts: Prompts | None
    trajectory: dict[str, Any] | None
    statistics_digest: str | None
    components: list[RecordedComponent] = Field(min_length=1)
    versions: dict[str, Any] = {}
    check: Check | None = None
    files: dict[str, str] = {}
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file: the fields that were given."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


def write_record(folder: Path, record: Record) -> None:
    """Write the record of a checkpoint folder, with the SHA-256 of itself."""
    content = record.to_json()
    write_json(folder / PLAN_FILE, {**content, _SEAL: _hash(content)})


def is_as_written(record: Mapping[str, Any]) -> bool:
    """Tell whether the content of a record is as `write_record` wrote it; older ones without a SHA-256 count."""
    return _SEAL not in record or record[_SEAL] == _hash(record)


def _hash(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without times, and without paths, which users may change: a model may move."""
    return sha256_json(_decisive(record))


def _decisive(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _decisive(each) for key, each in value.items() if key not in _NOT_HASHED}
    return [_decisive(each) for each in value] if isinstance(value, list) else value


def read_record(folder: Path) -> Record:
    """Return the record of a checkpoint folder; ValueError naming file and key where it is none that fluxq wrote."""
    record = read_plan_file(folder)
    if record is None:
        raise ValueError(f"{folder}: not a fluxq checkpoint (it has no {PLAN_FILE}); `fluxq quantize` writes one")
    if not is_as_written(record):
        raise ValueError(
            f"{folder / PLAN_FILE}: changed since fluxq wrote it; copy it again, or --overwrite the checkpoint"
        )
    try:
        return Record.model_validate({key: value for key, value in record.items() if key != _SEAL})
    except ValidationError as error:
        raise ValueError(
            f"{folder / PLAN_FILE}: damaged, it does not say how the checkpoint was made ({first_fault(error)}); "
            "quantize again"
        ) from None


def bits_per_weight(parts: Sequence[RecordedComponent]) -> float:
    """Return the bits per weight of components: all that is stored for all Linears over their weights."""
    weights = [sum(layer.weights for layer in part.layers) for part in parts]
    stored = sum(part.bits_per_weight * count for part, count in zip(parts, weights, strict=True))
    return stored / sum(weights)


def bits_of(layers: Sequence[Layer]) -> float:
    """Return the bits per weight of layers, of formats and transforms; 16 if there are none."""
    stored = sum(layer.bits_per_weight * layer.weights for layer in layers)
    return stored / sum(layer.weights for layer in layers) if layers else 16.0


def fitted_db(groups: Sequence[Group], of: Literal["all", "median", "low"] = "all") -> tuple[float, float] | None:
    """Return the mean SQNR in dB of groups, rounded to nearest and as fitted; None if none was fitted.

    of: all tokens together, the median token, or the 10th percentile of tokens.
    """
    pairs = {
        "all": [(group.sqnr_before_db, group.sqnr_db) for group in groups],
        "median": [(group.median_before_db, group.median_db) for group in groups],
        "low": [(group.low_before_db, group.low_db) for group in groups],
    }[of]
    finite = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not finite:
        return None
    before, after = (sum(values) / len(finite) for values in zip(*finite, strict=True))
    return before, after


def hash_files(path: Path, known_hashes: Mapping[Path, str]) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder by its relative name, for the plan file.

    known_hashes: of files that were hashed as they were written.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        hashes = pool.map(lambda file: known_hashes.get(file) or sha256_file(file), files)
        return {file.relative_to(path).as_posix(): sha256 for file, sha256 in zip(files, hashes, strict=True)}


def write_digests(folder: Path) -> None:
    """Write the digests of all components of a checkpoint folder into the config.json of those that are quantized."""
    checkpoint = resolve_model(str(folder), one_model=True)
    named = [name for name in checkpoint.components if (folder / name / "config.json").is_file()]
    tensor_digests = {name: checkpoint.tensors_digest(name) for name in named if is_model(checkpoint, name)}
    settings_digests = {name: digest for name in checkpoint.components if (digest := config_digest(checkpoint, name))}
    for name in tensor_digests:
        others = {
            key: rest
            for key, by_component in ((DIGESTS, tensor_digests), (CONFIG_DIGESTS, settings_digests))
            if (rest := {other: digest for other, digest in by_component.items() if other != name})
        }
        _add(folder / name / "config.json", {DIGEST: tensor_digests[name], **others})


def write_own_digest(folder: Path) -> None:
    """Write a quantized model's digest into its config.json, in the folder that a library saved it in.

    A folder without weights (adapters alone) or of another model stays as it is.
    """
    if not any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file():
        return
    if quantization_of(read_json(folder / "config.json")):
        _add(folder / "config.json", {DIGEST: ModelFolder(folder.name, folder).tensors_digest("")})


def _add(file: Path, digests: Mapping[str, Any]) -> None:
    config = read_json(file)
    if (quantization := quantization_of(config)) is not None:
        digests = {**digests, CONFIG_DIGEST: sha256_json(settings_of(config))}
        write_json(file, {**config, "quantization_config": {**quantization, **digests}})


def config_digest(folder: ModelFolder, component: str) -> str:
    """Return the SHA-256 of a component's settings; "" for one without settings.

    A model's settings are its config.json, a scheduler's or tokenizer's all files that it may be loaded from.
    """
    place = folder.path / component
    if (place / "config.json").is_file():
        return sha256_json(settings_of(read_json(place / "config.json")))
    files = sorted(file for file in place.glob("*") if file.suffix in _SETTINGS_SUFFIXES and file.is_file())
    contents = [[file.name, _values_of(file)] for file in files]
    return sha256_json(contents) if contents else ""


def _values_of(file: Path) -> Any:
    """Return the values of a small JSON object, however it is spaced, and the SHA-256 of any other file.

    A vocabulary may be larger than JSON files are read, and its keys are tokens: none of them is left out.
    """
    if file.suffix != ".json":
        return sha256_file(file)
    try:
        values = read_json(file)
    except ValueError:  # too large, or no object
        return sha256_file(file)
    return settings_of(values) if file.stem.endswith("config") else values


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a JSON file that a loader builds from: no digests, names, versions and dtypes."""
    settings = {key: value for key, value in config.items() if not key.startswith("_") and key not in _NO_SETTINGS}
    if isinstance(quantization := settings.get("quantization_config"), dict):
        settings["quantization_config"] = {key: each for key, each in quantization.items() if key not in _DIGEST_KEYS}
    return settings
