"""llama-tokenize: what it prints for which flags, with the tokenizer of a tiny model as the reference."""

import io
import sys

import pytest

from pyllama._engine import GgufFile
from pyllama.tokenizer import Tokenizer
from pyllama.tools.tokenize import main
from support.command import Caller
from support.tiny_llama import IM_START, write_tiny_llama

TEXT = "hello <|im_start|>world wörld"


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    return Caller(capfd, monkeypatch, str(tmp_path))


@pytest.fixture
def give(monkeypatch):
    def stdin(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return stdin


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_path):
    return Tokenizer.from_metadata(GgufFile(tiny_llama_path).metadata)


@pytest.fixture(scope="module")
def bos_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "bos.gguf"
    return write_tiny_llama(path, metadata={"tokenizer.ggml.add_bos_token": True})


def test_ids_are_a_python_list_with_control_tokens_recognised(call, tokenizer, tiny_llama_path):
    out = call.succeed(main, "-m", tiny_llama_path, "-p", TEXT, "--ids")
    assert out == f"{tokenizer.encode(TEXT, parse_special=True)}\n"
    assert IM_START in eval(out)


def test_control_tokens_stay_text_on_request(call, tokenizer, tiny_llama_path):
    out = call.succeed(main, "-m", tiny_llama_path, "-p", TEXT, "--ids", "--no-parse-special")
    assert out == f"{tokenizer.encode(TEXT)}\n"


def test_a_line_per_token_shows_its_id_and_text(call, tokenizer, tiny_llama_path):
    lines = call.succeed(main, "-m", tiny_llama_path, "-p", "hello the\nyou", "--show-count").splitlines()
    tokens = tokenizer.encode("hello the")
    assert lines[0] == f"{tokens[0]:6d} -> 'hello'"
    assert lines[1] == f"{tokens[1]:6d} -> ' the'"
    assert lines[2:4] == [f"{tokenizer.encode(chr(10))[0]:6d} -> '", "'"]
    assert lines[-1] == f"Total number of tokens: {len(tokens) + 2}"


def test_parts_of_a_character_are_written_as_their_bytes(capfdbinary, monkeypatch, tmp_path, tiny_llama_path):
    Caller(capfdbinary, monkeypatch, str(tmp_path))
    main(["-m", str(tiny_llama_path), "-p", "ö"])
    sys.stdout.flush()
    lines = capfdbinary.readouterr().out.splitlines()
    assert [line.split(b"-> ")[1] for line in lines] == [b"'\xc3'", b"'\xb6'"]


def test_bos_is_added_where_the_model_asks_for_it(call, bos_path, tokenizer):
    with_bos = eval(call.succeed(main, "-m", bos_path, "-p", "hello", "--ids"))
    without = eval(call.succeed(main, "-m", bos_path, "-p", "hello", "--ids", "--no-bos"))
    assert with_bos == [IM_START, *without]
    assert without == tokenizer.encode("hello")
    overridden = ("--override-kv", "tokenizer.ggml.add_bos_token=bool:false")
    assert eval(call.succeed(main, "-m", bos_path, "-p", "hello", "--ids", *overridden)) == without


@pytest.mark.parametrize(("flags", "text"), [((), "a\nb\n"), (("--no-escape",), "a\\nb\n")])
def test_escapes_are_processed_in_every_source_and_files_keep_their_last_newline(
    call, give, tmp_path, tokenizer, tiny_llama_path, flags, text
):
    (tmp_path / "text.txt").write_bytes(b"a\\nb\n")
    give(b"a\\nb\n")
    from_file = call.succeed(main, "-m", tiny_llama_path, "-f", tmp_path / "text.txt", "--ids", *flags)
    from_stdin = call.succeed(main, "-m", tiny_llama_path, "--stdin", "--ids", *flags)
    assert from_file == from_stdin == f"{tokenizer.encode(text)}\n"


def test_standard_input_goes_before_a_prompt_and_may_be_empty(call, give, tiny_llama_path):
    give(b"")
    assert call.succeed(main, "-m", tiny_llama_path, "-p", "hello", "--stdin", "--ids") == "[]\n"


def test_the_model_may_come_from_the_environment(call, monkeypatch, tiny_llama_path):
    monkeypatch.setenv("LLAMA_ARG_MODEL", str(tiny_llama_path))
    assert call.succeed(main, "-p", "", "--ids") == "[]\n"


def test_no_weight_is_read(call, tmp_path, tiny_llama_path):
    """A file that ends where its tensor data begins is enough."""
    data_start = min(tensor.offset for tensor in GgufFile(tiny_llama_path).tensors)
    header_only = tmp_path / "header.gguf"
    header_only.write_bytes(tiny_llama_path.read_bytes()[:data_start])
    assert call.succeed(main, "-m", header_only, "-p", "hello", "--ids") == call.succeed(
        main, "-m", tiny_llama_path, "-p", "hello", "--ids"
    )


def test_faults_are_one_line_and_code_1(call, tmp_path, tiny_llama_path):
    assert "error: no model given; use -m FILE" in call.fail(main, "-p", "x")
    assert call.fail(main, "-m", tiny_llama_path) == "error: no text given; use -p TEXT, -f FILE or --stdin"
    assert "missing.gguf" in call.fail(main, "-m", tmp_path / "missing.gguf", "-p", "x")
    assert "--idx" in call.fail(main, "-m", tiny_llama_path, "--idx")
