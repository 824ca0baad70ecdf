"""The outermost layer of the HTTP server: ids, API keys, and a last net under everything, so that no client ever sees a traceback.

Pure ASGI, so that nothing stands between a request and `http.disconnect`. Does not know: routes.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake.common.errors import MooncakeError
from mooncake.common.ids import new_id
from mooncake.gateway.auth import ApiKeys
from mooncake.gateway.sink import Sink

_log = logging.getLogger(__name__)
CLIENT_ID_CHARS = 256


class Front:
    """Puts `request_id` (ours) and `client_id` (echoed only) into the scope's state, and both on every answer."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = new_id("req")
        client_id = headers.get("x-request-id", "")[:CLIENT_ID_CHARS]
        scope.setdefault("state", {}).update(request_id=request_id, client_id=client_id)

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(raw=message.setdefault("headers", []))
                answer["x-request-id"] = client_id or request_id
                answer["x-mooncake-request-id"] = request_id
            await send(message)

        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send_with_ids(message)

        try:
            self._keys.check(scope["path"], headers.get("authorization"))
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            _log.debug("client gone before its request was complete")
        except MooncakeError as error:
            await Sink(watched).error(error)
        except Exception:  # the outermost loop of a request
            _log.exception("unexpected error", extra={"fields": {"request_id": request_id, "path": scope["path"]}})
            if not started:
                await Sink(watched).error(MooncakeError("Internal server error."))
