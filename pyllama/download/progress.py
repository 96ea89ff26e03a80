"""What a user sees of downloads: bars on a terminal (`bars`), a line per tenth elsewhere."""

import sys
import threading
from collections.abc import Callable
from typing import Protocol


class Report(Protocol):
    """Calls come from several threads."""

    def __enter__(self) -> "Report": ...

    def __exit__(self, *_: object) -> None: ...

    def update(self, name: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes are there; it can go down when a file starts over."""

    def finish(self, name: str, size: int) -> None: ...

    def note(self, text: str) -> None: ...


class Lines:
    """Plain text for pipes and logs. `write` takes a line without its end."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._tenths: dict[str, int] = {}

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, name: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        with self._lock:
            if name in self._tenths and (tenth <= self._tenths[name] or tenth >= 10):
                return
            self._tenths[name] = tenth
            of = f" of {bytes_text(total)}" if total else ""
            self._write(f"{name}: {bytes_text(done)}{of}")

    def finish(self, name: str, size: int) -> None:
        with self._lock:
            self._write(f"{name}: complete, {bytes_text(size)}")

    def note(self, text: str) -> None:
        with self._lock:
            self._write(text)


def report_on_stderr() -> Report:
    if not sys.stderr.isatty():
        return Lines(lambda text: print(text, file=sys.stderr, flush=True))
    from .bars import Bars

    return Bars()


def bytes_text(count: int) -> str:
    """`16.5 GB`: decimal units, as hubs show sizes."""
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
