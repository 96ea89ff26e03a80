"""Downloads on a terminal: a bar per file."""

import threading

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn


class Bars:
    """A bar per file on the terminal that standard error is."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn())
        console = console or Console(stderr=True)
        self._progress = Progress(TextColumn("{task.description}", markup=False), *columns, console=console)
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, name: str, done: int, total: int | None) -> None:
        with self._lock:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done, total=total)

    def finish(self, name: str, size: int) -> None:
        self.update(name, size, size)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)
