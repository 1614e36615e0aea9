"""The house: imports run one way, heavy packages load late, the folders are where the package expects them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("recipes", "calibrate", "quantize", "kernels", "eval")
ORDER = ("ground", *FOLDERS, "face")
HEAVY = ("torch", "diffusers", "transformers", "triton", "pydantic", "rich", "scipy")


def room(module: str) -> str:
    """Which room of the house a module of ours is in."""
    part = module.split(".")[1] if "." in module else ""
    if part in ("base", "tiny"):
        return "ground"
    return part if part in FOLDERS else "face"


def imports(source: str) -> Iterator[str]:
    """Every module of ours that a source text imports, at any depth, lazily or not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fluxq")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module is"
            if node.module == "fluxq":
                yield from (f"fluxq.{alias.name}" for alias in node.names)
            elif node.module and node.module.startswith("fluxq."):
                yield node.module


def backward(module: str, source: str) -> list[str]:
    """Imports of `module` that run against ORDER."""
    here = ORDER.index(room(module))
    return [f"{module} -> {name}" for name in imports(source) if ORDER.index(room(name)) > here]


def our_modules() -> dict[str, Path]:
    found = {}
    for folder in FOLDERS:
        found |= {f"fluxq.{folder}.{path.stem}": path for path in (ROOT / folder).rglob("*.py")}
    for path in (ROOT / "src" / "fluxq").rglob("*.py"):
        relative = path.relative_to(ROOT / "src").with_suffix("")
        found[".".join(relative.parts).removesuffix(".__init__")] = path
    return found


def test_imports_run_one_way() -> None:
    modules = our_modules()
    assert len(modules) > 30
    wrong = [line for name, path in modules.items() for line in backward(name, path.read_text(encoding="utf-8"))]
    assert wrong == []


def test_a_backward_import_is_found_even_inside_a_function() -> None:
    lazy = "def f():\n    from fluxq.eval import report\n"
    assert backward("fluxq.quantize.tensor", lazy) == ["fluxq.quantize.tensor -> fluxq.eval"]
    assert backward("fluxq.base.model", "from fluxq import jobs") == ["fluxq.base.model -> fluxq.jobs"]
    assert backward("fluxq.jobs", "import fluxq.eval.report") == []


def test_ground_imports_nothing_above_it() -> None:
    for name, path in our_modules().items():
        if room(name) == "ground":
            assert {room(found) for found in imports(path.read_text(encoding="utf-8"))} <= {"ground"}, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_top_level_folder_is_linked_and_is_no_package_of_its_own(folder: str) -> None:
    link = ROOT / "src" / "fluxq" / folder
    assert link.is_symlink() and link.resolve() == ROOT / folder
    # A top-level package called `kernels` would hide the Hugging Face package of that name from diffusers.
    assert not list((ROOT / folder).rglob("__init__.py"))
    assert (ROOT / folder / "README.md").is_file()


@pytest.mark.parametrize(
    "statement",
    [
        *("import fluxq", "import fluxq; fluxq.FORMATS", "import fluxq; fluxq.tiny.PROMPTS", "import fluxq.cli"),
        "sys.path.insert(0, 'tests'); import conftest",  # in the process that hands tests out
    ],
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    code = f"import sys\n{statement}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = done.stdout.strip()
    assert loaded == "[]"


def test_every_public_name_is_there() -> None:
    import fluxq

    for name in fluxq.__all__:
        assert getattr(fluxq, name) is not None
    assert set(fluxq.__all__) <= set(dir(fluxq))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fluxq.nothing  # noqa: B018


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom fluxq.cli import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage:" in done.stdout and done.stdout.strip().endswith("[]")


@pytest.mark.parametrize("order", ["fluxq, {}, {}", "{}, {}, fluxq"], ids=["first", "last"])
def test_diffusers_and_transformers_learn_of_fluxq_in_either_order(order: str) -> None:
    modules = "diffusers.quantizers.auto", "transformers.quantizers.auto"
    code = f"import {order.format(*modules)}\n"
    code += "\n".join(f"print({module}.AUTO_QUANTIZER_MAPPING['fluxq'].__module__)" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fluxq.integrations.diffusers", "fluxq.integrations.transformers"]


def test_outside_the_command_line_nothing_prints_exits_or_asserts() -> None:
    allowed = {"fluxq.cli", "fluxq.show", "fluxq.tiny.train", "fluxq.kernels.bench"}
    for name, path in our_modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and name not in allowed:
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.exit", "exit"), f"{path}:{node.lineno}"
