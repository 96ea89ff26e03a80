"""The option parser: how names and values are read, which source wins, and what bad input gives."""

import json
from pathlib import Path

import pytest

from pyllama.options import OptionError, Source, parse, parse_options
from pyllama.options.errors import Information


def read(*argv, tool="llama-server", environ=None, config_files=()):
    return parse(tool, argv, environ or {}, config_files=config_files)


def refusal(*argv, **kwargs) -> str:
    with pytest.raises(OptionError) as caught:
        read(*argv, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ names and values


@pytest.mark.parametrize("spelling", ["-c", "--ctx-size", "--ctx_size"])
def test_underscores_and_dashes_are_the_same_in_long_names(spelling):
    assert read(spelling, "512").ctx_size == 512


def test_single_dash_names_are_literal():
    assert refusal("-no_kvu") == "error: invalid argument: -no_kvu"


@pytest.mark.parametrize("argument", ["--ctx-size=512", "--nonsense", "stray", "-c512"])
def test_unknown_arguments_are_named(argument):
    assert refusal(argument) == f"error: invalid argument: {argument}"


def test_a_missing_value_is_an_error():
    assert refusal("-m", "x", "-c").startswith('error while handling argument "-c": expected value for argument')


def test_the_next_argument_is_the_value_even_if_it_looks_like_an_option():
    assert read("--cors-origins", "-c").cors_origins == "-c"


@pytest.mark.parametrize(("text", "value"), [("12abc", 12), (" 7", 7), ("+9", 9), ("4096.9", 4096), ("0", 0)])
def test_integers_are_read_by_prefix(text, value):
    assert read("-c", text).ctx_size == value


@pytest.mark.parametrize("text", ["1", "-1", "2147483648", "99999999999999999999", "abc", "", " ", "x1"])
@pytest.mark.parametrize("spelling", ["-c", "--ctx-size", "--ctx_size"])
def test_bad_context_sizes_name_option_and_value_and_show_its_usage(spelling, text):
    message = refusal(spelling, text)
    first, _, rest = message.partition("\n")
    assert first.startswith(f'error while handling argument "{spelling}": ')
    assert text.strip() in first
    assert "usage:\n-c, --ctx-size N" in rest
    assert rest.endswith("run with -h")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--temp", "warm"], "expected a number"),
        (["--temp", "nan"], "finite"),
        (["--repeat-penalty", "0"], "greater than 0"),
        (["--repeat-penalty", "inf"], "finite"),
        (["--repeat-last-n", "-1"], "at least 0"),
        (["--port", "65536"], "at most 65535"),
        (["-b", "0"], "at least 1"),
        (["-np", "0"], "at least one slot"),
        (["--seed", "4294967296"], "unsigned 32-bit"),
        (["-ctk", "q9"], "expected one of f32"),
        (["-fa", "maybe"], "expected one of on, off, auto"),
        (["-ngl", "many"], "expected a number of layers"),
        (["--rope-scale", "0"], "must not be 0"),
        (["--chat-template-kwargs", "[1]"], "JSON object"),
        (["--chat-template-kwargs", "{"], "JSON object"),
        (["-l", "15043"], "signed bias"),
        (["--override-kv", "a=b"], "key=type:value"),
        (["--override-kv", "a=bool:1"], "true or false"),
        (["--api-key", '"a'], "double quote is not closed"),
    ],
)
def test_bad_values_say_what_was_expected(argv, reason):
    message = refusal(*argv)
    assert message.startswith(f'error while handling argument "{argv[0]}"')
    assert reason in message.partition("\n")[0]


@pytest.mark.parametrize(("text", "value"), [("-1", 0xFFFFFFFF), ("4294967295", 0xFFFFFFFF), ("42", 42)])
def test_seed_is_unsigned_32_bit(text, value):
    assert read("-s", text).seed == value


def test_temperature_is_clamped_at_zero():
    assert read("--temp", "-3").temperature == 0.0


def test_rope_scale_is_the_reciprocal_of_the_frequency_scale():
    assert read("--rope-scale", "4").rope_freq_scale == 0.25


def test_csv_rules_protect_commas_with_double_quotes():
    assert read("--api-key", '"a,b","c""d",e').api_key == ("a,b", 'c"d', "e")


def test_list_options_collect_their_repetitions_without_a_warning():
    options = read("-l", "5-0.5", "--logit-bias", "7+2", "--api-key", "a", "--api-key", "b,c")
    assert options.logit_bias == ((5, -0.5), (7, 2.0))
    assert options.api_key == ("a", "b", "c")
    assert options.notices == ()


def test_a_repeated_option_warns_and_the_last_value_counts():
    options = read("-c", "512", "--ctx-size", "1024")
    assert options.ctx_size == 1024
    assert any("more than once" in notice and "--ctx-size" in notice for notice in options.notices)


def test_override_kv_reads_all_types():
    options = read("--override-kv", "a=int:-3,b=float:0.5,c=bool:true", "--override-kv", "d=str:x:y=z")
    assert dict(options.override_kv) == {"a": -3, "b": 0.5, "c": True, "d": "x:y=z"}


@pytest.mark.parametrize(("word", "value"), [("1", "on"), ("true", "on"), ("disabled", "off"), ("-1", "auto")])
def test_on_off_words_have_one_value(word, value):
    assert read("--log-colors", word).log_colors == value


def test_flags_and_their_negations():
    assert read().slots is True
    assert read("--no-slots").slots is False
    assert read("-nocb").cont_batching is False
    assert read("--no-slots", "--slots").slots is True


def test_verbose_raises_verbosity_to_the_maximum():
    assert read().verbosity == 3
    assert read("-v").verbosity == 2**31 - 1
    assert read("-v", "-lv", "1").verbosity == 1


# ------------------------------------------------------------------------------------------------ samplers


def test_sampler_names_letters_and_aliases_give_the_same_chain():
    by_name = read("--samplers", "Top-K;nucleus;temp").samplers
    assert by_name == ("top_k", "top_p", "temperature")
    assert read("--sampler-seq", "kpt").samplers == by_name
    assert read("--sampling-seq", "KPT").samplers == by_name


def test_unknown_samplers_are_skipped_with_a_warning():
    options = read("--samplers", "top_k;tfs_z")
    assert options.samplers == ("top_k",)
    assert any("tfs_z" in notice for notice in options.notices)


def test_dry_breakers_replace_the_defaults_and_none_leaves_none():
    assert read().dry_sequence_breaker == ("\n", ":", '"', "*")
    assert read("--dry-sequence-breaker", "a", "--dry-sequence-breaker", "b").dry_sequence_breaker == ("a", "b")
    assert read("--dry-sequence-breaker", "none").dry_sequence_breaker == ()


# ------------------------------------------------------------------------------------------------ files and escapes


def test_files_are_read_into_the_option_they_stand_for(tmp_path):
    text, keys, template = tmp_path / "p.txt", tmp_path / "keys", tmp_path / "t.jinja"
    text.write_text("hello\n\n")
    keys.write_text("# comment\nk1\n\nk2\n")
    template.write_text("{{ messages }}\n")
    cli = read("-f", str(text), tool="llama-cli")
    assert (cli.prompt, cli.file) == ("hello\n", str(text))
    server = read("--api-key", "k0", "--api-key-file", str(keys), "--chat-template-file", str(template))
    assert server.api_key == ("k0", "k1", "k2")
    assert server.chat_template == "{{ messages }}\n"
    assert server.given("chat_template")


def test_an_unreadable_file_is_a_fault_of_its_option(tmp_path):
    missing = tmp_path / "none"
    message = refusal("--api-key-file", str(missing))
    assert message.startswith('error while handling argument "--api-key-file": cannot read file')
    assert "No such file" in message


def test_escapes_are_processed_in_prompts_unless_switched_off():
    assert read("-p", r"a\nb\x41\q\\", tool="llama-cli").prompt == "a\nbA\\q\\"
    assert read("-p", r"a\nb", "--no-escape", tool="llama-cli").prompt == r"a\nb"
    assert read("-r", r"\n\n", "-r", "User:").reverse_prompt == ("\n\n", "User:")


# ------------------------------------------------------------------------------------------------ sources


def config(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.contract("own 10")
def test_precedence_is_default_config_files_environment_command_line(tmp_path):
    system = config(tmp_path, "system.ini", "ctx-size = 1024\nport = 1\nbatch-size = 64\n")
    user = config(tmp_path, "user.ini", "[*]\nport = 2\nLLAMA_ARG_BATCH = 128\n[some-model]\nport = 9\n")
    environ = {"LLAMA_ARG_BATCH": "256", "LLAMA_ARG_TOP_K": "3"}
    options = read("--top-k", "4", environ=environ, config_files=[system, user])
    assert (options.ctx_size, options.port, options.batch_size, options.top_k) == (1024, 2, 256, 4)
    assert options.source("ctx_size") is Source.CONFIG_FILE
    assert options.source("batch_size") is Source.ENVIRONMENT
    assert options.source("top_k") is Source.COMMAND_LINE
    assert options.source("host") is Source.DEFAULT
    assert not options.given("host")
    assert any("LLAMA_ARG_TOP_K" in notice for notice in options.notices)
    assert sum(notice.startswith("using config file") for notice in options.notices) == 2


def test_command_line_lists_replace_those_of_the_environment():
    assert read("--api-key", "b", environ={"LLAMA_API_KEY": "a"}).api_key == ("b",)


def test_unknown_config_keys_are_ignored_with_a_warning(tmp_path):
    options = read(config_files=[config(tmp_path, "c.ini", "version = 1\nnonsense = 3\nno-slots = true\nc = 300\n")])
    assert options.slots is False
    assert options.ctx_size == 300
    assert [notice for notice in options.notices if "nonsense" in notice]
    assert not [notice for notice in options.notices if "version" in notice]


def test_a_broken_config_file_or_value_is_an_error(tmp_path):
    assert "config file" in refusal(config_files=[config(tmp_path, "a.ini", "no equals sign\n")])
    message = refusal(config_files=[config(tmp_path, "b.ini", "ctx-size = many\n")])
    assert message.startswith("error while handling config file key")
    assert "many" in message


def test_default_config_files_follow_xdg(tmp_path):
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    config(folder, "config.ini", "port = 77\n")
    assert parse("llama-server", [], {"XDG_CONFIG_HOME": str(tmp_path)}).port == 77


@pytest.mark.parametrize(
    ("environ", "value"),
    [
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "off"}, False),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "enabled"}, True),
        ({"LLAMA_ARG_NO_ENDPOINT_SLOTS": ""}, False),
        ({"LLAMA_ARG_NO_ENDPOINT_SLOTS": "0"}, False),
    ],
)
def test_flag_pairs_in_the_environment(environ, value):
    assert read(environ=environ).slots is value


def test_flags_without_negation_are_only_switched_on_by_the_environment():
    assert read(environ={"LLAMA_ARG_ENDPOINT_METRICS": "1"}).metrics is True
    options = read(environ={"LLAMA_ARG_ENDPOINT_METRICS": "no"})
    assert options.metrics is False
    assert not options.given("metrics")


def test_bad_environment_values_name_the_variable():
    message = refusal(environ={"LLAMA_ARG_CTX_SIZE": "abc"})
    assert message.startswith('error while handling environment variable "LLAMA_ARG_CTX_SIZE"')
    assert 'variable "LLAMA_ARG_SLOTS' not in message
    assert "expected one of on" in refusal(environ={"LLAMA_ARG_ENDPOINT_SLOTS": "perhaps"})


def test_bench_reads_neither_environment_nor_config_files(tmp_path):
    file = config(tmp_path, "c.ini", "threads = 9\n")
    options = read(tool="llama-bench", environ={"LLAMA_ARG_THREADS": "7"}, config_files=[file])
    assert not options.given("threads")


# ------------------------------------------------------------------------------------------------ what is not there


@pytest.mark.parametrize(
    "argv",
    [
        ["--ui"],
        ["-dr", "a/b"],
        ["--mmproj", "x"],
        ["-ctk", "iq4_nl"],
        ["--load-mode", "mlock"],
        ["--embd-gemma-default"],
    ],
)
def test_planned_features_stop_the_start_and_name_the_option(argv):
    message = refusal(*argv)
    assert message.startswith(f"error: not supported yet: {argv[0]}")
    assert message.endswith(")")


@pytest.mark.parametrize(
    "argv",
    [
        ["--typical", "0.5"],
        ["--mirostat", "1"],
        ["--dry-multiplier", "0.8"],
        ["--xtc-probability", "0.5"],
        ["--top-nsigma", "1"],
        ["--dynatemp-range", "0.2"],
        ["--sampler-seq", "xat"],
        ["--dry-base", "1.9"],
        ["--xtc-threshold", "0.3"],
        ["--keep", "0"],
        ["--no-context-shift"],
        ["-ngl", "0"],
        ["-fa", "auto"],
        ["-fa", "on"],
        ["--no-ui"],
        ["--spec-type", "none"],
        ["--load-mode", "mmap"],
        ["--device", "none"],
        ["--split-mode", "none"],
        ["-sm", "row"],
        ["--tensor-split", "1,0,0"],
        ["-ts", "3"],
        ["-mg", "0"],
        ["--no-mmproj"],
        ["-kvu"],
        ["--samplers", "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"],
        ["--reasoning-format", "deepseek"],
        ["--reasoning-budget", "0"],
        ["--offline"],
    ],
)
def test_values_that_ask_for_nothing_are_accepted_silently(argv):
    assert read(*argv).notices == ()


@pytest.mark.parametrize("argv", [["-fa", "off"], ["--no-repack"], ["--threads-http", "4"], ["-dt", "0.1"]])
def test_harmless_options_without_effect_are_accepted_with_one_line(argv):
    (notice,) = read(*argv).notices
    assert notice.startswith(f"note: {argv[0]} ")


def test_a_planned_option_of_the_environment_can_be_switched_off_on_the_command_line():
    environ = {"LLAMA_ARG_PERF": "1"}
    assert "LLAMA_ARG_PERF" in refusal(environ=environ)
    assert read("--no-perf", environ=environ).perf is False


@pytest.mark.parametrize(("old", "new"), [("--draft-max", "--spec-draft-n-max"), ("--draft-min", "--spec-draft-n-min")])
def test_removed_options_name_their_replacement(old, new):
    message = refusal(old, "3")
    assert message.startswith(f"error: {old} was removed; use ")
    assert new in message


@pytest.mark.parametrize("name", ["--mlock", "--no-mmap", "--mmap", "--direct-io"])
def test_spellings_of_older_releases_are_unknown_but_get_a_hint(name):
    first, _, hint = refusal(name).partition("\n")
    assert first == f"error: invalid argument: {name}"
    assert "--load-mode" in hint


# ------------------------------------------------------------------------------------------------ information


@pytest.mark.parametrize("tool", ["llama-server", "llama-cli"])
def test_help_has_four_sections(tool):
    with pytest.raises(Information) as caught:
        read("-m", "x", "-h", tool=tool)
    titles = [line for line in str(caught.value).splitlines() if line.startswith("----- ")]
    assert [title.strip("- ") for title in titles] == [
        "common params",
        "sampling params",
        "speculative params",
        "example-specific params",
    ]


def test_help_works_whatever_the_environment_holds():
    with pytest.raises(Information):
        read("--help", environ={"LLAMA_ARG_CTX_SIZE": "abc"})


def test_version_has_two_lines():
    with pytest.raises(Information) as caught:
        read("--version")
    version, built = str(caught.value).splitlines()
    assert version.startswith("version: ")
    assert " (build " in version
    assert built.startswith("built with ")
    assert " for " in built


@pytest.mark.parametrize(("argv", "code"), [(["-h"], 0), (["--version"], 0), (["--list-devices"], 0), (["--bad"], 1)])
def test_programs_end_with_the_right_code_and_stream(argv, code, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options("llama-server", argv, {}, config_files=())
    assert caught.value.code == code
    out, err = capsys.readouterr()
    assert bool(out) is (code == 0)
    assert bool(err) is (code == 1)


def test_notices_go_to_stderr(capsys):
    parse_options("llama-server", ["--no-repack"], {}, config_files=())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("note: --no-repack")


def test_unknown_dests_are_attribute_errors():
    with pytest.raises(AttributeError, match="llama-server has no option 'nonsense'"):
        _ = read().nonsense


def test_chat_template_kwargs_stay_text():
    text = json.dumps({"enable_thinking": False})
    assert read("--chat-template-kwargs", text).chat_template_kwargs == text
