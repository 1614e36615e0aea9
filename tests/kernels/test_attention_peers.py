"""Attention of other packages: their calls, by modules of the same signatures, and when the dispatcher takes one."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base import settings
from fluxq.kernels import attention_peers, dispatch, findings, launch, proofs, timing
from fluxq.kernels.attention import kernel, warp_specialized
from fluxq.kernels.attention.op import attention_fp8
from fluxq.kernels.attention_peers import PEERS, coded, peers_for
from fluxq.kernels.compare import Sample
from fluxq.kernels.gluon_interpreter import Fault
from fluxq.kernels.interpreter import interpreting

GPU = {"gpu": "NVIDIA H200", "chip": "sm_90", "driver": "1", "fluxq": "1", "torch": "1", "triton": "1"}


def heads(tokens: int = 70, seed: int = 0) -> Tensor:
    return torch.randn(2, tokens, 2, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


Q, K, V = heads(), heads(130, 1) + 4, heads(130, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    """SageAttention 2.2.0: sageattention/core.py."""
    assert tensor_layout == "NHD" and not is_causal and not return_lse and not kwargs
    return exact(q, k, v, sm_scale).to(q.dtype)


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """FlashAttention-3: hopper/flash_attn_interface.py; scales are (B, heads), and o of fp8 is in bf16."""
    assert q_descale.shape == k_descale.shape == v_descale.shape == (2, 2) and q_descale.dtype == torch.float32
    assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn} and not causal and qv is None
    values = (
        x.float() * scale[:, None, :, None]
        for x, scale in zip((q, k, v), (q_descale, k_descale, v_descale), strict=True)
    )
    return exact(*values, softmax_scale).bfloat16()


class Graph:
    """cudnn.pygraph of nvidia-cudnn-frontend 1.32 with one node, which `execute` computes."""

    def __init__(self, io_data_type=None, intermediate_data_type=None, compute_data_type=None, handle=None):
        assert (io_data_type, intermediate_data_type, compute_data_type, handle) == ("e4m3", "fp32", "fp32", "handle")

    def tensor(self, dim, stride=None, data_type=None, name=""):
        return Node(name, dim, stride, data_type)

    def sdpa_fp8(self, **named):
        self.named = named
        self.outputs = [Node("o"), None, Node("amax_s"), Node("amax_o")]
        return self.outputs

    def build(self, heuristics):
        assert heuristics == ["A", "FALLBACK"] and self.outputs[0].output and self.outputs[0].data_type == "e4m3"

    def get_workspace_size(self):
        return 1024

    def execute(self, filled, workspace, handle=None):
        assert handle == "handle" and workspace.numel() == 1024 and len(filled) == 12
        given = {name: filled[node] for name, node in self.named.items() if isinstance(node, Node)}
        for name in ("q", "k", "v"):
            node, tensor = self.named[name], given[name].transpose(1, 2)
            assert (
                [*tensor.shape] == node.dim
                and [*tensor.stride()] == node.stride
                and tensor.dtype == torch.float8_e4m3fn
            )
        assert given["descale_s"] * given["scale_s"] == 1 and not self.named["use_causal_mask"]
        values = (given[name].float() * given[f"descale_{name}"] for name in ("q", "k", "v"))
        o = exact(*values, self.named["attn_scale"]) * given["scale_o"]
        assert o.abs().max() <= 448  # what fp8 holds
        filled[self.outputs[0]].copy_(o.to(torch.float8_e4m3fn))


class Node:
    def __init__(self, name, dim=None, stride=None, data_type=None):
        self.name, self.dim, self.stride, self.data_type, self.output = name, dim, stride, data_type, False

    def set_output(self, value):
        self.output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self


@pytest.fixture
def installed(monkeypatch) -> Iterator[None]:
    """All packages, in the version 2.2.0, by stand-ins."""
    stand_ins: dict[str, dict[str, Any]] = {
        "sageattention": {"sageattn": sageattn},
        "flash_attn_interface": {"flash_attn_func": flash_attn_func},
        "cudnn": {
            "pygraph": Graph,
            "data_type": SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32"),
            "heur_mode": SimpleNamespace(A="A", FALLBACK="FALLBACK"),
            "create_handle": lambda: "handle",
            "set_stream": lambda handle, stream: None,
        },
    }
    for name, parts in stand_ins.items():
        module: Any = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)
        for part, value in parts.items():
            setattr(module, part, value)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention_peers, "package_version", lambda package: "2.2.0")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    forget()
    yield
    forget()


def forget() -> None:
    peers_for.cache_clear()
    attention_peers._cudnn_graph.cache_clear()
    dispatch.forget()


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("row", PEERS, ids=lambda row: f"{row.package} {row.codes[0]}")
def test_each_call_is_near_exact_attention(row, scale: float | None, installed) -> None:
    found = row.call(Q, K, V, scale)
    assert found.shape == Q.shape and found.dtype == Q.dtype and found.is_contiguous()
    assert not kernel.compare_peer(found, Q, K, V, scale, row.codes[0]).is_wrong
    assert kernel.compare_peer(found.roll(1, 1), Q, K, V, scale, row.codes[0]).is_wrong


def test_codes_have_a_scale_that_takes_the_largest_to_448_and_zeros_one_of_1() -> None:
    x = torch.stack([torch.full((2, 3), 7.0), torch.zeros(2, 3)])
    codes, scale = coded(x, (1, 2))
    assert scale.flatten().tolist() == [7 / 448, 1.0] and codes.float().unique().tolist() == [0.0, 448.0]


def test_a_package_is_offered_for_its_codes_chips_and_dtypes(installed) -> None:
    assert [*peers_for("fp8", "sm_90", torch.bfloat16)] == ["flash_attn_3 2.2.0", "nvidia-cudnn-frontend 2.2.0"]
    assert [*peers_for("int8", "sm_90", torch.bfloat16)] == ["sageattention 2.2.0"]
    assert [*peers_for("int8-16bit", "sm_86", torch.bfloat16)] == ["sageattention 2.2.0"]
    assert not peers_for("fp8", "sm_120", torch.bfloat16)
    with findings.instead(document({"attention_fp8": 30.0, SAGE: 20.0})):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            chosen = SAGE if dtype == torch.bfloat16 else "attention_fp8"
            assert dispatch.choose_attention("int8", 64, "sm_90", 140, 128, 130, dtype).implementation == chosen


def test_without_packages_there_is_none() -> None:
    forget()
    assert not any(peers_for(codes, "sm_90", torch.bfloat16) for codes in ("fp8", "int8"))


def document(us: Mapping[str, float | None], why: str = "") -> dict[str, Any]:
    """A file of doctor's with the times of attention of a shape, of which the package's may be wrong."""
    row = {"format": "int8-64", "scheme": "attention int8-64", "m": 140, "n": 128, "k": 130, "share": 0.5}
    rows = [row | {"op": op, "us": each, "why": why if op != "attention_fp8" else ""} for op, each in us.items()]
    return findings.document(GPU, rows)


SAGE = "sageattention 2.2.0"
CASES = {
    "faster": ({"attention_fp8": 30.0, SAGE: 20.0}, "", SAGE),
    "slower": ({"attention_fp8": 20.0, SAGE: 30.0}, "", "attention_fp8"),
    "wrong": ({"attention_fp8": 30.0, SAGE: 20.0}, "errors of heads", "attention_fp8"),
    "of another version": ({"attention_fp8": 30.0, "sageattention 2.1.1": 20.0}, "", "attention_fp8"),
    "never measured": ({}, "", "attention_fp8"),
    "timed without ours": ({"attention_fp8": None, SAGE: 20.0}, "", "attention_fp8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_package_is_taken_where_doctor_found_it_right_and_faster(case: str, installed, monkeypatch) -> None:
    us, why, expected = CASES[case]
    called: list[str] = []
    monkeypatch.setattr(
        sys.modules["sageattention"], "sageattn", lambda *x, **_: called.append("sage") or sageattn(*x, "NHD")
    )
    with findings.instead(document(us, why)), interpreting():
        dispatch.forget()
        assert kernel.cells(Q, K, V, None, "int8", chip="sm_90") == ((expected, "int8-64"),)
        found = launch.launcher("attention_fp8")(Q, K, V, None, "int8", chip="sm_90")
        assert bool(called) == (expected == SAGE)
        assert not kernel.compare(found, Q, K, V, None, "int8", chip="sm_90", sample=Sample()).is_wrong
    dispatch.forget()


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_package_found_wrong_is_not_used_again(strict: bool, installed, monkeypatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        sys.modules["sageattention"], "sageattn", lambda q, *_, **__: called.append("sage") or torch.zeros_like(q)
    )
    monkeypatch.setattr(proofs, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(proofs, "_must_not_wait", lambda: False)
    monkeypatch.setattr(findings, "_withdrawn", {})
    monkeypatch.setattr(settings, "_set", {"verify": "always", "strict": strict})
    call = Q, K, V, None, "int8"
    with findings.instead(document({"attention_fp8": 30.0, SAGE: 20.0})), interpreting():
        dispatch.forget()
        with pytest.raises(RuntimeError, match="something wrong") if strict else nullcontext():
            proofs.verified("attention_fp8", call, launch.computed_by("attention_fp8", call, "sm_90"), "sm_90")
        found = proofs.verified("attention_fp8", call, launch.computed_by("attention_fp8", call, "sm_90"), "sm_90")
        assert called == ["sage"] and findings.wrong(SAGE, "int8-64", "sm_90")
        assert not kernel.compare(found, *call, chip="sm_90", sample=Sample()).is_wrong
    dispatch.forget()


@pytest.mark.slow
def test_doctor_judges_packages_beside_our_kernel(installed) -> None:
    from fluxq.jobs import doctor
    from fluxq.runtime.launches import Launch, Machine

    machine = Machine(torch.device("cpu"), "sm_90", "speed", torch.bfloat16)
    request = doctor.Request(machine, None, {}, None)
    for codes, names in (
        ("int8", [SAGE]),
        ("fp8", [dispatch.WARPS_APART, "flash_attn_3 2.2.0", "nvidia-cudnn-frontend 2.2.0"]),
    ):
        examination = doctor.Examination(findings.machine_of(machine.device, machine.chip))
        call = Launch("attention_fp8", (Q, K, V, None, codes), "here")
        with findings.keeping(examination.machine) as keeper, findings.instead(), interpreting():
            dispatch.forget()
            rows = doctor._judged(call, request, examination, keeper)
        assert [row["op"] for row in rows] == ["attention_fp8", *names]
        assert not examination.left_out and not examination.uncompared
        form = "64" if codes == "fp8" else "int8-64"
        assert {(row["format"], row["scheme"], row["why"]) for row in rows} == {(form, f"attention {form}", "")}
        assert {(row["m"], row["n"], row["k"]) for row in rows} == {(140, 128, 130)}


def judged_in_fp8(chip: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of doctor's for an attention in fp8, and what it left out."""
    from fluxq.jobs import doctor
    from fluxq.runtime.launches import Launch, Machine

    machine = Machine(torch.device("cpu"), chip, "speed", torch.bfloat16)
    request = doctor.Request(machine, None, {}, None)
    examination = doctor.Examination(findings.machine_of(machine.device, machine.chip))
    call = Launch("attention_fp8", (Q, K, V, None, "fp8"), "here")
    with findings.keeping(examination.machine) as keeper, findings.instead(), interpreting(chip):
        dispatch.forget()
        return doctor._judged(call, request, examination, keeper), examination.left_out


@pytest.mark.slow
def test_doctor_judges_the_kernel_with_warps_apart_beside_the_other_kernel_on_hopper_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, left_out = judged_in_fp8("sm_90")
    assert [(row["op"], row["format"], row["why"]) for row in rows] == [
        ("attention_fp8", "64", ""),
        (dispatch.WARPS_APART, "64", ""),
    ]
    assert not left_out
    rows, left_out = judged_in_fp8("sm_89")
    assert [row["op"] for row in rows] == ["attention_fp8"] and not left_out
    monkeypatch.setattr(dispatch, "warps_refusal", lambda *call: "its Gluon was never compiled with Triton 3.7")
    rows, left_out = judged_in_fp8("sm_90")
    assert [row["op"] for row in rows] == ["attention_fp8"]
    assert left_out == {f"{dispatch.WARPS_APART} in here": "its Gluon was never compiled with Triton 3.7"}


@pytest.mark.slow
def test_doctor_finds_the_kernel_with_warps_apart_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = warp_specialized.attend
    monkeypatch.setattr(warp_specialized, "attend", lambda *x: attend(*x) * 1.05)
    rows, _ = judged_in_fp8("sm_90")
    assert [(row["op"], bool(row["why"])) for row in rows] == [("attention_fp8", False), (dispatch.WARPS_APART, True)]


@pytest.mark.slow
def test_a_fault_of_the_kernel_with_warps_apart_makes_it_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*operands: Any) -> Tensor:
        raise Fault("deadlock in program (0, 0)")

    monkeypatch.setattr(warp_specialized, "attend", attend)
    rows, left_out = judged_in_fp8("sm_90")
    found = [(dispatch.WARPS_APART, "Fault: deadlock in program (0, 0)")]
    assert [(row["op"], row["why"]) for row in rows] == [("attention_fp8", ""), *found] and not left_out


def judged_as_on_a_gpu(monkeypatch, codes: str = "int8") -> tuple[list[dict[str, Any]], Any]:
    """Rows and examination of a launch."""
    from fluxq.jobs import doctor
    from fluxq.runtime.launches import Launch, Machine

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    device: Any = SimpleNamespace(type="cuda", index=0)
    request = doctor.Request(Machine(device, "sm_90", "speed", torch.bfloat16), None, {}, None)
    examination = doctor.Examination({"gpu": findings.INTERPRETER, "chip": "sm_90"})
    call = Launch("attention_fp8", (Q, K, V, None, codes), "here")
    with findings.keeping(examination.machine) as keeper, findings.instead(), interpreting():
        dispatch.forget()
        return doctor._judged(call, request, examination, keeper), examination


def timed(turns: dict[str, Any], device: Any, repeats: int) -> dict[str, Any]:
    if {SAGE, dispatch.WARPS_APART} & turns.keys():
        raise RuntimeError("operation not permitted when stream is capturing")
    return {name: SimpleNamespace(us=10.0) for name in turns}


@pytest.mark.slow
@pytest.mark.parametrize("error", [ImportError, NotImplementedError, AssertionError, TypeError])
def test_a_package_that_cannot_be_used_is_left_out_and_not_wrong(error: type, installed, monkeypatch) -> None:
    def attend(*q: Tensor, **how: Any) -> Tensor:
        raise error("libcudart.so.12 is not there")

    monkeypatch.setattr(timing, "measure", timed)
    monkeypatch.setattr(timing, "sets_of_operands", lambda size, device: 1)
    monkeypatch.setattr(sys.modules["sageattention"], "sageattn", attend)
    rows, examination = judged_as_on_a_gpu(monkeypatch)
    assert [(row["op"], row["why"], row["us"]) for row in rows] == [("attention_fp8", "", 10.0)]
    assert examination.left_out == {f"{SAGE} in here": f"{error.__name__}: libcudart.so.12 is not there"}


@pytest.mark.slow
@pytest.mark.parametrize(("codes", "name"), [("int8", SAGE), ("fp8", dispatch.WARPS_APART)])
def test_what_cannot_be_timed_takes_no_times_of_the_others(codes: str, name: str, installed, monkeypatch) -> None:
    monkeypatch.setattr(timing, "measure", timed)
    monkeypatch.setattr(timing, "sets_of_operands", lambda size, device: 1)
    rows, examination = judged_as_on_a_gpu(monkeypatch, codes)
    us = {row["op"]: row["us"] for row in rows}
    assert us.pop(name) is None and us.pop("attention_fp8") == 10.0 and not any(row["why"] for row in rows)
    assert rows[0]["beside"] == us | {"bf16": 10.0}
    why = "operation not permitted when stream is capturing"
    assert examination.left_out == {f"timing of {name} in here": why}


def test_warmup_compiles_our_kernel_beside_the_package_that_is_chosen(installed, monkeypatch) -> None:
    from fluxq.runtime.warmup import AttentionKind, Machine, warm_up

    ours: list[str] = []
    by_kernel = kernel.by_kernel
    monkeypatch.setattr(kernel, "by_kernel", lambda *x, **how: ours.append("ours") or by_kernel(*x, **how))
    rows = document({"attention_fp8": 30.0, SAGE: 20.0})
    for row in rows["rows"]:
        row |= {"m": 64, "k": 64}
    with findings.instead(rows), interpreting():
        dispatch.forget()
        kinds = [AttentionKind(2, 64, "int8")]
        warmed = warm_up(kinds, [64], Machine(torch.device("cpu"), "sm_90", "speed", torch.bfloat16))
    assert [each.implementation for each in warmed] == ["attention_fp8", SAGE] and ours == ["ours", "ours"]
    dispatch.forget()


@pytest.mark.parametrize("here", [{}, {"attention_fp8": None, SAGE: None}], ids=["never judged", "never timed"])
def test_times_of_other_gpus_choose_no_package(here: dict[str, float | None], installed, monkeypatch) -> None:
    monkeypatch.setattr(findings, "_shipped", lambda: (document({"attention_fp8": 30.0, SAGE: 20.0}),))
    with findings.instead(document(here)):
        dispatch.forget()
        assert dispatch.choose_attention("int8", 64, "sm_90", 140, 128, 130, Q.dtype).implementation == "attention_fp8"


def test_a_call_of_a_package_has_no_plan(installed, monkeypatch) -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    from fluxq.kernels.plans import watched

    def unseen(q: Tensor, *others: Tensor, **how: Any) -> Tensor:  # as an extension writes into a new tensor
        o = q.new_empty(q.shape)
        with _disable_current_modes():
            return o.copy_(sageattn(q, *others, **how))

    monkeypatch.setattr(sys.modules["sageattention"], "sageattn", unseen)

    operands = [x.clone() for x in (Q, K, V)]
    found, plan = watched(lambda: kernel.by_peer(SAGE, *operands, None, "int8", chip="sm_90"), operands)
    assert plan is None and torch.equal(found, sageattn(Q, K, V, "NHD"))


def test_a_scale_that_is_not_above_0_is_refused(installed) -> None:
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        kernel.by_peer(SAGE, Q, K, V, -1.0, "int8", chip="sm_90")
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        attention_fp8(Q, K, V, -1.0)
