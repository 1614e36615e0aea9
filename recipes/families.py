"""Model families: one row says what every Linear of a transformer is, what shares an input and what stays in 16 bit.

Adding a family means adding a row to FAMILIES; plan, calibration, loader and tests iterate the table. Imports no
torch: a row is names only, and tests check the names against the diffusers class on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fluxq.recipes.patterns import matches


@dataclass(frozen=True)
class InputGroup:
    """Linears of one block that read the same input tensor.

    role: what recipes call them. block: pattern of the block's path. members: paths below the block. joined: a
    fused layout concatenates them along N, so they share NVFP4's global weight scale.
    """

    role: str
    block: str
    members: tuple[str, ...]
    joined: bool = False


@dataclass(frozen=True)
class Family:
    """One row of FAMILIES.

    transformer: diffusers class name. keep: pattern -> reason, Linears that stay in 16 bit whatever a recipe says
    about roles. tiny_config: a configuration small enough for tests, every K a multiple of 128.
    """

    name: str
    transformer: str
    groups: tuple[InputGroup, ...]
    keep: dict[str, str]
    tiny_config: dict[str, object] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles in the order of the row, without repeats."""
        return tuple(dict.fromkeys(group.role for group in self.groups))

    def locate(self, path: str) -> tuple[InputGroup, str] | None:
        """The input group of the Linear at `path` and the path of its block; None if no group names it."""
        segments = path.split(".")
        for group in self.groups:
            depth = len(group.block.split("."))
            block, member = ".".join(segments[:depth]), ".".join(segments[depth:])
            if member in group.members and matches(group.block, block):
                return group, block
        return None

    def kept(self, path: str) -> str | None:
        """Why the Linear at `path` stays in 16 bit, or None."""
        return next((reason for pattern, reason in self.keep.items() if matches(pattern, path)), None)


def family_of(transformer_class: str) -> Family:
    """The row for a diffusers transformer class; ValueError that says how to add one."""
    for family in FAMILIES.values():
        if family.transformer == transformer_class:
            return family
    known = ", ".join(family.transformer for family in FAMILIES.values())
    raise ValueError(
        f"unknown model family: {transformer_class} has no row in recipes/families.py (known: {known}); "
        "CONTRIBUTING.md, 'Adding a model family', shows how to add one"
    )


_EMBEDDER = "embeds the timestep, text or patches: few weights, and every token depends on them"
_FINAL = "last projection: its error goes to the image undamped"

FAMILIES = {
    row.name: row
    for row in (
        Family(
            name="flux",
            transformer="FluxTransformer2DModel",
            groups=(
                InputGroup("qkv", "transformer_blocks.*", ("attn.to_q", "attn.to_k", "attn.to_v"), joined=True),
                InputGroup(
                    "text_qkv",
                    "transformer_blocks.*",
                    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
                    joined=True,
                ),
                InputGroup("attn_out", "transformer_blocks.*", ("attn.to_out.0",)),
                InputGroup("text_attn_out", "transformer_blocks.*", ("attn.to_add_out",)),
                InputGroup("ff_up", "transformer_blocks.*", ("ff.net.0.proj",)),
                InputGroup("text_ff_up", "transformer_blocks.*", ("ff_context.net.0.proj",)),
                InputGroup("ff_down", "transformer_blocks.*", ("ff.net.2",)),
                InputGroup("text_ff_down", "transformer_blocks.*", ("ff_context.net.2",)),
                InputGroup(
                    "single_in",
                    "single_transformer_blocks.*",
                    ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
                    joined=True,
                ),
                InputGroup("mixed_out", "single_transformer_blocks.*", ("proj_out",)),
                InputGroup("modulation", "transformer_blocks.*", ("norm1.linear",)),
                InputGroup("modulation", "transformer_blocks.*", ("norm1_context.linear",)),
                InputGroup("modulation", "single_transformer_blocks.*", ("norm.linear",)),
            ),
            keep={
                "x_embedder": _EMBEDDER,
                "context_embedder": _EMBEDDER,
                "time_text_embed.**": _EMBEDDER,
                "norm_out.linear": _FINAL,
                "proj_out": _FINAL,
            },
            tiny_config={
                "in_channels": 16,
                "num_layers": 1,
                "num_single_layers": 2,
                "attention_head_dim": 64,
                "num_attention_heads": 2,
                "joint_attention_dim": 64,
                "pooled_projection_dim": 64,
                "axes_dims_rope": [16, 24, 24],
            },
        ),
    )
}
