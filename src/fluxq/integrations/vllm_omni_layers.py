"""Layers of vLLM-Omni's own models that compute with fluxq's ops, from a checkpoint of fluxq.

vLLM-Omni makes one Linear of several that read the same input (`to_qkv` of `to_q`, `to_k`, `to_v`), and cuts Linears
over ranks. So a Linear of its own holds a QuantLinear for each part, cut by runtime/shard.py; their outputs stand side
by side. Layers that it makes without asking for a method, and parts of which only some are quantized, are loaded as
the 16-bit weights that their codes stand for.

This file needs vLLM: nothing but the builder that vllm_omni.py registers imports it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
from fluxq.integrations.engine import checked_prefer
from fluxq.integrations.loading import CODES, QUANTIZED
from fluxq.kernels.linear import SCALE_NAMES, QuantLinear, branch_shapes, stored_dtype
from fluxq.kernels.tensor import stored_shapes
from fluxq.recipes.computing import POLICY, QUANT_METHOD, QuantizationConfig
from fluxq.recipes.formats import Scheme
from fluxq.runtime.shard import partial_product, require_row_parallel, shard

JOINED = {  # a Linear of vLLM-Omni -> those of diffusers that it is made of, in order
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "w13": ("w1", "w3"),
}
COMPONENT = re.compile(r"^transformer(_\d+)?\.")  # what models are called in pipelines: Wan's experts are two
LISTED = re.compile(r"\.net_(\d+)(?=\.|$)")  # Wan's feed-forward has attributes where diffusers has a list
SHARDS = {"q": 0, "k": 1, "v": 2}  # what loaders call parts of `to_qkv`; other parts have numbers
PLAIN = (torch.bfloat16, torch.float16, torch.float32)  # of what is not codes or scales
OTHERWISE = "serve it with --diffusion-load-format diffusers"
Axis = Literal["N", "K"]


class FluxqVllmConfig(INCConfig):
    """`quantization_config` of a checkpoint of fluxq, for vLLM-Omni's own models.

    A subclass of INC's, of which nothing is used, because vLLM-Omni asks for that class before it lets a checkpoint
    say how modulation and FLUX.1's double blocks are stored (`safe_quant_config`): of others they stay in 16 bit.

    prefer: that of `runtime` in config.json, by which a GPU lays layers out; "" where it cannot be had.

    Raises ValueError for what this version of fluxq does not read.
    """

    is_checkpoint_quantized = True  # nothing is rounded after loading

    def __init__(self, stored: QuantizationConfig) -> None:
        VllmConfig.__init__(self)
        self.stored, self.schemes = stored, stored.schemes
        self.prefer = _preference(stored)

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
        names = [self.stored_name(part) for part in self.parts_of(prefix)]
        known = [name for name in names if name is not None]
        return FluxqLinearMethod(prefix, known, self) if len(known) == len(names) else UnquantizedLinearMethod()

    def parts_of(self, prefix: str) -> list[str]:
        """Return what diffusers calls the Linears that one called `prefix` is made of."""
        parent, _, last = prefix.rpartition(".")
        joined = {**JOINED, **getattr(self, "packed_modules_mapping", {})}
        return [f"{parent}.{part}" if parent else part for part in joined.get(last, (last,))]

    def stored_name(self, name: str) -> str | None:
        """Return a layer's name in the checkpoint, whatever its model is called; None for one it does not quantize."""
        name = LISTED.sub(r".net.\1", COMPONENT.sub("", name))
        return next((each for each in (name, f"{name}.0") if each in self.schemes), None)  # to_out is a list there


class FluxqLinearMethod(LinearMethodBase):
    """A Linear of vLLM-Omni made of one or more layers of fluxq.

    names: of its parts in the checkpoint, in order. Parameters are placeholders without elements until the files'
    tensors arrive, because parts differ in dtypes and shapes.
    """

    def __init__(self, prefix: str, names: Sequence[str], config: FluxqVllmConfig) -> None:
        self.prefix, self.names, self.config = prefix, names, config
        self.schemes = [config.schemes[name] for name in names]

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
                f"checkpoint: {OTHERWISE}"
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
            Part(name, scheme, (size, input_size), axis, layer.tp_rank if ranks > 1 else 0, ranks, params_dtype)
            for name, scheme, size in zip(self.names, self.schemes, sizes, strict=True)
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
        parts[index].take(name, tensor)

    def await_bias(self, layer: Any) -> None:
        """Take the parts' biases, too, since vLLM-Omni's layer has none: those of layers that center their inputs."""
        for part in layer.fluxq_arriving:
            if part.scheme.center:
                part.await_bias()

    def take_bias(self, layer: Any, name: str, bias: Tensor) -> None:
        """Give the part called `name` in the checkpoint its bias (N,)."""
        part: Part = layer.fluxq_arriving[self.names.index(name)]
        part.take("bias", bias)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the parts into the layer, each with its share of the bias, and on a GPU lay them out for it."""
        arriving: list[Part] = layer.fluxq_arriving
        del layer.fluxq_arriving
        device = layer.weight.device
        for name in dict.fromkeys(name for part in arriving for name in part.names):
            delattr(layer, name)
        layers, start = [], 0
        for part in arriving:
            quantized = part.finished().to(device)
            if layer.bias is not None and not layer.skip_bias_add:
                part.set_bias(quantized, layer.bias.data[start : start + quantized.out_features])
            start += quantized.out_features
            layers.append(quantized)
        layer.fluxq_parts = nn.ModuleList(layers)
        layer.fluxq_is_row_parallel = arriving[0].axis == "K" and arriving[0].ranks > 1
        if device.type == "cuda" and self.config.prefer:
            _lay_out(layers, device, self.config.prefer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute (…, N) of x (…, K); the bias is in the parts. Of K cut over ranks it is this rank's summand."""
        if layer.fluxq_is_row_parallel:
            from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

            return partial_product(layer.fluxq_parts[0], x, get_tp_group().device_group).to(x.dtype)
        products = [part.of_tokens(x) for part in layer.fluxq_parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class Part:
    """A layer of the checkpoint while its tensors arrive, in whatever order; cut once they are all there.

    name: in the checkpoint. shape: (N, K) of the whole layer. axis, rank, ranks: its share. dtype: of its computation.
    """

    def __init__(
        self, name: str, scheme: Scheme, shape: tuple[int, int], axis: Axis, rank: int, ranks: int, dtype: torch.dtype
    ) -> None:
        self.name, self.scheme, self.shape, self.rank, self.ranks = name, scheme, shape, rank, ranks
        self.axis: Axis = axis
        self.dtype = dtype
        self.shapes = tensor_shapes(scheme, shape)
        self.names = tuple(self.shapes)
        self.missing, self.tensors = set(self.names), {}
        self.layer: QuantLinear | None = None

    def await_bias(self) -> None:
        self.missing.add("bias")

    def take(self, tensor_name: str, tensor: Tensor) -> None:
        if tensor_name not in self.missing:
            raise ValueError(
                f"{self.name}.{tensor_name} is in the weight files, and a layer of {self.scheme} has none, or it "
                "twice: copy them again"
            )
        is_exact = tensor_name in ("weight", *SCALE_NAMES)
        dtypes = (stored_dtype(self.scheme, tensor_name),) if is_exact else PLAIN
        expected = self.shapes.get(tensor_name, (self.shape[0],))
        if tensor.shape != expected or tensor.dtype not in dtypes:
            raise ValueError(
                f"{self.name}.{tensor_name} is {tensor.dtype} {(*tensor.shape,)}, and a layer of {self.scheme} and "
                f"{self.shape} has {' or '.join(map(str, dtypes))} {(*expected,)}: copy the weight files and "
                f"config.json again, or {OTHERWISE}"
            )
        self.missing.remove(tensor_name)
        self.tensors[tensor_name] = tensor if is_exact else tensor.to(self.dtype)
        if not self.missing:
            self.layer = self._cut()

    def _cut(self) -> QuantLinear:
        tensors, self.tensors = self.tensors, {}
        try:
            layer = layer_of(tensors, self.shape, self.scheme, self.dtype)
            return shard(layer, self.axis, self.rank, self.ranks) if self.ranks > 1 else layer
        except ValueError as error:
            raise ValueError(f"{self.name} on rank {self.rank} of {self.ranks}: {error}; or {OTHERWISE}") from None

    def finished(self) -> QuantLinear:
        if self.layer is None:
            raise ValueError(f"the weight files lack {sorted(self.missing)[0]} of {self.name}: copy them again")
        return self.layer

    def set_bias(self, layer: QuantLinear, bias: Tensor) -> None:
        """Give a share its bias; of a sum over ranks the first has it."""
        if self.axis == "N" or not self.rank:
            layer._parameters["bias"] = nn.Parameter(bias.to(self.dtype), requires_grad=False)


def tensor_shapes(scheme: Scheme, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a layer's tensors in a checkpoint, but for the bias. shape: (N, K)."""
    stored = {name: each for name, (each, _) in stored_shapes(scheme.weights, *shape).items()}
    return {**stored, **({"input_scale": ()} if scheme.static_input else {}), **branch_shapes(scheme, *shape)}


def layer_of(tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme, dtype: torch.dtype) -> QuantLinear:
    """Make the layer of a checkpoint's tensors; without a bias, or where the scheme needs one with zeros."""
    layer_tensors = dict(tensors)
    if scheme.center and "bias" not in layer_tensors:
        layer_tensors["bias"] = torch.zeros(shape[0], dtype=dtype, device=layer_tensors["weight"].device)
    layer = QuantLinear.from_tensors(layer_tensors, shape, scheme)
    layer.compute_dtype = dtype
    return layer


def _preference(stored: QuantizationConfig) -> str:
    """Return how to lay layers out, and warn of what else config.json asks for: only diffusers' pipelines do that."""
    told = {**stored.runtime, **({"attention": stored.attention} if stored.attention != "16bit" else {})}
    if ignored := [key for key in ("attention", "steps", POLICY) if key in told]:
        logger.warning(
            "config.json asks for %s, which vLLM-Omni's own models do not know: to have it, %s",
            ", ".join(ignored),
            OTHERWISE,
        )
    try:
        prefer = checked_prefer(stored.runtime)
        if prefer == "decoded":
            raise ValueError("prefer is 'decoded', which is for products of a CPU: take 'speed' or 'memory'")
    except ValueError as error:
        logger.warning("fluxq in vLLM-Omni does not lay layers out for a GPU: %s", error)
        return ""
    return prefer


def _lay_out(layers: Iterable[QuantLinear], device: torch.device, prefer: str) -> None:
    """Lay layers out for a GPU, as `fluxq.prepare` does."""
    from fluxq.kernels.tiles import chip_of
    from fluxq.runtime.prepare import prepare_layer

    for layer in layers:
        prepare_layer(layer, device, chip_of(device), prefer, None)


def adapter_of(model: nn.Module, source: Any, config: Any) -> FluxqCheckpointAdapter | None:
    """Return the adapter of a component, None where fluxq has nothing to do with it.

    source: says what stands before the names of its modules and weights, and its folder. config: the pipeline's, which
    is that of the folder `transformer`. A component's own is that of its layers: experts of one pipeline differ.
    """
    prefix = getattr(source, "prefix", "")
    modules: dict[str, Any] = {name: module for name, module in model.named_modules() if name.startswith(prefix)}
    layers = {
        name: module
        for module in modules.values()
        if isinstance(getattr(module, "quant_method", None), FluxqLinearMethod)
        for name in module.quant_method.names
    }
    if layers:
        config = next(iter(layers.values())).quant_method.config
    elif not isinstance(config, FluxqVllmConfig):
        return None
    elif getattr(source, "subfolder", "") != "transformer":
        config = FluxqVllmConfig(QuantizationConfig({}, ()))
    bare = {name.removeprefix(prefix) for name, module in modules.items() if getattr(module, "bias", "") is None}
    return FluxqCheckpointAdapter(layers, config, prefix, bare)


def _homes(name: str) -> Iterator[str]:
    """Yield what Linears of vLLM-Omni may be called that a layer of the checkpoint goes into."""
    parent, _, last = name.rpartition(".")
    yield from (name, name.removesuffix(".0"))
    yield from (f"{parent}.{joint}".lstrip(".") for joint, parts in JOINED.items() if last in parts)


class FluxqCheckpointAdapter:
    """The weights of a checkpoint as a model of vLLM-Omni takes them.

    Tensors of layers that it computes with fluxq's ops pass. Those of other layers become 16-bit weights.

    layers: by the names of their parts in the checkpoint. prefix: before the names of modules and weights.
    without_bias: names of modules that have none.
    """

    def __init__(
        self, layers: Mapping[str, LinearBase], config: FluxqVllmConfig, prefix: str, without_bias: Set[str]
    ) -> None:
        self.layers, self.config, self.prefix, self.without_bias = layers, config, prefix, without_bias
        for layer in {id(layer): layer for layer in layers.values() if layer.bias is None}.values():
            layer.quant_method.await_bias(layer)

    def adapt(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the model's parameters."""
        tensors_of: dict[str, dict[str, Tensor]] = {}
        for full, tensor in weights:
            name, _, part = full.removeprefix(self.prefix).rpartition(".")
            layer = self.layers.get(name)
            if name not in self.config.schemes and (part in QUANTIZED or (part == "weight" and tensor.dtype in CODES)):
                raise ValueError(f"{full} is of a quantized model, and vLLM-Omni makes it in 16 bit: {OTHERWISE}")
            if part in tensors_of.get(name, ()):
                raise ValueError(f"the weight files hold {full} twice: copy them again")
            if layer is not None and layer.bias is None and part == "bias":
                layer.quant_method.take_bias(layer, name, tensor)
            elif layer is None and name in self.config.schemes and part in ("weight", *QUANTIZED, "bias"):
                tensors_of.setdefault(name, {})[part] = tensor
            else:
                yield full, tensor
        for name, tensors in tensors_of.items():
            yield from self._in_16_bit(name, self.config.schemes[name], tensors)
        if tensors_of:
            logger.warning(
                "vLLM-Omni makes %d layers of this checkpoint in 16 bit whatever they are stored in, such as %s: they "
                "take 16-bit memory, and their inputs are not rounded",
                len(tensors_of),
                next(iter(tensors_of)),
            )

    def _in_16_bit(self, name: str, scheme: Scheme, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor in fp32) of a plain Linear; whoever loads it rounds it to the model's dtype."""
        if "weight" not in tensors:
            raise ValueError(f"the weight files lack weight of {name}: copy them again")
        rows, columns = (*tensors["weight"].shape, 0, 0)[:2]
        part = Part(name, scheme, (rows, columns * 8 // scheme.weights.element.bits), "N", 0, 1, torch.float32)
        if "bias" in tensors:
            part.await_bias()
        for each, tensor in tensors.items():
            part.take(each, tensor)
        weight, bias = part.finished().collapsed()
        yield f"{self.prefix}{name}.weight", weight
        if bias is not None:
            if absent := self.without_bias & {*_homes(name)}:
                raise ValueError(f"{name} centers its inputs, and vLLM-Omni's {min(absent)} has no bias: {OTHERWISE}")
            yield f"{self.prefix}{name}.bias", bias
