"""Rotary position options as the engine and `Llama` name them."""

from typing import Any

from .parser import Options

# Keyword argument -> dest.
_ARGUMENTS = {
    "rope_scaling_type": "rope_scaling",
    "rope_freq_base": "rope_freq_base",
    "rope_freq_scale": "rope_freq_scale",
    "yarn_orig_ctx": "yarn_orig_ctx",
    "yarn_ext_factor": "yarn_ext_factor",
    "yarn_attn_factor": "yarn_attn_factor",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
}


def rope_arguments(options: Options) -> dict[str, Any]:
    """Keyword arguments of `pyllama._engine.Engine` and of `pyllama.Llama`."""
    return {name: getattr(options, dest) for name, dest in _ARGUMENTS.items()}
