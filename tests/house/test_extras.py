"""Rooms of packages: `fluxq` alone runs checkpoints, extras bring what makes, judges and serves them."""

import ast
import json
import re
import tomllib
from pathlib import Path

import hidden
import pytest
from packaging.requirements import Requirement

from fluxq.base import devices, extras
from fluxq.jobs import environment
from fluxq.runtime.step_caches import cache_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RUN = """
import json, sys, torch, fluxq
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
call = {**fluxq.tiny.CALL_KWARGS, "num_inference_steps": 1, "output_type": "latent"}
def image():
    return pipe("a red three", generator=torch.Generator().manual_seed(0), **call).images
loaded = image()
fluxq.prepare(pipe)
fluxq.optimize(pipe)
files = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "fluxq"}
print(json.dumps({"finite": bool(loaded.isfinite().all() and image().isfinite().all()), "files": files}))
"""
COMMANDS = """
import contextlib, io, json, sys
from fluxq import cli
answers = {}
for line in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["fluxq", *line.split("|")]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    answers[line] = code, out.getvalue(), err.getvalue()
print(json.dumps(answers))
"""


def package(requirement: str) -> str:
    return re.split(r"[>=<;\\[ ]", requirement)[0]


def imported_at_once(source: str) -> set[str]:
    """Top-level names of what a module imports while it is imported itself: not in functions."""
    waiting, found = [ast.parse(source)], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            waiting += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize(
    ("extra", "name", "version"),
    [
        ("all", "open-clip-torch", "3.2.0"),  # its tokenizers of Hugging Face need transformers 4
        ("serve", "python-multipart", "0.0.12"),  # whose module had another name
    ],
)
def test_versions_that_cannot_work_are_not_admitted(extra: str, name: str, version: str) -> None:
    (admitted,) = (Requirement(each) for each in PROJECT["optional-dependencies"][extra] if package(each) == name)
    assert version not in admitted.specifier


def test_the_table_is_that_of_the_extra() -> None:
    assert {package(each) for each in PROJECT["optional-dependencies"]["all"]} == {*extras.ALL.values()}
    assert not {package(each) for each in PROJECT["dependencies"]} & {*extras.ALL.values()}
    assert {package(each) for each in PROJECT["optional-dependencies"]["serve"]} == {*extras.SERVE.values()}
    own = {package(each) for each in PROJECT["optional-dependencies"]["demo"]} - {"fluxq"}
    assert own == {*extras.DEMO.values()}
    known = extras.ALL.keys() | extras.SERVE.keys() | extras.DEMO.keys()
    assert {name for names in extras.NEEDED.values() for name in names} <= known
    assert "fluxq[all," in " ".join(PROJECT["optional-dependencies"]["test"])


def test_only_packages_of_the_extra_are_told_to_be_installed_with_it() -> None:
    assert extras.cure_of(ModuleNotFoundError("", name="vl_convert.x")) == (
        'the package vl-convert-python is not installed: pip install "fluxq[all]"'
    )
    assert extras.cure_of(ModuleNotFoundError("", name="torch")) == extras.cure_of(ModuleNotFoundError("")) == ""


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ("0.40.0", 'SeaCache needs diffusers >= 0.41, and 0.40.0 is installed: pip install "diffusers>=0.41"'),
        ("0.41.0.dev0", ""),
        ("1.0", ""),
    ],
)
def test_a_feature_names_the_version_that_it_needs(present: str, said: str, monkeypatch) -> None:
    monkeypatch.setattr(devices, "package_version", lambda name: present)
    assert extras.too_old_for("SeaCache") == said and extras.too_old_for("TaylorSeer") == ""
    assert (said in environment.environment()["lacking"]) == bool(said)
    if said:
        with pytest.raises(ValueError, match=r"sea=0\.2.*diffusers >= 0\.41"):
            cache_of("sea=0.2")
    else:
        assert cache_of("sea=0.2").value == 0.2


def test_what_is_missing_of_the_extra_is_listed(monkeypatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "vl_convert" else True)
    assert extras.missing_of_all() == 'without vl-convert-python not every command works: pip install "fluxq[all]"'
    monkeypatch.setattr(extras, "find_spec", lambda name: True)
    assert extras.missing_of_all() == ""


@pytest.fixture(scope="module")
def answers(plain_checkpoint, tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Command -> exit code, stdout and stderr, without the packages of the extra."""
    from fluxq.cli import cli

    checkpoint = str(plain_checkpoint("int8"))
    lines = ["--version", "--help", *(f"{name}|--help" for name in cli.commands)]
    lines += ["env|--json", "families", f"inspect|{checkpoint}", f"verify|{checkpoint}", "plan|tiny"]
    lines += ["quantize|tiny", "auto|tiny|--bits|6", "steps|tiny|--compute|0.5"]
    lines += [f"{name}|{checkpoint}" for name in ("eval", "bench", "debug", "report", "history", "verify|--passport")]
    lines += ["gate|tiny|tiny", f"serve|{checkpoint}", f"demo|{checkpoint}"]
    without, folder = [*extras.ALL, *extras.SERVE, *extras.DEMO], tmp_path_factory.mktemp("commands")
    done = hidden.run(COMMANDS, *lines, without=without, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_checkpoint_runs_without_the_extra(plain_checkpoint) -> None:
    done = hidden.run(RUN, str(plain_checkpoint("int8")), without=[*extras.ALL])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["finite"] and len(found["files"]) > 40
    for name, file in found["files"].items():
        if file is None:  # a folder without a module of its own
            continue
        at_once = imported_at_once(Path(file).read_text(encoding="utf-8"))
        assert not at_once & extras.ALL.keys(), name


@pytest.mark.long
def test_a_checkpoint_runs_without_triton_and_what_windows_lacks(plain_checkpoint) -> None:
    lacking = "import os, signal; del os.O_DIRECTORY, signal.SIGHUP\nfrom fluxq import cli\n"
    done = hidden.run(lacking + RUN, str(plain_checkpoint("int8")), without=["triton"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["finite"]


@pytest.mark.slow
def test_doctor_without_triton_says_what_to_install(tmp_path) -> None:
    done = hidden.run(COMMANDS, "doctor|--chip|sm_90|--interpret", without=["triton"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ((code, out, err),) = json.loads(done.stdout).values()
    assert (code, out) == (2, "") and "doctor proves kernels in Triton, which is not there: install triton" in err


@pytest.mark.long
def test_every_command_starts_without_the_extra(answers) -> None:
    from fluxq.cli import cli

    for line in ("--version", "--help", *(f"{name}|--help" for name in cli.commands), "env|--json", "families"):
        code, out, err = answers[line]
        assert (code, err) == (0, "") and out, line
    for line, (code, out, err) in answers.items():
        if line.startswith(("inspect|/", "verify|/")) or line == "plan|tiny":
            assert code == 0 and out, (line, err)
    assert "Traceback" not in str(answers)


@pytest.mark.slow
def test_a_command_that_needs_the_extra_names_it(answers) -> None:
    asked = {}
    for line in answers:
        name = " ".join(line.split("|")[:2]) if "--passport" in line else line.split("|")[0]
        if name in extras.NEEDED and not line.endswith("--help"):
            asked[line] = name
    assert {*asked.values()} == extras.NEEDED.keys()
    for line in asked:
        code, out, err = answers[line]
        extra, absent = {"serve": ("serve", "fastapi"), "demo": ("demo", "gradio")}.get(asked[line], ("all", "scipy"))
        assert (code, out) == (2, "") and f'pip install "fluxq[{extra}]"' in err and absent in err, line
