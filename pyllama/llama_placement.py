"""Where the model of a `Llama` lies: its arguments are read, a place is found and said (docs/placement.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyllama.llama_values import read_gpu_layers, read_split_mode
from pyllama.placement import Placed, PlacementRequest, place_model
from pyllama.placement_log import load_lines

if TYPE_CHECKING:
    from pyllama.speculation import SpeculationOptions

logger = logging.getLogger("pyllama")


def read_placement(
    *,
    devices: Sequence[str] | None,
    n_gpu_layers: int | str | None,
    split_mode: int | str,
    tensor_split: Sequence[float] | None,
    main_gpu: int,
    tensor_overrides: Sequence[tuple[str, str]],
    fit: bool,
    fit_target: Sequence[int],
    fit_ctx: int,
    offload_kqv: bool,
) -> PlacementRequest:
    """Arguments of `Llama`. Raises `InvalidArgument`."""
    return PlacementRequest(
        devices=None if devices is None else tuple(devices),
        n_gpu_layers=read_gpu_layers(n_gpu_layers, has_devices=devices is not None),
        split_mode=read_split_mode(split_mode),
        tensor_split=tuple(tensor_split or ()),
        main_gpu=main_gpu,
        tensor_overrides=tuple(tensor_overrides),
        fit=bool(fit),
        fit_target=tuple(fit_target),
        fit_ctx=fit_ctx,
        kv_offload=bool(offload_kqv),
    )


def find_place(
    request: PlacementRequest,
    path: str,
    *,
    n_ctx: int,
    sizes: Mapping[str, Any],
    speculation: SpeculationOptions | None,
    weights: Mapping[str, Any],
    open_needs: Callable[..., Any],
    verbose: bool,
) -> Placed:
    """sizes: of the engine, weights: what to load; these and open_needs as `place_model` takes them.

    Warnings are logged, and if verbose the rest of what is said. Raises what `place_model` raises.
    """
    placed = place_model(
        request,
        path,
        n_ctx=n_ctx,
        may_shrink=n_ctx == 0,
        sizes=sizes,
        draft=speculation.draft_to_place(sizes) if speculation is not None else None,
        open_needs=open_needs,
        **weights,
    )
    warnings = speculation.placement_warnings(placed.arguments["devices"]) if speculation is not None else ()
    for warning in (*placed.warnings, *warnings):
        logger.warning("%s", warning)
    if verbose:
        for line in (*placed.lines, *load_lines(placed)):
            logger.info("%s", line)
    return placed
