"""Log output: severity letter, time, area and message on stderr or into a file, filtered by `-lv`."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

# -lv N -> the least severe level that is shown.
_LEVELS = {0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO}
_LETTERS = {logging.DEBUG: "D", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}
_COLORS = {"W": "\033[33m", "E": "\033[31m", "D": "\033[90m"}


class _Formatter(logging.Formatter):
    def __init__(self, *, prefix: bool, timestamps: bool, colors: bool) -> None:
        super().__init__()
        self._prefix = prefix
        self._timestamps = timestamps
        self._colors = colors
        self._start = time.time()

    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelno, "I")
        parts = []
        if self._timestamps:
            seconds = max(0.0, record.created - self._start)
            parts.append(f"{int(seconds // 60)}.{seconds % 60:06.3f}")
        if self._prefix:
            parts.append(letter)
        parts.append(f"{record.name.rpartition('.')[2]:<4} {record.funcName:>14}: {record.getMessage()}")
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if self._colors and letter in _COLORS:
            line = f"{_COLORS[letter]}{line}\033[0m"
        return line


def configure_logging(
    *,
    verbosity: int = 3,
    path: str = "",
    prefix: bool = True,
    timestamps: bool = True,
    colors: str = "auto",
    disabled: bool = False,
) -> None:
    """Set up the loggers below `pyllama`. Raises `OSError` when the log file cannot be opened."""
    logger = logging.getLogger("pyllama")
    logger.handlers.clear()
    logger.propagate = False
    if disabled:
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.CRITICAL + 1)
        return
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if path:
        handlers.append(logging.FileHandler(Path(path), encoding="utf-8", errors="replace"))
    for handler in handlers:
        is_terminal = isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "isatty", lambda: False)()
        wants_colors = colors == "on" or (
            colors == "auto" and is_terminal and not isinstance(handler, logging.FileHandler)
        )
        handler.setFormatter(_Formatter(prefix=prefix, timestamps=timestamps, colors=wants_colors))
        logger.addHandler(handler)
    logger.setLevel(_LEVELS.get(verbosity, logging.DEBUG if verbosity > 3 else logging.CRITICAL))
