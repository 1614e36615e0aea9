"""Record of an imported checkpoint, its `fluxq_plan.json`, made of what was read and of what was written.

The file is as any other checkpoint's, so what reads those reads it: `imported` says of each component which dialect of
which files it was (with their SHA-256) and what was mended, `recipe` is none that could be run again, and `model` is
the base where one was given. A layer's SQNR is that of the rows that were compared with the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log10
from pathlib import Path
from typing import Any

from fluxq.base import FLUXQ_VERSION
from fluxq.base.devices import versions
from fluxq.base.files import read_json, sha256_json
from fluxq.base.model import ModelFolder
from fluxq.base.output import name_of
from fluxq.base.tensors import TensorFile
from fluxq.quantize.checkpoint import build_on_meta, library_of
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.layer import most_of_16_bit
from fluxq.quantize.record import (
    Identity,
    Layer,
    Origin,
    Record,
    RecordedComponent,
    RecordedModel,
    RecordedRecipe,
    hash_files,
)
from fluxq.quantize.structure import model_family, shapes_of
from fluxq.recipes.computing import QuantizationConfig, quantization_of
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import GENERIC, Plan, located

_KEPT = "16 bit in the file"


@dataclass
class Imported:
    """Report of `import_model` on a component, of a class of `library`.

    quantized: module -> scheme. dequantized: module -> why it is in 16 bit now. mended: layer in the file -> what was
    wrong with it and is not any more. errors: module -> distance of its layer to the base's, of sampled rows, as a
    share. files: that it was read from -> SHA-256. notes: what was left behind. unproved: what the base could not tell.
    was_written: before, by the same command.
    """

    component: str
    dialect: str
    output: str
    class_name: str
    library: str
    quantized: dict[str, str] = field(default_factory=dict)
    dequantized: dict[str, str] = field(default_factory=dict)
    mended: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    was_written: bool = False

    def describe(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


def record_of(
    made: Path,
    path: Path,
    pipeline: ModelFolder | None,
    base: ModelFolder | None,
    reports: Sequence[Imported],
    job: str,
) -> Record:
    """Return the record of the folder `made`, whose other files are all there.

    path: what was imported. pipeline: whose other components were copied; base: the 16-bit model, in whatever form.
    job: of the command, as `job_digest` has it.
    """
    origin = base if base is not None and (base.path / "model_index.json").is_file() else None
    known = [report.component for report in reports if origin and report.component in origin.components]
    parts = [_component(made / report.component, report) for report in reports]
    parts += _copied(made, [report.component for report in reports]) if pipeline else []
    files = {"files": {report.component: report.files for report in reports}}
    about = pipeline or base or ModelFolder(path.name, path)
    dialects = " and ".join(dict.fromkeys(report.dialect for report in reports))
    return Record(
        fluxq_version=FLUXQ_VERSION,
        identity=Identity.model_validate({"recipe": sha256_json(files), "dtype": _dtype(made), "job": job}),
        model=RecordedModel(
            name=(base or about).name,
            source=_source(origin) if origin else None,
            revision=origin.commit if origin else None,
            license=about.license,
            digests={component: origin.digest(component) for component in known} if origin else {},
        ),
        recipe=RecordedRecipe(name=f"imported from {dialects}"),
        imported=[
            Origin(
                component=report.component,
                origin=name_of(path),
                dialect=report.dialect,
                about=DIALECTS[report.dialect].about,
                files=report.files,
                base=base.name if base else None,
                mended=report.mended,
                dequantized=report.dequantized,
                notes=report.notes,
            )
            for report in reports
        ],
        loras=[],
        prompts=None,
        trajectory=None,
        statistics_digest=None,
        components=parts,
        versions=versions(),
        check=None,
        files=hash_files(made, {}),
    )


def _component(folder: Path, report: Imported) -> RecordedComponent:
    """Return the record of a component that was imported into `folder`; `Plan` has the words."""
    reasons = {module: f"16 bit: {why}" for module, why in report.dequantized.items()}
    reasons |= dict.fromkeys(report.quantized, f"codes as {report.dialect} had them")
    part = _described(folder, report.component, report.library, report.class_name, reasons)
    for layer in part.layers:
        error = report.errors.get(layer.name)
        layer.weight_sqnr_db = round(-20 * log10(error), 2) if error else None
    part.notes = report.notes
    return part


def _copied(made: Path, imported: Sequence[str]) -> list[RecordedComponent]:
    """Of components that were checkpoints of fluxq before, and were copied."""
    folder, parts = ModelFolder(made.name, made), []
    for component, class_name in folder.components.items():
        if component in imported or not (made / component / "config.json").is_file():
            continue
        schemes = _schemes(folder.config(component))
        if schemes:
            reasons, library = dict.fromkeys(schemes, "copied, as it was quantized"), library_of(folder, component)
            parts.append(_described(made / component, component, library, class_name, reasons))
    return parts


def _described(
    folder: Path, component: str, library: str, class_name: str, reasons: Mapping[str, str]
) -> RecordedComponent:
    """A component as it stands in `folder`. reasons: by layer, but for those in 16 bit."""
    config = read_json(folder / "config.json")
    schemes = _schemes(config)
    model = build_on_meta(library, class_name, {key: config[key] for key in config if key != "quantization_config"})
    try:
        family = model_family(model)
    except ValueError:  # a text encoder without a row
        family = None
    layers = tuple(
        replace(located(family, each), scheme=schemes.get(each.name), reason=reasons.get(each.name, _KEPT))
        for each in shapes_of(model)
    )
    plan = Plan(family.name if family else GENERIC, component, layers)
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}  # tied ones once
    return RecordedComponent(
        component=component,
        library=library,
        class_name=class_name,
        family=plan.family,
        notes=[],
        attention="16bit",
        bytes_before=2 * sum(tensor.numel() for tensor in tensors.values()),
        bytes_after=sum(TensorFile(path).nbytes for path in folder.glob("*.safetensors")),
        bits_per_weight=round(plan.bits_per_weight, 4),
        layers=[Layer.of(layer, None) for layer in plan.layers],
        groups=[],
    )


def _schemes(config: Mapping[str, Any]) -> dict[str, Scheme]:
    quantization = quantization_of(config)
    return QuantizationConfig.from_dict(quantization).schemes if quantization is not None else {}


def _dtype(made: Path) -> str:
    """That of most tensors which are not quantized, by name."""
    words = [stored.dtype for path in made.rglob("*.safetensors") for stored in TensorFile(path).stored.values()]
    return str(most_of_16_bit(words)).removeprefix("torch.")


def _source(folder: ModelFolder) -> str:
    """A model such that it means the same from any folder."""
    is_local = folder.commit is None and folder.name != "tiny"
    return str(folder.path.resolve()) if is_local else folder.name
