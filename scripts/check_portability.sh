#!/usr/bin/env bash
# Checks that the engine compiles (syntax and warnings only) with every compiler at hand: clang, and the cross compilers for
# arm64 and ppc64le. Debian: apt-get install clang g++-aarch64-linux-gnu g++-powerpc64le-linux-gnu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

flags=(-std=c++20 -O1 -Wall -Wextra -Werror -Wno-restrict -Wno-unknown-warning-option -ffp-contract=off -Iggml_v100)
checked=0
for compiler in clang++ aarch64-linux-gnu-g++ powerpc64le-linux-gnu-g++; do
    command -v "$compiler" >/dev/null || { echo "$compiler: not installed, skipped"; continue; }
    target=$("$compiler" -dumpmachine)
    for file in ggml_v100/*/*.cpp; do
        extra=()
        case $file in
            *_avx2.cpp) [[ $target == x86_64* ]] || continue; extra=(-mavx2 -mfma -mf16c) ;;
            *_avx512.cpp) [[ $target == x86_64* ]] || continue
                extra=(-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c) ;;
        esac
        "$compiler" "${flags[@]}" "${extra[@]}" -fsyntax-only "$file"
    done
    echo "$compiler ($target): ok"
    checked=$((checked + 1))
done
[ "$checked" -gt 0 ] || { echo "no other compiler is installed" >&2; exit 1; }
