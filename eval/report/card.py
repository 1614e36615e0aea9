"""The model card of a checkpoint: what it is, what it cost, under which licence; made from fluxq_plan.json alone.

An evaluation is added to it afterwards: a section for people, a `model-index` for hubs, and the `.eval_results` files
that benchmark pages read.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml

from fluxq.base.console import amount, code, escaped, first_line
from fluxq.base.download import HUB_ID
from fluxq.base.output import is_sealed, seal, unsealed
from fluxq.base.untrusted_yaml import front_matter
from fluxq.eval.metrics.figures import limits
from fluxq.eval.metrics.schema import Metric, Report, Run
from fluxq.eval.report.markdown import metric_table, summary_table, verdict_lines
from fluxq.quantize.record import (
    Check,
    Layer,
    Origin,
    Record,
    RecordedComponent,
    RecordedModel,
    bits_of,
    fitted_db,
)
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.computing import Steps, attention_in_words
from fluxq.recipes.plan import KEPT_ROLE

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TASKS = {"image": ("text-to-image", "Text to image"), "video": ("text-to-video", "Text to video")}
_BEGIN, _END = "<!-- fluxq eval: begin -->", "<!-- fluxq eval: end -->"
_NEXT_SECTION = "## How it was made"


def model_card(record: Record) -> str:
    """Return README.md with front matter for hubs, sealed: `--overwrite` replaces none that a user changed."""
    model, parts = record.model, record.components
    lines = [
        *_front_matter(record),
        f"# {escaped(model.name)}, {_title(record)}",
        "",
        f"{_scope(parts)}. Base model: {_base(model)}; licence: "
        f"{escaped(license_text(model.license)) or 'not stated by the base model, check before you share this'}.",
        "",
        "It loads with fluxq, installed from its source (`python -m pip install .` in its folder); without `import "
        "fluxq` diffusers does not know the format.",
        "",
        "```python",
        *_loading(record),
        *_steps_calls(_steps_of(record)),
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
        "| component | role | weights-activations | layers | bits per weight | outputs' SQNR | median token "
        "| 10th percentile | weights' SQNR |",
        "|" + "---|" * 9,
        *(row for part in parts for row in _scope_rows(part)),
        *_about_fitting(parts),
        "",
        *(line for part in parts for note in part.notes for line in (f"`{_of(part)}`: {note}", "")),
        "## Measured quality",
        "",
        *_check_lines(record.check),
        "",
        "## How it was made",
        "",
        *(_recipe_lines(record) if record.imported is None else _imported_lines(record.imported)),
        f"- versions: {', '.join(f'{name} {value}' for name, value in record.versions.items())}",
        "",
        "Every layer with its reason is in `fluxq_plan.json`.",
    ]
    return seal("\n".join(lines), ".md")


def _loading(record: Record) -> list[str]:
    """Return the code that loads a pipeline, or the one model that was imported without one."""
    part = record.components[0]
    library, name, loaded = "diffusers", "DiffusionPipeline", "pipe"
    if not part.component:
        library, name, loaded = part.library, part.class_name, "model"
    call = f'{loaded} = {name}.from_pretrained("path/to/this/folder", dtype=torch.{record.identity.dtype})'
    return ["import fluxq", "import torch", f"from {library} import {name}", "", call]


def _of(part: RecordedComponent) -> str:
    return part.component or "model"


def _title(record: Record) -> str:
    name = escaped(record.recipe.name)
    return f"quantized with fluxq ({name})" if record.imported is None else name


def _recipe_lines(record: Record) -> list[str]:
    recipe, prompts = record.recipe, record.prompts
    return [
        f"- recipe `{code(recipe.name)}`, profile `{recipe.profile}`, SHA-256 `{record.identity.recipe[:16]}`",
        *_steps_lines(_steps_of(record)),
        *(
            f"- {len(part.layers)} layers in {part.format}, fitted in the checkpoint `{code(part.checkpoint)}`"
            for part in record.mixed
        ),
        *(
            f"- fused LoRA: `{code(PurePath(lora.file).name)}` at weight {lora.weight:g} in `{lora.component}`, "
            f"SHA-256 `{lora.sha256[:16]}`"
            for lora in record.loras
        ),
        *([f"- prompts: {escaped(prompts.source)}, SHA-256 `{prompts.digest[:16]}`"] if prompts else []),
        f"- calibration: {_calibration(record.trajectory)}",
    ]


def _imported_lines(parts: list[Origin]) -> list[str]:
    """Return lines on the files that were imported, the programs they are of, and what was done to them."""
    lines = []
    for part in parts:
        of = f"`{part.component}`" if part.component else "the model"
        files = ", ".join(f"`{code(name)}` (SHA-256 `{digest[:16]}`)" for name, digest in part.files.items())
        lines.append(f"- {of} was imported by `fluxq import` from {files}: {part.about}")
        faults = sorted({fault for layer in part.mended.values() for fault in layer})
        lines += [f"- mended in it: {', '.join(faults)}"] if faults else []
    return lines


def with_evaluation(card_text: str, report: Report) -> str:
    """Add an evaluation to the card; an earlier one is replaced, everything else stays.

    The front matter gets a `model-index` with a result for every metric of every run that has a finite mean; a run's
    arithmetic is its `config`, interval, N and implementation are its `args`. Raises ValueError for a front matter
    that is no YAML, not a table, stands for too much or is none to hubs.
    """
    from huggingface_hub import ModelCard

    front_matter(card_text)  # a stranger's may stand for more than there is memory
    try:
        card = ModelCard(_with_section(unsealed(card_text), "\n".join(_section(report))))
    except (TypeError, ValueError, yaml.YAMLError) as error:  # the class raises any of these for keys and values
        raise ValueError(first_line(error)) from None
    card.data["model_name"] = report.runs[0].name
    card.data["eval_results"] = [result for run in report.runs for result in _results(run, report)]
    return seal(str(card), ".md") if is_sealed(card_text) else str(card)


def eval_results(report: Report) -> dict[str, str]:
    """Return file name in `.eval_results/` -> YAML, of the run that computes its layers as they are stored.

    These files name a data set of the hub, so an evaluation on other prompts has none.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    dataset = report.protocol.dataset
    run = next((run for run in report.runs if run.backend == "native" and run.cache is None), None)
    if dataset is None or run is None:
        return {}
    entries = [
        EvalResultEntry(
            dataset_id=dataset,
            task_id=key,
            value=metric.value.mean,
            date=report.created,
            notes=f"{run.recipe}, protocol {report.protocol.name}, {_note(metric, run)}",
        )
        for key, metric in _measured(run)
        if metric.value is not None
    ]
    if not entries:
        return {}
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True, width=120)
    return {f"{dataset.split('/')[-1].lower()}.yaml": text}


def _results(run: Run, report: Report) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    protocol = report.protocol
    return [
        EvalResult(
            task_type=TASKS[run.noun][0],
            task_name=TASKS[run.noun][1],
            dataset_type=protocol.dataset or protocol.name,
            dataset_name=f"{protocol.prompts}, {protocol.count} prompts × {protocol.seeds} seeds",
            metric_type=key,
            metric_name=metric.name,
            metric_value=metric.value.mean,
            metric_config=run.backend if run.cache is None else f"{run.backend}, {run.cache}",
            metric_args={"n": metric.value.n, "interval": limits(metric.value, metric.digits), "how": metric.how},
        )
        for key, metric in _measured(run)
        if metric.value is not None
    ]


def _measured(run: Run) -> list[tuple[str, Metric]]:
    return [(key, each) for key, each in run.metrics.items() if each.value is not None and each.value.mean is not None]


def _note(metric: Metric, run: Run) -> str:
    between = f"95 % interval {limits(metric.value, metric.digits)}, " if limits(metric.value, metric.digits) else ""
    return f"{between}{metric.value.n if metric.value else 0} {run.noun}s; {metric.how}"


def _section(report: Report) -> list[str]:
    lines = [_BEGIN, "## Evaluation", ""]
    for run in report.runs:
        lines += [*verdict_lines(run), ""]
    lines += [*summary_table(report), "", *metric_table(report.runs), ""]
    count = f"{len(report.items)} {report.noun}s of each run"
    lines += [f"{count} against 16 bit, with the same prompts and noise; 95 % intervals."]
    return [*lines, f"Made by `{code(report.command)}`; all of it is in `eval/report.html`.", _END]


def _with_section(text: str, section: str) -> str:
    """Put the section in the place of an earlier one, else before how the checkpoint was made, else at the end."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        return before + section + after
    before, heading, after = text.partition(f"\n{_NEXT_SECTION}\n")
    if heading:
        return f"{before}\n{section}\n{heading}{after}"
    return f"{text.rstrip()}\n\n{section}\n"


def _steps_of(record: Record) -> Steps | None:
    """Return what the recipe says of steps, which is of denoisers; None where none is quantized."""
    kinds = (getattr(FAMILIES.get(part.family), "kind", "transformer") for part in record.components)
    steps = record.recipe.steps
    return Steps.model_validate(steps) if steps and "transformer" in kinds else None


def _steps_calls(steps: Steps | None) -> list[str]:
    """Return the calls by which a loaded pipeline keeps and skips steps."""
    kept = ["fluxq.keep_steps(pipe)"] if steps and steps.kept else []
    return [*kept, "fluxq.skip_steps(pipe)"] if steps and steps.compute else kept


def _steps_lines(steps: Steps | None) -> list[str]:
    lines = []
    if steps and steps.kept:
        read = " and the base model's weights" if steps.components == "16bit" else ""
        lines = [f"- kept {steps.how}: {steps} of every call, by `fluxq.keep_steps(pipe)`{read}"]
    if steps and steps.compute:
        lines.append(f"- computed: {100 * steps.compute:g}% of the steps of a call, by `fluxq.skip_steps(pipe)`")
    return lines


def _base(model: RecordedModel) -> str:
    name = escaped(model.name)
    return f"{name} at revision `{code(model.revision)}`" if model.revision else name


def license_text(fields: dict[str, str]) -> str:
    """Return a licence for people: its own name where the id is just "other"; empty if nothing is known."""
    return fields.get("license_name") or fields.get("license", "")


def _front_matter(record: Record) -> list[str]:
    model, first = record.model, record.components[0]
    library = "diffusers" if first.component else first.library
    made_by = record.recipe.name if record.imported is None else "imported"
    fields = {"library_name": library, "tags": ["quantization", "fluxq", made_by], **model.license}
    if HUB_ID.fullmatch(model.name):  # a local folder's name would point at a stranger's model
        fields |= {"base_model": model.name, "base_model_relation": "quantized"}
    written = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1 << 16)
    return ["---", *written.splitlines(), "---", ""]


def _scope(parts: list[RecordedComponent]) -> str:
    return "; ".join(
        f"{len(part.quantized)} of {len(part.layers)} Linears of the {_of(part)} are quantized" + _attention(part)
        for part in parts
    )


def _attention(part: RecordedComponent) -> str:
    words = attention_in_words(part.attention)
    return "" if words == "16bit" else f", its self-attention is computed in {words}"


def _size_row(part: RecordedComponent) -> str:
    before, after = part.bytes_before, part.bytes_after
    sizes = f"{before / 1e6:,.2f} MB | {after / 1e6:,.2f} MB ({after / before:.0%})"
    return f"| {_of(part)} | {sizes} | {part.bits_per_weight:.2f} |"


def _scope_rows(part: RecordedComponent) -> list[str]:
    kinds: dict[tuple[str, str], list[Layer]] = {}
    for layer in part.layers:
        kinds.setdefault((layer.role, layer.scheme), []).append(layer)
    return [_scope_row(part, role, scheme, layers) for (role, scheme), layers in kinds.items()]


def _scope_row(part: RecordedComponent, role: str, scheme: str, layers: list[Layer]) -> str:
    names = {layer.name for layer in layers}
    groups = [group for group in part.groups if names.intersection(group.layers)]
    gained = [fitted_db(groups, of) for of in ("all", "median", "low")]
    outputs = " | ".join(f"{pair[0]:.1f} → {pair[1]:.1f} dB" if pair else "–" for pair in gained)
    errors = [layer.weight_sqnr_db for layer in layers if layer.weight_sqnr_db is not None]
    weights = f"{sum(errors) / len(errors):.1f} dB" if errors else "–"
    role = "16 bit" if role == KEPT_ROLE else role
    return f"| {_of(part)} | {role} | {scheme} | {len(layers)} | {bits_of(layers):.2f} | {outputs} | {weights} |"


def _about_fitting(parts: list[RecordedComponent]) -> list[str]:
    """Return a note on why fitted weights look worse than rounded ones, if some were fitted."""
    if not any(fitted_db(part.groups) for part in parts):
        return []
    return [
        "",
        "SQNR of outputs: on tokens that nothing was fitted to, rounded to nearest → as stored; all together, and "
        "single tokens by their own power. Fitting moves weights away from the originals so that outputs come nearer: "
        "the last column falls where those before it rise.",
    ]


def _check_lines(check: Check | None) -> list[str]:
    if check is None:
        return ["Not measured (the closing check was skipped)."]
    frames = check.frames
    steps = check.listed or f"{check.steps} steps"
    extent = f"{amount(check.images, frames)}{' of' if frames is None else ' and'} {steps}"
    images = f"{extent}, same prompts and noise as the 16-bit pipeline"
    if not check.finite:
        return [f"**FAILED: NaN or infinity** in {images}."]
    if check.flat:
        return [f"**FAILED: {check.flat} images of one colour** among {images}."]
    psnr = "identical" if check.mean_psnr_db is None else f"{check.mean_psnr_db:.2f} dB"
    verdict = f"**FAILED: {', '.join(check.missed)}**" if check.missed else "passed"
    gates = f"; gates {', '.join(check.gates)}: {verdict}" if check.gates else ""
    few = "images" if frames is None else "videos"
    return [f"Paired PSNR {psnr} over {images}{gates}. A few {few} are a smoke test, not an evaluation."]


def _calibration(trajectory: dict[str, Any] | None) -> str:
    if trajectory is None:
        return "none; this recipe needs no data"
    steps = ", ".join(map(str, trajectory["steps_seen"]))
    return f"{len(trajectory['items'])} images, steps {steps} of {trajectory['scheduler']['class']}"
