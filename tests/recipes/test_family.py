"""Patterns over module paths: anchored at both ends, `*` within a segment, `**` across them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxq.recipes.family import matches

PATHS = st.lists(st.text("ab_0", min_size=1, max_size=3), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("proj_out", "proj_out"),
        ("single_transformer_blocks.*.proj_out", "single_transformer_blocks.12.proj_out"),
        ("**.proj_out", "single_transformer_blocks.0.proj_out"),
        ("**.proj_out", "proj_out"),
        ("time_text_embed.**", "time_text_embed.timestep_embedder.linear_1"),
        ("time_text_embed.**", "time_text_embed"),
        ("a.**.z", "a.z"),
        ("a.**.z", "a.b.c.z"),
        ("transformer_blocks.1*.attn.to_*", "transformer_blocks.17.attn.to_q"),
        ("blocks.*.to_out.*", "blocks.0.to_out.0"),
        ("**", "any.thing"),
    ],
)
def test_what_matches(pattern, path):
    assert matches(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("proj_out", "single_transformer_blocks.0.proj_out"),
        ("proj_out", "proj_out.weight"),
        ("transformer_blocks.*.attn.to_q", "single_transformer_blocks.0.attn.to_q"),
        ("blocks.*", "blocks.0.attn"),
        ("*", "a.b"),
        ("blocks.1", "blocks.11"),
        ("a.b", "a_b"),
        ("norm1.linear", "norm1xlinear"),
        ("**.to_q", "attn.add_to_q"),
        ("a.*.b", "a.b"),
    ],
)
def test_what_does_not_match(pattern, path):
    assert not matches(pattern, path)


@pytest.mark.parametrize("pattern", ["", ".", "a..b", "a.", ".a"])
def test_an_empty_segment_is_an_error_that_shows_a_good_pattern(pattern):
    with pytest.raises(ValueError, match=r"no module path.*transformer_blocks\.\*\.attn\.to_q"):
        matches(pattern, "a")


@given(PATHS)
def test_a_path_matches_itself_and_its_wildcards(segments):
    path = ".".join(segments)
    assert matches(path, path)
    assert matches("**", path) and matches(f"**.{segments[-1]}", path) and matches(f"{segments[0]}.**", path)
    assert matches(".".join("*" * len(segments)), path)
    assert not matches(".".join("*" * (len(segments) + 1)), path)
    assert not matches(f"{path}.x", path) and not matches(f"x.{path}", path)


@pytest.mark.parametrize("special", [".*", "a+", "(a)", "[ab]", "^a", "a|b", "\\d"])
def test_nothing_of_regular_expressions_is_left(special):
    if special == ".*":
        with pytest.raises(ValueError):
            matches(special, "a")
    else:
        assert not matches(special, "a") and matches(special, special)
