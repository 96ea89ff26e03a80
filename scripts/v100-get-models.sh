#!/usr/bin/env bash
# Fetch the model files: scripts/v100-get-models.sh [-s ms|hf] [-d DIR] [--quant q8_0|q4_k_m] [--mmproj], see -h.
# Runs the program of the environment that scripts/quickstart.sh made, else the one on the PATH.
set -euo pipefail
program=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/v100-get-models
if [ ! -x "$program" ]; then
    program=v100-get-models
fi
exec "$program" "$@"
