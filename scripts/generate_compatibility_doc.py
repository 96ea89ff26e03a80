"""Write docs/compatibility.md from the tables: `python scripts/generate_compatibility_doc.py [--check]`.

Sources: the option table, the tables of endpoints and of the fields of bodies, and the route tables of the server and
the router. With --check nothing is written; exit code 1 when the file differs from what the tables give.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from generated_page import ROOT, write_or_check

sys.path.insert(0, str(ROOT))

from pyllama.options.document import GROUPS
from pyllama.options.environment import VARIABLES
from pyllama.options.table import Option, gone_options, options_of
from pyllama.server.body_fields import GENERATION, BodyField
from pyllama.server.endpoints import ENDPOINTS, Endpoint

PAGE = ROOT / "docs" / "compatibility.md"

INTRODUCTION = """# Compatibility with llama-server

<!-- Made from the server's tables by scripts/generate_compatibility_doc.py. Do not edit by hand. -->

Every option, endpoint and field of a request of llama-server (build b11434), and what becomes of it here:

- *works*: has its effect.
- *no effect*: accepted, because the answer is the same without it.
- *refused*: not supported. An option stops the start with a message, an endpoint or field gives an error with its name;
  values that ask for nothing are accepted. Fields that llama-server does not know either are ignored, as it does.

What options mean and their defaults: [options.md](options.md). How the server behaves: [server.md](server.md).
"""

DIFFERENCES = """## Deliberate differences

- Answers to browsers: with `--cors-origins '*'`, the default, and no API key the origin is not echoed and credentials
  are not allowed; otherwise any web page could use the server.
- JSON is read strictly: `NaN`, `Infinity`, bytes that are not UTF-8, and numbers beyond double precision are refused.
- `--device` takes CPUs too; with `--no-kv-offload` GPUs still compute attention, over host memory. `--fit` works with
  `--split-mode tensor`, and moves experts to the CPU from the first layer on, as `--n-cpu-moe` does.
- The object form of `tool_choice` names a tool; llama-server takes it for `auto`.
- `/v1/responses`: `status` is `incomplete` when the limit ended the answer, events carry `sequence_number`, indices and
  whole responses, `text.format` counts. `/v1/completions` honours `echo`, fills OpenAI's arrays of `logprobs`, and
  refuses `suffix` and `best_of`. `dimensions` of embeddings counts.
- A queue of 1024 prompts; beyond that 503 with `Retry-After`. When memory is full the newest request waits; none fails.
- A first piece of a tool call carries `"arguments": ""`.
- An EAGLE-3 file as `--spec-draft-model` needs no `--spec-type`; llama-server then runs without speculation.
- Metrics are written with all digits.
"""


def compatibility_document() -> str:
    options = [option for option in options_of("llama-server") if option.status != "removed"]
    states = [option_state(option)[0] for option in options]
    parts = [INTRODUCTION, DIFFERENCES, "## Options\n", _counts("options", states), ""]
    for group, title in GROUPS:
        rows = [option for option in options if option.group == group]
        if rows:
            parts += [f"### {title}\n", *_table(("Option", "State", "Why"), map(_option_row, rows)), ""]
    parts.append("### Removed spellings\n\nRefused with what to write instead, as in llama-server:\n")
    parts.append(", ".join(_code([name]) for name in _removed_names()) + "\n")
    parts.append("### Environment variables without an option\n")
    rows = ((_code([v.name]), "no effect" if v.no_effect else "works", v.meaning, v.no_effect) for v in VARIABLES)
    parts += [*_table(("Variable", "State", "What", "Why"), rows), ""]
    served = [endpoint for endpoint in ENDPOINTS if is_served(endpoint)]
    states = ["works" if endpoint in served else "refused" for endpoint in ENDPOINTS for _ in endpoint.paths]
    parts += ["## Endpoints\n", _counts("methods of paths", states), ""]
    parts += [*_table(("Method", "Paths", "Purpose", "State", "Why"), map(_endpoint_row, ENDPOINTS)), ""]
    parts.append("## Fields of requests\n")
    parts += ["### Every generation\n", *_table(_FIELD_HEAD, map(_field_row, GENERATION)), ""]
    bodies: list[tuple[Sequence[BodyField], list[str]]] = []
    for endpoint in served:
        if endpoint.fields:
            same = next((names for fields, names in bodies if fields is endpoint.fields), None)
            if same is None:
                same = []
                bodies.append((endpoint.fields, same))
            same.append(f"`{endpoint.method} {endpoint.paths[0]}`")
    for fields, names in bodies:
        parts.append(f"### {', '.join(names)}\n")
        own = [field for field in fields if field not in GENERATION]
        if len(fields) - len(own) > len(GENERATION) // 2:
            parts.append("The fields of every generation, but for these:\n")
        else:
            own = list(fields)
        parts += [*_table(_FIELD_HEAD, map(_field_row, own)), ""]
    return "\n".join(parts)


_FIELD_HEAD = ("Field", "State", "What", "Why")


def is_served(endpoint: Endpoint) -> bool:
    """Whether it does what it is for; else its row says why, and with which status it answers."""
    return not endpoint.absent


def option_state(option: Option) -> tuple[str, str]:
    """Its state and the reason for it."""
    if option.status == "planned":
        return "refused", option.reason
    if option.status in ("accepted", "deprecated"):
        return "no effect", option.reason
    if option.supported:
        return "works", f"values: {', '.join(option.supported)}; others are refused: {option.unsupported_reason}"
    return "works", ""


def field_state(field: BodyField) -> tuple[str, str]:
    """Its state and the reason for it."""
    if field.refused:
        return "refused", field.refused
    return ("no effect", field.no_effect) if field.no_effect else ("works", "")


def _removed_names() -> list[str]:
    removed = [name for option in options_of("llama-server") if option.status == "removed" for name in option.names]
    return removed + list(gone_options())


def _counts(what: str, states: Sequence[str]) -> str:
    counts = Counter(states)
    shown = ", ".join(f"{counts[state]} {state}" for state in ("works", "no effect", "refused") if counts[state])
    return f"{len(states)} {what}: {shown}."


def _option_row(option: Option) -> tuple[str, ...]:
    return (_code(option.names + option.negated), *option_state(option))


def _endpoint_row(endpoint: Endpoint) -> tuple[str, ...]:
    purpose = endpoint.purpose + (" (router)" if endpoint.router else "")
    why = f"needs {endpoint.needs}" if endpoint.needs else ""
    state = "works"
    if not is_served(endpoint):
        state, why = "refused", f"{endpoint.absent}; {endpoint.status}"
    return endpoint.method, _code(endpoint.paths), purpose, state, why


def _field_row(field: BodyField) -> tuple[str, ...]:
    state, why = field_state(field)
    return _code(field.names), state, field.help, why


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, compatibility_document(), "generate_compatibility_doc.py"))
