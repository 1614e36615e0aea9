"""The report: `report.json` holds everything, `report.html` is drawn from it alone and opens offline.

    {schema_version, created, status, headline, model, recipe, size, time, call,
     metrics: {key: Row}, images: [one entry per (prompt, seed)], gallery, provenance, versions}

Numbers that do not exist (an interval of one image, the PSNR of identical images) are null in JSON, never
NaN.
"""

from __future__ import annotations

import base64
import io
import math
import os
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image
from torch import Tensor

from fluxq.base.files import write_json, write_text
from fluxq.eval.fidelity import Fidelity, Interval
from fluxq.eval.generate import Generated

SCHEMA_VERSION = 1
JSON_FILE, HTML_FILE = "report.json", "report.html"

_PACKAGES = ("fluxq", "torch", "diffusers", "transformers", "torchmetrics", "open_clip_torch", "scipy")
_SHOWN_PIXELS = 384  # longest side of a picture in the report; larger ones are reduced, smaller ones kept
_PER_GROUP = 3
_MAX_GAIN = 64
_MAX_DOTS = 400


@dataclass(frozen=True)
class Facts:
    """What a report says about a checkpoint besides its images.

    bytes_before, bytes_after: weights on disk of the quantized `components`. bits_per_weight: everything stored for
    the quantized Linears (codes, scales, side branches) over the number of their weights. provenance: further
    lines, label -> text, such as hashes, prompt source and licence.
    """

    model: str
    recipe: str
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    provenance: Mapping[str, str] = field(default_factory=dict)
    components: tuple[str, ...] = ("transformer",)


@dataclass(frozen=True)
class Row:
    """One metric; `digits` is a format specification, `better` is "higher" or "lower", `how` the variant.

    value: of the quantized images, baseline: of the 16-bit images, change: value - baseline, paired where
    the metric has per-image values. missing: why there is no value. per_image: in the order of the items.
    """

    name: str
    unit: str
    digits: str
    better: str
    how: str
    value: Interval | None = None
    baseline: Interval | None = None
    change: Interval | None = None
    notes: tuple[str, ...] = ()
    missing: str | None = None
    per_image: tuple[float, ...] | None = None


def make_report(
    reference: Generated,
    quantized: Generated,
    measured: Fidelity,
    rows: Mapping[str, Row],
    *,
    call: Mapping[str, Any],
    facts: Facts,
) -> dict[str, Any]:
    """Everything known about one evaluation, as plain JSON values."""
    status = _status(quantized, measured)
    size = {
        "components": ", ".join(facts.components),
        "bytes_before": facts.bytes_before,
        "bytes_after": facts.bytes_after,
        "ratio": facts.bytes_before / facts.bytes_after,
        "bits_per_weight": facts.bits_per_weight,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "status": status,
        "headline": _headline(status, quantized, rows["psnr_db"].value, size),
        "model": facts.model,
        "recipe": facts.recipe,
        "size": size,
        "time": {
            "images": len(quantized.items),
            "reference_seconds": reference.seconds,
            "quantized_seconds": quantized.seconds,
            "reference_device": reference.device,
            "quantized_device": quantized.device,
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        },
        "call": dict(call),
        "metrics": {key: _row_json(row) for key, row in rows.items()},
        "images": _images_json(quantized, measured, rows),
        "gallery": _gallery(reference.images, quantized.images, measured.psnr_db),
        "provenance": {
            **facts.provenance,
            "prompts and seeds (SHA-256)": quantized.items_digest,
            "16-bit images (SHA-256)": measured.reference,
        },
        "versions": _versions(),
    }


def write_report(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write `report.json` and `report.html` into `folder`, each atomically; returns the path of the HTML."""
    write_json(folder / JSON_FILE, report)
    write_text(folder / HTML_FILE, render(report))
    return folder / HTML_FILE


def render(report: Mapping[str, Any]) -> str:
    """The HTML of a report as read from `report.json`; ValueError if it has another schema version."""
    if report.get("schema_version") != SCHEMA_VERSION:
        found = report.get("schema_version")
        raise ValueError(f"report has schema_version {found}, this fluxq draws {SCHEMA_VERSION}: evaluate again")
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(figure=_figure, limits=_limits, size=_size)
    return environment.get_template("report.html").render(
        report=report, chart=_chart(report["images"], report["metrics"]["psnr_db"]["value"])
    )


def _status(quantized: Generated, measured: Fidelity) -> str:
    if not quantized.finite.all():
        return "broken"
    return "identical" if all(math.isinf(value) for value in measured.psnr_db) else "measured"


def _headline(status: str, quantized: Generated, psnr: Interval | None, size: Mapping[str, float]) -> str:
    count = len(quantized.items)
    if status == "broken" or psnr is None:
        bad = int((~quantized.finite).sum())
        return f"{bad} of {count} images of the quantized model hold NaN or infinity: this checkpoint is broken."
    if status == "identical":
        quality = f"All {count} images are identical to the 16-bit model's, byte for byte"
    else:
        limits = "" if math.isnan(psnr.low) else f" (95 % interval {psnr.low:.1f} to {psnr.high:.1f})"
        same = f"; {psnr.infinite} more are identical" if psnr.infinite else ""
        pairs = "one image" if psnr.n == 1 else f"the mean over {psnr.n} images"
        quality = (
            f"{psnr.mean:.1f} dB PSNR to the 16-bit model's images{limits}, {pairs} with equal prompts and noise{same}"
        )
    return f"{quality}. {_size_sentence(size)}"


def _size_sentence(size: Mapping[str, Any]) -> str:
    before, after = _size(size["bytes_before"]), _size(size["bytes_after"])
    less = f", {size['ratio']:.2f} times less" if size["ratio"] > 1 else ""
    takes = "together take" if "," in size["components"] else "takes"
    return f"The {size['components']} {takes} {after} instead of {before}{less}."


def _row_json(row: Row) -> dict[str, Any]:
    intervals = {name: getattr(row, name) for name in ("value", "baseline", "change")}
    return {
        "name": row.name,
        "unit": row.unit,
        "digits": row.digits,
        "better": row.better,
        "how": row.how,
        **{name: None if value is None else _interval_json(value) for name, value in intervals.items()},
        "notes": list(row.notes),
        "missing": row.missing,
    }


def _interval_json(value: Interval) -> dict[str, float | int | None]:
    limits = {name: _number(getattr(value, name)) for name in ("mean", "low", "high")}
    return {**limits, "n": value.n, "infinite": value.infinite}


def _images_json(quantized: Generated, measured: Fidelity, rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    per_image = {key: row.per_image for key, row in rows.items() if row.per_image is not None}
    return [
        {
            "prompt": prompt,
            "seed": seed,
            "finite": bool(quantized.finite[index]),
            "identical": measured.psnr_db[index] == math.inf,
            **{key: _number(values[index]) for key, values in per_image.items()},
        }
        for index, (prompt, seed) in enumerate(quantized.items)
    ]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _gallery(reference: Tensor, quantized: Tensor, psnr: Sequence[float]) -> dict[str, Any]:
    """Pictures of the chosen images as base64 PNG; one gain for all |differences|, so they compare by eye."""
    groups = choose(psnr)
    chosen = [index for indices in groups.values() for index in indices]
    differences = {index: (reference[index].int() - quantized[index].int()).abs() for index in chosen}
    gain = _gain([difference.numpy() for difference in differences.values()])
    height, width = reference.shape[-2:]

    def picture(index: int) -> dict[str, Any]:
        return {
            "index": index,
            "reference": _png(reference[index]),
            "quantized": _png(quantized[index]),
            "difference": _png((differences[index] * gain).clamp(max=255)),
        }

    return {
        "gain": gain,
        "height": height,
        "width": width,
        "shown_pixels": min(max(height, width), _SHOWN_PIXELS),
        "groups": {name: [picture(index) for index in indices] for name, indices in groups.items()},
    }


def choose(psnr: Sequence[float], seed: int = 0) -> dict[str, list[int]]:
    """Indices of the images to show, none twice: worst, median, best by PSNR, and some drawn by `seed`.

    A broken image (NaN) is worst of all, an identical one (infinite) best. All are shown if there are few.
    """
    order = sorted(range(len(psnr)), key=lambda index: -math.inf if math.isnan(psnr[index]) else psnr[index])
    if len(order) <= 4 * _PER_GROUP:
        return {"all": order}
    middle = (len(order) - _PER_GROUP) // 2
    groups = {
        "worst": order[:_PER_GROUP],
        "median": order[middle : middle + _PER_GROUP],
        "best": order[: -_PER_GROUP - 1 : -1],
    }
    rest = sorted(set(order).difference(*groups.values()))
    return {**groups, "random": sorted(random.Random(seed).sample(rest, _PER_GROUP))}


def _gain(differences: Sequence[np.ndarray]) -> int:
    """The largest power of two up to 64 that keeps 99 % of the differences below full scale."""
    high = max(1.0, float(np.percentile(np.concatenate([d.ravel() for d in differences]), 99)))
    return max(1, min(_MAX_GAIN, 2 ** int(math.log2(255 / high))))


def _png(image: Tensor) -> str:
    """Integer (3, H, W) in 0..255 as base64 PNG, reduced by averaging if it is large."""
    picture = Image.fromarray(image.permute(1, 2, 0).numpy().astype(np.uint8))
    if max(picture.size) > _SHOWN_PIXELS:
        picture.thumbnail((_SHOWN_PIXELS, _SHOWN_PIXELS), Image.Resampling.BOX)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _chart(images: Sequence[Mapping[str, Any]], psnr: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Geometry of the PSNR strip in a 760 x 190 box: a dot per image from worst to best, mean and interval.

    Images without a finite PSNR are not drawn; of very many, evenly spaced ranks are. None if none is left.
    """
    ranked = sorted((image for image in images if image["psnr_db"] is not None), key=lambda image: image["psnr_db"])
    if not ranked:
        return None
    values = [image["psnr_db"] for image in ranked]
    ticks = _ticks(values[0], values[-1])
    left, right, top, bottom = 44, 752, 12, 164

    def y(value: float) -> float:
        return bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top)

    count = min(len(ranked), _MAX_DOTS)
    ranks = [round(i * (len(ranked) - 1) / max(count - 1, 1)) for i in range(count)]
    dots = [
        {"x": left + (rank + 0.5) / len(ranked) * (right - left), "y": y(values[rank]), "image": ranked[rank]}
        for rank in ranks
    ]
    return {
        "left": left,
        "right": right,
        "bottom": bottom,
        "ticks": [{"value": tick, "y": y(tick)} for tick in ticks],
        "dots": dots,
        "radius": 3.5 if count <= 100 else 2,
        "mean": psnr and {"value": psnr["mean"], "y": y(psnr["mean"])},
        "band": psnr and psnr["low"] is not None and {"top": y(psnr["high"]), "bottom": y(psnr["low"])},
        "left_out": len(images) - len(ranked),
    }


def _ticks(low: float, high: float) -> list[float]:
    """Round values around [low, high], about five of them."""
    rough = max(high - low, 0.5) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _figure(interval: Mapping[str, Any] | None, digits: str, sign: str = "") -> str:
    if interval is None:
        return "–"
    if interval["mean"] is None:
        return "identical" if interval["infinite"] else "–"
    return format(interval["mean"], sign + digits).replace("-", "−")


def _limits(interval: Mapping[str, Any] | None, digits: str, sign: str = "") -> str:
    if interval is None or interval["low"] is None:
        return ""
    return f"{interval['low']:{sign}{digits}} to {interval['high']:{sign}{digits}}".replace("-", "−")


def _size(count: float) -> str:
    power = min(int(math.log10(max(count, 1)) / 3), 4)
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{count / 1000**power:.{2 if power else 0}f} {unit}"
