"""Make an F32, F16 or Q8_0 copy of a GGUF model: decode every matrix, store it in the new type, keep the rest as it is.

Uses the `gguf` package, whose NumPy Q8_0 encoder writes the same bytes as the reference encoder. Test and benchmark
data only.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # values of general.file_type


def requantize(source: Path, target: Path, type_name: str) -> None:
    """Write `target` with the metadata of `source` (file type replaced) and every matrix as `type_name`."""
    wanted = gguf.GGMLQuantizationType[type_name.upper()]
    reader = gguf.GGUFReader(source, "r")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if (
            name.startswith("GGUF.") or name == "general.architecture"
        ):  # header fields; the writer adds the architecture
            continue
        value = FILE_TYPES[type_name] if name == "general.file_type" else field.contents()
        element_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], element_type)
    for tensor in reader.tensors:
        data, data_type = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1 and data_type != wanted:
            values = gguf.quants.dequantize(data, data_type)
            data, data_type = gguf.quants.quantize(values, wanted), wanted
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
