"""Chat templates that can be chosen by name, written here after each family's published prompt format."""

from __future__ import annotations

from collections.abc import Mapping

from pyllama.chat_template_turns import TURNS, template_source

_CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_LLAMA2 = """\
{{- bos_token -}}
{%- set state = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set state.system = message.content ~ '\\n' -%}
    {%- elif message.role == 'user' -%}
        {{- '[INST] ' ~ state.system ~ message.content ~ ' [/INST]' -}}
        {%- set state.system = '' -%}
    {%- else -%}
        {{- message.content ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

# The variant with system markers, for models trained with them.
_LLAMA2_SYS = _LLAMA2.replace("message.content ~ '\\n' -%}", "'<<SYS>>\\n' ~ message.content ~ '\\n<</SYS>>\\n\\n' -%}")

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ message.content | trim ~ '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

_GEMMA = """\
{{- bos_token -}}
{%- set state = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set state.system = message.content | trim ~ '\\n\\n' -%}
    {%- else -%}
        {%- set role = 'model' if message.role == 'assistant' else message.role -%}
        {{- '<start_of_turn>' ~ role ~ '\\n' ~ state.system ~ message.content | trim ~ '<end_of_turn>\\n' -}}
        {%- set state.system = '' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

_MISTRAL_V7 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- '[SYSTEM_PROMPT] ' ~ message.content ~ '[/SYSTEM_PROMPT]' -}}
    {%- elif message.role == 'user' -%}
        {{- '[INST] ' ~ message.content ~ '[/INST]' -}}
    {%- else -%}
        {{- ' ' ~ message.content ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

_PHI3 = """\
{%- for message in messages -%}
    {{- '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>\\n' -}}
{%- endif -%}
"""

BUILTIN_TEMPLATES: Mapping[str, str] = {
    "chatml": _CHATML,
    "llama2": _LLAMA2,
    "llama2-sys": _LLAMA2_SYS,
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    "mistral-v7": _MISTRAL_V7,
    "phi3": _PHI3,
    **{name: template_source(turns) for name, turns in TURNS.items()},
}

DEFAULT_TEMPLATE = "chatml"
"""Used for a model without a template of its own."""
