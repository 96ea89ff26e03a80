"""Prompt formats that are a row of turns, as a table: what stands before and after the content of each role.

Each row becomes Jinja source, so that it is rendered like every other template. The names are llama-server's.
"""

from __future__ import annotations

import json
from typing import NamedTuple


class Turns(NamedTuple):
    """Text before and after the content of each role.

    opens: what begins an answer. begins: what begins the prompt. trims: the roles whose content loses white space at
    its ends. without_system: what stands in the place of a system message that is not there.
    merges_system: a system message is put into the next message of the user, before its content, with `system` around
    it. separator: before every message but the first, or, where system messages are merged, before those of the user.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    opens: str = ""
    begins: str = ""
    trims: tuple[str, ...] = ()
    without_system: str = ""
    merges_system: bool = False
    separator: str = ""


ALL = ("system", "user", "assistant")
_END_OF_SENTENCE = "<｜end▁of▁sentence｜>"


def _same(before: str, after: str, opens: str, *, trims: tuple[str, ...] = ()) -> Turns:
    """Turns that differ in the name of the role only, which stands for `ROLE` in `before`."""
    system, user, assistant = ((before.replace("ROLE", role), after) for role in ALL)
    return Turns(system, user, assistant, opens, trims=trims)


def _bailing(after: str, opens: str = "", without_system: str = "") -> Turns:
    roles = [(f"<role>{role}</role>", after) for role in ("SYSTEM", "HUMAN", "ASSISTANT")]
    return Turns(*roles, f"<role>ASSISTANT</role>{opens}", without_system=without_system)


def _llama2(*, trims: tuple[str, ...] = (), separator: str = "") -> Turns:
    system = ("<<SYS>>\n", "\n<</SYS>>\n\n")
    user, assistant = ("[INST] ", " [/INST]"), ("", "</s>")
    return Turns(system, user, assistant, trims=trims, merges_system=True, separator=separator)


def _mistral(user: tuple[str, str], assistant: tuple[str, str], *, trims: tuple[str, ...] = ()) -> Turns:
    return Turns(("", "\n\n"), user, assistant, trims=trims, merges_system=True)


TURNS: dict[str, Turns] = {
    "bailing": _bailing(""),
    "bailing-think": _bailing("", "<think>"),
    "bailing2": _bailing("<|role_end|>", without_system="<role>SYSTEM</role>detailed thinking off<|role_end|>"),
    "chatglm3": _same("<|ROLE|>\n ", "", "<|assistant|>")._replace(begins="[gMASK]sop"),
    "chatglm4": _same("<|ROLE|>\n", "", "<|assistant|>\n")._replace(begins="[gMASK]<sop>"),
    "command-r": Turns(
        *(
            (f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>", "<|END_OF_TURN_TOKEN|>")
            for role in ("SYSTEM", "USER", "CHATBOT")
        ),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        trims=ALL,
    ),
    "deepseek": Turns(("", ""), ("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n"), "### Response:\n"),
    "deepseek-ocr": Turns(("", ""), ("", ""), ("", "")),
    "deepseek2": Turns(("", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", _END_OF_SENTENCE), "Assistant:"),
    "deepseek3": Turns(("", "\n\n"), ("<｜User｜>", ""), ("<｜Assistant｜>", _END_OF_SENTENCE), "<｜Assistant｜>"),
    "exaone-moe": _same("<|ROLE|>\n", "<|endofturn|>\n", "<|assistant|>\n", trims=ALL),
    "exaone3": _same("[|ROLE|]", "[|endofturn|]\n", "[|assistant|]", trims=ALL)._replace(user=("[|user|]", "\n")),
    "exaone4": _same("[|ROLE|]", "[|endofturn|]\n", "[|assistant|]", trims=ALL)._replace(user=("[|user|]", "\n")),
    "falcon3": _same("<|ROLE|>\n", "\n", "<|assistant|>\n"),
    "gigachat": Turns(
        ("", "<|message_sep|>"),
        ("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
        ("assistant<|role_sep|>", "<|message_sep|>"),
        "assistant<|role_sep|>",
        begins="<s>",
    ),
    "glmedge": _same("<|ROLE|>\n", "", "<|assistant|>"),
    "gpt-oss": _same("<|start|>ROLE<|message|>", "<|end|>", "<|start|>assistant")._replace(
        assistant=("<|start|>assistant<|message|>", "<|return|>")
    ),
    "granite": (
        granite := _same(
            "<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>"
        )
    ),
    "granite-4.0": granite,
    "granite-4.1": granite,
    "grok-2": Turns(
        ("System: ", "<|separator|>\n\n"),
        ("Human: ", "<|separator|>\n\n"),
        ("Assistant: ", "<|separator|>\n\n"),
        "Assistant:",
        trims=("system", "user"),
    ),
    "hunyuan-dense": Turns(
        ("", "<｜hy_place▁holder▁no▁3｜>"),
        ("<｜hy_User｜>", "<｜hy_Assistant｜>"),
        ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
    ),
    "hunyuan-moe": Turns(("<|startoftext|>", "<|extra_4|>"), ("<|startoftext|>", "<|extra_0|>"), ("", "<|eos|>")),
    "hunyuan-vl": Turns(
        ("", "<｜hy_place▁holder▁no▁3｜>"),
        ("", "<｜hy_User｜>"),
        ("", "<｜hy_Assistant｜>"),
        begins="<｜hy_begin▁of▁sentence｜>",
    ),
    "kimi-k2": _same("<|im_ROLE|>ROLE<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
    "llama2-sys-bos": _llama2(separator="<s>"),
    "llama2-sys-strip": _llama2(trims=ALL),
    "llama4": _same(
        "<|header_start|>ROLE<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        trims=ALL,
    ),
    "megrez": _same("<|role_start|>ROLE<|role_end|>", "<|turn_end|>", "<|role_start|>assistant<|role_end|>"),
    "minicpm": Turns(("", ""), ("<用户>", "<AI>"), ("", ""), trims=ALL),
    "mistral-v1": _mistral((" [INST] ", " [/INST]"), (" ", "</s>")),
    "mistral-v3": _mistral(("[INST] ", "[/INST]"), (" ", "</s>"), trims=("assistant",)),
    "mistral-v3-tekken": _mistral(("[INST]", "[/INST]"), ("", "</s>")),
    "mistral-v7-tekken": Turns(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>")),
    "monarch": _same("ROLE\n", "</s>\n", "<s>assistant\n")._replace(separator="<s>"),
    "openchat": Turns(
        ("", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    "orion": Turns(("", "\n\n"), ("Human: ", "\n\nAssistant: </s>"), ("", "</s>"), merges_system=True),
    "pangu-embedded": Turns(
        ("[unused9]系统：", "[unused10]"),
        ("[unused9]用户：", "[unused10]"),
        ("[unused9]助手：", "[unused10]"),
        "[unused9]助手：",
        without_system="[unused9]系统：[unused10]",
    ),
    "phi4": _same("<|im_start|>ROLE<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "rwkv-world": Turns(("System: ", "\n\n"), ("User: ", "\n\nAssistant:"), (" ", "\n\n"), trims=ALL),
    "seed_oss": _same("<seed:bos>ROLE\n", "<seed:eos>", "<seed:bos>assistant\n", trims=("assistant",)),
    "smolvlm": Turns(
        ("", "\n\n"),
        ("User: ", "<end_of_utterance>\n"),
        ("Assistant: ", "<end_of_utterance>\n"),
        "Assistant:",
        begins="<|im_start|>",
    ),
    "solar-open": _same("<|begin|>ROLE<|content|>", "<|end|>", "<|begin|>assistant"),
    "vicuna": Turns(("", "\n\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    "vicuna-orca": Turns(("SYSTEM: ", "\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
    # The format has no system message. llama-server leaves one out; here the user's first message begins with it.
    "yandex": Turns(
        ("", "\n\n"),
        (" Пользователь: ", "\n\n"),
        (" Ассистент: ", "\n\n"),
        " Ассистент:[SEP]",
        merges_system=True,
    ),
    "zephyr": _same("<|ROLE|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}


def template_source(turns: Turns) -> str:
    """The format as a Jinja template."""

    def literal(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def content(role: str) -> str:
        return "message.content | trim" if role in turns.trims else "message.content"

    def turn(role: str, prefix: str = "") -> str:
        before, after = getattr(turns, role)
        return f"{{{{- {literal(before)} ~ {prefix}({content(role)}) ~ {literal(after)} -}}}}"

    lines = [f"{{{{- {literal(turns.begins)} -}}}}"] if turns.begins else []
    if turns.without_system:
        lines.append("{%- if not messages or messages[0].role != 'system' -%}")
        lines += [f"{{{{- {literal(turns.without_system)} -}}}}", "{%- endif -%}"]
    system_turn, user_turn, between = turn("system"), turn("user"), "not loop.first"
    if turns.merges_system:
        lines.append("{%- set state = namespace(system='', has_turns=false) -%}")
        before, after = map(literal, turns.system)
        system_turn = f"{{%- set state.system = {before} ~ ({content('system')}) ~ {after} -%}}"
        user_turn = turn("user", "state.system ~ ") + "{%- set state.system = '' -%}{%- set state.has_turns = true -%}"
        between = "state.has_turns and message.role == 'user'"
    lines.append("{%- for message in messages -%}")
    if turns.separator:
        lines.append(f"{{%- if {between} -%}}{{{{- {literal(turns.separator)} -}}}}{{%- endif -%}}")
    lines += ["{%- if message.role == 'system' -%}", system_turn]
    lines += ["{%- elif message.role == 'assistant' -%}", turn("assistant"), "{%- else -%}", user_turn]
    lines += ["{%- endif -%}", "{%- endfor -%}"]
    if turns.opens:
        lines.append(f"{{%- if add_generation_prompt -%}}{{{{- {literal(turns.opens)} -}}}}{{%- endif -%}}")
    return "\n".join(lines)
