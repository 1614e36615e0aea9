"""The model card of a checkpoint: what it is, what it cost, under which licence; made from fluxq_plan.json alone."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any


def model_card(record: dict[str, Any]) -> str:
    """README.md with the front matter that hubs read."""
    recipe, model, check = record["recipe"], record["model"], record["check"]
    parts = record["components"]
    lines = [
        *_front_matter(record),
        f"# {model['name']}, quantized with fluxq ({recipe['name']})",
        "",
        f"{_scope(parts)}. Base model: {model['name']}; licence: "
        f"{license_text(model['license']) or 'not stated by the base model, check before you share this'}.",
        "",
        "```python",
        "import fluxq",
        "import torch",
        "from diffusers import DiffusionPipeline",
        "",
        f'pipe = DiffusionPipeline.from_pretrained("path/to/this/folder", dtype=torch.{record["identity"]["dtype"]})',
        "```",
        "",
        "## Size",
        "",
        "| component | before | after | bits per weight (all Linears) |",
        "|---|---|---|---|",
        *(_size_row(part) for part in parts),
        "",
        "## Scope",
        "",
        "| component | role | weights-activations | layers | bits | mean weight SQNR |",
        "|---|---|---|---|---|---|",
        *(row for part in parts for row in _scope_rows(part)),
        "",
        "## Measured quality",
        "",
        *_check_lines(check),
        "",
        "## How it was made",
        "",
        f"- recipe `{recipe['name']}`, profile `{recipe['profile']}`, SHA-256 `{record['identity']['recipe'][:16]}`",
        *(f"- fused LoRA: {_lora(lora)}, SHA-256 `{lora['sha256'][:16]}`" for lora in record.get("loras", [])),
        f"- prompts: {record['prompts']['source']}, SHA-256 `{record['prompts']['digest'][:16]}`",
        f"- calibration: {_calibration(record)}",
        f"- versions: {', '.join(f'{name} {value}' for name, value in record['versions'].items())}",
        "",
        "Every layer with its reason is in `fluxq_plan.json`.",
    ]
    return "\n".join(lines) + "\n"


def _lora(lora: dict[str, Any]) -> str:
    return f"`{PurePath(lora['file']).name}` at weight {lora['weight']:g}"


def license_text(fields: dict[str, str]) -> str:
    """A licence for people: its own name where the id is just "other"; empty if nothing is known."""
    return fields.get("license_name") or fields.get("license", "")


def _front_matter(record: dict[str, Any]) -> list[str]:
    model = record["model"]
    lines = ["---", "library_name: diffusers", f"tags: [quantization, fluxq, {record['recipe']['name']}]"]
    lines += [f"{field}: {value}" for field, value in model["license"].items()]
    if "/" in model["name"]:  # a hub id; a local folder's name would point at a stranger's model
        lines += [f"base_model: {model['name']}", "base_model_relation: quantized"]
    return [*lines, "---", ""]


def _scope(parts: list[dict[str, Any]]) -> str:
    counts = []
    for part in parts:
        done = sum(layer["scheme"] != "16bit" for layer in part["layers"])
        counts.append(f"{done} of {len(part['layers'])} Linears of the {part['component']} are quantized")
    return "; ".join(counts)


def _size_row(part: dict[str, Any]) -> str:
    before, after = part["bytes_before"], part["bytes_after"]
    sizes = f"{before / 1e6:,.2f} MB | {after / 1e6:,.2f} MB ({after / before:.0%})"
    return f"| {part['component']} | {sizes} | {part['bits_per_weight']:.2f} |"


def _scope_rows(part: dict[str, Any]) -> list[str]:
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for layer in part["layers"]:
        kinds.setdefault((layer["role"], layer["scheme"]), []).append(layer)
    return [_scope_row(part["component"], role, scheme, layers) for (role, scheme), layers in kinds.items()]


def _scope_row(component: str, role: str, scheme: str, layers: list[dict[str, Any]]) -> str:
    bits = sum(layer["bits_per_weight"] for layer in layers) / len(layers)
    errors = [layer["weight_sqnr_db"] for layer in layers if layer["weight_sqnr_db"] is not None]
    error = f"{sum(errors) / len(errors):.1f} dB" if errors else "–"
    return f"| {component} | {role} | {scheme} | {len(layers)} | {bits:.2f} | {error} |"


def _check_lines(check: dict[str, Any] | None) -> list[str]:
    if check is None:
        return ["Not measured (the closing check was skipped)."]
    images = f"{check['images']} images of {check['steps']} steps, same prompts and noise as the 16-bit pipeline"
    if not check["finite"]:
        return [f"**FAILED: NaN or infinity** in {images}."]
    psnr = "identical" if check["mean_psnr_db"] is None else f"{check['mean_psnr_db']:.2f} dB"
    verdict = f"**FAILED: {', '.join(check['missed'])}**" if check["missed"] else "passed"
    gates = f"; gates {', '.join(check['gates'])}: {verdict}" if check["gates"] else ""
    return [f"Paired PSNR {psnr} over {images}{gates}. A few images are a smoke test, not an evaluation."]


def _calibration(record: dict[str, Any]) -> str:
    trajectory = record["trajectory"]
    if trajectory is None:
        return "none; this recipe needs no data"
    steps = ", ".join(map(str, trajectory["steps_seen"]))
    return f"{len(trajectory['items'])} images, steps {steps} of {trajectory['scheduler']['class']}"
