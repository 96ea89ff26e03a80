"""Builds the emulated device and prints its folder.

PYTHONPATH=tests:ggml_v100/cuda python -m support.emulated_cuda [UNIT ...]
"""

import sys

from support.emulated_cuda.build import ensure_built

print(ensure_built(sys.argv[1:] or None))
