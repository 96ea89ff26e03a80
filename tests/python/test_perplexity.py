"""llama-perplexity on tiny models: figures against NumPy over the engine's logits, saved log-probabilities, faults."""

import re
import struct

import numpy as np
import pytest

from pyllama._engine import Engine, GgufFile, Model, log_sum_exp
from pyllama.errors import GgufError, PyllamaError
from pyllama.tokenizer import Tokenizer
from pyllama.tools.kl_divergence import Comparison, report, summarise
from pyllama.tools.logits_file import DEPTH, LogitsReader, decode_rows, encode_rows
from pyllama.tools.perplexity import main
from pyllama.tools.scoring import Mean
from support.command import Caller
from support.logits import kl_divergence, log_softmax, position_logits
from support.tiny_llama import IM_START, write_tiny_llama

N_CTX = 32
TEXT = "hello the world and you\nthe user is in a world of the others; " * 6


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    return Caller(capfd, monkeypatch, str(tmp_path))


@pytest.fixture(scope="module")
def text_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT + "\n")
    return path


@pytest.fixture(scope="module")
def other_path(tmp_path_factory):
    """The same model with weights rounded to 4 bits."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "q4_0.gguf", weight_type="q4_0")


def tokens_of(path, text=TEXT):
    tokens = Tokenizer.from_metadata(GgufFile(path).metadata).encode(text, add_special=True)
    return np.asarray(tokens[: len(tokens) // N_CTX * N_CTX]).reshape(-1, N_CTX)


def chunk_log_softmax(path, chunk, first_token=None):
    """ln p after every position of a chunk, [N_CTX, n_vocab]."""
    model = Model(path)
    engine = Engine(model, n_ctx=N_CTX)
    tokens = [int(chunk[0]) if first_token is None else first_token, *chunk[1:].tolist()]
    result = log_softmax(position_logits(engine, tokens))
    engine.close()
    model.close()
    return result


def expected_surprise(path, first_token=None):
    """-ln p of the scored tokens of every chunk."""
    scored = range(N_CTX // 2, N_CTX - 1)
    chunks = tokens_of(path)
    rows = [chunk_log_softmax(path, chunk, first_token) for chunk in chunks]
    return [[-lp[i, chunk[i + 1]] for i in scored] for lp, chunk in zip(rows, chunks, strict=True)]


def figures(out):
    """Running perplexities, final one, its error."""
    final = re.search(r"^Final estimate: PPL = (\S+) \+/- (\S+)$", out, re.MULTILINE)
    return [float(value) for value in re.findall(r"\[\d+\]([\d.]+),", out)], float(final[1]), float(final[2])


def test_perplexity_is_that_of_the_second_half_of_each_chunk(call, tiny_llama_path, text_path):
    running, final, error = figures(call.succeed(main, "-m", tiny_llama_path, "-f", text_path, "-c", N_CTX))
    surprise = np.asarray(expected_surprise(tiny_llama_path))
    assert len(running) == len(surprise) >= 5
    means = np.exp(np.cumsum(surprise.sum(axis=1)) / (surprise.shape[1] * np.arange(1, len(surprise) + 1)))
    assert running == pytest.approx(means, abs=2e-4)
    assert final == running[-1]
    assert error == pytest.approx(np.exp(surprise.mean()) * surprise.std(ddof=1) / surprise.size**0.5, rel=1e-4)


def test_bos_replaces_the_first_token_of_every_chunk(call, tmp_path, text_path):
    path = write_tiny_llama(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    _, final, _ = figures(call.succeed(main, "-m", path, "-f", text_path, "-c", N_CTX))
    assert tokens_of(path)[0, 0] == IM_START
    assert final == pytest.approx(np.exp(np.mean(expected_surprise(path, IM_START))), abs=2e-4)
    assert final != pytest.approx(np.exp(np.mean(expected_surprise(path))), abs=2e-4)


@pytest.mark.parametrize("flags", [("-ub", 7), ("-b", 16), ("-t", 1), ("-c", N_CTX, "--chunks", 99)])
def test_batches_and_threads_do_not_change_a_digit(call, tiny_llama_path, text_path, flags):
    argv = ("-m", tiny_llama_path, "-f", text_path, "-c", N_CTX)
    assert call.succeed(main, *argv, *flags).splitlines()[-1] == call.succeed(main, *argv).splitlines()[-1]


def test_chunks_limits_the_text(call, tiny_llama_path, text_path):
    argv = ("-m", tiny_llama_path, "-f", text_path, "-c", N_CTX)
    running, _, _ = figures(call.succeed(main, *argv))
    assert figures(call.succeed(main, *argv, "--chunks", 2))[0] == running[:2]


def test_output_type_1_is_a_line_per_chunk(call, tiny_llama_path, text_path):
    argv = ("-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "--chunks", 3)
    running, _, _ = figures(call.succeed(main, *argv))
    lines = call.succeed(main, *argv, "--ppl-output-type", 1).splitlines()[:3]
    assert [int(line.split()[0]) for line in lines] == [N_CTX, 2 * N_CTX, 3 * N_CTX]
    assert [float(line.split()[1]) for line in lines] == running
    assert [float(line.split()[2]) for line in lines] == pytest.approx(np.log(running), abs=1e-4)


def test_log_sum_exp_normalises_rows_and_refuses_bad_ones():
    logits = np.random.default_rng(3).normal(0, 30, (5, 1000)).astype(np.float32)
    found = logits - log_sum_exp(logits)[:, None]
    assert found == pytest.approx(log_softmax(logits), abs=1e-5)
    logits[3, 7] = np.nan
    with pytest.raises(PyllamaError):
        log_sum_exp(logits)


def test_saved_rows_hold_the_log_probabilities_to_half_a_code(call, tmp_path, tiny_llama_path, text_path):
    saved = tmp_path / "base.kld"
    argv = ("-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "--chunks", 2)
    call.succeed(main, *argv, "--save-all-logits", saved)
    chunks = tokens_of(tiny_llama_path)[:2]
    with LogitsReader(saved) as reader:
        assert (reader.header.chunks == chunks).all()
        for chunk in chunks:
            expected = chunk_log_softmax(tiny_llama_path, chunk)[N_CTX // 2 : N_CTX - 1]
            expected = np.maximum(expected, expected.max(axis=1, keepdims=True) - DEPTH)
            rows = reader.read(reader.header.rows_per_chunk)
            found = decode_rows(rows, expected.shape[1])
            assert np.abs(found - expected).max() < 0.51 * rows["scale"].max() + 1e-5
        assert reader.read(1).size == 0
    assert not list(tmp_path.glob(".*partial"))


def test_layout_of_the_file_of_log_probabilities(call, tmp_path, tiny_llama_path, text_path):
    """Read by hand: a header, the tokens, then rows of a scale, a minimum and 16-bit codes."""
    saved = tmp_path / "base.kld"
    call.succeed(main, "-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "--chunks", 1, "--save-all-logits", saved)
    data = saved.read_bytes()
    n_vocab = Model(tiny_llama_path).n_vocab
    assert data[:8] == b"_logits_"
    assert struct.unpack("<3i", data[8:20]) == (N_CTX, n_vocab, 1)
    start, stride = 20 + 4 * N_CTX, 8 + 2 * (n_vocab + n_vocab % 2)
    assert len(data) == start + (N_CTX - 1 - N_CTX // 2) * stride
    scale, minimum = struct.unpack("<2f", data[start : start + 8])
    codes = np.frombuffer(data[start + 8 : start + 8 + 2 * n_vocab], "<u2")
    assert np.exp(codes * scale + minimum).sum() == pytest.approx(1, abs=1e-3)
    assert codes.min() == 0
    assert codes.max() == 65535


def test_values_far_below_the_largest_are_raised_and_a_flat_row_survives():
    logits = np.asarray([[0, -5, -300], [2, 2, 2]], np.float32)
    decoded = decode_rows(encode_rows(logits, log_sum_exp(logits)), 3)
    assert decoded[0] == pytest.approx([0 - np.log1p(np.exp(-5)), -5 - np.log1p(np.exp(-5)), -DEPTH], abs=0.01)
    assert decoded[1] == pytest.approx([-np.log(3)] * 3)


def test_a_model_does_not_diverge_from_itself(call, tmp_path, tiny_llama_path, text_path):
    saved = tmp_path / "base.kld"
    call.succeed(main, "-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "--save-all-logits", saved)
    out = call.succeed(main, "-m", tiny_llama_path, "--kl-divergence", "--kl-divergence-base", saved)
    assert abs(float(re.search(r"Mean    KLD: +(\S+)", out)[1])) < 5e-6  # codes of 16 bits
    assert "Same top p: 100.000 ± 0.000 %" in out
    assert float(re.search(r"Mean PPL\(Q\)/PPL\(base\) +: +(\S+)", out)[1]) == pytest.approx(1, abs=2e-5)


def test_divergence_from_another_model_is_that_over_the_whole_vocabulary(
    call, tmp_path, tiny_llama_path, other_path, text_path
):
    saved = tmp_path / "base.kld"
    call.succeed(main, "-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "--chunks", 3, "--save-all-logits", saved)
    out = call.succeed(main, "-m", other_path, "--kl-divergence", "--kl-divergence-base", saved, "-ub", 9)
    scored = slice(N_CTX // 2, N_CTX - 1)
    kl, same = [], []
    for chunk in tokens_of(tiny_llama_path)[:3]:
        base = chunk_log_softmax(tiny_llama_path, chunk)[scored]
        ours = chunk_log_softmax(other_path, chunk)[scored]
        ids = np.broadcast_to(np.arange(base.shape[1]), base.shape)
        kl.append(kl_divergence(ids, base, ours))
        same.append(base.argmax(axis=1) == ours.argmax(axis=1))
    mean = np.mean(kl)
    assert mean > 1e-3
    assert float(re.search(r"Mean    KLD: +(\S+)", out)[1]) == pytest.approx(mean, rel=1e-3)
    assert float(re.search(r"Maximum KLD: +(\S+)", out)[1]) == pytest.approx(np.max(kl), rel=1e-3)
    assert float(re.search(r"Same top p: +(\S+)", out)[1]) == pytest.approx(100 * np.mean(same), abs=1e-3)
    assert len([line for line in out.splitlines() if re.match(r" +\d+  ", line)]) == 3


def test_summary_agrees_with_resampling():
    """The errors printed are those that drawing the positions again would show."""
    rng = np.random.default_rng(5)
    base = rng.gamma(2.0, 1.5, 400)
    comparison = Comparison(base + rng.normal(0.05, 0.3, 400), base, rng.gamma(1, 0.01, 400), rng.random(400) < 0.9)
    summary = summarise(comparison)
    assert summary.correlation == pytest.approx(np.corrcoef(comparison.surprise, base)[0, 1])
    assert summary.ratio[0] == pytest.approx(summary.perplexity[0] / summary.base_perplexity[0])
    assert summary.rms_change[0] == pytest.approx(np.sqrt(np.mean(comparison.probability_change**2)))
    draws = []
    for _ in range(2000):
        i = rng.integers(0, 400, 400)
        ours, other = np.exp(comparison.surprise[i].mean()), np.exp(base[i].mean())
        rms = np.sqrt(np.mean(comparison.probability_change[i] ** 2))
        draws.append((ours, np.log(ours / other), ours / other, ours - other, rms, comparison.same_top[i].mean()))
    errors = [summary.perplexity, summary.log_ratio, summary.ratio, summary.difference, summary.rms_change]
    assert [error for _, error in [*errors, summary.same_top]] == pytest.approx(np.std(draws, axis=0), rel=0.12)
    assert "Median  KLD: " + f"{np.median(comparison.divergence):10.6f}" in report(comparison, summary)


def test_mean_of_parts_is_the_mean_of_all():
    values = np.random.default_rng(1).normal(3, 2, 50)
    mean = Mean()
    for part in np.split(values, [3, 20]):
        mean.add(part)
    assert (mean.value, mean.error) == pytest.approx((values.mean(), values.std(ddof=1) / 50**0.5))
    assert Mean().value == Mean().error == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"_logitz_" + data[8:], "not a file of log-probabilities"),
        (lambda data: data[:11], "not a file of log-probabilities"),
        (lambda data: data[:-1], "not written to its end"),
        (lambda data: data[:8] + struct.pack("<i", -5) + data[12:], "chunks of -5 tokens"),
        (lambda data: data[:16] + struct.pack("<i", 2**31 - 1) + data[20:], "not written to its end"),
        (lambda data: data[:20] + struct.pack("<i", 10**6) + data[24:], "tokens outside its vocabulary"),
    ],
)
def test_damaged_files_are_refused(call, tmp_path, tiny_llama_path, text_path, change, message):
    saved = tmp_path / "base.kld"
    call.succeed(main, "-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "--chunks", 1, "--save-all-logits", saved)
    saved.write_bytes(change(saved.read_bytes()))
    with pytest.raises(GgufError, match=message):
        LogitsReader(saved)
    assert message in call.fail(main, "-m", tiny_llama_path, "--kl-divergence", "--kl-divergence-base", saved)


def test_another_vocabulary_is_refused(call, tmp_path, tiny_llama_path):
    saved = tmp_path / "base.kld"
    saved.write_bytes(b"_logits_" + struct.pack("<3i", 4, 2, 1) + bytes(16) + bytes(12))
    message = call.fail(main, "-m", tiny_llama_path, "--kl-divergence", "--kl-divergence-base", saved)
    assert "the saved log-probabilities are of 2 tokens" in message


def test_faults_are_one_line_and_leave_no_file(call, tmp_path, tiny_llama_path, text_path):
    model = ("-m", tiny_llama_path)
    assert "error: no model given; use -m FILE" in call.fail(main, "-f", text_path)
    assert call.fail(main, *model) == "error: no text given; use -f FILE"
    assert "need at least 1024" in call.fail(main, *model, "-f", text_path, "--save-all-logits", tmp_path / "x")
    assert "folder does not exist" in call.fail(main, *model, "-f", text_path, "--save-all-logits", tmp_path / "y/x")
    assert "leaves nothing to predict" in call.fail(main, *model, "-f", text_path, "-c", 2)
    assert "give --kl-divergence-base" in call.fail(main, *model, "--kl-divergence")
    assert "not supported yet: --ppl-stride" in call.fail(main, *model, "-f", text_path, "--ppl-stride", 8)
    assert "not supported yet: --hellaswag" in call.fail(main, *model, "-f", text_path, "--hellaswag")
    assert not list(tmp_path.iterdir())


def test_progress_is_on_stderr_and_can_be_switched_off(call, tiny_llama_path, text_path):
    argv = ("-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "--chunks", 1)
    assert "computing 1 chunks of 32 tokens" in call(main, *argv).err
    assert call(main, *argv, "--log-disable").err == ""
