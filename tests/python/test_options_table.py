"""The option table: the spellings users of llama.cpp know are there, rows are well formed, the page is current."""

import subprocess
from pathlib import Path

import pytest
from generate_options_doc import PAGE

from pyllama.options import TOOLS, options_of, parse
from pyllama.options.document import options_document
from pyllama.options.help import bash_completion, help_text
from pyllama.options.table import STATUSES, all_options, gone_options
from pyllama.options.values import _PARSERS

FROZEN = Path(__file__).parent.parent / "golden" / "option_names.txt"


def test_imatrix_knows_exactly_the_frozen_spellings():
    lines = FROZEN.read_text(encoding="utf-8").splitlines()
    frozen = {line.split(maxsplit=1)[1] for line in lines if not line.startswith("#")}
    assert {name for option in options_of("llama-imatrix") for name in option.names + option.negated} == frozen


@pytest.mark.parametrize("tool", TOOLS)
def test_no_spelling_stands_for_two_options(tool):
    names = [name for option in options_of(tool) for name in option.names + option.negated]
    assert len(names) == len(set(names))


def test_gone_spellings_are_not_in_the_table():
    assert not set(gone_options()) & {name for option in all_options() for name in option.names}


@pytest.mark.parametrize("tool", TOOLS)
def test_rows_are_well_formed(tool):
    for option in options_of(tool):
        where = option.long_name
        assert option.status in STATUSES, where
        assert option.type == "flag" or option.type in _PARSERS, where
        assert option.dest.isidentifier(), where
        assert option.help.endswith("."), where
        if option.status in ("planned", "accepted", "deprecated"):
            assert option.reason, where
        if option.status == "removed":
            assert option.replacement, where
        if option.choices and option.default not in (None, "none") and not isinstance(option.default, tuple):
            assert option.default in option.choices, where
        for value in option.supported:
            assert value in option.choices, where
            assert option.unsupported_reason, where
        if option.append:
            assert isinstance(option.default, tuple) or option.into, where
        if option.negated:
            assert option.is_flag, where


@pytest.mark.parametrize("tool", TOOLS)
def test_dests_that_options_share_have_one_default(tool):
    defaults = {}
    for option in options_of(tool):
        assert defaults.setdefault(option.dest, option.default) == option.default, option.dest


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_given_is_accepted_and_gives_every_default(tool):
    options = parse(tool, [], {}, config_files=())
    for option in options_of(tool):
        assert options.values[option.dest] == option.default
        assert not options.given(option.dest)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_default_is_accepted_when_given_as_text(tool):
    for option in options_of(tool):
        plain = isinstance(option.default, (int, float, str)) and not isinstance(option.default, bool)
        typed = option.command_line and option.type in ("int", "float", "enum", "on_off", "layers")
        if typed and plain and option.default != "none":
            options = parse(tool, [option.long_name, str(option.default)], {}, config_files=())
            assert options.values[option.dest] == option.default, option.long_name
            assert not [notice for notice in options.notices if "deprecated" not in notice], option.long_name


@pytest.mark.parametrize("tool", TOOLS)
def test_help_mentions_every_option_that_can_be_given(tool):
    text = help_text(tool)
    for option in options_of(tool):
        if option.command_line and option.status != "removed":
            assert all(name in text for name in option.names + option.negated), option.long_name


def test_options_page_is_what_the_table_gives():
    assert PAGE.read_text(encoding="utf-8") == options_document(), "run python scripts/generate_options_doc.py"


def test_options_page_has_a_row_for_every_option():
    page = options_document()
    for option in all_options():
        assert f"`{option.names[0]}`" in page


def test_bash_completion_is_valid_and_completes_names(tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(bash_completion())
    check = (
        f"source {script}; COMP_WORDS=(llama-server --ctx-s); COMP_CWORD=1; _pyllama_complete; "
        'printf "%s" "${COMPREPLY[*]}"'
    )
    done = subprocess.run(["bash", "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "--ctx-size"
    assert done.stderr == ""
