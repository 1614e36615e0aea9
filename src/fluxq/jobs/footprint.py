"""Footprint of a job beside weights that wait for their turn, from shapes, before anything is computed.

    running   a model's activations: 3 · M · (N + K), with M tokens of a batch and the widest of its matrices (N, K)
    fitting   Grams of all input groups of a block, samples of their tokens, and the memory of fitting the largest group

Outputs of a block's norms, products and activation lie side by side, and rotated queries and keys are fp32: in FLUX.1's
blocks that is 2 to 2.5 times the input and output of the widest Linear. All figures are bytes, too many rather than too
few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from fluxq.base.model import ModelFolder
from fluxq.calibrate.capture import FRAMES, Item, batches, frames_in
from fluxq.calibrate.prompts import PromptRow
from fluxq.quantize.checkpoint import SourceWeights, library_of, model_on_meta
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.plan import LayerPlan, Plan
from fluxq.recipes.workloads import CallSize, ForwardPass, forward_pass

_FP32 = 4  # bytes
_TEXT, _SHORT_TEXT = 512, 77  # tokens of a prompt by default, and of one that is padded for CLIP
_SIDE = 1024  # of an image, by default
_SPANNED = 16  # pixels on a side that a token spans, of a model without a row
_SAMPLES = 2048 + 1024  # rows of each group's input that are kept
_CHUNK = 4096  # tokens that are added to a Gram at a time, at most
_ROWS, _ROWS_OF_GPU = 256, 1 << 14  # least rows of a weight that are in fp32 at a time
_COPIES = 6  # of such rows: decoded, transposed, their error, and those of rounding
_TRIED = 1024  # rows of a group's weights that stages are tried on, and tokens of its input
_JOINT_GRAMS, _JOINT_K = 7, 6144  # Grams of joint fitting, three sums and room to solve; its largest K
_CHANNELS = 256  # at full size, of a VAE whose configuration has none
_FEW_FRAMES = {"AutoencoderKLWan": 5}  # that a VAE has at a time: of one latent frame, and kept of the last


def sizes(items: Sequence[Item], call: Mapping[str, Any]) -> frozenset[CallSize]:
    """Return the sizes of the calls that make these items."""
    call_sizes = set()
    for batch in batches(items, None, call):
        row = batch[0][0]
        arguments = {**call, **(dict(row.arguments) if isinstance(row, PromptRow) else {})}
        frames = frames_in(arguments) if {*FRAMES} & arguments.keys() else None
        height, width, text = (arguments.get(name) for name in ("height", "width", "max_sequence_length"))
        call_sizes.add(CallSize(len(batch), height, width, frames, text))
    return frozenset(call_sizes)


def activations(folder: ModelFolder, component: str, size: CallSize, itemsize: int) -> int:
    """Return the bytes that a component needs beside its weights in a call, its numbers of `itemsize` bytes each."""
    if _is_vae(folder, component):
        pixels = size.images * (size.height or _SIDE) * (size.width or _SIDE)
        config = folder.config(component)
        if size.frames is not None:
            pixels = pixels * _frames_at_once(folder, component, size.frames) // (config.get("patch_size") or 1) ** 2
        return decoding(config, pixels, itemsize)
    source, config = SourceWeights(folder, component), folder.config(component)
    vocabularies = {config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")}
    weights = [source.stored(name).shape for name in source.names if name.endswith("weight")]  # no tables of positions
    shapes = [shape for shape in weights if len(shape) > 1]
    widths = [s[0] if s[0] in vocabularies else 3 * (s[0] + prod(s[1:])) for s in shapes]  # logits are made once
    return itemsize * tokens(folder, component, size) * max(widths, default=0)


def decoding(config: Mapping[str, Any], pixels: int, itemsize: int) -> int:
    """Return the bytes that a VAE of this configuration needs beside its weights for so many pixels."""
    halves = (config.get("block_out_channels"), config.get("decoder_block_out_channels"))  # either may be null
    outer = [channels for half in halves for channels in (half or ())[:2]]
    return 4 * itemsize * pixels * max(outer, default=_CHANNELS)


def largest(folder: ModelFolder, component: str, itemsize: int) -> int:
    """Return the bytes of the largest module's weights, which come and go together."""
    source = SourceWeights(folder, component)
    module_bytes: dict[str, int] = {}
    for name in source.names:
        module = name.rpartition(".")[0]
        module_bytes[module] = module_bytes.get(module, 0) + _loaded(source, name, itemsize)
    return max(module_bytes.values())


def weight_bytes(folder: ModelFolder, component: str, itemsize: int) -> int:
    """Return the bytes of all weights of a component as it is loaded."""
    source = SourceWeights(folder, component)
    return sum(_loaded(source, name, itemsize) for name in source.names)


def served_bytes(folder: ModelFolder, component: str) -> int:
    """Return the bytes of all weights in bfloat16: tied ones count once, and transformers keeps none in fp32."""
    source, of_diffusers = SourceWeights(folder, component), library_of(folder, component) == "diffusers"
    model = model_on_meta(folder, component)
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} & {*source.names}
    return sum(_loaded(source, name, 2) if of_diffusers else 2 * prod(source.stored(name).shape) for name in names)


def _loaded(source: SourceWeights, name: str, itemsize: int) -> int:
    return prod(source.stored(name).shape) * (max(itemsize, _FP32) if source.stays_fp32(name) else itemsize)


def fitting(plan: Plan, running: int, itemsize: int, *, widened: bool, on_gpu: bool) -> dict[str, int]:
    """Return block -> bytes that fitting its groups takes beside weights that can be read again.

    running: activations of the component.
    itemsize: bytes of one of its weights.
    widened: weights come in fp32, as fused ones do.
    """
    blocks: dict[str, list[tuple[LayerPlan, ...]]] = {}
    for members in plan.statistics_groups().values():
        blocks.setdefault(members[0].block, []).append(members)
    return {
        block: sum(_observed(members, itemsize) for members in groups)
        + max(
            running + max(_chunk(members[0].k) for members in groups),
            max(_fitted(members, _FP32 if widened else itemsize, on_gpu) for members in groups),
        )
        for block, groups in blocks.items()
    }


def _observed(members: Sequence[LayerPlan], itemsize: int) -> int:
    """Return the bytes kept of a group's input: its Grams, and its samples, which are put together of parts."""
    grams = 0 if all(layer.method.is_plain for layer in members) else _gram(members)
    return grams + 2 * itemsize * _SAMPLES * members[0].k


def _gram(members: Sequence[LayerPlan]) -> int:
    return _FP32 * sum(k * k for k in members[0].segments)


def _chunk(k: int) -> int:
    return _FP32 * max(256, min(_CHUNK, k // 4)) * k


def _fitted(members: Sequence[LayerPlan], width: int, on_gpu: bool) -> int:
    """Return the bytes of fitting a group beside the statistics of its input: the Gram again, and its weights."""
    k, method = members[0].k, members[0].method
    gram = _FP32 * max(members[0].segments) ** 2
    grams = gram * (method.gptq + bool(method.transforms or method.deflate))
    if method.joint and k <= _JOINT_K:
        grams = _JOINT_GRAMS * gram
    rows = max(layer.n for layer in members)
    at_once = min(rows, max(k // 8, _ROWS_OF_GPU if on_gpu else _ROWS))
    weights = (width + 1) * k * sum(layer.n for layer in members)  # and their codes
    tried = 0 if method.is_plain else _COPIES * _FP32 * _TRIED * k
    return grams + weights + max(_COPIES * _FP32 * at_once * k + tried, 3 * _FP32 * rows * k)  # or the outcome


def tokens(folder: ModelFolder, component: str, size: CallSize) -> int:
    """Return the tokens of a call: of two sequences for each image where guidance may run both halves at once."""
    config = folder.config(component)
    if library_of(folder, component) == "transformers":
        return 2 * size.images * max(size.text or _TEXT, _SHORT_TEXT)
    sequences = size.images * (1 if config.get("guidance_embeds") else 2)
    try:
        forward = forward_pass_of(folder, component, size)
    except ValueError:  # a class without a row, or one of convolutions
        image = (size.height or _SIDE) * (size.width or _SIDE) // _SPANNED**2 * (size.frames or 1)
        return sequences * (image + (size.text or _TEXT))
    return sequences * (forward.image + forward.text + forward.vision)


def forward_pass_of(folder: ModelFolder, component: str, size: CallSize) -> ForwardPass:
    """Return the forward pass of one sequence of a denoiser; ValueError for one whose family is not modelled."""
    return forward_pass(
        next((row.name for row in FAMILIES.values() if row.model == folder.components[component]), ""),
        folder.config(component),
        replace(size, images=1),
        vae=folder.config("vae") if "vae" in folder.components else None,
    )


def _frames_at_once(folder: ModelFolder, component: str, frames: int) -> int:
    """Return the number of frames that a VAE decodes together: a few, or all and two that its convolutions see."""
    return min(frames + 2, _FEW_FRAMES.get(folder.components[component], frames + 2))


def _is_vae(folder: ModelFolder, component: str) -> bool:
    return component == "vae" or folder.components[component].startswith(("Autoencoder", "AsymmetricAutoencoder"))
