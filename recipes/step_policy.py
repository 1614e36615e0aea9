"""First and last steps at 16-bit activations, in the schema that SGLang-Diffusion and vLLM-Omni read.

    quantization_config.runtime.diffusion_step_policy of a component's config.json

Both check every field and take no others. `scope` names kinds of components, so that a second denoiser is a transformer
too; `reasoner` is about the tokens of text inside of a model of both, which no family here has.

Sources: SGLang 0.5.23, `modelopt_fp8_step_precision.py`; vLLM-Omni 0.30.0, `cosmos3/mixed_precision/checkpoint.py`.
"""

from __future__ import annotations

from typing import Any

POLICY = "diffusion_step_policy"
MOST_KEPT = 1 << 20  # steps of an end of a call
_COMPONENT = "transformer"


def policy_of(first: int, last: int) -> dict[str, Any]:
    """Return the policy that computes so many steps of each end at 16-bit activations."""
    return {
        "schema_version": 1,
        "type": "first_last_n",
        "index_space": "denoising_loop_iteration",
        "scope": [_COMPONENT],
        "default_mode": "native",
        "first_steps": {"count": first, "mode": "a16"},
        "last_steps": {"count": last, "mode": "a16"},
        "overlap": "a16",
        "reasoner": "native",
    }


def ends_of(policy: Any) -> tuple[int, int]:
    """Return (first, last) of a policy, (0, 0) if it is for other components; ValueError for one of another kind."""
    try:
        counts = [policy[end]["count"] for end in ("first_steps", "last_steps")]
        scope, reasoner = policy["scope"], policy["reasoner"]
        wanted = policy_of(*counts) | {"scope": scope, "reasoner": reasoner}
        different = sorted(key for key in {*policy, *wanted} if policy.get(key) != wanted.get(key))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{POLICY} is {str(policy)[:80]}, expected {policy_of(1, 2)} ({error!r})") from None
    if any(type(count) is not int or not 0 <= count <= MOST_KEPT for count in counts):
        different += ["first_steps", "last_steps"]
    if not isinstance(scope, list) or not scope or not all(isinstance(name, str) for name in scope):
        different.append("scope")
    if reasoner not in ("native", "a16"):
        different.append("reasoner")
    if different:
        got = {key: policy.get(key, "nothing") for key in different}
        raise ValueError(f"{POLICY} says {str(got)[:80]}, where {policy_of(1, 2)} would be known")
    return (counts[0], counts[1]) if _COMPONENT in scope else (0, 0)
