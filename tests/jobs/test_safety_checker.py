"""Stable Diffusion 1.5: a pipeline whose checker is a class of diffusers' own pipelines, carried over and at work."""

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from shared import copy_of
from tiny_configs import TINY_CONFIGS

from fluxq import QuantLinear, tiny
from fluxq.base.files import read_json, write_json
from fluxq.base.model import load_pipeline, module_of, resolve_model
from fluxq.jobs import making
from fluxq.quantize.checkpoint import library_of, model_on_meta
from fluxq.quantize.verify import verify
from fluxq.recipes.all_families import FAMILIES

CALL = {"num_inference_steps": 1, "height": 16, "width": 16}
CHECKED = "safety_checker/model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a random pipeline whose checker finds something in every image."""
    torch.manual_seed(0)
    row, clip = FAMILIES["unet"], FAMILIES["clip"]
    changes = {"use_linear_projection": False, "addition_embed_type": None, "cross_attention_dim": 128}
    text = transformers.CLIPTextConfig.from_dict({**TINY_CONFIGS[clip.name], "vocab_size": 2048})
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = {**vision, "image_size": 16, "patch_size": 8}
    checker = StableDiffusionSafetyChecker(transformers.CLIPConfig(vision_config=seen, projection_dim=16))
    checker.concept_embeds_weights.data.fill_(-2)  # cosines are larger
    extractor = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    stable_diffusion: Any = diffusers.StableDiffusionPipeline
    pipe = stable_diffusion(
        vae=diffusers.AutoencoderKL.from_config({**TINY_CONFIGS["kl"], "latent_channels": 4}),
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.AutoTokenizer.from_pretrained(Path(tiny.path()) / "tokenizer"),
        unet=diffusers.UNet2DConditionModel.from_config({**TINY_CONFIGS[row.name], **changes}),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=checker,
        feature_extractor=extractor,
    )
    folder = tmp_path_factory.mktemp("stable") / "diffusion"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy to damage."""
    return copy_of(made, tmp_path / "diffusion")


@pytest.mark.slow
def test_the_checker_is_carried_over_and_works(made, tmp_path):
    index = read_json(made / "model_index.json")
    assert index["safety_checker"] == ["stable_diffusion", "StableDiffusionSafetyChecker"]
    assert index["requires_safety_checker"] is True and index["image_encoder"] == [None, None]
    options = making.JobOptions(model=str(made), recipe="fp8", output=str(tmp_path / "out"), check=False)
    making.quantize(making.job_of(options))
    assert read_json(tmp_path / "out" / "model_index.json") == index
    for name in (CHECKED, "feature_extractor/preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (made / name).read_bytes()
    assert [finding for result in verify(tmp_path / "out") for finding in result.findings] == []

    how: Any = {"dtype": torch.bfloat16, "local_files_only": True}
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", **how)
    assert any(isinstance(module, QuantLinear) for module in pipe.unet.modules())
    checker = StableDiffusionSafetyChecker.from_pretrained(made / "safety_checker", **how)
    assert type(pipe.safety_checker) is StableDiffusionSafetyChecker
    assert all(torch.equal(value, checker.state_dict()[key]) for key, value in pipe.safety_checker.state_dict().items())
    pipe.set_progress_bar_config(disable=True)
    found = pipe("a red three", output_type="np", **CALL)
    assert found.nsfw_content_detected == [True] and not found.images.any()
    pipe.safety_checker.concept_embeds_weights.data.fill_(2)
    found = pipe("a red three", output_type="np", **CALL)
    assert found.nsfw_content_detected == [False] and found.images.any()


def test_its_weights_are_checked_like_all_others(folder):
    file = folder / CHECKED
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"safety_checker/model\.safetensors: truncated or damaged"):
        load_pipeline(resolve_model(str(folder)))
    file.rename(folder / "safety_checker" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"safety_checker: holds pickle weights \(pytorch_model\.bin\)"):
        load_pipeline(resolve_model(str(folder)))


@pytest.mark.slow
def test_without_a_checker_there_is_none(folder):
    index = read_json(folder / "model_index.json")
    index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    write_json(folder / "model_index.json", index)
    for name in ("safety_checker", "feature_extractor"):
        shutil.rmtree(folder / name)
    pipe: Any = load_pipeline(resolve_model(str(folder)), "float32")
    assert pipe.safety_checker is None and pipe("a", **CALL).nsfw_content_detected is None


def test_it_is_of_a_library_and_no_layer_of_it_has_a_row(made):
    model = resolve_model(str(made))
    assert library_of(model, "safety_checker") == "diffusers.pipelines.stable_diffusion"
    assert type(model_on_meta(model, "safety_checker")) is StableDiffusionSafetyChecker
    options = making.JobOptions(model=str(made), recipe="fp8", components=("safety_checker",))
    with pytest.raises(ValueError, match="StableDiffusionSafetyChecker"):
        making.job_of(options)


STRANGERS = (
    *("planted", "os", "torch", "diffusers.pipelines.stable_diffusion", "stable_diffusion.planted", "..planted", ""),
    *("FluxPipeline", "pipeline_utils", "__path__", "\ud800", "stable_diffusion\n", None, 1, ["stable_diffusion"], {}),
)


@pytest.mark.parametrize("library", STRANGERS, ids=ascii)
def test_no_other_word_is_a_module(folder, tmp_path, monkeypatch, library):
    (tmp_path / "planted.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    assert module_of(library) is None
    index = read_json(folder / "model_index.json")
    index["safety_checker"][0] = library
    (folder / "model_index.json").write_text(json.dumps(index))
    half = library == "\ud800"  # of a surrogate pair, which is no UTF-8
    refused = "not valid JSON" if half else r"component .safety_checker. comes from .* is never run"
    with pytest.raises(ValueError, match=refused):
        resolve_model(str(folder))
