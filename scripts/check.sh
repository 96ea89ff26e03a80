#!/usr/bin/env bash
# Style: ruff (lint and format) on the Python code, clang-format on the engine. Changes nothing; exits 1 when something differs.
# To fix: `ruff check --fix`, `ruff format`, `clang-format -i FILE`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

status=0
ruff check . || status=1
ruff format --check . || status=1
find ggml_v100 -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 -r clang-format --dry-run -Werror --style=file || status=1
exit $status
