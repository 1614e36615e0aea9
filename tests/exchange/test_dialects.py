"""The table of dialects: all that one program's files have of their own stands in one file."""

import ast

import pytest
from exchange_readers import READERS, WIDENED

from fluxq.commands.exchanging import EXPORTS
from fluxq.quantize.exchange.dialects import DIALECTS, RULES, WRITERS
from tests.house.test_house import our_modules

NAMED_ELSEWHERE = {  # module -> dialects that it names, outside comments and docstrings
    "fluxq.commands.exchanging": set(WRITERS) - {"compressed_tensors"},  # --help must not import the table
    # What `fluxq recipe new` exports to; which shipped recipes keep their codes there.
    "fluxq.commands.writing_recipes": set(WRITERS) - {"compressed_tensors", "fp8_blocks"},
    "fluxq.jobs.advising": set(WRITERS) - {"compressed_tensors", "fp8_blocks"},
    # A recipe's `compat` is limited to what nunchaku's or ComfyUI's file can hold.
    "fluxq.recipes.recipe": {"nunchaku", "comfy"},
    # Which layers ComfyUI has by itself.
    "fluxq.integrations.comfyui.load": {"comfy"},
    # ModelOpt's mark beside ComfyUI's is a contradiction of its own.
    "fluxq.quantize.exchange.comfy": {"modelopt"},
    # These share tensors: two layouts of nunchaku's kernels.
    "fluxq.quantize.exchange.nunchaku": {"nunchaku"},
}


def named(source: str) -> set[str]:
    """Dialects that a source text names by a string."""
    return {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)} & DIALECTS.keys()


@pytest.mark.slow
def test_no_dialect_is_named_outside_its_file_and_the_table() -> None:
    found = {}
    for module, path in our_modules().items():
        names = named(path.read_text(encoding="utf-8"))
        own = {name for name, dialect in DIALECTS.items() if dialect.decode.__module__ == module}
        if names - own and module != "fluxq.quantize.exchange.dialects":
            found[module] = names - own
    assert found == NAMED_ELSEWHERE
    assert named('if dialect == "comfy": pass') == {"comfy"}


def test_every_dialect_is_known_by_its_name_and_has_what_its_kind_needs() -> None:
    assert all(RULES[name] is dialect and dialect.name == name for name, dialect in DIALECTS.items())
    for name, dialect in DIALECTS.items():
        assert dialect.marks, f"nothing tells a file of {name}"
        assert bool(dialect.encode) == bool(dialect.writer) == bool(dialect.format_key) == (name in WRITERS)
        assert dialect.rows or name in WIDENED, f"{name} has no layers"
    assert {reader.dialect for reader in READERS} == WRITERS.keys()
    assert EXPORTS == tuple(DIALECTS[name].option or name for name in WRITERS)


@pytest.mark.parametrize("name", DIALECTS)
def test_tensors_that_only_a_dialect_has_are_found_in_files(name: str) -> None:
    """A suffix that another dialect has too is one that all layers may have."""
    mine = DIALECTS[name].suffixes
    others = {suffix for other, row in DIALECTS.items() if row.suffixes is not mine for suffix in row.suffixes}
    assert not others & set(mine)
