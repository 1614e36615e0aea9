"""fluxq's plug-ins in engines that serve images: what vllm_omni.py and sglang.py share.

An engine calls a plug-in in each of its processes, whatever models it serves. So nothing heavy is imported here, only
pipelines with layers of fluxq are touched, and no error of fluxq's preparations ends a server: it computes the same
images without them. Importing fluxq has told diffusers how to read a checkpoint by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, get_args

from fluxq.base.console import did_you_mean, logger

if TYPE_CHECKING:
    from fluxq.runtime.prepare import Prefer


@dataclass(frozen=True)
class Engine:
    """An engine whose plug-in was tried.

    package: on PyPI. tried: the public version.
    """

    name: str
    package: str
    tried: str

    @property
    def present(self) -> str:
        """Version that is installed, "" if none is, or if what pip wrote of it is damaged."""
        try:
            return version(self.package) or ""
        except Exception:  # of a damaged file whatever its parser raises, and the engine must go on
            return ""

    def is_tried(self) -> bool:
        """Tell whether this is the version that was tried; where it is not, say so in the log."""
        present = self.present
        is_tried = present.partition("+")[0] == self.tried  # "+cu129" names a build of it
        if not is_tried:
            logger.warning(
                "fluxq's plug-in was tried with %s %s, and this is %s: it changes nothing in it. Checkpoints load by "
                'its diffusers back end, without what fluxq does after loading; for that, pip install "%s==%s"',
                *(self.name, self.tried, present or "an unknown version", self.package, self.tried),
            )
        return is_tried


VLLM_OMNI = Engine("vLLM-Omni", "vllm-omni", "0.30.0")
SGLANG = Engine("SGLang-Diffusion", "sglang", "0.5.23")


def after_loading(pipe: Any, engine: Engine) -> list[str]:
    """Do in a loaded pipeline what its checkpoint's `runtime` says, else the defaults; return what was done.

    prefer: of `fluxq.prepare`, "speed" by default. attention: of `fluxq.set_attention`, by default as loaded. steps,
    diffusion_step_policy: lists and 16-bit activations, where they are recorded. Other keys are ignored.

    A pipeline without layers of fluxq is left alone. A key that cannot be obeyed is left out, with a warning that says
    why: a wrong value too, since the images are those of the checkpoint without it.
    """
    try:
        return _after_loading(pipe, engine)
    except Exception as error:  # whatever the pipeline is, the engine must go on
        _left_out(engine, "what fluxq does after loading", error)
        return []


def _after_loading(pipe: Any, engine: Engine) -> list[str]:
    from fluxq.kernels.linear import quant_layers
    from fluxq.runtime.placed import models_of

    if not hasattr(pipe, "components") and not hasattr(pipe, "modules"):  # neither a pipeline nor a model
        return []
    models = [part for part in models_of(pipe).values() if quant_layers(part)]
    if not models:
        return []
    done = []
    for name, do in _actions(recorded_runtime(models)):
        try:
            if do(pipe) is not None:
                done.append(name)
        except Exception as error:  # a kernel that does not compile, a folder that cannot be read: it runs without
            _left_out(engine, name, error)
    logger.info("fluxq in %s, after loading: %s", engine.name, ", ".join(done) or "nothing")
    return done


def recorded_runtime(models: Iterable[Any]) -> dict[str, Any]:
    """Return the keys of all models' `runtime` that are read here; of two that say the same key, the first."""
    from fluxq.runtime.steps import recorded_in

    joined: dict[str, Any] = {}
    for runtime in reversed([config.runtime for part in models if (config := recorded_in(part))]):
        joined |= {key: runtime[key] for key in ("prefer", "attention") if key in runtime}
    return joined


def checked_prefer(runtime: Mapping[str, Any]) -> Prefer:
    """Return `prefer` of a config.json's `runtime`, "speed" by default; ValueError for a word that is none of it."""
    from fluxq.runtime.prepare import Prefer

    prefer = runtime.get("prefer", "speed")
    if prefer not in get_args(Prefer):
        hint = did_you_mean(str(prefer), get_args(Prefer)) or f"; expected one of {', '.join(get_args(Prefer))}"
        raise ValueError(f"quantization_config.runtime.prefer in config.json is {prefer!r}{hint}")
    return prefer


def _actions(runtime: Mapping[str, Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return (name, function of the pipeline that returns None where it did nothing), in their order."""
    import fluxq
    from fluxq.runtime.skip import skip_recorded_steps
    from fluxq.runtime.steps import keep_recorded_steps

    attention = runtime.get("attention")
    return [
        ("prepare", lambda pipe: fluxq.prepare(pipe, prefer=checked_prefer(runtime)) or None),
        ("attention", lambda pipe: None if attention is None else fluxq.set_attention(pipe, attention)),
        ("optimize", lambda pipe: fluxq.optimize(pipe) or None),
        ("kept steps", keep_recorded_steps),
        ("skipped steps", skip_recorded_steps),
    ]


def _left_out(engine: Engine, name: str, error: Exception) -> None:
    logger.warning("fluxq in %s leaves out %s: %s: %s", engine.name, name, type(error).__name__, error)
