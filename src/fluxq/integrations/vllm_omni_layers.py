"""Layers of vLLM-Omni's own models that compute with fluxq's ops, from a checkpoint of fluxq.

vLLM-Omni makes one Linear of several that read the same input (`to_qkv` of `to_q`, `to_k`, `to_v`), and cuts Linears
over ranks. So a Linear of its own holds a QuantLinear for each part, cut by runtime/shard.py; their outputs stand side
by side. Layers that it makes without asking for a method, and parts of which only some are quantized, are loaded as
the 16-bit weights that their codes stand for.

This file needs vLLM: nothing but the builder that vllm_omni.py registers imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (  # pyright: ignore[reportMissingImports]
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (  # pyright: ignore[reportMissingImports]
    QuantizationConfig as VllmConfig,
)
from vllm.model_executor.layers.quantization.inc import INCConfig  # pyright: ignore[reportMissingImports]

from fluxq.base.console import logger
from fluxq.kernels.linear import BRANCHES, SCALE_NAMES, QuantLinear, branch_shapes
from fluxq.kernels.tensor import stored_shapes
from fluxq.recipes.computing import QUANT_METHOD, QuantizationConfig
from fluxq.recipes.formats import Scheme
from fluxq.runtime.shard import partial_product, require_row_parallel, shard

JOINED = {  # a Linear of vLLM-Omni -> those of diffusers that it is made of, in order
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "w13": ("w1", "w3"),
}
SHARDS = {"q": 0, "k": 1, "v": 2}  # what loaders call parts of `to_qkv`; other parts have numbers
Axis = Literal["N", "K"]


class FluxqVllmConfig(INCConfig):
    """`quantization_config` of a checkpoint of fluxq, for vLLM-Omni's own models.

    A subclass of INC's, of which nothing is used, because vLLM-Omni asks for that class before it lets a checkpoint
    say how modulation and FLUX.1's double blocks are stored (`safe_quant_config`): of others they stay in 16 bit.

    Raises ValueError for what this version of fluxq does not read.
    """

    is_checkpoint_quantized = True  # nothing is rounded after loading

    def __init__(self, stored: QuantizationConfig) -> None:
        VllmConfig.__init__(self)
        self.stored, self.schemes = stored, stored.schemes

    def get_name(self) -> Any:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FluxqVllmConfig:
        return cls(QuantizationConfig.from_dict(dict(config)))

    def apply_vllm_mapper(self, *_: Any) -> None:
        """Keep the checkpoint's names."""

    def __repr__(self) -> str:
        return f"FluxqVllmConfig of {len(self.schemes)} layers"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a Linear by its name in the model; None for modules of other kinds."""
        if not isinstance(layer, LinearBase):
            return None
        schemes = [self.scheme_of(name) for name in self.parts_of(prefix)]
        known = [scheme for scheme in schemes if scheme is not None]
        return FluxqLinearMethod(prefix, known) if len(known) == len(schemes) else UnquantizedLinearMethod()

    def parts_of(self, prefix: str) -> list[str]:
        """Return the names in the checkpoint that a Linear called `prefix` is made of."""
        parent, _, last = prefix.rpartition(".")
        joined = {**JOINED, **getattr(self, "packed_modules_mapping", {})}
        return [f"{parent}.{part}" if parent else part for part in joined.get(last, (last,))]

    def scheme_of(self, name: str) -> Scheme | None:
        """Return the scheme of a layer, whatever its model is called in the pipeline."""
        name = name.removeprefix("transformer.")
        return self.schemes.get(name) or self.schemes.get(f"{name}.0")  # to_out is a list in diffusers


class FluxqLinearMethod(LinearMethodBase):
    """A Linear of vLLM-Omni made of one or more layers of fluxq.

    schemes: of its parts, in order. Parameters are placeholders without elements until the files' tensors arrive,
    because parts differ in dtypes and shapes.
    """

    def __init__(self, prefix: str, schemes: Sequence[Scheme]) -> None:
        self.prefix, self.schemes = prefix, schemes

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Give the layer a placeholder for every tensor that one of its parts has in the checkpoint."""
        if len(output_partition_sizes) != len(self.schemes):
            raise ValueError(
                f"{self.prefix} has {len(output_partition_sizes)} parts in vLLM-Omni and {len(self.schemes)} in the "
                "checkpoint: serve it with --diffusion-load-format diffusers"
            )
        axis = "K" if input_size_per_partition != input_size else "N"
        ranks = layer.tp_size if axis == "K" or sum(output_partition_sizes) != output_size else 1
        for scheme in self.schemes if axis == "K" and ranks > 1 else ():
            try:
                require_row_parallel(scheme)
            except ValueError as error:
                raise ValueError(f"{self.prefix}: {error}") from None
        sizes = [size * (ranks if axis == "N" else 1) for size in output_partition_sizes]
        parts = [
            Part(scheme, (size, input_size), axis, layer.tp_rank if ranks > 1 else 0, ranks, params_dtype)
            for scheme, size in zip(self.schemes, sizes, strict=True)
        ]
        layer.fluxq_arriving = parts
        for name in dict.fromkeys(name for part in parts for name in part.missing):
            placeholder = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            vars(placeholder)["weight_loader"] = functools.partial(self._arrive, parts, name)
            layer.register_parameter(name, placeholder)

    def _arrive(
        self, parts: Sequence[Part], name: str, _: nn.Parameter, tensor: Tensor, shard_id: str | int | None = None
    ) -> None:
        index = 0 if shard_id is None else SHARDS.get(str(shard_id), shard_id)
        if not isinstance(index, int) or not 0 <= index < len(parts):
            raise ValueError(f"{self.prefix} has no part {shard_id!r} to load {name} into")
        parts[index].take(f"{self.prefix}.{name}", name, tensor)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the parts into the layer, each with its share of the bias, and on a GPU lay them out for it."""
        arriving: list[Part] = layer.fluxq_arriving
        del layer.fluxq_arriving
        device = layer.weight.device
        for name in dict.fromkeys(name for part in arriving for name in part.names):
            delattr(layer, name)
        layers, start = [], 0
        for part in arriving:
            quantized = part.finished(self.prefix).to(device)
            if layer.bias is not None and not layer.skip_bias_add:
                part.set_bias(quantized, layer.bias.data[start : start + quantized.out_features])
            start += quantized.out_features
            layers.append(quantized)
        layer.fluxq_parts = nn.ModuleList(layers)
        layer.fluxq_is_row_parallel = arriving[0].axis == "K" and arriving[0].ranks > 1
        if device.type == "cuda":
            _lay_out(layers, device)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute (…, N) of x (…, K); the bias is in the parts. Of K cut over ranks it is this rank's summand."""
        if layer.fluxq_is_row_parallel:
            from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

            return partial_product(layer.fluxq_parts[0], x, get_tp_group().device_group).to(x.dtype)
        products = [part.of_tokens(x) for part in layer.fluxq_parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class Part:
    """A layer of the checkpoint while its tensors arrive, in whatever order; cut once they are all there.

    shape: (N, K) of the whole layer. axis, rank, ranks: its share. dtype: of its computation.
    """

    def __init__(
        self, scheme: Scheme, shape: tuple[int, int], axis: Axis, rank: int, ranks: int, dtype: torch.dtype
    ) -> None:
        self.scheme, self.shape, self.rank, self.ranks = scheme, shape, rank, ranks
        self.axis: Axis = axis
        self.dtype = dtype
        self.names = tuple(tensor_names(scheme, shape))
        self.missing, self.tensors = set(self.names), {}
        self.layer: QuantLinear | None = None

    def take(self, full_name: str, name: str, tensor: Tensor) -> None:
        if name not in self.missing:
            raise ValueError(f"{full_name} is in the weight files, and a layer of {self.scheme} has none, or it twice")
        self.missing.remove(name)
        self.tensors[name] = tensor if name in ("weight", *SCALE_NAMES) else tensor.to(self.dtype)
        if not self.missing:
            self.layer = self._cut()

    def _cut(self) -> QuantLinear:
        layer = layer_of(self.tensors, self.shape, self.scheme, self.dtype)
        self.tensors = {}
        return shard(layer, self.axis, self.rank, self.ranks) if self.ranks > 1 else layer

    def finished(self, prefix: str) -> QuantLinear:
        if self.layer is None:
            raise ValueError(f"the weight files lack {sorted(self.missing)[0]} of {prefix}: copy them again")
        return self.layer

    def set_bias(self, layer: QuantLinear, bias: Tensor) -> None:
        """Give a share its bias; of a sum over ranks the first has it."""
        if self.axis == "N" or not self.rank:
            layer._parameters["bias"] = nn.Parameter(bias.to(self.dtype), requires_grad=False)


def tensor_names(scheme: Scheme, shape: tuple[int, int]) -> Iterator[str]:
    """Yield the names of a layer's tensors in a checkpoint, but for the bias."""
    yield from stored_shapes(scheme.weights, *shape)
    if scheme.static_input:
        yield "input_scale"
    yield from branch_shapes(scheme, *shape)


def layer_of(tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme, dtype: torch.dtype) -> QuantLinear:
    """Make the layer of a checkpoint's tensors; without a bias, or where the scheme needs one with zeros."""
    held = dict(tensors)
    if scheme.center and "bias" not in held:
        held["bias"] = torch.zeros(shape[0], dtype=dtype, device=held["weight"].device)
    layer = QuantLinear.from_tensors(held, shape, scheme)
    layer.compute_dtype = dtype
    return layer


def _lay_out(layers: Iterable[QuantLinear], device: torch.device) -> None:
    """Lay layers out for a GPU, as `fluxq.prepare` does."""
    from fluxq.kernels.tiles import chip_of
    from fluxq.runtime.prepare import prepare_layer

    for layer in layers:
        prepare_layer(layer, device, chip_of(device), "speed", None)


class FluxqCheckpointAdapter:
    """The weights of a checkpoint as a model of vLLM-Omni takes them.

    Tensors of layers that it computes with fluxq's ops pass. Those of other layers become 16-bit weights.
    """

    def __init__(self, model: nn.Module, config: FluxqVllmConfig, prefix: str = "") -> None:
        self.config, self.prefix = config, prefix
        self.taken = {
            part.removeprefix("transformer.")
            for name, module in model.named_modules()
            if isinstance(getattr(module, "quant_method", None), FluxqLinearMethod)
            for part in config.parts_of(name.removeprefix(prefix))
        }

    def adapt(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the model's parameters."""
        held: dict[str, dict[str, Tensor]] = {}
        for full, tensor in weights:
            name, _, part = full.removeprefix(self.prefix).rpartition(".")
            scheme = self.config.schemes.get(name)
            is_whole = scheme is None or name in self.taken or name.removesuffix(".0") in self.taken
            if is_whole or part not in ("weight", *SCALE_NAMES, *BRANCHES, "bias"):
                yield full, tensor
                continue
            held.setdefault(name, {})[part] = tensor
        for name, tensors in held.items():
            yield from self._in_16_bit(name, self.config.schemes[name], tensors)
        if held:
            logger.warning(
                "vLLM-Omni makes %d layers of this checkpoint in 16 bit whatever they are stored in, such as %s: they "
                "take 16-bit memory, and their inputs are not rounded",
                len(held),
                next(iter(held)),
            )

    def _in_16_bit(self, name: str, scheme: Scheme, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        rows, columns = tensors["weight"].shape
        shape = rows, columns * 8 // scheme.weights.element.bits
        weight, bias = layer_of(tensors, shape, scheme, torch.bfloat16).collapsed()
        yield f"{self.prefix}{name}.weight", weight.to(torch.bfloat16)
        if bias is not None:
            yield f"{self.prefix}{name}.bias", bias.to(torch.bfloat16)
