"""Images and videos at scale: every (prompt, seed) of a side becomes a file exactly once, whatever makes it and however
often that is killed.

    item  = (prompt, seed, batch, key)                  key: SHA-256 of all that decides the bits of the images
    files = <SHA-256 of item>.png, .safetensors         the image, lossless, and its final latents
            <SHA-256 of item>/00000.png, …              in the image's place the frames of a video, lossless
    rows  = manifest-<worker>.jsonl                     an item's row says that its files are complete, and their hashes

The unit of work is a chunk: the run of `batch_size` items that share a call of the pipeline. Other images in the same
call change an image's last bits, so chunks are cut from the whole list before anything is looked at, and one that was
made in part is made again whole. A worker writes a chunk's files, then its rows in one piece. Missing images are handed
to one of three engines; an audit then counts and hashes everything, whoever made it.

A worker on a CPU computes with one thread: their number counts among what decides bits. Measured with torch 2.15:
`Linear`, attention, convolution, norms and sums along an axis give the same bits with 1 to 4 threads, and so does the
embedded pipeline, but the mean of a whole fp32 tensor does not, and a step cache decides by such a mean.

Engines of several processes need one folder that all of them see.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from fluxq.base.console import first_fault, first_line, logger, progress
from fluxq.base.files import atomic_path, require_regular, room_left, sha256_file, sha256_json, write_json, write_text
from fluxq.base.output import Output, atomic_output, sole_writer
from fluxq.base.ranks import ALONE, Ranks, connected
from fluxq.base.tensors import TensorFile, save_weights
from fluxq.calibrate.capture import batches, pixels_in
from fluxq.eval.images.generate import Generated, Lazy, as_picture, generate_batch, images_digest
from fluxq.eval.images.sides import Side
from fluxq.quantize.structure import denoisers_in
from fluxq.runtime.skipped import skipped_in
from fluxq.runtime.step_caches import counted, naming

WORK_FILE = "work.json"
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")  # PIL reads others, as EPS, by programs that it starts
RETRIES = 3  # of a chunk whose worker died
_PACKAGES = ("fluxq", "torch", "diffusers", "transformers", "triton")
_NAME = 16  # hex digits of a SHA-256 that name a file
_SHOWN = 5  # problems that an error lists
_PATIENCE = 60.0  # seconds without a sign of life before a waiting run says so
_PART = ".part"  # suffix of half-written folders
_CONNECT_SECONDS = 10.0
_USAGE = "RAY_USAGE_STATS_ENABLED"
_STORE_BYTES = 80 << 20  # shared memory for the arguments of actors; Ray's least


@dataclass(frozen=True)
class Work:
    """Images to make: `side` on every (prompt, seed) of `items`, `batch_size` in a call, kept in `root`.

    call: pipeline arguments as JSON holds them. device: as torch writes it; engines of several GPUs put each worker
    on its own. Raises ValueError without items, and for one that comes twice.
    """

    side: Side
    items: tuple[tuple[str, int], ...]
    call: Mapping[str, Any]
    batch_size: int
    root: Path
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("nothing to generate: the list of (prompt, seed) is empty")
        (prompt, seed), count = Counter(self.items).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{prompt!r} with seed {seed} is asked for {count} times: give every image its own noise")

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that decide the bits of an image besides its batch."""
        return {
            "side": self.side.describe(),
            "call": dict(self.call),
            "batch_size": self.batch_size,
            "device": self.device_type,
            "threads": 1 if self.device_type == "cpu" else None,
            "versions": {name: _version(name) for name in _PACKAGES},
        }

    @cached_property
    def key(self) -> str:
        """SHA-256 of `facts`: lists of items under one key share a folder and the chunks that they have in common."""
        return sha256_json(self.facts)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The items, cut into calls of the pipeline."""
        return tuple(Chunk.of(tuple(batch), self.key) for batch in batches(self.items, self.batch_size))

    @property
    def folder(self) -> Path:
        """Folder of the images."""
        return self.root / self.key[:_NAME]

    @property
    def device_type(self) -> str:
        """The device without its index."""
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class Chunk:
    """Items of one call of the pipeline. digest: SHA-256 of their list. names: stems of each one's files."""

    items: tuple[tuple[str, int], ...]
    digest: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, items: tuple[tuple[str, int], ...], key: str) -> Chunk:
        """Return the chunk of these items under a work's key."""
        digest = sha256_json(items)[:_NAME]
        return cls(items, digest, tuple(_name(key, digest, prompt, seed) for prompt, seed in items))


class ManifestLine(BaseModel):
    """Line of a manifest: one finished item.

    image, latents: SHA-256 of its files; of a video's frames, that of their names and SHA-256.
    seconds: share of the call's time.
    frames: number of frames of a video.
    computed: with a step cache or a list of steps, share of the multiplications of all steps that were made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    item: str
    chunk: str
    prompt: str
    seed: int
    image: str
    latents: str
    finite: bool
    seconds: float
    device: str
    frames: int | None = None
    computed: float | None = None


@dataclass(frozen=True)
class ImageFolder:
    """An audited set of images or videos on disk, read when asked for; `rows` are in the order of the work's items.

    Reading raises ValueError naming a file that is unreadable.
    """

    folder: Path
    rows: tuple[ManifestLine, ...]

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        """(prompt, seed) of each image."""
        return tuple((row.prompt, row.seed) for row in self.rows)

    @property
    def frames(self) -> int | None:
        """Frames of each video; None for images."""
        return self.rows[0].frames if self.rows else None

    @cached_property
    def images(self) -> Sequence[Tensor]:
        """uint8 (3, H, W) each, or (F, 3, H, W)."""
        read = read_image if self.frames is None else read_video
        return Lazy(len(self.rows), lambda index: read(_files(self.folder, self.rows[index].item, self.frames)[0]))

    @property
    def latents(self) -> Sequence[Tensor]:
        """fp32, as they left the last denoising step."""

        def read(index: int) -> Tensor:
            with TensorFile(_files(self.folder, self.rows[index].item, self.frames)[1]) as stored:
                return stored.get_tensor("latents")

        return Lazy(len(self.rows), read)

    @property
    def finite(self) -> Tensor:
        """bool (N,), False where image or latents held NaN or infinity."""
        return torch.tensor([row.finite for row in self.rows])

    @property
    def computed(self) -> float | None:
        """Share of the multiplications of all steps that were made; None where nothing leaves any out."""
        shares = [row.computed for row in self.rows if row.computed is not None]
        return fmean(shares) if shares else None

    @property
    def device(self) -> str:
        """Device that made the images; several names, separated by commas, if there were several."""
        return ", ".join(sorted({row.device for row in self.rows}))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the pixels, see `generate.images_digest`."""
        return images_digest(self.images)

    def head(self, count: int) -> ImageFolder:
        """Return the first `count` images."""
        return replace(self, rows=self.rows[:count])


class Engine(Protocol):
    """Maker of chunks. leads: whether this process looks after the folder; others only help it."""

    leads: bool

    def agree(self, value: Any) -> Any:
        """Return the value of the process that leads, which JSON can hold, in every process."""
        ...

    def make(self, work: Work, pending: Sequence[int]) -> Iterator[int]:
        """Make these chunks (indices into `work.chunks`), yielding each when it is finished."""
        ...


def ensure_images(work: Work, engine: Engine | None = None) -> ImageFolder | None:
    """Make what is missing of a work, audit all of it and return it; None in processes that only helped.

    engine: of `open_engine`, by default this process. Raises ValueError for a corrupted manifest, RuntimeError for
    files that are not as their rows say (both before anything is made, and naming them) and where another process is
    making the same images, and OSError if the disk is too small. The next call goes on from any stop, and makes files
    that are gone again, with their batch.
    """
    engine = engine or _Processes(ALONE)
    work = replace(work, root=work.root.resolve())  # workers may run in another folder
    if not engine.leads:
        for _ in engine.make(work, ()):
            pass
        return None
    with sole_writer(work.folder / WORK_FILE):
        pending = _prepare(work)
        items = (item for index in engine.make(work, pending) for item in work.chunks[index].items)
        for _ in progress(items, f"Generating: {work.side.name}", sum(len(work.chunks[i].items) for i in pending)):
            pass
        images = audit(work)
    if len({row.device for row in images.rows}) > 1:
        logger.warning("%s: made on %s, whose last bits may differ", work.side.name, images.device)
    return images


def open_engine(name: str, *, workers: int | None = None, address: str | None = None) -> AbstractContextManager[Engine]:
    """Open an engine for several works, `with open_engine("ray") as engine`; end it if it was started here.

    workers: at most so many Ray actors, by default one for each GPU or core. address: of a running Ray cluster;
    without, one is started on this machine.
    """
    if name != "ray" and (workers is not None or address is not None):
        raise ValueError(f"a number of workers and an address are for engine ray, not for {name}: leave them out")
    return ENGINES[name](workers, address)


def audit(work: Work) -> ImageFolder:
    """Return all images of a work; RuntimeError unless each is there once, as its row says, and nothing else is."""
    rows = _read_manifests(work)
    wanted = {name: item for chunk in work.chunks for name, item in zip(chunk.names, chunk.items, strict=True)}
    missing = [
        f"{prompt!r} with seed {seed} ({name}) has no row in any manifest"
        for name, (prompt, seed) in wanted.items()
        if name not in rows
    ]
    _require_none(work, [*missing, *_problems(work, rows, pending=set())])
    return ImageFolder(work.folder, tuple(rows[name] for name in wanted))


class Worker:
    """A pipeline, and the manifest of its images.

    name: of the manifest, no other worker's. Raises RuntimeError where the work's folder is not to be seen, or where
    other versions than the leader's would make other images.
    """

    def __init__(self, work: Work, name: str, device: str) -> None:
        if replace(work).key != work.key:  # computed anew, from what is installed here
            raise RuntimeError(f"{platform.node()}: versions differ from those of the run; it would make other images")
        if not (work.folder / WORK_FILE).is_file():
            raise RuntimeError(f"{platform.node()}: {work.folder} is not here; use a folder that every worker can see")
        self.work, self.manifest = work, _manifest_path(work, name)
        self.pipe = work.side.open(device)
        place = torch.device(device)
        self.device = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type

    def make(self, index: int) -> None:
        """Make a chunk: its files, then its rows. OSError naming the folder if the disk is full."""
        chunk = self.work.chunks[index]
        start = time.perf_counter()
        models = [model for _, model in denoisers_in(self.pipe)]
        is_whole = self.work.side.cache is None and not any(map(skipped_in, models))
        with naming(self.work.side.cache), counted(() if is_whole else models) as computed:
            batch = generate_batch(self.pipe, chunk.items, self.work.call)
        seconds = (time.perf_counter() - start) / len(chunk.items)
        try:
            hashes = _write_files(self.work.folder, chunk, batch)
            rows = [
                ManifestLine(
                    item=name,
                    chunk=chunk.digest,
                    prompt=prompt,
                    seed=seed,
                    image=image,
                    latents=latents,
                    finite=bool(finite),
                    seconds=round(seconds, 4),
                    device=self.device,
                    frames=batch.frames,
                    computed=None if is_whole else computed(),
                )
                for name, (prompt, seed), (image, latents), finite in zip(
                    chunk.names, chunk.items, hashes, batch.finite, strict=True
                )
            ]
            _append(self.manifest, rows)
        except OSError as error:
            raise OSError(
                f"cannot write to {self.work.folder} ({error}){room_left(error, self.work.folder)}. "
                "What is finished is kept: mend that and run the same again"
            ) from None


def read_image(path: Path) -> Tensor:
    """Read a picture of one of FORMATS, uint8 (3, H, W); ValueError naming the file if it is none."""
    from torchvision.transforms.functional import pil_to_tensor

    try:
        with Image.open(path, formats=FORMATS) as picture:
            pixels = pil_to_tensor(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # a damaged PNG raises any
        raise ValueError(f"{path}: unreadable image ({first_line(error)}); delete its row to make it again") from None
    if pixels.dtype != torch.uint8 or len(pixels) != 3:
        raise ValueError(f"{path}: a picture of {len(pixels)} channels in {pixels.dtype}, expected 8-bit RGB")
    return pixels


def read_video(folder: Path) -> Tensor:
    """Read the frames in a folder by their names, uint8 (F, 3, H, W); ValueError naming a file that is none."""
    paths = sorted(folder.glob("*.png"))
    if not paths:
        raise ValueError(f"{folder}: no frames; delete its row to make it again")
    return torch.stack([read_image(path) for path in paths])


def _write_files(folder: Path, chunk: Chunk, batch: Generated) -> list[tuple[str, str]]:
    """Write an image or a folder of frames, and latents, of each item durably; return the SHA-256 of both."""
    pairs = [_files(folder, name, batch.frames) for name in chunk.names]
    for (image_path, latents_path), image, latents in zip(pairs, batch.images, batch.latents, strict=True):
        if batch.frames is not None:
            aside = folder / f".{image_path.name}{_PART}"
            with atomic_output(Output(image_path), aside, is_private=True) as part:
                for index, frame in enumerate(image):
                    as_picture(frame).save(part / f"{index:05}.png", "PNG")
            aside.rmdir()
        else:
            with atomic_path(image_path, durable=False) as part:
                as_picture(image).save(part, "PNG")
        with atomic_path(latents_path, durable=False) as part:
            save_weights({"latents": latents.contiguous()}, part, {"format": "pt"})
    for path in (path for image_path, latents in pairs for path in (*_frames(image_path), latents)):
        with path.open("r+b") as stream:  # all at the end: a disk makes several durable for the price of one
            os.fsync(stream.fileno())
    return [(_digest(image_path), sha256_file(latents_path)) for image_path, latents_path in pairs]


def _frames(path: Path) -> list[Path]:
    """Return the files of an image, or of a video."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def _digest(path: Path) -> str:
    """Return the SHA-256 of an image's file; of a video, that of its files' names and SHA-256."""
    if not path.is_dir():
        return sha256_file(path)
    return sha256_json([[frame.name, sha256_file(frame)] for frame in _frames(path)])


def _append(manifest: Path, rows: Sequence[ManifestLine]) -> None:
    """Add a chunk's rows in one piece; if that fails, the file is as before."""
    text = "".join(row.model_dump_json() + "\n" for row in rows)
    size = manifest.stat().st_size if manifest.exists() else 0
    try:
        with manifest.open("ab") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        os.truncate(manifest, size)
        raise


def _prepare(work: Work) -> list[int]:
    """Clear what killed workers left half done and return the chunks to make; refuse faults and a small disk."""
    for part in work.folder.glob(f".*{_PART}"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    write_json(work.folder / WORK_FILE, {"key": work.key, **work.facts})
    _read_manifests(work)  # refuses an item with two rows, before any row is dropped
    for manifest in _manifests(work):
        _repair(manifest, work)
    rows = _read_manifests(work)
    pending = [index for index, chunk in enumerate(work.chunks) if not rows.keys() >= set(chunk.names)]
    if pending:  # else the audit comes next
        _require_none(work, _problems(work, rows, {name for index in pending for name in work.chunks[index].names}))
        _require_space(work, sum(len(work.chunks[index].items) for index in pending))
    return pending


def _repair(manifest: Path, work: Work) -> None:
    """Drop a torn last line, and rows of chunks that do not have all of theirs, or whose files are not all there."""
    rows = _read_manifest(manifest, work.key)
    items = {row.item for row in rows if all(map(os.path.lexists, _files(work.folder, row.item, row.frames)))}
    torn = {chunk.digest for chunk in work.chunks if not items >= set(chunk.names)}
    kept = "".join(row.model_dump_json() + "\n" for row in rows if row.chunk not in torn)
    if kept.encode() != manifest.read_bytes():
        write_text(manifest, kept)


def _read_manifests(work: Work) -> dict[str, ManifestLine]:
    """Return item -> its row; RuntimeError naming an item that has several."""
    entries: dict[str, tuple[ManifestLine, str]] = {}
    for manifest in _manifests(work):
        for row in _read_manifest(manifest, work.key):
            if row.item in entries:
                raise RuntimeError(
                    f"{work.folder}: {row.item} ({row.prompt!r}, seed {row.seed}) was made more than once: it has rows "
                    f"in {entries[row.item][1]} and {manifest.name}; delete all but one"
                )
            entries[row.item] = row, manifest.name
    return {item: row for item, (row, _) in entries.items()}


def _read_manifest(path: Path, key: str) -> list[ManifestLine]:
    """Return the complete lines of a manifest; ValueError naming one that is not a row of this work.

    A last line without its end was cut off when a worker was killed: it does not count.
    """
    rows = []
    require_regular(path)
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = ManifestLine.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{path}:{number}: corrupted manifest ({first_fault(error)}); delete the line") from None
        if row.item != _name(key, row.chunk, row.prompt, row.seed):
            raise ValueError(f"{path}:{number}: corrupted manifest ({row.item} is not of this run); delete the line")
        rows.append(row)
    return rows


def _problems(work: Work, rows: Mapping[str, ManifestLine], pending: set[str]) -> list[str]:
    """Return faults of the folder: files that differ from `rows`, and files that this run did not make.

    Files of `pending` items are still to be written again and are passed over.
    """
    problems, sizes = [], Counter()
    for name in (name for chunk in work.chunks for name in chunk.names if name in rows and name not in pending):
        row = rows[name]
        picture, latents = _files(work.folder, name, row.frames)
        for path, expected in ((picture, row.image), (latents, row.latents)):
            if not path.is_file() and not path.is_dir():
                problems.append(f"{path.name} ({row.prompt!r}, seed {row.seed}) is missing")
            elif _digest(path) != expected:
                problems.append(f"{path.name} ({row.prompt!r}, seed {row.seed}) is not what was written")
            elif path == picture:
                sizes[_size(picture, row.frames)] += 1
    if len(sizes) > 1:
        problems.append("images differ in size: " + ", ".join(f"{n} of {size}" for size, n in sizes.items()))
    expected_names = {f"{name}{suffix}" for name in (*rows, *pending) for suffix in ("", ".png", ".safetensors")}
    expected_names |= {WORK_FILE, *(manifest.name for manifest in _manifests(work))}
    names = sorted(path.name for path in work.folder.iterdir() if not path.name.startswith("."))
    return problems + [f"{name} was not made by this run" for name in names if name not in expected_names]


def _require_none(work: Work, problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise RuntimeError(
            f"{work.folder}: {'; '.join(problems[:_SHOWN])}{more}. Delete what is not as it was written to make its "
            "batch again, what does not belong there, or the folder to make all again"
        )


def _require_space(work: Work, count: int) -> None:
    """Raise OSError if images may fill the disk: pixels that do not compress, and latents an eighth as wide."""
    needed = count * (4 * pixels_in(work.call) + 8192)
    free = shutil.disk_usage(work.folder).free
    if free < needed:
        raise OSError(
            f"not enough space in {work.folder}: {count} images may need {needed / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB are free; give another folder for images"
        )


def one_thread(device_type: str) -> AbstractContextManager[None]:
    """Compute with one thread if the device is a CPU, and as before afterwards."""
    return threads(1 if device_type == "cpu" else None)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads of a CPU, and as before afterwards; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Processes:
    """This process alone, or those that torchrun or `accelerate launch` started; each makes its share of chunks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.leads = ranks, ranks.leads
        self.name = "local" if ranks.group is None else f"rank-{ranks.rank}"

    def agree(self, value: Any) -> Any:
        return self.ranks.agree(value)

    def make(self, work: Work, pending: Sequence[int]) -> Iterator[int]:
        pending = self.ranks.agree(list(pending))  # the first rank's list
        share, device = self.ranks.share(pending), self.ranks.device(work.device)
        if share:
            with one_thread(work.device_type):
                worker = Worker(work, self.name, device)
                for index in share:
                    worker.make(index)
                    yield index
        self.ranks.meet()
        mine = set(share)
        yield from (index for index in pending if index not in mine)


@contextmanager
def _torchrun(_workers: int | None, _address: str | None) -> Iterator[Engine]:
    unset = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if unset:
        raise ValueError(
            "engine torchrun runs in the processes that torchrun starts (or `accelerate launch`, on several GPUs), and "
            f"{unset[0]} is not set: `torchrun --nproc-per-node 2 -m fluxq eval OUT --engine torchrun`"
        )
    with connected() as ranks:
        yield _Processes(ranks)


class _Actor:
    """A `Worker` in a process of Ray's. Opening is a call of its own, so that its errors arrive as themselves."""

    def open(self, work: Work, name: str) -> None:
        if work.device_type == "cpu":
            torch.set_num_threads(1)
        self.worker = Worker(work, name, work.device_type)  # of several GPUs, Ray shows an actor only its own

    def make(self, index: int) -> None:
        self.worker.make(index)


# An actor at work, its name, and the chunk that it makes, None while it opens its pipeline.
_Hand = tuple[Any, str, int | None]


class _Ray:
    """Actors that each hold a pipeline and take the next chunk when they are done with one."""

    leads = True

    def __init__(self, ray: Any, workers: int | None) -> None:
        self.ray, self.workers = ray, workers

    def agree(self, value: Any) -> Any:
        return value

    def make(self, work: Work, pending: Sequence[int]) -> Iterator[int]:
        crew = _Crew(self.ray, work)
        queue, losses = deque(pending), Counter()
        try:
            for _ in range(min(self._places(work), len(queue)) if queue else 0):
                crew.hire()
            while queue or crew.busy:
                (actor, name, index), died = crew.next()
                if died and not crew.finished(name, index):
                    losses[index] += 1
                    if losses[index] > RETRIES:
                        raise RuntimeError(f"{RETRIES + 1} workers died {_doing(work, index)}: {died}")
                    logger.warning("%s died %s: %s", name, _doing(work, index), died)
                    queue.extendleft([] if index is None else [index])
                elif index is not None:
                    yield index
                if queue and died:
                    crew.hire()
                elif queue:
                    crew.give(actor, name, queue.popleft())
        finally:
            crew.dismiss()

    def _places(self, work: Work) -> int:
        """Return the largest number of actors."""
        if self.workers is not None:
            return self.workers
        resources = self.ray.cluster_resources()
        if work.device_type == "cpu":
            return max(1, int(resources.get("CPU", 1)))
        if not resources.get("GPU"):
            raise ValueError("this Ray cluster has no GPU: give --device cpu, or the number of workers that will come")
        return int(resources["GPU"])


class _Crew:
    """The actors of one work and what each is doing."""

    def __init__(self, ray: Any, work: Work) -> None:
        needs = {"num_cpus": 1} if work.device_type == "cpu" else {"num_gpus": 1}
        self.ray, self.work, self.kind = ray, work, ray.remote(_Actor).options(**needs)
        self.hands: dict[Any, _Hand] = {}  # pending call -> its actor
        self.hired: list[Any] = []

    @property
    def busy(self) -> bool:
        return any(index is not None for _, _, index in self.hands.values())

    def hire(self) -> None:
        """Start one more actor, under a name that no other had."""
        actor, name = self.kind.remote(), f"ray-{len(self.hired)}"
        self.hired.append(actor)
        self.hands[actor.open.remote(self.work, name)] = actor, name, None

    def give(self, actor: Any, name: str, index: int) -> None:
        """Let it make this chunk."""
        self.hands[actor.make.remote(index)] = actor, name, index

    def next(self) -> tuple[_Hand, str | None]:
        """Return the next actor that is done, with None, or that died, with the reason.

        A failure of the work itself is raised here as its own exception.
        """
        done, _ = self.ray.wait(list(self.hands), timeout=_PATIENCE)
        while not done:
            if not self.busy:
                logger.warning("still waiting for Ray to find a place for a worker")
            done, _ = self.ray.wait(list(self.hands), timeout=_PATIENCE)
        hand = self.hands.pop(done[0])
        try:
            self.ray.get(done[0])
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self.ray.exceptions.RayError as error:
            self.ray.kill(hand[0])
            return hand, first_line(error)
        return hand, None

    def finished(self, name: str, index: int | None) -> bool:
        """Tell whether a dead actor's last chunk is complete in its manifest."""
        manifest = _manifest_path(self.work, name)
        if index is None or not manifest.exists():
            return False
        _repair(manifest, self.work)
        rows = {row.item for row in _read_manifest(manifest, self.work.key)}
        return rows >= set(self.work.chunks[index].names)

    def dismiss(self) -> None:
        """End all actors; the chunks that they are making are lost."""
        for actor in self.hired:
            self.ray.kill(actor)


@contextmanager
def _ray(workers: int | None, address: str | None) -> Iterator[Engine]:
    try:
        import ray
    except ModuleNotFoundError:
        raise RuntimeError("engine ray needs the package ray: `pip install 'fluxq[distributed]'`") from None
    is_ours = not ray.is_initialized()
    if not is_ours and address is not None:
        raise ValueError(f"this process has joined a Ray cluster already: leave out the address {address}")
    with ExitStack() as stack:
        # Ray tells of dead workers on standard output, which belongs to what a program was asked for.
        stack.enter_context(redirect_stdout(sys.stderr))
        if is_ours:
            if address is None and _USAGE not in os.environ:
                os.environ[_USAGE] = "0"
                stack.callback(os.environ.pop, _USAGE, None)
            stack.callback(ray.shutdown)
            _join(ray, workers, address)
        yield _Ray(ray, workers)


def _join(ray: Any, workers: int | None, address: str | None) -> None:
    """Connect to a cluster, or start a small one on this machine, with Ray's own token against strangers."""
    logging.getLogger("ray").setLevel(logging.ERROR)  # it speaks before it looks at what comes next
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        cores = max(workers or 1, os.cpu_count() or 1)
        ray.init("local", num_cpus=cores, include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
        return
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address, **quiet)
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: {first_line(error)}") from None


def _doing(work: Work, index: int | None) -> str:
    if index is None:
        return "opening the pipeline"
    prompt, seed = work.chunks[index].items[0]
    return f"making the batch of {prompt!r}, seed {seed}"


def _size(path: Path, frames: int | None) -> str:
    with Image.open(_frames(path)[0]) as picture:
        width, height = picture.size
    return f"{width} x {height}" + ("" if frames is None else f", {frames} frames")


def _manifests(work: Work) -> list[Path]:
    return sorted(work.folder.glob("manifest-*.jsonl"))


def _manifest_path(work: Work, worker: str) -> Path:
    return work.folder / f"manifest-{worker}.jsonl"


def _files(folder: Path, name: str, frames: int | None) -> tuple[Path, Path]:
    """Return the files of an item: image, or folder of frames, and latents."""
    return folder / (f"{name}.png" if frames is None else name), folder / f"{name}.safetensors"


def _name(key: str, chunk: str, prompt: str, seed: int) -> str:
    return sha256_json([key, chunk, prompt, seed])[:_NAME]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# name -> function from the largest number of workers and the address of a cluster to an open engine
ENGINES: dict[str, Callable[[int | None, str | None], AbstractContextManager[Engine]]] = {
    "local": lambda _workers, _address: nullcontext(_Processes(ALONE)),
    "torchrun": _torchrun,
    "ray": _ray,
}
