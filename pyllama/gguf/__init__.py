"""GGUF files for the file tools: typed metadata, streaming reads by rows, streaming writes, split names.

Parsing and validation are the engine's (`pyllama._engine.GgufFile`); nothing in the engine writes files, so writing
lives here.
"""

from pyllama._engine import GgufFile, KeyValue, TensorInfo, type_traits

from .reader import PIECE_BYTES, TensorReader
from .split_set import SET_ID, check_parts, open_parts, split_id, without_split_keys
from .splits import SplitName, shard_path, split_name
from .writer import GgufWriter, TensorSpec, encoded_header, encoded_scalar, entry_offsets, file_bytes, with_key

__all__ = [
    "PIECE_BYTES",
    "SET_ID",
    "GgufFile",
    "GgufWriter",
    "KeyValue",
    "SplitName",
    "TensorInfo",
    "TensorReader",
    "TensorSpec",
    "check_parts",
    "encoded_header",
    "encoded_scalar",
    "entry_offsets",
    "file_bytes",
    "open_parts",
    "shard_path",
    "split_id",
    "split_name",
    "type_traits",
    "with_key",
    "without_split_keys",
]
