"""One file from a URL to a path: resumed where an earlier run stopped, verified, put in place whole.

Beside `NAME` live, while they are needed: `NAME.partial`, the bytes so far; `.NAME.json`, a `Record` of the file that
they belong to, kept afterwards so that a finished file is known without reading it again; `.NAME.lock`.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from filelock import FileLock, Timeout

from pyllama.errors import DownloadError

from .hub import RemoteFile
from .progress import Report, bytes_text
from .session import NO_ACCESS, Access, Session, Transient, Unreachable, shown

HASH_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Fetch `remote` to `target`."""

    remote: RemoteFile
    target: Path
    access: Access = NO_ACCESS

    @property
    def name(self) -> str:
        """What the user sees: the target may be named after a checksum."""
        return self.remote.path

    @property
    def partial(self) -> Path:
        return self.target.with_name(f"{self.target.name}.partial")


@dataclass(frozen=True, slots=True)
class Record:
    """Which file the bytes beside it are. validator: strong ETag or date of change. mtime_ns: of the finished file."""

    url: str
    size: int | None = None
    sha256: str | None = None
    validator: str | None = None
    mtime_ns: int = 0

    def is_of(self, remote: RemoteFile) -> bool:
        """Whether the bytes may belong to `remote`, by what is known of it."""
        if remote.size is not None and self.size not in (None, remote.size):
            return False
        if remote.sha256 is not None and self.sha256 is not None:
            return self.sha256 == remote.sha256
        return self.url == remote.url


def download(job: Job, session: Session, report: Report) -> None:
    """Make `job.target` the file that `job.remote` is. Waits when another process does the same.

    Raises DownloadError; what has come stays in the partial file for the next run.
    """
    job.target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(job, session, report):
            _Download(job, session, report).run()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(f"{job.partial}: {error.strerror}; the download resumes when there is room") from None
        raise


def missing_bytes(job: Job) -> int:
    """What is still to come, as far as it is known without asking."""
    if job.remote.size is None or (job.target.exists() and job.target.stat().st_size == job.remote.size):
        return 0
    have = job.partial.stat().st_size if job.partial.exists() else 0
    return max(0, job.remote.size - have)


def require_space(directory: Path, needed: int) -> None:
    """Raises DownloadError when the file system of `directory` has fewer than `needed` bytes left."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise DownloadError(f"{directory}: {bytes_text(needed)} are needed and {bytes_text(free)} are free")


@contextlib.contextmanager
def _locked(job: Job, session: Session, report: Report) -> Iterator[None]:
    lock = FileLock(job.target.with_name(f".{job.target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report.note(f"{job.name}: another process is fetching it; waiting")
        while not lock.is_locked:
            session.check_cancelled()
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0.2)
    try:
        yield
    finally:
        lock.release()


class _Download:
    """State of one download while its lock is held."""

    def __init__(self, job: Job, session: Session, report: Report) -> None:
        self._job, self._session, self._report = job, session, report
        self._remote, self._target = job.remote, job.target
        self._record_path = self._target.with_name(f".{self._target.name}.json")
        self._use_ranges = True
        self._mismatches = 0

    def run(self) -> None:
        record = _read_record(self._record_path)
        if self._target.exists() and self._is_finished(record):
            self._report.finish(self._job.name, self._target.stat().st_size)
            return
        if record is None or record.mtime_ns or not record.is_of(self._remote):
            self._job.partial.unlink(missing_ok=True)
            record = None
        self._record = record or Record(self._remote.url, self._remote.size, self._remote.sha256)
        with _Partial(self._job.partial, self._watch) as partial:
            self._partial = partial
            self._session.retry(self._remote.url, self._attempt, progress=lambda: partial.reached)
        self._report.finish(self._job.name, self._target.stat().st_size)

    def _is_finished(self, record: Record | None) -> bool:
        """Whether the target is the remote file already."""
        status, remote = self._target.stat(), self._remote
        if record is not None and (record.size, record.mtime_ns) != (status.st_size, status.st_mtime_ns):
            record = None
        if remote.sha256 is None:
            return record is not None and record.url == remote.url and self._is_unchanged(record)
        if remote.size not in (None, status.st_size):
            return False
        if record is not None and record.sha256 is not None:
            return record.sha256 == remote.sha256
        with self._target.open("rb") as file:
            if _hash(file, self._watch).hexdigest() != remote.sha256:
                return False
        self._write_record(Record(remote.url, status.st_size, remote.sha256, mtime_ns=status.st_mtime_ns))
        return True

    def _watch(self, n_bytes: int) -> None:
        """Bytes that are here already are being read."""
        self._session.check_cancelled()
        self._report.update(self._job.name, n_bytes, self._remote.size)

    def _is_unchanged(self, record: Record) -> bool:
        """Ask the server. If it cannot be asked, what is there must do."""
        headers = {"Accept-Encoding": "identity"}
        if record.validator is not None:
            condition = "If-None-Match" if record.validator.startswith('"') else "If-Modified-Since"
            headers[condition] = record.validator

        def ask() -> bool:
            with self._session.open(self._remote.url, headers, self._job.access) as response:
                if response.status_code == 304:
                    return True
                is_same_size = _announced(response) in (None, record.size)
                return is_same_size and _validator(response) == record.validator

        try:
            return self._session.retry(self._remote.url, ask, attempts=2)
        except Unreachable as error:
            self._report.note(f"{error}; using the file that is here")
            return True

    def _attempt(self) -> None:
        """Fetch what is missing and put the file in place."""
        partial, record = self._partial, self._record
        if record.size is None or partial.size != record.size:
            headers = {"Accept-Encoding": "identity"}
            if partial.size and self._use_ranges and (record.sha256 or record.validator):
                headers["Range"] = f"bytes={partial.size}-"
                if record.sha256 is None and record.validator is not None:
                    headers["If-Range"] = record.validator
            with self._session.open(self._remote.url, headers, self._job.access) as response:
                self._begin(response)
                self._receive(response)
        self._finish()

    def _begin(self, response: httpx.Response) -> None:
        """Check what the response claims to be, and set the partial file to where its first byte belongs."""
        where, partial = shown(self._remote.url), self._partial
        if response.status_code == 416:
            self._start_over("the server has no such range")
        encoding = response.headers.get("content-encoding", "identity")
        kind = response.headers.get("content-type", "")
        if response.status_code == 304 or encoding != "identity" or kind.startswith("text/html"):
            raise DownloadError(f"{where}: the answer is {kind or 'something'} ({encoding}), not the file")
        announced = _announced(response)
        if response.status_code == 206:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("content-range", ""))
            if found is None or int(found[1]) != partial.size or int(found[2]) < int(found[1]):
                self._use_ranges = False
                self._start_over("the server sent another range than was asked for")
            if not self._is_same(response):
                self._start_over("the file has changed on the server")
            return
        expected = self._remote.size if self._remote.size is not None else _linked_size(response)
        if None not in (expected, announced) and announced != expected:
            raise DownloadError(f"{where}: the server has {announced} bytes, {expected} are expected")
        size = expected if expected is not None else announced
        if size is None and response.headers.get("transfer-encoding", "").lower() != "chunked":
            raise DownloadError(f"{where}: the server does not say how long the file is")
        sha256 = self._remote.sha256 or _linked_sha256(response)
        partial.restart()
        self._record = Record(self._remote.url, size, sha256, _validator(response))
        self._write_record(self._record)
        if size is not None:
            require_space(self._target.parent, size)

    def _is_same(self, response: httpx.Response) -> bool:
        """Whether the rest that comes belongs to the bytes that are here."""
        record = self._record
        if _announced(response) not in (None, record.size):
            return False
        if record.sha256 is not None:
            return _linked_sha256(response) in (None, record.sha256)
        return _validator(response) == record.validator

    def _start_over(self, reason: str) -> None:
        self._partial.restart()
        raise Transient(reason, pause=0)

    def _receive(self, response: httpx.Response) -> None:
        partial, size, name = self._partial, self._record.size, self._job.name
        self._report.update(name, partial.size, size)
        for chunk in response.iter_raw():
            self._session.check_cancelled()
            if size is not None and partial.size + len(chunk) > size:
                partial.restart()
                raise DownloadError(f"{shown(self._remote.url)}: the server sent more than the {size} bytes expected")
            partial.append(chunk)
            self._report.update(name, partial.size, size)
        if size is not None and partial.size < size:
            raise Transient(f"the connection ended after {partial.size} of {size} bytes")

    def _finish(self) -> None:
        partial, record, where = self._partial, self._record, shown(self._remote.url)
        digest = partial.digest.hexdigest()
        if record.sha256 is not None and digest != record.sha256:
            partial.restart()
            self._use_ranges = False
            self._mismatches += 1
            if self._mismatches > 1:
                raise DownloadError(f"{where}: sha256 is {digest}, expected {record.sha256}")
            raise Transient("the checksum is wrong", pause=0)
        if record.sha256 is None and not partial.starts_with(b"GGUF"):
            partial.restart()
            raise DownloadError(f"{where}: what the server sent is not a GGUF file")
        partial.flush()
        mtime_ns = self._job.partial.stat().st_mtime_ns
        self._job.partial.replace(self._target)
        self._write_record(replace(record, size=partial.size, sha256=digest, mtime_ns=mtime_ns))

    def _write_record(self, record: Record) -> None:
        temporary = self._record_path.with_name(f"{self._record_path.name}.new")
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        temporary.replace(self._record_path)


class _Partial:
    """The bytes so far, open for appending, with the sha256 of all of them. `reached`: the most there ever were."""

    def __init__(self, path: Path, watch: Callable[[int], None]) -> None:
        self._file = path.open("a+b")
        self._file.seek(0)
        self.digest = _hash(self._file, watch)
        self.size = self._file.tell()
        self.reached = self.size

    def __enter__(self) -> "_Partial":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self.digest.update(chunk)
        self.size += len(chunk)
        self.reached = max(self.reached, self.size)

    def restart(self) -> None:
        self._file.truncate(0)
        self.digest = hashlib.sha256()
        self.size = 0

    def starts_with(self, magic: bytes) -> bool:
        self._file.seek(0)
        return self._file.read(len(magic)) == magic

    def flush(self) -> None:
        """Everything on disk, so that the name it gets next never stands for less."""
        self._file.flush()
        os.fsync(self._file.fileno())


def _hash(file: BinaryIO, watch: Callable[[int], None]) -> Any:
    """The sha256 of the rest of `file`. watch: called with the number of bytes read."""
    digest = hashlib.sha256()
    while block := file.read(HASH_BLOCK):
        digest.update(block)
        watch(file.tell())
    return digest


def _read_record(path: Path) -> Record | None:
    """None when there is none that can be read: then the bytes beside it are of unknown origin."""
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _announced(response: httpx.Response) -> int | None:
    """The size of the whole file, as the response states it."""
    if response.status_code == 206:
        total = response.headers.get("content-range", "").rpartition("/")[2]
    else:
        total = response.headers.get("content-length", "")
    return int(total) if total.isdecimal() else None


def _validator(response: httpx.Response) -> str | None:
    """What changes when the file does."""
    etag: str = response.headers.get("etag", "")
    date: str | None = response.headers.get("last-modified")
    return etag if etag.startswith('"') else date


def _linked_size(response: httpx.Response) -> int | None:
    return next((int(size) for size in _linked(response, "x-linked-size") if size.isdecimal()), None)


def _linked_sha256(response: httpx.Response) -> str | None:
    """Hugging Face names the checksum of a stored file on the response that redirects to it."""
    found = (re.fullmatch(r'"?([0-9a-f]{64})"?', etag) for etag in _linked(response, "x-linked-etag"))
    return next((match[1] for match in found if match), None)


def _linked(response: httpx.Response, header: str) -> list[str]:
    return [hop.headers[header] for hop in (*response.history, response) if header in hop.headers]
