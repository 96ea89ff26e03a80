"""`gguf-set-metadata` and `gguf-new-metadata`. Oracle: the `gguf` package reads the results."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama.gguf import GgufFile, KeyValue, TensorSpec
from pyllama.tools import gguf_metadata
from support.file_tools import run_tool, write_model
from support.tiny_llama import IM_END

SPECS = [TensorSpec("a", "f32", (5,)), TensorSpec("b", "q8_0", (32, 3)), TensorSpec("c", "i8", (3,))]
KEYS = [
    KeyValue("x.tokens", "string[]", ["a", "bc"]),
    KeyValue("x.u8", "u8", 1),
    KeyValue("x.i8", "i8", -1),
    KeyValue("x.u16", "u16", 1),
    KeyValue("x.i32", "i32", 1),
    KeyValue("x.u64", "u64", 1),
    KeyValue("x.f32", "f32", 0.5),
    KeyValue("x.f64", "f64", 0.5),
    KeyValue("x.bool", "bool", False),
    KeyValue("x.text", "string", "übermut"),
    KeyValue("general.alignment", "u32", 64),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", SPECS, KEYS)


def metadata(path: Path) -> dict[str, Any]:
    file = GgufFile(path)
    return {
        entry.key: entry.value.tolist() if isinstance(entry.value, np.ndarray) else entry.value
        for entry in file.key_values
    }


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("x.u8", "255", 255),
        ("x.i8", "-128", -128),
        ("x.u16", "0x1234", 0x1234),
        ("x.i32", "-7", -7),
        ("x.u64", str(2**64 - 1), 2**64 - 1),
        ("x.f32", "1e6", 1e6),
        ("x.f64", "0.1", 0.1),
        ("x.bool", "true", True),
        ("x.text", "abcdefgh", "abcdefgh"),  # as many bytes
    ],
)
def test_value_is_changed_in_place_and_nothing_else(model: Path, key: str, text: str, value: object) -> None:
    before, inode = model.read_bytes(), model.stat().st_ino
    old = metadata(model)
    assert run_tool(gguf_metadata.main_set, "--force", model, key, text) == 0
    assert metadata(model) == old | {key: value}
    assert gguf.GGUFReader(model).fields[key].contents() == value
    after = model.read_bytes()
    changed = [at for at, (left, right) in enumerate(zip(before, after, strict=True)) if left != right]
    assert changed[-1] - changed[0] < 8
    assert model.stat().st_ino == inode


@pytest.mark.parametrize(
    ("key", "text", "fault"),
    [
        ("x.u8", "256", "not a value of type u8"),
        ("x.u8", "-1", "not a value of type u8"),
        ("x.u8", "1.5", "not a value of type u8"),
        ("x.u8", "", "not a value of type u8"),
        ("x.f32", "1e40", "not a value of type f32"),
        ("x.bool", "yes", "not a value of type bool"),
        ("x.text", "longer text", "11 bytes does not fit into the 8 bytes of the old one; gguf-new-metadata"),
        ("x.tokens", "a", "is an array; gguf-new-metadata"),
        ("general.alignment", "32", "gguf-new-metadata"),
        ("x.absent", "1", "has no key 'x.absent'"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], key: str, text: str, fault: str
) -> None:
    before = model.read_bytes()
    assert run_tool(gguf_metadata.main_set, "--force", model, key, text) == 1
    assert fault in capsys.readouterr().err
    assert model.read_bytes() == before


@pytest.mark.parametrize(("answer", "code"), [("YES\n", 0), ("yes\n", 1), ("", 1)])
def test_change_is_confirmed_by_a_word(model: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert run_tool(gguf_metadata.main_set, model, "x.u8", "9") == code
    assert metadata(model)["x.u8"] == (1 if code else 9)


def test_dry_run_tells_and_changes_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert run_tool(gguf_metadata.main_set, "--dry-run", model, "x.text", "xxxxxxxx") == 0
    assert "x.text: 'übermut' -> 'xxxxxxxx'" in capsys.readouterr().out
    assert model.read_bytes() == before


# new-metadata


def renewed(model: Path, *options: object) -> dict[str, Any]:
    """Metadata of the copy, whose tensors are those of the model."""
    target = model.with_name("new.gguf")
    assert run_tool(gguf_metadata.main_new, *options, model, target) == 0
    old, new = GgufFile(model), GgufFile(target)
    assert [TensorSpec.of(tensor) for tensor in new.tensors] == [TensorSpec.of(tensor) for tensor in old.tensors]
    for tensor in new.tensors:
        assert tensor.offset % new.alignment == 0
        assert new.tensor_bytes(tensor.name) == old.tensor_bytes(tensor.name)
    assert [tensor.name for tensor in gguf.GGUFReader(target).tensors] == [tensor.name for tensor in old.tensors]
    return metadata(target)


def test_copy_without_changes_is_the_same_file(model: Path) -> None:
    assert renewed(model) == metadata(model)
    assert model.with_name("new.gguf").read_bytes() == model.read_bytes()


def test_texts_are_set_and_keys_removed(model: Path) -> None:
    options = ["--general-name", "N", "--general-description=D d", "--pre-tokenizer", "qwen2"]
    expected = metadata(model) | {
        "general.name": "N",
        "general.description": "D d",
        "tokenizer.ggml.pre": "qwen2",
    }
    del expected["x.u8"]
    del expected["x.tokens"]
    assert renewed(model, *options, "--remove-metadata", "x.u8", "--remove-metadata", "x.tokens") == expected


def test_removing_the_alignment_places_the_data_anew(model: Path) -> None:
    assert "general.alignment" not in renewed(model, "--remove-metadata", "general.alignment")
    assert GgufFile(model.with_name("new.gguf")).alignment == 32


@pytest.mark.parametrize("source", ["--chat-template", "--chat-template-file", "--chat-template-config"])
def test_chat_template_from_each_source(tiny_llama_path: Path, tmp_path: Path, source: str) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(tiny_llama_path.read_bytes())
    template = "{{ messages }} ü\n"
    argument: object = template
    if source != "--chat-template":
        argument = tmp_path / "template"
        content = template if source == "--chat-template-file" else json.dumps({"chat_template": template})
        argument.write_text(content, encoding="utf-8")
    assert renewed(model, source, argument) == metadata(model) | {"tokenizer.chat_template": template}


@pytest.mark.parametrize("as_config", [False, True])
def test_several_chat_templates(model: Path, as_config: bool) -> None:
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    if as_config:
        config = model.with_name("tokenizer_config.json")
        config.write_text(json.dumps({"chat_template": templates}))
        found = renewed(model, "--chat-template-config", config)
    else:
        found = renewed(model, "--chat-template", json.dumps(templates))
    assert {key: value for key, value in found.items() if "chat_template" in key} == {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
    }
    single = model.with_name("single.gguf")
    several = model.with_name("new.gguf")
    assert run_tool(gguf_metadata.main_new, "--chat-template", "[one]", several, single) == 0
    assert {key: value for key, value in metadata(single).items() if "chat_template" in key} == {
        "tokenizer.chat_template": "[one]"
    }


def test_special_tokens_by_text_and_by_id(tiny_llama_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(tiny_llama_path.read_bytes())
    found = renewed(model, "--special-token", "eot", "<|im_end|>", "--special-token-by-id", "bos", "7")
    assert found == metadata(model) | {"tokenizer.ggml.eot_token_id": IM_END, "tokenizer.ggml.bos_token_id": 7}
    target = tmp_path / "sep.gguf"
    assert run_tool(gguf_metadata.main_new, "--special-token-by-id", "separator", "1", model, target) == 0
    assert metadata(target)["tokenizer.ggml.seperator_token_id"] == 1


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--remove-metadata", "x.absent"], "has no key 'x.absent'"),
        (["--special-token", "eos", "<none>"], "'<none>' is no token"),
        (["--special-token", "end", "a"], "'end' is no special token"),
        (["--special-token-by-id", "eos", "300000"], "token id '300000' is not one of 0..299"),
        (["--special-token-by-id", "eos", "-1"], "error: "),
        (["--chat-template-config", "absent.json"], "absent.json"),
        (["--chat-template", "a", "--chat-template-file", "b"], "not allowed with"),
    ],
    ids=str,
)
def test_a_change_that_cannot_be_made_leaves_no_file(
    tiny_llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fault: str
) -> None:
    assert run_tool(gguf_metadata.main_new, *options, tiny_llama_path, tmp_path / "new.gguf") == 1
    assert fault in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["[", "{}", '{"chat_template": 1}', '{"chat_template": [{"name": "a"}]}', "[1]"])
def test_config_without_a_template_is_refused(model: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    config = model.with_name("config.json")
    config.write_text(content)
    target = model.with_name("new.gguf")
    assert run_tool(gguf_metadata.main_new, "--chat-template-config", config, model, target) == 1
    assert str(config) in capsys.readouterr().err
    assert not target.exists()


def test_existing_file_is_replaced_by_force_only(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = model.with_name("new.gguf")
    target.write_bytes(b"old")
    assert run_tool(gguf_metadata.main_new, model, target) == 1
    assert target.read_bytes() == b"old"
    assert run_tool(gguf_metadata.main_new, "--force", model, model) == 1
    assert "is the input" in capsys.readouterr().err
    assert run_tool(gguf_metadata.main_new, "--force", model, target) == 0
    assert target.read_bytes() == model.read_bytes()
