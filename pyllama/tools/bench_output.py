"""Output formats of llama-bench. `FIELDS` lists the columns of csv, json, jsonl and sql in their order."""

import csv
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from pyllama.devices import is_host, this_machine
from pyllama.options import Options, options_of
from pyllama.options.version import build_info

from .bench_drafts import speculation_of
from .bench_run import BenchResult
from .cpu_info import cpu_name

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

SPECULATION_FIELDS: dict[str, str] = {
    "spec_type": "TEXT",
    "spec_draft_model": "TEXT",
    "draft_n_max": "INTEGER",
    "draft_n": "INTEGER",
    "draft_n_accepted": "INTEGER",
}
"""Columns behind the others, of runs with drafts. The last two are sums over the repetitions."""

FIELDS: dict[str, str] = {
    "build_commit": "TEXT",
    "build_number": "INTEGER",
    "cpu_info": "TEXT",
    "gpu_info": "TEXT",
    "backends": "TEXT",
    "model_filename": "TEXT",
    "model_type": "TEXT",
    "model_size": "INTEGER",
    "model_n_params": "INTEGER",
    "n_batch": "INTEGER",
    "n_ubatch": "INTEGER",
    "n_threads": "INTEGER",
    "cpu_mask": "TEXT",
    "cpu_strict": "INTEGER",
    "poll": "INTEGER",
    "type_k": "TEXT",
    "type_v": "TEXT",
    "n_gpu_layers": "INTEGER",
    "n_cpu_moe": "INTEGER",
    "split_mode": "TEXT",
    "main_gpu": "INTEGER",
    "no_kv_offload": "INTEGER",
    "flash_attn": "INTEGER",
    "devices": "TEXT",
    "tensor_split": "TEXT",
    "tensor_buft_overrides": "TEXT",
    "load_mode": "TEXT",
    "lazy_mode": "TEXT",
    "embeddings": "INTEGER",
    "no_op_offload": "INTEGER",
    "no_host": "INTEGER",
    "repack": "INTEGER",
    "fit_target": "INTEGER",
    "fit_min_ctx": "INTEGER",
    "n_prompt": "INTEGER",
    "n_gen": "INTEGER",
    "n_depth": "INTEGER",
    "test_time": "TEXT",
    "avg_ns": "INTEGER",
    "stddev_ns": "INTEGER",
    "avg_ts": "REAL",
    "stddev_ts": "REAL",
}


def fields_of(options: Options) -> dict[str, str]:
    """The columns of a call and their types."""
    return FIELDS | (SPECULATION_FIELDS if speculation_of(options) is not None else {})


def record(result: BenchResult, fields: Mapping[str, str] = FIELDS) -> dict[str, Any]:
    """The values of `fields` for one result. Flags are bool, `avg_ts` and `stddev_ts` tokens per second."""
    parameters = result.test.parameters
    build_number, build_commit = build_info()
    values: dict[str, Any] = {
        "build_commit": build_commit,
        "build_number": build_number,
        "cpu_info": cpu_name(),
        "gpu_info": gpu_info(result.model.devices),
        "backends": backends(result.model.devices),
        "model_filename": result.model.path,
        "model_type": result.model.description,
        "model_size": result.model.size_bytes,
        "model_n_params": result.model.n_params,
        "n_batch": parameters["batch_size"],
        "n_ubatch": parameters["ubatch_size"],
        "n_threads": parameters["threads"],
        "cpu_mask": parameters["cpu_mask"],
        "cpu_strict": bool(parameters["cpu_strict"]),
        "poll": parameters["poll"],
        "type_k": parameters["cache_type_k"],
        "type_v": parameters["cache_type_v"],
        "n_gpu_layers": parameters["n_gpu_layers"],
        "n_cpu_moe": parameters["n_cpu_moe"],
        "split_mode": parameters["split_mode"],
        "main_gpu": parameters["main_gpu"],
        "no_kv_offload": bool(parameters["no_kv_offload"]),
        "flash_attn": FLASH_ATTENTION[parameters["flash_attn"]],
        "devices": parameters["device"],
        "tensor_split": "/".join(f"{share:.2f}" for share in result.test.placement.tensor_split) or "0.00",
        "tensor_buft_overrides": parameters["override_tensor"] or "none",
        "load_mode": parameters["load_mode"],
        "lazy_mode": parameters["lazy_mode"],
        "embeddings": bool(parameters["embeddings"]),
        "no_op_offload": bool(parameters["no_op_offload"]),
        "no_host": bool(parameters["no_host"]),
        "repack": bool(parameters["repack"]),
        "fit_target": 0,
        "fit_min_ctx": 0,
        "n_prompt": result.test.n_prompt,
        "n_gen": result.test.n_gen,
        "n_depth": result.test.n_depth,
        "test_time": result.started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": result.avg_ns,
        "stddev_ns": result.stddev_ns,
        "avg_ts": result.avg_ts,
        "stddev_ts": result.stddev_ts,
    }
    if (speculation := result.speculation) is not None:
        values |= {
            "spec_type": ",".join(speculation.types),
            "spec_draft_model": speculation.draft_model,
            "draft_n_max": speculation.n_max,
            "draft_n": result.n_drafted,
            "draft_n_accepted": result.n_accepted,
        }
    return {name: values[name] for name in fields}


def backends(devices: Sequence[str]) -> str:
    """What a model on these devices computes with: `CPU`, `CUDA`, or both."""
    kinds = {name.rstrip("0123456789") for name in devices}
    return ",".join(sorted(kinds, reverse=True))


def gpu_info(devices: Sequence[str]) -> str:
    """What those of them that are GPUs are called."""
    if all(map(is_host, devices)):
        return ""
    machine = this_machine()
    found = (machine.find(name) for name in devices if not is_host(name))
    return ", ".join(device.description for device in found if device is not None)


def _plain(value: Any) -> str:
    """csv and sql text: flags as 0 and 1, reals with six decimals."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6f}" if isinstance(value, float) else str(value)


class Printer(Protocol):
    def header(self) -> None: ...
    def row(self, result: BenchResult) -> None: ...
    def footer(self) -> None: ...


class CsvPrinter:
    def __init__(self, out: TextIO, fields: Mapping[str, str]) -> None:
        self._out, self._fields = out, fields
        self._writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")

    def header(self) -> None:
        print(",".join(self._fields), file=self._out, flush=True)

    def row(self, result: BenchResult) -> None:
        self._writer.writerow([_plain(value) for value in record(result, self._fields).values()])
        self._out.flush()

    def footer(self) -> None:
        pass


def _with_samples(result: BenchResult, fields: Mapping[str, str]) -> dict[str, Any]:
    return {**record(result, fields), "samples_ns": list(result.samples_ns), "samples_ts": list(result.samples_ts)}


class JsonLinesPrinter:
    def __init__(self, out: TextIO, fields: Mapping[str, str]) -> None:
        self._out, self._fields = out, fields

    def header(self) -> None:
        pass

    def row(self, result: BenchResult) -> None:
        print(json.dumps(_with_samples(result, self._fields)), file=self._out, flush=True)

    def footer(self) -> None:
        pass


class JsonPrinter:
    """One array, written as the results come."""

    def __init__(self, out: TextIO, fields: Mapping[str, str]) -> None:
        self._out, self._fields = out, fields
        self._first = True

    def header(self) -> None:
        print("[", file=self._out)

    def row(self, result: BenchResult) -> None:
        values = _with_samples(result, self._fields)
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        separator = "" if self._first else ",\n"
        print(separator + "  {\n" + ",\n".join(lines) + "\n  }", end="", file=self._out, flush=True)
        self._first = False

    def footer(self) -> None:
        print("\n]" if not self._first else "]", file=self._out, flush=True)


class SqlPrinter:
    def __init__(self, out: TextIO, fields: Mapping[str, str]) -> None:
        self._out, self._fields = out, fields

    def header(self) -> None:
        columns = ",\n".join(f"  {name} {kind}" for name, kind in self._fields.items())
        print(f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n", file=self._out, flush=True)

    def row(self, result: BenchResult) -> None:
        values = ", ".join(
            "'" + _plain(value).replace("'", "''") + "'" for value in record(result, self._fields).values()
        )
        print(f"INSERT INTO llama_bench ({', '.join(self._fields)}) VALUES ({values});", file=self._out, flush=True)

    def footer(self) -> None:
        pass


class MarkdownPrinter:
    """A table that shows, besides the fixed columns, the parameters that were given and are not at their default."""

    FIXED = (("model", 30, "<"), ("size", 10, ">"), ("params", 10, ">"), ("backend", 10, "<"), ("threads", 7, ">"))
    OPTIONAL = (
        ("ngl", 3, "n_gpu_layers"),
        ("n_batch", 7, "batch_size"),
        ("n_ubatch", 8, "ubatch_size"),
        ("type_k", 6, "cache_type_k"),
        ("type_v", 6, "cache_type_v"),
        ("fa", 2, "flash_attn"),
    )
    LAST = (("test", 15, ">"), ("t/s", 20, ">"))

    def __init__(self, out: TextIO, options: Options) -> None:
        self._out = out
        defaults = {option.dest: option.default for option in options_of("llama-bench")}
        shown = [
            (name, width, ">") for name, width, dest in self.OPTIONAL if options.values.get(dest) != defaults.get(dest)
        ]
        drafts = [("drafts", 24, ">"), ("stood", 6, ">")] if speculation_of(options) is not None else []
        self._columns = (*self.FIXED, *shown, *drafts, *self.LAST)

    def header(self) -> None:
        self._line([name for name, _, _ in self._columns])
        self._line(["-" * width if align == "<" else "-" * (width - 1) + ":" for _, width, align in self._columns])

    def row(self, result: BenchResult) -> None:
        parameters = result.test.parameters
        cells = {
            "model": result.model.description,
            "size": size_text(result.model.size_bytes),
            "params": params_text(result.model.n_params),
            "backend": backends(result.model.devices),
            "threads": parameters["threads"],
            "ngl": parameters["n_gpu_layers"],
            "n_batch": parameters["batch_size"],
            "n_ubatch": parameters["ubatch_size"],
            "type_k": parameters["cache_type_k"],
            "type_v": parameters["cache_type_v"],
            "fa": FLASH_ATTENTION[parameters["flash_attn"]],
            "drafts": ",".join(result.speculation.types) if result.speculation is not None else "",
            "stood": f"{result.n_accepted / result.n_drafted:.3f}" if result.n_drafted else "-",
            "test": result.test.name,
            "t/s": f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}",
        }
        self._line([str(cells[name]) for name, _, _ in self._columns])

    def footer(self) -> None:
        number, commit = build_info()
        print(f"\nbuild: {commit} ({number})", file=self._out, flush=True)

    def _line(self, cells: list[str]) -> None:
        padded = [f"{cell:{align}{width}}" for cell, (_, width, align) in zip(cells, self._columns, strict=True)]
        print(f"| {' | '.join(padded)} |", file=self._out, flush=True)


def size_text(size_bytes: int) -> str:
    gib = 1024**3
    return f"{size_bytes / gib:.2f} GiB" if size_bytes >= gib else f"{size_bytes / 1024**2:.2f} MiB"


def params_text(n_params: int) -> str:
    return f"{n_params / 1e9:.2f} B" if n_params >= 1e9 else f"{n_params / 1e6:.2f} M"


def make_printer(kind: str, out: TextIO, options: Options) -> Printer:
    """kind: md, csv, json, jsonl or sql."""
    if kind == "md":
        return MarkdownPrinter(out, options)
    fields = fields_of(options)
    if kind == "csv":
        return CsvPrinter(out, fields)
    if kind == "json":
        return JsonPrinter(out, fields)
    return JsonLinesPrinter(out, fields) if kind == "jsonl" else SqlPrinter(out, fields)
