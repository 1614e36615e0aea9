"""A machine with a GPU often has torch and Triton only: kernels, their tests and the session must not ask for more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a fresh process no other distribution than these, and what they need, is found.
BARE = """
import importlib, importlib.abc, importlib.metadata as metadata, re, sys


def spelt(name):
    return re.sub("[-_.]+", "-", name).lower()


wanted, present = ["torch", "triton", "click", "pytest", "numpy"], set()
while wanted:
    name = wanted.pop()
    if spelt(name) in present:
        continue
    try:
        needs = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        continue
    present.add(spelt(name))
    wanted += [re.match(r"[\\w.-]+", text)[0] for text in needs if "extra ==" not in text]
others = {
    package
    for package, distributions in metadata.packages_distributions().items()
    if not present & set(map(spelt, distributions)) and package not in ("fluxq", "tests", "_distutils_hack")
}


class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in others else self.finder.find_spec(name, path, target)


assert {"diffusers", "transformers", "pydantic", "yaml", "xxhash", "safetensors"} <= others
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def on_a_bare_machine(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'src')!r}, {str(ROOT / 'benchmarks')!r}]\n"
    return subprocess.run(
        [sys.executable, "-c", BARE + paths + code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
    )


@pytest.mark.slow
def test_what_a_session_runs_is_imported() -> None:
    modules = ["gpu_session", *(f"benchmarks.kernels.{name}" for name in ("tune", "bench", "same_bits", "on_gpu"))]
    done = on_a_bare_machine(f"for name in {modules}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_session_runs_its_stages_there_and_says_what_the_others_lack(tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE)  # of all processes that stages start
    out, only = tmp_path / "out", [word for name in ("first", "rates", "step", "runs") for word in ("--only", name)]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_session.py"), "--dry-run", "--out", str(out), *only]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and "no report: " in done.stdout, done.stdout + done.stderr  # proofs are missing
    stages = {row["stage"]: row for row in json.loads((out / "results.json").read_text())["stages"]}
    verdicts = {name: row["verdict"] for name, row in stages.items()}
    assert verdicts == {"first": "right", "rates": "right", "step": "not here", "runs": "right"}, done.stdout
    assert stages["step"]["about"] == "not installed: diffusers, pydantic, peft, accelerate"
    assert json.loads((out / "rates.json").read_text())["results"]


@pytest.mark.slow
def test_tests_of_the_kernels_are_collected() -> None:
    code = (
        "import pytest\nsys.exit(pytest.main(['-o', 'addopts=--import-mode=importlib', '-q', '--co', *sys.argv[1:]]))"
    )
    files = sorted(map(str, (ROOT / "tests" / "kernels").glob("test_*_kernel.py")))
    done = on_a_bare_machine(code, "--noconftest", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_a_package_that_is_absent_fails_to_import() -> None:
    done = on_a_bare_machine("import pydantic")
    assert done.returncode == 1 and "No module named 'pydantic'" in done.stderr
