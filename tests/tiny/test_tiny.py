"""The embedded pipeline: what ships loads offline, draws what it is asked for, and can be trained again."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported: before torch and diffusers

import torch
from diffusers import DiffusionPipeline, FluxPipeline
from safetensors import safe_open

from benchmarks.tiny import data, drawing
from benchmarks.tiny.accuracy import accuracy
from fluxq import tiny

FOLDER = tiny.path().parent
LIMIT = 12_000_000  # bytes of everything that is not source


@pytest.fixture(scope="module")
def pipe() -> FluxPipeline:
    return tiny.load()


@pytest.fixture(scope="module")
def network():
    return tiny.feature_network()


@pytest.fixture(scope="module")
def clip():
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tiny.clip_path()}")
    return model.eval(), transform, open_clip.get_tokenizer(f"local-dir:{tiny.clip_path()}")


def draw(pipe: FluxPipeline, prompts: list[str], **options):
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    return pipe(prompt=prompts, generator=generators, **{**tiny.CALL_KWARGS, **options}).images


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """[0, 1] to uint8, (B, 3, 16, 16)."""
    return (images.float() * 255).round().to(torch.uint8)


def shipped() -> list[Path]:
    roots = [FOLDER / "pipeline", FOLDER / "clip"]
    files = [file for root in roots for file in root.rglob("*") if file.is_file()]
    return [
        *files,
        FOLDER / "features.safetensors",
        FOLDER / "held_out.safetensors",
        FOLDER / "training_log.json",
    ]


def test_import_is_light():
    """Importing fluxq.tiny and listing its prompts brings in none of the heavy libraries."""
    heavy = "{'torch', 'diffusers', 'transformers', 'sklearn', 'open_clip'} & set(sys.modules)"
    code = f"import sys; from fluxq import tiny; tiny.PROMPTS, tiny.CALL_KWARGS, tiny.path(); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_ships_is_small_and_safe():
    files = shipped()
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert {file.suffix for file in files} <= {".json", ".txt", ".safetensors", ".md"}
    for file in files:
        if file.suffix != ".safetensors":
            text = file.read_text(encoding="utf-8")
            assert "/home/" not in text and "/tmp" not in text and "/work" not in text, f"machine path in {file}"


def test_pipeline_is_stored_in_bfloat16():
    for file in tiny.path().rglob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                assert stored.get_slice(name).get_dtype() == "BF16", f"{file}: {name}"


def test_every_quantizable_linear_reads_a_multiple_of_128(pipe):
    sizes = {
        module.in_features
        for name, module in pipe.transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and "transformer_blocks." in name and "norm" not in name
    }
    assert sizes == {128, 512, 640}


def test_licences_are_named():
    text = (FOLDER / "LICENSES.txt").read_text(encoding="utf-8")
    assert "CC BY 4.0" in text and "BSD-3" in text and "Apache-2.0" in text
    assert (tiny.path() / "LICENSE.txt").read_text(encoding="utf-8") == text
    makers = [*re.findall(r"`python -m (\S+)`", text), *re.findall(r"drawn by (\S+)\.py", text)]
    root = Path(data.__file__).parents[2]
    assert len(makers) == 2 and all((root / f"{maker.replace('.', '/')}.py").is_file() for maker in makers), makers
    assert "license: apache-2.0" in (tiny.path() / "README.md").read_text(encoding="utf-8")


def test_prompts_are_the_grammar():
    written = (tiny.path() / "fluxq_prompts.txt").read_text(encoding="utf-8").splitlines()
    assert written == list(tiny.PROMPTS) == list(data.captions())
    assert len(set(tiny.PROMPTS)) == len(tiny.PROMPTS) == 336
    assert all(data.caption(*data.parse(text)) == text for text in tiny.PROMPTS)
    with pytest.raises(ValueError, match="a <colour> <object> on <background>"):
        data.parse("a red elephant on black")


def test_prompts_fit_the_text_encoders(pipe):
    """No prompt is cut and no word falls apart: five words and the special tokens."""
    for tokenizer, special in ((pipe.tokenizer, 2), (pipe.tokenizer_2, 1)):
        lengths = {len(ids) for ids in tokenizer(list(tiny.PROMPTS)).input_ids}
        assert lengths == {5 + special}
        assert 5 + special <= tiny.CALL_KWARGS["max_sequence_length"]
    assert pipe.text_encoder.config.eos_token_id == pipe.tokenizer.eos_token_id != 2


def test_stock_loading_is_complete_and_both_ways_agree(caplog):
    """FluxPipeline and DiffusionPipeline load the folder without a warning and draw the same image."""
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipes = [kind.from_pretrained(tiny.path(), dtype=torch.bfloat16) for kind in (FluxPipeline, DiffusionPipeline)]
    said = [record.getMessage() for record in caplog.records] + [str(item.message) for item in caught]
    assert not [text for text in said if any(word in text for word in ("missing", "unexpected", "newly", "match"))]
    images = [draw(pipe, ["a red three on black"], output_type="pt") for pipe in pipes]
    assert torch.equal(*images)


@pytest.mark.slow
def test_output_types_and_prompt_matters(pipe):
    latents = draw(pipe, ["a red three on black", "a blue circle on white"], output_type="latent")
    assert latents.shape == (2, 16, 16) and latents.isfinite().all()
    assert [image.size for image in draw(pipe, ["a red three on black"], output_type="pil")] == [(16, 16)]
    same = draw(pipe, ["a red three on black"], output_type="latent")
    other = draw(pipe, ["a blue circle on white"], output_type="latent")
    assert torch.nn.functional.mse_loss(same.float(), other.float()) > 0.05


@pytest.mark.slow
def test_generated_images_show_their_prompts(pipe, network):
    prompts = list(tiny.PROMPTS[:64])
    images = draw(pipe, prompts, output_type="pt")
    assert images.isfinite().all()
    right = accuracy(network, to_pixels(images), prompts)
    assert right["object"] >= 0.8  # shipped: 0.92 of 512
    assert right["colour"] >= 0.9
    assert right["background"] >= 0.9


@pytest.mark.slow
def test_reconstructions_show_their_captions(pipe, network):
    from benchmarks.tiny import stages

    images, captions = tiny.held_out()
    images, captions = images[:256], captions[:256]
    assert accuracy(network, images, captions)["object"] >= 0.95
    assert accuracy(network, stages.reconstruct(pipe.vae, images), captions)["object"] >= 0.93
    shuffled = captions[1:] + captions[:1]
    assert accuracy(network, images, shuffled)["object"] <= 0.3


@pytest.mark.slow
def test_held_out_images():
    images, captions = tiny.held_out()
    assert images.shape == (1024, 3, 16, 16) and images.dtype == torch.uint8
    assert len(captions) == 1024 and set(captions) <= set(tiny.PROMPTS)
    again = drawing.draw(1024, seed=1000, held_out=True)
    assert again.captions() == captions
    assert torch.equal(torch.from_numpy(again.pixels), images)


@pytest.mark.slow
def test_held_out_digits_are_unseen():
    """No mask of a held-out digit is a mask of training."""
    for digit in range(10):
        seen = {mask.tobytes() for mask in drawing._digit_masks(digit, held_out=False)}
        unseen = {mask.tobytes() for mask in drawing._digit_masks(digit, held_out=True)}
        assert seen and unseen and not seen & unseen


def test_digits_are_at_least_twelve_pixels_tall():
    for digit in range(10):
        rows = (drawing._digit_masks(digit, held_out=True).max(2) > 0).sum(1)  # (N,) rows with ink
        assert rows.min() >= 11 and rows.max() <= 15  # the outermost row of a pale scan may fade


@pytest.mark.slow
def test_feature_network_serves_torchmetrics(network):
    from torchmetrics.image.fid import FrechetInceptionDistance

    images, _ = tiny.held_out()
    distance = FrechetInceptionDistance(feature=network, input_img_size=(3, 16, 16))
    distance.update(images[:512], real=True)
    distance.update(images[512:], real=False)
    near = float(distance.compute())
    distance.reset()
    distance.update(images[:512], real=True)
    distance.update(255 - images[512:], real=False)
    assert 0 <= near < float(distance.compute()) / 3
    assert network(images[:2]).shape == (2, network.num_features)
    with pytest.raises(ValueError, match="uint8"):
        network(images[:2].float())


def test_clip_ranks_the_caption_and_sees_the_object(clip):
    from PIL import Image

    model, transform, tokenizer = clip
    images, captions = tiny.held_out()
    images, captions = images[:128], captions[:128]
    batch = torch.stack([transform(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
    labels = [data.parse(text) for text in captions]
    siblings = [data.caption((obj + 5) % 16, colour, background) for obj, colour, background in labels]
    with torch.no_grad():
        image = model.encode_image(batch, normalize=True)
        own = (image * model.encode_text(tokenizer(captions), normalize=True)).sum(1)
        other = (image * model.encode_text(tokenizer(siblings), normalize=True)).sum(1)
    assert (own > other).float().mean() >= 0.9
    assert own.mean() - other.mean() >= 0.2


def test_load_rejects_what_is_no_dtype():
    with pytest.raises(ValueError, match="floating torch dtype"):
        tiny.load(dtype="int8")


def test_log_tells_how_the_weights_were_made():
    log = json.loads((FOLDER / "training_log.json").read_text(encoding="utf-8"))
    assert log["results"]["accuracy_generated"]["object"] >= 0.85
    assert log["results"]["accuracy_reconstructed"]["object"] >= 0.93
    curve = log["stages"]["transformer"]["loss_curve"]
    assert curve[-1][0] == log["stages"]["transformer"]["steps"] and curve[-1][2] < curve[0][2]
    assert {"seed", "hardware", "versions"} <= set(log)


@pytest.mark.slow
def test_training_script_runs_and_writes_a_pipeline(tmp_path):
    from benchmarks.tiny import train

    train.main(["--smoke", "--minutes", "1", "--output", str(tmp_path / "out")])  # too short to compile for
    pipe = tiny.load(folder=tmp_path / "out" / "pipeline")
    assert draw(pipe, ["a red three on black"], output_type="latent").isfinite().all()
    assert not list((tmp_path / "out").glob(".new-*"))
    assert json.loads((tmp_path / "out" / "training_log.json").read_text())["stages"]["transformer"]["steps"] == 3
