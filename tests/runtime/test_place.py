"""`fluxq.place`: the fastest way that fits, what it takes, and what it does to a pipeline."""

import accelerate
import pytest
import torch
from torch import nn

import fluxq
from fluxq import tiny
from fluxq.base import console
from fluxq.recipes.cards import CONTEXT, WAYS, PartSize, Way, fit, least
from fluxq.runtime import place as placing
from fluxq.runtime.modulation import hoist_modulation, hoisted_in, modulation_of
from fluxq.runtime.peaks import on_meta, peaks
from fluxq.runtime.place import part_of, parts_of, place, rows_of
from fluxq.runtime.placed import is_offloaded, models_of

CALL = {"height": 16, "width": 16, "max_sequence_length": 8, "num_inference_steps": 4}
PARTS = [
    PartSize("text_encoder", 9e9, 1e8),
    PartSize("transformer", 8e9, 5e8, hoisted=5e9, in_blocks=1e9),
    PartSize("vae", 2e8, 6e9, in_tiles=1e9),
]


@pytest.fixture
def pipe():
    pipe = tiny.load()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def counted(monkeypatch):
    """Activations that were counted before."""
    stages = {"text_encoder": 10_000, "text_encoder_2": 9_000, "transformer": 140_000, "vae": 70_000}
    monkeypatch.setattr(placing, "activations_of", lambda pipe, call: (stages, {"vae": 60_000}))


def image(pipe) -> torch.Tensor:
    return pipe("a red circle", output_type="pt", generator=torch.Generator().manual_seed(0), **CALL).images


def bytes_of(model: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    ("way", "by_hand"),
    [
        (Way("everything"), (17.2e9 + 1e8, 17.2e9 + 5e8, 17.2e9 + 6e9)),
        (Way("turns"), (9.1e9, 8.5e9, 6.2e9)),
        (Way("turns", hoisted=True), (9.1e9, 5.5e9, 6.2e9)),
        (Way("turns", tiled=True), (9.1e9, 8.5e9, 1.2e9)),
        (Way("blocks"), (9.3e9, 1.7e9, 6.2e9)),
        (Way("blocks", tiled=True), (9.3e9, 1.7e9, 1.2e9)),
    ],
    ids=str,
)
def test_what_a_way_takes_by_hand(way, by_hand):
    found = way.peaks(PARTS)
    assert found == pytest.approx(dict(zip(("text_encoder", "transformer", "vae"), by_hand, strict=True)))
    assert way in WAYS


def test_a_way_that_no_part_can_go_is_left_out_and_the_first_that_fits_is_taken():
    plain = [PartSize(part.name, part.weights, part.activations) for part in PARTS]
    assert [way.peaks(plain) is not None for way in WAYS] == [True, True] + [False] * 5
    small = [PartSize("text_encoder", 1e9), *PARTS[1:]]
    for room, way in (
        (17e9, "everything"),
        (9.2e9, "turns"),
        (6.8e9, "turns, hoisted"),
        (6.2e9, "turns, hoisted, tiled"),
    ):
        found = fit(small, room)
        assert found and found[0].word == way
    assert least(small) == CONTEXT + 1.7e9 and fit(small, least(small)) and not fit(small, least(small) - 1)


def test_bytes_of_a_component_by_hand(pipe):
    """Blocks, the modulation's largest layer and its tables, and weights that a recipe would make smaller."""
    model = pipe.transformer
    part = part_of("transformer", model, activations=7, rows=4)
    assert (part.weights, part.activations) == (bytes_of(model), 7)
    blocks = [bytes_of(block) for block in (*model.transformer_blocks, *model.single_transformer_blocks)]
    assert part.in_blocks == bytes_of(model) - sum(blocks) + max(blocks)
    layers = [linear for linear, _ in modulation_of(model)[0].values()]
    sizes = [bytes_of(linear) for linear in layers]
    assert part.hoisted == bytes_of(model) - sum(sizes) + max(sizes) + 2 * 4 * sum(each.out_features for each in layers)
    name = "transformer_blocks.0.attn.to_q"
    less = part_of("transformer", model, activations=7, rows=4, stored={name: 100.0})
    assert part.weights - less.weights == 2 * model.get_submodule(name).weight.numel() - 100
    assert part_of("text_encoder", pipe.text_encoder, activations=0).in_blocks is None
    assert rows_of(pipe, {**CALL, "prompt": ["a star"] * 3}) == 3 * rows_of(pipe, {**CALL, "prompt": "a star"})
    model.register_to_config(guidance_embeds=True)
    assert rows_of(pipe, {**CALL, "negative_prompt": "a circle"}) == 2 * rows_of(pipe, CALL)
    embeddings = dict.fromkeys(("prompt_embeds", "negative_prompt_embeds"), torch.zeros(3, 2, 4))
    assert rows_of(pipe, CALL | embeddings) == 6 * rows_of(pipe, CALL)


@pytest.mark.slow
def test_compiled_modulation_is_not_hoisted(pipe):
    """Its products are in the compiled graph, so another way is taken."""
    assert part_of("transformer", pipe.transformer, activations=0).hoisted
    pipe.transformer.compile_repeated_blocks()
    assert part_of("transformer", pipe.transformer, activations=0).hoisted is None


@pytest.mark.slow
def test_tables_of_hoisted_modulation_are_counted(pipe):
    """The transformer's stage, hoisted, within 3 % of a real call's, tables and all."""
    assert rows_of(pipe, CALL) == 4 * (1 if pipe.transformer.config.guidance_embeds else 2)
    plain = peaks(on_meta(pipe), CALL)["transformer"]
    part = part_of("transformer", pipe.transformer, activations=plain, rows=2)  # `peaks` runs two steps
    layers = [bytes_of(linear) for linear, _ in modulation_of(pipe.transformer)[0].values()]
    tables = (part.hoisted or 0) - (part.weights - sum(layers) + max(layers))
    with hoist_modulation(pipe):
        taken = peaks(pipe, CALL)["transformer"]
    assert abs((plain + tables) / taken - 1) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("way", [WAYS[4], WAYS[6], *WAYS[:4], WAYS[5]], ids=str)
def test_every_way_makes_the_same_image_and_is_what_its_lines_do(way, pipe, counted, monkeypatch):
    want = image(pipe)
    monkeypatch.setattr(placing, "fit", lambda parts, room: (way, way.peaks(parts)))
    found = place(pipe, vram="8GB", device="cpu", **CALL)
    assert torch.allclose(image(pipe), want, atol=2e-2)
    assert found.way is way and [*found.peaks] == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert found.code.splitlines()[3:] == [*way.lines] and len(found.code.splitlines()) <= 6
    other = tiny.load()
    for line in way.lines:
        exec(
            line.replace('"cuda"', '"cpu"').replace("offload()", 'offload(device="cpu")'),
            {"pipe": other, "fluxq": fluxq},
        )
    assert [is_offloaded(each) for each in models_of(other).values()] == [
        is_offloaded(each) for each in models_of(pipe).values()
    ]
    assert other.vae.use_tiling == pipe.vae.use_tiling == way.tiled
    assert torch.equal(image(other), image(pipe))
    assert bool(found.hoisted) == way.hoisted == bool(hoisted_in(pipe.transformer.modules()))
    if found.hoisted:
        found.hoisted.remove()
        assert hoisted_in(pipe.transformer.modules()) is None


@pytest.mark.slow
def test_it_says_what_it_did_in_one_sentence(pipe):
    found = place(pipe, vram="8GB", device="cpu", **CALL)
    assert str(found).startswith(
        "everything on the GPU: at most 604 MB of 8 GB, 600 MB of them the driver's (text_encoder "
    )
    assert (
        found.peak == CONTEXT + max(found.peaks.values()) and found.describe()["placement"] == "everything on the GPU"
    )
    assert parts_of(pipe, CALL)[2].weights == bytes_of(pipe.transformer)


def test_hoisted_weights_stay_on_the_cpu_when_the_model_moves(pipe):
    """The meta device stands for a GPU."""
    layers = [linear for linear, _ in modulation_of(pipe.transformer)[0].values()]
    hoisted = hoist_modulation(pipe, offload=True)
    pipe.transformer.to("meta")
    assert not any(each.is_meta for linear in layers for each in linear.parameters())
    assert pipe.transformer.x_embedder.weight.is_meta
    hoisted.remove()
    assert all(linear.weight.is_meta for linear in layers)
    nn.Module.to(pipe.transformer, "meta")
    assert not any("_apply" in vars(linear) for linear in layers)


@pytest.mark.parametrize(
    ("vram", "said"),
    [
        ("12", r"vram is '12', expected bytes, or a size with its unit, as in '12GB'"),
        ("much", "vram is 'much', expected bytes"),
        (None, "vram is None"),
        (True, "vram is True"),
        (float("nan"), "vram is nan"),
        (-5, "vram is -5"),
        ("0GB", "vram is '0GB'"),
        ("500MB", "vram is 500 MB, and a GPU's driver and libraries alone keep 600 MB: give the memory of the card"),
        (CONTEXT + 1000, r"FluxPipeline takes at least 60\dMB, more than vram=.*: quantize it"),
    ],
)
def test_what_is_no_card_is_refused(vram, said, pipe, counted):
    with pytest.raises(ValueError, match=said):
        place(pipe, vram=vram, device="cpu", **CALL)
    assert not is_offloaded(pipe.transformer)


def test_the_least_that_is_named_is_enough(pipe, counted):
    with pytest.raises(ValueError, match="takes at least") as refused:
        place(pipe, vram=CONTEXT + 1000, device="cpu", **CALL)
    named = str(refused.value).split("at least ")[1].split(",")[0]
    assert place(pipe, vram=named, device="cpu", **CALL).peak <= console.bytes_of(named)


@pytest.mark.parametrize("steps", [None, 0, -1, "4", 2.5, True])
def test_steps_that_are_no_number_are_refused(steps, pipe, counted):
    with pytest.raises(ValueError, match=r"num_inference_steps is .*, expected a whole number, 1 or more"):
        place(pipe, vram="8GB", device="cpu", num_inference_steps=steps)


def test_a_pipeline_that_something_holds_is_refused(pipe, counted):
    with pytest.raises(ValueError, match=r"device cuda: torch finds no such GPU; .*fluxq plan MODEL --vram SIZE"):
        place(pipe, vram="8GB")
    with pytest.raises(ValueError, match="place needs a pipeline of diffusers, got FluxTransformer2DModel"):
        place(pipe.transformer, vram="8GB")
    hoisted = "transformer is captured or hoisted already: .* Where `fluxq.place` hoisted it, that is `hoisted` of"
    with hoist_modulation(pipe), pytest.raises(ValueError, match=hoisted):
        place(pipe, vram="8GB", device="cpu")
    accelerate.cpu_offload_with_hook(pipe.vae, "cpu")
    with pytest.raises(ValueError, match=r"vae is offloaded already, .*pipe\.remove_all_hooks"):
        place(pipe, vram="8GB", device="cpu")


def test_a_card_with_less_is_refused(pipe, monkeypatch):
    class Properties:
        total_memory = 7.9e9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    with pytest.raises(ValueError, match=r"cuda has 7\.9 GB, less than the 8 GB of vram: give what it has"):
        place(pipe, vram="8GB")
    with pytest.raises(ValueError, match="device cuda:1: torch finds no such GPU"):
        place(pipe, vram="8GB", device="cuda:1")


def test_a_pipeline_is_optimized_first_and_then_placed(pipe, counted):
    want = image(pipe)
    fluxq.optimize(pipe)
    place(pipe, vram="8GB", device="cpu", **CALL)
    assert torch.equal(image(pipe), want)
