"""The two lines of `--version`, from the package's version and the native module's build facts."""

import platform
import re

from pyllama import __version__


def build_info() -> tuple[int, str]:
    """(build number, commit) as the version tells: its dev or post number, else 0; its local part, else `unknown`."""
    number = re.search(r"(?:dev|post)(\d+)", __version__)
    _, _, local = __version__.partition("+")
    return (int(number[1]) if number else 0), (local or "unknown")


def compiler() -> str:
    """Compiler of the native module, where it tells."""
    try:
        from pyllama import _engine
    except ImportError:
        return "unknown compiler"
    return str(_engine.backend_info().get("compiler", "unknown compiler"))


def version_text() -> str:
    number, commit = build_info()
    target = f"{platform.machine()}-{platform.system().lower()}"
    return f"version: {__version__} (build {number}, commit {commit})\nbuilt with {compiler()} for {target}"
