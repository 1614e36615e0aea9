"""A folder's pipeline in bounded memory: every model of it is built without weights, which come as they are needed.

    16 bit       the source's tensors, cast as diffusers and transformers cast them, LoRA updates added
    checkpoint   its tensors as they are stored

Models are those that `from_pretrained` makes, to the bit; `base/residence.py` says when their weights are there. Files
are read by `TensorFile`, which checks them, and nothing is copied on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import accelerate
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from fluxq.base.model import ModelFolder, check_weights, load_pipeline
from fluxq.base.modules import put_tensor
from fluxq.base.residence import Residence
from fluxq.base.tensors import DTYPES, TensorFile, by_tensor
from fluxq.integrations.loading import FluxqConfig, lacking, put_layers, refuse_unannounced
from fluxq.integrations.transformers import FluxqHfQuantizer
from fluxq.kernels.linear import quant_layers
from fluxq.quantize.checkpoint import SourceWeights, is_model, library_of, model_class_of
from fluxq.quantize.lora import Updates, fused
from fluxq.recipes.computing import QuantizationConfig
from fluxq.runtime.attention_choice import set_attention

_Tensors = Mapping[str, Callable[[], Tensor]]  # name in the model -> reads it


def load_bounded(
    folder: ModelFolder,
    dtype: str,
    residence: Residence,
    *,
    ranks: Mapping[str, int],
    working: Mapping[str, int],
    updates: Mapping[str, Sequence[Updates]],
) -> DiffusionPipeline:
    """Load the pipeline that `load_pipeline` loads, on the device of `residence`, which looks after its weights.

    Raises ValueError as loading does, and for a tensor that the weight files lack.

    ranks, working: of components, see `Residence.add`; 0 by default.
    updates: component -> additions of LoRA files to its weights.
    """
    check_weights(folder)  # before any component is built
    models = {}
    for component in folder.components:
        if not is_model(folder, component):
            continue
        model, tensors = _quantized(folder, component, dtype) or _plain(folder, component, dtype)
        read = _reader(tensors, model, updates.get(component, ()))
        residence.add(model, read, rank=ranks.get(component, 0), working=working.get(component, 0))
        models[component] = model
    return load_pipeline(folder, dtype, models=models)


def load_empty(folder: ModelFolder, dtype: str) -> DiffusionPipeline:
    """Load the pipeline that `load_pipeline` loads, its weights on the meta device: none is read."""
    check_weights(folder)
    components = [component for component in folder.components if is_model(folder, component)]
    models = {name: (_quantized(folder, name, dtype) or _plain(folder, name, dtype))[0] for name in components}
    return load_pipeline(folder, dtype, models=models)


def _plain(folder: ModelFolder, component: str, dtype: str) -> tuple[nn.Module, _Tensors]:
    source = SourceWeights(folder, component)
    model = _built(folder, component, dtype, source)
    return model, {name: lambda name=name: source[name] for name in source.names}


def _quantized(folder: ModelFolder, component: str, dtype: str) -> tuple[nn.Module, _Tensors] | None:
    """Build a quantized component, None for one that is not. Its files have the names of the model."""
    config = folder.config(component).get("quantization_config")
    if config is None:
        return None
    places = by_tensor(map(TensorFile, folder.weight_files(component)))
    model = _built(folder, component, dtype, places)
    dtypes = {name: getattr(torch, DTYPES[file.stored[name].dtype][0]) for name, file in places.items()}
    stored = QuantizationConfig.from_dict(config)
    if isinstance(model, PreTrainedModel):
        quantizer = FluxqHfQuantizer(FluxqConfig.from_dict(config), pre_quantized=True)
        quantizer.update_dtype(getattr(torch, dtype))
        quantizer._process_model_before_weight_loading(model)  # what T5 needs of a Linear is its to know
    else:
        put_layers(model, stored.schemes, getattr(torch, dtype))
        if stored.attention != "16bit":
            set_attention(model, stored.attention)
    refuse_unannounced(dtypes, model)
    exact = {f"{name}.{part}" for name, layer in quant_layers(model) for part, _ in layer.named_parameters()}
    placeholders = model.state_dict()

    def read(name: str) -> Tensor:
        tensor = places[name].get_tensor(name)
        if name not in exact:
            return tensor
        placeholder = placeholders[name]
        return (tensor.view(placeholder.dtype) if name.endswith(".weight") else tensor).reshape(placeholder.shape)

    return model, {name: lambda name=name: read(name) for name in places}


def _reader(tensors: _Tensors, model: nn.Module, updates: Sequence[Updates]) -> Callable[[str], Tensor]:
    """Return a function from name in the model to tensor; ValueError for names that the files lack.

    Tied weights are in the files under one name.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    others: dict[str, set[str]] = {}
    for one, other in tied.items():
        others.setdefault(one, set()).add(other)
        others.setdefault(other, set()).add(one)
    dtypes = {name: tensor.dtype for name, tensor in _named(model) if tensor.is_meta}
    names_in_files = {}
    for name in dtypes:
        at = next((other for other in (name, *sorted(others.get(name, ()))) if other in tensors), None)
        if at is None:
            raise lacking(name)
        names_in_files[name] = at

    def read(name: str) -> Tensor:
        tensor = tensors[names_in_files[name]]()
        layer, _, parameter = name.rpartition(".")
        of_layer = [every[layer] for every in updates if layer in every] if parameter == "weight" else []
        return fused(tensor.to(dtypes[name]), of_layer) if of_layer else tensor

    return read


def _built(folder: ModelFolder, component: str, dtype: str, tensors: Any) -> nn.Module:
    """Build the model without weights, in the dtypes that it is loaded in. tensors: names in its files.

    Buffers are real where the files lack them, and so is whatever else its constructor computes.
    """
    model = _construct(folder, component, dtype, torch.device("meta"))
    if _computes(model, tensors):
        model = _construct(folder, component, dtype, accelerate.init_empty_weights(include_buffers=False))
        for name, buffer in list(model.named_buffers()):
            if name in tensors:
                path, _, parameter = name.rpartition(".")
                put_tensor(model.get_submodule(path), parameter, torch.empty_like(buffer, device="meta"))
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
    for name, tensor in _named(model):
        if tensor.is_meta and tensor.is_floating_point():
            path, _, parameter = name.rpartition(".")
            kept = torch.empty_like(tensor, dtype=_dtype_of(model, name, getattr(torch, dtype)))
            put_tensor(model.get_submodule(path), parameter, kept)
    return model.eval().requires_grad_(False)


def _construct(folder: ModelFolder, component: str, dtype: str, place: Any) -> Any:
    model_class: Any = model_class_of(library_of(folder, component), folder.components[component])
    config = folder.config(component)
    config.pop("quantization_config", None)
    is_transformers = issubclass(model_class, PreTrainedModel)
    make: Any = model_class  # whose class attributes are of any type
    with place, local_torch_dtype(getattr(torch, dtype)):
        if is_transformers:
            return make._from_config(make.config_class.from_dict(config), dtype=getattr(torch, dtype))
        return make.from_config(config)


def _computes(model: nn.Module, tensors: Any) -> bool:
    """Tell whether the model holds numbers that its files do not."""
    if any(name not in tensors for name, _ in model.named_buffers()):
        return True
    return any(_holds_meta(value) for part in model.modules() for key, value in vars(part).items() if key[0] != "_")


def _holds_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(_holds_meta, value))


def _dtype_of(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to load a floating tensor in: some modules stay in fp32, of transformers some only from fp16."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if isinstance(model, PreTrainedModel):
        kept = (kept if dtype == torch.float16 else set()) | set(model._keep_in_fp32_modules_strict or ())
    return dtype if kept.isdisjoint(name.split(".")) else torch.float32


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, also under their second names, and buffers."""
    yield from list(model.named_parameters(remove_duplicate=False))
    yield from list(model.named_buffers(remove_duplicate=False))
