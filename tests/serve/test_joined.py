"""Joined denoiser calls: which calls become one, what each gets of it, and images that are the same bytes."""

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from served import ask, running, until
from torch import nn

from fluxq.serve.joined import Meeting, meet, shared_by
from fluxq.serve.orders import Order
from fluxq.serve.worker import Settings, Worker, _Making

pytest.importorskip("fastapi")


class Denoiser(nn.Module):
    """Twice its input, and a note of how many rows each call had."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, hidden_states: Any, timestep: Any = None, img_ids: Any = None, guidance: Any = None) -> Any:
        self.rows.append(len(hidden_states))
        if timestep is not None and bool((timestep < 0).any()):
            raise ValueError("a time below zero")
        return ([2 * each for each in hidden_states] if isinstance(hidden_states, list) else 2 * hidden_states,)


def together(denoiser: Denoiser, calls: list[list[dict[str, Any]]]) -> list[list[Any]]:
    """Make these calls, each list in a thread of its own; return results, or errors, with the number that shared."""
    meeting, results = Meeting(len(calls)), [list[Any]() for _ in calls]

    def run(index: int) -> None:
        meeting.enter()
        for each in calls[index]:
            try:
                (made,) = denoiser(**each)
            except ValueError as error:
                made = error
            results[index].append((made, shared_by()))
        meeting.leave()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
        assert not each.is_alive()
    return results


def of(value: float, rows: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"hidden_states": torch.full((rows, 3), value), "timestep": torch.full((rows,), value), **arguments}


@pytest.mark.parametrize(
    ("calls", "rows"),
    [
        ([of(1.0), of(2.0), of(3.0)], [3]),
        ([of(1.0, 2), of(2.0, 2)], [4]),
        ([of(1.0, 2), of(2.0, 1)], [1, 2]),
        ([of(1.0, guidance=3.5), of(2.0, guidance=3.5)], [2]),
        ([of(1.0, guidance=3.5), of(2.0, guidance=4.0), of(3.0, guidance=3.5)], [1, 2]),
        ([of(1.0, img_ids=torch.zeros(1, 3)), of(2.0, img_ids=torch.zeros(1, 3))], [2]),
        ([of(1.0, img_ids=torch.zeros(1, 3)), of(2.0, img_ids=torch.ones(1, 3))], [1, 1]),
        ([{"hidden_states": [torch.ones(4)]}, {"hidden_states": [torch.ones(4)]}], [2]),
        ([{"hidden_states": [torch.ones(4)]}, {"hidden_states": [torch.ones(5)]}], [1, 1]),
    ],
)
def test_calls_whose_arguments_allow_it_are_one(calls: list[dict[str, Any]], rows: list[int]) -> None:
    denoiser = Denoiser()
    meet(denoiser)
    results = together(denoiser, [[each] for each in calls])
    assert sorted(denoiser.rows) == rows
    for call, ((made, _),) in zip(calls, results, strict=True):
        for one, other in zip(made, call["hidden_states"], strict=True):
            assert torch.equal(one, 2 * other)


def test_who_ends_first_keeps_nobody_waiting_and_an_error_is_that_of_all_who_shared() -> None:
    denoiser = Denoiser()
    meet(denoiser)
    long, short = together(denoiser, [[of(1.0), of(2.0), of(3.0)], [of(4.0)]])
    assert denoiser.rows == [2, 1, 1] and [shared for _, shared in long] == [2, 1, 1] and short[0][1] == 2
    for ((made, _),) in together(denoiser, [[of(-1.0)], [of(2.0)]]):
        assert str(made) == "a time below zero"
    assert denoiser(**of(1.0))[0].tolist() == [[2.0] * 3]  # in no meeting


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64])
def test_in_joined_calls_of_int8_no_bit_depends_on_the_others(size: int, plain_checkpoint: Any) -> None:
    pipe: Any = DiffusionPipeline.from_pretrained(plain_checkpoint("int8"), dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    calls: list[list[dict[str, Any]]] = []
    alone: list[Any] = []
    plain = pipe.transformer.forward

    def forward(**arguments: Any) -> Any:
        calls[-1].append(arguments)
        alone.append(plain(**arguments)[0])
        return (alone[-1],)

    pipe.transformer.forward = forward
    for seed in range(4):
        calls.append([])
        noise = torch.Generator().manual_seed(seed)
        call = {"width": size, "height": size, "num_inference_steps": 4, "max_sequence_length": 8}
        pipe(f"a {seed}", **call, guidance_scale=1.0, generator=noise)
    pipe.transformer.forward = plain
    meet(pipe.transformer)
    made = [one for each in together(pipe.transformer, calls) for one in each]
    assert [shared for _, shared in made] == [4] * 16
    assert all(torch.equal(one, other) for (one, _), other in zip(made, alone, strict=True))


@pytest.mark.slow
def test_joined_calls_that_fail_leave_nothing_in_the_making(plain_checkpoint: Any, monkeypatch: Any) -> None:
    worker = Worker(Settings({"X": str(plain_checkpoint("int8"))}, "cpu", joins=True))
    call = {**worker.load("X").defaults, "num_inference_steps": 1}
    plain = _Making._make

    def make(self: _Making) -> Any:
        if self._meeting is not None:
            raise RuntimeError("out of memory")
        return plain(self)

    monkeypatch.setattr(_Making, "_make", make)
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.prove_joined([Order(seed, "X", str(seed), seed, call) for seed in range(3)])
    assert not worker._kept
    worker.unload("X")  # Busy while it makes images
    assert not worker.memory()


@pytest.mark.long
@pytest.mark.parametrize("in_process", [True, False])
def test_joined_images_of_int8_are_the_bytes_that_are_made_alone(in_process: bool, plain_checkpoint: Any) -> None:
    checkpoint: Path = plain_checkpoint("int8")
    bodies = [{"prompt": f"a {n}", "seed": n, "num_inference_steps": 5 + n, "size": "16x16"} for n in range(4)]
    bodies += [{"prompt": "other", "seed": 9, "num_inference_steps": 6, "size": "32x32"}]
    made: list[list[bytes]] = []
    for join in (False, True):
        with running(checkpoint, join=join, in_process=in_process) as server, ThreadPoolExecutor() as pool:
            first = pool.submit(ask, server, "/v1/images/generations", bodies[0] | {"num_inference_steps": 60})
            until(lambda server=server: len(server.dispatcher.queue) == 1)
            answers = [pool.submit(ask, server, "/v1/images/generations", body) for body in bodies]
            made.append([content(each.result()) for each in [first, *answers]])
            page, row = ask(server, "/metrics")[2], ask(server, "/v1/models")[2]["data"][0]
            joined = [line for line in page.splitlines() if line.startswith("fluxq_steps_joined_total{")]
            assert bool(joined) == join and row.get("joined") == ("the same bits" if join else None)
            assert ask(server, "/v1/images/generations", bodies[0] | {"prompt": "x " * 5000})[0] in (200, 400)
    assert made[0] == made[1]


def content(answer: tuple[int, Any, Any]) -> bytes:
    assert answer[0] == 200, answer[2]
    return Image.open(io.BytesIO(base64.b64decode(answer[2]["data"][0]["b64_json"]))).tobytes()
