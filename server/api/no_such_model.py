"""Routes for kinds of models that cannot be loaded here: they say so, as llama-server does where another kind runs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.errors import NotSupported


async def transcribe(http: Request) -> Response:
    raise NotSupported("The current model does not support audio input.")


async def decide(http: Request) -> Response:
    raise NotSupported("This model is not a decision model")
