"""The node *fluxq load*: a MODEL of ComfyUI whose quantized layers are fluxq's own.

ComfyUI's model is made by ComfyUI, of 16-bit tensors under its names and, for quantized layers, tensors on the meta
device that have no more than shapes. Then the quantized layers take their places. Where ComfyUI joins what diffusers
splits (q, k and v), one module computes the parts and joins outputs, so that codes and scales are those of the files.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.base.files import read_json
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.kernels.linear import QuantLinear, QuantPointwise, quant_layers
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.computing import QuantizationConfig, quantization_of
from fluxq.recipes.family import Family
from fluxq.recipes.keymap_rows import Order
from fluxq.recipes.keymaps import original_names


class FluxqLoad:
    """Load a checkpoint that `fluxq quantize` wrote, from a folder in ComfyUI's models/diffusion_models."""

    CATEGORY = "fluxq"
    FUNCTION = "load"
    DESCRIPTION = "Loads a checkpoint of fluxq with rotation, low rank, deflation or centring. No LoRA."
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"checkpoint": (sorted(checkpoints()),)}}

    def load(self, checkpoint: str) -> tuple[Any]:
        """Return a ModelPatcher; ValueError says what is wrong with the checkpoint, and what to do."""
        folders = checkpoints()
        if checkpoint not in folders:
            raise ValueError(
                f"fluxq load: no checkpoint {checkpoint!r} in {', '.join(_roots())}; copy the folder that "
                "`fluxq quantize` wrote there"
            )
        return (load_model(folders[checkpoint]),)


class JoinedLinear(nn.Module):
    """Linears on the same input whose outputs follow each other along N, as one module.

    A part that ComfyUI left on another device, for want of memory, is copied to that of the input for the call.

    weight: None; ComfyUI 0.33 looks at it to see whether the layer can take an activation in, which codes here cannot.
    """

    weight = None

    def __init__(self, parts: list[nn.Module], order: Order = "as they are") -> None:
        super().__init__()
        self.parts, self.order = nn.ModuleList(parts), order

    def forward(self, x: Tensor) -> Tensor:
        """Compute (…, ΣN) of x (…, K), in the dtype of x; layers compute in their own."""
        outputs = [_on(part, x.device)(x.to(_dtype(part))).to(x.dtype) for part in self.parts]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return torch.cat(y.chunk(2, -1)[::-1], -1) if self.order == "halves swapped" else y


def checkpoints() -> dict[str, Path]:
    """Return name -> folder of fluxq's checkpoints in models/diffusion_models, to a depth of two folders."""
    folders = {}
    for root in map(Path, _roots()):
        for folder in (*root.glob("*/"), *root.glob("*/*/")):
            if any(_is_ours(config) for config in (folder / "config.json", *folder.glob("*/config.json"))):
                folders[folder.relative_to(root).as_posix()] = folder
    nested = {name for name in folders if any(name.startswith(f"{other}/") for other in folders)}
    return {name: folder for name, folder in folders.items() if name not in nested}


def load_model(path: Path) -> Any:
    """Return ComfyUI's ModelPatcher of the denoiser in a pipeline folder, or in the folder of one model.

    Raises ValueError for a folder without quantized denoiser, and a family whose names in ComfyUI are not known.
    """
    import diffusers

    folder = resolve_model(str(path), one_model=True)
    component, family = denoiser_of(folder)
    kind = getattr(diffusers, family.model)
    dtype = computing_dtype()
    model = kind.from_pretrained(folder.path / component, dtype=dtype, use_safetensors=True)
    if all(_is_native(layer) for _, layer in quant_layers(model)):
        logger.info("ComfyUI loads %s by itself, and faster: fluxq export %s --format comfy", folder.name, path)
    _warn_of_unused(QuantizationConfig.from_dict(folder.config(component)["quantization_config"]), folder.name)
    state, modules = translated(family.name, model)
    return _patcher(state, modules, dtype, folder.name)


def computing_dtype() -> torch.dtype:
    """Return the dtype in which ComfyUI computes models in bf16 on its device: bf16, fp16, or fp32 as on a CPU."""
    from comfy import model_management  # pyright: ignore[reportMissingImports]

    device, dtypes = model_management.get_torch_device(), [torch.bfloat16, torch.float16, torch.float32]
    return model_management.unet_manual_cast(torch.bfloat16, device, dtypes) or torch.bfloat16


def denoiser_of(folder: ModelFolder) -> tuple[str, Family]:
    """Return the component that fluxq quantized and ComfyUI has a model of, and its family; ValueError without one."""
    quantized = {name: kind for name, kind in folder.components.items() if _is_ours(folder.path / name / "config.json")}
    families = {family.model: family for family in FAMILIES.values() if family.originals}
    mapped = {name: families[kind] for name, kind in quantized.items() if kind in families}
    if len(mapped) == 1:
        return mapped.popitem()
    if len(mapped) > 1:
        raise ValueError(
            f"fluxq load: {folder.name} has {len(mapped)} quantized denoisers ({', '.join(mapped)}); "
            "put the folder of one of them into models/diffusion_models"
        )
    if not quantized:
        raise ValueError(
            f"fluxq load: nothing in {folder.name} is quantized by fluxq; load a 16-bit model with "
            "*Load Diffusion Model*"
        )
    names = ", ".join(family.name for family in families.values())
    raise ValueError(
        f"fluxq load: ComfyUI's names of {', '.join(quantized.values())} are not known (known: {names}); "
        "run it in diffusers, which loads the folder as it is"
    )


def translated(family: str, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, JoinedLinear]]:
    """Return (tensors by ComfyUI's names, module name -> module) of a model of diffusers.

    Tensors of the modules are there on the meta device, for their shapes.
    """
    layers = dict(quant_layers(model))
    if images := [name for name, layer in layers.items() if isinstance(layer, QuantPointwise)]:
        raise ValueError(f"fluxq load: {images[0]} is a quantized convolution, which is not run here; use diffusers")
    tensors = {name: value for name, value in model.state_dict().items() if name.rpartition(".")[0] not in layers}
    for name, layer in layers.items():
        plain = layer.plain(layer.bias is not None, layer.compute_dtype)
        tensors |= {f"{name}.{part}": value.data for part, value in plain.named_parameters()}
    state: dict[str, Tensor] = {}
    modules: dict[str, JoinedLinear] = {}
    for original, parts, order in original_names(family, tensors.keys()):
        owners = [part.rpartition(".")[0] for part in parts]
        if any(owner in layers for owner in owners):
            modules.setdefault(
                original.rpartition(".")[0], JoinedLinear([model.get_submodule(o) for o in owners], order)
            )
            state[original] = torch.cat([tensors[part].to("meta") for part in parts])
        elif parts:
            pieces = [tensors[part] for part in parts]
            rows = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            state[original] = torch.cat(rows.chunk(2)[::-1]) if order == "halves swapped" else rows
    return state, modules


def _patcher(state: dict[str, Tensor], modules: Mapping[str, JoinedLinear], dtype: torch.dtype, name: str) -> Any:
    import comfy.sd  # pyright: ignore[reportMissingImports]

    options = {"custom_operations": _operations(), "dtype": dtype}
    patcher = comfy.sd.load_diffusion_model_state_dict(dict(state), model_options=options)
    if patcher is None:
        raise ValueError(
            f"fluxq load: this ComfyUI knows no model of the shapes of {name}; update ComfyUI, or run it in diffusers"
        )
    net = patcher.model.diffusion_model
    present = dict(net.named_modules())
    if missing := [module for module in modules if module not in present]:
        raise ValueError(f"fluxq load: ComfyUI's {type(net).__name__} has no {missing[0]!r}; update fluxq")
    for module, joined in modules.items():
        net.set_submodule(module, joined)
    return _patcher_class()(patcher.model, patcher.load_device, patcher.offload_device)


def _operations() -> type:
    """Return ComfyUI's layers, of which Linears take no memory for a weight that comes on the meta device."""
    import comfy.ops  # pyright: ignore[reportMissingImports]

    class Operations(comfy.ops.manual_cast):
        class Linear(comfy.ops.manual_cast.Linear):
            def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
                weight = state_dict.get(f"{prefix}weight")
                if weight is not None and weight.is_meta:
                    self.weight = self.bias = None
                else:
                    super()._load_from_state_dict(state_dict, prefix, *args)

    return Operations


def _patcher_class() -> type:
    import comfy.model_patcher  # pyright: ignore[reportMissingImports]

    class FluxqPatcher(comfy.model_patcher.ModelPatcher):
        """ComfyUI's handle on a model; one of fluxq takes no LoRA, and gives no weights to a merge."""

        def add_patches(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError(
                "fluxq load: no LoRA or merge goes into quantized layers here; fuse it while quantizing (fluxq "
                "quantize MODEL --lora FILE), or take its node off this model"
            )

        add_hook_patches = get_key_patches = add_patches

    return FluxqPatcher


def _warn_of_unused(stored: QuantizationConfig, name: str) -> None:
    """Say which settings of the checkpoint ComfyUI's attention and samplers leave aside."""
    settings = {
        "attention": stored.attention != "16bit",
        "steps in 16 bit": stored.steps,
        "list of steps": stored.step_lists,
    }
    if unused := [setting for setting, is_set in settings.items() if is_set]:
        logger.warning("fluxq load: %s has %s, which ComfyUI does not use", name, ", ".join(unused))


def _roots() -> list[str]:
    import folder_paths  # pyright: ignore[reportMissingImports]  ComfyUI's

    return folder_paths.get_folder_paths("diffusion_models")


def _is_ours(config: Path) -> bool:
    """Tell whether a config.json says that fluxq quantized its model; what is no such file says nothing."""
    try:
        return quantization_of(read_json(config)) is not None
    except (OSError, ValueError):
        return False


def _is_native(layer: QuantLinear) -> bool:
    """Tell whether ComfyUI itself has a layer's format, as `fluxq export --format comfy` would write it."""
    from fluxq.quantize.exchange.dialects import misfit  # late: loading needs no dialects

    is_of_kitchen = layer.scheme.weights.element.name == "int4"  # comfy-kitchen decodes it, ComfyUI loads none
    return not is_of_kitchen and not misfit(layer.scheme, (layer.out_features, layer.in_features), "comfy")


def _dtype(part: nn.Module) -> torch.dtype:
    return part.compute_dtype if isinstance(part, QuantLinear) else part.weight.dtype  # pyright: ignore


def _on(part: nn.Module, device: torch.device) -> nn.Module:
    """Return the part itself if it is on a device, else a copy of it there."""
    if all(tensor.device == device for tensor in part.parameters()):
        return part
    moved = copy.copy(part)
    moved._parameters = {
        name: None if tensor is None else nn.Parameter(tensor.to(device), requires_grad=False)
        for name, tensor in part._parameters.items()
    }
    return moved
