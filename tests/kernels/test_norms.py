"""adaLN and q/k norm ops: as torch.library ops, and bit for bit what diffusers' own layers compute on this CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounding import norm_packed
from torch import Tensor

from fluxq.kernels.adaln_quantize import op as adaln
from fluxq.kernels.qk_norm_rope import op as rope
from fluxq.kernels.quantize_activation import op as quantizer
from fluxq.kernels.tensor import pack_named, unpack_named

STEPS = ("layer", 1e-6, {"format": ""})  # norm, eps and rounding


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5).to(dtype)


def operands(m: int = 6, d: int = 64, images: int = 2, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """x, scale, shift, branch, gate; the modulation is chunked from one tensor."""
    scale, shift, gate = rows(images, 3 * d, dtype=dtype, seed=1).chunk(3, 1)
    return rows(m, d, dtype=dtype), scale, shift, rows(m, d, dtype=dtype, seed=2), gate


def heads(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """q and k (2, 5, 3, 16) as views into one projection, their weights, and cos and sin of 9 positions."""
    qkv = rows(2, 5, 3 * 48, dtype=dtype)
    q, k, _ = (part.unflatten(-1, (3, 16)) for part in qkv.chunk(3, -1))
    angle = torch.linspace(0, 6, 9 * 8).reshape(9, 8).repeat_interleave(2, 1)
    return q, k, rows(16, dtype=dtype, seed=1), rows(16, dtype=dtype, seed=2), angle.cos(), angle.sin()


def normed(rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope` of `heads()`, with so many rows of cos and sin."""
    q, k, *weights, cos, sin = heads()
    return rope.qk_norm_rope(
        q, k, *pack_named(rope.RopeTensors(cos[:rows], sin[:rows], *weights, q)), 1e-6, True, False
    )


ADALN_CASES = {
    "16 bit": ({}, STEPS),
    "no branch": ({"branch": None, "gate": None}, STEPS),
    "rms with a weight": ({"weight": rows(64)}, ("rms", 1e-6, {"format": "int8"})),
    "every step": (
        {"input_scale": torch.tensor(0.02), "smooth": torch.rand(64) + 0.5, "mean": torch.rand(64)},
        ("layer", 1e-6, {"format": "nvfp4", "hadamard": 32, "four_over_six": True, "swizzled": True}),
    ),
    "own global scale": ({}, ("layer", 1e-6, {"format": "nvfp4"})),
    "fp8": ({"input_scale": torch.full((6, 1), 0.1)}, ("layer", 1e-6, {"format": "fp8"})),
    "mxfp4": ({"branch": None, "gate": None}, ("rms", 1e-6, {"format": "mxfp4", "hadamard": 16, "swizzled": True})),
}


def arguments(case: str) -> tuple:
    changed, (norm, eps, how) = ADALN_CASES[case]
    x, scale, shift, branch, gate = operands()
    named = {"scale": scale, "shift": shift, "branch": branch, "gate": gate}
    return x, *norm_packed(**named | changed | how), norm, eps


def compiled(op: Callable, arguments: tuple) -> tuple[Tensor, ...]:
    torch._dynamo.reset()  # or it gives up after eight kinds of arguments
    return torch.compile(op, fullgraph=True, backend="aot_eager")(*arguments)


@pytest.mark.often(1)
@pytest.mark.parametrize("case", ADALN_CASES)
def test_adaln_quantize_is_a_well_formed_op(case: str) -> None:
    torch.library.opcheck(adaln.adaln_quantize, arguments(case))
    found = compiled(adaln.adaln_quantize, arguments(case))
    for ours, theirs in zip(found, adaln.adaln_quantize(*arguments(case)), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.often(1)
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("steps", [(1e-6, True, False), (1e-5, False, True)])
def test_qk_norm_rope_is_a_well_formed_op(steps: tuple, weighted: bool, streams: int) -> None:
    q, k, *weights, cos, sin = heads()
    weights = weights if weighted else (None, None)
    if streams == 1:
        given = rope.RopeTensors(cos[:5], sin[:5], *weights)
    else:
        given = rope.RopeTensors(cos, sin, *weights, k, q[:, :4], k[:, :4], k[:, 1:], *weights)
    arguments = q, k, *pack_named(given), *steps
    torch.library.opcheck(rope.qk_norm_rope, arguments)
    found = compiled(rope.qk_norm_rope, arguments)
    for ours, theirs in zip(found, rope.qk_norm_rope(*arguments), strict=True):
        assert torch.equal(ours, theirs) and ours.is_contiguous()


@pytest.mark.parametrize("case", ADALN_CASES)
def test_codes_are_those_of_v_quantized_by_itself(case: str) -> None:
    x, tensors, rounding, norm, eps = arguments(case)
    codes, scale, global_scale, new = adaln.adaln_quantize(x, tensors, rounding, norm, eps)
    given, how = unpack_named(adaln.NormTensors, tensors, rounding, quantizer.Rounding.parse)
    plain = pack_named(given._replace(input_scale=None, smooth=None, mean=None), quantizer.Rounding())
    v, no_scale, no_global, alone = adaln.adaln_quantize(x, *plain, norm, eps)
    assert torch.equal(new, alone) and no_scale.numel() == no_global.numel() == 0
    if not how.format:
        assert torch.equal(codes, v) and codes.dtype == x.dtype
        return
    expected = quantizer.quantize_activation(v, *pack_named(given.of_rounding, how))
    for ours, theirs in zip((codes, scale, global_scale), expected, strict=False):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_autocast_changes_nothing() -> None:
    expected = *adaln.adaln_quantize(*arguments("16 bit")), *normed()
    with torch.autocast("cpu", torch.float16):
        found = *adaln.adaln_quantize(*arguments("16 bit")), *normed()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_without_tokens_there_are_no_codes() -> None:
    x, scale, shift, branch, gate = operands()
    for name in ("", "int8", "nvfp4"):
        given = norm_packed(name, scale=scale, shift=shift, branch=branch[:0], gate=gate)
        out = adaln.adaln_quantize(x[:0], *given, "layer", 1e-6)
        assert out[0].shape[0] == 0 and out[3].shape == (0, 64)


def test_arguments_that_do_not_fit_are_named() -> None:
    x, scale, shift, branch, gate = operands()
    given = {"scale": scale, "shift": shift}
    with pytest.raises(ValueError, match="unknown norm 'group', expected one of layer, rms"):
        adaln.adaln_quantize(x, *norm_packed("", **given), "group", 1e-6)
    with pytest.raises(ValueError, match="of branch and gate one is given"):
        adaln.adaln_quantize(x, *norm_packed("", **given, branch=branch), "layer", 1e-6)
    with pytest.raises(ValueError, match=r"scale \(4, 64\) does not split 6 tokens into equal images"):
        adaln.adaln_quantize(x, *norm_packed("", scale=rows(4, 64), shift=rows(4, 64)), "layer", 1e-6)
    with pytest.raises(ValueError, match="format is 'fp3'"):
        adaln.adaln_quantize(x, *norm_packed("fp3", **given, branch=branch, gate=gate), "layer", 1e-6)
    with pytest.raises(ValueError, match="5 tokens, but cos and sin have 6 and 6 rows"):
        normed(6)


# Against diffusers


def modulated(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    branch: Tensor | None = None,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    norm: str = "layer",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor | None]:
    """`modulated_norm` of x (B, S, D)."""
    branch = branch if branch is None else branch.flatten(0, 1)
    given = adaln.NormTensors(scale, shift, branch, gate, weight)
    v, new = adaln.modulated_norm(x.flatten(0, 1), given, norm, eps)
    return v.reshape(x.shape), None if new is None else new.reshape(x.shape)


@pytest.fixture(params=[torch.bfloat16, torch.float32, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def layer(name: str, dtype: torch.dtype, *arguments, **options) -> Any:
    """A layer of diffusers with random weights."""
    normalization = pytest.importorskip("diffusers.models.normalization")
    module = getattr(normalization, name)(*arguments, **options)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


def test_ada_layer_norm_zero_and_the_norm_after_attention(dtype: torch.dtype) -> None:
    """FLUX, FLUX.2, SD3 and Qwen-Image: both halves of a block."""
    module, x, emb = layer("AdaLayerNormZero", dtype, 64), rows(2, 5, 64, dtype=dtype), rows(2, 64, dtype=dtype, seed=1)
    expected, gate, shift_mlp, scale_mlp, _ = module(x, emb=emb)
    shift, scale = module.linear(module.silu(emb)).chunk(6, 1)[:2]
    assert torch.equal(modulated(x, scale, shift)[0], expected)
    attention = rows(2, 5, 64, dtype=dtype, seed=2)
    hidden = x + gate.unsqueeze(1) * attention
    expected = module.norm(hidden) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
    v, new = modulated(x, scale_mlp, shift_mlp, branch=attention, gate=gate)
    assert torch.equal(v, expected) and new is not None and torch.equal(new, hidden)


def test_ada_layer_norm_zero_single(dtype: torch.dtype) -> None:
    """FLUX's single blocks."""
    module, x = layer("AdaLayerNormZeroSingle", dtype, 64), rows(2, 5, 64, dtype=dtype)
    emb = rows(2, 64, dtype=dtype, seed=1)
    shift, scale, _ = module.linear(module.silu(emb)).chunk(3, 1)
    assert torch.equal(modulated(x, scale, shift)[0], module(x, emb)[0])


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_ada_layer_norm_continuous(dtype: torch.dtype, norm: str) -> None:
    """The last norm of FLUX, SD3 and Qwen-Image; with RMSNorm it has a weight."""
    options = {"elementwise_affine": norm == "rms", "eps": 1e-6, "norm_type": f"{norm}_norm"}
    module, x = layer("AdaLayerNormContinuous", dtype, 64, 32, **options), rows(2, 5, 64, dtype=dtype)
    emb = rows(2, 32, dtype=dtype, seed=1)
    scale, shift = module.linear(module.silu(emb)).chunk(2, 1)
    weight = {"weight": module.norm.weight} if norm == "rms" else {}
    v, _ = modulated(x, scale, shift, **weight, norm=norm, eps=1e-6)
    assert torch.equal(v, module(x, emb))


def test_both_modulations_of_sd35(dtype: torch.dtype) -> None:
    """SD3.5's first norm feeds two attentions: one call for each."""
    module, x = layer("SD35AdaLayerNormZeroX", dtype, 64), rows(2, 5, 64, dtype=dtype)
    emb = rows(2, 64, dtype=dtype, seed=1)
    shift, scale, _, _, _, _, shift2, scale2, _ = module.linear(module.silu(emb)).chunk(9, 1)
    first, *_, second, _ = module(x, emb=emb)
    assert torch.equal(modulated(x, scale, shift)[0], first)
    assert torch.equal(modulated(x, scale2, shift2)[0], second)


def test_norm_without_a_shift(dtype: torch.dtype) -> None:
    """Lumina: a shift of zero."""
    module, x = layer("LuminaRMSNormZero", dtype, 64, 1e-5, True), rows(2, 5, 64, dtype=dtype)
    emb = rows(2, 64, dtype=dtype, seed=1)
    scale = module.linear(module.silu(emb)).chunk(4, 1)[0]
    v, _ = modulated(x, scale, torch.zeros_like(scale), weight=module.norm.weight, norm="rms", eps=1e-5)
    assert torch.equal(v, module(x, emb)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("images", [2, 10])  # 10: Wan 2.2 modulates each token
def test_fp32_modulation_of_wan(dtype: torch.dtype, images: int) -> None:
    norm = layer("FP32LayerNorm", torch.float32, 64, 1e-6, elementwise_affine=False)
    x, attention = rows(2, 5, 64, dtype=dtype), rows(2, 5, 64, dtype=dtype, seed=2)
    scale, shift, gate = rows(images, 192, dtype=torch.float32, seed=1).chunk(3, 1)
    by_token = (t.reshape(2, -1, 64) for t in (scale, shift, gate))
    scale_of, shift_of, gate_of = by_token
    hidden = (x.float() + attention.float() * gate_of).type_as(x)
    expected = (norm(hidden.float()) * (1 + scale_of) + shift_of).type_as(x)
    v, new = modulated(x, scale, shift, branch=attention, gate=gate)
    assert torch.equal(v, expected) and new is not None and torch.equal(new, hidden)


@pytest.mark.parametrize("dim", [-1, -2])
def test_heads_of_flux(dtype: torch.dtype, dim: int) -> None:
    """torch.nn.RMSNorm, then apply_rotary_emb on neighbours (FLUX) or halves; text takes the first positions."""
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    q, k, *weights, _, _ = heads(dtype)
    ids = torch.cat([torch.zeros(4, 3), torch.arange(15.0).reshape(5, 3)])  # of 4 text and 5 image tokens
    cos, sin = embeddings.get_1d_rotary_pos_embed(16, ids[:, 1], use_real=True, freqs_dtype=torch.float64)
    if dim == -2:
        cos, sin = embeddings.get_1d_rotary_pos_embed(16, ids[:, 1], use_real=True, repeat_interleave_real=False)
    text = [x[:, :4] * 2 for x in (q, k, k)]
    given = rope.RopeTensors(cos, sin, *weights, text[2], q, k, k, *weights[::-1])
    *found, v = rope.qk_norm_rope(*text[:2], *pack_named(given), 1e-6, dim == -1, False)
    streams = zip(text[:2], (q, k), strict=True), zip(weights, weights[::-1], strict=True)
    for parts, own, ours in zip(*streams, found, strict=True):
        both = []
        for x, weight in zip(parts, own, strict=True):
            norm = torch.nn.RMSNorm(16, eps=1e-6).to(dtype)
            norm.weight.data.copy_(weight)
            both.append(norm(x))
        joined = torch.cat(both, 1)  # as diffusers' attention does, before it rotates
        theirs = embeddings.apply_rotary_emb(joined, (cos, sin), use_real_unbind_dim=dim, sequence_dim=1)
        assert torch.equal(ours, theirs)
    assert torch.equal(v, torch.cat([text[2], k], 1))


def test_heads_of_qwen_image(dtype: torch.dtype) -> None:
    """diffusers' RMSNorm, then the complex product: the same numbers but for its own fused multiply-adds."""
    qwen = pytest.importorskip("diffusers.models.transformers.transformer_qwenimage")
    q, k, *weights, cos, sin = heads(dtype)
    cos, sin = cos[:5], sin[:5]
    frequencies = torch.complex(cos, sin)[:, ::2]
    found = rope.qk_norm_rope(q, k, *pack_named(rope.RopeTensors(cos, sin, *weights)), 1e-6, True, True)[:2]
    for x, weight, ours in zip((q, k), weights, found, strict=True):
        norm = layer("RMSNorm", dtype, 16, 1e-6)
        norm.weight.data.copy_(weight)
        v = norm(x)
        theirs = qwen.apply_rotary_emb_qwen(v, frequencies, use_real=False)
        terms = v.float().abs() * cos[:, None].abs() + rope.rotate(v, True).float().abs() * sin[:, None].abs()
        spacing = torch.finfo(dtype).eps * theirs.float().abs() + 2.0**-23 * terms
        assert ((ours.float() - theirs.float()).abs() <= spacing).all()
