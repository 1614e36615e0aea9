"""Published models: their configurations against published numbers, and what `fluxq families` says of them."""

import json
import re
import weakref
from functools import cache
from inspect import signature
from pathlib import Path

import diffusers
import pytest
import torch
from click.testing import CliRunner
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fluxq.cli import cli
from fluxq.jobs import catalogue
from fluxq.jobs.catalogue import CatalogueModel
from fluxq.quantize.structure import convolutions_of, shapes_of
from fluxq.recipes.all_families import FAMILIES, PUBLISHED, find_published
from fluxq.recipes.cards import CONTEXT
from fluxq.recipes.cost import activation_bytes, cost
from fluxq.recipes.devices import DEVICES
from fluxq.recipes.plan import component_recipe, make_plan
from fluxq.recipes.recipe import load_recipe, shipped_recipes
from fluxq.recipes.workloads import CallSize, forward_pass

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
# Billions of parameters, as published: in model cards, papers, or the tensors of the published files.
BILLIONS = {
    "FLUX.1-dev": 11.90,
    "FLUX.1-schnell": 11.89,
    "FLUX.1-Fill-dev": 11.90,
    "FLUX.1-Depth-dev": 11.90,
    "FLUX.2-dev": 32.22,
    "FLUX.2-klein-4B": 3.88,
    "FLUX.2-klein-9B": 9.08,
    "Chroma1-HD": 8.90,
    "Stable Diffusion 3 medium": 2.03,
    "Stable Diffusion 3.5 medium": 2.24,  # 2.47 with the table of positions, which is no parameter
    "Stable Diffusion 3.5 large": 8.06,
    "PixArt-Sigma-XL-2": 0.611,
    "Qwen-Image": 20.43,
    "Qwen-Image-Edit-2511": 20.43,
    "Z-Image-Turbo": 6.15,
    "Wan2.1-T2V-1.3B": 1.42,
    "Wan2.1-T2V-14B": 14.29,
    "Wan2.1-I2V-14B": 16.39,
    "Wan2.2-T2V-A14B": 2 * 14.29,
    "Wan2.2-I2V-A14B": 2 * 14.29,
    "Wan2.2-TI2V-5B": 5.00,
    "LTX-Video-2B": 1.92,
    "LTX-Video-13B": 13.04,
    "HunyuanVideo": 12.82,
    "HunyuanVideo-I2V": 12.81,
    "HiDream-I1-Full": 17.11,
    "SANA-0.6B": 0.592,
    "SANA-1.6B": 1.604,
    "SANA1.5-1.6B": 1.604,
    "SANA1.5-4.8B": 4.72,
    "SANA-Sprint-0.6B": 0.593,
    "SANA-Sprint-1.6B": 1.61,
    "Stable Diffusion XL": 2.567,
    "Stable Diffusion 1.5": 0.860,
    "T5-XXL": 4.76,
    "UMT5-XXL": 5.68,
    "CLIP-L": 0.123,
    "CLIP-L with projection": 0.1237,
    "CLIP-G with projection": 0.695,
    "Qwen2.5-VL-7B": 8.29,
    "Qwen3-4B": 4.02,
    "Qwen3-4B for causal LM": 4.02,
    "Qwen3-8B for causal LM": 8.19,
    "LLaVA-Llama-3-8B, its language model": 7.50,
    "Llama-3.1-8B": 8.03,
    "Gemma-2-2B": 2.61,
    "Gemma-3-12B": 12.19,
    "Mistral-Small-3.2-24B": 24.01,
    "FLUX.1 VAE": 0.0838,
    "SDXL VAE": 0.0837,
}
FEW = PUBLISHED[::12]  # for what takes a while


@cache
def named(name: str) -> CatalogueModel:
    return CatalogueModel(find_published(name)[0])


def test_every_family_has_a_published_model_and_every_name_is_one():
    assert {row.family for row in PUBLISHED} == set(FAMILIES)
    names = [name for row in PUBLISHED for name in (row.name, *row.also)]
    assert all(CallSize(**row.size).images == 1 for row in PUBLISHED)
    assert len({name.lower() for name in names}) == len(names) and set(BILLIONS) == {row.name for row in PUBLISHED}


@pytest.mark.often(1)
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_a_configuration_makes_as_many_parameters_as_are_published(row):
    model = named(row.name)
    assert model.parameters / 1e9 == pytest.approx(BILLIONS[row.name], rel=0.002)
    for linear in model.linears:
        assert (model.family.locate(linear.name) is None) != (model.family.kept(linear.name) is None), linear.name


@pytest.mark.often(2)
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_a_configuration_says_only_what_the_class_knows(row):
    """Diffusers drops an unknown key with a warning, transformers keeps it without one."""
    family = FAMILIES[row.family]
    if family.library == "diffusers":
        assert set(row.config) <= set(signature(getattr(diffusers, family.model).__init__).parameters)
        return
    config = named(row.name).module.config
    for key, value in row.config.items():
        parts = [(getattr(config, key), value)] if isinstance(value, dict) else [(config, {key: value})]
        for owner, said in parts:
            known = type(owner)().to_dict()
            assert {one: getattr(owner, one) for one in said if one in known} == said


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in FEW else pytest.mark.slow, id=row.name) for row in PUBLISHED],
)
def test_every_recipe_plans_and_costs_it_in_full_size(row):
    model = named(row.name)
    located = {linear.name for linear in model.linears if model.family.locate(linear.name)}
    for recipe in shipped_recipes():
        plan, size = model.plan(recipe), model.size(recipe)
        assert {layer.name for layer in plan.quantized} == located
        assert 0 < size.checkpoint_bytes < model.bytes_16bit and size.bits <= size.most_bits < 16
        assert size.serving_bytes >= size.checkpoint_bytes
        if model.family.kind == "transformer":
            forward = forward_pass(
                row.family,
                dict(model.module.config),
                CallSize(**row.size),
                vae=row.vae,
                convolutions=convolutions_of(model.module),
            )
            found = cost(plan, forward, DEVICES["h200"])
            assert found.total.seconds["fused"] < found.total.seconds_16bit and found.total.flops > 1e11


def test_a_model_with_a_vae_of_its_own_takes_fewer_tokens():
    row = named("Wan2.2-TI2V-5B").row
    assert forward_pass(row.family, row.config, CallSize(**row.size), vae=row.vae).image == 31 * 22 * 40


def test_names_are_found_however_they_are_written():
    assert [row.name for row in find_published("flux.1 DEV")] == ["FLUX.1-dev"]
    assert find_published("FLUX.1-Kontext-dev") == find_published("FLUX.1-dev")
    assert {row.family for row in find_published("wan")} == {"wan"} and len(find_published("wan")) == 6
    assert find_published("HiDreamImageTransformer2DModel") == find_published("hidream")
    assert find_published("flux.2") == find_published("flux2")
    with pytest.raises(ValueError, match=r"of that name; models with that in their name: FLUX\.2-klein-4B, FLUX"):
        find_published("klein")
    with pytest.raises(ValueError, match=r"of that name \(did you mean 'FLUX\.1-dev'\?\)$"):
        find_published("FLX.1-dev")
    for nothing in ("", "nonsense"):
        with pytest.raises(
            ValueError, match="no published model, family or model class of that name; families: flux, fl"
        ):
            find_published(nothing)


# Sizes


def test_sizes_of_flux_dev_by_hand():
    """Blocks of 11 811 Mi weights: nvfp4 takes 4.5 bits in the core, fp8 8 bits in the modulation, the rest 16."""
    model, size = named("FLUX.1-dev"), named("FLUX.1-dev").size("nvfp4")
    modulation = 76 * 18432 * 3072 - 38 * 9216 * 3072
    core = sum(linear.n * linear.k for linear in model.linears if model.family.locate(linear.name)) - modulation
    by_hand = 4.5 * core + 8 * modulation + 16 * (model.parameters - core - modulation)
    assert size.checkpoint_bytes == pytest.approx(by_hand / 8, rel=0.003)  # smoothing vectors and scales of rows
    assert model.bytes_16bit == 2 * model.parameters
    assert named("Stable Diffusion 3.5 medium").bytes_16bit == 2 * (
        named("Stable Diffusion 3.5 medium").parameters + 384**2 * 1536
    )  # and the table of positions, which is stored


@pytest.mark.slow
def test_a_shared_weight_is_stored_once_and_two_experts_twice():
    tied, free = named("Qwen3-4B for causal LM"), named("Qwen3-8B for causal LM")
    assert tied.bytes_16bit == 2 * tied.parameters and "lm_head.weight" not in tied.weights.names
    assert "lm_head.weight" in free.weights.names
    one, two = named("Wan2.1-T2V-14B"), named("Wan2.2-T2V-A14B")
    assert two.parameters == 2 * one.parameters and two.bytes_16bit == 2 * one.bytes_16bit
    pairs = [(model.size("fp8"), model.activation_bytes) for model in (one, two)]
    assert pairs[1][0].checkpoint_bytes == 2 * pairs[0][0].checkpoint_bytes
    assert pairs[1][0].serving_bytes - pairs[0][0].serving_bytes == pairs[0][0].checkpoint_bytes  # one runs at a time


def test_a_recipe_that_tries_more_may_store_more():
    model = named("FLUX.1-dev")
    plain, tried = model.size("nvfp4"), model.size("nvfp4-max")
    assert plain.bits == tried.bits and tried.most_bits - plain.most_bits == pytest.approx(0.18, abs=0.02)
    assert catalogue.bits(model.size("fp8")) == "8.05" and catalogue.bits(tried) == "5.51 to 5.70"


def test_a_text_encoder_has_no_forward_pass():
    model = named("T5-XXL")
    assert model.activation_bytes == 0 and model.size("fp8").serving_bytes == model.size("fp8").checkpoint_bytes


def test_rounding_holds_some_pieces_and_a_block():
    size, model = named("FLUX.1-dev").size("fp8"), named("FLUX.1-dev")
    largest = 2 * 12288 * 3072
    double = sum(linear.n * linear.k for linear in model.linears if linear.name.startswith("transformer_blocks.0."))
    assert double < size.quantizing_bytes < 2 * double + 9 * largest < 0.1 * model.bytes_16bit


# Activations


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators make and that live at once; those of `held` do not count."""

    def __init__(self, held) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in held}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


ARGUMENTS = {
    "FLUX.1-dev": lambda: {
        "hidden_states": bf16(1, 4096, 64),
        "encoder_hidden_states": bf16(1, 512, 4096),
        "pooled_projections": bf16(1, 768),
        "timestep": bf16(1),
        "guidance": bf16(1),
        "img_ids": bf16(4096, 3),
        "txt_ids": bf16(512, 3),
    },
    "Stable Diffusion 3.5 large": lambda: {
        "hidden_states": bf16(1, 16, 128, 128),
        "encoder_hidden_states": bf16(1, 333, 4096),
        "pooled_projections": bf16(1, 2048),
        "timestep": bf16(1),
    },
    "Wan2.1-T2V-1.3B": lambda: {
        "hidden_states": bf16(1, 16, 21, 60, 104),
        "encoder_hidden_states": bf16(1, 512, 4096),
        "timestep": bf16(1),
    },
    "SANA-1.6B": lambda: {
        "hidden_states": bf16(1, 32, 32, 32),
        "encoder_hidden_states": bf16(1, 300, 2304),
        "timestep": bf16(1),
    },
    "LTX-Video-2B": lambda: {
        "hidden_states": bf16(1, 7392, 128),
        "encoder_hidden_states": bf16(1, 128, 4096),
        "encoder_attention_mask": torch.ones(1, 128, dtype=torch.bool),
        "timestep": bf16(1),
        "num_frames": 21,
        "height": 16,
        "width": 22,
    },
    "Stable Diffusion XL": lambda: {
        "sample": bf16(1, 4, 128, 128),
        "timestep": bf16(1),
        "encoder_hidden_states": bf16(1, 77, 2048),
        "added_cond_kwargs": {"text_embeds": bf16(1, 1280), "time_ids": bf16(1, 6)},
    },
}
SHALLOW = {"num_layers": 1, "num_single_layers": 1, "transformer_layers_per_block": 1}


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_estimated_activations_are_near_what_a_forward_pass_allocates(name):
    """At full width and the usual size, with tensors that have no data. Depth does not matter: layers come in turn."""
    row = find_published(name)[0]
    family, config = FAMILIES[row.family], dict(row.config)
    model_class = getattr(diffusers, family.model)
    config |= {key: value for key, value in SHALLOW.items() if key in signature(model_class.__init__).parameters}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model = model_class.from_config(config)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                with Live([*model.parameters(), *model.buffers()]) as live:
                    model(**ARGUMENTS[name](), return_dict=False)
    finally:
        torch.set_default_dtype(torch.float32)
    plan = make_plan(
        family, "x", component_recipe(load_recipe("fp8")[1], "x", family), shapes_of(model), static_inputs=False
    )
    forward = forward_pass(row.family, dict(model.config), convolutions=convolutions_of(model))
    assert 0.65 < activation_bytes(plan, forward) / live.peak < 1.1


# Cards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("FLUX.1-dev", ["nvfp4-max / nvfp4-max / turns, hoisted", "mxfp8 / 16 bit / turns, hoisted"]),
        ("Stable Diffusion 1.5", ["16 bit / 16 bit / everything"] * 2),
        ("Wan2.2-T2V-A14B", ["16 bit / mxfp8 / blocks", "int4 / int4 / turns"]),
    ],
)
def test_the_best_that_fits_eight_and_twelve_gigabytes(name, cells):
    assert [named(name).fits(card) for card in catalogue.CARDS[:2]] == cells
    assert named(name).fits(CONTEXT + 1) == "no" and named("T5-XXL").fits(8e9) == "–"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "in_tiles"),
    [
        (
            "LTX-Video-2B",
            4 * 2 * 704 * 512 * 163 // 16 * 256,
            4 * 2 * 512 * 512 * 163 // 16 * 256 + 12 * 704 * 512 * 161,
        ),
        ("HunyuanVideo", 2048 * 1280 * 720 * 18, 2048 * 256 * 256 * 18 + 12 * 1280 * 720 * 129),
        ("Wan2.1-T2V-1.3B", 2048 * 832 * 480 * 5, 2048 * 256 * 256 * 5 + 12 * 832 * 480 * 81),
        ("FLUX.1-dev", 2048 * 1024 * 1024, None),
    ],
)
def test_a_vae_of_videos_has_many_frames_at_once(name, whole, in_tiles):
    """Four times 256 channels in 16 bit, for all frames at once and two around them: of LTX in patches of 4 x 4.

    Beside a tile there are the others and the video.
    """
    *_, vae = named(name).choices[0].parts
    assert (vae.name, vae.activations, vae.in_tiles) == ("vae", whole, in_tiles)


@pytest.mark.slow
def test_a_text_encoder_needs_room_for_its_prompts():
    """T5 for FLUX.1-dev: two prompts of 512 tokens, three times the 4096 and 10240 channels of its widest Linear."""
    [encoder] = [part for part in named("FLUX.1-dev").choices[0].parts if part.name == "T5-XXL"]
    assert encoder.activations == 2 * 2 * 512 * 3 * (4096 + 10240)


def test_hoisted_flux_takes_of_a_card_what_it_takes_by_hand():
    """FLUX.1-dev under nvfp4-max: its checkpoint without 3.2 G of modulation in fp8, and tables of 256 rows."""
    model = named("FLUX.1-dev")
    choice = next(one for one in model.choices if one.recipes["transformer"] == "nvfp4-max")
    [part] = [part for part in choice.parts if part.name == "transformer"]
    assert part.weights == pytest.approx(model.size("nvfp4-max").checkpoint_bytes, rel=1e-3)
    rows, columns = 38 * 18432 + 38 * 9216 + 2 * 3072, 3072
    by_hand = part.weights - (rows - 2 * 3072) * columns - 2 * 2 * 3072 * columns + 18432 * columns + 2 * 256 * rows
    assert part.hoisted == pytest.approx(by_hand, rel=0.01)


# The command and the page


def run(*arguments: str):
    return CliRunner().invoke(cli, ["families", *arguments])


@pytest.mark.slow
def test_one_model_is_shown_in_detail_with_every_recipe():
    result = run("FLUX.1-Kontext-dev")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and {row[0] for row in lines if row} >= set(shipped_recipes())
    assert "11.9 B parameters, 23.8 GB in 16 bit; 99.4% of the parameters are quantized" in result.stdout
    assert "last projection: its error goes to the image undamped" in result.stdout
    [row] = [line for line in result.stdout.splitlines() if re.match("fp8 +8", line)]
    assert re.fullmatch(r"fp8 +8\.0\d +12 GB +12\.5 GB +9\d\d MB", row.rstrip())
    assert "and 481 MB of activations, estimated" in result.stdout
    assert "norm, read by attn.to_q attn.to_k attn.to_v proj_mlp" in result.stdout


def test_a_small_model_is_counted_in_millions():
    said = run("CLIP-L", "--recipe", "fp8").stdout.splitlines()
    assert any(line.startswith("123 M parameters, 246 MB in 16 bit; ") for line in said)


@pytest.mark.slow
def test_json_has_the_numbers_and_the_chosen_recipe():
    result = run("sana-1.6b", "--recipe", "int4-svd", "--json")
    (model,) = json.loads(result.stdout)
    (size,) = model["recipes"]
    assert (model["class"], model["kind"], size["recipe"]) == ("SanaTransformer2DModel", "transformer", "int4-svd")
    assert size["bits_per_weight"] < size["bits_per_weight_at_most"] and size["checkpoint_gb"] < model["gb_16bit"] / 2
    assert sum(role["linears"] for role in model["linears"]) == len(named("SANA-1.6B").linears)


@pytest.mark.slow
def test_unknown_names_and_recipes_are_refused():
    for arguments, words in ((["nonsense"], "nonsense: no published model"), (["flux", "--recipe", "x"], "x")):
        result = CliRunner().invoke(cli, ["families", *arguments], standalone_mode=False)
        assert result.exit_code != 0 and words in str(result.exception)


@pytest.mark.slow
def test_without_a_name_there_is_a_line_for_each_model(monkeypatch):
    monkeypatch.setattr(catalogue, "models", lambda name: map(CatalogueModel, FEW))
    result = run()
    assert result.exit_code == 0 and all(row.name in result.stdout for row in FEW)
    key, cards, empty, header, *_ = result.stdout.splitlines()
    assert key.startswith("under a recipe: bits per weight / GB of the checkpoint / GB to serve") and not empty
    assert cards.startswith("in a card: recipe of the denoiser / of the text encoders / placement")
    assert re.search(r"fp8: bits / GB / GB +nvfp4: bits / GB / GB +to quantize, GB", header)
    assert "int8" not in header


def as_markdown(models, recipes) -> list[str]:
    header, rows = catalogue.table(models, recipes)
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen", [pytest.param(FEW, id="few"), pytest.param(PUBLISHED, id="all", marks=pytest.mark.slow)]
)
def test_the_page_says_what_the_command_says(chosen, request):
    before, table, after = PAGE.read_text(encoding="utf-8").split("<!-- families -->\n")
    if request.config.getoption("--write-features"):
        lines = as_markdown([named(row.name) for row in PUBLISHED], shipped_recipes())
        table = "\n".join(lines) + "\n"
        PAGE.write_text("<!-- families -->\n".join([before, table, after]), encoding="utf-8")
    lines = table.splitlines()
    assert [line.split(" | ")[0].removeprefix("| ").split(", 2 of")[0] for line in lines[2:]] == [
        r.name for r in PUBLISHED
    ]
    header, dashes, *rows = as_markdown([named(row.name) for row in chosen], shipped_recipes())
    assert lines[:2] == [header, dashes] and set(rows) <= set(lines)


def test_models_that_share_a_row_are_on_the_page():
    text = PAGE.read_text(encoding="utf-8").split("<!-- families -->\n")[2]
    for word in ("Kontext", "Krea", "Canny", "Edit", "2509", "Dev and Fast", "turbo", "SDXL-Turbo"):
        assert word in text
