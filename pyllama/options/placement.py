"""Device options as `pyllama._engine.Model` and `Llama` name them."""

from collections.abc import Iterable, Sequence
from typing import Any

from pyllama.errors import InvalidArgument

from .parser import Options

EXPERT_WEIGHTS = r"\.ffn_(gate|up|down|gate_up)_(ch)?exps\."
HOST = "CPU"


def placement_arguments(options: Options) -> dict[str, Any]:
    """Keyword arguments of `pyllama._engine.Model` and of `pyllama.Llama`. Raises `InvalidArgument`."""
    return {
        "devices": device_names(options.device),
        "split_mode": options.split_mode,
        "tensor_split": tuple(options.tensor_split),
        "main_gpu": options.main_gpu,
        "tensor_overrides": (
            *tensor_overrides(options.override_tensor),
            *expert_overrides(options.n_cpu_moe, every_layer=options.cpu_moe),
        ),
    }


def device_names(names: Sequence[str]) -> tuple[str, ...]:
    """`none` and `auto` leave the choice to the engine."""
    return () if len(names) == 1 and names[0] in ("none", "auto") else tuple(names)


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


def expert_overrides(n_layers: int | None, *, every_layer: bool = False) -> tuple[tuple[str, str], ...]:
    """Expert weights of the first layers, or of all, in host memory."""
    layers = tuple((rf"blk\.{layer}{EXPERT_WEIGHTS}", HOST) for layer in range(n_layers or 0))
    return (*layers, (EXPERT_WEIGHTS, HOST)) if every_layer else layers
