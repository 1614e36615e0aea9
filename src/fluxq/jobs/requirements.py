"""Requirements of a job on its options, its pipeline and its output; each refuses with the cure.

Most need no more than paths, JSON and the headers of weight files, and nothing heavy is imported, so that a mistake is
reported within a second.
"""

from __future__ import annotations

import glob
import inspect
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fluxq.base.console import did_you_mean, path_near
from fluxq.base.console import size as _size
from fluxq.base.files import read_json, require_no_pipe
from fluxq.base.model import GENERATION_FILE, PLAN_FILE, ModelFolder, check_weights, resolve_model
from fluxq.base.output import ANY_JOB, plain_path

_SHOWN = 80  # characters of a value, and names
_LONGEST_TEXT = 10_000  # characters; no text encoder reads a tenth of it
_LISTS = (list, tuple, Sequence, Iterable)
_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}


_OURS = {  # arguments of a call that `calibrate.capture.run_pipeline` gives
    *("prompt", "generator", "output_type", "return_dict", "callback", "callback_on_step_end"),
    "callback_on_step_end_tensor_inputs",
}


def require_call(
    folder: ModelFolder, call: dict[str, Any], option_names: Collection[str] = (), file: Path | None = None
) -> None:
    """Refuse arguments that the pipeline does not take, before it is loaded.

    option_names: arguments that options gave. file: that says the others, by default that of the folder's defaults.
    """
    import diffusers

    pipeline, file = folder.pipeline_class, file or folder.path / GENERATION_FILE
    if pipeline is None:
        name = folder.index["_class_name"]
        present = diffusers.__version__
        raise ValueError(f"{folder.path}: a {name}, which this diffusers ({present}) does not have: update diffusers")
    if ours := sorted(call.keys() & _OURS):
        where = "the call" if set(ours) & set(option_names) else file
        raise ValueError(f"{where}: {', '.join(ours)}: fluxq says that itself, by prompts and seeds; leave it out")
    unknown = sorted(call.keys() - inspect.signature(pipeline.__call__).parameters.keys())
    if "num_frames" in unknown and not makes_video(folder):
        raise ValueError(f"{folder.name}: a {pipeline.__name__} makes images, which have no frames: leave out --frames")
    options = [f"--{'frames' if name == 'num_frames' else name}" for name in unknown if name in option_names]
    if options:
        flags = ", ".join(options).replace("_", "-")
        raise ValueError(f"{folder.name}: {pipeline.__name__} takes no such argument: leave out {flags}")
    if unknown:
        named = ", ".join(name[:_SHOWN] for name in unknown[:_SHOWN])
        raise ValueError(f"{file}: {pipeline.__name__} takes no {named}; remove it")
    _require_sizes(folder, call, option_names, file)
    _require_values(file, pipeline, {name: value for name, value in call.items() if name not in option_names})


def _require_sizes(folder: ModelFolder, call: Mapping[str, Any], option_names: Collection[str], file: Path) -> None:
    """Raise ValueError for an image below two by two latents, or of a part of one, where the VAE tells their size."""
    if folder.components.get("vae") != "AutoencoderKL":
        return
    stages = folder.config("vae").get("block_out_channels")
    unit = 1 << (len(stages) - 1) if isinstance(stages, list) and stages else 1
    for name in ("height", "width"):
        size = call.get(name)
        if type(size) is int and (size < 2 * unit or size % unit):
            where = f"--{name}" if name in option_names else f"{file}: {name}"
            raise ValueError(
                f"{where} is {size}, expected a multiple of {unit} from {2 * unit} up, as the VAE makes them"
            )


def _require_values(file: Path, pipeline: type, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for a default of a type that the call does not take, by its annotations or own defaults."""
    call = inspect.unwrap(pipeline.__call__)
    try:
        hints = get_type_hints(call)
    except (NameError, TypeError):  # of names for type checkers alone
        hints = {}
    for name, parameter in inspect.signature(call).parameters.items():
        if name not in defaults or defaults[name] == parameter.default:
            continue
        value = defaults[name]
        hint = hints.get(name, Any if parameter.default in (None, parameter.empty) else type(parameter.default))
        where = f"{file}: {name} is {str(value)[:_SHOWN]!r}"
        if isinstance(value, list) and _fits("", hint):
            raise ValueError(f"{where}, expected one text, which all prompts share; correct it")
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            raise ValueError(
                f"{where}…, a text of {len(value)} characters, expected {_LONGEST_TEXT} at most; shorten it"
            )
        if not _fits(value, hint):
            expected = " or ".join(dict.fromkeys(_words(hint)))
            cure = f"expected {expected}; correct it" if expected else "expected what no file can say; remove it"
            raise ValueError(f"{where}, {cure}")


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a value of a JSON file has the type that an annotation says."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Literal:
        return value in inner
    if value is None:  # many lists and texts may be left out though their annotations have no None
        return kind not in (float, int, bool)
    if isinstance(value, list):
        # One type is that of every value: libraries write tuple[int] for tuples of any length.
        is_short = kind is not tuple or len(inner) < 2 or Ellipsis in inner or len(value) == len(inner)
        each_of = [float if one is int else one for one in inner] or [Any]  # LTX-Video's own timesteps end with 0.03
        return kind in _LISTS and is_short and all(any(_fits(each, one) for one in each_of) for each in value)
    return type(value) in ((int, float) if kind is float else (kind,))


def _words(hint: Any) -> Iterator[str]:
    """Yield the kinds of value that an annotation allows, as far as a JSON file can hold them, in words for people."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        for each in inner:
            yield from _words(each)
    elif kind in _LISTS and (words := [word for each in inner for word in _words(each)]):
        yield f"a list, each {words[0]}"
    elif kind is Literal:
        yield from map(repr, inner)
    elif kind in _KINDS:
        yield _KINDS[kind]


def call_of(
    folder: ModelFolder, defaults: Mapping[str, Any], options: Mapping[str, Any], frames: int | None = None
) -> dict[str, Any]:
    """Return the arguments of a call of the pipeline: defaults of the model, overridden by options.

    num_frames gets the pipeline's own name for it. If it is missing, the pipeline's own number of frames is written
    out, at most `frames`, so that batches can be cut by it. A size that BINNED lacks is made as it is.
    """
    from fluxq.calibrate.capture import frames_argument

    call, pipeline = {**defaults, **options}, folder.pipeline_class
    if pipeline is None:
        return call
    argument = frames_argument(pipeline)
    if argument is not None:
        if argument != "num_frames" and "num_frames" in call:
            call[argument] = call.pop("num_frames")
        counts = [each for each in (default_frames(folder), frames) if each is not None]
        if counts:
            call.setdefault(argument, min(counts))
    sizes = BINNED.get(pipeline.__name__)
    if sizes is not None and folder.config("transformer").get("sample_size") not in sizes:
        call.setdefault("use_resolution_binning", False)
    return call


def require_no_adapter(folder: ModelFolder, component: str) -> None:
    """Raise ValueError for an adapter beside a component to quantize, whose weights do not hold it."""
    for file in folder.adapter_files(component)[:1]:
        raise ValueError(
            f"{file}: an adapter, which transformers adds to the {component} as it loads it, and which quantized "
            f"weights would lack: merge it first (PEFT's merge_and_unload), or leave {component} out of --components"
        )


def require_steps(folder: ModelFolder) -> None:
    """Raise ValueError for a pipeline that has neither a scheduler nor a callback by which its steps are followed."""
    from fluxq.calibrate.capture import TELLS

    pipeline = folder.pipeline_class
    if pipeline is None or TELLS in inspect.signature(pipeline.__call__).parameters:
        return
    if "scheduler" not in folder.components:
        raise ValueError(
            f"{folder.name}: a {pipeline.__name__} takes no {TELLS} in this diffusers and has no scheduler, so it "
            "cannot be calibrated or checked; --profile rtn --no-check quantizes it without running it"
        )


def require_pictures(folder: ModelFolder, cure: str) -> None:
    """Raise ValueError for a pipeline that makes neither images nor video."""
    if not makes_pictures(folder):
        outputs = ", ".join(outputs_of(folder))
        raise ValueError(
            f"{folder.name}: a {folder.index['_class_name']} makes {outputs}, and only images and video can be "
            f"compared; {cure}"
        )


def require_prompts_suffice(folder: ModelFolder, call: Mapping[str, Any]) -> None:
    """Raise ValueError for a pipeline that needs more than a prompt, such as an image to begin with."""
    pipeline = folder.pipeline_class
    parameters = inspect.signature(pipeline.__call__).parameters if pipeline is not None else {}
    named = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = [each.name for each in named[1:] if each.default is each.empty and each.name not in {"prompt", *call}]
    if pipeline is not None and needed:
        raise ValueError(
            f"{folder.name}: a {pipeline.__name__} needs {', '.join(needed)} beside a prompt, and only prompts are "
            "asked here; the closing check of `fluxq quantize --prompts FILE` takes what rows of the file say"
        )


def makes_pictures(folder: ModelFolder) -> bool:
    """Tell whether the pipeline's outputs are images or frames; True if its outputs are unknown."""
    from fluxq.eval.images.generate import PICTURES

    outputs = outputs_of(folder)
    return not outputs or bool({*outputs} & {*PICTURES})


def default_frames(folder: ModelFolder) -> int | None:
    """Return the number of frames that the pipeline makes by itself; None where its call does not say."""
    from fluxq.calibrate.capture import frames_argument

    pipeline = folder.pipeline_class
    argument = frames_argument(pipeline) if pipeline is not None else None
    default = inspect.signature(pipeline.__call__).parameters[argument].default if pipeline and argument else None
    return default if isinstance(default, int) else None


def makes_video(folder: ModelFolder) -> bool:
    """Tell whether the pipeline's outputs are frames."""
    return "frames" in outputs_of(folder)


def outputs_of(folder: ModelFolder) -> tuple[str, ...]:
    """Return the fields of the pipeline's outputs, by the output classes of its module; empty if it has none."""
    from diffusers.utils import BaseOutput

    pipeline = folder.pipeline_class
    module = vars(sys.modules[pipeline.__module__]) if pipeline is not None else {}
    classes = [each for each in module.values() if inspect.isclass(each) and issubclass(each, BaseOutput)]
    return tuple(dict.fromkeys(name for each in classes for name in getattr(each, "__dataclass_fields__", ())))


def scheduler_of(folder: ModelFolder) -> Any:
    """Load the pipeline's scheduler from its files; ValueError for one that this diffusers does not have."""
    import diffusers

    name = folder.components.get("scheduler", "")
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise ValueError(f"{folder.name}: this diffusers has no scheduler {name!r}; leave `steps` out of the recipe")
    return kind.from_pretrained(folder.path / "scheduler", local_files_only=True)


def output_for(output: str | None, model: str, recipe: str, *, is_file: bool) -> Path:
    """Return the path of a checkpoint or a file of statistics: `output`, else a name made of model and recipe."""
    return plain_path(output or f"{Path(model).name}-{recipe}{'-statistics.safetensors' if is_file else ''}")


def reads_of(model: Path, options: Mapping[str, Any]) -> dict[str, str | Path | None]:
    """Return name for people -> file, for all files that a quantizing command reads. options: the command's."""
    from fluxq.quantize.lora_file import LoraFile
    from fluxq.recipes.recipe import find_recipe

    loras = {f"the LoRA file {text}": LoraFile.parse(text).path for text in options.get("lora") or ()}
    files = {"the prompts": options.get("prompts"), "the statistics": options.get("statistics")}
    existing = {what: path for what, path in files.items() if path and Path(path).expanduser().exists()}
    return {"the model": model, "the recipe": find_recipe(options["recipe"]), **loras, **existing}


def existing_parent(output: Path) -> Path:
    """Return the nearest folder around `output` that exists; its disk is the one to be written to."""
    return next(parent for parent in output.resolve().parents if parent.exists())


def require_free_space(folder: Path, needed: int, what: str) -> None:
    """Raise OSError where a folder's disk has too few free bytes. what: the thing to be written, for the message."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"not enough space in {folder}: {what} may need {_size(needed)}, {_size(free)} are free; "
            "give another --output"
        )


def require_model(
    model: str, revision: str | None = None, local_files_only: bool = False, components: Iterable[str] = ()
) -> ModelFolder:
    """Return the pipeline folder of MODEL after a look through its index and the headers of its weights.

    components: names of components in the command.

    Raises FileNotFoundError, PermissionError, OSError or ValueError with the cure, as `resolve_model` does; a published
    model's name is answered with its hub id.
    """
    if not Path(model).expanduser().exists():
        _require_no_published_name(model)
    try:
        folder = resolve_model(model, revision=revision, local_files_only=local_files_only)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{_near_hub_id(model)}") from None
    check_weights(folder)
    for component in components:
        folder.require_component(component)
    return folder


def require_checkpoint(output: str | Path, *, recorded: bool = False) -> None:
    """Raise FileNotFoundError for an OUTPUT that is no folder, and if `recorded` ValueError for one without a plan."""
    folder = Path(output).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{output} is no folder{path_near(folder)}; give one that `fluxq quantize` wrote")
    if recorded and not (folder / PLAN_FILE).is_file():
        if _is_quantized(folder):
            raise ValueError(
                f"{output}: its {PLAN_FILE} is missing, which says what it was made from; fetch it too (verify, "
                "inspect and export need none)"
            )
        raise ValueError(f"{output}: not a fluxq checkpoint (it has no {PLAN_FILE}); `fluxq quantize` writes one")


def base_recipe(recipe: str | None, checkpoints: Sequence[str]) -> str:
    """Return the recipe that a search starts from: the one given, that of the first checkpoint, or nvfp4.

    Raises ValueError or FileNotFoundError for folders that are no checkpoints.
    """
    for checkpoint in checkpoints:
        folder = Path(checkpoint).expanduser()
        if not folder.is_dir() and any(folder.resolve().parent.glob(f".{glob.escape(folder.name)}.{ANY_JOB}.work")):
            raise ValueError(f"{checkpoint} is not finished yet: the command that began it goes on with it")
        require_checkpoint(checkpoint, recorded=True)
    if recipe is not None and checkpoints:
        raise ValueError(f"--recipe {recipe}: with --from the recipe is that of the first checkpoint; leave it out")
    return str(Path(checkpoints[0]).expanduser() / PLAN_FILE) if checkpoints else recipe or "nvfp4"


def _is_quantized(folder: Path) -> bool:
    """Tell whether fluxq quantized a component of a pipeline's folder, or the one model of a folder."""
    for config in (folder / "config.json", *sorted(folder.glob("*/config.json"))):
        with suppress(ValueError, OSError):
            quantization = read_json(config).get("quantization_config")
            if isinstance(quantization, dict) and quantization.get("quant_method") == "fluxq":
                return True
    return False


def require_local(output: str) -> None:
    """Raise as `resolve_model` does for a checkpoint that is neither a folder nor in the hub's cache."""
    resolve_model(output, local_files_only=True, one_model=True)


def require_path(path: str | Path) -> None:
    """Raise FileNotFoundError for a file or folder that is not there, ValueError for a pipe or a device."""
    place = Path(path).expanduser()
    if not place.exists():
        raise FileNotFoundError(f"{path} does not exist{path_near(place)}")
    require_no_pipe(place, str(path))


def require_evaluated(path: str | Path) -> None:
    """Raise FileNotFoundError for a folder without the report of `fluxq eval`."""
    place = Path(path).expanduser()
    if place.is_dir() and not (place / "eval" / "report.json").is_file():
        raise FileNotFoundError(f"{path} was not evaluated: run `fluxq eval {path}` first")


def require_measures(gates: Iterable[str], metrics: Iterable[str]) -> None:
    """Raise ValueError for a gate that cannot be read, or a metric that neither fluxq nor a plug-in has."""
    from fluxq.eval.metrics.plugins import find_plugins
    from fluxq.recipes.recipe import GATE_METRICS, parse_gate

    for gate in gates:
        parse_gate(gate)
    for name in metrics:
        names = list(dict.fromkeys([*GATE_METRICS, *find_plugins()]))
        if name not in names:
            raise ValueError(f"metric {name!r} is unknown{did_you_mean(name, names)}; known: {', '.join(names)}")


def require_base(base: str | None) -> None:
    """Raise as `require_model` does for a --base that is no file, no folder and on no hub."""
    if base and not Path(base).expanduser().exists():
        require_model(base)


def _require_no_published_name(model: str) -> None:
    """Raise FileNotFoundError for a name that `fluxq families` knows, with the hub id to give."""
    from fluxq.recipes.all_families import hub_ids

    repos = hub_ids(model) if "/" not in model else ()
    if repos:
        raise FileNotFoundError(
            f"model {model!r} is a published model's name, not a folder here: give its hub id, {' or '.join(repos)}"
        )


def _near_hub_id(model: str) -> str:
    """Return " (did you mean …?)" where a published model's hub id looks like `model`, but is another."""
    from fluxq.recipes.all_families import HUB_IDS

    hub_ids = [repo for repos in HUB_IDS.values() for repo in repos]
    return "" if model in hub_ids else did_you_mean(model, hub_ids, cutoff=0.75)


def require_files(arguments: Mapping[str, Any]) -> None:
    """Raise FileNotFoundError or ValueError for an option that names a missing file or folder.

    arguments: a command's, by the names that click gives them; only those that name files are looked at.
    """
    from fluxq.calibrate.prompts import require_source
    from fluxq.quantize.lora_file import LoraFile

    for name, message in PATHS.items():
        value = arguments.get(name)
        if not value or value == "hub":
            continue
        place = Path(value).expanduser()
        if not place.exists():
            raise FileNotFoundError(message.format(path=value) + path_near(place))
        require_no_pipe(place, f"--{name.replace('_', '-')} {value}")
    for text in arguments.get("lora") or ():
        LoraFile.parse(text)
    if arguments.get("prompts"):
        require_source(arguments["prompts"])


# Option -> message for a missing path; `hub` is a word of --weights.
PATHS = {
    "statistics": "statistics file {path} does not exist; `fluxq calibrate` writes one",
    "fid_reference": "--fid-reference {path}: no such folder of images or npz file",
    "weights": "--weights {path}: no such folder; `--weights hub` fetches what is missing",
}
# Pipeline -> sizes (`sample_size` of its transformer) that it has tables of resolutions for; with any other it refuses
# a call unless told to use no table.
BINNED: dict[str, tuple[int, ...]] = {
    "PixArtAlphaPipeline": (32, 64, 128),
    "PixArtSigmaPipeline": (32, 64, 128, 256),
    "PixArtSigmaPAGPipeline": (32, 64, 128, 256),
    "SanaPipeline": (16, 32, 64, 128),
    "SanaControlNetPipeline": (16, 32, 64, 128),
    "SanaPAGPipeline": (16, 32, 64, 128),
    "SanaSprintPipeline": (32,),
    "SanaSprintImg2ImgPipeline": (32,),
    "SanaVideoPipeline": (22, 30),
    "SanaImageToVideoPipeline": (22, 30),
}
