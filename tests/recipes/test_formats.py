"""FORMATS against the facts that the specifications state."""

import ast
import dataclasses

import pytest

from fluxq.recipes.formats import ELEMENTS, FORMATS, find_format
from tests.house.test_house import our_modules

# name: (element, elements per scale, scale type, rule, two levels, bits per weight of a 128 x 256 matrix)
FACTS = {
    "fp8": ("e4m3", (1, 0), "fp32", "amax", False, 8 + 32 / 256),
    "fp8_tensor": ("e4m3", (0, 0), "fp32", "amax", False, 8 + 32 / (128 * 256)),
    "fp8_1x128": ("e4m3", (1, 128), "fp32", "amax", False, 8.25),
    "fp8_128x128": ("e4m3", (128, 128), "fp32", "amax", False, 8 + 32 / 128**2),
    "mxfp8": ("e4m3", (1, 32), "e8m0", "ceil", False, 8.25),
    "mxfp4": ("e2m1", (1, 32), "e8m0", "least_squares", False, 4.25),
    "nvfp4": ("e2m1", (1, 16), "e4m3", "amax", True, 4.5 + 32 / (128 * 256)),
    "fp8_e5m2": ("e5m2", (1, 0), "fp32", "amax", False, 8 + 32 / 256),
    "int8": ("int8", (1, 0), "fp32", "amax", False, 8 + 32 / 256),
    "int4": ("int4", (1, 64), "bf16", "amax", False, 4.25),
}


def test_the_rows_state_the_facts():
    rows = {
        row.name: (row.element.name, row.block, row.scale, row.rule, row.two_level, row.stored_bits(128, 256) / 2**15)
        for row in FORMATS.values()
    }
    assert rows == FACTS
    assert all(name == row.name for name, row in FORMATS.items())


# name: (bits, exponent, mantissa, bias, largest, smallest where it is not -largest, dtype)
ELEMENT_FACTS = {
    "e2m1": (4, 2, 1, 1, 6.0, None, "uint8"),
    "e4m3": (8, 4, 3, 7, 448.0, None, "float8_e4m3fn"),
    "e5m2": (8, 5, 2, 15, 57344.0, None, "float8_e5m2"),
    "int8": (8, 0, 7, 0, 127.0, None, "int8"),
    "int4": (4, 0, 3, 0, 7.0, -8.0, "uint8"),
}
# name: (smallest normal number, distance of the largest number from the one below, where clipping begins, has NaN)
DERIVED_FACTS = {
    "e2m1": (1.0, 2.0, 7.0, False),
    "e4m3": (2.0**-6, 32.0, 464.0, True),
    "e5m2": (2.0**-14, 8192.0, 61440.0, True),
    "int8": (None, 1.0, 127.5, False),
    "int4": (None, 1.0, 7.5, False),
}


def test_the_elements_state_the_facts():
    facts = {name: (e.bits, e.exponent, e.mantissa, e.bias, e.max, e.low, e.storage) for name, e in ELEMENTS.items()}
    assert facts == ELEMENT_FACTS
    assert all(name == row.name for name, row in ELEMENTS.items())


def test_what_follows_from_an_element_is_what_was_written_down_before():
    derived = {
        name: (None if e.is_integer else e.smallest_normal, e.largest_step, e.clips_at, e.has_nan)
        for name, e in ELEMENTS.items()
    }
    assert derived == DERIVED_FACTS
    assert ELEMENTS["e2m1"].magnitudes == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert len(ELEMENTS["e4m3"].magnitudes) == 0x7F and len(ELEMENTS["e5m2"].magnitudes) == 0x7C


def named(source: str, name: str) -> bool:
    """True if a source text names the format, or an element of that name, by a string."""
    return any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(ast.parse(source)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_e5m2", "e5m2"])
def test_a_format_is_two_rows_and_no_other_file_names_it(name):
    """Of a format that no kernel and no program multiplies yet: its rows are all that it takes."""
    modules = our_modules()
    found = {module for module, path in modules.items() if named(path.read_text(encoding="utf-8"), name)}
    assert found == {"fluxq.recipes.formats"}


@pytest.mark.parametrize("wrong", [{"mantissa": 2}, {"exponent": 5}, {"max": 465.0}, {"bias": 9}])
def test_an_element_that_contradicts_itself_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=r"element e4m3: .*correct its row"):
        dataclasses.replace(ELEMENTS["e4m3"], **wrong)


@pytest.mark.parametrize(("wrong", "right"), [("nvfp", "nvfp4"), ("mxfp_8", "mxfp8"), ("int-8", "int8"), ("f8", "fp8")])
def test_a_misspelt_format_gets_a_suggestion(wrong, right):
    with pytest.raises(ValueError, match=f"unknown format '{wrong}' \\(did you mean '{right}'\\?\\); formats: fp8, "):
        find_format(wrong)


@pytest.mark.parametrize("name", ["", "bitsandbytes", "_g128", "int4_g", "int4_gx"])
def test_an_unknown_format_lists_all(name):
    with pytest.raises(ValueError, match=f"unknown format .*formats: {', '.join(FORMATS)}$"):
        find_format(name)


def test_only_int4_has_a_choice_of_group_sizes():
    assert find_format("int4_g128").block == (1, 128)
    assert find_format("int4_g64") is FORMATS["int4"]
    for name in ("int4_g32", "int4_g0", "nvfp4_g32", "fp8_g64"):
        with pytest.raises(ValueError, match=r"group_size .* is not offered"):
            find_format(name)


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_a_shape_that_does_not_fit_is_refused_by_name_and_with_a_cure(row):
    unit = 1 if row.spans_rows else row.group_size or (2 if row.element.bits == 4 else 1)
    row.check_shape(3, 2 * unit, "blocks.0.to_q")
    for n, k in ((3, 0), (0, unit), *([(3, 2 * unit + 1)] if unit > 1 else [])):
        with pytest.raises(ValueError, match=r"blocks\.0\.to_q: shape \(.*multiples of .*exclude this layer"):
            row.check_shape(n, k, "blocks.0.to_q")
