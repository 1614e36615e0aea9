"""`fluxq serve`: options in, a server that runs until it is told to end.

Options that cannot work are found before anything is computed: the port, the keys, folders and their names. Checkpoints
are loaded while the server answers /health already; one that is refused ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn

from fluxq.base.extras import CURE, CURE_OF_REDIS
from fluxq.base.files import read_json
from fluxq.serve.api import Limits
from fluxq.serve.app import Served, application
from fluxq.serve.dispatcher import Dispatcher, Hands, Here
from fluxq.serve.elastic import Setting, read_settings
from fluxq.serve.guard import Guard, read_keys
from fluxq.serve.metrics import Metrics
from fluxq.serve.process import Apart
from fluxq.serve.shadow import Shadows
from fluxq.serve.traces import Traced, provider_here
from fluxq.serve.worker import Settings

_HEADERS = 1 << 16  # bytes of a request's head
_SILENT = 30  # seconds for a whole one
_IDLE = 620  # seconds between two requests: a balancer closes first, Google's after 600, or it would ask a closed one
_UNREAD = 20  # seconds in which an answer is to be read, at the end
_BACKLOG = 2048  # connections that wait to be taken
_PORTS = {
    errno.EADDRINUSE: "is in use: give another --port",
    errno.EACCES: "is not for you: give one above 1023",
    errno.EADDRNOTAVAIL: "cannot be taken: that is no address of this machine; give another --host, such as 0.0.0.0",
}


@dataclass(frozen=True)
class ServeOptions:
    """Options of `fluxq serve`, as the command has them."""

    outputs: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    without_key: bool = False
    root: Path | None = None
    lora: Path | None = None
    device: str = "auto"
    dtype: str = "bfloat16"
    max_memory: int | None = None
    max_queue: int = 64
    max_wait: float = 60.0
    max_steps: int = 100
    max_pixels: int = 1 << 22
    max_pixel_steps: float = 6e8
    elastic: Path | None = None
    queue: str | None = None
    shadow: float = 0.0
    shadow_model: str | None = None
    join: bool = False
    allow_unrecorded: bool = False
    in_process: bool = False
    engine: str = "local"
    replicas: str | None = None


class Server:
    """A server, checked and bound to its port; `run` serves until a signal or `end` ends it."""

    def __init__(self, options: ServeOptions) -> None:
        """Raise ValueError, FileNotFoundError or OSError for what cannot work."""
        if options.replicas is not None:
            raise ValueError("--replicas are those of --engine ray: give that too, or leave it out")
        if options.queue:
            _require_queue(options.queue)
        self._check(options)
        settings, limits = self.checked.settings, limits_of(options)
        hands = (Here if options.in_process else Apart)(settings)
        self.dispatcher = dispatcher_of(options, self.checked, hands)
        self.shared: Any = None
        if options.queue:
            from fluxq.serve.redis_queue import RedisQueue

            self.shared = RedisQueue(options.queue, self.dispatcher, limits, settings.adapters)
        bounds = limits, settings.adapters, options.root, self.checked.elastic
        self._served = Served(self.dispatcher, *bounds, self.shared)
        app = application(self._served)
        app.router.lifespan_context = self._lifespan
        self._spans = provider_here()
        self.dispatcher.tracer = self._spans and self._spans.get_tracer("fluxq")
        self._put(app if self._spans is None else Traced(app, self.dispatcher.tracer), self.dispatcher.metrics)

    def _check(self, options: ServeOptions) -> None:
        """Find what cannot work, and take the port."""
        self.options, self.checked = options, checked(options)
        self._keys = _keys(options)
        self._admin_keys = () if options.admin_key_file is None else read_keys(options.admin_key_file)
        if options.root is not None and not options.root.is_dir():
            raise FileNotFoundError(f"--root {options.root} is no folder; give one that holds checkpoints")
        self._error: BaseException | None = None
        self._told: Callable[[str], None] = lambda line: None
        self._spans: Any = None
        self._socket = bound(options.host, options.port)

    def _put(self, app: Any, metrics: Metrics) -> None:
        """Put an application behind the guard and the port."""
        guarded = Guard(app, self._keys, self._admin_keys, limits_of(self.options).body, metrics.answered)
        how = {"http": "h11", "h11_max_incomplete_event_size": _HEADERS, "lifespan": "on", "timeout_keep_alive": _IDLE}
        self._uvicorn = Uvicorn(guarded, self._is_busy, self._say_ending, self._give_up, **how)

    @property
    def names(self) -> list[str]:
        """Names of the checkpoints, as they were given."""
        return [*self.checked.settings.folders]

    @property
    def address(self) -> str:
        """Address, as clients have it."""
        return address_of(self._socket)

    @property
    def is_ready(self) -> bool:
        """True while requests are taken."""
        return self._served.is_ready

    def run(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """Serve; return when a signal has ended it and all that was taken is finished.

        tell: takes lines for people. Raises what loading the checkpoints raised.
        """
        self._told = tell
        try:
            asyncio.run(self._uvicorn.serve(sockets=[self._socket]))
        finally:
            self._socket.close()
            if hasattr(self._spans, "force_flush"):
                self._spans.force_flush()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Let it end as a signal does."""
        self._uvicorn.should_exit = True

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Any) -> AsyncIterator[None]:
        starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._finish()

    async def _start(self) -> None:
        try:
            await self._begin()
            self._tell(f"ready: {self.address}/v1")
        except Exception as error:
            self._error = error
            self.end()

    async def _begin(self) -> None:
        """Load what is served; raise for what is refused."""
        await self.dispatcher.start()
        if self.shared is not None:
            await self.shared.start()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
            self._told(line)

    def _is_busy(self) -> bool:
        return len(self.dispatcher.queue) > 0 or (self.shared is not None and self.shared.is_awaited)

    def _say_ending(self) -> None:
        self._tell("ending: what was taken is finished first; a second signal ends at once")

    def _give_up(self) -> None:
        self.dispatcher.give_up()
        if self.shared is not None:
            self.shared.give_up()

    async def _finish(self) -> None:
        """Finish what was taken, but for videos, which nobody could fetch any more from here."""
        if self.shared is None:
            self._served.videos.end()
        else:
            await self.shared.stop()
        await self.dispatcher.stop()


class Uvicorn(uvicorn.Server):
    """uvicorn with bounds for clients that say half of a request, or read nothing; its signals are no failures.

    is_busy: whether something is being made that clients wait for.
    ending, give_up: called at the first signal, and at the second.
    how: settings of uvicorn's.
    """

    def __init__(
        self,
        app: Any,
        is_busy: Callable[[], bool] = lambda: True,
        ending: Callable[[], None] = lambda: None,
        give_up: Callable[[], None] = lambda: None,
        **how: Any,
    ) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, server_header=False, **how))
        self.is_busy, self.ending, self.give_up = is_busy, ending, give_up
        self._silent_since: dict[Any, float] = {}

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to end, or end at once; uvicorn's own would raise the signal again when all is finished."""
        asyncio.get_running_loop().call_soon_threadsafe(self.give_up if self.should_exit else self.ending)
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Close connections on which no whole request has come for a while."""
        if counter % 10 == 0:
            now, before = time.monotonic(), self._silent_since
            silent = [each for each in self.server_state.connections if _is_silent(each)]
            self._silent_since = {each: before.get(each, now) for each in silent}
            for each, since in self._silent_since.items():
                if now - since > _SILENT:
                    each.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """End; clients that do not read their answers are let go once nothing is being made."""
        letting_go = asyncio.create_task(self._let_go())
        try:
            await super().shutdown(sockets)
        finally:
            letting_go.cancel()

    async def _let_go(self) -> None:
        idle = 0
        while idle < _UNREAD:
            await asyncio.sleep(1)
            idle = 0 if self.is_busy() else idle + 1
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections, whatever they still wait for."""
        for each in list(self.server_state.connections):
            each.transport.abort()


@dataclass(frozen=True)
class Checked:
    """Options that were looked at: plain values, which go to another process.

    originals: checkpoint -> name of its 16-bit pipeline. elastic: settings to walk down.
    """

    settings: Settings
    originals: Mapping[str, str]
    elastic: Sequence[Setting]


def checked(options: ServeOptions) -> Checked:
    """Look at checkpoints, adapters and settings; ValueError or FileNotFoundError for what cannot work."""
    names = names_of(options.outputs)
    originals = _originals(names, options)
    settings = Settings(
        folders=names,
        device=options.device,
        dtype=options.dtype,
        memory=options.max_memory,
        adapters=_adapters(options.lora),
        originals={_original_name(folder): folder for folder in originals.values()},
        unrecorded=options.allow_unrecorded,
        joins=options.join,
    )
    elastic = () if options.elastic is None else read_settings(options.elastic, names)
    return Checked(settings, {name: _original_name(folder) for name, folder in originals.items()}, elastic)


def _is_silent(connection: Any) -> bool:
    """Tell whether a connection is neither in the middle of a request that was understood nor idle, its answer read."""
    cycle = getattr(connection, "cycle", None)
    is_answered = getattr(connection, "timeout_keep_alive_task", None) is not None
    is_idle = is_answered and not connection.transport.get_write_buffer_size()
    return not is_idle and (cycle is None or cycle.response_complete)


def dispatcher_of(options: ServeOptions, checked: Checked, hands: Hands) -> Dispatcher:
    """Return a dispatcher over a worker, which is not started yet."""
    bounds = {"longest": options.max_queue, "patience": options.max_wait}
    names, shadows = [*checked.settings.folders], Shadows(options.shadow)
    dispatcher = Dispatcher(hands, names, Metrics(), shadows, joins=options.join, **bounds)
    dispatcher.originals = {**checked.originals}
    return dispatcher


def limits_of(options: ServeOptions) -> Limits:
    """Return the bounds of a request."""
    return Limits(
        images=min(Limits.images, options.max_queue),  # more would be refused as "the queue is full", however empty
        pixels=options.max_pixels,
        steps=options.max_steps,
        pixel_steps=options.max_pixel_steps,
    )


def names_of(outputs: Sequence[str]) -> dict[str, str]:
    """Return name -> folder of checkpoints; ValueError for two of one name."""
    from fluxq.jobs.requirements import require_checkpoint

    names: dict[str, str] = {}
    for output in outputs:
        require_checkpoint(output)
        folder = Path(output).expanduser().resolve()
        if names.get(folder.name) == str(folder):
            raise ValueError(f"{output} is given twice")
        if folder.name in names:
            raise ValueError(f"{output} and {names[folder.name]} have one name, which requests choose by: rename one")
        names[folder.name] = str(folder)
    return names


def _originals(names: Mapping[str, str], options: ServeOptions) -> dict[str, str]:
    """Return name -> folder of the 16-bit pipeline that its images are compared with; none without shadows."""
    if not options.shadow:
        if options.shadow_model is not None:
            raise ValueError("--shadow-model says what --shadow compares with; give that share too, as 0.01")
        return {}
    folders = {}
    for name, folder in names.items():
        try:
            folders[name] = str(original_of(folder, options.shadow_model))
        except OSError as error:
            raise ValueError(f"--shadow needs the 16-bit model of {name}: {error}; give --shadow-model DIR") from None
    return folders


def original_of(folder: str, given: str | None = None) -> Path:
    """Return the folder of the 16-bit pipeline that a checkpoint was made from, or of the given one.

    Raises OSError where it is not on this machine, or lacks a LoRA that was fused into the checkpoint.
    """
    from fluxq.base.model import resolve_model
    from fluxq.base.output import PLAN_FILE

    plan = Path(folder) / PLAN_FILE
    record = read_json(plan) if plan.is_file() else {}
    recorded = record["model"] if isinstance(record.get("model"), dict) else {}
    source, revision = given or recorded.get("source"), None
    if not isinstance(source, str):
        raise FileNotFoundError(f"{folder} does not say what it was made from")
    if _place_of(source) == _place_of(recorded.get("source")):
        if record.get("loras"):
            raise FileNotFoundError(
                f"{folder} has a LoRA fused into it, which {source} lacks: save that with the LoRA (fuse_lora, "
                "unload_lora_weights, save_pretrained)"
            )
        revision = recorded["revision"] if isinstance(recorded.get("revision"), str) else None
    return resolve_model(source, revision=revision, local_files_only=True).path.resolve()


def _place_of(model: object) -> object:
    """Return the whole path of a model's folder, and any other name as it is."""
    path = Path(model).expanduser() if isinstance(model, str) else None
    return path.resolve() if path is not None and path.is_dir() else model


def _original_name(folder: str) -> str:
    return f"16 bit: {folder}"


def _adapters(folder: Path | None) -> dict[str, str]:
    """Return name -> file of the LoRAs in a folder."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise FileNotFoundError(f"--lora {folder} is no folder; give one that holds .safetensors files")
    if find_spec("peft") is None:
        raise RuntimeError(f"--lora needs the package peft: {CURE}")
    from fluxq.base.tensors import TensorFile

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"--lora {folder} holds no .safetensors file")
    for file in files:
        TensorFile(file)  # ValueError for one that is damaged
    return {file.stem: str(file.absolute()) for file in files}  # what a link of the hub's cache leads to has no ending


def _require_queue(url: str) -> None:
    if find_spec("redis") is None:
        raise RuntimeError(f"--queue needs the package redis: {CURE_OF_REDIS}")
    from fluxq.serve.redis_store import require_redis

    require_redis(url)


def _keys(options: ServeOptions) -> tuple[str, ...]:
    if options.api_key_file is not None:
        return read_keys(options.api_key_file)
    if not options.without_key and not is_loopback(options.host):
        raise ValueError(
            f"--host {options.host} lets other machines ask: give --api-key-file FILE, or --without-key if something "
            "in front of the server asks for one"
        )
    return ()


def is_loopback(host: str) -> bool:
    """Tell whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def address_of(taken: socket.socket) -> str:
    """Return the address of a socket that listens, as clients have it."""
    host, port = taken.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens; OSError in one sentence for a port that is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"--host {host} is no address of this machine ({error.strerror})") from None
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
        taken.listen(_BACKLOG)
    except OSError as error:
        taken.close()
        raise OSError(f"port {port} of {host} {_PORTS.get(error.errno or 0, error.strerror)}") from None
    taken.setblocking(False)
    return taken
