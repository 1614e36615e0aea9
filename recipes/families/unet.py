"""Describe the UNet of Stable Diffusion XL and 1.5."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fluxq.recipes.family import EMBEDDER, FF, Family, InputGroup, Published, Workload, gated, normed, self_and_cross
from fluxq.recipes.keymap_rows import Rule, Table, compiled, rows

_ENDS = "begins or ends a stack of blocks: few weights, and all of the stack passes through them"
_MOST_LEVELS = 8  # of a UNet; published ones have three or four

_RESNET = {
    **{"in_layers.0": "norm1", "in_layers.2": "conv1", "out_layers.0": "norm2", "out_layers.3": "conv2"},
    **{"emb_layers.1": "time_emb_proj", "skip_connection": "conv_shortcut"},
}

_MOST_BLOCKS = 4  # down and up, each; no published model has more


def _block(block: str) -> tuple[InputGroup, ...]:
    """Group a block; its norms have weights of their own, which no Linear makes: nothing is folded into them."""
    up, down = FF
    return (*self_and_cross(block, cross_q="norm"), normed("ff_up", block, (up,)), gated("ff_down", block, down, up))


def _original_names(names: Collection[str]) -> tuple[Rule, ...]:
    """Make the rows for stacks that are numbered through: a block's first layer depends on how many come before."""
    layers = _layers_per_block(names)
    table: Table = {
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
    for block in range(_MOST_BLOCKS):
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
    return rows(table, *rules)


def _layers_per_block(names: Collection[str]) -> int:
    """Find `layers_per_block` of the configuration from names of either kind."""

    def numbers(pattern: str) -> set[int]:
        return {int(match[1]) for name in names if (match := compiled(pattern).fullmatch(name))}

    ours, samplers = numbers("down_blocks.0.resnets.*.conv1"), numbers("input_blocks.*.0.op")
    layers = len(ours) or min(samplers, default=max(numbers("input_blocks.*.0.**"), default=0) + 1) - 1
    if layers < 1:
        raise ValueError("unet: neither 'down_blocks.0.resnets.0.conv1' nor 'input_blocks.1.0' is among the names")
    return layers


def _config(channels: Sequence[int], attends: Sequence[bool], **config: Any) -> dict[str, Any]:
    """Configure so many channels at each resolution; attends: whether there are transformer blocks."""
    kinds = ["CrossAttn" if attended else "" for attended in attends]
    return {
        "block_out_channels": [*channels],
        "down_block_types": [f"{kind}DownBlock2D" for kind in kinds],
        "up_block_types": [f"{kind}UpBlock2D" for kind in reversed(kinds)],
        **config,
    }


def _special(rows: int, columns: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Count the pixels at each resolution: a step down halves both sides and rounds up."""
    levels = [(rows, columns)]
    for _ in config["down_block_types"][1:]:
        levels.append((-(-levels[-1][0] // 2), -(-levels[-1][1] // 2)))
    return {"levels": tuple(height * width for height, width in levels)}


UNET = Family(
    name="unet",
    model="UNet2DConditionModel",  # SDXL; of Stable Diffusion 1.5 two thirds are convolutions
    groups=(
        *_block("down_blocks.*.attentions.*.transformer_blocks.*"),
        *_block("mid_block.attentions.*.transformer_blocks.*"),
        *_block("up_blocks.*.attentions.*.transformer_blocks.*"),
    ),
    keep={
        EMBEDDER: ("time_embedding.**", "add_embedding.**"),
        "adds the timestep to every pixel of a residual block: few weights": ("**.time_emb_proj",),
        "carries what a block does not change past it: few weights": ("**.conv_shortcut",),
        _ENDS: ("**.attentions.*.proj_in", "**.attentions.*.proj_out"),
    },
    workload=Workload(
        text=77,
        patch=1,
        sized=True,
        normalised=False,
        gated=True,
        streams={
            "**.attn2.to_k": "text",
            "**.attn2.to_v": "text",
            "**.time_emb_proj": "one",
            "time_embedding.**": "one",
            "add_embedding.**": "one",
            **{f"down_blocks.{i}.downsamplers.**": f"level {i + 1}" for i in range(_MOST_LEVELS)},
            **{f"up_blocks.{i}.upsamplers.**": f"level {-2 - i}" for i in range(_MOST_LEVELS)},
            **{f"down_blocks.{i}.**": f"level {i}" for i in range(_MOST_LEVELS)},
            **{f"up_blocks.{i}.**": f"level {-1 - i}" for i in range(_MOST_LEVELS)},
            "mid_block.**": "level -1",
        },
        attention=(("**.attn1.to_q", "own", "own"), ("**.attn2.to_q", "own", "text")),
        convolutions={"**.resnets.*.conv1": 4, "**.resnets.*.conv2": 4, "conv_out": 4, "**": 0},  # norm, activation
        special=_special,
    ),
    originals=_original_names,
    published=(
        Published(
            "Stable Diffusion XL",
            _config(
                (320, 640, 1280),
                (False, True, True),
                sample_size=128,
                transformer_layers_per_block=[1, 2, 10],
                attention_head_dim=[5, 10, 20],
                cross_attention_dim=2048,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            ),
            also=("SDXL", "SDXL-Turbo"),
            beside=("CLIP-L", "CLIP-G with projection", "SDXL VAE"),
        ),
        Published(
            "Stable Diffusion 1.5",
            _config((320, 640, 1280, 1280), (True, True, True, False), sample_size=64, cross_attention_dim=768),
            also=("SD1.5",),
            beside=("CLIP-L", "SDXL VAE"),
        ),
    ),
    hub_ids={
        "Stable Diffusion XL": ("stabilityai/stable-diffusion-xl-base-1.0",),
        "SDXL": ("stabilityai/stable-diffusion-xl-base-1.0",),
        "SDXL-Turbo": ("stabilityai/sdxl-turbo",),
        "Stable Diffusion 1.5": ("stable-diffusion-v1-5/stable-diffusion-v1-5",),
        "SD1.5": ("stable-diffusion-v1-5/stable-diffusion-v1-5",),
    },
)
