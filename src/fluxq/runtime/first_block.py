"""FirstBlockCache of diffusers with its decision taken out, so that a step can be recorded once for each.

At each step diffusers computes the first block, compares what it added to the image with what it added when all blocks
were computed last, |r - r'| / |r'| over the threshold, and then computes the rest, or adds what the rest added then.
Here whoever records a step decides beforehand, and what later steps read of a computed one lies in memory that stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from torch import Tensor, nn

from fluxq.runtime.placed import diffusers_hooks


class FirstBlock:
    """The FirstBlockCache of a denoiser."""

    def __init__(self, hook: FBCHeadBlockHook) -> None:
        self._hook: Any = hook

    @property
    def kind(self) -> tuple[str, float]:
        """Name of the present context, which has a state of its own, and threshold. ValueError outside of a context."""
        manager = self._hook.state_manager
        if hasattr(type(manager), "context"):
            return manager.context.name, self._hook.threshold
        if manager._current_context is None:  # diffusers before 0.41 has the name alone
            raise ValueError("no context is set: call the denoiser inside of its `cache_context(name)`")
        return manager._current_context, self._hook.threshold

    @contextmanager
    def deciding(self, computes: Callable[[Tensor], bool]) -> Iterator[None]:
        """Let a function of what the first block added tell whether the other blocks are computed.

        Afterwards later steps read what they would have read before: a recording makes tensors that hold nothing yet.
        """
        state, before = self._state, dict(vars(self._state))
        self._hook._should_compute_remaining_blocks = computes
        try:
            yield
        finally:
            del self._hook._should_compute_remaining_blocks
            vars(state).update(before)

    def suffices(self, added: Tensor) -> Tensor:
        """Tell, on the device and as diffusers does, whether the last computed step is near enough; a bool ()."""
        before = self._state.head_block_residual
        return ~((added - before).abs().mean() / before.abs().mean()).double().gt(self._hook.threshold)

    def read(self) -> list[Tensor]:
        """Return what later steps read of the one that was computed last."""
        residuals = [self._state.head_block_residual, *self._state.tail_block_residuals]
        return [each for each in residuals if each is not None]

    def put(self, residuals: Sequence[Tensor]) -> None:
        """Let later steps read these, in the order of `read`."""
        first, image, *text = residuals
        state = self._state
        state.head_block_output, state.head_block_residual = None, first
        state.tail_block_residuals = (image, text[0] if text else None)

    def holds(self, residuals: Sequence[Tensor]) -> bool:
        """Tell whether a step would read these very tensors: a pipeline's call begins with none."""
        state = self._state
        return state.tail_block_residuals is not None and state.head_block_residual is residuals[0]

    @property
    def _state(self) -> Any:
        return self._hook.state_manager.get_state()


def first_block_of(model: nn.Module) -> FirstBlock | None:
    """Return the FirstBlockCache that is enabled in a model, if one is."""
    for module in model.modules():
        for hook in diffusers_hooks(module).values():
            if isinstance(hook, FBCHeadBlockHook):
                return FirstBlock(hook)
    return None
