"""The page docs/options.md, made from the option table."""

from .help import default_text, env_text, status_text
from .table import TOOLS, Option, all_options, gone_options, options_of

INTRODUCTION = """# Options

<!-- Made from pyllama/options/options.json by scripts/generate_options_doc.py. Do not edit by hand. -->

How values are read:

- In names that start with `--`, `_` and `-` are the same. The value is the next argument; `--name=value` is not a form.
- Rising priority: defaults, `/etc/llama.cpp/config.ini`, `$XDG_CONFIG_HOME/llama.cpp/config.ini` (else
  `~/.config/llama.cpp/config.ini`), environment variables, command line. `llama-bench` reads its command line only.
- In config files only the part before any section and the section `[*]` count. Keys are option names without dashes, or
  variable names.
- A repeated option warns and its last value counts; options marked *repeatable* collect their values.
- In comma lists, double quotes protect commas and `""` is one quote.
- Integers are read up to the first character that is no digit.
- Flags in the environment take `on`, `enabled`, `true`, `1` and `off`, `disabled`, `false`, `0`; a `LLAMA_ARG_NO_...`
  variable switches its flag off by being there.

`llama-tokenize` also takes the other common and sampling options, and `llama-perplexity` the sampling options, as
llama.cpp's programs do; they have no effect there.

Status: an empty cell means that the option works. *not yet*: known, and the start stops with a message when the option
asks for something. *no effect*: accepted, because the answer is the same without it.
"""

GROUPS = (
    ("common", "Model, context, threads, log"),
    ("sampling", "Sampling"),
    ("server", "Server and chat"),
    ("cli", "Command-line chat"),
    ("multimodal", "Images, audio, video"),
    ("speculative", "Speculative decoding"),
    ("router", "Several models"),
    ("scoring", "llama-perplexity and llama-imatrix"),
    ("tokenize", "llama-tokenize"),
    ("preset", "Presets and keys of preset files"),
    ("bench", "llama-bench"),
)


def options_document() -> str:
    parts = [INTRODUCTION]
    for group, title in GROUPS:
        rows = [option for option in all_options() if option.group == group and option.status != "removed"]
        parts.append(f"## {title}\n")
        parts.append("| Option | Programs | Default | Environment | Meaning | Status |")
        parts.append("|---|---|---|---|---|---|")
        parts += [_row(option) for option in rows]
        parts.append("")
    parts.append("## Removed spellings\n\nThese are errors that name what to write instead.\n")
    parts.append("| Spelling | Instead |")
    parts.append("|---|---|")
    for option in all_options():
        if option.status == "removed":
            parts.append(f"| {_code(option.names)} | {_code(option.replacement)} |")
    parts += [f"| `{old}` | `{new}` |" for old, new in gone_options().items()]
    return "\n".join(parts) + "\n"


def _row(option: Option) -> str:
    names = _code(option.names + option.negated)
    if option.metavar:
        names += f" {_escaped(option.metavar)}"
    programs = ", ".join(tool.removeprefix("llama-") for tool in TOOLS if tool in option.tools)
    variants = {tool: _variant(option, tool) for tool in TOOLS if tool in option.tools}
    default = _per_program({tool: variant[0] for tool, variant in variants.items()})
    status = _per_program({tool: variant[1] for tool, variant in variants.items()})
    meaning = option.help + (" *Repeatable.*" if option.append else "")
    cells = (names, programs, default, env_text(option).removeprefix("env: "), _escaped(meaning), status)
    return "| " + " | ".join(cells) + " |"


def _variant(option: Option, tool: str) -> tuple[str, str]:
    own = next(candidate for candidate in options_of(tool) if candidate.names == option.names)
    default = default_text(own).removeprefix("default: ")
    status = status_text(own).replace("not supported yet", "*not yet*").replace("no effect", "*no effect*")
    return (f"`{_escaped(default)}`" if default else "", _escaped(status))


def _per_program(texts: dict[str, str]) -> str:
    """One text when all programs agree, else each with its program."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{tool.removeprefix('llama-')}: {text or 'works'}" for tool, text in texts.items())


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
