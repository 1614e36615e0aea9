"""Times that `fluxq doctor` measured in place of modelled ones; here they are planted, by doctor's own writer."""

from pathlib import Path
from typing import Any

import pytest

from fluxq.base.files import write_json
from fluxq.jobs.job import JobOptions
from fluxq.jobs.search import AutoOptions, Search, search_of
from fluxq.kernels import findings
from fluxq.recipes.cost import product_of
from fluxq.recipes.devices import find_device, is_called
from fluxq.recipes.formats import BF16

CALL = {"height": 16, "width": 16, "max_sequence_length": 8}
MACHINE = {"gpu": "NVIDIA B200", "chip": "sm_100", "driver": "580", "fluxq": "0", "torch": "0", "triton": "0"}


def search(times: Path | None = None, **options: Any) -> Search:
    how: dict[str, Any] = {"gate": "latent_sqnr>=20", "gpu": "b200", "menu": ("nvfp4", "fp8"), **options}
    return search_of(JobOptions("tiny", call=CALL), AutoOptions(times=times, **how), writes=False)


def row(product: tuple[str, int, int, int], us: float, **changes: Any) -> dict[str, Any]:
    formats, m, n, k = product
    what = {"op": "op", "format": formats, "scheme": formats, "m": m, "n": n, "k": k, "share": 0.1, "why": ""}
    return {**what, "us": us, "beside": {BF16: 9 * us}, "chosen": True, "candidate": False, **changes}


ROW = row(("fp8-fp8", 8, 128, 128), 1.0)


@pytest.fixture(scope="module")
def modelled() -> Search:
    return search()


@pytest.fixture(scope="module")
def products(modelled) -> dict[str, dict[str, list[Any]]]:
    """Option -> unit -> its products."""
    from fluxq.jobs.making import model_costs

    forward = next(iter(model_costs(modelled.job, "b200", "speed", None, 1).values())).forward
    offer = modelled.offer
    return {
        option: {
            unit: [product_of(offer.layers[option][name], forward, "sm_100") for name in names]
            for unit, names in offer.units.items()
        }
        for option in offer.options
    }


def kept(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> Path:
    monkeypatch.setattr(findings, "folder", lambda: folder)
    findings.Keeper(MACHINE).write(rows)
    return findings.file_of(MACHINE)


def test_products_that_were_measured_take_their_times_the_others_the_models(
    modelled, products, tmp_path, monkeypatch
) -> None:
    unit = "transformer.transformer_blocks.0.ff.net.2"
    (fast,), (slow,) = products["fp8"][unit], products["nvfp4"][unit]
    rows = [row(fast, 3000.0), row(fast, 5000.0, op="slower"), row(fast, 1.0, op="wrong", why="NaN"), row(slow, 7000.0)]
    found = search(kept(tmp_path, monkeypatch, rows))
    same = {unit for unit in products["fp8"] if {*products["fp8"][unit]} == {fast}}  # of the same shape in all options
    assert unit in same and {*found.costs.measured} == same
    plain, now = modelled.costs.numbers, found.costs.numbers
    rest = {option: now[unit][option] - ms for option, ms in (("fp8", 3.0), ("nvfp4", 7.0))}
    assert rest["fp8"] == pytest.approx(rest["nvfp4"])  # passes that no call of a layer makes
    assert 0 <= rest["fp8"] < plain[unit]["fp8"]
    assert {u: plain[u] for u in plain.keys() - same} == {u: now[u] for u in now.keys() - same}
    assert found.costs.fixed == modelled.costs.fixed


def test_a_unit_with_an_option_that_was_not_measured_stays_modelled(modelled, products, tmp_path, monkeypatch) -> None:
    rows = [row(product, 3000.0) for of_unit in products["fp8"].values() for product in of_unit]
    file = kept(tmp_path, monkeypatch, [row for row in rows if row["scheme"] != "nvfp4-nvfp4"])
    assert search(file).costs == modelled.costs
    assert not search(file, menu=("nvfp4", "fp8", "16bit")).costs.measured


def test_16_bit_takes_the_time_beside(modelled, products, tmp_path, monkeypatch) -> None:
    rows = [row(each, 1e3) for option in products.values() for of_unit in option.values() for each in of_unit]
    found = search(kept(tmp_path, monkeypatch, rows), menu=("nvfp4", "fp8", "16bit"))
    assert {*found.costs.measured} == {*found.offer.units}
    (one, *_) = found.offer.units
    assert found.costs.numbers[one]["16bit"] >= 9 * len(found.offer.units[one])


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"machine": {**MACHINE, "gpu": "NVIDIA H200"}},
            r"on NVIDIA H200, not on B200.*run `fluxq doctor` there",
        ),
        ({"rows": [{"op": 1}]}, "no file of `fluxq doctor`, or is damaged .*run `fluxq doctor` on the GPU again"),
        ({"kind": "fluxq auto"}, "its kind is 'fluxq auto'"),
        ({"rows": [{**ROW, "beside": [1]}]}, "or is damaged"),
        ({"rows": [{name: value for name, value in ROW.items() if name != "us"}]}, "or is damaged"),
    ],
)
def test_another_gpus_or_a_damaged_file_is_refused_with_the_cure(change, words, tmp_path) -> None:
    file = tmp_path / "times.json"
    write_json(file, findings.document(MACHINE, []) | change)
    with pytest.raises(ValueError, match=words):
        search(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"times\.json"):
        search(file)


def test_times_mean_nothing_without_a_budget_of_time(tmp_path) -> None:
    with pytest.raises(ValueError, match="give --ms or --gate, and --gpu, too"):
        search(tmp_path / "x.json", gate=None, bits=5.5)


def test_a_driver_calls_cards_by_longer_names() -> None:
    assert is_called(find_device("h100"), "NVIDIA H100 80GB HBM3") and is_called(find_device("h200"), "NVIDIA H200")
    assert not is_called(find_device("h200"), "NVIDIA H100 80GB HBM3") and not is_called(find_device("b200"), "the CPU")
    assert is_called(find_device("3080 12GB"), "NVIDIA GeForce RTX 3080")
    assert is_called(find_device("4060ti"), "NVIDIA GeForce RTX 4060 Ti")
    for other in ("RTX 3080 Ti", "RTX 3080 Laptop GPU", "RTX 3080 SUPER"):
        assert not is_called(find_device("3080"), f"NVIDIA GeForce {other}")
