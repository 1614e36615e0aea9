"""The gate in front of the application: who may ask, and how much; nothing of a body is read before a key is known.

Plain ASGI: a middleware that wraps requests and answers would hide that a client has left.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fluxq.base.files import read_text
from fluxq.serve.api import error_of

_READ_SECONDS = 30.0  # for a whole body
_FORGOTTEN = 4  # times the limit of a body is read of one that is too large
_TEXTS = 1 << 19  # bytes of a body without files
_WITHOUT_KEY = ("/health", "/ready", "/metrics")


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line, `#` begins a comment; ValueError or FileNotFoundError for none."""
    lines = read_text(path, f"the file of keys {path}", "write one key a line into it").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ValueError(f"the file of keys {path} holds none; write one key a line into it")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ValueError(f"the file of keys {path} holds one that no header takes: use letters, digits and signs")
    return tuple(keys)


class Guard:
    """An ASGI application behind keys and a limit of bytes.

    keys: of everything; none: open. admin_keys: of /admin/ alone; none: nobody may. body: bytes at most.
    """

    def __init__(
        self, app: Any, keys: Collection[str], admin_keys: Collection[str], body: int, count: Callable[[int, str], None]
    ) -> None:
        self.app, self.body, self.count = app, body, count
        self.keys, self.admin_keys = tuple(keys), tuple(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if problem := self._who(scope["path"], headers.get(b"authorization", b"")):
            await self._refusal(401, problem, "invalid_api_key")(scope, receive, send)
            return
        kind = headers.get(b"content-type", b"").lower()
        most = 0 if scope["path"] in _WITHOUT_KEY else self.body if kind.startswith(b"multipart/") else _TEXTS
        try:
            content = await asyncio.wait_for(self._read(receive, most), _READ_SECONDS)
        except TimeoutError:
            late = f"the body did not come within {_READ_SECONDS:.0f} s"
            await self._refusal(408, late)(scope, receive, send)
            return
        if content is None:
            await self._refusal(413, f"the body is larger than {most} bytes")(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replayed, send)

    def _who(self, path: str, header: bytes) -> str:
        """Return why a request is refused; "" if it is not."""
        kind, _, given = header.partition(b" ")
        key = given.strip() if kind.lower() == b"bearer" else b""
        if path.startswith("/admin"):
            if not self.admin_keys:
                return "admin routes are off: start the server with --admin-key-file"
            return "" if _is_one_of(key, self.admin_keys) else "admin routes need a key of --admin-key-file"
        if not self.keys or path in _WITHOUT_KEY or _is_one_of(key, self.keys):
            return ""
        return "this server needs a key: send it as Authorization: Bearer KEY"

    async def _read(self, receive: Receive, limit: int) -> bytes | None:
        """Return the body; None where it is too large.

        Of one that is too large some more is read and forgotten: a client that still writes would not read the answer.
        """
        parts, size, most = list[bytes](), 0, self.body * _FORGOTTEN if limit else 0
        while size <= most:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            parts.append(part)
            if size > limit:
                parts.clear()
            if message["type"] == "http.disconnect" or not message.get("more_body"):
                break
        return b"".join(parts) if size <= limit else None

    def _refusal(self, status: int, message: str, code: str | None = None) -> Response:
        self.count(status, code or "refused")
        headers = {"connection": "close"} | ({"www-authenticate": "Bearer"} if status == 401 else {})
        content = json.dumps(error_of(message, "invalid_request_error", code=code))
        return Response(content, status, headers, "application/json")


def _is_one_of(key: bytes, keys: tuple[str, ...]) -> bool:
    """Compare with all, in a time that tells nothing."""
    return any([hmac.compare_digest(key, each.encode()) for each in keys])
