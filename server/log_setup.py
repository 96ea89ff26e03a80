"""Log output, filtered by `-lv`: severity letter, time, area and message on stderr, or JSON lines on stdout; also in a
file.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

# -lv N -> the least severe level that is shown.
_LEVELS = {0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO}
_LETTERS = {logging.DEBUG: "D", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}
_JSON_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warn",
    logging.ERROR: "error",
    logging.CRITICAL: "error",
}
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


class _JsonFormatter(logging.Formatter):
    """One JSON object per record: type, time (Unix, microseconds), level, msg."""

    def format(self, record: logging.LogRecord) -> str:
        message = f"{record.name.rpartition('.')[2]:<4} {record.funcName:>14}: {record.getMessage()}"
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        level = _JSON_LEVELS.get(record.levelno, "info")
        line = {"type": "log", "time": int(record.created * 1e6), "level": level, "msg": message}
        return json.dumps(line)  # ASCII, so that no terminal or file can fail on it


def configure_logging(
    *,
    verbosity: int = 3,
    path: str = "",
    prefix: bool = True,
    timestamps: bool = True,
    colors: str = "auto",
    disabled: bool = False,
    as_json: bool = False,
) -> None:
    """Set up the loggers below `pyllama`. Raises `OSError` when the log file cannot be opened."""
    logger = logging.getLogger("pyllama")
    logger.handlers.clear()
    logger.propagate = False
    if disabled:
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.CRITICAL + 1)
        return
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout if as_json else sys.stderr)]
    if path:
        handlers.append(logging.FileHandler(Path(path), "w", encoding="utf-8", errors="replace"))
    for handler in handlers:
        is_terminal = isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "isatty", lambda: False)()
        wants_colors = colors == "on" or (
            colors == "auto" and is_terminal and not isinstance(handler, logging.FileHandler)
        )
        text = _Formatter(prefix=prefix, timestamps=timestamps, colors=wants_colors)
        handler.setFormatter(_JsonFormatter() if as_json else text)
        logger.addHandler(handler)
    logger.setLevel(_LEVELS.get(verbosity, logging.DEBUG if verbosity > 3 else logging.CRITICAL))
