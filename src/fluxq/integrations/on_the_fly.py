"""Quantizing a 16-bit model while a library loads it: the plan, and weights rounded as they arrive.

Only a configuration with a recipe needs this; a stored checkpoint is loaded without it.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.integrations.loading import FluxqConfig
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.nearest import joined_scale, quantize_weight, round_matrix, weight_to_round
from fluxq.quantize.structure import has_name_of_denoiser, model_family, shapes_of
from fluxq.recipes.plan import Plan, component_recipe, make_plan
from fluxq.recipes.recipe import load_recipe


def refuse_disk(device_map: object) -> None:
    """Raise ValueError for a device map with a disk part: weights are written there before they are quantized."""
    if isinstance(device_map, dict) and "disk" in device_map.values():
        raise ValueError(
            "a model cannot be quantized on the fly and offloaded to disk at once: write the checkpoint with "
            "`fluxq quantize` (or save_pretrained on a larger machine) and load that with this device_map"
        )


def plan_for(model: nn.Module, config: FluxqConfig) -> Plan | None:
    """Return the plan of config's recipe for a 16-bit model; None, with a warning, for a VAE that it does not name.

    Raises ValueError for a class that no family row knows and where the recipe needs calibration.
    """
    recipe_name, recipe = load_recipe(str(config.recipe), profile=config.profile)  # pyright: ignore[reportArgumentType]
    class_name = type(model).__name__
    if recipe.auto is not None:
        raise ValueError(
            f"recipe {recipe_name} chooses formats by a search, which loading cannot do: run `fluxq auto MODEL "
            f"--recipe {config.recipe}`, and give the recipe that it writes"
        )
    try:
        family = model_family(model)
    except ValueError as error:
        raise ValueError(
            f"{error}. Leave this component in 16 bit by naming those to quantize: "
            "PipelineQuantizationConfig(..., components_to_quantize=['transformer'])"
        ) from None
    if family.kind == "vae" and "vae" not in recipe.components:
        logger.warning(
            "%s stays in 16 bit: few of its weights are Linears, and its error would go straight into pixels; "
            "a recipe that names `vae` quantizes it",
            class_name,
        )
        return None
    entry = component_recipe(recipe, config.component, family)
    if recipe.needs_data(entry):
        raise ValueError(
            f"recipe {recipe_name} fits this {class_name} to data, which loading cannot do: run `fluxq quantize MODEL "
            f"--recipe {config.recipe}` and load what it writes, or pass profile='rtn', which only rounds to nearest"
        )
    component = config.component or family.kind
    is_called_so = has_name_of_denoiser if family.kind == "transformer" else lambda name: name.startswith(family.kind)
    if component not in recipe.components and not is_called_so(component):
        raise ValueError(
            f"component {component!r}: recipe {recipe_name} has no entry of that name, and {class_name} is a "
            f"{family.kind}: leave component= out, or add the entry"
        )
    plan = make_plan(
        family,
        class_name,
        entry.without(config.exclude),
        shapes_of(model),
        static_inputs=False,
        profile=recipe.profile,
        compat=recipe.compat,
        include=config.include,
    )
    for note in plan.notes:
        logger.warning(note)
    steps = recipe.steps if family.kind == "transformer" else None
    if steps and steps.compute:
        logger.warning(
            "recipe %s computes %g%% of the steps of a call, by a list that loading cannot make: "
            "`fluxq.skip_steps(pipe, compute=%g)` makes it once the pipeline is loaded",
            *(recipe_name, 100 * steps.compute, steps.compute),
        )
    return replace(plan, steps=steps and steps.kept)


class Arrivals:
    """Weights of a plan, rounded in whatever order, and from whichever thread, a loader brings them.

    A weight is rounded at once and its 16-bit form can go. Only those that share nvfp4's global scale, or fp8_tensor's
    one (q, k and v; a single block's q, k, v and proj_mlp) wait for one another. So beside the quantized model memory
    holds only the loader's own tensors and one such group.
    """

    def __init__(self, plan: Plan) -> None:
        self._layers = {f"{layer.name}.weight": layer for layer in plan.quantized}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._left = set(self._layers)
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._layers

    def add(self, name: str, weight: Tensor) -> dict[str, QuantizedTensor]:
        """Round the layers that this weight of a file completes: itself, its group, or none yet."""
        layer = self._layers[name]
        if not layer.scale_group:
            self._left.discard(name)
            return {layer.name: quantize_weight(weight, layer)}
        if not torch.isfinite(weight).all():  # it would reach the whole group's scale
            raise ValueError(f"{name}: holds NaN or infinity; get the source again, or exclude this layer")
        members = [n for n, other in self._layers.items() if other.scale_group == layer.scale_group]
        with self._lock:
            group = self._waiting.setdefault(layer.scale_group, {})
            group[name] = weight
            if len(group) < len(members):
                return {}
            del self._waiting[layer.scale_group]
            self._left.difference_update(members)
        layers = [self._layers[member] for member in members]
        # Each 16-bit form goes as soon as it is rotated, or rounded.
        matrices = [weight_to_round(group.pop(name), layer) for name, layer in zip(members, layers, strict=True)]
        scale = joined_scale(matrices, layers)
        return {layer.name: round_matrix(matrices.pop(0), layer, scale.clone()) for layer in layers}

    def require_all(self) -> None:
        """Raise ValueError naming a weight that never came."""
        if self._left:
            raise ValueError(
                f"{min(self._left)} did not pass through fluxq while the model was loaded, so it is not quantized; "
                "leave out offload_state_dict, or quantize first (`fluxq quantize`) and load the checkpoint"
            )
