"""One file: resumed, verified, put in place whole, whatever the server does."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyllama.download import transfer
from pyllama.download.fetch import fetch
from pyllama.download.hub import RemoteFile
from pyllama.download.progress import Lines
from pyllama.download.session import Cancelled, Patience, Session, Unreachable
from pyllama.download.transfer import Job
from pyllama.errors import DownloadError
from support.hub_server import GOOD, Answer, HubServer, cut, running_hub, sha256

QUICK = Patience(attempts=4, timeout=1.0, first_pause=0.001, longest_pause=2.0)
DATA = b"GGUF" + random.Random(1).randbytes(300_000)
NEW_DATA = b"GGUF" + random.Random(2).randbytes(300_000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with running_hub() as server:
        server.urls["/m.gguf"] = DATA
        yield server


class Get:
    """`get()` fetches /m.gguf into `target` as one run of a program would, with `lines` as its output."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub = hub
        self.target = folder / "m.gguf"
        self.partial = folder / "m.gguf.partial"
        self.record = folder / ".m.gguf.json"
        self.lines: list[str] = []

    def __call__(self, *, patience: Patience = QUICK, knows: bool = True, data: bytes = DATA) -> None:
        """knows: size and checksum are known beforehand, as from a hub."""
        known: dict[str, Any] = {"size": len(data), "sha256": sha256(data)} if knows else {}
        remote = RemoteFile("m.gguf", self.hub.endpoint + "/m.gguf", **known)
        with Session(patience) as session:
            fetch([Job(remote, self.target)], session, Lines(self.lines.append))

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("range") for headers in self.hub.file_requests()]


@pytest.fixture
def get(hub: HubServer, tmp_path: Path) -> Get:
    return Get(hub, tmp_path)


ONCE = Patience(attempts=1, timeout=1.0, first_pause=0.0)
both = pytest.mark.parametrize("knows", [True, False], ids=["known", "unknown"])


# ------------------------------------------------------------------------------------------------ the good case


@both
def test_a_file_arrives_whole_and_leaves_no_partial_file(get: Get, knows: bool) -> None:
    get(knows=knows)
    assert get.target.read_bytes() == DATA
    assert not get.partial.exists()
    assert get.lines[-1] == "m.gguf: complete, 300.0 kB"


def test_a_finished_file_is_known_without_a_request(get: Get) -> None:
    get()
    get()
    assert len(get.ranges) == 1


def test_an_unknown_file_of_the_right_content_is_adopted_and_of_another_replaced(get: Get) -> None:
    get.target.write_bytes(DATA)
    get()
    assert get.ranges == []
    get.target.write_bytes(NEW_DATA)
    get()
    assert get.target.read_bytes() == DATA


def test_a_file_changed_by_the_user_after_the_download_is_fetched_again(get: Get) -> None:
    get()
    get.target.write_bytes(NEW_DATA)
    get()
    assert get.target.read_bytes() == DATA


def test_a_url_is_asked_for_changes_and_not_fetched_again_without(get: Get) -> None:
    get(knows=False)
    get(knows=False)
    assert get.hub.file_requests()[1]["if-none-match"].startswith('"')
    get.hub.urls["/m.gguf"] = NEW_DATA
    get(knows=False)
    assert get.target.read_bytes() == NEW_DATA


@pytest.mark.parametrize("validator", [{"Last-Modified": "Sun, 29 Nov 2026 10:00:00 GMT"}, {"ETag": 'W/"weak"'}, {}])
def test_halves_of_different_files_are_never_joined(get: Get, validator: dict[str, str | None]) -> None:
    get.hub.answers = [cut(100_000, etag=False, headers=validator)]
    with pytest.raises(Unreachable):
        get(patience=ONCE, knows=False)
    get.hub.urls["/m.gguf"] = NEW_DATA
    get.hub.answer = Answer(etag=False, headers=dict.fromkeys(validator, "Sun, 29 Nov 2026 11:00:00 GMT"))
    get(knows=False)
    assert get.target.read_bytes() == NEW_DATA


def test_a_date_of_change_is_enough_to_resume_and_to_keep_a_file(get: Get) -> None:
    date = {"Last-Modified": "Sun, 29 Nov 2026 10:00:00 GMT"}
    get.hub.answer = Answer(etag=False, headers=dict(date))
    get.hub.answers = [cut(100_000, etag=False, headers=dict(date))]
    get(knows=False)
    get(knows=False)
    assert get.ranges == [None, "bytes=100000-", None]
    last = get.hub.file_requests()[-1]
    assert last["if-modified-since"] == date["Last-Modified"]
    assert not any("complete" in line for line in get.lines[:-2])


def test_a_url_file_is_used_as_it_is_while_the_server_fails(get: Get) -> None:
    get(knows=False)
    get.hub.answer = Answer(status=503)
    get(knows=False)
    assert get.target.read_bytes() == DATA
    assert any("using the file that is here" in line for line in get.lines)


# ------------------------------------------------------------------------------------------------ cut connections


@both
def test_a_cut_connection_is_resumed_where_it_ended(get: Get, knows: bool) -> None:
    get.hub.answers = [cut(100_000), cut(50_000)]
    get(knows=knows)
    assert get.target.read_bytes() == DATA
    assert get.ranges == [None, "bytes=100000-", "bytes=150000-"]


@both
def test_the_next_run_resumes_too(get: Get, knows: bool) -> None:
    get.hub.answers = [cut(100_000)]
    with pytest.raises(Unreachable, match="after 1 attempts"):
        get(patience=ONCE, knows=knows)
    assert get.partial.read_bytes() == DATA[:100_000]
    get(knows=knows)
    assert get.target.read_bytes() == DATA
    assert get.ranges == [None, "bytes=100000-"]


def test_a_partial_file_of_unknown_origin_is_not_trusted(get: Get) -> None:
    get.partial.write_bytes(NEW_DATA[:1000])
    get()
    assert get.target.read_bytes() == DATA
    assert get.ranges == [None]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 1, "more": 2}', "\0"])
def test_an_unreadable_record_costs_a_new_start_only(get: Get, text: str) -> None:
    get.partial.write_bytes(DATA[:1000])
    get.record.write_text(text)
    get()
    assert get.target.read_bytes() == DATA


def test_a_complete_partial_file_needs_no_request(get: Get) -> None:
    get.hub.answers = [cut(len(DATA) - 1)]
    with pytest.raises(Unreachable):
        get(patience=ONCE)
    get.partial.write_bytes(DATA)
    get()
    assert get.target.read_bytes() == DATA
    assert len(get.ranges) == 1


def test_failures_do_not_add_up_while_there_is_progress(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllama.download.session.PROGRESS_BYTES", 10_000)
    get.hub.answer = cut(16_384)
    get()
    assert get.target.read_bytes() == DATA
    assert len(get.ranges) > 10


def test_a_server_that_ignores_ranges_and_always_cuts_ends_in_an_error(
    get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama.download.session.PROGRESS_BYTES", 10_000)
    get.hub.answer = cut(100_000, ignores_ranges=True)
    with pytest.raises(Unreachable):
        get()
    assert len(get.ranges) <= 2 * QUICK.attempts
    get.hub.answer = GOOD
    get()
    assert get.target.read_bytes() == DATA


@both
def test_a_stalled_connection_is_given_up_and_resumed(get: Get, knows: bool) -> None:
    get.hub.answers = [Answer(seconds_per_block=0.4)]
    get(knows=knows, patience=Patience(attempts=3, timeout=0.2, first_pause=0.001))
    assert get.target.read_bytes() == DATA
    assert get.ranges[1] is not None


def test_a_slow_server_is_waited_for(get: Get) -> None:
    get.hub.answers = [Answer(seconds_per_block=0.02)]
    get()
    assert len(get.ranges) == 1


# ------------------------------------------------------------------------------------------------ strange answers


@both
def test_a_server_that_ignores_ranges_sends_everything_again(get: Get, knows: bool) -> None:
    get.hub.answers = [cut(100_000), Answer(ignores_ranges=True)]
    get(knows=knows)
    assert get.target.read_bytes() == DATA


@both
@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Range": "bytes 5-300003/300004"},
        {"Content-Range": "bytes 100000-5/300004"},
        {"Content-Range": "nonsense"},
        {"Content-Range": None},
        {"Content-Range": "bytes 100000-300003/7"},
    ],
)
def test_a_wrong_content_range_starts_over(get: Get, knows: bool, headers: dict[str, str | None]) -> None:
    get.hub.answers = [cut(100_000), Answer(headers=headers)]
    get(knows=knows)
    assert get.target.read_bytes() == DATA
    assert get.ranges[2] is None


def test_a_range_with_other_bytes_than_it_says_is_found_by_the_checksum(get: Get) -> None:
    shifted = {"Content-Range": f"bytes 100000-{len(DATA) - 1}/{len(DATA)}"}
    body = DATA[100_007:] + b"\0" * 7
    get.hub.answers = [cut(100_000), Answer(headers=shifted, body=body)]
    get()
    assert get.target.read_bytes() == DATA


@both
def test_a_range_that_cannot_be_had_starts_over(get: Get, knows: bool) -> None:
    get.hub.answers = [cut(100_000), Answer(status=416, headers={"Content-Range": "bytes */300004"}, body=b"")]
    get(knows=knows)
    assert get.target.read_bytes() == DATA


def test_416_for_ever_ends_in_an_error(get: Get) -> None:
    get.hub.answer = Answer(status=416, body=b"")
    with pytest.raises(DownloadError, match="no such range"):
        get()


def test_a_wrong_length_is_an_error_that_keeps_what_came(get: Get) -> None:
    get.hub.answers = [cut(100_000)]
    get.hub.answer = Answer(body=DATA[:-5], ignores_ranges=True)
    with pytest.raises(DownloadError, match="has 299999 bytes, 300004 are expected"):
        get()
    assert get.partial.stat().st_size == 100_000
    get.hub.answer = GOOD
    get()
    assert get.target.read_bytes() == DATA


@pytest.mark.parametrize(("length", "knows"), [("300000", True), ("400000", True), ("400000", False)])
def test_a_length_that_is_a_lie_gives_no_file(get: Get, length: str, knows: bool) -> None:
    get.hub.answer = Answer(headers={"Content-Length": length})
    with pytest.raises(DownloadError):
        get(knows=knows, patience=Patience(attempts=2, timeout=0.3, first_pause=0.001))
    assert not get.target.exists()
    get.hub.answer = GOOD
    get()
    assert get.target.read_bytes() == DATA


def test_more_bytes_than_expected_are_refused(get: Get) -> None:
    headers = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    get.hub.answer = Answer(headers=headers, body=DATA + b"!")
    with pytest.raises(DownloadError, match="more than the 300004 bytes"):
        get()
    assert not get.target.exists()


def test_a_file_without_a_stated_length_is_taken_in_chunks_only(get: Get) -> None:
    get.hub.answers = [Answer(headers={"Content-Length": None, "Connection": "close"})]
    with pytest.raises(DownloadError, match="how long"):
        get(knows=False)
    get.hub.answers = [Answer(headers={"Content-Length": None, "Transfer-Encoding": "chunked"})]
    get(knows=False)
    assert get.target.read_bytes() == DATA


def test_a_cut_file_in_chunks_is_not_taken_for_complete(get: Get) -> None:
    headers = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    get.hub.answers = [cut(100_000, headers=headers)]
    get(knows=False)
    assert get.target.read_bytes() == DATA


@both
@pytest.mark.parametrize(
    "headers", [{"Content-Type": "text/html; charset=utf-8"}, {"Content-Encoding": "gzip"}], ids=["html", "gzip"]
)
def test_a_web_page_or_packed_data_is_not_the_file(get: Get, knows: bool, headers: dict[str, str]) -> None:
    get.hub.answer = Answer(headers=dict(headers), body=b"<html>Log in</html>")
    with pytest.raises(DownloadError, match="not the file"):
        get(knows=knows)
    assert not get.target.exists()


def test_what_is_not_gguf_is_refused_where_no_checksum_is_known(get: Get) -> None:
    get.hub.urls["/m.gguf"] = b'{"message": "quota exceeded"}'
    with pytest.raises(DownloadError, match="not a GGUF file"):
        get(knows=False)
    assert not get.target.exists()


def test_a_wrong_checksum_starts_over_once_and_then_is_an_error(get: Get) -> None:
    get.hub.answers = [Answer(body=NEW_DATA)]
    get()
    assert get.target.read_bytes() == DATA
    get.target.unlink()
    get.hub.answer = Answer(body=NEW_DATA)
    with pytest.raises(DownloadError, match="sha256 is"):
        get()
    assert not get.target.exists()
    assert get.partial.stat().st_size == 0


# ------------------------------------------------------------------------------------------------ statuses


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, r"access denied \(401\).*HF_TOKEN"), (403, "access denied"), (404, "not found"), (418, "418")],
)
def test_a_refusal_is_one_request_and_one_error(get: Get, status: int, message: str) -> None:
    get.hub.answers = [Answer(status=status, body=b"no")]
    with pytest.raises(DownloadError, match=message):
        get()
    assert len(get.ranges) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_in_trouble_is_asked_again(get: Get, status: int) -> None:
    get.hub.answers = [Answer(status=status, body=b"")] * 2
    get()
    assert get.target.read_bytes() == DATA


def test_a_server_that_stays_in_trouble_ends_in_an_error(get: Get) -> None:
    get.hub.answer = Answer(status=500, body=b"")
    with pytest.raises(Unreachable, match=r"500 Internal Server Error \(after 4 attempts\)"):
        get()


@pytest.mark.parametrize("text", ["1", lambda: formatdate(time.time() + 2, usegmt=True)])
def test_retry_after_is_honoured(get: Get, text: str | Callable[[], str]) -> None:
    text = text if isinstance(text, str) else text()
    get.hub.answers = [Answer(status=429, headers={"Retry-After": text}, body=b"")]
    start = time.monotonic()
    get()
    assert 0.9 < time.monotonic() - start < 2.5


def test_a_server_that_asks_for_too_long_a_pause_ends_in_an_error(get: Get) -> None:
    get.hub.answers = [Answer(status=503, headers={"Retry-After": "3600"}, body=b"")]
    with pytest.raises(Unreachable, match="come back in 3600 s"):
        get()


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path, hub: HubServer) -> None:
    get = Get(hub, tmp_path)
    hub.close()
    with pytest.raises(Unreachable, match="refused"):
        get()


# ------------------------------------------------------------------------------------------------ changed files


@both
def test_a_file_that_changes_between_attempts_is_fetched_anew(get: Get, knows: bool) -> None:
    get.hub.answers = [cut(100_000)]
    with pytest.raises(Unreachable):
        get(patience=ONCE, knows=knows)
    get.hub.urls["/m.gguf"] = NEW_DATA
    get(knows=knows, data=NEW_DATA)
    assert get.target.read_bytes() == NEW_DATA
    assert len(get.ranges) == 2  # a known change is not even asked about


def test_the_rest_of_an_old_file_never_makes_it_the_new_one(get: Get) -> None:
    get.hub.answers = [cut(100_000)]
    with pytest.raises(Unreachable):
        get(patience=ONCE)
    with pytest.raises(DownloadError, match="sha256 is"):  # the hub tells of a new file, the server has the old one
        get(data=NEW_DATA)
    assert not get.target.exists()


def test_a_changed_file_is_noticed_by_a_server_that_does_not_know_if_range(get: Get) -> None:
    get.hub.answers = [cut(100_000)]
    with pytest.raises(Unreachable):
        get(patience=ONCE, knows=False)
    get.hub.urls["/m.gguf"] = NEW_DATA
    rest = {"Content-Range": f"bytes 100000-{len(NEW_DATA) - 1}/{len(NEW_DATA)}"}
    get.hub.answers = [Answer(status=206, headers=rest, body=NEW_DATA[100_000:])]
    get(knows=False)
    assert get.target.read_bytes() == NEW_DATA


def test_a_file_that_differs_from_what_the_hub_says_is_an_error(get: Get) -> None:
    get.hub.urls["/m.gguf"] = NEW_DATA
    with pytest.raises(DownloadError, match="expected"):
        get()
    assert not get.target.exists()


def test_an_update_replaces_the_old_file_only_when_it_is_whole(get: Get) -> None:
    get()
    get.hub.urls["/m.gguf"] = NEW_DATA
    get.hub.answers = [cut(1000)]
    with pytest.raises(Unreachable):
        get(patience=ONCE, data=NEW_DATA)
    assert get.target.read_bytes() == DATA
    get(data=NEW_DATA)
    assert get.target.read_bytes() == NEW_DATA


# ------------------------------------------------------------------------------------------------ disk and processes


def test_a_full_disk_is_noticed_before_anything_is_sent(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=299_999))
    with pytest.raises(DownloadError, match=r"300\.0 kB are needed and 300\.0 kB are free"):
        get()
    assert get.ranges == []


def test_a_full_disk_is_noticed_where_the_server_tells_the_size(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match="are free"):
        get(knows=False)


def test_a_resumed_file_needs_room_for_the_rest_only(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    get.hub.answers = [cut(100_000)]
    with pytest.raises(Unreachable):
        get(patience=ONCE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_004))
    get()
    assert get.target.read_bytes() == DATA


def test_a_disk_that_fills_up_is_an_error_and_the_download_resumes(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    append = transfer._Partial.append

    def failing(self: Any, chunk: bytes) -> None:
        if self.size > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(transfer._Partial, "append", failing)
        with pytest.raises(DownloadError, match="No space left"):
            get()
    get()
    assert get.target.read_bytes() == DATA
    assert get.ranges[1] is not None


def test_several_files_come_at_once_and_a_failure_stops_the_rest_resumably(hub: HubServer, tmp_path: Path) -> None:
    jobs = []
    for index in range(6):
        hub.urls[f"/{index}.gguf"] = DATA
        remote = RemoteFile(f"{index}.gguf", f"{hub.endpoint}/{index}.gguf", len(DATA), sha256(DATA))
        jobs.append(Job(remote, tmp_path / f"{index}.gguf"))
    missing = Job(RemoteFile("x.gguf", hub.endpoint + "/x.gguf", 5, "0" * 64), tmp_path / "x.gguf")
    hub.answer = Answer(seconds_per_block=0.02)
    with Session(QUICK) as session, pytest.raises(DownloadError, match=r"x\.gguf: not found"):
        fetch([*jobs[:3], missing, *jobs[3:]], session, Lines(lambda line: None))
    hub.answer = GOOD
    with Session(QUICK) as session:
        fetch([*jobs, *jobs], session, Lines(lambda line: None))
    assert all(job.target.read_bytes() == DATA for job in jobs)


def test_a_cancelled_session_starts_nothing(hub: HubServer, tmp_path: Path) -> None:
    with Session(QUICK) as session:
        session.cancel()
        with pytest.raises(Cancelled):
            fetch([Job(RemoteFile("m", hub.endpoint + "/m.gguf"), tmp_path / "m")], session, Lines(print))
    assert hub.file_requests() == []


def test_two_downloads_of_one_file_at_once_send_it_once(hub: HubServer, tmp_path: Path) -> None:
    hub.answer = Answer(seconds_per_block=0.01)
    first, second = Get(hub, tmp_path), Get(hub, tmp_path)
    threads = [threading.Thread(target=get) for get in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.target.read_bytes() == DATA
    assert len(first.ranges) == 1
    assert any("waiting" in line for line in first.lines + second.lines)


# Forks a process for each line of its input, so that twenty of them need not wait for twenty imports.
PROGRAM = """
import json, os, sys
from pathlib import Path
from pyllama.download.fetch import fetch
from pyllama.download.hub import RemoteFile
from pyllama.download.progress import Lines
from pyllama.download.session import Session
from pyllama.download.transfer import Job
job = Job(RemoteFile(**json.loads(sys.argv[1])), Path(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    if (process := os.fork()) == 0:
        with Session() as session:
            fetch([job], session, Lines(lambda text: None))
        os._exit(0)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Downloads:
    """Processes that fetch /m.gguf to `target`, one after the other."""

    def __init__(self, hub: HubServer, target: Path) -> None:
        data = hub.urls["/m.gguf"]
        remote = {"path": "m.gguf", "url": hub.endpoint + "/m.gguf", "size": len(data), "sha256": sha256(data)}
        command = [sys.executable, "-c", PROGRAM, json.dumps(remote), str(target)]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._input, self._output = self._parent.stdin, self._parent.stdout
        self._output.readline()

    def start(self) -> int:
        """The id of a new process."""
        print(file=self._input, flush=True)
        return int(self._output.readline())

    def wait(self) -> int:
        """The exit code of the process that was started last; minus the signal that killed it."""
        return int(self._output.readline())

    def close(self) -> None:
        self._input.close()
        self._parent.wait(10)
        self._output.close()


def test_two_processes_at_once_make_one_right_file(hub: HubServer, tmp_path: Path) -> None:
    hub.answer = Answer(seconds_per_block=0.01)
    both = [Downloads(hub, tmp_path / "m.gguf") for _ in range(2)]
    for downloads in both:
        downloads.start()
    assert [downloads.wait() for downloads in both] == [0, 0]
    for downloads in both:
        downloads.close()
    assert (tmp_path / "m.gguf").read_bytes() == DATA
    assert len(hub.file_requests()) == 1


def test_a_program_killed_at_any_moment_leaves_what_the_next_one_completes(hub: HubServer, tmp_path: Path) -> None:
    """Twenty kills of one download: half of them while it starts, half after new bytes have come."""
    data = b"GGUF" + random.Random(3).randbytes(5_000_000)
    hub.urls["/m.gguf"] = data
    hub.answer = Answer(seconds_per_block=0.005)
    target, partial = tmp_path / "m.gguf", tmp_path / "m.gguf.partial"
    downloads, chance = Downloads(hub, target), random.Random(4)

    def size() -> int:
        return partial.stat().st_size if partial.exists() else 0

    for index in range(20):
        before = size()
        process = downloads.start()
        while index % 2 and size() <= before and not target.exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process, signal.SIGKILL)
        assert downloads.wait() in (-signal.SIGKILL, 0)
        assert not target.exists() or target.read_bytes() == data
    hub.answer = GOOD
    downloads.start()
    assert downloads.wait() == 0
    downloads.close()
    assert target.read_bytes() == data
    assert sum("range" in headers for headers in hub.file_requests()) >= 9
    assert {path.name for path in tmp_path.iterdir()} <= {"m.gguf", ".m.gguf.json", ".m.gguf.lock"}
