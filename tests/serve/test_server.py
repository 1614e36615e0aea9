"""The real application with the embedded pipeline, over HTTP: what it answers, refuses, forgets and finishes."""

import base64
import io
import json
import logging
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

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from served import ask, events, running, until

from fluxq.cli import cli
from fluxq.eval.images.generate import as_picture, generate_batch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

IMAGES = "/v1/images/generations"
PROMPT = "a red three on black"
CALL = {"width": 16, "height": 16, "max_sequence_length": 8, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def int8(plain_checkpoint) -> Path:
    return plain_checkpoint("int8")


@pytest.fixture(scope="module")
def server(int8: Path, tmp_path_factory) -> Iterator[Any]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# who may\nfirst-key\nsecond-key\n", encoding="utf-8")
    with running(int8, api_key_file=keys, admin_key_file=keys, max_steps=400) as one:
        yield one


@pytest.fixture(scope="module")
def alone(int8: Path) -> Any:
    """alone(prompt, seed, steps) is the image that the checkpoint's pipeline makes by itself."""
    from diffusers import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(int8, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)

    def make(prompt: str, seed: int, steps: int, **call: Any) -> Image.Image:
        return as_picture(
            generate_batch(pipe, [(prompt, seed)], CALL | {"num_inference_steps": steps} | call).images[0]
        )

    return make


def metric(server: Any, name: str) -> float:
    """The value of a counter or a gauge without labels."""
    lines = ask(server, "/metrics")[2].splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def image_in(row: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(row["b64_json"])))


def test_images_in_turns_are_the_bytes_of_the_pipeline_alone(server: Any, alone: Any) -> None:
    asked = [{"prompt": f"a {word} three on black", "seed": 7 + n, "num_inference_steps": n, "n": 2} for n, word in
             ((2, "red"), (5, "blue"), (3, "green"))]  # fmt: skip
    with ThreadPoolExecutor() as pool:
        answers = [*pool.map(lambda body: ask(server, IMAGES, body, "first-key"), asked)]
    for body, (status, _, answer) in zip(asked, answers, strict=True):
        assert status == 200, answer
        for index, row in enumerate(answer["data"]):
            assert row["seed"] == body["seed"] + index and row["steps_computed"] == body["num_inference_steps"]
            expected = alone(body["prompt"], row["seed"], row["steps"])
            assert image_in(row).tobytes() == expected.tobytes()
            assert row["checkpoint"] == server.dispatcher.facts[answer["model"]].digest and row["compute_ms"] > 0
    assert b'fluxq_images_total{model="tiny-int8"} 6.0' in ask(server, "/metrics")[2].encode()


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
        ({"prompt": "a", "model": "tiny-int4"}, 404, "did you mean 'tiny-int8'?"),
        ({"prompt": "a", "size": "10x"}, 400, "write WIDTHxHEIGHT"),
        ({"prompt": "a", "size": "17x16"}, 400, "multiple of 4"),
        ({"prompt": "a", "size": "16x16", "width": 32}, 400, "contradict"),
        ({"prompt": "a", "height": 16}, 400, "give both"),
        ({"prompt": "a", "size": "8192x8192"}, 400, "4194304 at most"),
        ({"prompt": "a", "num_inference_steps": 401}, 400, "400 at most"),
        ({"prompt": "a", "num_inference_steps": 400, "size": "2048x2048"}, 400, "width × height × steps × n"),
        ({"prompt": "a", "n": 11}, 400, "10 at most"),
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


def test_nothing_of_a_prompt_is_logged(server: Any, caplog, capfd) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "a heliotrope three on black and much more than the encoder reads"
    for body in ({"prompt": secret}, {"prompt": secret, "seed": "x"}, {"prompt": secret, "size": "8x8"}):
        ask(server, IMAGES, body, "first-key")
    written = "".join([caplog.text, *capfd.readouterr()])
    assert "heliotrope" not in written and "encoder reads" not in written


def test_a_request_that_would_wait_too_long_is_told_when_to_come(int8: Path) -> None:
    long = {"prompt": PROMPT, "num_inference_steps": 100, "deadline_ms": 1, "stream": True}
    with running(int8, max_wait=0.05, max_queue=3) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, server, IMAGES, long | {"num_inference_steps": 30})
        until(lambda: any(entry.steps for entry in server.dispatcher.queue))
        status, headers, answer = ask(server, IMAGES, long)
        assert status == 429 and int(headers["Retry-After"]) >= 1 and "predicted wait" in answer["error"]["message"]
        status, _, answer = ask(server, IMAGES, long | {"n": 3})
        assert status == 429 and "queue is full" in answer["error"]["message"]
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
        (("OUT", "OUT"), "have one name"),
        (("DAMAGED",), "fluxq verify refuses it"),
        (("OUT", "--max-memory", "1MB"), "more than there is room for"),
    ],
)
def test_what_cannot_be_served_ends_with_one_sentence(words, said: str, int8: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    if "DAMAGED" in words:
        shutil.copytree(int8, damaged)
        (damaged / "scheduler" / "scheduler_config.json").write_text("{}", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"OUT": str(int8), "TAKEN": str(taken.getsockname()[1]), "DAMAGED": str(damaged)}
        chosen = [values.get(word, word) for word in words]
        free = [] if "--port" in chosen else ["--port", "0"]
        done = CliRunner().invoke(cli, ["serve", *chosen, *free, "--in-process", "-q", "--device", "cpu"])
    assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1, done.output


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


@pytest.mark.slow
def test_the_command_finishes_what_it_has_taken_when_it_is_told_to_end(int8: Path) -> None:
    command = [sys.executable, "-m", "fluxq", "serve", str(int8), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stdout.readline, "")
        address = next(match[1] for line in lines if (match := re.match(r"ready: (http://.*)/v1", line)))
        with ThreadPoolExecutor() as pool:
            body = {"prompt": PROMPT, "num_inference_steps": 60, "seed": 1}
            asked = [pool.submit(ask, address, IMAGES, body) for _ in range(3)]
            until(lambda: "fluxq_queue_images 3.0" in ask(address, "/metrics")[2])
            process.send_signal(signal.SIGTERM)
            assert [each.result()[0] for each in asked] == [200] * 3
        assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
