"""The chat templates of a checkpoint as `tokenizer.chat_template*` keys."""

import re
from typing import Any

from pyllama.errors import TokenizerError
from pyllama.gguf import KeyValue

from ..json_files import read_json
from .files import TokenizerFiles

KEY = "tokenizer.chat_template"


def chat_template_keys(files: TokenizerFiles) -> list[KeyValue]:
    """The default template, the named ones beside it, and the list of their names."""
    templates = _templates(files)
    default = templates.pop("default", None)
    keys = []
    if templates:
        keys.append(KeyValue("tokenizer.chat_templates", "string[]", list(templates)))
        keys += [KeyValue(f"{KEY}.{name}", "string", text) for name, text in templates.items()]
    if default is not None:
        keys.append(KeyValue(KEY, "string", default))
    return keys


def _templates(files: TokenizerFiles) -> dict[str, str]:
    found: Any = files.tokenizer_config.get("chat_template")
    single = files.path("chat_template.jinja")
    older = files.path("chat_template.json")
    if found is None and single.is_file():
        found = single.read_text(encoding="utf-8")
    if found is None and older.is_file():
        found = read_json(older).get("chat_template")
    templates: dict[str, str] = {}
    for path in sorted(files.path("additional_chat_templates").glob("*.jinja")):
        templates[_key_part(path.stem)] = path.read_text(encoding="utf-8")
    if isinstance(found, list):
        for entry in found:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("name", "template")):
                raise TokenizerError("chat_template: a list must hold objects with name and template")
            templates[_key_part(entry["name"])] = entry["template"]
    elif isinstance(found, str):
        templates["default"] = found
    elif found is not None:
        raise TokenizerError(f"chat_template is a {type(found).__name__}, expected a text or a list")
    return templates


def _key_part(name: str) -> str:
    return re.sub(r"[^a-z0-9_]", "", name.lower())
