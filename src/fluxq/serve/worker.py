"""A worker: checkpoints in memory, and the images that they are making, one quantum at a time.

Each image is a call of a stock pipeline in a thread of its own, which stops after every step until it is told to go on.
So images take turns at the granularity of a step, whatever the pipeline, and each is the one that the pipeline makes
alone, bit for bit: nothing but the turn is shared, unless denoiser calls are joined. A shallow copy of the pipeline,
with a scheduler of its own, is what an image changes. Where a denoiser remembers its last step (lists of steps, kept
steps, step caches), one image is finished before the next begins.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import parent_process
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from PIL import Image

from fluxq.base.console import first_line, logger
from fluxq.serve.joined import Meeting, meet, shared_by
from fluxq.serve.orders import Busy, Facts, NotFinite, NotLoaded, Order, Picture, Quantum, Refused, WorkerDied

if TYPE_CHECKING:
    from torch import Tensor

_ENCODINGS = 256 << 20  # bytes of encoded prompts that are kept
_LEAST = 1024  # bytes that one counts at least
_SIDE = 1024  # pixels, of a pipeline that says nothing
_UNKNOWN_ADAPTER = ("", 0.0)  # equal to no request's: the next image switches


@dataclass(frozen=True)
class Settings:
    """Settings of a worker.

    folders: name -> folder of a checkpoint.
    device: as `--device` has it. dtype: as torch writes it.
    memory: bytes of weights at most; None for what is free.
    adapters: name -> file of a LoRA.
    originals: name -> folder of a 16-bit pipeline, for shadows.
    unrecorded: whether checkpoints are served that record nothing to hold their files against.
    joins: whether denoiser calls may be joined.
    """

    folders: Mapping[str, str]
    device: str = "auto"
    dtype: str = "bfloat16"
    memory: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    originals: Mapping[str, str] = field(default_factory=dict)
    unrecorded: bool = False
    joins: bool = False


class Worker:
    """Checkpoints in memory and images in the making. Its methods are called one at a time, from any thread."""

    def __init__(self, settings: Settings) -> None:
        """Raise ValueError for a device that cannot be used."""
        from fluxq.base.devices import choose

        self.settings = settings = replace(settings, device=choose(settings.device))
        self.folders = {**settings.folders, **settings.originals}
        self._models: OrderedDict[str, _Model] = OrderedDict()  # used last comes last
        self._making: dict[int, _Making] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # number -> image, latents
        self._proved: dict[str, tuple[Any, str]] = {}  # name -> stamps of the files, digest
        self._digests: dict[str, str] = {}  # name -> digest when it was loaded first

    def know(self, name: str, folder: str | None, digest: str | None = None) -> None:
        """Take note of a checkpoint.

        folder: of one that the settings do not name. digest: of one that a worker before this one has loaded.
        """
        if folder is not None:
            self.folders[name] = folder
        if digest is not None:
            self._digests[name] = digest

    def load(self, name: str) -> Facts:
        """Load a checkpoint, if it is not in memory, and return its facts.

        ValueError for one that `fluxq verify` refuses, or that does not fit.
        """
        return self._model(name).facts

    def unload(self, name: str, forget: bool = False) -> None:
        """Give a checkpoint's memory back; `Busy` while it makes images. forget: whether its folder too."""
        if any(each.order.model == name for each in self._making.values()):
            raise Busy(f"{name} is making images; try again when they are finished")
        self._models.pop(name, None)
        if forget:
            self.folders.pop(name, None)
            self._digests.pop(name, None)
        _give_back(self.settings.device)

    def run(self, orders: Sequence[Order], tell: Callable[[Quantum], None], pauses: Callable[[], bool]) -> None:
        """Make images of one model and adapter, from where they stand, until they are finished or pause after a step.

        Calls of the denoiser are joined where there is more than one image.

        tell: takes each quantum, in another thread; an image that cannot be made has an `error`, and is forgotten.
        pauses: whether to stop after the one that was just told.
        """
        start, name = time.perf_counter(), orders[0].model
        model = self._loaded(name, unloads=orders[0].shadow_of is None)
        loading = time.perf_counter() - start
        self._models.move_to_end(name)
        with _discreet():
            model.adapt(orders[0].lora)
            makings = [self._making.setdefault(order.number, _Making(model, order)) for order in orders]
            meeting = Meeting(len(makings)) if len(makings) > 1 else None
            for each in makings:
                each.go_on(tell, pauses, start, loading, meeting)
            for each in makings:
                each.wait()
        done = [each for each in makings if each.is_done]
        for each in done:
            del self._making[each.order.number]
        for each in done:  # `tell` may raise
            tell(self._last(each))

    def _last(self, making: _Making) -> Quantum:
        """Return the last quantum of an image, with what was measured of a shadow; `WorkerDied` where a GPU is lost."""
        order = making.order
        try:
            last, made = making.result()
            measured = None
            if order.shadow_of is not None:
                measured = _compared(made, self._kept.pop(order.shadow_of))
            elif order.is_kept:
                self._kept[order.number] = made
            return replace(last, measured=measured)
        except Exception as error:
            _require_gpu(self.settings.device)
            return Quantum(order.number, 0, 0.0, error=error)

    def prove_joined(self, orders: Sequence[Order]) -> float:
        """Return the least SQNR in dB of latents of these images made in joined calls, against the same alone."""
        from fluxq.eval.metrics.fidelity import sqnr

        latents: list[list[Tensor]] = []
        try:
            for groups in ([[order] for order in orders], [orders]):
                for group in groups:
                    self.run([replace(order, is_kept=True) for order in group], Quantum.check, lambda: False)
                latents.append([self._kept.pop(order.number)[1] for order in orders])
        finally:
            for order in orders:
                self._kept.pop(order.number, None)
        return min(float(sqnr([one], [other])[0]) for one, other in zip(*latents, strict=True))

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a finished image that was kept, uint8 (3, H, W), and its latents; they are kept no longer."""
        return self._kept.pop(number)

    def drop(self, number: int) -> None:
        """Stop making an image, where it stands, and forget one that was kept."""
        self._kept.pop(number, None)
        if making := self._making.pop(number, None):
            making.drop()

    def memory(self) -> dict[str, int]:
        """Return checkpoint in memory -> bytes of its weights."""
        return {name: model.facts.nbytes for name, model in self._models.items()}

    def _loaded(self, name: str, *, unloads: bool) -> _Model:
        """Return a model for an image; `NotLoaded` where its folder is to blame, not the request."""
        try:
            return self._model(name, unloads=unloads)
        except Refused:
            raise
        except (ValueError, OSError) as error:
            logger.warning("%s cannot be loaded: %s", name, first_line(error))
            raise NotLoaded(f"{name} cannot be loaded now; the server's log says why") from None

    def _model(self, name: str, *, unloads: bool = True) -> _Model:
        if name not in self._models:
            if name not in self.folders:
                raise Refused(f"there is no model {name!r}", "model")
            folder = Path(self.folders[name]).expanduser().resolve()
            is_original = name in self.settings.originals
            digest = "" if is_original else self._prove(name, folder)
            if self._digests.setdefault(name, digest) != digest:
                raise ValueError(f"{folder}: its files are others than at first; unload {name} and load it again")
            self._make_room(name, folder, unloads=unloads)
            self._models[name] = _Model(name, folder, digest, self.settings)
        return self._models[name]

    def _prove(self, name: str, folder: Path) -> str:
        """Return a checkpoint's digest; ValueError for one that `fluxq verify` refuses. Files are read once."""
        from fluxq.base.model import resolve_model
        from fluxq.eval.images.sides import pipeline_digest, side_stamps
        from fluxq.jobs.requirements import require_checkpoint

        require_checkpoint(folder)
        source = resolve_model(str(folder))
        if self._proved.get(name, ((), ""))[0] != side_stamps(folder):
            _require_whole(folder, unrecorded=self.settings.unrecorded)
            self._proved[name] = side_stamps(folder), pipeline_digest(source)
        return self._proved[name][1]

    def _make_room(self, name: str, folder: Path, *, unloads: bool) -> None:
        """Unload checkpoints that were not used for longest until another fits; ValueError says by how much not."""
        from fluxq.base.model import resolve_model
        from fluxq.jobs.memory import in_words, stored_bytes

        needed = stored_bytes(resolve_model(str(folder)))
        if unloads and needed > self._room():
            for shadow in [number for number, each in self._making.items() if each.order.shadow_of is not None]:
                self.drop(shadow)  # it begins anew when nothing else is made
        busy = {each.order.model for each in self._making.values()}
        idle = [each for each in self._models if each not in busy] if unloads else []
        while (lacking := needed - self._room()) > 0 and idle:
            oldest = idle.pop(0)
            logger.warning("%s makes room for %s", oldest, name)
            self.unload(oldest)
        if lacking > 0:
            raise ValueError(
                f"{folder}: its weights take {in_words(needed)}, {in_words(lacking)} more than there is room for on "
                f"{self.settings.device}; give fewer checkpoints, or more with --max-memory"
            )

    def _room(self) -> int:
        import torch

        from fluxq.base.devices import free_bytes

        if self.settings.memory is not None:
            return self.settings.memory - sum(self.memory().values())
        free = free_bytes(torch.device(self.settings.device))
        return 1 << 62 if free is None else free


class _Model:
    """A checkpoint in memory."""

    def __init__(self, name: str, folder: Path, digest: str, settings: Settings) -> None:
        from fluxq.base.model import load_pipeline, resolve_model
        from fluxq.calibrate.capture import frames_argument
        from fluxq.jobs.memory import weight_bytes
        from fluxq.quantize.structure import denoisers_in
        from fluxq.runtime.steps import about_to_keep

        source = resolve_model(str(folder))
        with about_to_keep():
            self.pipe: Any = load_pipeline(source, settings.dtype, settings.device)
        self.keeps_state = _make_ready(self.pipe, settings.device)
        if settings.joins and not self.keeps_state:
            for _, denoiser in denoisers_in(self.pipe):
                meet(denoiser)
        self.editing, edits = _editing(self.pipe)
        self.adapters, self.loaded_adapters = dict(settings.adapters), set[str]()
        self.lora: tuple[str, float] | None = None
        self.encodings = _Encodings()
        defaults = source.generation_defaults
        frames = frames_argument(type(self.pipe)) or ""
        usual = _usual(self.pipe, "num_inference_steps", *((frames,) if frames else ()))
        self.facts = Facts(
            name=name,
            digest=digest,
            accepts=frozenset(inspect.signature(self.pipe.__call__).parameters),
            defaults=usual | defaults,
            unit=_unit(self.pipe),
            nbytes=weight_bytes(source, settings.dtype),
            gates=_gates(folder),
            frames=frames,
            edits=edits,
            is_alone=self.keeps_state,
        )

    def copy(self, order: Order) -> Any:
        """Return what one image changes: the pipeline with a scheduler of its own, or the pipeline itself."""
        pipe = self.editing if order.sources else self.pipe
        if not self.keeps_state:
            pipe = copy.copy(pipe)
            pipe.scheduler = copy.deepcopy(self.pipe.scheduler)
        return pipe

    def adapt(self, lora: tuple[str, float] | None) -> None:
        """Switch to the adapter of the image that goes on; an adapter's file is read once.

        `Refused` for one that does not fit the model.
        """
        if lora == self.lora:
            return
        if lora is None:
            self.pipe.disable_lora()
        else:
            self._switch_on(*lora)
        self.lora = lora

    def _switch_on(self, name: str, scale: float) -> None:
        refused = Refused(f"lora: {name} does not fit {self.facts.name}", "lora")
        if not hasattr(self.pipe, "load_lora_weights"):
            raise refused
        self.lora = _UNKNOWN_ADAPTER  # of one that fails a part may be active, and of those before it too
        try:
            self._load_adapter(name)
            self.pipe.enable_lora()
            self.pipe.set_adapters([self._plain(name)], [scale])  # ValueError: the file has no weights of this model
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            logger.warning("the adapter %s does not fit %s: %s", name, self.facts.name, first_line(error))
            raise refused from None

    def _plain(self, name: str) -> str:
        """Return a name that can be one of a module; a file's can be any."""
        return f"adapter_{[*self.adapters].index(name)}"

    def _load_adapter(self, name: str) -> None:
        if name in self.loaded_adapters:
            return
        file = Path(self.adapters[name])
        self.pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=self._plain(name))
        self.loaded_adapters.add(name)


class _Making:
    """An image in the making: a call of the pipeline in a thread that can stop after each step."""

    def __init__(self, model: _Model, order: Order) -> None:
        self.model, self.order = model, order
        self.is_done = False
        self._steps, self._is_dropped = 0, False
        self._result: tuple[Quantum, tuple[Tensor, Tensor]] | None = None
        self._error: BaseException | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"image {order.number}", daemon=True)

    def go_on(
        self,
        tell: Callable[[Quantum], None],
        pauses: Callable[[], bool],
        start: float,
        loading: float,
        meeting: Meeting | None = None,
    ) -> None:
        """Let it run to its next stop.

        start: when its first quantum began; loading: seconds of that for the model. meeting: with those that run too.
        """
        self._tell, self._pauses, self._start, self._loading, self._meeting = tell, pauses, start, loading, meeting
        if not self._thread.ident:
            self._thread.start()
        self._go.release()

    def wait(self) -> None:
        """Wait until it has stopped."""
        self._stopped.acquire()

    def result(self) -> tuple[Quantum, tuple[Tensor, Tensor]]:
        """Return the last quantum, and image and latents; what went wrong is raised."""
        if self._result is None:
            raise _as_refusal(self._error or RuntimeError("an image was dropped"))
        return self._result

    def drop(self) -> None:
        """End its thread."""
        self._is_dropped, self._meeting = True, None
        if self._thread.ident:
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._resume()
        try:
            if not self._is_dropped:
                self._result = self._make()
        except _Dropped:
            pass
        except BaseException as error:  # the thread's end is not to be the worker's
            clear_frames(error.__traceback__)  # whose tensors would wait for the garbage collector
            self._error = error
        finally:
            self.is_done = True
            self._stop()

    def _resume(self) -> None:
        self._go.acquire()
        if self._meeting is not None:
            self._meeting.enter()

    def _stop(self) -> None:
        if self._meeting is not None:
            self._meeting.leave()
        self._stopped.release()

    def _make(self) -> tuple[Quantum, tuple[Tensor, Tensor]]:
        from fluxq.calibrate.capture import run_pipeline
        from fluxq.eval.images.generate import pictures, to_uint8

        pipe, order = self.model.copy(self.order), self.order
        images = [Image.frombytes("RGB", (each.width, each.height), each.pixels) for each in order.sources]
        call = {**order.call, **({"image": images if images[1:] else images[0]} if images else {})}
        computed = _counted(pipe)
        with _Remembering(self.model.encodings, pipe, order) as self._prompt:
            item = (order.prompt, order.seed)
            ((output, latents),) = run_pipeline(
                pipe, [item], call, output_type="pt", batch_size=1, on_latents=self._after_step
            )
        values = pictures(output)[0]  # (3, H, W) or (F, 3, H, W)
        if not (values.isfinite().all() and latents[0].isfinite().all()):
            raise _not_finite(order)
        image = to_uint8(values)
        height, width = image.shape[-2:]
        pixels = image.movedim(-3, -1).contiguous().numpy().tobytes()
        picture = Picture(width, height, pixels, computed(self._steps), len(image) if image.ndim == 4 else None)
        return self._quantum(picture), (image, latents[0].float().cpu())

    def _after_step(self, step: int, latents: Tensor) -> None:
        calls = getattr(self.model.pipe.scheduler, "order", 1)  # of a step: two of Heun's, whose last has one
        self._steps = step // calls + 1
        if (step + 1) % calls:
            return
        _wait_for(latents)
        self._tell(self._quantum())
        if self._pauses():
            self._stop()
            self._resume()
            if self._is_dropped:
                raise _Dropped

    def _quantum(self, picture: Picture | None = None) -> Quantum:
        """Return what has been done since the last one."""
        now = time.perf_counter()
        seconds, loading = now - self._start, self._loading
        self._start, self._loading = now, 0.0
        encoding, self._prompt.seconds = self._prompt.seconds, 0.0
        return Quantum(
            self.order.number,
            self._steps,
            seconds,
            loading,
            picture,
            self._prompt.was_hit,
            is_alone=self._meeting is None,
            shared=shared_by(),
            encoding=encoding,
        )


class _Dropped(BaseException):
    """An image that nobody waits for; pipelines catch no BaseException."""


class _Encodings:
    """Encoded prompts, those that were used last within `_ENCODINGS` bytes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._nbytes = 0

    def get(self, key: str) -> Any:
        """Return a copy of an encoding, None for one that is not kept."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return _cloned(self._kept[key])

    def put(self, key: str, value: Any) -> None:
        """Keep a copy of an encoding."""
        self._kept[key] = _cloned(value)
        self._nbytes += _LEAST + _nbytes(value)
        while self._nbytes > _ENCODINGS:
            _, gone = self._kept.popitem(last=False)
            self._nbytes -= _LEAST + _nbytes(gone)


class _Remembering:
    """A pipeline's copy that looks for encodings before it encodes a prompt, while the block lasts.

    was_hit: whether all was there. seconds: that it took.
    """

    def __init__(self, encodings: _Encodings, pipe: Any, order: Order) -> None:
        self.encodings, self.pipe, self.order, self.was_hit = encodings, pipe, order, False
        self.seconds, self._lacked = 0.0, False

    def __enter__(self) -> _Remembering:
        if callable(getattr(self.pipe, "encode_prompt", None)):
            self._plain: Callable[..., Any] = self.pipe.encode_prompt
            self.pipe.encode_prompt = self._timed
        return self

    def __exit__(self, *_: Any) -> None:
        vars(self.pipe).pop("encode_prompt", None)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        encoding = self._encode(*args, **kwargs)
        parts = encoding if isinstance(encoding, tuple) else (encoding,)
        _wait_for(next((each for each in parts if hasattr(each, "device")), None))
        self.seconds += time.perf_counter() - start
        return encoding

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._plain).bind(*args, **kwargs).arguments
        if any(not _is_plain(value) for value in bound.values()):
            return self._plain(*args, **kwargs)
        text = repr((sorted((name, repr(value)) for name, value in bound.items()), self.order.lora))
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        encoding = self.encodings.get(key)
        self._lacked |= encoding is None
        self.was_hit = not self._lacked
        if encoding is None:
            encoding = self._plain(*args, **kwargs)
            self.encodings.put(key, encoding)
        return encoding


@contextmanager
def _discreet() -> Iterator[None]:
    """Keep libraries from warning meanwhile: they quote what encoders cut off, a part of somebody's prompt."""
    libraries = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    levels = [library.level for library in libraries]
    for library in libraries:
        library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.setLevel(level)


def _compared(shadow: tuple[Tensor, Tensor], made: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return metric -> dB of an image against its shadow."""
    from fluxq.eval.metrics.fidelity import psnr, sqnr

    (image, latents), (other, others) = shadow, made
    return {"psnr": float(psnr([image], [other])[0]), "latent_sqnr": float(sqnr([latents], [others])[0])}


def _is_plain(value: Any) -> bool:
    import torch

    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    return value is None or isinstance(value, (str, int, float, torch.device, torch.dtype))


def _cloned(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_cloned, value))
    return value.clone() if hasattr(value, "clone") else value


def _nbytes(value: Any) -> int:
    return sum(map(_nbytes, value)) if isinstance(value, (tuple, list)) else getattr(value, "nbytes", 0)


def _counted(pipe: Any) -> Callable[[int], int]:
    """Count the steps that a pipeline's denoisers compute from now on; the number is a function of all steps."""
    from fluxq.quantize.structure import denoisers_in
    from fluxq.runtime.skipped import skipped_in

    skipped = next((each for _, model in denoisers_in(pipe) if (each := skipped_in(model))), None)
    if skipped is None:
        return lambda steps: steps
    handle = skipped.skipped
    before = handle.calls, handle.computed

    def computed(steps: int) -> int:
        calls = handle.calls - before[0]
        return round(steps * (handle.computed - before[1]) / calls) if calls else steps

    return computed


def _make_ready(pipe: Any, device: str) -> bool:
    """Do in a loaded pipeline what its checkpoint says; return whether its denoisers remember steps.

    On a GPU its layers are laid out for it. On a CPU they compute as stored: images are those of `fluxq eval`.
    """
    import fluxq
    from fluxq.integrations.engine import checked_prefer, recorded_runtime
    from fluxq.kernels.linear import quant_layers
    from fluxq.runtime.placed import models_of
    from fluxq.runtime.skip import skip_recorded_steps
    from fluxq.runtime.steps import keep_recorded_steps

    models = [part for part in models_of(pipe).values() if quant_layers(part)]
    if models:
        runtime = recorded_runtime(models)
        if device != "cpu":
            fluxq.prepare(pipe, prefer=checked_prefer(runtime))
        if "attention" in runtime:
            fluxq.set_attention(pipe, runtime["attention"])
        try:
            fluxq.optimize(pipe)
        except ValueError as error:
            logger.info("not optimized: %s", first_line(error))
    kept, skipped = keep_recorded_steps(pipe), skip_recorded_steps(pipe)
    return kept is not None or skipped is not None


def _editing(pipe: Any) -> tuple[Any, str]:
    """Return the pipeline that begins with an image, and how it takes it: see `Facts.edits`."""
    from diffusers import AutoPipelineForImage2Image

    if "image" in inspect.signature(pipe.__call__).parameters:
        return pipe, "image"
    try:
        editing: Any = AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError:
        return None, ""
    editing.set_progress_bar_config(disable=True)
    return editing, "strength"


def _require_whole(folder: Path, *, unrecorded: bool) -> None:
    """Raise ValueError for a folder that `fluxq verify` refuses."""
    from fluxq.quantize.verify import verify

    results = verify(folder)
    for each in results:
        if each.status == "failed" or (each.status == "not made" and each.findings):
            finding = each.findings[0]
            raise ValueError(f"{folder}: fluxq verify refuses it ({finding.where}: {finding.what})")
    unmade = [each.check for each in results if each.status != "ok"]
    if unmade and not unrecorded:
        raise ValueError(
            f"{folder}: fluxq verify cannot make {', '.join(unmade)}: nothing is recorded to hold the files against; "
            "--allow-unrecorded accepts that"
        )


def _gates(folder: Path) -> tuple[str, ...]:
    """Return the gates that a checkpoint was shipped with."""
    from fluxq.quantize.checkpoint import read_plan_file

    recipe = (read_plan_file(folder) or {}).get("recipe")
    gates = recipe.get("gates") if isinstance(recipe, dict) else None
    return tuple(map(str, gates)) if isinstance(gates, list) else ()


def _usual(pipe: Any, *names: str) -> dict[str, Any]:
    """Return a pipeline's own size, and its own values of these arguments."""
    parameters = inspect.signature(pipe.__call__).parameters
    side = getattr(pipe, "default_sample_size", None)
    pixels = side * _scale(pipe) if isinstance(side, int) else _SIDE
    defaults = {name: parameters[name].default for name in ("width", "height", *names) if name in parameters}
    return {"width": pixels, "height": pixels} | {name: value for name, value in defaults.items() if value is not None}


def _scale(pipe: Any) -> int:
    """Return the pixels that a latent stands for, along a side."""
    scales = (getattr(pipe, name, None) for name in ("vae_scale_factor", "vae_scale_factor_spatial"))
    return next((scale for scale in scales if isinstance(scale, int)), 8)


def _unit(pipe: Any) -> int:
    """Return the pixels that width and height are multiples of: pipelines round others down, with a warning."""
    return _scale(pipe) * (2 if hasattr(pipe, "_pack_latents") else 1)  # two by two latents are a token


def _as_refusal(error: BaseException) -> BaseException:
    """Return an error of a pipeline's call: ValueErrors are about what was asked for.

    Also those that were put down to the folder's own arguments: whoever asks may have changed another one.
    """
    for each in (error, error.__cause__):
        if isinstance(each, (ValueError, TypeError)) and not isinstance(each, Refused):
            return Refused(first_line(each))
    return error


def _not_finite(order: Order) -> Exception:
    """Return the error in place of a black image."""
    if order.lora is None:
        return NotFinite(f"{order.model} made values that are not finite")
    return Refused("lora: {} at scale {:g} makes values that are not finite".format(*order.lora), "lora")


def _wait_for(tensor: Tensor | None) -> None:
    """Wait until a GPU has computed what was launched, so that times are those of quanta."""
    import torch

    if tensor is not None and tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def _require_gpu(device: str) -> None:
    """Raise WorkerDied where a GPU computes nothing more for this process, as after an access to a wrong address.

    Only in a process of its own, for the front can start another one.
    """
    import torch

    if torch.device(device).type == "cuda" and parent_process() is not None:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise WorkerDied(f"the worker has lost its GPU: {first_line(error)}") from None


def _give_back(device: str) -> None:
    import gc

    import torch

    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
