"""Output of the commands for people. Nothing is ever cut: a name that one cannot copy is of no use."""

from __future__ import annotations

import itertools
import shlex
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fluxq.base.console import amount, is_terminal, visible, width
from fluxq.base.console import duration as _duration
from fluxq.base.console import size as _size
from fluxq.base.console import work as _work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fluxq.eval.gate.result import GateResult
    from fluxq.eval.history.rows import HistoryRow
    from fluxq.eval.metrics.schema import Debug, Estimate, GateOutcome, Report, Served, Speed
    from fluxq.jobs.advising import Advice
    from fluxq.jobs.catalogue import CatalogueModel
    from fluxq.jobs.doctor import Examination
    from fluxq.jobs.forecast import Forecast
    from fluxq.jobs.job import Job, JobOptions
    from fluxq.jobs.memory import Demand
    from fluxq.jobs.passports import PassportResult
    from fluxq.jobs.search import Search
    from fluxq.quantize.exchange.export import Changed, Exported
    from fluxq.quantize.record import Check, Group, Record, RecordedComponent
    from fluxq.quantize.verify import Result
    from fluxq.recipes.cards import Holding
    from fluxq.recipes.cost import Cost
    from fluxq.recipes.plan import LayerPlan, Plan

_GAP, _INDENT = "  ", "    "
_NARROWEST = 30  # characters that a last column may be wrapped to; else it stands below its row


def plan(
    job: Job,
    costs: dict[str, Cost],
    demands: Sequence[Demand | None] = (),
    holdings: Sequence[Holding] = (),
    *,
    every_layer: bool = False,
) -> None:
    """Print the formats of the Linears by role, and the reasons.

    costs: printed instead, where there are any.
    demands: of quantizing, on each device; the least memory that it may be given is printed.
    holdings: of the pipeline by the GPU, under the chosen `prefer` and under "memory".
    every_layer: print each Linear by name.
    """
    if job.recipe.auto is not None:
        echo(
            f"formats are chosen by a search, for {job.recipe.auto}: `fluxq auto` makes it, or `fluxq quantize` first "
            "of all. This is the base that it starts from:"
        )
    for component in job.plans:
        if not costs:
            (_layers if every_layer else _fates)(component)
            _reasons(component)
        _summary(component)
    for component, cost in costs.items():
        _cost(component, cost)
    if holdings:
        echo(f"\n{next(iter(costs.values())).device.name} {holdings[0]}")
        if holdings[-1].word != holdings[0].word:
            echo(f"with --prefer memory it {holdings[-1]}")
        echo("modelled: weights as they lie there, activations at the size above, other parts in 16 bit")
    for each in filter(None, demands):
        echo(f"--max-memory with --device {each.device}: at least {each}")


def _fates(component: Plan) -> None:
    """Print a row for all Linears with one role, format and reason; quantized ones first."""
    alike: dict[tuple[str, str, str], list[LayerPlan]] = {}
    for layer in sorted(component.layers, key=lambda layer: layer.scheme is None):
        alike.setdefault((layer.role, _scheme(layer), layer.reason), []).append(layer)
    rows = []
    for (role, scheme, _), layers in alike.items():
        shapes = [*dict.fromkeys(f"{layer.n}×{layer.k}" for layer in layers)]
        bits = sum(la.bits_per_weight * la.n * la.k for la in layers) / sum(la.n * la.k for la in layers)
        shown = ", ".join(shapes[:2]) + ", …" * (len(shapes) > 2)
        rows.append((_role(role), str(len(layers)), shown, scheme, f"{bits:.2f}"))
    print_table(("role", "Linears", "N×K", "weights-activations", "bits"), rows)


def _layers(component: Plan) -> None:
    """Print a row for each Linear."""
    rows = [
        (la.name, f"{la.n}×{la.k}", _scheme(la), f"{la.bits_per_weight:.2f}", _role(la.role)) for la in component.layers
    ]
    print_table(("layer", "N×K", "weights-activations", "bits", "role"), rows)


def _reasons(component: Plan) -> None:
    """Print each reason once, with its roles, or with its layers where a role has several reasons."""
    from fluxq.recipes.family import compact
    from fluxq.recipes.plan import KEPT_ROLE

    reasons: dict[str, dict[str, list[str]]] = {}
    fates: dict[str, set[str]] = {}
    for layer in component.layers:
        reason = layer.reason.removeprefix("16 bit: ").removeprefix(f"{layer.role}: ")
        reasons.setdefault(reason, {}).setdefault(layer.role, []).append(layer.name)
        fates.setdefault(layer.role, set()).add(reason)
    for reason, roles in reasons.items():
        whole = [role for role in roles if len(fates[role]) == 1 and role != KEPT_ROLE]
        parts = [name for role, names in roles.items() if role not in whole for name in names]
        echo(f"{', '.join([*whole, *([compact(parts)] if parts else [])])}: {reason}")


def _scheme(layer: LayerPlan) -> str:
    return str(layer.scheme or "16bit")


def _role(role: str) -> str:
    from fluxq.recipes.plan import KEPT_ROLE

    return "16 bit" if role == KEPT_ROLE else role


def plan_json(job: Job, costs: dict[str, Cost], holdings: Sequence[Holding] = ()) -> dict[str, Any]:
    """Return the plans as JSON; `costs` are under `cost`, the GPU's holding under `pipeline`, a search under `auto`."""
    plans: dict[str, Any] = {plan.component: [layer.describe() for layer in plan.layers] for plan in job.plans}
    if job.recipe.auto is not None:
        plans["auto"] = job.recipe.auto.model_dump(exclude_none=True)
    if costs:
        plans["cost"] = {name: cost.describe() for name, cost in costs.items()}
    return {**plans, "pipeline": holdings[0].describe()} if holdings else plans


def fit(answer: dict[str, Any]) -> None:
    """Print the recipe of each component, what it takes on the card, and how to make and place the pipeline."""
    peaks = answer["stages_gb"]
    rows = [(name, recipe, _size(1e9 * peaks[name])) for name, recipe in answer["recipes"].items()]
    print_table(("component", "recipe", "on the card while it runs"), rows)
    echo(f"{answer['sentence']}\n")
    if answer["command"]:
        echo(answer["command"])
    echo("\n".join(answer["code"]))


def forecast(of_job: Forecast) -> None:
    """Print the time and memory of a job; nothing for one that only rounds, as fast as files are copied."""
    if of_job.parts:
        echo(f"takes {of_job} and {of_job.memory_bytes / 1e9:.1f} GB of memory, estimated")


def outline_json(search: Search, outline: Mapping[str, Any]) -> dict[str, Any]:
    """Return as JSON what may be chosen and what the search will take."""
    units = {
        unit: {"layers": list(names), "options": list(search.offer.choices[unit])}
        for unit, names in search.offer.units.items()
    }
    return {"menu": list(search.offer.options), "units": units, **outline}


def outline(search: Search, outline: Mapping[str, Any]) -> None:
    """Print what may be chosen and what the search will take."""
    offer, weights = search.offer, search.offer.weights
    rows = [
        (unit, str(len(names)), f"{weights[unit] / sum(weights.values()):.1%}", ", ".join(offer.choices[unit]))
        for unit, names in offer.units.items()
    ]
    print_table(("input group", "Linears", "of the weights", "options"), rows)
    way = f" with {search.seat.way}" if search.seat else ""
    echo(f"least budget {outline['least']}, largest {outline['largest']}{way}")
    passes = ", ".join(f"{count} of {name}" for name, count in outline["passes"].items())
    seconds = outline["modelled_seconds"]
    modelled = "" if seconds is None else f"; modelled on {search.options.gpu}: {_duration(seconds)}"
    echo(f"at most {outline['runs']} runs; forward passes of one image, at most: {passes}{modelled}")


def listed_steps(result: dict[str, Any], output: str) -> None:
    """Print the lists that ran, and the one that was taken."""
    made = result["list"]
    rows = [
        (str(each["computed"]), _goes_on(each), _nmse_db(each["predicted_nmse"]), _nmse_db(each["measured_nmse"]))
        for each in result["tried"]
    ]
    print_table((f"computed of {made['steps']}", "others", "predicted, dB", "measured, dB"), rows, right=True)
    echo(f"computed, others {_goes_on(made)}: {', '.join(map(str, made['compute']))}")
    if result["identity"]["mask"]:
        alike = next(row for row in result["curve"] if row["computed"] == len(made["compute"]))
        least = _nmse_db(alike["predicted_nmse"])
        share = len(made["compute"]) / made["steps"]
        echo(f"a list chosen of so many steps is predicted {least} dB: --compute {share:.3g}")
    echo(f"list: {output}")
    echo(f"next: fluxq.skip_steps(pipe, {output!r})")


def _goes_on(made: Mapping[str, Any]) -> str:
    """Return what stands for steps that are not computed."""
    return "fitted" if made.get("fitted") else f"of order {made['order']}"


def exported_list(place: Path) -> None:
    """Print where a list was written for another program, and how that reads it."""
    echo(f"list: {place}")
    text = place.read_text(encoding="utf-8")
    for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()):
        echo(line[2:])


def chosen(result: dict[str, Any], places: Mapping[str, str], options: JobOptions | None = None) -> None:
    """Print the plans that ran, the front, and how far prediction and measurement agree.

    places: "output", the recipe, and "checkpoint" where one was put together.
    options: of the search, for the command that comes next; None where its job goes on by itself.
    """
    unit = result["cost_unit"]
    rows = [
        (
            ", ".join(each["proposed_by"]) + (" (chosen)" if each["chosen"] else ""),
            *_computed(each),
            f"{each['cost']:.4g}",
            _nmse_db(each["predicted_nmse"]),
            _nmse_db(each["nmse"]),
        )
        for each in result["tried"]
    ]
    steps = result.get("steps")
    computed = (f"computed of {steps['total']}",) if steps else ()
    print_table(("proposed by", *computed, unit, "predicted, dB", "measured, dB"), rows, right=True)
    counts: dict[str, int] = {}
    groups = [each for each in result["units"] if each["layers"]]
    for each in groups:
        counts[each["option"]] = counts.get(each["option"], 0) + each["weights"]
    shares = ", ".join(f"{option} {count / sum(counts.values()):.1%}" for option, count in sorted(counts.items()))
    echo(f"of the weights in {len(groups)} input groups: {shares}")
    if attention := [each["option"] for each in result["units"] if not each["layers"]]:
        echo(f"self-attention in fp8: {attention.count('fp8')} of {len(attention)} modules")
    rows = [(f"{each['cost']:.4g}", *_computed(each), _nmse_db(each["predicted_nmse"])) for each in result["front"]]
    print_table((f"least error for {unit}", *computed, "predicted, dB"), rows, right=True)
    if steps:
        echo(f"{unit} are those of a step in the mean of all {steps['total']}")
        made = steps["list"]
        which = f"{', '.join(map(str, made['compute']))}; others {_goes_on(made)}" if made else "all"
        echo(f"steps computed: {which}")
    if "measured_times" in result:
        count = len(result["measured_times"])
        echo(f"times of {count} of {len(result['units'])} input groups are measured, the others modelled")
    if not result["agrees"]:
        echo("predicted and measured error differ by more than a factor of 1.5: choose by the measured ones")
    if not result.get("checkpoints"):
        echo("layers were rounded to nearest; fitting them, by `fluxq quantize --recipe`, makes less error")
    elif "checkpoint" not in places:
        echo(f"layers are those of {', '.join(result['checkpoints'].values())}; --assemble FOLDER writes a checkpoint")
    echo(f"recipe: {places['output']}")
    if "checkpoint" in places:
        echo(f"checkpoint: {places['checkpoint']}")
        echo(f"next: fluxq eval {shlex.quote(places['checkpoint'])}")
    if "card" in result:
        fit(result["card"])
    if options is not None and not result.get("checkpoints") and "card" not in result:
        plain = replace(options, recipe=places["output"], profile=None, include=(), exclude=())  # which it says
        echo(f"next: {_quantizing(plain)}")


def _computed(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cell of the number of computed steps, where that was chosen."""
    return (str(row["computed"]),) if "computed" in row else ()


def _nmse_db(error: float | None) -> str:
    """Return the SQNR of the final latents for a normalised squared error."""
    import math

    return "–" if error is None else "exact" if not error else f"{-10 * math.log10(error):.2f}"


def calibrated(job: Job, path: Path) -> None:
    """Print the path of the statistics, and their use."""
    if job.finished:
        echo(f"already done: {path} holds the statistics of this recipe and model")
    else:
        echo(f"statistics of {job.calibration.count} images in {path}")
    if not any(plan.static_groups() for plan in job.plans):
        echo(f"recipe {job.recipe_name} stores no input scale, so `fluxq quantize` has no use for them")
        return
    if job.fitted:
        echo("they widen input scales; layers are fitted to calls that `fluxq quantize` captures itself")
    echo(f"next: {_quantizing(job.options)} --statistics {shlex.quote(str(path))}")


def _quantizing(options: JobOptions) -> str:
    """Return the command that quantizes the model of a job."""
    words = [options.model] if options.model else []
    words += ["--recipe", options.recipe]
    words += ["--profile", options.profile] if options.profile else []
    words += ["--components", ",".join(options.components)] if options.components else []
    words += [word for pattern in options.include for word in ("--include", pattern)]
    words += [word for pattern in options.exclude for word in ("--exclude", pattern)]
    words += [word for lora in options.lora for word in ("--lora", lora)]
    words += ["--revision", options.revision] if options.revision else []
    return f"fluxq quantize {shlex.join(words)}"


def quantized(job: Job, record: Record) -> None:
    """Print the closing table of `fluxq quantize`."""
    if job.finished:
        echo(f"already done: {job.output} holds this recipe on this model")
    parts = record.components
    columns = {part.component: _facts([part]) for part in parts}
    header = (parts[0].component, job.recipe_name)
    if len(parts) > 1:
        columns["total"] = _facts(parts)
        header = (job.recipe_name, *columns)
    rows = [(fact, *(facts[fact] for facts in columns.values())) for fact in next(iter(columns.values()))]
    rows.append(("paired PSNR", *[""] * (len(columns) - 1), _psnr(record.check)))
    if chosen := [f"{words} in {plan.component}" for plan in job.plans if (words := _attention(plan))]:
        rows.append(("attention", *[""] * (len(columns) - 1), ", ".join(chosen)))
    rows += [
        ("fused LoRA", *[""] * (len(columns) - 1), f"{f.path.name} at {f.weight:g} in {f.component}") for f in job.loras
    ]
    if not job.finished:
        rows.append(("took", *[""] * (len(columns) - 1), _duration(record.seconds)))
    print_table(header, rows)
    _decisions(parts)
    from fluxq.jobs.requirements import makes_pictures

    echo(f"checkpoint: {job.output}")
    following = "eval" if makes_pictures(job.folder) else "verify"
    echo(f"next: fluxq {following} {shlex.quote(str(job.output))}")


def judged(gate: GateOutcome) -> str:
    """Return a gate and its measured value, as in `psnr>=30 (28.1)`."""
    return f"{gate.gate} ({gate.absent if gate.value is None else f'{gate.value:.4g}'})"


def why_failed(job: Job, check: Check) -> str:
    """Return the closing check's faults in words, and the cure."""
    noun = "images" if check.frames is None else "videos"
    what = f"gate missed: {', '.join(check.missed)}"
    if not check.finite:
        what = f"NaN or infinity in the {noun}"
    elif check.flat:
        what = f"{check.flat} of {check.images} {noun} are of one colour"
    measured = f"paired PSNR {_psnr(check)}"
    kept = "the checkpoint was kept and its card says so"
    return f"{job.output}: {what} ({measured}); {kept}. Try a recipe with more bits"


def evaluated(page: Path, report: Report) -> None:
    """Print advice on which checkpoint to use, each run's verdict, main figures and gains, and the report's path."""
    from fluxq.eval.metrics.figures import stated
    from fluxq.eval.report.advice import advice
    from fluxq.eval.report.markdown import facts
    from fluxq.eval.report.summary import caches, command_for, figures_of

    echo(advice(report))
    for run in report.runs:
        echo(f"{run.name}: {run.verdict.text}")
        echo(f"  {'; '.join(figures_of(run))}")
        echo(f"  {'; '.join(facts(run))}")
        for gate in run.gates:
            echo(f"  gate {'passed' if gate.passed else 'MISSED'}: {judged(gate)}")
    for run, fewer, difference in caches(report):
        than = "not compared" if difference is None else f"{stated(difference, '.2f', 'dB', '+')} of PSNR"
        echo(f"{run.name} against {fewer.name}: {than}")
    for timed in report.timed:
        echo(f"{timed.name}: timed, its quality was not measured: {command_for(timed)}")
    for warning in report.warnings:
        echo(f"note: {warning}")
    echo(f"report: {page}")


def gated(result: GateResult) -> None:
    """Print the verdict of a gate, and what it rests on."""
    for reason in result.reasons:
        echo(reason)
    echo(f"{gate_in_words(result)} ({_duration(result.seconds)})")


def gate_in_words(result: GateResult) -> str:
    """Return the verdict of a gate in one line."""
    after = f"after {result.images} images"
    if result.verdict == "worse":
        verdicts = {key: metric.verdict for key, metric in result.metrics.items()}
        verdicts |= {"speed": result.speed.verdict} if result.speed else {}
        worse = ", ".join(key for key, verdict in verdicts.items() if verdict == "worse")
        return f"worse than A ({worse}) {after}"
    if result.verdict == "cannot tell":
        if result.speed and all(metric.verdict == "equivalent" for metric in result.metrics.values()):
            more = f"; about {result.speed.more_pairs} more pairs would" if result.speed.more_pairs else ""
            return f"images are equivalent to A's {after}, speed cannot tell{more}"
        more = "" if result.more_images is None else f"; about {result.more_images} more would"
        return f"cannot tell {after}{more}"
    return {"equivalent": f"equivalent to A {after}", "no-op": f"no change {after}, and one was expected"}[
        result.verdict
    ]


def history(rows: Sequence[HistoryRow], page: Path) -> None:
    """Print what changed in a history, and where its page is."""
    from fluxq.eval.report.past import series_of

    for series in series_of(rows):
        for sentence in series.sentences:
            echo(f"{series.subject}: {sentence}")
    echo(f"{len(rows)} runs: {page}")


def timed(speed: Speed) -> None:
    """Print median times of every stage, speed-ups, and the reasons for those that are not given."""
    from fluxq.eval.metrics.figures import plain_shape
    from fluxq.eval.metrics.schema import STEPS

    echo(f"on {speed.measured_on}")
    for condition in ("baseline", STEPS):
        if condition in speed.conditions:
            echo(f"{condition}: {speed.conditions[condition]}")
    rows = []
    for row in speed.rows:
        size = plain_shape(row)
        if row.missing is not None:
            rows.append((row.side, row.mode, size, f"not measured: {row.missing}", "", ""))
        for stage, times in row.stages.items():
            spread = times.iqr / times.p50 if times.p50 else 0.0
            rows.append(
                (row.side, row.mode, size, stage, f"{1e3 * times.p50:.1f} / {1e3 * times.p95:.1f}", f"{spread:.1%}")
            )
    noun = "images" if all(row.frames is None for row in speed.rows) else "videos"
    print_table(("side", "mode", noun, "stage", "p50 / p95, ms", "spread"), rows)
    refused: dict[str, list[str]] = {}
    for gain in speed.speedups:
        of = f"{gain.side}, {gain.stage}, {gain.mode}, {plain_shape(gain)}"
        if gain.ratio is None:
            refused.setdefault(gain.refused or "", []).append(of)
        else:
            echo(f"{of}: {_interval(gain.ratio)} times as fast as {gain.baseline}")
    for reason, which in refused.items():
        echo(f"no speed-up given of {'; '.join(dict.fromkeys(which))}: {reason}")
    if speed.served is not None:
        echo(_served(speed.served))
    for side in dict.fromkeys(card.side for card in speed.cards):
        cards = [card for card in speed.cards if card.side == side]
        fits = ", ".join(f"{card.gigabytes} GB {'yes' if card.fits else 'no'}" for card in cards)
        echo(f"{side} takes {_size(cards[0].needed)} ({cards[0].basis}); fits {fits}")
    for warning in speed.warnings:
        echo(f"note: {warning}")


def _served(served: Served) -> str:
    """Return the arithmetic that was timed, and its memory, in words."""
    from fluxq.eval.metrics.figures import computed

    memory = f"{_size(served.resident_bytes)} of quantized components in memory, {served.bits_per_weight:.2f} bits for "
    text = f"quantized layers were computed {computed(served)}: {memory}each weight"
    if served.arithmetic == "native":
        return text
    return f"{text}; that is another quality than as stored, `fluxq eval` measures it as a run of its own"


def debugged(diagnosis: Debug, patch: Path | None) -> None:
    """Print the findings, the worst layers and the path of the patch."""
    from fluxq.eval.debug.findings import about_shares

    for finding in diagnosis.findings:
        echo(finding)
    rows = [
        (layer.name, layer.scheme, _share(layer.damage), _share(layer.gain), _decibels(layer.local_sqnr_db))
        for layer in diagnosis.layers[:12]
    ]
    print_table(("layer", "scheme", "damage alone", "gone if kept", "local SQNR, dB"), rows)
    echo(about_shares(diagnosis.layers[:12]))
    if patch is not None and diagnosis.patch is not None:
        echo(f"patch: {patch}, for `fluxq quantize --recipe`")


def _interval(value: Estimate) -> str:
    limits = "" if value.low is None else f" [{value.low:.2f}, {value.high:.2f}]"
    return f"{value.mean:.2f}{limits}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _decibels(values: Sequence[float | None]) -> str:
    measured = [value for value in values if value is not None]
    return f"{min(measured):.1f} to {max(measured):.1f}" if measured else "–"


def verified(results: Sequence[Result]) -> None:
    """Print every check, and its findings beneath it."""
    for result in results:
        measured = f"; {result.measured}" if result.measured else ""
        echo(f"{result.status:<12}  {result.check:<7}  {result.about}{measured}")
        for finding in result.findings:
            echo(f"{'':<12}  {finding.where}: {finding.what}")


def passport_repeated(result: PassportResult) -> None:
    """Print how near a machine is to a checkpoint's passport, and what differs there."""
    echo(result.sentence)
    if result.made_on != result.machine:
        echo(f"made on {result.made_on}, this is {result.machine}")
    for name, (there, here) in result.versions.items():
        echo(f"{name}: {there} there, {here} here")
    if not result.exit_code:
        echo(f"{repeated_in_words(result)} ({_duration(result.seconds)})")


def repeated_in_words(result: PassportResult) -> str:
    """Return the verdict on a passport in one line."""
    return {
        "bit for bit": f"this machine repeats all {result.images} images bit for bit",
        "within the floor": f"this machine repeats all {result.images} images within the floor",
        "not": "this machine does not repeat the images of its passport",
        "cannot tell": f"{result.images} images cannot tell; `fluxq eval` writes a passport of more",
        "changed": f"not the pipeline that its passport is of: {result.sentence}",
    }[result.verdict]


def exported(done: Exported) -> None:
    """Print the files of an export, and every layer that did not keep its codes."""
    of = ", ".join(name or "the model" for name in done.components)
    if done.was_written:
        echo(f"{done.target}: written before by this command, {done.dialect} of {of}")
        return
    echo(f"wrote {done.target}: {_size(done.nbytes)}, {done.dialect} of {of}")
    echo(f"weights: {_size(done.checkpoint_bytes)} in the checkpoint -> {_size(done.weight_bytes)}")
    if done.hint:
        echo(f"hint: {done.hint}")
    counts = ", ".join(f"{count} {name}" for name, count in done.formats.items())
    echo(f"layers: {counts}; {len(done.dequantized)} quantized ones in 16 bit")
    for what, changed in (("written in 16 bit", done.dequantized), ("rounded again", done.requantized)):
        if changed:
            echo(f"{what}, {_size(sum(layer.nbytes for layer in changed))}:")
            _changes(changed)
    if done.folded:
        readers = {reader for folded in done.folded.values() for reader in folded}
        echo(f"means and factors of {len(readers)} layers were folded into {len(done.folded)} that make their inputs")
    for name in done.in_16_bit:
        echo(f"{name}: the pipeline's other quantized component, written in 16 bit")
    for note, count in done.notes.items():
        echo(f"note ({count} layers): {note}")


def _changes(changed: Sequence[Changed]) -> None:
    """Print a line for all layers with the same change for the same reason; names are never cut."""
    from fluxq.recipes.family import compact

    alike: dict[tuple[str, str, str], list[Changed]] = {}
    for layer in changed:
        alike.setdefault((layer.was, layer.now, layer.why), []).append(layer)
    for (was, now, why), layers in alike.items():
        added = max(layer.added_error for layer in layers)
        names = f"{compact(layer.name for layer in layers)} ({len(layers)} layers)"
        echo(f"  {names}: {was} -> {now}, adds {added:.2%} at most: {why}")


def families(models: Sequence[CatalogueModel], recipes: Sequence[str], *, in_detail: bool) -> None:
    """Print published models under recipes: a line for each, or in detail every kind of Linear."""
    from fluxq.jobs import catalogue

    if not in_detail:
        header, rows = catalogue.table(models, recipes)
        echo(f"under a recipe: {catalogue.CELL}")
        echo(f"in a card: {catalogue.FIT}\n")
        print_table(tuple(f"{name}: bits / GB / GB" if name in recipes else name for name in header), rows)
        echo("`fluxq families NAME` shows a model, a family or a class under every recipe; --recipe picks some")
        return
    for model in models:
        _family(model, recipes)


def _family(model: CatalogueModel, recipes: Sequence[str]) -> None:
    from fluxq.jobs import catalogue

    row, family, number = model.row, model.family, catalogue.digits
    also = f" (and {', '.join(row.also)})" if row.also else ""
    echo(f"{row.name}{also}: {family.model} of {family.library}, family {family.name}")
    each = f", {row.count} of them together" if row.count > 1 else ""
    billions = model.parameters / 1e9
    counted = f"{number(billions)} B" if billions >= 1 else f"{number(1e3 * billions)} M"
    size = f"{counted} parameters{each}, {_size(model.bytes_16bit)} in 16 bit"
    echo(f"{size}; {model.quantized_share:.1%} of the parameters are quantized")
    rows = [
        (
            role["role"],
            str(role["linears"]),
            number(role["weights"] / 1e6),
            ", ".join(f"{n}×{k}" for n, k in role["shapes"][:3]) + (", …" if len(role["shapes"]) > 3 else ""),
            role["reason"] or f"{role['made_by']}, read by {' | '.join(role['together'])}",
        )
        for role in model.roles()
    ]
    print_table(("role", "Linears", "M weights", "N×K", "input, or why not"), rows)
    sizes = [model.size(recipe) for recipe in recipes]
    rows = [
        (
            size.recipe,
            catalogue.bits(size),
            _size(size.checkpoint_bytes),
            _size(size.serving_bytes),
            _size(size.quantizing_bytes),
        )
        for size in sizes
    ]
    print_table(("recipe", "bits per weight", "checkpoint", "to serve", "to quantize"), rows, right=True)
    if model.activation_bytes:
        echo(f"to serve: weights as stored, and {_size(model.activation_bytes)} of activations, estimated")
    echo("to quantize: what rounding to nearest holds of the weights; the program itself takes another 0.7 GB")
    if model.choices:
        echo(f"{catalogue.FIT}:")
        print_table(("memory", "fits"), [(catalogue.card(each), model.fits(each)) for each in catalogue.CARDS])
    echo()


def environment(report: dict[str, Any]) -> None:
    """Print versions, devices, what is lacking, the implementation of each scheme, and the variables that are set."""
    driver = {"driver": report["driver"]} if report["driver"] else {}
    for name, value in {**report["versions"], **driver, **report["variables"]}.items():
        echo(f"{name:<16}  {value}")
    for device in report["devices"]:
        memory = f"{device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else ""
        facts = [device["name"], memory, device["capability"]]
        echo(f"{device['device']:<16}  {', '.join(fact for fact in facts if fact)}")
    for words in report["lacking"]:
        echo(f"{'lacking':<16}  {words}")
    echo()
    columns = ("op", "scheme", "recipes", "device", "implementation", "reason")
    print_table(columns, [tuple(row[column] for column in columns) for row in report["implementations"]])


def _cost(component: str, cost: Cost) -> None:
    """Print memory and modelled time of a forward pass, by part of the model."""
    forward, total, device = cost.forward, cost.total, cost.device
    tokens = f"{forward.image} image and {forward.text} text tokens"
    tokens += f", {forward.batch} sequences" if forward.batch > 1 else ""
    echo(f"\n{component} on one {device.name}, one step, modelled, not measured: {tokens}")
    header = ("part", "layers", "stored", "at run time", "work", "fused", "unfused", "over 16 bit")
    rows = [
        (
            part.name,
            str(part.layers or ""),
            _size(part.stored_bytes) if part.layers else "",
            _size(part.resident_bytes) if part.layers else "",
            _work(part.flops) if part.flops else "",
            _duration(part.seconds["fused"]),
            _duration(part.seconds["unfused"]),
            f"{part.speedup:.2f}x",
        )
        for part in (*cost.parts, total)
    ]
    print_table(header, rows, right=True)
    echo(f"16 bit, unfused: {_duration(total.seconds_16bit)}; `over 16 bit` is that over fused")
    echo(f"memory: Linears only, of {device.memory:g} GB; not the other components, activations or buffers")
    for scheme, route in cost.routes.items():
        echo(f"{scheme}: {route.about}")
    echo(f"attention: {cost.attention_in_words}")
    echo(f"peaks: {device.source}")
    for name, efficiency in cost.efficiencies().items():
        echo(f"efficiency of {name}: {efficiency}")


def _facts(parts: list[RecordedComponent]) -> dict[str, str]:
    """Return the closing table's lines about components together."""
    from fluxq.quantize.record import bits_per_weight

    before, after = sum(part.bytes_before for part in parts), sum(part.bytes_after for part in parts)
    layers, quantized = sum(len(part.layers) for part in parts), sum(len(part.quantized) for part in parts)
    return {
        "layers quantized": f"{quantized} of {layers} Linears",
        "bits per weight": f"{bits_per_weight(parts):.2f} (all Linears)",
        "size": f"{_size(before)} -> {_size(after)} ({after / before:.0%})",
        "layers' SQNR": _layers_sqnr(parts),
    }


def _layers_sqnr(parts: list[RecordedComponent]) -> str:
    """Return the gain of fitting, in words; where nothing was fitted, the SQNR of the weights.

    Not both: fitting moves weights away from the originals so that outputs come nearer.
    """
    from fluxq.quantize.record import fitted_db

    if sqnr := fitted_db([group for part in parts for group in part.groups]):
        return f"{sqnr[0]:.1f} -> {sqnr[1]:.1f} dB by fitting (outputs, held out)"
    errors = [la.weight_sqnr_db for part in parts for la in part.layers if la.weight_sqnr_db is not None]
    return f"{sum(errors) / len(errors):.1f} dB (weights)" if errors else "exact"


def _decisions(parts: list[RecordedComponent]) -> None:
    """Print the stages that were kept, and the layers' gain, by role; nothing where nothing was tried."""
    from fluxq.quantize.record import fitted_db

    rows = []
    for part in parts:
        role_of = {layer.name: layer.role for layer in part.layers}
        by_role: dict[str, list[Group]] = {}
        for group in part.groups:
            by_role.setdefault(role_of[group.layers[0]], []).append(group)
        for role, groups in by_role.items():
            tried = dict.fromkeys(stage.name for group in groups for stage in group.stages)
            kept = [stage.name for group in groups for stage in group.stages if stage.kept]
            if tried:
                gained = [_gain(fitted_db(groups, of)) for of in ("all", "median", "low")]
                words = ", ".join(f"{name} {kept.count(name)}" for name in tried if name != "all") or "nothing"
                rows.append((role, str(len(groups)), *gained, words))
    if rows:
        print_table(
            ("role", "inputs", "held-out SQNR, dB", "median token", "10th percentile", "kept, of so many inputs"), rows
        )


def _gain(db: tuple[float, float] | None) -> str:
    return f"{db[0]:.1f} -> {db[1]:.1f}" if db else "not measured"


def advised(file: Path, advice: Advice, model: str) -> None:
    """Print which recipe was chosen, what it takes, and what comes next. model: as the hub has it."""
    where = "at once" if advice.holding.word == "all" else "each part in its turn"
    time = "" if advice.milliseconds is None else f", a step in {advice.milliseconds:.0f} ms"
    echo(f"{advice.recipe}: {_size(advice.peak)} of {_size(advice.holding.room)}, {where}{time} (modelled, not run)")
    if advice.encoders:
        echo("it counts on quantized text encoders: add --components transformer,text_encoder,… as the model has them")
    echo(f"recipe: {file}")
    echo(f"next: fluxq quantize {shlex.join([model, '--recipe', str(file)])}")


def checked(files: Sequence[str]) -> None:
    """Print the recipe files in which nothing is wrong."""
    for file in files:
        echo(f"{file}: nothing is wrong with it")


def warmed(rows: list[dict[str, Any]]) -> None:
    """Print the launches, with the time of the first, which compiles, and of a second."""
    header = ("scheme", "N x K", "tokens", "implementation", "first launch s", "again ms")
    texts = [
        (
            row["scheme"],
            "{} x {}".format(*row["shape"]),
            str(row["m"]),
            row["implementation"],
            f"{row['first_s']:.2f}",
            f"{1e3 * row['again_s']:.2f}",
        )
        for row in rows
    ]
    print_table(header, texts)
    echo(f"{len(rows)} launches, {sum(row['first_s'] for row in rows):.1f} s")


def examined(examination: Examination) -> None:
    """Print each kernel and shape: how near to its bound, its time, and what else computes the same."""
    from fluxq.kernels.findings import told

    machine = examination.machine
    echo(", ".join(f"{name} {word}" for name, word in machine.items() if word))
    header = ("op", "format", "layer", "M x N x K", "error / bound", "us", "beside", "chosen")
    rows = []
    for row in examination.rows:
        share = "inf" if row["share"] is None else f"{row['share']:.2f}"
        beside = ", ".join(f"{name} {us / row['us']:.2f}x" for name, us in row["beside"].items())
        us = "" if row["us"] is None else f"{row['us']:.1f}"
        shape = "{} x {} x {}".format(*(row[name] for name in "mnk"))
        verdict = "WRONG" if row["why"] else "yes" if row["chosen"] else ""
        rows.append((row["op"], row["format"], row["scheme"], shape, share, us, beside, verdict))
    print_table(header, rows)
    for row in examination.wrong:
        echo(f"WRONG: {told(row)}: {row['why']}")
    for title, notes in (("not compared", examination.uncompared), ("left out", examination.left_out)):
        for what, why in notes.items():
            echo(f"{title}: {what}: {why}")
    kept = f"written to {examination.file}" if examination.file else f"not kept: {examination.not_kept}"
    echo(
        f"{len(examination.rows)} results, {len(examination.wrong)} wrong, "
        f"{len(examination.uncompared)} not compared; {kept}"
    )
    if any(row["beside"] for row in examination.rows):
        echo("beside: their time over ours, above 1 ours is faster")


def _psnr(check: Check | None) -> str:
    if check is None:
        return "not measured (--no-check)"
    number = amount(check.images, check.frames)
    if check.mean_psnr_db is None:
        return f"identical ({number})" if check.finite else "not finite"
    return f"{check.mean_psnr_db:.1f} dB ({number}, {check.listed or f'{check.steps} steps'})"


def _summary(component: Plan) -> None:
    attention = f", attention in {words}" if (words := _attention(component)) else ""
    steps = f", {component.steps} {component.steps.how}" if component.steps else ""
    steps += f", {100 * component.compute:g}% of the steps of a call computed" if component.compute else ""
    counts = f"{len(component.quantized)} of {len(component.layers)} Linears quantized"
    echo(f"{component.component}: {counts}, {_bits(component)}{attention}{steps}")


def _attention(component: Plan) -> str:
    """Return the arithmetic of a component's attention, "" for 16 bit."""
    from fluxq.recipes.computing import attention_in_words

    return "" if component.attention == "16bit" else attention_in_words(component.attention)


def _bits(component: Plan) -> str:
    """Return the bits of the formats alone; only fitting decides about the rest."""
    bits, most = f"{component.bits_per_weight:.2f}", f"{component.most_bits_per_weight:.2f}"
    if bits == most:
        return f"{bits} bits per weight"
    tried = dict.fromkeys(name for layer in component.quantized for name in layer.method.stored)
    return f"{bits} bits per weight before fitting, at most {most} with what it keeps of {', '.join(tried)}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> None:
    """Print rows in columns. right: align all columns but the first, which are numbers, to the right.

    Where a terminal is too narrow for sentences in the last column, these are wrapped, or stand below their rows.
    """
    widths = [max(width(row[column]) for row in (header, *rows)) for column in range(len(header))]
    before = sum(widths[:-1]) + len(_GAP) * (len(header) - 1)
    room = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else before + widths[-1]
    has_sentences = not right and widths[-1] > _NARROWEST and any(" " in row[-1] for row in rows)

    def padded(cells: Sequence[str]) -> str:
        parts = []
        for column, cell in enumerate(cells):
            blank = " " * (widths[column] - width(cell))
            parts.append(blank + cell if right and column else cell + blank)
        return _GAP.join(parts).rstrip()

    def line(row: Sequence[str]) -> str:
        if not has_sentences or before + widths[-1] <= room:
            return padded(row)
        if room - before < _NARROWEST:
            below = textwrap.wrap(row[-1], room - len(_INDENT))
            return "\n".join([padded(row[:-1]), *(_INDENT + rest for rest in below)])
        first, *more = textwrap.wrap(row[-1], room - before) or [""]
        return "\n".join([padded([*row[:-1], first]), *(" " * before + rest for rest in more)])

    echo(line(header), bold=True)
    for row in rows:
        echo(line(row))


def echo(text: str = "", *, bold: bool = False) -> None:
    """Print text for people, which may hold names that strangers chose."""
    click.echo(click.style(visible(text), bold=True) if bold else visible(text))
