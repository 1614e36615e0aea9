"""The real application with the embedded pipeline, over HTTP: what it answers, refuses, forgets and finishes."""

import base64
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file
from served import ask, events, running, until

from fluxq.cli import cli
from fluxq.eval.images import generate

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

IMAGES = "/v1/images/generations"
PROMPT = "a red three on black"


@pytest.fixture(scope="module")
def server(int8: Path, tmp_path_factory) -> Iterator[Any]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# who may\nfirst-key\nsecond-key\n", encoding="utf-8")
    with running(int8, api_key_file=keys, admin_key_file=keys, max_steps=400) as one:
        yield one


def metric(server: Any, name: str) -> float:
    """The value of a counter or a gauge without labels."""
    lines = ask(server, "/metrics")[2].splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def image_in(row: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(row["b64_json"])))


@pytest.mark.slow
def test_images_in_turns_are_the_bytes_of_the_pipeline_alone(server: Any, alone: Any) -> None:
    long = {"prompt": "a red three on black", "seed": 7, "num_inference_steps": 20}
    changes = {"num_inference_steps": 2, "deadline_ms": 1, "n": 2}
    short = [long | changes | {"prompt": f"a {word} six on red"} for word in ("blue", "white")]
    asked, ended = [long, *short], list[int]()
    with ThreadPoolExecutor() as pool:
        waiting = []
        for index, body in enumerate(asked):  # each passes the one before in the middle of it
            waiting.append(pool.submit(ask, server, IMAGES, body, "first-key"))
            waiting[-1].add_done_callback(lambda _, index=index: ended.append(index))
            until(lambda: waiting[0].done() or any(entry.steps > 2 for entry in server.dispatcher.queue))
        answers = [each.result() for each in waiting]
    assert ended[-1] == 0
    for body, (status, _, answer) in zip(asked, answers, strict=True):
        assert status == 200, answer
        for index, row in enumerate(answer["data"]):
            assert row["seed"] == body["seed"] + index and row["steps_computed"] == body["num_inference_steps"]
            expected = alone(body["prompt"], row["seed"], row["steps"])
            assert image_in(row).tobytes() == expected.tobytes()
            assert row["checkpoint"] == server.dispatcher.facts[answer["model"]].digest and row["compute_ms"] > 0
    assert b'fluxq_images_total{model="tiny-int8"} 5.0' in ask(server, "/metrics")[2].encode()


@pytest.mark.slow
def test_a_stream_tells_of_each_step_and_a_kept_prompt_changes_no_byte(server: Any, alone: Any) -> None:
    body = {"prompt": "a green six on red", "seed": 3, "num_inference_steps": 3, "stream": True}
    before = metric(server, "fluxq_prompts_cached_total")
    for _ in range(2):
        status, headers, text = ask(server, IMAGES, body, "second-key")
        *steps, last = events(text)
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert [each["type"] for each in steps] == ["image_generation.progress"] * 3
        assert [(each["step"], each["steps"]) for each in steps] == [(1, 3), (2, 3), (3, 3)]
        assert last["type"] == "image_generation.completed" and last["seed"] == 3
        assert image_in(last).tobytes() == alone(body["prompt"], 3, 3).tobytes()
    assert metric(server, "fluxq_prompts_cached_total") == before + 1
    assert image_in(events(ask(server, IMAGES, body | {"output_format": "webp"}, "first-key")[2])[-1]).format == "WEBP"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[" * 100_000, 400, ""),
        (b'{"prompt": "\\ud800"}', 400, "prompt: "),
        (b'{"prompt": "a", "guidance_scale": NaN}', 400, "guidance_scale"),
        ({}, 400, "prompt: Field required"),
        ({"prompt": "a", "seeed": 1}, 400, "no field 'seeed' (did you mean 'seed'?)"),
        ({"prompt": "a", "num_frames": 4}, 400, "no field 'num_frames'"),
        ({"prompt": "a", "steps": 4}, 400, "no field 'steps' (did you mean 'num_inference_steps'?)"),
        ({"prompt": "a", "model": "tiny-int4"}, 404, "did you mean 'tiny-int8'?"),
        ({"prompt": "a", "size": "10x"}, 400, "write WIDTHxHEIGHT"),
        ({"prompt": "a", "size": "17x16"}, 400, "multiple of 4"),
        ({"prompt": "a", "size": "16x16", "width": 32}, 400, "contradict"),
        ({"prompt": "a", "height": 16}, 400, "give both"),
        ({"prompt": "a", "size": "8192x8192"}, 400, "4194304 at most"),
        ({"prompt": "a", "num_inference_steps": 401}, 400, "400 at most"),
        ({"prompt": "a", "num_inference_steps": 400, "size": "2048x2048"}, 400, "width × height × steps × n"),
        ({"prompt": "a", "n": 11}, 400, "10 at most"),
        ({"prompt": "a", "max_sequence_length": 4000}, 400, "max_sequence_length"),
        ({"prompt": "a", "size": "16384x16", "output_format": "webp"}, 400, "webp holds 16383 pixels a side"),
        ({"prompt": "a", "size": "99984x16", "output_format": "jpeg"}, 400, "jpeg holds 65500 pixels a side"),
        ({"prompt": "a", "seed": -1}, 400, "seed"),
        ({"prompt": "a", "seed": "1"}, 400, "seed"),
        ({"prompt": "a", "response_format": "url"}, 400, "b64_json"),
        ({"prompt": "a", "lora": {"name": "../../etc/passwd"}}, 400, "no adapter of that name"),
        ({"prompt": "a" * (9 << 20)}, 413, "larger than"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(server: Any, body: object, status: int, said: str) -> None:
    code, _, answer = ask(server, IMAGES, body, "first-key")
    assert code == status and said in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [IMAGES, "/v1/videos"])
def test_a_body_that_is_not_said_to_be_json_is_told_how(server: Any, path: str) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl has it
    status, _, answer = ask(server, path, {"prompt": "a"}, "first-key", **form)
    assert status == 400 and "header Content-Type: application/json" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "key", "status"),
    [
        ("/v1/models", None, "", 401),
        ("/v1/models", None, "first-ke", 401),
        ("/v1/models", None, "first-key", 200),
        ("/v1/models/tiny-int8", None, "first-key", 200),
        (IMAGES, {"prompt": "a"}, "", 401),
        ("/admin/drain", {}, "", 401),
        ("/admin/load", {"folder": "x"}, "first-key", 400),
        ("/v1/nothing", None, "first-key", 404),
        ("/v1", None, "first-key", 200),
        ("/", None, "first-key", 200),
        ("/", None, "", 401),
        (IMAGES, None, "first-key", 405),
        ("/health", None, "", 200),
        ("/ready", None, "", 200),
        ("/metrics", None, "", 200),
    ],
)
def test_keys_open_all_but_probes(server: Any, path: str, body: object, key: str, status: int) -> None:
    code, _, answer = ask(server, path, body, key)
    assert code == status, answer
    if path == "/v1/models" and code == 200:
        assert [row["id"] for row in answer["data"]] == ["tiny-int8"] and answer["data"][0]["gates"] == ["psnr>=18"]


def test_an_image_is_let_go_at_the_next_step_when_its_client_leaves(server: Any) -> None:
    body = {"prompt": PROMPT, "num_inference_steps": 400, "seed": 1}
    for stream in (True, False):
        connection = HTTPConnection(server.address.removeprefix("http://"), timeout=30)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer first-key"}
        connection.request("POST", IMAGES, json.dumps(body | {"stream": stream}), headers)
        until(lambda: any(entry.steps for entry in server.dispatcher.queue))
        (entry,) = server.dispatcher.queue
        connection.sock.close()
        until(lambda: not len(server.dispatcher.queue))
        assert entry.steps < 300
    assert metric(server, "fluxq_cancelled_images_total") == 2


@pytest.mark.slow
def test_nothing_of_a_prompt_is_logged(server: Any, caplog, capfd) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "a heliotrope three on black and much more than the encoder reads"
    for body in ({"prompt": secret}, {"prompt": secret, "seed": "x"}, {"prompt": secret, "size": "8x8"}):
        ask(server, IMAGES, body, "first-key")
    written = "".join([caplog.text, *capfd.readouterr()])
    assert "heliotrope" not in written and "encoder reads" not in written


@pytest.mark.slow
def test_a_request_that_would_wait_too_long_is_told_when_to_come(int8: Path) -> None:
    long = {"prompt": PROMPT, "num_inference_steps": 100, "deadline_ms": 1, "stream": True}
    with running(int8, max_wait=0.05, max_queue=3) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, server, IMAGES, long | {"num_inference_steps": 30})
        until(lambda: any(entry.steps for entry in server.dispatcher.queue))
        status, headers, answer = ask(server, IMAGES, long)
        assert status == 429 and int(headers["Retry-After"]) >= 1 and "predicted wait" in answer["error"]["message"]
        status, _, answer = ask(server, IMAGES, long | {"n": 3})
        assert status == 429 and "queue is full" in answer["error"]["message"]
        status, _, answer = ask(server, IMAGES, long | {"n": 4})
        assert status == 400 and answer["error"]["message"] == "n is 4, 3 at most"
        assert events(first.result()[2])[-1]["type"] == "image_generation.completed"
        assert ask(server, IMAGES, long | {"num_inference_steps": 2})[0] == 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "nowhere is no folder"),
        (("OUT", "--port", "TAKEN"), "is in use: give another --port"),
        (("OUT", "--api-key-file", "nothing"), "the file of keys nothing does not exist"),
        (("OUT", "--api-key-file", "/dev/null"), "device"),
        (("OUT", "--host", "0.0.0.0"), "--api-key-file"),
        (("OUT", "--lora", "nothing"), "--lora nothing is no folder"),
        (("OUT", "OUT"), "is given twice"),
        (("OUT", "DAMAGED"), "have one name"),
        (("DAMAGED",), "fluxq verify refuses it"),
        (("OUT", "--max-memory", "1MB"), "more than there is room for"),
    ],
)
def test_what_cannot_be_served_ends_with_one_sentence(words, said: str, int8: Path, tmp_path: Path) -> None:
    damaged = tmp_path / int8.name
    if "DAMAGED" in words:
        shutil.copytree(int8, damaged)
        (damaged / "scheduler" / "scheduler_config.json").write_text("{}", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"OUT": str(int8), "TAKEN": str(taken.getsockname()[1]), "DAMAGED": str(damaged)}
        chosen = [values[word] if word in values else word for word in words]
        free = [] if "--port" in chosen else ["--port", "0"]
        done = CliRunner().invoke(cli, ["serve", *chosen, *free, "--in-process", "-q", "--device", "cpu"])
    assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1, done.output


@pytest.mark.slow
def test_an_adapter_is_used_by_the_requests_that_name_it(
    int8: Path, lora_file: Any, alone: Any, tmp_path: Path
) -> None:
    (tmp_path / "loras").mkdir()
    lora_file("loras/style.safetensors", ["attn.to_q", "attn.to_v"], rank=4, seed=3)
    body = {"prompt": PROMPT, "seed": 2, "num_inference_steps": 3}
    with running(int8, lora=tmp_path / "loras") as server, ThreadPoolExecutor() as pool:
        adapted = body | {"lora": {"name": "style", "scale": 2.0}}
        plain, with_it, again = pool.map(lambda each: ask(server, IMAGES, each)[2]["data"][0], (body, adapted, body))
        bytes_of = [image_in(row).tobytes() for row in (plain, with_it, again)]
        assert bytes_of[0] == bytes_of[2] == alone(PROMPT, 2, 3).tobytes() != bytes_of[1]


def test_adapters_that_are_links_keep_their_names(lora_file: Any, tmp_path: Path) -> None:
    from fluxq.serve.server import _adapters

    blob = lora_file("style.safetensors", ["attn.to_q"], rank=4, seed=3).rename(
        tmp_path / "0123abcd"
    )  # as the hub has it
    (tmp_path / "style.safetensors").symlink_to(blob)
    assert _adapters(tmp_path) == {"style": str(tmp_path / "style.safetensors")}


@pytest.mark.long
def test_checkpoints_take_turns_in_the_memory_that_there_is(int8: Path, plain_checkpoint, tmp_path: Path) -> None:
    (tmp_path / "more").symlink_to(int8)
    other, body = plain_checkpoint("nvfp4"), {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2}
    keys = tmp_path / "keys"
    keys.write_text("key", encoding="utf-8")
    options = {"max_memory": 5_000_000, "root": tmp_path, "admin_key_file": keys}
    with running(int8, other, **options) as server, ThreadPoolExecutor() as pool:
        assert [*server.dispatcher.memory] == ["tiny-int8"]
        asked = [body | {"model": name} for name in ("tiny-int8", "tiny-nvfp4") * 3]
        rows = [answer["data"][0] for _, _, answer in pool.map(lambda each: ask(server, IMAGES, each), asked)]
        assert len({row["checkpoint"] for row in rows}) == len({row["b64_json"] for row in rows}) == 2
        assert ask(server, "/admin/load", {"folder": "../more"}, "key")[0] == 400
        assert ask(server, "/admin/load", {"folder": "more", "name": "tiny-int8"}, "key")[0] == 400
        os.symlink(int8, tmp_path / "x")
        status, _, row = ask(server, "/admin/load", {"folder": "more", "name": "again"}, "key")
        assert status == 400 and "below --root" in row["error"]["message"]  # a link that leads out


@pytest.mark.slow
def test_a_checkpoint_is_loaded_and_unloaded_while_others_are_served(int8: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key", encoding="utf-8")
    with running(int8, root=int8.parent, admin_key_file=keys) as server:
        load = {"folder": int8.name, "name": "again"}
        assert ask(server, "/admin/load", load, "key")[2]["loaded"]
        assert ask(server, IMAGES, {"prompt": PROMPT, "model": "again", "num_inference_steps": 2})[0] == 200
        assert ask(server, "/admin/unload", {"name": "tiny-int8"}, "key")[0] == 200
        assert [row["id"] for row in ask(server, "/v1/models")[2]["data"]] == ["again"]
        assert ask(server, "/admin/unload", {"name": "again"}, "key")[0] == 409
        assert ask(server, "/admin/drain", {}, "key")[0] == 200
        assert ask(server, "/ready")[0] == ask(server, IMAGES, {"prompt": PROMPT})[0] == 503


@pytest.mark.long
def test_a_worker_that_is_killed_costs_the_image_that_it_made_and_no_other(int8: Path, alone: Any) -> None:
    body = {"prompt": PROMPT, "seed": 4}
    with running(int8, in_process=False) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, server, IMAGES, body | {"num_inference_steps": 100, "deadline_ms": 1})
        until(lambda: any(entry.steps for entry in server.dispatcher.queue))
        others = [pool.submit(ask, server, IMAGES, body | {"num_inference_steps": steps}) for steps in (2, 3)]
        until(lambda: len(server.dispatcher.queue) == 3)
        before = server.dispatcher.hands._process.pid
        os.kill(before, signal.SIGKILL)
        status, headers, answer = first.result()
        assert status == 503 and headers["Retry-After"] and answer["error"]["code"] == "unavailable"
        for steps, each in zip((2, 3), others, strict=True):
            assert image_in(each.result()[2]["data"][0]).tobytes() == alone(PROMPT, 4, steps).tobytes()
        assert server.dispatcher.hands._process.pid != before and metric(server, "fluxq_worker_restarts_total") == 1
        assert ask(server, "/ready")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [True, False])
def test_an_error_of_the_servers_own_costs_one_image(in_process: bool, int8: Path, monkeypatch, caplog) -> None:
    body = {"prompt": PROMPT, "num_inference_steps": 3}
    with running(int8, in_process=in_process) as server:
        plain, told = server.dispatcher.metrics.quantum, list[object]()

        def count(*arguments: object) -> None:
            told.append(arguments)
            if len(told) == 1:
                raise KeyError("a defect")
            plain(*arguments)

        monkeypatch.setattr(server.dispatcher.metrics, "quantum", count)
        status, _, answer = ask(server, IMAGES, body)
        assert status == 500 and answer["error"]["code"] == "KeyError" and "defect" not in str(answer)
        assert [ask(server, IMAGES, body)[0] for _ in range(2)] == [200, 200] and ask(server, "/health")[0] == 200
        assert "defect" not in caplog.text  # such a text may quote a prompt
        server.dispatcher._loop.get_loop().call_soon_threadsafe(server.dispatcher._loop.cancel)
        until(lambda: ask(server, "/health")[0] == 500)


def gated(a: object, b: object, work: Path) -> dict[str, Any]:
    """Return what `fluxq gate A B` finds in PSNR, with its exit code."""
    words = ["gate", str(a), str(b), "--images", "8", "--num-inference-steps", "4", "--device", "cpu"]
    words += ["--batch-size", "1", "--metric", "psnr", "--work", str(work), "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code in (0, 1), done.output
    return {"exit_code": done.exit_code, **json.loads(done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("join", [False, True])
def test_a_server_is_equivalent_to_its_checkpoint(int8: Path, tmp_path: Path, join: bool) -> None:
    with running(int8, join=join) as server:
        found = gated(int8, server.address, tmp_path)
        assert found["exit_code"] == 0 and found["identical"]


@pytest.mark.long
def test_a_server_is_judged_against_another(int8: Path, plain_checkpoint: Any, tmp_path: Path) -> None:
    with running(int8) as server, running(int8) as again, running(plain_checkpoint("int4")) as other:
        same, worse = (gated(server.address, each.address, tmp_path / each.address[-5:]) for each in (again, other))
        assert same["exit_code"] == 0 and same["identical"]
        assert worse["exit_code"] == 1 and worse["verdict"] == "worse"


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_leaves_nothing_behind(
    int8: Path, plain_checkpoint: Any, lora_file: Any, tmp_path: Path
) -> None:
    name = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"
    save_file({name.format("A"): torch.ones(2, 8), name.format("B"): torch.ones(8, 2)}, tmp_path / "bad.safetensors")
    other = {name.removeprefix("transformer.").format(one): torch.ones(2, 2) for one in "AB"}  # of no pipeline
    save_file(other, tmp_path / "other.safetensors")
    lora_file("style.safetensors", ["attn.to_q", "attn.to_v"], rank=4, seed=3)
    keys = tmp_path / "keys"
    keys.write_text("key")
    body = {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2}
    with running(int8, plain_checkpoint("int4"), lora=tmp_path, admin_key_file=keys) as server:
        before = ask(server, IMAGES, body)[2]["data"][0]["b64_json"]
        assert ask(server, IMAGES, body | {"lora": {"name": "style"}})[2]["data"][0]["b64_json"] != before
        for wrong in ("bad", "other"):
            status, _, answer = ask(server, IMAGES, body | {"lora": {"name": wrong}})
            assert status == 400 and answer["error"]["param"] == "lora" and "does not fit" in answer["error"]["message"]
            assert ask(server, IMAGES, body)[2]["data"][0]["b64_json"] == before
        assert ask(server, "/admin/unload", {"name": "tiny-int8"}, "key")[0] == 200


@pytest.mark.slow
def test_values_that_are_not_finite_are_an_error_and_no_black_image(
    int8: Path, lora_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lora_file("loras/style.safetensors", ["attn.to_q"], rank=4, seed=3)
    save_file({name: value * math.inf for name, value in load_file(file).items()}, file)
    body = {"prompt": PROMPT, "seed": 1, "num_inference_steps": 2}
    with running(int8, lora=file.parent, in_process=True) as server:
        status, _, answer = ask(server, IMAGES, body | {"lora": {"name": "style"}})
        assert status == 400 and answer["error"]["message"] == "lora: style at scale 1 makes values that are not finite"
        whole = generate.pictures
        monkeypatch.setattr(generate, "pictures", lambda output: [each * math.nan for each in whole(output)])
        status, _, answer = ask(server, IMAGES, body)
        assert status == 500 and answer["error"]["code"] == "NotFinite"


@pytest.mark.slow
def test_a_checkpoint_that_was_damaged_meanwhile_is_no_fault_of_who_asks(
    int8: Path, plain_checkpoint: Any, tmp_path: Path
) -> None:
    folder, size = tmp_path / "tiny-bad", sum(file.stat().st_size for file in int8.rglob("*.safetensors"))
    shutil.copytree(plain_checkpoint("int4"), folder)
    with running(int8, folder, max_memory=int(1.5 * size)) as server:
        assert ask(server, IMAGES, {"prompt": PROMPT, "model": "tiny-int8"})[0] == 200
        until(lambda: [*server.dispatcher.memory] == ["tiny-int8"])
        (weights,) = folder.glob("transformer/*.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        status, headers, answer = ask(server, IMAGES, {"prompt": PROMPT, "model": "tiny-bad"})
        assert status == 503 and headers["Retry-After"] and str(tmp_path) not in json.dumps(answer)
        assert ask(server, IMAGES, {"prompt": PROMPT, "model": "tiny-int8"})[0] == 200


@pytest.mark.slow
def test_the_default_size_is_held_to_the_limit_of_pixels(int8: Path) -> None:
    with running(int8, max_pixels=64) as server:
        status, _, answer = ask(server, IMAGES, {"prompt": PROMPT})
        assert status == 400 and "256 pixels, 64 at most" in answer["error"]["message"]


@pytest.mark.slow
def test_heads_and_bodies_are_bounded_before_anybody_is_known(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = server.address.removeprefix("http://").split(":")

    def said(text: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(text)
            return connection.recv(4096)

    assert b" 400 " in said(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000)
    assert b" 413 " in said(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123456789")
    long = {"prompt": "a", "user": "b" * (600 << 10)}
    status, _, answer = ask(server, IMAGES, long, "first-key")
    assert status == 413 and "524288" in answer["error"]["message"]
    assert ask(server, f"{IMAGES}/", {"prompt": "a"}, "first-key")[0] == 404
    idle = HTTPConnection(host, int(port), timeout=60)
    idle.request("GET", "/health")
    assert idle.getresponse().read()
    monkeypatch.setattr("fluxq.serve.server._SILENT", 0.5)
    assert said(b"GET /hea") == b""
    idle.request("GET", "/health")
    assert idle.getresponse().read()
    idle.close()


def test_connections_are_kept_for_longer_than_balancers_keep_theirs() -> None:
    from types import SimpleNamespace

    from fluxq.serve.metrics import Metrics
    from fluxq.serve.server import ServeOptions, Server, _is_silent

    server: Any = Server.__new__(Server)
    server.options, server._keys, server._admin_keys = ServeOptions([]), (), ()
    server._put(None, Metrics())
    assert server._uvicorn.config.timeout_keep_alive > 600
    unread = [0]
    connection = SimpleNamespace(cycle=SimpleNamespace(response_complete=True), timeout_keep_alive_task="of uvicorn's")
    connection.transport = SimpleNamespace(get_write_buffer_size=lambda: unread[0])
    assert not _is_silent(connection)
    unread[0] = 1
    assert _is_silent(connection)
    unread[0] = 0
    connection.timeout_keep_alive_task = None  # half a head has come
    assert _is_silent(connection)


@pytest.mark.long
def test_files_that_were_changed_are_not_served_under_the_old_digest(
    int8: Path, plain_checkpoint: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny-one"
    shutil.copytree(int8, folder)
    with running(folder, in_process=False) as server:
        shutil.rmtree(folder)
        shutil.copytree(plain_checkpoint("int4"), folder)
        os.kill(server.dispatcher.hands._process.pid, signal.SIGKILL)
        status, _, answer = ask(server, IMAGES, {"prompt": PROMPT})
        assert status == 503 and "cannot be loaded now" in answer["error"]["message"]


@pytest.mark.long
def test_a_worker_that_hangs_holds_up_no_second_signal(int8: Path) -> None:
    command = [sys.executable, "-m", "fluxq", "serve", str(int8), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("ready"))
        (pid,) = [
            int(each)
            for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if "spawn_main" in Path(f"/proc/{each}/cmdline").read_text()
        ]
        with ThreadPoolExecutor() as pool:
            os.kill(pid, signal.SIGSTOP)
            asked = pool.submit(ask, address.removesuffix("/v1"), IMAGES, {"prompt": PROMPT})
            until(lambda: "fluxq_queue_images 1.0" in ask(address.removesuffix("/v1"), "/metrics")[2])
            process.send_signal(signal.SIGTERM)
            until(lambda: refuses(address))
            process.send_signal(signal.SIGTERM)
            assert asked.result()[0] == 503 and process.wait(60) == 0


def refuses(address: str) -> bool:
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return True
    return False


_FRONT = """
import asyncio, time
from fluxq.serve.process import Apart
from fluxq.serve.worker import Settings, Worker

def last(self):  # in the place of a long step
    print("busy", flush=True)
    time.sleep(600)

Worker.memory = last

async def main():
    hands = Apart(Settings({}, "cpu"))
    await hands.start()
    print(hands._process.pid, flush=True)
    await hands.ask("memory")

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_worker_ends_at_once_with_its_front(tmp_path: Path) -> None:
    import psutil

    (tmp_path / "front.py").write_text(_FRONT, encoding="utf-8")
    with subprocess.Popen([sys.executable, tmp_path / "front.py"], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        worker = psutil.Process(int(front.stdout.readline()))
        assert front.stdout.readline() == "busy\n"
        front.kill()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 30)


def test_a_worker_hears_no_signal_before_it_ignores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio
    import multiprocessing
    from types import SimpleNamespace

    from fluxq.serve.process import Apart
    from fluxq.serve.worker import Settings

    signals, blocked = {signal.SIGINT, signal.SIGTERM}, list[set[Any]]()

    def process(**_: object) -> Any:
        return SimpleNamespace(start=lambda: blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))

    spawning = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: spawning)
    monkeypatch.setattr(Apart, "_answer", lambda self: None)
    asyncio.run(Apart(Settings({})).start())
    assert signals <= blocked[0] and not signals & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_ignores_signals_and_lets_its_own_programs_have_them() -> None:
    code = """
import signal
from types import SimpleNamespace
from fluxq.serve import process

signal.pthread_sigmask(signal.SIG_BLOCK, process._SIGNALS)
process.Worker = lambda settings: None
process._work(SimpleNamespace(send=print, recv=lambda: (_ for _ in ()).throw(EOFError)), None, 0)
print([signal.getsignal(each).name for each in process._SIGNALS], signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    assert forked.run("-c", code).stdout.splitlines()[-1] == "['SIG_IGN', 'SIG_IGN'] set()"


def test_the_16_bit_model_is_that_of_the_recorded_commit_without_a_lora(tmp_path: Path, monkeypatch) -> None:
    from fluxq.base.model import ModelFolder
    from fluxq.serve.server import original_of

    calls, plan = [], {"model": {"source": "me/model", "revision": "abc"}, "loras": []}

    def resolve(source: str, *, revision: str | None, local_files_only: bool) -> ModelFolder:
        calls.append((source, revision, local_files_only))
        return ModelFolder(source, tmp_path)

    monkeypatch.setattr("fluxq.base.model.resolve_model", resolve)
    (tmp_path / "fluxq_plan.json").write_text(json.dumps(plan), encoding="utf-8")
    for given in (None, "me/model", "me/other"):
        assert original_of(str(tmp_path), given) == tmp_path
    assert calls == [("me/model", "abc", True), ("me/model", "abc", True), ("me/other", None, True)]
    (tmp_path / "fluxq_plan.json").write_text(json.dumps(plan | {"loras": [{"file": "a"}]}), encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"has a LoRA fused into it.*fuse_lora"):
        original_of(str(tmp_path))
    assert original_of(str(tmp_path), "me/fused") == tmp_path


def test_an_address_of_another_machine_is_said_to_be_that() -> None:
    from fluxq.serve.server import bound

    with pytest.raises(OSError, match=r"192\.0\.2\.1 .* no address of this machine.*give another --host"):
        bound("192.0.2.1", 0)


def test_prompts_that_print_alike_are_kept_apart() -> None:
    from types import SimpleNamespace

    from fluxq.serve.worker import _Encodings, _Remembering

    class Pipe:
        def encode_prompt(self, prompt: object) -> list[object]:
            return [prompt]

    pipe, encodings, order = Pipe(), _Encodings(), SimpleNamespace(lora=None)
    found = []
    for prompt in (None, "None", ["a"], "['a']"):
        with _Remembering(encodings, pipe, order) as looking:  # pyright: ignore[reportArgumentType]
            found.append((pipe.encode_prompt(prompt), looking.was_hit))
    assert found == [([None], False), (["None"], False), ([["a"]], False), (["['a']"], False)]
    with _Remembering(encodings, pipe, order) as looking:  # pyright: ignore[reportArgumentType]
        assert [pipe.encode_prompt(prompt) for prompt in ("new", "None")] and not looking.was_hit


def test_two_calls_of_a_second_order_scheduler_are_one_step() -> None:
    from types import SimpleNamespace

    from fluxq.serve.worker import _Making

    making: Any = _Making.__new__(_Making)
    steps: list[int] = []
    making.model = SimpleNamespace(pipe=SimpleNamespace(scheduler=SimpleNamespace(order=2)))
    making._quantum, making._tell, making._pauses = lambda: making._steps, steps.append, lambda: False
    for call in range(5):
        making._after_step(call, torch.zeros(1))
    assert steps == [1, 2] and making._steps == 3


def test_what_fails_keeps_nothing_of_what_it_computed() -> None:
    import weakref

    from fluxq.serve.orders import Order
    from fluxq.serve.process import portable
    from fluxq.serve.worker import _Making

    computed: list[Any] = []

    def fails() -> None:
        latents = torch.zeros(1)
        computed.append(weakref.ref(latents))
        raise torch.OutOfMemoryError("no memory")

    making: Any = _Making(None, Order(1, "A", "p", 1, {}))  # pyright: ignore[reportArgumentType]
    making._make = fails
    making.go_on(print, lambda: False, 0.0, 0.0)
    making.wait()
    with pytest.raises(torch.OutOfMemoryError, match="no memory") as raised:
        making.result()
    assert computed[0]() is None
    sent = portable(raised.value)
    assert type(sent) is torch.OutOfMemoryError and sent.__traceback__ is None


def test_a_gpu_that_computes_nothing_more_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from fluxq.serve.orders import Order, WorkerDied
    from fluxq.serve.worker import Settings, Worker

    def fails(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nmore")

    worker: Any = Worker.__new__(Worker)
    worker.settings = Settings({}, "cuda")
    making: Any = SimpleNamespace(order=Order(1, "A", "p", 1, {}), result=fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("fluxq.serve.worker.parent_process", object)  # as in one that the server started
    assert isinstance(worker._last(making).error, RuntimeError)  # of this image alone
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(WorkerDied, match=r"lost its GPU: CUDA error: device-side assert triggered$"):
        worker._last(making)


@pytest.mark.slow
def test_clients_written_for_others_work_unchanged(int8: Path) -> None:
    import openai

    with running(int8) as server:
        client: Any = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny-int8"]
        steps = {"seed": 1, "num_inference_steps": 2}
        answer = client.images.generate(model="tiny-int8", prompt=PROMPT, n=2, size="16x16", extra_body=steps)
        assert [row.seed for row in answer.data] == [1, 2] and image_in(answer.data[0].model_dump()).size == (16, 16)
        stream = client.images.generate(model="tiny-int8", prompt=PROMPT, stream=True, extra_body=steps)
        *_, last = [event for event in stream if not event.type.endswith("progress")]
        assert last.type == "image_generation.completed" and last.b64_json == answer.data[0].b64_json
        with pytest.raises(openai.BadRequestError, match="10 at most"):
            client.images.generate(prompt=PROMPT, n=11)
        # The body that vLLM-Omni's own example client sends.
        body = {"prompt": PROMPT, "n": 1, "size": "16x16", "response_format": "b64_json", "seed": 1}
        body |= {"num_inference_steps": 2, "guidance_scale": 1.0, "true_cfg_scale": 1.0, "negative_prompt": "blue"}
        assert ask(server, IMAGES, body)[2]["data"][0]["b64_json"] == last.b64_json


@pytest.mark.slow
def test_the_command_finishes_what_it_has_taken_when_it_is_told_to_end(int8: Path) -> None:
    command = [sys.executable, "-m", "fluxq", "serve", str(int8), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines = iter(process.stdout.readline, "")
        address = next(match[1] for line in lines if (match := re.match(r"ready: (http://.*)/v1", line)))
        with ThreadPoolExecutor() as pool:
            body = {"prompt": PROMPT, "num_inference_steps": 60, "seed": 1}
            asked = [pool.submit(ask, address, IMAGES, body) for _ in range(3)]
            until(lambda: "fluxq_queue_images 3.0" in ask(address, "/metrics")[2])
            process.send_signal(signal.SIGTERM)
            assert next(lines).startswith("ending: what was taken is finished first")
            assert [each.result()[0] for each in asked] == [200] * 3
        assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
