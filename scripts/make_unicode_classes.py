"""Writes pyllama/tokenizer_unicode.py: the Unicode 15.1 ranges of the classes L, N, M and P.

Tokenizers must not change with the interpreter, so the tables are frozen. Run with CPython 3.13, whose `unicodedata` is
15.1.0, or with the package `unicodedata2==15.1.0`: `python scripts/make_unicode_classes.py >
pyllama/tokenizer_unicode.py`.
"""

import textwrap
import unicodedata

VERSION = "15.1.0"
CLASSES = {"L": "LETTERS", "N": "NUMBERS", "M": "MARKS", "P": "PUNCTUATION"}

HEADER = '''"""Frozen Unicode {version} ranges that the pre-tokenizers need: letters, numbers, marks, punctuation.

Written by scripts/make_unicode_classes.py; do not edit. Inclusive ranges `first-last` or single code points, in hex.
"""

UNICODE_VERSION = "{version}"
'''


def ranges(unicode: object, letter: str) -> list[tuple[int, int]]:
    """Inclusive code point ranges whose general category begins with `letter`."""
    found: list[tuple[int, int]] = []
    for code in range(0x110000):
        if unicode.category(chr(code))[0] != letter:  # type: ignore[attr-defined]
            continue
        if found and found[-1][1] == code - 1:
            found[-1] = (found[-1][0], code)
        else:
            found.append((code, code))
    return found


def main() -> None:
    unicode: object = unicodedata
    if unicodedata.unidata_version != VERSION:
        import unicodedata2

        unicode = unicodedata2
        if unicodedata2.unidata_version != VERSION:
            raise SystemExit(f"needs Unicode {VERSION}, found {unicodedata2.unidata_version}")
    print(HEADER.format(version=VERSION))
    for letter, name in CLASSES.items():
        text = " ".join(
            f"{first:x}" if first == last else f"{first:x}-{last:x}" for first, last in ranges(unicode, letter)
        )
        print(f'{name} = """')
        print(textwrap.fill(text, 118, break_on_hyphens=False))
        print('"""')


if __name__ == "__main__":
    main()
