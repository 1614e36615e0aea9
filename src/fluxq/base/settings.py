"""Settings of a process: strict mode, sums of fp8 on Hopper, which launches are compared, bits of gradients."""

from __future__ import annotations

import os

ACCUMULATIONS = ("fast", "exact")
VERIFICATIONS = ("first", "always", "off")
GRADIENTS = ("16bit", "8bit")
_set: dict[str, bool | str] = {}
_changes = 0


def configure(
    *,
    strict: bool | None = None,
    accumulate: str | None = None,
    verify: str | None = None,
    gradients: str | None = None,
) -> None:
    """Set how kernels are chosen in this process; an argument left out stays as it is.

    strict: whether a GPU without a kernel for a scheme as it is written raises an error. Without strict it falls back
    with a warning, to another arithmetic or to the slow torch reference.
    accumulate: how fp8 products add up on Hopper. "fast", the default, keeps sums in the matrix unit, with 13 bits;
    "exact" moves partial sums to fp32 on the way. kernels/README.md has the error of both.
    verify: which launches on a GPU are compared with the torch reference, on a few tokens. "first", the default, takes
    the first launch of each kernel, format and shape that no file of `fluxq doctor` vouches for; "always" takes all,
    slowly; "off" none. A kernel that is wrong is not used again: what it computed is computed anew, and strict mode
    raises RuntimeError. Nothing is compared while a CUDA graph is recorded.
    gradients: what a layer's backward pass multiplies with its weight. "16bit", the default, takes the gradient as it
    comes; "8bit" rounds it to codes of the weight's own kind where that is fp8 or int8, each token by its own scale, so
    that 8-bit matrix units multiply. Weights of other formats, and GPUs without such units, keep 16 bit, and what
    torch.compile compiled before keeps what it was compiled with.

    Where nothing was configured, FLUXQ_STRICT=1, FLUXQ_ACCUMULATE=exact, FLUXQ_VERIFY=always or off and
    FLUXQ_GRADIENTS=8bit in the environment do the same, as they are when a kernel is first launched. Raises ValueError
    for another value.
    """
    global _changes
    if accumulate is not None:
        _set["accumulate"] = _checked(accumulate, "accumulate", ACCUMULATIONS)
    if verify is not None:
        _set["verify"] = _checked(verify, "verify", VERIFICATIONS)
    if gradients is not None:
        _set["gradients"] = _checked(gradients, "gradients", GRADIENTS)
    if strict is not None:
        _set["strict"] = bool(strict)
    _changes += 1  # last: what is chosen until now is not to be taken for a choice by the new settings


def changes() -> int:
    """Count the calls of `configure`: what was chosen by settings is chosen anew after one."""
    return _changes


def is_strict() -> bool:
    """Tell whether strict mode is on: by the last `configure`, else by the environment."""
    return bool(_set.get("strict", os.environ.get("FLUXQ_STRICT", "") not in ("", "0")))


def accumulation() -> str:
    """Return "fast" or "exact": by the last `configure`, else by the environment."""
    return _chosen("accumulate", ACCUMULATIONS)


def verification() -> str:
    """Return "first", "always" or "off": by the last `configure`, else by the environment."""
    return _chosen("verify", VERIFICATIONS)


def gradients() -> str:
    """Return "16bit" or "8bit": by the last `configure`, else by the environment."""
    return _chosen("gradients", GRADIENTS)


def _chosen(name: str, choices: tuple[str, ...]) -> str:
    variable = f"FLUXQ_{name.upper()}"
    return str(_set.get(name) or _checked(os.environ.get(variable) or choices[0], variable, choices))


def _checked(value: str, name: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    return value
