# Functions shared by quickstart.sh and test.sh: find Python and a C++ compiler, make a virtual environment, install the repository.
# Sourced, not run. Every failure names the missing thing and the command that installs it.

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# install_hint DEBIAN_PACKAGES RHEL_PACKAGES: the command for this system's package manager.
install_hint() {
    if command -v apt-get >/dev/null 2>&1; then
        printf 'sudo apt-get install -y %s' "$1"
    elif command -v dnf >/dev/null 2>&1; then
        printf 'sudo dnf install -y %s' "$2"
    else
        printf 'install with your package manager: %s' "$1"
    fi
}

# Prints the first Python from 3.10 up; $PYTHON is taken if set.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not sys.version_info >= (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    die "no Python 3.10 or newer found (looked for ${PYTHON:-python3, python3.10 .. python3.13}). Try:" \
        "$(install_hint 'python3 python3-venv python3-dev' 'python3.11 python3.11-devel'), or set PYTHON=/path/to/python"
}

check_python_parts() {
    local python=$1 version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments. Try: $(install_hint "python$version-venv" "python$version")"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "the headers of Python $version (Python.h) are missing. Try: $(install_hint "python$version-dev" "python$version-devel")"
}

# A compiler counts when it compiles a C++20 program; $CXX is taken if set.
check_compiler() {
    local work compiler found=""
    work=$(mktemp -d)
    printf '#include <compare>\n#include <span>\n#include <vector>\nint main() { std::vector<int> v(3); return int(std::span<int>(v).size()) - 3; }\n' >"$work/probe.cpp"
    for compiler in ${CXX:-c++ g++ clang++}; do
        if command -v "$compiler" >/dev/null 2>&1; then
            found=$compiler
            if "$compiler" -std=c++20 "$work/probe.cpp" -o "$work/probe" 2>"$work/log"; then
                rm -rf "$work"
                return 0
            fi
        fi
    done
    rm -rf "$work"
    if [ -n "$found" ]; then
        die "$found ($("$found" --version | head -n 1)) cannot compile C++20; gcc 11 or clang 14 or newer is needed. Try:" \
            "$(install_hint 'g++' 'gcc-toolset-12-gcc-c++ (then: scl enable gcc-toolset-12 bash)')"
    fi
    die "no C++ compiler found (looked for ${CXX:-c++, g++, clang++}). Try: $(install_hint 'g++' 'gcc-c++')"
}

# make_environment DIR: a virtual environment with a working pip in DIR; an existing one is kept.
make_environment() {
    local dir=$1 python
    if [ ! -x "$dir/bin/python" ] || ! "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        check_python_parts "$python"
        echo "Creating $dir with $("$python" --version)"
        "$python" -m venv --clear "$dir"
    fi
}

# install_repository DIR WHAT [PIP_OPTION...]: pip install WHAT (`.` or `.[test]`) into DIR unless nothing changed since the last time.
install_repository() {
    local dir=$1 what=$2 stamp=$1/.installed
    shift 2
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$what" ] &&
        [ -z "$(find ggml_v100 pyllama server vendor CMakeLists.txt pyproject.toml -type f -newer "$stamp" -print -quit)" ]; then
        return 0
    fi
    check_compiler
    echo "Building and installing $what (a few minutes the first time)"
    rm -f "$stamp"
    touch "$dir/.started" # sources edited while the build runs must count as newer
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check "$what" "$@"
    printf '%s\n' "$what" >"$dir/.started.tmp"
    touch -r "$dir/.started" "$dir/.started.tmp"
    mv "$dir/.started.tmp" "$stamp"
    rm -f "$dir/.started"
}
