"""Damage that `inspect --base` must see: in few rows or columns, in biases, in what is not quantized, in odd tensors.

A file of one kind of damage each; `import` refuses them all.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from exchange_files import Tensors, base_state, write_base
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluxq.cli import cli
from fluxq.quantize.exchange.dialects import DIALECTS
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.inspect import Inspection, inspect_path
from fluxq.quantize.exchange.layer import Plain, QuantTensors
from tests.exchange.test_import_files import asymmetric, in_blocks, of_source
from tests.exchange.test_inspect import (
    ATTENTION,
    FP8,
    NVFP4,
    STATIC,
    Break,
    change,
    folded_state,
    folder_of,
    kinds,
    made,
)

N, K, COUNT = 2048, 64, 5
ROW = 200  # between the rows that readings are tried on
LAYER = "blocks.2"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "transformer")


def large(folder: Path, broken: Callable[[Tensors], None]) -> Inspection:
    """Return the inspection of fp8 layers of many rows once one of them was changed."""
    g = torch.Generator().manual_seed(0)
    truth, state = {}, {}
    for i in range(COUNT):
        weight, bias = torch.randn(N, K, generator=g) * 0.02, torch.randn(N, generator=g) * 0.02
        scale = weight.abs().amax(1) / 448
        truth |= {f"blocks.{i}.weight": weight.bfloat16(), f"blocks.{i}.bias": bias.bfloat16()}
        codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        layer = {"weight": codes, "weight_scale": scale, "bias": bias.bfloat16()}
        if f"blocks.{i}" == LAYER:
            broken(layer)
        state |= {f"blocks.{i}.{suffix}": tensor for suffix, tensor in layer.items()}
    save_file(state, folder / "model.safetensors", {"quantization": "fp8r"})
    save_file(truth, folder / "base.safetensors")
    return inspect_path(folder / "model.safetensors", folder / "base.safetensors")[""]


def times(name: str, at: int | slice, by: float) -> Callable[[Tensors], None]:
    def broken(layer: Tensors) -> None:
        layer[name] = layer[name].clone()
        layer[name][at] = (layer[name][at].float() * by).to(layer[name].dtype)

    return broken


def without_bias(layer: Tensors) -> None:
    del layer["bias"]


FEW: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "one row twice as large": (times("weight_scale", ROW, 2.0), "lost scale"),
    "one row a fifth too large": (times("weight_scale", ROW, 1.2), "lost scale"),
    "one row of zeros": (times("weight", ROW, 0.0), "lost scale"),
    "a tile of rows five times as large": (times("weight_scale", slice(128, 256), 5.0), "lost scale"),
    "half a bias turned round": (times("bias", slice(128, 256), -1.0), "another value"),
    "a lost bias": (without_bias, "another value"),
}


@pytest.mark.parametrize("case", FEW)
def test_damage_of_few_rows_is_seen_wherever_they_are(case, tmp_path) -> None:
    broken, kind = FEW[case]
    report = large(tmp_path, broken)
    assert [(fault.kind, fault.layer) for fault in report.faults if fault.is_error] == [(kind, LAYER)]
    assert report.proofs[0].startswith(f"{COUNT - 1} of {COUNT} layers are as declared" + ", in all of their rows")


def test_what_is_right_in_all_rows_is_proved(tmp_path) -> None:
    report = large(tmp_path, lambda layer: None)
    assert report.is_sound and report.proofs[0].startswith(f"{COUNT} of {COUNT} layers")


def test_a_bias_that_the_base_lacks_must_be_zero(tmp_path) -> None:
    large(tmp_path, lambda layer: None)
    truth = load_file(tmp_path / "base.safetensors")
    save_file({name: t for name, t in truth.items() if name != f"{LAYER}.bias"}, tmp_path / "base.safetensors")
    report = inspect_path(tmp_path / "model.safetensors", tmp_path / "base.safetensors")[""]
    assert [(fault.kind, fault.layer) for fault in report.faults if fault.is_error] == [("another value", LAYER)]


def test_the_bound_of_block_scales_is_that_of_scaled_codes(base, tmp_path) -> None:
    """An unscaled cast of weights of this size rounds much more of them to nothing."""
    name, state = "transformer_blocks.0.attn.to_q", base_state()
    for by, sound in ((1.0, True), (1.04, False)):
        codes, scale, _ = in_blocks(state[f"{name}.weight"].float() * by)
        held = {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}
        report = inspect_path(folder_of(tmp_path / str(by), state | held), base)[""]
        (layer,) = report.layers
        assert layer.against is not None and layer.against.bound < 0.06 and report.is_sound == sound


def smoothed(by: Callable[[Tensor], Tensor]) -> Break:
    """ModelOpt's smoothing of int8 layers, with these factors beside codes of the right ones."""

    def broken(module: str, tensors: Tensors) -> None:
        k = tensors["weight"].shape[1]
        smooth = torch.exp(torch.randn(k, generator=torch.Generator().manual_seed(0)))
        weight = tensors["weight"].float() * tensors["weight_scale"].reshape(-1, 1).float() / smooth
        scale = weight.abs().amax(1) / 127
        tensors |= {"weight": (weight / scale[:, None]).round().to(torch.int8), "weight_scale": scale}
        tensors["pre_quant_scale"] = by(smooth)

    return broken


def one_column(smooth: Tensor) -> Tensor:
    return torch.cat([smooth[:-1], smooth[-1:] * 0.01])


def half_of_them(smooth: Tensor) -> Tensor:
    return torch.where(torch.arange(len(smooth)) % 2 == 0, smooth, smooth * 1e-3)


@pytest.mark.often(1)
@pytest.mark.parametrize("by", [None, one_column, half_of_them])
def test_damaged_smoothing_does_not_set_its_own_bound(by, base, tmp_path) -> None:
    words = {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
    path = made(tmp_path, "modelopt", "int8-int8", smoothed(by or (lambda t: t)), config=words)
    report = inspect_path(path, base)[""]
    assert report.is_sound == (by is None), report.faults[:3]
    if by is not None:
        assert {fault.layer for fault in report.faults if fault.is_error} >= {layer.name for layer in report.layers}


def folded_elsewhere(factors: Tensor) -> Tensors:
    """Rows of one block divided by what columns of the other carry."""
    there, here = folded_state(factors), base_state()
    ours = "transformer_blocks.0.attn.to_out.0.weight"
    theirs = "single_transformer_blocks.0.attn.to_v"
    rows = {f"{theirs}.weight": (here[f"{theirs}.weight"].float() / factors[:, None]).bfloat16()}
    return here | {ours: there[ours]} | rows | {f"{theirs}.bias": (here[f"{theirs}.bias"].float() / factors).bfloat16()}


def folded_modulation(state: Tensors, modulation: str, factors: Tensor, wrong: str = "") -> Tensors:
    """The weight and bias of a modulation whose first shift and scale are divided by factors.

    wrong: what is done otherwise.
    """
    found = {}
    for part in ("weight", "bias"):
        value = state[f"{modulation}.{part}"].float()
        by = factors if value.ndim == 1 else factors[:, None]
        if wrong != "shift is not folded":
            value[:128] /= by
        one = 1.0 if part == "bias" and wrong != "bias without the 1" else 0.0
        if part == "weight" or wrong != "bias is not folded":
            value[128:256] = (value[128:256] + one) / by - one
        found[f"{modulation}.{part}"] = value.bfloat16()
    return found


READERS = [f"transformer_blocks.0.attn.to_{x}.weight" for x in "qkv"]
TEXT_READERS = [f"transformer_blocks.0.attn.add_{x}_proj.weight" for x in "qkv"]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "wrong", ["", "shift is not folded", "bias without the 1", "bias is not folded", "for the text"]
)
def test_a_modulation_takes_factors_back_as_it_makes_x(wrong: str, base, tmp_path) -> None:
    """Shift and scale, weights and biases, for the layers that read that very x."""
    state, factors = dict(base_state()), torch.ones(128)
    factors[:64] = 0.25
    readers = TEXT_READERS if wrong == "for the text" else READERS
    state |= folded_modulation(state, "transformer_blocks.0.norm1.linear", factors, wrong)
    state |= {name: (state[name].float() * factors).bfloat16() for name in readers}
    report = inspect_path(made(tmp_path, "modelopt", FP8, state=state), base)[""]
    assert report.is_sound is (wrong == ""), [fault for fault in report.faults if fault.is_error]


def test_folded_factors_are_told_from_one_factor_that_rounding_may_have(base, tmp_path) -> None:
    """Of such sizes that the error is just above the bound, and 4 % off all numbers would bring it below."""
    spread = torch.linspace(1 - 0.287, 1 + 0.287, 128)
    factors = spread[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    state = dict(base_state())
    state |= folded_modulation(state, "transformer_blocks.0.norm1.linear", factors)
    state |= {name: (state[name].float() * factors).bfloat16() for name in READERS}
    report = inspect_path(made(tmp_path, "modelopt", NVFP4, state=state), base)[""]
    assert report.is_sound, [fault for fault in report.faults if fault.is_error]


ONE_COLUMN: dict[str, tuple[Callable[[Tensor], Tensor] | None, set[str]]] = {
    "taken back": (lambda q: q, set()),
    "not taken back": (None, {"to_q", "to_k", "to_v"}),
    "another column of q too": (lambda q: torch.cat([q[:, :1] * 1.5, q[:, 1:]], 1), {"to_q"}),
    "all of q too": (lambda q: q * 1.03, {"to_q"}),
    "a column of q lost too": (lambda q: torch.cat([q[:, :1] * 0, q[:, 1:]], 1), {"to_q"}),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("by", [0.6, 1.5])
@pytest.mark.parametrize("case", ONE_COLUMN)
def test_a_factor_of_one_column_is_folding_where_it_is_taken_back(case: str, by: float, base, tmp_path) -> None:
    """It is little of the whole layer, and so of the error that any factors would take away."""
    state, factors = dict(base_state()), torch.ones(128)
    column = int(sum(state[name].float().square().sum(0) for name in READERS).argmin())
    factors[column] = by
    state |= {name: (state[name].float() * factors).bfloat16() for name in READERS}
    change_q, wrong = ONE_COLUMN[case]
    if change_q is not None:
        state |= folded_modulation(state, "transformer_blocks.0.norm1.linear", factors)
        state[READERS[0]] = change_q(state[READERS[0]].float()).bfloat16()
    report = inspect_path(made(tmp_path, "modelopt", NVFP4, state=state), base)[""]
    assert {fault.layer.rpartition(".")[2] for fault in report.faults if fault.is_error} == wrong, report.faults
    if case == "taken back":
        assert any(fault.what.endswith(" with a factor for 1 of its columns") for fault in report.faults), report.faults


@pytest.mark.often(1)
@pytest.mark.parametrize(("scheme", "axis", "by"), [(NVFP4, 0, 1.25), (FP8, 0, 1.07), (FP8, 1, 1.08)])
def test_a_lost_scale_is_found_in_what_reads_two_values(scheme: str, axis: int, by: float, base, tmp_path) -> None:
    """One row or column of less than the mean size, where noise of the other axis takes more of the error away."""
    name, state = "single_transformer_blocks.0.proj_out", dict(base_state())
    weight = state[f"{name}.weight"].float()
    at = int(weight.norm(dim=1).argmin()) if axis == 0 else 300
    weight.select(axis, at).mul_(by)
    report = inspect_path(
        made(tmp_path, "modelopt", scheme, state=state | {f"{name}.weight": weight.bfloat16()}), base
    )[""]
    assert [(fault.kind, fault.layer) for fault in report.faults if fault.is_error] == [("lost scale", name)]


def as_codes(weight: Tensor, most: int) -> Tensor:
    """Rounded to integers up to `most` with a scale for each row, and in 16 bit again."""
    scale = weight.float().abs().amax(1, keepdim=True) / most
    return ((weight.float() / scale).round() * scale).bfloat16()


GATE = 300  # of the embedded pipeline's modulation, rows 256 to 384
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda weight: weight,
    "a row is larger": lambda weight: at_row(weight, weight[GATE] * 1.05),
    "a row is a little larger": lambda weight: at_row(weight, weight[GATE] * 1.02),
    "a row is smaller": lambda weight: at_row(weight, weight[GATE] / 1.05),
    "a row is zeros": lambda weight: at_row(weight, weight[GATE] * 0),
    "a row is another's": lambda weight: at_row(weight, weight[GATE + 1]),
}


def at_row(weight: Tensor, row: Tensor) -> Tensor:
    return torch.cat([weight[:GATE], row[None], weight[GATE + 1 :]])


@pytest.mark.often(1)
@pytest.mark.parametrize("most", [127, None], ids=["codes once", "16 bit"])
@pytest.mark.parametrize("damage", GATES)
def test_rounding_of_a_gate_is_told_from_its_damage(damage: str, most: int | None, base, tmp_path) -> None:
    """A modulation that took factors, and was codes of 8 bits before it was 16 bit: nothing reads through its gate."""
    state, factors = dict(base_state()), torch.ones(128)
    factors[:64] = 0.25
    state |= folded_modulation(state, "transformer_blocks.0.norm1.linear", factors)
    state |= {name: (state[name].float() * factors).bfloat16() for name in READERS}
    name = "transformer_blocks.0.norm1.linear.weight"
    weight = state[name] if most is None else as_codes(state[name], most)
    state[name] = GATES[damage](weight)
    report = inspect_path(made(tmp_path, "modelopt", FP8, state=state), base)[""]
    wrong = {fault.layer for fault in report.faults if fault.is_error}
    assert (name.removesuffix(".weight") in wrong) == (damage != "whole"), report.faults
    assert report.is_sound == (damage == "whole"), report.faults


def folded_for_one(factors: Tensor) -> Tensors:
    """A modulation divided by what the columns of q carry, and those of k and v do not."""
    state = dict(base_state())
    modulation, q = "transformer_blocks.0.norm1.linear", "transformer_blocks.0.attn.to_q.weight"
    state |= folded_modulation(state, modulation, factors)
    return state | {q: (state[q].float() * factors).bfloat16()}


@pytest.mark.parametrize("state", [folded_elsewhere, folded_for_one])
def test_folding_is_what_the_same_block_takes_back_in_all_that_read_it(state, base, tmp_path) -> None:
    report = inspect_path(made(tmp_path, "modelopt", FP8, state=state(torch.linspace(0.3, 3, 128))), base)[""]
    wrong = {fault.layer.rpartition(".")[2] for fault in report.faults if fault.is_error}
    assert wrong == ({"0", "to_v"} if state is folded_elsewhere else {"to_k", "to_v"}), report.faults


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [FP8, NVFP4])
def test_values_with_factors_of_rows_and_of_columns(scheme, base, tmp_path) -> None:
    """Rows with an fp32 scale each take any factor in, scales of blocks powers of two."""
    rows = torch.linspace(0.3, 3, 128)[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    rows = rows if scheme is FP8 else rows.log2().round().exp2()
    columns, state = torch.linspace(-1, 1, 128).exp2(), folded_state(rows)
    state |= folded_modulation(state, "transformer_blocks.0.norm1.linear", columns)
    for name in ("to_q", "to_k", "to_v"):
        weight = state[f"{ATTENTION}.{name}.weight"].float() * columns
        state |= {f"{ATTENTION}.{name}.weight": weight.bfloat16()}
    report = inspect_path(made(tmp_path, "modelopt", scheme, state=state), base)[""]
    assert report.is_sound, report.faults
    noted = {fault.layer for fault in report.faults if fault.kind == "folded factors"}
    assert noted >= {f"{ATTENTION}.{name}" for name in ("to_q", "to_v", "add_v_proj", "to_out.0", "to_add_out")}
    lost = state | {f"{ATTENTION}.to_out.0.weight": base_state()[f"{ATTENTION}.to_out.0.weight"]}
    report = inspect_path(made(tmp_path / "lost", "modelopt", scheme, state=lost), base)[""]
    assert f"{ATTENTION}.to_out.0" in {fault.layer for fault in report.faults if fault.is_error}


def only(name: str, by: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda state: state | {name: by(state[name])}


def first_is(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.cat([torch.full_like(tensor.flatten()[:1], value), tensor.flatten()[1:]]).reshape(
        tensor.shape
    )


NORM, TABLE = "transformer_blocks.0.attn.norm_q.weight", "x_embedder.weight"
EXTRA = "transformer_blocks.7.attn.norm_q.weight"
REFUSED = (
    r"NaN or infinite|integers|no model needs|damaged|another|missing|lacks|the model has no|asks for|not in the base"
    "|off by a factor"
)
PLAIN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a norm of integers": (only(NORM, lambda t: torch.full_like(t, 7, dtype=torch.int32)), "integers"),
    "an embedder of integers": (only(TABLE, lambda t: torch.ones_like(t, dtype=torch.int64)), "integers"),
    "a norm that is cut to integers": (only(NORM, lambda t: t.long()), "integers"),
    "a norm larger than any": (only(NORM, lambda t: t * 1e20), "too large"),
    "a norm that is NaN": (only(NORM, first_is(torch.nan)), "no numbers"),
    "an embedder that is infinite": (only(TABLE, first_is(torch.inf)), "no numbers"),
    "a bias that is NaN": (only("x_embedder.bias", first_is(torch.nan)), "no numbers"),
    "a norm a little off": (only(NORM, lambda t: t * 1.01), "damaged"),
    "a Linear in 16 bit a little off": (only("proj_out.weight", lambda t: t * 1.01), "scale off by a factor"),
    "one number of a norm off": (only(NORM, lambda t: first_is(float(t[0]) * 1.25)(t)), "damaged"),
    "a norm of another size": (only(NORM, lambda t: t[:-1].clone()), "another value"),
    "a tensor less": (lambda state: {name: t for name, t in state.items() if name != NORM}, "missing"),
    "a tensor more": (
        lambda state: state | {EXTRA: state[NORM].clone()},
        "not in the base",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLAIN)
def test_damage_of_what_is_not_quantized(case, base, tmp_path) -> None:
    broken, kind = PLAIN[case]
    folder = made(tmp_path, "modelopt", STATIC)
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file(broken(load_file(file)), file, {"format": "pt"})
    report = inspect_path(folder, base)[""]
    assert kinds(report)[kind] == 1 and sum(kinds(report).values()) in (1, 2), report.faults
    for given in (base,) if kind in ("damaged", "scale off by a factor") else (None, base):
        with pytest.raises(ValueError, match=REFUSED):
            import_model(folder, tmp_path / "out", given)


def codes_less(codes: Tensor) -> Tensor:
    """Four of 16 codes of a row become 0."""
    codes = codes.clone()
    codes.view(torch.uint8)[3, 8:10] = 0
    return codes


def neighbours_scale(scale: Tensor) -> Tensor:
    """The scale of a block, where the one beside it is half as large again, becomes that one's."""
    codes, values = scale.view(torch.uint8).clone(), scale.float()
    row, at = divmod(int((values[:, 1:] / values[:, :-1] - 1.45).abs().argmin()), values.shape[1] - 1)
    codes[row, at] = codes[row, at + 1]
    return codes.view(scale.dtype)


SMALL: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "four codes of zero": (NVFP4, "weight", codes_less, "damaged"),
    "a neighbour's scale": (NVFP4, "weight_scale", neighbours_scale, "damaged"),
    "1.5 % more of 4 bits": (NVFP4, "weight_scale_2", lambda scale: scale * 1.015, "scale off by a factor"),
    "0.4 % more of 8 bits": (FP8, "weight_scale", lambda scale: scale * 1.004, "scale off by a factor"),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("case", SMALL)
def test_what_was_rounded_to_nearest_is_held_to_it(case, base, tmp_path) -> None:
    """Fitted codes may be further off; these are not, in all but one layer."""
    scheme, name, by, kind = SMALL[case]
    layer = "transformer_blocks.0.ff.net.2"
    report = inspect_path(made(tmp_path, "modelopt", scheme, change(name, by, layer)), base)[""]
    assert [(fault.kind, fault.layer) for fault in report.faults if fault.is_error] == [(kind, layer)]


def hardly_fitted(codes: Tensor) -> Tensor:
    """One code in 250 becomes the one beside it, wherever it is, and four of one row."""
    codes = codes.clone()
    moved = torch.rand(codes.shape, generator=torch.Generator().manual_seed(0)) < 1 / 125
    moved[3, 8:12] = True
    codes.view(torch.uint8)[moved] ^= 1
    return codes


def test_codes_that_fitting_hardly_moved_are_not_held_to_rounding_to_nearest(base, tmp_path) -> None:
    folder = made(tmp_path, "modelopt", NVFP4, change("weight", hardly_fitted, "transformer_blocks.0.ff.net.2"))
    report = inspect_path(folder, base)[""]
    assert report.is_sound, [fault for fault in report.faults if fault.is_error]


def trained_on(state: Tensors) -> Tensors:
    """Weights of another training, all of them near these."""
    g, found = torch.Generator().manual_seed(7), {}
    for name, value in state.items():
        noise = torch.randn(value.shape, generator=g) * value.float().std() * 0.3
        found[name] = (value.float() + noise).bfloat16() if value.ndim == 2 else value
    return found


def without_low_bits(module: str, tensors: Tensors) -> None:
    tensors["weight"] = (tensors["weight"].view(torch.uint8) & 0xF8).view(torch.float8_e4m3fn)


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "state"), [(None, trained_on), (without_low_bits, dict)])
def test_what_is_further_off_than_rounding_in_most_linears_is_not_the_bases(broken, state, base, tmp_path) -> None:
    """Another training, or damage of all layers: numbers do not tell them apart, and neither is taken for the base."""
    folder = made(tmp_path, "modelopt", FP8, broken, state=state(base_state()))
    report = inspect_path(folder, base)[""]
    assert not report.is_sound and kinds(report)["differs"] > 20
    with pytest.raises(ValueError, match="differs: error"):
        import_model(folder, tmp_path / "out", base)
    tuned = tmp_path / "tuned"
    shutil.copytree(base, tuned)
    save_file(state(base_state()), tuned / "diffusion_pytorch_model.safetensors")
    assert inspect_path(folder, tuned)[""].is_sound == (broken is None)


def test_a_cast_to_fp8_may_lose_what_it_loses_of_the_bases_small_numbers(base, tmp_path) -> None:
    name, state = "transformer_blocks.0.attn.to_q.bias", base_state()
    small = state | {name: (state[name].float() / state[name].float().abs().max() * 0.0147).bfloat16()}
    plain = tmp_path / "base"
    shutil.copytree(base, plain)
    save_file(small, plain / "diffusion_pytorch_model.safetensors")
    cast = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in small.items()}
    assert (cast[name].float() - small[name].float()).norm() > 0.05 * small[name].float().norm()
    report = inspect_path(folder_of(tmp_path / "theirs", cast), plain)[""]
    assert report.is_sound, report.faults
    cast[name] = (small[name].float() * 1.15).to(torch.float8_e4m3fn)
    assert not inspect_path(folder_of(tmp_path / "off", cast), plain)[""].is_sound


@pytest.mark.slow
def test_scales_of_activations_are_said_not_to_be_proved(base, tmp_path) -> None:
    folder = made(tmp_path, "modelopt", STATIC, change("input_scale", lambda scale: scale * 100))
    report = inspect_path(folder, base)[""]
    assert report.is_sound and report.unproved[0].startswith(f"input scales of {len(report.layers)} layers")
    (done,) = import_model(folder, tmp_path / "out", base)
    assert done.unproved == report.unproved and not done.notes
    said = CliRunner().invoke(cli, ["inspect", str(folder), "--base", str(base)]).output
    assert "not proved" in said and "nothing is wrong in what the base can prove" in said.splitlines()[-1]


# --- readers


def test_a_scale_for_each_block_is_told_from_one_for_each_row_by_its_shape() -> None:
    """16,384 columns of 128 blocks: as many scales as the layer has rows."""
    weight = torch.randn(128, 128 * 128, generator=torch.Generator().manual_seed(0))
    codes, scale, dense = in_blocks(weight)
    assert scale.numel() == len(weight)
    entry = {"format": "float-quantized", "input_activations": None}
    found = DIALECTS["compressed_tensors"].decode({"weight": codes, "weight_scale": scale}, (128, 128 * 128), entry)
    assert isinstance(found, QuantTensors) and torch.equal(found.collapsed()[0], dense)


def test_zero_points_of_one_packed_row(tmp_path) -> None:
    held, dense, words = asymmetric(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    assert held["weight_zero_point"].shape[0] == 1
    entry = {"format": "pack-quantized", "weights": words, "input_activations": None}
    found = DIALECTS["compressed_tensors"].decode(held, (8, 64), entry)
    assert isinstance(found, Plain) and torch.equal(found.weight, dense)


def test_one_scale_of_several_blocks_is_refused_with_a_base_or_without(base, tmp_path) -> None:
    """Each window of 128 rows and columns could be read; the layer cannot."""
    name, state = "transformer_blocks.0.ff.net.0.proj", base_state()
    held, _, said = of_source("fp8_pb_wo", state[f"{name}.weight"])
    held["weight_scale"] = held["weight_scale"].max()
    folder = folder_of(tmp_path / "theirs", state | {f"{name}.{part}": value for part, value in held.items()}, **said)
    for given in (None, base):
        report = inspect_path(folder, given)[""]
        assert [(fault.kind, fault.layer) for fault in report.faults if fault.is_error] == [("unreadable", name)]


def test_a_missing_input_scale_does_not_hide_why_a_layer_is_unreadable(base, tmp_path) -> None:
    def broken(module: str, tensors: Tensors) -> None:
        if module.endswith("attn.to_q"):
            del tensors["input_scale"]
            tensors["weight_scale"] = tensors["weight_scale"][:, :-1].contiguous()

    report = inspect_path(made(tmp_path, "modelopt", NVFP4, broken), base)[""]
    assert kinds(report)["unreadable"] == kinds(report)["missing input_scale"] > 1


LEFT: dict[str, Tensors] = {
    "factors of another size": {"pre_quant_scale": torch.ones(3)},
    "factors that are NaN": {"pre_quant_scale": torch.full((64,), torch.nan)},
    "one matrix of two": {"svdquant_lora_a": torch.zeros(4, 64)},
    "matrices that do not fit": {"svdquant_lora_a": torch.zeros(4, 3), "svdquant_lora_b": torch.zeros(3, 4)},
}


@pytest.mark.often(1)
@pytest.mark.parametrize("case", LEFT)
def test_damage_of_what_modelopt_took_out_of_a_weight(case, base, tmp_path) -> None:
    name, folder = "context_embedder", made(tmp_path, "modelopt", FP8)
    file = folder / "diffusion_pytorch_model.safetensors"
    k = base_state()[f"{name}.weight"].shape[1]
    left = {f"{name}.{part}": t[..., :k] if t.shape[-1] == 64 else t for part, t in LEFT[case].items()}
    save_file(load_file(file) | {part: tensor.contiguous() for part, tensor in left.items()}, file, {"format": "pt"})
    for given in (None, base):
        assert kinds(inspect_path(folder, given)[""])["unreadable"] == 1
        with pytest.raises(ValueError, match=f"{name}.*is damaged; get the file again"):
            import_model(folder, tmp_path / "out", given)


def odd(suffix: str, tensor: Tensor) -> Break:
    return change(suffix, lambda _: tensor.clone())


def bare(*kept: str) -> Break:
    def broken(module: str, tensors: Tensors) -> None:
        for name in [name for name in tensors if name not in kept]:
            del tensors[name]

    return broken


WORDS = ("compressed_tensors", "int4-16bit")
ODD: dict[str, tuple[str, str, Break]] = {
    "a shape that is no number": (
        "compressed_tensors",
        "int4-16bit",
        odd("weight_shape", torch.tensor([torch.inf] * 2)),
    ),
    "a complex shape": ("compressed_tensors", "int4-16bit", odd("weight_shape", torch.zeros(2, dtype=torch.complex64))),
    "one scale for all": ("nunchaku_lite", "int4-int4", odd("wscales", torch.ones(()))),
    "a global scale in fp8": (
        *("modelopt", NVFP4),
        change("weight_scale_2", lambda t: torch.ones(()).to(torch.float8_e4m3fn)),
    ),
    "block scales of no size": ("modelopt", "mxfp4-mxfp4", change("weight_scale", lambda t: t[:, :0].contiguous())),
    "scales alone": ("modelopt", NVFP4, bare("weight_scale", "weight_scale_2")),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("case", ODD)
def test_odd_tensors_end_in_a_sentence(case, base, tmp_path) -> None:
    dialect, scheme, broken = ODD[case]
    path = made(tmp_path, dialect, scheme, broken)
    for given in (None, base):
        assert not inspect_path(path, given)[""].is_sound
        with pytest.raises(ValueError, match=str(path)):
            import_model(path, tmp_path / "out", given)


def test_a_checkpoint_of_fluxq_whose_codes_are_gone_is_unreadable(plain_checkpoint, tmp_path) -> None:
    folder = shutil.copytree(plain_checkpoint("nvfp4") / "transformer", tmp_path / "transformer")
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    scaled = next(name for name in tensors if name.endswith(".weight_scale"))
    codes = scaled.removesuffix("_scale")
    tensors[codes.removesuffix("weight") + "qweight"] = tensors.pop(codes)
    save_file(tensors, file, {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    assert not inspect_path(folder)[""].is_sound


@pytest.mark.often(1)
@pytest.mark.parametrize("value", [1e-30, 1e30])
def test_an_input_scale_of_no_activations_is_refused_everywhere(value: float, base, tmp_path) -> None:
    def broken(module: str, tensors: Tensors) -> None:
        tensors["input_scale"] = torch.tensor(value)

    folder = made(tmp_path, "modelopt", STATIC, broken)
    for given in (None, base):
        report = inspect_path(folder, given)[""]
        assert {fault.kind for fault in report.faults if fault.is_error} == {"no activations'"}
        with pytest.raises(ValueError, match=r"not a scale of any activations|no activations'"):
            import_model(folder, tmp_path / "out", given)
    assert not (tmp_path / "out").exists()
