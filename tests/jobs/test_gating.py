"""`fluxq gate` end to end, on the embedded pipeline and on folders of images."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from image_servers import images_server, stock_diffusers
from picture_folders import picture_folder
from PIL import Image

from fluxq import tiny
from fluxq.base import devices
from fluxq.cli import cli
from fluxq.eval.gate import speed
from fluxq.eval.gate.pictures import PROMPTS_FILE
from fluxq.jobs import gating

TINY = str(tiny.path())


def gate(*arguments: object) -> tuple[int, dict[str, Any], str]:
    done = CliRunner().invoke(cli, ["gate", *map(str, arguments), "--json", "--device", "cpu"])
    return done.exit_code, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.slow
def test_a_pipeline_is_equivalent_to_itself_and_a_change_that_does_nothing_is_named(tmp_path: Path) -> None:
    same = (TINY, TINY, "--images", 8, "--work", tmp_path / "w", "--num-inference-steps", 2)
    code, result, _ = gate(*map(str, same))
    assert code == 0 and result["verdict"] == "equivalent" and result["identical"]
    assert result["metrics"].keys() == {"latent_sqnr", "psnr"} and result["images"] == 8
    assert result["metrics"]["psnr"]["distance"] == 0 < result["metrics"]["psnr"]["floor"]
    code, result, error = gate(*map(str, same), "--expect-change", "--junit", tmp_path / "out.xml")
    assert code == 1 and result["verdict"] == "no-op" and "one was expected" in error
    assert gate(*map(str, same), "--expect-change", "--junit", tmp_path / "out.xml")[0] == 1  # its own is replaced
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()[0]
    assert suite.get("failures") == "1" and suite.get("tests") == "3"


@pytest.mark.slow
def test_a_gross_fault_costs_eight_images_and_a_margin_can_allow_it(tmp_path: Path) -> None:
    a, b, again = (picture_folder(tmp_path / name, shift, 32) for name, shift in (("a", 0), ("b", 40), ("again", 0)))
    code, result, error = gate(a, b, "--floor", again)
    assert code == 1 and result["images"] == 8 and "worse than A (psnr) after 8 images" in error
    code, result, _ = gate(a, b, "--margin", "psnr=50")
    assert code == 0 and result["images"] == 32 and result["floor"] is None


def test_images_of_the_same_bits_are_equivalent_however_far_the_floor_is(tmp_path: Path) -> None:
    a, b, again = (picture_folder(tmp_path / name, count=3) for name in ("a", "b", "again"))
    Image.new("RGB", (16, 16), (40, 99, 0)).save(again / "1.png")
    code, result, _ = gate(a, b, "--floor", again)
    assert code == 0 and result["verdict"] == "equivalent" and result["identical"]


def test_a_pipeline_that_is_its_own_floor_is_run_again(tmp_path: Path) -> None:
    options = gating.GateOptions(TINY, TINY, floor=TINY, work=tmp_path)
    request = gating.gate_of(options)
    assert request.floor is not None and request.floor != request.a


def test_metrics_are_taken_where_pipelines_run_by_default(tmp_path: Path) -> None:
    a, b = picture_folder(tmp_path / "a"), picture_folder(tmp_path / "b")
    request = gating.gate_of(gating.GateOptions(str(a), str(b), margins={"ssim": 0.5}, work=tmp_path / "w"))
    assert request.options.device == request.networks.device == devices.choose("auto")
    assert gating.run_gate(request).metrics["ssim"].distance == pytest.approx(0, abs=1e-6)


def test_what_cannot_be_told_has_its_own_exit_code(tmp_path: Path) -> None:
    a, b = picture_folder(tmp_path / "a"), picture_folder(tmp_path / "b", 1, 8)
    value = gate(a, b, "--margin", "psnr=1")[1]["metrics"]["psnr"]["distance"]
    Image.new("RGB", (16, 16), (200, 0, 9)).save(b / "0.png")
    code, result, error = gate(a, b, "--margin", f"psnr={value + 1}")
    assert code == 3 and result["verdict"] == "cannot tell" and result["metrics"]["psnr"]["more_images"] > 0
    assert "cannot tell after 8 images; about" in error


def test_what_cannot_be_compared_is_refused_before_work(tmp_path: Path) -> None:
    a, b = picture_folder(tmp_path / "a", machine="X"), picture_folder(tmp_path / "b", count=4, machine="Y")
    other, small = picture_folder(tmp_path / "other", machine="X"), picture_folder(tmp_path / "small", size=8)
    grey, floor = picture_folder(tmp_path / "grey"), picture_folder(tmp_path / "floor", machine="Z")
    Image.new("L", (16, 16)).save(grey / "3.png")
    twice = picture_folder(tmp_path / "twice")
    (twice / PROMPTS_FILE).write_text((twice / PROMPTS_FILE).read_text().replace("7.png", "6.png"))
    one = picture_folder(tmp_path / "one")
    (one / PROMPTS_FILE).write_text(re.sub(r"prompt \d", "prompt", (one / PROMPTS_FILE).read_text()))
    (tmp_path / "notes.md").write_text("run fluxq gate before merging", encoding="utf-8")
    again = picture_folder(tmp_path / "again", machine="Y")
    (tmp_path / "mine.xml").write_text("<mine/>", encoding="utf-8")
    for arguments, message in (
        ((a, other, "--margin", "psnr=3", "--junit", tmp_path / "mine.xml"), "mine.xml exists"),
        ((a, other, "--margin", "psnr=3", "--markdown", tmp_path / "mine.xml" / "x.md"), "no folder"),
        ((a, other, "--margin", "psnr=3", "--work", a), "--work .* is A, which would be changed"),
        ((a, other), "give a second run of it as --floor, or what is allowed as --margin"),
        ((a, b, "--margin", "psnr=3"), "give.*images of A from Y as --floor"),
        ((a, b, "--floor", again), "b lacks 4 of the 8 images of a"),
        ((b, again, "--margin", "psnr=3"), "b lacks 4 of the 8 images of again"),
        ((a, small, "--margin", "psnr=3"), "are 16 x 16 and 8 x 8 pixels"),
        ((a, grey, "--margin", "psnr=3"), "3.png: a picture of mode L"),
        ((a, twice, "--margin", "psnr=3"), "'6.png' is the image of 2 lines"),
        ((one, one, "--margin", "psnr=3"), "one: 8 of one prompt"),
        ((a, other, "--floor", a), "these are A's own images"),
        ((a, other, "--floor", floor), "floor, the floor, was made on Z, other on X"),
        ((a, other, "--margin", "psnr=3", "--seed", "1", "--height", "64"), "--seed, --height: folders of images are"),
        ((a, other, "--margin", "psnr=3", "--junit", "x.md", "--markdown", "x.md"), "are both x.md"),
        ((a, other, "--margin", "psnr=3", "--markdown", tmp_path / "notes.md"), "notes.md exists"),
        ((a, tmp_path, "--margin", "psnr=3"), "neither a pipeline"),
        ((a, other, "--metric", "fid", "--margin", "psnr=3"), "'fid' is no distance of two images; known: latent_sqnr"),
        ((a, other, "--metric", "latent_sqnr", "--margin", "psnr=3"), "a has images only"),
        ((a, other, "--margin", "psnr"), "write a metric and a number"),
        ((a, other, "--margin", "psnr=nan"), "write a metric and a number"),
        (
            (a, other, "--margin", "psnr=3", "--speed"),
            r"--speed: a \(images\) is no pipeline that runs in",
        ),
        ((a, other, "--margin", "psnr=3", "--slower", "0.1"), "--slower says how speed is judged: give --speed too"),
        ((a, other, "--margin", "psnr=3", "--prompts", a / PROMPTS_FILE), "whose own prompts are compared"),
    ):
        code, _, error = gate(*arguments)
        assert code == 2, error
        assert re.search(message, error.replace("\n", " "), re.IGNORECASE), error


@pytest.mark.slow
def test_a_floor_of_other_images_is_refused_and_one_broken_image_of_many_named(tmp_path: Path) -> None:
    a, again, b = (picture_folder(tmp_path / name, count=64) for name in ("a", "again", "b"))
    for index in range(64):  # of another seed: its green and blue are another image's
        Image.new("RGB", (16, 16), (10 * index % 256, 3 * index, 250 - 3 * index)).save(again / f"{index}.png")
    code, _, error = gate(a, b, "--floor", again)
    assert code == 1 and "again is no second run of a" in error
    Image.new("RGB", (16, 16)).save(b / "40.png")
    code, result, _ = gate(a, b, "--margin", "psnr=3", "--markdown", tmp_path / "out.md")
    assert code == 3 and result["metrics"]["psnr"]["outliers"] == [40] and result["metrics"]["psnr"]["high"] < 3
    assert any("'prompt 40', seed 40, is far beyond" in reason for reason in result["reasons"])
    assert gate(a, b, "--margin", "psnr=3", "--markdown", tmp_path / "out.md")[0] == 3  # its own file is replaced


def coloured(body: dict[str, Any], shift: int = 0) -> Image.Image:
    return Image.new("RGB", (16, 16), (body["seed"] % 200, 100 + shift, len(body["prompt"]) % 256))


@pytest.mark.slow
def test_a_server_is_its_own_floor_and_a_second_call_asks_for_no_more_than_one_image(tmp_path: Path) -> None:
    size = ("--height", 16, "--width", 16, "--work", tmp_path / "w")
    with images_server(coloured) as (a, asked), images_server(lambda body: coloured(body, 40)) as (b, _):
        code, result, _ = gate(a, a, "--images", 8, *size)
        # Three runs, and of A and of B the first image with another seed and once more.
        assert code == 0 and result["identical"] and len(asked) == 3 * 8 + 4
        assert gate(a, a, "--images", 8, *size)[0] == 0 and len(asked) == 3 * 8 + 4 + 2
        code, result, error = gate(a, b, *size)
        assert code == 1 and result["images"] == 8 and "worse than A (psnr)" in error
    with images_server(lambda _: Image.new("RGB", (16, 16))) as (same, _):
        code, _, error = gate(same, same, *size)
        assert code == 2 and "ignores the seed" in error


def test_options_of_commits_are_refused_without_one(tmp_path: Path) -> None:
    a, b = picture_folder(tmp_path / "a"), picture_folder(tmp_path / "b")
    code, _, error = gate(a, b, "--margin", "psnr=3", "--setup", "make")
    assert code == 2 and "--setup: only commits have it" in error
    code, _, error = gate("git:no-such", b, "--margin", "psnr=3", "--command", "x {prompts} {out}")
    assert code == 2 and "no commit of the project" in error


@pytest.mark.slow
def test_a_stock_diffusers_server_is_equivalent_and_one_that_skips_a_step_is_not(tmp_path: Path) -> None:
    options = ("--images", 8, "--num-inference-steps", 4, "--metric", "psnr", "--work", tmp_path / "w")
    with images_server(stock_diffusers(TINY)) as (address, asked):
        code, result, error = gate(TINY, address, *options)
        assert code == 0 and result["verdict"] == "equivalent", error
        # The same requests, whichever comes first. A server has no floor of other batches: make images singly, too.
        reversed_code, _, error = gate(address, TINY, *options, "--batch-size", 1)
        assert reversed_code == 0 and {each["num_inference_steps"] for each in asked} == {4}, error
        assert len({json.dumps({**each, "prompt": "", "seed": 0}, sort_keys=True) for each in asked}) == 1
    with images_server(stock_diffusers(TINY, num_inference_steps=3)) as (address, _):
        code, result, _ = gate(TINY, address, *options)
        assert code == 1 and result["verdict"] == "worse" and result["images"] == 8


@pytest.mark.slow
def test_speed_counts_and_a_pipeline_is_not_slower_than_itself_by_half(tmp_path: Path, monkeypatch) -> None:
    words = (TINY, TINY, "--images", 2, "--num-inference-steps", 2, "--speed", "--pairs", 10, "--work", tmp_path / "w")
    code, result, _ = gate(*words, "--slower", 0.5, "--history", tmp_path / "h")
    found = result["speed"]
    if found["ratio"] is None:  # another process on this machine
        assert code == 3 and result["verdict"] == "cannot tell" and "spread by" in found["sentence"]
    else:
        assert code == 0 and found["verdict"] == "equivalent" and found["pairs"] == len(found["times"]) == 10
    calm, slow = [speed.Call(1.0)] * 10, [speed.Call(1.5)] * 10
    monkeypatch.setattr(gating, "judge_speed", lambda a, b, slower: speed.judge_speed(calm, slow, slower))
    code, result, error = gate(*words, "--junit", tmp_path / "out.xml", "--markdown", tmp_path / "out.md")
    assert code == 1 and result["verdict"] == "worse" and "worse than A (speed) after 2 images" in error
    case = ElementTree.parse(tmp_path / "out.xml").getroot()[0].find("testcase[@name='speed']/failure")
    assert case is not None and "B takes +50.00%" in case.attrib["message"]
    assert "| speed, median | worse | 1 s | 1.5 s | +50.00%" in (tmp_path / "out.md").read_text(encoding="utf-8")
