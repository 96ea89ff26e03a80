"""`POST /slots/{id}?action=...` on the real engine and a tiny model: what a file gives back, what is refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import EngineServer

from pyllama.options import parse
from pyllama.server.settings import SettingsError, settings_from_options
from support.tiny_llama import write_tiny_llama

pytest.importorskip("pyllama._engine", reason="needs the native module")

BAD_NAMES = (
    "",
    ".",
    "..",
    "../a",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "c:a",
    "a\0b",
    ".slot-x",
    "x" * 300,
    "é" * 200,
    7,
    None,
)
PROMPT = "the world is the hello of all you and the rest " * 8


@pytest.fixture
def start(tiny_llama_path: Path, tmp_path: Path) -> Iterator[Callable[..., EngineServer]]:
    """`start(*arguments, model=...)`: a server whose slot files are in `tmp_path / "slots"`."""
    (tmp_path / "slots").mkdir()
    servers: list[EngineServer] = []

    def start_one(*arguments: str, model: Path = tiny_llama_path, **options: Any) -> EngineServer:
        servers.append(EngineServer(model, "--slot-save-path", str(tmp_path / "slots"), *arguments, **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def message(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.contract("slot_save 7")
def test_a_restored_slot_goes_on_as_if_it_had_never_been_gone(
    start: Callable[..., EngineServer], tmp_path: Path
) -> None:
    server = start()
    first = server.complete(PROMPT, 0)
    saved = server.act(0, "save", filename="a.bin").json()
    n_held = first["tokens_cached"]
    assert list(saved) == ["id_slot", "filename", "n_saved", "n_written", "timings"]
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "a.bin", n_held)
    assert saved["n_written"] == (tmp_path / "slots" / "a.bin").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    assert [path.name for path in (tmp_path / "slots").iterdir()] == ["a.bin"]
    warm = server.complete(PROMPT + "again", 0)

    restarted = start()
    restored = restarted.act(1, "restore", filename="a.bin").json()
    assert list(restored) == ["id_slot", "filename", "n_restored", "n_read", "timings"]
    assert (restored["id_slot"], restored["n_restored"]) == (1, n_held)
    assert restored["n_read"] == saved["n_written"]
    assert restored["timings"]["restore_ms"] > 0
    after = restarted.complete(PROMPT + "again", 1)
    assert after["content"] == warm["content"]
    assert after["timings"]["cache_n"] == warm["timings"]["cache_n"] > 30
    assert after["timings"]["prompt_n"] == warm["timings"]["prompt_n"]


@pytest.mark.contract("slot_save 3")
def test_erase_makes_the_slot_forget(start: Callable[..., EngineServer]) -> None:
    server = start("--slot-prompt-similarity", "0")
    first = server.complete(PROMPT, 1)
    assert server.act(1, "erase").json() == {"id_slot": 1, "n_erased": first["tokens_cached"]}
    assert server.act(1, "erase").json() == {"id_slot": 1, "n_erased": 0}
    assert server.complete(PROMPT, 1)["timings"]["cache_n"] == 0


@pytest.mark.contract("slot_save 1")
def test_a_file_goes_into_another_slot_and_the_slots_keep_their_own_texts(start: Callable[..., EngineServer]) -> None:
    server = start("--slot-prompt-similarity", "0")
    common = PROMPT + "The capital of "
    france, germany = common + "you and the rest", common + "all of hello world"
    first = server.complete(france, 1)
    n_prompt = first["timings"]["prompt_n"]
    held = first["tokens_cached"]
    assert server.act(1, "save", filename="france").json()["n_saved"] == held
    second = server.complete(germany, 1)["timings"]
    assert 0 < second["prompt_n"] < n_prompt
    assert server.act(0, "restore", filename="france").json()["n_restored"] == held
    in_other = server.complete(germany, 0)["timings"]
    assert in_other["prompt_n"] <= second["prompt_n"]
    assert in_other["prompt_n"] + in_other["cache_n"] == second["prompt_n"] + second["cache_n"]
    assert server.complete(germany, 1)["timings"]["prompt_n"] == 1


@pytest.mark.contract("slot_save 2")
@pytest.mark.parametrize("words", [[5, 6, 7], [0xFFFFFFFF, 1, 2, 5, 6, 0]])
def test_files_of_llama_server_are_refused_and_say_what_they_are_not(
    start: Callable[..., EngineServer], tmp_path: Path, words: list[int]
) -> None:
    """Its header is magic, version and the number of words; a plain list of tokens in old files."""
    server = start()
    state = np.array([0x67677371, 2, len(words), *words], "<u4").tobytes() + bytes(4096)
    (tmp_path / "slots" / "theirs").write_bytes(state)
    server.complete(PROMPT, 0)
    answer = server.act(0, "restore", filename="theirs")
    assert message(answer, 400) == "Unable to restore slot: invalid file: it is not a slot file"
    assert server.act(0, "erase").json()["n_erased"] == 0


@pytest.mark.contract("kv_keep 1", "kv_keep 2")
@pytest.mark.parametrize("option", ["--cache-idle-slots", "--no-cache-idle-slots"])
def test_what_an_idle_slot_held_is_reused_on_another(start: Callable[..., EngineServer], option: str) -> None:
    server = start("--kv-unified", "--cache-ram", "100", option)
    first = server.complete(PROMPT, 0)
    server.complete("something else altogether", 1)
    again = server.complete(PROMPT, 1)
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] > 0
    assert again["timings"]["prompt_n"] < first["timings"]["prompt_n"]
    longer = server.complete(PROMPT + "and more", 1)["timings"]
    assert longer["cache_n"] >= first["timings"]["prompt_n"] - 1


def test_an_empty_slot_can_be_saved_and_restored(start: Callable[..., EngineServer]) -> None:
    server = start("--cache-ram", "0")
    assert server.act(0, "save", filename="empty").json()["n_saved"] == 0
    server.complete(PROMPT, 1)
    assert server.act(1, "restore", filename="empty").json()["n_restored"] == 0
    assert server.complete(PROMPT, 1)["timings"]["cache_n"] == 0


def test_the_slot_is_taken_modulo_the_number_of_slots(start: Callable[..., EngineServer]) -> None:
    server = start()
    assert server.act(3, "erase").json()["id_slot"] == 1
    assert server.act(-1, "erase").json()["id_slot"] == 1


def test_a_busy_slot_delays_the_action_until_it_is_free(start: Callable[..., EngineServer]) -> None:
    server = start()
    answers: list[dict[str, Any]] = []  # of the busy request only: whose answer arrives first is open
    thread = threading.Thread(target=lambda: answers.append(server.complete(PROMPT, 0, n_predict=1500)))
    thread.start()
    deadline = time.monotonic() + 10
    while server.state.loaded.engine_loop.slots[0].generation is None:
        assert time.monotonic() < deadline
    queued = threading.Thread(target=lambda: server.complete("hello", 0))
    queued.start()
    saved = server.act(0, "save", filename="busy").json()
    thread.join()
    queued.join()
    assert saved["n_saved"] == answers[0]["tokens_cached"]


@pytest.mark.contract("own 30")
@pytest.mark.parametrize(
    ("slot", "action", "name", "words"),
    [
        ("x", "save", "a", "Invalid slot ID"),
        ("1e1", "save", "a", "Invalid slot ID"),
        ("--1", "save", "a", "Invalid slot ID"),
        ("0", "copy", "a", "Invalid action"),
        ("0", "", "a", "Invalid action"),
        *(("0", action, name, "Invalid filename") for action in ("save", "restore") for name in BAD_NAMES),
    ],
)
def test_bad_requests_are_refused(
    start: Callable[..., EngineServer], tmp_path: Path, slot: str, action: str, name: Any, words: str
) -> None:
    assert message(start().act(slot, action, filename=name), 400) == words
    assert list((tmp_path / "slots").iterdir()) == []


def test_links_do_not_lead_out_of_the_folder(start: Callable[..., EngineServer], tmp_path: Path) -> None:
    server = start()
    server.complete(PROMPT, 0)
    server.act(0, "save", filename="a")
    outside = (tmp_path / "slots" / "a").rename(tmp_path / "outside")
    before = outside.read_bytes()
    (tmp_path / "slots" / "link").symlink_to(outside)
    server.complete("other", 0)
    assert message(server.act(0, "save", filename="link"), 400) == "Invalid filename"
    assert message(server.act(0, "restore", filename="link"), 400) == "Invalid filename"
    assert outside.read_bytes() == before


def test_what_is_not_a_readable_file_is_refused_at_once(start: Callable[..., EngineServer], tmp_path: Path) -> None:
    server = start()
    os.mkfifo(tmp_path / "slots" / "pipe")
    (tmp_path / "slots" / "folder").mkdir()
    assert "not a regular file" in message(server.act(0, "restore", filename="pipe"), 400)
    assert message(server.act(0, "restore", filename="folder"), 400).startswith("Unable to restore slot: ")
    assert "No such file" in message(server.act(0, "restore", filename="missing"), 400)
    assert message(server.act(0, "save", filename="folder"), 500) == "Unable to save slot"


def test_truncated_and_damaged_files_are_refused_and_leave_an_empty_slot(
    start: Callable[..., EngineServer], tmp_path: Path
) -> None:
    server = start("--slot-prompt-similarity", "0")
    server.complete(PROMPT, 0)
    server.act(0, "save", filename="a")
    path = tmp_path / "slots" / "a"
    good = path.read_bytes()
    faults = {
        b"": "not a slot file",
        b"GGUF" + good[4:]: "not a slot file",
        good[:8] + b"\x09" + good[9:]: "version",
        good[:-1]: "truncated",
        good[: len(good) // 2]: "truncated",
        good + b"\0": "truncated or damaged",
        good[:100] + bytes([good[100] ^ 1]) + good[101:]: "damaged",
    }
    for content, words in faults.items():
        server.complete(PROMPT, 0)
        path.write_bytes(content)
        text = message(server.act(0, "restore", filename="a"), 400)
        assert text.startswith("Unable to restore slot: ")
        assert words in text
        assert server.act(0, "erase").json()["n_erased"] == 0
    path.write_bytes(good)
    assert server.act(0, "restore", filename="a").status_code == 200


def test_files_of_another_model_quantisation_cache_type_build_or_setting_are_refused(
    start: Callable[..., EngineServer], tmp_path: Path
) -> None:
    server = start()
    server.complete(PROMPT, 0)
    server.act(0, "save", filename="a")
    others = [
        (start(model=write_tiny_llama(tmp_path / "other.gguf", seed=7)), "another model"),
        (start(model=write_tiny_llama(tmp_path / "q8.gguf", weight_type="q8_0")), "another model, quantisation"),
        (start("-ctk", "f32"), "other KV cache types"),
        (start("--rope-freq-base", "5000"), "another RoPE setting"),
        (start("--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.01"), "another --override-kv"),
        (start(build_info="b2-other"), "another build: b1-test, here b2-other"),
    ]
    for other, words in others:
        assert words in message(other.act(0, "restore", filename="a"), 400)


def test_a_text_longer_than_the_slot_is_refused(start: Callable[..., EngineServer]) -> None:
    server = start()
    n_tokens = len(server.client.post("/tokenize", json={"content": PROMPT * 4}).json()["tokens"])
    assert n_tokens > 512
    server.complete(PROMPT * 4, 0)
    assert server.act(0, "save", filename="long").json()["n_saved"] > n_tokens
    assert "do not fit the slot's context of 256" in message(start("-c", "512").act(0, "restore", filename="long"), 400)


def test_idle_slots_forget_their_tokens_when_a_restored_text_needs_the_room(start: Callable[..., EngineServer]) -> None:
    server = start("-np", "3", "-kvu", "--slot-prompt-similarity", "0")
    for slot in range(3):
        server.complete([60 + slot] * 900, slot, n_predict=1)  # each fits, all three do not
        assert server.act(slot, "save", filename=str(slot)).json()["n_saved"] == 900
    for slot in range(3):
        assert server.act(slot, "restore", filename=str(slot)).json()["n_restored"] == 900
    held = [len(slot.tokens) for slot in server.state.loaded.engine_loop.slots]
    assert held[2] == 900
    assert sorted(held) == [0, 900, 900]


@pytest.mark.contract("own 30")
def test_slot_files_need_their_folder(tiny_llama_path: Path, tmp_path: Path) -> None:
    server = EngineServer(tiny_llama_path)
    try:
        assert "--slot-save-path" in message(server.act(0, "save", filename="a"), 501)
        assert server.client.get("/slots/0").status_code == 404
    finally:
        server.close()
    options = parse("llama-server", ["--slot-save-path", str(tmp_path / "missing")], {}, config_files=())
    with pytest.raises(SettingsError, match="no directory"):
        settings_from_options(options, "m")
