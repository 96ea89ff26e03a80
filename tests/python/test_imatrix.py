"""llama-imatrix on tiny models: files against NumPy and the `gguf` package, merging, the older form, statistics."""

import re
import struct

import gguf
import numpy as np
import pytest

from pyllama._engine import GgufFile, InputSums
from pyllama.errors import InvalidArgument, ModelError
from pyllama.quantize.imatrix import Importance, ImportanceMatrix, read_imatrix, write_imatrix
from pyllama.quantize.imatrix_legacy import write_legacy_imatrix
from pyllama.tokenizer import Tokenizer
from pyllama.tools.imatrix import collected, main, merged
from pyllama.tools.imatrix_statistics import statistics_of, statistics_report
from pyllama.tools.perplexity import main as perplexity
from support.command import Caller
from support.llama_forward import linear_inputs
from support.tiny_llama import write_tiny_llama

N_CTX = 32
TEXT = "hello the world and you\nthe user is in a world of the others; " * 5


@pytest.fixture
def call(capfd, monkeypatch, tmp_path):
    return Caller(capfd, monkeypatch, str(tmp_path))


@pytest.fixture(scope="module")
def text_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def argv(tmp_path, tiny_llama_path, text_path):
    return ("-m", tiny_llama_path, "-f", text_path, "-c", N_CTX, "-o", tmp_path / "out.gguf")


@pytest.fixture(scope="module")
def chunks(tiny_llama_path):
    tokens = Tokenizer.from_metadata(GgufFile(tiny_llama_path).metadata).encode(TEXT, add_special=True)
    return np.asarray(tokens[: len(tokens) // N_CTX * N_CTX], np.int32).reshape(-1, N_CTX)


def entry(sums, counts):
    return Importance(np.asarray(sums, np.float32), np.asarray(counts, np.float32))


def assert_same_entries(found, expected, rtol=0.0):
    assert found.entries.keys() == expected.entries.keys()
    for name, (sums, counts) in expected.entries.items():
        np.testing.assert_allclose(found.entries[name].in_sum2, sums, rtol=rtol, err_msg=name)
        assert (found.entries[name].counts == counts).all(), name


def test_the_file_holds_the_squares_of_all_rows_of_the_text(call, argv, tmp_path, tiny_llama_path, text_path, chunks):
    call.succeed(main, *argv, "-ctk", "f32", "-ctv", "f32")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": [str(text_path)],
        "imatrix.chunk_count": len(chunks),
        "imatrix.chunk_size": N_CTX,
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    inputs = [linear_inputs(tiny_llama_path, chunk) for chunk in chunks]
    names = [name for name in inputs[0] if name.startswith("blk.")]
    assert sorted(tensors) == sorted(name + suffix for name in names for suffix in (".counts", ".in_sum2"))
    for name in names:
        expected = np.square(np.concatenate([of_chunk[name] for of_chunk in inputs])).sum(axis=0)
        np.testing.assert_allclose(tensors[name + ".in_sum2"].data.ravel(), expected, rtol=1e-3, err_msg=name)
        assert tensors[name + ".counts"].data.ravel().tolist() == [chunks.size], name


def test_the_output_layer_is_collected_on_request(call, argv, tmp_path):
    call.succeed(main, *argv, "--process-output", "--chunks", 1)
    assert "output.weight" in read_imatrix(tmp_path / "out.gguf").entries


def test_perplexity_is_that_of_llama_perplexity_and_can_be_left_out(call, argv, tiny_llama_path, text_path):
    scores = call.succeed(perplexity, "-m", tiny_llama_path, "-f", text_path, "-c", N_CTX)
    assert call.succeed(main, *argv) == call.succeed(main, *argv, "-ub", 16) == scores
    assert call.succeed(main, *argv, "--no-ppl") == ""


def test_two_parts_of_a_text_merge_to_the_whole(call, argv, tmp_path):
    call.succeed(main, *argv, "--chunks", 2)
    first = tmp_path / "first.gguf"
    (tmp_path / "out.gguf").rename(first)
    call.succeed(main, *argv, "--from-chunk", 2, "--in-file", first)
    parts = read_imatrix(tmp_path / "out.gguf")
    call.succeed(main, *argv)
    whole = read_imatrix(tmp_path / "out.gguf")
    assert_same_entries(parts, whole, rtol=1e-6)
    assert (parts.chunk_count, parts.chunk_size, parts.datasets) == (
        whole.chunk_count,
        whole.chunk_size,
        whole.datasets,
    )


def test_without_a_text_files_are_merged_and_need_no_model(call, argv, tmp_path):
    call.succeed(main, *argv, "--chunks", 1)
    once = read_imatrix(tmp_path / "out.gguf")
    call.succeed(main, "--in-file", f"{tmp_path}/out.gguf,{tmp_path}/out.gguf", "-o", tmp_path / "twice.gguf")
    twice = read_imatrix(tmp_path / "twice.gguf")
    assert twice.chunk_count == 2
    for name, (sums, counts) in once.entries.items():
        assert (twice.entries[name].in_sum2 == 2 * sums).all()
        assert (twice.entries[name].counts == 2 * counts).all()


def test_the_older_form_gives_the_same_weights(call, argv, tmp_path):
    call.succeed(main, *argv)
    matrix = read_imatrix(tmp_path / "out.gguf")
    call.succeed(main, *argv[:-1], tmp_path / "out.dat", "--output-format", "dat")
    legacy = read_imatrix(tmp_path / "out.dat")
    assert (legacy.chunk_count, legacy.datasets) == (matrix.chunk_count, matrix.datasets)
    assert legacy.entries.keys() == matrix.entries.keys()
    for name, (sums, _) in matrix.entries.items():
        assert legacy.entries[name].counts.tolist() == [matrix.chunk_count]
        expected = matrix.weights(name, sums.shape[1], 1)
        np.testing.assert_allclose(legacy.weights(name, sums.shape[1], 1), expected, rtol=1e-6)


def test_experts_that_saw_no_token_count_every_column_alike_in_the_older_form(tmp_path):
    matrix = ImportanceMatrix({"blk.0.ffn_up_exps.weight": entry([[4, 8], [0, 0]], [64, 0])}, [], 2, 32)
    write_legacy_imatrix(tmp_path / "a.dat", matrix)
    found = read_imatrix(tmp_path / "a.dat").weights("blk.0.ffn_up_exps.weight", 2, 2)
    assert found.tolist() == matrix.weights("blk.0.ffn_up_exps.weight", 2, 2).tolist() == [[4 / 64, 8 / 64], [1, 1]]


def test_layout_of_the_older_form(tmp_path):
    """By hand: means times the number of chunks that the most seen matrix had."""
    matrix = ImportanceMatrix({"blk.0.x": entry([[32, 128]], [64])}, ["a.txt", "b.txt"], 3, 32)
    write_legacy_imatrix(tmp_path / "a.dat", matrix)
    expected = struct.pack("<2i7s2i2f2i5s", 1, 7, b"blk.0.x", 2, 2, 32 / 64 * 2, 128 / 64 * 2, 3, 5, b"b.txt")
    assert (tmp_path / "a.dat").read_bytes() == expected


def test_the_older_form_needs_the_size_of_a_chunk(tmp_path):
    with pytest.raises(InvalidArgument, match="counts in chunks"):
        write_legacy_imatrix(tmp_path / "a.dat", ImportanceMatrix({"blk.0.x": entry([[1]], [1])}))
    assert not list(tmp_path.iterdir())


def test_copies_are_kept_at_the_frequency_asked_for(call, argv, tmp_path, chunks):
    call.succeed(main, *argv, "--save-frequency", 2)
    copies = {path.name: read_imatrix(path).chunk_count for path in tmp_path.glob("out.gguf.at_*")}
    assert copies == {f"out.gguf.at_{n}": n for n in range(2, len(chunks) + 1, 2)}


def test_the_file_appears_before_the_end_at_the_output_frequency(call, argv, monkeypatch):
    written = []
    monkeypatch.setattr("pyllama.tools.imatrix.write_imatrix", lambda path, matrix: written.append(matrix.chunk_count))
    call.succeed(main, *argv, "--output-frequency", 3, "--chunks", 4)
    assert written == [3, 4]


def test_control_tokens_are_parsed_on_request(call, tmp_path, tiny_llama_path):
    text = tmp_path / "control.txt"
    text.write_text("<|im_start|>hello" * 40)
    argv = ("-m", tiny_llama_path, "-f", text, "-c", 32, "-o", tmp_path / "out.gguf", "--no-ppl")
    call.succeed(main, *argv)
    as_text = read_imatrix(tmp_path / "out.gguf").chunk_count
    call.succeed(main, *argv, "--parse-special")
    assert read_imatrix(tmp_path / "out.gguf").chunk_count < as_text


def test_merging_refuses_what_does_not_fit():
    one = ImportanceMatrix({"blk.0.x": entry([[1, 2]], [3])}, ["a"], 1, 32)
    with pytest.raises(InvalidArgument, match=r"'blk\.0\.x' has"):
        merged([one, ImportanceMatrix({"blk.0.x": entry([[1, 2, 3]], [3])})])
    with pytest.raises(InvalidArgument, match="chunks of 32 and 64 tokens"):
        merged([one, ImportanceMatrix({}, [], 1, 64)])


def test_sums_that_are_not_finite_are_refused():
    sums = {"blk.0.x": InputSums(np.asarray([[1.0, np.inf]]), np.asarray([16]))}
    with pytest.raises(ModelError, match=r"blk\.0\.x are not finite"):
        collected(sums, process_output=False)


def test_statistics_of_an_entry():
    even = statistics_of(entry([[8, 8, 8, 8]], [4]))
    assert (even.total, even.lowest, even.highest, even.mean, even.deviation) == (8, 2, 2, 2, 0)
    assert even.evenness == pytest.approx(1)
    uneven = statistics_of(entry([[8, 0, 8, 0], [0, 0, 0, 0]], [4, 0]))  # the second expert saw nothing
    assert (uneven.total, uneven.lowest, uneven.deviation) == (4, 0, 1)
    assert uneven.evenness == pytest.approx(np.log(2) / np.log(4))
    assert statistics_of(entry([[0, 0]], [0])).total == 0


def test_the_report_shows_growth_from_layer_to_layer(call, tmp_path):
    matrix = ImportanceMatrix(
        {"blk.0.ffn_up.weight": entry([[2, 2]], [1]), "blk.10.ffn_up.weight": entry([[1, 1]], [1]),
         "blk.1.ffn_up.weight": entry([[8, 8]], [1]), "output.weight": entry([[1, 3]], [1])},
    )  # fmt: skip
    write_imatrix(tmp_path / "m.gguf", matrix)
    out = call.succeed(main, "--show-statistics", "--in-file", tmp_path / "m.gguf")
    assert out == statistics_report(str(tmp_path / "m.gguf"), matrix) + "\n"
    rows = [line.split() for line in out.splitlines() if "weight" in line]
    assert [row[2] for row in rows] == [
        "blk.0.ffn_up.weight",
        "blk.1.ffn_up.weight",
        "blk.10.ffn_up.weight",
        "output.weight",
    ]
    assert [row[-1] for row in rows] == ["-", "2.00", "-", "-"]
    assert re.search(r"^ +1 \| +16\.0000 +2\.00$", out, re.MULTILINE)


def test_faults_are_one_line_and_leave_no_file(call, argv, tmp_path, tiny_llama_path, text_path):
    out = ("-o", tmp_path / "out.gguf")
    assert "error: no model given; use -m FILE" in call.fail(main, "-f", text_path, *out)
    assert call.fail(main, "-m", tiny_llama_path, *out) == "error: no text given; use -f FILE"
    assert "need at least 1024" in call.fail(main, "-m", tiny_llama_path, "-f", text_path, *out)
    assert "the text has 0 tokens" in call.fail(main, *argv, "--from-chunk", 99)
    assert "fewer than 16 tokens do not count" in call.fail(main, *argv, "-ub", 8)
    assert "folder does not exist" in call.fail(main, *argv[:-1], tmp_path / "no" / "out.gguf")
    assert "--show-statistics needs one matrix" in call.fail(main, "--show-statistics")
    assert "error: not supported yet: --nextn" in call.fail(main, *argv, "--nextn")
    assert not list(tmp_path.iterdir())


def test_quantised_weights_are_collected_for_too(call, tmp_path, text_path):
    path = write_tiny_llama(tmp_path / "q4_0.gguf", weight_type="q4_0")
    call.succeed(main, "-m", path, "-f", text_path, "-c", N_CTX, "-o", tmp_path / "out.gguf", "--no-ppl")
    assert len(read_imatrix(tmp_path / "out.gguf").entries) == 14
