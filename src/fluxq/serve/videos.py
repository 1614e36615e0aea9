"""Videos as jobs: a request is answered at once, its video is asked for later, and kept for an hour.

A video's file is an animated WebP without loss, which needs no other program and which browsers show.
"""

from __future__ import annotations

import asyncio
import io
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from starlette.exceptions import HTTPException

from fluxq.base.console import logger
from fluxq.serve import api
from fluxq.serve.dispatcher import Dispatcher, Job, Made, Unavailable
from fluxq.serve.orders import Failed, NotLoaded, Refused

MEDIA_TYPE = "image/webp"
KEPT_SECONDS = 3600.0
KEPT_BYTES = 1 << 30


@dataclass(eq=False)
class Video:
    """A video that was asked for. file: None before it is finished."""

    name: str
    job: Job
    fps: int
    created: float = field(default_factory=time.time)
    completed: float | None = None
    progress: int = 0
    status: str = "queued"
    file: bytes | None = None
    about: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    making: asyncio.Task[None] | None = None

    def told(self) -> dict[str, Any]:
        """Return what OpenAI's API tells of a video, and how it was made."""
        order = self.job.orders[0]
        width, height = order.size
        row: dict[str, Any] = {"id": self.name, "object": "video", "model": order.model, "status": self.status}
        row |= {"progress": self.progress, "created_at": int(self.created), "size": f"{width}x{height}"}
        row |= {"seconds": f"{order.frames / self.fps:g}", "num_frames": order.frames}
        if self.completed is not None:
            row |= {"completed_at": int(self.completed), "expires_at": int(self.completed + KEPT_SECONDS)}
        return row | {"error": self.error} | self.about

    def describe(self, made: Made) -> None:
        """Tell how it was made, with its number of frames, which pipelines round."""
        frames = made.picture.frames or 1
        self.about = api.told(made) | {"num_frames": frames, "seconds": f"{frames / self.fps:g}"}

    def fail(self, error: Exception) -> None:
        """Tell that it could not be made."""
        self.status, self.completed = "failed", self.completed or time.time()
        is_told = isinstance(error, (Refused, NotLoaded, Unavailable))  # as where an image is asked for
        message = str(error) if is_told else "the video could not be made"
        self.error = {"code": error.code if isinstance(error, Failed) else type(error).__name__, "message": message}


class Videos:
    """Videos that are made, and those that were made within the last hour, in so many bytes at most."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._videos: dict[str, Video] = {}

    async def keep_video(self, job: Job, fps: int) -> Video:
        """Keep a request that was taken, under a name that nobody guesses."""
        self._tidy()
        video = Video(f"video_{secrets.token_hex(16)}", job, fps)
        self._videos[video.name] = video
        video.making = asyncio.create_task(self._make(video))
        return video

    async def video(self, name: str, *, whole: bool = False) -> Video:
        """Return a video; 404 for a name that there is not, or no more. whole: whether its file is wanted."""
        self._tidy()
        if name not in self._videos:
            raise no_video()
        return self._videos[name]

    async def forget_video(self, name: str) -> None:
        """Forget a video; one that is not finished is let go at the next step."""
        video = await self.video(name)
        del self._videos[name]
        if not video.job.is_finished:
            self.dispatcher.cancel(video.job)
            if video.making is not None:
                video.making.cancel()

    async def _make(self, video: Video) -> None:
        job = video.job
        while (news := await job.news.get()) is not None:
            if "step" in news:
                video.status, video.progress = "in_progress", min(99, 100 * news["step"] // news["steps"])
        if job.error is not None:
            video.fail(job.error)
            return
        (made,) = job.made.values()
        job.made.clear()  # its pixels
        video.describe(made)
        try:
            video.file = await asyncio.to_thread(file_of, made, video.fps)
        except Exception as error:
            logger.warning("a video could not be written: %s", type(error).__name__)
            video.fail(error)
            return
        video.status, video.progress, video.completed = "completed", 100, time.time()

    def end(self) -> None:
        """Let go of all that is not finished, where the server ends: nobody could fetch it."""
        for video in self._videos.values():
            if video.status in ("queued", "in_progress"):
                self.dispatcher.cancel(video.job)

    def _tidy(self) -> None:
        """Forget what is too old, and the oldest where there is too much."""
        now, nbytes = time.time(), 0
        for video in sorted(self._videos.values(), key=lambda each: -each.created):
            nbytes += len(video.file or b"")
            is_old = video.completed is not None and now - video.completed > KEPT_SECONDS
            if is_old or (video.file is not None and nbytes > KEPT_BYTES):
                del self._videos[video.name]


def no_video() -> HTTPException:
    """Return the error for a name that there is not, or no more."""
    return HTTPException(404, "there is no video of that id, or no more")


def file_of(made: Made, fps: int) -> bytes:
    """Return the frames as an animated WebP, without loss."""
    picture = made.picture
    size = 3 * picture.width * picture.height
    frames = [
        Image.frombytes("RGB", (picture.width, picture.height), picture.pixels[start : start + size])
        for start in range(0, len(picture.pixels), size)
    ]
    file = io.BytesIO()
    how = {"lossless": True, "quality": 0, "method": 0, "duration": round(1000 / fps), "loop": 0}
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], **how)
    return file.getvalue()
