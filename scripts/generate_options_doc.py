"""Write docs/options.md from the option table: `python scripts/generate_options_doc.py [--check]`.

With --check nothing is written; exit code 1 when the file differs from what the table gives.
"""

import sys

from generated_page import ROOT, write_or_check

sys.path.insert(0, str(ROOT))

from pyllama.options.document import options_document

PAGE = ROOT / "docs" / "options.md"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, options_document(), "generate_options_doc.py"))
