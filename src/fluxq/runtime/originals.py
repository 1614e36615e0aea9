"""16-bit weights of quantized layers, for the steps that steps.py computes with them.

    resident    all of them lie beside the codes, each on its layer's device
    streamed    a block is read from the model's files when one of its layers is called, and the next one meanwhile:
                two blocks at most are in memory, and none between such steps

Steps whose activations alone are in 16 bit need none of it: layers compute them with their codes (`codes_of`).

Only quantized layers have something here; all other weights are in 16 bit anyway. The original weight takes the input
as it comes, with the original bias: mean, factors, rotation and deflation of the input belong to the codes, and so do
the changes of bias and low-rank branch that make up for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base.devices import free_bytes
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.checkpoint import SourceWeights

_SHARE = 0.75  # of the free memory; activations take the rest
_ALIKE = 0.5  # a weight's relative distance to its codes; the worst format's is a quarter, another weight's 1.4


@dataclass(frozen=True, eq=False)
class Original:
    """A layer's weight (N, K), and bias (N,) or None, as the 16-bit model has them; `layer.instead`.

    is_centred: the layer centres its input, so its own bias is another one; otherwise it is used, and `bias` is None.
    rank: of the layer's low-rank branch that belongs to its codes; later ranks are fused adapters, and count here too.
    """

    weight: Tensor
    bias: Tensor | None
    is_centred: bool
    rank: int

    def __call__(self, layer: QuantLinear, x: Tensor) -> Tensor:
        """Apply the layer to x (…, K): (…, N)."""
        y = F.linear(x, self.weight, self.bias if self.is_centred else layer.bias)
        first = first_fused(layer, self.rank)
        if layer.low_rank is not None and layer.scheme.rank > first:
            a, b = layer.low_rank
            y = y + F.linear(F.linear(x, a[first:].to(x.dtype)), b[:, first:].to(x.dtype))
        return y

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Originals:
    """Reader of the 16-bit weights of a model's quantized layers.

    layers: by path. ranks: of each layer's low-rank branch that belongs to its codes. Raises ValueError for a source
    that lacks a weight or has one of another shape.
    """

    def __init__(self, layers: Mapping[str, QuantLinear], source: SourceWeights, ranks: Mapping[str, int]) -> None:
        self.layers, self.source, self.ranks = layers, source, ranks
        for path, layer in layers.items():
            first_fused(layer, ranks[path])
            name, (n, k) = f"{path}.weight", (layer.out_features, layer.in_features)
            if name not in source:
                raise ValueError(f"{source.folder}: holds no {name}, so this is not the model that was quantized")
            shape = source.stored(name).shape
            if shape not in ((n, k), (n, k, 1, 1)):
                raise ValueError(
                    f"{source.folder}: {name} is {shape}, and the quantized layer {(n, k)}: this is not the model that "
                    "was quantized"
                )

    def read(self, path: str) -> Original:
        """Read a layer's weight and bias on the CPU, in the dtype that the 16-bit model computes with."""
        layer, weight, bias = self.layers[path], f"{path}.weight", f"{path}.bias"
        dtype = torch.float32 if self.source.stays_fp32(weight) else layer.compute_dtype
        is_centred = layer.stored_scheme.center
        original_bias = self.source[bias].to(dtype) if is_centred and bias in self.source else None
        return Original(self.source[weight].flatten(1).to(dtype), original_bias, is_centred, self.ranks[path])

    def nbytes(self, path: str) -> int:
        """Return the bytes of `read(path)`."""
        layer = self.layers[path]
        itemsize = 4 if self.source.stays_fp32(f"{path}.weight") else layer.compute_dtype.itemsize
        has_bias = layer.stored_scheme.center and f"{path}.bias" in self.source
        return itemsize * layer.out_features * (layer.in_features + has_bias)

    def require_alike(self) -> None:
        """Raise ValueError where a weight is not near the one that its codes stand for, in one layer of each block."""
        for paths in self.blocks():
            path, layer = paths[0], self.layers[paths[0]]
            if layer.weight.is_meta:
                continue
            weight = self.read(path).weight.to(layer.weight.device).float()
            off = float((layer.collapsed()[0] - weight).norm() / weight.norm())
            if not off < _ALIKE:
                raise ValueError(
                    f"{self.source.folder}: {path}.weight differs from the quantized one by {off:.0%} of its size, "
                    "more than any rounding: this is not the model that was quantized; name that one as source="
                )

    def blocks(self) -> list[list[str]]:
        """List the paths of the layers of each block, in the model's order."""
        blocks: dict[str, list[str]] = {}
        for path in self.layers:
            blocks.setdefault(_block_of(path), []).append(path)
        return list(blocks.values())

    def fits(self) -> bool:
        """Tell whether every device that holds layers has room for the weights beside the codes."""
        needed: dict[torch.device, int] = {}
        for path, layer in self.layers.items():
            device = layer.weight.device
            needed[device] = needed.get(device, 0) + self.nbytes(path)
        free = {device: free_bytes(device) for device in needed}
        return all(room is None or needed[device] <= _SHARE * room for device, room in free.items())


def first_fused(layer: QuantLinear, rank: int) -> int:
    """Return the first of the ranks of a layer's branch that are fused adapters; rank: without adapters.

    ValueError where codes for one GPU were made with an adapter inside, which is then in them alone.
    """
    if layer.prepared is None or layer.prepared.kind != "re-encoded":
        return rank
    if layer.prepared.scheme.rank > rank:
        raise ValueError(
            "an adapter was fused before fluxq.prepare, which put it into the codes, and steps in 16 bit would go "
            "without it: prepare first, then fuse the adapter, or leave it unfused"
        )
    return 0


class Held:
    """Functions of a layer and its input x (…, K), by path, with which layers compute in such steps."""

    def __init__(
        self, layers: Mapping[str, QuantLinear], instead: Mapping[str, Callable[[QuantLinear, Tensor], Tensor]]
    ) -> None:
        self._layers, self._instead = layers, instead

    @property
    def nbytes(self) -> int:
        """Bytes of 16-bit weights that are in memory."""
        return sum(each.nbytes for each in self._instead.values() if isinstance(each, Original))

    def enter(self) -> None:
        """Let layers compute so from now on."""
        for path, instead in self._instead.items():
            self._layers[path].instead = instead

    def leave(self) -> None:
        """Let layers compute as ever again."""
        for layer in self._layers.values():
            vars(layer).pop("instead", None)

    def close(self) -> None:
        self.leave()
        self._instead = {}


def resident(originals: Originals) -> Held:
    """Return every original beside its codes, where these are now."""
    layers = originals.layers
    return Held(layers, {path: _on(originals.read(path), layer.weight.device) for path, layer in layers.items()})


def codes_of(layers: Mapping[str, QuantLinear]) -> Held:
    """Return the layers' own codes for inputs that are not rounded; those that are weight-only do so anyway."""
    rounding = [path for path, layer in layers.items() if layer.scheme.activations is not None]
    return Held(layers, dict.fromkeys(rounding, QuantLinear.without_rounding))


class Streamed(Held):
    """Originals that come block by block, between `enter` and `leave`; blocks may be called in any order.

    The order is learned: at first the next block is the one that is defined next.
    """

    def __init__(self, originals: Originals) -> None:
        super().__init__(originals.layers, {path: partial(self._compute, path) for path in originals.layers})
        self._originals = originals
        self._blocks = originals.blocks()
        self._index = {path: index for index, paths in enumerate(self._blocks) for path in paths}
        self._after = {index: index + 1 for index in range(len(self._blocks) - 1)}
        self._present: tuple[int, _Brought] | None = None
        self._coming: tuple[int, torch.device, Future[_Brought]] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._reader = ThreadPoolExecutor(1, "fluxq-16bit")

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are in memory."""
        here = [self._present[1]] if self._present else []
        here += [self._coming[2].result()] if self._coming and self._coming[2].done() else []
        return sum(block.nbytes for block in here)

    def leave(self) -> None:
        """Let layers compute as ever again, and drop all originals."""
        super().leave()
        self._present = None
        self._drop_coming()

    def close(self) -> None:
        super().close()
        self._reader.shutdown()

    @torch.compiler.disable(reason="16-bit weights are streamed, which no graph can: weights='resident'")
    def _compute(self, path: str, layer: QuantLinear, x: Tensor) -> Tensor:
        index = self._index[path]
        if self._present is None or self._present[0] != index:
            self._advance(index, x.device)
        if self._present is None:
            raise RuntimeError(f"{path}: its block was not brought")
        return self._present[1].originals[path](layer, x)

    def _advance(self, index: int, device: torch.device) -> None:
        """Replace the block in memory by this one, and begin to read the next."""
        if self._present is not None:
            self._after[self._present[0]] = index
        self._present = None
        done = _event(device)
        if self._coming is not None and self._coming[:2] == (index, device):
            brought = self._coming[2].result()
            self._coming = None
        else:
            self._drop_coming()
            brought = self._read(index, device, done)
        brought.wait()
        self._present = index, brought
        following = self._after.get(index)
        if following is not None:
            self._coming = following, device, self._reader.submit(self._read, following, device, done)

    def _drop_coming(self) -> None:
        if self._coming is not None:
            future = self._coming[2]
            self._coming = None
            if not future.cancel():
                future.exception()  # a read that has begun is waited for, and what came of it is nobody's

    def _read(self, index: int, device: torch.device, done: torch.cuda.Event | None) -> _Brought:
        """Read a block's originals to a device. done: when the block before the present one has been used."""
        read = {path: self._originals.read(path) for path in self._blocks[index]}
        if device.type != "cuda":
            return _Brought({path: _on(each, device) for path, each in read.items()})
        if done is not None:
            done.synchronize()  # or Python, which runs ahead of the GPU, would fill it with blocks
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._streams[device]):
            return _Brought({path: _on(each, device, pinned=True) for path, each in read.items()}, _event(device))


@dataclass
class _Brought:
    """A block's originals. ready: when their copies to a GPU are complete, None if they are."""

    originals: dict[str, Original]
    ready: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.originals.values())

    def wait(self) -> None:
        """Order all later launches behind the copies, and keep the memory from reuse before they have run."""
        if self.ready is None:
            return
        for each in self.originals.values():
            stream = torch.cuda.current_stream(each.weight.device)
            stream.wait_event(self.ready)
            each.weight.record_stream(stream)
            if each.bias is not None:
                each.bias.record_stream(stream)


def _on(original: Original, device: torch.device, pinned: bool = False) -> Original:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)

    bias = None if original.bias is None else moved(original.bias)
    return Original(moved(original.weight), bias, original.is_centred, original.rank)


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event behind the work that the GPU has been given; None on other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _block_of(path: str) -> str:
    """Return `transformer_blocks.3` of `transformer_blocks.3.attn.to_q`; the first name of a path without a number."""
    parts = path.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])
