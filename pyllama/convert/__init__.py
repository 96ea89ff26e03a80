"""From a model folder as `transformers` saves it to GGUF files.

`Conversion` reads the folder and knows every key and tensor; `output.split` divides them over files and `output.write`
streams the values. What is special about a model family is in `families`, one file each.
"""

from .conversion import OUT_TYPES, Conversion
from .families import supported
from .output import OutputFile, split, write

__all__ = ["OUT_TYPES", "Conversion", "OutputFile", "split", "supported", "write"]
