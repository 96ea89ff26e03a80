"""Long conversations with a tiny hybrid model, over HTTP with a server of its own: how little each turn computes.

Every answer is compared with that of a second server that remembers nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_process import ServerProcess

pytest.importorskip("pyllama._engine", reason="needs the native module")

N_TURNS = 12
PAGE = 256
OPENING = 8  # tokens of "<|im_start|>assistant\n" at most: what a second try computes again
# Answers of capital letters, one token each: their text gives back the same tokens.
LETTERS = range(3 + ord("A"), 3 + ord("Z") + 1)
BIAS = [[token, False] for token in range(300) if token not in LETTERS]

Messages = list[dict[str, str]]


class Talker:
    """Asks both servers and knows every text that the one with a memory has seen."""

    def __init__(self, server: ServerProcess, forgetful: ServerProcess, seed: int) -> None:
        self.server, self.forgetful = server, forgetful
        self.known: list[list[int]] = []
        self._random = random.Random(seed)

    def text(self, n: int) -> str:
        return "".join(chr(self._random.randrange(ord("A"), ord("Z") + 1)) for _ in range(n))

    def user(self, n: int = 60) -> dict[str, str]:
        return {"role": "user", "content": self.text(n)}

    def tokens(self, messages: Messages) -> list[int]:
        prompt = self.server.post("/apply-template", {"messages": messages}).json()["prompt"]
        return self.server.post("/tokenize", {"content": prompt, "add_special": True}).json()["tokens"]

    def ask(self, messages: Messages, *, most: int | None = None, n: int = 40, **fields: Any) -> str:
        """The answer. most: tokens that may be computed; None: what no earlier text began with, and a page."""
        body = {"messages": messages, "max_tokens": n, "temperature": 0, "logit_bias": BIAS, **fields}
        result = self.server.post("/v1/chat/completions", body).json()
        content = result["choices"][0]["message"]["content"]
        expected = self.forgetful.post("/v1/chat/completions", {**body, "id_slot": -1}).json()
        assert content == expected["choices"][0]["message"]["content"]
        assert expected["timings"]["cache_n"] == 0

        prompt = self.tokens(messages)
        n_new = len(prompt) - max((common_prefix(known, prompt) for known in self.known), default=0)
        timings = result["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == len(prompt)
        assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == timings["cache_n"]
        assert timings["prompt_n"] <= (n_new + PAGE if most is None else most)
        # The last token of an answer that met its limit never entered the slot.
        self.known.append([*prompt, *(3 + ord(letter) for letter in content[:-1])])
        return content

    def new_tokens(self, messages: Messages) -> int:
        prompt = self.tokens(messages)
        return len(prompt) - max(common_prefix(known, prompt) for known in self.known)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def start(directory: Path, model: Path, *arguments: str) -> ServerProcess:
    process = ServerProcess(directory, "-m", str(model), "-c", "16384", "-t", "1", "--metrics", *arguments)
    process.wait_ready()
    return process


@pytest.fixture(scope="module")
def forgetful(tiny_hybrid_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("forgetful")
    process = start(directory, tiny_hybrid_path, "-np", "1", "--no-cache-prompt", "--cache-ram", "0")
    yield process
    process.close()


@pytest.fixture
def server(tiny_hybrid_path: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    process = start(tmp_path / "server", tiny_hybrid_path, "-np", "4")
    yield process
    process.close()


def extend(messages: Messages, answer: str, *more: dict[str, str]) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, *more]


@pytest.mark.contract("own 17")
def test_in_a_long_conversation_every_turn_computes_what_is_new(
    server: ServerProcess, forgetful: ServerProcess
) -> None:
    """Known fault F1, also after edits, second tries and stripped reasoning, with other conversations in between."""
    talker = Talker(server, forgetful, 1)
    messages: Messages = [{"role": "system", "content": talker.text(350)}, talker.user()]
    history: list[Messages] = []
    for turn in range(N_TURNS):
        history.append(messages)
        is_first = turn == 0
        answer = talker.ask(messages, most=None if is_first else talker.new_tokens(messages))
        if turn in (2, 7):  # a second try
            assert talker.ask(messages, most=OPENING) == answer
        if turn in (3, 6, 9):  # somebody else
            talker.ask([talker.user(300)])
        if turn == 8:  # an edit three turns back, then on from there as well as from the original
            edited = [*history[turn - 3][:-1], talker.user()]
            other = talker.ask(edited, most=talker.new_tokens(edited) + OPENING)
            talker.ask(extend(edited, other, talker.user()))
        if turn == 10:  # the client drops what it takes for reasoning
            stripped = extend(messages, answer[25:], talker.user())
            talker.ask(stripped, most=talker.new_tokens(stripped) + OPENING)
        messages = extend(messages, answer, talker.user())


def test_another_slot_goes_on_where_the_longest_prefix_is(server: ServerProcess, forgetful: ServerProcess) -> None:
    talker = Talker(server, forgetful, 2)
    messages = [{"role": "system", "content": talker.text(300)}, talker.user()]
    answer = talker.ask(messages, id_slot=0)
    longer = extend(messages, answer, talker.user())
    talker.ask(longer, most=talker.new_tokens(longer), id_slot=3)
    branch = extend(messages, answer, talker.user(30))
    # Known up to the words of the user, with a state before this message.
    talker.ask(branch, most=talker.new_tokens(branch) + OPENING, id_slot=1)
    talker.ask(longer, most=OPENING, id_slot=2)


def test_a_slot_file_brings_its_states_along(tiny_hybrid_path: Path, forgetful: ServerProcess, tmp_path: Path) -> None:
    """Known fault F4: after save, restart and restore, appended, repeated and edited prompts compute what is new."""
    (tmp_path / "slots").mkdir()
    arguments = ("-np", "4", "--slot-save-path", str(tmp_path / "slots"))
    server = start(tmp_path / "first", tiny_hybrid_path, *arguments)
    try:
        talker = Talker(server, forgetful, 3)
        messages: Messages = [{"role": "system", "content": talker.text(350)}, talker.user()]
        history = []
        for _ in range(5):
            history.append(messages)
            answer = talker.ask(messages, id_slot=1)
            messages = extend(messages, answer, talker.user())
        saved = server.post("/slots/1?action=save", {"filename": "talk"}).json()
        assert saved["n_saved"] == len(talker.known[-1])
    finally:
        server.close()

    server = talker.server = start(tmp_path / "second", tiny_hybrid_path, *arguments)
    try:
        restored = server.post("/slots/2?action=restore", {"filename": "talk"}).json()
        assert restored["n_restored"] == saved["n_saved"]
        talker.ask(messages, most=talker.new_tokens(messages))
        talker.ask(history[-1], most=OPENING)
        edited = [*history[-3][:-1], talker.user()]
        talker.ask(edited, most=talker.new_tokens(edited) + OPENING)
    finally:
        server.close()


def test_eight_clients_with_their_own_conversations_in_four_slots(
    server: ServerProcess, forgetful: ServerProcess
) -> None:
    """Conversations take turns: what a slot gives up comes back from host memory, and nobody gets foreign text."""
    talkers = [Talker(server, forgetful, 10 + i) for i in range(8)]
    conversations: list[Messages] = [
        [{"role": "system", "content": f"NONCE {i} {talker.text(280)}"}, talker.user()]
        for i, talker in enumerate(talkers)
    ]
    for turn in range(3):
        for i, talker in enumerate(talkers):
            most = None if turn == 0 else talker.new_tokens(conversations[i])
            answer = talker.ask(conversations[i], most=most, n=16)
            conversations[i] = extend(conversations[i], answer, talker.user(20))
