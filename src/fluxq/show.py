"""What the commands print for people; rich is imported when something is printed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fluxq.catalogue import Model
    from fluxq.eval.schema import Debug, Estimate, Report, Speed
    from fluxq.memory import Demand
    from fluxq.prepared import Prepared
    from fluxq.quantize.exchange.export import Exported
    from fluxq.quantize.verify import Result
    from fluxq.recipes.cost import Cost
    from fluxq.recipes.plan import Plan


def plan(prepared: Prepared, costs: dict[str, Cost], demands: Sequence[Demand | None] = ()) -> None:
    """Every Linear with formats, bits and reason, and the mean; with `costs`, those instead of the Linears.

    demands: of quantizing, on each device; the least that it may be given is said.
    """
    for component in prepared.plans:
        if costs:
            _summary(component)
            continue
        rows = [
            (
                layer.name,
                f"{layer.n}×{layer.k}",
                str(layer.scheme or "16bit"),
                f"{layer.bits_per_weight:.2f}",
                layer.reason,
            )
            for layer in component.layers
        ]
        _table(("layer", "N×K", "weights-activations", "bits", "reason"), rows)
        _summary(component)
    for component, cost in costs.items():
        _cost(component, cost)
    for each in filter(None, demands):
        click.echo(f"--max-memory with --device {each.device}: at least {each}")


def plan_json(prepared: Prepared, costs: dict[str, Cost]) -> dict[str, Any]:
    """The plans as JSON; with `costs`, those too, under `cost`."""
    plans = {plan.component: [layer.describe() for layer in plan.layers] for plan in prepared.plans}
    return {**plans, "cost": {name: cost.describe() for name, cost in costs.items()}} if costs else plans


def calibrated(prepared: Prepared, path: Path) -> None:
    """Where the statistics are and what they are for."""
    click.echo(f"statistics of {prepared.calibration.count} images in {path}")
    if not any(plan.static_groups() for plan in prepared.plans):
        click.echo(f"recipe {prepared.recipe_name} stores no input scale, so `fluxq quantize` has no use for them")
        return
    if prepared.fitted:
        click.echo("they widen input scales; layers are fitted to calls that `fluxq quantize` captures itself")
    options = prepared.options
    again = [options.model] if options.model else []
    again += ["--recipe", options.recipe]
    again += ["--profile", options.profile] if options.profile else []
    again += ["--components", ",".join(options.components)] if options.components else []
    again += [word for lora in options.lora for word in ("--lora", lora)]
    again += ["--revision", options.revision] if options.revision else []
    click.echo(f"next: fluxq quantize {shlex.join([*again, '--statistics', str(path)])}")


def quantized(prepared: Prepared, record: dict[str, Any]) -> None:
    """The closing table of `fluxq quantize`."""
    if prepared.finished is not None:
        click.echo(f"already done: {prepared.output} holds this recipe on this model")
    parts = record["components"]
    columns = {part["component"]: _facts(part) for part in parts}
    if len(parts) == 1:
        (component,) = columns
        header = (component, prepared.recipe_name)
    else:
        columns["total"] = _facts(_together(parts))
        header = (prepared.recipe_name, *columns)
    rows = [(fact, *(facts[fact] for facts in columns.values())) for fact in next(iter(columns.values()))]
    rows.append(("paired PSNR", *[""] * (len(columns) - 1), _psnr(record["check"])))
    if chosen := [f"{plan.attention} in {plan.component}" for plan in prepared.plans if plan.attention != "16bit"]:
        rows.append(("attention", *[""] * (len(columns) - 1), ", ".join(chosen)))
    rows += [
        ("fused LoRA", *[""] * (len(columns) - 1), f"{f.path.name} at {f.weight:g} in {f.component}")
        for f in prepared.loras
    ]
    _table(header, rows)
    _decisions(parts)
    from fluxq.requirements import makes_video

    click.echo(f"checkpoint: {prepared.output}")
    click.echo(f"next: fluxq {'verify' if makes_video(prepared.folder) else 'eval'} {prepared.output}")


def why_failed(prepared: Prepared, check: dict[str, Any]) -> str:
    """What the closing check found, and what to do."""
    what = "NaN or infinity in the images" if not check["finite"] else f"gate missed: {', '.join(check['missed'])}"
    measured = f"paired PSNR {_psnr(check)}"
    kept = "the checkpoint was kept and its card says so"
    return f"{prepared.output}: {what} ({measured}); {kept}. Try a recipe with more bits"


def evaluated(page: Path, report: Report) -> None:
    """Each run's verdict and what it buys, and where the report is."""
    from fluxq.eval.markdown import facts

    for run in report.runs:
        click.echo(f"{run.name}: {run.verdict.text}")
        click.echo(f"  {'; '.join(facts(run))}")
        for gate in run.gates:
            value = "not measured" if gate.value is None else f"{gate.value:.4g}"
            click.echo(f"  gate {gate.gate}: {'passed' if gate.passed else 'MISSED'} ({value})")
    for warning in report.warnings:
        click.echo(f"note: {warning}")
    click.echo(f"report: {page}")


def timed(speed: Speed) -> None:
    """Median times of every stage, what was gained, and what was not said because it was not certain."""
    click.echo(f"on {speed.measured_on}")
    if "baseline" in speed.conditions:
        click.echo(f"baseline: {speed.conditions['baseline']}")
    rows = []
    for row in speed.rows:
        size = f"{row.batch} x {row.height}x{row.width}"
        if row.missing is not None:
            rows.append((row.side, row.mode, size, f"not measured: {row.missing}", "", ""))
        for stage, times in row.stages.items():
            spread = times.iqr / times.p50 if times.p50 else 0.0
            rows.append(
                (row.side, row.mode, size, stage, f"{1e3 * times.p50:.1f} / {1e3 * times.p95:.1f}", f"{spread:.1%}")
            )
    _table(("side", "mode", "images", "stage", "p50 / p95, ms", "spread"), rows)
    for gain in speed.speedups:
        size = f"{gain.batch} x {gain.height}x{gain.width}"
        said = f"no speed-up given: {gain.refused}"
        if gain.ratio is not None:
            said = f"{_interval(gain.ratio)} times as fast as {gain.baseline}"
        click.echo(f"{gain.side}, {gain.stage}, {gain.mode}, {size}: {said}")
    for side in dict.fromkeys(card.side for card in speed.cards):
        cards = [card for card in speed.cards if card.side == side]
        fits = ", ".join(f"{card.gigabytes} GB {'yes' if card.fits else 'no'}" for card in cards)
        click.echo(f"{side} takes {cards[0].needed / 1e9:.2f} GB ({cards[0].basis}); fits {fits}")
    for warning in speed.warnings:
        click.echo(f"note: {warning}")


def debugged(found: Debug, patch: Path | None) -> None:
    """What was found, the worst layers and the patch."""
    for finding in found.findings:
        click.echo(finding)
    rows = [
        (layer.name, layer.scheme, _share(layer.damage), _share(layer.gain), _decibels(layer.local_sqnr_db))
        for layer in found.layers[:12]
    ]
    _table(("layer", "scheme", "damage alone", "gain if kept", "local SQNR, dB"), rows)
    if found.patch is None:
        return
    fix = found.patch
    click.echo(
        f"patch: {len(fix.layers)} layers in {fix.format}, "
        f"{fix.bits_before:.2f} -> {fix.bits_after:.2f} bits per weight; "
        f"latents {_number(fix.before_sqnr_db)} -> {_number(fix.measured_sqnr_db)} dB, "
        f"predicted {_number(fix.predicted_sqnr_db)}: {patch}"
    )


def _interval(value: Estimate) -> str:
    limits = "" if value.low is None else f" [{value.low:.2f}, {value.high:.2f}]"
    return f"{value.mean:.2f}{limits}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _decibels(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{min(known):.1f} to {max(known):.1f}" if known else "–"


def verified(results: Sequence[Result]) -> None:
    """Every check, and beneath it what it found."""
    for result in results:
        click.echo(f"{result.status:<12}  {result.check:<7}  {result.about}")
        for finding in result.findings:
            click.echo(f"{'':<12}  {finding.where}: {finding.what}")


def exported(done: Exported) -> None:
    """What an export wrote, and every layer that did not keep its codes."""
    of = ", ".join(name or "the model" for name in done.components)
    click.echo(f"wrote {done.target}: {_size(done.nbytes)}, {done.dialect} of {of}")
    held = ", ".join(f"{count} {name}" for name, count in done.formats.items())
    click.echo(f"layers: {held}; {len(done.dequantized)} quantized ones in 16 bit")
    for what, changed in (("written in 16 bit", done.dequantized), ("rounded again", done.requantized)):
        if changed:
            click.echo(f"{what}, {_size(sum(layer.nbytes for layer in changed))}:")
            rows = [(c.name, f"{c.was} -> {c.now}", _size(c.nbytes), f"{c.added_error:.2%}", c.why) for c in changed]
            _table(("layer", "scheme", "size", "added error", "because"), rows)
    if done.folded:
        readers = sum(map(len, done.folded.values()))
        click.echo(f"means and factors of {readers} layers were folded into {len(done.folded)} modulations")
    for name in done.in_16_bit:
        click.echo(f"{name}: the pipeline's other quantized component, written in 16 bit")
    for note, count in done.notes.items():
        click.echo(f"note ({count} layers): {note}")


def families(found: Sequence[Model], recipes: Sequence[str], *, in_detail: bool) -> None:
    """Published models and what recipes make of them: a line for each, or with what becomes of each kind of Linear."""
    from fluxq import catalogue

    if not in_detail:
        _table(*catalogue.table(found, recipes))
        click.echo(f"under a recipe: {catalogue.CELL}")
        click.echo("`fluxq families NAME` shows a model, a family or a class under every recipe; --recipe picks some")
        return
    for model in found:
        _family(model, recipes)


def _family(model: Model, recipes: Sequence[str]) -> None:
    from fluxq import catalogue

    row, family, number = model.row, model.family, catalogue.digits
    also = f" (and {', '.join(row.also)})" if row.also else ""
    click.echo(f"{row.name}{also}: {family.model} of {family.library}, family {family.name}")
    each = f", {row.count} of them together" if row.count > 1 else ""
    size = f"{number(model.parameters / 1e9)} B parameters{each}, {number(model.bytes_16bit / 1e9)} GB in 16 bit"
    click.echo(f"{size}; {model.quantized_share:.1%} of the parameters are quantized")
    rows = [
        (
            role.role or "16 bit",
            str(role.count),
            number(role.weights / 1e6),
            ", ".join(f"{n}×{k}" for n, k in role.shapes[:3]) + (", …" if len(role.shapes) > 3 else ""),
            f"{role.made_by}, read by {' | '.join(role.together)}" if role.role else role.reason,
        )
        for role in model.roles()
    ]
    _table(("role", "Linears", "M weights", "N×K", "input, or why not"), rows)
    sizes = [model.size(recipe) for recipe in recipes]
    rows = [
        (
            size.recipe,
            catalogue.bits(size),
            number(size.checkpoint_bytes / 1e9),
            number(size.serving_bytes / 1e9),
            number(size.quantizing_bytes / 1e9),
        )
        for size in sizes
    ]
    _table(("recipe", "bits per weight", "checkpoint, GB", "to serve, GB", "to quantize, GB"), rows, right=True)
    if model.activation_bytes:
        activations = f"{number(model.activation_bytes / 1e9)} GB of activations, estimated"
        click.echo(f"to serve: weights as stored, and {activations}")
    click.echo("to quantize: what rounding to nearest holds of the weights; the program itself takes another 0.7 GB\n")


def environment(report: dict[str, Any]) -> None:
    """Versions, devices, what computes each scheme, and the variables that are set."""
    driver = {"driver": report["driver"]} if report["driver"] else {}
    for name, value in {**report["versions"], **driver, **report["variables"]}.items():
        click.echo(f"{name:<16}  {value}")
    for device in report["devices"]:
        memory = f"{device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else ""
        facts = [device["name"], memory, device["capability"]]
        click.echo(f"{device['device']:<16}  {', '.join(fact for fact in facts if fact)}")
    click.echo()
    columns = ("op", "scheme", "recipes", "device", "implementation", "reason")
    _table(columns, [tuple(row[column] for column in columns) for row in report["implementations"]])


def _cost(component: str, cost: Cost) -> None:
    """Memory and modelled time of a forward pass, by part of the model."""
    forward, total, device = cost.forward, cost.total, cost.device
    tokens = f"{forward.image} image and {forward.text} text tokens"
    tokens += f", {forward.batch} sequences" if forward.batch > 1 else ""
    click.echo(f"\n{component} on one {device.name}, one step, modelled, not measured: {tokens}")
    header = ("part", "layers", "GB stored", "GB at run time", "TFLOP", "ms fused", "ms unfused", "over 16 bit")
    rows = [
        (
            part.name,
            str(part.layers or ""),
            _digits(part.stored_bytes / 1e9) if part.layers else "",
            _digits(part.resident_bytes / 1e9) if part.layers else "",
            _digits(part.flops / 1e12) if part.flops else "",
            _digits(1e3 * part.seconds["fused"]),
            _digits(1e3 * part.seconds["unfused"]),
            f"{part.speedup:.2f}x",
        )
        for part in (*cost.parts, total)
    ]
    _table(header, rows, right=True)
    click.echo(f"16 bit, unfused: {_digits(1e3 * total.seconds_16bit)} ms; `over 16 bit` is that over fused")
    click.echo(f"memory: Linears only, of {device.memory:g} GB; not the other components, activations or buffers")
    for scheme, route in cost.routes.items():
        click.echo(f"{scheme}: {route.about}")
    click.echo(f"attention: {cost.attention.about}")
    click.echo(f"peaks: {device.source}")
    for name, efficiency in cost.efficiencies().items():
        click.echo(f"efficiency of {name}: {efficiency}")


def _facts(part: dict[str, Any]) -> dict[str, str]:
    """What the closing table says of a component, or of all together."""
    done = [layer for layer in part["layers"] if layer["scheme"] != "16bit"]
    errors = [layer["weight_sqnr_db"] for layer in done if layer["weight_sqnr_db"] is not None]
    before, after = part["bytes_before"], part["bytes_after"]
    return {
        "layers quantized": f"{len(done)} of {len(part['layers'])} Linears",
        "bits per weight": f"{part['bits_per_weight']:.2f} (all Linears)",
        "size": f"{_size(before)} -> {_size(after)} ({after / before:.0%})",
        "mean layer SQNR": f"{sum(errors) / len(errors):.1f} dB (weights)" if errors else "exact",
    }


def _decisions(parts: list[dict[str, Any]]) -> None:
    """What was kept, and what the layers' outputs gained by it, by role; nothing where nothing was tried."""
    rows = []
    for part in parts:
        role_of = {layer["name"]: layer["role"] for layer in part["layers"]}
        by_role: dict[str, list[dict[str, Any]]] = {}
        for group in part["groups"]:
            by_role.setdefault(role_of[group["layers"][0]], []).append(group)
        for role, groups in by_role.items():
            tried = dict.fromkeys(stage["name"] for group in groups for stage in group["stages"])
            kept = [stage["name"] for group in groups for stage in group["stages"] if stage["kept"]]
            if tried:
                before, after = (_mean(group[key] for group in groups) for key in ("sqnr_before_db", "sqnr_db"))
                words = ", ".join(f"{name} {kept.count(name)}" for name in tried)
                rows.append((role, str(len(groups)), f"{before} -> {after}", words))
    if rows:
        _table(("role", "inputs", "held-out SQNR, dB", "kept, of so many inputs"), rows)


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f}" if known else "not measured"


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several components as if they were one."""
    layers = [layer for part in parts for layer in part["layers"]]
    weights = [layer["shape"][0] * layer["shape"][1] for layer in layers]
    bits = sum(layer["bits_per_weight"] * count for layer, count in zip(layers, weights, strict=True))
    return {
        "layers": layers,
        "bits_per_weight": bits / sum(weights),
        "bytes_before": sum(part["bytes_before"] for part in parts),
        "bytes_after": sum(part["bytes_after"] for part in parts),
    }


def warmed(rows: list[dict[str, Any]]) -> None:
    """What was launched, and how much of its first launch was compiling."""
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
    _table(header, texts)
    click.echo(f"{len(rows)} launches, {sum(row['first_s'] for row in rows):.1f} s")


def _psnr(check: dict[str, Any] | None) -> str:
    if check is None:
        return "not measured (--no-check)"
    if check["mean_psnr_db"] is None:
        return f"identical images ({check['images']})" if check["finite"] else "not finite"
    return f"{check['mean_psnr_db']:.1f} dB ({check['images']} images, {check['steps']} steps)"


def _summary(component: Plan) -> None:
    attention = "" if component.attention == "16bit" else f", attention in {component.attention}"
    steps = f", {component.steps} in 16 bit" if component.steps else ""
    bits = f"{component.bits_per_weight:.2f} bits per weight"
    click.echo(f"{component.component}: {_counts(component)}, {bits}{attention}{steps}")


def _counts(component: Plan) -> str:
    return f"{len(component.quantized)} of {len(component.layers)} Linears quantized"


def _digits(value: float) -> str:
    """Three of them, which is more than a model can promise."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _size(nbytes: int) -> str:
    unit, name = (1e9, "GB") if nbytes >= 1e9 else (1e6, "MB")
    return f"{nbytes / unit:.2f} {name}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]], *, right: bool = False) -> None:
    """Print a table; right: numbers, all columns but the first, end in line."""
    from rich.console import Console
    from rich.table import Table

    table = Table(header[0], box=None, pad_edge=False, header_style="bold")
    for name in header[1:]:
        table.add_column(name, justify="right" if right else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a pipe has no width, and cut names would be useless there
    console.print(table)
