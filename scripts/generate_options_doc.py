"""Write docs/options.md from the option table: `python scripts/generate_options_doc.py [--check]`.

With --check nothing is written; exit code 1 when the file differs from what the table gives.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pyllama.options.document import options_document  # noqa: E402

PAGE = ROOT / "docs" / "options.md"


def main() -> int:
    text = options_document()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current == text:
            return 0
        print(
            f"{PAGE.relative_to(ROOT)} is not up to date; run python scripts/generate_options_doc.py", file=sys.stderr
        )
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
