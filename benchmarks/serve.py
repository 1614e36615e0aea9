"""`fluxq serve` under load, beside a plain loop, and asked nonsense: the figures of docs/serving.md.

    python -m benchmarks.serve                  writes serve.json, then the table of ../docs/serving.md
    python -m benchmarks.serve --only plain     a part again
    python -m benchmarks.serve --tables         the table again, from the result file

Load: clients that ask at random times (Poisson), for other sizes, steps, seeds and adapters; one in ten leaves early;
in a quarter of the time more is asked for than can be made. In the middle the worker is killed, in the end the server
is told to end. Images are compared with those of the pipeline called alone. Nonsense: bodies near to good ones, no
answer to which may be 5xx. Beside it: a plain FastAPI route around diffusers' call, by turns: single requests, then
twice as many as can be made. Joined: eight clients at two servers by turns, one of which joins denoiser calls. Shadows:
one request in ten again in 16 bit, of a checkpoint that is sound, and of one that was made from damaged weights.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from PIL import Image

from benchmarks.pages import between, goals_in_words
from benchmarks.sources import sources
from fluxq.base.devices import commit, cpu_name, versions
from fluxq.base.files import read_json, write_json, write_text

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks" / "serve.json", ROOT / "docs" / "serving.md"
BEGIN, END = "<!-- serve: begin -->\n", "<!-- serve: end -->"
CLIENTS, LEAVING, ADAPTED = 64, 0.1, 0.125
SIZES, STEPS = (16, 24, 32), (4, 8, 12)
OVERLOAD, CALM = 2.0, 0.6  # times what can be made: in the third quarter, in the others
WAIT = 3.0  # seconds of --max-wait
MAKING = 4  # images in the making at most
PARTS = ("load", "nonsense", "plain", "joined", "shadows")
COMPARED, PAIRS, BODIES, JOINED_TURNS = 24, 30, 10_000, 10
SINGLE = ((16, 8), (64, 28), (128, 28))  # size and steps of single requests; the last is the one that a goal is about
OVERLOADED = 30.0  # seconds
SETTLED = 200  # requests after which memory is to be flat
PLAIN = """
import asyncio, base64, io, sys, torch, uvicorn, fluxq
from diffusers import DiffusionPipeline
from fastapi import FastAPI, Request
pipe = DiffusionPipeline.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
pipe.set_progress_bar_config(disable=True)
fluxq.optimize(pipe)
app, lock = FastAPI(), asyncio.Lock()
def make(body):
    width, height = map(int, body["size"].split("x"))
    noise = torch.Generator().manual_seed(body["seed"])
    call = {"num_inference_steps": body["num_inference_steps"], "max_sequence_length": 8, "guidance_scale": 1.0}
    image = pipe(body["prompt"], width=width, height=height, generator=noise, **call).images[0]
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"data": [{"b64_json": base64.b64encode(file.getvalue()).decode()}]}
@app.post("/v1/images/generations")
async def generations(request: Request):
    body = await request.json()
    async with lock:
        return await asyncio.to_thread(make, body)
@app.get("/ready")
async def ready():
    return {}
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


@contextmanager
def server(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `fluxq serve` on a free port; yield the process and the port once it is ready."""
    command = [sys.executable, "-m", "fluxq", "serve", *words, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stdout.readline, "")  # pyright: ignore[reportOptionalMemberAccess]
        yield process, next(int(match[1]) for line in lines if (match := re.match(r"ready: .*:(\d+)/v1", line)))
    finally:
        process.kill()
        process.wait()


@contextmanager
def plain_loop(folder: Path, port: int) -> Iterator[int]:
    """Start the plain loop; yield its port once it answers."""
    process = subprocess.Popen([sys.executable, "-c", PLAIN, str(folder), str(port)])
    try:
        while True:
            try:
                asyncio.run(ask(port, None, path="/ready"))
                break
            except OSError:
                time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


async def ask(port: int, body: bytes | None, leave: float = 0.0, path: str = "/v1/images/generations") -> Any:
    """Ask once; return (status, answer), or None where the client left after so many seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body or b'')}\r\n\r\n".encode() + (body or b""))
        text = await asyncio.wait_for(reader.read(), leave or None)
    except TimeoutError:
        return None
    finally:
        writer.close()
    first, _, content = text.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(content) if content[:1] == b"{" else content.decode()


def drawn(rng: random.Random, index: int, adapted: float = ADAPTED) -> dict[str, Any]:
    """Draw a request: no two have one seed. adapted: share with an adapter."""
    size = rng.choice(SIZES)
    body = {"prompt": f"a {rng.choice(('red', 'blue', 'green'))} three on black", "seed": index}
    body |= {"size": f"{size}x{size}", "num_inference_steps": rng.choice(STEPS)}
    return body | ({"lora": {"name": "style", "scale": 1.0}} if rng.random() < adapted else {})


async def load(port: int, seconds: float, per_second: float, halfway: Any) -> list[dict[str, Any]]:
    """Let the clients ask for so long; return a row of each request. halfway: called in the middle."""
    rows: list[dict[str, Any]] = []
    clients = [random.Random(number) for number in range(CLIENTS)]
    start = time.monotonic()

    async def one(index: int, rng: random.Random) -> None:
        body = drawn(rng, index)
        leave = rng.uniform(0.01, 1.0) if rng.random() < LEAVING else 0.0
        came = time.monotonic()
        answer = await ask(port, json.dumps(body).encode(), leave)
        row = {"body": body, "came": came - start, "seconds": time.monotonic() - came, "leaving": leave > 0}
        rows.append(row | {"status": answer and answer[0], "answer": answer and answer[1]})

    async def arrivals() -> None:  # of all clients: a sum of Poisson processes is one
        rng, asked = random.Random(5), list[asyncio.Task[None]]()
        while (now := time.monotonic() - start) < seconds:
            rate = per_second * (OVERLOAD if 0.5 <= now / seconds < 0.75 else CALM)
            await asyncio.sleep(rng.expovariate(rate))
            asked.append(asyncio.create_task(one(len(asked), clients[rng.randrange(CLIENTS)])))
        await asyncio.gather(*asked)

    async def middle() -> None:
        await asyncio.sleep(seconds / 2)
        halfway()

    await asyncio.gather(middle(), arrivals())
    return rows


def children(pid: int) -> list[int]:
    """Return the processes that one has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident(pid: int) -> int:
    """Return the bytes of memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def of_both(pid: int) -> list[int]:
    """Return the bytes of a server's front and of its worker."""
    workers = [each for each in children(pid) if "spawn_main" in command_of(each)]
    return [resident(each) for each in (pid, *workers)]


def figure(text: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, 5th, 95th percentile and maximum."""
    ordered = sorted(values)
    p5, p95 = (ordered[int(at * len(ordered))] for at in (0.05, 0.95))
    found = {"p5": p5, "p50": statistics.median(ordered), "p95": p95, "max": ordered[-1]}
    return {name: round(value, 4) for name, value in found.items()}


def capacity(port: int, adapted: float = ADAPTED) -> float:
    """Return the requests a second that a server makes, one after the other."""
    rng, start = random.Random(0), time.monotonic()
    for index in range(12):
        asyncio.run(ask(port, json.dumps(drawn(rng, 10**9 + index, adapted)).encode()))
    return 12 / (time.monotonic() - start)


def under_load(folder: Path, loras: Path, seconds: float) -> dict[str, Any]:
    """Measure the load, the killed worker and the end."""
    with server(str(folder), "--lora", str(loras), "--max-wait", str(WAIT), "--max-queue", "1000") as (process, port):
        per_second = capacity(port)
        before, workers = resident(process.pid), list[int]()

        def kill() -> None:
            workers.extend(pid for pid in children(process.pid) if "spawn_main" in command_of(pid))
            for pid in workers:
                os.kill(pid, signal.SIGKILL)

        rows = asyncio.run(load(port, seconds, per_second, kill))
        metrics = asyncio.run(ask(port, None, path="/metrics"))[1]
        after = resident(process.pid)
        ended = asyncio.run(ending(process, port))
    made = [row for row in rows if row["status"] == 200]
    told = [row["answer"]["data"][0] for row in made]
    refused = [row for row in rows if row["status"] == 429]

    def is_overload(row: dict[str, Any]) -> bool:  # and what is left of it
        return 0.5 <= row["came"] / seconds < 0.8

    return {
        "requests_per_second_alone": round(per_second, 2),
        "seconds": seconds,
        "requests": len(rows),
        "left_early": sum(row["status"] is None for row in rows),
        "status": dict(Counter(str(row["status"]) for row in rows)),
        "images_made": figure(metrics, "fluxq_images_total") - 12,
        "lost": sum(row["status"] not in (200, 429, 503, None) for row in rows),
        "doubled": len(told) - len({(row["seed"], row["b64_json"]) for row in told}),
        "wrong_seed": sum(row["seed"] != each["body"]["seed"] for row, each in zip(told, made, strict=True)),
        "refused_in_overload": sum(map(is_overload, refused)),
        "calm": sum(not is_overload(row) for row in rows),
        "queue_ms": quantiles([row["queue_ms"] for row in told]),
        "predicted_over_actual": quantiles([row["predicted_ms"] / row["compute_ms"] for row in told]),
        "workers_killed": len(workers),
        "front_bytes": [before, after],
        "ended": ended,
        "compared": compared(folder, loras, [(row["body"], row["answer"]["data"][0]) for row in made]),
    }


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def ending(process: subprocess.Popen[str], port: int) -> dict[str, Any]:
    """Tell the server to end while it has images to make; count those that are answered."""
    rng = random.Random(1)
    asked = [asyncio.create_task(ask(port, json.dumps(drawn(rng, 10**10 + n)).encode())) for n in range(8)]
    while figure((await ask(port, None, path="/metrics"))[1], "fluxq_queue_images") < 4:
        await asyncio.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    answers = await asyncio.gather(*asked)
    code = await asyncio.to_thread(process.wait, 60)
    return {"asked": len(asked), "answered": sum(status == 200 for status, _ in answers), "exit_code": code}


def compared(folder: Path, loras: Path, made: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, int]:
    """Return how many of a sample of images have the bytes of the pipeline called alone."""
    import torch
    from diffusers import DiffusionPipeline

    from fluxq.eval.images.generate import as_picture, generate_batch

    pipe: Any = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    sample = random.Random(2).sample(made, min(COMPARED, len(made)))
    same = 0
    for is_adapted in (False, True):
        if is_adapted:
            pipe.load_lora_weights(str(loras), weight_name="style.safetensors", adapter_name="style")
        for body, row in sample:
            if ("lora" in body) == is_adapted:
                width, height = map(int, body["size"].split("x"))
                call = {"width": width, "height": height, "num_inference_steps": body["num_inference_steps"]}
                call |= {"max_sequence_length": 8, "guidance_scale": 1.0}
                alone = as_picture(generate_batch(pipe, [(body["prompt"], body["seed"])], call).images[0])
                image = Image.open(io.BytesIO(base64.b64decode(row["b64_json"])))
                same += image.tobytes() == alone.tobytes()
    return {"images": len(sample), "same": same}


def nonsense(folder: Path, count: int) -> dict[str, Any]:
    """Send bodies near to good ones; count the answers."""
    from http.client import HTTPConnection

    from fluxq.serve.api import ImageRequest

    rng = random.Random(3)
    good = {"prompt": "a", "n": 1, "size": "16x16", "seed": 1, "num_inference_steps": 1, "stream": False}
    values = [
        None,
        True,
        -1,
        0,
        1e308,
        10**400,
        1 << 70,
        "",
        "x" * 999,
        "\ud800",
        "\0",
        [],
        {},
        [[]],
        {"name": "/etc/x"},
    ]
    values += ["../x", "16x", "0x0", "99999x99999", "auto", 0.5, "b64_json", {"name": "a", "scale": 1e9}]
    counts: Counter[int] = Counter()
    with server(str(folder)) as (process, port):
        memory = [resident(process.pid)]
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        for index in range(count):
            body: Any = dict(good)
            for _ in range(rng.randint(1, 3)):
                body[rng.choice([*ImageRequest.model_fields, "x" * rng.randint(1, 99)])] = rng.choice(values)
            text = json.dumps(body).encode()
            if rng.random() < 0.3:
                place = rng.randrange(len(text))
                text = text[:place] + bytes([rng.randrange(256)]) + text[place + rng.randint(0, 9) :]
            connection.request("POST", "/v1/images/generations", text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            counts[answer.status] += 1
            if index == count // 4:
                memory.append(resident(process.pid))
        memory.append(resident(process.pid))
        ready = asyncio.run(ask(port, None, path="/ready"))[0]
    return {"bodies": count, "status": {str(key): n for key, n in sorted(counts.items())}, "front_bytes": memory} | {
        "ready_afterwards": ready == 200
    }


def beside_plain(folder: Path) -> dict[str, Any]:
    """Time single requests of both servers by turns, then ask each for twice as many as it makes."""
    rows: dict[str, dict[str, list[float]]] = {}
    with server(str(folder)) as (_, ours), plain_loop(folder, ours + 1) as theirs:
        ports = {"fluxq serve": ours, "plain loop": theirs}
        for size, steps in SINGLE:
            took = rows[f"{size}x{size}, {steps} steps"] = {name: [] for name in ports}
            for index in range(PAIRS + 3):
                body = {"prompt": f"a red three on black {index}", "seed": index, "size": f"{size}x{size}"}
                content = json.dumps(body | {"num_inference_steps": steps}).encode()
                for name, port in list(ports.items())[:: 1 if index % 2 else -1]:
                    start = time.perf_counter()
                    status, _ = asyncio.run(ask(port, content))
                    if status == 200 and index >= 3:
                        took[name].append(time.perf_counter() - start)
        overload = {name: asyncio.run(overloaded(port, capacity(port, 0.0))) for name, port in ports.items()}
    return {"single": {name: _single(took) for name, took in rows.items()}, "overload": overload}


def _single(took: dict[str, list[float]]) -> dict[str, Any]:
    ours, plain = took.values()
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    medians = {name: round(statistics.median(each), 4) for name, each in took.items()}
    more = round(1000 * (statistics.median(ours) - statistics.median(plain)), 2)
    return medians | {"ratio": round(statistics.median(ratios), 4), "ratios": quantiles(ratios), "more_ms": more}


async def overloaded(port: int, per_second: float) -> dict[str, Any]:
    """Ask for twice as many images as are made, none of which has an adapter, until all are answered."""
    rng, asked, start = random.Random(4), list[asyncio.Task[tuple[int, float]]](), time.monotonic()

    async def one(index: int) -> tuple[int, float]:
        came = time.monotonic()
        status, _ = await ask(port, json.dumps(drawn(rng, 10**11 + index, 0.0)).encode())
        return status, time.monotonic() - came

    while time.monotonic() - start < OVERLOADED:
        asked.append(asyncio.create_task(one(len(asked))))
        await asyncio.sleep(rng.expovariate(OVERLOAD * per_second))
    rows = await asyncio.gather(*asked)
    made = [seconds for status, seconds in rows if status == 200]
    return {
        "asked": len(rows),
        "made": len(made),
        "images_per_second": round(len(made) / (time.monotonic() - start), 2),
        "seconds": quantiles(made),
        "seconds_of_refusals": quantiles([seconds for status, seconds in rows if status == 429] or [0.0]),
    }


def joined(folder: Path) -> dict[str, Any]:
    """Let eight clients ask two servers by turns, one that joins calls; compare images a second, and bytes."""
    found: dict[str, Any] = {}
    with server(str(folder)) as (_, alone), server(str(folder), "--join") as (_, joining):
        for size in (16, 64):
            took: dict[int, list[float]] = {alone: [], joining: []}
            images: dict[int, list[list[str]]] = {alone: [], joining: []}
            for turn in range(JOINED_TURNS):
                for port in took:
                    start = time.perf_counter()
                    images[port].append(asyncio.run(_asked_by_eight(port, size, turn)))
                    took[port].append(time.perf_counter() - start)
            ratios = [a / b for a, b in zip(took[alone][1:], took[joining][1:], strict=True)]  # the first is tried out
            pages = asyncio.run(ask(joining, None, path="/metrics"))[1]
            found[f"{size}x{size}"] = {
                "times_as_fast": quantiles(ratios),
                "steps_joined": figure(pages, "fluxq_steps_joined_total"),
                "same_bytes": images[alone] == images[joining],
            }
    return found


async def _asked_by_eight(port: int, size: int, turn: int) -> list[str]:
    bodies = [{"prompt": f"a red three on black {n}", "seed": 100 * turn + n} for n in range(16)]
    more = [{"size": f"{size}x{size}", "num_inference_steps": STEPS[n % len(STEPS)]} for n in range(16)]
    limit = asyncio.Semaphore(8)

    async def one(body: dict[str, Any]) -> str:
        async with limit:
            return (await ask(port, json.dumps(body).encode()))[1]["data"][0]["b64_json"]

    return [*await asyncio.gather(*(one(a | b) for a, b in zip(bodies, more, strict=True)))]


def shadows(folder: Path, damaged: Path, count: int) -> dict[str, Any]:
    """Ask one after the other; return after how many requests there was an alert, None for none."""
    found = {}
    for name, checkpoint, most in (("damaged", damaged, 200), ("sound", folder, count)):
        with server(str(checkpoint), "--shadow", "0.1", "--shadow-model", "tiny") as (process, port):
            alerted, settled = None, list[int]()
            for index in range(most):
                body = {"prompt": "a red three on black", "seed": index, "num_inference_steps": 4}
                asyncio.run(ask(port, json.dumps(body).encode()))
                told = asyncio.run(ask(port, None, path="/v1/models"))[1]["data"][0]["shadow"]
                if told["alert"]:
                    alerted = index + 1
                    break
                if index + 1 == SETTLED:
                    settled = of_both(process.pid)
            found[name] = {"requests": index + 1, "alert_after": alerted, **told}
            if most > SETTLED:
                found[name]["bytes_after"] = {str(SETTLED): settled, str(index + 1): of_both(process.pid)}
    return found


def damage(folder: Path) -> None:
    """Write the embedded pipeline with noise in its transformer's weights."""
    import torch

    from fluxq import tiny

    pipe, noise = tiny.load(), torch.Generator().manual_seed(0)
    for parameter in pipe.transformer.parameters():
        if parameter.ndim == 2:
            drawn_noise = torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
            parameter.data += 0.5 * parameter.data.float().std().to(parameter.dtype) * drawn_noise
    pipe.save_pretrained(folder)


@click.command()
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Of the load.")
@click.option("--bodies", type=int, default=BODIES, show_default=True, help="Of nonsense.")
@click.option("--sound", type=int, default=2000, show_default=True, help="Requests to a sound checkpoint.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="These parts, again if the file has them.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--tables", is_flag=True, help="Only write the table, from the result file.")
def main(tables: bool, output: Path, only: tuple[str, ...], **counts: Any) -> None:
    """Measure what the result file lacks, then write the table."""
    if not tables:
        measure(output, only, **counts)
    if output == RESULT and {*PARTS} <= read_json(RESULT).keys():
        write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table_of(read_json(RESULT))))


def measure(file: Path, only: Sequence[str], *, seconds: float, bodies: int, sound: int) -> None:
    """Measure, part by part; parts of the same code that the file holds are kept, and those that are not asked for."""
    report = read_json(file) if file.is_file() else {}
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "versions": versions("fastapi", "uvicorn")}
    code, of = {"commit": commit(), "sources": sources(), **machine}, report.setdefault("measured", {})
    with tempfile.TemporaryDirectory() as work:
        folder, damaged, loras = _inputs(Path(work))
        measures = {
            "load": lambda: under_load(folder, loras, seconds),
            "nonsense": lambda: nonsense(folder, bodies),
            "plain": lambda: beside_plain(folder),
            "joined": lambda: joined(folder),
            "shadows": lambda: shadows(folder, damaged, sound),
        }
        for name in only or [name for name in PARTS if of.get(name, {}).get("sources") != code["sources"]]:
            report[name], of[name] = measures[name](), code
            click.echo(json.dumps({name: report[name]}, indent=2))
            write_json(file, report)


def _inputs(work: Path) -> tuple[Path, Path, Path]:
    """Write a checkpoint, one of damaged weights, and a folder with an adapter; return the three."""
    from fluxq.jobs import making

    folder, damaged, loras = work / "tiny-int8", work / "broken-int8", work / "loras"
    damage(work / "broken")
    for model, output in (("tiny", folder), (str(work / "broken"), damaged)):
        options = making.JobOptions(model=model, recipe="int8", profile="rtn", output=str(output), check=False)
        making.quantize(making.job_of(options))
    loras.mkdir()
    write_style(loras / "style.safetensors")
    return folder, damaged, loras


def goals(report: dict[str, Any]) -> dict[str, bool]:
    """Return goal, in words -> whether it is met."""
    load_row, nonsense_row, sound = report["load"], report["nonsense"], report["shadows"]["sound"]
    ended, same, single = load_row["ended"], load_row["compared"], report["plain"]["single"]
    calm = load_row["status"].get("429", 0) - load_row["refused_in_overload"]
    settled, last = (sum(each) for each in sound["bytes_after"].values())
    alert = report["shadows"]["damaged"]["alert_after"]
    *_, last_size = single
    return {
        "load: no image lost, doubled or of another seed": not any(
            load_row[name] for name in ("lost", "doubled", "wrong_seed")
        ),
        f"load: {same['images']} images have the bytes of the pipeline alone": same["same"] == same["images"],
        "load: predicted over actual seconds within 20% at the median": abs(
            load_row["predicted_over_actual"]["p50"] - 1
        )
        <= 0.2,
        "load: 429 in the overload, and of 1% of the requests of other times at most": load_row["refused_in_overload"]
        > 0
        and calm <= 0.01 * load_row["calm"],
        f"load: 95% of what was taken waited for {WAIT:g} s at most": load_row["queue_ms"]["p95"] <= 1000 * WAIT,
        "load: of a killed worker those in the making get 503, and the rest goes on": load_row["workers_killed"] == 1
        and load_row["status"].get("503", 0) <= MAKING,
        "load: what was taken is answered before the end": ended["answered"] == ended["asked"]
        and ended["exit_code"] == 0,
        f"memory grows by 5% at most from request {SETTLED} to {sound['requests']}": last <= 1.05 * settled,
        f"{nonsense_row['bodies']} bodies near to good ones: no 5xx, memory flat": nonsense_row["ready_afterwards"]
        and all(int(status) < 500 for status in nonsense_row["status"])
        and nonsense_row["front_bytes"][2] <= 1.05 * nonsense_row["front_bytes"][1],
        f"a single request of {last_size} takes 3% more than in the plain loop at most": single[last_size]["ratio"]
        <= 1.03,
        "int8: joined calls change no byte": all(row["same_bytes"] for row in report["joined"].values()),
        "a damaged checkpoint raises the alert within 200 requests": alert is not None and alert <= 200,
        f"a sound one does not in {sound['requests']}": sound["alert_after"] is None,
    }


def table_of(report: dict[str, Any]) -> str:
    """Return the table of docs/serving.md."""
    row, plain = report["load"], report["plain"]
    lines = ["| single request | `fluxq serve` | plain loop | more |", "|---|---|---|---|"]
    for name, each in plain["single"].items():
        ours, theirs = (f"{1000 * each[side]:.0f} ms" for side in ("fluxq serve", "plain loop"))
        share, low, high = (ratio - 1 for ratio in (each["ratio"], each["ratios"]["p5"], each["ratios"]["p95"]))
        more = f"{each['more_ms']:.1f} ms, {share:+.1%} ({low:+.0%} to {high:+.0%})"
        lines.append(f"| {name} | {ours} | {theirs} | {more} |")
    lines += ["", "Times are medians; the share is the median of requests by turns, with its 5th and 95th percentile."]
    lines += ["", "| twice as many as can be made | made a second | p50 | p95 | refused |", "|---|---|---|---|---|"]
    for name, each in plain["overload"].items():
        p50, p95 = (f"{each['seconds'][at]:.1f} s" for at in ("p50", "p95"))
        refused = each["asked"] - each["made"]
        lines.append(f"| {name} | {each['images_per_second']:.1f} | {p50} | {p95} | {refused} of {each['asked']} |")
    lines += ["", "| `--join`, eight clients | times as fast | bytes |", "|---|---|---|"]
    for name, each in report["joined"].items():
        bytes_ = "the same" if each["same_bytes"] else "others"
        fast = each["times_as_fast"]
        lines.append(f"| {name} | {fast['p50']:.2f} ({fast['p5']:.2f} to {fast['max']:.2f}) | {bytes_} |")
    status = ", ".join(f"{code} {count}" for code, count in row["status"].items() if code != "None")
    loaded = f"{row['requests']} requests in {row['seconds']:g} s: {status}, {row['left_early']} left early."
    measured = report["measured"]
    machine = f"{measured['load']['cores']} cores of {measured['load']['cpu']}"
    about = f"{commits_of(measured)}, {machine}, the embedded pipeline in int8."
    return "\n".join([*lines, "", loaded, about, "", *goals_in_words(goals(report))])


def commits_of(measured: dict[str, dict[str, Any]]) -> str:
    """Return the commit of all parts, or of each where they differ."""
    parts: dict[str, list[str]] = {}
    for name in PARTS:
        parts.setdefault(measured[name]["commit"], []).append(name)
    if len(parts) == 1:
        return f"Commit {next(iter(parts))}"
    return "Commits " + ", ".join(f"{each} ({', '.join(names)})" for each, names in parts.items())


def write_style(path: Path) -> None:
    """Write a small adapter of the embedded transformer."""
    import torch
    from safetensors.torch import save_file

    from fluxq import tiny

    noise, tensors = torch.Generator().manual_seed(0), {}
    for name, module in tiny.load().transformer.named_modules():
        if name.endswith(("attn.to_q", "attn.to_v")):
            linear: Any = module
            shapes = {"A": (4, linear.in_features), "B": (linear.out_features, 4)}
            for part, shape in shapes.items():
                drawn_part = 0.05 * torch.randn(shape, generator=noise)
                tensors[f"transformer.{name}.lora_{part}.weight"] = drawn_part.bfloat16()
    save_file(tensors, path)


if __name__ == "__main__":
    main()
