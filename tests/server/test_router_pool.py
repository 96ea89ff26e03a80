"""The router's pool with stand-ins for its processes: order of loads, who makes room, clients that leave, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pyllama.server.errors import InvalidRequest, NotFound, ServerFault, Unavailable
from pyllama.server.router.catalog import CatalogModel
from pyllama.server.router.instance import SERVING
from pyllama.server.router.pool import Pool


class FakeInstance:
    """A process that loads when told (`finish_loading`) or at once, and ends when asked."""

    def __init__(self, name: str, on_state: Callable[[Any], None], *, loads: bool, fails: bool) -> None:
        self.name = name
        self.arguments: list[str] = []
        self.state = "starting"
        self.is_stopping = False
        self.port = 1
        self.model: dict[str, Any] = {}
        self._on_state = on_state
        self._loads, self._fails = loads, fails
        self._end = asyncio.Event()
        self.exit_code = 0

    @property
    def is_loaded(self) -> bool:
        return self.state in SERVING and not self.is_stopping

    async def run(self) -> int:
        await asyncio.sleep(0)
        if self._fails:
            return 1
        if self._loads:
            self.finish_loading()
        await self._end.wait()
        return self.exit_code

    def finish_loading(self) -> None:
        self.tell("loaded")

    def tell(self, state: str) -> None:
        self.state = state
        self._on_state(self)

    def stop(self, timeout: float) -> None:
        self.is_stopping = True
        self._end.set()

    def crash(self) -> None:
        self.exit_code = -11
        self._end.set()


class World:
    """A pool of models a, b, c, d. `log`: starts, in order. `failing`, `slow`: names."""

    def __init__(self, max_models: int) -> None:
        self.log: list[str] = []
        self.events: list[tuple[str, str, Any]] = []
        self.failing: set[str] = set()
        self.slow: set[str] = set()
        self.instances: dict[str, FakeInstance] = {}
        models = {name: CatalogModel(name, "models_dir", (), aliases=(name * 2,)) for name in "abcd"}
        self.pool = Pool(models, max_models, self._make, lambda *event: self.events.append(event))

    def _make(self, arguments: list[str], on_state: Callable[[Any], None]) -> Any:
        name = arguments[arguments.index("--alias") + 1]
        self.log.append(name)
        self.instances[name] = FakeInstance(name, on_state, loads=name not in self.slow, fails=name in self.failing)
        return self.instances[name]

    @property
    def loaded(self) -> set[str]:
        return {name for name, entry in self.pool.entries.items() if entry.is_loaded}

    async def use(self, name: str, until: Awaitable[Any] | None = None) -> str:
        async with self.pool.use(name, autoload=True) as instance:
            if until is not None:
                await until
            return str(instance.name)  # type: ignore[attr-defined]


def play(max_models: int, scene: Callable[[World], Awaitable[None]]) -> World:
    """Run a scene; nothing may be left running or waiting after it."""

    async def run() -> World:
        world = World(max_models)
        await asyncio.wait_for(scene(world), 10)
        await asyncio.wait_for(world.pool.close(), 10)
        assert not world.loaded
        assert all(entry.n_users == 0 for entry in world.pool.entries.values())
        return world

    return asyncio.run(run())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_requests_at_once_share_one_load() -> None:
    async def scene(world: World) -> None:
        assert await asyncio.gather(*(world.use(name) for name in ("a", "aa", "a"))) == ["a"] * 3

    assert play(4, scene).log == ["a"]


def test_the_least_recently_used_idle_model_makes_room() -> None:
    async def scene(world: World) -> None:
        for name in ("a", "b", "a", "c"):
            await world.use(name)
        assert world.loaded == {"a", "c"}
        await world.use("d")
        assert world.loaded == {"c", "d"}

    assert play(2, scene).log == ["a", "b", "c", "d"]


def test_without_a_limit_nothing_is_unloaded() -> None:
    async def scene(world: World) -> None:
        for name in "abcd":
            await world.use(name)
        assert world.loaded == set("abcd")

    play(0, scene)


@pytest.mark.contract("router 5")
def test_a_model_with_requests_is_never_unloaded_and_the_next_waits_for_its_end() -> None:
    async def scene(world: World) -> None:
        done = asyncio.Event()
        busy = asyncio.create_task(world.use("a", done.wait()))
        await settle()
        waiting = asyncio.create_task(world.use("b"))
        await settle()
        assert world.loaded == {"a"}
        assert world.pool.entries["b"].status == "loading"
        done.set()
        assert await busy == "a"
        assert await waiting == "b"
        assert world.loaded == {"b"}

    play(1, scene)


@pytest.mark.contract("router 8")
def test_loads_start_in_the_order_in_which_they_were_asked_for() -> None:
    async def scene(world: World) -> None:
        done = asyncio.Event()
        tasks = [asyncio.create_task(world.use("a", done.wait()))]
        for name in "cbdb":
            await settle()
            tasks.append(asyncio.create_task(world.use(name)))
        await settle()
        done.set()
        assert await asyncio.gather(*tasks) == ["a", "c", "b", "d", "b"]

    assert play(1, scene).log == ["a", "c", "b", "d"]


@pytest.mark.contract("router 6")
def test_requests_for_one_model_share_its_place_and_the_busy_model_stays() -> None:
    async def scene(world: World) -> None:
        done = asyncio.Event()
        busy = asyncio.create_task(world.use("a", done.wait()))
        await settle()
        await world.use("b")
        assert await asyncio.gather(*(world.use("c") for _ in range(3))) == ["c"] * 3
        assert world.loaded == {"a", "c"}
        done.set()
        assert await busy == "a"

    assert play(2, scene).log == ["a", "b", "c"]


@pytest.mark.contract("router 9")
def test_two_that_wait_for_an_idle_model_are_both_served() -> None:
    async def scene(world: World) -> None:
        done = asyncio.Event()
        busy = asyncio.create_task(world.use("a", done.wait()))
        await settle()
        waiting = [asyncio.create_task(world.use("b")) for _ in range(2)]
        await settle()
        assert not any(task.done() for task in waiting)
        done.set()
        assert await asyncio.gather(busy, *waiting) == ["a", "b", "b"]
        assert world.loaded == {"b"}

    assert play(1, scene).log == ["a", "b"]


@pytest.mark.contract("router 7")
def test_a_client_that_leaves_the_queue_takes_its_load_along() -> None:
    async def scene(world: World) -> None:
        done = asyncio.Event()
        busy = asyncio.create_task(world.use("a", done.wait()))
        await settle()
        leaving = asyncio.create_task(world.use("b"))
        staying = asyncio.create_task(world.use("c"))
        await settle()
        leaving.cancel()
        await settle()
        assert world.pool.entries["b"].status == "unloaded"
        done.set()
        assert await busy == "a"
        assert await staying == "c"

    assert play(1, scene).log == ["a", "c"]


def test_one_of_two_clients_may_leave_and_the_other_is_served() -> None:
    async def scene(world: World) -> None:
        world.slow.add("a")
        leaving, staying = (asyncio.create_task(world.use("a")) for _ in range(2))
        await settle()
        leaving.cancel()
        await settle()
        world.instances["a"].finish_loading()
        assert await staying == "a"

    assert play(1, scene).log == ["a"]


def test_a_load_whose_clients_all_left_is_finished_and_may_then_make_room() -> None:
    async def scene(world: World) -> None:
        world.slow.add("a")
        leaving = asyncio.create_task(world.use("a"))
        await settle()
        leaving.cancel()
        waiting = asyncio.create_task(world.use("b"))
        await settle()
        assert world.log == ["a"]
        world.instances["a"].finish_loading()
        assert await waiting == "b"

    play(1, scene)


def test_a_failed_load_is_told_to_all_who_wait_and_tried_again_for_the_next() -> None:
    async def scene(world: World) -> None:
        world.failing.add("a")
        results = await asyncio.gather(*(world.use("a") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(result, ServerFault) and "exit code 1" in str(result) for result in results)
        entry = world.pool.entries["a"]
        assert (entry.status, entry.exit_code, entry.has_failed) == ("unloaded", 1, True)
        world.failing.clear()
        assert await world.use("a") == "a"
        assert not entry.has_failed

    assert play(1, scene).log == ["a", "a"]


def test_a_failed_load_does_not_hold_up_the_queue() -> None:
    async def scene(world: World) -> None:
        world.failing.add("a")
        failed, served = await asyncio.gather(world.use("a"), world.use("b"), return_exceptions=True)
        assert isinstance(failed, ServerFault)
        assert served == "b"

    play(1, scene)


def test_a_crash_is_shown_and_the_next_request_loads_anew() -> None:
    async def scene(world: World) -> None:
        await world.use("a")
        world.instances["a"].crash()
        await settle()
        entry = world.pool.entries["a"]
        assert (entry.status, entry.exit_code, entry.has_failed) == ("unloaded", -11, True)
        assert await world.use("a") == "a"

    assert play(1, scene).log == ["a", "a"]


def test_load_and_unload_on_request() -> None:
    async def scene(world: World) -> None:
        pool = world.pool
        pool.load("aa")
        with pytest.raises(InvalidRequest, match="already running"):
            pool.load("a")
        await settle()
        assert world.loaded == {"a"}
        pool.unload("a")
        with pytest.raises(InvalidRequest, match="not running"):
            pool.unload("a")
        await settle()
        assert pool.entries["a"].status == "unloaded"
        with pytest.raises(NotFound):
            pool.load("x")
        with pytest.raises(InvalidRequest, match="not found"):
            pool.unload("x")
        states = [data["status"] for name, event, data in world.events if (name, event) == ("a", "status_change")]
        assert [state for state, before in zip(states, [None, *states], strict=False) if state != before] == [
            "loading",
            "loaded",
            "unloaded",
        ]

    play(1, scene)


def test_an_explicit_load_waits_its_turn_without_a_client_and_can_be_taken_back() -> None:
    async def scene(world: World) -> None:
        done = asyncio.Event()
        busy = asyncio.create_task(world.use("a", done.wait()))
        await settle()
        world.pool.load("b")
        world.pool.load("c")
        world.pool.unload("b")
        await settle()
        assert world.loaded == {"a"}
        done.set()
        await busy
        await settle()
        assert world.loaded == {"c"}

    assert play(1, scene).log == ["a", "c"]


def test_unloading_while_loading_fails_those_who_wait() -> None:
    async def scene(world: World) -> None:
        world.slow.add("a")
        waiting = asyncio.create_task(world.use("a"))
        await settle()
        world.pool.unload("a")
        with pytest.raises(ServerFault, match="unloaded"):
            await waiting

    play(1, scene)


def test_a_request_during_the_unloading_loads_anew() -> None:
    async def scene(world: World) -> None:
        await world.use("a")
        world.pool.unload("a")
        assert await world.use("a") == "a"

    assert play(1, scene).log == ["a", "a"]


def test_a_model_that_sleeps_is_shown_so_serves_and_may_make_room() -> None:
    async def scene(world: World) -> None:
        await world.use("a")
        a = world.instances["a"]
        for state in ("sleeping", "loaded", "sleeping"):
            a.tell(state)
            assert world.pool.entries["a"].status == state
            assert await world.use("a") == "a"
        told = [data["status"] for name, _, data in world.events if name == "a"]
        assert told == ["loading", "loading", "loaded", "sleeping", "loaded", "sleeping"][-len(told) :]
        assert told[-4:] == ["loaded", "sleeping", "loaded", "sleeping"]
        assert world.log == ["a"]
        await world.use("b")
        assert a.is_stopping

    play(1, scene)


def test_without_autoload_only_loaded_models_answer() -> None:
    async def scene(world: World) -> None:
        with pytest.raises(InvalidRequest, match="model is not loaded"):
            async with world.pool.use("a", autoload=False):
                pass
        with pytest.raises(InvalidRequest, match="'x' not found"):
            await world.use("x")
        world.pool.load("a")
        await settle()
        async with world.pool.use("a", autoload=False) as instance:
            assert instance.is_loaded

    assert play(1, scene).log == ["a"]


def test_the_end_of_the_router_ends_all_models_and_refuses_new_ones() -> None:
    async def scene(world: World) -> None:
        world.slow |= {"b", "c"}
        await world.use("a")
        waiting = [asyncio.create_task(world.use(name)) for name in ("b", "c")]
        await settle()
        await world.pool.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, Unavailable) for result in results)
        with pytest.raises(Unavailable):
            await world.use("a")

    play(2, scene)


def test_a_rescan_ends_what_is_gone_and_keeps_what_runs() -> None:
    async def scene(world: World) -> None:
        await world.use("a")
        await world.use("b")
        models = {name: CatalogModel(name, "models_dir", ("-c", "1")) for name in "ae"}
        world.pool.replace_models(models)
        await settle()
        assert list(world.pool.entries) == ["a", "e"]
        assert world.loaded == {"a"}
        assert world.instances["b"].is_stopping
        gone = [name for name, event, _ in world.events if event == "model_remove"]
        assert sorted(gone) == ["b", "c", "d"]
        assert await world.use("e") == "e"

    assert play(4, scene).log == ["a", "b", "e"]


def test_random_requests_are_all_served_within_the_limit() -> None:
    import random

    rng = random.Random(1)

    async def scene(world: World) -> None:
        most = 0

        async def ask() -> None:
            nonlocal most
            await asyncio.sleep(rng.random() / 100)
            name = rng.choice("abcd")
            async with world.pool.use(name, autoload=True):
                running = sum(entry.instance is not None for entry in world.pool.entries.values())
                most = max(most, running)
                await asyncio.sleep(rng.random() / 1000)

        tasks = [asyncio.create_task(ask()) for _ in range(300)]
        await asyncio.sleep(0.005)
        for task in tasks[::7]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert most == 2

    play(2, scene)
