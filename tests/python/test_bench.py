"""llama-bench: which tests a command makes, what reaches the engine, and the output formats (on a recording engine)."""

import csv
import io
import json
import os
import sqlite3
import statistics
import time
from types import SimpleNamespace

import pytest

from pyllama.devices import Device, Machine
from pyllama.errors import ModelError
from pyllama.options import parse
from pyllama.tools import bench, bench_run
from pyllama.tools.bench_matrix import expand
from pyllama.tools.bench_output import FIELDS, backends, make_printer, params_text, size_text
from pyllama.tools.bench_run import Runner

LLAMA_CPP_COLUMNS = (
    "build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,model_size,model_n_params,n_batch,"
    "n_ubatch,n_threads,cpu_mask,cpu_strict,poll,type_k,type_v,n_gpu_layers,n_cpu_moe,split_mode,main_gpu,no_kv_offload,"
    "flash_attn,devices,tensor_split,tensor_buft_overrides,load_mode,lazy_mode,embeddings,no_op_offload,no_host,repack,"
    "fit_target,fit_min_ctx,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts"
)


class RecordingModel:
    loaded: list[str]
    placements: list[dict]
    open_models: int

    def __init__(self, path, *, n_threads=0, **placement):
        if path == "bad.gguf":
            raise ModelError("bad.gguf: tensor output.weight is missing")
        type(self).loaded.append(path)
        type(self).placements.append(placement)
        type(self).open_models += 1
        self.path = path
        self.description = "llama 135M Q4_1"
        self.size_bytes = 96_600_000
        self.n_params = 134_515_008
        self.n_vocab = 1000
        self.devices = ("CPU",)
        self.metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1}

    def close(self):
        type(self).open_models -= 1


class RecordingEngine:
    """Keeps every call; `decode` enforces what the real one does: batch size, vocabulary, room in the context."""

    instances: list["RecordingEngine"]

    def __init__(self, model, *, n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, type_k, type_v, **placement):
        assert n_ubatch <= n_batch
        self.model, self.n_ctx, self.n_batch = model, n_ctx, n_batch
        self.settings = SimpleNamespace(
            n_ubatch=n_ubatch, n_threads=n_threads, type_k=type_k, type_v=type_v, **placement
        )
        self.length = 0
        self.calls: list[tuple[str, int]] = []
        self.first_tokens: list[int] = []
        self.closed = False
        type(self).instances.append(self)

    def decode(self, tokens):
        time.sleep(0.0002)  # keeps speeds in the range that tables are made for
        assert 1 <= len(tokens) <= self.n_batch
        assert all(0 <= token < self.model.n_vocab for token in tokens)
        self.length += len(tokens)
        assert self.length <= self.n_ctx
        self.calls.append(("decode", len(tokens)))
        self.first_tokens.append(tokens[0])

    def fork(self, source, destination, length):
        assert {source, destination} == {0, 1}
        self.length = length
        self.calls.append(("fork", source, length))

    def clear(self, seq_id):
        self.length = 0
        self.calls.append(("clear", seq_id))

    def close(self):
        self.closed = True


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr(RecordingModel, "loaded", [], raising=False)
    monkeypatch.setattr(RecordingModel, "placements", [], raising=False)
    monkeypatch.setattr(RecordingModel, "open_models", 0, raising=False)
    monkeypatch.setattr(RecordingEngine, "instances", [], raising=False)
    module = SimpleNamespace(Model=RecordingModel, Engine=RecordingEngine)
    monkeypatch.setattr(bench, "_native", lambda: module)
    return module


def options_of_call(*argv):
    return parse("llama-bench", ["-m", "a.gguf", *argv], {}, config_files=())


def expanded(*argv):
    return expand(options_of_call(*argv), default_threads=3)


def output_of_call(capsys, *argv):
    assert bench.main(["-m", "a.gguf", "-r", "2", *argv]) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ which tests


def test_defaults_are_a_prompt_and_a_generation_test():
    tests = expanded()
    assert [test.name for test in tests] == ["pp512", "tg128"]
    assert {test.parameters["threads"] for test in tests} == {3}


def test_lists_and_repetitions_multiply_with_types_slower_than_threads_slower_than_depth():
    tests = expanded("-p", "16", "-p", "32", "-n", "0", "-t", "1,2", "-ctk", "f16,q8_0", "-d", "0,4")
    axes = [
        (test.parameters["cache_type_k"], test.parameters["threads"], test.n_depth, test.n_prompt) for test in tests
    ]
    assert axes == [(k, t, d, p) for k in ("f16", "q8_0") for t in (1, 2) for d in (0, 4) for p in (16, 32)]


def test_ranges_add_and_multiply():
    assert [test.n_prompt for test in expanded("-p", "1-8*2,10-16+3", "-n", "0")] == [1, 2, 4, 8, 10, 13, 16]


def test_combined_and_depth_names():
    tests = expanded("-p", "0", "-n", "0", "-pg", "512,128", "-pg", "8,4", "-d", "0,4096")
    assert [test.name for test in tests] == ["pp512+tg128", "pp8+tg4", "pp512+tg128 @ d4096", "pp8+tg4 @ d4096"]


def test_the_prompt_test_of_a_model_comes_before_the_next_model():
    tests = expanded("-m", "b.gguf", "-p", "8", "-n", "4")
    assert [(test.parameters["model"], test.name) for test in tests] == [
        ("a.gguf", "pp8"),
        ("a.gguf", "tg4"),
        ("b.gguf", "pp8"),
        ("b.gguf", "tg4"),
    ]


# ------------------------------------------------------------------------------------------------ what runs


def test_prompts_run_in_batches_and_generation_token_by_token(native):
    runner = Runner(native, repetitions=2, warmup=False)
    runner.measure(expanded("-p", "100", "-n", "0", "-b", "64", "-ub", "512")[0], label="")
    runner.measure(expanded("-p", "0", "-n", "3")[0], label="")
    prompt, generation = RecordingEngine.instances
    assert prompt.calls == [("decode", 64), ("decode", 36), ("clear", 0)] * 2
    assert generation.calls == [*[("decode", 1)] * 3, ("clear", 0)] * 2
    assert prompt.closed
    assert generation.closed


def test_warm_up_comes_first_and_is_not_measured(native):
    runner = Runner(native, repetitions=1, warmup=True)
    result = runner.measure(expanded("-p", "10", "-n", "0")[0], label="")
    (engine,) = RecordingEngine.instances
    assert engine.calls == [("decode", 10), ("clear", 0), ("decode", 10), ("clear", 0)]
    assert len(result.samples_ns) == 1


def test_depth_fills_the_cache_once_and_is_kept_between_runs(native):
    runner = Runner(native, repetitions=2, warmup=False)
    runner.measure(expanded("-p", "0", "-n", "2", "-d", "300")[0], label="")
    (engine,) = RecordingEngine.instances
    run = [("decode", 1), ("decode", 1), ("clear", 0), ("fork", 1, 300)]
    assert engine.calls == [("decode", 300), ("fork", 0, 300), *run * 2]
    assert engine.n_ctx == 512


def test_prompts_begin_with_bos_where_the_vocabulary_asks_for_it(native):
    Runner(native, repetitions=1, warmup=False).measure(expanded("-p", "5", "-n", "0")[0], label="")
    assert RecordingEngine.instances[0].first_tokens == [1]


def test_layers_on_devices_are_an_axis_and_reach_the_model(native):
    runner = Runner(native, repetitions=1, warmup=False)
    argv = ["-p", "4", "-n", "0", "-ngl", "0,5,-1", "-dev", "CPU0/CPU1", "-ts", "1/3", "-ncmoe", "2"]
    for test in expanded(*argv):
        runner.measure(test, label="")
    assert [placement["device_layers"] for placement in RecordingModel.placements] == [0, 5, None]
    for placement in RecordingModel.placements:
        assert (placement["devices"], placement["tensor_split"]) == (("CPU0", "CPU1"), (1.0, 3.0))
        assert placement["tensor_overrides"] == ((r"blk\.(0|1)\.ffn_(gate|up|down|gate_up)_(ch)?exps\.", "CPU"),)


def test_layers_that_find_no_gpu_are_told_of(native, capsys, monkeypatch):
    monkeypatch.setattr(bench_run, "this_machine", lambda *, with_gpus: Machine(Device("CPU", 1, 1), (), "no driver"))
    Runner(native, repetitions=1, warmup=False).measure(expanded("-p", "4", "-n", "0", "-ngl", "7")[0], label="")
    assert capsys.readouterr().err == "llama-bench: no usable GPU (no driver): --gpu-layers has no effect\n"
    assert RecordingModel.placements[0]["devices"] == ()


def test_what_computes_is_named_after_the_devices():
    assert backends(("CPU",)) == backends(("CPU0", "CPU1")) == "CPU"
    assert backends(("CUDA0", "CUDA1")) == "CUDA"
    assert backends(("CPU", "CUDA0")) == "CUDA,CPU"


def test_parameters_reach_the_engine(native):
    argv = ["-p", "4", "-n", "0", "-b", "32", "-ub", "16", "-t", "2", "-ctk", "q8_0", "-ctv", "bf16"]
    cpu = min(os.sched_getaffinity(0))
    argv += ["--poll", "7", "-C", f"{1 << cpu:x}", "--cpu-strict", "1"]
    Runner(native, repetitions=1, warmup=False, priority=2).measure(expanded(*argv)[0], label="")
    settings = RecordingEngine.instances[0].settings
    assert vars(settings) == {
        "n_seq_max": 1,
        "n_ubatch": 16,
        "n_threads": 2,
        "type_k": "q8_0",
        "type_v": "bf16",
        "offload_kqv": True,
        "thread_cpus": [[cpu]],
        "thread_priority": 2,
        "thread_poll": 7,
    }


def test_a_model_is_loaded_once_and_closed(native, capsys):
    output_of_call(capsys, "-m", "b.gguf", "-p", "4,8", "-n", "2")
    assert RecordingModel.loaded == ["a.gguf", "b.gguf"]
    assert RecordingModel.open_models == 0


# ------------------------------------------------------------------------------------------------ output


def test_csv_has_the_columns_of_llama_cpp_and_quotes_every_value(native, capsys):
    text = output_of_call(capsys, "-p", "8", "-n", "2", "-o", "csv")
    header, *lines = text.splitlines()
    assert header == LLAMA_CPP_COLUMNS
    assert all(line.startswith('"') and line.endswith('"') for line in lines)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [("8", "0"), ("0", "2")]
    assert rows[0]["model_type"] == "llama 135M Q4_1"
    assert rows[0]["flash_attn"] == "-1"
    assert rows[0]["embeddings"] == "0"


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_json_carries_the_samples_that_the_means_come_from(native, capsys, kind):
    text = output_of_call(capsys, "-p", "8", "-n", "2", "-o", kind)
    rows = json.loads(text) if kind == "json" else [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert list(row) == [*FIELDS, "samples_ns", "samples_ts"]
        n_tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([1e9 * n_tokens / ns for ns in row["samples_ns"]])
        assert row["avg_ts"] == pytest.approx(statistics.mean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(statistics.stdev(row["samples_ts"]))
        assert row["avg_ns"] == pytest.approx(statistics.mean(row["samples_ns"]), abs=1)
        assert row["embeddings"] is False
        assert row["test_time"].endswith("Z")


def test_json_without_tests_is_an_empty_array(native, capsys):
    assert json.loads(output_of_call(capsys, "-p", "0", "-n", "0", "-o", "json")) == []


def test_sql_can_be_executed(native, capsys):
    database = sqlite3.connect(":memory:")
    database.executescript(output_of_call(capsys, "-p", "8", "-n", "2", "-o", "sql"))
    rows = database.execute("SELECT n_prompt, n_gen, model_type FROM llama_bench").fetchall()
    database.close()
    assert rows == [(8, 0, "llama 135M Q4_1"), (0, 2, "llama 135M Q4_1")]


def test_markdown_shows_fixed_columns_and_what_differs_from_the_default(native, capsys):
    plain = output_of_call(capsys, "-p", "8", "-n", "2", "-t", "2").splitlines()
    assert [cell.strip() for cell in plain[0].strip("|").split("|")] == [
        *("model", "size", "params", "backend", "threads", "test", "t/s")
    ]
    assert plain[1].startswith("| ------------------------------ | ---------: | ---------: | ---------- | ------: |")
    assert plain[2].startswith("| llama 135M Q4_1                |  92.12 MiB |   134.52 M | CPU        |       2 |")
    assert "±" in plain[2]
    assert len({len(line) for line in plain[:4]}) == 1
    assert plain[-1].startswith("build: ")
    changed = output_of_call(capsys, "-p", "8", "-n", "0", "-ub", "64", "-ctk", "f16,q8_0", "-fa", "on")
    header = [cell.strip() for cell in changed.splitlines()[0].strip("|").split("|")]
    assert header[5:] == ["n_ubatch", "type_k", "fa", "test", "t/s"]
    assert [line.split("|")[7].strip() for line in changed.splitlines()[2:4]] == ["f16", "q8_0"]


def test_results_can_go_to_stderr_as_well_and_progress_is_apart(native, capsys):
    assert bench.main(["-m", "a.gguf", "-p", "4", "-n", "0", "-oe", "jsonl", "--progress"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| model")
    lines = err.splitlines()
    assert [json.loads(line)["n_prompt"] for line in lines if line.startswith("{")] == [4]
    assert any("test 1/1 (pp4): run 5/5" in line for line in lines)


def test_a_broken_model_is_one_line_and_exit_code_1(native, capsys):
    assert bench.main(["-m", "bad.gguf"]) == 1
    assert capsys.readouterr().err == "error: bad.gguf: tensor output.weight is missing\n"
    assert RecordingModel.open_models == 0


def test_no_model_is_an_error(capsys):
    assert bench.main(["-p", "8"]) == 1
    assert capsys.readouterr().err.startswith("error: no model given")


@pytest.mark.parametrize(
    "argv", [["-o", "xml"], ["-p", "x"], ["-p", "8-4"], ["-p", "0-8*2"], ["-b", "0"], ["-pg", "5"]]
)
def test_bad_arguments_exit_with_1_and_name_the_argument(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["-m", "a.gguf", *argv])
    assert caught.value.code == 1
    assert f'"{argv[0]}"' in capsys.readouterr().err


def test_interrupt_ends_with_130_and_closes_everything(native, monkeypatch, capsys):
    def interrupt(self, tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordingEngine, "decode", interrupt)
    assert bench.main(["-m", "a.gguf"]) == 130
    assert RecordingModel.open_models == 0
    assert all(engine.closed for engine in RecordingEngine.instances)


def test_size_and_parameter_texts():
    assert (size_text(1024**3), size_text(1024**3 - 1)) == ("1.00 GiB", "1024.00 MiB")
    assert (params_text(1_100_000_000), params_text(134_515_008)) == ("1.10 B", "134.52 M")


def test_every_format_has_a_printer():
    for kind in ("csv", "json", "jsonl", "md", "sql"):
        assert make_printer(kind, io.StringIO(), options_of_call()) is not None
