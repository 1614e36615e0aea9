"""Pages of the site that are made: one for each shipped recipe, the command line, and Python.

Figures are taken from tables of documents, which tests hold to the result files. Signatures and docstrings are read
from the source; nothing heavy is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

import fluxq
from fluxq.recipes.recipe import find_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
_WIDTH = 110  # columns of a command's help


def made_pages(root: Path = ROOT) -> dict[str, str]:
    """Return place -> text of the pages that stand in no file of the checkout."""
    recipes = {f"recipes/{name}.md": recipe_page(name, root) for name in shipped_recipes()}
    return {"commands.md": commands_page(), "api.md": api_page(), **recipes}


def recipe_page(name: str, root: Path = ROOT) -> str:
    """Return the page of a shipped recipe: for whom it is, what was measured, published models under it, the file."""
    text = find_recipe(name).read_text(encoding="utf-8")
    about = re.findall("^# For whom: (.*)$", text, flags=re.MULTILINE)[0]
    lines = [f"# {name}", "", about[0].upper() + about[1:], "", f"    fluxq quantize MODEL --recipe {name}", ""]
    for title, page, mark, words in MEASURED:
        rows = rows_about(name, *table_behind(root / page, mark))
        if len(rows) > 1:
            lines += [f"## {title}", "", words, "", *_turned(rows), ""]
    lines += ["## In published models", "", _PUBLISHED, "", *_published(name, root), ""]
    return "\n".join([*lines, "## The file", "", "```yaml", text.rstrip(), "```", ""])


def rows_about(recipe: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Return the header and the rows whose first cell begins with a recipe's name."""
    return [header, *(row for row in rows if re.match(rf"`{re.escape(recipe)}`( |$)", row[0]))]


def table_behind(page: Path, mark: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the first table behind a mark of a document; ValueError without any."""
    lines = page.read_text(encoding="utf-8").partition(mark)[2].splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("|")), None)
    if start is None:
        raise ValueError(f"{page.name} has no table behind {mark}")
    stop = next((index for index, line in enumerate(lines) if index > start and not line.startswith("|")), len(lines))
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:stop])
    return header, rows


def commands_page() -> str:
    """Return the page of the command line: what each command prints for --help."""
    from fluxq.cli import cli

    lines = ["# Commands", "", "What `fluxq COMMAND --help` prints.", ""]
    for name, command in _commands(cli, "fluxq"):
        context = click.Context(command, info_name=name, max_content_width=_WIDTH, terminal_width=_WIDTH)
        lines += [f"## {name}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def _commands(group: click.Group, above: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in sorted(group.commands.items()):
        yield f"{above} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{above} {name}")


def api_page() -> str:
    """Return the page of `import fluxq`."""
    lines = ["# In Python", "", *_documented(_parsed("fluxq")), ""]
    for name in fluxq.__all__:
        if not name.startswith("_"):
            lines += [f"## {name}", "", *_entry_of(name), ""]
    return "\n".join(lines)


def _entry_of(name: str) -> list[str]:
    """Return the entry of a public name, by the source of its home."""
    home = fluxq._HOMES.get(name)
    if home is None:
        return [*_entry(f"fluxq.{name}", _parsed(f"fluxq.{name}"))]
    module = _parsed(home)
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return [*_entry(f"fluxq.{name}", node)]
    return _directive("data", f"fluxq.{name}", _documented(module))  # a table, which its module describes


def _entry(name: str, node: ast.FunctionDef | ast.ClassDef | ast.Module) -> Iterator[str]:
    """Yield the entry of a function, a class with its members, or a module with its functions."""
    if isinstance(node, ast.FunctionDef):
        yield from _directive("function", f"{name}({ast.unparse(node.args)}){_returns(node)}", _documented(node))
    elif isinstance(node, ast.ClassDef):
        yield from _directive("class", name, _documented(node))
        for member in _public(node):
            yield from ["", *_member(f"{name}.{member.name}", member)]
    else:
        yield from _documented(node)
        for member in _public(node):
            yield from ["", *_entry(f"{name}.{member.name}", member)]


def _member(name: str, node: ast.FunctionDef) -> list[str]:
    kinds = {ast.unparse(each) for each in node.decorator_list}
    if kinds & {"property", "cached_property"}:
        return _directive("attribute", name, _documented(node))
    arguments = ast.unparse(node.args)
    if "staticmethod" not in kinds:
        arguments = arguments.partition(",")[2].strip()  # without self or cls
    return _directive("method", f"{name}({arguments}){_returns(node)}", _documented(node))


def _public(node: ast.ClassDef | ast.Module) -> Iterator[ast.FunctionDef]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and ast.get_docstring(each):
            yield each


def _returns(node: ast.FunctionDef) -> str:
    return f" -> {ast.unparse(node.returns)}" if node.returns else ""


def _directive(kind: str, signature: str, body: Iterable[str]) -> list[str]:
    return [f"````{{py:{kind}}} {signature}", *body, "````"]


def _documented(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> list[str]:
    return [*_prose(ast.get_docstring(node) or "")]


def _prose(docstring: str) -> Iterator[str]:
    """Yield a docstring as Markdown: `name: what it is` becomes an entry of a list, what is indented stays as it is."""
    first, *rest = docstring.splitlines() or [""]
    yield _escaped(first)
    is_entry = False
    for line in rest:
        if match := re.match(r"([a-z_]+(?:, [a-z_]+)*): (.*)", line):
            yield from () if is_entry else [""]
            yield f"- **{_escaped(match[1])}**: {_escaped(match[2])}"
            is_entry = True
        else:
            is_entry = is_entry and line.startswith("    ")
            yield _escaped(line) if is_entry or not line.startswith("    ") else line


def _escaped(text: str) -> str:
    """Return a line of a docstring whose signs mean themselves in Markdown, outside of code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else re.sub(r"([*_<\[])", r"\\\1", part) for index, part in enumerate(parts))


def _parsed(module: str) -> ast.Module:
    place = ROOT / "src" / Path(*module.split("."))
    file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
    return ast.parse(file.read_text(encoding="utf-8"))


def _published(recipe: str, root: Path) -> list[str]:
    """Return the column of a recipe in the table of published models."""
    header, rows = table_behind(root / "docs" / "families.md", "<!-- families -->")
    column, plain = header.index(recipe), header.index("16 bit, GB")
    cells = ([row[0], row[plain], *row[column].split(" / ")] for row in rows)
    return _table(["model", "16 bit, GB", "bits per weight", "checkpoint, GB", "to serve, GB"], cells)


def _turned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose columns are the rows of another; lines without a figure are left out."""
    header, *lines = (cells for cells in zip(*rows, strict=True) if any(cells[1:]))
    return _table(header, lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


_PUBLISHED = "Computed from configurations, at most; of each model alone ([the table of all](../docs/families.md))."
# Title, document, mark of its table, and words before what is taken of it.
MEASURED = (
    (
        "Measured",
        "recipes/README.md",
        "<!-- recipes: begin -->",
        "On the embedded pipeline; what each line means stands [below the whole table](README.md). "
        "*ms* are modelled, of FLUX.1-dev.",
    ),
    (
        "In other programs",
        "docs/exchange.md",
        "<!-- recipes -->",
        "What `fluxq export` makes of FLUX.1-dev's checkpoint: what becomes of modulation, and GB of the file "
        "([what the words mean](../docs/exchange.md#which-recipe-goes-where)).",
    ),
)
