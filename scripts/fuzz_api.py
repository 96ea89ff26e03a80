"""Drive a server with generated requests: `python scripts/fuzz_api.py MODEL.gguf [--requests 20000] [--seed 1]`.

Requests come from the OpenAPI description: half of them keep to it, half break it (wrong types, missing and unknown
fields, bodies that are no JSON). No answer may be 500, but for the client mistakes that llama-server reports so; error
bodies must have their form, streams must be readable, and the server must be idle and well afterwards.
Needs the package schemathesis (test extra).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import hypothesis
import jsonschema_rs
import schemathesis
from hypothesis import HealthCheck, Phase
from make_openapi import ERROR, openapi_document

CONTRACT_500 = re.compile(
    r"Failed to parse (messages|tools): |Unknown reasoning format: |Cannot use both json_schema and grammar|"
    r"'messages' is required|Field 'top_n'|\w+ input is not supported|Unable to save slot"
)
"""What llama-server, and so this server, answers with 500 although the client made a mistake."""

FEATURE_DISABLED = {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}
"""What routes that must be asked for answer; the one error without a code."""

STATUSES = (200, 400, 404, 413, 501, 503)


@dataclass
class Report:
    """What was sent and what came back. failures: (reason, request line, body) of the first of each kind."""

    n_requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    operations: dict[str, Counter[int]] = field(default_factory=dict)
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)

    def note(self, label: str, response: httpx.Response, body: Any) -> None:
        self.n_requests += 1
        self.statuses[response.status_code] += 1
        self.operations.setdefault(label, Counter())[response.status_code] += 1
        reason = fault(response)
        if reason:
            self.failures.setdefault(f"{label}: {reason}", (str(response.request.url), repr(body)[:2000]))


_error_form = jsonschema_rs.validator_for(ERROR)


def fault(response: httpx.Response) -> str:
    """What is wrong with an answer; empty if nothing is."""
    status = response.status_code
    if status == 200:
        return _bad_stream(response.text) if "event-stream" in response.headers["content-type"] else ""
    if status == 204:
        return "204 with a body" if response.content else ""
    try:
        body = response.json()
    except ValueError:
        return f"{status} without JSON: {response.text[:100]!r}"
    if status == 403 and body == FEATURE_DISABLED:
        return ""
    if not _error_form.is_valid(body) or body["error"]["code"] != status:
        return f"{status} with an error of another form: {response.text[:200]}"
    message = body["error"]["message"]
    if status == 500 and CONTRACT_500.match(message):
        return ""
    return "" if status in STATUSES else f"{status}: {re.sub(r'[0-9]+', '0', message)[:120]}"


def _bad_stream(text: str) -> str:
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            try:
                event = json.loads(data)
            except ValueError:
                return f"a stream with an unreadable event: {data[:100]!r}"
            if "error" in event and event["error"] is not None:
                return f"a stream that failed: {data[:200]}"
    return ""


def fuzz(url: str, n_requests: int, seed: int, progress: Callable[[Report], None] = lambda report: None) -> Report:
    """Send about so many requests, as many to every operation, and return what came back.

    What was generated for one operation is sent to all that take the same, because generating is the slow part.
    """
    schema = schemathesis.openapi.from_dict(openapi_document())
    groups: dict[str, list[Any]] = {}
    n_operations = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        raw = operation.definition.raw
        takes = json.dumps([operation.method, raw.get("requestBody"), raw["parameters"]])
        groups.setdefault(takes, []).append(operation)
        n_operations += 1
    report = Report()
    each = max(1, round(n_requests / (2 * n_operations)))
    with httpx.Client(base_url=url, timeout=60) as client:
        for operations in groups.values():
            first = operations[0]
            if first.body or first.query or first.path_parameters:
                for mode in schemathesis.GenerationMode:
                    _fuzz_operations(client, operations, mode, each, seed, report)
            else:
                for operation in operations * (2 * each):
                    response = client.request(operation.method.upper(), operation.path)
                    report.note(operation.label, response, None)
            progress(report)
    return report


def _fuzz_operations(
    client: httpx.Client, operations: list[Any], mode: Any, n_cases: int, seed: int, report: Report
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n_cases,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operations[0].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        content = case.body if isinstance(case.body, bytes) else b""
        if not content and case.body is not None and not isinstance(case.body, schemathesis.core.NotSet):
            content = json.dumps(case.body).encode("utf-8", "surrogatepass")
        parameters = {name: str(value) for name, value in (case.query or {}).items()}
        for operation in operations:
            path = operation.path.format(**{name: str(value) for name, value in (case.path_parameters or {}).items()})
            path = quote(path, safe="/")
            response = client.request(case.method.upper(), path, params=parameters, content=content)
            report.note(operation.label, response, case.body)

    send()


def wait_healthy(url: str, seconds: float = 60) -> None:
    """Until no slot is busy and a request is answered; raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while any(slot["is_processing"] for slot in client.get("/slots").json()):
            if time.monotonic() > deadline:
                raise TimeoutError("a slot is still busy")
            time.sleep(0.02)
        client.post("/completion", json={"prompt": "a", "n_predict": 1}).raise_for_status()


SERVER_OPTIONS = ("-n", "4", "-c", "1024", "-np", "2", "-t", "1", "--embeddings", "--pooling", "mean", "--metrics",
                  "--props", "--cache-ram", "16")  # fmt: skip
"""Short answers and small memory, and every endpoint that the model can have."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        model = str(Path(arguments.model).resolve())
        command = [sys.executable, "-m", "pyllama.server", "-m", model, "--port", "0", *SERVER_OPTIONS]
        command += ["--slot-save-path", folder]
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = _wait_listening(server, Path(log.name))
            started = time.monotonic()
            report = fuzz(url, arguments.requests, arguments.seed, _show)
            wait_healthy(url)
            seconds = time.monotonic() - started
            resident = Path(f"/proc/{server.pid}/status")
            sizes = re.findall(r"VmRSS:\s+(\d+) kB", resident.read_text()) if resident.exists() else []
        finally:
            server.terminate()
            server.wait(30)
        print(f"\n{report.n_requests} requests in {seconds:.0f} s, resident memory at the end {sizes} kB")
        for label, statuses in (("all", report.statuses), *report.operations.items()):
            print(f"  {label}: {', '.join(f'{status}: {count}' for status, count in sorted(statuses.items()))}")
        for reason, (where, body) in report.failures.items():
            print(f"FAILED {reason}\n  {where}\n  {body}")
        traces = Path(log.name).read_text(errors="replace").count("Traceback")
        print(f"{len(report.failures)} kinds of failures, {traces} tracebacks in the log")
        if traces:
            print(Path(log.name).read_text(errors="replace")[-8000:])
        return 1 if report.failures or traces else 0


def _show(report: Report) -> None:
    print(f"\r{report.n_requests} requests, {len(report.failures)} kinds of failures", end="", flush=True)


def _wait_listening(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while (found := re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))) is None:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.1)
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
