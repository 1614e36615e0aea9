"""The door of the page: what of gradio's server is open, by whose name, and what pages may ask.

Open is what the page needs, a table; the rest of gradio (uploads, proxies, an API, its monitor) is not there. On a
loopback address the name that a browser asks by has to be of this machine: else a page elsewhere, whose name was made
to lead here, could ask too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from starlette.responses import Response

from fluxq.serve.server import is_loopback

_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'"
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class Door:
    """An ASGI application that lets to another what the page needs.

    folder: of the images that are shown. hosts: names that it is asked by; none: all.
    """

    def __init__(self, app: Any, folder: str, hosts: Collection[str]) -> None:
        self.app, self.hosts = app, hosts
        self._open = tuple(re.compile(each.replace("FOLDER", re.escape(_slashed(folder)))) for each in _OPEN)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"content-security-policy", _POLICY.encode())]
            await send(message)

        if scope["type"] != "http":  # its start and end
            await self.app(scope, receive, send)
        elif self.hosts and not _is_from_here(scope, self.hosts):
            line = f"this page is at {', '.join(self.hosts)}; --host gives it another address"
            await _refusal(421, line)(scope, receive, answer)
        elif not any(each.fullmatch(_slashed(f"{scope['method']} {scope['path']}")) for each in self._open):
            await _refusal(404, "there is nothing here")(scope, receive, answer)
        else:
            await self.app(scope, receive, answer)


def hosts_of(address: str, name: str = "") -> tuple[str, ...]:
    """Return the names by which a server at an address is asked; none: all, because other machines have their own.

    name: the one that it was given.
    """
    if not is_loopback(address):
        return ()
    names = (*_LOCAL, *(f"[{each}]" if ":" in each else each for each in (address, name.lower()) if each))
    return tuple(dict.fromkeys(names))


def _is_from_here(scope: Any, hosts: Collection[str]) -> bool:
    """Tell whether a request asks by one of these names, and comes from no page but this one."""
    headers = [(name, value.decode("latin-1").lower()) for name, value in scope["headers"]]
    authorities = {value for name, value in headers if name == b"host"} or {""}
    pages = {value.partition("://")[2] for name, value in headers if name == b"origin"}
    return {re.sub(r":\d+\Z", "", each) for each in authorities} <= {*hosts} and pages <= authorities


def _slashed(path: str) -> str:
    """Return a path of Windows as browsers write it."""
    return path.replace("\\", "/")


def _refusal(status: int, line: str) -> Response:
    return Response(f"{line}\n", status, {"content-type": "text/plain", "connection": "close"})


# Method and path, as regular expressions. FOLDER: that of the images that are shown.
_OPEN = (
    r"(GET|HEAD) /",
    r"GET /(theme\.css|manifest\.json|favicon\.ico)",
    r"GET /(assets|static)/.+",
    r"GET /gradio_api/(app_id|heartbeat/\w+)",
    r"POST /gradio_api/queue/join",
    r"GET /gradio_api/queue/data",
    r"(GET|HEAD) /gradio_api/file=FOLDER/\w+/[\w.-]+",
)
