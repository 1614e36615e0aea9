"""Define a row of original names, and the rows that several families share.

A row pairs one original module, or tensor, with the modules of diffusers that follow each other along N in it.
keymaps.py reads the rows. Imports no torch.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

Order = Literal["as they are", "halves swapped"]

Table = dict[str, str | tuple[str, ...]]


class Rule(NamedTuple):
    """Pair names in patterns. beside, unless: modules of diffusers that must exist too, and must not."""

    original: str
    parts: tuple[str, ...]
    order: Order = "as they are"
    beside: str = ""
    unless: str = ""


def rows(table: Table, *more: Rule) -> tuple[Rule, ...]:
    """Make a row of each entry, original name -> modules that follow each other in it, and append the full rows."""
    return (*(Rule(name, (parts,) if isinstance(parts, str) else parts) for name, parts in table.items()), *more)


def below(block: str, *members: str) -> tuple[str, ...]:
    """Return the paths of a block's members."""
    return tuple(f"{block}.{member}" for member in members)


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; its last group is the rest after a module's path, "" or ".weight"."""
    stars = {"*": r"([^.]+)", "**": r"(.+)"}
    segments = [stars.get(segment) or re.escape(segment) for segment in pattern.split(".")]
    return re.compile(r"\.".join(segments) + r"(\.[^.]+)?")


TO_QKV, ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
SWAPPED_FINAL = Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), "halves swapped")
NOT_HELD = (Rule("pos_embed", ()), Rule("y_embedder.y_embedding", ()))  # computed anew, and read in training alone
SAME_NAMES = rows({"**": "**"})  # the authors' and ComfyUI's are diffusers' own


def bfl_double(up: str, down: str) -> Table:
    """Name blocks of two streams as Black Forest Labs does. up, down: of the feed-forward in diffusers."""
    rows: Table = {}
    streams = {
        "img": (TO_QKV, "to_out.0", "norm_", "ff"),
        "txt": (ADDED_QKV, "to_add_out", "norm_added_", "ff_context"),
    }
    for stream, (qkv, out, norm, ff) in streams.items():
        ours, theirs = "transformer_blocks.*", f"double_blocks.*.{stream}"
        rows |= {
            f"{theirs}_attn.qkv": below(f"{ours}.attn", *qkv),
            f"{theirs}_attn.proj": f"{ours}.attn.{out}",
            f"{theirs}_attn.norm.query_norm.scale": f"{ours}.attn.{norm}q.weight",
            f"{theirs}_attn.norm.key_norm.scale": f"{ours}.attn.{norm}k.weight",
            f"{theirs}_mlp.0": f"{ours}.{ff}.{up}",
            f"{theirs}_mlp.2": f"{ours}.{ff}.{down}",
        }
    return rows


BFL_ENDS: Table = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
}

BFL_SINGLE: Table = {
    "single_blocks.*.linear1": below("single_transformer_blocks.*", *below("attn", *TO_QKV), "proj_mlp"),
    "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
    "single_blocks.*.norm.query_norm.scale": "single_transformer_blocks.*.attn.norm_q.weight",
    "single_blocks.*.norm.key_norm.scale": "single_transformer_blocks.*.attn.norm_k.weight",
}
