"""Prompts for calibration and evaluation, from files, folders and datasets, with other columns of their rows.

ARGUMENTS at the end of the file names the columns that become arguments of a row's call. DATASETS names the published
sets whose columns are known. None of them is part of fluxq; each has a licence of its own.
"""

from __future__ import annotations

import csv
import difflib
import functools
import inspect
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from fluxq.base.console import first_line, logger, path_near
from fluxq.base.files import is_text, sha256_file, sha256_json, stamps
from fluxq.base.model import LARGEST, PROMPTS_FILE, ModelFolder, whole_number
from fluxq.base.untrusted_yaml import require_modest

if TYPE_CHECKING:
    from PIL import Image

COLUMNS = ("prompt", "prompts", "caption", "captions", "text", "sentences")

_BUNDLED = Path(__file__).parent / "default_prompts.txt"
_MAX_CHARACTERS = 10_000  # no text encoder reads a tenth of it
_MAX_DEPTH = 10  # of lists and mappings in YAML; two are a file of prompts
_MAX_ROWS, _ROWS_AT_ONCE, _MAX_TABLE = 1_000_000, 64, 1 << 28  # of a file; the last in bytes, unpacked
_MAX_VALUES = 1 << 22  # of a table: fifty bytes each where one row holds all of them
_MAX_LINE, _MAX_LINES = 1 << 20, 1 << 22  # characters of a line; lines of a file, empty ones too
_MAX_DOCUMENT = 1 << 24  # bytes of JSON or YAML, read as a whole; parsed, each may take thirty
_MAX_VALUES_OF_YAML = 250_000  # two seconds
_MAX_PIXELS = 1 << 26  # of an image file: four times those of a diffusion model, 200 MB decoded
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")  # decoders without scripts, delegates or external references
_NEAR = 0.8  # of difflib: a column this like a known one is taken for its misspelling

# Where a row stands, for messages; its prompt, a text or several captions of one image; and all columns of a table.
Entry = tuple[str, object, Mapping[str, object]]


@dataclass(frozen=True)
class ImageFile:
    """An image that a row names.

    mode: "RGB", or "L" for a mask.
    sha256: of the file's bytes when it was read.
    """

    path: Path
    mode: str
    sha256: str

    def load(self) -> Image.Image:
        """Return its pixels, upright; ValueError if the file has changed since it was read."""
        if not self.path.is_file() or sha256_file(self.path) != self.sha256:
            raise ValueError(f"{self.path}: the image has changed since the prompts were read; start again")
        return _decoded(self.path, self.mode)


# Of a call of the pipeline, sorted by name.
Arguments = tuple[tuple[str, str | int | float | ImageFile], ...]


@dataclass(frozen=True)
class PromptRow:
    """A prompt, and arguments of the pipeline's call for it alone."""

    prompt: str
    arguments: Arguments = ()

    def described(self, seed: int) -> tuple[Any, ...]:
        """Return (prompt, seed), and the arguments where there are any, in JSON's types: images by their SHA-256."""
        if not self.arguments:
            return self.prompt, seed
        plain = {k: f"sha256:{v.sha256}" if isinstance(v, ImageFile) else v for k, v in self.arguments}
        return self.prompt, seed, plain

    def shares_call_with(self, other: PromptRow) -> bool:
        """Tell whether one call of the pipeline can make both: texts may differ, other arguments may not.

        No row with an image does: of a list of images some pipelines take one for each prompt (FLUX Fill), others all
        of them for every prompt (Qwen-Image Edit Plus).
        """
        mine, theirs = dict(self.arguments), dict(other.arguments)
        if mine.keys() != theirs.keys() or any(isinstance(value, ImageFile) for value in mine.values()):
            return False
        return all(isinstance(value, str) or value == theirs[name] for name, value in mine.items())


@dataclass(frozen=True)
class PromptSet:
    """Prompts in order, with the arguments of their calls, and their source."""

    source: str
    rows: tuple[PromptRow, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """Texts alone."""
        return tuple(row.prompt for row in self.rows)

    @property
    def digest(self) -> str:
        """SHA-256 of the texts in order, with arguments where there are any."""
        if not any(row.arguments for row in self.rows):
            return sha256_json(self.prompts)
        return sha256_json([row.described(0) for row in self.rows])

    @property
    def duplicates(self) -> int:
        """Number of rows that repeat an earlier row of the set."""
        return len(self.rows) - len(set(self.rows))

    @property
    def alike(self) -> PromptSet:
        """The rows whose images can be compared in one tensor: the first, and those that can share a call with it."""
        first, *rows = self.rows
        return PromptSet(self.source, (first, *(row for row in rows if first.shares_call_with(row))))

    def items(self, count: int, seed: int) -> list[tuple[PromptRow, int]]:
        """Return `count` pairs (row, seed + i); a shorter set starts over, and each repeat gets noise of its own."""
        rows = self.rows
        return [(rows[i % len(rows)], seed + i) for i in range(count)]


@dataclass(frozen=True)
class Dataset:
    """A published prompt set.

    repo: hub id of the dataset, None where it is not on the hub.
    file: the one file of it with the prompts, read without the rest; None: `split` is read with the `datasets` library.
    column: of the prompts.
    count: of prompts, None where it is not known here.
    about: description, and the source of a set that is not on the hub.
    """

    repo: str | None
    file: str | None
    split: str
    column: str
    count: int | None
    about: str


def load_prompts(
    source: str, model: ModelFolder, shuffle: int | None = None, pipeline: type | None = None
) -> PromptSet:
    """Read prompts from a file, a folder that `datasets` saved, a name in DATASETS, or any other `datasets` id.

    "default" is the model folder's own `fluxq_prompts.txt`, else the set bundled with fluxq. Files: .txt (one a line),
    .jsonl, .json and .yaml (entries by name, or a list), .csv, .tsv and .parquet. Tables need a column called as in
    COLUMNS; of several captions of an image the first is taken. Raises FileNotFoundError or ValueError naming source,
    row and cure.

    shuffle: seed of an order of its own, the same on every machine; None keeps the set's.
    pipeline: the class whose `__call__` takes a file's columns of ARGUMENTS; None reads prompts alone.
    """
    label, where, entries = _find(source, model, is_alone=pipeline is None)
    arguments = _arguments_reader(Path(source).parent, pipeline) if pipeline else lambda _place, _columns: ()
    rows = []
    for place, value, columns in entries:
        rows.append(PromptRow(_prompt(value, place), arguments(place, columns)))
        if len(rows) > _MAX_ROWS:
            raise ValueError(
                f"{where}: more than {_MAX_ROWS} prompts, which are the most that are read; make it shorter"
            )
    if not rows:
        raise ValueError(f"{where}: holds no prompts")
    if shuffle is not None:
        random.Random(shuffle).shuffle(rows)
    prompts = PromptSet(label, tuple(rows))
    if prompts.duplicates:
        logger.warning("%s: %d of %d prompts occur more than once", source, prompts.duplicates, len(rows))
    return prompts


def require_source(source: str) -> None:
    """Raise FileNotFoundError for a missing file of prompts, ValueError for a FIFO or device.

    Any other source may be a dataset's name.
    """
    path = Path(source)
    if path.suffix.lower() in READERS and not path.exists():
        raise FileNotFoundError(f"prompt file {source!r} does not exist{path_near(path)}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"prompts {source!r}: a FIFO or device, which ends nowhere; write the prompts to a file")


def _find(source: str, model: ModelFolder, is_alone: bool) -> tuple[str, object, Iterable[Entry]]:
    """Return the source's name, its place, and its rows. is_alone: whether only their prompts are wanted."""
    if source == "default":
        file = model.path / PROMPTS_FILE
        path, label = (file, f"{model.name}/{PROMPTS_FILE}") if file.is_file() else (_BUNDLED, "bundled")
        return label, path, _read_text(path)
    path = Path(source)
    if path.is_file():
        reader = _reader(path)
        return path.name, path, _read_parquet(path, is_alone) if reader is _read_parquet else reader(path)
    if path.is_dir():
        return path.name, path, _read_saved(path)
    require_source(source)
    names = {key.lower(): name for name, row in DATASETS.items() for key in (name, row.repo) if key}
    if source.lower() in names:
        name = names[source.lower()]
        return name, name, _read_dataset(name)
    return source, source, _read_hub(source, "train", COLUMNS)


def _prompt(value: object, place: str) -> str:
    if isinstance(value, list) and value:
        value = value[0]
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, list) or text is None or text == "":
        raise ValueError(f"{place}: the prompt is empty; fill it in, or take the row out")
    if not isinstance(text, str):
        raise ValueError(f"{place}: expected a prompt, found {type(text).__name__}")
    if not is_text(text):
        raise ValueError(f"{place}: the prompt holds half of a surrogate pair, which is no text; write it again")
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(
            f"{place}: a prompt of {len(text)} characters, and text encoders read some hundred words; shorten it to "
            f"{_MAX_CHARACTERS} at most, or check that one row holds one prompt"
        )
    return text


def _arguments_reader(folder: Path, pipeline: type) -> Callable[[str, Mapping[str, object]], Arguments]:
    """Return the function arguments(place, columns) of a row. folder: of the prompt file and its images.

    ValueError for an argument that the pipeline does not take, and for a bad value.
    """
    parameters = inspect.signature(pipeline.__call__).parameters
    warned: set[str] = set()

    def arguments(place: str, columns: Mapping[str, object]) -> Arguments:
        values: dict[str, str | int | float | ImageFile] = {}
        for column, value in columns.items():
            nearest = _nearest(column)
            if nearest is None or value is None or value != value:  # NaN: a missing number of a table
                continue
            if nearest != column.lower():
                if column not in warned:
                    logger.warning("%s: column %r is ignored; did you mean %r?", place, column, nearest)
                warned.add(column)
                continue
            name, read = ARGUMENTS[nearest]
            if name not in parameters:
                raise ValueError(
                    f"{place}: column {column!r} is the argument {name}, which {pipeline.__name__} does not take; "
                    "rename the column or take it out"
                )
            if name in values:
                raise ValueError(f"{place}: two columns are the argument {name}; take out {column!r} or the other")
            values[name] = read(value, f"{place}: column {column!r}", folder)
        return tuple(sorted(values.items()))

    return arguments


@functools.cache
def _nearest(column: str) -> str | None:
    """Return the column of ARGUMENTS of that name in any case, or one that it may be a misspelling of."""
    return next(iter(difflib.get_close_matches(column.lower(), ARGUMENTS, 1, _NEAR)), None)


def _read_words(value: object, where: str, _folder: Path) -> str:
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS or not is_text(value):
        raise ValueError(f"{where}: expected a text of at most {_MAX_CHARACTERS} characters, found {_shown(value)}")
    return value


def _read_whole(value: object, where: str, folder: Path, most: int) -> int:
    number = _read_number(value, where, folder)
    if not 1 <= number <= most or number != int(number):
        raise ValueError(f"{where}: expected {whole_number(most)}, found {_shown(value)}")
    return int(number)


def _read_number(value: object, where: str, _folder: Path) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{where}: expected a number that is not negative, found {_shown(value)}")
    return number


def _read_image(value: object, where: str, folder: Path, mode: str) -> ImageFile:
    """Return the image at a path relative to `folder`; it is decoded once to check that it can be."""
    if not isinstance(value, str) or not value or "\0" in value or not is_text(value):
        raise ValueError(f"{where}: expected the path of an image file, found {_shown(value)}")
    parts = PureWindowsPath(value)  # which knows the roots, drives and separators of other systems too
    path = folder / value
    if parts.anchor or ".." in parts.parts or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{where}: {value!r} is not a path within the folder of the prompt file; put the image there and give its "
            "path from that folder"
        )
    if not path.is_file():
        raise ValueError(f"{where}: image {value!r} does not exist in {folder}")
    try:
        return ImageFile(path, mode, _checked(path, mode, str(stamps([path]))))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@functools.cache
def _checked(path: Path, mode: str, _stamp: str) -> str:
    """Return the SHA-256 of an image file that can be decoded; once, however many rows name it."""
    _decoded(path, mode)
    return sha256_file(path)


def upright(image: Image.Image) -> Image.Image:
    """Return an image of 8 bits as the camera stood by its EXIF data, of which damaged parts are passed over."""
    from PIL import ImageOps

    image.load()
    with suppress(Exception):  # Pillow raises all kinds over what is damaged
        image.getexif()
    image.info.pop("exif", None)  # or it would be written anew for the turned image
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):  # gray of 16 bits, of which Pillow makes white from 255 on
        turned = turned.point(lambda value: value / 256).convert("L")
    return turned


def _decoded(path: Path, mode: str) -> Image.Image:
    """Return the pixels of an image file, upright by its EXIF data; ValueError for a damaged, a huge and no image."""
    from PIL import Image

    try:
        with Image.open(path, formats=_IMAGE_FORMATS) as image:
            if image.width * image.height <= _MAX_PIXELS:
                return upright(image).convert(mode)
            size = f"{image.width}x{image.height} pixels"
    except Image.DecompressionBombError:
        size = "far too many pixels"
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{path}: damaged, or no image of the formats {', '.join(_IMAGE_FORMATS)} ({first_line(error)})"
        ) from None
    raise ValueError(f"{path}: an image of {size}; at most {_MAX_PIXELS} are read: make it smaller")


def _shown(value: object) -> str:
    """Return a number or a short text as it is, of any other value the type."""
    return repr(value) if isinstance(value, (int, float, str)) and len(str(value)) < 80 else type(value).__name__


def _reader(path: Path) -> Callable[[Path], Iterator[Entry]]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: prompt files end in {', '.join(READERS)}, not {path.suffix!r}")
    return reader


def _lines(path: Path) -> Iterator[str]:
    """Yield lines without their ends; only the present one is in memory."""
    _require_short(path, _MAX_TABLE)
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number in itertools.count(1):
                line = stream.readline(_MAX_LINE)
                if len(line) == _MAX_LINE or number > _MAX_LINES:
                    most = f"of more than {_MAX_LINE} characters" if number <= _MAX_LINES else "too many"
                    raise ValueError(f"{path}:{number}: a line {most}; check that this is a file of prompts")
                if not line:
                    return
                yield line.removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; save it again as UTF-8") from None


def _document(path: Path) -> str:
    """Return the text of a file that is read as a whole."""
    _require_short(path, _MAX_DOCUMENT)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; save it again as UTF-8") from None


def _require_short(path: Path, most: int) -> None:
    if path.stat().st_size > most:
        raise ValueError(f"{path}: {path.stat().st_size >> 20} MiB; at most {most >> 20} are read: make it shorter")


def _read_text(path: Path) -> Iterator[Entry]:
    yield from ((f"{path}:{number}", line, {}) for number, line in enumerate(_lines(path), start=1) if line.strip())


def _read_jsonl(path: Path) -> Iterator[Entry]:
    for place, line, _ in _read_text(path):
        try:
            row = json.loads(str(line))
        except (ValueError, RecursionError) as error:  # bad JSON, a number of thousands of digits, nesting
            raise ValueError(f"{place}: not a JSON object ({first_line(error)})") from None
        yield place, *_entry(row, place)


def _read_json(path: Path) -> Iterator[Entry]:
    text = _document(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting
        raise ValueError(f"{path}: not JSON ({first_line(error)})") from None
    yield from _entries(value, path)


def _read_yaml(path: Path) -> Iterator[Entry]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, ten times as fast, where PyYAML was built so
    text = _document(path)
    try:
        require_modest(text, _MAX_VALUES_OF_YAML, _MAX_DEPTH, loader=loader, cure="; make it shorter, or a .jsonl file")
        value = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # of numbers, dates and nesting
        raise ValueError(f"{path}: not YAML ({first_line(error)})") from None
    yield from _entries(value, path)


def _entries(value: object, path: Path) -> Iterator[Entry]:
    """Yield the entries of a document that maps names to prompts, or lists them."""
    if not isinstance(value, (dict, list)):
        raise ValueError(f"{path}: expected prompts by name or a list of them, found {type(value).__name__}")
    pairs = value.items() if isinstance(value, dict) else enumerate(value, start=1)
    yield from ((f"{path}: entry {key}", *_entry(row, f"{path}: entry {key}")) for key, row in pairs)


def _entry(row: object, place: str) -> tuple[object, Mapping[str, object]]:
    """Return the prompt of an entry, and its columns."""
    if not isinstance(row, (str, dict)):
        raise ValueError(f"{place}: expected an object or a string, found {type(row).__name__}")
    if isinstance(row, str):
        return row, {}
    return row[_column(row, place)], {str(name): value for name, value in row.items()}


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Entry]:
    rows = csv.DictReader((f"{line}\n" for line in _lines(path)), delimiter=delimiter, strict=True)
    try:
        column = _column(rows.fieldnames or (), f"{path}:1")
        for row in rows:  # fields beyond the header's have no name; an empty field says nothing
            columns = {name: value for name, value in row.items() if name and value}
            yield f"{path}:{rows.line_num}", row[column], columns
    except csv.Error as error:
        what = str(error)
        if "field limit" in what:
            what = f"a field of more than {csv.field_size_limit()} characters; check that one row holds one prompt"
        elif "end of data" in what:
            what = "a quote is opened and never closed; close it, or double it where it is part of the text"
        raise ValueError(f"{path}:{rows.line_num + 1}: {what}") from None


def _read_parquet(path: Path, is_alone: bool = False) -> Iterator[Entry]:
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        column = _column(names, str(path))
        # Other columns may hold gigabytes of pictures.
        columns = [name for name in names if name == column or (_nearest(name) and not is_alone)]
        with pyarrow.parquet.ParquetFile(path) as file:
            texts = _require_small(path, file.metadata, columns)
        number = nbytes = 0
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:  # a text that recurs is there once
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns)
                nbytes += sum(_unpacked(chunk) for each in table.columns for chunk in each.chunks)
                if nbytes > _MAX_TABLE:  # a small file may hold more of it than there is memory
                    raise ValueError(f"{path}: more than {_MAX_TABLE >> 20} MiB of text unpacked; make it shorter")
                for batch in table.to_batches(_ROWS_AT_ONCE):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path}: row {number}", row[column], row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or no parquet file ({first_line(error)})") from None


def _require_small(path: Path, metadata: Any, columns: Sequence[str]) -> list[str]:
    """Return the names of columns of texts; ValueError for a file whose metadata tell of too much to read."""
    if metadata.num_rows > _MAX_ROWS:
        raise ValueError(f"{path}: {metadata.num_rows} rows; at most {_MAX_ROWS} are read: make it shorter")
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    read = [group.column(i) for group in groups for i in range(group.num_columns)]
    read = [each for each in read if each.path_in_schema.partition(".")[0] in columns]
    if sum(each.total_uncompressed_size for each in read) > _MAX_TABLE:
        raise ValueError(f"{path}: more than {_MAX_TABLE >> 20} MiB of text unpacked; make it shorter")
    if (count := sum(each.num_values for each in read)) > _MAX_VALUES:
        raise ValueError(f"{path}: {count} texts and numbers; at most {_MAX_VALUES} are read: make it shorter")
    return sorted({each.path_in_schema for each in read if each.physical_type == "BYTE_ARRAY"})


def _unpacked(array: Any) -> int:
    """Count the bytes that the values of an Arrow array take, recurring ones each time."""
    import pyarrow
    from pyarrow.compute import call_function as call

    if pyarrow.types.is_dictionary(array.type):
        used = array.indices.drop_null().value_counts()
        values = array.dictionary.take(used.field("values"))
        each = values.nbytes / max(len(values), 1)
        with suppress(pyarrow.ArrowException):  # of numbers, which are all of one size
            return call("sum", [call("multiply", [call("binary_length", [values]), used.field("counts")])]).as_py() or 0
        return int(each * len(array))
    if pyarrow.types.is_struct(array.type):
        return sum(map(_unpacked, array.flatten()))
    if pyarrow.types.is_nested(array.type) and hasattr(array, "flatten"):
        return _unpacked(array.flatten())
    return array.nbytes


def _read_saved(path: Path) -> Iterator[Entry]:
    """Yield the rows of a folder that `save_to_disk` wrote: one table, or a single split."""
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


def _read_dataset(name: str) -> Iterator[Entry]:
    """Yield the rows of a set of DATASETS: only its prompts where they are in a file of their own."""
    row = DATASETS[name]
    if row.repo is None:
        raise FileNotFoundError(
            f"prompts {name!r} are not on the hub: get {row.file} ({row.about}) and give it with --prompts FILE"
        )
    if row.file is None:
        yield from _read_hub(row.repo, row.split, (row.column,))
        return
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(row.repo, row.file, repo_type="dataset"))
    except Exception as error:
        raise _unreachable(name, f"{row.file} of the dataset {row.repo}", error) from None
    yield from ((place, value, {}) for place, value, _ in _reader(path)(path))


def _read_hub(name: str, split: str, columns: Sequence[str]) -> Iterator[Entry]:
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


def _numbered(values: Iterable[object], where: object) -> Iterator[Entry]:
    yield from ((f"{where}: row {number}", value, {}) for number, value in enumerate(values, start=1))


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
    ".tsv": functools.partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
}

_read_picture = functools.partial(_read_image, mode="RGB")
_read_mask = functools.partial(_read_image, mode="L")
_read_size = functools.partial(_read_whole, most=LARGEST["height"])
_read_frames = functools.partial(_read_whole, most=LARGEST["num_frames"])

# Column -> argument of the pipeline's call, and how a value of it is read.
ARGUMENTS: dict[str, tuple[str, Callable[[object, str, Path], str | int | float | ImageFile]]] = {
    "image": ("image", _read_picture),
    "last_image": ("last_image", _read_picture),
    "control_image": ("control_image", _read_picture),
    "mask": ("mask_image", _read_mask),
    "mask_image": ("mask_image", _read_mask),
    "negative_prompt": ("negative_prompt", _read_words),
    "height": ("height", _read_size),
    "width": ("width", _read_size),
    "frames": ("num_frames", _read_frames),
    "num_frames": ("num_frames", _read_frames),
    "guidance": ("guidance_scale", _read_number),
    "guidance_scale": ("guidance_scale", _read_number),
    "true_cfg_scale": ("true_cfg_scale", _read_number),
}

# Ids, files and columns as programs that read these sets use them; licences as the sets or their readers state them.
DATASETS = {
    "MJHQ-30K": Dataset(
        "playgroundai/MJHQ-30K",  # Playground v2.5 Community License
        "meta_data.json",  # the rest is gigabytes of pictures
        "test",
        "prompt",
        30_000,
        "3000 prompts of each of 10 categories, with pictures that FID can be taken to",
    ),
    "sDCI": Dataset(
        "mit-han-lab/svdquant-datasets",  # no licence stated
        "sDCI.yaml",
        "train",
        "prompt",
        None,
        "summaries of densely captioned images",
    ),
    "COCO-2014": Dataset(
        "yerevann/coco-karpathy",  # CC BY 4.0
        None,
        "test",
        "sentences",
        5_000,
        "captions of val2014 pictures in Karpathy's test split, the first of each picture",
    ),
    "MLPerf-COCO-2014": Dataset(
        None,
        "captions_source.tsv",  # CC BY 4.0
        "validation",
        "caption",
        5_000,
        "captions of val2014 pictures, in text_to_image/coco2014/captions of the GitHub repository mlcommons/inference",
    ),
    "DrawBench": Dataset(
        "sayakpaul/drawbench",  # Apache-2.0
        None,
        "train",
        "Prompts",
        200,
        "hard prompts of 11 kinds (Saharia et al. 2022)",
    ),
    "PartiPrompts": Dataset(
        "nateraw/parti-prompts",  # Apache-2.0
        "PartiPrompts.tsv",
        "train",
        "Prompt",
        1_632,
        "prompts of 12 kinds and 11 challenges (Yu et al. 2022)",
    ),
}
