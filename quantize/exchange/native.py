"""A quantized component of a native checkpoint, one layer at a time, its means and factors folded into modulation.

What a layer does to each channel of x before it rounds it, z = (x - mean) · factor, few programs do at run time. Where
x is made by a modulation, x = norm · (1 + scale) + shift, with scale and shift rows of a Linear's output, that Linear
can make z at once:

    scale' = factor · (1 + scale) - 1        shift' = factor · (shift - mean)

so its rows are multiplied by `factor`, exactly for codes with a scale for each row, and its bias becomes another one,
rounded to 16 bit. A Linear in 16 bit that reads the same x gets W / factor and b + W mean instead. Which Linears share
an input, and what modulates it, says the family's row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fluxq.base.model import ModelFolder
from fluxq.base.tensors import TensorFile, by_tensor, word_for
from fluxq.kernels.linear import QuantLinear, QuantPointwise, linear_size, linears_of
from fluxq.quantize.checkpoint import build_on_meta, filed_shape, library_of, quantized_on_meta
from fluxq.quantize.exchange.layer import QuantTensors, all_equal
from fluxq.quantize.structure import tree_of
from fluxq.recipes.all_families import family_of
from fluxq.recipes.computing import quantization_of
from fluxq.recipes.family import Family, Modulation
from fluxq.recipes.formats import Scheme


@dataclass(frozen=True, eq=False)
class Fold:
    """A mean (K,) and factors (K,), fp32, that leave an input's readers for the modulation that makes it.

    readers: quantized Linears; plain: those of the same input in 16 bit. shift, scale: rows of the modulation.
    """

    modulation: str
    shift: slice
    scale: slice
    mean: Tensor
    factors: Tensor
    readers: tuple[str, ...]
    plain: tuple[str, ...]


class NativeComponent:
    """One component of a checkpoint. ValueError for one that is not quantized, or whose files are not as it says.

    schemes, shapes: of quantized layers by module name. biases: names of modules whose 16-bit original has one.
    pixelwise: 1x1 convolutions among the quantized layers. linears: (N, K) of every Linear. stored: all tensors;
    plain: those of no quantized layer. why_not_folded: layer -> why it keeps its mean and factors.
    factors_stay: whether factors of layers under a scheme are left to them where no mean has to be folded.
    """

    def __init__(
        self, folder: ModelFolder, component: str, factors_stay: Callable[[Scheme], bool] = lambda scheme: False
    ) -> None:
        self.folder, self.component = folder, component
        self.library, self.class_name = library_of(folder, component), folder.components[component]
        self.config = folder.config(component)
        said = quantization_of(self.config)
        if said is None:
            raise ValueError(f"{folder.path / component}: is not quantized by fluxq; give a checkpoint that it wrote")
        self.quantization = self.config.pop("quantization_config")
        held = quantized_on_meta(folder, component)
        original = build_on_meta(self.library, self.class_name, self.config)
        self._layers = {name: module for name, module in held.named_modules() if isinstance(module, QuantLinear)}
        self.schemes = {name: layer.scheme for name, layer in self._layers.items()}
        self.shapes = {name: (layer.out_features, layer.in_features) for name, layer in self._layers.items()}
        self.pixelwise = {name for name, layer in self._layers.items() if isinstance(layer, QuantPointwise)}
        linears = linears_of(original)
        self.linears = {name: linear_size(module) for name, module in linears.items()}
        self.biases = {name for name, module in linears.items() if getattr(module, "bias", None) is not None}
        self._model = original
        self._files = by_tensor(map(TensorFile, folder.weight_files(component)))
        self.stored = {name: file.stored[name] for name, file in self._files.items()}
        self._require_stored()
        quantized = {
            f"{name}.{suffix}" for name, layer in self._layers.items() for suffix, _ in layer.named_parameters()
        }
        self.plain = [name for name in self.stored if name not in quantized]
        self._factors_stay = factors_stay
        self.why_not_folded: dict[str, str] = {}
        self.folds = self._find_folds()

    @cached_property
    def family(self) -> Family:
        return family_of(self.class_name, tree_of(self._model) if self.library == "diffusers" else None)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype that most of the other tensors have."""
        words = [self.stored[name].dtype for name in self.plain]
        return torch.float16 if words.count("F16") > words.count("BF16") else torch.bfloat16

    def file_of(self, name: str) -> TensorFile:
        return self._files[name]

    def _read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def scheme(self, name: str) -> Scheme:
        """A layer's, without what was folded."""
        scheme = self.schemes[name]
        if name in self.why_not_folded or not (scheme.center or scheme.smooth):
            return scheme
        return replace(scheme, center=False, smooth=False)

    def small(self, name: str, suffix: str) -> Tensor | None:
        """One of a layer's tensors, None if it has none of that name."""
        return self._read(f"{name}.{suffix}") if f"{name}.{suffix}" in self.stored else None

    def layer(self, name: str) -> QuantTensors:
        """A quantized layer, folds applied."""
        tensors: dict[str, Tensor] = {}
        for suffix, parameter in self._layers[name].named_parameters():
            tensors[suffix] = self._read(f"{name}.{suffix}").reshape(parameter.shape)
        for fold in self.folds.get(name, ()):
            tensors = _into_codes(tensors, fold)
        scheme = self.scheme(name)
        dropped = {"pre_quant_mean": not scheme.center, "pre_quant_scale": not scheme.smooth}
        kept = {suffix: tensor for suffix, tensor in tensors.items() if not dropped.get(suffix)}
        return QuantTensors(kept, self.shapes[name], scheme)

    def is_changed(self, name: str) -> bool:
        """Tell whether a fold changes this tensor, one of `plain`."""
        module = name.rpartition(".")[0]
        return module in self.folds or module in self._readers

    def tensor(self, name: str) -> Tensor:
        """One of `plain`, folds applied, in its own dtype."""
        tensor = self._read(name)
        if not self.is_changed(name):
            return tensor
        module, _, suffix = name.rpartition(".")
        weight, bias = (self._read(f"{module}.{part}").float() for part in ("weight", "bias"))
        if module in self._readers:
            fold = self._readers[module]
            weight, bias = weight / fold.factors, bias + weight @ fold.mean
        for fold in self.folds.get(module, ()):
            weight[fold.shift] *= fold.factors.unsqueeze(1)
            weight[fold.scale] *= fold.factors.unsqueeze(1)
            bias = _folded_bias(bias, fold)
        return (weight if suffix == "weight" else bias).to(tensor.dtype)

    @cached_property
    def _readers(self) -> dict[str, Fold]:
        """Linear in 16 bit -> the fold of its input."""
        return {name: fold for folds in self.folds.values() for fold in folds for name in fold.plain}

    def _require_stored(self) -> None:
        """ValueError naming the first tensor of a quantized layer that is missing, or not as its scheme implies."""
        where = self.folder.path / self.component
        for name, layer in self._layers.items():
            for suffix, parameter in layer.named_parameters():
                key = f"{name}.{suffix}"
                if key not in self.stored:
                    raise ValueError(f"{where}: the weights lack {key!r}, which config.json implies; copy it again")
                stored, shape = self.stored[key], tuple(parameter.shape)
                shape = filed_shape(self.library, shape) if suffix == "weight" else shape
                exact = suffix in layer.stored_names
                if stored.shape != shape or (exact and stored.dtype != word_for(parameter.dtype)):
                    raise ValueError(
                        f"{where}: {key!r} is {stored.dtype} {stored.shape}, config.json implies "
                        f"{word_for(parameter.dtype)} {shape}; run `fluxq verify`"
                    )

    def _find_folds(self) -> dict[str, list[Fold]]:
        """Modulation -> what it takes in; `why_not_folded` says of the other layers with vectors why they keep them."""
        folds: dict[str, list[Fold]] = {}
        done: set[str] = set()
        for name, scheme in self.schemes.items():
            if name in done or not (scheme.center or scheme.smooth):
                continue
            found = self.family.locate(name)
            group, block = found if found else (None, "")
            members = [f"{block}.{path}" for path in group.members] if group else [name]
            readers = [path for path in members if path in self.linears]
            done.update(readers)
            fold: Fold | str = "no Linear modulates its input"
            schemes = [self.schemes[path] for path in readers if path in self.schemes]
            if all(not one.center and self._factors_stay(one) for one in schemes):
                fold = "every layer has factors there"
            elif group is not None and group.modulation is not None:
                fold = self._fold(readers, f"{block}.{group.modulation.linear}", group.modulation)
            if isinstance(fold, Fold):
                folds.setdefault(fold.modulation, []).append(fold)
            else:
                self.why_not_folded |= {path: fold for path in readers if path in self.schemes}
        return folds

    def _fold(self, readers: list[str], modulation: str, row: Modulation) -> Fold | str:
        """The fold of one input, or why there is none."""
        if modulation not in self.linears:
            return f"its input is modulated by {modulation}, which is not among the layers"
        own = self.schemes.get(modulation)
        if own is not None and (own.weights.block != (1, 0) or own.is_transformed or own.rank):
            return f"{modulation}, which modulates its input, is {own} and has no plain scale for each row"
        if f"{modulation}.bias" not in self.stored:
            return f"{modulation}, which modulates its input, has no bias"
        quantized = [name for name in readers if name in self.schemes]
        plain = [name for name in readers if name not in self.schemes]
        if any(self.schemes[name].rank for name in quantized):
            return "its low-rank branch reads the input as it was"
        if lacking := [name for name in plain if f"{name}.bias" not in self.stored]:
            return f"{lacking[0]}, which reads the same input in 16 bit, has no bias"
        if lacking := [name for name in quantized if self.schemes[name].center and name not in self.biases]:
            return f"{lacking[0]} has a bias here, which the model itself has not"
        vectors: list[Tensor] = []
        for suffix, neutral in (("pre_quant_mean", 0.0), ("pre_quant_scale", 1.0)):
            held = [self.small(name, suffix) for name in quantized]
            first = next((v for v in held if v is not None), None)
            if first is not None and not all_equal(held):
                return "Linears that share its input have other means or factors"
            k = self.shapes[quantized[0]][1]
            vectors.append(torch.full((k,), neutral, dtype=torch.float32) if first is None else first.float())
        mean, factors = vectors
        if not (torch.isfinite(mean).all() and torch.isfinite(factors).all() and (factors > 0).all()):
            raise ValueError(f"{self.folder.path}: means or factors of {quantized[0]} are damaged; run `fluxq verify`")
        shift, scale = row.rows(self.linears[modulation][0], len(mean))
        return Fold(modulation, shift, scale, mean, factors, tuple(quantized), tuple(plain))


def _into_codes(tensors: Mapping[str, Tensor], fold: Fold) -> dict[str, Tensor]:
    """A modulation with a scale for each row, after a fold: codes stay as they are."""
    scale = tensors["weight_scale"].clone()
    scale[fold.shift] *= fold.factors
    scale[fold.scale] *= fold.factors
    bias = _folded_bias(tensors["bias"].float(), fold).to(tensors["bias"].dtype)
    return {**tensors, "weight_scale": scale, "bias": bias}


def _folded_bias(bias: Tensor, fold: Fold) -> Tensor:
    bias = bias.clone()
    bias[fold.shift] = fold.factors * (bias[fold.shift] - fold.mean)
    bias[fold.scale] = fold.factors * (bias[fold.scale] + 1) - 1
    return bias
