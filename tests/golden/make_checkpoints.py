"""Goldens of our own: a FLUX of one double and one single block under every shipped recipe, as this version writes it.

`python tests/golden/make_checkpoints.py` leaves the quantized transformers in tests/golden/checkpoints, and in
`outputs.safetensors` there each one's output of one input on a CPU. Those that stand there were written by commit
06514f1 and are not written again: later versions load them and compute the same.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from make_models import CONFIG, HERE, model
from safetensors.torch import load_file, save_file

from fluxq import tiny
from fluxq.recipes.recipe import load_recipe, shipped_recipes

CHECKPOINTS = HERE / "checkpoints"
OUTPUTS = CHECKPOINTS / "outputs.safetensors"


def inputs() -> dict[str, Any]:
    """Return the arguments of the call that `outputs.safetensors` is of."""
    g = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=g).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 5, 64, generator=g).bfloat16(),
        "pooled_projections": torch.randn(1, 64, generator=g).bfloat16(),
        "timestep": torch.tensor([0.5]).bfloat16(),
        "img_ids": torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], 1),
        "txt_ids": torch.zeros(5, 3),
    }


def main() -> None:
    """Write the checkpoints that are not there."""
    CONFIG.update(joint_attention_dim=64, pooled_projection_dim=64)
    outputs = load_file(OUTPUTS) if OUTPUTS.exists() else {}
    pipe = tiny.load()
    pipe.register_modules(transformer=model())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pipe.save_pretrained(folder / "pipe")
        for recipe in shipped_recipes():
            if (CHECKPOINTS / recipe).exists():
                continue
            calibrated = load_recipe(recipe)[1].calibration is not None
            text = f"extends: {recipe}\n" + ("calibration: {count: 2, steps: 2}\n" if calibrated else "")
            (folder / "recipes").mkdir(exist_ok=True)
            (folder / "recipes" / f"{recipe}.yaml").write_text(text)
            made = folder / f"made-{recipe}"
            command = [str(Path(sys.executable).with_name("fluxq")), "quantize", str(folder / "pipe"), "--no-check"]
            subprocess.run(
                [*command, "--recipe", f"{recipe}.yaml", "-o", str(made)], cwd=folder / "recipes", check=True
            )
            shutil.copytree(made / "transformer", CHECKPOINTS / recipe)
            loaded = FluxTransformer2DModel.from_pretrained(CHECKPOINTS / recipe, torch_dtype=torch.bfloat16)
            with torch.inference_mode():
                outputs[recipe] = loaded(**inputs()).sample.contiguous()
            save_file(outputs, OUTPUTS)


if __name__ == "__main__":
    main()
