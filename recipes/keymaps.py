"""Original names: what a denoiser's tensors are called where its authors' code or ComfyUI reads them, row by row.

diffusers splits what the original code joins: q, k and v, one Linear `qkv` there, are three. A row says which of
diffusers' modules follow each other along N in one original module:

    double_blocks.*.img_attn.qkv = [transformer_blocks.*.attn.to_q | …to_k | …to_v]

`*` is one path segment, `**` any number, and stars of both sides stand for the same in order. What follows a module's
path (`weight`, `bias`, `weight_scale`) is the same on both sides; a row may also name one tensor in full.

Imports no torch: these are names, and whoever holds the tensors joins, cuts and permutes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

Order = Literal["as they are", "halves swapped"]

Stars = tuple[str, ...]  # what the stars of a pattern stand for in a name, and what follows it: "" or ".weight"

CHECKPOINT_PREFIX = "model.diffusion_model."  # of a denoiser in a file that holds VAE and text encoders too


class Joined(NamedTuple):
    """One original tensor and the tensors of diffusers that follow each other along N in it.

    original: without CHECKPOINT_PREFIX. parts: none for what diffusers does not hold. order: of the rows of what was
    joined; halves are swapped where diffusers puts the scale before the shift and the original does not. Swapping them
    once more undoes it.
    """

    original: str
    parts: tuple[str, ...]
    order: Order = "as they are"


class Rule(NamedTuple):
    """A row: a `Joined` in patterns. beside, unless: of diffusers, a module that must and must not be there too."""

    original: str
    parts: tuple[str, ...]
    order: Order = "as they are"
    beside: str = ""
    unless: str = ""


def original_names(family: str, names: Collection[str]) -> list[Joined]:
    """Original tensors that hold what diffusers calls `names`, in the order of their first parts.

    family: a key of ORIGINALS. names: of all tensors, or all modules, of a model; what a name becomes can depend on
    which others there are. ValueError for a family without a row, a name without one, and a part that is missing.
    """
    rules, present = _rules(family, names), _with_modules(names)
    found: dict[str, Joined] = {}
    for name, rows in _matching(names, rules, lambda rule: rule.parts).items():
        joined = _only([_joined(*row) for row in rows if _holds(*row, present)], family, name, "original name")
        found.setdefault(joined.original, joined)
    for joined in found.values():
        if missing := [part for part in joined.parts if part not in present]:
            raise ValueError(
                f"{family}: {joined.original!r} joins {', '.join(joined.parts)}, and of these {missing[0]!r} is "
                "missing; give the names of the whole model"
            )
    return list(found.values())


def diffusers_names(family: str, originals: Collection[str]) -> list[Joined]:
    """The same of a file with original names: what each of its tensors is joined of, in the order given.

    With CHECKPOINT_PREFIX on any of them, those without it are another component's and are passed over. Errors are
    those of `original_names`.
    """
    if any(name.startswith(CHECKPOINT_PREFIX) for name in originals):
        heads = [name for name in originals if name.startswith(CHECKPOINT_PREFIX)]
        originals = [name.removeprefix(CHECKPOINT_PREFIX) for name in heads]
    rules = _rules(family, originals)
    matching = _matching(originals, rules, lambda rule: (rule.original,))
    present = _with_modules(part for rows in matching.values() for row in rows for part in _joined(*row).parts)
    return [
        _only([_joined(*row) for row in rows if _holds(*row, present)], family, name, "name in diffusers")
        for name, rows in matching.items()
    ]


def _rules(family: str, names: Collection[str]) -> tuple[Rule, ...]:
    if family not in ORIGINALS:
        raise ValueError(f"no original names are known for {family!r} (known: {', '.join(ORIGINALS)})")
    rules = ORIGINALS[family]
    return rules(names) if callable(rules) else rules


def _only(found: list[Joined], family: str, name: str, what: str) -> Joined:
    if len(found) != 1:
        said = f"{len(found)} rows name" if found else "no row names"
        raise ValueError(
            f"{family}: no {what} is known for {name!r}: {said} it in recipes/keymaps.py; is this another model?"
        )
    return found[0]


def _matching(
    names: Iterable[str], rules: Iterable[Rule], side: Callable[[Rule], tuple[str, ...]]
) -> dict[str, list[tuple[Rule, Stars]]]:
    """Name -> rows with a pattern on that side that it matches, whatever else they ask for."""
    patterns = [(rule, pattern.partition("*")[0], _compile(pattern)) for rule in rules for pattern in side(rule)]
    found: dict[str, list[tuple[Rule, Stars]]] = {}
    for name in names:
        hits = [(rule, regex.fullmatch(name)) for rule, head, regex in patterns if name.startswith(head)]
        found[name] = [(rule, tuple(group or "" for group in hit.groups())) for rule, hit in hits if hit]
    return found


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    stars = {"*": r"([^.]+)", "**": r"(.+)"}
    segments = [stars.get(segment) or re.escape(segment) for segment in pattern.split(".")]
    return re.compile(r"\.".join(segments) + r"(\.[^.]+)?")


def _filled(pattern: str, stars: Stars) -> str:
    values = iter(stars)
    return ".".join(next(values) if segment in ("*", "**") else segment for segment in pattern.split("."))


def _joined(rule: Rule, stars: Stars) -> Joined:
    original, *parts = (_filled(pattern, stars) + stars[-1] for pattern in (rule.original, *rule.parts))
    return Joined(original, tuple(parts), rule.order)


def _holds(rule: Rule, stars: Stars, present: set[str]) -> bool:
    if rule.beside and _filled(rule.beside, stars) not in present:
        return False
    return not (rule.unless and _filled(rule.unless, stars) in present)


def _with_modules(names: Iterable[str]) -> set[str]:
    """Names of tensors and of the modules that hold them."""
    names = set(names)
    return names | {name.rpartition(".")[0] for name in names}


# --- rows


def _rows(table: dict[str, str | tuple[str, ...]], *more: Rule) -> tuple[Rule, ...]:
    return (*(Rule(name, (parts,) if isinstance(parts, str) else parts) for name, parts in table.items()), *more)


def _of(block: str, *members: str) -> tuple[str, ...]:
    return tuple(f"{block}.{member}" for member in members)


_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_SWAPPED_FINAL = Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), "halves swapped")
_NOT_HELD = (Rule("pos_embed", ()), Rule("y_embedder.y_embedding", ()))  # computed anew, and read in training alone


def _bfl_double(up: str, down: str) -> dict[str, str | tuple[str, ...]]:
    """Blocks of two streams as Black Forest Labs names them. up, down: of the feed-forward in diffusers."""
    rows: dict[str, str | tuple[str, ...]] = {}
    streams = {"img": (_QKV, "to_out.0", "norm_", "ff"), "txt": (_ADDED_QKV, "to_add_out", "norm_added_", "ff_context")}
    for stream, (qkv, out, norm, ff) in streams.items():
        ours, theirs = "transformer_blocks.*", f"double_blocks.*.{stream}"
        rows |= {
            f"{theirs}_attn.qkv": _of(f"{ours}.attn", *qkv),
            f"{theirs}_attn.proj": f"{ours}.attn.{out}",
            f"{theirs}_attn.norm.query_norm.scale": f"{ours}.attn.{norm}q.weight",
            f"{theirs}_attn.norm.key_norm.scale": f"{ours}.attn.{norm}k.weight",
            f"{theirs}_mlp.0": f"{ours}.{ff}.{up}",
            f"{theirs}_mlp.2": f"{ours}.{ff}.{down}",
        }
    return rows


_BFL_ENDS: dict[str, str | tuple[str, ...]] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
}
_BFL_SINGLE: dict[str, str | tuple[str, ...]] = {
    "single_blocks.*.linear1": _of("single_transformer_blocks.*", *_of("attn", *_QKV), "proj_mlp"),
    "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
    "single_blocks.*.norm.query_norm.scale": "single_transformer_blocks.*.attn.norm_q.weight",
    "single_blocks.*.norm.key_norm.scale": "single_transformer_blocks.*.attn.norm_k.weight",
}
_FLUX = _rows(
    {
        **_BFL_ENDS,
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        **_bfl_double("net.0.proj", "net.2"),
        "double_blocks.*.img_mod.lin": "transformer_blocks.*.norm1.linear",
        "double_blocks.*.txt_mod.lin": "transformer_blocks.*.norm1_context.linear",
        **_BFL_SINGLE,
        "single_blocks.*.modulation.lin": "single_transformer_blocks.*.norm.linear",
    },
    _SWAPPED_FINAL,
)
_FLUX2 = _rows(
    {
        **_BFL_ENDS,
        "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
        "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        **_bfl_double("linear_in", "linear_out"),
        **_BFL_SINGLE,
        "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
        "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
    },
    _SWAPPED_FINAL,
)
_CHROMA = _rows(
    {
        **_BFL_ENDS,
        "distilled_guidance_layer.in_proj": "distilled_guidance_layer.in_proj",
        "distilled_guidance_layer.out_proj": "distilled_guidance_layer.out_proj",
        "distilled_guidance_layer.layers.*.in_layer": "distilled_guidance_layer.layers.*.linear_1",
        "distilled_guidance_layer.layers.*.out_layer": "distilled_guidance_layer.layers.*.linear_2",
        "distilled_guidance_layer.norms.*.scale": "distilled_guidance_layer.norms.*.weight",
        **_bfl_double("net.0.proj", "net.2"),
        **_BFL_SINGLE,
    }
)

_SD3_LAST = "transformer_blocks.*.attn.to_add_out"  # in every block but the last, whose text goes nowhere
_SD3_MODULATION = ("joint_blocks.*.context_block.adaLN_modulation.1", ("transformer_blocks.*.norm1_context.linear",))
_SD3 = _rows(
    {
        "pos_embed": "pos_embed.pos_embed",
        "x_embedder.proj": "pos_embed.proj",
        "context_embedder": "context_embedder",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "joint_blocks.*.x_block.attn.qkv": _of("transformer_blocks.*.attn", *_QKV),
        "joint_blocks.*.x_block.attn.ln_q": "transformer_blocks.*.attn.norm_q",
        "joint_blocks.*.x_block.attn.ln_k": "transformer_blocks.*.attn.norm_k",
        "joint_blocks.*.x_block.attn.proj": "transformer_blocks.*.attn.to_out.0",
        "joint_blocks.*.x_block.attn2.qkv": _of("transformer_blocks.*.attn2", *_QKV),
        "joint_blocks.*.x_block.attn2.ln_q": "transformer_blocks.*.attn2.norm_q",
        "joint_blocks.*.x_block.attn2.ln_k": "transformer_blocks.*.attn2.norm_k",
        "joint_blocks.*.x_block.attn2.proj": "transformer_blocks.*.attn2.to_out.0",
        "joint_blocks.*.x_block.adaLN_modulation.1": "transformer_blocks.*.norm1.linear",
        "joint_blocks.*.x_block.mlp.fc1": "transformer_blocks.*.ff.net.0.proj",
        "joint_blocks.*.x_block.mlp.fc2": "transformer_blocks.*.ff.net.2",
        "joint_blocks.*.context_block.attn.qkv": _of("transformer_blocks.*.attn", *_ADDED_QKV),
        "joint_blocks.*.context_block.attn.ln_q": "transformer_blocks.*.attn.norm_added_q",
        "joint_blocks.*.context_block.attn.ln_k": "transformer_blocks.*.attn.norm_added_k",
        "joint_blocks.*.context_block.attn.proj": _SD3_LAST,
        "joint_blocks.*.context_block.mlp.fc1": "transformer_blocks.*.ff_context.net.0.proj",
        "joint_blocks.*.context_block.mlp.fc2": "transformer_blocks.*.ff_context.net.2",
        "final_layer.linear": "proj_out",
    },
    Rule(*_SD3_MODULATION, beside=_SD3_LAST),
    Rule(*_SD3_MODULATION, "halves swapped", unless=_SD3_LAST),
    _SWAPPED_FINAL,
)

_WAN = _rows(
    {
        "patch_embedding": "patch_embedding",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
        "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
        **{
            f"blocks.*.{theirs}.{name}": f"blocks.*.{ours}.{called}"
            for theirs, ours in {"self_attn": "attn1", "cross_attn": "attn2"}.items()
            for name, called in {
                **{"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"},
                **{"norm_q": "norm_q", "norm_k": "norm_k"},
            }.items()
        },
        "blocks.*.cross_attn.k_img": "blocks.*.attn2.add_k_proj",
        "blocks.*.cross_attn.v_img": "blocks.*.attn2.add_v_proj",
        "blocks.*.cross_attn.norm_k_img": "blocks.*.attn2.norm_added_k",
        "blocks.*.norm3": "blocks.*.norm2",  # the one before the attention to the text; the others have no weights
        "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
        "blocks.*.ffn.2": "blocks.*.ffn.net.2",
        "blocks.*.modulation": "blocks.*.scale_shift_table",
        "head.modulation": "scale_shift_table",
        "head.head": "proj_out",
    }
)

_Z_IMAGE = _rows(
    {
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        **{f"{name}.**": f"{name}.**" for name in ("t_embedder", "cap_embedder", "siglip_embedder")},
        **{name: name for name in ("x_pad_token", "cap_pad_token", "siglip_pad_token")},
        "*.*.attention.qkv": _of("*.*.attention", *_QKV),
        "*.*.attention.out": "*.*.attention.to_out.0",
        "*.*.attention.q_norm": "*.*.attention.norm_q",
        "*.*.attention.k_norm": "*.*.attention.norm_k",
        **{f"*.*.feed_forward.{name}": f"*.*.feed_forward.{name}" for name in ("w1", "w2", "w3")},
        **{f"*.*.{name}": f"*.*.{name}" for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")},
        "*.*.adaLN_modulation.0": "*.*.adaLN_modulation.0",
    },
    Rule("norm_final.weight", ()),  # nothing reads it
)

_PIXART_AND_SANA: dict[str, str | tuple[str, ...]] = {
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "blocks.*.scale_shift_table": "transformer_blocks.*.scale_shift_table",
    "blocks.*.attn.qkv": _of("transformer_blocks.*.attn1", *_QKV),
    "blocks.*.attn.proj": "transformer_blocks.*.attn1.to_out.0",
    "blocks.*.cross_attn.q_linear": "transformer_blocks.*.attn2.to_q",
    "blocks.*.cross_attn.kv_linear": _of("transformer_blocks.*.attn2", "to_k", "to_v"),
    "blocks.*.cross_attn.proj": "transformer_blocks.*.attn2.to_out.0",
    "final_layer.linear": "proj_out",
    "final_layer.scale_shift_table": "scale_shift_table",
}
_PIXART = _rows(
    {
        **_PIXART_AND_SANA,
        "x_embedder.proj": "pos_embed.proj",
        "t_block.1": "adaln_single.linear",
        **{
            f"{theirs}.mlp.{index}": f"adaln_single.emb.{ours}.linear_{number}"
            for theirs, ours in {
                **{"t_embedder": "timestep_embedder", "csize_embedder": "resolution_embedder"},
                "ar_embedder": "aspect_ratio_embedder",
            }.items()
            for index, number in ((0, 1), (2, 2))
        },
        "blocks.*.mlp.fc1": "transformer_blocks.*.ff.net.0.proj",
        "blocks.*.mlp.fc2": "transformer_blocks.*.ff.net.2",
    },
    *_NOT_HELD,
)
_SPRINT = "time_embed.guidance_embedder.linear_1"
_SANA = _rows(
    {
        **_PIXART_AND_SANA,
        "x_embedder.proj": "patch_embed.proj",
        "t_block.1": "time_embed.linear",
        "cfg_embedder.mlp.0": _SPRINT,
        "cfg_embedder.mlp.2": "time_embed.guidance_embedder.linear_2",
        "attention_y_norm": "caption_norm",
        **{
            f"blocks.*.{theirs}.{name}_norm": f"transformer_blocks.*.{ours}.norm_{name}"
            for theirs, ours in {"attn": "attn1", "cross_attn": "attn2"}.items()
            for name in ("q", "k")
        },
        "blocks.*.mlp.inverted_conv.conv": "transformer_blocks.*.ff.conv_inverted",
        "blocks.*.mlp.depth_conv.conv": "transformer_blocks.*.ff.conv_depth",
        "blocks.*.mlp.point_conv.conv": "transformer_blocks.*.ff.conv_point",
    },
    Rule("t_embedder.mlp.0", ("time_embed.emb.timestep_embedder.linear_1",), unless=_SPRINT),
    Rule("t_embedder.mlp.2", ("time_embed.emb.timestep_embedder.linear_2",), unless=_SPRINT),
    Rule("t_embedder.mlp.0", ("time_embed.timestep_embedder.linear_1",), beside=_SPRINT),
    Rule("t_embedder.mlp.2", ("time_embed.timestep_embedder.linear_2",), beside=_SPRINT),
    Rule("logvar_linear", ()),
    *_NOT_HELD,
)

_LTX = _rows(
    {
        "patchify_proj": "proj_in",
        "adaln_single.**": "time_embed.**",
        "caption_projection.**": "caption_projection.**",
        **{
            f"transformer_blocks.*.{attn}.{name}": f"transformer_blocks.*.{attn}.{called}"
            for attn in ("attn1", "attn2")
            for name, called in {
                **{name: name for name in (*_QKV, "to_out.0")},
                **{"q_norm": "norm_q", "k_norm": "norm_k"},
            }.items()
        },
        "transformer_blocks.*.ff.**": "transformer_blocks.*.ff.**",
        "transformer_blocks.*.scale_shift_table": "transformer_blocks.*.scale_shift_table",
        "scale_shift_table": "scale_shift_table",
        "proj_out": "proj_out",
    }
)

_REFINER = "txt_in.individual_token_refiner.blocks.*", "context_embedder.token_refiner.refiner_blocks.*"
_HUNYUAN_VIDEO = _rows(
    {
        "img_in.proj": "x_embedder.proj",
        "time_in.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "time_in.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.mlp.0": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.mlp.2": "time_text_embed.guidance_embedder.linear_2",
        "txt_in.input_embedder": "context_embedder.proj_in",
        "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
        "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
        "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
        f"{_REFINER[0]}.self_attn_qkv": _of(f"{_REFINER[1]}.attn", *_QKV),
        f"{_REFINER[0]}.self_attn_proj": f"{_REFINER[1]}.attn.to_out.0",
        f"{_REFINER[0]}.norm1": f"{_REFINER[1]}.norm1",
        f"{_REFINER[0]}.norm2": f"{_REFINER[1]}.norm2",
        f"{_REFINER[0]}.mlp.fc1": f"{_REFINER[1]}.ff.net.0.proj",
        f"{_REFINER[0]}.mlp.fc2": f"{_REFINER[1]}.ff.net.2",
        f"{_REFINER[0]}.adaLN_modulation.1": f"{_REFINER[1]}.norm_out.linear",
        "double_blocks.*.img_mod.linear": "transformer_blocks.*.norm1.linear",
        "double_blocks.*.img_attn_qkv": _of("transformer_blocks.*.attn", *_QKV),
        "double_blocks.*.img_attn_q_norm": "transformer_blocks.*.attn.norm_q",
        "double_blocks.*.img_attn_k_norm": "transformer_blocks.*.attn.norm_k",
        "double_blocks.*.img_attn_proj": "transformer_blocks.*.attn.to_out.0",
        "double_blocks.*.img_mlp.fc1": "transformer_blocks.*.ff.net.0.proj",
        "double_blocks.*.img_mlp.fc2": "transformer_blocks.*.ff.net.2",
        "double_blocks.*.txt_mod.linear": "transformer_blocks.*.norm1_context.linear",
        "double_blocks.*.txt_attn_qkv": _of("transformer_blocks.*.attn", *_ADDED_QKV),
        "double_blocks.*.txt_attn_q_norm": "transformer_blocks.*.attn.norm_added_q",
        "double_blocks.*.txt_attn_k_norm": "transformer_blocks.*.attn.norm_added_k",
        "double_blocks.*.txt_attn_proj": "transformer_blocks.*.attn.to_add_out",
        "double_blocks.*.txt_mlp.fc1": "transformer_blocks.*.ff_context.net.0.proj",
        "double_blocks.*.txt_mlp.fc2": "transformer_blocks.*.ff_context.net.2",
        "single_blocks.*.modulation.linear": "single_transformer_blocks.*.norm.linear",
        "single_blocks.*.linear1": _of("single_transformer_blocks.*", *_of("attn", *_QKV), "proj_mlp"),
        "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
        "single_blocks.*.q_norm": "single_transformer_blocks.*.attn.norm_q",
        "single_blocks.*.k_norm": "single_transformer_blocks.*.attn.norm_k",
        "final_layer.linear": "proj_out",
    },
    _SWAPPED_FINAL,
)

_RESNET = {
    **{"in_layers.0": "norm1", "in_layers.2": "conv1", "out_layers.0": "norm2", "out_layers.3": "conv2"},
    **{"emb_layers.1": "time_emb_proj", "skip_connection": "conv_shortcut"},
}
_UNET_BLOCKS = 4  # down and up, each; no published model has more


def _unet(names: Collection[str]) -> tuple[Rule, ...]:
    """Stable Diffusion's, whose stacks are numbered through: a block's first layer depends on how many come before."""
    layers = _layers_per_block(names)
    table: dict[str, str | tuple[str, ...]] = {
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "label_emb.0.0": "add_embedding.linear_1",
        "label_emb.0.2": "add_embedding.linear_2",
        "input_blocks.0.0": "conv_in",
        "out.0": "conv_norm_out",
        "out.2": "conv_out",
        "middle_block.1.**": "mid_block.attentions.0.**",
    }
    resnets = {"middle_block.0": "mid_block.resnets.0", "middle_block.2": "mid_block.resnets.1"}
    rules = []
    for block in range(_UNET_BLOCKS):
        down, up = f"down_blocks.{block}", f"up_blocks.{block}"
        first = block * (layers + 1)
        for layer in range(layers):
            resnets[f"input_blocks.{1 + first + layer}.0"] = f"{down}.resnets.{layer}"
            table[f"input_blocks.{1 + first + layer}.1.**"] = f"{down}.attentions.{layer}.**"
        table[f"input_blocks.{first + layers + 1}.0.op"] = f"{down}.downsamplers.0.conv"
        for layer in range(layers + 1):
            resnets[f"output_blocks.{first + layer}.0"] = f"{up}.resnets.{layer}"
            attention = f"{up}.attentions.{layer}"
            rules.append(Rule(f"output_blocks.{first + layer}.1.**", (f"{attention}.**",), beside=f"{attention}.norm"))
        last, attention, sampler = first + layers, f"{up}.attentions.{layers}.norm", f"{up}.upsamplers.0.conv"
        rules += [
            Rule(f"output_blocks.{last}.1.conv", (sampler,), unless=attention),
            Rule(f"output_blocks.{last}.2.conv", (sampler,), beside=attention),
        ]
    for theirs, ours in resnets.items():
        table |= {f"{theirs}.{name}": f"{ours}.{called}" for name, called in _RESNET.items()}
    return _rows(table, *rules)


def _layers_per_block(names: Collection[str]) -> int:
    """`layers_per_block` of a UNet's configuration, from names of either kind."""

    def numbers(pattern: str) -> set[int]:
        return {int(found[1]) for name in names if (found := _compile(pattern).fullmatch(name))}

    ours, samplers = numbers("down_blocks.0.resnets.*.conv1"), numbers("input_blocks.*.0.op")
    layers = len(ours) or min(samplers, default=max(numbers("input_blocks.*.0.**"), default=0) + 1) - 1
    if layers < 1:
        raise ValueError("unet: neither 'down_blocks.0.resnets.0.conv1' nor 'input_blocks.1.0' is among the names")
    return layers


ORIGINALS: dict[str, tuple[Rule, ...] | Callable[[Collection[str]], tuple[Rule, ...]]] = {
    "flux": _FLUX,
    "flux2": _FLUX2,
    "sd3": _SD3,
    "qwen_image": _rows({"**": "**"}),
    "wan": _WAN,
    "chroma": _CHROMA,
    "z_image": _Z_IMAGE,
    "pixart": _PIXART,
    "ltx": _LTX,
    "hunyuan_video": _HUNYUAN_VIDEO,
    "sana": _SANA,
    "hidream": _rows({"**": "**"}),
    "unet": _unet,
}
