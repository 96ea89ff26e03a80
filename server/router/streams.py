"""Which child owns a resumable stream (`X-Conversation-Id`), and the routes that read, stop and look up streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.streams import asked_conversations, conversation_of, offset_of
from pyllama.server.errors import InvalidRequest, NotFound, Unavailable
from pyllama.server.json_codec import dump_json
from pyllama.server.responses import json_response, read_object
from pyllama.server.router.instance import Instance
from pyllama.server.stream_replay import SECONDS_AFTER_END, conversations_of

if TYPE_CHECKING:
    from pyllama.server.router.forward import Forwarder


class StreamOwner:
    """A stream's model and, once the request went on to it, its child. `passing`: the task that passes the answer on.

    is_answered: the child has begun to answer, so it knows the stream. is_stopped: a client wants no more of it.
    """

    def __init__(self, conversation: str, model: str) -> None:
        self.conversation = conversation
        self.model = model
        self.started_at = int(time.time())
        self.child: Instance | None = None
        self.passing: asyncio.Task[None] | None = None
        self.is_answered = False
        self.is_stopped = False

    def json(self) -> dict[str, Any]:
        """As long as no child can tell."""
        return {
            "conversation_id": self.conversation,
            "is_done": False,
            "total_bytes": 0,
            "started_at": self.started_at,
            "completed_at": 0,
        }


class StreamOwners:
    """The owners by conversation; forgotten when the child has forgotten the stream."""

    def __init__(self, seconds_after_end: float = SECONDS_AFTER_END) -> None:
        self._owners: dict[str, StreamOwner] = {}
        self._seconds_after_end = seconds_after_end

    def open(self, conversation: str, model: str) -> tuple[StreamOwner, StreamOwner | None]:
        """A new owner, and the one that the conversation had before."""
        before = self._owners.get(conversation)
        owner = self._owners[conversation] = StreamOwner(conversation, model)
        return owner, before

    def find(self, conversation: str) -> StreamOwner | None:
        return self._owners.get(conversation)

    def matching(self, conversations: Iterable[str]) -> list[StreamOwner]:
        asked = set(conversations)
        return [owner for name, owner in self._owners.items() if not asked.isdisjoint(conversations_of(name))]

    def forget(self, owner: StreamOwner) -> None:
        if self._owners.get(owner.conversation) is owner:
            del self._owners[owner.conversation]

    def has_ended(self, owner: StreamOwner) -> None:
        """The request is over: its stream can be read as long as the child keeps it."""
        if owner.is_answered and not owner.is_stopped:
            asyncio.get_running_loop().call_later(self._seconds_after_end, self.forget, owner)
        else:
            self.forget(owner)


def _forwarder(http: Request) -> Forwarder:
    forwarder: Forwarder = http.app.state.server.forwarder
    return forwarder


async def read_stream(http: Request) -> Any:
    """Handed to the child that has it."""
    owner = _forwarder(http).owners.find(conversation_of(http))
    offset_of(http)
    if owner is None:
        raise NotFound
    if not owner.is_answered:
        raise Unavailable("Stream owner model is loading, retry later")
    if owner.child is None or not owner.child.is_loaded:  # its buffers went with the process
        _forwarder(http).owners.forget(owner)
        raise NotFound
    return _forwarder(http).to_model(owner.model)


async def stop_stream(http: Request) -> Response:
    forwarder = _forwarder(http)
    owner = forwarder.owners.find(conversation_of(http))
    if owner is not None:
        await forwarder.stop_stream(owner)
    return Response(status_code=204)


async def lookup_streams(http: Request) -> Response:
    forwarder = _forwarder(http)
    owners = forwarder.owners.matching(asked_conversations(await read_object(http)))
    found = {owner.conversation: owner.json() for owner in owners if not owner.is_answered}
    children: dict[int, tuple[Instance, list[str]]] = {}
    for owner in owners:
        if owner.is_answered and owner.child is not None and owner.child.is_loaded:
            children.setdefault(owner.child.port, (owner.child, []))[1].append(owner.conversation)
    answers = await asyncio.gather(
        *(
            forwarder.ask(child, "POST", "/v1/streams/lookup", dump_json({"conversation_ids": names}))
            for child, names in children.values()
        )
    )
    for answer in answers:
        if answer is not None:
            found |= {stream["conversation_id"]: stream for stream in answer}
    return json_response([found[owner.conversation] for owner in owners if owner.conversation in found])


def cancelled_while_waiting() -> InvalidRequest:
    """What the request gets whose stream was stopped before a child had it."""
    return InvalidRequest("the request was cancelled")
