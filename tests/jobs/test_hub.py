"""To and from the hub: the commit that was downloaded is recorded, licences travel along, uploads are earned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from shared import copy_of

from fluxq import tiny
from fluxq.base.files import read_json, write_json
from fluxq.base.model import ModelFolder
from fluxq.cli import cli
from fluxq.jobs import hub, judge, making
from fluxq.jobs.menu import Costs, Offer
from fluxq.jobs.search import AutoOptions, Search
from fluxq.quantize.record import Record, read_record

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def downloads(tmp_path, monkeypatch) -> list[tuple[str, str | None]]:
    """(repository, revision) of every `snapshot_download`, which gives the embedded pipeline as links to blobs."""
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / COMMIT, tmp_path / "models--a--b" / "blobs"
    copy_of(tiny.path(), folder)
    blobs.mkdir()
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    asked = []

    def download(repo: str, revision: str | None = None, **_: object) -> str:
        asked.append((repo, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def quantized(tmp_path: Path, model: str, **how: object) -> Record:
    """The record of a checkpoint in tmp_path/out."""
    options = {"recipe": "fp8", "output": str(tmp_path / "out"), "check": False, **how}
    return making.quantize(making.job_of(making.JobOptions(model=model, **options)))


@pytest.mark.slow
def test_the_commit_that_was_downloaded_is_recorded_and_asked_for_again(downloads, tmp_path):
    record = quantized(tmp_path, "a/b", revision="main")
    assert record.model.source == "a/b" and record.model.revision == COMMIT
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Base model: a/b at revision `{COMMIT}`; licence: apache-2.0." in card and "\nbase_model: a/b\n" in card
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    for model in (None, "a/b", "c/d"):  # another repository, a mirror perhaps, has other commits
        judge.subject_of(tmp_path / "out", judge.JudgeOptions(model=model))
    assert downloads == [("a/b", "main"), ("a/b", COMMIT), ("c/d", None)]


def test_the_tables_of_a_search_lie_beside_its_recipe(tmp_path):
    job: Any = SimpleNamespace(folder=ModelFolder("a/b", tiny.path()), output=tmp_path / "out.yaml")
    search = Search(job, AutoOptions(bits=5.5), Offer((), {}, {}, {}, {}), Costs({}, 0), 0)
    assert search.table_file("velocity") == tmp_path / "b-velocity-errors.safetensors"


def test_a_folder_has_no_commit(tiny_folder, tmp_path):
    record = quantized(tmp_path, str(tiny_folder))
    assert record.model.revision is None
    assert "Base model: model; licence" in (tmp_path / "out" / "README.md").read_text()


def test_licences_and_the_safety_checker_travel_along(tiny_folder, tmp_path):
    index = read_json(tiny_folder / "model_index.json")
    index |= {"safety_checker": ["transformers", "CLIPVisionModel"], "requires_safety_checker": True}
    index["feature_extractor"] = ["transformers", "CLIPImageProcessor"]
    write_json(tiny_folder / "model_index.json", index)
    own = {
        "safety_checker/model.safetensors": (tiny_folder / "text_encoder" / "model.safetensors").read_bytes(),
        "safety_checker/config.json": b"{}",
        "safety_checker/LICENSE": b"of the checker",
        "feature_extractor/preprocessor_config.json": b"{}",
        "LICENSE-flux.md": b"of the model",
        "NOTICE": b"of others",
    }
    for name, data in own.items():
        (tiny_folder / name).parent.mkdir(exist_ok=True)
        (tiny_folder / name).write_bytes(data)
    front = "license: other\nlicense_name: flux-1-dev\nlicense_link: LICENSE-flux.md\n"
    (tiny_folder / "README.md").write_text(f"---\n{front}---\n")
    quantized(tmp_path, str(tiny_folder))
    out = tmp_path / "out"
    assert {name: (out / name).read_bytes() for name in own} == own
    assert read_json(out / "model_index.json") == index
    assert (out / "README.md").read_text().split("---")[1].endswith(front)


class NoConnection(Exception):
    """As of the HTTP library that the hub's client uses: no OSError."""


class Hub:
    """HfApi's methods that fluxq calls, and what they were called with; `fails` says which of them raises."""

    def __init__(self, fails: dict[str, Exception]) -> None:
        self.calls: list[tuple] = []
        self.fails = fails

    def __call__(self) -> "Hub":
        return self

    def _note(self, name: str, *call: object) -> None:
        self.calls.append((name, *call))
        if name in self.fails:
            raise self.fails[name]

    def whoami(self) -> dict:
        self._note("whoami")
        return {"name": "somebody"}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> huggingface_hub.RepoUrl:
        self._note("create_repo", repo_id, private, exist_ok)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id if '/' in repo_id else f'me/{repo_id}'}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        assert (folder_path / "README.md").is_file() and (folder_path / "fluxq_plan.json").is_file()
        self._note("upload_folder", repo_id, Path(folder_path).name, commit_message.split()[0])


@pytest.fixture
def api(monkeypatch) -> Hub:
    made = Hub({})
    monkeypatch.setattr(huggingface_hub, "HfApi", made)
    return made


def run(tmp_path: Path, *arguments: object) -> tuple[int, str]:
    """(exit code, what was printed) of `fluxq quantize` in tmp_path, rounding tiny to nearest in fp8."""
    from click.testing import CliRunner

    words = ["quantize", "--recipe", "fp8", "-o", tmp_path / "out", "--num-inference-steps", 1, *arguments]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    return result.exit_code, result.output


UPLOADED = [("create_repo", "me/tiny-fp8", True, True), ("upload_folder", "me/tiny-fp8", "out", "tiny")]


@pytest.mark.slow
def test_what_passed_is_uploaded_and_a_failed_upload_can_be_made_again(api, tmp_path):
    push = ("tiny", "--push-to-hub", "me/tiny-fp8", "--private")
    api.fails = {"upload_folder": NoConnection("no route")}
    code, said = run(tmp_path, *push)
    assert code == 1 and "is complete but not uploaded to me/tiny-fp8 (no route); the same command" in said
    assert api.calls == [("whoami",), *UPLOADED]
    api.calls, api.fails = [], {}
    code, said = run(tmp_path, *push)
    assert code == 0 and "already done" in said and "uploaded: https://huggingface.co/me/tiny-fp8" in said
    assert api.calls == [("whoami",), *UPLOADED]


def test_a_repository_without_its_owner_is_the_users(api, tmp_path):
    for name in ("README.md", "fluxq_plan.json"):
        (tmp_path / name).touch()
    named, check = SimpleNamespace(name="tiny"), SimpleNamespace(passed=True)
    record: Any = SimpleNamespace(check=check, model=named, recipe=named, fluxq_version="0")
    assert hub.push(tmp_path, record, "x", False) == "https://huggingface.co/me/x"
    assert api.calls == [("create_repo", "x", False, True), ("upload_folder", "me/x", tmp_path.name, "tiny")]
    api.fails = {"upload_folder": NoConnection("no route")}
    with pytest.raises(OSError, match="the same command without --overwrite only uploads it"):
        hub.push(tmp_path, record, "x", False)


@pytest.mark.slow
def test_what_missed_a_gate_is_written_but_not_uploaded(api, tmp_path):
    (tmp_path / "hard.yaml").write_text("extends: fp8\ngates: ['psnr>=900']\n")
    code, said = run(tmp_path, "--recipe", tmp_path / "hard.yaml", "--push-to-hub", "me/tiny")
    assert code == 1 and "psnr>=900" in said and (tmp_path / "out").is_dir()
    assert api.calls == [("whoami",)]
    with pytest.raises(ValueError, match="its closing check did not pass"):
        hub.push(tmp_path / "out", read_record(tmp_path / "out"), "me/tiny", False)
    assert api.calls == [("whoami",)]


def test_what_cannot_be_published_is_refused_before_formats_are_searched_too(api, tiny_folder, tmp_path, monkeypatch):
    def choose(*_: object, **__: object) -> None:
        raise RuntimeError("formats are searched")

    monkeypatch.setattr("fluxq.jobs.choosing.choose", choose)
    (tmp_path / "mine.yaml").write_text("extends: nvfp4\nauto: {bits: 5.5}\n")
    for front, words in (("tags: [a]", "names no licence"), ("license: mit", "formats are searched")):
        (tiny_folder / "README.md").write_text(f"---\n{front}\n---\n")
        _, said = run(tmp_path, tiny_folder, "--recipe", tmp_path / "mine.yaml", "--push-to-hub", "me/x")
        assert words in said


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("arguments", "front", "fails", "words"),
    [
        (["--push-to-hub", "me/x"], "tags: [a]", {}, "model names no licence"),
        (["--push-to-hub", "me/x"], "license_link: LICENSE.md", {}, "model names no licence"),
        (["--push-to-hub", "me/x"], "license: other\nlicense_link: LICENSE.md", {}, "model names no licence"),
        (["--push-to-hub", "me/x"], "license: Unknown", {}, "and `license_name:` of one that the hub has no word for"),
        (["--push-to-hub", "me/x", "--no-check"], "license: other\nlicense_name: mine", {}, "leave out --no-check"),
        (["--push-to-hub", "me/x", "--no-check"], "license: mit", {}, "leave out --no-check"),
        (["--push-to-hub", "me/x/y"], "license: mit", {}, "me/x/y"),
        (["--private"], "license: mit", {}, "--push-to-hub REPO"),
        (["--push-to-hub", "me/x"], "license: mit", {"whoami": OSError("no token")}, "(no token): run `hf auth login`"),
        (["--push-to-hub", "me/x"], "license: mit", {"whoami": NoConnection("no route")}, "(no route): run"),
    ],
)
def test_what_cannot_be_published_is_refused_before_any_work(
    api, tiny_folder, tmp_path, arguments, front, fails, words
):
    (tiny_folder / "README.md").write_text(f"---\n{front}\n---\n")
    api.fails = fails
    code, said = run(tmp_path, tiny_folder, *arguments)
    assert code == 2 and words in said and not (tmp_path / "out").exists()
    assert all(name == "whoami" for name, *_ in api.calls)
