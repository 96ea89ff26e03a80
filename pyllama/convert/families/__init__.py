"""The model families that can be converted: one file each, found by what config.json says.

To add one: a class with the members of `dense.DenseFamily`, and its name in `FAMILIES`.
"""

from pyllama.errors import ModelError

from ..config import Config
from .dense import MTP_CHOICES, DenseFamily
from .dflash import DFlash
from .eagle3 import Eagle3
from .gemma3 import Gemma3
from .llama import Llama
from .mixtral import Mixtral
from .qwen2 import Qwen2
from .qwen3 import Qwen3
from .qwen3moe import Qwen3Moe
from .qwen4exp import Qwen4Exp
from .qwen35 import Qwen35
from .qwen35moe import Qwen35Moe

FAMILIES: tuple[type[DenseFamily], ...] = (
    DFlash, Eagle3, Gemma3, Llama, Mixtral, Qwen2, Qwen3, Qwen3Moe, Qwen35, Qwen35Moe, Qwen4Exp,
)  # fmt: skip

__all__ = ["FAMILIES", "MTP_CHOICES", "DenseFamily", "family_of", "supported"]


def family_of(config: Config) -> DenseFamily:
    """By `architectures`, or by `model_type` where that is absent. Raises `ModelError` with the list of known ones."""
    named = config.get("architectures")
    if named:
        names = named if isinstance(named, list) else [named]
        found = [family for family in FAMILIES if names[0] in family.hf_architectures]
    else:
        names = [config.get("model_type")]
        found = [family for family in FAMILIES if names[0] in family.model_types]
    if not found:
        raise ModelError(
            f"{config.source}: architecture {names[0]!r} is not supported; supported are {', '.join(supported())}"
        )
    return found[0](config.text_part(found[0].defaults))


def supported() -> list[str]:
    return [name for family in FAMILIES for name in family.hf_architectures]
