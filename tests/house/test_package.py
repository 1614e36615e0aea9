"""The wheel: built from a clean export, installed outside the repository, it does the main job."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA_SUFFIXES = (".yaml", ".json", ".txt", ".md", ".html", ".safetensors", ".typed")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks or would track, links kept as links."""
    folder = tmp_path_factory.mktemp("export")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    return folder / "source"


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return wheel_of(source)


def wheel_of(source: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", "..", "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(source.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment outside the repository that holds the wheel and sees this environment's packages."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    # Only the running environment's packages are wanted, not its editable fluxq, which another .pth there names.
    (packages / "running.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    script = folder / "bin" / "fluxq"
    script.write_text(f"#!{folder / 'bin' / 'python'}\nfrom fluxq.cli import main\nmain()\n")
    script.chmod(0o755)
    return folder


def run(environment: Path, *command: str) -> str:
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=environment, capture_output=True, text=True, env={**os.environ, "PATH": path, "PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_only_fluxq_and_every_file_of_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fluxq"}
    package = ROOT / "src" / "fluxq"
    wanted = set()
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            if "__pycache__" not in folder and (file.endswith(DATA_SUFFIXES) or file.endswith(".py")):
                wanted.add("fluxq/" + (Path(folder) / file).relative_to(package).as_posix())
    assert len(wanted) > 40
    assert wanted <= names, sorted(wanted - names)


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym()]  # some systems make none
        # Python 3.11 has filters from its fourth release on.
        unpack = partial(archive.extractall, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall
        unpack(tmp_path)
    unpacked = next(each for each in tmp_path.iterdir() if each.is_dir())
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(wheel_of(unpacked)) as other:
        assert {each.filename: each.CRC for each in other.infolist() if "/RECORD" not in each.filename} == {
            each.filename: each.CRC for each in archive.infolist() if "/RECORD" not in each.filename
        }


def test_a_checkout_without_symbolic_links_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "src" / "fluxq").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    for folder in ("calibrate", "eval", "kernels", "quantize", "recipes"):
        (tmp_path / "src" / "fluxq" / folder).write_text(f"../../{folder}")  # what git writes where it makes no links
    build = "from setuptools import build_meta; build_meta.get_requires_for_build_wheel()"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "git clone -c core.symlinks=true" in done.stderr and "Traceback" not in done.stderr


def test_the_installed_wheel_answers(environment: Path) -> None:
    code = "import fluxq; print(fluxq.__file__); print(*fluxq.FORMATS)"
    where, formats = run(environment, str(environment / "bin" / "python"), "-c", code).splitlines()
    assert Path(where).is_relative_to(environment)
    assert "nvfp4" in formats.split()
    assert run(environment, "fluxq", "--version").startswith("fluxq, version ")


@pytest.mark.long
def test_the_installed_wheel_does_the_main_job(environment: Path) -> None:
    (environment / "short.yaml").write_text("extends: nvfp4\ngates: []\n")
    order = ("quantize", "--recipe", "short.yaml", "--profile", "rtn", "--num-inference-steps", "2")
    record = json.loads(run(environment, "fluxq", *order, "--output", "out", "--json"))
    assert record["model"]["license"]["license"] == "apache-2.0"
    assert record["check"]["finite"] and (environment / "out" / "model_index.json").is_file()
    shutil.rmtree(environment / "out")
