"""The one exception tree.

Knows: for every failure that can cross a module boundary, its HTTP status, its OpenAI error `type`, and the integer
code that the drop-in APIs (`mooncake.engine`, `mooncake.store`) return for it.
Does not know: who raises what. A caller catches the narrowest class that it can act on.
"""

from __future__ import annotations


class MooncakeError(Exception):
    """Root of the tree. `code` is the integer of the drop-in API, `http_status` what the gateway answers."""

    http_status: int = 500
    error_type: str = "internal_error"
    code: int = -1


class ConfigError(MooncakeError):
    """An option, file or environment value is wrong; the text names it and the fix."""

    http_status = 400
    error_type = "invalid_request_error"
    code = -600


# --- requests (gateway) ---------------------------------------------------------------------------------------------


class BadRequest(MooncakeError):
    """The client's request is malformed or too long. `param` names the field (OpenAI error shape)."""

    http_status = 400
    error_type = "invalid_request_error"
    code = -600

    def __init__(self, message: str, *, param: str | None = None, error_code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.error_code = error_code


class Unauthorized(BadRequest):
    """Missing or unknown API key."""

    http_status = 401
    error_type = "authentication_error"


class ModelNotFound(BadRequest):
    """No instance serves that model name."""

    http_status = 404
    error_type = "not_found_error"


class BodyTooLarge(BadRequest):
    """The request body exceeds `max_body_bytes`."""

    http_status = 413


class Overloaded(MooncakeError):
    """Capacity exists but is contended now. `retry_after_s` comes from the Conductor's estimate."""

    http_status = 429
    error_type = "rate_limit_error"
    code = -1010

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoCapacity(MooncakeError):
    """No instance that could serve the request is alive."""

    http_status = 503
    error_type = "service_unavailable_error"
    code = -1010


class UpstreamFailed(MooncakeError):
    """A worker failed in a way that no retry could hide."""

    http_status = 502
    error_type = "upstream_error"


class DeadlineExceeded(MooncakeError):
    """The request's own deadline passed."""

    http_status = 504
    error_type = "timeout_error"
    code = -901


# --- transfer engine ------------------------------------------------------------------------------------------------


class TransferError(MooncakeError):
    """Root of what the transfer engine raises or reports."""

    code = -800


class TransferTimeout(TransferError):
    """The operation's deadline passed."""

    code = -901


class TransferCancelled(TransferError):
    """The batch was cancelled, or its group was fenced by the target."""


class PeerUnavailable(TransferError):
    """The peer cannot be reached, is gone, or is another instance than the one asked for."""

    code = -900


class LinkLost(PeerUnavailable):
    """The control connection broke before the answer came. That says nothing of the peer: dial again and ask again."""


class NotRegistered(TransferError):
    """An address range is not inside a registered memory region (of either side)."""

    code = -600


class RegionOverlap(TransferError):
    """A memory region overlaps another one without being equal to it."""

    code = -600


class InvalidHandle(TransferError):
    """A batch or segment handle was freed, doubled, or belongs to another engine."""

    code = -600


class DeviceError(TransferError):
    """The GPU driver refused or failed an operation on device memory."""


class ProtocolViolation(TransferError):
    """A peer sent bytes that the protocol does not allow."""


class AuthenticationFailed(TransferError):
    """The peer does not hold the cluster token, or the two do not accept each other's certificates."""


# --- store ----------------------------------------------------------------------------------------------------------


class StoreError(MooncakeError):
    """Root of what the Mooncake Store raises or reports."""


class ObjectNotFound(StoreError):
    http_status = 404
    code = -704


class ObjectExists(StoreError):
    code = -705


class NoSpace(StoreError):
    """Nothing more can be evicted: every block is in use or the object exceeds the pool."""

    code = -200


class StoreUnavailable(StoreError):
    """No store master answers (circuit open, or deadline passed)."""

    http_status = 503
    code = -900


# --- coordination ---------------------------------------------------------------------------------------------------


class RegistryUnavailable(MooncakeError):
    """etcd does not answer. Callers keep the last known picture."""

    http_status = 503
    code = -1000
