"""Placement of the engine's threads: reading of masks, ranges and NUMA nodes, and what the system then shows."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pyllama._engine import Engine, Model
from pyllama.errors import InvalidArgument
from pyllama.thread_placement import numa_nodes, parse_mask, parse_range, thread_cpus
from support.tiny_llama import write_tiny_llama

CPUS = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cpus"), [("1", {0}), ("0x5", {0, 2}), ("0XfF", set(range(8))), ("0", set()), ("100000000000", {44})]
)
def test_mask_names_processors_by_bits(text: str, cpus: set[int]) -> None:
    assert parse_mask(text) == cpus


@pytest.mark.parametrize("text", ["g", "0x", "-1", "1 2", "f" * 257])
def test_mask_that_is_no_hexadecimal_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="hexadecimal"):
        parse_mask(text)


def test_range_includes_both_ends_and_may_leave_them_out() -> None:
    assert parse_range("2-4") == {2, 3, 4}
    assert parse_range("-1") == {0, 1}
    assert parse_range("0-") == set(range(CPUS[-1] + 1))


@pytest.mark.parametrize("text", ["4-2", "3", "a-b", "1-2-3"])
def test_range_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_range(text)


def test_processor_outside_the_process_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="may use"):
        thread_cpus(cpu_range="0-1000")


def test_nothing_chosen_leaves_the_threads_free() -> None:
    assert list(thread_cpus()) == []


def write_nodes(folder: Path, *lists: str) -> Path:
    for index, text in enumerate(lists):
        (folder / f"node{index}").mkdir()
        (folder / f"node{index}" / "cpulist").write_text(text + "\n")
    return folder


def test_nodes_without_a_processor_of_this_process_are_left_out(tmp_path: Path) -> None:
    nodes = write_nodes(tmp_path, f"{CPUS[0]},900-903", "904", "")
    assert numa_nodes(nodes) == [{CPUS[0]}]


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")
def test_distribute_deals_threads_out_to_the_nodes_in_turn(tmp_path: Path) -> None:
    nodes = write_nodes(tmp_path, str(CPUS[0]), ",".join(map(str, CPUS[1:])))
    assert list(thread_cpus(numa="distribute", nodes=nodes)) == [CPUS[:1], CPUS[1:]]
    assert list(thread_cpus(numa="distribute", strict=True, nodes=nodes))[:2] == [[CPUS[0]], [CPUS[1]]]


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")
def test_isolate_stays_on_one_node(tmp_path: Path) -> None:
    nodes = write_nodes(tmp_path, str(CPUS[0]), ",".join(map(str, CPUS[1:])))
    assert list(thread_cpus(numa="isolate", nodes=nodes)) in ([CPUS[:1]], [CPUS[1:]])


def thread_affinities() -> dict[int, set[int]]:
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")
def test_engine_threads_run_where_they_were_put(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    before = set(thread_affinities())
    seen: dict[int, set[int]] = {}
    caller: list[int] = []

    def drive() -> None:  # a thread of its own: the test's own keeps its processors
        engine = Engine(Model(path), n_ctx=256, n_threads=2, thread_cpus=[[CPUS[0]], [CPUS[1]]], thread_poll=0)
        engine.decode([1, 2, 3])
        caller.append(threading.get_native_id())
        seen.update(thread_affinities())
        engine.close()

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join()
    assert seen[caller[0]] == {CPUS[0]}
    workers = [cpus for task, cpus in seen.items() if task not in before and task != caller[0]]
    assert workers == [{CPUS[1]}]


@pytest.mark.parametrize("poll", [0, 100])
def test_poll_changes_no_result(tmp_path: Path, poll: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    model = Model(path)
    logits = []
    for value in (50, poll):
        engine = Engine(model, n_ctx=256, n_threads=2, thread_poll=value)
        engine.decode([1, 2, 3])
        logits.append(engine.logits().copy())
    assert (logits[0] == logits[1]).all()


@pytest.mark.parametrize(
    "settings", [{"thread_poll": 101}, {"thread_priority": 4}, {"thread_cpus": [[100000]]}, {"thread_cpus": [[]]}]
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    with pytest.raises(InvalidArgument):
        Engine(Model(path), n_ctx=256, n_threads=2, **settings)  # type: ignore[arg-type]
