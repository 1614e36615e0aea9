"""Every protocol is whole: what it asks for exists, is fixed, and is refused where it would say nothing."""

import json
from collections.abc import Sequence

import pytest

from fluxq.base.model import ModelFolder, resolve_model
from fluxq.calibrate.prompts import DATASETS, PromptRow, PromptSet, load_prompts
from fluxq.eval.images.protocols import PROTOCOLS, items_of
from fluxq.eval.metrics.distribution import RESIZES
from fluxq.eval.metrics.metrics import METRICS
from fluxq.recipes.recipe import GATE_METRICS, gate_holds, parse_gate


def folder(path, pipeline: str, **transformer) -> ModelFolder:
    """A model folder, as far as protocols look at it."""
    (path / "transformer").mkdir(parents=True, exist_ok=True)
    (path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    (path / "transformer" / "config.json").write_text(json.dumps(transformer))
    return ModelFolder("model", path)


def flux(path, guidance: bool) -> ModelFolder:
    return folder(path, "FluxPipeline", num_layers=19, num_single_layers=38, guidance_embeds=guidance)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_row_asks_for_what_exists(name):
    row = PROTOCOLS[name]
    assert row.prompts == "default" or row.prompts in DATASETS
    assert row.metrics is None or set(row.metrics) <= METRICS.keys()
    gated = {parse_gate(gate).metric for gate in row.gates}
    assert gated <= set(row.metrics or METRICS)
    known = DATASETS[row.prompts].count if row.prompts in DATASETS else None
    assert known is None or row.count <= known
    assert row.fid_resize is None or row.fid_resize in RESIZES
    assert row.comparable or not (row.strict or row.only_known or row.calls)
    for each in row.calls:
        assert "num_inference_steps" in each.call and {"guidance_scale", "true_cfg_scale"} & each.call.keys()


def test_gates_know_every_metric():
    assert set(GATE_METRICS) == METRICS.keys() | {"velocity_error"}


def test_fid_is_in_no_protocol_with_too_few_images():
    for row in PROTOCOLS.values():
        if row.metrics is not None and any(key.startswith(("fid", "kid", "cmmd")) for key in row.metrics):
            assert row.count * row.seeds >= 5000 and row.fid_resize


def test_smoke_is_a_few_images_of_the_model_s_own_prompts():
    tiny, row = resolve_model("tiny"), PROTOCOLS["smoke"]
    assert row.call(tiny) == {}
    found = load_prompts(row.source(tiny), tiny, shuffle=row.shuffle)
    items = items_of(found.prompts, row.count, row.seeds)
    assert (
        items == [(prompt, seed) for seed, prompt in enumerate(found.prompts[:8])]
        and len({prompt for prompt, _ in items}) == 8
    )
    assert "fid" not in row.metrics


def test_standard_asks_a_model_s_own_prompts_where_it_has_some(tmp_path):
    row = PROTOCOLS["standard"]
    model = flux(tmp_path, guidance=True)
    assert row.source(model) == "MJHQ-30K"
    (tmp_path / "fluxq_prompts.txt").write_text("a\nb\n")
    assert row.source(model) == "default"
    assert PROTOCOLS["paper"].source(model) == "MJHQ-30K"


@pytest.mark.parametrize(
    "name, guidance, expected",
    [
        ("paper", True, {"num_inference_steps": 50, "guidance_scale": 3.5}),
        ("paper", False, {"num_inference_steps": 4, "guidance_scale": 0}),
        ("drawbench", False, {}),
        ("smoke", True, {}),
    ],
)
def test_steps_and_guidance_are_the_model_s(tmp_path, name, guidance, expected):
    assert PROTOCOLS[name].call(flux(tmp_path, guidance)) == expected


def test_models_of_one_class_are_told_apart(tmp_path):
    assert PROTOCOLS["drawbench"].call(flux(tmp_path, True))["num_inference_steps"] == 28
    assert PROTOCOLS["paper"].call(folder(tmp_path, "SanaPipeline", num_layers=20))["guidance_scale"] == 4.5
    with pytest.raises(ValueError, match=r"model: .* numbers are of FLUX\.1-dev, FLUX\.1-schnell, .*standard"):
        PROTOCOLS["paper"].call(folder(tmp_path, "SanaPipeline", num_layers=28))


@pytest.mark.parametrize("name", ["paper", "mlperf-sdxl"])
def test_a_published_protocol_is_not_for_every_model(name):
    with pytest.raises(ValueError, match=r"compare with no other model's; take --protocol standard"):
        PROTOCOLS[name].call(resolve_model("tiny"))


def test_mlperf_s_windows_are_two_sided():
    clip, fid = PROTOCOLS["mlperf-sdxl"].gates
    assert [gate_holds(clip, {"clip_score": value}) for value in (31.68, 31.7, 31.82)] == [False, True, False]
    assert [gate_holds(fid, {"fid": value}) for value in (23.0, 23.5, 23.96, None)] == [False, True, False, False]


def test_departures_are_named(tmp_path):
    model = flux(tmp_path, guidance=True)
    row = PROTOCOLS["paper"]
    prompts = texts("MJHQ-30K", ("a",))
    call = {"num_inference_steps": 50, "guidance_scale": 3.5, "height": 1024}
    assert row.departures(model, prompts, 5000, 1, call) == []
    assert row.departures(model, texts("meta_data.json", ("a",)), 5000, 1, call) == []
    found = row.departures(model, texts("mine.txt", ("a",)), 256, 1, {**call, "num_inference_steps": 8})
    assert found == [
        f"{what}: the numbers do not compare with published ones"
        for what in (
            "prompts are those of mine.txt, not MJHQ-30K",
            "count is 256, the protocol's 5000",
            "num_inference_steps is 8, the protocol's 50",
        )
    ]
    assert PROTOCOLS["smoke"].departures(model, prompts, 1, 1, {}) == []
    [one] = PROTOCOLS["drawbench"].departures(resolve_model("tiny"), texts("DrawBench", ("a",)), 200, 1, {})
    assert one.startswith("the protocol fixes no steps and guidance for tiny")


def test_items_give_every_image_a_seed_of_its_own():
    assert items_of(("a", "b"), 3, 2, 10) == [("a", 10), ("a", 11), ("b", 12), ("b", 13), ("a", 14), ("a", 15)]
    assert items_of(["a", "b"], 3, first_seed=7) == [("a", 7), ("b", 8), ("a", 9)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((), 3), "the list of prompts is empty"),
        ((("a",), 0), "0 prompts with 1 images each are none"),
        ((("a",), 3, 0), "3 prompts with 0 images each are none"),
        ((("a",), 1, 1, -1), "seeds from -1 on leave the range"),
        ((("a",), 2, 1, (1 << 63) - 1), "leave the range 0 to 2\\^63 - 1"),
    ],
)
def test_items_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        items_of(*arguments)


def texts(source: str, prompts: Sequence[str]) -> PromptSet:
    """A set of prompts without arguments."""
    return PromptSet(source, tuple(map(PromptRow, prompts)))
