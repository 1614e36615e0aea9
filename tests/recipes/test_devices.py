"""DEVICES: rows that are whole, dense peaks, and sources for everything that is not assumed."""

import re

import pytest

from fluxq.kernels.tiles import CHIPS
from fluxq.recipes.cost import EIGHT_BIT, NATIVE, REFERENCE
from fluxq.recipes.devices import DEVICES, find_device


@pytest.fixture(params=DEVICES.values(), ids=DEVICES)
def device(request):
    return request.param


def test_every_row_has_a_chip_and_an_efficiency_for_each_peak(device):
    assert device.peaks.keys() == device.matmul.keys()
    if device.chip in REFERENCE:
        assert device.chip not in CHIPS and device.peaks.keys() == {"bf16", "fp32"}
    else:
        assert device.chip in CHIPS
        assert {"bf16", *NATIVE[device.chip].values(), EIGHT_BIT[device.chip]} <= device.peaks.keys()
    assert len(device.source.split()) > 3


def test_every_efficiency_is_a_fraction_with_a_source_or_the_word_assumed(device):
    attention = device.attention, device.attention_fp8
    for efficiency in (*device.matmul.values(), *attention, device.streaming, device.scalar):
        assert 0.25 < efficiency.fraction < 1.05  # cards that clock higher than the data sheet counts on pass 1
        assert bool(efficiency.measured) != bool(efficiency.why)
        assert bool(efficiency.why) == ("assumed: " in str(efficiency))
        if efficiency.measured:
            assert "/" in efficiency.measured  # a repository, with its thread or folder


def test_matrix_units_are_faster_than_the_rest_of_the_chip(device):
    times = device.peaks["bf16"] / device.scalar_peak
    assert 1 < times < 32 or (times == 1 and device.chip == "sm_75")  # which has no such unit for bf16
    assert device.scalar_flops == 0.5e12 * device.scalar_peak


def test_peaks_are_dense(device):
    """Each halving of the bits doubles the rate on these chips; one sparse figure among dense ones would show.

    GeForce cards halve bf16 and fp8, because their sums are fp32; block-scaled formats and int8 are not held back.
    """
    halved = 2 if re.match(r"RTX \d", device.name) else 1
    times = {
        "fp8": 2,
        "fp8_1x128": 2,
        "int8": 2 * halved,
        "mxfp8": 2 * halved,
        "mxfp4": 4 * halved,
        "nvfp4": 4 * halved,
    }
    times["fp32"] = 1 if device.chip in ("apple", "sm_75") else 1 / 2
    for arithmetic, peak in device.peaks.items():
        assert peak == pytest.approx(device.peaks["bf16"] * times.get(arithmetic, 1), rel=0.002), arithmetic


def test_h200_is_an_h100_with_more_memory():
    h100, h200 = DEVICES["h100"], DEVICES["h200"]
    assert h100.peaks == h200.peaks and h100.matmul.keys() == h200.matmul.keys()
    assert h200.memory > h100.memory and h200.bandwidth > h100.bandwidth


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, "rtx5090") for name in ("rtx5090", "RTX 5090", "rtx-5090", "Rtx_5090", "5090", "GeForce RTX 5090")),
        *((name, "rtx4060ti") for name in ("4060ti", "RTX 4060 Ti", "NVIDIA GeForce RTX 4060 Ti", "rtx 4060 ti 16gb")),
        *((name, "rtx3060") for name in ("3060", "rtx3060", "RTX 3060 12GB")),
        *((name, "rx7900xtx") for name in ("7900 XTX", "rx7900xtx", "AMD Radeon RX 7900 XTX")),
        *((name, "rx9070") for name in ("9070", "RX 9070")),
        ("RTX 4060 Ti 8GB", "rtx4060ti-8gb"),
        *((name, "rtx4060") for name in ("4060", "NVIDIA GeForce RTX 4060")),
        *((name, "rtx3070") for name in ("3070", "RTX 3070")),
        *((name, "rtx3080") for name in ("3080", "NVIDIA GeForce RTX 3080", "3080 10GB")),
        ("RTX 3080 12GB", "rtx3080-12gb"),
        *((name, key) for name, key in (("2080", "rtx2080"), ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"))),
        *((name, "a6000") for name in ("A6000", "RTX A6000", "NVIDIA RTX A6000")),
        ("a100", "a100"),
        ("NVIDIA L4", "l4"),
        ("Apple M4", "m4"),
        ("Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_found_by_any_spelling(name, key):
    assert find_device(name) is DEVICES[key]


def test_no_two_gpus_are_spelt_alike():
    for key, device in DEVICES.items():
        assert find_device(key) is device and find_device(device.name) is device


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h20", " (did you mean h200?)"),
        ("rtx4070ti", " (did you mean rtx4070?)"),
        ("5070 Ti Super", " (did you mean rtx5070 or rtx5070ti?)"),
        ("7900", " (did you mean rx7900xt or rx7900xtx?)"),
        ("rtx5009", " (did you mean rtx5090 or rtx5080?)"),
        ("voodoo", ""),
        ("NVIDIA", ""),
    ],
)
def test_an_unknown_gpu_lists_the_known_ones_and_the_nearest(name, hint):
    with pytest.raises(ValueError, match=r"^unknown GPU ") as caught:
        find_device(name)
    text = str(caught.value)
    assert text.startswith(f"unknown GPU {name!r}{hint}; known: a100, h100, ")
    assert text.endswith("mi355x; recipes/devices.py shows how to add one")


def test_an_arithmetic_that_the_chip_lacks_is_named():
    assert DEVICES["a100"].flops("bf16") == pytest.approx(271e12, rel=0.01)
    with pytest.raises(ValueError, match="A100 SXM 80GB does not multiply fp8; it has bf16, int8"):
        DEVICES["a100"].flops("fp8")
