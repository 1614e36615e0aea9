"""docs/exchange.md: its tables are what encode, decode, the writers and READERS say; its lines to copy run."""

import ast
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from exchange_readers import KEPT, READERS, WIDENED, Reader
from packaging.requirements import Requirement
from torch import Tensor

from fluxq.cli import cli
from fluxq.jobs.exchange import FORMATS
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.exchange.layer import QuantTensors
from fluxq.recipes import formats
from fluxq.recipes.formats import Scheme
from tests.exchange.test_layers import quantized, same_bytes, with_needs

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "exchange.md"
RAN = [reader for reader in READERS if reader.package]


# --- the tables


@dataclass
class Format:
    """Findings on a dialect's format.

    exported: (scheme, scheme that comes back) of layers that `export` moves as they are. read: the schemes that
    `import` makes. rounded: tensors that do not come back byte for byte.
    """

    exported: list[tuple[Scheme, Scheme]]
    read: list[Scheme]
    rounded: set[str]


@cache
def layer_of(text: str) -> Any:
    layer = quantized(text, 128, 128)
    if layer.scheme.smooth:  # no powers of two: the reciprocals that some dialects hold are rounded
        noise = torch.rand(128, generator=torch.Generator().manual_seed(3))
        layer.tensors["pre_quant_scale"] = (noise + 0.5).bfloat16()
    for name in ("weight_scale_2", "input_scale"):
        if name in layer.tensors:
            layer.tensors[name] = no_reciprocal(layer.tensors[name])
    return layer


def no_reciprocal(scale: Tensor) -> Tensor:
    """A number not much larger that is the reciprocal of no other: half of those above √2 times a power of two are."""
    mantissa, exponent = torch.frexp(scale)
    scale = torch.ldexp(mantissa.clamp(min=0.75), exponent)
    while 1 / (1 / scale) == scale:
        scale = torch.nextafter(scale, torch.tensor(torch.inf))
    return scale


def schemes() -> Iterable[Scheme]:
    """Every scheme that some dialect might hold: all weights, rounded activations or none, what comes with them."""
    for weights in (*formats.FORMATS, "int4_g128"):
        own = formats.for_tokens(formats.find_format(weights)).name
        for activations in dict.fromkeys((own, weights.removesuffix("_tensor"), "16bit")):
            found = itertools.product(("", "-static"), ("", "-smooth"), ("", "-hr16"), ("", "-r32"))
            for features in found:
                try:
                    yield Scheme.parse(f"{weights}-{activations}{''.join(features)}")
                except ValueError:
                    continue  # x has no global scale there


def found_formats(dialect: str) -> dict[str, Format]:
    """The dialect's formats, by what its encode and decode do with layers under every scheme."""
    row = DIALECTS[dialect]
    found = {held.name: Format([], [], set()) for held in row.rows}
    for scheme in schemes():
        own = layer_of(str(scheme))
        for layer in (own, with_needs(dialect, own)):  # as a checkpoint has it, and with what other files have beside
            try:
                encoded = row.encode(layer)  # pyright: ignore[reportOptionalCall]
            except ValueError:
                continue
            back = row.decode(encoded.tensors, layer.shape, encoded.entry)
            assert isinstance(back, QuantTensors), (dialect, scheme)
            name = name_of(encoded.entry, {held.name for held in row.rows})
            made = found[name]
            if layer is own and not any(held.unread and not held.beside for held in row.rows if held.name == name):
                made.exported.append((scheme, replace(back.scheme, rank=scheme.rank)))
            if not encoded.notes or back.scheme == scheme:
                made.read.append(back.scheme)
            made.rounded |= {
                name
                for name in back.tensors.keys() & layer.tensors.keys()
                if not same_bytes(back.tensors[name], layer.tensors[name])
            }
            break
    return found


def name_of(entry: dict[str, Any], known: set[str]) -> str:
    """Return the dialect's word that an entry of a layer says."""
    words = f"{entry.get('op')} {entry.get('precision')}"
    said = [value for value in (*entry.values(), words) if isinstance(value, str) and value in known]
    assert len(said) == 1, (entry, known)
    return said[0]


def worded(found: list[Scheme]) -> str:
    """Schemes by weights and activations; in brackets what may come with them, in one notation for all ranks."""
    parts: dict[str, list[frozenset[str]]] = {}
    for scheme in found:
        features = {"static": scheme.static_input, "smooth": scheme.smooth, "hr": scheme.regular}
        features |= {"rank": bool(scheme.rank)}
        plain = replace(scheme, static_input=False, smooth=False, hadamard=0, regular=False, rank=0)
        parts.setdefault(str(plain), []).append(frozenset(name for name, has in features.items() if has))
    words = []
    for plain, sets in parts.items():
        always, some = frozenset.intersection(*sets), frozenset.union(*sets)
        assert len(set(sets)) == 2 ** len(some - always), f"{plain}: the notation has no word for {sets}"
        features = [f"-{name}" if name in always else f"[-{name}]" for name in _FEATURES if name in some]
        words.append(f"`{plain}{''.join(features)}`")
    return ", ".join(words)


_FEATURES = ["static", "smooth", "hr", "rank"]


def exports(dialect: str, made: Format) -> str:
    if dialect not in WRITERS or not made.exported:
        return "no"
    same = worded([scheme for scheme, back in made.exported if as_it_is(scheme, back)])
    other: dict[str, list[Scheme]] = {}
    for scheme, back in made.exported:
        if not as_it_is(scheme, back):
            other.setdefault(str(replace(back, rank=0, smooth=False, static_input=False)), []).append(scheme)
    return "; ".join([*([same] if same else []), *(f"{worded(held)} as `{back}`" for back, held in other.items())])


def as_it_is(scheme: Scheme, back: Scheme) -> bool:
    return (scheme.weights, scheme.activations) == (back.weights, back.activations)


def programs(dialect: str, name: str) -> str:
    """Return the programs that read a format: those that tests run, then those that are known to and are not run."""
    of_dialect = [reader for reader in READERS if reader.dialect == dialect]
    ran = [reader.program for reader in of_dialect if name in reader.formats]
    known = {part for row in DIALECTS[dialect].rows if row.name == name for part in row.read_by.split(", ")}
    rest = [r.program for r in of_dialect if r.program in known and name not in r.formats]
    words = [*([f"**{', '.join(ran)}**"] if ran else []), *([f"not run: {', '.join(rest)}"] if rest else [])]
    return "; ".join(words) or "no program known"


def dialects_table() -> str:
    lines = ["| dialect | format | `export` writes layers of | `import` keeps | loaded by |", "|---" * 5 + "|"]
    for dialect, row in DIALECTS.items():
        spelt = dialect.replace("_", "-") if dialect.replace("_", "-") in FORMATS else dialect
        found = found_formats(dialect) if row.encode else {held.name: Format([], [], set()) for held in row.rows}
        for name, made in found.items():
            lost = ", ".join(f"`{tensor}`" for tensor in sorted(made.rounded))
            kept = KEPT.get((dialect, name), f"codes; rounds {lost}" if lost else "codes")
            loaded = programs(dialect, name) if dialect in WRITERS else "not written"
            beside = "".join({f", beside `{held.beside}`" for held in row.rows if held.name == name and held.beside})
            lines.append(f"| `{spelt}` | `{name}` | {exports(dialect, made)}{beside} | {kept} | {loaded} |")
        if dialect in WIDENED:
            names = ", ".join(f"`{name}`" for name in WIDENED[dialect])
            lines.append(f"| `{spelt}` | {names} | no | 16 bit, with `--dequantize` | not written |")
    return "\n".join(lines)


def programs_table() -> str:
    lines = ["| program | command | run | |", "|---|---|---|---|"]
    for reader in READERS:
        command = f"`{reader.command}`" if reader.command else f"({reader.dialect})"
        commit = f", commit {reader.commit}" if reader.commit else ""
        ran = f"{reader.package} {reader.version}{commit}" if reader.package else "not run"
        lines.append(f"| {reader.program} | {command} | {ran} | {reader.proof} |")
    return "\n".join(lines)


TABLES = {"dialects": dialects_table, "programs": programs_table}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_is_what_the_code_does(name: str, request: pytest.FixtureRequest) -> None:
    text, table = PAGE.read_text(encoding="utf-8"), TABLES[name]() + "\n"
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    written, mark, after = rest.partition(f"<!-- /{name} -->")
    assert mark, f"{PAGE.name} has no block {name!r}"
    if request.config.getoption("--write-features") and written != table:
        PAGE.write_text(f"{before}<!-- {name} -->\n{table}{mark}{after}", encoding="utf-8")
        written = table
    assert written == table, "`pytest --write-features tests/exchange/test_page.py` updates it"


# --- what is said to be run is run


def marked_tests() -> dict[tuple[str, str], list[str]]:
    """(program, dialect) of the marker `reader` -> the tests that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(TESTS.glob("*/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.reader":
                    program, dialect = (ast.literal_eval(argument) for argument in mark.args)
                    found.setdefault((program, dialect), []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.slow
def test_a_program_is_said_to_be_run_where_a_test_runs_it_and_nowhere_else() -> None:
    assert marked_tests().keys() == {(reader.program, reader.dialect) for reader in RAN}


def test_formats_that_are_said_to_be_read_are_the_dialects() -> None:
    for reader in READERS:
        rows = DIALECTS[reader.dialect].rows
        assert set(reader.formats) <= {row.name for row in rows} and bool(reader.formats) == bool(reader.package)
        assert reader.command or reader.package, f"{reader.program}: neither run nor a way to do it"
    known = {part for d in DIALECTS.values() for row in d.rows for part in row.read_by.split(", ") if part}
    assert known <= {reader.program for reader in READERS}


@pytest.mark.parametrize(
    "reader",
    [r for r in RAN if not (r.commit or r.interpreter)],
    ids=lambda reader: f"{reader.program} {reader.dialect}",
)
def test_what_is_run_is_what_the_package_asks_for(reader: Reader) -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = map(Requirement, project["dependencies"] + project["optional-dependencies"]["peers"])
    (own,) = [each for each in asked if each.name == reader.package]
    assert reader.version in own.specifier


# --- what is there to copy


@pytest.mark.slow
def test_the_lines_for_diffusers_make_an_image(plain_checkpoint, tmp_path, monkeypatch) -> None:
    """In this process, beside fluxq; test_export.py has one without."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-nvfp4").symlink_to(plain_checkpoint("nvfp4"))
    (reader,) = [reader for reader in READERS if (reader.program, reader.dialect) == ("diffusers", "bfl")]
    run(reader.command)
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(snippet, PAGE.name, "exec"), names)
    assert type(names["transformer"].transformer_blocks[0].attn.to_q).__name__ == "BFLNVFP4Linear"
    assert names["image"].size == (16, 16)


@pytest.mark.often(1)
@pytest.mark.parametrize("reader", [r for r in READERS if "export tiny-nvfp4" in r.command], ids=lambda r: r.program)
def test_every_command_writes_what_the_program_is_given(reader, plain_checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-nvfp4").symlink_to(plain_checkpoint("nvfp4"))
    (tmp_path / "ComfyUI/models/diffusion_models").mkdir(parents=True)
    ours, _, theirs = reader.command.partition(" && ")
    run(ours)
    given = [word for word in shlex.split(theirs) if "tiny-nvfp4" in word]
    assert all((tmp_path / word).exists() for word in given) and bool(given) == bool(theirs)
    if reader.program == "ComfyUI":
        assert list((tmp_path / "ComfyUI/models/diffusion_models").glob("*.safetensors"))


def run(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "fluxq"
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
