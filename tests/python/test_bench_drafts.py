"""llama-bench with drafts: as many tokens as without, in fewer steps; what was drafted and stood is told."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pyllama._engine import Engine
from pyllama.tools import bench
from support.tiny_dflash import write_tiny_dflash
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama

OURS = ["spec_type", "spec_draft_model", "draft_n_max", "draft_n", "draft_n_accepted"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    write_tiny_llama(path / "llama.gguf", n_layer=4)
    write_tiny_llama(path / "foreign.gguf", seed=7)
    write_tiny_hybrid(path / "hybrid.gguf", n_layer=5, attention_interval=3, n_mtp=1)
    write_tiny_dflash(path / "dflash.gguf", target_layers=(1, 3))
    return path


def run(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str, output: str = "json") -> str:
    capsys.readouterr()
    common = ["-m", str(model), "-p", "0", "-n", "48", "-r", "3", "-t", "1", "-o", output]
    assert bench.main([*common, *arguments]) == 0
    return capsys.readouterr().out


def results(*arguments: Any) -> dict[str, Any]:
    (result,) = json.loads(run(*arguments))
    return result


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama", ("--spec-type", "draft-simple", "-md", "foreign.gguf")),
        ("llama", ("-md", "dflash.gguf")),  # the file says what it is
        ("hybrid", ("--spec-type", "draft-mtp")),
    ],
)
def test_drafts_stand_as_often_as_wished(
    capsys: pytest.CaptureFixture[str], folder: Path, model: str, arguments: tuple[str, ...]
) -> None:
    given = [str(folder / a) if a.endswith(".gguf") else a for a in arguments]
    found = {
        length: results(capsys, folder / f"{model}.gguf", *given, "--spec-draft-n-max", "4", "--spec-synth-len", length)
        for length in ("1", "3", "5")
    }
    assert found["1"]["draft_n_accepted"] < 0.02 * found["1"]["draft_n"]  # what the model itself says by chance
    assert found["5"]["draft_n_accepted"] == found["5"]["draft_n"] > 100
    assert 0 < found["3"]["draft_n_accepted"] < found["3"]["draft_n"]
    assert found["3"]["draft_n"] > 1.5 * found["5"]["draft_n"]  # more rounds for as many tokens
    assert found["3"]["spec_type"].startswith("draft-")


def test_so_many_tokens_are_made_as_without_drafts(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = Engine.step

    class Counting(Engine):
        def step(self, work: Any, n_passes: int = 1) -> Any:
            outputs = original(self, work, n_passes)
            made.append(len(outputs))
            return outputs

    monkeypatch.setattr("pyllama._engine.Engine", Counting)
    model = folder / "llama.gguf"
    same = ("--spec-type", "draft-simple", "-md", str(model), "--spec-draft-n-max", "6", "--no-warmup")
    result = results(capsys, model, *same)
    counted = [n for n in made if n]
    assert sum(counted) == 3 * 48
    assert result["draft_n_accepted"] == sum(n - 1 for n in counted)
    assert result["samples_ts"] == [pytest.approx(48e9 / ns) for ns in result["samples_ns"]]


def test_columns_are_llama_cpps_and_ours_behind_them(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    ngrams = ("--spec-type", "ngram-simple")
    columns = {}
    for arguments in ((), ngrams):
        (row,) = csv.DictReader(io.StringIO(run(capsys, folder / "llama.gguf", *arguments, output="csv")))
        columns[arguments] = list(row)
    assert columns[ngrams] == [*columns[()], *OURS]
    table = run(capsys, folder / "llama.gguf", *ngrams, output="md").splitlines()
    assert [cell.strip() for cell in table[0].split("|")][6:8] == ["drafts", "stood"]
    assert "ngram-simple" in table[2]
    assert "draft_n_accepted INTEGER" in run(capsys, folder / "llama.gguf", *ngrams, output="sql")


def test_what_cannot_be_drafted_is_said(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for arguments, message in (
        (("--spec-type", "draft-simple"), "needs a draft model"),
        (("--spec-type", "ngram-simple", "--spec-synth-rates", "0.5"), "expected 48"),
    ):
        assert bench.main(["-m", str(folder / "llama.gguf"), "-p", "0", "-n", "4", *arguments]) == 1
        assert message in capsys.readouterr().err
