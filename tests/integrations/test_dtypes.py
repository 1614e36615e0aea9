"""A quantized pipeline that is loaded without `dtype=` makes an image, and is saved as it was."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from safetensors.torch import load_file, save_file
from shared import copy_of

from fluxq import tiny

PROMPT = "a red three on black"


def image(pipe, **call) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    how = {**tiny.CALL_KWARGS, "generator": torch.Generator().manual_seed(0), "output_type": "pt", **call}
    return pipe(PROMPT, **how).images[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all components, by path."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.parent.name}/{name}": t for file in files for name, t in load_file(file).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [FluxPipeline, DiffusionPipeline])
def test_it_is_what_naming_the_dtype_loads_and_is_saved_as_it_was(checkpoint, tmp_path, caplog, pipeline):
    pipe = pipeline.from_pretrained(checkpoint("nvfp4"))
    assert "no dtype= was given: FluxPipeline is loaded in bfloat16; better say so: FluxPipeline.from_pr" in caplog.text
    said = FluxPipeline.from_pretrained(checkpoint("nvfp4"), dtype=torch.bfloat16)
    assert torch.equal(image(pipe), image(said))
    pipe.save_pretrained(tmp_path / "saved")
    assert_same(tensors(tmp_path / "saved"), tensors(checkpoint("nvfp4")))


@pytest.mark.often(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_dtype_that_was_named_is_obeyed_without_a_word(checkpoint, caplog, dtype):
    pipe = FluxPipeline.from_pretrained(checkpoint("fp8"), dtype=dtype)
    assert pipe.vae.dtype == pipe.text_encoder.dtype == dtype and not caplog.records
    assert torch.isfinite(image(pipe)).all()


def test_the_16_bit_pipeline_is_left_to_diffusers(caplog):
    pipe = FluxPipeline.from_pretrained(tiny.path())
    assert pipe.vae.dtype == torch.float32 and not [r for r in caplog.records if "no dtype=" in r.message]


def widened(folder: Path, component: str) -> Path:
    """The folder, with the component in fp32 and numbers that no 16-bit dtype has."""
    (file,) = (folder / component).glob("*.safetensors")
    save_file({name: t.float() * (1 + 2**-12) for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("components", [("vae",), ("vae", "text_encoder", "text_encoder_2")])
def test_a_component_with_more_digits_keeps_them(checkpoint, tmp_path, caplog, components):
    folder = copy_of(checkpoint("fp8"), tmp_path / "wide")
    for component in components:
        widened(folder, component)
        config = folder / component / "config.json"
        config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
    pipe = FluxPipeline.from_pretrained(folder)
    assert f"; {', '.join(components)}: kept in their own dtype" in caplog.text
    assert all(getattr(pipe, component).dtype == torch.float32 for component in components)
    made = image(pipe)
    assert torch.isfinite(made).all()
    narrow = image(FluxPipeline.from_pretrained(checkpoint("fp8"), dtype=torch.bfloat16))
    assert 0 < (made.float() - narrow.float()).abs().mean() < 0.05  # a VAE of more digits, not another image
    pipe.save_pretrained(tmp_path / "saved")
    assert_same(tensors(tmp_path / "saved"), tensors(folder))


def test_a_copy_of_such_a_pipeline_is_one_of_its_own(checkpoint, tmp_path):
    pipe = FluxPipeline.from_pretrained(widened(copy_of(checkpoint("fp8"), tmp_path / "wide"), "vae"))
    twin = copy.deepcopy(pipe.vae)
    with torch.no_grad():
        for parameter in pipe.vae.parameters():
            parameter.zero_()
        latents = torch.randn(1, twin.config.latent_channels, 4, 4, dtype=torch.bfloat16)
        assert twin.decode(latents).sample.abs().max() > 0 == pipe.vae.decode(latents).sample.abs().max()
        assert twin.encode(torch.rand(1, 3, 16, 16, dtype=torch.bfloat16)).latent_dist.mean.dtype == torch.float32


def test_quantizing_while_loading_settles_it_too(caplog):
    from diffusers import PipelineQuantizationConfig

    how = PipelineQuantizationConfig(
        quant_backend="fluxq", quant_kwargs={"recipe": "fp8"}, components_to_quantize=["transformer", "text_encoder_2"]
    )
    pipe = FluxPipeline.from_pretrained(tiny.path(), quantization_config=how)
    assert "loaded in bfloat16" in caplog.text and torch.isfinite(image(pipe)).all()


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.WARNING, "fluxq")


def test_components_that_the_caller_brings_stay_as_they_are(checkpoint):
    """They may belong to another pipeline."""
    plain = FluxPipeline.from_pretrained(tiny.path(), dtype=torch.float32)
    shared = {name: getattr(plain, name) for name in ("vae", "text_encoder", "text_encoder_2")}
    pipe = FluxPipeline.from_pretrained(checkpoint("fp8"), **shared)
    assert {part.dtype for part in shared.values()} == {torch.float32}
    for each in (pipe, plain):
        assert each("a red three", **{**tiny.CALL_KWARGS, "num_inference_steps": 1}).images


@pytest.mark.slow
def test_a_vae_that_keeps_its_digits_is_called_by_keyword_too(checkpoint):
    vae = FluxPipeline.from_pretrained(tiny.path(), dtype=torch.float32).vae
    pipe = FluxPipeline.from_pretrained(checkpoint("fp8"), vae=vae)
    latents = torch.zeros(1, vae.config.latent_channels, 4, 4, dtype=torch.bfloat16)
    assert torch.equal(pipe.vae.decode(z=latents).sample, pipe.vae.decode(latents).sample)


def test_a_cast_to_the_dtype_that_all_has_is_none_and_another_is_refused(checkpoint):
    pipe = FluxPipeline.from_pretrained(checkpoint("fp8"), dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    assert pipe.to(torch.bfloat16) is pipe and pipe.to("cpu", torch.bfloat16) is pipe
    assert pipe.to(dtype=torch.bfloat16, device="cpu") is pipe
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.transformer.state_dict().items())
    pipe.vae.float()
    with pytest.raises(ValueError, match="cannot be cast"):
        pipe.to(torch.bfloat16)
    assert pipe.vae.dtype == torch.float32
