"""One checkpoint has one number of bits per weight, whoever says it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fluxq.cli import cli
from fluxq.eval.metrics.schema import read_report
from fluxq.quantize.record import Layer, RecordedComponent, bits_of, bits_per_weight, read_record
from fluxq.recipes.formats import Scheme

FEW = ("--count", 2, "--num-inference-steps", 1)


def said(*arguments: object) -> str:
    """Run a command that works and return what it prints."""
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def bits_in(text: str) -> set[str]:
    """Every number that is followed by the words, but 16-bit components'."""
    found = re.findall(r"(\d+\.\d\d) bits per weight", text)
    return {bits for bits in found if bits != "16.00"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_every_command_says_the_same_bits_per_weight(recipe: str, checkpoint: Callable[[str], Path], tmp_path) -> None:
    """fp8 stores what its formats say, so its plan knows them; nvfp4 is fitted, and keeps what fitting found."""
    out = Path(shutil.copytree(checkpoint(recipe), tmp_path / "out"))
    record = read_record(out)
    stored = f"{bits_per_weight(record.components):.2f}"
    planned = said("plan", "tiny", "--recipe", recipe)
    if recipe == "fp8":
        assert bits_in(planned) == {stored}
        again = said("quantize", "--recipe", recipe, "--no-check", "-o", tmp_path / "again")
        assert f"bits per weight   {stored} (all Linears)" in again
    else:
        before, most = map(
            float, re.findall(r"(\d\.\d\d) bits per weight before fitting, at most (\d\.\d\d)", planned)[0]
        )
        assert before < float(stored) <= most and "with what it keeps of center, smooth" in planned
    assert bits_in(said("inspect", out)) == {stored}
    assert bits_in(said("verify", out)) == {stored}
    assert bits_in(said("eval", out, *FEW, "--metrics", "psnr", "--backends", "native")) == {stored}
    assert bits_in(said("report", out, "-o", tmp_path / "page.html")) == {stored}
    page, markdown = ((tmp_path / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    assert bits_in(markdown) == {stored} and bits_in(page) == {stored}
    assert f"{read_report(tmp_path / 'page.json').runs[0].size.bits_per_weight:.2f}" == stored
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "bits per weight (all Linears)" in card and f"| {stored} |" in card and bits_in(card) == {stored}


def test_bits_of_quantized_weights_leave_out_16_bit_layers(checkpoint: Callable[[str], Path]) -> None:
    (part,) = read_record(checkpoint("nvfp4")).components
    sizes = [(Scheme.parse(layer.scheme), *layer.shape) for layer in part.quantized]
    expected = sum(scheme.stored_bits(n, k) for scheme, n, k in sizes) / sum(n * k for _, n, k in sizes)
    assert bits_of(part.quantized) == pytest.approx(expected, abs=1e-3)
    assert bits_of(part.quantized) < bits_per_weight([part]) - 0.5
    assert bits_of([]) == 16


def test_several_components_are_weighted_by_their_weights() -> None:
    layers = [
        Layer(name="a", shape=[10, 30], scheme="nvfp4-16bit", bits_per_weight=4.0),
        Layer(name="b", shape=[10, 10], scheme="fp8-16bit", bits_per_weight=8.0),
    ]
    parts = [
        RecordedComponent(
            component=la.name, bytes_before=1, bytes_after=1, bits_per_weight=la.bits_per_weight, layers=[la]
        )
        for la in layers
    ]
    assert bits_per_weight(parts) == bits_of(layers) == 5


def test_a_record_with_other_bits_than_the_files_fails_verify(
    plain_checkpoint: Callable[[str], Path], tmp_path
) -> None:
    out = Path(shutil.copytree(plain_checkpoint("fp8"), tmp_path / "out"))
    record = json.loads((out / "fluxq_plan.json").read_text(encoding="utf-8"))
    record["components"][0]["bits_per_weight"] = 4.5
    (out / "fluxq_plan.json").write_text(json.dumps(record), encoding="utf-8")
    done = CliRunner().invoke(cli, ["verify", str(out)])
    assert done.exit_code == 1 and "bits per weight, fluxq_plan.json says 4.5" in done.output
