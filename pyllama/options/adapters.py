"""Options of LoRA adapters and control vectors as `Llama` names them."""

from typing import Any

from .parser import Options


def adapter_arguments(options: Options) -> dict[str, Any]:
    """Keyword arguments of `pyllama.Llama`."""
    return {
        "lora_adapters": options.adapters,
        "control_vectors": options.control_vectors,
        "control_vector_layers": options.control_vector_layer_range,
    }
