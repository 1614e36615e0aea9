"""The file that `fluxq doctor --share` writes for a bug report: what was found, and nothing about who found it.

It holds neither paths nor names: of the user, the host, the candidate, or the layers of a checkpoint.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fluxq.base.files import read_json, write_json
from fluxq.base.output import plain_path, takes_files

if TYPE_CHECKING:
    from fluxq.jobs.doctor import Examination


def require_place(file: Path, checkpoint: str | None) -> None:
    """Raise ValueError for a file that cannot be written, or would replace something else than such a file."""
    place = plain_path(file)
    if not place.parent.is_dir() or not takes_files(place.parent):
        raise ValueError(f"--share {file}: {place.parent} is no folder one may write to; make it, or give another FILE")
    if os.path.lexists(place) and not _is_ours(place):
        raise ValueError(f"--share {file} exists, and is no file that --share wrote; remove it, or give another FILE")
    if checkpoint is not None and place.resolve().is_relative_to(Path(checkpoint).expanduser().resolve()):
        raise ValueError(f"--share {file} lies in {checkpoint}, which would be changed; give another FILE")


def share(examination: Examination, file: Path) -> None:
    """Write what was found to a file: GPU, driver, versions, rows, and what was left out."""
    from fluxq.kernels import findings

    theirs = examination.outside
    rows = [row | {"why": _anonymous(row["why"], theirs)} for row in examination.our_rows]
    notes = {
        name: [*dict.fromkeys(_note(what, why, theirs) for what, why in reasons.items() if not _is_of(what, theirs))]
        for name, reasons in (("left_out", examination.left_out), ("uncompared", examination.uncompared))
    }
    write_json(plain_path(file), findings.document(examination.machine, rows) | notes)


def _is_ours(place: Path) -> bool:
    """Tell whether `share` wrote a file; doctor's own file of findings has no `left_out`."""
    from fluxq.kernels import findings

    if place.is_symlink() or not place.is_file():
        return False
    with suppress(ValueError, OSError):
        document = read_json(place)
        return document.get("kind") == findings.KIND and "left_out" in document
    return False


def _is_of(what: str, candidate: str) -> bool:
    """Tell whether a note is about the candidate, or its timing."""
    return bool(candidate) and what.partition(" in ")[0].removeprefix("timing of ") == candidate


def _note(what: str, why: str, candidate: str) -> str:
    return f"{what.partition(' in ')[0]}: {_anonymous(why, candidate)}"  # without the layer


def _anonymous(text: str, candidate: str) -> str:
    """Return a text without paths and without the names of user, host and candidate, its module and its function.

    The rest of the line after an absolute path goes too, for its folders may have blanks in their names.
    """
    for pattern in _PATHS:
        text = pattern.sub("…", text)
    host = platform.node()
    names = [Path.home().name, host, host.partition(".")[0], candidate, *candidate.split(":")]
    with suppress(KeyError, OSError):  # a user without a name
        names.append(getpass.getuser())
    for name in sorted(filter(None, names), key=len, reverse=True):  # a whole name before its parts
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
    return text


_PATHS = (
    re.compile(r"""(["'`])(?:(?!\1).)*[/\\](?:(?!\1).)*\1"""),  # between quotes
    re.compile(r"(?<![^\s(\[{<=:,])(?:~\w*|[A-Za-z]:|\w+:/)?[/\\]+[^\s/\\].*"),  # absolute
    re.compile(r"\S*[/\\]\S*"),
)
