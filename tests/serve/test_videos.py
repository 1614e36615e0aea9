"""Videos as jobs: asked for, looked at, fetched, forgotten; their frames are those of the pipeline alone."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_pipelines import wan
from PIL import Image, ImageSequence
from served import ask, running, until

from fluxq.eval.images.generate import generate_batch
from fluxq.jobs import making

pytest.importorskip("fastapi")
pytest.importorskip("python_multipart")

pytestmark = pytest.mark.slow
CALL = {"num_frames": 5, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def checkpoint_of_wan(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    pipe, call = wan()
    pipe.save_pretrained(folder / "wan")
    (folder / "wan" / "fluxq_generation.json").write_text(json.dumps(call | CALL))
    options = making.JobOptions(
        model=str(folder / "wan"), recipe="int8", profile="rtn", output=str(folder / "out"), check=False
    )
    making.quantize(making.job_of(options))
    return folder / "out"


@pytest.fixture(scope="module")
def server(checkpoint_of_wan: Path) -> Iterator[Any]:
    with running(checkpoint_of_wan) as one:
        yield one


def test_a_video_is_made_as_a_job_and_its_frames_are_the_pipelines(server: Any, checkpoint_of_wan: Path) -> None:
    from diffusers import DiffusionPipeline

    body = {"prompt": "a cat", "seed": 3, "seconds": 0.3125, "negative_prompt": "dull"}
    status, _, asked = ask(server, "/v1/videos", body)
    assert status == 200 and asked["object"] == "video" and asked["status"] == "queued" and asked["num_frames"] == 5
    place = f"/v1/videos/{asked['id']}"
    until(lambda: ask(server, place)[2]["status"] == "completed")
    told = ask(server, place)[2]
    assert told["progress"] == 100 and told["seed"] == 3 and told["steps_computed"] == 2 and told["error"] is None
    with ask_file(server, f"{place}/content") as file:
        frames = [np.asarray(each.convert("RGB")) for each in ImageSequence.Iterator(file)]
    pipe: Any = DiffusionPipeline.from_pretrained(checkpoint_of_wan, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    defaults = json.loads((checkpoint_of_wan / "fluxq_generation.json").read_text())
    video = generate_batch(pipe, [("a cat", 3)], defaults | CALL | {"negative_prompt": "dull"}).images[0]
    assert np.array_equal(np.stack(frames), video.movedim(-3, -1).numpy())
    assert ask(server, place, method="DELETE")[2]["deleted"] and ask(server, place)[0] == 404


def test_frames_that_no_file_holds_fail_the_video_and_their_pixels_are_let_go(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bytes:
        raise ValueError("too large")

    monkeypatch.setattr("fluxq.serve.videos.file_of", fails)
    _, _, asked = ask(server, "/v1/videos", {"prompt": "a cat"})
    until(lambda: ask(server, f"/v1/videos/{asked['id']}")[2]["status"] == "failed")
    (video,) = [each for name, each in server._served.videos._videos.items() if name == asked["id"]]
    assert not video.job.made


def ask_file(server: Any, path: str) -> Image.Image:
    from urllib.request import urlopen

    with urlopen(f"{server.address}{path}") as answer:
        assert answer.headers["Content-Type"] == "image/webp"
        return Image.open(io.BytesIO(answer.read()))


def test_a_video_that_is_deleted_is_let_go_and_one_that_is_not_finished_has_no_file(server: Any) -> None:
    _, _, asked = ask(server, "/v1/videos", {"prompt": "a cat", "num_inference_steps": 90})
    place = f"/v1/videos/{asked['id']}"
    until(lambda: any(entry.steps for entry in server.dispatcher.queue))
    assert ask(server, f"{place}/content")[0] == 409 and ask(server, place)[2]["status"] == "in_progress"
    assert ask(server, place, method="DELETE")[0] == 200
    until(lambda: not len(server.dispatcher.queue))


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/images/generations", {"prompt": "a"}, 400, "makes videos: ask /v1/videos"),
        ("/v1/videos", {"prompt": "a", "n": 2}, 400, "one video of a request"),
        ("/v1/videos", {"prompt": "a", "seconds": 1, "num_frames": 5}, 400, "give one of them"),
        ("/v1/videos", {"prompt": "a", "num_frames": 10_000, "size": "1024x1024"}, 400, "width × height × frames"),
        ("/v1/videos/video_x", None, 404, "no video of that id"),
    ],
)
def test_what_cannot_be_made_is_refused(server: Any, path: str, body: object, status: int, said: str) -> None:
    code, _, answer = ask(server, path, body)
    assert code == status and said in answer["error"]["message"], answer
