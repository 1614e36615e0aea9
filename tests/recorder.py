"""Stands in for CUDA graphs: a recording knows operations and the memory that they read and write, and nothing else.

A replay computes the operations anew from what lies in that memory. Memory that a recording allocated, other recordings
write over: graphs of one denoiser share it. Below it are calls of the embedded pipeline, and of its transformer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import accelerate
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Tape(TorchDispatchMode):
    """Notes every operation on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable, tuple, dict, Any]] = []
        self.allocated: list[Tensor] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = op(*args, **(kwargs or {}))
        on_memory = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, out))  # wherever those tensors go later
        self.operations.append((op, *on_memory))
        given = {place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        self.allocated += [each for each in tree_leaves(out) if isinstance(each, Tensor) and place(each) not in given]
        return out

    def play(self) -> None:
        for op, args, kwargs, out in self.operations:
            given = {place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            made = op(*args, **kwargs)
            for held, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                if isinstance(held, Tensor) and place(held) not in given:  # neither a view nor in place
                    held.copy_(new)

    def spoil(self) -> None:
        for each in self.allocated:
            each.fill_(float("nan") if each.is_floating_point() else 0)


class Answer:
    """An answer that a recording writes; as with a GPU, it is not there before."""

    def __init__(self) -> None:
        self.value = torch.full((1,), -1, dtype=torch.int8)

    def write(self, yes: Tensor) -> None:
        self.value.copy_(yes.to(torch.int8).view(1))

    def expect(self) -> None:
        self.value.fill_(-1)

    def read(self) -> bool:
        assert int(self.value) >= 0, "the recording wrote no answer"
        return bool(self.value)


class Recorder:
    """Stands in for the device, as `CudaGraphs` does on a GPU."""

    kind = "cpu"
    tapes: ClassVar[list[Tape]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tapes.clear()

    def warm_up(self, call: Callable[[], Any]) -> None:
        call()

    def rehearse(self, call: Callable[[], Any]) -> bool:
        call()
        return True

    def record(self, call: Callable[[], Any], beside: Tape | None) -> tuple[Tape, Any, int]:
        with Tape() as tape:
            outputs = call()
        tape.spoil()  # recording computes nothing
        self.tapes.append(tape)
        return tape, outputs, 0

    def replay(self, graph: Tape) -> None:
        with torch.inference_mode():  # a graph does not ask what it may write to
            for other in self.tapes:
                if other is not graph:
                    other.spoil()
            graph.play()

    def answer(self) -> Answer:
        return Answer()


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if not tensor.is_meta else id(tensor)


def latents(pipe, prompt: str | list[str] = "a red circle", **how) -> Tensor:
    count = 1 if isinstance(prompt, str) else len(prompt)
    noise = [torch.Generator().manual_seed(seed) for seed in range(count)]
    size = {"height": 16, "width": 16, "max_sequence_length": 8, "num_inference_steps": STEPS}
    return pipe(prompt, generator=noise, output_type="latent", **size | how).images


def arguments(model: nn.Module, images: int = 2, tokens: int = 16, seed: int = 0, **more) -> dict:
    noise = torch.Generator().manual_seed(seed)
    place = next(model.parameters())
    random = lambda *shape: torch.randn(shape, generator=noise).bfloat16().to(place.device)  # noqa: E731
    return {
        "hidden_states": random(images, tokens, 16),
        "encoder_hidden_states": random(images, 8, 64),
        "pooled_projections": random(images, 64),
        "timestep": torch.linspace(0.05, 0.95, images).bfloat16().to(place.device),
        "img_ids": torch.zeros(tokens, 3, device=place.device),
        "txt_ids": torch.zeros(8, 3, device=place.device),
    } | more


def velocity(model: nn.Module, **how) -> Tensor:
    return model(**arguments(model, **how), return_dict=False)[0]


@contextmanager
def plainly(model: nn.Module) -> Iterator[nn.Module]:
    """The model without its graphs for a while, which stay recorded."""
    step = vars(model).pop("forward")
    try:
        yield model
    finally:
        vars(model)["forward"] = step


def assert_plain(model: nn.Module, **how) -> Tensor:
    """A call, twice, gives what a plain one does, byte for byte."""
    with plainly(model):
        want = velocity(model, **how)
    for _ in range(2):
        assert torch.equal(velocity(model, **how), want)
    return want


def guided(**how) -> dict:
    return {"negative_prompt": "a blue square", "true_cfg_scale": 3.0} | how


def offloaded(pipe) -> None:
    accelerate.cpu_offload(pipe.transformer, torch.device("cpu"))


STEPS = 2
ADAPTED = ("to_q", "to_k", "proj_mlp", "ff.net.2", "proj_out")
