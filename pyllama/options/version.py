"""The two lines of `--version`, from the package's version and the native module's build facts."""

import platform
from typing import Any

from pyllama import __version__


def _native_facts() -> dict[str, Any]:
    try:
        from pyllama import _engine
    except ImportError:  # a source tree that was not installed
        return {}
    return _engine.backend_info()


def build_info() -> tuple[int, str]:
    """(build number, commit) of the native module; (0, ``unknown``) where it does not tell."""
    facts = _native_facts()
    return int(facts.get("build_number", 0)), str(facts.get("commit", "unknown"))


def build_label() -> str:
    """Number and commit as the server tells them: `b1234-abcdef0`."""
    number, commit = build_info()
    return f"b{number}-{commit}"


def compiler() -> str:
    """Compiler of the native module, where it tells."""
    return str(_native_facts().get("compiler", "unknown compiler"))


def cuda_kernels() -> str:
    """The compiler of the CUDA kernels, or why there are none."""
    return str(_native_facts().get("cuda", "unknown"))


def version_text() -> str:
    number, commit = build_info()
    target = f"{platform.machine()}-{platform.system().lower()}"
    return f"version: {__version__} (build {number}, commit {commit})\nbuilt with {compiler()} for {target}"
