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
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o666 & ~umask)  # mkstemp made it private
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
