"""Tests that fluxq tells its own outputs from other files, and a finished command from another one's output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from click.testing import CliRunner
from example_report import example
from safetensors.torch import load_file, save_file
from shared import copy_of

from fluxq import tiny
from fluxq.base import output as module
from fluxq.base.tensors import save_weights
from fluxq.cli import cli

QUANTIZE = "quantize {model} --recipe {recipe} --profile rtn --no-check -o {output} -q"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def fluxq(words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, words.split())
    return done.exit_code, done.output


@pytest.fixture
def here(plain_checkpoint, tmp_path, monkeypatch) -> Path:
    """A folder to stand in, with the checkpoint ck."""
    copy_of(plain_checkpoint("fp8"), tmp_path / "ck")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "export ck --format torchao -o x",
        "export ck --format bfl -o x.safetensors",
        "import y.safetensors -o x --base {tiny}",
        "report run.json -o x.html",
    ],
)
def test_the_same_command_again_says_that_it_had_finished_and_another_that_something_stands_there(here, words):
    fluxq("export ck --format bfl -o y.safetensors")
    (here / "run.json").write_text(example().model_dump_json())
    words = words.format(tiny="tiny")
    assert fluxq(words)[0] == 0
    before = bytes_of(here)
    code, said = fluxq(words)
    assert code == 0 and bytes_of(here) == before, said
    assert "written before by this command" in said or words.startswith("report")
    other = words.replace("torchao", "modelopt --requantize").replace("bfl", "comfy --requantize")
    other = other.replace("import", "import --dequantize")
    if other == words:
        (here / "run.json").write_text(example(2).model_dump_json())
    code, said = fluxq(other)
    assert code == 2 and "exists; give another --output" in said and bytes_of(here).keys() == before.keys(), said
    if words.startswith("export"):  # of other weights in the same checkpoint
        file = here / "ck" / WEIGHTS
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith("bias"))
        save_file({**tensors, name: tensors[name] + 1}, file, {"format": "pt"})
        code, said = fluxq(words)
        assert code == 2 and "exists; give another --output" in said, said


@pytest.mark.often(1)
@pytest.mark.parametrize("words", ["-o x --format torchao", "-o x.safetensors --format bfl"])
def test_a_left_over_does_not_make_another_output_this_commands(here, words):
    """A kill before the old output is removed, then another checkpoint at the place."""
    script = f"""
import os, fluxq.base.output as module, fluxq.cli
real = module.remove
def remove(path, *rest):
    if str(path).endswith(".old"):
        os.kill(os.getpid(), {signal.SIGKILL})
    real(path, *rest)
module.remove = remove
fluxq.cli.main()
"""
    command = ["export", "ck", *words.split()]
    assert forked.run("-c", script, *command).returncode == -signal.SIGKILL
    left = sorted(here.glob(".x*.old"))
    place = Path(words.split()[1])
    assert left and place.exists()
    if place.is_dir():
        shutil.rmtree(place)
        assert fluxq(QUANTIZE.format(model="tiny", recipe="int8", output="x"))[0] == 0
        assert not list(here.glob(".x*"))
        left[0].mkdir()
    else:
        tensors = {name: tensor.clone() for name, tensor in load_file(place).items()}
        save_weights(tensors, place, {"fluxq_version": "1"})
        Path("x.config.json").write_text("{}")
    serving = {name for name in bytes_of(here) if name.endswith((".lock", ".pid"))}  # which the kill left
    before = {name: content for name, content in bytes_of(here).items() if name not in serving}
    code, said = fluxq(" ".join(command))
    assert code == 2 and "exists" in said and bytes_of(here) == before, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_killed_behind_the_last_removal_the_same_command_says_that_it_had_finished(here, number, code):
    script = f"""
import os, fluxq.cli
from fluxq.commands.session import Session
Session.print = lambda *_: os.kill(os.getpid(), {number})
fluxq.cli.main()
"""
    fluxq("export ck --format bfl -o y.safetensors")
    for words in ("export ck --format torchao -o x", "import y.safetensors -o z --base tiny"):
        assert forked.run("-c", script, *words.split()).returncode == code
        assert sorted(path.name for path in here.iterdir() if path.name.startswith(".")) == []
        ended, said = fluxq(words)
        assert ended == 0 and "written before by this command" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("words", ["export ck --format torchao -o out", "import y.safetensors -o out --base {tiny}"])
def test_what_a_killed_quantize_moved_aside_is_put_back_before_another_command_writes(here, words, monkeypatch):
    fluxq("export ck --format bfl -o y.safetensors")
    fluxq(QUANTIZE.format(model="tiny", recipe="int8", output="out"))
    old = bytes_of(here / "out")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise SystemExit
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(module, "_undo", lambda *_: None)
        patch.setattr(Path, "rmdir", lambda _: None)
        fluxq(QUANTIZE.format(model="tiny", recipe="fp8", output="out") + " --overwrite")
    assert not (here / "out").exists() and list(here.glob(".out.*.work/old/out"))
    code, said = fluxq(words.format(tiny="tiny"))
    assert code == 2 and "output out exists" in said and bytes_of(here / "out") == old, said
    code, said = fluxq(QUANTIZE.format(model="tiny", recipe="fp8", output="out") + " --overwrite")
    assert code == 0 and not list(here.glob(".out*")), said


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("make", "words", "named"),
    [
        (
            {"y.config.json": '{"_class_name": "MyOwnThing"}'},
            "export ck --format bfl -o y.safetensors",
            "y.config.json",
        ),
        ({"r.json": '{"schema_version": 3, "my": "precious"}'}, "report run.json -o r.html", "r.json"),
        ({"r.md": "# mine\n\n## Provenance\n"}, "report run.json -o r.html", "r.md"),
    ],
)
def test_words_that_others_use_too_do_not_make_a_file_ours(here, make, words, named):
    (here / "run.json").write_text(example().model_dump_json())
    for name, text in make.items():
        (here / name).write_text(text)
    before = bytes_of(here)
    code, said = fluxq(words + " --overwrite")
    assert code == 2 and f"nothing marks {named} as fluxq's" in said and bytes_of(here) == before, said
    for name in make:
        (here / name).unlink()
    for _ in range(2):
        assert fluxq(words + " --overwrite")[0] == 0
    for name in make:
        (here / name).write_text((here / name).read_text() + "\nmine\n" if name != "r.json" else "{}")
        code, said = fluxq(words + " --overwrite")
        assert code == 2 and f"nothing marks {named} as fluxq's" in said, said


def test_what_a_user_changed_in_a_checkpoint_or_an_export_is_not_replaced(here):
    assert fluxq(QUANTIZE.format(model="tiny", recipe="fp8", output="out"))[0] == 0
    assert fluxq("export ck --format torchao -o x")[0] == 0
    quantize = QUANTIZE.format(model="tiny", recipe="int8", output="out") + " --overwrite"
    for file, command in (
        ("out/README.md", quantize),
        (f"out/{WEIGHTS}", quantize),
        ("out/scheduler/scheduler_config.json", quantize),
        (f"x/{WEIGHTS}", "export ck --format torchao -o x --overwrite"),
    ):
        data = (here / file).read_bytes()
        (here / file).write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if file.endswith("rs") else data + b"\nmine\n")
        before, name = bytes_of(here), file.partition("/")[2]
        code, said = fluxq(command)
        assert code == 2 and f"{name} was changed since fluxq wrote it" in said and bytes_of(here) == before, said
        (here / file).write_bytes(data)
    assert fluxq(quantize)[0] == 0 and fluxq("export ck --format torchao -o x --overwrite")[0] == 0


def test_large_files_that_nobody_touched_since_the_record_are_not_read(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights").write_bytes(b"0" * 100)
    time.sleep(0.05)  # the clock of file systems is a coarse one
    plan = {"files": {"weights": module.sha256_file(tmp_path / "out" / "weights")}}
    (tmp_path / "out" / module.PLAN_FILE).write_text(json.dumps(plan))
    read: list[Path] = []
    hashed = module.sha256_file
    monkeypatch.setattr(module, "sha256_file", lambda path: read.append(path) or hashed(path))
    monkeypatch.setattr(module, "_SMALL", 10)
    module.Output(tmp_path / "out").require({}, overwrite=True)
    assert not read
    time.sleep(0.05)
    os.utime(tmp_path / "out" / "weights")
    module.Output(tmp_path / "out").require({}, overwrite=True)
    assert [path.name for path in read] == ["weights"]
    (tmp_path / "out" / "weights").write_bytes(b"1" * 100)
    with pytest.raises(ValueError, match="weights was changed since fluxq wrote it"):
        module.Output(tmp_path / "out").require({}, overwrite=True)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ("ck", "--images ck is the checkpoint"),
        ("ck/transformer", "--images ck/transformer lies in the checkpoint"),
        ("m", "--images m is the 16-bit model"),
        ("m/vae/new", "--images m/vae/new lies in the 16-bit model"),
        (".", "--images . holds the checkpoint"),
        ("loop", "loop"),
        ("loop/in", "loop"),
        ("/dev/null", "--images /dev/null is no folder"),
        ("/dev/null/in", "cannot be made"),
    ],
)
def test_eval_adds_no_images_to_what_it_reads(here, images, said):
    copy_of(tiny.path(), here / "m")
    (here / "loop").symlink_to("loop")
    before = bytes_of(here)
    code, words = fluxq(f"eval ck --model m --count 1 --metrics psnr -q --images {images}")
    assert code == 2 and said in words and bytes_of(here) == before, words


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("eval", name) for name in ("report.html", "report.md", "report.json")),
        ("bench", "speed.json"),
        ("debug", "debug.json"),
    ],
)
def test_no_figures_that_fluxq_did_not_write_are_replaced(here, command, name):
    (here / "ck" / "eval").mkdir(exist_ok=True)
    (here / "ck" / "eval" / name).write_text("mine" if not name.endswith("json") else '{"mine": 1}')
    before = bytes_of(here)
    code, said = fluxq("eval ck --count 1 --metrics psnr -q" if command == "eval" else f"{command} ck -q")
    assert code == 2 and f"ck/eval/{name} would be replaced" in said and bytes_of(here) == before, said


# True messages


def test_a_place_that_takes_no_files_is_not_called_another_process(here):
    if not Path("/proc/self").exists():
        pytest.skip("no /proc")
    code, said = fluxq("export ck --format torchao -o /proc/x")
    assert (
        code == 2
        and "another process" not in said
        and "output" in said
        and "/proc is no folder one may write to" in said
    ), said


def test_a_current_folder_that_was_removed_is_named(here):
    script = "import os, sys, fluxq.cli; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); fluxq.cli.main()"
    command = [sys.executable, "-c", script, "export", str(here / "ck"), "--format", "torchao", "-o", str(here / "x")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert (
        done.returncode == 2 and done.stderr == "Error: the current folder was removed; change to one that is there\n"
    )
