"""A real Redis of this machine's distribution on a free port, for tests; they are skipped where there is none."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import TIMEOUT, until

redis = pytest.importorskip("redis")
PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="there is no redis-server here: apt-get install redis-server")


class RealRedis:
    """A Redis that keeps what it was told over its own end."""

    def __init__(self, folder: Path, password: str = "", certificate: Path | None = None) -> None:
        """Start it. certificate: a PEM file with its key; then it speaks TLS."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder, self.password, self.certificate = folder, password, certificate
        self.url = f"redis://:{password}@127.0.0.1:{self.port}/0"
        if certificate is not None:
            self.url = f"rediss{self.url.removeprefix('redis')}?ssl_ca_certs={certificate}"
        self.client = redis.Redis.from_url(self.url, socket_timeout=TIMEOUT)
        self.start()

    def start(self) -> None:
        words = ["--port", str(self.port)]
        if self.certificate is not None:
            words = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            words += ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.certificate)]
        words += ["--requirepass", self.password] if self.password else []
        words += ["--dir", str(self.folder), "--save", "", "--appendonly", "yes"]
        words += ["--appendfsync", "always", "--loglevel", "warning"]
        self.process = subprocess.Popen([str(PROGRAM), *words], stdout=subprocess.DEVNULL)
        until(self._answers)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            return self.client.ping()
        except redis.RedisError:
            return False

    def finished(self) -> list[str]:
        """Entries of the images that were made, each as often as it was."""
        return [row[b"entry"].decode() for _, row in self.client.xrange("fluxq:news") if row[b"kind"] == b"made"]

    def dumped(self) -> bytes:
        """All that it holds."""
        return b"".join(map(self._content, self.client.keys()))

    def _content(self, name: bytes) -> bytes:
        kind = self.client.type(name)
        if kind == b"hash":
            return b"".join(b"".join(pair) for pair in self.client.hgetall(name).items())
        if kind == b"stream":
            return str(self.client.xrange(name)).encode()
        return self.client.get(name) if kind == b"string" else b""


def real_redis(folder: Path, *options: Any) -> Iterator[RealRedis]:
    """Yield a Redis while the generator lives: the body of a fixture."""
    one = RealRedis(folder, *options)
    try:
        yield one
    finally:  # of a test that fails too
        one.client.close()
        one.stop()
