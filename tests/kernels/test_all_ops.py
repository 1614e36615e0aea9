"""The table of ops: all that one op has of its own stands in its folder."""

import ast
import json
from pathlib import Path

import pytest

from fluxq.kernels.all_ops import OPS, product_of
from fluxq.kernels.op import Op
from fluxq.kernels.tiles import TUNED
from tests.house.test_house import our_modules

# Module -> ops that it calls or asks about, outside comments and docstrings: users of an op, which hold nothing of it.
NAMED_ELSEWHERE = {
    # Device code that quantizes shares what decodes scales.
    "fluxq.kernels.codes": {"dequantize"},
    # The op that chooses among products quantizes first.
    "fluxq.kernels.dispatch": {"weight_only_matmul"},
    "fluxq.kernels.launch": {"quantize_activation"},
    "fluxq.kernels.linear": {"quantize_activation"},
    # References that are those of others, and more.
    "fluxq.kernels.ops": {"quantize_activation"},
    # What fuses blocks, lays layers out and compiles ahead.
    "fluxq.runtime.fused_forms": {"adaln_quantize", "qk_norm_rope", "quantize_activation"},
    "fluxq.runtime.optimize": {"quantize_activation"},
    "fluxq.runtime.attention_choice": {"attention_fp8"},
    # Of what a layer holds, its steps to codes are compared by value.
    "fluxq.runtime.graphs": {"quantize_activation"},
}


def named(source: str) -> set[str]:
    """Ops that a source text names: by a string, an import or a name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fluxq."):
            found |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found & OPS.keys()


MORE_FILES = {"attention_fp8": {"warp_specialized.py"}}  # another kernel of the op, in Gluon


def folder_of(op: Op) -> str:
    return f"fluxq.kernels.{op.file}."


def test_no_op_is_named_outside_its_folder_and_the_table() -> None:
    found = {}
    for module, path in our_modules().items():
        if module.startswith(("fluxq.kernels.", "fluxq.runtime.")) and module != "fluxq.kernels.all_ops":
            names = named(path.read_text(encoding="utf-8"))
            if names and not any(module.startswith(folder_of(op)) for op in OPS.values()):
                found[module] = names
    assert found == NAMED_ELSEWHERE
    offered, imported = 'refusal("scaled_matmul", "fp8", chip)', "from fluxq.kernels.scaled_matmul.op import OP"
    assert named(offered) == named(imported) == {"scaled_matmul"}


@pytest.mark.parametrize("name", OPS)
def test_the_folder_of_an_op_holds_all_of_it(name: str) -> None:
    op = OPS[name]
    folder = TUNED.parent / op.file
    assert {path.name for path in folder.glob("*.py")} == {"op.py", "kernel.py"} | MORE_FILES.get(name, set())
    assert op.how in ("native", "decode", "memory") and len(set(op.formats)) == len(op.formats) > 0
    assert callable(op.kernel.launch)
    cells = Path(__file__).parents[2] / "benchmarks" / "kernels" / "cells" / f"{op.file}.py"
    assert cells.is_file()
    assert json.loads((TUNED.parent / "compiled" / f"{op.file}.json").read_text(encoding="utf-8"))


def test_every_folder_and_table_is_of_an_op_of_the_table() -> None:
    files = {op.file for op in OPS.values()}
    assert {path.parent.name for path in TUNED.parent.glob("*/kernel.py")} == files
    assert {path.stem for path in (TUNED.parent / "compiled").glob("*.json")} == files
    assert files - {path.stem for path in TUNED.glob("*.json")} == {"adaln_quantize"}  # whose tiles follow from rows


@pytest.mark.parametrize(
    ("weights", "activations", "row_scale", "expected"),
    [
        ("fp8", "fp8", False, ("scaled_matmul", "fp8")),
        ("fp8", "fp8_1x128", False, ("scaled_matmul", "fp8-fp8_1x128")),
        ("fp8_1x128", "fp8_1x128", False, None),
        ("nvfp4", "nvfp4", False, ("block_scaled_matmul", "nvfp4")),
        ("nvfp4", "int8", True, ("w4a8_matmul", "nvfp4-int8")),
        ("nvfp4", "int8", False, None),
        ("int4", None, False, None),
        ("mxfp8", "int8", True, None),
    ],
)
def test_the_product_of_two_formats(weights: str, activations: str | None, row_scale: bool, expected) -> None:
    found = product_of(weights, activations, row_scale)
    assert (found and (found[0].name, found[1])) == expected
