"""Tiny transformers of the families that `fluxq.optimize` fuses, calls of them, and what a call was computed by."""

import zlib
from collections import Counter

import diffusers
import torch
from peft import LoraConfig
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fluxq.kernels.linear import QuantLinear, branch_shapes
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.all_families import FAMILIES, family_of
from fluxq.recipes.family import Family
from fluxq.recipes.formats import Scheme
from fluxq.runtime import fused

FUSABLE = {name: family for name, family in FAMILIES.items() if family.fusable}
FULL = "nvfp4-nvfp4-static-center-smooth-h16-46-r4"
BLOCKS = {"flux": 3, "flux2": 3, "sd3": 2, "qwen_image": 2, "wan": 2}  # of the tiny configurations
TEXT_TOKENS = 5
SMALL, LARGE = (1, 7), (5, 7)  # rows and columns of an image's tokens


def quantized(scheme: str, dtype: torch.dtype = torch.bfloat16, family: str = "flux", **config) -> nn.Module:
    """A family's tiny configuration under a scheme; what a group's layers do to their input is the same."""
    torch.manual_seed(0)
    row = FAMILIES[family]
    model = getattr(diffusers, row.model).from_config({**TINY_CONFIGS[row.name], **config})
    model = model.to(dtype).eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if "norm_" in name and isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.ndim == 1:
            module.weight.data = (1 + 0.2 * torch.randn(module.weight.shape)).to(dtype)
        if isinstance(module, nn.Linear) and not row.kept(name):
            put(model, name, scheme)
    if family == "wan":  # as `from_pretrained` leaves it
        for module in model.modules():
            if type(module).__name__ in ("FP32LayerNorm", "WanRotaryPosEmbed"):
                module.float()
            if hasattr(module, "scale_shift_table"):
                module.scale_shift_table.data = module.scale_shift_table.data.float()
        for block in model.blocks:
            block.norm2.weight.data += 0.2 * torch.randn(block.norm2.weight.shape)
            block.norm2.bias.data += 0.2 * torch.randn(block.norm2.bias.shape)
    return model


def put(model: nn.Module, path: str, scheme: str) -> None:
    """Hold the Linear at `path` under a scheme, its vectors drawn for its input group."""
    parent, _, name = path.rpartition(".")
    linear = model.get_submodule(path)
    weight, bias, dtype = plain(linear)
    if scheme == "16 bit":
        layer = nn.Linear(linear.in_features, linear.out_features, bias is not None, dtype=dtype).requires_grad_(False)
        layer.weight.data = weight.to(dtype)
        if bias is not None:
            layer.bias.data = bias
    else:
        group, block = family(model).locate(path)
        seed = zlib.crc32(f"{block} {group.members[0]}".encode())
        layer = _layer(weight, bias, dtype, Scheme.parse(scheme), seed)
    model.get_submodule(parent).register_module(name, layer)


def plain(linear: nn.Linear) -> tuple[Tensor, Tensor | None, torch.dtype]:
    bias = None if linear.bias is None else linear.bias.data
    if isinstance(linear, QuantLinear):
        return linear.collapsed()[0], bias, linear.compute_dtype
    return linear.weight.data, bias, linear.weight.dtype


def _layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, scheme: Scheme, seed: int) -> QuantLinear:
    n, k = weight.shape
    noise = torch.Generator().manual_seed(seed)
    branches = {}
    for name, shape in branch_shapes(scheme, n, k).items():
        drawn = torch.randn(shape, generator=noise)
        branches[name] = (drawn.abs() + 0.5 if name == "pre_quant_scale" else 0.1 * drawn).to(dtype)
    scale = torch.tensor(0.002) if scheme.static_input else None
    if scheme.center and bias is None:  # what a mean becomes
        bias = torch.randn(n, generator=noise).to(dtype)
    return QuantLinear.from_quantized(QuantizedTensor.quantize(weight, scheme.weights), bias, scheme, scale, branches)


def family(model: nn.Module) -> Family:
    return family_of(type(model).__name__)


def layers(model: nn.Module) -> list[QuantLinear]:
    return [module for module in model.modules() if isinstance(module, QuantLinear)]


def adapt(model: nn.Module, ends: list[str]) -> None:
    """Put an adapter "a" around Linears, with an up-projection that is not 0."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in names if any(name.endswith(f".{end}") for end in ends)]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False), "a")


def output(
    model: nn.Module, images: int = 1, size: tuple[int, int] = SMALL, grad: bool = False, prompt: int = 1, **arguments
) -> Tensor:
    """Return a transformer's output for drawn inputs; prompt: seed of the text."""
    noise, words = torch.Generator().manual_seed(1), torch.Generator().manual_seed(prompt)
    name, dtype, (h, w) = family(getattr(model, "_orig_mod", model)).name, model.proj_out.weight.dtype, size

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise).to(dtype)

    def text(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=words).to(dtype)

    steps = torch.linspace(0.2, 0.9, images)
    given = {"timestep": (1000 * steps if name in ("sd3", "wan") else steps).to(dtype), "return_dict": False}
    given["encoder_hidden_states"] = text(images, 512 if name == "wan" else TEXT_TOKENS, 64)
    if name == "sd3":
        given |= {"hidden_states": draw(images, 4, 2 * h, 2 * w), "pooled_projections": text(images, 64)}
    elif name == "wan":
        given |= {"hidden_states": draw(images, 4, 1, 2 * h, 2 * w), "encoder_hidden_states_image": draw(images, 6, 64)}
    elif name == "qwen_image":
        of_text = torch.arange(TEXT_TOKENS) < torch.arange(TEXT_TOKENS, TEXT_TOKENS - images, -1)[:, None]
        given |= {"encoder_hidden_states_mask": of_text, "img_shapes": [[(1, h, w)]] * images}
        given |= {"hidden_states": draw(images, h * w, 16)}
    else:
        axes = 4 if name == "flux2" else 3
        given |= {"hidden_states": draw(images, h * w, 16), "txt_ids": torch.zeros(TEXT_TOKENS, axes)}
        given |= {"img_ids": torch.arange(axes * h * w).view(h * w, axes).float()}
        given |= {"guidance": steps.to(dtype)} if name == "flux2" else {"pooled_projections": text(images, 64)}
    with torch.set_grad_enabled(grad):
        return model(**(given | arguments))[0]


class Calls:
    """Counts the blocks of a call that were fused, and keeps the reasons of the others."""

    def __init__(self) -> None:
        self.fused, self.reasons = 0, set()

    def __enter__(self) -> "Calls":
        self.own = fused._why_plain

        def why_plain(*arguments) -> str:
            why = self.own(*arguments)
            self.fused += not why
            self.reasons |= {why} - {""}
            return why

        fused._why_plain = why_plain
        return self

    def __exit__(self, *_) -> None:
        fused._why_plain = self.own


def fused_calls(model: nn.Module, **call) -> int:
    with Calls() as calls:
        output(model, **call)
    return calls.fused


class Count(TorchDispatchMode):
    """Counts calls of fluxq's ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fluxq":
            self.found[func._schema.name.removeprefix("fluxq::")] += 1
        return func(*args, **(kwargs or {}))


def ops(model: nn.Module, **call) -> Counter:
    with Count() as count:
        output(model, **call)
    return count.found
