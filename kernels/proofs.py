"""Proof of launches on the GPU at hand: what was launched, compared with the torch reference.

`judge` names the cells of a call that has been computed, each with its verdict; `fluxq doctor` asks for all of them.
`verified` compares the first launch of each cell and shape in a process, on a few tokens, unless a file of doctor's
vouches for it: a cell that is wrong is withdrawn, and the call computed anew with what is offered then, the torch
reference in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fluxq.base.console import first_line, logger
from fluxq.base.settings import is_strict, verification
from fluxq.kernels import dispatch, findings, launch, ops
from fluxq.kernels.all_ops import ATTENTION_FP8, INPUT_GRADIENT, OPS, QK_NORM_ROPE, QUANTIZE_ACTIVATION
from fluxq.kernels.compare import Product, Sample, Verdict, at, near, picked, product, same, taken
from fluxq.kernels.dispatch import TORCH, Choice
from fluxq.kernels.epilogue import ROUNDED_WEIGHTS, rounds_weights
from fluxq.kernels.findings import Cell, Shape
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.reencode import reencode
from fluxq.kernels.tensor import QuantizedTensor, pack_named, unpack_named
from fluxq.recipes.formats import Scheme

SLICE = Sample(tokens=16, outputs=256)  # milliseconds
_seen: set[tuple[Cell, Shape]] = set()  # compared in this process


def verified(name: str, arguments: Sequence[Any], result: Any, chip: str) -> Any:
    """Return the result of an op's call, compared if that is its turn, or computed anew where it was wrong.

    Raises RuntimeError for a wrong one where fluxq is strict.
    """
    how = verification()
    if how == "off" or not is_on_gpu(arguments[0]) or _must_not_wait():
        return result
    cells = cells_of(name, arguments, chip)
    kinds = {cell: findings.alike(*shape_of(name, arguments, cell)) for cell in cells}
    if not cells or (
        how == "first" and all(kind in _seen or findings.vouched(*kind[0], kind[1]) for kind in kinds.items())
    ):
        return result
    try:
        judged = judge(name, arguments, result, chip=chip, sample=SLICE)
    except Exception as error:  # of the comparison, memory that is short for instance: it must not stop the call
        logger.warning("%s on %s was not compared: %s", name, chip, first_line(error))
        _seen.update(kinds.items())
        return result
    wrong = [(cell, verdict) for cell, verdict in judged if verdict.is_wrong]
    if wrong and not _is_comparable(name, arguments):
        logger.warning("%s on %s was not compared: its input, or the reference's result, is not finite", name, chip)
        return result
    _seen.update((cell, kinds[cell]) for cell, _ in judged)  # one behind a wrong one was not
    if not wrong:
        return result
    for cell, verdict in wrong:
        _withdraw(cell, verdict)
    return verified(name, arguments, launch.computed_by(name, arguments, chip), chip)


def _is_comparable(name: str, arguments: Sequence[Any]) -> bool:
    """Tell whether a call is of finite numbers, whose torch reference is finite too: a NaN is the model's own."""
    with torch.no_grad(), ops.no_autocast(arguments[0]):
        numbers = tree_leaves((arguments[0], REFERENCES[name](*arguments)))
    return all(
        bool(each.isfinite().all())
        for each in numbers
        if isinstance(each, Tensor) and each.is_floating_point() and each.element_size() > 1
    )


def is_on_gpu(x: Tensor) -> bool:
    """Tell whether kernels run on a real GPU for a tensor."""
    return x.is_cuda


def _must_not_wait() -> bool:
    return torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()


def _withdraw(cell: Cell, verdict: Verdict) -> None:
    op, name, chip = cell
    text = f"{op} {name} on {chip} computed something wrong ({verdict.what}) and is not used again in this process"
    dispatch.withdraw(op, name, chip, f"wrong on this GPU: {verdict.what}")
    launch.PLANS.clear()
    cure = "`fluxq doctor --share FILE` proves all kernels on this GPU and writes what a bug report needs"
    if is_strict():
        raise RuntimeError(f"{text}; {cure}. Strict mode falls back to nothing")
    logger.error("%s; %s", text, cure)


def shape_of(name: str, arguments: Sequence[Any], cell: Cell) -> Shape:
    """Return (M, N, K) of a cell in a call: tokens, outputs and inputs; of attention tokens, channels and keys."""
    x, *rest = arguments
    if name == QK_NORM_ROPE.name:
        width = x.shape[2] * x.shape[3]
        return OPS[name].kernel.tokens_of(x, *rest[1:3]), width, width
    if name == ATTENTION_FP8.name:
        return x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], rest[0].shape[1]
    if name == INPUT_GRADIENT.name:  # times W (N, K), a product of N inputs
        w, _ = OPS[name].kernel.operands(*arguments[:5])
        inputs, outputs = w.shape
        return x.shape[0], inputs if cell[0] == QUANTIZE_ACTIVATION.name else outputs, inputs
    m, k = x.numel() // x.shape[-1], x.shape[-1] * (2 if x.dtype == torch.uint8 else 1)  # 4-bit codes: two to a byte
    return m, rest[0][0].shape[0] if is_product(name) and cell[0] != QUANTIZE_ACTIVATION.name else k, k


def is_product(name: str) -> bool:
    """Tell whether an op multiplies by a weight."""
    return name == LINEAR or hasattr(OPS[name].kernel, "multiply")


def cells_of(name: str, arguments: Sequence[Any], chip: str) -> tuple[Cell, ...]:
    """Return the cells that a call launches; empty for the torch reference."""
    if name == LINEAR:
        parts = cells_of_choice(_choice(arguments, chip))
    else:
        try:
            parts = OPS[name].kernel.cells(*arguments, chip=chip)
        except dispatch.NoKernel:
            return ()
        if any(findings.wrong(op, part, chip) for op, part in parts):
            return ()
    return tuple((op, part, chip) for op, part in parts)


def cells_of_choice(choice: Choice) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that a layer launches under a choice: the quantizer's, then the product's."""
    if choice.implementation == TORCH:
        return ()
    quantizer = () if choice.activations is None else ((QUANTIZE_ACTIVATION.name, choice.activations),)
    return (*quantizer, choice.cell)


def judge(name: str, arguments: Sequence[Any], result: Any, *, chip: str, sample: Sample) -> list[tuple[Cell, Verdict]]:
    """Compare the result of a call; return its cells, each with a verdict. One behind a wrong cell is not judged."""
    with torch.no_grad(), ops.no_autocast(arguments[0]):
        if name == LINEAR:
            return judge_linear(_choice(arguments, chip), arguments, result, chip=chip, sample=sample)
        kernel, cells = OPS[name].kernel, cells_of(name, arguments, chip)
        judged: list[tuple[Cell, Verdict]] = []
        if len(cells) > 1 and hasattr(
            kernel, "compare_quantizer"
        ):  # which is not blamed for the product, nor this for it
            judged = [(cells[0], kernel.compare_quantizer(*arguments, chip=chip, sample=sample))]
            if judged[0][1].is_wrong:
                return judged
        verdict = kernel.compare(result, *arguments, chip=chip, sample=sample)
        return [*judged, *((cell, verdict) for cell in cells[len(judged) :])]


def judge_linear(
    choice: Choice, arguments: Sequence[Any], result: Tensor, *, chip: str, sample: Sample
) -> list[tuple[Cell, Verdict]]:
    """Compare what a choice computed of a layer: its quantizer launched alone, then the product of those codes.

    Both start from the steps before the quantizer, which are torch's on every device.
    """
    x, tensors, text = arguments
    given, scheme = unpack_named(ops.LinearTensors, tensors, text, Scheme.parse)
    z, low_rank, (rounding, how) = launch.steps_before(x.reshape(-1, x.shape[-1]), scheme, choice.activations, given)
    parts, verdicts = cells_of_choice(choice), []
    if not parts:
        return []
    rows = picked(z.shape[0], sample.tokens, z.device)
    a: Tensor | QuantizedTensor = z[rows]
    if choice.activations is not None:
        call = z.contiguous(), *pack_named(rounding, how)
        made = launch.computed_by(QUANTIZE_ACTIVATION.name, call, chip)
        kernel = QUANTIZE_ACTIVATION.kernel
        verdicts = [((*parts[0], chip), kernel.compare(made, *call, chip=chip, sample=sample))]
        if verdicts[0][1].is_wrong:
            return verdicts
        a = kernel.coded(made, rounding, how, rows)
    verdict = _compare_product(a, rows, given, scheme, choice, low_rank, result, sample)
    return [*verdicts, ((*parts[-1], chip), verdict)]


def _compare_product(
    a: Tensor | QuantizedTensor,
    rows: Tensor,
    given: ops.LinearTensors,
    scheme: Scheme,
    choice: Choice,
    low_rank: tuple[Tensor, Tensor] | None,
    result: Tensor,
    sample: Sample,
) -> Verdict:
    """Compare outputs (…, N) of a layer, of the given rows of its input."""
    y = result.reshape(-1, result.shape[-1])
    outputs = picked(y.shape[1], sample.outputs, y.device)
    w = taken(QuantizedTensor.stored(*given[:3], scheme.weights), outputs)
    if choice.activations is not None and given.row_scale is not None:
        w = reencode(w, choice.activations, given.row_scale[outputs])
    rounds = choice.activations is None and rounds_weights(scheme.weights, result.dtype)
    what = Product(
        a,
        w,
        None if given.bias is None else given.bias[outputs],
        None if low_rank is None else (at(low_rank[0], rows), at(low_rank[1], outputs)),
        terms=ROUNDED_WEIGHTS if rounds else 0,
        separate=low_rank is not None,
    )
    return product(choice.implementation, y[rows][:, outputs], what)


def judge_outside(name: str, arguments: Sequence[Any], result: Any, chip: str, sample: Sample) -> Verdict:
    """Compare what a kernel that is not ours computed of an op's call; of a layer in the arithmetic of its choice.

    result: of the op's kind (`unlike`). Codes may be those of numbers that were rounded to the other side: where they
    are not ours, the values that they stand for are compared, all together.
    """
    if name == LINEAR:
        choice = _choice(arguments, chip)
        judged = judge_linear(choice, arguments, result, chip=chip, sample=sample)
        if judged and judged[-1][0][0] == choice.implementation:  # neither the torch reference nor a wrong quantizer
            return judged[-1][1]
        return near("values", result.flatten(0, -2), REFERENCES[name](*arguments).flatten(0, -2), (0, 1))
    kernel = OPS[name].kernel
    verdict = kernel.compare(result, *arguments, chip=chip, sample=sample)
    if not verdict.is_wrong or not hasattr(kernel, "decoded"):
        return verdict
    values, expected = (kernel.decoded(made, *arguments) for made in (result, REFERENCES[name](*arguments)))
    return near("values", values, expected, (0, 1))


def unlike(name: str, arguments: Sequence[Any], result: Any) -> str:
    """Return how the result of a call is of another kind than the op's, in words; empty if it is not.

    Compared are numbers of tensors, shapes, dtypes and devices, before anything looks inside.
    """
    expected = getattr(torch.ops.fluxq, name)(*tree_map_only(Tensor, lambda each: each.to("meta"), [*arguments]))
    device = arguments[0].device
    kinds = _kind(result, None), _kind(expected, device)
    return "" if kinds[0] == kinds[1] else f"returned {kinds[0]}, expected {kinds[1]}"


def _kind(value: Any, device: torch.device | None) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_kind(each, device) for each in value)})"
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {(*value.shape,)} on {device or value.device}"


def changed(arguments: Any, before: Any) -> str:
    """Return how many tensors of a call were changed in place, in words, and give them their values back.

    before: a copy of the arguments from before the call.
    """
    pairs = [
        pair for pair in zip(tree_leaves(arguments), tree_leaves(before), strict=True) if isinstance(pair[1], Tensor)
    ]
    others = [(now, then) for now, then in pairs if same("", now, then).is_wrong]
    for now, then in others:
        now.data = then
    return f"{len(others)} of its inputs changed in place" if others else ""


def _choice(arguments: Sequence[Any], chip: str) -> Choice:
    """Return the choice of what computes a layer's call."""
    return dispatch.choose(*launch.kind_of_linear(*arguments, chip=chip))


LINEAR = "quantized_linear"
