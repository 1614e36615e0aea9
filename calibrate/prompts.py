"""Prompts for calibration and evaluation, from wherever a user keeps them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxq.base.console import first_line
from fluxq.base.files import sha256_json
from fluxq.base.model import PROMPTS_FILE, ModelFolder

COLUMNS = ("prompt", "caption", "text")

_BUNDLED = Path(__file__).parent / "default_prompts.txt"


@dataclass(frozen=True)
class PromptSet:
    """Prompts in order and where they came from."""

    source: str
    prompts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the texts in order."""
        return sha256_json(self.prompts)

    def take(self, count: int) -> tuple[str, ...]:
        """The first `count`; a shorter set starts over, and each repeat gets noise of its own."""
        return tuple(self.prompts[i % len(self.prompts)] for i in range(count))


def load_prompts(source: str, model: ModelFolder) -> PromptSet:
    """Read prompts from a .txt (one a line), .jsonl, .csv or .parquet file, or a `datasets` id.

    "default" is the model folder's own `fluxq_prompts.txt`, else the set bundled with fluxq. Tables need a column
    called prompt, caption or text. Raises FileNotFoundError or ValueError naming source, line and cure.
    """
    if source == "default":
        own = model.path / PROMPTS_FILE
        path, label = (own, f"{model.name}/{PROMPTS_FILE}") if own.is_file() else (_BUNDLED, "bundled")
        return PromptSet(label, _require_some(_read_text(path), path))
    path = Path(source)
    if path.is_file():
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            raise ValueError(f"{path}: prompt files end in {', '.join(READERS)}, not {path.suffix!r}")
        return PromptSet(path.name, _require_some(reader(path), path))
    if path.suffix.lower() in READERS:
        raise FileNotFoundError(f"prompt file {source!r} does not exist")
    return PromptSet(source, _require_some(_read_hub(source), source))


def _read_text(path: Path) -> Iterable[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; save it again as UTF-8") from None


def _read_jsonl(path: Path) -> Iterable[str]:
    for number, line in enumerate(_read_text(path), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a JSON object ({error.msg})") from None
            if not isinstance(row, (str, dict)):
                raise ValueError(f"{path}:{number}: expected an object or a string, found {type(row).__name__}")
            yield row if isinstance(row, str) else row[_column(row, f"{path}:{number}")]


def _read_csv(path: Path) -> Iterable[str]:
    rows = csv.DictReader(f"{line}\n" for line in _read_text(path))
    try:
        column = _column(rows.fieldnames or (), f"{path}:1")
        yield from (row[column] for row in rows)
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num + 1}: {error}") from None


def _read_parquet(path: Path) -> Iterable[str]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or no parquet file ({first_line(error)})") from None
    return table.column(_column(table.column_names, str(path))).to_pylist()


def _read_hub(name: str) -> Iterable[str]:
    import datasets

    try:
        table = datasets.load_dataset(name, split="train")
    except Exception as error:
        raise FileNotFoundError(
            f"prompts {name!r}: neither a file nor a dataset that can be reached: {first_line(error)}"
        ) from None
    columns = list(table.column_names or ())
    return table[_column(columns, name)]


def _column(names: Iterable[str], where: str) -> str:
    lowered = {name.lower(): name for name in names}
    for column in COLUMNS:
        if column in lowered:
            return lowered[column]
    raise ValueError(f"{where}: no column called {', '.join(COLUMNS)}; found: {', '.join(lowered) or 'none'}")


def _require_some(texts: Iterable[str], where: object) -> Sequence[str]:
    prompts = tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())
    if not prompts:
        raise ValueError(f"{where}: holds no prompts")
    return prompts


READERS = {".txt": _read_text, ".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
