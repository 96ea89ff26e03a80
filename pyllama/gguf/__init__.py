"""GGUF files for the file tools: typed metadata, streaming reads by rows, streaming writes, split names.

Parsing and validation are the engine's (`pyllama._engine.GgufFile`); nothing in the engine writes files, so writing
lives here.
"""

from pyllama._engine import GgufFile, KeyValue, TensorInfo, type_traits

from .reader import TensorReader
from .splits import SplitName, shard_path, split_name
from .writer import GgufWriter, TensorSpec, file_bytes, with_key

__all__ = [
    "GgufFile",
    "GgufWriter",
    "KeyValue",
    "SplitName",
    "TensorInfo",
    "TensorReader",
    "TensorSpec",
    "file_bytes",
    "shard_path",
    "split_name",
    "type_traits",
    "with_key",
]
