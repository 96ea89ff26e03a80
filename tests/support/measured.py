"""Runs one of our programs in a process of its own and measures it.

The peak is `VmHWM`, which starts anew with the program; `ru_maxrss` keeps the size of the test process before `exec`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_PROGRAM = """
import importlib, json, re, resource, sys
report, module, *sys.argv[1:] = sys.argv[1:]
status = 0
try:
    importlib.import_module(module).run()
except SystemExit as end:
    status = end.code or 0
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
usage = resource.getrusage(resource.RUSAGE_SELF)
json.dump([status, peak, usage.ru_utime + usage.ru_stime], open(report, "w"))
"""


class Measured(NamedTuple):
    status: int
    output: bytes
    peak_bytes: int
    cpu_seconds: float


def run_measured(module: str, *arguments: str | Path, folder: Path) -> Measured:
    """Run `module.run()` with these command-line arguments; `folder` takes a report and is the working directory."""
    report = folder / "measured.json"
    command = [sys.executable, "-c", _PROGRAM, str(report), module, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=folder, check=True)
    status, peak, seconds = json.loads(report.read_text())
    report.unlink()
    return Measured(status, done.stdout, peak, seconds)
