"""Models of which a part lies on a CUDA device and the rest on the host: the machine's card, or the emulated device.

Compared with the CPU alone; tolerances as in test_cuda_models.py. With CPUs in the place of devices: test_ranks.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import Llama, SpeculationOptions, _engine
from pyllama._engine import Engine, MemoryNeeds, Model, backend_info
from pyllama.devices import this_machine
from pyllama.options import parse
from pyllama.placement import PlacementRequest, place_model
from pyllama.placement_log import load_lines
from pyllama.tools.loading import load_llama
from support.cuda_engine import cuda_devices
from support.logits import log_softmax, position_logits
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_models import write_tiny_model

UNITS = (
    "rows", "rows_panel", "all_reduce", "row_moves", "panel", "repack", "kv_append", "delta_net", "delta_net_chunked",
    "causal_conv", "routing", "attention_decode_64", "attention_prompt_64", "linear_f32", "linear_f16",
    "linear_row_f16",
    "linear_prompt_f16",
)  # fmt: skip
WIDTHS: dict[str, Any] = {"n_embd": 128, "head_dim": 64, "n_head": 4, "n_head_kv": 2, "weight_type": "f16"}
SIZES = {"n_seq_max": 1, "n_ubatch": 512, "type_k": "f16", "type_v": "f16"}


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    with cuda_devices(UNITS, EMULATED_CUDA_DEVICES="2"):
        yield


@pytest.fixture(scope="module", params=["llama", "qwen3moe", "qwen35moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda_placement") / f"{request.param}.gguf"
    if request.param == "qwen35moe":
        return write_tiny_hybrid(path, request.param, n_layer=4, attention_interval=2, **WIDTHS)
    experts = {"n_expert": 0, "n_ff": 192} if request.param == "llama" else {"n_expert": 4, "n_ff": 64}
    return write_tiny_model(path, request.param, n_layer=4, **WIDTHS, **experts)


TOKENS = np.random.default_rng(8).integers(3, 290, 70).tolist()


@pytest.mark.parametrize(
    "placement",
    [
        {"devices": ["CUDA0"], "device_layers": 3},
        {"devices": ["CUDA0", "CUDA1"], "device_layers": 4, "tensor_split": [1, 2]},
        {"devices": ["CUDA0"], "tensor_overrides": [(r"blk\.[01]\.ffn_.*", "CPU")]},
        {"devices": ["CUDA0"], "device_layers": 4, "tensor_overrides": [(r"blk\.2\.ffn_", "CPU"), ("^output", "CPU")]},
        {"devices": ["CUDA0", "CUDA1"], "split_mode": "tensor", "tensor_overrides": [(r"\.ffn_.*_exps", "CPU")]},
    ],
    ids=str,
)
def test_a_part_on_the_host_gives_the_logits_of_the_cpu(path: Path, placement: dict[str, Any]) -> None:
    if missing := set(placement["devices"]) - set(backend_info()["devices"]):
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    alone, model = Model(path), Model(path, **placement)
    assert any(device.startswith("CUDA") for device in model.devices)
    expected, found = (position_logits(Engine(m, n_ctx=512), TOKENS) for m in (alone, model))
    p, q = log_softmax(expected), log_softmax(found)
    divergences = np.sort((np.exp(p) * (p - q)).sum(axis=-1))
    if "moe" in path.name:
        divergences = divergences[:-3]  # where two experts are as good as each other, either may be chosen
    assert divergences.mean() <= 1e-3
    assert divergences.max() <= 1e-2
    needs = MemoryNeeds(path).of(n_ctx=512, **placement)
    assert [need.device for need in needs] == list(model.devices)
    for need, matrices in zip(needs, model.rank_bytes, strict=True):
        assert matrices <= need.weights <= 1.1 * matrices + 20_000
    model.close()
    alone.close()


def test_layers_are_found_room_for_on_the_gpus_that_are_there(path: Path) -> None:
    machine = this_machine()
    assert machine.gpus[0].name == "CUDA0"
    assert all(0 < gpu.free <= gpu.total for gpu in machine.gpus)
    placed = place_model(PlacementRequest(split_mode="none"), str(path), n_ctx=512, sizes=SIZES)
    assert placed.arguments["devices"] == ("CUDA0",)
    assert "load_tensors: offloaded 5/5 layers to GPU" in load_lines(placed)
    total_mib = machine.gpus[0].total >> 20
    nothing = place_model(
        PlacementRequest(split_mode="none", fit_target=(total_mib,)), str(path), n_ctx=512, sizes=SIZES
    )
    assert nothing.n_gpu_layers == 0
    assert [need.device for need in nothing.needs] == ["CPU"]


def test_llama_leaves_layers_to_the_host(path: Path) -> None:
    texts = []
    for arguments in ({}, {"n_gpu_layers": 2, "split_mode": 0}):
        llama = Llama(str(path), verbose=False, **arguments)
        texts.append(llama.create_completion(TOKENS[:20], max_tokens=4, temperature=0)["choices"][0]["text"])
        llama.close()
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another model with the same vocabulary."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    return write_tiny_model(path, "llama", n_layer=2, seed=5, n_expert=0, n_ff=192, **WIDTHS)


def drafted(llama: Llama) -> tuple[str, int]:
    """A greedy text, and how many tokens were drafted for it."""
    n_drafted = 0
    assert llama._sequence is not None
    drafts: Any = llama._sequence._drafts
    on_verified = drafts.on_verified

    def count(n_tokens: int, n_accepted: int) -> None:
        nonlocal n_drafted
        n_drafted += n_tokens
        on_verified(n_tokens, n_accepted)

    drafts.on_verified = count
    text = llama.create_completion(TOKENS[:20], max_tokens=10, temperature=0)["choices"][0]["text"]
    return text, n_drafted


@pytest.mark.parametrize("path", ["llama", "qwen35moe"], indirect=True)
@pytest.mark.parametrize(
    ("n_gpu_layers", "placement", "where"),
    [
        (-1, {}, "CUDA0"),
        (2, {"device_layers": 2}, "CPU, CUDA0"),
        (-1, {"devices": ()}, "CPU"),
        (0, {"device_layers": 3}, "CUDA0"),
        (-1, {"devices": ("CUDA1",)}, "CUDA1"),
    ],
    ids=str,
)
def test_texts_with_a_draft_model_are_those_without_wherever_it_lies(
    path: Path,
    draft_path: Path,
    n_gpu_layers: int,
    placement: dict[str, Any],
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if missing := set(placement.get("devices", ())) - set(backend_info()["devices"]):
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    arguments: dict[str, Any] = {"n_gpu_layers": n_gpu_layers, "split_mode": 0, "n_ctx": 512}
    with Llama(str(path), verbose=False, **arguments) as llama:
        expected = llama.create_completion(TOKENS[:20], max_tokens=10, temperature=0)["choices"][0]["text"]
    options = SpeculationOptions(types=("draft-simple",), draft_model=str(draft_path), placement=placement)
    with caplog.at_level(logging.INFO, "pyllama"), Llama(str(path), draft_model=options, **arguments) as llama:
        text, n_drafted = drafted(llama)
    assert text == expected
    assert n_drafted > 10
    assert f"loading draft model '{draft_path}', it lies on {where}" in caplog.messages


@pytest.mark.parametrize("path", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("argv", "device"),
    [(("-ngl", "9"), "CUDA0"), (("-ngl", "9", "-ngld", "0"), "CPU"), (("-ngl", "0", "-ngld", "all"), "CUDA0")],
    ids=str,
)
def test_the_command_line_sends_a_draft_model(
    path: Path, draft_path: Path, argv: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    class WatchedModel(Model):
        def __init__(self, path: Any, **arguments: Any) -> None:
            super().__init__(path, **arguments)
            found.append((str(path), self.devices))

    monkeypatch.setattr(_engine, "Model", WatchedModel)
    given = ("-m", str(path), "-md", str(draft_path), "--spec-type", "draft-simple", "-sm", "none", "-c", "512", *argv)
    with load_llama(parse("llama-cli", given, {}, config_files=())) as llama:
        _, n_drafted = drafted(llama)
    assert n_drafted > 10
    assert dict(found)[str(draft_path)] == (device,)
