"""Build the input groups of blocks that several families have, and give the reasons why layers are kept in 16 bit.

Imports no torch: a group is names only.
"""

from __future__ import annotations

from fluxq.recipes.family import InputGroup, Maker, Modulation

EMBEDDER = "embeds the timestep, text or patches: few weights, and every token depends on them"
FINAL = "last projection: its error goes to the image undamped"
SHARED = "modulates every block: few weights, and their error reaches all blocks"
QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
FF = ("ff.net.0.proj", "ff.net.2")
TEXT_FF = ("ff_context.net.0.proj", "ff_context.net.2")


def normed(role: str, block: str, members: tuple[str, ...], modulation: str = "", chunk: int = 0) -> InputGroup:
    """Group Linears behind a norm; modulation: the Linear of the same block that scales and shifts it, if any."""
    by = Modulation(modulation, chunk) if modulation else None
    return InputGroup(role, block, members, len(members) > 1, "norm", by)


def image_and_text(
    block: str,
    image_ff: tuple[str, str],
    text_ff: tuple[str, str],
    modulation: tuple[str, str] = ("", ""),
) -> tuple[InputGroup, ...]:
    """Group a block of two streams that share one attention (MMDiT). image_ff, text_ff: up and down.

    modulation: of the image, of the text; it makes shift, scale and gate of the attention, then of the feed-forward.
    """
    image, text = modulation
    return (
        normed("qkv", block, QKV, image, 0),
        normed("text_qkv", block, _ADDED_QKV, text, 0),
        InputGroup("attn_out", block, ("attn.to_out.0",), made_by="attention"),
        InputGroup("text_attn_out", block, ("attn.to_add_out",), made_by="attention"),
        normed("ff_up", block, image_ff[:1], image, 3),
        normed("text_ff_up", block, text_ff[:1], text, 3),
        InputGroup("ff_down", block, image_ff[1:], made_by="activation"),
        InputGroup("text_ff_down", block, text_ff[1:], made_by="activation"),
        *(InputGroup("modulation", block, (linear,)) for linear in modulation if linear),
    )


def both_at_once(block: str, members: tuple[str, ...], down: str, modulation: str = "") -> tuple[InputGroup, ...]:
    """Group a block of one stream whose attention and feed-forward run side by side."""
    return (
        normed("single_in", block, members, modulation, 0),
        InputGroup("mixed_out", block, (down,), made_by="concatenation"),
        *(InputGroup("modulation", block, (linear,)) for linear in (modulation,) if linear),
    )


def self_and_cross(block: str, cross_q: Maker) -> tuple[InputGroup, ...]:
    """Group the attention to the image itself and the one to the text; cross_q: what makes the input of the latter."""
    return (
        normed("qkv", block, ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
        InputGroup("attn_out", block, ("attn1.to_out.0",), made_by="attention"),
        InputGroup("cross_q", block, ("attn2.to_q",), made_by=cross_q),
        InputGroup("cross_kv", block, ("attn2.to_k", "attn2.to_v"), joined=True),
        InputGroup("cross_out", block, ("attn2.to_out.0",), made_by="attention"),
    )


def feed_forward(block: str, up: str, down: str) -> tuple[InputGroup, ...]:
    return (
        normed("ff_up", block, (up,)),
        InputGroup("ff_down", block, (down,), made_by="activation"),
    )
