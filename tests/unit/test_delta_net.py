"""The plain gated delta nets, recurrent and chunked, against the recurrence in f64 (native/delta_net_driver.cpp).

The kernels of each instruction set have the bits of the recurrent one: cpu_kernels/recurrent.cpp.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from unit.native_build import build_driver

EPS = 1e-6
TOLERANCE = 1e-4  # of the largest value
Array = NDArray[np.float32]


@dataclass
class Case:
    key_heads: int
    value_heads: int
    head_dim: int
    a: Array
    dt_bias: Array
    qkv: Array
    beta: Array
    alpha: Array
    memory: Array  # [value_heads, head_dim (key), head_dim (value)]


def random_case(
    rows: int, key_heads: int = 2, value_heads: int = 4, head_dim: int = 32, fading: float = 1.0, seed: int = 5
) -> Case:
    """`fading` scales the log decays: 0.01 keeps nearly everything for hundreds of tokens, 30 forgets at once."""
    rng = np.random.default_rng(seed + rows)

    def normal(*shape: int) -> Array:
        return rng.normal(0, 1, shape).astype(np.float32)

    return Case(
        key_heads,
        value_heads,
        head_dim,
        a=-np.exp(normal(value_heads)) * np.float32(fading),
        dt_bias=normal(value_heads),
        qkv=normal(rows, (2 * key_heads + value_heads) * head_dim),
        beta=2 * normal(rows, value_heads),
        alpha=normal(rows, value_heads),
        memory=normal(value_heads, head_dim, head_dim),
    )


def to_record(memory: Array) -> Array:
    """The record: [value_heads, value feature / 16, key feature, value feature % 16]."""
    heads, n, _ = memory.shape
    return memory.reshape(heads, n, n // 16, 16).transpose(0, 2, 1, 3)


def from_record(values: Array, like: Array) -> Array:
    heads, n, _ = like.shape
    return values.reshape(heads, n // 16, n, 16).transpose(0, 2, 1, 3).reshape(like.shape)


def run(driver: Path, case: Case, form: str) -> tuple[Array, Array]:
    rows = len(case.qkv)
    shape = (case.key_heads, case.value_heads, case.head_dim, rows, EPS, form)
    inputs = (case.a, case.dt_bias, case.qkv, case.beta, case.alpha, to_record(case.memory))
    done = subprocess.run(
        [driver, *map(str, shape)], input=b"".join(x.astype("<f4").tobytes() for x in inputs), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    values = np.frombuffer(done.stdout, "<f4")
    n_outputs = rows * case.value_heads * case.head_dim
    return values[:n_outputs].reshape(rows, -1), from_record(values[n_outputs:], case.memory)


def recurrence(case: Case) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Decay the memory, write what of the value it does not give for the key yet, read with the query."""
    n = case.head_dim
    key_size = case.key_heads * n
    memory = case.memory.astype(np.float64)
    outputs = []
    for u, beta, alpha in zip(*(x.astype(np.float64) for x in (case.qkv, case.beta, case.alpha)), strict=True):
        q, k = (part.reshape(case.key_heads, n) for part in (u[:key_size], u[key_size : 2 * key_size]))
        v = u[2 * key_size :].reshape(case.value_heads, n)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS) for x in (q, k))
        softplus = np.logaddexp(0, alpha + case.dt_bias)
        for h in range(case.value_heads):
            key, query = k[h % case.key_heads], q[h % case.key_heads] / np.sqrt(n)
            memory[h] *= np.exp(case.a[h].astype(np.float64) * softplus[h])
            memory[h] += np.outer(key, (v[h] - key @ memory[h]) / (1 + np.exp(-beta[h])))
            outputs.append(query @ memory[h])
    return np.array(outputs).reshape(len(case.qkv), -1), memory


def assert_near(found: Array, expected: NDArray[np.float64]) -> None:
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = ["ops/delta_net.cpp", "ops/delta_net_chunked.cpp"]
    return build_driver("delta_net_driver", sources, tmp_path_factory.mktemp("delta_net"))


@pytest.mark.parametrize("form", ["recurrent", "64"])
@pytest.mark.parametrize("fading", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_both_forms_are_the_recurrence(driver: Path, rows: int, fading: float, form: str) -> None:
    case = random_case(rows, fading=fading)
    y, memory = run(driver, case, form)
    expected_y, expected_memory = recurrence(case)
    assert_near(y, expected_y)
    assert_near(memory, expected_memory)


@pytest.mark.parametrize("form", ["recurrent", "1", "7", "16", "64", "300"])
@pytest.mark.parametrize(("key_heads", "value_heads", "head_dim"), [(1, 1, 16), (3, 3, 48), (2, 6, 128)])
def test_shapes_and_chunks(driver: Path, key_heads: int, value_heads: int, head_dim: int, form: str) -> None:
    case = random_case(70, key_heads, value_heads, head_dim, fading=0.1)
    y, memory = run(driver, case, form)
    expected_y, expected_memory = recurrence(case)
    assert_near(y, expected_y)
    assert_near(memory, expected_memory)


@pytest.mark.parametrize("form", ["recurrent", "64"])
def test_the_memory_carries_a_prompt_over_a_cut(driver: Path, form: str) -> None:
    case = random_case(100, fading=0.05)
    whole, memory = run(driver, case, form)
    parts = []
    for begin, end in ((0, 1), (1, 64), (64, 100)):
        part = Case(**{**vars(case), **{name: getattr(case, name)[begin:end] for name in ("qkv", "beta", "alpha")}})
        y, case.memory = run(driver, part, form)
        parts.append(y)
    if form == "recurrent":
        assert np.array_equal(np.concatenate(parts), whole)
        assert np.array_equal(case.memory, memory)
    else:
        assert_near(np.concatenate(parts), whole.astype(np.float64))


def test_the_tolerance_notices_a_wrong_head_order(driver: Path) -> None:
    case = random_case(20)
    y, _ = run(driver, case, "recurrent")
    case.qkv = np.roll(case.qkv, case.head_dim, axis=1)
    with pytest.raises(AssertionError):
        assert_near(y, recurrence(case)[0])
