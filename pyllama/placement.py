"""Where a model lies: from what the user asks for to devices, layers and a context that fit (docs/placement.md).

`place` decides before anything is loaded. What a choice takes of each device it asks of `measure`, for which
`pyllama._engine.MemoryNeeds` is made; the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pyllama.devices import HOST, Machine, is_host, this_machine
from pyllama.draft_placement import (
    DraftNeeds,
    DraftToPlace,
    PlacedDraft,
    arguments_beside,
    layers_on_gpus,
    looks_for_gpus,
)
from pyllama.errors import InvalidArgument, OutOfMemory

MEBIBYTE = 1 << 20
PAGE_TOKENS = 256
ALL_LAYERS = "all"
EXPERT_WEIGHTS = r"\.ffn_(gate|up|down|gate_up)_(ch)?exps\."
DENSE_WEIGHTS = r"\.ffn_(gate|up|down)\."


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What the user asks for. None and empty: not given.

    devices: of `backend_info()["devices"]`; None: the GPUs that can be used, or the CPU. n_gpu_layers: of the layers
    and the output matrix, the last so many lie on the devices; ``"all"`` of them, whether they fit or not; None: as
    many as fit. fit: choose what is not given so that it fits, leaving `fit_target` MiB free on each device (one value:
    on all) and the context at `fit_ctx` tokens or more.
    """

    devices: tuple[str, ...] | None = None
    n_gpu_layers: int | str | None = None
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    tensor_overrides: tuple[tuple[str, str], ...] = ()
    fit: bool = True
    fit_target: tuple[int, ...] = (1024,)
    fit_ctx: int = 4096
    kv_offload: bool = True

    @property
    def looks_for_gpus(self) -> bool:
        if self.devices is None:
            return self.n_gpu_layers != 0
        return not all(map(is_host, self.devices))


class RankNeeds(Protocol):
    """`pyllama._engine.RankNeeds`."""

    @property
    def device(self) -> str: ...
    @property
    def weights(self) -> int: ...
    @property
    def kv(self) -> int: ...
    @property
    def states(self) -> int: ...
    @property
    def compute(self) -> int: ...


class Needs(Protocol):
    """`pyllama._engine.MemoryNeeds`, with the sizes of the engine filled in except for `n_ctx`."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_experts(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...
    def of(self, *, n_ctx: int, **placement: Any) -> Sequence[RankNeeds]: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """`arguments`: of `pyllama._engine.Model`. `needs`: of each rank. `lines`, `warnings`: for the log.

    n_gpu_layers: of n_layer + 1, those on devices that are no CPU. advice: what to do when memory runs out. draft: the
    draft model beside it.
    """

    arguments: dict[str, Any]
    n_ctx: int
    n_layer: int
    n_gpu_layers: int
    needs: tuple[RankNeeds, ...]
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    advice: str = ""
    draft: PlacedDraft | None = None


@contextmanager
def explained(placed: Placed) -> Iterator[None]:
    """Loads what was placed: when memory runs out, the error says what to do."""
    try:
        yield
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}; {placed.advice}") from error


def expert_overrides(n_layers: int | None, *, every_layer: bool = False) -> tuple[tuple[str, str], ...]:
    """Expert weights of the first layers, or of all, in host memory."""
    return ((EXPERT_WEIGHTS, HOST),) if every_layer else _first_layers(n_layers, EXPERT_WEIGHTS)


def dense_overrides(n_layers: int | None) -> tuple[tuple[str, str], ...]:
    """Weights of dense feed-forwards of the first layers in host memory."""
    return _first_layers(n_layers, DENSE_WEIGHTS)


def _first_layers(n_layers: int | None, weights: str) -> tuple[tuple[str, str], ...]:
    """One rule: each is tried on every tensor."""
    layers = "|".join(map(str, range(n_layers or 0)))
    return ((rf"blk\.({layers}){weights}", HOST),) if layers else ()


def total(need: RankNeeds) -> int:
    return need.weights + need.kv + need.states + need.compute


def place(
    request: PlacementRequest,
    needs: Needs,
    machine: Machine,
    *,
    n_ctx: int,
    may_shrink: bool,
    granule: int = PAGE_TOKENS,
    draft: DraftNeeds | None = None,
) -> Placed:
    """n_ctx: tokens of the context, 0 for the training length. may_shrink: it may be made smaller to fit, to a multiple
    of `granule`. draft: of a draft model beside it.

    Raises `InvalidArgument` for what cannot be, and what `needs.of` raises.
    """
    return _Planner(request, needs, machine, n_ctx or needs.n_ctx_train, may_shrink, granule, draft).plan()


def chosen(request: PlacementRequest, machine: Machine) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments of `pyllama._engine.Model` for what is asked, and warnings; nothing is measured or made to fit.

    Raises `InvalidArgument`.
    """
    planner = _Planner(request, None, machine, 0, may_shrink=False)
    planner.choose_devices()
    return planner.arguments(planner.asked()), tuple(planner.warnings)


def place_model(
    request: PlacementRequest,
    path: str,
    *,
    n_ctx: int,
    may_shrink: bool = False,
    granule: int = PAGE_TOKENS,
    sizes: Mapping[str, Any],
    draft: DraftToPlace | None = None,
    open_needs: Callable[..., Any] | None = None,
    **model: Any,
) -> Placed:
    """`place` for a file on this machine. open_needs: `pyllama._engine.MemoryNeeds`, or what stands for it. sizes: what
    its `of` takes of the engine. model: arguments of it. Raises also what it raises.
    """
    if open_needs is None:
        from pyllama._engine import MemoryNeeds

        open_needs = MemoryNeeds
    wants_gpus = request.looks_for_gpus or (draft is not None and looks_for_gpus(draft.placement))
    machine = this_machine(with_gpus=wants_gpus)
    beside = DraftNeeds(draft, open_needs(draft.path)) if draft is not None else None
    needs = _FileNeeds(open_needs(path, **model), dict(sizes), request.kv_offload)
    return place(request, needs, machine, n_ctx=n_ctx, may_shrink=may_shrink, granule=granule, draft=beside)


@dataclass(frozen=True, slots=True)
class _FileNeeds:
    """`Needs` of a file, for engines of these sizes."""

    memory: Any
    sizes: dict[str, Any]
    kv_offload: bool = True

    @property
    def n_layer(self) -> int:
        return int(self.memory.n_layer)

    @property
    def n_experts(self) -> int:
        return int(self.memory.n_experts)

    @property
    def n_ctx_train(self) -> int:
        return int(self.memory.n_ctx_train)

    def of(self, *, n_ctx: int, **placement: Any) -> Sequence[RankNeeds]:
        needs: Sequence[RankNeeds] = self.memory.of(n_ctx=n_ctx, **self.sizes, **placement)
        return needs if self.kv_offload else _with_kv_on_host(needs)


@dataclass(frozen=True, slots=True)
class _Sum:
    """`RankNeeds` of two models on one device."""

    device: str
    weights: int
    kv: int
    states: int
    compute: int


def _with_kv_on_host(needs: Sequence[RankNeeds]) -> Sequence[RankNeeds]:
    """What GPUs would keep of the KV cache lies in memory of the host."""
    gpus = [need for need in needs if not is_host(need.device)]
    left = [_Sum(need.device, need.weights, 0, need.states, need.compute) for need in gpus]
    host = next((need.device for need in needs if is_host(need.device)), HOST)
    moved = _Sum(host, 0, sum(need.kv for need in gpus), 0, 0)
    return _together([*left, *(need for need in needs if is_host(need.device))], [moved])


def _together(needs: Sequence[RankNeeds], more: Sequence[RankNeeds]) -> Sequence[RankNeeds]:
    """By device."""
    found = {need.device: need for need in needs}
    for need in more:
        before = found.get(need.device, _Sum(need.device, 0, 0, 0, 0))
        sums = (before.weights + need.weights, before.kv + need.kv, before.states + need.states)
        found[need.device] = _Sum(need.device, *sums, before.compute + need.compute)
    return tuple(found.values())


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that fits, where everything below one that fits does so too."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the planner varies. n_layers: on the devices, None for all; n_cpu_experts: of the first layers; draft: where
    the draft model lies, as arguments of `pyllama._engine.Model`."""

    n_ctx: int
    n_layers: int | None
    n_cpu_experts: int = 0
    draft: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Planner:
    request: PlacementRequest
    needs: Any  # Needs; None: nothing may be measured
    machine: Machine
    n_ctx: int
    may_shrink: bool
    granule: int = PAGE_TOKENS
    draft: DraftNeeds | None = None
    devices: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _output: int | None = None

    def plan(self) -> Placed:
        self.choose_devices()
        choice = self._choice()
        advice = self._warn_of_shortage(choice)
        return Placed(
            arguments=self.arguments(choice),
            n_ctx=choice.n_ctx,
            n_layer=self.needs.n_layer,
            n_gpu_layers=self._n_on_gpus(choice),
            needs=tuple(self.needs.of(n_ctx=choice.n_ctx, **self.arguments(choice))),
            lines=tuple(self.lines),
            warnings=tuple(self.warnings),
            advice=advice,
            draft=self._placed_draft(choice),
        )

    # ---- what is asked

    def choose_devices(self) -> None:
        request = self.request
        if request.devices is not None:
            self.devices = request.devices
        elif request.n_gpu_layers != 0:
            self.devices = tuple(gpu.name for gpu in self.machine.gpus)
        names_gpus = any(not is_host(name) for name in self.devices)
        if request.split_mode == "none" and self.devices:
            if not 0 <= request.main_gpu < len(self.devices):
                raise InvalidArgument(f"main device is {request.main_gpu}, expected 0 to {len(self.devices) - 1}")
            self.devices = (self.devices[request.main_gpu],)
        if request.split_mode == "tensor" and names_gpus and any(map(is_host, self.devices)):
            raise InvalidArgument(
                "split mode 'tensor' over GPUs: the CPU cannot be one of the devices that share layers"
            )
        if self.devices:
            return
        if request.looks_for_gpus:
            self.lines.append(f"the model runs on the CPU: {self.machine.problem}")
        if request.n_gpu_layers not in (None, 0) and request.devices is None:
            self.warnings.append(f"no usable GPU ({self.machine.problem}): --gpu-layers has no effect")
        if request.tensor_split or request.main_gpu:
            self.warnings.append("--tensor-split and --main-gpu have no effect without devices to share")

    def asked(self) -> _Choice:
        n_layers = self.request.n_gpu_layers if self.devices else None
        return _Choice(self.n_ctx, n_layers if isinstance(n_layers, int) else None, draft=self._asked_draft())

    def _asked_draft(self) -> Mapping[str, Any] | None:
        if self.draft is None:
            return None
        asked = self.draft.draft.placement
        arguments = arguments_beside(asked, self.devices, self.machine)
        if looks_for_gpus(asked) and not arguments["devices"]:
            self.warnings.append(f"no usable GPU ({self.machine.problem}): --spec-draft-ngl has no effect")
        return arguments

    def arguments(self, choice: _Choice, shares: tuple[float, ...] = ()) -> dict[str, Any]:
        """shares: instead of those that are asked for."""
        request = self.request
        if not shares:
            shares = request.tensor_split
            if len(self.devices) < 2:
                shares = shares if request.devices else ()
            elif not shares and request.split_mode == "layer":
                shares = self._shares_by_memory(choice)
        return {
            "devices": self.devices,
            "split_mode": request.split_mode,
            "tensor_split": shares,
            "main_gpu": 0,
            "tensor_overrides": (*request.tensor_overrides, *expert_overrides(choice.n_cpu_experts)),
            "device_layers": choice.n_layers,
        }

    def _shares_by_memory(self, choice: _Choice) -> tuple[float, ...]:
        """Layers in proportion to what is free beside a draft model, where that is known."""
        budgets = [self._budget(name) for name in self.devices]
        if any(budget is None for budget in budgets):
            return ()
        taken = {need.device: total(need) for need in self._measure_draft(choice)}
        room = [max(0, (budget or 0) - taken.get(name, 0)) for name, budget in zip(self.devices, budgets, strict=True)]
        room[-1] = max(0, room[-1] - self._output_bytes())
        return tuple(map(float, room)) if any(room) else ()

    def _output_bytes(self) -> int:
        """Of the output matrix, which the last device has beside its layers."""
        if self.needs is None:
            return 0
        if self._output is None:
            found = self.needs.of(
                n_ctx=PAGE_TOKENS, **self.arguments(_Choice(PAGE_TOKENS, 1), (1.0,) * len(self.devices))
            )
            self._output = sum(need.weights for need in found if need.device == self.devices[-1])
        return self._output

    # ---- what it takes

    def _measure(self, choice: _Choice) -> Sequence[RankNeeds]:
        """Of the model and the draft model."""
        needs: Sequence[RankNeeds] = self.needs.of(n_ctx=choice.n_ctx, **self.arguments(choice))
        return _together(needs, self._measure_draft(choice)) if self.draft is not None else needs

    def _measure_draft(self, choice: _Choice) -> Sequence[RankNeeds]:
        if self.draft is None or choice.draft is None:
            return ()
        return self.draft.of(n_ctx=choice.n_ctx, **choice.draft)

    def _placed_draft(self, choice: _Choice) -> PlacedDraft | None:
        if self.draft is None or choice.draft is None:
            return None
        n_layer = self.draft.n_layer
        n_on_gpus = layers_on_gpus(choice.draft, n_layer)
        needs = tuple(self._measure_draft(choice))
        return PlacedDraft(self.draft.draft.path, dict(choice.draft), n_layer, n_on_gpus, needs)

    def _budget(self, name: str) -> int | None:
        """Bytes that may be taken; None: not known. The host is shared with everything else: all of it counts."""
        device = self.machine.find(name)
        if device is None:
            return None
        targets = self.request.fit_target
        index = self.devices.index(name) if name in self.devices else 0
        target = targets[min(index, len(targets) - 1)] if targets else 0
        return (device.total if is_host(name) else device.free) - target * MEBIBYTE

    def _limited(self, choice: _Choice, found: Sequence[RankNeeds]) -> list[RankNeeds]:
        """Of what is needed, that of which too little may be there. The host counts where all of the model is there."""
        counts_host = self._n_on_gpus(choice) == 0 or len(found) == 1
        limited = [need for need in found if counts_host or not is_host(need.device)]
        return [need for need in limited if self._budget(need.device) is not None]

    def _shortage(self, limited: Sequence[RankNeeds]) -> int:
        """Bytes by which the fullest device is too small; 0: all fits."""
        return max((total(need) - (self._budget(need.device) or 0) for need in limited), default=0)

    def _fits(self, choice: _Choice) -> bool:
        return self._shortage(self._limited(choice, self._measure(choice))) <= 0

    # ---- what fits

    def _choice(self) -> _Choice:
        """What was asked for, made to fit. A draft model gives way to the host where there is no room beside the model
        that it is for, or where that would leave the GPU to it.
        """
        asked = self.asked()
        if not self.request.fit:
            return asked
        choice = self._fitted(asked)
        if self.draft is None or asked.draft is None or self.draft.draft.placement:
            return choice
        gpus = [name for name in asked.draft["devices"] if not is_host(name)]
        fits, is_on_gpus = self._fits(choice), self._n_on_gpus(choice) > 0
        if not gpus or (fits and is_on_gpus):
            return choice
        said, self.lines = self.lines, []
        other = self._fitted(replace(asked, draft={**asked.draft, "devices": ()}))
        if not self._fits(other) or (fits and self._n_on_gpus(other) == 0):
            self.lines = said
            return choice
        self.warnings.append(f"there is no room for the draft model on {gpus[0]} beside the model: it lies on the CPU")
        return other

    def _fitted(self, asked: _Choice) -> _Choice:
        choice = asked
        if self._fits(choice):
            return choice
        granule = self.granule
        least = min(-(-self.request.fit_ctx // granule) * granule, choice.n_ctx)
        if self.may_shrink and least < choice.n_ctx:
            pages = largest(
                least // granule, choice.n_ctx // granule, lambda n: self._fits(replace(choice, n_ctx=n * granule))
            )
            smaller = replace(choice, n_ctx=pages * granule if pages is not None else least)
            saved = sum(map(total, self._measure(choice))) - sum(map(total, self._measure(smaller)))
            self.lines.append(
                f"common_fit_params: context size reduced from {choice.n_ctx} to {smaller.n_ctx} -> "
                f"need {saved // MEBIBYTE} MiB less memory in total"
            )
            choice = smaller
            if pages is not None:
                return choice
        return self._with_fewer_layers(choice)

    def _with_fewer_layers(self, choice: _Choice) -> _Choice:
        """Experts of the first layers go to the host first, then whole layers. Nothing where the user has chosen."""
        request = self.request
        is_free = request.n_gpu_layers is None and not request.tensor_split and not request.tensor_overrides
        if not is_free or all(map(is_host, self.devices)):
            return choice
        layers = self.needs.n_layer
        if self.needs.n_experts > 0:
            kept = largest(0, layers, lambda n: self._fits(replace(choice, n_cpu_experts=layers - n)))
            if kept is not None:
                return replace(choice, n_cpu_experts=layers - kept)
        n = largest(0, layers + 1, lambda n: self._fits(replace(choice, n_layers=n)))
        return replace(choice, n_layers=n or 0)

    def _warn_of_shortage(self, choice: _Choice) -> str:
        """Returns what to do when memory runs out all the same."""
        more_room = "--fit-target leaves more room, -c or --gpu-layers takes less"
        limited = self._limited(choice, self._measure(choice))
        if not limited:
            return more_room
        told = [need for need in limited if not is_host(need.device)] or limited
        used = sum(map(total, told))
        devices = [self.machine.find(need.device) for need in told]
        free = sum((device.total if is_host(device.name) else device.free) for device in devices if device is not None)
        kind = "host" if is_host(told[0].device) else "device"
        available = "host memory in total" if kind == "host" else "free device memory"
        self.lines.append(
            f"common_fit_params: projected to use {used // MEBIBYTE} MiB of {kind} memory vs. "
            f"{free // MEBIBYTE} MiB of {available}"
        )
        if self._shortage(limited) <= 0:
            self.lines.append(f"common_fit_params: will leave {(free - used) // MEBIBYTE} MiB of free {kind} memory")
            return f"{used // MEBIBYTE} MiB of {kind} memory were planned; {more_room}"
        advice = self._what_would_fit(choice)
        self.warnings.append(
            f"the model may not fit: {self._shortage(limited) // MEBIBYTE} MiB too much for "
            f"{self._fullest(limited)}; {advice}"
        )
        return advice

    def _fullest(self, limited: Sequence[RankNeeds]) -> str:
        return max(limited, key=lambda need: total(need) - (self._budget(need.device) or 0)).device

    def _what_would_fit(self, choice: _Choice) -> str:
        """The largest -ngl with this context, and the largest context with these layers."""
        answers = []
        if not all(map(is_host, self.devices)):
            n = largest(0, self.needs.n_layer + 1, lambda n: self._fits(replace(choice, n_layers=n)))
            if n:
                answers.append(f"--gpu-layers {n}")
        pages = largest(1, choice.n_ctx // PAGE_TOKENS, lambda n: self._fits(replace(choice, n_ctx=n * PAGE_TOKENS)))
        if pages:
            answers.append(f"--ctx-size {pages * PAGE_TOKENS}")
        return f"{' or '.join(answers)} would fit" if answers else "no context and no number of layers would fit"

    def _n_on_gpus(self, choice: _Choice) -> int:
        if not self.devices or all(map(is_host, self.devices)):
            return 0
        units = self.needs.n_layer + 1
        return units if choice.n_layers is None else min(choice.n_layers, units)
