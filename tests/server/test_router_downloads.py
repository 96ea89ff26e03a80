"""Downloads of a router: what is told while they run, what refuses to start, how they fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pyllama.errors import DownloadError
from pyllama.server.errors import InvalidRequest, ServerFault
from pyllama.server.router.downloads import Downloads


class Source:
    """Stands for the hub: a model comes with two lines of progress when `go` is set, and fails with `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.error = error

    def repository_model(self, name: str) -> Any:
        if name == "user/none":
            raise DownloadError("user/none is not there")
        return self

    def fetch(self, write: Callable[[str], None]) -> None:
        assert self.go.wait(10)
        write("half")
        write("whole")
        if self.error is not None:
            raise self.error


def told(source: Source, *, on_change: Callable[[], None] = lambda: None) -> list[tuple[str, str, Any]]:
    """The events of one download, to its end."""
    events: list[tuple[str, str, Any]] = []

    async def scene() -> None:
        downloads = Downloads(source, lambda *event: events.append(event), on_change)  # type: ignore[arg-type]
        await downloads.start("user/m:Q8_0")
        assert downloads.names == {"user/m:Q8_0"}
        with pytest.raises(InvalidRequest, match="is being downloaded already"):
            await downloads.start("user/m:Q8_0")
        with pytest.raises(InvalidRequest, match="user/none is not there"):
            await downloads.start("user/none")
        source.go.set()
        while downloads.names:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert {name for name, _, _ in events} == {"user/m:Q8_0"}
    return events


@pytest.mark.contract("own 32")
def test_a_download_is_told_from_its_beginning_to_its_end() -> None:
    changes: list[int] = []
    events = told(Source(), on_change=lambda: changes.append(1))
    assert [(event, data) for _, event, data in events] == [
        ("status_change", {"status": "downloading"}),
        ("download_progress", {"text": "half"}),
        ("download_progress", {"text": "whole"}),
        ("status_change", {"status": "downloaded"}),
        ("download_finished", {}),
    ]
    assert changes == [1]


@pytest.mark.parametrize("error", [DownloadError("cut off"), OSError("disk full")])
def test_a_download_that_fails_says_why_and_changes_nothing(error: Exception) -> None:
    events = told(Source(error), on_change=lambda: pytest.fail("nothing has changed"))
    assert events[-1][1:] == ("download_failed", {"error": str(error)})
    assert "download_finished" not in [event for _, event, _ in events]


def test_a_list_that_cannot_be_read_again_does_not_hide_the_end() -> None:
    def broken() -> None:
        raise ServerFault("the preset file is wrong now")

    assert told(Source(), on_change=broken)[-1][1] == "download_finished"
