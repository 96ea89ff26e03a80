"""Chat templates by name against what llama-server makes of them.

`golden/named_chat_templates.json` holds the prompts that llama.cpp (xllamacpp, build b11549) renders for a conversation
with `--no-jinja --chat-template NAME`; the slow test asks it again, and writes the file with `WRITE_GOLDEN=1`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from pyllama.chat_template import ChatTemplate
from pyllama.chat_template_builtins import BUILTIN_TEMPLATES
from pyllama.chat_template_turns import TURNS

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "named_chat_templates.json"
PROMPTS: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))
OURS = {"yandex"}  # llama-server leaves the system message out there

SYSTEM, *TURNS_OF_CHAT = (
    {"role": role, "content": content}
    for role, content in (
        ("system", " S one "),
        ("user", " U one "),
        ("assistant", " A one "),
        ("user", " U two "),
        ("assistant", " A two "),
        ("user", " U one "),
    )
)  # fmt: skip
CONVERSATION = [SYSTEM, *TURNS_OF_CHAT]


def rendered(name: str, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(BUILTIN_TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    return template.render(messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_a_named_template_renders_what_llama_server_renders(name: str) -> None:
    assert rendered(name, CONVERSATION) == PROMPTS[name]


def test_every_row_is_compared() -> None:
    assert set(PROMPTS) | OURS == set(TURNS)


@pytest.mark.parametrize("name", sorted(TURNS))
def test_every_text_is_in_the_prompt_and_an_answer_only_opened_when_asked_for(name: str) -> None:
    for messages in (CONVERSATION, TURNS_OF_CHAT):
        closed = rendered(name, messages, add_generation_prompt=False)
        assert rendered(name, messages) == closed + TURNS[name].opens
        at = 0
        for message in messages:
            at = closed.index(message["content"].strip(), at) + 1
    assert rendered(name, [SYSTEM]).count("S one") == (not TURNS[name].merges_system)


def test_a_system_message_is_left_out_of_no_format() -> None:
    assert rendered("yandex", CONVERSATION[:2]) == " Пользователь:  S one \n\n U one \n\n Ассистент:[SEP]"


def test_where_a_format_wants_a_system_message_it_gets_one() -> None:
    assert rendered("bailing2", TURNS_OF_CHAT).startswith("<role>SYSTEM</role>detailed thinking off<|role_end|><role>")
    assert rendered("pangu-embedded", TURNS_OF_CHAT).startswith("[unused9]系统：[unused10][unused9]用户：")
    assert "detailed thinking off" not in rendered("bailing2", CONVERSATION)


def test_turns_of_one_history_are_separated_by_the_beginning_token() -> None:
    assert rendered("llama2-sys-bos", TURNS_OF_CHAT[:3]) == "[INST]  U one  [/INST] A one </s><s>[INST]  U two  [/INST]"
    assert rendered("monarch", TURNS_OF_CHAT[:1]) == "user\n U one </s>\n<s>assistant\n"


@pytest.mark.slow
def test_llama_server_still_renders_the_golden_prompts(tiny_llama_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs the llama.cpp wheel")
    found = {}
    for name in sorted(set(TURNS) - OURS):
        params = xllamacpp.CommonParams()
        params.model.path = str(tiny_llama_path)
        params.n_ctx, params.n_parallel, params.port, params.cpuparams.n_threads = 256, 1, 0, 1
        params.chat_template, params.use_jinja = name, False
        server = xllamacpp.Server(params)
        answer = httpx.post(server.listening_address + "/apply-template", json={"messages": CONVERSATION}, timeout=60)
        found[name] = answer.json()["prompt"]
        del server
    if os.environ.get("WRITE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    assert found == PROMPTS
