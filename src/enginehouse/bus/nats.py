"""`ports.Bus` on NATS, with every default of nats-py set explicitly.

The connection reconnects for ever after any failure and restores its subscriptions. It buffers nothing: without a
connection a publish fails at once, because the store is the record and the caller retries from there. A denied subject
raises at the subscription. `receive` callbacks run one after another in order, and an exception in one affects only
its own message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from enginehouse.bus.address import parse_address
from enginehouse.bus.credentials import sign_nonce
from enginehouse.bus.library import Client, Msg, Server, Subscription, errors
from enginehouse.core.errors import Denied, Invalid, TooLarge, Unavailable
from enginehouse.ports import Message

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2  # of one attempt: a LAN answers in milliseconds, a VPN in tenths of a second
FIRST_PAUSE_SECONDS = 0.1  # between attempts: a restarted server is back soon
LONGEST_PAUSE_SECONDS = 2.0  # an absent server must not be flooded by all nodes: pauses grow and have jitter
# The connection is closed when the third ping is due: a half-open link is detected within 24 s (G26: 30 s).
PING_SECONDS = 8
UNANSWERED_PINGS = 2
FLUSH_SECONDS = 5  # a round trip to a live server; LocalAI waits as long
CLOSE_SECONDS = 5
RENEW_SECONDS = 10  # for a second connection; the first one is valid for another quarter of an hour by then
# Limits of what may wait to be sent or received. Receivers return at once, so a full queue means that this process
# hangs. The excess is dropped and logged, because a blocked reader would miss its pings and lose everything.
OUTGOING_BYTES = 8 * 1024 * 1024
INCOMING_MESSAGES = 65_536
INCOMING_BYTES = 64 * 1024 * 1024

Hook = Callable[[], None]


def _nothing() -> None:
    pass


class BusOptions(Struct, frozen=True, kw_only=True):
    """The server and the credential: a user in `url`, else `jwt` and `seed`, else anonymous (LocalAI's default)."""

    url: str
    name: str
    jwt: str = ""
    seed: str = ""
    on_connected: Hook = _nothing
    on_disconnected: Hook = _nothing


class NatsBus:
    """One connection. Created by `connect`, ended by `close`."""

    def __init__(self, options: BusOptions) -> None:
        self._options = options
        self._address = parse_address(options.url)
        self._client = Client()
        self._subscriptions: list[tuple[str, Callable[[Message], None]]] = []
        self._violations: list[str] = []
        self._logged: set[str] = set()
        self._last_error = "no server answered"
        self._is_opening = False
        self._is_closing = False
        self._is_renewing = False
        self._is_refused = False
        self._reopening: asyncio.Task[None] | None = None
        self.dropped = 0

    @classmethod
    async def connect(cls, options: BusOptions, *, limit_seconds: float) -> NatsBus:
        """Retry for `limit_seconds`. A refused credential raises `Denied` at once."""
        bus = cls(options)
        bus._is_opening = True
        try:
            async with asyncio.timeout(limit_seconds):
                await bus._open()
        except TimeoutError as error:
            await bus.close()
            raise Unavailable(
                f"cannot connect to the bus at {bus._address.shown} within {limit_seconds:g} s: {bus._last_error}. "
                "Check that nats-server is running there and that the address is correct",
                code="bus_unavailable",
            ) from error
        except (Denied, asyncio.CancelledError):
            await bus.close()
            raise
        except (errors.Error, ValueError) as error:
            await bus.close()
            raise Invalid(
                f"cannot use {bus._address.shown!r} as the address of the bus: {error}", code="invalid_uri"
            ) from error
        finally:
            bus._is_opening = False
        return bus

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def is_refused(self) -> bool:
        return self._is_refused and not self._client.is_connected

    async def answers(self, limit_seconds: float) -> bool:
        """Asked over another connection, which any server greets: nats-py breaks this one when a ping is given up."""
        server = self._client.connected_url
        if not self._client.is_connected or server is None:
            return False
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(limit_seconds):
                reader, writer = await asyncio.open_connection(server.hostname, server.port)
                try:
                    return (await reader.readline()).startswith(b"INFO ")
                finally:
                    writer.close()
        return False

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        client = self._client
        # Checked here, because the library would buffer the message and send it later, or wait for room without a
        # limit.
        if not client.is_connected or client.pending_data_size + len(payload) > OUTGOING_BYTES:
            raise self._unavailable(
                subject, "there is no connection" if not client.is_connected else "too much data is pending"
            )
        try:
            await client.publish(subject, payload, reply=reply)
        except errors.MaxPayloadError as error:
            raise TooLarge(
                f"cannot send {len(payload)} bytes on {subject}: at most {client.max_payload} are allowed"
            ) from error
        except errors.BadSubjectError as error:
            raise Invalid(f"cannot send on {subject!r}: it is not a valid subject") from error
        except (errors.Error, OSError) as error:
            raise self._unavailable(subject, str(error)) from error

    async def subscribe(self, subject: str, receive: Callable[[Message], None]) -> None:
        """Effective on return: the server has confirmed it."""
        await self._subscribe(self._client, subject, receive)
        self._subscriptions.append((subject, receive))

    async def close(self) -> None:
        self._is_closing = True
        if self._reopening is not None:
            self._reopening.cancel()
        await _close(self._client)

    async def renew(self, jwt: str, seed: str) -> None:
        """Switch to a new credential. A second connection is ready before the first one is closed, so no message is
        missed; one may arrive twice. Without a connection, the next one uses the new credential.
        """
        self._options = msgspec.structs.replace(self._options, jwt=jwt, seed=seed)
        if self._is_renewing or not self._client.is_connected:
            return
        old, self._is_renewing = self._client, True
        try:
            async with asyncio.timeout(RENEW_SECONDS):
                await self._open()
            await _close(old, drain=True)
        except (TimeoutError, Unavailable, Denied, errors.Error, OSError) as error:
            # The old connection stays until the server closes it; the next one uses the new credential.
            log.warning("bus.renew_failed name=%s error=%s", self._options.name, error)
        finally:
            self._is_renewing = False

    async def _open(self) -> None:
        client = Client()
        if not self._is_renewing:
            self._client = client
        async with contextlib.AsyncExitStack() as unless_open:
            if self._is_renewing:
                unless_open.push_async_callback(_close, client)
            await self._connect(client)
            for subject, receive in self._subscriptions:
                await self._subscribe(client, subject, receive)
            unless_open.pop_all()
        self._client = client
        self._logged.clear()
        self._options.on_connected()

    async def _connect(self, client: Client) -> None:
        options, address = self._options, self._address
        has_credential = bool(options.jwt and options.seed) and not address.has_user

        def only_for_this(call: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
            # Ignore events of a connection that was abandoned or is not in use yet.
            async def call_if_current() -> None:
                if client is self._client:
                    await call()

            return call_if_current

        await client.connect(
            servers=list(address.servers),
            user=address.user or None,
            password=address.password if address.user else None,
            token=address.token or None,
            name=options.name,  # shown by the server for each connection
            # Unlimited attempts: the connection recovers from an outage of any length. The default gives up after 60.
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            connect_timeout=CONNECT_SECONDS,
            # Between attempts of the first connection; `_next_server` sets the later pauses. Annotated as int, but
            # fractions work.
            reconnect_time_wait=FIRST_PAUSE_SECONDS * 2,  # type: ignore[arg-type]
            reconnect_to_server_handler=_next_server,
            dont_randomize=True,
            ping_interval=PING_SECONDS,  # the default of 120 s would take 6 minutes to detect a half-open link
            max_outstanding_pings=UNANSWERED_PINGS,
            pending_size=2 * OUTGOING_BYTES,  # never reached: `publish` refuses first
            flush_timeout=FLUSH_SECONDS,  # the default is no limit
            flusher_queue_size=1024,
            drain_timeout=CLOSE_SECONDS,
            no_echo=False,  # a frontend receives its own messages like those of others
            inbox_prefix=b"_INBOX",  # LocalAI's permissions deny any other
            verbose=False,
            pedantic=False,
            skip_subject_validation=False,  # keeps line breaks out of the protocol
            # Read at every attempt, because the credential may have been renewed.
            user_jwt_cb=(lambda: self._options.jwt.encode()) if has_credential else None,
            signature_cb=(lambda nonce: sign_nonce(self._options.seed, nonce)) if has_credential else None,
            error_cb=self._on_error,
            disconnected_cb=only_for_this(self._on_disconnected),
            reconnected_cb=only_for_this(self._on_reconnected),
            closed_cb=only_for_this(self._on_closed),
        )

    async def _subscribe(self, client: Client, subject: str, receive: Callable[[Message], None]) -> None:
        async def deliver(message: Msg) -> None:
            headers = message.headers
            no_responders = headers is not None and headers.get("Status") == "503" and not message.data
            receive(Message(message.subject, message.data, message.reply, no_responders))

        if not client.is_connected:
            raise self._unavailable(subject, "there is no connection")
        try:
            subscription = await client.subscribe(
                subject, cb=deliver, pending_msgs_limit=INCOMING_MESSAGES, pending_bytes_limit=INCOMING_BYTES
            )
        except errors.BadSubjectError as error:
            raise Invalid(f"cannot listen on {subject!r}: it is not a valid subject") from error
        except (errors.Error, OSError) as error:
            raise self._unavailable(subject, str(error)) from error
        try:
            # The library sends the ping of a flush at once but the subscription one loop turn later, so the first
            # answer proves nothing. The ping of the second flush follows the subscription.
            await client.flush(timeout=FLUSH_SECONDS)
            await client.flush(timeout=FLUSH_SECONDS)
        except (errors.Error, OSError) as error:
            await _forget(subscription)
            raise self._unavailable(subject, str(error)) from error
        # The library's parser converts the server's message to lower case.
        if any(f'"{subject.lower()}"' in violation for violation in self._violations if "subscription" in violation):
            await _forget(subscription)
            raise Denied(
                f"cannot listen on {subject}: the bus denies it to {self._options.name}. "
                "Check the credential of this node"
            )

    def _unavailable(self, subject: str, cause: str) -> Unavailable:
        return Unavailable(
            f"cannot use {subject} on the bus at {self._address.shown}: {cause}. It is retried automatically",
            code="bus_unavailable",
        )

    async def _on_error(self, error: Exception) -> None:
        """Errors without a caller. Repeated lines are logged once, because an outage causes many."""
        self._last_error = str(error) or type(error).__name__
        text = self._last_error.lower()
        if isinstance(error, errors.SlowConsumerError):
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                log.error("bus.dropped name=%s subject=%s dropped=%d", self._options.name, error.subject, self.dropped)
        elif "permissions violation" in text:
            self._violations.append(text)
            del self._violations[:-100]
            self._log_once(logging.ERROR, "bus.denied", text)
        elif isinstance(error, errors.Error | OSError | TimeoutError):
            self._is_refused = "authorization" in text or "authentication" in text
            self._log_once(logging.WARNING, "bus.failed", self._last_error)
            if self._is_opening and "authorization" in text:
                # Raised through the library's connect, which would otherwise retry the same credential for ever.
                raise Denied(
                    f"cannot connect to the bus at {self._address.shown}: "
                    f"it does not accept the credential of {self._options.name}"
                )
        else:
            log.error("bus.receiver_failed name=%s", self._options.name, exc_info=error)

    def _log_once(self, level: int, event: str, text: str) -> None:
        if text not in self._logged and len(self._logged) < 100:
            self._logged.add(text)
            log.log(level, "%s name=%s error=%s", event, self._options.name, text)

    async def _on_disconnected(self) -> None:
        if not self._is_closing:
            log.warning("bus.disconnected name=%s url=%s", self._options.name, self._address.shown)
            self._options.on_disconnected()

    async def _on_reconnected(self) -> None:
        self._logged.clear()
        log.info("bus.reconnected name=%s url=%s", self._options.name, self._address.shown)
        self._options.on_connected()

    async def _on_closed(self) -> None:
        """Reopen the connection. The library gives up on some errors (slow consumer, expired credential, …)."""
        if self._is_closing:
            return
        log.error("bus.closed_by_server name=%s error=%s", self._options.name, self._last_error)
        # The library runs this in its own task, which has no other reference.
        self._reopening = asyncio.current_task()
        while not self._is_closing:
            await asyncio.sleep(random.uniform(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
            try:
                await self._open()
                return
            except (Unavailable, Denied, errors.Error, OSError) as error:
                self._log_once(logging.WARNING, "bus.failed", str(error))


def _next_server(servers: list[Server], _: object) -> tuple[Server, float]:
    """The server with the fewest failures, after a growing pause with jitter, so that nodes do not come in step."""
    server = min(servers, key=lambda candidate: candidate.reconnects)
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(server.reconnects, 10))
    return server, random.uniform(longest / 2, longest)


async def _close(client: Client, *, drain: bool = False) -> None:
    """With `drain`, messages that have arrived are still delivered."""
    try:
        # The library's close may wait for a peer that does not read.
        async with asyncio.timeout(CLOSE_SECONDS):
            if client.is_connected and drain:
                await client.drain()
            elif client.is_connected:
                await client.flush(timeout=FLUSH_SECONDS)
            await client.close()
    except (TimeoutError, errors.Error, OSError) as error:
        log.warning("bus.close_failed error=%s", error)


async def _forget(subscription: Subscription) -> None:
    with contextlib.suppress(errors.Error):
        await subscription.unsubscribe()
