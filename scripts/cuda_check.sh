#!/usr/bin/env bash
# Checks the CUDA backend on the card of this machine - driver layer, kernels, whole models - then times it.
#
#   scripts/cuda_check.sh [KERNELS_DIR [BENCH_KERNELS_DIR]]
#
# Without folders the kernels are compiled first (docs/kernels.md), into build/kernels and build/kernels-bench; the second
# set leaves the tensor instruction out, for timing loads where it is emulated (cards newer than the V100). Needs a driver,
# a C++ compiler, python3 with this package, pytest and gguf; no network, and 35 GB in TMPDIR for a model of 27 billion
# weights (BENCH_MODELS="smollm2-135m:Q8_0" names smaller ones). Uses pytest-xdist and compute-sanitizer where they are.
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
export PYTHONPATH="$PWD/tests:$PWD/scripts:$PWD/scripts/bench:$PWD/ggml_v100/cuda${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import pyllama._engine' 2>/dev/null; then
    echo "$python does not have this package: pip install . comes first" >&2
    exit 1
fi

echo "== driver layer"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=(ggml_v100/base/inflate.cpp ggml_v100/cuda/{device,driver,graph,kernel_archive,memory,module,stream}.cpp)
"${CXX:-c++}" -std=c++20 -O1 -Iggml_v100 "${sources[@]}" tests/unit/native/cuda_driver.cpp -o "$work/driver" -ldl || exit 1
for what in list copies "memory 1048576"; do
    # shellcheck disable=SC2086  # a case and its argument
    "$work/driver" libcuda.so.1 $what || status=1
done

tests=("$python" -m pytest -q -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider)
echo "== tests/cuda"
parallel=()
if "$python" -c 'import xdist' 2>/dev/null; then parallel=(-n 8); fi
if "$python" -c 'import pytest_benchmark' 2>/dev/null; then tests+=(-p no:benchmark); fi # it warns beside xdist
V100_KERNELS_DIR=$kernels "${tests[@]}" --confcutdir=tests/cuda tests/cuda "${parallel[@]}" --tb=short || status=1

echo "== models of every architecture beside the CPU"
V100_KERNELS_DIR=$kernels "${tests[@]}" --confcutdir=tests/models tests/models/test_cuda_models.py "${parallel[@]}" \
    --tb=short || status=1

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "== compute-sanitizer $tool"
        V100_KERNELS_DIR=$kernels compute-sanitizer --tool "$tool" --error-exitcode 1 "${tests[@]}" \
            --confcutdir=tests/cuda tests/cuda -k "several and Q8_0-13 or fault" || status=1
    done
fi

echo "== kernels without the tensor instruction"
for script in cuda_linear cuda_attention cuda_delta_net; do
    V100_KERNELS_DIR=$bench "$python" scripts/bench/$script.py || status=1
done

# shellcheck disable=SC2206  # words
models=(${BENCH_MODELS:-smollm2-135m:Q8_0 qwen3.8-27b:Q8_0 qwen3.8-27b:Q4_K_M qwen3.5-35b-a3b:Q8_0})
for folder in "$kernels" "$bench"; do
    echo "== whole models with the kernels of $folder"
    V100_KERNELS_DIR=$folder "$python" scripts/bench/cuda_models.py --models "${models[@]}" || status=1
done
exit $status
