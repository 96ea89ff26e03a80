"""What users of other engines met on the command line: shards that do not belong together (J3), numbers at the edge
(J4), a context that is not the one asked for (J5), spellings (J6), splits over devices (J9).
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from pyllama import Llama
from pyllama.errors import GgufError, InvalidArgument
from pyllama.gguf import GgufFile, GgufWriter, TensorSpec
from pyllama.options import TOOLS, OptionError, options_of, parse, parse_options
from pyllama.server.loaded_model import context_sizes, load_model
from pyllama.server.settings import SettingsError, settings_from_options
from pyllama.tools import bench, cli, gguf_split, perplexity
from support.file_tools import run_tool
from support.tiny_llama import write_tiny_llama


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("LLAMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.chdir(tmp_path)  # programs must not start in the source tree, whose package has no compiled extension


def serve(model, *argv):
    """The loaded model of a server, its engine thread ended."""
    options = parse("llama-server", ["-t", "1", *map(str, argv)], {}, config_files=())
    loaded = load_model(settings_from_options(options, str(model)), lambda events: None)
    loaded.engine_loop.stop()
    return loaded


def complete(capsys, model, *argv):
    """(exit code, stdout, stderr) of a short greedy completion of llama-cli."""
    fixed = ["-m", model, "-t", "1", "-no-cnv", "-p", "the world", "-n", "8", "--temp", "0", "--no-show-timings"]
    try:
        code = cli.main([*map(str, fixed), *map(str, argv)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


# ---- J3: shards


@pytest.fixture
def sets(tmp_path):
    """One model in two quantisations, three shards each."""
    shards = {}
    for quant in ("q4_0", "q8_0"):
        folder = tmp_path / quant
        folder.mkdir()
        model = write_tiny_llama(folder / "m.gguf", n_layer=4, weight_type=quant)
        n_each = -(-len(GgufFile(model).tensors) // 3)
        assert run_tool(gguf_split.main, "--split-max-tensors", n_each, model, folder / "s") == 0
        shards[quant] = sorted(folder.glob("s-*-of-00003.gguf"))
        assert len(shards[quant]) == 3
    return shards


def lose(shards, other):
    shards[1].unlink()
    return shards[1], "part 2 of 3 is missing"


def swap(shards, other):
    aside = shards[1].rename(shards[1].with_name("aside"))
    shards[2].rename(shards[1])
    aside.rename(shards[2])
    return shards[1], "split.no is 2, expected 1"


def mix(shards, other):
    shutil.copy(other[2], shards[2])
    return shards[2], "split.set_id is"


def mix_without_identity(shards, other):
    """As other programs write shards: without our key."""
    shutil.copy(other[2], shards[2])
    for shard in shards:
        file = GgufFile(shard, single_file=True)
        blobs = [file.tensor_bytes(tensor.name) for tensor in file.tensors]
        keys = [entry for entry in file.key_values if entry.key != "split.set_id"]
        with GgufWriter(shard, keys, [TensorSpec.of(tensor) for tensor in file.tensors]) as writer:
            for blob in blobs:
                writer.write(blob)
    return shards[2], "is q8_0 here, q4_0 in the other parts"


def mix_first(shards, other):
    shutil.copy(other[0], shards[0])
    return shards[1], "split.set_id is"


def cut(shards, other):
    shards[2].write_bytes(shards[2].read_bytes()[:-100])
    return shards[2], ""


@pytest.mark.parametrize("damage", [lose, swap, mix, mix_without_identity, mix_first, cut], ids=lambda f: f.__name__)
def test_every_way_to_load_names_the_shard_at_fault(sets, damage, capsys):
    shard, words = damage(sets["q4_0"], sets["q8_0"])
    first = sets["q4_0"][0]
    for load in (lambda: serve(first), lambda: Llama(str(first), verbose=False)):
        with pytest.raises(GgufError) as caught:
            load()
        assert str(shard) in str(caught.value)
        assert words in str(caught.value)
    code, out, err = complete(capsys, first)
    assert (code, out) == (1, "")
    assert err == f"error: {caught.value}\n"
    assert bench.main(["-m", str(first), "-p", "4", "-n", "0", "-r", "1", "-t", "1"]) == 1
    assert f"error: {caught.value}\n" in capsys.readouterr().err
    assert run_tool(perplexity.main, "-m", first, "-p", "the world " * 100, "-c", 32) == 1
    assert f"error: {caught.value}\n" in capsys.readouterr().err


def test_the_server_ends_with_exit_code_1_and_the_shard_in_its_log(sets):
    shard, words = lose(sets["q4_0"], sets["q8_0"])
    command = [sys.executable, "-m", "pyllama.server", "--port", "0", "-m", str(sets["q4_0"][0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{shard}: {words}" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_shard_than_the_first_is_refused(sets, capsys):
    code, _, err = complete(capsys, sets["q4_0"][1])
    assert code == 1
    assert f"{sets['q4_0'][1]}: is part 2 of 3" in err


def test_whole_sets_beside_each_other_load_and_answer_as_the_single_file(sets, tmp_path, capsys):
    together = tmp_path / "together"
    together.mkdir()
    for quant, shards in sets.items():
        for shard in shards:
            shutil.copy(shard, together / shard.name.replace("s-", f"{quant}-"))
    for quant in sets:
        whole = complete(capsys, tmp_path / quant / "m.gguf")
        assert complete(capsys, together / f"{quant}-00001-of-00003.gguf") == whole
        assert whole[0] == 0


# ---- J4: numbers

NUMBERS = {
    "int": ["abc", "", " ", "2147483648", "-2147483649", "9" * 30],
    "uint32": ["abc", "", "4294967296", "9" * 30],
    "float": ["abc", "", "nan", "inf", "1e39", "1e400"],
    "reciprocal": ["abc", "", "nan", "inf", "0"],
    "layers": ["abc", "", "2147483648"],
    "pair": ["abc", "2147483648"],
    "int_list": ["abc", "", "1,abc", "2147483648"],
    "float_list": ["abc", "", "1,nan", "1e39"],
    "ratio_list": ["abc", "nan", "1,inf", "-1"],
    "ranges": ["abc", "", "1-", "2147483648", "1-2147483648"],
    "int_pairs": ["abc", "", "1", "1,abc", "1,2147483648"],
}


NUMERIC_OPTIONS = [
    pytest.param(tool, option, id=f"{tool}{option.long_name}")
    for tool in TOOLS
    for option in options_of(tool)
    if option.type in NUMBERS and option.command_line and option.status != "removed"
]


def refusal(tool, option, text):
    values = [text, text] if option.type == "pair" else [text]
    with pytest.raises(OptionError) as caught:
        parse(tool, [option.long_name, *values], {}, config_files=())
    return str(caught.value).partition("\n")[0]


@pytest.mark.parametrize(("tool", "option"), NUMERIC_OPTIONS)
def test_a_number_that_is_none_or_too_large_is_refused_with_option_and_value(tool, option):
    for text in NUMBERS[option.type]:
        message = refusal(tool, option, text)
        assert message.startswith(f'error while handling argument "{option.long_name}": ')
        assert (text.strip().split(",")[-1].lstrip("-").partition("e")[0]) in message


@pytest.mark.parametrize(("tool", "option"), NUMERIC_OPTIONS)
def test_numbers_outside_the_limits_of_the_table_are_refused(tool, option):
    outside = [str(value) for value in option.refuse]
    outside += [f"{option.minimum - 1:.0f}"] if option.minimum is not None else []
    outside += [f"{option.maximum + 1:.0f}"] if option.maximum is not None else []
    for text in outside:
        assert text.lstrip("-") in refusal(tool, option, text)


@pytest.mark.parametrize("text", ["1", "-1", "2147483648", "2147483647", "abc", ""])
@pytest.mark.parametrize("spelling", ["-c", "--ctx-size", "--ctx_size"])
def test_impossible_contexts_end_the_programs_with_exit_code_1(tiny_llama_path, capsys, spelling, text):
    code, out, err = complete(capsys, tiny_llama_path, spelling, text)
    assert (code, out) == (1, "")
    assert err.startswith(f'error while handling argument "{spelling}": ')
    assert text in err.partition("\n")[0]


def test_counts_that_no_engine_can_hold_are_invalid_arguments(tiny_llama_path):
    for argument in ({"n_ctx": 2**31}, {"n_ctx": 2**70}, {"n_ctx": -1}, {"n_batch": 2**31}, {"n_threads": 2**40}):
        with pytest.raises(InvalidArgument, match=next(iter(argument))):
            Llama(str(tiny_llama_path), verbose=False, **argument)


def test_the_largest_values_of_the_table_start_or_are_refused_by_name(tiny_llama_path):
    assert serve(tiny_llama_path, "-c", 2**30).n_ctx == 2**30
    with pytest.raises(InvalidArgument, match="n_ctx"):
        serve(tiny_llama_path, "-c", 2**30, "-np", 3)  # three equal whole slots would be more than that


# ---- J5: the context that was asked for


@pytest.mark.parametrize("argv", [[], ["-c", "0"], ["-c", "0", "-fit", "on"], ["-c", "0", "-np", "1"]])
def test_without_a_size_the_context_is_that_of_the_training(tmp_path, argv):
    model = write_tiny_llama(tmp_path / "m.gguf", n_ctx_train=8192)
    loaded = serve(model, *argv)
    assert (loaded.n_ctx, loaded.n_ctx_slot) == (8192, 8192)


def test_llama_cli_and_llama_take_the_training_length_for_0(tmp_path, capsys):
    model = write_tiny_llama(tmp_path / "m.gguf", n_ctx_train=1024)
    with_default = complete(capsys, model, "-p", "the " * 600)
    assert with_default[0] == 0
    assert complete(capsys, model, "-c", "0", "-p", "the " * 600) == with_default
    assert complete(capsys, model, "-c", "512", "-p", "the " * 600)[0] == 1
    llama = Llama(str(model), n_ctx=0, verbose=False)
    assert llama.n_ctx() == 1024
    llama.close()


@pytest.mark.parametrize("n_ctx", [2, 256, 300, 1024, 2048, 4096, 100_000])
@pytest.mark.parametrize("n_slots", [1, 3, 4])
def test_an_explicit_context_is_never_lowered(n_ctx, n_slots):
    """A slot alone ends at the length of the training, beyond which a model makes no sense."""
    for unified in ([], ["-kvu"]):
        options = parse("llama-server", ["-c", str(n_ctx), "-np", str(n_slots), *unified], {}, config_files=())
        total, per_slot = context_sizes(settings_from_options(options, "m"), 2048)
        assert total >= n_ctx
        assert per_slot >= min(2048, n_ctx if unified else n_ctx // n_slots)


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ([], (4096, 1000)),
        (["-np", "2"], (2048, 1000)),
        (["-np", "2", "-kvu"], (2048, 1000)),
        (["-c", "512"], (512, 512)),
        (["-c", "3000", "-np", "2"], (3072, 1000)),
        (["-c", "3000", "-np", "4"], (3072, 768)),
    ],
)
def test_a_limit_per_slot_makes_the_pool_and_holds_beside_it(argv, sizes):
    argv = ["--kv-unified-per-slot", "1000", *argv]
    options = parse("llama-server", argv, {}, config_files=())
    assert context_sizes(settings_from_options(options, "m"), 2048) == sizes


def test_a_limit_per_slot_beyond_the_training_is_capped_to_it():
    options = parse("llama-server", ["--kv-unified-per-slot", "5000"], {}, config_files=())
    assert context_sizes(settings_from_options(options, "m"), 2048) == (20224, 2048)


def test_limits_per_slot_that_add_up_to_more_than_the_largest_context_are_refused():
    argv = ["--kv-unified-per-slot", "268435457"]
    with pytest.raises(SettingsError, match="--kv-unified-per-slot: 4 slots of 268435457 tokens are more than"):
        settings_from_options(parse("llama-server", argv, {}, config_files=()), "m")
    with_context = parse("llama-server", [*argv, "-c", "512"], {}, config_files=())
    assert context_sizes(settings_from_options(with_context, "m"), 2048) == (512, 512)


# ---- J6: spellings


def test_both_spellings_of_long_names_are_the_same_everywhere(tiny_llama_path, tmp_path):
    config = tmp_path / "config.ini"
    config.write_text("ctx_size = 512\n")
    by_file = parse("llama-server", [], {}, config_files=[config])
    spellings = ("--ctx-size", "--ctx_size")
    by_line = [parse("llama-server", [spelling, "512"], {}, config_files=()) for spelling in spellings]
    assert [options.ctx_size for options in (by_file, *by_line)] == [512] * 3


# ---- J9: splits over devices


def test_every_split_that_leaves_all_on_one_device_gives_the_same_text(tiny_llama_path, capsys):
    plain = complete(capsys, tiny_llama_path)
    assert plain[0] == 0
    splits = [["-sm", mode] for mode in ("none", "layer", "row", "tensor")]
    splits += [["-ts", ratios] for ratios in ("1,0,0", "1", "0.5/0", "")]
    splits += [["-sm", "tensor", "-ts", "1,0", "-mg", "0"], ["-dev", "none"], ["-dev", "CPU"], ["-dev", "CPU3"]]
    splits += [["-dev", "CPU0,CPU1", "-sm", "none", "-mg", "1"], ["-cmoe"], ["-ncmoe", "3"], ["-ot", "ffn=CPU"]]
    for split in splits:
        assert complete(capsys, tiny_llama_path, *split) == plain


def test_splits_over_several_devices_give_the_same_text(tiny_llama_path, capsys):
    plain = complete(capsys, tiny_llama_path)
    for split in (
        ["-dev", "CPU0,CPU1"],  # whole layers, the default
        ["-dev", "CPU0,CPU1,CPU2", "-sm", "tensor", "-ctk", "f32", "-ctv", "f32"],
        ["-dev", "CPU0,CPU1", "-sm", "tensor", "-ts", "3/1", "-ot", "ffn_(gate|up|down)=CPU1"],
    ):
        assert complete(capsys, tiny_llama_path, *split) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-dev", "CPU0", "--tensor-split", "1,1"], "the tensor split has a share for device 2 of 1"),
        (["-dev", "CPU0", "-ts", "0,1"], "the tensor split has a share for device 2 of 1"),
        (["--device", "CUDA31"], "device 'CUDA31' "),
        (["-dev", "CPU0,CPU1", "-sm", "row"], "split mode 'row' is not supported; 'tensor' divides"),
        (["-dev", "CPU0", "-sm", "none", "-mg", "1"], "main device is 1, expected 0 to 0"),
        (["-ot", "ffn=CUDA0"], "tensor override 'ffn': device 'CUDA0' is not one of CPU"),
        (["-ot", "ffn"], "--override-tensor ffn: expected <tensor name pattern>=<device>"),
        (["-ot", "(=CPU"], "tensor override '(': not a regular expression"),
    ],
)
def test_a_split_that_cannot_be_is_refused_by_name(tiny_llama_path, capsys, options, message):
    code, out, err = complete(capsys, tiny_llama_path, *options)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err


def test_the_list_of_devices_has_name_and_memory(capsys):
    with pytest.raises(SystemExit) as end:
        parse_options("llama-server", ["--list-devices"], {})
    assert end.value.code == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "Available devices:"
    assert re.fullmatch(r"  CPU: .+ \(\d+ MiB, \d+ MiB free\)", lines[0])
