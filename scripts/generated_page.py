"""Pages of docs/ that scripts write from the program's own tables."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(page: Path, text: str, script: str) -> int:
    """Write the page, or with --check on the command line only compare: exit status 1 when it differs.

    page: below `ROOT`. script: the file that makes it, for the message.
    """
    if "--check" in sys.argv[1:]:
        current = page.read_text(encoding="utf-8") if page.exists() else ""
        if current == text:
            return 0
        print(f"{page.relative_to(ROOT)} is not up to date; run python scripts/{script}", file=sys.stderr)
        return 1
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page.relative_to(ROOT)}")
    return 0
