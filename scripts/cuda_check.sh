#!/usr/bin/env bash
# Checks the CUDA kernels and the driver layer on the card of this machine, then times the streaming kernels.
#
#   scripts/cuda_check.sh [KERNELS_DIR [BENCH_KERNELS_DIR]]
#
# Without folders the kernels are compiled first (docs/kernels.md), into build/kernels and build/kernels-bench; the second
# set leaves the tensor instruction out, for timing loads where it is emulated (cards newer than the V100). Needs a driver,
# a C++ compiler, python3 with numpy, pytest and gguf; no network. Uses pytest-xdist and compute-sanitizer where they are.
# PYTHON names another interpreter. Exit status 1 when something failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
status=0
kernels=${1:-build/kernels}
bench=${2:-build/kernels-bench}
if [ $# -lt 1 ]; then "$python" ggml_v100/cuda/compile_kernels.py --out "$kernels" || exit 1; fi
if [ $# -lt 2 ]; then "$python" ggml_v100/cuda/compile_kernels.py --bench --out "$bench" || exit 1; fi
kernels=$(cd "$kernels" && pwd) && bench=$(cd "$bench" && pwd) || exit 1
export PYTHONPATH="tests:scripts:ggml_v100/cuda${PYTHONPATH:+:$PYTHONPATH}"

echo "== driver layer"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=(ggml_v100/base/inflate.cpp ggml_v100/cuda/{device,driver,graph,kernel_archive,memory,module,stream}.cpp)
"${CXX:-c++}" -std=c++20 -O1 -Iggml_v100 "${sources[@]}" tests/unit/native/cuda_driver.cpp -o "$work/driver" -ldl || exit 1
for what in list copies "memory 1048576"; do
    # shellcheck disable=SC2086  # a case and its argument
    "$work/driver" libcuda.so.1 $what || status=1
done

tests=("$python" -m pytest -q --confcutdir=tests/cuda -p no:cacheprovider tests/cuda)
echo "== tests/cuda"
parallel=()
if "$python" -c 'import xdist' 2>/dev/null; then parallel=(-n 8); fi
if "$python" -c 'import pytest_benchmark' 2>/dev/null; then tests+=(-p no:benchmark); fi # it warns beside xdist
V100_KERNELS_DIR=$kernels "${tests[@]}" "${parallel[@]}" --tb=short || status=1

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "== compute-sanitizer $tool"
        V100_KERNELS_DIR=$kernels compute-sanitizer --tool "$tool" --error-exitcode 1 "${tests[@]}" \
            -k "several and Q8_0-13 or fault" || status=1
    done
fi

echo "== streaming kernels without the tensor instruction"
V100_KERNELS_DIR=$bench "$python" scripts/bench/cuda_linear.py || status=1
exit $status
