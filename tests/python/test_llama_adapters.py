"""LoRA adapters and control vectors in `Llama`, `llama-cli` and `llama-perplexity`, beside merged models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import Llama
from pyllama.errors import InvalidArgument, ModelError
from pyllama.tools import cli, perplexity
from support.adapters import merge, random_matrices, write_adapter, write_control_vector
from support.command import Caller
from support.tiny_llama import write_tiny_llama

PROMPT = "hello the world of you and the others"
SCALE = 0.6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    model = write_tiny_llama(folder / "model.gguf")
    matrices = random_matrices(model, lambda name: name.startswith("blk.") and "norm" not in name)
    return {
        "model": model,
        "lora": write_adapter(folder / "lora.gguf", matrices),
        "merged": merge(model, folder / "merged.gguf", [(matrices, SCALE)], architecture="llama"),
        "control": write_control_vector(
            folder / "control.gguf", {1: np.random.default_rng(2).standard_normal(64).astype(np.float32)}
        ),
    }


@pytest.fixture
def load(files: dict[str, Path]) -> Iterator[Any]:
    opened: list[Llama] = []

    def load_one(name: str = "model", **arguments: Any) -> Llama:
        opened.append(Llama(files[name], n_ctx=512, n_threads=1, verbose=False, **arguments))
        return opened[-1]

    yield load_one
    for llama in opened:
        llama.close()


def answer(llama: Llama, prompt: str = PROMPT) -> str:
    return str(llama(prompt, max_tokens=24, temperature=0)["choices"][0]["text"])


def test_an_adapter_answers_as_the_merged_model_does(files, load):
    merged, plain = answer(load("merged")), answer(load())
    assert merged != plain
    lora = files["lora"]
    for arguments in (
        {"lora_path": lora, "lora_scale": SCALE},
        {"lora_adapters": {str(lora): SCALE}},
        {"lora_adapters": [(lora, SCALE)]},
        {"lora_path": str(lora), "lora_scale": SCALE, "lora_adapters": [(lora, 0)]},
    ):
        assert answer(load(**arguments)) == merged, arguments


def test_scales_are_changed_between_calls(files, load):
    llama = load(lora_adapters=[(files["lora"], 0.0)])
    plain, merged = answer(load()), answer(load("merged"))
    assert answer(llama) == plain
    llama.set_lora_scales([SCALE])
    assert (llama.lora_scales, llama.n_tokens) == ((SCALE,), 0)
    assert answer(llama) == merged
    held = llama.n_tokens
    llama.set_lora_scales([SCALE])
    assert llama.n_tokens == held, "nothing changed, nothing is forgotten"
    llama.reset()
    assert answer(llama) == merged
    llama.set_lora_scales([0])
    assert answer(llama) == plain
    for scales in ([], [1.0, 2.0], [float("nan")], [float("inf")]):
        with pytest.raises(InvalidArgument, match="scales"):
            llama.set_lora_scales(scales)
    assert llama.lora_scales == (0.0,)


def test_texts_kept_in_host_memory_come_back_under_their_scales_only(files, load):
    llama = load(lora_adapters=[(files["lora"], 0.0)], cache_ram=64)
    plain, merged = answer(load()), answer(load("merged"))
    for _ in range(2):
        llama.set_lora_scales([0.0])
        assert answer(llama) == plain
        llama.set_lora_scales([SCALE])
        assert answer(llama) == merged


def test_a_saved_state_belongs_to_its_scales(files, load):
    llama = load(lora_adapters=[(files["lora"], SCALE)])
    first = answer(llama)
    state = llama.save_state()
    llama.set_lora_scales([1.0])
    with pytest.raises(InvalidArgument, match="other scales"):
        llama.load_state(state)
    other = answer(llama)
    assert other != first
    llama.set_lora_scales([SCALE])
    llama.load_state(state)
    assert llama.n_tokens == len(state.input_ids)
    assert answer(llama) == first
    with pytest.raises(InvalidArgument, match="not loaded"):
        load().load_state(state)


def test_embeddings_follow_the_scales(files, load):
    llama = load(lora_adapters=[(files["lora"], SCALE)], embedding=True, pooling_type="mean")
    expected = load("merged", embedding=True, pooling_type="mean").embed("hello")
    plain = load(embedding=True, pooling_type="mean").embed("hello")
    assert np.allclose(llama.embed("hello"), expected, rtol=1e-3, atol=1e-3)
    llama.set_lora_scales([0.0])
    assert llama.embed("hello") == plain


def test_control_vectors_steer_within_their_layers(files, load):
    plain = answer(load())
    steered = answer(load(control_vectors=[(files["control"], 2.0)]))
    assert steered != plain
    assert answer(load(control_vectors={str(files["control"]): 2.0}, control_vector_layers=(1, 1))) == steered
    assert answer(load(control_vectors=[(files["control"], 0.0)])) == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_path": "nowhere.gguf"}, "there is no file 'nowhere.gguf'"),
        ({"lora_adapters": [("nowhere.gguf", 1.0)]}, "there is no file 'nowhere.gguf'"),
        ({"lora_adapters": ["x"]}, "lora_adapters: expected"),
        ({"lora_adapters": [("x", "much")]}, "lora_adapters: expected"),
        ({"lora_adapters": [("x", float("inf"))]}, "lora_adapters: the scale of x is inf"),
        ({"control_vectors": [("nowhere.gguf", 1.0)]}, "there is no file 'nowhere.gguf'"),
        ({"lora_base": "x"}, "lora_base"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(load, arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        load(**arguments)


def test_a_model_is_no_adapter(files, load):
    with pytest.raises(ModelError, match=r"model.gguf: .*general.type"):
        load(lora_path=files["model"])


# ------------------------------------------------------------------------------------------------ programs


@pytest.fixture
def call(capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Caller:
    return Caller(capfd, monkeypatch, str(tmp_path))


def test_llama_cli_applies_adapters_and_control_vectors(files, call, load):
    argv = ("-m", files["model"], "-no-cnv", "-p", PROMPT, "-n", "24", "--temp", "0", "-t", "1", "--no-display-prompt")
    plain = call.succeed(cli.main, *argv)
    assert call.succeed(cli.main, *argv, "--lora-scaled", f"{files['lora']}:{SCALE}").rstrip("\n") == answer(
        load("merged")
    )
    assert call.succeed(cli.main, *argv, "--lora-scaled", f"{files['lora']}:0") == plain
    assert call.succeed(cli.main, *argv, "--control-vector-scaled", f"{files['control']}:2") != plain
    assert "there is no file 'x.gguf'" in call.fail(cli.main, *argv, "--lora", "x.gguf")
    assert "general.type" in call.fail(cli.main, *argv, "--lora", files["model"])


def test_llama_perplexity_is_that_of_the_merged_model(files, call, tmp_path):
    (tmp_path / "text.txt").write_text("hello the world and you\nthe user is in a world of the others; " * 6)
    argv = ("-f", tmp_path / "text.txt", "-c", "32", "-t", "1")

    def final(*arguments: object) -> float:
        line = next(
            line for line in call.succeed(perplexity.main, *argv, *arguments).splitlines() if "Final estimate" in line
        )
        return float(line.split("PPL = ")[1].split()[0])

    merged = final("-m", files["merged"])
    assert final("-m", files["model"], "--lora-scaled", f"{files['lora']}:{SCALE}") == pytest.approx(merged, rel=1e-3)
    assert final("-m", files["model"]) != pytest.approx(merged, rel=1e-2)


@pytest.mark.parametrize("value", ["x.gguf", ":0.5", "x.gguf:", "x.gguf:much", "x.gguf:inf"])
def test_scaled_files_need_a_path_and_a_scale(call, files, value):
    result = call(cli.main, "-m", files["model"], "--lora-scaled", value)
    assert result.code == 1
    assert '"--lora-scaled"' in result.err
