"""Pairs of images: those that both pipelines make alone, what is kept of them, what is refused."""

import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fluxq import tiny
from fluxq.base.model import ModelFolder, load_pipeline

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from fluxq.cli import cli
from fluxq.demo.pairs import DemoOptions, Pair, Pairs, Side
from fluxq.eval.images.generate import generate_batch
from fluxq.jobs.memory import stored_bytes
from fluxq.serve.orders import Order

PROMPT = "a red three on black"


@pytest.fixture(scope="module")
def pairs(plain_checkpoint) -> Pairs:
    folders = [str(plain_checkpoint(name)) for name in ("int8", "nvfp4")]
    return Pairs(DemoOptions(folders, device="cpu", max_pixels=1 << 10, max_steps=10))


def alone(pipe: Any, steps: int) -> Any:
    """Image that a pipeline makes by itself."""
    return generate_batch(pipe, [(PROMPT, 5)], tiny.CALL_KWARGS | {"num_inference_steps": steps})


@pytest.mark.slow
def test_a_pair_is_what_both_pipelines_make_alone_and_another_checkpoint_changes_one_side(
    pairs: Pairs, pipe: Any, plain_checkpoint, monkeypatch
) -> None:
    told: list[tuple[str, int, int]] = []
    before = alone(pipe, 2)
    for recipe, sides in (("int8", ["16 bit", "tiny-int8"]), ("nvfp4", ["tiny-nvfp4"])):
        folder = plain_checkpoint(recipe)
        pair = pairs.make(folder.name, PROMPT, 5, 2, tell=lambda *news: told.append(news))
        assert list(dict.fromkeys(side for side, _, _ in told)) == sides
        assert [step for side, step, steps in told if side == folder.name and steps == 2] == [1, 2, 2]
        assert told.clear() is None and pair.order.size == (16, 16) and pair.order.seed == 5
        after = alone(load_pipeline(ModelFolder("", folder)), 2)
        assert torch.equal(pair.original.image, before.images[0]) and torch.equal(pair.quantized.image, after.images[0])
        assert torch.equal(pair.original.latents, before.latents[0])
        a, b = before.images[0].double(), after.images[0].double()
        assert pair.psnr == pytest.approx(float(10 * torch.log10(255**2 / (a - b).square().mean())))
        assert 10 < pair.latent_sqnr < 60
        for side in (pair.original, pair.quantized):
            assert 0 < side.stepping < side.seconds
    monkeypatch.setattr(pairs._worker, "run", lambda *_: pytest.fail("all of it was kept"))
    assert pairs.make("tiny-nvfp4", PROMPT, 5, 2).quantized is pair.quantized
    assert pairs.make("tiny-nvfp4", PROMPT, 5, 2, 16, 16).original is pair.original


def test_an_image_that_is_being_made_when_the_demo_ends_is_let_go(pairs: Pairs, monkeypatch) -> None:
    monkeypatch.setattr(pairs, "_ends", False)
    steps: list[int] = []

    def tell(side: str, step: int, _: int) -> None:
        steps.append(step)
        pairs.end()

    with pytest.raises(RuntimeError, match="the demo is ending"):
        pairs.make("tiny-int8", PROMPT, 6, 4, tell=tell)
    assert steps == [1]


@pytest.mark.slow
def test_an_image_stops_after_a_step_or_before_the_first_and_can_be_made_again(pairs: Pairs) -> None:
    steps: list[int] = []
    for stops, made in ((lambda: len(steps) == 1, [1]), (lambda: True, [])):
        steps.clear()
        with pytest.raises(RuntimeError, match="stopped"):
            pairs.make("tiny-int8", PROMPT, 7, 4, tell=lambda side, step, _: steps.append(step), stops=stops)
        assert steps == made and not pairs._worker._making
    assert pairs.make("tiny-int8", PROMPT, 7, 4).order.seed == 7


def test_the_map_has_one_scale_for_all_pairs() -> None:
    a = torch.zeros(3, 1, 4, dtype=torch.uint8)
    b = a.clone()
    b[:, 0] = torch.tensor([[0, 1, 0, 9], [0, 0, 3, 255], [0, 1, 0, 7]])
    latents = torch.tensor([3.0, 4.0])
    pair = Pair(Order(0, "", "", 0, {}), Side(a, latents, 4.0, 3.0), Side(b, latents + 0.5, 2.0, 1.5))
    assert pair.difference.tolist() == [[0, 1, 3, 255]]
    assert pair.error_map.shape == a.shape and pair.error_map[2].tolist() == [[0, 32, 64, 255]]
    assert pair.latent_sqnr == pytest.approx(10 * torch.log10(torch.tensor(25 / 0.5)).item()) and pair.speed == 2
    assert Pair(pair.order, pair.original, Side(b, latents, 1.0, 0.0)).speed is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"steps": 11}, "num_inference_steps is 11, 10 at most"),
        ({"steps": 0}, "num_inference_steps: Input should be greater"),
        ({"width": 24, "height": 16}, "24"),
        ({"width": 64, "height": 32}, "64 x 32 are 2048 pixels, 1024 at most"),
        ({"width": 16}, "width and height: give both"),
        ({"prompt": ""}, "prompt: "),
        ({"seed": -1}, "seed: "),
        ({"name": "other"}, "there is no checkpoint 'other'"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(pairs: Pairs, asked: dict[str, Any], said: str) -> None:
    if said == "24" and pairs.facts["tiny-int8"].unit <= 8:
        asked, said = {"width": 17, "height": 16}, "expected a multiple of"
    with pytest.raises(ValueError, match=said):
        pairs.make(**{"name": "tiny-int8", "prompt": PROMPT} | asked)


@pytest.mark.slow
def test_models_without_room_for_both_take_turns_and_one_says_what_it_lacks(plain_checkpoint, pipe: Any) -> None:
    folder = plain_checkpoint("int8")
    own, base = (stored_bytes(ModelFolder("", path)) for path in (folder, tiny.path()))
    turns = Pairs(DemoOptions([str(folder)], device="cpu", max_memory=base + own // 2))
    pair = turns.make(folder.name, PROMPT, 5, 1)
    assert [*turns._worker.memory()] == [folder.name]
    assert torch.equal(pair.original.image, alone(pipe, 1).images[0])
    with pytest.raises(ValueError, match=r"its weights take .*, .* more than there is room for on cpu"):
        Pairs(DemoOptions([str(folder)], device="cpu", max_memory=base - 1))


def test_the_16_bit_model_is_the_checkpoints_own(plain_checkpoint, tiny_folder: Path, tmp_path: Path) -> None:
    int8, nvfp4 = (str(plain_checkpoint(name)) for name in ("int8", "nvfp4"))
    with pytest.raises(ValueError, match="was quantized itself"):
        Pairs(DemoOptions([int8], nvfp4, device="cpu"))
    with pytest.raises(ValueError, match=r"the 16-bit model of tiny-int8 is not here: .*--model DIR"):
        Pairs(DemoOptions([int8], "nobody/none", device="cpu"))
    shutil.copy(tiny_folder / "scheduler" / "scheduler_config.json", tmp_path / "before.json")
    text = (tiny_folder / "scheduler" / "scheduler_config.json").read_text()
    (tiny_folder / "scheduler" / "scheduler_config.json").write_text(text.replace('"shift":', '"shift": 7, "was":'))
    with pytest.raises(ValueError, match="its scheduler is not what tiny-int8 has"):
        Pairs(DemoOptions([int8], str(tiny_folder), device="cpu"))


@pytest.mark.skipif(find_spec("gradio") is None, reason="needs gradio, of the extra `demo`")
def test_a_port_in_use_and_a_damaged_folder_end_the_command_in_a_sentence(plain_checkpoint, tmp_path: Path) -> None:
    folder = plain_checkpoint("int8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli, ["demo", str(folder), "--port", port])
    assert result.exit_code == 2 and f"port {port} of 127.0.0.1 is in use: give another --port" in result.output
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    config = damaged / "vae" / "config.json"
    config.write_text(config.read_text() + " ")
    result = CliRunner().invoke(cli, ["demo", str(damaged), "--port", "0", "--device", "cpu"])
    assert result.exit_code == 2 and "fluxq verify refuses it" in result.output, result.output
