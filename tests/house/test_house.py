"""The house: imports run one way, heavy packages load late, the folders are where the package expects them."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
from shared import without_spread

ROOT = Path(__file__).parents[2]
FOLDERS = ("recipes", "kernels", "calibrate", "quantize", "eval")  # at the top level, linked into src/fluxq
ORDER = ("ground", "recipes", "kernels", "calibrate", "quantize", "runtime", "eval", "face")
HEAVY = ("torch", "diffusers", "transformers", "triton", "pydantic", "rich", "scipy")


def room(module: str) -> str:
    """Return the room of the house that a module of ours is in."""
    part = module.split(".")[1] if "." in module else ""
    if part in ("base", "tiny"):
        return "ground"
    return part if part in ORDER else "face"


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a source text of the wheel, which several tests look through."""
    return tuple(ast.walk(ast.parse(source)))


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    yield
    nodes.cache_clear()


def imports(source: str) -> Iterator[str]:
    """Every module of ours that a source text imports, at any depth, lazily or not."""
    for node in nodes(source):
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
    """Name -> file of every module in the wheel."""
    tops = {ROOT / folder: f"fluxq/{folder}" for folder in FOLDERS} | {ROOT / "src" / "fluxq": "fluxq"}
    files = {Path(name, path.relative_to(top)): path for top, name in tops.items() for path in top.rglob("*.py")}
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): path for file, path in files.items()}


def imported_modules(source: str, modules: Container[str]) -> Iterator[str]:
    """The modules among `modules` that a source text imports, or imports names from."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)


def circles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Modules that import one another, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reached[start] = seen
    return {tuple(sorted(m for m in graph if m in reached[n] and n in reached[m])) for n in graph if n in reached[n]}


def test_imports_run_one_way() -> None:
    modules = our_modules()
    assert len(modules) > 30
    wrong = [line for name, path in modules.items() for line in backward(name, path.read_text(encoding="utf-8"))]
    assert wrong == []


def test_a_backward_import_is_found_even_inside_a_function() -> None:
    lazy = "def f():\n    from fluxq.eval import report\n"
    assert backward("fluxq.quantize.run", lazy) == ["fluxq.quantize.run -> fluxq.eval"]
    assert backward("fluxq.kernels.linear", "import fluxq.runtime.layout") == [
        "fluxq.kernels.linear -> fluxq.runtime.layout"
    ]
    assert backward("fluxq.base.model", "from fluxq import jobs") == ["fluxq.base.model -> fluxq.jobs"]
    assert backward("fluxq.jobs.making", "import fluxq.eval.report") == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    modules = our_modules()
    graph = {
        name: {*imported_modules(path.read_text(encoding="utf-8"), modules)} - {"fluxq"}
        for name, path in modules.items()
        if name != "fluxq"
    }
    assert circles(graph) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {("a", "b", "c")}


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_types_of_a_linked_folder_are_checked(folder: str) -> None:
    """Pyright follows no link that it finds in a folder."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"src/fluxq/{folder}" in settings["tool"]["pyright"]["include"]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", ["fluxq, {}, {}", pytest.param("{}, {}, fluxq", marks=pytest.mark.slow)], ids=["first", "last"]
)
def test_diffusers_and_transformers_learn_of_fluxq_in_either_order(order: str) -> None:
    modules = "diffusers.quantizers.auto", "transformers.quantizers.auto"
    code = f"import {order.format(*modules)}\n"
    code += "\n".join(f"print({module}.AUTO_QUANTIZER_MAPPING['fluxq'].__module__)" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fluxq.integrations.diffusers", "fluxq.integrations.transformers"]


def test_outside_the_command_line_nothing_prints_exits_or_asserts() -> None:
    allowed = {"fluxq.cli", "fluxq.commands.show"}
    for name, path in our_modules().items():
        for node in nodes(path.read_text(encoding="utf-8")):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and name not in allowed:
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.exit", "exit"), f"{path}:{node.lineno}"


def test_no_docstring_begins_with_a_question() -> None:
    """A first line says what a function does or what a thing is, and no later sentence has "What ..." for a subject."""
    riddle = re.compile(r"(What|Whether|Which|Where|Who|Whose|How|When|Why)\b")
    files = [path for folder in (*FOLDERS, "src", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    sources = [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in files]
    others = re.compile(rf'"""\s*{riddle.pattern}')  # parsing those without takes seconds
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        (path, ast.get_docstring(node) or "")
        for path, source in sources
        if path.parts[0] not in ("benchmarks", "tests") or others.search(source)
        for node in nodes(source)
        if isinstance(node, documented)
    ]
    assert sum(bool(text) for _, text in texts) > 2500
    assert [f"{path}: {text.splitlines()[0]}" for path, text in texts if riddle.match(text)] == []
    subject = re.compile(r"[.:]\s+(What|Whether|Which|Who|Whose)\b[^?]*?[.:]\s")
    product = [(path, text) for path, text in texts if path.parts[0] in {*FOLDERS, "src"}]
    assert [f"{path}: {found[0].strip()}" for path, text in product if (found := subject.search(text + "\n"))] == []


def test_no_variable_has_a_participle_for_a_name() -> None:
    """A value has its noun: a file's `config` is not `said`, a layer's `tensors` are not `held` or its `own`."""
    vague = {"found", "held", "said", "own", "asked"}
    names: list[tuple[str, int, str]] = []
    for module, path in our_modules().items():
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append((module, node.lineno, node.id))
            elif isinstance(node, ast.arg):
                names.append((module, node.lineno, node.arg))
    in_files = {("fluxq.calibrate.calls", "held")}  # keys of files that were written before
    assert len(names) > 30_000
    assert [row for row in names if row[2].strip("_") in vague and (row[0], row[2]) not in in_files] == []


def test_no_function_takes_more_than_eight_arguments() -> None:
    """Beside commands, whose options click passes, the options of the verbs in `fluxq.__all__`, and device code."""
    wide, seen = [], 0
    for module, path in our_modules().items():
        for node in nodes(path.read_text(encoding="utf-8")):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            seen += 1
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if re.search(r"\bjit\b|click|option|argument", decorators):
                continue
            given = [*node.args.posonlyargs, *node.args.args]
            given = given[given[:1] != [] and given[0].arg in ("self", "cls") :]
            is_verb = module == "fluxq.verbs" and not node.name.startswith("_")
            count = len(given) + (0 if is_verb else len(node.args.kwonlyargs))
            if count > 8:
                wide.append(f"{module}.{node.name} takes {count}")
    assert seen > 3000 and wide == []


def test_no_kernel_takes_more_than_sixteen_parameters() -> None:
    """Arguments that belong together are one of them, a named tuple."""
    seen, longer = 0, set()
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.FunctionDef) and {"triton.jit", "gluon.jit"} & {
                *map(ast.unparse, node.decorator_list)
            }:
                seen += 1
                longer |= {node.name} if len(node.args.args) > 16 else set()
    assert seen > 60 and longer == set()


LOAD = """
import sys
from pathlib import Path
from diffusers import FluxPipeline
import fluxq
FluxPipeline.from_pretrained(sys.argv[1])
print(*sorted(name for name, module in sys.modules.items() if name.startswith("fluxq") and module.__file__))
"""


def test_run_slow_takes_sets_from_all_over_a_test() -> None:
    assert without_spread(range(12), 4) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert without_spread(range(6), 4) == [2, 5] and without_spread(range(3), 4) == []


@pytest.mark.long
def test_loading_a_checkpoint_imports_nothing_that_makes_one(plain_checkpoint) -> None:
    """Neither calibration, rounding, exchange, fusing of LoRAs and plans, nor the families' rows."""
    words = [sys.executable, "-c", LOAD, str(plain_checkpoint("int8"))]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    making = re.compile(r"fluxq\.(calibrate|eval|jobs|commands|quantize|recipes\.(plan|recipe|famil|all_))")
    assert "fluxq.integrations.diffusers" in loaded and "fluxq.recipes.computing" in loaded
    assert [name for name in loaded if making.match(name)] == []
    assert len(loaded) <= 24, loaded
