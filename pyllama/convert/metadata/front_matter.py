"""The YAML block at the top of a model card: plain keys with texts and lists of texts, which is all that is needed."""

import re
from pathlib import Path

_KEY = re.compile(r"(?P<key>[A-Za-z_][\w-]*):(?:\s+(?P<value>.*))?")


def read_front_matter(path: Path) -> dict[str, str | list[str]]:
    """Keys of README.md between its first two `---` lines. Nested objects and block texts are passed over."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].rstrip() != "---" or "---" not in (rest := [line.rstrip() for line in lines[1:]]):
        return {}
    card: dict[str, str | list[str]] = {}
    key = ""
    for line in rest[: rest.index("---")]:
        item = re.fullmatch(r"\s*- (?P<item>.*)", line)
        if match := _KEY.fullmatch(line):
            key, value = match["key"], _scalar(match["value"] or "")
            if value.startswith("[") and value.endswith("]"):
                card[key] = [text for part in value[1:-1].split(",") if (text := _scalar(part))]
            elif value not in ("", "|", ">", "|-", ">-", "null", "~"):
                card[key] = value
        elif item and key and not _KEY.fullmatch(item["item"]) and isinstance(card.setdefault(key, []), list):
            card[key].append(_scalar(item["item"]))  # type: ignore[union-attr]
    return {key: value for key, value in card.items() if value}


def _scalar(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return re.sub(r"\s+#.*", "", text)
