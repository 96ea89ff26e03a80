"""`gguf-set-metadata` changes one value inside a GGUF file; `gguf-new-metadata` writes a copy with other metadata.

Changing in place touches the bytes of the value and nothing else, so the new value must be as long as the old one.
Of a split model both work on the part they are given.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.gguf import (
    GgufFile,
    GgufWriter,
    KeyValue,
    TensorReader,
    TensorSpec,
    encoded_scalar,
    entry_offsets,
    with_key,
)

from .command_line import ArgumentParser, byte_progress, printable, run_command
from .gguf_dump import scalar_text

# A token's role on the command line -> the part of its key. One key carries its historical misspelling.
SPECIAL_TOKENS = {
    name: name
    for name in (
        "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "fim_pre", "fim_suf", "fim_mid",
        "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle",
    )
} | {"separator": "seperator"}  # fmt: skip
TOKENS = "tokenizer.ggml.tokens"
CHAT_TEMPLATE = "tokenizer.chat_template"
CHAT_TEMPLATES = "tokenizer.chat_templates"


# gguf-set-metadata


def main_set(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="gguf-set-metadata", description="Change one value of a GGUF file in place.")
    parser.add_argument("model", type=Path, help="GGUF file; of a split model, any part")
    parser.add_argument("key")
    parser.add_argument("value")
    parser.add_argument("--dry-run", action="store_true", help="say what would change")
    parser.add_argument("--force", action="store_true", help="do not ask")
    options = parser.parse_args(argv)

    entry, offset = find_value(options.model, options.key)
    value = parse_value(entry, options.value)
    new, old = encoded_scalar(entry.type, value), encoded_scalar(entry.type, entry.value)
    if len(new) != len(old):
        raise InvalidArgument(
            f"{entry.key}: the new text of {len(new) - 8} bytes does not fit into the {len(old) - 8} bytes of the old "
            "one; gguf-new-metadata writes a changed copy"
        )
    print(f"{printable(entry.key)}: {scalar_text(entry.value)} -> {scalar_text(value)}")
    if options.dry_run or new == old:
        print("dry run: not changed" if options.dry_run else "not changed: it has this value")
        return 0
    if not options.force:
        confirm(options.model)
    overwrite(options.model, offset, new)
    return 0


def run_set() -> None:
    run_command(main_set)


def find_value(path: Path, key: str) -> tuple[KeyValue, int]:
    """The entry and the file offset of its value. Refuses keys that cannot be changed in place."""
    file = GgufFile(path, metadata_only=True, single_file=True)
    entries = file.key_values
    index = next((index for index, entry in enumerate(entries) if entry.key == key), None)
    if index is None:
        raise InvalidArgument(f"{path}: has no key '{printable(key)}'")
    if key == "general.alignment":
        raise InvalidArgument("general.alignment decides where the data lies; gguf-new-metadata writes a changed copy")
    if entries[index].type.endswith("[]"):
        raise InvalidArgument(f"{key} is an array; gguf-new-metadata writes a changed copy")
    return entries[index], entry_offsets(entries)[index][1]


def parse_value(entry: KeyValue, text: str) -> Any:
    """The text as a value of the entry's type. Raises `InvalidArgument`."""
    if entry.type == "string":
        return text
    if entry.type == "bool":
        if text.lower() in ("true", "1"):
            return True
        if text.lower() in ("false", "0"):
            return False
    else:
        try:
            return float(text) if entry.type in ("f32", "f64") else int(text, 0)
        except ValueError:
            pass  # reported below
    raise InvalidArgument(f"{entry.key}: '{text}' is not a value of type {entry.type}")


def confirm(path: Path) -> None:
    print(f"{path} is changed in place; a wrong value can make it useless. Type YES to go on: ", end="", flush=True)
    if sys.stdin.readline().strip() != "YES":
        raise InvalidArgument("not confirmed, nothing changed; --force does not ask")


def overwrite(path: Path, offset: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, data, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# gguf-new-metadata


def main_new(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="gguf-new-metadata", description="Write a copy of a GGUF file with other metadata.")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--general-name", metavar="NAME")
    parser.add_argument("--general-description", metavar="TEXT")
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--chat-template", metavar="TEMPLATE", help="text, or JSON list of {name, template}")
    template.add_argument("--chat-template-file", metavar="FILE", type=Path)
    template.add_argument("--chat-template-config", metavar="FILE", type=Path, help="a tokenizer_config.json")
    parser.add_argument("--pre-tokenizer", metavar="NAME", help="value of tokenizer.ggml.pre")
    parser.add_argument("--remove-metadata", metavar="KEY", action="append", default=[])
    for option, meaning in (("--special-token", "TOKEN"), ("--special-token-by-id", "ID")):
        parser.add_argument(
            option, nargs=2, metavar=("ROLE", meaning), action="append", default=[],
            help=f"ROLE is one of {', '.join(SPECIAL_TOKENS)}",
        )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace OUTPUT where it exists")
    options = parser.parse_args(argv)

    with TensorReader(options.input, single_file=True) as reader:
        if options.output.exists():
            if options.output.samefile(options.input):
                raise InvalidArgument(f"{options.output}: is the input")
            if not options.force:
                raise InvalidArgument(f"{options.output}: exists; --force replaces it")
        copy_with(reader, options.output, edited(reader.file.key_values, options))
    return 0


def run_new() -> None:
    run_command(main_new)


def edited(entries: list[KeyValue], options: Any) -> list[KeyValue]:
    """The keys after all changes: removals first, then values, in the order of the options' descriptions."""
    for key in options.remove_metadata:
        if all(entry.key != key for entry in entries):
            raise InvalidArgument(f"--remove-metadata: the file has no key '{printable(key)}'")
        entries = [entry for entry in entries if entry.key != key]
    for key, text in (
        ("general.name", options.general_name),
        ("general.description", options.general_description),
        ("tokenizer.ggml.pre", options.pre_tokenizer),
    ):
        if text is not None:
            entries = with_key(entries, key, "string", text)
    templates = chat_templates(options)
    if templates is not None:
        entries = with_templates(entries, templates)
    for role, token in options.special_token:
        entries = with_special_token(entries, role, id_of, token)
    for role, number in options.special_token_by_id:
        entries = with_special_token(entries, role, checked_id, number)
    return entries


def chat_templates(options: Any) -> dict[str, str] | None:
    """Templates by name, `default` being the main one; None when no option asks for any."""
    if options.chat_template_file is not None:
        return {"default": read_text(options.chat_template_file)}
    if options.chat_template_config is not None:
        try:
            content = json.loads(read_text(options.chat_template_config))
        except ValueError as error:
            raise InvalidArgument(f"{options.chat_template_config}: not JSON: {error}") from None
        template = content.get("chat_template") if isinstance(content, dict) else None
        if template is None:
            raise InvalidArgument(f"{options.chat_template_config}: has no chat_template")
        return named_templates(template, str(options.chat_template_config))
    if options.chat_template is None:
        return None
    if options.chat_template.lstrip().startswith("["):
        try:
            return named_templates(json.loads(options.chat_template), "--chat-template")
        except json.JSONDecodeError:
            pass  # a template may well begin with a bracket
    return {"default": options.chat_template}


def named_templates(content: Any, source: str) -> dict[str, str]:
    if isinstance(content, str):
        return {"default": content}
    if isinstance(content, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in content
    ):
        return {item["name"]: item["template"] for item in content}
    raise InvalidArgument(f"{source}: chat_template is neither a text nor a list of objects with name and template")


def with_templates(entries: list[KeyValue], templates: dict[str, str]) -> list[KeyValue]:
    """The new templates instead of all older ones."""
    entries = [
        entry
        for entry in entries
        if entry.key not in (CHAT_TEMPLATE, CHAT_TEMPLATES) and not entry.key.startswith(f"{CHAT_TEMPLATE}.")
    ]
    others = [name for name in templates if name != "default"]
    if others:
        entries.append(KeyValue(CHAT_TEMPLATES, "string[]", others))
    for name, text in templates.items():
        entries.append(KeyValue(CHAT_TEMPLATE if name == "default" else f"{CHAT_TEMPLATE}.{name}", "string", text))
    return entries


def with_special_token(
    entries: list[KeyValue], role: str, find_id: Callable[[Sequence[str], str], int], text: str
) -> list[KeyValue]:
    if role not in SPECIAL_TOKENS:
        raise InvalidArgument(f"'{role}' is no special token, expected one of {', '.join(SPECIAL_TOKENS)}")
    tokens = next((entry.value for entry in entries if entry.key == TOKENS and entry.type == "string[]"), None)
    if tokens is None:
        raise InvalidArgument(f"the file has no list of tokens ({TOKENS})")
    return with_key(entries, f"tokenizer.ggml.{SPECIAL_TOKENS[role]}_token_id", "u32", find_id(tokens, text))


def id_of(tokens: Sequence[str], text: str) -> int:
    try:
        return list(tokens).index(text)
    except ValueError:
        raise InvalidArgument(f"'{printable(text)}' is no token of the vocabulary") from None


def checked_id(tokens: Sequence[str], text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= len(tokens):
        raise InvalidArgument(f"token id '{text}' is not one of 0..{len(tokens) - 1}")
    return int(text)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def copy_with(reader: TensorReader, path: Path, entries: Sequence[KeyValue]) -> None:
    specs = [TensorSpec.of(tensor) for tensor in reader.tensors]
    with (
        GgufWriter(path, entries, specs) as writer,
        byte_progress("writing", sum(spec.n_bytes for spec in specs)) as advance,
    ):
        for tensor in reader.tensors:
            for piece in reader.pieces(tensor):
                writer.write(piece)
                advance(len(piece))
