"""Several files at once: room on disk is checked first; the first failure stops the rest, which can resume."""

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from .progress import Report
from .session import Cancelled, Session
from .transfer import Job, download, missing_bytes, require_space

FILES_AT_ONCE = 4


def fetch(jobs: Iterable[Job], session: Session, report: Report) -> None:
    """Make every job's target its remote file. Raises DownloadError, or what the file system raises."""
    jobs = list({job.target: job for job in jobs}.values())
    _require_space(jobs)
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        running = [pool.submit(download, job, session, report) for job in jobs]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C: the threads must end before the process can
            session.cancel()
            raise
        if any(future.exception() for future in done):
            session.cancel()
    errors = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
        raise error


def _require_space(jobs: Iterable[Job]) -> None:
    needed: dict[int, int] = defaultdict(int)
    directories: dict[int, Path] = {}
    for job in jobs:
        directory = job.target.parent
        directory.mkdir(parents=True, exist_ok=True)
        device = directory.stat().st_dev
        needed[device] += missing_bytes(job)
        directories[device] = directory
    for device, directory in directories.items():
        require_space(directory, needed[device])
