"""Writing a file so that it is never seen half done."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced_file(path: Path | str) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the context ends normally, and vanishes when an exception ends it."""
    target = Path(path)
    file, partial = open_partial(target)
    try:
        with file:
            yield file
        make_public(partial)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def open_partial(target: Path) -> tuple[BinaryIO, Path]:
    """A new private file beside `target`, and its name."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    return os.fdopen(descriptor, "wb", buffering=1 << 20), Path(name)


def make_public(partial: Path) -> None:
    """Give the file the permissions that a plain `open` would have given it."""
    umask = os.umask(0)
    os.umask(umask)
    partial.chmod(0o666 & ~umask)
