"""Tests of what a card holds of a pipeline, against figures made by hand."""

import dataclasses

import pytest

from fluxq.recipes.cards import CONTEXT, PartSize, holding, weights_on
from fluxq.recipes.devices import DEVICES
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan, Method

CARD = dataclasses.replace(DEVICES["rtx4070"], memory=10)
GIB = 1 << 30


def layer(scheme: str | None, n: int = 256, k: int = 512, **how) -> LayerPlan:
    parsed = Scheme.parse(scheme) if scheme else None
    return LayerPlan("a", n, k, "qkv", "", False, parsed, "", **how)


def test_all_at_once_is_the_sum_of_weights_and_the_most_activations():
    found = holding([PartSize("a", 3e9, 1e9), PartSize("b", 4e9, 0.5e9), PartSize("c", 1e9)], CARD)
    assert found.at_once == CONTEXT + 8e9 + 1e9 and found.in_turns == CONTEXT + 4.5e9
    assert (found.word, found.widest, found.room) == ("all", "b", 10 * GIB)
    assert str(found) == (
        "holds the pipeline at once: 9.6 GB of 10.7 GB; in turns (enable_model_cpu_offload) 5.1 GB, for b"
    )
    assert found.describe() == {
        "holds": "all", "memory_gb": 10 * GIB / 1e9, "at_once_gb": 9.6, "in_turns_gb": 5.1, "widest": "b",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "word", "said"),
    [
        ((6e9, 5e9), "turns", "holds it in turns: in turns (enable_model_cpu_offload) 6.6 GB, for a; at once it takes"),
        (
            (10.5e9, 1e9),
            "no",
            "does not hold the pipeline: in turns (enable_model_cpu_offload) 11.1 GB, for a; at once",
        ),
        ((10 * GIB - CONTEXT, 0), "all", "holds the pipeline at once: 10.7 GB of 10.7 GB;"),
    ],
)
def test_what_does_not_fit_at_once_may_fit_in_turns(weights, word, said):
    found = holding([PartSize("a", weights[0]), PartSize("b", weights[1])], CARD)
    assert found.word == word and str(found).startswith(said)


def test_weights_lie_on_a_card_as_it_computes_with_them():
    numbers, plain, four = 256 * 512, layer(None), layer("nvfp4-nvfp4")
    stored = four.stored_bits / 8
    assert weights_on([plain], 7, "sm_89") == 7 + 2 * numbers
    assert weights_on([four], 0, "sm_120") == weights_on([four], 0, "sm_89", "memory") == stored
    assert weights_on([four], 0, "sm_89") == numbers + 4 * 256  # int8, a scale for each row
    # Where torch decodes it, its codes and the weight stand there in fp32 while it multiplies: of one layer at a time.
    narrow = layer("nvfp4-nvfp4", n=128)
    kept = stored + narrow.stored_bits / 8
    assert weights_on([four, narrow, plain], 0, "gfx1100") == kept + 2 * numbers + 2 * 4 * numbers
    assert weights_on([plain], 0, "apple") == 2 * numbers


def test_all_that_fitting_may_add_to_a_layer_counts():
    fitted = layer("nvfp4-nvfp4", method=Method(transforms=("center", "smooth"), rank=32))
    branch, vectors = 2 * 32 * (256 + 512), 2 * (512 + 512 + 256)  # mean, factors, and what the mean comes to
    assert weights_on([fitted], 0, "sm_120") - weights_on([layer("nvfp4-nvfp4")], 0, "sm_120") == branch + vectors
