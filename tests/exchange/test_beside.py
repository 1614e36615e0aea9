"""Tests of what stands beside a file's weights: settings and other components, which must be the base's too."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_files import write_base
from safetensors.torch import load_file, save_file

from fluxq.quantize.exchange.beside import other_settings
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.inspect import inspect_path
from tests.exchange.test_inspect import FP8, kinds, made


def settings(file: Path, **other: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | other))


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another rope": ({"axes_dims_rope": [24, 24, 16]}, "axes_dims_rope is [24, 24, 16], the base's "),
    "another class": ({"_class_name": "SD3Transformer2DModel"}, "_class_name is 'SD3Transformer2DModel', the base's"),
    "a default that the base leaves to the class": ({"guidance_embeds": True}, "guidance_embeds is True"),
    "where it is from": ({"_name_or_path": "elsewhere", "_diffusers_version": "0.1"}, ""),
    "what no class takes": ({"made_by": "somebody"}, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_a_loader_uses_are_the_bases(case, tmp_path) -> None:
    other, said = SETTINGS[case]
    base, folder = write_base(tmp_path / "base"), made(tmp_path, "modelopt", FP8)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "guidance_embeds"}))
    settings(folder / "config.json", **({"guidance_embeds": False} | other))
    report = inspect_path(folder, base)[""]
    found = [fault.what for fault in report.faults if fault.kind == "other settings"]
    assert report.is_sound == (not said) and len(found) == bool(said)
    if said:
        assert found[0].startswith(said)
        with pytest.raises(ValueError, match="other settings"):
            import_model(folder, tmp_path / "out", base)


def test_without_settings_on_one_side_nothing_is_compared_and_it_is_said(tmp_path) -> None:
    base, folder = write_base(tmp_path / "base"), made(tmp_path, "modelopt", FP8)
    report = inspect_path(folder, base / "diffusion_pytorch_model.safetensors")[""]
    assert report.is_sound and "config.json: the base has none, so its settings were not compared" in report.unproved
    assert not list(other_settings({}, {"num_layers": 3}))


def of_scheduler(folder: Path) -> None:
    settings(folder / "scheduler" / "scheduler_config.json", shift=50.0)


def of_zeros(folder: Path) -> None:
    (file,) = (folder / "vae").glob("*.safetensors")
    save_file({name: torch.zeros_like(t) for name, t in load_file(file).items()}, file, {"format": "pt"})


def of_encoder(folder: Path) -> None:
    settings(folder / "text_encoder_2" / "config.json", num_heads=16)


def of_pipeline(folder: Path) -> None:
    settings(folder / "model_index.json", _class_name="FluxImg2ImgPipeline")


def of_cast(folder: Path) -> None:
    (file,) = (folder / "vae").glob("*.safetensors")
    save_file({name: t.half() for name, t in load_file(file).items()}, file, {"format": "pt"})


BESIDE: dict[str, tuple[Callable[[Path], None], str]] = {
    "another scheduler": (of_scheduler, "scheduler"),
    "a vae of zeros": (of_zeros, "vae"),
    "an encoder of other settings": (of_encoder, "text_encoder_2"),
    "another pipeline": (of_pipeline, "_class_name"),
    "a vae in another 16-bit dtype": (of_cast, ""),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("case", BESIDE)
def test_other_components_are_the_bases(case, plain_checkpoint, tmp_path) -> None:
    change, name = BESIDE[case]
    base, folder = plain_checkpoint("16 bit"), tmp_path / "theirs"
    shutil.copytree(base, folder)
    shutil.rmtree(folder / "transformer")
    shutil.copytree(plain_checkpoint("fp8") / "transformer", folder / "transformer")
    change(folder)
    report = inspect_path(folder, base)["transformer"]
    assert [fault.layer for fault in report.faults if fault.is_error] == [name] * bool(name), report.faults
    assert not report.unproved and kinds(report)["another component"] == bool(name)


def test_what_was_compared_with_nothing_is_named(plain_checkpoint, tmp_path) -> None:
    base = plain_checkpoint("16 bit")
    report = inspect_path(plain_checkpoint("fp8"), base / "transformer")["transformer"]
    assert report.is_sound and "vae" in report.unproved[0] and "they were not compared" in report.unproved[0]
