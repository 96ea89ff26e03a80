"""What a client sees when something goes wrong: the one table from exception to HTTP status, error type and body."""

from __future__ import annotations

from typing import Any

from pyllama import errors as engine_errors


class RequestError(Exception):
    """A request that ends with an error body. `fields` are added to the error object."""

    def __init__(self, message: str, **fields: int) -> None:
        super().__init__(message)
        self.fields = fields


class InvalidRequest(RequestError):
    """The client sent something wrong."""


class ExceedsContext(RequestError):
    """The prompt leaves no room for one token in a slot."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens), "
            "try increasing it",
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=n_ctx,
        )


class InputTooLarge(ExceedsContext):
    """A text to embed, or a query with its document, has more tokens than a slot."""

    def __init__(self, n_tokens: int, n_ctx: int) -> None:
        RequestError.__init__(
            self,
            f"input ({n_tokens} tokens) is too large to process: "
            f"it is larger than the max context size ({n_ctx} tokens)",
            n_prompt_tokens=n_tokens,
            n_ctx=n_ctx,
        )


class Unauthorized(RequestError):
    def __init__(self) -> None:
        super().__init__("Invalid API Key")


class FeatureDisabled(RequestError):
    """An experimental route that is off, or not for whoever asks."""

    def __init__(self, message: str = "this feature is disabled") -> None:
        super().__init__(message)


class NotFound(RequestError):
    def __init__(self) -> None:
        super().__init__("File Not Found")


class RequestTimeout(RequestError):
    """The body took longer than `--timeout`."""


class TooLarge(RequestError):
    """The request body passes the size limit."""


class ServerFault(RequestError):
    """A failure that llama-server reports as its own, also where the client caused it (kept for compatibility)."""


class NotSupported(RequestError):
    """The feature is disabled, absent in the model, or not built yet."""


class Unavailable(RequestError):
    """Not now: loading, queue full, no idle slot. The response says when to come back."""


class QueueFull(Unavailable):
    """Too many requests wait already."""


# First match wins, so subclasses stand before their bases. Columns: exception, HTTP status, error type.
ERRORS: tuple[tuple[type[BaseException], int, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error"),
    (ExceedsContext, 400, "exceed_context_size_error"),
    (Unauthorized, 401, "authentication_error"),
    (FeatureDisabled, 403, "feature_disabled"),
    (NotFound, 404, "not_found_error"),
    (RequestTimeout, 408, "invalid_request_error"),
    (TooLarge, 413, "invalid_request_error"),
    (ServerFault, 500, "server_error"),
    (NotSupported, 501, "not_supported_error"),
    (Unavailable, 503, "unavailable_error"),
    (engine_errors.TemplateError, 400, "invalid_request_error"),
    (engine_errors.TokenizerError, 400, "invalid_request_error"),
    (engine_errors.InvalidArgument, 400, "invalid_request_error"),
    (engine_errors.ContextFull, 500, "server_error"),
    (engine_errors.OutOfMemory, 500, "server_error"),
    (Exception, 500, "server_error"),
)

# These two are written by the HTTP layer in another key order than the rest.
MESSAGE_FIRST = (Unauthorized, NotFound)


def error_status(error: BaseException) -> tuple[int, str]:
    """HTTP status and error type of an exception."""
    for kind, status, type_name in ERRORS:
        if isinstance(error, kind):
            return status, type_name
    return 500, "server_error"


def error_headers(error: BaseException) -> dict[str, str]:
    """Extra response headers of an error."""
    return {"Retry-After": "1"} if isinstance(error, Unavailable) else {}


def error_body(error: BaseException) -> dict[str, Any]:
    """The JSON body; its `code` is the HTTP status."""
    status, type_name = error_status(error)
    message = str(error) or type(error).__name__
    if isinstance(error, FeatureDisabled):
        return {"error": {"message": message, "type": type_name}}
    if isinstance(error, MESSAGE_FIRST):
        return {"error": {"message": message, "type": type_name, "code": status}}
    body: dict[str, Any] = {"code": status, "message": message, "type": type_name}
    if isinstance(error, RequestError):
        body.update(error.fields)
    return {"error": body}
