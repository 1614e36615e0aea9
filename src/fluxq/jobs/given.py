"""Check what a user named before anything heavy is imported: models, checkpoints, files, devices.

Nothing here needs more than paths, JSON and the headers of weight files, so a mistake is said within a second. The jobs
check again what they depend on: these functions only say it early.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluxq.base.console import did_you_mean, path_near
from fluxq.base.files import read_json, require_no_pipe
from fluxq.base.model import PLAN_FILE, ModelFolder, check_weights, resolve_model
from fluxq.base.output import Output
from fluxq.jobs.requirements import output_for as output_for
from fluxq.jobs.requirements import reads_of


def require_model(
    model: str, revision: str | None = None, local_files_only: bool = False, components: Iterable[str] = ()
) -> ModelFolder:
    """Return the pipeline folder of MODEL, its index and the headers of its weights looked through.

    components: of the pipeline, that the command names.

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


def require_output(output: Path, folder: ModelFolder, said: Mapping[str, Any], *, is_file: bool) -> None:
    """Raise ValueError for an output that cannot or must not be written. folder: of the model; said: the options."""
    reads = reads_of(folder.path, said)
    Output(output, is_file).require(reads, overwrite=said["overwrite"], exists_ok=True)


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


def _is_quantized(folder: Path) -> bool:
    """Tell whether fluxq quantized a component of a pipeline's folder, or the one model of a folder."""
    for config in (folder / "config.json", *sorted(folder.glob("*/config.json"))):
        with suppress(ValueError, OSError):
            said = read_json(config).get("quantization_config")
            if isinstance(said, dict) and said.get("quant_method") == "fluxq":
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
    from fluxq.eval.metrics.plugins import find_offers
    from fluxq.recipes.recipe import GATE_METRICS, parse_gate

    for gate in gates:
        parse_gate(gate)
    for name in metrics:
        known = list(dict.fromkeys([*GATE_METRICS, *find_offers()]))
        if name not in known:
            raise ValueError(f"metric {name!r} is unknown{did_you_mean(name, known)}; known: {', '.join(known)}")


def require_base(base: str | None) -> None:
    """Raise as `require_model` does for a 16-bit model to prove with that is no file, no folder and on no hub."""
    if base and not Path(base).expanduser().exists():
        require_model(base)


def _require_no_published_name(model: str) -> None:
    """Raise FileNotFoundError for a name that `fluxq families` knows, with the hub id to give."""
    from fluxq.recipes.all_families import hub_ids

    found = hub_ids(model) if "/" not in model else ()
    if found:
        raise FileNotFoundError(
            f"model {model!r} is a published model's name, not a folder here: give its hub id, {' or '.join(found)}"
        )


def _near_hub_id(model: str) -> str:
    """Return " (did you mean …?)" where a published model's hub id looks like `model`, but is another."""
    from fluxq.recipes.all_families import HUB_IDS

    known = [repo for repos in HUB_IDS.values() for repo in repos]
    return "" if model in known else did_you_mean(model, known, cutoff=0.75)


def require_files(arguments: Mapping[str, Any]) -> None:
    """Raise FileNotFoundError or ValueError for an option that names a file or folder which is not there.

    arguments: a command's, by the names that click gives them; of those only the ones that name files are looked at.
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


# Option -> what is said of a path that is not there; `hub` is a word of --weights.
PATHS = {
    "statistics": "statistics file {path} does not exist; `fluxq calibrate` writes one",
    "fid_reference": "--fid-reference {path}: no such folder of images or npz file",
    "weights": "--weights {path}: no such folder; `--weights hub` fetches what is missing",
}
