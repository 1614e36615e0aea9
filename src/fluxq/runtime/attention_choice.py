"""Attention from 8-bit codes in diffusers' models: `fluxq.set_attention(pipe, "fp8")`, and a recipe's choice.

diffusers' attention processors hand q, k and v to a dispatcher, with the backend that is set on them. Backends are
members of an enum and functions in a table, and there is no entry point for more; so integrations/whole.py adds two of
each, and `transformer.set_attention_backend("fluxq_fp8")` works as with those of diffusers. The choice is an attribute
of processors: it goes with copies and pickles, and `set_attention_backend("native")` takes it away.

They serve self-attention without a mask. Every other call, and every call on a GPU without the kernel, goes to the
backend `native`, which is PyTorch's attention in 16 bit; the log says once why.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.base.modules import uncompiled_path
from fluxq.base.settings import is_strict
from fluxq.kernels.attention.op import CHOICES, FLOATS, OP, attention_fp8, format_of
from fluxq.recipes import computing
from fluxq.runtime.placed import models_of

if TYPE_CHECKING:
    from fluxq.recipes.family import Family

Choice = Literal["16bit", "fp8", "int8", "sage", "flash3"]


def set_attention(model: Any, attention: Choice | Mapping[Any, Sequence[str]]) -> int:
    """Compute the self-attention of a transformer, or of a pipeline's, another way; return how many modules were set.

    attention: "16bit" is diffusers' default again; "fp8" and "int8" are fluxq's, of which "int8" has q and k in int8, p
    and v in fp8, or in fp16 on GPUs that do not multiply fp8; "sage" and "flash3" are diffusers' backends of
    SageAttention and FlashAttention-3, whose packages have to be installed. {"fp8": ["transformer_blocks.3.attn"]}
    names modules by patterns, and sets all others to 16 bit. A checkpoint records the first three.
    Raises ValueError for an unknown choice, a missing package, a model that is no transformer fluxq knows, attention
    that cannot be replaced, and for a pattern that names none.
    """
    chosen = attention if isinstance(attention, Mapping) else {attention: ()}
    if not chosen:
        raise ValueError("attention: {} names no module; write '16bit' to set all to 16 bit")
    for word in chosen:
        if word not in BACKENDS:
            raise ValueError(f"attention is {word!r}, expected one of {', '.join(BACKENDS)}")
        _require_package(word)
    for patterns in chosen.values():
        are_several = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not are_several or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"attention: expected a list of patterns, as in ['blocks.*.attn'], got {patterns!r}")
    modules = _set_modules(model, attention)
    for name, module, _ in modules:
        if not hasattr(module.processor, "_attention_backend"):
            raise ValueError(
                f"{name}: its {type(module.processor).__name__} does not ask diffusers' dispatcher, so its attention "
                "cannot be replaced; give it the processor that it came with"
            )
    uses = Counter(id(module.processor) for _, module, _ in modules)
    for _, module, word in modules:
        if isinstance(attention, Mapping) and uses[id(module.processor)] > 1:  # `set_attn_processor` shares one
            module.processor = copy.copy(module.processor)
        module.processor._attention_backend = backend_of(word)
    return len(modules)


def _set_modules(model: Any, attention: Choice | Mapping[Any, Sequence[str]]) -> list[tuple[str, Any, str]]:
    """Return (name, module, word) of all modules to set, in the model's order."""
    from fluxq.recipes.all_families import FAMILIES
    from fluxq.recipes.plan import attention_words, require_replaceable_attention

    denoisers = list(_transformers(model))
    if not denoisers:
        models = ", ".join(family.model for family in FAMILIES.values() if family.kind == "transformer")
        raise ValueError(f"this {type(model).__name__} holds no transformer that fluxq knows: {models}")
    for _, family in denoisers:
        for word in attention if isinstance(attention, Mapping) else (attention,):
            require_replaceable_attention(family, word)
    if not isinstance(attention, Mapping):
        named = [each for part, family in denoisers for each in _attention_modules(part, family, attention)]
        return [(name, module, attention) for name, module in named]
    modules = [each for part, family in denoisers for each in _attention_modules(part, family, "fp8")]
    words = attention_words(attention, [uncompiled_path(name) for name, _ in modules])
    return [(name, module, words.get(uncompiled_path(name), "16bit")) for name, module in modules]


def with_attention(module: Any, attention: Choice) -> Any:
    """Return an attention module that shares all of another's layers, and computes another way than that goes on to."""
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)  # a hook's, which is the other's
    twin.__dict__["processor"] = copy.copy(module.processor)
    twin.processor._attention_backend = backend_of(attention)
    return twin


def dispatched(attention: str, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """Compute attention (B, S, H, D) for diffusers' dispatcher: from codes, or in 16 bit and say why.

    attention: "fp8" or "int8".
    how: the other arguments of diffusers' own attention in 16 bit.
    """
    why, codes = _why_16_bit(query, key, value, how), attention
    if not why and query.device.type == "cuda":
        codes, why = _codes(attention, query.shape[3], query.device)
    if not why:
        return attention_fp8(query, key, value, how.get("scale"), codes)
    from diffusers.models.attention_dispatch import _native_attention

    _say(attention, why)
    return _native_attention(query=query, key=key, value=value, **how)


def _why_16_bit(q: Tensor, k: Tensor, v: Tensor, how: Mapping[str, Any]) -> str:
    """Return the reason why no GPU computes a call from codes; empty if some do."""
    if q.shape[1] != k.shape[1]:
        return "cross-attention, which codes are not for"
    if how.get("attn_mask") is not None or how.get("is_causal"):
        return "a mask"
    if (scale := how.get("scale")) is not None and not 0 < scale < math.inf:
        return f"a scale of {scale}"
    if how.get("return_lse"):
        return "log-sum-exps, which the op does not return"
    if how.get("dropout_p"):
        return "dropout"
    if how.get("enable_gqa") or q.shape[2] != k.shape[2]:
        return "heads that share keys"
    if how.get("_parallel_config") is not None:
        return "context parallelism"
    if q.dtype not in FLOATS:
        return f"tensors of {q.dtype}"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "gradients, which the op has none of"
    return ""


@torch.compiler.assume_constant_result
def _codes(attention: str, head_size: int, device: torch.device) -> tuple[str, str]:
    """Return (row of the op's CODES by which a GPU computes an attention, reason why it has no kernel, or "").

    Raises ValueError with that reason where fluxq is strict.
    """
    if find_spec("triton") is None:
        codes, why = attention, f"no Triton for {device}"
    else:
        from fluxq.kernels.tiles import chip_of

        chip = chip_of(device)
        codes, refused = codes_on(attention, head_size, chip)
        why = f"no kernel for heads of {head_size} elements on {chip} ({refused})" if refused else ""
    if why and is_strict():
        raise ValueError(
            f"attention in {attention}: {why}. Strict mode takes no other arithmetic than the one chosen: choose 16 "
            "bit (fluxq.set_attention(model, '16bit')) or leave strict mode"
        )
    return codes, why


def codes_on(attention: str, head_size: int, chip: str) -> tuple[str, str]:
    """Return (row of the op's CODES by which a chip computes an attention, reason why it has no kernel, or "")."""
    from fluxq.kernels.dispatch import refusal  # which needs Triton

    rows = CHOICES[attention]
    refusals = {row: refusal(OP.name, format_of(row, head_size), chip) for row in rows}
    return next(((row, "") for row, why in refusals.items() if not why), (rows[0], refusals[rows[0]]))


@torch.compiler.assume_constant_result
def _say(attention: str, why: str) -> None:
    _say_once(attention, why)


@functools.cache
def _say_once(attention: str, why: str) -> None:
    logger.warning("attention in 16 bit, not %s: %s", attention, why)


def _transformers(model: Any) -> Iterator[tuple[nn.Module, Family]]:
    """Yield (model, family) of the transformers in a pipeline, or of one by itself."""
    from fluxq.recipes.all_families import FAMILIES

    families = {family.model: family for family in FAMILIES.values() if family.kind == "transformer"}
    for part in models_of(model).values():
        if type(part).__name__ in families:
            yield part, families[type(part).__name__]


def _attention_modules(model: nn.Module, family: Family, attention: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) to set a choice on: self-attention; for 16 bit every module that asks the dispatcher."""
    from fluxq.recipes.family import matches

    for name, module in model.named_modules():
        path = uncompiled_path(name)
        is_asking = attention == "16bit" and hasattr(getattr(module, "processor", None), "_attention_backend")
        if is_asking or (attention != "16bit" and any(matches(row, path) for row in family.self_attention)):
            yield name, module


def _require_package(attention: str) -> None:
    """Raise ValueError where diffusers' backend needs a package that is not there."""
    if attention in PACKAGES:
        from diffusers.models.attention_dispatch import _check_attention_backend_requirements

        try:
            _check_attention_backend_requirements(backend_of(attention))
        except RuntimeError as error:
            raise ValueError(
                f"attention {attention!r} is that of {PACKAGES[attention]}, which cannot be used here: install it, or "
                f"choose 'fp8', which needs no package ({error})"
            ) from None


def backend_of(attention: str) -> Any:
    """Return the member of diffusers' enum; None for its default, unless `set_attention_backend` made that ours."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backend = BACKENDS[attention]
    if backend is None:
        is_ours = _AttentionBackendRegistry.get_active_backend()[0] in computing.BACKENDS.values()
        return AttentionBackendName.NATIVE if is_ours else None
    return AttentionBackendName(backend)


BACKENDS: dict[str, str | None] = {"16bit": None, **computing.BACKENDS, "sage": "sage", "flash3": "_flash_3"}
PACKAGES = {"sage": "SageAttention (pip install sageattention)", "flash3": "FlashAttention-3 (built from its source)"}
