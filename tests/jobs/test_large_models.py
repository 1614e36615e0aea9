"""The least `--max-memory` of whole pipelines and what serves them, from shapes: the tables of docs/large-models.md."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from published_models import PIPELINES, ROWS, published

from benchmarks import large_models
from fluxq.base.model import ModelFolder
from fluxq.cli import cli
from fluxq.jobs import making, memory, planning
from fluxq.jobs.catalogue import CatalogueModel
from fluxq.recipes.cards import holding
from fluxq.recipes.devices import DEVICES
from fluxq.recipes.workloads import CallSize

PAGE = Path(__file__).parents[2] / "docs" / "large-models.md"
MARK = "<!-- least -->\n"
RECIPES = ("fp8", "nvfp4", "int4-svd", "nvfp4-max")
ONE = "1 video, 25 frames"  # of the closing check


def line_of(name: str, folder: Path) -> str:
    """The model's line of the page: GiB on the CPU and on a GPU, for each recipe."""
    model, cells = str(published(folder / name, name)), []
    for recipe in RECIPES:
        prepared = making.job_of(making.JobOptions(model, recipe), writes=False)
        asked = [making.demand(prepared, device, writes=True) for device in ("cpu", "cuda")]
        cells.append(" / ".join(f"{math.ceil(10 * each.least / (1 << 30)) / 10:g}" for each in asked if each) or "any")
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "FLUX.1-dev" else pytest.param(name, marks=pytest.mark.slow) for name in PIPELINES]
)
def test_the_page_says_the_least_that_a_model_can_be_given(name, tmp_path, request, monkeypatch):
    monkeypatch.setattr(planning, "free_bytes", lambda _: 24 << 30)  # whatever other processes hold just now
    before, table, after = PAGE.read_text(encoding="utf-8").split(MARK)
    line, lines = line_of(name, tmp_path), table.splitlines()
    if request.config.getoption("--write-features"):
        kept = {row.split(" | ")[0]: row for row in lines[2:]} | {f"| {name}": line}
        rows = [kept[f"| {each}"] for each in PIPELINES if f"| {each}" in kept]
        head = [f"| model | {' | '.join(f'`{recipe}`' for recipe in RECIPES)} |", "|---" * (1 + len(RECIPES)) + "|"]
        lines = [*head, *rows]
        PAGE.write_text(MARK.join([before, "\n".join([*lines, ""]), after]), encoding="utf-8")
    assert line in lines


@pytest.mark.slow
def test_the_closing_check_asks_for_most_where_nothing_is_fitted(tmp_path):
    """By hand, of FLUX.1-dev under fp8: one image of a megapixel, through the transformer and through the VAE."""
    model = str(published(tmp_path / "model", "FLUX.1-dev"))
    prepared = making.job_of(making.JobOptions(model, "fp8"), writes=False)
    found = making.demand(prepared, "cpu", writes=True)
    assert found is not None
    itemsize, tokens, widest = 2, 4096 + 512, 3 * (18432 + 3072)
    largest = {"transformer": 18432 * (3072 + 1), "vae": 512 * (512 * 9 + 1)}
    took = {"transformer": tokens * widest, "vae": 4 * 1024 * 1024 * 256}
    for component, numbers in took.items():
        assert found.needs[f"running {component} on 1 image"] == itemsize * (numbers + 2 * largest[component])
    assert found.most == "running vae on 1 image" and found.least == found.needs[found.most] + (64 << 20)
    with pytest.raises(ValueError, match=r"--max-memory 1GiB: running vae on 1 image needs 2\.1GiB; give at least"):
        found.bound(1 << 30)
    assert found.bound(found.least).limit == found.least
    assert (
        making.demand(making.job_of(making.JobOptions(model, "fp8", check=False), writes=False), "cpu", writes=True)
        is None
    )


@pytest.mark.slow
def test_videos_are_decoded_a_few_frames_at_a_time_or_all_at_once(tmp_path):
    """By hand: what a VAE takes, of the short videos of the closing check, in numbers of 2 bytes."""
    model = published(tmp_path / "model", "Wan2.2-T2V-A14B")
    prepared = making.job_of(making.JobOptions(str(model), "fp8"), writes=False)
    found = making.demand(prepared, "cpu", writes=True)
    assert found is not None and f"running vae on {ONE}" in found.needs
    assert found.working["vae"] == 2 * 4 * 256 * 5 * 1024 * 1024  # of a latent frame, and what is kept of the last
    wan, folder = (CallSize(1, 64, 64, frames, None) for frames in (9, 25)), ModelFolder("m", model)
    assert len({memory.activations(folder, "vae", size, 2) for size in wan}) == 1
    video = json.loads((model / "vae" / "config.json").read_text())
    for cls, patch, frames in (("AutoencoderKLHunyuanVideo", None, 27), ("AutoencoderKLLTXVideo", 4, 27)):
        changed = {**video, "block_out_channels": [128, 256], "patch_size": patch}
        (model / "vae" / "config.json").write_text(json.dumps(changed))
        index = json.loads((model / "model_index.json").read_text())
        (model / "model_index.json").write_text(json.dumps({**index, "vae": ["diffusers", cls]}))
        size, pixels = CallSize(1, 64, 64, 25, None), 64 * 64 // (patch or 1) ** 2
        assert memory.activations(ModelFolder("m", model), "vae", size, 2) == 2 * 4 * 256 * pixels * frames
    with pytest.raises(ValueError, match="a smaller --height and --width, or fewer --frames"):
        found.bound(1 << 30)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mark", "table"),
    [
        ("chips", large_models.chips_table),
        ("FLUX.1-dev", partial(large_models.cards_table, "FLUX.1-dev")),
        slow("Qwen-Image", partial(large_models.cards_table, "Qwen-Image")),
        slow("Wan2.1-T2V-14B", partial(large_models.cards_table, "Wan2.1-T2V-14B")),
        slow("models", large_models.models_table),
    ],
)
def test_the_page_says_what_serves_what(mark, table, request):
    before, written, after = PAGE.read_text(encoding="utf-8").split(f"<!-- {mark} -->\n")
    lines = table()
    if request.config.getoption("--write-features"):
        text = f"<!-- {mark} -->\n".join([before, "\n".join([*lines, ""]), after])
        PAGE.write_text(text, encoding="utf-8")
        written = text.split(f"<!-- {mark} -->\n")[1]
    assert written.splitlines() == lines, (
        "`pytest --write-features --run-all tests/jobs/test_large_models.py` updates it"
    )


def row_of(lines: list[str], card: str) -> dict[str, str]:
    """The cells of a card's row, by the column's title without its ticks."""
    title, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    [cells] = [cells for cells in rows if card in cells[1].split(", ")]
    return {name.replace("`", ""): cell for name, cell in zip(title, cells, strict=True)}


@pytest.mark.slow
def test_twelve_gb_hold_flux_in_4_bits_where_they_stay_4_bits():
    lines = large_models.cards_table("FLUX.1-dev")
    ada, blackwell = row_of(lines, "RTX 4070"), row_of(lines, "RTX 5070")
    assert ada["nvfp4"] == "12.5 no" and blackwell["nvfp4"] == "8.7 turns"
    assert ada['nvfp4, prefer="memory"'] == blackwell["nvfp4"]
    assert ada["memory"] == blackwell["memory"] == "12 GB" and ada == row_of(lines, "RTX 3060 12GB")
    assert {device.name for device in DEVICES.values()} == {
        name for line in lines[2:] for name in line.split(" | ")[1].split(", ")
    }


@pytest.mark.slow
def test_a_videos_vae_counts_the_frames_that_it_has_at_once():
    *_, vae = large_models.pieces("Wan2.1-T2V-14B", "fp8", DEVICES["rtx4090"], "speed", encoders=False)
    assert (vae.name, vae.activations) == ("vae", 2048 * 832 * 480 * 5)


@pytest.mark.slow
def test_the_parts_of_a_pipeline_by_hand():
    """FLUX.1-dev on an RTX 5070 in nvfp4, its encoders in 16 bit: CLIP-L and T5-XXL of so many parameters."""
    found = {
        piece.name: piece
        for piece in large_models.pieces("FLUX.1-dev", "nvfp4", DEVICES["rtx5070"], "speed", encoders=False)
    }
    size = CatalogueModel(ROWS["FLUX.1-dev"]).size("nvfp4")
    assert found["transformer"].weights == pytest.approx(size.checkpoint_bytes, rel=1e-3)
    assert found["transformer"].weights + found["transformer"].activations == pytest.approx(
        size.serving_bytes, rel=1e-3
    )
    assert found["CLIP-L"].weights == pytest.approx(2 * 123e6, rel=0.01)
    assert found["T5-XXL"].weights == pytest.approx(2 * 4.762e9, rel=0.01)
    assert found["vae"].weights == pytest.approx(2 * 83.8e6, rel=0.01)
    assert found["vae"].activations == 2 * 4 * 1024 * 1024 * 256
    quantized = {
        piece.name: piece.weights
        for piece in large_models.pieces("FLUX.1-dev", "nvfp4", DEVICES["rtx5070"], "speed", encoders=True)
    }
    assert quantized["T5-XXL"] < 0.31 * found["T5-XXL"].weights and quantized["vae"] == found["vae"].weights


@pytest.mark.slow
def test_a_model_of_two_halves_counts_them_both():
    names = [
        piece.name for piece in large_models.pieces("Wan2.2-T2V-A14B", "fp8", DEVICES["a100"], "speed", encoders=False)
    ]
    assert names == ["transformer", "transformer_2", "UMT5-XXL", "vae"]


@pytest.mark.slow
def test_plan_says_what_a_card_does_not_hold_and_what_would_help(tmp_path, monkeypatch):
    """FLUX.1-dev's own shapes, of which the memory of a 12 GB card is the question; as the table of the page has it."""
    monkeypatch.chdir(tmp_path)
    model = str(published(tmp_path / "dev", "FLUX.1-dev"))

    def plan(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["plan", model, "--recipe", "nvfp4", "--gpu", *arguments])
        assert result.exit_code == 0, result
        return result.stdout

    said = [line for line in plan("4070").splitlines() if "in turns" in line]
    assert [line.partition(":")[0] for line in said] == [
        "RTX 4070 does not hold the pipeline",
        "with --prefer memory it holds it in turns",
    ]
    assert all("the card has 12.9 GB" in line for line in said)
    told = json.loads(plan("RTX 5070", "--json"))["pipeline"]
    assert told["holds"] == "turns" and told["widest"] == "text_encoder_2"
    assert told["in_turns_gb"] < told["memory_gb"] < told["at_once_gb"]
    modelled = large_models.pieces("FLUX.1-dev", "nvfp4", DEVICES["rtx5070"], "speed", encoders=False)
    assert told["at_once_gb"] == pytest.approx(holding([*modelled], DEVICES["rtx5070"]).at_once / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "component", "numbers"),
    [
        # Both halves of guidance; its modulations are wider than its feed-forward, its table of positions is no layer.
        ("Stable Diffusion 3.5 large", "transformer", 2 * (4096 + 154) * 3 * (6 * 2432 + 2432)),
        ("FLUX.2-dev", "vae", 4 * 1024 * 1024 * 256),  # whose decoder's channels are null: they are the encoder's
    ],
)
def test_activations_go_by_the_widest_layer(name, component, numbers, tmp_path):
    folder = ModelFolder(name, published(tmp_path / "model", name, component))
    size = CallSize(1, 1024, 1024, None, None)
    assert memory.activations(folder, component, size, 2) == pytest.approx(2 * numbers, rel=0.05)
