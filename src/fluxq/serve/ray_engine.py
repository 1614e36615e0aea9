"""`--engine ray`: the application in replicas of a Ray Serve deployment, behind one front.

    client ── front: keys, limit of bytes, choice of a replica ── replica: application, dispatcher, worker

The front is the process of the command; a replica is an actor of the cluster, with a GPU of its own. Ray starts them,
as many as their predicted seconds ask for, and another one where one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.applications import Starlette

from fluxq.base.console import first_line, logger
from fluxq.serve.ray_front import Front
from fluxq.serve.ray_replica import Nearest, Replica, replicas_wanted
from fluxq.serve.server import ServeOptions, Server

_LOOKS = 1.0  # seconds between looks at the replicas
_HEALTH = 5.0  # seconds between Ray's
_MANY = 10_000  # requests of a replica, whose own admission is the bound
_LONGEST = 600.0  # seconds that a replica which is to go has for its images
_CONNECT_SECONDS = 5.0
# For a cluster of our own: nothing is sent to Ray's makers, and replicas are no background work.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


class RayServer(Server):
    """The front, checked and bound to its port, in a Ray cluster: that of RAY_ADDRESS, or one of its own."""

    def __init__(self, options: ServeOptions) -> None:
        _refuse(options)
        bounds = None if options.replicas is None else replicas_in(options.replicas)
        self._check(options)
        self._is_ours = _join(max(bounds or (1, 1)))
        try:
            self._bounds, device = _placed(bounds, options.device, self._is_ours)
        except ValueError:
            ray.shutdown()
            raise
        self.checked = replace(self.checked, settings=replace(self.checked.settings, device=device))
        self._name = f"fluxq-{secrets.token_hex(4)}"
        self._front = Front(keeps_videos=self._bounds[0] == self._bounds[1])
        self._looking: asyncio.Task[None] | None = None
        self._put(Starlette(routes=self._front.routes(), lifespan=self._lifespan), self._front.metrics)

    def run(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """Serve, as other servers; then leave the cluster as it was."""
        try:
            super().run(tell)
        finally:
            if not self._is_ours:
                with contextlib.suppress(Exception):  # of a cluster that is gone
                    serve.delete(self._name)
            ray.shutdown()

    async def _begin(self) -> None:
        self._front.handle = await asyncio.to_thread(self._deploy)
        while not self._front.free:
            states = await self._front.look()
            for error in filter(None, (each.error for each in states)):
                raise error
            if not states:
                await asyncio.to_thread(_require_hope, self._name)
            await asyncio.sleep(_LOOKS / 4)
        self._looking = asyncio.create_task(self._look_on())

    def _is_busy(self) -> bool:
        return True

    def _say_ending(self) -> None:
        self._tell("ending: what was taken is finished first")

    def _give_up(self) -> None: ...

    async def _finish(self) -> None:
        self._front.is_ending = True
        if self._looking is not None:
            self._looking.cancel()
            await self._front.ask("drain", None)

    def _deploy(self) -> Any:
        """Let Ray start the replicas; return their handle."""
        low, high = self._bounds
        policy = AutoscalingPolicy(policy_function=replicas_wanted)
        scaled = AutoscalingConfig(min_replicas=low, max_replicas=high, policy=policy)
        count: dict[str, Any] = {"num_replicas": low} if low == high else {"autoscaling_config": scaled}
        has_gpu = self.checked.settings.device == "cuda"
        router: Any = Nearest
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        deployment = serve.deployment(
            name="replica",
            ray_actor_options={"num_cpus": 0, "num_gpus": 1} if has_gpu else {"num_cpus": 1},
            max_ongoing_requests=_MANY,
            health_check_period_s=_HEALTH,
            graceful_shutdown_timeout_s=_LONGEST,
            request_router_config=RequestRouterConfig(request_router_class=router),
            logging_config=quiet,
            **count,
        )(Replica)
        serve.start(proxy_location="Disabled", logging_config=quiet)
        bound = deployment.bind(self.options, self.checked, logger.level)
        target = serve.RunTarget(bound, name=self._name, route_prefix=None)
        return serve.run_many([target], wait_for_applications_running=False)[0]

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_LOOKS)
            try:
                await self._front.look()
            except Exception as error:
                logger.warning("the replicas cannot be asked: %s", first_line(error))


def replicas_in(text: str) -> tuple[int, int]:
    """Read `--replicas`, `2` or `1-4`, as the fewest and the most; ValueError for what is neither."""
    match = re.fullmatch(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        raise ValueError(f"--replicas {text}: write a number, as in 2, or the fewest and the most, as in 1-4")
    return low, high


def _refuse(options: ServeOptions) -> None:
    """Raise ValueError for options that mean nothing with replicas."""
    given = {"--in-process": options.in_process, "--queue": options.queue, "--root": options.root}
    given |= {"--admin-key-file": options.admin_key_file}
    if names := ", ".join(name for name, value in given.items() if value):
        raise ValueError(f"{names}: not with --engine ray; leave it out")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {options.device}: with --engine ray each replica has a GPU, cuda, or is on the cpu")
    if "://" in (address := os.environ.get("RAY_ADDRESS", "")):  # Ray's client, from outside the cluster
        raise ValueError(f"RAY_ADDRESS {address}: give HOST:PORT of the cluster, and run this on a machine of it")


def _join(replicas: int) -> bool:
    """Connect to the cluster of RAY_ADDRESS, or start a small one on this machine; return whether it was started."""
    for name in ("ray", "ray.serve"):  # they speak of what is not there yet
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if not (address := os.environ.get("RAY_ADDRESS")):
        os.environ.update(_ENVIRONMENT | os.environ)
        ray.init("local", num_cpus=max(replicas, os.cpu_count() or 1), include_dashboard=False, **quiet)
        return True
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address, **quiet)
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at RAY_ADDRESS {address}: {first_line(error)}") from None
    return False


def _placed(bounds: tuple[int, int] | None, device: str, is_ours: bool) -> tuple[tuple[int, int], str]:
    """Return the fewest and most replicas, and whether they are on `cuda` or `cpu`; ValueError for too few GPUs."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if device == "cpu" or (device == "auto" and not gpus):
        return bounds or (1, 1), "cpu"
    low, high = bounds or (max(1, gpus), max(1, gpus))
    if is_ours and high > gpus:
        raise ValueError(f"replicas have a GPU each, and Ray finds {gpus} for {high}: give fewer, or --device cpu")
    return (low, high), "cuda"


def _require_hope(name: str) -> None:
    """Raise RuntimeError where Ray has given up to start replicas."""
    status = serve.status().applications.get(name)
    if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise RuntimeError(f"Ray could not start a replica: {first_line(Exception(status.message))}")
