"""The one thread that drives the engine: takes requests in, runs the scheduler's plans, hands events out per step.

Other threads use `submit`, `cancel`, `on_idle_slot` and `stop` only. A request that was cancelled is gone before the
next step. Tests call `iterate` without a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from pyllama.checkpoints import PAGE_TOKENS
from pyllama.errors import ContextFull, InvalidArgument, PyllamaError
from pyllama.grammar import ConstraintFailed
from pyllama.server import scheduler, slot_log
from pyllama.server.constrained_draws import ConstrainedDraws
from pyllama.server.embedding_tasks import EmbeddingQueue, EmbeddingRequest
from pyllama.server.errors import QueueFull, ServerFault, Unavailable
from pyllama.server.generation import Event, Failed, Finished, Generation, Progress, Started
from pyllama.server.loop_settings import LoopSettings
from pyllama.server.metrics import Totals
from pyllama.server.prompt_scores import score_rows
from pyllama.server.requests import ActiveRequest
from pyllama.server.scheduler import Chunk, SequenceState, Waiting
from pyllama.server.slot_memory import SlotMemory
from pyllama.server.slots import Slot, choose_slot
from pyllama.server.speculation import SlotSpeculation

log = logging.getLogger("pyllama.server.slot")

# Tokens that come within a sixtieth of a second look simultaneous.
STEP_SECONDS = 1 / 60

# Rows per call when prompt tokens are scored: their logits take rows x vocabulary x 4 bytes.
SCORED_ROWS = 64


class EngineLoop:
    """Owner of the engine while it runs. `deliver` gets the events of each step, on the engine thread.

    make_work: `pyllama._engine.Work`. make_row: `pyllama._engine.LogitsRow`. make_engine: another engine like the
    first, after a sleep.
    embeddings: where `EmbeddingRequest`s go; None refuses them.
    make_speculation: drafts for an engine; None: there are none.
    """

    def __init__(
        self,
        engine: Any,
        settings: LoopSettings,
        *,
        make_work: Callable[..., Any],
        make_row: Callable[[], Any],
        deliver: Callable[[list[Event]], None],
        make_engine: Callable[[], Any] | None = None,
        embeddings: EmbeddingQueue | None = None,
        make_speculation: Callable[[Any], SlotSpeculation | None] = lambda engine: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.slots = [Slot(i) for i in range(settings.n_slots)]
        self.memory = SlotMemory(engine, self.slots, settings.checkpoints, can_cut=settings.can_cut)
        self.totals = Totals()
        self._reports = slot_log.GenerationReports(settings.n_slots)
        self.on_sleep: Callable[[bool], None] = lambda is_sleeping: (
            None
        )  # called when it falls asleep and when it wakes
        self._engine = engine
        self._embeddings = embeddings
        self._settings = settings
        self._n_batch = max(settings.n_batch, settings.n_slots + 1)
        self._make_work = make_work
        self._make_engine = make_engine
        self._make_speculation = make_speculation
        self._speculation = make_speculation(engine)
        self._deliver = deliver
        self._clock = clock
        self._condition = threading.Condition()
        self._has_news = False  # something was asked of the loop, or a mask is there, since the iteration began
        self._constrained = ConstrainedDraws(settings.n_slots, make_row, self._on_mask)
        self._arrived: deque[ActiveRequest] = deque()
        self._cancelled: deque[ActiveRequest] = deque()
        self._slot_actions: deque[tuple[Slot, Callable[[Slot], Any], Future[Any]]] = deque()
        self._is_stopping = False
        self._waiting: list[list[Generation]] = []
        self._events: list[Event] = []
        self._n_arrivals = 0
        self._has_stepped = True  # since the last time that a sequence gave way
        self._embeddings_pause = False  # they gave way: a step comes first
        self._has_run_prompt = False  # in this iteration
        self._prompt_end_us = self._prompt_step_us = 0  # of the last iteration that did: its end, and how long it took
        self._pass_seconds = STEP_SECONDS  # of the steps that drew one token per sequence, decaying average
        self._thread: threading.Thread | None = None

    # ---- other threads

    @property
    def n_deferred(self) -> int:
        """Prompts that wait for a slot, and texts that wait to be embedded."""
        n_arrived = sum(
            len(request.tasks if isinstance(request, EmbeddingRequest) else request.groups)
            for request in tuple(self._arrived)
        )
        return len(self._waiting) + n_arrived + (self._embeddings.n_waiting if self._embeddings else 0)

    @property
    def n_busy(self) -> int:
        """Requests that run: slots that are in use, and texts being embedded."""
        n_embedded = self._embeddings.n_running if self._embeddings else 0
        return sum(slot.generation is not None for slot in self.slots) + n_embedded

    @property
    def is_sleeping(self) -> bool:
        """The engine was closed for want of work; the next work makes one."""
        return self._engine is None

    @property
    def speculation_names(self) -> list[str]:
        return self._speculation.names if self._speculation is not None else []

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: ActiveRequest) -> None:
        """Queue all parts of a request. Raises `QueueFull`."""
        if isinstance(request, EmbeddingRequest) and self._embeddings is None:
            raise InvalidArgument("the engine loop was created without a queue for embeddings")
        with self._condition:
            if self._is_stopping:
                raise Unavailable("the server is shutting down")
            if len(self._waiting) + len(self._arrived) >= self._settings.max_queue:
                raise QueueFull(f"{self._settings.max_queue} requests are waiting already")
            self._arrived.append(request)
            self._tell()

    def cancel(self, request: ActiveRequest) -> None:
        """Forget a request: queued parts vanish, running parts stop before the next step. No event follows."""
        request.is_cancelled = True
        with self._condition:
            self._cancelled.append(request)
            self._tell()

    def on_idle_slot(self, id_slot: int, action: Callable[[Slot], Any]) -> Future[Any]:
        """Run `action` on the engine thread as soon as the slot (modulo the number of slots) is idle."""
        future: Future[Any] = Future()
        with self._condition:
            if self._is_stopping:
                raise Unavailable("the server is shutting down")
            self._slot_actions.append((self.slots[id_slot % len(self.slots)], action, future))
            self._tell()
        return future

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float | None = None) -> None:
        """Fail what is in flight and end the thread after its running step. Waits at most `timeout` seconds."""
        with self._condition:
            self._is_stopping = True
            self._tell()
        if self._thread is not None:
            self._thread.join(timeout)

    def _on_mask(self) -> None:
        with self._condition:
            self._tell()

    def _tell(self) -> None:
        self._has_news = True
        self._condition.notify()

    # ---- the engine thread

    def _run(self) -> None:
        while True:
            with self._condition:
                has_work = self._condition.wait_for(self._has_work, self._seconds_to_sleep)
            if not has_work:
                self._sleep()
                continue
            if self._is_stopping:
                self._fail_everything(Unavailable("the server is shutting down"))
                self._constrained.close()
                if self._speculation is not None:
                    self._speculation.log_statistics()
                    self._speculation.close()
                return
            if self._engine is None and not self._wake():
                continue
            try:
                self.iterate()
            except Exception as error:  # our own fault: the requests learn of it, the server lives on
                log.exception("the engine loop failed")
                self._fail_everything(ServerFault(f"internal error: {error}"))

    def _has_work(self) -> bool:
        return bool(
            self._arrived
            or (self._cancelled and self._engine is not None)
            or self._slot_actions
            or self._is_stopping
            or self._waiting
            or self._embeddings
            or self.n_busy
        )

    @property
    def _seconds_to_sleep(self) -> float | None:
        is_never = self._settings.sleep_seconds <= 0 or self._make_engine is None or self._engine is None
        return None if is_never else self._settings.sleep_seconds

    def _sleep(self) -> None:
        log.info("no work for %g seconds: the model is unloaded", self._settings.sleep_seconds)
        engine = self._engine
        if self._speculation is not None:
            self._speculation.close()
        self._use(None)
        engine.close()

    def _wake(self) -> bool:
        """False: there is no engine, and what waited for it has learnt that."""
        try:
            self._use(self._make_engine())
        except (PyllamaError, OSError) as error:
            log.error("the model cannot be loaded again: %s", error)
            self._fail_everything(ServerFault(f"the model cannot be loaded again: {error}"))
            return False
        return True

    def _use(self, engine: Any) -> None:
        self._engine = engine
        self._speculation = None if engine is None else self._make_speculation(engine)
        self.on_sleep(engine is None)
        self.memory.use(engine)
        if self._embeddings is not None:
            self._embeddings.use(engine)

    def iterate(self) -> None:
        """One iteration: arrivals and cancellations, admission, one engine step, its results.

        Where there is nothing to do but to wait for masks of grammars, it ends with the next one, or other news.
        """
        self._has_news = False
        self._take_arrivals()
        self._drop_cancelled()
        self._run_slot_actions()
        self._admit()
        self._flush()  # streams begin before the first step, which may be long
        started_us, self._has_run_prompt = self._now_us(), False
        rests = scheduler.prompts_rest(
            started_us - self._prompt_end_us, self._prompt_step_us, self._settings.prefill_pace
        )
        self._score_prompt(rests=rests)
        self._shift_contexts()
        self._resume_blocked()
        self._start_children()
        self._draw_kept()
        plan = scheduler.plan_step(
            self._states(),
            self._n_batch,
            mixes_prompts=self._settings.mixes_prompts,
            prompts_rest=rests,
            prompt_grain=self._settings.prompt_grain,
        )
        if plan:
            self._step(plan)
            self._draw_kept()
        if self._has_run_prompt:
            self._prompt_end_us = self._now_us()
            self._prompt_step_us = self._prompt_end_us - started_us
        if self._embeddings and not (self._embeddings_pause and plan):
            self._embed(self._embeddings, n_rows=self._settings.n_embedding_rows if plan else self._n_batch)
        self._flush()
        if not (plan or self._has_run_prompt or self._embeddings) and any(
            state.awaits_mask for state in self._states()
        ):
            with self._condition:
                self._condition.wait_for(lambda: self._has_news)

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _take_arrivals(self) -> None:
        while self._arrived:
            with self._condition:
                request = self._arrived.popleft()
                if isinstance(request, EmbeddingRequest):
                    for task in request.tasks:
                        task.age = self._n_arrivals
                        self._n_arrivals += 1
                    self._embeddings.add(request)
                    continue
                groups = request.groups
                for generation in request.generations:
                    generation.age = self._n_arrivals
                    self._n_arrivals += 1
                self._waiting += [group for group in groups if group[0].n_prompt > 0]
            for group in groups:
                if group[0].n_prompt == 0:  # nothing to continue: an empty answer
                    for generation in group:
                        generation.is_done = True
                        self._events += (Started(generation), Finished(generation))

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if self._embeddings is not None:
                self._embeddings.cancel(request)
            self._waiting = [group for group in self._waiting if group[0].request is not request]
            for slot in self.slots:
                if slot.generation is not None and slot.generation.request is request:
                    slot_log.stopped(slot, slot.generation, why=", cancelled")
                    self._release(slot)

    def _run_slot_actions(self) -> None:
        """Before requests are admitted: an action waits for the running request of its slot, not for queued ones."""
        for _ in range(len(self._slot_actions)):
            slot, action, future = self._slot_actions.popleft()
            if slot.generation is not None:
                self._slot_actions.append((slot, action, future))
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(action(slot))
                except Exception as error:  # the caller's to handle
                    future.set_exception(error)

    # ---- admission and prefix reuse

    def _admit(self) -> None:
        if not self._waiting or (self._embeddings is not None and self._embeddings.lacks_memory):
            return
        idle = {slot.id for slot in self.slots if slot.generation is None}
        if not idle:
            return
        waiting = [Waiting(len(group), self._pinned_slot(group)) for group in self._waiting]

        def choose(index: int, free: Collection[int]) -> int:
            first = self._waiting[index][0]
            candidates = [self.slots[i] for i in free]
            slot, share = choose_slot(candidates, first.tokens, self._settings.similarity, first.params.applied_scales)
            slot_log.selected(slot, share)
            return slot.id

        admitted = scheduler.admit(waiting, idle, choose)
        for index, slot_ids in admitted:
            if waiting[index].id_slot >= 0:
                slot_log.selected_by_id(slot_ids[0], waiting[index].id_slot)
            for generation, slot_id in zip(self._waiting[index], slot_ids, strict=True):
                self._place(generation, self.slots[slot_id])
        gone = {index for index, _ in admitted}
        if gone:
            self._waiting = [group for index, group in enumerate(self._waiting) if index not in gone]

    def _pinned_slot(self, group: list[Generation]) -> int:
        id_slot = group[0].request.id_slot
        return id_slot % len(self.slots) if id_slot >= 0 else -1

    def _place(self, generation: Generation, slot: Slot) -> None:
        slot.generation = slot.last_generation = generation
        generation.slot_id = slot.id
        generation.sampler.accept(generation.tokens)
        self._constrained.begin(generation)
        if generation.waits_for_parent:
            self.memory.forget(slot)
        else:
            generation.reuse = self._reuse_prefix(generation, slot)
        generation.start(self._clock(), len(slot.tokens))
        slot_log.launched(generation)
        self._events.append(Started(generation))
        self._report_progress(generation, len(slot.tokens))

    def _reuse_prefix(self, generation: Generation, slot: Slot) -> Any:
        """Begin with what is known of the tokens, unless the request wants them computed; the engine's answer."""
        scales = generation.params.applied_scales
        if not generation.params.cache_prompt or generation.is_scoring:
            self.memory.start_anew(slot, scales)
            return None
        found = self.memory.reuse(slot, generation.tokens, scales, generation.params.n_cache_reuse)
        self.memory.plan_checkpoints(slot, generation.prompt)
        if found is not None:
            log.debug(
                "slot %2d | task %d | prefix reuse: n_past = %d of %d, known = %d, source = %s, "
                "checkpoint = %d, limit = %s, moved = %d; states will be kept at %s",
                slot.id,
                generation.age,
                found.length,
                generation.n_prompt,
                found.matched,
                found.source,
                found.checkpoint,
                found.limit or "none",
                found.moved,
                slot.checkpoints,
            )
        return found

    def _resume_blocked(self) -> None:
        """Sequences that gave way go on when there is room, with what host memory kept of them."""
        if not any(slot.generation is not None and slot.generation.is_blocked for slot in self.slots):
            return
        states = self._states()
        # Right after a sequence gave way the free pages are spoken for: they count again once a step has used them.
        free_tokens = self._engine.free_tokens() if self._has_stepped else 0
        embeds = self._embeddings is not None and self._embeddings.n_running > 0
        for slot_id in scheduler.resumable(states, free_tokens, PAGE_TOKENS, others_run=embeds):
            slot = self.slots[slot_id]
            self._reuse_prefix(slot.generation, slot)
            slot.generation.on_resumed(len(slot.tokens))

    # ---- one step

    def _states(self) -> list[SequenceState]:
        states = []
        for slot in self.slots:
            generation = slot.generation
            if generation is not None:
                n_pending = len(generation.tokens) - len(slot.tokens)
                if generation.waits_for_parent or (generation.is_scoring and not generation.is_blocked):
                    n_pending = 0
                is_generating = n_pending == 1 and generation.n_decoded > 0
                states.append(
                    SequenceState(
                        slot.id,
                        generation.age,
                        n_pending,
                        is_generating,
                        generation.is_blocked,
                        self._tokens_until_cut(slot),
                        generation.has_begun,
                        generation.awaits_mask,
                        len(slot.tokens),
                    )
                )
        return states

    def _tokens_until_cut(self, slot: Slot) -> int:
        """Tokens up to the next checkpoint or the point where children take over the prompt; 0: none ahead."""
        n_held = len(slot.tokens)
        if n_held >= slot.generation.n_prompt:
            return 0
        cuts = slot.checkpoints
        if any(child.waits_for_parent for child in slot.generation.children):
            cuts = [*cuts, slot.generation.n_prompt - 1]
        return min((position for position in cuts if position > n_held), default=n_held) - n_held

    def _step(self, plan: list[Chunk]) -> None:
        started = self._clock()
        # First the drafts: masks are computed beside them, and who has one needs no other.
        drafts = self._speculation.drafts(plan, self.slots, self._constrained) if self._speculation is not None else {}
        plan, placed = self._place_samplers(plan)
        if not plan:
            return
        drafts = {chunk.slot: drafts[chunk.slot] for chunk in plan if chunk.slot in drafts}
        n_passes = self._n_passes(plan)
        if self._speculation is not None:
            n_passes = min(n_passes, self._speculation.n_quiet)
        works = [self._work(chunk, placed, drafts) for chunk in plan]
        computing = self._clock()
        try:
            try:
                outputs = self._engine.step(works, n_passes)
            except ContextFull:
                if not drafts:
                    raise
                drafts = {}  # nobody gives way for a guess
                works = [self._work(chunk, placed, drafts) for chunk in plan]
                outputs = self._engine.step(works, n_passes)
        except ContextFull:
            self._make_room(plan)
            return
        except PyllamaError as error:
            self._fail_plan(plan, error)
            return
        now = self._clock()
        self._has_stepped, self._embeddings_pause = True, False
        if n_passes > 1:
            n_passes = len(outputs) // len(plan)  # fewer when the pool ends
        self._count_step(plan, drafts, n_passes, now - started, now - computing)

        drawn = deque(outputs)
        finished = []
        for chunk, work in zip(plan, works, strict=True):
            slot = self.slots[chunk.slot]
            generation = slot.generation
            is_first = generation.n_decoded == 0
            slot.tokens += work.tokens
            if is_first or chunk.n_tokens > 1:
                generation.has_begun = self._has_run_prompt = True
            if is_first:
                generation.on_prompt(len(slot.tokens), now)
                self._report_progress(generation, len(slot.tokens))
            if self._speculation is not None and (is_first or chunk.n_tokens > 1):
                self._speculation.on_computed(slot, begins=is_first and chunk.draws)
            if work.logits is not None:
                generation.awaits_mask = True
            elif chunk.draws:
                try:
                    if draft := drafts.get(slot.id):
                        is_done = self._take_round(slot, draft.tokens, drawn, now)
                    else:
                        is_done = self._take(generation, drawn.popleft(), now)
                    if is_done:
                        finished.append(slot)
                except ConstraintFailed as error:
                    self._fail(slot, error)
        for _ in range(1, n_passes):
            for chunk in plan:
                slot, output = self.slots[chunk.slot], drawn.popleft()
                generation = slot.generation
                if generation.is_done:
                    continue
                slot.tokens.append(generation.tokens[-1])
                if self._take(generation, output, now):
                    finished.append(slot)
        if n_passes > 1:
            for slot in finished:  # passes after the end went on from it
                self._engine.truncate(slot.id, len(slot.tokens))
        for chunk in plan:
            slot = self.slots[chunk.slot]
            generation = slot.generation
            if generation is None:  # it failed
                continue
            if generation.params.cache_prompt and generation.parent is None:
                self.memory.keep_state(slot, is_generating=len(slot.tokens) > generation.n_prompt)
        for slot in finished:
            self._finish(slot)

    def _draw_kept(self) -> None:
        """Draw for the sequences whose logits waited for a mask that is there now."""
        for slot in self.slots:
            if not self._constrained.can_draw(slot):
                continue
            try:
                if self._take(slot.generation, self._constrained.draw(slot), self._clock()):
                    self._finish(slot)
            except PyllamaError as error:
                self._fail(slot, error)

    def _shift_contexts(self) -> None:
        """Make room in full slots whose generations may go on."""
        for slot in self.slots:
            generation = slot.generation
            if generation is None or generation.is_blocked or not generation.shifts_context:
                continue
            held = len(slot.tokens)
            if held + 1 < generation.n_ctx or held + 1 != len(generation.tokens):
                continue
            params = generation.params
            n_keep = generation.n_prompt if params.n_keep < 0 else params.n_keep
            n_keep = max(0, min(n_keep + self._settings.adds_bos, generation.n_ctx - 4))
            n_left = held - n_keep
            n_discard = max(1, min(params.n_discard or n_left // 2, n_left - 1))
            try:
                self._engine.shift(slot.id, n_keep, n_discard)
            except ContextFull:  # shared pages must be copied first: another iteration will do
                self._make_room([Chunk(slot.id, 1, True)])
                continue
            except PyllamaError as error:
                self._fail_plan([Chunk(slot.id, 1, True)], error)
                continue
            del slot.tokens[n_keep : n_keep + n_discard]
            generation.shift(n_keep, n_discard)
            log.info(
                "slot %2d | context shift, n_keep = %d, n_left = %d, n_discard = %d",
                slot.id,
                n_keep,
                n_left,
                n_discard,
            )

    def _embed(self, queue: EmbeddingQueue, n_rows: int) -> None:
        """Move the texts that are to be embedded on by up to `n_rows` tokens."""
        is_alone = all(slot.generation is None for slot in self.slots)
        queue.admit(self.memory.drop_idle, must_start=is_alone)
        started = self._clock()
        try:
            n_done, n_tasks, finished = queue.step(n_rows)
        except ContextFull:
            self._make_room_for_texts(queue, is_alone=is_alone)
            return
        except PyllamaError as error:
            log.error("embedding failed: %s: %s", type(error).__name__, error)
            self._events += [Failed(task, error) for task in queue.drop_running()]
            return
        self._events += [Finished(task) for task in finished]
        if n_done:
            totals = self.totals
            totals.n_decode += 1
            totals.n_busy_slots += n_tasks
            totals.prompt_tokens += n_done
            totals.prompt_seconds += self._clock() - started
            totals.n_tokens_max = max(totals.n_tokens_max, *(len(task.tokens) for task in finished), 0)

    def _score_prompt(self, *, rests: bool) -> None:
        """Run some prompt tokens of the oldest request that wants them scored; the last one is left to a step.

        rests: not while something generates, but for a first chunk.
        """
        scoring = [s for s in self.slots if s.generation is not None and s.generation.is_scoring]
        scoring = [s for s in scoring if not s.generation.is_blocked]
        if rests and any(state.generates for state in self._states()):
            scoring = [s for s in scoring if not s.generation.has_begun]
        if not scoring:
            return
        slot = min(scoring, key=lambda s: s.generation.age)
        generation, n_past = slot.generation, len(slot.tokens)
        n_rows = min(SCORED_ROWS, generation.n_prompt - 1 - n_past)
        tokens = generation.tokens[n_past : n_past + n_rows]
        chunk = [Chunk(slot.id, n_rows, False)]
        try:
            self._engine.decode(tokens, [slot.id] * n_rows, [True] * n_rows)
            logits = self._engine.logits()
        except ContextFull:
            self._make_room(chunk)
            return
        except PyllamaError as error:
            self._fail_plan(chunk, error)
            return
        slot.tokens += tokens
        generation.has_begun = self._has_run_prompt = True
        following = generation.tokens[n_past + 1 : n_past + 1 + n_rows]
        generation.prompt_records += score_rows(logits, following, generation.params.n_probs)
        generation.on_prompt(len(slot.tokens), self._clock())
        self._has_stepped, self._embeddings_pause = True, False
        self._report_progress(generation, len(slot.tokens))

    def _n_passes(self, plan: list[Chunk]) -> int:
        """Tokens to draw per sequence in the next step: more than one only where nobody would be kept waiting by it."""
        n_passes = min(self._settings.max_passes, int(STEP_SECONDS / max(self._pass_seconds, 1e-9)))
        if n_passes <= 1 or self._waiting or self._arrived or self._cancelled:
            return 1
        for chunk in plan:
            generation = self.slots[chunk.slot].generation
            if chunk.n_tokens > 1 or generation.n_decoded == 0 or generation.constraint is not None:
                return 1
            n_passes = min(n_passes, generation.n_left)
            if self._settings.checkpoints is not None:  # a state may be kept at the end of a page
                n_passes = min(n_passes, PAGE_TOKENS - len(self.slots[chunk.slot].tokens) % PAGE_TOKENS)
        return max(1, n_passes)

    def _place_samplers(self, plan: list[Chunk]) -> tuple[list[Chunk], dict[int, tuple[Any, Any]]]:
        """By slot, what draws and what keeps logits for later; the plan without sequences that cannot go on."""
        possible, placed = [], {}
        for chunk in plan:
            slot = self.slots[chunk.slot]
            try:
                placed[slot.id] = self._constrained.place(slot) if chunk.draws else (None, None)
            except ConstraintFailed as error:
                self._fail(slot, error)
                continue
            possible.append(chunk)
        return possible, placed

    def _work(self, chunk: Chunk, placed: dict[int, tuple[Any, Any]], drafts: dict[int, Any]) -> Any:
        slot = self.slots[chunk.slot]
        generation, n_past = slot.generation, len(slot.tokens)
        params = generation.params
        return self._make_work(
            slot.id,
            generation.tokens[n_past : n_past + chunk.n_tokens],
            placed[slot.id][0],
            params.n_probs,
            params.post_sampling_probs,
            placed[slot.id][1],
            **(self._speculation.work(slot, drafts[slot.id]) if slot.id in drafts else {}),
        )

    def _take_round(self, slot: Slot, draft: list[int], drawn: deque[Any], now: float) -> bool:
        """The tokens that a verified draft gave; True when one of them ends the generation."""
        generation = slot.generation
        outputs = [drawn.popleft()]
        while drawn and drawn[0].seq_id == slot.id:
            outputs.append(drawn.popleft())
        n_accepted = len(outputs) - 1
        self._speculation.on_verified(slot, len(draft), n_accepted)
        self.totals.add_draft(len(draft), n_accepted)
        for n_stood, output in enumerate(outputs):
            slot.tokens += draft[n_stood - 1 : n_stood] if n_stood else []
            if self._take(generation, output, now, is_last=n_stood == n_accepted):
                self.memory.drop_behind(slot, draft[n_stood:n_accepted])
                return True
        return False

    def _take(self, generation: Generation, output: Any, now: float, *, is_last: bool = True) -> bool:
        """One drawn token; True when it ends the generation. is_last: of those that the step drew for it."""
        self._events.append(generation.on_token(output.token, output.logprob, output.top, now))
        self._reports.on_token(generation, now)
        if is_last and not generation.is_done:
            self._constrained.begin(generation)
        return generation.is_done

    def _count_step(
        self, plan: list[Chunk], drafts: dict[int, Any], n_passes: int, seconds: float, engine_seconds: float
    ) -> None:
        """Attribute the time of a step to prompts and generation by their rows. engine_seconds: without drafting."""
        totals = self.totals
        n_rows = n_generation_rows = sum(len(draft.tokens) for draft in drafts.values())
        for slot_id, n_tokens, _ in plan:
            n_rows += n_tokens
            if n_tokens == 1 and self.slots[slot_id].generation.n_decoded > 0:
                n_generation_rows += 1
        if n_generation_rows == n_rows:
            if not drafts:
                self._pass_seconds += 0.2 * (seconds / n_passes - self._pass_seconds)
            if self._speculation is not None:
                n_drafted = sum(len(draft.tokens) for draft in drafts.values())
                self._speculation.on_step(n_rows, engine_seconds / n_passes, n_drafted=n_drafted, n_passes=n_passes)
        totals.n_decode += n_passes
        totals.n_busy_slots += self.n_busy * n_passes
        totals.predicted_seconds += seconds * n_generation_rows / n_rows
        totals.prompt_seconds += seconds * (n_rows - n_generation_rows) / n_rows

    def _report_progress(self, generation: Generation, n_tokens: int) -> None:
        slot_log.prompt_progress(generation, n_tokens)
        params = generation.params
        if params.return_progress and params.stream:
            timings = generation.timings() if params.timings_per_token else None
            time_ms = (generation.t_prompt_end - generation.t_start) * 1e3
            self._events.append(Progress(generation, n_tokens, time_ms, timings))

    def _start_children(self) -> None:
        """Children get the parent's prompt but for its last token, which each of them runs with its own sampler."""
        for slot in self.slots:
            parent = slot.generation
            if parent is None or not parent.children or len(slot.tokens) < parent.n_prompt - 1:
                continue
            for child in parent.children:
                if child.waits_for_parent:
                    target = self.slots[child.slot_id]
                    self.memory.share(slot, target, parent.n_prompt - 1)
                    child.waits_for_parent = False
                    child.start(self._clock(), len(target.tokens))

    def _finish(self, slot: Slot) -> None:
        generation = slot.generation
        generation.tokens_held = len(slot.tokens)
        totals, timings = self.totals, generation.timings()
        totals.prompt_tokens += timings["prompt_n"]
        totals.prompt_tokens_cached += generation.n_cached
        totals.predicted_tokens += generation.n_decoded
        totals.predicted_steps += generation.n_decoded - 1
        totals.n_tokens_max = max(totals.n_tokens_max, len(generation.tokens))
        slot_log.finished(slot, generation, timings)
        self._events.append(Finished(generation))
        self._release(slot)

    def _release(self, slot: Slot) -> None:
        generation, slot.generation = slot.generation, None
        generation.is_done = True
        slot.checkpoints = []
        self.memory.mark_used(slot)
        if generation.parent is not None:
            self.memory.clear(slot)
        elif generation.shifted_at is not None and generation.shifted_at < len(slot.tokens):
            self.memory.cut(slot, generation.shifted_at)
        if self.n_busy == 0:
            slot_log.all_idle()

    # ---- when things go wrong

    def _make_room(self, plan: list[Chunk]) -> None:
        """The pool has no pages for a plan: an idle slot forgets its tokens, else the newest sequence gives way."""
        if self.memory.drop_idle():
            return
        planned = {chunk.slot for chunk in plan}
        candidates = [
            state
            for state in self._states()
            if not state.is_blocked and (state.slot in planned or self.slots[state.slot].tokens)
        ]
        state = scheduler.gives_way(candidates)
        if self._embeddings is not None and (age := self._embeddings.age) is not None:
            # Texts being embedded count like sequences: the newest of all gives way.
            newest = max(candidates, key=lambda s: s.age)
            if newest.age < age:
                self._embeddings.give_way()
                self._embeddings_pause = True
                return
            state = newest
        if state is None:
            for chunk in plan:
                self._fail(self.slots[chunk.slot], ServerFault("Context size has been exceeded."))
            return
        self._preempt(self.slots[state.slot])
        self._has_stepped = False

    def _make_room_for_texts(self, queue: EmbeddingQueue, *, is_alone: bool) -> None:
        """As `_make_room`, for texts being embedded."""
        if self.memory.drop_idle():
            return
        younger = [
            slot
            for slot in self.slots
            if slot.generation is not None and slot.tokens and slot.generation.age > (queue.age or 0)
        ]
        if younger:
            self._preempt(max(younger, key=lambda slot: slot.generation.age))
        elif queue.n_running > 1 or not is_alone:
            queue.give_way()
        else:
            error = ServerFault("Context size has been exceeded.")
            self._events += [Failed(task, error) for task in queue.drop_running()]

    def _preempt(self, slot: Slot) -> None:
        """The request of a slot gives its memory away and waits."""
        log.warning(
            "slot %2d | the KV pool is full: the newest request waits, n_tokens = %d", slot.id, len(slot.tokens)
        )
        self.memory.forget(slot)
        slot.generation.on_preempted()

    def _fail_plan(self, plan: list[Chunk], error: PyllamaError) -> None:
        """A step failed as a whole: what it ran is in an unknown state and ends."""
        log.error("engine step failed: %s: %s", type(error).__name__, error)
        for chunk in plan:
            self._fail(self.slots[chunk.slot], error)

    def _fail(self, slot: Slot, error: Exception) -> None:
        generation = slot.generation
        self.memory.clear(slot)
        self._events.append(Failed(generation, error))
        for child in generation.children:
            if child.waits_for_parent and not child.is_done:
                self._events.append(Failed(child, error))
                self._release(self.slots[child.slot_id])
        self._release(slot)

    def _fail_everything(self, error: Exception) -> None:
        self._take_arrivals()
        for group in self._waiting:
            self._events += [Failed(generation, error) for generation in group]
        self._waiting = []
        for slot in self.slots:
            if slot.generation is not None:
                self._fail(slot, error)
        if self._embeddings is not None:
            self._events += [Failed(task, error) for task in self._embeddings.take_all()]
        while self._slot_actions:
            _, _, future = self._slot_actions.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._flush()
