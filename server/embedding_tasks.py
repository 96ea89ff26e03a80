"""Texts on their way to embeddings: a queue of tasks and the sequences of the engine that it runs them on.

Belongs to the engine loop, which calls `step` once per iteration beside its own step, so that neither generation nor
embedding waits for the other. All methods run on the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyllama.server.requests import ActiveRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class EmbeddingTask:
    """One text. `values`: its embedding, when it is finished."""

    __slots__ = ("age", "index", "is_done", "pool", "request", "seq_id", "tokens", "values")

    def __init__(self, request: EmbeddingRequest, index: int, tokens: list[int]) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.age = -1  # set by the engine loop on arrival
        self.seq_id = -1
        self.pool: Any = None
        self.is_done = False
        self.values: NDArray[np.float32] | None = None


class EmbeddingRequest(ActiveRequest):
    """One HTTP request's texts. scales: of the LoRA adapters; empty: none is applied."""

    __slots__ = ("scales", "tasks")

    def __init__(self, texts: Sequence[list[int]], scales: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.scales = scales
        self.tasks = [EmbeddingTask(self, index, tokens) for index, tokens in enumerate(texts)]


class EmbeddingQueue:
    """First come, first served, on the engine's sequences `sequences`, which nobody else uses.

    make_work: `pyllama._engine.EmbeddingWork`. make_pool: a new `HiddenPool`. page_tokens: of the engine.
    """

    def __init__(
        self,
        engine: Any,
        sequences: Sequence[int],
        *,
        make_work: Callable[..., Any],
        make_pool: Callable[[], Any],
        page_tokens: int = 256,
    ) -> None:
        self._engine = engine
        self._free = list(sequences)
        self._make_work = make_work
        self._make_pool = make_pool
        self._page_tokens = page_tokens
        self._waiting: deque[EmbeddingTask] = deque()
        self._running: list[EmbeddingTask] = []
        self.lacks_memory = False  # the first task waits for pages

    def use(self, engine: Any) -> None:
        """From now on another engine. Only while nothing runs."""
        self._engine = engine

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def age(self) -> int | None:
        """Of the oldest running task; None when none runs."""
        return min((task.age for task in self._running), default=None)

    def add(self, request: EmbeddingRequest) -> None:
        self._waiting += request.tasks

    def cancel(self, request: ActiveRequest) -> None:
        self._waiting = deque(task for task in self._waiting if task.request is not request)
        for task in [task for task in self._running if task.request is request]:
            self._release(task)
        self.lacks_memory = self.lacks_memory and bool(self._waiting)

    def take_all(self) -> list[EmbeddingTask]:
        """Every task, which is forgotten here."""
        tasks = [*self._running, *self._waiting]
        for task in list(self._running):
            self._release(task)
        self._waiting.clear()
        self.lacks_memory = False
        return tasks

    def give_way(self) -> bool:
        """Hand the running tasks' memory back; they start again later. False when none holds any."""
        if not self._running:
            return False
        tasks = list(self._running)
        for task in tasks:
            self._release(task)
        self._waiting.extendleft(reversed(tasks))
        self.lacks_memory = True
        return True

    def admit(self, make_room: Callable[[], bool], *, must_start: bool) -> None:
        """Give sequences to waiting tasks as long as the free pages hold their whole texts.

        make_room: frees some pages, or returns False. must_start: nothing else uses the engine, so the first task runs
        in any case.
        """
        reserved = sum(self._pages(len(task.tokens)) - self._pages(task.pool.n_tokens) for task in self._running)
        while self._waiting and self._free:
            task = self._waiting[0]
            needed = reserved + self._pages(len(task.tokens))
            while needed * self._page_tokens > self._engine.free_tokens():
                if not make_room():
                    break
            else:
                self.lacks_memory = False
                self._start(self._waiting.popleft())
                reserved = needed
                continue
            if self._running or not must_start:
                self.lacks_memory = not self._running
                return
            self._start(self._waiting.popleft())
            reserved = needed

    def step(self, n_rows: int) -> tuple[int, int, list[EmbeddingTask]]:
        """Run up to `n_rows` tokens of the running tasks, the oldest first.

        Returns the number of tokens, the number of tasks they belong to, and the tasks that ended.
        An error of the engine passes through and leaves the tasks as they were.
        """
        chunks = []
        room = n_rows
        for task in self._running:
            n_done = task.pool.n_tokens
            n_tokens = min(room, len(task.tokens) - n_done)
            if n_tokens <= 0:
                break
            room -= n_tokens
            chunks.append((task, task.tokens[n_done : n_done + n_tokens], n_done + n_tokens == len(task.tokens)))
        if not chunks:
            return 0, 0, []
        self._engine.embed([self._make_work(task.seq_id, tokens, task.pool, ends) for task, tokens, ends in chunks])
        finished = [task for task, _, ends in chunks if ends]
        for task in finished:
            task.values = task.pool.values()
            task.is_done = True
            self._release(task)
        return n_rows - room, len(chunks), finished

    def drop_running(self) -> list[EmbeddingTask]:
        """The tasks that were running, after an error that ends them."""
        tasks = list(self._running)
        for task in tasks:
            self._release(task)
        return tasks

    def _start(self, task: EmbeddingTask) -> None:
        task.seq_id = self._free.pop(0)
        task.pool = self._make_pool()
        self._engine.set_adapters(task.seq_id, task.request.scales)
        self._running.append(task)

    def _release(self, task: EmbeddingTask) -> None:
        self._running.remove(task)
        self._engine.clear(task.seq_id)
        self._free.append(task.seq_id)
        self._free.sort()
        task.seq_id, task.pool = -1, None

    def _pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self._page_tokens)
