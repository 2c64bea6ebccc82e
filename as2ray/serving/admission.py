"""Bounds how many requests a gateway receives and ranks at once, and how slow a body may be."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from as2ray.serving.settings import Settings
from as2ray.serving.types import RequestError, overloaded_error, unavailable_error

MAX_RECEIVING = 1_024
"""Requests whose bodies may arrive at the same time."""

RESERVED_REQUESTS = 2 * MAX_RECEIVING
"""Requests that Ray Serve lets through beyond those that rank: bodies that arrive, and as many
probes and refusals."""

BODY_TIMEOUT_S, MIN_BYTES_PER_SECOND = 5.0, 10_000
"""A body must make progress within the timeout, and after it be received at this rate."""

SLOW_AFTER_S, MAX_SLOW_PER_CLIENT = 1.0, 64
"""A body that takes longer is slow; each address may send so many slow bodies at the same time."""

MAX_BUFFERED_BODIES = 16
"""Bytes of all bodies that arrive or are ranked, as a multiple of `max_body_bytes`."""


class Admission:
    """Counts the requests of a gateway, and refuses those beyond its bounds.

    Args:
        settings: Settings of the service.
    """

    def __init__(self, settings: Settings) -> None:
        batching, limits = settings.batching, settings.limits
        self.max_ranking = (
            batching.max_ongoing_requests * settings.replicas.max_replicas
            + batching.max_queued_requests
        )
        self.max_body_bytes = limits.max_body_bytes
        self.num_received = self.num_ongoing = self.num_receiving = self.num_buffered_bytes = 0
        self.num_slow: Counter[str] = Counter()
        """Slow bodies by the address of their client."""
        self.is_draining = False
        """Whether the service shuts down, and is no longer ready."""
        self.is_closed = False
        """Whether it answers only what it has accepted."""

    def check_ready(self) -> None:
        """Checks that the service does not shut down.

        Raises:
            RequestError: It does.
        """
        if self.is_draining:
            raise shutting_down_error()

    @contextmanager
    def admit(self, receive: Receive, client: str) -> Iterator["BodyReceiver"]:
        """Counts a request during the context, in which its body is received.

        Raises:
            RequestError: The service shuts down, or too many bodies arrive.
        """
        self.num_received += 1
        if self.is_closed:
            raise shutting_down_error()
        if self.num_receiving >= MAX_RECEIVING:
            raise overloaded_error("too many requests are being received", 1)
        body = BodyReceiver(self, receive, client)
        self.num_ongoing += 1
        try:
            yield body
        finally:
            self.num_ongoing -= 1
            self.num_buffered_bytes -= body.num_bytes
            body.release()


class BodyReceiver:
    """Receives the body of one request; an ASGI `receive`."""

    def __init__(self, admission: Admission, receive: Receive, client: str) -> None:
        self.admission, self.receive, self.client = admission, receive, client
        self.num_bytes = 0
        self.is_complete = self.is_slow = False
        self.started_at = self.progress_at = time.monotonic()
        admission.num_receiving += 1

    async def __call__(self) -> Message:
        """Receives the next message.

        Raises:
            RequestError: The body is too slow or too large, or too many are.
            ClientDisconnect: The client left; Ray Serve cancels then what receives.
        """
        if self.is_complete:
            return await self.receive()
        try:
            message = await self._receive_in_time()
        except RequestError:
            raise
        except Exception as error:
            raise ClientDisconnect from error
        self.progress_at = time.monotonic()
        num_bytes, admission = len(message.get("body", b"")), self.admission
        self.num_bytes += num_bytes
        admission.num_buffered_bytes += num_bytes
        if self.num_bytes > admission.max_body_bytes:
            raise body_too_large_error(admission.max_body_bytes)
        if admission.num_buffered_bytes > MAX_BUFFERED_BODIES * admission.max_body_bytes:
            raise overloaded_error("too many bytes are being received or ranked", 1)
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.release()
            num_ranking = admission.num_ongoing - admission.num_receiving
            if num_ranking > admission.max_ranking:
                raise overloaded_error(f"{num_ranking - 1:,} requests are being ranked", 1)
        return message

    def release(self) -> None:
        """Stops counting the body as one that arrives: it is complete or given up."""
        if self.is_complete:
            return
        self.is_complete = True
        self.admission.num_receiving -= 1
        if self.is_slow:
            self.admission.num_slow[self.client] -= 1
            self.admission.num_slow += Counter()  # forgets clients without slow bodies

    async def _receive_in_time(self) -> Message:
        if not self.is_slow:
            try:
                async with asyncio.timeout(self._left(SLOW_AFTER_S)):
                    return await self.receive()
            except TimeoutError:
                self._check_slow_bodies()
        latest = BODY_TIMEOUT_S + self.num_bytes / MIN_BYTES_PER_SECOND
        without_progress = self.progress_at - self.started_at + BODY_TIMEOUT_S
        try:
            async with asyncio.timeout(self._left(min(latest, without_progress))):
                return await self.receive()
        except TimeoutError:
            raise self._error("it made too little progress") from None

    def _left(self, seconds: float) -> float:
        return max(0.0, self.started_at + seconds - time.monotonic())

    def _check_slow_bodies(self) -> None:
        num_slow = self.admission.num_slow
        if num_slow[self.client] >= MAX_SLOW_PER_CLIENT:
            raise self._error(f"{MAX_SLOW_PER_CLIENT} others of this address are as slow")
        num_slow[self.client] += 1
        self.is_slow = True

    def _error(self, reason: str) -> RequestError:
        waited_s = time.monotonic() - self.started_at
        problem = f"the body was not received within {waited_s:.1f} s: {reason}"
        return RequestError("body_timeout", problem, "send the body at once", retry_after=1)


def body_too_large_error(max_body_bytes: int) -> RequestError:
    """Returns the error of a request whose body is over the limit."""
    problem = f"the body is over the limit of {max_body_bytes:,} bytes"
    return RequestError("too_large", problem, "send fewer or shorter candidates")


def shutting_down_error() -> RequestError:
    """Returns the error of a request that comes after the last one that is answered."""
    return unavailable_error("the service is shutting down", "it answers what it has accepted")
