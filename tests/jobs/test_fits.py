"""The best recipe and placement that fit a card, of a pipeline's folder, by bytes."""

import math
import re

import pytest

from fluxq.base import console
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.base.tensors import TensorFile
from fluxq.integrations.bounded import load_empty
from fluxq.jobs import fits
from fluxq.jobs.fits import AS_STORED, IN_16_BIT, Choice, best, best_fit
from fluxq.recipes.cards import CONTEXT, PartSize
from fluxq.recipes.recipe import shipped_recipes

CALL = {"height": 16, "width": 16, "max_sequence_length": 8}


@pytest.fixture(scope="module")
def folder():
    return resolve_model("tiny", local_files_only=True)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Activations that were counted before, and no weight is read."""
    stages = {"text_encoder": 10_000, "text_encoder_2": 9_000, "transformer": 140_000, "vae": 70_000}
    monkeypatch.setattr(fits, "activations_of", lambda pipe, call: (stages, {"vae": 60_000}))
    monkeypatch.setattr(TensorFile, "get_tensor", lambda *_: pytest.fail("a weight was read"))


def at(folder, room: float, *recipes: str):
    return best_fit(folder, room, CALL, recipes, model="tiny")


@pytest.fixture(scope="module")
def stored(plain_checkpoint):
    return resolve_model(str(plain_checkpoint("fp8")), local_files_only=True, one_model=True)


@pytest.fixture
def options(folder) -> list[Choice]:
    pipe = load_empty(folder, "bfloat16")
    return fits.choices(fits.components_of(folder, pipe, CALL), shipped_recipes())


def test_less_room_means_fewer_bits_and_then_slower_placements(options):
    room, seen = 1e9, []
    while found := best(options, room):
        choice, way, peaks = found
        assert CONTEXT + max(peaks.values()) <= room
        seen.append((choice.recipes["transformer"], way.moves))
        room = CONTEXT + max(peaks.values()) - 1
    assert seen[0] == (IN_16_BIT, "everything") and seen[-1][1] == "blocks" and len(seen) > 8
    moves = [way for _, way in seen]
    assert moves == sorted(moves, key=lambda way: way == "blocks")  # weights move at every step where nothing else fits


@pytest.mark.slow
def test_too_little_is_refused_with_the_least(folder):
    with pytest.raises(ValueError, match=r"tiny: nothing fits into 60\d MB; the least is 60\dMB") as refused:
        at(folder, CONTEXT + 5e5)
    least = console.bytes_of(re.findall(r"is (\S+)\.", str(refused.value))[0])
    assert at(folder, least).placement.peak <= least


def test_the_order_of_quality_is_the_bytes_of_the_denoiser_then_those_of_the_encoders(options):
    weights = [{part.name: part.weights for part in choice.parts} for choice in options]
    order = [(each["transformer"], each["text_encoder"] + each["text_encoder_2"]) for each in weights]
    assert order == sorted(order, reverse=True) and {*options[0].recipes.values()} == {IN_16_BIT}
    assert len({tuple(one.recipes.values()) for one in options}) == len(options) == 1 + 3 * len(shipped_recipes())
    assert all(each["vae"] == weights[0]["vae"] for each in weights)


def test_where_only_moving_weights_at_every_step_is_left_it_is_done():
    def choice(name: str, weights: float) -> Choice:
        return Choice({"transformer": name}, [PartSize("transformer", weights, 0, None, 0.1 * weights)])

    options = [choice("16 bit", 20e9), choice("int4", 5e9)]
    for room, recipe, moves in ((30e9, "16 bit", "everything"), (6e9, "int4", "everything"), (3e9, "16 bit", "blocks")):
        found = best(options, room)
        assert found and (found[0].recipes["transformer"], found[1].moves) == (recipe, moves)
    assert best(options, CONTEXT + 0.4e9) is None


def test_it_says_how_to_make_it(folder):
    of_hub = ModelFolder("a/tiny", folder.path)
    found = best_fit(of_hub, CONTEXT + 2.2e6, CALL, ["nvfp4"], model="a/tiny", revision="v1")
    assert found.recipes == dict.fromkeys(("text_encoder", "text_encoder_2", "vae"), IN_16_BIT) | {
        "transformer": "nvfp4"
    }
    words = "--revision v1 --recipe nvfp4 --components transformer"
    assert found.command == f"fluxq quantize a/tiny {words} -o tiny-nvfp4"
    lines = found.placement.code.splitlines()
    assert lines[2] == "pipe = FluxPipeline.from_pretrained('tiny-nvfp4', dtype=torch.bfloat16)" and len(lines) <= 6
    described = found.describe()
    assert described["code"] == lines and described["recipes"] == found.recipes
    assert math.isclose(described["peak_gb"], max(described["stages_gb"].values()) + CONTEXT / 1e9)


def test_what_is_quantized_stays_as_it_is_stored(stored):
    found = at(stored, 1e9)
    assert found.recipes["transformer"] == AS_STORED and found.recipes["vae"] == IN_16_BIT and not found.command
