"""Read and check a request for formats under a budget: units, options, costs, images, and a digest of all that decides.

Images that decide are not those that errors are measured on: their noise is another, and their prompts where there are
enough.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

import fluxq
from fluxq.base.console import logger
from fluxq.base.files import sha256_file, sha256_json
from fluxq.base.model import DEFAULT_MODEL, resolve_model
from fluxq.base.output import Output, job_digest, plain_path
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.adjoint import PROBES
from fluxq.calibrate.capture import Item, number_of_steps
from fluxq.calibrate.errors import MEASURES, SIXTEEN_BIT, ErrorTable, Measure
from fluxq.jobs import memory
from fluxq.jobs.fitted import fitted_of
from fluxq.jobs.hub import require_pushable
from fluxq.jobs.job import Job, JobOptions, Run, decisive, is_finished, require_no_other
from fluxq.jobs.listing import items_of_list, listed_call
from fluxq.jobs.menu import Costs, Offer, modelled_ms, offer_of, stored_bits, stored_size
from fluxq.jobs.planning import job_of, settle_by
from fluxq.jobs.requirements import output_for, reads_of, require_steps
from fluxq.jobs.seat import Seat, seat_of
from fluxq.quantize.checkpoint import digest_rest
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.structure import component_family, denoisers_of
from fluxq.recipes.budget import extremes, total
from fluxq.recipes.devices import find_device
from fluxq.recipes.family import matches
from fluxq.recipes.plan import component_recipe
from fluxq.recipes.recipe import Recipe, latent_bound, load_recipe
from fluxq.runtime.place import room_of
from fluxq.runtime.step_trials import FORMS
from fluxq.runtime.step_trials import IMAGES as IMAGES_OF_LIST

Kind = Literal["bits", "size", "vram", "ms", "gate"]
IMAGES, MOST_IMAGES = 8, 10_000  # that errors are measured on
ROUNDS = (2, 2)  # times as many decide, the second round only between plans that the first leaves open
_TOO_LARGE = 1e18  # of bytes, bits or milliseconds
MOST_PLANS = 8  # that are run before swaps, and swaps or corrections of a gate
MOST_SHARES = 5  # numbers of computed steps that are run before swaps
_JUDGING_SEEDS = 1 << 21  # calibration's begin at 1 << 20, those of evaluation at 0


@dataclass(frozen=True)
class AutoOptions:
    """Options of a search beside those of its job, as a recipe's `Auto` and `fluxq.auto` describe them.

    bits: before fitting. size, vram: bytes; the former of all weights of the checkpoint, whatever fitting keeps.
    gate: the least cost that holds it, in time where `gpu` is given, else in bytes.
    menu: () for the usual formats. dialect: a key of WRITERS as commands spell it. measure: None for every way that the
    model allows. fitted: checkpoints, of which the first gives all that is not chosen.
    """

    bits: float | None = None
    size: int | None = None
    vram: float | None = None
    ms: float | None = None
    gate: str | None = None
    gpu: str | None = None
    times: Path | None = None
    menu: tuple[str, ...] = ()
    dialect: str | None = None
    measure: Measure | None = None
    count: int = IMAGES
    modulation: bool = False
    attention: bool = False
    steps: bool = False
    fitted: tuple[str, ...] = ()
    assemble: str | None = None

    @property
    def budget(self) -> tuple[Kind, Any]:
        """Kind and value of the budget; ValueError unless there is exactly one."""
        given = {kind: value for kind in get_args(Kind) if (value := getattr(self, kind)) is not None}
        if len(given) != 1:
            ways = "--bits, --size, --vram, --ms or --gate"
            raise ValueError(
                f"{' and '.join(f'--{kind}' for kind in given)} are {len(given)} budgets: give one"
                if given
                else f"no budget: give one of {ways}"
            )
        return next(iter(given.items()))

    @property
    def is_of_time(self) -> bool:
        """True if costs are modelled milliseconds."""
        kind, _ = self.budget
        return kind == "ms" or (kind == "gate" and self.gpu is not None)


@dataclass(frozen=True)
class Search:
    """All inputs of a search, read and checked.

    job: of which the base recipe is; its output is the recipe's file.
    costs: of options, in the unit of the budget: bits, bytes · 8 or milliseconds.
    limit: of the cost, infinite under a gate.
    seat: placement on a card, None without --vram.
    """

    job: Job
    options: AutoOptions
    offer: Offer
    costs: Costs
    limit: float
    seat: Seat | None = None

    @cached_property
    def measuring(self) -> Sequence[Item]:
        """Images that errors are measured on."""
        count = self.options.count
        return self.job.prompts.items(count, self.job.calibration_items[0][1])

    @cached_property
    def judging(self) -> Sequence[Sequence[Item]]:
        """Images that decide, round by round: of other noise, and of other prompts where there are any."""
        count, prompts = self.options.count, self.job.prompts
        others = prompts.rows[count:] or prompts.rows
        seed = _JUDGING_SEEDS + self.job.calibration.seed
        items = ((others[index % len(others)], seed + index) for index in range(sum(ROUNDS) * count))
        return [list(islice(items, times * count)) for times in ROUNDS]

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Measures to take, the one that predicts first."""
        return (self.options.measure,) if self.options.measure else ("adjoint", "velocity")

    def table_file(self, measure: Measure) -> Path:
        """Return the place of a table, beside the recipe."""
        return self.job.output.with_name(f"{Path(self.job.folder.name).name}-{measure}-errors.safetensors")

    def table_digest(self, measure: Measure) -> str:
        """Return the digest of all that decides a table."""
        names = ("fluxq", "model", "others", "units", "prompts", "call", "steps", "dtype", "seed", "count", "fitted")
        decisive = {name: self.job.identity[name] for name in names if name in self.job.identity}
        return job_digest([measure, decisive])

    def cost(self, choice: Mapping[str, str]) -> float:
        """Return the cost of a choice and of all else."""
        return total(self.costs.numbers, choice) + self.costs.fixed

    def in_words(self, cost: float, digits: int = 2) -> str:
        """Return a cost as people read it, rounded up; of milliseconds two digits that are not 0 at least."""
        kind, per = self.unit
        if kind == "ms" and 0 < cost < 0.1:
            digits = max(digits, 1 - math.floor(math.log10(cost)))
        up = 10**digits
        return f"{math.ceil(up * cost / per - 1e-9) / up:.{digits}f} {kind}"

    @property
    def unit(self) -> tuple[str, float]:
        """Unit of costs, and the cost that it is."""
        kind, _ = self.options.budget
        if kind == "bits":
            return "bits", sum(self.offer.weights.values())
        return ("ms", 1) if self.options.is_of_time else ("GB", 8e9)

    @property
    def least_part(self) -> float:
        """Least share of the steps of a call that may be computed."""
        return 2 / number_of_steps(self.job.folder.pipeline_class, self.job.call) if self.options.steps else 1


def auto_options(recipe: Recipe, given: Mapping[str, Any]) -> AutoOptions:
    """Return the options of a search: those given, beside what the recipe says under `auto`.

    given: names of AutoOptions; None, () and False leave the recipe's value; a budget takes that of the recipe's, and
    one that is not of time its `steps`, too.
    """
    given = {name: value for name, value in given.items() if value is not None and value is not False and value != ()}
    settings = recipe.auto.model_dump(exclude_none=True) if recipe.auto else {}
    if kinds := given.keys() & {*get_args(Kind)}:
        replaced = {*get_args(Kind)} | ({"steps"} if kinds - {"ms", "gate"} else set())
        settings = {name: value for name, value in settings.items() if name not in replaced}
    merged = {**settings, **given}
    return AutoOptions(**{**merged, "menu": tuple(merged.get("menu", ()))})


def search_before(options: JobOptions, ranks: Ranks = ALONE) -> tuple[Search, JobOptions] | None:
    """Return the search that a recipe with `auto` asks for before layers are fitted, and the options of fitting.

    Recipe and tables of the search lie beside the output. None for a recipe that names all formats.
    """
    name, recipe = load_recipe(options.recipe, profile=options.profile)
    if recipe.auto is None:
        return None
    model = resolve_model(
        options.model or recipe.model or DEFAULT_MODEL,
        revision=options.revision,
        local_files_only=options.local_files_only,
    )
    if options.push_to_hub and ranks.leads:
        require_pushable(options.push_to_hub, model, options.check)
    output = output_for(options.output, model.name, name, is_file=False)
    place = output.with_name(f"{output.name}-chosen.yaml")
    search = search_of(replace(options, output=str(place), statistics=None), auto_options(recipe, {}), ranks=ranks)
    job = search.job
    is_chosen = ranks.leads and Output(job.output, True, (".json",)).holds(job_digest(decisive(job)))
    if ranks.agree(is_chosen):  # by the same command, --overwrite or not, which ended before layers were fitted
        search = replace(search, job=replace(job, finished=True))
    return search, replace(options, recipe=str(search.job.output), output=str(output))


def search_of(job_options: JobOptions, options: AutoOptions, *, writes: bool = True, ranks: Ranks = ALONE) -> Search:
    """Read and check a request; ValueError or FileNotFoundError, before anything is computed, if it cannot work."""
    _require_sound(options)
    if job_options.lora:
        raise ValueError(
            "formats are chosen for the model without a LoRA: run `fluxq auto` without it, and give the recipe that it "
            "writes to `fluxq quantize --lora`"
        )
    if options.fitted and (job_options.include or job_options.exclude):
        raise ValueError("--from takes layers as they were fitted: leave out --include and --exclude")
    plain = replace(job_options, check=False, max_memory=None)  # whose bound would be that of fitting
    job = _with_patterns(job_of(plain, writes=False, runs=False, ranks=ranks))
    require_steps(job.folder)
    if options.steps:
        _require_lists(job)
    extra = [name for name in ("modulation", "attention") if getattr(options, name)] + _weighed(job, options)
    offer = offer_of(job, options.menu, _dialect(options), fitted_of(job, options.fitted), extra)
    place = plain_path(job_options.output or recipe_file(job.folder.name, options))
    place = Output(place).place if place.is_symlink() else place  # both files have the name of what is written
    if place.suffix != ".yaml":
        raise ValueError(f"output {place}: a recipe is a .yaml file; call it {place.stem}.yaml, say")
    output = Output(place, True, (".json",))
    search = _with_budget(Search(replace(job, output=place), options, offer, Costs({}, 0), math.inf))
    reads = reads_of(job.folder.path, vars(job_options)) | {f"the checkpoint {one}": one for one in options.fitted}
    output.require(reads, overwrite=job_options.overwrite, exists_ok=True)
    if options.assemble is not None:
        _require_assemblable(search, reads | {"the recipe that is written": place}, exists_ok=True)
    if not writes:
        return search
    job = replace(search.job, run=_run(search, job_options))
    job = replace(job, identity=ranks.agree(_identity(search) if ranks.leads else None))
    search = replace(search, job=job)
    if ranks.leads and is_finished(job, output):
        search = replace(search, job=replace(job, finished=True))
    elif ranks.leads:
        require_no_other(job)
        _require_own_tables(search)
        if options.assemble is not None:  # the checkpoint of a finished search may stand there, no other
            _require_assemblable(search, reads, exists_ok=False)
    return replace(search, job=replace(search.job, finished=ranks.agree(search.job.finished)))


def _run(search: Search, job_options: JobOptions) -> Run:
    """Return where the search can run; ValueError for memory in which it cannot."""
    job = search.job
    images = memory.sizes_of([*search.measuring, *chain.from_iterable(search.judging)], job.call)
    if search.options.steps:
        images |= memory.sizes_of(items_of_list(job), job.call)
    needs = partial(
        memory.demand_of_search,
        dtype=job_options.dtype,
        folder=job.folder,
        sizes=images,
        plans=job.calibrated.values(),
        by_adjoint="adjoint" in search.measures,
    )
    return settle_by(needs, job, job_options, "--measure velocity takes less")


def _with_patterns(job: Job) -> Job:
    """Return the job with a recipe that excludes what --include and --exclude leave out: what is written is of it."""
    include, exclude = job.options.include, job.options.exclude
    if not include and not exclude:
        return job
    components = dict(job.recipe.components)
    for component, plan in job.calibrated.items():
        entry = component_recipe(job.recipe, component, component_family(job.folder, component))
        names = [layer.name for layer in plan.layers]
        left = [pattern for pattern in exclude if any(matches(pattern, name) for name in names)]
        left += [name for name in names if include and not any(matches(pattern, name) for pattern in include)]
        components[component] = entry.without(left)
    return replace(job, recipe=job.recipe.model_copy(update={"components": components}))


def _require_sound(options: AutoOptions) -> None:
    """Raise ValueError for options that mean nothing, or contradict each other."""
    kind, value = options.budget
    if kind == "gate":
        latent_bound(str(value))
    elif isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value < _TOO_LARGE):
        raise ValueError(f"--{kind} {value!r}: expected a number above 0 and below {_TOO_LARGE:g}")
    if kind == "ms" and options.gpu is None:
        raise ValueError("--ms is modelled time on a GPU: give --gpu too, as in --gpu h200")
    if options.gpu is not None:
        find_device(str(options.gpu))
    if options.attention and not options.is_of_time:
        raise ValueError(
            "--attention takes no bits and no bytes, so that all of it would stay in 16 bit; give --ms, or --gate with "
            "--gpu"
        )
    if options.attention and options.dialect:
        raise ValueError(f"--attention: files for {options.dialect} say nothing of it; leave out one of the two")
    if options.steps and not options.is_of_time:
        raise ValueError(
            f"--steps: steps that are left out save time, which --{kind} does not count; give --ms and --gpu, or "
            "--gate and --gpu"
        )
    if options.steps and options.dialect:
        raise ValueError(f"--steps: files for {options.dialect} hold no list of steps; leave out one of the two")
    if options.steps and options.fitted:
        raise ValueError(
            "--from: the list of steps is that of the first checkpoint; leave out --steps, and make one with "
            "`fluxq.skip_steps(pipe, compute=…)`"
        )
    if options.measure not in (None, *MEASURES):
        raise ValueError(f"--measure {options.measure!r}: expected one of {', '.join(MEASURES)}")
    if options.times is not None and (options.gpu is None or kind not in ("ms", "gate")):
        raise ValueError("--times are those of a step on a GPU: give --ms or --gate, and --gpu, too")
    if options.assemble is not None and not options.fitted:
        raise ValueError("--assemble puts fitted layers together: give their checkpoints, as in --from OUT1,OUT2")
    if options.fitted and kind == "vram":
        raise ValueError("--vram also chooses what the first checkpoint of --from has, text encoders: give --size")
    if options.fitted and (options.modulation or options.attention):
        raise ValueError(
            "--from: modulation and attention are those of the first checkpoint; leave out --modulation and --attention"
        )
    if options.fitted and options.dialect is not None:
        raise ValueError(
            "--for chooses before layers are fitted: leave it out, and `fluxq export` what --assemble writes"
        )
    count = options.count
    if isinstance(count, bool) or not (isinstance(count, int) and 1 <= count <= MOST_IMAGES):
        raise ValueError(
            f"--count {count!r}: expected at least one image to measure errors on, and at most {MOST_IMAGES}"
        )


def _require_lists(job: Job) -> None:
    """Raise ValueError for a job whose computed steps cannot be chosen."""
    _, total = listed_call(job.folder, job.call)
    if total < 3:
        raise ValueError(
            f"--steps: the first and the last step are always computed, and a call has {total}: leave out --steps, or "
            "give --num-inference-steps 3 or more"
        )
    denoisers = denoisers_of(job.folder)
    if len(denoisers) > 1:
        raise ValueError(
            f"--steps: {' and '.join(denoisers)} share the steps of a call, and modelled time counts a pass of each; "
            "leave out --steps, and list steps with `fluxq steps`"
        )
    if job.recipe.steps is not None:
        raise ValueError(
            f"--steps chooses which steps are computed, all in one way, and recipe {job.recipe_name} has `steps` of "
            "its own; leave out one of the two"
        )


def _weighed(job: Job, options: AutoOptions) -> list[str]:
    """Return the components that run once per image and are units; of others that are named, the log says why not."""
    units = []
    for plan in job.plans:
        if plan.kind == "transformer" or plan.component not in job.options.components:
            continue
        why = ""
        if plan.kind == "vae":
            why = "errors are measured at the latents, which it decodes"
        elif options.size is None and (options.gate is None or options.gpu is not None):
            why = "its bytes count under --size, or --gate without --gpu, alone"
        elif options.fitted:
            why = "with --from it is that of the first checkpoint"
        elif options.dialect:
            why = f"files for {options.dialect} do not hold it"
        elif job.options.dtype == "float16":
            why = "text encoders overflow in float16, where layers are replaced"
        if why:
            logger.warning("%s: its format is not chosen: %s", plan.component, why)
        units += [] if why else [plan.component]
    return units


def _dialect(options: AutoOptions) -> str | None:
    """Return the key of the dialect; ValueError for one that is not written."""
    if options.dialect is None:
        return None
    names = {DIALECTS[name].option or name: name for name in WRITERS}
    dialect = names.get(options.dialect, options.dialect.replace("-", "_"))
    if dialect not in WRITERS:
        raise ValueError(f"--for {options.dialect}: expected one of {', '.join(names)}")
    return dialect


def recipe_file(model: str, options: AutoOptions) -> str:
    """Return the name of the file that a search writes unless told where."""
    kind, value = options.budget
    bound = latent_bound(value) if kind == "gate" else value / 1e9 if kind in ("size", "vram") else value
    unit = {"gate": "dB", "size": "GB", "vram": "GB-vram"}.get(kind, kind)
    return f"{Path(model).name}-{bound:g}{unit}{'-steps' if options.steps else ''}.yaml"


def _with_budget(search: Search) -> Search:
    """Return the search with costs and limits; ValueError for a budget that no plan fits, or that all do."""
    job, offer, options = search.job, search.offer, search.options
    kind, value = options.budget
    if kind == "bits":
        search = replace(search, costs=stored_bits(offer))
        limit = math.floor(value * search.unit[1])
    elif kind == "vram":
        room = room_of(value)
        costs, seat = seat_of(job, offer, room)
        search, limit = replace(search, costs=costs, seat=seat), 8 * room
    elif options.is_of_time:
        search = replace(search, costs=modelled_ms(job, offer, str(options.gpu), options.times))
        limit = value
    else:
        search, limit = replace(search, costs=stored_size(job, offer)), 8 * value if kind == "size" else 0
    if kind == "gate":
        return search
    least, largest = (cost + search.costs.fixed for cost in extremes(search.costs.numbers))
    if limit < least * search.least_part:
        steps = " with the fewest steps computed" if options.steps else ""
        raise ValueError(
            f"--{kind}: the smallest plan takes {search.in_words(least * search.least_part, 4)}{steps}; give at least "
            "that, or a --menu with a smaller format"
        )
    if limit > largest and len(offer.options) > 1:
        where = f" with {search.seat.way}" if search.seat else ""
        if all(SIXTEEN_BIT in options for options in offer.choices.values()):
            raise ValueError(
                f"--{kind}: all that is chosen from fits in 16 bit already, {search.in_words(largest, 4)}{where}, so "
                "there is no choice; leave it as it is, or give less"
            )
        raise ValueError(
            f"--{kind}: the largest plan takes {search.in_words(largest, 4)}{where}, so there is no choice; give less, "
            "or a --menu with a larger format"
        )
    return replace(search, limit=limit)


def _identity(search: Search) -> dict[str, Any]:
    """Return all that decides what a search writes."""
    job, offer = search.job, search.offer
    layers = {option: {n: str(la.scheme) for n, la in plans.items()} for option, plans in offer.layers.items()}
    return {
        "fluxq": fluxq.__version__,
        "recipe": job.recipe.digest,
        "model": {component: job.folder.digest(component) for component in offer.parts},
        "others": digest_rest(job.folder, offer.parts),
        "units": sha256_json([dict(offer.units), dict(offer.choices), layers]),
        "prompts": job.prompts.digest,
        "call": job.call,
        "steps": job.calibration.steps,
        "dtype": job.options.dtype,
        "seed": job.calibration.seed,
        "count": search.options.count,
        "budget": list(search.options.budget),
        "costs": sha256_json([search.costs.numbers, search.costs.fixed]),
        "gpu": search.options.gpu,
        "for": search.options.dialect,
        "times": search.options.times and sha256_file(search.options.times),
        "measure": search.options.measure,
        **({"lists": True} if search.options.steps else {}),
    } | ({"fitted": {option: one.digest for option, one in offer.fitted.items()}} if offer.fitted else {})


def _require_assemblable(search: Search, reads: Mapping[str, Any], *, exists_ok: bool) -> None:
    """Raise ValueError, as `Output.require` does, for a place that a checkpoint cannot be put together at."""
    try:
        output = Output(Path(str(search.options.assemble)))
        output.require(reads, overwrite=search.job.options.overwrite, exists_ok=exists_ok)
    except ValueError as error:
        raise ValueError(str(error).replace("another --output", "another --assemble")) from None


def _require_own_tables(search: Search) -> None:
    """Raise ValueError for a table of another request in this one's place, unless it may be replaced."""
    for measure in search.measures:
        file = search.table_file(measure)
        if not file.exists():
            continue
        digest = table_job(file)
        if digest is None:
            raise ValueError(f"{file} is no table of errors, and would be replaced; move it, or give another --output")
        if digest != search.table_digest(measure) and not search.job.options.overwrite:
            raise ValueError(
                f"{file}: errors of another model, recipe, menu, --from, call, dtype, set of prompts, seed, count or "
                "number of steps looked at, or another version of fluxq; give an --output in another folder, or "
                "--overwrite to measure again"
            )


def table_job(table: Path) -> str | None:
    """Return the request of a table; None for all that is none, folders and half a file too."""
    with suppress(ValueError):
        return ErrorTable.stored_job(table) if table.is_file() else None


def outline_of(search: Search) -> dict[str, Any]:
    """Return the cost of a search and bounds of its budget as JSON has them, without computing anything.

    least, largest: cost of the smallest and the largest plan, in words.
    passes: name of a part -> forward passes of the transformers with one image; of the adjoint about, with backward.
    runs: of the pipeline over the judging images, at most.
    modelled_seconds: on the GPU, None without one.
    """
    low, high = extremes(search.costs.numbers)
    steps = number_of_steps(search.job.folder.pipeline_class, search.job.call)
    images = search.options.count
    options = sum(option != SIXTEEN_BIT for of_unit in search.offer.choices.values() for option in of_unit)
    seen = min(steps, search.job.calibration.steps)
    once = images * steps * (1 + sum(o != SIXTEEN_BIT for u in search.offer.once for o in search.offer.choices[u]))
    again = 3 + sum(option != SIXTEEN_BIT for option in search.offer.options)  # forward: call and block twice, options
    each = {"velocity": images * (steps + options * seen), "adjoint": images * steps * (again + PROBES)}
    each = {measure: passes + (once if search.offer.once else 0) for measure, passes in each.items()}
    runs = 1 + 2 * MOST_PLANS
    judging = sum(ROUNDS) * images
    lists = {"lists of steps": IMAGES_OF_LIST * steps * (2 + FORMS * MOST_SHARES)} if search.options.steps else {}
    passes = {measure: each[measure] for measure in search.measures} | lists | {"runs": runs * judging * steps}
    seconds = None
    if search.options.gpu:
        plain = modelled_ms(search.job, search.offer, search.options.gpu)
        seconds = sum(passes.values()) * (extremes(plain.numbers)[1] + plain.fixed) / 1e3
    digits = 4 if search.seat else 2  # of which most is the same in all plans
    low, high = ((low + search.costs.fixed) * search.least_part, high + search.costs.fixed)
    least, largest = (search.in_words(cost, digits) for cost in (low, high))
    return {"least": least, "largest": largest, "passes": passes, "runs": runs, "modelled_seconds": seconds}
