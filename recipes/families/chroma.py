"""Describe Chroma."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxq.recipes.family import EMBEDDER, FINAL, SHARED, Family, Published, Workload, both_at_once, image_and_text
from fluxq.recipes.keymap_rows import BFL_ENDS, BFL_SINGLE, bfl_double, rows

_ORIGINALS = rows(
    {
        **BFL_ENDS,
        "distilled_guidance_layer.in_proj": "distilled_guidance_layer.in_proj",
        "distilled_guidance_layer.out_proj": "distilled_guidance_layer.out_proj",
        "distilled_guidance_layer.layers.*.in_layer": "distilled_guidance_layer.layers.*.linear_1",
        "distilled_guidance_layer.layers.*.out_layer": "distilled_guidance_layer.layers.*.linear_2",
        "distilled_guidance_layer.norms.*.scale": "distilled_guidance_layer.norms.*.weight",
        **bfl_double("net.0.proj", "net.2"),
        **BFL_SINGLE,
    }
)


def _special(rows: int, columns: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Count the vectors that Chroma's network makes: shift, scale and gate of each norm, and two of the last."""
    return {"modulations": 12 * config["num_layers"] + 3 * config["num_single_layers"] + 2}


CHROMA = Family(
    name="chroma",
    model="ChromaTransformer2DModel",
    groups=(
        # FLUX.1 with one network that makes the modulation of all blocks: nothing to fold into.
        *image_and_text("transformer_blocks.*"),
        *both_at_once("single_transformer_blocks.*"),
    ),
    keep={
        EMBEDDER: ("x_embedder", "context_embedder"),
        SHARED: ("distilled_guidance_layer.**",),
        FINAL: ("proj_out",),
    },
    workload=Workload(
        text=512,
        patch=2,  # as for FLUX.1
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
        ),
        special=_special,
    ),
    originals=_ORIGINALS,
    published=(
        Published(
            "Chroma1-HD",
            {"num_layers": 19, "num_single_layers": 38},
            also=("Chroma1-Base",),
            beside=("T5-XXL", "FLUX.1 VAE"),
        ),
    ),
    hub_owner="lodestones",
)
