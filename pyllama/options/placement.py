"""Options about devices and memory as `pyllama.placement` takes them."""

from collections.abc import Iterable, Sequence
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.placement import PlacementRequest, dense_overrides, expert_overrides

from .parser import Options

NO_LIMIT = 2**31 - 1
AUTO_DEVICES = ((), ("auto",))


def placement_request(options: Options) -> PlacementRequest:
    """Raises `InvalidArgument`."""
    return PlacementRequest(
        devices=device_names(options.device),
        n_gpu_layers=gpu_layers(options.n_gpu_layers),
        split_mode=options.split_mode,
        tensor_split=tuple(options.tensor_split),
        main_gpu=options.main_gpu,
        tensor_overrides=(
            *tensor_overrides(options.override_tensor),
            *expert_overrides(options.n_cpu_moe, every_layer=options.cpu_moe),
            *dense_overrides(options.n_cpu_ffn),
        ),
        fit=options.fit == "on",
        fit_target=tuple(options.fit_target),
        # A context of the training length that was asked for in so many words is not made smaller.
        fit_ctx=NO_LIMIT if options.given("ctx_size") and options.ctx_size == 0 else options.fit_ctx,
        kv_offload=options.kv_offload,
    )


def draft_placement(options: Options) -> dict[str, Any]:
    """Arguments of `pyllama._engine.Model` for a draft model, as far as they are given. Raises `InvalidArgument`."""
    placement: dict[str, Any] = {}
    n_layers = gpu_layers(options.spec_draft_ngl)
    devices = () if n_layers == 0 else device_names(options.spec_draft_device)
    if devices is not None:
        placement["devices"] = devices
    if n_layers is not None:
        placement["device_layers"] = n_layers if isinstance(n_layers, int) else NO_LIMIT
    overrides = (
        *tensor_overrides(options.spec_draft_override_tensor),
        *expert_overrides(options.spec_draft_n_cpu_moe, every_layer=options.spec_draft_cpu_moe),
    )
    return {**placement, "tensor_overrides": overrides} if overrides else placement


def gpu_layers(value: str | int) -> int | str | None:
    """Of a number, `auto` (also -1) or `all` (also other negative numbers)."""
    if value in ("auto", "all"):
        return None if value == "auto" else "all"
    n_layers = int(value)
    return n_layers if n_layers >= 0 else None if n_layers == -1 else "all"


def device_names(names: Sequence[str]) -> tuple[str, ...] | None:
    """None where the choice is left to the program; `none` is the CPU."""
    if tuple(names) in AUTO_DEVICES:
        return None
    return () if tuple(names) == ("none",) else tuple(names)


def tensor_overrides(rules: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """(pattern, device) of `pattern=device`."""
    pairs = []
    for rule in rules:
        pattern, equals, device = rule.rpartition("=")
        if not (pattern and equals and device):
            raise InvalidArgument(f"--override-tensor {rule}: expected <tensor name pattern>=<device>")
        pairs.append((pattern, device))
    return tuple(pairs)


def ratios(text: str) -> tuple[float, ...]:
    """Of `1/2/0`."""
    try:
        return tuple(float(word) for word in text.split("/"))
    except ValueError:
        raise InvalidArgument(f"--tensor-split {text}: expected numbers joined by /") from None
