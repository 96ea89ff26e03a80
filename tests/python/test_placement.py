"""Where models are placed: a planner before fake devices and a model whose needs are plain sums.

That the engine needs what `MemoryNeeds` says: tests/models/test_ranks.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pyllama._engine import MemoryNeeds, RankNeeds
from pyllama.devices import Device, Machine
from pyllama.draft_placement import DraftNeeds, DraftToPlace, PlacedDraft
from pyllama.errors import InvalidArgument, OutOfMemory
from pyllama.options import parse, placement_request
from pyllama.placement import (
    MEBIBYTE,
    Placed,
    PlacementRequest,
    _FileNeeds,
    chosen,
    explained,
    largest,
    place,
    place_model,
    total,
)
from pyllama.placement_log import load_lines
from pyllama.speculation import speculation_from_options
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_models import write_tiny_model

GIB = 1024 * MEBIBYTE
HOST = Device("CPU", 64 * GIB, 40 * GIB)
MARGIN = 1024  # MiB, the default of --fit-target


def machine(*free_mib: int) -> Machine:
    gpus = tuple(Device(f"CUDA{i}", 16 * GIB, mib * MEBIBYTE, "Tesla V100") for i, mib in enumerate(free_mib))
    return Machine(HOST, gpus, "" if gpus else "no driver")


@dataclass
class PlainModel:
    """24 layers of 400 MiB (300 of them experts, where it has any), an output matrix of 600 MiB, 1 MiB of KV cache per
    layer and 256 tokens, 100 MiB of activations on each device."""

    n_experts: int = 0
    n_layer: int = 24
    n_ctx_train: int = 32768
    asked: list[dict[str, Any]] = field(default_factory=list)

    LAYER, EXPERTS, OUTPUT, COMPUTE = 400, 300, 600, 100

    def of(self, *, n_ctx: int, **placement: Any) -> Sequence[RankNeeds]:
        self.asked.append({"n_ctx": n_ctx, **placement})
        devices = list(placement["devices"]) or ["CPU"]
        units = self.n_layer + 1
        on_devices = units if placement["device_layers"] is None else min(placement["device_layers"], units)
        layers = self.n_layer + 1 - on_devices
        weights = dict.fromkeys(("CPU", *devices), 0)
        kv = dict(weights)
        shares = placement["tensor_split"] or [1.0] * len(devices)
        bounds = [
            round(sum(shares[: i + 1]) / sum(shares) * (self.n_layer - min(layers, 24))) for i in range(len(devices))
        ]
        for layer in range(self.n_layer):
            device = "CPU"
            if layer >= layers:
                device = devices[next(i for i, bound in enumerate(bounds) if layer - layers < bound)]
            experts_on_host = any(
                where == "CPU" and re.search(pattern, f"blk.{layer}.ffn_up_exps.weight")
                for pattern, where in placement["tensor_overrides"]
            )
            moved = self.EXPERTS if self.n_experts and experts_on_host else 0
            weights["CPU"] += moved
            weights[device] += self.LAYER - moved
            kv[device] += n_ctx // 256
        if on_devices > 0:
            weights[devices[-1]] += self.OUTPUT
        else:
            weights["CPU"] += self.OUTPUT
        return tuple(
            RankNeeds(name, weights[name] * MEBIBYTE, kv[name] * MEBIBYTE, 0, self.COMPUTE * MEBIBYTE)
            for name in weights
            if weights[name] > 0
        )


WEIGHTS = 24 * PlainModel.LAYER + PlainModel.OUTPUT + PlainModel.COMPUTE  # MiB, all on one device


def placed(model: PlainModel, where: Machine, *, n_ctx: int = 0, **request: Any) -> Placed:
    return place(PlacementRequest(**request), model, where, n_ctx=n_ctx, may_shrink=n_ctx == 0)


def used_mib(result: Placed, device: str) -> int:
    return sum(total(need) for need in result.needs if need.device == device) // MEBIBYTE


def test_a_model_that_fits_lies_on_the_gpu_with_its_whole_context() -> None:
    result = placed(PlainModel(), machine(16000))
    assert result.n_ctx == 32768
    assert (result.arguments["devices"], result.arguments["device_layers"]) == (("CUDA0",), None)
    assert result.n_gpu_layers == 25
    assert not result.warnings
    assert "load_tensors: offloaded 25/25 layers to GPU" in load_lines(result)
    assert "load_tensors: offloading 24 repeating layers to GPU" in load_lines(result)
    assert "load_tensors:      CUDA0 model buffer size = 10200.00 MiB" in load_lines(result)
    assert "llama_kv_cache:      CUDA0 KV buffer size =  3072.00 MiB" in load_lines(result)


def test_a_context_that_was_not_asked_for_shrinks_before_layers_move() -> None:
    free = WEIGHTS + MARGIN + 24 * 50 + 23  # 50 pages and nearly one more
    result = placed(PlainModel(), machine(free))
    assert result.n_ctx == 50 * 256
    assert result.n_gpu_layers == 25
    assert any("context size reduced from 32768 to 12800 -> need 1872 MiB less" in line for line in result.lines)


def test_a_context_that_was_asked_for_stays_and_layers_move() -> None:
    result = placed(PlainModel(), machine(WEIGHTS + MARGIN), n_ctx=32768)
    assert result.n_ctx == 32768
    per_layer = PlainModel.LAYER + 128
    assert result.n_gpu_layers == 1 + (WEIGHTS - PlainModel.OUTPUT - PlainModel.COMPUTE) // per_layer
    assert used_mib(result, "CUDA0") <= WEIGHTS
    assert not result.warnings


def test_layers_move_with_the_smallest_context_where_no_context_helps() -> None:
    result = placed(PlainModel(), machine(6000), fit_ctx=8192)
    assert result.n_ctx == 8192
    assert 0 < result.n_gpu_layers < 25
    one_more = placed(PlainModel(), machine(6000), fit_ctx=8192, n_gpu_layers=result.n_gpu_layers + 1)
    assert used_mib(result, "CUDA0") <= 6000 - MARGIN < used_mib(one_more, "CUDA0")


def test_experts_of_the_first_layers_move_before_whole_layers() -> None:
    result = placed(PlainModel(n_experts=8), machine(WEIGHTS + MARGIN + 24 * 16 - 1000))
    assert result.n_ctx == 4096
    assert result.n_gpu_layers == 25
    assert result.arguments["tensor_overrides"] == (  # 300 MiB each
        (r"blk\.(0|1|2|3)\.ffn_(gate|up|down|gate_up)_(ch)?exps\.", "CPU"),
    )
    tiny = placed(PlainModel(n_experts=8), machine(3000))
    assert 0 < tiny.n_gpu_layers < 25
    assert not tiny.arguments["tensor_overrides"]


def test_more_free_memory_never_gives_less() -> None:
    before = (0, 0)
    for free in range(1000, 18000, 250):
        result = placed(PlainModel(), machine(free))
        now = (result.n_gpu_layers, result.n_ctx if result.n_gpu_layers == 25 else 0)
        assert now >= before, free
        assert used_mib(result, "CUDA0") <= max(0, free - MARGIN)
        before = now
    assert before == (25, 32768)


def test_layers_are_shared_out_by_free_memory() -> None:
    result = placed(PlainModel(), machine(9000, 5000), n_ctx=4096)
    last = 5000 - MARGIN - PlainModel.OUTPUT
    assert result.arguments["tensor_split"] == ((9000 - MARGIN) * MEBIBYTE, last * MEBIBYTE)
    given = placed(PlainModel(), machine(9000, 9000), n_ctx=4096, tensor_split=(3, 1))
    assert given.arguments["tensor_split"] == (3, 1)
    even = placed(PlainModel(), machine(16000, 16000), n_ctx=4096, split_mode="tensor")
    assert even.arguments["tensor_split"] == ()


def test_the_last_gpu_has_fewer_layers_for_the_output_matrix() -> None:
    layer = PlainModel.LAYER + 16
    first, last = 13 * layer + PlainModel.COMPUTE, 11 * layer + PlainModel.OUTPUT + PlainModel.COMPUTE
    result = placed(PlainModel(), machine(first + MARGIN + 50, last + MARGIN + 100), n_ctx=4096)
    assert (result.n_gpu_layers, result.warnings) == (25, ())
    assert (used_mib(result, "CUDA0"), used_mib(result, "CUDA1")) == (first, last)


@pytest.mark.parametrize(
    "given",
    [{"n_gpu_layers": "all"}, {"n_gpu_layers": 25}, {"fit": False}, {"tensor_overrides": (("blk.0.", "CUDA0"),)}],
    ids=str,
)
def test_what_the_user_chose_stays_and_a_warning_says_what_would_fit(given: dict[str, Any]) -> None:
    result = placed(PlainModel(), machine(8000), n_ctx=4096, **given)
    assert result.n_gpu_layers == 25
    (warning,) = result.warnings
    assert warning.startswith("the model may not fit: ")
    per_layer = PlainModel.LAYER + 16
    most = 1 + (8000 - MARGIN - PlainModel.OUTPUT - PlainModel.COMPUTE) // per_layer
    assert f"for CUDA0; --gpu-layers {most} would fit" in warning


def test_the_largest_context_is_named_where_one_helps() -> None:
    result = placed(PlainModel(), machine(WEIGHTS + MARGIN + 24 * 20), n_ctx=32768, n_gpu_layers="all")
    assert result.warnings[0].endswith("--gpu-layers 20 or --ctx-size 5120 would fit")


def test_running_out_of_memory_is_told_with_what_would_fit() -> None:
    tight = placed(PlainModel(), machine(WEIGHTS + MARGIN + 24 * 20), n_ctx=32768, n_gpu_layers="all")
    with (
        pytest.raises(OutOfMemory, match=r"^no 5 MiB; --gpu-layers 20 or --ctx-size 5120 would fit$"),
        explained(tight),
    ):
        raise OutOfMemory("no 5 MiB")
    roomy = placed(PlainModel(), machine(16000), n_ctx=4096)
    with pytest.raises(OutOfMemory, match=r"MiB of device memory were planned; --fit-target leaves"), explained(roomy):
        raise OutOfMemory("no 5 MiB")


def test_margins_are_per_device() -> None:
    two = placed(PlainModel(), machine(8000, 8000), n_ctx=4096, fit_target=(1000, 3000))
    assert two.arguments["tensor_split"] == (7000 * MEBIBYTE, (5000 - PlainModel.OUTPUT) * MEBIBYTE)


def test_without_a_gpu_the_cpu_computes_and_says_why() -> None:
    result = placed(PlainModel(), machine())
    assert result.arguments["devices"] == ()
    assert "the model runs on the CPU: no driver" in result.lines
    assert not result.warnings
    asked = placed(PlainModel(), machine(), n_gpu_layers=12, tensor_split=(1, 2), main_gpu=1)
    assert asked.warnings == (
        "no usable GPU (no driver): --gpu-layers has no effect",
        "--tensor-split and --main-gpu have no effect without devices to share",
    )
    assert asked.n_gpu_layers == 0
    assert not any("layers to GPU" in line for line in load_lines(asked))


def test_a_context_on_the_cpu_is_made_to_fit_the_memory_of_the_machine() -> None:
    small = Machine(Device("CPU", (WEIGHTS + MARGIN + 24 * 30) * MEBIBYTE, 0), problem="no driver")
    assert placed(PlainModel(), small).n_ctx == 30 * 256
    assert placed(PlainModel(), small, fit=False).n_ctx == 32768


def test_a_context_is_made_of_whole_slots() -> None:
    request = PlacementRequest()
    where = machine(WEIGHTS + MARGIN + 24 * 50)
    result = place(request, PlainModel(), where, n_ctx=0, may_shrink=True, granule=4 * 256)
    assert result.n_ctx == 48 * 256


@pytest.mark.parametrize("request_", [{"devices": ()}, {"n_gpu_layers": 0}])
def test_gpus_that_nobody_wants_are_left_alone(request_: dict[str, Any]) -> None:
    request = PlacementRequest(**request_)
    assert not request.looks_for_gpus
    result = place(request, PlainModel(), machine(16000), n_ctx=4096, may_shrink=False)
    assert [need.device for need in result.needs] == ["CPU"]
    assert not result.warnings


def test_one_gpu_of_several_has_it_all_without_a_split() -> None:
    result = placed(PlainModel(), machine(2000, 16000), split_mode="none", main_gpu=1)
    assert result.arguments["devices"] == ("CUDA1",)
    with pytest.raises(InvalidArgument, match="main device is 2, expected 0 to 1"):
        placed(PlainModel(), machine(2000, 16000), split_mode="none", main_gpu=2)


def test_a_kv_cache_that_is_left_to_the_host_takes_nothing_of_a_gpu() -> None:
    class Memory(PlainModel):
        def of(self, *, n_ctx: int, **placement: Any) -> list[RankNeeds]:
            return [RankNeeds("CUDA0", 700, 200, 30, 20)]

    needs = _FileNeeds(Memory(), {}, kv_offload=False).of(n_ctx=256)
    found = {need.device: (need.weights, need.kv, need.states, need.compute) for need in needs}
    assert found == {"CUDA0": (700, 0, 30, 20), "CPU": (0, 200, 0, 0)}


@dataclass
class PlainDraft:
    """12 layers of 50 MiB, an output matrix of 100 MiB, 0.25 MiB of KV cache per layer and 256 tokens, all on the first
    of its devices as far as they are left there."""

    n_layer: int = 12

    LAYER, OUTPUT = 50, 100

    def of(
        self, *, n_ctx: int, devices: Sequence[str], device_layers: int | None = None, **sizes: Any
    ) -> Sequence[RankNeeds]:
        n_on_device = self.n_layer + 1 if device_layers is None else min(device_layers, self.n_layer + 1)
        layers = {"CPU": self.n_layer, **dict.fromkeys(devices[:1], max(0, n_on_device - 1))}
        if devices:
            layers["CPU"] -= layers[devices[0]]
        output = devices[0] if devices and n_on_device > 0 else "CPU"
        return tuple(
            RankNeeds(
                name,
                (n * self.LAYER + (name == output) * self.OUTPUT) * MEBIBYTE,
                n * n_ctx // 1024 * MEBIBYTE,
                0,
                0,
            )
            for name, n in layers.items()
            if n > 0 or name == output
        )


DRAFT = 12 * PlainDraft.LAYER + PlainDraft.OUTPUT  # MiB, without its cache


def placed_with_draft(
    where: Machine, *argv: str, n_ctx: int = 4096, draft: PlainDraft | None = None, **request: Any
) -> Placed:
    """argv: of llama-server, about the draft model."""
    options = speculation_from_options(parse("llama-server", argv, {}, config_files=()))
    needs = DraftNeeds(DraftToPlace("draft.gguf", options.placement, {}), draft or PlainDraft())
    return place(PlacementRequest(**request), PlainModel(), where, n_ctx=n_ctx, may_shrink=n_ctx == 0, draft=needs)


def draft_of(result: Placed) -> PlacedDraft:
    assert result.draft is not None
    return result.draft


@pytest.mark.parametrize(
    ("argv", "request_", "devices", "n_gpu_layers"),
    [
        ((), {}, ("CUDA0",), 13),
        ((), {"devices": ("CUDA1", "CUDA0")}, ("CUDA1",), 13),
        ((), {"split_mode": "none", "main_gpu": 1}, ("CUDA1",), 13),
        ((), {"n_gpu_layers": 0}, (), 0),
        ((), {"devices": ()}, (), 0),
        (("-ngld", "all"), {"n_gpu_layers": 0}, ("CUDA0",), 13),
        (("-ngld", "99"), {"n_gpu_layers": 0}, ("CUDA0",), 13),
        (("-ngld", "7"), {}, ("CUDA0",), 7),
        (("-ngld", "0"), {}, (), 0),
        (("-devd", "none"), {}, (), 0),
        (("-devd", "CUDA1"), {}, ("CUDA1",), 13),
        (("-devd", "CUDA1", "-ngld", "0"), {}, (), 0),
    ],
    ids=str,
)
def test_a_draft_model_lies_where_it_was_sent_or_on_the_first_gpu_of_the_model(
    argv: tuple[str, ...], request_: dict[str, Any], devices: tuple[str, ...], n_gpu_layers: int
) -> None:
    result = placed_with_draft(machine(16000, 16000), *argv, **request_)
    draft = draft_of(result)
    assert (draft.arguments["devices"], draft.n_gpu_layers) == (devices, n_gpu_layers)
    assert sum(map(total, draft.needs)) == (DRAFT + 12 * 4) * MEBIBYTE
    lines = list(load_lines(result))
    where = ", ".join(need.device for need in draft.needs)
    at = lines.index(f"loading draft model 'draft.gguf', it lies on {where}")
    assert (f"load_tensors: offloaded {n_gpu_layers}/13 layers to GPU" in lines[at:]) == bool(devices)
    assert not result.warnings


def test_parts_of_a_draft_model_are_sent_to_the_host() -> None:
    options = speculation_from_options(parse("llama-server", ("-otd", "a=CPU", "-ncmoed", "1"), {}, config_files=()))
    assert options.placement["tensor_overrides"] == (
        ("a", "CPU"),
        (r"blk\.(0)\.ffn_(gate|up|down|gate_up)_(ch)?exps\.", "CPU"),
    )


def test_a_draft_model_counts_in_what_fits() -> None:
    free = WEIGHTS + MARGIN + 24 * 50
    alone, beside = placed(PlainModel(), machine(free)), placed_with_draft(machine(free), n_ctx=0)
    assert draft_of(beside).arguments["devices"] == ("CUDA0",)
    used = used_mib(beside, "CUDA0") + sum(map(total, draft_of(beside).needs)) // MEBIBYTE
    assert free - MARGIN - 27 - 1 <= used <= free - MARGIN  # a page more takes 27 MiB
    assert alone.n_ctx > beside.n_ctx > 4096
    assert any(f"projected to use {used} MiB" in line for line in beside.lines)


def test_layers_of_the_model_make_room_for_its_draft_model() -> None:
    free = WEIGHTS + MARGIN + 24 * 16
    assert placed(PlainModel(), machine(free), n_ctx=4096).n_gpu_layers == 25
    result = placed_with_draft(machine(free))
    assert draft_of(result).n_gpu_layers == 13
    assert 20 < result.n_gpu_layers < 25
    assert not result.warnings


def test_layers_are_shared_out_by_what_a_draft_model_leaves_free() -> None:
    result = placed_with_draft(machine(9000, 9000))
    draft = DRAFT + 12 * 4
    room = ((9000 - MARGIN - draft) * MEBIBYTE, (9000 - MARGIN - PlainModel.OUTPUT) * MEBIBYTE)
    assert result.arguments["tensor_split"] == room


@pytest.mark.parametrize(
    ("where", "request_"),
    [
        (machine(WEIGHTS + MARGIN + 24 * 16 + DRAFT), {"n_gpu_layers": "all"}),  # no room for its cache
        (machine(3000), {}),  # the model would have no layer there
    ],
    ids=["layers that were asked for", "a small GPU"],
)
def test_a_draft_model_without_room_lies_on_the_cpu_and_a_warning_says_so(
    where: Machine, request_: dict[str, Any]
) -> None:
    large = PlainDraft(n_layer=36) if where.gpus[0].free < 4000 * MEBIBYTE else PlainDraft()
    result = placed_with_draft(where, draft=large, **request_)
    assert [need.device for need in draft_of(result).needs] == ["CPU"]
    assert draft_of(result).n_gpu_layers == 0
    assert result.n_gpu_layers > 0
    assert result.warnings == ("there is no room for the draft model on CUDA0 beside the model: it lies on the CPU",)
    said = placed_with_draft(where, "-devd", "CUDA0", draft=large, **request_)
    assert draft_of(said).arguments["devices"] == ("CUDA0",)


def test_a_draft_model_has_the_gpu_where_no_layer_of_the_model_has_room() -> None:
    small = placed_with_draft(machine(MARGIN + 500), draft=PlainDraft(n_layer=4))
    assert (small.n_gpu_layers, draft_of(small).arguments["devices"]) == (0, ("CUDA0",))
    large = placed_with_draft(machine(MARGIN + 500), draft=PlainDraft())
    assert (large.n_gpu_layers, draft_of(large).n_gpu_layers) == (0, 0)


def test_a_draft_model_keeps_its_cache_on_its_gpu_beside_a_model_on_the_host() -> None:
    result = placed_with_draft(machine(16000), "-ngld", "all", n_gpu_layers=0, kv_offload=False)
    assert [(need.device, need.kv > 0) for need in draft_of(result).needs] == [("CUDA0", True)]
    assert [need.device for need in result.needs] == ["CPU"]


def test_layers_of_a_draft_model_that_no_gpu_can_have_are_told() -> None:
    result = placed_with_draft(machine(), "-ngld", "99")
    assert draft_of(result).n_gpu_layers == 0
    assert result.warnings == ("no usable GPU (no driver): --spec-draft-ngl has no effect",)
    assert not placed_with_draft(machine(), "-ngld", "auto").warnings


def test_what_a_draft_model_takes_is_what_the_file_says(tmp_path: Path) -> None:
    plain = str(write_tiny_model(tmp_path / "model.gguf", "llama"))
    recurrent = str(write_tiny_hybrid(tmp_path / "recurrent.gguf", "qwen35"))
    sizes = {"n_seq_max": 3, "n_ubatch": 64, "type_k": "f16", "type_v": "f16"}
    for path, n_sequences in ((plain, 3), (recurrent, 6)):
        request = PlacementRequest(devices=("CPU0",), n_gpu_layers=1)
        result = place_model(request, plain, n_ctx=512, sizes=sizes, draft=DraftToPlace(path, {}, sizes))
        needs = MemoryNeeds(path).of(n_ctx=512, **{**sizes, "n_seq_max": n_sequences})
        assert draft_of(result).needs == tuple(needs)
        assert [need.device for need in result.needs] == ["CPU", "CPU0"]


@pytest.mark.parametrize(
    ("argv", "devices", "is_told"),
    [
        ((), ("CUDA0",), False),
        (("-ngld", "99"), ("CUDA0", "CUDA1"), False),
        (("-ngld", "99"), (), True),
        (("-ngld", "0"), ("CUDA0",), True),
        (("-ngld", "0"), (), False),
        (("-devd", "none"), ("CUDA0",), True),
        (("-devd", "CUDA0"), ("CUDA0",), False),
        (("-devd", "CUDA1"), ("CUDA0",), True),
        (("-otd", "a=CPU"), ("CUDA0",), True),
    ],
    ids=str,
)
def test_a_drafter_that_is_part_of_the_model_is_not_sent_elsewhere(
    argv: tuple[str, ...], devices: tuple[str, ...], is_told: bool
) -> None:
    for kind in ("draft-mtp", "draft-dflash", "draft-dspark", "draft-eagle3"):
        parsed = parse("llama-server", ("--spec-type", kind, *argv), {}, config_files=())
        warnings = speculation_from_options(parsed).placement_warnings(devices)
        assert bool(warnings) == is_told
        assert not is_told or "where it was sent has no effect" in warnings[0]
    simple = parse("llama-server", ("--spec-type", "draft-simple", *argv), {}, config_files=())
    assert not speculation_from_options(simple).placement_warnings(devices)


def test_the_cpu_does_not_share_the_layers_of_gpus() -> None:
    with pytest.raises(InvalidArgument, match="the CPU cannot be one of the devices that share layers"):
        placed(PlainModel(), machine(16000), devices=("CPU0", "CUDA0"), split_mode="tensor")


def test_benchmarks_take_what_they_are_told() -> None:
    arguments, warnings = chosen(PlacementRequest(n_gpu_layers=7, fit=False), machine(100))
    assert (arguments["devices"], arguments["device_layers"], warnings) == (("CUDA0",), 7, ())
    arguments, warnings = chosen(PlacementRequest(n_gpu_layers=7, fit=False), machine())
    assert (arguments["devices"], arguments["device_layers"], len(warnings)) == ((), None, 1)


@pytest.mark.parametrize(("low", "high", "limit"), [(0, 10, 7), (0, 0, 0), (3, 9, 9), (0, 25, 0), (4, 8, 2)])
def test_the_search_finds_the_largest_that_fits(low: int, high: int, limit: int) -> None:
    expected = min(high, limit) if limit >= low else None
    assert largest(low, high, lambda n: n <= limit) == expected


# ---- options


def requested(*argv: str, environ: dict[str, str] | None = None) -> PlacementRequest:
    return placement_request(parse("llama-server", argv, environ or {}, config_files=()))


def test_options_and_variables_become_a_request() -> None:
    assert requested() == PlacementRequest()
    assert requested("-ngl", "-1") == requested("-ngl", "auto") == PlacementRequest()
    assert requested("-ngl", "all").n_gpu_layers == requested("-ngl", "-2").n_gpu_layers == "all"
    assert requested(environ={"LLAMA_ARG_N_GPU_LAYERS": "12"}).n_gpu_layers == 12
    assert requested("-dev", "none").devices == ()
    assert requested("-dev", "CUDA1,CUDA0").devices == ("CUDA1", "CUDA0")
    assert requested("-fit", "off", "-fitt", "512,2048", "-fitc", "9000") == PlacementRequest(
        fit=False, fit_target=(512, 2048), fit_ctx=9000
    )
    assert not requested("-nkvo").kv_offload
    assert requested("-c", "0").fit_ctx > 2**30  # the whole training length was asked for
    overrides = requested("-ot", "a=CUDA0", "--n-cpu-moe", "1", "--n-cpu-ffn", "1").tensor_overrides
    assert overrides == (
        ("a", "CUDA0"),
        (r"blk\.(0)\.ffn_(gate|up|down|gate_up)_(ch)?exps\.", "CPU"),
        (r"blk\.(0)\.ffn_(gate|up|down)\.", "CPU"),
    )
