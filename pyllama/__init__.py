"""Runs GGUF language models: `Llama` is the object most users want; `pyllama.server` is the HTTP server.

`pyllama._engine` (typed in `_engine.pyi`) is the native layer below it.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pyllama.errors import (
    ContextFull,
    DeviceError,
    DownloadError,
    GgufError,
    InvalidArgument,
    ModelError,
    OutOfMemory,
    PyllamaError,
    TemplateError,
    TokenizerError,
)

if TYPE_CHECKING:
    from pyllama.grammar import LlamaGrammar
    from pyllama.llama import Llama
    from pyllama.llama_drafts import LlamaDraftModel, LlamaPromptLookupDecoding, SpeculationOptions

try:
    __version__ = version("pyllama-v100")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"

__all__ = [
    "ContextFull",
    "DeviceError",
    "DownloadError",
    "GgufError",
    "InvalidArgument",
    "Llama",
    "LlamaDraftModel",
    "LlamaGrammar",
    "LlamaPromptLookupDecoding",
    "ModelError",
    "OutOfMemory",
    "PyllamaError",
    "SpeculationOptions",
    "TemplateError",
    "TokenizerError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command-line programs import this package for its errors and version only.
    if name == "Llama":
        from pyllama.llama import Llama

        return Llama
    if name in ("LlamaDraftModel", "LlamaPromptLookupDecoding", "SpeculationOptions"):
        from pyllama import llama_drafts

        return getattr(llama_drafts, name)
    if name == "LlamaGrammar":
        from pyllama.grammar import LlamaGrammar

        return LlamaGrammar
    raise AttributeError(f"module 'pyllama' has no attribute '{name}'")
