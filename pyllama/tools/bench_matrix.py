"""The tests of a llama-bench call: the product of all list parameters, times the lengths to measure."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyllama.options import Options
from pyllama.options.placement import device_names, gpu_layers, ratios, tensor_overrides
from pyllama.placement import PlacementRequest, expert_overrides

AXES = (
    "model",
    "n_gpu_layers",
    "n_cpu_moe",
    "split_mode",
    "main_gpu",
    "device",
    "tensor_split",
    "override_tensor",
    "load_mode",
    "lazy_mode",
    "embeddings",
    "no_op_offload",
    "no_host",
    "repack",
    "batch_size",
    "ubatch_size",
    "cache_type_k",
    "cache_type_v",
    "no_kv_offload",
    "flash_attn",
    "threads",
    "cpu_mask",
    "cpu_strict",
    "n_depth",
    "poll",
)
"""Parameters that multiply, slowest first."""


@dataclass(frozen=True, slots=True)
class BenchTest:
    """`parameters`: one value per axis. Lengths are tokens; `n_depth` tokens are in the cache before the start."""

    parameters: Mapping[str, Any]
    n_prompt: int
    n_gen: int

    @property
    def n_depth(self) -> int:
        return int(self.parameters["n_depth"])

    @property
    def placement(self) -> PlacementRequest:
        """Nothing is made to fit: a test measures what it was asked for. Raises `InvalidArgument`."""
        rules = [rule for rule in self.parameters["override_tensor"].split(";") if rule]
        split = self.parameters["tensor_split"]
        return PlacementRequest(
            devices=device_names(self.parameters["device"].split("/")),
            n_gpu_layers=gpu_layers(self.parameters["n_gpu_layers"]),
            split_mode=self.parameters["split_mode"],
            tensor_split=() if split in (0, "0") else ratios(split),
            main_gpu=int(self.parameters["main_gpu"]),
            tensor_overrides=tensor_overrides(rules) + expert_overrides(self.parameters["n_cpu_moe"]),
            fit=False,
            kv_offload=not self.parameters["no_kv_offload"],
        )

    @property
    def name(self) -> str:
        """`pp512`, `tg128`, `pp512+tg128`, and ` @ d4096` where the cache is filled before."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


def expand(options: Options, *, default_threads: int) -> list[BenchTest]:
    """All tests in the order in which they run. Lengths of 0 make no test."""
    values = {axis: getattr(options, axis) for axis in AXES}
    values["threads"] = values["threads"] or (default_threads,)
    values["override_tensor"] = values["override_tensor"] or ("",)
    lengths = [(n_prompt, 0) for n_prompt in options.n_prompt if n_prompt]
    lengths += [(0, n_gen) for n_gen in options.n_gen if n_gen]
    lengths += list(options.prompt_gen)
    return [
        BenchTest(dict(zip(AXES, combination, strict=True)), n_prompt, n_gen)
        for combination in itertools.product(*(values[axis] for axis in AXES))
        for n_prompt, n_gen in lengths
    ]
