"""The comparison: its rows and columns, its files, honesty about tokens, other packages and wrong options."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from benchmarks.layers import compare, peers
from fluxq.base.model import resolve_model
from fluxq.recipes.devices import find_device

K = 128
FITTED = """\
version: 1
components:
  transformer:
    weights: {{format: {format}}}
    activations: {{format: {format}}}
    transforms: [center, smooth{hadamard}]
    low_rank: {low_rank}
    rounding: {{method: gptq, scales: search}}
    modulation: null
calibration: {{prompts: default, count: 4, steps: 2}}
compat: full
"""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """A recipe with everything in mxfp4 and one without low rank in int8."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, row, hadamard, low_rank in (
        ("four", "mxfp4", ", hadamard", "{rank: 1/96, deflate: true}"),
        ("eight", "int8", "", "null"),
    ):
        text = FITTED.format(format=row, hadamard=hadamard, low_rank=low_rank)
        (folder / f"{name}.yaml").write_text(text)
    return [str(folder / f"{name}.yaml") for name in ("four", "eight")]


def run(*words: str):
    return CliRunner().invoke(compare.main, [str(word) for word in words])


@pytest.fixture(scope="module")
def compared(recipes, tmp_path_factory):
    """The printed table, the JSON and the picture of both recipes on one small drawing."""
    folder = tmp_path_factory.mktemp("out")
    files = ("--json", folder / "rows.json", "--plot", folder / "plot.svg")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "FIT_TOKENS", 2048)
        done = run("--size", K, "--drawings", 1, "--recipe", recipes[0], "--recipe", recipes[1], *files)
    assert done.exit_code == 0, done.output
    return done.output, json.loads((folder / "rows.json").read_text()), (folder / "plot.svg").read_text()


@pytest.mark.slow
def test_the_table_has_a_line_for_each_recipe_and_what_it_is_compared_with(compared):
    output, report, _ = compared
    header, *lines = output.splitlines()
    for column in ("formats", "bits", "above", "adaln", "ffn", "attn", "mean dB", "s/layer", "µs on B200", "kept"):
        assert column in header
    rows = [(row["formats"], row["row"]) for row in report["rows"]]
    assert rows == [
        ("mxfp4-mxfp4", "RTN"),
        ("mxfp4-mxfp4", "SVDQuant"),
        ("mxfp4-mxfp4", "SVDQuant + GPTQ"),
        ("mxfp4-mxfp4", "four balanced"),
        ("int8-int8", "RTN"),
        ("int8-int8", "Hadamard + GPTQ"),
        ("int8-int8", "eight balanced"),
    ]
    for (formats, row), line in zip(rows, lines, strict=False):
        assert line.startswith(formats) and row in line
    assert "neither fit nor gate has seen" in output and "modelled on B200" in output


@pytest.mark.slow
def test_better_methods_are_better_and_bits_are_counted(compared):
    rows = {(row["formats"], row["row"]): row for row in compared[1]["rows"]}
    four = [rows["mxfp4-mxfp4", name]["mean"] for name in ("RTN", "SVDQuant", "SVDQuant + GPTQ", "four balanced")]
    assert four == sorted(four) and four[-1] > four[0] + 5
    assert rows["int8-int8", "eight balanced"]["mean"] > rows["int8-int8", "RTN"]["mean"] + 5
    assert rows["mxfp4-mxfp4", "RTN"]["bits"] == 4.25 and rows["mxfp4-mxfp4", "RTN"]["most_above"] == 0
    svdquant = rows["mxfp4-mxfp4", "SVDQuant"]
    assert svdquant["kept"] == "smooth, low rank"
    assert svdquant["bits"] == pytest.approx(4.25 + 16 * (K + K) / K**2 + 16 / K)  # one rank, the factors
    assert svdquant["microseconds"] > rows["mxfp4-mxfp4", "RTN"]["microseconds"] > 0


def test_the_json_says_how_it_was_made(compared):
    report = compared[1]
    assert report["commit"] and torch.__version__.startswith(report["versions"]["torch"])
    assert report["layers"] == "synthetic" and report["drawings"] == 1 and report["k"] == K
    assert report["modelled"] == {"gpu": "B200", "tokens": 4608}
    one = next(one for one in report["layers_measured"] if one["row"] == "four balanced" and one["column"] == "adaln")
    assert one["scheme"].startswith("mxfp4-mxfp4-") and "gptq" in one["kept"] and one["drawing"] == 0
    assert report["rows"][0]["error"] is None  # of one drawing


def test_the_picture_has_a_labelled_point_for_each_row(compared):
    _, report, picture = compared
    root = ElementTree.fromstring(picture)
    labels = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    best_first = sorted(report["rows"], key=lambda row: -row["mean"])
    assert labels == [f"{row['formats']} {row['row']}" for row in best_first]
    heights = [float(text.get("y")) for text in root.iter("{http://www.w3.org/2000/svg}text") if text.text in labels]
    assert len(heights) == len(labels) and all(b - a >= 12.9 for a, b in pairwise(heights))  # none covers another
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 60 <= float(circle.get("cx")) <= 700 and 20 <= float(circle.get("cy")) <= 590


def test_a_picture_of_one_row_and_of_none():
    row = compare.Summary("a<b", "RTN", 4.0, 0.0, {"ffn": 10.0}, 10.0, None, 1.0, 1.0, "")
    for rows in ([row], [replace(row, mean=None)], []):
        assert len(list(ElementTree.fromstring(compare.svg(rows)).iter("{http://www.w3.org/2000/svg}circle"))) == (
            rows == [row]
        )


def test_mean_and_error_are_over_drawings():
    found = [
        compare.Measured("f", "r", column, drawing, "", db, 4.5, 4.25, 1.0, 2.0, "", kept)
        for column, drawing, db, kept in (
            ("adaln", 0, 10.0, ("smooth",)),
            ("ffn", 0, 20.0, ("smooth", "gptq")),
            ("adaln", 1, 12.0, ("smooth",)),
            ("ffn", 1, 24.0, ("smooth", "gptq")),
        )
    ]
    (row,) = compare._summaries(found)
    assert row.db == {"adaln": 11, "ffn": 22} and row.mean == 16.5
    assert row.error == pytest.approx(1.5)  # 15 and 18
    assert row.kept == "smooth, gptq 2/4" and row.most_above == 0.25


@pytest.mark.slow
def test_the_number_comes_from_tokens_that_nothing_was_fitted_to():
    source = compare.Synthetic(1, K, "cpu")
    (batch,) = source.batches({})
    for case in batch:
        seen = torch.cat([case.fit, case.inputs.fit, case.inputs.held_out])
        assert len(case.fit) == compare.FIT_TOKENS and len(case.judge) == compare.JUDGE_TOKENS
        assert len(case.inputs.held_out) == compare.GATE_TOKENS
        assert not set(map(tuple, seen.tolist())) & set(map(tuple, case.judge.tolist()))


@pytest.mark.slow
def test_the_gate_of_the_recipe_decides(recipes):
    """At a rate that nothing can pay for only what is free is kept."""
    (row,) = [row for row in compare.rows_of([recipes[0]]) if row.name == "four balanced"]
    dear = replace(row, recipe=row.recipe.model_copy(update={"gate": compare.Gate(db_per_percent=1000.0)}))
    source = compare.Synthetic(1, K, "cpu")
    (batch,) = source.batches({})
    case = batch[0]
    kept = {}
    for one in (row, dear):
        layers = source.planned(one.recipe)[case.group]
        (measured,) = compare.measure(one, layers, case, find_device("b200"), 4608)
        kept[one] = set(measured.kept)
    assert "low rank" in kept[row] and "low rank" not in kept[dear] and "gptq" in kept[dear]


@pytest.mark.slow
def test_a_model_is_compared_block_by_block_on_images_that_judge_or_decide_but_not_both(recipes):
    source = compare.Model(resolve_model("tiny"), 4, "cpu")
    rows = [row for row in compare.rows_of([recipes[1]]) if row.name != "Hadamard + GPTQ"]
    planned = {row: source.planned(row.recipe) for row in rows}
    batches = source.batches(planned)
    cases = {case.column: case for case in next(batches)}
    assert set(cases) == {
        "qkv",
        "text_qkv",
        "attn_out",
        "text_attn_out",
        "ff_up",
        "text_ff_up",
        "ff_down",
        "text_ff_down",
    }
    case = cases["qkv"]
    assert len(case.weights) == 3 and "transformer_blocks.0.attn.to_q" in case.weights
    assert len(case.judge) == len(case.inputs.held_out) == compare.STEPS * 16  # tokens of one image each
    assert not set(map(tuple, case.judge.tolist())) & set(map(tuple, case.inputs.held_out.float().tolist()))
    assert case.inputs.held_weight.mean() == 1
    rtn, eight = (list(compare.measure(row, planned[row][case.group], case, find_device("h200"), 4608)) for row in rows)
    assert [one.layer for one in eight] == list(case.weights)
    assert all(b.db > a.db for a, b in zip(rtn, eight, strict=True))
    batches.close()


@pytest.mark.slow
def test_a_model_is_compared_by_role(recipes, tmp_path):
    file = tmp_path / "rows.json"
    done = run("--layers", "tiny", "--images", 4, "--recipe", recipes[1], "--json", file)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert {"qkv", "ff_up", "ff_down", "attn_out", "single_in", "mixed_out"} <= report["rows"][0]["db"].keys()
    assert "modulation" not in report["rows"][0]["db"]
    rows = {row["row"]: row for row in report["rows"]}
    assert rows["eight balanced"]["mean"] > rows["RTN"]["mean"]
    layers = {one["layer"] for one in report["layers_measured"]}
    assert "transformer_blocks.0.attn.to_q" in layers and "single_transformer_blocks.3.proj_out" in layers


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--recipe", "nvpf4"), "Invalid value for --recipe: recipe 'nvpf4' is neither a file nor a shipped recipe"),
        (("--recipe", "int8", "--recipe", "int8.yaml"), "int8.yaml: a second recipe called int8; rename the file"),
        (("--layers", "/nowhere"), "Invalid value for --layers: "),
        (("--gpu", "b300x"), "Invalid value for --gpu: unknown GPU 'b300x'"),
        (("--size", "100", "--recipe", "nvfp4"), "a synthetic layer: shape (100, 100) does not fit nvfp4"),
        (("--device", "cuda:77"), "Invalid value for --device: "),
        (("--layers", "tiny", "--images", "1"), "Invalid value for '--images'"),
    ],
)
def test_wrong_options_are_named(words, says):
    done = run(*words)
    assert done.exit_code != 0
    assert says in " ".join(done.output.replace("│", " ").split())


def test_without_recipes_those_of_four_bits_and_int8_are_compared():
    names = compare.default_recipes()
    assert {"nvfp4", "int4", "int8"} <= set(names) and not {"fp8", "mxfp8"} & set(names)


# --- other packages


def layers(count: int = 2) -> list[peers.PeerLayer]:
    g = torch.Generator().manual_seed(0)
    return [peers.PeerLayer(*(torch.randn(m, 128, generator=g) for m in (128, 256, 32))) for _ in range(count)]


def test_packages_that_are_missing_are_said(recipes, monkeypatch):
    monkeypatch.setattr(peers, "is_installed", lambda name: False)
    monkeypatch.setattr(compare, "MADE_BY", {"attn": "attention"})
    done = run("--size", 128, "--drawings", 1, "--recipe", "int8", "--peers")
    assert done.exit_code == 0, done.output
    for peer in peers.PEERS.values():
        assert f"not compared, because it is not installed; `pip install {peer.package}`" in done.output


def test_a_missing_module_is_not_installed():
    missing = {name: replace(peer, module=f"no_such_{name}.part") for name, peer in peers.PEERS.items()}
    for name in missing:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(peers.PEERS, name, missing[name])
            assert not peers.is_installed(name)


@pytest.mark.slow
def test_a_configuration_that_fails_or_kills_its_process_is_a_row(monkeypatch, tmp_path):
    """A peer of our own, that the other process imports by way of sitecustomize."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{peers.ROOT}")
    names = ("exact", "raises", "dies", "half")
    monkeypatch.setitem(peers.PEERS, "stand-in", peers.Peer("stand-in", "os", dict.fromkeys(names)))
    exact, raises, dies, half = peers.measured("stand-in", layers())
    assert exact.configuration == "exact" and len(exact.layers) == 2
    assert exact.layers[0].bits == 32 and exact.layers[0].db > 100
    assert raises.layers == () and raises.error == "ValueError: no such thing"
    assert dies.error == "killed by SIGKILL"
    assert half.layers[1].db == pytest.approx(6.02, abs=0.01)  # half of y is lost


STAND_IN = """
import sys
if "--peer" in sys.argv:
    import os, signal
    from benchmarks.layers import peers

    def raises(layer):
        print("chatter")
        raise ValueError("no such thing\\nand more")

    peers.PEERS["stand-in"] = peers.Peer("stand-in", "os", {
        "exact": lambda layer: (lambda x: x.double() @ layer.weight.double().T, 32.0),
        "raises": raises,
        "dies": lambda layer: os.kill(os.getpid(), signal.SIGKILL),
        "half": lambda layer: (lambda x: x @ layer.weight.T / 2, 16.0),
    })
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", peers.PEERS)
def test_a_package_quantizes_our_layers(name):
    if not peers.is_installed(name):
        pytest.skip(f"{peers.PEERS[name].package} is not installed")
    outcomes = {outcome.configuration: outcome for outcome in peers.measured(name, layers())}
    assert outcomes.keys() == peers.PEERS[name].configurations.keys()
    eight = outcomes["int8 W8A8"]
    assert eight.error == "" and all(30 < one.db < 60 and 8 < one.bits < 9 for one in eight.layers)
    for configuration, outcome in outcomes.items():
        if not configuration.startswith("int8"):
            assert outcome.error or all(10 < one.db < 30 and 4 < one.bits < 5 for one in outcome.layers)
