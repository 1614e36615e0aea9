"""The least `--max-memory` of whole pipelines, from shapes of published models: docs/large-models.md has the table."""

import json
import math
from pathlib import Path

import pytest

from fluxq import footprint, jobs
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder
from fluxq.catalogue import Model
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.families import FAMILIES
from fluxq.recipes.published import PUBLISHED

PAGE = Path(__file__).parent.parent / "docs" / "large-models.md"
MARK = "<!-- least -->\n"
RECIPES = ("fp8", "nvfp4", "int4-svd", "nvfp4-max")
ROWS = {row.name: row for row in PUBLISHED}
ONE = "1 video, 25 frames"  # of the closing check
VAE = "FLUX.1 VAE"  # SD3.5's has the same layers
# Model on the page -> class of the pipeline, and by component a published model or a class of diffusers as it stands.
PIPELINES = {
    "FLUX.1-dev": ("FluxPipeline", {"text_encoder": "CLIP-L", "text_encoder_2": "T5-XXL", "vae": VAE}),
    "Stable Diffusion 3.5 large": (
        "StableDiffusion3Pipeline",
        {
            "text_encoder": "CLIP-L with projection",
            "text_encoder_2": "CLIP-G with projection",
            "text_encoder_3": "T5-XXL",
            "vae": VAE,
        },
    ),
    "Z-Image-Turbo": ("ZImagePipeline", {"text_encoder": "Qwen3-4B", "vae": VAE}),
    "Qwen-Image": ("QwenImagePipeline", {"text_encoder": "Qwen2.5-VL-7B", "vae": "AutoencoderKLQwenImage"}),
    "FLUX.2-dev": ("Flux2Pipeline", {"text_encoder": "Mistral-Small-3.2-24B", "vae": "AutoencoderKLFlux2"}),
    "Wan2.2-T2V-A14B": (
        "WanPipeline",
        {"transformer_2": "Wan2.2-T2V-A14B", "text_encoder": "UMT5-XXL", "vae": "AutoencoderKLWan"},
    ),
}

# GB of memory -> what the page says is served in them, the text encoders elsewhere.
SERVED = {
    8: {
        "int4-svd": ("FLUX.1-dev",),
        "nvfp4": (
            *("Z-Image-Turbo", "FLUX.2-klein-9B", "Chroma1-HD"),
            *("Stable Diffusion 3.5 large", "LTX-Video-2B", "Wan2.1-T2V-1.3B"),
        ),
    },
    12: {"nvfp4": ("FLUX.1-dev", "LTX-Video-13B", "Wan2.1-T2V-14B")},
    16: {"fp8": ("FLUX.1-dev",), "nvfp4": ("Qwen-Image",)},
    24: {"fp8": ("Qwen-Image",), "nvfp4": ("Wan2.2-T2V-A14B", "HunyuanVideo", "FLUX.2-dev")},
    80: {"fp8": ("Wan2.2-T2V-A14B", "FLUX.2-dev")},
}
CONTEXT = 0.6e9  # bytes that a GPU's driver and libraries keep


def published(folder: Path, name: str, only: str = "") -> Path:
    """The pipeline of a published model: configurations, and weight files whose tensors are holes that take no disk."""
    pipeline, others = PIPELINES[name]
    index: dict[str, object] = {"_class_name": pipeline}
    for component, what in {"transformer": name, **others}.items():
        if only not in ("", component):
            continue
        row = ROWS.get(what)
        family = FAMILIES[row.family] if row else None
        library, cls = (family.library, family.model) if family else ("diffusers", what)
        model = build_on_meta(library, cls, dict(row.config) if row else {})
        (folder / component).mkdir(parents=True)
        config = model.config if isinstance(model.config, dict) else model.config.to_dict()
        (folder / component / "config.json").write_text(json.dumps(config, default=str))
        header, end = {}, 0
        for key, tensor in model.state_dict().items():
            nbytes = 2 * tensor.numel()
            header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + nbytes]}
            end += nbytes
        text = json.dumps(header).encode()
        stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
        with (folder / component / f"{stem}.safetensors").open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        index[component] = [library, cls]
    write_json(folder / "model_index.json", index)
    return folder


def line_of(name: str, folder: Path) -> str:
    """The model's line of the page: GiB on the CPU and on a GPU, for each recipe."""
    model, cells = str(published(folder / name, name)), []
    for recipe in RECIPES:
        prepared = jobs.prepare(jobs.Options(model, recipe), writes=False)
        asked = [jobs.demand(prepared, device, writes=True) for device in ("cpu", "cuda")]
        cells.append(" / ".join(f"{math.ceil(10 * each.least / (1 << 30)) / 10:g}" for each in asked if each) or "any")
    return f"| {name} | {' | '.join(cells)} |"


@pytest.mark.parametrize(
    "name", [name if name == "FLUX.1-dev" else pytest.param(name, marks=pytest.mark.slow) for name in PIPELINES]
)
def test_the_page_says_the_least_that_a_model_can_be_given(name, tmp_path, request):
    before, table, after = PAGE.read_text(encoding="utf-8").split(MARK)
    line, lines = line_of(name, tmp_path), table.splitlines()
    if request.config.getoption("--write-features"):
        kept = {row.split(" | ")[0]: row for row in lines[2:]} | {f"| {name}": line}
        rows = [kept[f"| {each}"] for each in PIPELINES if f"| {each}" in kept]
        head = [f"| model | {' | '.join(f'`{recipe}`' for recipe in RECIPES)} |", "|---" * (1 + len(RECIPES)) + "|"]
        lines = [*head, *rows]
        PAGE.write_text(MARK.join([before, "\n".join([*lines, ""]), after]), encoding="utf-8")
    assert line in lines


def test_the_closing_check_asks_for_most_where_nothing_is_fitted(tmp_path):
    """By hand, of FLUX.1-dev under fp8: one image of a megapixel, through the transformer and through the VAE."""
    model = str(published(tmp_path / "model", "FLUX.1-dev"))
    prepared = jobs.prepare(jobs.Options(model, "fp8"), writes=False)
    found = jobs.demand(prepared, "cpu", writes=True)
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
    assert jobs.demand(jobs.prepare(jobs.Options(model, "fp8", check=False), writes=False), "cpu", writes=True) is None


def test_videos_are_decoded_a_few_frames_at_a_time_or_all_at_once(tmp_path):
    """By hand: what a VAE takes, of the short videos of the closing check, in numbers of 2 bytes."""
    model = published(tmp_path / "model", "Wan2.2-T2V-A14B")
    prepared = jobs.prepare(jobs.Options(str(model), "fp8"), writes=False)
    found = jobs.demand(prepared, "cpu", writes=True)
    assert found is not None and f"running vae on {ONE}" in found.needs
    assert found.working["vae"] == 2 * 4 * 256 * 5 * 1024 * 1024  # of a latent frame, and what is kept of the last
    wan, folder = (footprint.Size(1, 64, 64, frames, None) for frames in (9, 25)), ModelFolder("m", model)
    assert len({footprint.activations(folder, "vae", size, 2) for size in wan}) == 1
    video = json.loads((model / "vae" / "config.json").read_text())
    for cls, patch, frames in (("AutoencoderKLHunyuanVideo", None, 27), ("AutoencoderKLLTXVideo", 4, 27)):
        changed = {**video, "block_out_channels": [128, 256], "patch_size": patch}
        (model / "vae" / "config.json").write_text(json.dumps(changed))
        index = json.loads((model / "model_index.json").read_text())
        (model / "model_index.json").write_text(json.dumps({**index, "vae": ["diffusers", cls]}))
        size, pixels = footprint.Size(1, 64, 64, 25, None), 64 * 64 // (patch or 1) ** 2
        assert footprint.activations(ModelFolder("m", model), "vae", size, 2) == 2 * 4 * 256 * pixels * frames
    with pytest.raises(ValueError, match="a smaller --height and --width, or fewer --frames"):
        found.bound(1 << 30)


@pytest.mark.parametrize("gigabytes", SERVED)
def test_what_the_page_serves_fits(gigabytes):
    text = PAGE.read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line.startswith(f"| {gigabytes} GB")]
    for recipe, names in SERVED[gigabytes].items():
        assert f"`{recipe}`" in line
        for name in names:
            assert name in line and Model(ROWS[name]).size(recipe).serving_bytes + CONTEXT < gigabytes * (1 << 30), name


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
    size = footprint.Size(1, 1024, 1024, None, None)
    assert footprint.activations(folder, component, size, 2) == pytest.approx(2 * numbers, rel=0.05)
