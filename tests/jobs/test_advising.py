"""A recipe for a GPU: what is offered, what fits, what comes first; the file of it, and the pages that show it."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from benchmarks import large_models
from benchmarks.pages import between
from benchmarks.site.made import table_behind
from fluxq.commands.options import RECIPES
from fluxq.commands.writing_recipes import TARGETS
from fluxq.jobs import advising
from fluxq.jobs.advising import BY_QUALITY, SCHEMA, Advice, Wish, advise, hub_id_of, write_recipe
from fluxq.recipes.all_families import find_published, hub_ids
from fluxq.recipes.cards import GIB, Holding
from fluxq.recipes.devices import DEVICES
from fluxq.recipes.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGE_OF_CARDS = (ROOT / "docs" / "cards.md").read_text(encoding="utf-8")
GB = {"int8": 12, "fp8": 11.9, "mxfp8": 12.2, "int4": 8.4, "nvfp4-max": 9, "nvfp4": 8.7, "mxfp4-max": 8.7, "mxfp4": 8.4}


@pytest.fixture
def small(monkeypatch):
    """Pipelines of so many GB, twice that at once, less where encoders are quantized; 4 bits are the faster ones."""

    def held(parts, device):
        (name, encoders) = parts
        least = 1e9 * (GB[name] - encoders)
        return Holding(device.memory * GIB, 2 * least, least, "transformer")

    monkeypatch.setattr(advising, "pieces", lambda model, recipe, *_, encoders: (recipe, encoders))
    monkeypatch.setattr(advising, "holding", held)
    monkeypatch.setattr(
        advising, "_milliseconds", lambda model, recipe, *_: 100 if recipe == "int4" else 10 * GB[recipe]
    )


@pytest.mark.parametrize(
    ("wish", "recipe", "word"),
    [
        (Wish("b200", "quality"), "int8", "all"),
        (Wish("b200", "speed"), "nvfp4", "all"),  # of those that take as long the nearest to 16 bit
        (Wish("5070", "quality"), "int8", "turns"),
        (Wish("5070", "quality", 10e9), "int4", "turns"),
        (Wish("4090", "speed", 14.9e9), "mxfp4", "all"),  # at once, encoders quantized, before better in turns
        (Wish("cpu", "speed", 64e9), "int4", "all"),
        (Wish("7900xtx", "quality"), "int8", "all"),
    ],
)
def test_the_first_that_fits_by_what_comes_first(small, wish, recipe, word):
    advice = advise(wish)
    assert (advice.recipe, advice.holding.word, advice.encoders) == (recipe, word, recipe == "mxfp4")


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (
            Wish("5070", "speed", 5e9),
            r"FLUX\.1-dev does not fit into 5 GB .*the least is 7\.4 GB.*`fluxq plan MODEL --vram",
        ),
        (Wish("cpu", "speed"), "give --memory, as in 16GB"),
        (Wish("cpu", "speed", 64e9, "comfy"), "comfy has no format that a CPU with 64 GB multiplies; leave out --for"),
        (Wish("h100", "speed", target="nunchaku"), "nunchaku has no format that H100 SXM with .* multiplies"),
        (Wish("5070", "speed", 1e8), r"--memory 100 MB: the driver alone takes 600 MB"),
        (Wish("5070", "speed", target="comfyui"), r"no target 'comfyui' \(did you mean 'comfy'\?\)"),
        (Wish("9999", "speed"), "unknown GPU '9999'"),
        (Wish("h100", "quality", model="T5-XXL"), "T5-XXL: the other parts of its pipeline are not known here"),
        (Wish("h100", "quality", model="wan"), "wan is what several models are called: name one of Wan"),
    ],
)
def test_what_no_recipe_serves_is_refused_with_a_cure(small, wish, said):
    with pytest.raises(ValueError, match=said):
        advise(wish)


def test_a_model_is_quantized_by_its_hub_id_however_it_was_called():
    (row,) = find_published("z_image")  # a family of one
    assert {hub_id_of(name) for name in ("z_image", row.name.lower())} == {hub_ids(row.name)[0]}


def test_a_small_card_is_told_of_the_page_and_of_models_that_fit(small, monkeypatch):
    held, smaller = advising.holding, ("Z-Image-Turbo", "SANA1.5-4.8B")
    monkeypatch.setattr(advising, "pieces", lambda model, recipe, *_, encoders: (recipe, encoders, model))
    monkeypatch.setattr(
        advising,
        "holding",
        lambda parts, card: replace(held(parts[:2], card), in_turns=1e9 * (5 + 5 * (parts[2] not in smaller))),
    )
    for gpu in ("4060", "3070", "2080"):
        with pytest.raises(ValueError, match=r"FLUX\.1-dev into 8 GB \(docs/cards\.md\)") as caught:
            advise(Wish(gpu, "quality"))
        assert str(caught.value).endswith("; smaller models fit: --model 'Z-Image-Turbo' or 'SANA1.5-4.8B'"), gpu
    with pytest.raises(ValueError, match=r"\(docs/cards\.md\)$"):
        advise(Wish("4060", "quality", 4e9))
    of_another = Wish("4060", "quality", target="nunchaku")  # which reads FLUX.1 alone
    assert advising._smaller(of_another, advising._device(of_another)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("model", advising.SMALLER)
def test_the_models_named_for_a_small_card_fit_8_gb(model):
    assert {advise(Wish(gpu, "quality", 8e9, model=model)).recipe for gpu in ("4060", "3070", "2080")} == {"int8"}
    assert model in PAGE_OF_CARDS.split("## Smaller models")[1]


def test_other_programs_have_kernels_for_turing():
    with pytest.raises(ValueError, match=r"nunchaku has no format that RTX 2080 Ti with .* multiplies"):
        advise(Wish("2080ti", "quality", target="nunchaku"))
    offered = advising._offered(Wish("2080ti", "quality", target="comfy"), DEVICES["rtx2080ti"])
    assert offered == [*advising.OF_OTHERS["sm_75"]]


def test_the_order_of_quality_is_the_measured_one():
    rows = json.loads((ROOT / "benchmarks" / "tiny_quality.json").read_text(encoding="utf-8"))["recipes"]
    measured = {row["recipe"]: row["psnr_db"][0] for row in rows if row["recipe"] in BY_QUALITY}
    assert sorted(BY_QUALITY) == sorted(RECIPES) == sorted(measured)
    assert all(measured[a] > measured[b] - 0.1 for a, b in pairwise(BY_QUALITY))


def test_targets_hold_what_the_page_of_exports_says():
    header, rows = table_behind(ROOT / "docs" / "exchange.md", "<!-- recipes -->")
    for target, recipes in advising.TARGETS.items():
        if target != advising.OWN:
            column = header.index(f"`{target}`")
            held = {row[0].strip("`") for row in rows if row[column] != "requantize"}
            assert {*recipes} <= held, target
    of_comfyui = [load_recipe(name)[1].components["transformer"].weights for name in advising.TARGETS["comfy"]]
    assert "int4" not in {weights.row.element.name for weights in of_comfyui}  # comfy-kitchen decodes it, ComfyUI not
    assert tuple(advising.TARGETS) == TARGETS


def test_the_file_is_commented_loads_and_replaces_nothing(tmp_path, monkeypatch):
    advice = Advice("nvfp4", "memory", True, Holding(12e9, 20e9, 9e9, "transformer"), 812.4)
    monkeypatch.setattr(advising, "advise", lambda wish: advice)
    file, wish = tmp_path / "mine.yaml", Wish("4070", "speed")
    assert write_recipe(wish, file) is advice
    text = file.read_text()
    assert (
        load_recipe(str(file))[1] == load_recipe("nvfp4")[1] and f"# yaml-language-server: $schema={SCHEMA}\n" in text
    )
    assert text.startswith("# For RTX 4070 with 12.9 GB, speed first, in fluxq.\n") and "9 GB there, each part" in text
    assert 'prefer="memory"' in text and "text encoders, too" in text and max(map(len, text.splitlines())) <= 120
    schema = json.loads((tmp_path / SCHEMA).read_text())
    assert schema == json.loads((ROOT / "recipes" / "schema.json").read_text())
    for line in text.splitlines():  # what stands in a comment to be uncommented is valid, too
        if line.startswith("# ") and ": " in line and "  # " in line:
            other = tmp_path / "other.yaml"
            other.write_text(f"{text}{line[2:]}\n")
            assert load_recipe(str(other)), line
            assert {*yaml.safe_load(line[2:])} <= {*schema["properties"]}
    assert write_recipe(wish, file) is advice and file.read_text() == text  # done before
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"output .*mine\.yaml exists"):
        write_recipe(wish, file)
    assert file.read_text() == "mine"
    (tmp_path / SCHEMA).write_text('{"title": "of somebody else"}')
    write_recipe(wish, tmp_path / "second.yaml")
    assert "somebody" in (tmp_path / SCHEMA).read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mark", "page", "table"),
    [
        ("cards", "cards.md", large_models.card_sections),
        ("gpus", "which-recipe.md", lambda: large_models.gpus_table("FLUX.1-dev")),
    ],
)
def test_the_pages_of_cards_and_gpus_say_what_is_computed(mark, page, table, request):
    file = ROOT / "docs" / page
    text, mark = file.read_text(encoding="utf-8"), f"<!-- {mark} -->"
    written = between(text, f"{mark}\n", mark, "\n".join(table()))
    if request.config.getoption("--write-features"):
        file.write_text(written, encoding="utf-8")
    assert written == text, "`pytest --write-features --run-all tests/jobs/test_advising.py` updates it"


@pytest.mark.slow
def test_cards_get_what_their_chips_multiply():
    assert advise(Wish("5070", "speed")).recipe.startswith("nvfp4")
    old = advise(Wish("3060", "speed"))
    assert old.prefer == "memory" and old.holding.word == "turns" and DEVICES["rtx3060"].memory == 12
    assert advise(Wish("4090", "quality", target="comfy")).recipe == "int8-convrot"


def test_the_two_pages_agree_on_every_card():
    """The page by memory has as many bits as that by card, or more; both say first which recipe suits most cards."""
    header, rows = table_behind(ROOT / "docs" / "which-recipe.md", "<!-- gpus -->")
    column = header.index("nearest to 16 bit")
    by_card = {card: row[column].split("`")[1:2] for row in rows for card in row[1].split(", ")}
    by_memory = dict(re.findall(r"^## (\d+) GB\nTransformer in ([\w-]+)", PAGE_OF_CARDS, re.MULTILINE))
    assert by_card.keys() == {device.name for device in DEVICES.values()} and len(by_memory) == 4
    for device in DEVICES.values():
        [*named] = by_card[device.name]
        assert named == (["int8"] if device.memory >= 16 else ["int4"] if device.memory >= 10 else []), device.name
        if by_size := by_memory.get(f"{device.memory:g}"):
            assert bits_of(by_size) >= max(map(bits_of, named), default=0), device.name
    for page in ("which-recipe.md", "cards.md"):
        lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        assert lines[1].startswith("**`int8` suits most cards**"), page


def bits_of(recipe: str) -> int:
    """Bits of a code of a recipe's transformer; 16 for "16"."""
    return 16 if recipe == "16" else load_recipe(recipe)[1].components["transformer"].weights.row.element.bits


def test_the_time_of_a_step_is_modelled_for_a_real_card():
    device = advising.find_device("4070")
    assert (advising._milliseconds("FLUX.1-dev", "int8", device, "speed") or 0) > 0
