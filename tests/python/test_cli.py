"""llama-cli: conversation, commands, plain completion, Ctrl-C, pipes and errors (on a scripted model).

Text that the engine makes, and the speed line over real tokens, are covered by the tests of `Llama`.
"""

import io
import os
import signal
import sys

import numpy as np
import pytest

from pyllama.errors import InvalidArgument, ModelError
from pyllama.options import parse
from pyllama.sampling_values import DEFAULT_SAMPLERS
from pyllama.tools import cli, loading
from pyllama.tools.answer import Speed, stream_answer
from pyllama.tools.console import Interrupter


class ScriptedLlama:
    """Answers `echo N: <last message>` word by word; one token per word. Records what it was asked."""

    def __init__(self, metadata=None):
        self.n_discarded = 0
        self.metadata = {"tokenizer.chat_template": "x"} if metadata is None else metadata
        self.conversations: list[list[dict[str, str]]] = []
        self.prompts: list[str] = []
        self.arguments: dict = {}
        self.on_word = lambda index: None
        self.fail_with: Exception | None = None
        self.closed = False
        self._tokens: list[int] = []
        self._ids: dict[str, int] = {}  # one token per message text

    def n_ctx(self):
        return 8192

    @property
    def n_tokens(self):
        return len(self._tokens)

    @property
    def input_ids(self):
        return np.array(self._tokens, np.intc)

    def tokenizer(self):
        return type("T", (), {"eog_ids": frozenset({2, 7})})

    def close(self):
        self.closed = True

    def create_chat_completion(self, messages, *, stream, **arguments):
        assert stream
        self.arguments = arguments
        self.conversations.append([dict(message) for message in messages])
        answer = f"echo {len(self.conversations)}: {messages[-1]['content']}"
        prompt = [self._ids.setdefault(message["content"], len(self._ids)) for message in messages]
        return self._stream(prompt, answer, lambda text: {"delta": {"content": text} if text else {}})

    def create_completion(self, prompt, *, stream, **arguments):
        assert stream
        self.arguments = arguments
        self.prompts.append(prompt)
        return self._stream([len(prompt)], " and so on", lambda text: {"text": text})

    def _stream(self, prompt, answer, choice):
        if self.fail_with is not None:
            raise self.fail_with
        return self._chunks(prompt, answer, choice)

    def _chunks(self, prompt, answer, choice):
        self._tokens = list(prompt)
        for index, word in enumerate(answer.split(" ")):
            self.on_word(index)
            yield {"choices": [choice(word if index == 0 else f" {word}")]}
            self._tokens.append(5000 + index)
        yield {"choices": [choice("")]}


@pytest.fixture
def llama(monkeypatch):
    model = ScriptedLlama()
    monkeypatch.setattr(cli, "load_llama", lambda options: model)
    return model


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Runs llama-cli with text on standard input; gives (exit code, stdout, stderr)."""

    def run(*argv, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        for name in [name for name in os.environ if name.startswith("LLAMA_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
        code = cli.main(["-m", "model.gguf", *argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


# ------------------------------------------------------------------------------------------------ chat


def test_piped_lines_are_turns_with_history(llama, call):
    code, out, err = call("-sys", "be brief", stdin="one\ntwo\n")
    assert code == 0
    assert out == "echo 1: one\necho 2: two\n"
    assert llama.conversations[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "echo 1: one"},
        {"role": "user", "content": "two"},
    ]
    assert err.count("t/s ]") == 2
    assert llama.closed


def test_the_prompt_is_the_first_message(llama, call):
    assert call("-p", "hello", stdin="bye\n")[1] == "echo 1: hello\necho 2: bye\n"


def test_single_turn_ends_after_one_answer(llama, call):
    assert call("-p", "hello", "-st", stdin="never read\n")[1] == "echo 1: hello\n"
    assert call("-st", stdin="\n/clear\nfirst\nsecond\n")[1] == "echo 2: first\n"


def test_end_of_input_without_a_message_is_success(llama, call):
    assert call(stdin="")[:2] == (0, "")


def test_timings_can_be_switched_off(llama, call):
    assert call("-p", "x", "-st", "--no-show-timings")[2] == ""


def test_backslash_continues_a_line_and_with_multiline_input_ends_it(llama, call):
    call(stdin="a\\\nb\nc\n")
    assert [turn[-1]["content"] for turn in llama.conversations] == ["a\nb", "c"]
    llama.conversations.clear()
    call("-mli", stdin="a\nb\\\nc\n")
    assert [turn[-1]["content"] for turn in llama.conversations] == ["a\nb", "c"]


def test_clear_forgets_all_but_the_system_message(llama, call):
    call("-sys", "s", stdin="one\n/clear\ntwo\n")
    assert [message["content"] for message in llama.conversations[1]] == ["s", "two"]


def test_regen_answers_the_last_message_again(llama, call):
    _, out, _ = call(stdin="one\n/regen\n")
    assert out == "echo 1: one\necho 2: one\n"
    assert llama.conversations[0] == llama.conversations[1]


def test_regen_without_an_answer_is_an_error(llama, call):
    code, _, err = call(stdin="/regen\n")
    assert code == 1
    assert err == "error: there is no answer to make again\n"


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_exit_leaves(llama, call, leave):
    assert call(stdin=f"one\n{leave}\ntwo\n")[:2] == (0, "echo 1: one\n")


def test_read_and_glob_put_files_before_the_next_message(llama, call, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"content of {name}")
    call(stdin=f"/read {tmp_path}/a.txt\none\n/glob {tmp_path}/*.txt\ntwo\nthree\n")
    first, second, third = (turn[-1]["content"] for turn in llama.conversations)
    assert first.endswith("a.txt:\ncontent of a.txt\n\none")
    assert "content of a.txt" in second
    assert "content of b.txt" in second
    assert third == "three"


def test_an_unreadable_file_is_an_error(llama, call):
    code, _, err = call(stdin="/read /no/such/file\n")
    assert code == 1
    assert err == "error: cannot read '/no/such/file': No such file or directory\n"


def test_a_failed_turn_is_one_line_and_leaves_the_history(llama, call):
    llama.fail_with = InvalidArgument("the prompt has 9000 tokens, but the context holds n_ctx=8192")
    code, out, err = call(stdin="one\n")
    assert (code, out) == (1, "")
    assert err == "error: the prompt has 9000 tokens, but the context holds n_ctx=8192\n"


# ------------------------------------------------------------------------------------------------ completion


def test_no_cnv_continues_the_prompt_once(llama, call):
    assert call("-no-cnv", "-p", r"Once\n", stdin="ignored\n")[:2] == (0, "Once\n and so on\n")
    assert call("-no-cnv", "-p", "Once", "--no-display-prompt")[1] == " and so on\n"


def test_no_cnv_reads_standard_input_without_a_prompt(llama, call):
    assert call("-no-cnv", stdin="A pipe")[1] == "A pipe and so on\n"


def test_no_cnv_without_any_text_is_an_error(llama, call):
    code, _, err = call("-no-cnv", stdin="")
    assert code == 1
    assert err.startswith("error: completion needs a text")


def test_zero_tokens_show_the_prompt_only(llama, call):
    assert call("-no-cnv", "-p", "Once", "-n", "0")[:2] == (0, "Once\n")
    assert llama.prompts == []


@pytest.mark.parametrize(
    ("metadata", "argv", "chats"),
    [
        ({}, (), False),
        ({}, ("-cnv",), True),
        ({}, ("--chat-template", "{{ messages }}"), True),
        (None, (), True),
        (None, ("-no-cnv",), False),
    ],
)
def test_conversation_follows_the_chat_template_unless_told(llama, call, metadata, argv, chats):
    if metadata is not None:
        llama.metadata = metadata
    call("-p", "x", *argv)
    assert bool(llama.conversations) is chats
    assert bool(llama.prompts) is not chats


# ------------------------------------------------------------------------------------------------ options


def test_sampling_options_reach_the_completion(llama, call):
    call(
        "-p",
        "x",
        "-st",
        *[
            "--temp",
            "0.5",
            "--top-k",
            "3",
            "--top-p",
            "0.7",
            "--min-p",
            "0.1",
            "--repeat-penalty",
            "1.1",
            "-n",
            "9",
            "-r",
            "END",
        ],
    )
    samplers_at_their_defaults = {
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ("\n", ":", '"', "*"),
        "mirostat_mode": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "samplers": DEFAULT_SAMPLERS,
    }
    about_thoughts = {"reasoning_format", "reasoning_budget", "reasoning_budget_message", "chat_template_kwargs"}
    sampling = {name: value for name, value in llama.arguments.items() if name not in about_thoughts}
    assert sampling == samplers_at_their_defaults | {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.7,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 9,
        "stop": ["END"],
        "logit_bias": None,
    }


def test_samplers_and_their_order_reach_the_completion(llama, call):
    argv = "--sampler-seq xadt --typical 0.5 --top-nsigma 2 --xtc-probability 0.5 --xtc-threshold 0.2 --mirostat 2 "
    argv += "--dynatemp-range 0.3 --dynatemp-exp 2 --dry-multiplier 0.8 --dry-base 0.5 --dry-allowed-length 3 "
    argv += "--dry-penalty-last-n 9 --dry-sequence-breaker + --mirostat-ent 4 --mirostat-lr 0.2 "
    argv += "--adaptive-target 0.4 --adaptive-decay 0.5"
    call("-p", "x", "-st", *argv.split())
    expected = {
        "samplers": ("xtc", "adaptive_p", "dry", "temperature"), "typical_p": 0.5, "top_n_sigma": 2.0,
        "xtc_probability": 0.5, "xtc_threshold": 0.2, "mirostat_mode": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2,
        "dynatemp_range": 0.3, "dynatemp_exponent": 2.0, "dry_multiplier": 0.8, "dry_allowed_length": 3,
        "dry_penalty_last_n": 9, "dry_sequence_breakers": ("+",), "adaptive_target": 0.4, "adaptive_decay": 0.5,
    }  # fmt: skip
    assert {name: llama.arguments[name] for name in expected} == expected
    assert "dry_base" not in llama.arguments, "a base below 1 leaves the default"


def test_ignore_eos_bans_every_end_token_and_biases_add_up(llama, call):
    call("-p", "x", "-st", "--ignore-eos", "-l", "5+1", "-l", "5+0.5")
    assert llama.arguments["logit_bias"] == {5: 1.5, 2: -np.inf, 7: -np.inf}


def test_the_model_suggests_sampling_values_that_the_user_overrides(llama, call):
    llama.metadata |= {"general.sampling.temp": "0.25", "general.sampling.top_k": "7"}
    llama.metadata |= {"general.sampling.mirostat": "1", "general.sampling.sequence": "top_k;temp;no_such"}
    call("-p", "x", "-st", "--top-k", "9")
    assert (llama.arguments["temperature"], llama.arguments["top_k"]) == (0.25, 9)
    assert (llama.arguments["mirostat_mode"], llama.arguments["samplers"]) == (1, ("top_k", "temperature"))


def test_model_options_reach_the_model(monkeypatch):
    seen = {}
    monkeypatch.setattr("pyllama.Llama", lambda path, **arguments: seen.update(arguments, path=path), raising=False)
    argv = [
        "-m",
        "a.gguf",
        "-c",
        "300",
        "-b",
        "64",
        "-t",
        "2",
        "-ctk",
        "q8_0",
        "-s",
        "5",
        "--repeat-last-n",
        "9",
        "--override-kv",
        "a=int:1",
        "--rope-scale",
        "2",
    ]
    loading.load_llama(parse("llama-cli", argv, {}, config_files=()))
    expected = {"path": "a.gguf", "n_ctx": 300, "n_batch": 64, "n_ubatch": 64, "n_threads": 2, "n_threads_batch": None}
    expected |= {"type_k": "q8_0", "type_v": "f16", "seed": 5, "last_n_tokens_size": 9, "kv_overrides": {"a": 1}}
    expected |= {"rope_freq_scale": 0.5, "chat_format": None}
    assert {name: seen[name] for name in expected} == expected


# ------------------------------------------------------------------------------------------------ Ctrl-C, errors


def interrupt_at(word):
    return lambda index: signal.raise_signal(signal.SIGINT) if index == word else None


def test_interrupt_stops_the_answer_and_the_chat_goes_on(llama, call):
    llama.on_word = interrupt_at(2)
    _, out, _ = call(stdin="one two three four\nagain\n")
    assert out.startswith("echo 1: one")
    assert "four" not in out
    assert llama.conversations[1][1]["role"] == "assistant"
    assert llama.conversations[1][2] == {"role": "user", "content": "again"}


def test_interrupt_before_any_text_takes_the_message_back(llama, call):
    llama.on_word = lambda index: signal.raise_signal(signal.SIGINT) if len(llama.conversations) == 1 else None
    _, out, _ = call(stdin="one\ntwo\n")
    assert out == "\necho 2: two\n"
    assert [message["content"] for message in llama.conversations[1]] == ["two"]


def test_a_second_interrupt_does_not_wait_for_more_text(llama):
    def twice(index):
        if index == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    llama.on_word = twice
    shown = []
    answer = stream_answer(
        llama,
        lambda: llama.create_chat_completion([{"role": "user", "content": "x"}], stream=True),
        shown.append,
        Interrupter(),
    )
    assert answer.interrupted
    assert shown == ["echo"]


def test_the_old_signal_handler_is_back_after_an_answer(llama, call):
    before = signal.getsignal(signal.SIGINT)
    call("-p", "x", "-st")
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_at_the_prompt_exits_with_130(llama, call, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("pyllama.tools.console.Console.read_message", interrupted)
    assert call()[0] == 130
    assert llama.closed


def test_interrupted_completion_exits_with_130(llama, call):
    llama.on_word = interrupt_at(1)
    assert call("-no-cnv", "-p", "x")[0] == 130


def test_a_model_that_does_not_load_is_one_line_and_exit_code_1(monkeypatch, call):
    def fail(options):
        raise ModelError("model.gguf: unknown architecture 'foo'")

    monkeypatch.setattr(cli, "load_llama", fail)
    assert call("-p", "x") == (1, "", "error: model.gguf: unknown architecture 'foo'\n")


def test_no_model_is_an_error(capsys, monkeypatch):
    monkeypatch.delenv("LLAMA_ARG_MODEL", raising=False)
    assert cli.main([]) == 1
    assert capsys.readouterr().err.startswith("error: no model given")


def test_planned_options_stop_before_the_model_is_loaded(llama, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["-m", "x", "--rpc", "host:1"])
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("error: not supported yet: --rpc")


# ------------------------------------------------------------------------------------------------ speed line


def test_speed_counts_new_prompt_tokens_only(llama):
    def ask(text):
        return stream_answer(
            llama,
            lambda: llama.create_chat_completion([*history, {"role": "user", "content": text}], stream=True),
            lambda _: None,
            Interrupter(),
        )

    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first = ask("c")
    assert first.speed.prompt_tokens == 3
    assert first.speed.generated_tokens == 3
    second = ask("d")
    assert second.speed.prompt_tokens == 1


def test_speed_line_without_tokens_shows_dashes():
    assert str(Speed(100, 0.5, 40, 2.0)) == "[ Prompt: 200.0 t/s | Generation: 20.0 t/s ]"
    assert str(Speed(0, 0.0, 0, 0.0)) == "[ Prompt: - t/s | Generation: - t/s ]"


# ------------------------------------------------------------------------------------------------ thoughts


def test_thoughts_are_shown_apart_and_kept_in_the_history(llama, call):
    def chunks(prompt, answer, choice):
        for delta in (
            {"role": "assistant"},
            {"reasoning_content": "hm"},
            {"reasoning_content": " so"},
            {"content": "ok"},
        ):
            llama._tokens.append(1)
            yield {"choices": [{"delta": delta}]}

    llama._chunks = chunks
    code, out, _ = call(stdin="one\ntwo\n")
    assert code == 0
    assert out.startswith("[Start thinking]\nhm so\n[End thinking]\n\nok\n")
    assert llama.conversations[1][1] == {"role": "assistant", "content": "ok", "reasoning_content": "hm so"}


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        ([], {}),
        (["--reasoning-budget", "5", "--reasoning-budget-message", "!"], {"reasoning_budget": 5, "message": "!"}),
        (["-rea", "off"], {"enable_thinking": False}),
        (["--reasoning-effort", "none"], {"enable_thinking": False}),
        (["--reasoning-effort", "low"], {"reasoning_effort": "low"}),
        (["--no-reasoning-preserve"], {"preserve_reasoning": False}),
        (["--chat-template-kwargs", '{"a": [1], "enable_thinking": false}'], {"a": [1], "enable_thinking": False}),
        (["--skip-chat-parsing"], {"reasoning_format": "none"}),
        (["--reasoning-format", "none"], {"reasoning_format": "none"}),
    ],
)
def test_options_about_thoughts_reach_the_chat(llama, call, argv, changes):
    assert call("-st", "-p", "x", *argv)[0] == 0
    arguments = {
        "reasoning_format": changes.pop("reasoning_format", "deepseek"),
        "reasoning_budget": changes.pop("reasoning_budget", -1),
        "reasoning_budget_message": changes.pop("message", ""),
        "chat_template_kwargs": {"enable_thinking": True, "preserve_reasoning": True, **changes},
    }
    assert {name: llama.arguments[name] for name in arguments} == arguments
