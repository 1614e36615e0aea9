"""Prompts for calibration and evaluation, from wherever a user keeps them.

DATASETS at the end of the file names the published sets whose columns are known. None of them is part of fluxq; each
has a licence of its own.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxq.base.console import first_line, logger
from fluxq.base.files import sha256_json
from fluxq.base.model import PROMPTS_FILE, ModelFolder

COLUMNS = ("prompt", "prompts", "caption", "captions", "text", "sentences")

_BUNDLED = Path(__file__).parent / "default_prompts.txt"
_MAX_CHARACTERS = 10_000  # no text encoder reads a tenth of it

# Where a value stands, for messages, and the value: a text, or several captions of one image.
Row = tuple[str, object]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in order and where they came from."""

    source: str
    prompts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the texts in order."""
        return sha256_json(self.prompts)

    @property
    def duplicates(self) -> int:
        """How many prompts have occurred before in the set."""
        return len(self.prompts) - len(set(self.prompts))

    def take(self, count: int) -> tuple[str, ...]:
        """The first `count`; a shorter set starts over, and each repeat gets noise of its own."""
        return tuple(self.prompts[i % len(self.prompts)] for i in range(count))


@dataclass(frozen=True)
class Dataset:
    """A published prompt set.

    repo: hub id of the dataset, None where it is not on the hub. file: the one file of it that holds the prompts, read
    without the rest; None: `split` is read with the `datasets` library. column: of the prompts. count: how many there
    are, None where that is not known here. about: what it is, and where to get what is not on the hub.
    """

    repo: str | None
    file: str | None
    split: str
    column: str
    count: int | None
    license: str
    about: str


def load_prompts(source: str, model: ModelFolder, shuffle: int | None = None) -> PromptSet:
    """Read prompts from a file, a folder that `datasets` saved, a name in DATASETS, or any other `datasets` id.

    "default" is the model folder's own `fluxq_prompts.txt`, else the set bundled with fluxq. Files: .txt (one a line),
    .jsonl, .json and .yaml (entries by name, or a list), .csv, .tsv and .parquet. Tables need a column called as in
    COLUMNS; of several captions of an image the first is taken. shuffle: seed of an order of its own, the same on every
    machine; None keeps the set's. Raises FileNotFoundError or ValueError naming source, row and cure.
    """
    found = _find(source, model)
    if found.duplicates:
        logger.warning("%s: %d of %d prompts occur more than once", source, found.duplicates, len(found.prompts))
    if shuffle is None:
        return found
    prompts = list(found.prompts)
    random.Random(shuffle).shuffle(prompts)
    return PromptSet(found.source, tuple(prompts))


def _find(source: str, model: ModelFolder) -> PromptSet:
    if source == "default":
        own = model.path / PROMPTS_FILE
        path, label = (own, f"{model.name}/{PROMPTS_FILE}") if own.is_file() else (_BUNDLED, "bundled")
        return PromptSet(label, _prompts(_read_text(path), path))
    path = Path(source)
    if path.is_file():
        return PromptSet(path.name, _prompts(_reader(path)(path), path))
    if path.is_dir():
        return PromptSet(path.name, _prompts(_read_saved(path), path))
    if path.suffix.lower() in READERS:
        raise FileNotFoundError(f"prompt file {source!r} does not exist")
    names = {key.lower(): name for name, row in DATASETS.items() for key in (name, row.repo) if key}
    if source.lower() in names:
        name = names[source.lower()]
        return PromptSet(name, _prompts(_read_dataset(name), name))
    return PromptSet(source, _prompts(_read_hub(source, "train", COLUMNS), source))


def _prompts(rows: Iterable[Row], where: object) -> tuple[str, ...]:
    prompts = tuple(_prompt(value, place) for place, value in rows)
    if not prompts:
        raise ValueError(f"{where}: holds no prompts")
    return prompts


def _prompt(value: object, place: str) -> str:
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, list) or value is None or value == "":
        raise ValueError(f"{place}: the prompt is empty; fill it in, or take the row out")
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a prompt, found {type(value).__name__}")
    text = value.strip()
    if not text:
        raise ValueError(f"{place}: the prompt is empty; fill it in, or take the row out")
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(
            f"{place}: a prompt of {len(text)} characters, and text encoders read some hundred words; shorten it to "
            f"{_MAX_CHARACTERS} at most, or check that one row holds one prompt"
        )
    return text


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: prompt files end in {', '.join(READERS)}, not {path.suffix!r}")
    return reader


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; save it again as UTF-8") from None


def _read_text(path: Path) -> Iterator[Row]:
    yield from ((f"{path}:{number}", line) for number, line in enumerate(_lines(path), start=1) if line.strip())


def _read_jsonl(path: Path) -> Iterator[Row]:
    for place, line in _read_text(path):
        try:
            row = json.loads(str(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not a JSON object ({error.msg})") from None
        yield place, _entry(row, place)


def _read_json(path: Path) -> Iterator[Row]:
    try:
        value = json.loads("\n".join(_lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    yield from _entries(value, path)


def _read_yaml(path: Path) -> Iterator[Row]:
    import yaml

    try:
        value = yaml.safe_load("\n".join(_lines(path)))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML ({first_line(error)})") from None
    yield from _entries(value, path)


def _entries(value: object, path: Path) -> Iterator[Row]:
    """The entries of a document that maps names to prompts, or lists them."""
    if not isinstance(value, (dict, list)):
        raise ValueError(f"{path}: expected prompts by name or a list of them, found {type(value).__name__}")
    pairs = value.items() if isinstance(value, dict) else enumerate(value, start=1)
    yield from ((f"{path}: entry {key}", _entry(row, f"{path}: entry {key}")) for key, row in pairs)


def _entry(row: object, place: str) -> object:
    if not isinstance(row, (str, dict)):
        raise ValueError(f"{place}: expected an object or a string, found {type(row).__name__}")
    return row if isinstance(row, str) else row[_column(row, place)]


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    rows = csv.DictReader((f"{line}\n" for line in _lines(path)), delimiter=delimiter)
    try:
        column = _column(rows.fieldnames or (), f"{path}:1")
        yield from ((f"{path}:{rows.line_num}", row[column]) for row in rows)
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num + 1}: {error}") from None


def _read_tsv(path: Path) -> Iterator[Row]:
    return _read_csv(path, delimiter="\t")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or no parquet file ({first_line(error)})") from None
    return _numbered(table.column(_column(table.column_names, str(path))).to_pylist(), path)


def _read_saved(path: Path) -> Iterator[Row]:
    """A folder that `save_to_disk` wrote: one table, or several splits of which only one may be there."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        raise ValueError(
            f"{path}: a folder that `datasets` cannot load ({first_line(error)}); give one that save_to_disk wrote, or "
            f"a file that ends in {', '.join(READERS)}"
        ) from None
    if isinstance(saved, datasets.DatasetDict):
        if len(saved) != 1:
            raise ValueError(f"{path}: holds the splits {', '.join(map(str, saved))}; give the folder of one of them")
        saved = next(iter(saved.values()))
    return _numbered(saved[_column(saved.column_names, str(path))], path)


def _read_dataset(name: str) -> Iterator[Row]:
    """A set of DATASETS: only its prompts where they are in a file of their own."""
    row = DATASETS[name]
    if row.repo is None:
        raise FileNotFoundError(
            f"prompts {name!r} are not on the hub: get {row.file} ({row.about}) and give it with --prompts FILE"
        )
    if row.file is None:
        return _read_hub(row.repo, row.split, (row.column,))
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(row.repo, row.file, repo_type="dataset"))
    except Exception as error:
        raise _unreachable(name, f"{row.file} of the dataset {row.repo}", error) from None
    return _reader(path)(path)


def _read_hub(name: str, split: str, columns: Sequence[str]) -> Iterator[Row]:
    import datasets

    try:
        table = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise _unreachable(name, f"the {split!r} split of the dataset {name}", error) from None
    return _numbered(table[_column(table.column_names or (), name, columns)], name)


def _unreachable(name: str, what: str, error: Exception) -> FileNotFoundError:
    return FileNotFoundError(
        f"prompts {name!r}: neither a file nor a dataset that can be reached: {first_line(error)}. Get {what} where "
        "there is a network, and give it with --prompts FILE"
    )


def _numbered(values: Iterable[object], where: object) -> Iterator[Row]:
    yield from ((f"{where}: row {number}", value) for number, value in enumerate(values, start=1))


def _column(names: Iterable[str], where: str, columns: Sequence[str] = COLUMNS) -> str:
    lowered = {str(name).lower(): name for name in names}
    for column in columns:
        if column.lower() in lowered:
            return lowered[column.lower()]
    raise ValueError(f"{where}: no column called {', '.join(columns)}; found: {', '.join(lowered) or 'none'}")


READERS = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".yaml": _read_yaml,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}

# Ids, files and columns as programs that read these sets use them; licences as the sets or their readers state them.
DATASETS = {
    "MJHQ-30K": Dataset(
        "playgroundai/MJHQ-30K",
        "meta_data.json",  # the rest is gigabytes of pictures
        "test",
        "prompt",
        30_000,
        "Playground v2.5 Community License",
        "3000 prompts of each of 10 categories, with pictures that FID can be taken to",
    ),
    "sDCI": Dataset(
        "mit-han-lab/svdquant-datasets",
        "sDCI.yaml",
        "train",
        "prompt",
        None,
        "not stated",
        "summaries of densely captioned images",
    ),
    "COCO-2014": Dataset(
        "yerevann/coco-karpathy",
        None,
        "test",
        "sentences",
        5_000,
        "CC BY 4.0",
        "captions of val2014 pictures in Karpathy's test split, the first of each picture",
    ),
    "MLPerf-COCO-2014": Dataset(
        None,
        "captions_source.tsv",
        "validation",
        "caption",
        5_000,
        "CC BY 4.0",
        "captions of val2014 pictures, in text_to_image/coco2014/captions of the GitHub repository mlcommons/inference",
    ),
    "DrawBench": Dataset(
        "sayakpaul/drawbench",
        None,
        "train",
        "Prompts",
        200,
        "Apache-2.0",
        "hard prompts of 11 kinds (Saharia et al. 2022)",
    ),
    "PartiPrompts": Dataset(
        "nateraw/parti-prompts",
        "PartiPrompts.tsv",
        "train",
        "Prompt",
        1_632,
        "Apache-2.0",
        "prompts of 12 kinds and 11 challenges (Yu et al. 2022)",
    ),
}
