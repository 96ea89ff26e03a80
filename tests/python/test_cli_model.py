"""llama-cli and llama-bench as processes, on the real engine and a tiny random model."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest


def program(module, *argv):
    return [sys.executable, "-m", f"pyllama.tools.{module}", *map(str, argv)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Programs must not start in the source tree, whose package has no compiled extension."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def environ(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    return {**kept, "XDG_CONFIG_HOME": str(tmp_path)}


@pytest.fixture
def call(environ):
    def run(module, *argv, stdin=""):
        return subprocess.run(
            program(module, *argv), input=stdin, capture_output=True, text=True, env=environ, timeout=120, check=False
        )

    return run


def test_greedy_completion_is_repeatable_and_starts_with_the_prompt(call, tiny_llama_path):
    argv = ("-m", tiny_llama_path, "-no-cnv", "-p", "hello world", "-n", "12", "--temp", "0", "--ignore-eos")
    first, second = call("cli", *argv), call("cli", *argv)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("hello world")
    assert len(first.stdout) > len("hello world\n")
    assert first.stdout == second.stdout


def test_an_answer_goes_on_beyond_the_context_with_context_shift(call, tiny_llama_path):
    argv = ("-m", tiny_llama_path, "-no-cnv", "-p", "hello", "-n", "600", "-c", "256", "--temp", "0", "--ignore-eos")
    argv = (*argv, "--logit-bias", "68+1000")
    short, long = call("cli", *argv), call("cli", *argv, "--context-shift", "--keep", "5")
    assert (short.returncode, long.returncode) == (0, 0), long.stderr
    assert long.stdout == "hello" + "A" * 600 + "\n"
    assert len(short.stdout) < len("hello") + 256 + len("\n")
    assert "Generation: -" not in long.stderr


def test_answers_keep_to_a_grammar_or_a_schema(call, tiny_llama_path, tmp_path):
    (tmp_path / "answer.gbnf").write_text('root ::= "forced \\"text\\""')
    argv = ("-m", tiny_llama_path, "-no-cnv", "-p", "x", "-n", "60", "--no-display-prompt")
    forced = call("cli", *argv, "--grammar-file", tmp_path / "answer.gbnf")
    assert (forced.returncode, forced.stdout) == (0, 'forced "text"\n'), forced.stderr
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    answer = call("cli", *argv, "-j", json.dumps(schema))
    assert [type(item) for item in json.loads(answer.stdout)] == [bool, bool]
    wrong = call("cli", *argv, "-j", '{"type": "array", "uniqueItems": true}')
    assert wrong.returncode == 1
    assert "uniqueItems" in wrong.stderr
    wrong = call("cli", *argv, "-j", "{", "--grammar", "x")
    assert wrong.returncode == 1
    assert "cannot be used together" in wrong.stderr


def test_a_greedy_answer_made_again_is_the_same(call, tiny_llama_path):
    argv = ("-m", tiny_llama_path, "-c", "1024", "-n", "4", "--temp", "0", "--ignore-eos")
    done = call("cli", *argv, stdin="the " * 100 + "\n/regen\n")
    assert done.returncode == 0, done.stderr
    half = len(done.stdout) // 2
    assert half > len("\n")
    assert done.stdout[:half] == done.stdout[half:]
    assert done.stderr.count("Generation: ") == 2


def test_a_message_that_does_not_fit_is_one_line_and_exit_code_1(call, tiny_llama_path):
    done = call("cli", "-m", tiny_llama_path, "-c", "256", stdin="the world " * 400 + "\n")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "256" in line


def test_a_file_that_is_no_model_is_one_line_and_exit_code_1(call, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")
    for module in ("cli", "bench"):
        done = call(module, "-m", path)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {path}: ")


def test_interrupt_ends_a_long_completion_with_130(environ, tiny_llama_path):
    argv = ("-m", tiny_llama_path, "-no-cnv", "-p", "hello", "-c", "100000", "--ignore-eos")
    process = subprocess.Popen(program("cli", *argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    with process:
        assert process.stdout is not None
        seen = b""
        while len(seen) < len("hello") + 10:  # it is answering
            seen += os.read(process.stdout.fileno(), 100)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - started < 30


def test_a_closed_pipe_ends_the_program_without_a_traceback(environ, tiny_llama_path):
    argv = ("-m", tiny_llama_path, "-no-cnv", "-p", "hello", "-c", "100000", "--ignore-eos")
    process = subprocess.Popen(program("cli", *argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 1
    assert b"Traceback" not in errors


def test_bench_measures_the_real_engine(call, tiny_llama_path):
    lengths = ["-p", "40", "-n", "5", "-pg", "16,4", "-d", "0,300"]
    settings = ["-b", "32", "-ub", "16", "-ctk", "bf16", "-r", "2", "-t", "1"]
    done = call("bench", "-m", tiny_llama_path, *lengths, *settings, "-o", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    measured = [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows]
    assert measured == [(40, 0, 0), (0, 5, 0), (16, 4, 0), (40, 0, 300), (0, 5, 300), (16, 4, 300)]
    for row in rows:
        assert len(row["samples_ns"]) == 2
        assert row["avg_ts"] > 0
        assert row["model_n_params"] > 0
        assert row["model_size"] > 0
        assert row["type_k"] == "bf16"
