"""Options of models: the INI file of `--models-preset`, and how they become the command line of a child."""

from __future__ import annotations

import configparser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama.errors import PyllamaError
from pyllama.options import Option, OptionError, options_of
from pyllama.options.parser import command_line_assignments
from pyllama.options.sources import EVERY, HEAD, Assignment, Source, config_names, read_ini
from pyllama.options.values import parse_bool, parse_value

TOOL = "llama-server"
STOP_TIMEOUT: int = next(option.default for option in options_of(TOOL) if option.dest == "stop_timeout")

# What the router decides for itself or sets for its children.
OWN_OPTIONS = frozenset({
    *("host", "port", "reuse_port", "alias", "api_key", "api_key_file", "api_prefix", "ssl_key_file", "ssl_cert_file"),
    *("cors_origins", "cors_methods", "cors_headers", "cors_credentials", "path", "ui", "ui_config", "ui_config_file"),
    *("log_file", "log_jsonl", "models_dir", "models_preset", "models_max", "models_autoload"),
    *("ui_mcp_proxy", "load_on_startup", "stop_timeout", "dedup_cache_models"),
})  # fmt: skip


class CatalogError(PyllamaError):
    """The models that a router was given cannot be listed; the text says why."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Options of one model, `[*]` included. `text`: its own section as written."""

    aliases: tuple[str, ...] = ()
    loads_on_startup: bool = False
    stop_timeout: int = STOP_TIMEOUT
    hides_cached_twin: bool = False
    assignments: tuple[Assignment, ...] = ()
    text: str = ""

    def value(self, dest: str) -> str:
        """What the section gives for an option, or empty."""
        return next((given.text for given in reversed(self.assignments) if given.option.dest == dest), "")


# What a preset that came from a hub may set: how a model is loaded, what it answers with. Nothing that names a file, an
# address, a key or a program of this machine.
_OF_A_HUB = frozenset({
    *("ctx_size", "n_predict", "batch_size", "ubatch_size", "keep", "swa_full", "flash_attn", "escape", "override_kv"),
    *("rope_scaling", "rope_freq_scale", "rope_freq_base", "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_slow", "yarn_beta_fast", "kv_offload", "cache_type_k", "cache_type_v", "n_gpu_layers", "split_mode"),
    *("cpu_moe", "n_cpu_moe", "fit", "hf_repo", "hf_file", "alias", "tags", "kv_unified", "kv_unified_per_slot"),
    *("ctx_checkpoints", "checkpoint_min_step", "cache_idle_slots", "context_shift", "reverse_prompt", "special"),
    *("warmup", "spm_infill", "pooling", "parallel", "cont_batching", "embd_normalize", "embeddings", "reranking"),
    *("chat_template", "chat_template_kwargs", "cache_prompt", "cache_reuse", "jinja", "reasoning", "reasoning_format"),
    *("reasoning_effort", "reasoning_budget", "reasoning_budget_message", "reasoning_preserve", "skip_chat_parsing"),
    *("prefill_assistant", "slot_prompt_similarity", "sleep_idle_seconds", "load_on_startup", "stop_timeout"),
    "dedup_cache_models",
})  # fmt: skip
_GROUPS_OF_A_HUB = frozenset({"sampling", "speculative", "multimodal"})
_LOCAL_METAVARS = frozenset({"FNAME", "FILE", "PATH", "DIR", "URL"})


def _may_come_from_a_hub(option: Option) -> bool:
    if option.dest in _OF_A_HUB:
        return True
    names_file = option.type.endswith("_file") or option.metavar in _LOCAL_METAVARS
    return option.group in _GROUPS_OF_A_HUB and not names_file


def read_presets(path: Path, *, from_hub: bool = False) -> tuple[Preset, dict[str, Preset]]:
    """What `[*]` says for every model, and the models that have a section.

    from_hub: the file came from a repository, so it may not set what concerns this machine. Raises `CatalogError`.
    """
    try:
        sections = read_ini(path, strict=True)
    except UnicodeDecodeError:
        raise CatalogError(f"{path}: is not UTF-8") from None
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror}") from None
    except configparser.Error as error:
        raise CatalogError(f"{path}: {' '.join(str(error).split())}") from None
    if from_hub:
        for keys in sections.values():
            for given in _assignments(path, keys):
                if not _may_come_from_a_hub(given.option):
                    raise CatalogError(f"{given.spelling}: a preset of a hub may not set this option")
    every = {**sections.pop(HEAD), **sections.pop(EVERY, {})}
    return _preset(path, every, {}), {name: _preset(path, every, keys) for name, keys in sections.items()}


def _preset(path: Path, every: Mapping[str, str], keys: Mapping[str, str]) -> Preset:
    layers = [list(_assignments(path, every)), list(_assignments(path, keys))]
    given = {assignment.option.dest: assignment for layer in layers for assignment in layer}
    own = {assignment.option.dest: assignment for assignment in layers[1]}

    def is_on(dest: str) -> bool:
        return dest in given and _value(given[dest]) is True

    return Preset(
        aliases=_value(own["alias"]) if "alias" in own else (),
        loads_on_startup=is_on("load_on_startup"),
        stop_timeout=_value(given["stop_timeout"]) if "stop_timeout" in given else STOP_TIMEOUT,
        hides_cached_twin=is_on("dedup_cache_models"),
        assignments=tuple(merged(layers)),
        text="".join(f"{key} = {value}\n" for key, value in keys.items()),
    )


def _assignments(path: Path, keys: Mapping[str, str]) -> Iterable[Assignment]:
    names = config_names(options_of(TOOL))
    for key, text in keys.items():
        if key == "version":
            continue
        found = names.get(key) or names.get(key.replace("_", "-"))
        if found is None:
            raise CatalogError(f"{path}: unknown key '{key}'")
        option, negated = found
        yield Assignment(option, Source.CONFIG_FILE, f"{path}: {key}", text, negated)


def _value(assignment: Assignment) -> Any:
    try:
        if assignment.option.is_flag:
            return parse_bool(assignment.text) is not assignment.negated
        return parse_value(assignment.option, assignment.text)
    except ValueError as error:
        raise CatalogError(f"{assignment.spelling}: {error}") from None


def merged(layers: Sequence[Iterable[Assignment]]) -> Iterable[Assignment]:
    """Later layers win, option by option."""
    chosen: dict[str, list[Assignment]] = {}
    for layer in layers:
        given: dict[str, list[Assignment]] = {}
        for assignment in layer:
            given.setdefault(assignment.option.dest, []).append(assignment)
        for dest, assignments in given.items():
            chosen.pop(dest, None)  # the place moves too: among options that set one value, the last in line wins
            chosen[dest] = assignments
    return [assignment for assignments in chosen.values() for assignment in assignments]


def command_line(argv: Sequence[str]) -> tuple[Assignment, ...]:
    """The router's own command line, as far as it is meant for its children."""
    try:
        given = list(command_line_assignments(TOOL, argv))
    except OptionError as error:  # it was parsed before
        raise CatalogError(str(error)) from None
    return tuple(assignment for assignment in given if assignment.option.dest not in OWN_OPTIONS)


def child_arguments(assignments: Iterable[Assignment]) -> list[str]:
    """Options as the arguments of a process. Raises `CatalogError`."""
    argv: list[str] = []
    for assignment in assignments:
        option = assignment.option
        if option.dest in OWN_OPTIONS:
            continue
        if not option.is_flag:
            values = assignment.text.split() if option.type == "pair" else [assignment.text]
            argv += [option.long_name, *values]
            continue
        is_on = not assignment.negated if assignment.source is Source.COMMAND_LINE else _value(assignment)
        if is_on:
            argv.append(option.long_name)
        elif option.negated:
            argv.append(option.negated[0])
    return argv
