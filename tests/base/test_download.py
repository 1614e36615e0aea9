"""Hub models: why one cannot be had is said with the cure, and nothing is fetched that could not work."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from fluxq.base import download as module
from fluxq.base.download import download

MODEL = "owner/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"model_index.json": b"{}", "vae/config.json": b"{}", "vae/model.safetensors": b"weights"}


class Hub(ThreadingHTTPServer):
    """Answers as the hub does. files: of the one model that it has. refuses…: status and error code for all of it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = dict(FILES)
        self.refuses_model: tuple[int, str] | None = None
        self.refuses_files: tuple[int, str] | None = None
        self.fetched: list[str] = []
        self.asked, self.delay = 0, 0.0


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked += 1
        time.sleep(hub.delay)
        if path.startswith("/api/"):
            if hub.refuses_model:
                return self.answer(*hub.refuses_model)
            listed = [
                {"type": "file", "path": n, "size": len(b), "oid": f"{i:040}"}
                for i, (n, b) in enumerate(hub.files.items())
            ]
            if "/tree/" in path:
                return self.answer(200, body=json.dumps(listed).encode())
            about = {"id": MODEL, "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]}
            return self.answer(200, body=json.dumps(about).encode())
        if hub.refuses_files:
            return self.answer(*hub.refuses_files)
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if name not in hub.files:
            return self.answer(404, "EntryNotFound")
        if self.command == "GET":
            hub.fetched.append(name)
        number = list(hub.files).index(name)
        self.answer(200, body=hub.files[name], extra={"ETag": f'"{number:040}"', "X-Repo-Commit": COMMIT})

    def answer(self, status: int, code: str = "", body: bytes = b"", extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/json", **(extra or {})}
        for name, value in (headers | ({"X-Error-Code": code} if code else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # seconds that its end may take
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "")
    download.cache_clear()
    yield server
    server.shutdown()
    server.server_close()
    download.cache_clear()


def test_a_model_is_fetched_once_and_found_again_without_a_connection(hub, monkeypatch):
    folder = download(MODEL, None, False)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == FILES.keys()
    assert folder.name == COMMIT and sorted(hub.fetched) == sorted(FILES)
    assert download(MODEL, None, False) == folder
    download.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert download(MODEL, None, True) == folder


def test_only_what_a_pipeline_loads_is_fetched(hub):
    loaded = {
        "text_encoder/model.safetensors.index.json": b"{}",
        "text_encoder/model-00001-of-00002.safetensors": b"weights",
        "text_encoder_2/adapter_model.safetensors": b"weights",
        "text_encoder_3/model-0001-of-0002.safetensors": b"weights",
        "tokenizer/chat_template.jinja": b"template",
        "transformer/diffusion_pytorch_model.safetensors": b"weights",
    }
    hub.files |= loaded | {
        "text_encoder/model.fp16-00001-of-00002.safetensors": b"weights",
        "text_encoder/model-00001-of-00002.fp16.safetensors": b"weights",
        "text_encoders/clip_g.safetensors": b"weights",
        "transformer/diffusion_pytorch_model.fp16.safetensors": b"weights",
        "vae/diffusion_pytorch_model.bin": b"pickled",
        "model.safetensors": b"weights",
    }
    download(MODEL, None, False)
    assert set(hub.fetched) == {*FILES, *loaded}


REFUSED = {
    "gated": (
        "files",
        (401, "GatedRepo"),
        r"'owner/model' is gated: accept its licence at http.*/owner/model, and log in",
    ),
    "gated, logged in": (
        "files",
        (403, "GatedRepo"),
        r"is gated: accept its licence at .*/model, and then run this again",
    ),
    "gated as a whole": ("model", (403, "GatedRepo"), r"is gated: accept its licence"),
    "missing": (
        "model",
        (404, "RepoNotFound"),
        r"the hub knows none of that name, or it is private: check the name, or `hf",
    ),
    "private": (
        "model",
        (401, "RepoNotFound"),
        r"or it is private: check the name, or `hf auth login` for a private one",
    ),
    "revision": (
        "model",
        (404, "RevisionNotFound"),
        r"has no revision 'v9'; http.*/owner/model/commits/main lists them",
    ),
    "token, logged in": ("model", (401, ""), r"the hub refuses the token that it was given: `hf auth login` again"),
    "no token": ("model", (401, ""), r"the hub asks for a login: `hf auth login`, or set HF_TOKEN"),
    "too often": ("model", (429, ""), r"the hub answers with status 429; try again later"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_refuses_is_named_with_the_cure(hub, monkeypatch, case):
    what, answer, message = REFUSED[case]
    monkeypatch.setenv("HF_TOKEN", "hf_x" if "logged in" in case else "")
    if what == "files":
        hub.refuses_files = answer
    else:
        hub.refuses_model = answer
    with pytest.raises(OSError, match=message):
        download(MODEL, "v9", False)
    assert hub.fetched == []


def test_an_unreachable_hub_is_said(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FileNotFoundError, match=r"the hub cannot be reached \(.*\); connect this machine, or give a f"):
        download(MODEL, None, False)
    with pytest.raises(
        FileNotFoundError, match=f"on this machine, and nothing is fetched here: .*`hf download {MODEL}`"
    ):
        download(MODEL, None, True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="and HF_HUB_OFFLINE is set"):
        download(MODEL, None, False)


@pytest.mark.parametrize("trouble", ["server", "silent"])
def test_a_hub_in_trouble_is_asked_once_and_a_copy_in_the_cache_serves(hub, monkeypatch, trouble, caplog):
    hub.refuses_model = (503, "")
    if trouble == "silent":
        hub.delay, message = 0.5, r"the hub cannot be reached \(.*timed out.*\)"
        monkeypatch.setattr(module, "_PATIENCE", 0.1)
    else:
        message = "the hub answers with status 503; try again later"
    with pytest.raises(OSError, match=message):
        download(MODEL, None, False)
    assert hub.asked == 1
    hub.refuses_model, hub.delay = None, 0.0
    monkeypatch.setattr(module, "_PATIENCE", 10)
    folder = download(MODEL, None, False)
    download.cache_clear()
    hub.refuses_model = (503, "")
    with caplog.at_level("WARNING"):
        assert download(MODEL, None, False) == folder
    assert "status 503; try again later; the copy in the cache is taken" in caplog.text


def test_a_name_that_no_model_can_have_is_said(hub):
    with pytest.raises(FileNotFoundError, match="neither a folder nor a hub model: Repo id"):
        download("owner/-.-", None, False)


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"config.json": b"{}"}, FileNotFoundError, "holds no diffusers pipeline"),
        ({"model_index.json": b"{}", "vae/model.bin": b""}, ValueError, "holds no safetensors weights"),
    ],
)
def test_what_is_no_pipeline_is_not_fetched(hub, files, error, message):
    hub.files = files
    with pytest.raises(error, match=message):
        download(MODEL, None, False)
    assert hub.fetched == []


def test_a_full_disk_is_said_before_anything_is_fetched(hub, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=3))
    with pytest.raises(OSError, match=r"0\.0 GB are to be fetched into .*, 0\.0 GB are free there; set HF_HOME"):
        download(MODEL, None, False)
    assert hub.fetched == []
