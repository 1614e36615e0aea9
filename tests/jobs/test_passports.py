"""Passports end to end on the embedded pipeline: written by quantize and eval, repeated by verify."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from fluxq.base.output import Output
from fluxq.cli import cli
from fluxq.eval.gate.passport import NamedImage, read_passport, write_passport
from fluxq.jobs import passports
from fluxq.quantize.record import Check

ONE_STEP = ("--num-inference-steps", 1)


def run(*words: object) -> tuple[int, Any, str]:
    done = CliRunner().invoke(cli, [*map(str, words), "--json"])
    return done.exit_code, json.loads(done.stdout) if done.stdout else {}, done.stderr


def quantized(output: Path, *words: object, recipe: object = "fp8") -> Path:
    words = ("tiny", "--recipe", recipe, "--profile", "rtn", "--device", "cpu", "-o", output, *words)
    code, _, error = run("quantize", *words)
    assert code == 0, error
    return output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(tmp_path_factory.mktemp("passports") / "out", *ONE_STEP)


def copy_of(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / "out"))


@pytest.mark.slow
def test_the_closing_check_writes_a_passport_that_this_machine_repeats(checkpoint: Path, tmp_path: Path) -> None:
    passport = read_passport(checkpoint / "passport.json")
    assert (passport.by, passport.batch_size, len(passport.images), len(passport.floor)) == ("quantize", 4, 4, 2)
    assert passport.metrics.keys() == {"psnr", "latent_sqnr"}
    assert [(gate.gate, gate.passed) for gate in passport.gates] == [("psnr>=18", True)]
    assert (checkpoint / "passport.json").stat().st_size < 10_000
    code, result, _ = run("verify", checkpoint, "--passport")
    assert (code, result["verdict"], result["same"], result["sqnr"]) == (0, "bit for bit", 4, [None] * 4)
    code, results, error = run("verify", checkpoint)
    assert code == 0 and {result["status"] for result in results} == {"ok"}, error
    Output(checkpoint).require_free(overwrite=True)  # fluxq's own, so it may be replaced
    out = copy_of(checkpoint, tmp_path)
    (out / "passport.json").write_text('{"name": "somebody"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"passport\.json was changed"):
        Output(out).require_free(overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "code", "verdict"), [(1.002, 0, "within the floor"), (1.5, 1, "not")])
def test_how_far_a_machine_is_from_a_passport_is_said(checkpoint: Path, tmp_path: Path, factor, code, verdict) -> None:
    out = copy_of(checkpoint, tmp_path)
    passport = read_passport(out / "passport.json")
    rows = [(image, torch.from_numpy(image.numbers.copy()).float() * factor) for image in passport.images]
    images = tuple(NamedImage.of(image.prompt, image.seed, latents) for image, latents in rows)
    write_passport(out, passport.model_copy(update={"images": images, "machine": "another"}))
    found, result, error = run("verify", out, "--passport")
    assert (found, result["verdict"], result["made_on"]) == (code, verdict, "another")
    assert "dB (SQNR) from the passport's" in result["sentence"]
    assert ("does not repeat" in error) == bool(code)


@pytest.mark.slow
def test_a_checkpoint_without_its_passport_or_its_weights_is_refused_with_the_cure(
    checkpoint: Path, tmp_path: Path
) -> None:
    out = copy_of(checkpoint, tmp_path)
    assert run("verify", out, "--device", "cpu")[0] == 2
    weights = out / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    code, result, error = run("verify", out, "--passport")
    assert (code, result["verdict"], result["changed"]) == (1, "changed", ["vae"]) and "vae changed since" in error
    passport = read_passport(out / "passport.json")
    for call, said in (
        ({"height": 3}, "height is 3"),
        ({"a": 1}, "FluxPipeline takes no a"),
        ({"generator": 1}, "generator"),
        ({"num_inference_steps": 0}, "num_inference_steps is '0', expected a whole number"),
    ):
        write_passport(out, passport.model_copy(update={"call": {**passport.call, **call}}))
        code, _, error = run("verify", out, "--passport")
        assert code == 2 and f"passport.json: {said}" in error and "fluxq_generation" not in error
    (out / "passport.json").write_text("{", encoding="utf-8")
    code, _, error = run("verify", out, "--passport")
    assert code == 2 and "passport.json: not valid JSON" in error
    bare = quantized(tmp_path / "bare", "--no-check", *ONE_STEP)
    code, _, error = run("verify", bare, "--passport")
    assert code == 2 and "has no passport.json" in error and f"`fluxq eval {bare}` writes one" in error


def test_a_second_run_that_is_not_finite_costs_the_passport_alone(tmp_path, monkeypatch, caplog) -> None:
    made: Any = SimpleNamespace(items=[("a", 0)], latents=torch.ones(1, 4))
    run = SimpleNamespace(device="cpu", limit=1 << 30)
    job: Any = SimpleNamespace(check_call={}, check_items=made.items, run=run, folder=None)
    monkeypatch.setattr(passports, "set_attention", lambda *_: None)
    monkeypatch.setattr(passports, "generate", lambda *_, **__: SimpleNamespace(latents=made.latents * float("nan")))
    check = Check.model_construct(gates=[], gates_for_eval=[], missed=[])
    passports.write_from_check(tmp_path, job, None, made, {}, check, ("", {}))
    assert not any(tmp_path.iterdir()) and "no passport: latents with NaN or infinity repeat nothing" in caplog.text


@pytest.mark.slow
def test_eval_replaces_the_passport_alone(checkpoint: Path, tmp_path: Path) -> None:
    out = copy_of(checkpoint, tmp_path)
    record = (out / "fluxq_plan.json").read_bytes()
    words = ("--count", 2, "--metrics", "psnr", "--gate", "psnr>=99", "--backends", "native")
    code, _, error = run("eval", out, *words, "--images", tmp_path / "images", *ONE_STEP)
    assert code == 1 and "gate missed: psnr>=99" in error
    passport = read_passport(out / "passport.json")
    assert (passport.by, len(passport.images), len(passport.floor), passport.threads) == ("eval", 2, 2, 1)
    assert passport.metrics.keys() == {"psnr", "velocity_error"} and [gate.passed for gate in passport.gates] == [
        True,
        False,
    ]
    assert (out / "fluxq_plan.json").read_bytes() == record
    assert run("verify", out, "--passport")[1]["verdict"] == "bit for bit"


@pytest.mark.slow
def test_of_backends_that_make_the_same_images_native_stays_wherever_it_was_named(plain_checkpoint, tmp_path) -> None:
    out = copy_of(plain_checkpoint("int8"), tmp_path)
    words = ("--count", 2, "--metrics", "psnr", "--backends", "int8,native", "--images", tmp_path / "images")
    code, _, error = run("eval", out, *words, *ONE_STEP)
    assert code == 0, error
    assert read_passport(out / "passport.json").by == "eval"


@pytest.mark.slow
def test_steps_that_are_kept_in_16_bit_are_repeated_too(tmp_path: Path) -> None:
    recipe = tmp_path / "kept.yaml"
    kept = re.sub("(?m)^steps: null", "steps: {first: 1}", (files("fluxq.recipes") / "nvfp4.yaml").read_text("utf-8"))
    recipe.write_text(kept, encoding="utf-8")
    out = quantized(tmp_path / "out", "--num-inference-steps", 2, recipe=recipe)
    assert run("verify", out, "--passport")[1]["verdict"] == "bit for bit"
