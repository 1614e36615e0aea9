"""Values and projections of an attention: sound where all agree on factors and mean, a fault where one does not."""

from pathlib import Path

import pytest
import torch
from exchange_files import Tensors, base_state, write_base
from torch import Tensor

from fluxq.quantize.exchange.inspect import inspect_path
from tests.exchange.test_inspect import ATTENTION, FP8, NVFP4, made

VALUES, PROJECTIONS = ("to_v", "add_v_proj"), ("to_out.0", "to_add_out")
K = 128
FREE = torch.linspace(0.3, 3, K)[torch.randperm(K, generator=torch.Generator().manual_seed(3))]
MEAN = 0.3 * torch.randn(K, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "transformer")


def folded(factors: Tensor, carried: Tensor | None = None, taken_back: Tensor | None = None) -> Tensors:
    """Return a state with factors and a mean. carried, taken_back: other factors of values and of projections."""
    carried = factors if carried is None else carried
    taken_back = factors if taken_back is None else taken_back
    state, changed = base_state(), {}
    for name in VALUES:
        path = f"{ATTENTION}.{name}"
        changed[f"{path}.weight"] = state[f"{path}.weight"].float() / carried[:, None]
        changed[f"{path}.bias"] = (state[f"{path}.bias"].float() - MEAN) / carried
    for name in PROJECTIONS:
        path = f"{ATTENTION}.{name}"
        weight = state[f"{path}.weight"].float()
        changed[f"{path}.weight"] = weight * taken_back
        changed[f"{path}.bias"] = state[f"{path}.bias"].float() + weight @ MEAN
    return state | {name: value.bfloat16() for name, value in changed.items()}


def of_base(*names: str, scaled: Tensor | None = None) -> Tensors:
    """Return tensors of the attention as the base has them, or over factors."""
    state = base_state()
    tensors = {f"{ATTENTION}.{name}": state[f"{ATTENTION}.{name}"] for name in names}
    return {name: (t.float() / (1 if scaled is None else scaled)).bfloat16() for name, t in tensors.items()}


def at(factors: Tensor, channels: slice, values: Tensor) -> Tensor:
    changed = factors.clone()
    changed[channels] = values
    return changed


IN_V, IN_TEXT, OUT, OUT_TEXT = "to_v", "add_v_proj", "to_out.0", "to_add_out"
# What the file holds, and the layers that are wrong then.
CASES = {
    "sound": (folded, set()),
    "one value lacks the mean": (lambda f: folded(f) | of_base("to_v.bias", scaled=f), {IN_V}),
    "biases of values are the base's": (lambda f: folded(f) | of_base("to_v.bias", "add_v_proj.bias"), {IN_V, IN_TEXT}),
    "squared": (lambda f: folded(f, taken_back=f * f), {IN_V, IN_TEXT, OUT, OUT_TEXT}),
    "one head of values reversed": (lambda f: folded(f, carried=at(f, slice(32), f[:32].flip(0))), {OUT, OUT_TEXT}),
    "one head of projections reversed": (lambda f: folded(f, taken_back=at(f, slice(32), f[:32].flip(0))), {OUT}),
    "one channel of values off by 2": (lambda f: folded(f, carried=at(f, slice(7, 8), 2 * f[7:8])), {OUT}),
    "one channel of projections off by 2": (lambda f: folded(f, taken_back=at(f, slice(7, 8), 2 * f[7:8])), {OUT}),
    "the other value lacks the mean": (lambda f: folded(f) | of_base("add_v_proj.bias", scaled=f), {IN_TEXT}),
    "one projection lacks the mean": (lambda f: folded(f) | of_base("to_out.0.bias"), {OUT}),
    "the other projection lacks the mean": (lambda f: folded(f) | of_base("to_add_out.bias"), {OUT_TEXT}),
    "one projection lacks the factors": (lambda f: folded(f) | of_base("to_out.0.weight"), {OUT}),
}


@pytest.mark.often(4)
@pytest.mark.parametrize(("scheme", "case"), [(scheme, case) for scheme in (FP8, NVFP4) for case in CASES])
def test_values_and_projections_agree(scheme, case, base, tmp_path):
    factors = FREE if scheme == FP8 else FREE.log2().round().exp2()
    state, wrong = CASES[case]
    report = inspect_path(made(tmp_path, "modelopt", scheme, state=state(factors)), base)[""]
    found = {fault.layer.removeprefix(f"{ATTENTION}.") for fault in report.faults if fault.is_error}
    assert found >= wrong and report.is_sound == (not wrong), report.faults
    assert found <= {IN_V, IN_TEXT, OUT, OUT_TEXT}
