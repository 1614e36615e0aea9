"""Live quality: what shadow images show of a checkpoint, and when that is an alert."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from served import ask, running, until

from fluxq.serve.orders import NotLoaded, Order, Quantum
from fluxq.serve.shadow import Shadows
from fluxq.serve.worker import Settings, Worker
from fluxq.tiny import path as tiny_path

PROMPT = "a red three on black"


@pytest.mark.parametrize(
    ("mean", "count", "is_alert"),
    [(17.0, 4, False), (14.0, 20, True), (17.9, 20, False), (17.0, 64, True), (19.0, 2000, False), (18.2, 2000, False)],
)
def test_an_alert_needs_a_mean_that_is_surely_below_the_gate(mean: float, count: int, is_alert: bool, caplog) -> None:
    shadows, rng = Shadows(), random.Random(0)
    shadows.of("a", ["psnr>=18", "lpips<=0.1"])
    said = 0
    for _ in range(count):
        shadows.add("a", {"psnr": rng.gauss(mean, 1.5), "latent_sqnr": 5.0})
        said += "a" in shadows.alerts
    assert bool(said) == is_alert == ("not what it was shipped as" in caplog.text)
    assert caplog.text.count("shipped as") == is_alert  # once
    if is_alert:
        assert shadows.alerts["a"].startswith("psnr 1") and "shipped with >= 18" in shadows.alerts["a"]


def test_a_broken_image_counts_and_a_perfect_one_ends_an_alert() -> None:
    shadows = Shadows()
    shadows.of("a", ["latent_sqnr > 20.5"])
    for _ in range(5):
        shadows.add("a", {"psnr": 60.0, "latent_sqnr": float("nan")})
    assert shadows.told("a") == {"images": 5, "psnr_db": 60.0, "latent_sqnr_db": -100.0, "alert": shadows.alerts["a"]}
    for _ in range(64):
        shadows.add("a", {"psnr": float("inf"), "latent_sqnr": float("inf")})
    assert not shadows.alerts and shadows.told("a")["psnr_db"] == 100.0


@pytest.mark.slow
def test_a_shadow_that_has_begun_makes_room_for_a_checkpoint_and_begins_anew(plain_checkpoint) -> None:
    folders = {"int8": str(plain_checkpoint("int8"))}
    worker = Worker(Settings(folders, "cpu", originals={"16 bit": str(tiny_path())}))
    call = worker.load("16 bit").defaults | {"num_inference_steps": 2}
    worker.settings = replace(worker.settings, memory=sum(worker.memory().values()))  # for one of them
    worker.run([Order(2, "16 bit", PROMPT, 0, call, shadow_of=1)], Quantum.check, lambda: True)
    worker.load("int8")
    assert [*worker.memory()] == ["int8"]
    with pytest.raises(NotLoaded):  # nothing gives way to a shadow
        worker.run([Order(2, "16 bit", PROMPT, 0, call, shadow_of=1)], Quantum.check, lambda: True)


@pytest.mark.slow
def test_shadow_images_are_made_when_nothing_else_is(plain_checkpoint) -> None:
    pytest.importorskip("fastapi")
    int8: Path = plain_checkpoint("int8")
    with running(int8, shadow=1.0, shadow_model=str(tiny_path())) as server:
        for seed in range(5):
            body = {"prompt": PROMPT, "seed": seed, "num_inference_steps": 2}
            assert ask(server, "/v1/images/generations", body)[0] == 200
        told = lambda: ask(server, "/v1/models")[2]["data"][0]["shadow"]  # noqa: E731
        until(lambda: told()["images"] == 5)
        assert told()["psnr_db"] > 40 and told()["latent_sqnr_db"] > 30 and told()["alert"] is None
        page = ask(server, "/metrics")[2]
        assert 'fluxq_shadow_psnr_db_count{model="tiny-int8"} 5.0' in page
        assert 'fluxq_shadow_alert{model="tiny-int8"} 0.0' in page and "fluxq_images_total" in page
        server.dispatcher.shadows.of("tiny-int8", ["psnr>=90"])
        assert ask(server, "/v1/images/generations", {"prompt": PROMPT, "num_inference_steps": 2})[0] == 200
        until(lambda: told()["alert"])
        assert 'fluxq_shadow_alert{model="tiny-int8"} 1.0' in ask(server, "/metrics")[2]
