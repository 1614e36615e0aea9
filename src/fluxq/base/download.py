"""A model of the Hugging Face hub: looked up first, then fetched into the hub's cache.

The hub's refusals (a gated, missing or private model, a missing revision) and models that cannot work (no pipeline, no
safetensors weights, too little disk) are reported before the first weight is fetched.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxq.base.console import first_line, logger, path_near
from fluxq.base.files import WEIGHT_STEMS

if TYPE_CHECKING:
    from collections.abc import Iterable

PATTERNS = [
    "model_index.json",
    "*/*.json",
    *(f"*/{stem}.safetensors" for stem in WEIGHT_STEMS),
    # Shards, numbered with four to six digits: variants such as fp16 stay out.
    *(f"*/{stem}-*-of-{digits}.safetensors" for stem in WEIGHT_STEMS for digits in ("????", "?????", "??????")),
    "*/adapter_model.safetensors",
    "*/*.txt",
    "*/*.model",
    "*/*.jinja",
    "LICENSE*",
    "license*",
    "NOTICE*",
    "notice*",
    "README.md",
    "fluxq_*",
]
HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_FILE_ENDINGS = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".zip")
_CURE = (
    "quantizing starts from a whole pipeline, its folder or hub id; docs/diffusers.md shows how to make a folder of a "
    "single file, and `fluxq inspect` says what a quantized one is"
)


def no_model(model: str, why: str) -> FileNotFoundError:
    """Return the error for a MODEL that is found nowhere."""
    return FileNotFoundError(f"model {model!r} is neither a folder nor a hub model: {why}")


def require_hub_id(model: str) -> None:
    """Raise FileNotFoundError for a MODEL that is no folder and cannot be a hub id, with a guess at its kind."""
    path = Path(model).expanduser()
    if match := re.match(r"https?://[^/]+/([\w.-]+/[\w.-]+)", model):
        raise no_model(model, f"it is an address; give {match[1]}")
    if path.is_file():
        raise no_model(model, f"it is a single file; {_CURE}")
    if path.suffix.lower() in _FILE_ENDINGS:
        raise no_model(model, f"there is no such file{path_near(path)}, and one file would not do: {_CURE}")
    if model.startswith((".", "~", os.sep)) or "\\" in model or model.count("/") > 1 or model.endswith("/"):
        raise no_model(model, f"there is no such folder{path_near(path)}")
    if not HUB_ID.fullmatch(model):
        raise no_model(model, f"there is no such folder{path_near(path)}; hub ids are written owner/name")


@cache
def download(model: str, revision: str | None, local_files_only: bool) -> Path:
    """Return the folder of a hub model in the local cache, fetching missing files; once per process.

    Raises FileNotFoundError for a model that the hub does not give and OSError where the disk has no room.
    """
    from huggingface_hub import constants, snapshot_download

    if not (local_files_only or constants.HF_HUB_OFFLINE):
        files = _look_up(model, revision)
        local_files_only = files is None
        if files is not None:
            _require_fetchable(model, files)
    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=PATTERNS, local_files_only=local_files_only)
        )
    except Exception as error:  # of the hub's client, or of its HTTP library
        raise _refusal(model, revision, local_files_only or constants.HF_HUB_OFFLINE, error) from None


def _look_up(model: str, revision: str | None) -> list[Any] | None:
    """Return the files that would be fetched; None where the hub is in trouble, but the cache has the model.

    Raises the hub's refusal, or its trouble. It is asked once with a time limit first: its client tries for a minute.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        HfApi().model_info(model, revision=revision, timeout=_PATIENCE)
        return list(snapshot_download(model, revision=revision, allow_patterns=PATTERNS, dry_run=True))
    except Exception as error:
        cause = (error.__cause__ if isinstance(error, DryRunError) else None) or error
        refusal = _refusal(model, revision, False, cause)
        if (_status(cause) or _OF_SERVER) < _OF_SERVER:  # the hub's own answer
            raise refusal from None
        try:
            snapshot_download(model, revision=revision, allow_patterns=PATTERNS, local_files_only=True)
        except Exception:
            raise refusal from None
        logger.warning("%s; the copy in the cache is taken", first_line(refusal))
        return None


def _require_fetchable(model: str, files: Iterable[Any]) -> None:
    """Raise an error for a repository without a pipeline or safetensors weights, or too large for the disk."""
    from huggingface_hub import constants

    names = {file.filename for file in files}
    if "model_index.json" not in names:
        raise no_model(model, "that repository holds no diffusers pipeline (it has no model_index.json)")
    if not any(name.endswith(".safetensors") for name in names):
        raise ValueError(
            f"model {model!r} holds no safetensors weights, or only a variant such as fp16; "
            "unpickling a stranger's file runs its code"
        )
    needed = sum(file.file_size for file in files if file.will_download)
    place = next(parent for parent in Path(constants.HF_HUB_CACHE, "x").absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OSError(
            f"model {model!r}: {needed / 1e9:.1f} GB are to be fetched into {constants.HF_HUB_CACHE}, "
            f"{free / 1e9:.1f} GB are free there; set HF_HOME to a larger disk"
        )
    if needed > 1e8:
        logger.warning("fetching %.1f GB of %s", needed / 1e9, model)


def _refusal(model: str, revision: str | None, offline: bool, error: BaseException) -> OSError:
    """Return the error that says why a hub model cannot be had, and the cure."""
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{model}"
    if offline:
        words = f"{model} --revision {revision}" if revision else model
        cure = f"nothing is fetched here: leave out --local-files-only, or `hf download {words}` first"
        if constants.HF_HUB_OFFLINE:
            cure = "HF_HUB_OFFLINE is set: fetch it once without that"
        return no_model(model, f"it is not (completely) on this machine, and {cure}")
    if isinstance(error, errors.GatedRepoError):
        who = "log in with `hf auth login` (or set HF_TOKEN)" if get_token() is None else "then run this again"
        return PermissionError(f"model {model!r} is gated: accept its licence at {page}, and {who}")
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"model {model!r} has no revision {revision!r}; {page}/commits/main lists them")
    if isinstance(error, errors.RepositoryNotFoundError):
        cure = "check the name" if get_token() else "check the name, or `hf auth login` for a private one"
        return no_model(model, f"the hub knows none of that name, or it is private: {cure}")
    if isinstance(error, errors.HFValidationError):
        return no_model(model, first_line(error))
    status = _status(error) or _status(error.__cause__)
    if status in (401, 403) and get_token() is None:
        return PermissionError(f"model {model!r}: the hub asks for a login: `hf auth login`, or set HF_TOKEN")
    if status in (401, 403):
        return PermissionError(f"model {model!r}: the hub refuses the token that it was given: `hf auth login` again")
    if status is not None:
        cure = "try again later" if status == _TOO_MANY or status >= _OF_SERVER else f"look at {page}"
        return OSError(f"model {model!r}: the hub answers with status {status}; {cure}")
    if isinstance(error, OSError) and error.errno in _OF_DISK:
        return OSError(f"model {model!r} cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror}); set HF_HOME")
    return no_model(
        model,
        f"the hub cannot be reached ({first_line(error.__cause__ or error)}); connect this machine, or give a folder",
    )


_TOO_MANY, _OF_SERVER = 429, 500  # HTTP
_PATIENCE = 10  # seconds for the hub to answer
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.EISDIR)


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status that the hub answered with, None for an error of another kind."""
    return getattr(getattr(error, "response", None), "status_code", None)
