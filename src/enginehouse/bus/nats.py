"""NATS behind `ports.Bus`: the only door to nats-py, with every default of that library set on purpose.

The connection heals by itself for ever, whatever ended it, and plays its subscriptions again. It keeps
nothing for later: without a connection a publish fails at once, because the store is the record and the
caller retries from there. A denied subject is an error at the subscription, not silence. `receive` callbacks
run one after the other in order, and one that raises harms only its own message.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec
import nats.errors
import nkeys
from msgspec import Struct
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from enginehouse.bus.address import parse_address
from enginehouse.core.errors import Denied, Invalid, TooLarge, Unavailable
from enginehouse.ports import Message

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2  # of one attempt: a LAN answers in milliseconds, a VPN in tenths
FIRST_PAUSE_SECONDS = 0.1  # between attempts: a restarted server is back soon,
LONGEST_PAUSE_SECONDS = 2.0  # and one that stays away must not be hammered by a fleet: pauses grow and are jittered
PING_SECONDS = 8  # two unanswered pings and the third is due: a half-open link is noticed within 24 s (G26: 30 s)
UNANSWERED_PINGS = 2
FLUSH_SECONDS = 5  # a round trip to a server that lives; LocalAI waits as long
CLOSE_SECONDS = 5
RENEW_SECONDS = 10  # for a second connection; the first one has a quarter of an hour left by then
# What may wait to be written or to be received. Receivers return at once, so a full queue means that this process
# hangs; the excess is dropped and logged, because a reader that waits would miss its pings and lose everything.
OUTGOING_BYTES = 8 * 1024 * 1024
INCOMING_MESSAGES = 65_536
INCOMING_BYTES = 64 * 1024 * 1024

Hook = Callable[[], None]


def _nothing() -> None:
    pass


class BusOptions(Struct, frozen=True, kw_only=True):
    """Where and as whom: a user in `url`, else `jwt` and `seed`, else anonymous as LocalAI's default is."""

    url: str
    name: str
    jwt: str = ""
    seed: str = ""
    on_connected: Hook = _nothing
    on_disconnected: Hook = _nothing


class NatsBus:
    """One connection. Made by `connect`, ended by `close`."""

    def __init__(self, options: BusOptions) -> None:
        self._options = options
        self._address = parse_address(options.url)
        self._client = Client()
        self._subscriptions: list[tuple[str, Callable[[Message], None]]] = []
        self._violations: list[str] = []
        self._said: set[str] = set()
        self._last_error = "no server answered"
        self._is_opening = False
        self._is_closing = False
        self._is_renewing = False
        self._is_refused = False
        self._reopening: asyncio.Task[None] | None = None
        self.dropped = 0

    @classmethod
    async def connect(cls, options: BusOptions, *, limit_seconds: float) -> NatsBus:
        """Keep trying for `limit_seconds`. A credential that the server refuses is `Denied` at once."""
        bus = cls(options)
        bus._is_opening = True
        try:
            async with asyncio.timeout(limit_seconds):
                await bus._open()
        except TimeoutError as error:
            await bus.close()
            raise Unavailable(
                f"cannot connect to the bus at {bus._address.shown} within {limit_seconds:g} s: {bus._last_error}. "
                "Check that nats-server is running there and that the address is right",
                code="bus_unavailable",
            ) from error
        except (Denied, asyncio.CancelledError):
            await bus.close()
            raise
        except (nats.errors.Error, ValueError) as error:
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

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        client = self._client
        # Checked here, because the library would keep the message and send it whenever, or wait without a
        # limit for room.
        if not client.is_connected or client.pending_data_size + len(payload) > OUTGOING_BYTES:
            raise self._unavailable(
                subject, "there is no connection" if not client.is_connected else "it does not keep up"
            )
        try:
            await client.publish(subject, payload, reply=reply)
        except nats.errors.MaxPayloadError as error:
            raise TooLarge(
                f"cannot send {len(payload)} bytes on {subject}: the bus takes {client.max_payload}"
            ) from error
        except nats.errors.BadSubjectError as error:
            raise Invalid(f"cannot send on {subject!r}: it is not a subject") from error
        except (nats.errors.Error, OSError) as error:
            raise self._unavailable(subject, str(error)) from error

    async def subscribe(self, subject: str, receive: Callable[[Message], None]) -> None:
        """Effective on return: the server has confirmed it, and has not denied it."""
        await self._subscribe(self._client, subject, receive)
        self._subscriptions.append((subject, receive))

    async def close(self) -> None:
        self._is_closing = True
        if self._reopening is not None:
            self._reopening.cancel()
        await _close(self._client)

    async def renew(self, jwt: str, seed: str) -> None:
        """Go over to a new credential. A second connection is ready before the first one is closed, so that nothing is
        missed; a message that comes between the two comes twice. Without a connection the next one uses it.
        """
        self._options = msgspec.structs.replace(self._options, jwt=jwt, seed=seed)
        if self._is_renewing or not self._client.is_connected:
            return
        old, self._is_renewing = self._client, True
        try:
            async with asyncio.timeout(RENEW_SECONDS):
                await self._open()
            await _close(old, drain=True)
        except (TimeoutError, Unavailable, Denied, nats.errors.Error, OSError) as error:
            # The old connection goes on for as long as the server lets it, and the next one uses what is new.
            log.warning("bus.not_renewed name=%s error=%s", self._options.name, error)
        finally:
            self._is_renewing = False

    async def _open(self) -> None:
        client = Client()
        if not self._is_renewing:
            self._client = client
        try:
            await self._connect(client)
            for subject, receive in self._subscriptions:
                await self._subscribe(client, subject, receive)
        except BaseException:
            if self._is_renewing:
                await _close(client)
            raise
        self._client = client
        self._said.clear()
        self._options.on_connected()

    async def _connect(self, client: Client) -> None:
        options, address = self._options, self._address
        has_credential = bool(options.jwt and options.seed) and not address.has_user

        def only_for_this(call: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
            # A connection that was given up, or is not in use yet, has nothing to tell.
            async def told() -> None:
                if client is self._client:
                    await call()

            return told

        await client.connect(
            servers=list(address.servers),
            user=address.user or None,
            password=address.password if address.user else None,
            token=address.token or None,
            name=options.name,  # shown by the server for each connection
            # Attempts without end: an outage of any length heals without a restart. The default gives up
            # after 60.
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            connect_timeout=CONNECT_SECONDS,
            # Between attempts of the first connection; later ones pause by `_next_server`. Annotated as whole seconds,
            # used as any.
            reconnect_time_wait=FIRST_PAUSE_SECONDS * 2,  # type: ignore[arg-type]
            reconnect_to_server_handler=_next_server,
            dont_randomize=True,
            ping_interval=PING_SECONDS,  # the default, 120 s, would take 6 minutes to notice a half-open link
            max_outstanding_pings=UNANSWERED_PINGS,
            pending_size=2 * OUTGOING_BYTES,  # never reached: `publish` refuses first
            flush_timeout=FLUSH_SECONDS,  # the default is no limit at all
            flusher_queue_size=1024,
            drain_timeout=CLOSE_SECONDS,
            no_echo=False,  # a frontend hears itself the way it hears the others
            inbox_prefix=b"_INBOX",  # any other is denied by LocalAI's permissions
            verbose=False,
            pedantic=False,
            skip_subject_validation=False,  # it is what keeps line breaks out of the protocol
            # Read at every attempt: it may have been renewed since.
            user_jwt_cb=(lambda: self._options.jwt.encode()) if has_credential else None,
            signature_cb=(lambda nonce: _signature(self._options.seed, nonce)) if has_credential else None,
            error_cb=self._on_error,
            disconnected_cb=only_for_this(self._on_disconnected),
            reconnected_cb=only_for_this(self._on_reconnected),
            closed_cb=only_for_this(self._on_closed),
        )

    async def _subscribe(self, client: Client, subject: str, receive: Callable[[Message], None]) -> None:
        async def deliver(message: Msg) -> None:
            headers = message.headers
            nobody = headers is not None and headers.get("Status") == "503" and not message.data
            receive(Message(message.subject, message.data, message.reply, nobody))

        if not client.is_connected:
            raise self._unavailable(subject, "there is no connection")
        try:
            subscription = await client.subscribe(
                subject, cb=deliver, pending_msgs_limit=INCOMING_MESSAGES, pending_bytes_limit=INCOMING_BYTES
            )
        except nats.errors.BadSubjectError as error:
            raise Invalid(f"cannot listen on {subject!r}: it is not a subject") from error
        except (nats.errors.Error, OSError) as error:
            raise self._unavailable(subject, str(error)) from error
        try:
            # The library writes the ping of a flush at once and the subscription a turn of the loop later, so the first
            # answer says nothing about it; the ping of the second is behind it on the wire.
            await client.flush(timeout=FLUSH_SECONDS)
            await client.flush(timeout=FLUSH_SECONDS)
        except (nats.errors.Error, OSError) as error:
            await _forget(subscription)
            raise self._unavailable(subject, str(error)) from error
        # The parser of the library gives the server's words in lower case.
        if any(f'"{subject.lower()}"' in violation for violation in self._violations if "subscription" in violation):
            await _forget(subscription)
            raise Denied(
                f"cannot listen on {subject}: the bus does not allow it to {self._options.name}. "
                "Check the credential of this node"
            )

    def _unavailable(self, subject: str, cause: str) -> Unavailable:
        return Unavailable(
            f"cannot use {subject} on the bus at {self._address.shown}: {cause}; it is being tried again",
            code="bus_unavailable",
        )

    async def _on_error(self, error: Exception) -> None:
        """Everything that the library cannot raise to a caller. It must not flood: an outage repeats the same
        few lines."""
        self._last_error = str(error) or type(error).__name__
        text = self._last_error.lower()
        if isinstance(error, nats.errors.SlowConsumerError):
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                log.error("bus.dropped name=%s subject=%s dropped=%d", self._options.name, error.subject, self.dropped)
        elif "permissions violation" in text:
            self._violations.append(text)
            del self._violations[:-100]
            self._say(logging.ERROR, "bus.denied", text)
        elif isinstance(error, nats.errors.Error | OSError | TimeoutError):
            self._is_refused = "authorization" in text or "authentication" in text
            self._say(logging.WARNING, "bus.error", self._last_error)
            if self._is_opening and "authorization" in text:
                # Raised through the library's connect, which would try the same credential for ever.
                raise Denied(
                    f"cannot connect to the bus at {self._address.shown}: "
                    f"it does not accept the credential of {self._options.name}"
                )
        else:
            log.error("bus.receiver_failed name=%s", self._options.name, exc_info=error)

    def _say(self, level: int, event: str, text: str) -> None:
        if text not in self._said and len(self._said) < 100:
            self._said.add(text)
            log.log(level, "%s name=%s error=%s", event, self._options.name, text)

    async def _on_disconnected(self) -> None:
        if not self._is_closing:
            log.warning("bus.disconnected name=%s url=%s", self._options.name, self._address.shown)
            self._options.on_disconnected()

    async def _on_reconnected(self) -> None:
        self._said.clear()
        log.info("bus.reconnected name=%s url=%s", self._options.name, self._address.shown)
        self._options.on_connected()

    async def _on_closed(self) -> None:
        """The library gives up for good on some words of the server (slow consumer, expired, …); we do not."""
        if self._is_closing:
            return
        log.error("bus.closed_by_server name=%s error=%s", self._options.name, self._last_error)
        # The library runs this in a task of its own that nothing else holds on to.
        self._reopening = asyncio.current_task()
        while not self._is_closing:
            await asyncio.sleep(random.uniform(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))
            try:
                await self._open()
                return
            except (Unavailable, Denied, nats.errors.Error, OSError) as error:
                self._say(logging.WARNING, "bus.error", str(error))


def _next_server(servers: list[Server], _: object) -> tuple[Server, float]:
    """The server that failed least, after a pause that grows with its failures; the jitter keeps a fleet
    apart."""
    server = min(servers, key=lambda candidate: candidate.reconnects)
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(server.reconnects, 10))
    return server, random.uniform(longest / 2, longest)


def _signature(seed: str, nonce: str) -> bytes:
    return base64.b64encode(nkeys.from_seed(seed.encode()).sign(nonce.encode()))


async def _close(client: Client, *, drain: bool = False) -> None:
    """With `drain`, what has arrived is still received."""
    try:
        # The library's own end may wait for a peer that reads nothing.
        async with asyncio.timeout(CLOSE_SECONDS):
            if client.is_connected and drain:
                await client.drain()
            elif client.is_connected:
                await client.flush(timeout=FLUSH_SECONDS)
            await client.close()
    except (TimeoutError, nats.errors.Error, OSError) as error:
        log.warning("bus.close_failed error=%s", error)


async def _forget(subscription: Subscription) -> None:
    with contextlib.suppress(nats.errors.Error):
        await subscription.unsubscribe()
