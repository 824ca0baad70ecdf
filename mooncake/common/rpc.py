"""gRPC as every role uses it: servers and channels with the cluster token, keepalive, message limits; errors mapped.

Does not know: any service. Call everything here that makes an aio object inside a running event loop.
"""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc  # type: ignore[import-untyped]

from mooncake.common.auth import check_bearer
from mooncake.common.errors import (
    AuthenticationFailed,
    BadRequest,
    DeadlineExceeded,
    MooncakeError,
    ObjectExists,
    ObjectNotFound,
    Overloaded,
    PeerUnavailable,
)
from mooncake.common.net import format_address, parse_address

MAX_MESSAGE_BYTES = 64 << 20
_HEALTH_PREFIX = "/grpc.health.v1.Health/"  # probes of an orchestrator carry no token

_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not a shared one
]
_CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # closing a channel forgets its back-off
    ("grpc.enable_http_proxy", 0),
]


# --- server ---------------------------------------------------------------------------------------------------------


def make_server(address: str, *, token: str) -> tuple[grpc.aio.Server, str]:
    """A bound, not yet started server with the health service, and its address (port 0 is replaced by the real one).

    Every call but health needs metadata `authorization: Bearer <token>` when `token` is set. Raises MooncakeError when
    the address cannot be bound.
    """
    server = grpc.aio.server(interceptors=[_TokenCheck(token)], options=_SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    host, _ = parse_address(address)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise MooncakeError(f"cannot listen on {address}: is the port taken?") from error
    if port == 0:
        raise MooncakeError(f"cannot listen on {address}: is the port taken?")
    return server, format_address(host, port)


class _TokenCheck(grpc.aio.ServerInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_PREFIX):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        if check_bearer(given if isinstance(given, str) else None, self._token):
            return handler
        return _refuse(handler)


def _refuse(handler: Any) -> Any:
    """A handler of the same kind that answers UNAUTHENTICATED without reading anything."""
    text = "missing or wrong cluster token"

    async def one(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    async def many(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
        yield None

    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            return grpc.unary_unary_rpc_method_handler(one, **codecs)
        case True, False:
            return grpc.stream_unary_rpc_method_handler(one, **codecs)
        case False, True:
            return grpc.unary_stream_rpc_method_handler(many, **codecs)
        case _:
            return grpc.stream_stream_rpc_method_handler(many, **codecs)


# --- channels -------------------------------------------------------------------------------------------------------


def aio_channel(address: str, token: str) -> grpc.aio.Channel:
    """Asyncio channel whose calls carry the token. Connects lazily; close it with `await channel.close()`."""
    channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return _AuthorizedChannel(channel, token) if token else channel


def sync_channel(address: str, token: str) -> grpc.Channel:
    """Blocking channel whose calls carry the token, for threads without an event loop."""
    channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.intercept_channel(channel, _SyncToken(token)) if token else channel


def _with_token(metadata: Any, token: str) -> tuple[tuple[str, Any], ...]:
    return (*(metadata or ()), ("authorization", f"Bearer {token}"))


class _AuthorizedChannel(grpc.aio.Channel):
    """Adds the token to each call's metadata. (aio client interceptors would cost a task a call and change stream
    calls.)
    """

    def __init__(self, inner: grpc.aio.Channel, token: str) -> None:
        self._inner = inner
        self._token = token

    def _authorized(self, call: Any) -> Any:
        def invoke(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return call(*args, metadata=_with_token(metadata, self._token), **kwargs)

        return invoke

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._inner.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


class _CallDetails(
    collections.namedtuple(
        "_CallDetails", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")
    ),
    grpc.ClientCallDetails,
):
    """What grpc's client interceptors must pass on."""


class _SyncToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, token: str) -> None:
        self._token = token

    def _intercept(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        authorized = _CallDetails(
            details.method,
            details.timeout,
            _with_token(details.metadata, self._token),
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
        return continuation(authorized, request)

    intercept_unary_unary = _intercept  # type: ignore[assignment]
    intercept_unary_stream = _intercept  # type: ignore[assignment]
    intercept_stream_unary = _intercept  # type: ignore[assignment]
    intercept_stream_stream = _intercept  # type: ignore[assignment]


# --- errors ---------------------------------------------------------------------------------------------------------

_ERROR_OF_STATUS: dict[grpc.StatusCode, type[MooncakeError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationFailed,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationFailed,
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.NOT_FOUND: ObjectNotFound,
    grpc.StatusCode.ALREADY_EXISTS: ObjectExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


def to_mooncake_error(error: grpc.RpcError, *, unavailable: type[MooncakeError] = PeerUnavailable) -> MooncakeError:
    """The error of our tree for a failed call (not raised). `unavailable` is the class for a peer that cannot be
    reached.
    """
    status = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else None) or str(error)
    if status is grpc.StatusCode.UNAVAILABLE:
        return unavailable(details)
    return _ERROR_OF_STATUS.get(status, MooncakeError)(details)


_STATUS_OF_HTTP: Sequence[tuple[int, grpc.StatusCode]] = (
    (400, grpc.StatusCode.INVALID_ARGUMENT),
    (401, grpc.StatusCode.UNAUTHENTICATED),
    (404, grpc.StatusCode.NOT_FOUND),
    (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (503, grpc.StatusCode.UNAVAILABLE),
    (504, grpc.StatusCode.DEADLINE_EXCEEDED),
)


async def abort_with(context: grpc.aio.ServicerContext, error: MooncakeError) -> NoReturn:
    """Ends the call in a servicer with the status that `to_mooncake_error` maps back."""
    status = dict(_STATUS_OF_HTTP).get(error.http_status, grpc.StatusCode.INTERNAL)
    await context.abort(status, str(error))
    raise AssertionError("abort returned")
