"""A quantized component of a native checkpoint, one layer at a time, its means and factors folded into what makes x.

Few programs can apply z = (x - mean) · factor to a layer's input at run time. Where x is made by a modulation, x = norm
· (1 + scale) + shift, with scale and shift rows of a Linear's output, that Linear can make z at once:

    scale' = factor · (1 + scale) - 1        shift' = factor · (shift - mean)

so its rows are multiplied by `factor`, exactly for codes with a scale for each row, and its bias becomes another one,
rounded to 16 bit. Where x is made by attention or by a gated unit, rows of the values, or of the factor that passes no
activation function, do the same: z = P ((V - mean) · factor). Where these rows have no fp32 scale each, the factors are
powers of two, which scales of any block take in exactly. A Linear in 16 bit that reads the same x gets W / factor and
b + W mean instead. The family's row says which Linears share an input, and which make it.
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
from fluxq.quantize.exchange.layer import QuantTensors, all_equal, most_of_16_bit
from fluxq.quantize.structure import tree_of
from fluxq.recipes.all_families import family_of
from fluxq.recipes.computing import quantization_of
from fluxq.recipes.family import Family, InputGroup, Modulation
from fluxq.recipes.formats import Scheme

_INEXACT, _INEXACT_ROW = 2**-9, 2**-5  # relative: of block scales that took factors in, all together and in a row
_E8M0_NAN = 255


@dataclass(frozen=True, eq=False)
class Fold:
    """A mean (C,) and factors (C,), fp32, that leave an input's readers for a Linear that makes C of its channels.

    maker: the Linear. shift: its rows that make these channels, or the shift of a modulation. scale: rows of a
    modulation that scale them. vectors: all of the input's.
    """

    maker: str
    shift: slice
    scale: slice | None
    mean: Tensor
    factors: Tensor
    vectors: Vectors

    @property
    def rows(self) -> tuple[slice, ...]:
        """Rows of the maker that take the factors in."""
        return (self.shift,) if self.scale is None else (self.shift, self.scale)


@dataclass(frozen=True, eq=False)
class Vectors:
    """Mean (K,) and factors (K,), fp32, of one input. readers: quantized Linears. plain: those in 16 bit."""

    mean: Tensor
    factors: Tensor
    readers: tuple[str, ...]
    plain: tuple[str, ...]

    def fold(self, maker: str, shift: slice, scale: slice | None, channels: slice, shifts: bool = True) -> Fold:
        """Return what a Linear takes in that makes these channels."""
        mean = self.mean[channels] if shifts else torch.zeros_like(self.mean[channels])
        return Fold(maker, shift, scale, mean, self.factors[channels], self)


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
        quantization = quantization_of(self.config)
        if quantization is None:
            raise ValueError(f"{folder.path / component}: is not quantized by fluxq; give a checkpoint that it wrote")
        self.quantization = self.config.pop("quantization_config")
        network = quantized_on_meta(folder, component)
        original = build_on_meta(self.library, self.class_name, self.config)
        self._layers = {name: module for name, module in network.named_modules() if isinstance(module, QuantLinear)}
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
        self.folds: dict[str, list[Fold]] = {}  # maker -> what it takes in
        self._find_folds()

    @cached_property
    def family(self) -> Family:
        return family_of(self.class_name, tree_of(self._model) if self.library == "diffusers" else None)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype that most of the other tensors have."""
        return most_of_16_bit([self.stored[name].dtype for name in self.plain])

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
        weight = self._read(f"{module}.weight").float()
        bias = self._read(f"{module}.bias").float() if f"{module}.bias" in self.stored else None
        if module in self._readers:
            vectors = self._readers[module]
            bias = None if bias is None else bias + weight.flatten(1) @ vectors.mean
            weight = (weight.flatten(1) / vectors.factors).view_as(weight)
        for fold in self.folds.get(module, ()):
            for rows in fold.rows:
                weight[rows] *= fold.factors.view(-1, *[1] * (weight.ndim - 1))
            bias = None if bias is None else _folded_bias(bias, fold)
        return (weight if suffix == "weight" or bias is None else bias).to(tensor.dtype)

    @cached_property
    def _readers(self) -> dict[str, Vectors]:
        """Linear in 16 bit -> mean and factors that its input has got."""
        return {name: fold.vectors for folds in self.folds.values() for fold in folds for name in fold.vectors.plain}

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

    def _find_folds(self) -> None:
        """Find all folds; `why_not_folded` says of the other layers with vectors why they keep them."""
        done: set[str] = set()
        for name, scheme in self.schemes.items():
            if name in done or not (scheme.center or scheme.smooth):
                continue
            group, block = self.family.locate(name) or (None, "")
            members = self.family.sharing_vectors(group, block) if group else [name]
            readers = [path for path in members if path in self.linears]
            done.update(readers)
            folds: list[Fold] | str = "no Linear makes or modulates its input"
            schemes = [self.schemes[path] for path in readers if path in self.schemes]
            if all(not one.center and self._factors_stay(one) for one in schemes):
                folds = "every layer has factors there"
            elif group is not None and group.modulation is not None:
                folds = self._into_modulation(readers, f"{block}.{group.modulation.linear}", group.modulation)
            elif group is not None and group.producers:
                folds = self._into_producers(readers, block, group)
            if isinstance(folds, str):
                self.why_not_folded |= {path: folds for path in readers if path in self.schemes}
                continue
            for fold in folds:
                self.folds.setdefault(fold.maker, []).append(fold)

    def _into_modulation(self, readers: list[str], modulation: str, row: Modulation) -> list[Fold] | str:
        """Return the fold of one input into its modulation, or the reason why there is none."""
        if modulation not in self.linears:
            return f"its input is modulated by {modulation}, which is not among the layers"
        scheme = self.schemes.get(modulation)
        if scheme is not None and (not scheme.weights.has_row_scale or scheme.is_transformed or scheme.rank):
            return f"{modulation}, which modulates its input, is {scheme} and has no plain scale for each row"
        if f"{modulation}.bias" not in self.stored:
            return f"{modulation}, which modulates its input, has no bias"
        vectors = self._vectors(readers)
        if isinstance(vectors, str):
            return vectors
        k = len(vectors.mean)
        shift, scale = row.rows(self.linears[modulation][0], k)
        return [vectors.fold(modulation, shift, scale, slice(0, k))]

    def _into_producers(self, readers: list[str], block: str, group: InputGroup) -> list[Fold] | str:
        """Return the folds of one input into the Linears that make its channels, or the reason why there are none."""
        vectors = self._vectors(readers)
        if isinstance(vectors, str):
            return vectors
        folds, end = [], 0
        for index, width in enumerate(group.segments(*self.linears[readers[0]])):
            end += width
            channels = slice(end - width, end)
            makers = [p for p in group.producers if p.segment == index and f"{block}.{p.linear}" in self.linears]
            if not makers and (vectors.factors[channels] != 1).any():
                return "no Linear makes the channels that have factors"
            if vectors.mean[channels].any() and not any(producer.shifts for producer in makers):
                return "no Linear that makes its input can take in a mean"
            for producer in makers:
                maker = f"{block}.{producer.linear}"
                rows = producer.rows(self.linears[maker][0], width)
                fold = vectors.fold(maker, rows, None, channels, producer.shifts)
                if why_not := self._why_not_taken(fold):
                    return why_not
                folds.append(fold)
        return folds

    def _why_not_taken(self, fold: Fold) -> str:
        """Return the reason why a Linear cannot take a fold in; empty if it can."""
        n = self.linears[fold.maker][0]
        if not 0 <= fold.shift.start < fold.shift.stop <= n:
            return f"{fold.maker} has {n} rows, not one for each channel that it makes"
        if fold.mean.any() and f"{fold.maker}.bias" not in self.stored:
            return f"{fold.maker}, which makes its input, has no bias"
        scheme = self.schemes.get(fold.maker)
        if scheme is None:
            return ""
        if scheme.weights.block[0] == 1 and _takes(self._read(f"{fold.maker}.weight_scale"), fold):
            return ""
        return f"scales of {fold.maker} in {scheme.weights.name}, which makes its input, cannot take its factors in"

    def _vectors(self, readers: list[str]) -> Vectors | str:
        """Return mean and factors of the input of some Linears, or the reason why they cannot leave these."""
        quantized = [name for name in readers if name in self.schemes]
        plain = [name for name in readers if name not in self.schemes]
        if any(self.schemes[name].rank for name in quantized):
            return "its low-rank branch reads the input as it was"
        if lacking := [name for name in quantized if self.schemes[name].center and name not in self.biases]:
            return f"{lacking[0]} has a bias here, which the model itself has not"
        vectors: list[Tensor] = []
        for suffix, neutral in (("pre_quant_mean", 0.0), ("pre_quant_scale", 1.0)):
            tensors = [self.small(name, suffix) for name in quantized]
            first = next((v for v in tensors if v is not None), None)
            if first is not None and not all_equal(tensors):
                return "Linears that share its input have other means or factors"
            k = self.shapes[quantized[0]][1]
            vectors.append(torch.full((k,), neutral, dtype=torch.float32) if first is None else first.float())
        mean, factors = vectors
        if not (torch.isfinite(mean).all() and torch.isfinite(factors).all() and (factors > 0).all()):
            raise ValueError(f"{self.folder.path}: means or factors of {quantized[0]} are damaged; run `fluxq verify`")
        if mean.any() and (lacking := [name for name in plain if f"{name}.bias" not in self.stored]):
            return f"{lacking[0]}, which reads the same input in 16 bit, has no bias"
        return Vectors(mean, factors, tuple(quantized), tuple(plain))


def _takes(scale: Tensor, fold: Fold) -> bool:
    """Tell whether a weight's scales (N, …) take factors in, as they are stored: exactly, but for scales near zero."""
    if scale.dtype == torch.uint8:
        shifted = scale[fold.shift].int() + _exponents(fold.factors, scale)
        is_power = bool((fold.factors.log2().round().exp2() == fold.factors).all())
        return is_power and bool(((shifted > 0) & (shifted < _E8M0_NAN)).all())
    exact = scale[fold.shift].float() * _by_row(fold.factors, scale)
    off = exact.to(scale.dtype).float() - exact
    of_rows, sizes = (each.reshape(len(each), -1).norm(dim=1) for each in (off, exact))
    return bool(of_rows.norm() <= _INEXACT * sizes.norm()) and bool((of_rows <= _INEXACT_ROW * sizes).all())


def _scaled(scale: Tensor, rows: slice, factors: Tensor) -> Tensor:
    """Return scales, or a matrix, with factors on some of its rows. Bytes are exponents of E8M0."""
    if scale.dtype == torch.uint8:
        exponents = scale.int()
        exponents[rows] += _exponents(factors, scale)
        return exponents.to(torch.uint8)
    scaled = scale.float().clone()
    scaled[rows] *= _by_row(factors, scaled)
    return scaled.to(scale.dtype)


def _exponents(factors: Tensor, scale: Tensor) -> Tensor:
    return _by_row(factors.log2().round().int(), scale)


def _by_row(factors: Tensor, scale: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (scale.ndim - 1))


def _into_codes(tensors: Mapping[str, Tensor], fold: Fold) -> dict[str, Tensor]:
    """Return a Linear with a scale for each row, or more, after a fold: codes stay as they are."""
    made = dict(tensors)
    for name in ("weight_scale", "svdquant_lora_b", "deflate_out"):
        if name in made:
            for rows in fold.rows:
                made[name] = _scaled(made[name], rows, fold.factors)
    if "bias" in made:
        made["bias"] = _folded_bias(made["bias"].float(), fold).to(made["bias"].dtype)
    return made


def _folded_bias(bias: Tensor, fold: Fold) -> Tensor:
    bias = bias.clone()
    bias[fold.shift] = fold.factors * (bias[fold.shift] - fold.mean)
    if fold.scale is not None:
        bias[fold.scale] = fold.factors * (bias[fold.scale] + 1) - 1
    return bias
