"""The tests of numbers can fail: each deliberate fault below turns the tests named beside it red."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from kernel_tests import sibling

from fluxq.kernels import encode, ops
from fluxq.recipes.formats import FORMATS

encoding, goldens, linears = (
    sibling("test_encode", "mutated"),
    sibling("test_golden", "mutated"),
    sibling("test_linear", "mutated"),
)
tensors = sibling("test_tensor", "mutated")


def exact_linear(scheme: str) -> Callable[[], None]:
    test = linears.test_the_output_is_the_simulation_bit_for_bit
    return partial(test, scheme, True, torch.bfloat16, (17, linears.K))


def nearest_code(format_name: str) -> Callable[[], None]:
    test = tensors.test_every_value_takes_the_nearest_code_under_its_scale
    return partial(test.hypothesis.inner_test, row=FORMATS[format_name], seed=3)


def rounding(kind: str) -> Callable[[], None]:
    return partial(encoding.test_every_bf16_number_rounds_to_the_nearest_even_code, kind)


PACKING = encoding.test_the_even_element_is_packed_into_the_low_nibble
UNPACKING = encoding.test_every_byte_unpacks_low_nibble_first_and_packs_again
CEILING = encoding.test_the_ceil_rule_takes_the_smallest_power_of_two_that_does_not_saturate
MODELOPT_NVFP4 = goldens.test_modelopt_nvfp4_differs_only_in_dropping_the_sign_of_negative_zeros
MODELOPT_MXFP8 = goldens.test_modelopt_mxfp8_differs_only_in_the_scale_of_the_zero_block
MODELOPT_INT8 = partial(goldens.test_modelopt_per_channel_bytes_are_ours, "modelopt_int8", "int8")
MODELOPT_FP8 = partial(goldens.test_modelopt_per_channel_bytes_are_ours, "modelopt_fp8_pc_pt", "fp8")
CT_MXFP4 = goldens.test_ct_mxfp4_has_another_scale_rule_and_drops_the_sign_of_negative_zeros


# The faults. Each takes the place of the function that MUTATIONS names and may call the original.


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return packed >> 4 | packed << 4 if packed.dtype == torch.uint8 else packed


def pack_high_first(original, codes, element):
    return swap_nibbles(original(codes, element))


def unpack_high_first(original, stored, element):
    return original(swap_nibbles(stored), element)


def pairs_high_first(original, element, device):
    pairs = original(element, device)
    return (
        pairs if pairs is None else pairs.view(torch.float32).view(-1, 2).flip(1).contiguous().view(torch.int64)[:, 0]
    )


def rolled_by_one_group(original, *args):
    return original(*args).roll(1, dims=-1)


def transposed(original, *args):
    scale = original(*args)
    return scale.t().reshape(scale.shape)


def scale_of_the_whole_row(original, blocks, row, global_scale):
    return original(blocks.flatten(1).unsqueeze(1).expand(-1, blocks.shape[1], -1), row, global_scale)


def without_saturation(original, x, element):
    if element.name == "e4m3":
        return torch.where(x.abs() > 464, torch.nan, x).to(torch.float8_e4m3fn)  # as casts of older torch do
    if element.name == "e2m1":
        return original((x + 6) % 12 - 6, element)
    return x.round().to(torch.int32).to(torch.int8)


def truncated(original, x, element, **how):
    return original(x.trunc(), element, **how)


def ties_away_from_zero(original, x, element, **how):
    return original(torch.nextafter(x, x.sign() * torch.inf), element, **how)


def sign_of_zero_dropped(original, x, element, **how):
    return original(torch.where(x == 0, 0.0, x), element, **how)


def floor_exponent(original, amax, element_max):
    return torch.frexp(amax).exponent - torch.frexp(torch.tensor(element_max)).exponent


def ceil_instead_of_least_squares(original, blocks, amax, element):
    return encode.ceil_exponent(amax, element.max)


def bf16_scale(original, blocks, row, global_scale):
    scale = original(blocks, row, global_scale)
    return scale.bfloat16().to(scale.dtype) if scale.dtype == torch.float32 else scale


def zero_scale_for_zeros(original, blocks, row, global_scale):
    scale = original(blocks, row, global_scale)
    return torch.where((blocks == 0).all(-1), torch.zeros((), dtype=scale.dtype), scale)


def finite_scale_for_infinity(original, blocks, row, global_scale):
    return original(blocks.nan_to_num(posinf=1.0, neginf=-1.0), row, global_scale)


def one_scale_for_all_tokens(original, x, row, input_scale, four_over_six):
    return None, None


def input_scale_ignored(original, x, row, input_scale, four_over_six):
    return original(x, row, None, four_over_six)


def product_in_bf16(original, a, b):
    return F.linear(a.bfloat16(), b.bfloat16())


def bias_after_the_cast(original, x, w, input_scale, bias, *steps):
    y = original(x, w, input_scale, None, *steps).to(torch.bfloat16)
    return (y + bias).float()


@dataclass(frozen=True)
class Mutation:
    """A fault put in place of `module.name`, and the tests that must notice."""

    module: ModuleType
    name: str
    fault: Callable
    noticed_by: tuple[Callable[[], None], ...]


MUTATIONS = {
    "nibbles: pack only": [Mutation(encode, "pack", pack_high_first, (PACKING, UNPACKING, MODELOPT_NVFP4))],
    "nibbles: unpack only": [Mutation(encode, "unpack", unpack_high_first, (UNPACKING,))],
    "nibbles: decoded only": [
        Mutation(encode, "stored_pairs", pairs_high_first, (MODELOPT_NVFP4, exact_linear("nvfp4-fp8")))
    ],
    "nibbles: both": [
        Mutation(encode, "pack", pack_high_first, (PACKING, MODELOPT_NVFP4)),
        Mutation(encode, "unpack", unpack_high_first, ()),
    ],
    "scales: stored one group off": [
        Mutation(encode, "block_scale", rolled_by_one_group, (MODELOPT_NVFP4, MODELOPT_MXFP8, CT_MXFP4))
    ],
    "scales: decoded one group off": [
        Mutation(encode, "decode_scale", rolled_by_one_group, (MODELOPT_NVFP4, exact_linear("mxfp8-mxfp8")))
    ],
    "scales: transposed": [Mutation(encode, "block_scale", transposed, (MODELOPT_NVFP4, exact_linear("int4-16bit")))],
    "scales: one for the whole row": [
        Mutation(encode, "block_scale", scale_of_the_whole_row, (MODELOPT_NVFP4, exact_linear("int4-16bit")))
    ],
    "scales: rounded to bf16": [Mutation(encode, "block_scale", bf16_scale, (MODELOPT_FP8, MODELOPT_INT8))],
    "scales: zero for a zero block": [
        Mutation(
            encode,
            "block_scale",
            zero_scale_for_zeros,
            (
                partial(encoding.test_zeros_get_scale_one_and_decode_to_zeros_with_their_sign, "fp8"),
                partial(encoding.test_zeros_get_scale_one_and_decode_to_zeros_with_their_sign, "nvfp4"),
            ),
        )
    ],
    "scales: infinity saturates": [
        Mutation(
            encode,
            "block_scale",
            finite_scale_for_infinity,
            (
                partial(
                    encoding.test_nan_and_infinity_in_activations_turn_their_own_block_into_nan,
                    "nvfp4",
                    float("inf"),
                ),
            ),
        )
    ],
    "E8M0: floor instead of ceil": [
        Mutation(encode, "ceil_exponent", floor_exponent, (CEILING, MODELOPT_MXFP8, exact_linear("mxfp8-mxfp8")))
    ],
    "E8M0: ceil instead of least squares": [
        Mutation(
            encode,
            "_least_squares_exponent",
            ceil_instead_of_least_squares,
            (
                partial(encoding.test_mxfp4_takes_the_exponent_of_least_squared_error_at_every_magnitude, 1.0),
                CT_MXFP4,
                exact_linear("mxfp4-mxfp4"),
            ),
        )
    ],
    "codes: no saturation": [
        Mutation(encode, "encode", without_saturation, tuple(map(rounding, ("e4m3", "e2m1", "int8", "int4"))))
    ],
    "codes: truncated": [Mutation(encode, "encode", truncated, (rounding("e2m1"), nearest_code("int8"), MODELOPT_FP8))],
    "codes: ties away from zero": [
        Mutation(encode, "encode", ties_away_from_zero, tuple(map(rounding, ("e4m3", "e2m1", "int8", "int4"))))
    ],
    "codes: sign of zero dropped": [
        Mutation(encode, "encode", sign_of_zero_dropped, (rounding("e4m3"), rounding("e2m1"), MODELOPT_NVFP4))
    ],
    "activations: one global scale for all tokens": [
        Mutation(ops, "activation_scales", one_scale_for_all_tokens, (exact_linear("nvfp4-nvfp4"),))
    ],
    "activations: input_scale ignored": [
        Mutation(ops, "activation_scales", input_scale_ignored, (exact_linear("nvfp4-nvfp4-static"),))
    ],
    "int8: inexact product": [
        Mutation(
            ops,
            "int8_product",
            product_in_bf16,
            (exact_linear("int8-int8"), linears.test_the_int8_product_is_exact_for_the_largest_codes),
        )
    ],
    "int8: bias after the cast": [Mutation(ops, "_int8_linear", bias_after_the_cast, (exact_linear("int8-int8"),))],
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_turns_its_tests_red(monkeypatch, fault):
    mutations = MUTATIONS[fault]
    checks = [check for mutation in mutations for check in mutation.noticed_by]
    for check in checks:
        check()
    for mutation in mutations:
        original = getattr(mutation.module, mutation.name)
        monkeypatch.setattr(mutation.module, mutation.name, partial(mutation.fault, original))
    for check in checks:
        with pytest.raises(AssertionError):
            check()
