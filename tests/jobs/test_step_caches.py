"""Step caches of an evaluation: fewer steps beside each, what is kept of measuring, what is refused early."""

import json
from types import SimpleNamespace

import pytest

from fluxq import tiny
from fluxq.base.model import resolve_model
from fluxq.eval.images.executor import open_engine
from fluxq.eval.images.sides import Side, variants
from fluxq.jobs import listing, step_caches
from fluxq.runtime.step_caches import cache_of, fewer_steps
from fluxq.runtime.step_trials import Trials

CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 4}
SIDE = Side("q", str(tiny.path()), "digest")


def test_fewer_steps_compute_no_less_and_equal_numbers_are_one_side():
    caches = [cache_of("0.1"), cache_of("taylor_lite=3"), cache_of("mag=0.1"), cache_of("sea=0.2")]
    sides = variants(SIDE, ["native", "int8"], caches)
    shares = [None, None, 0.39, 11 / 28, 0.41, 1.0, 0.39, 11 / 28, 15 / 28, 1.0]
    sets = [None if share is None else SimpleNamespace(computed=share) for share in shares]
    with open_engine("local") as engine:
        fewer = step_caches.sides_of_fewer(sides, sets, 28, engine)  # pyright: ignore[reportArgumentType]
    assert [(name, side.name, side.backend) for name, side in fewer.items()] == [
        ("q, FirstBlockCache 0.1", "q, 11 steps", "native"),
        ("q, TaylorSeer lite 3", "q, 11 steps", "native"),
        ("q, MagCache 0.1", "q, 12 steps", "native"),
        ("q as int8, FirstBlockCache 0.1", "q as int8, 11 steps", "int8"),
        ("q as int8, TaylorSeer lite 3", "q as int8, 11 steps", "int8"),
        ("q as int8, MagCache 0.1", "q as int8, 15 steps", "int8"),
    ]
    assert len(set(fewer.values())) == 4
    one = fewer["q, MagCache 0.1"]
    assert step_caches.arguments_of(one, CALL) == {**CALL, "num_inference_steps": 12}
    assert step_caches.arguments_of(sides[2], CALL) == CALL
    assert step_caches.share_of(one, sets[2], 28) == 12 / 28  # pyright: ignore[reportArgumentType]
    assert one.describe() != SIDE.describe() and one.cache == fewer_steps(12)


def test_what_is_measured_beforehand_is_kept_and_shared_by_caches_of_a_kind(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(Side, "open", lambda *_: measured.append("opened"))
    monkeypatch.setattr(step_caches, "measured_for", lambda cache, *_: measured.append(cache.kind) or "[1.0, 0.9]")
    folder, caches = resolve_model("tiny"), [cache_of("mag=0.1"), cache_of("mag=0.3"), cache_of("taylor=3")]
    with open_engine("local") as engine:
        for _ in range(2):
            made = step_caches.measured_caches(caches, folder, SIDE, CALL, "a", "cpu", tmp_path, engine)
            assert [each.made for each in made] == ["[1.0, 0.9]", "[1.0, 0.9]", None] and made[1].value == 0.3
    assert measured == ["opened", "mag"]
    (file,) = tmp_path.glob("*/made.json")
    file.write_text(json.dumps({"made": "[2]"}), encoding="utf-8")
    with open_engine("local") as engine:
        step_caches.measured_caches(caches, folder, SIDE, CALL, "a", "cpu", tmp_path, engine)
    assert measured == ["opened", "mag"] * 2


def test_what_the_denoiser_or_the_scheduler_cannot_have_is_refused_early(tmp_path, monkeypatch):
    folder = resolve_model("tiny")
    assert len(step_caches.require_caches(["0.1", "list=0.5"], folder, CALL)) == 2
    assert step_caches.images_to_measure([cache_of("0.1"), cache_of("mag=1"), cache_of("list=0.5")]) == 49
    monkeypatch.setattr("diffusers.FluxTransformer2DModel", object)
    with pytest.raises(ValueError, match=r"takes no step cache in this diffusers: .*--cache list=0\.5"):
        step_caches.require_caches(["0.1"], folder, CALL)
    levels = {"compute": [0, 1], "order": 1, "levels": [1.0, 0.5], "models": {}, "settings": {}}
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"kind": "fluxq steps", "list": {"scheduler": "DDIMScheduler", **levels}}))
    with pytest.raises(ValueError, match="the list is of a DDIMScheduler"):
        step_caches.require_caches([f"list={file}"], folder, CALL)


@pytest.mark.slow
def test_a_share_becomes_a_list_and_an_interrupted_one_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(step_caches, "IMAGES", 4)
    side, caches = Side("16-bit", str(tiny.path()), "digest", dtype="float32"), [cache_of("list=0.5")]
    measured, measure = [], listing.measure_velocities
    monkeypatch.setattr(listing, "measure_velocities", lambda *args: (measured.append(1), measure(*args))[1])
    monkeypatch.setattr(Trials, "best", lambda *_: 1 / 0)
    with open_engine("local") as engine:
        arguments = caches, resolve_model("tiny"), side, CALL, "a", "cpu", tmp_path, engine
        with pytest.raises(ZeroDivisionError):
            step_caches.measured_caches(*arguments)
        monkeypatch.undo()
        monkeypatch.setattr(step_caches, "IMAGES", 4)
        (made,) = step_caches.measured_caches(*arguments)
    assert measured == [1] and len(made.steps.computed) == 2 and made.value is None and not made.is_unmeasured
