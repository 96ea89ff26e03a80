"""The engine's contract on a tiny model: steps are all or nothing, sequences share pages, states survive a round trip.

Bit equality across batches and chunks is the subject of test_batch_invariance, right logits that of the oracle tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import Engine, Model, Sampler, Work
from pyllama.errors import ContextFull, InvalidArgument, PyllamaError
from support.tiny_llama import write_tiny_llama

PAGE = 256


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[Model]:
    model = Model(tiny_llama_path)
    yield model
    model.close()


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = Engine(model, n_ctx=4 * PAGE, n_seq_max=3, n_ubatch=64)
    yield engine
    engine.close()


def random_tokens(model: Model, n_tokens: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.n_vocab, n_tokens).tolist()


def greedy(model: Model) -> Sampler:
    return Sampler(model.n_vocab, temperature=0.0)


def last_logits(model: Model, tokens: list[int]) -> np.ndarray:
    engine = Engine(model, n_ctx=4 * PAGE)
    engine.decode(tokens)
    logits = engine.logits()[-1]
    engine.close()
    return logits


def test_step_returns_one_output_per_work_item_with_a_sampler_in_order(model: Model, engine: Engine) -> None:
    outputs = engine.step(
        [
            Work(2, random_tokens(model, 5), greedy(model)),
            Work(0, random_tokens(model, 90)),
            Work(1, random_tokens(model, 7, seed=2), greedy(model)),
        ]
    )
    assert [output.seq_id for output in outputs] == [2, 1]
    assert [engine.length(seq_id) for seq_id in range(3)] == [90, 7, 5]
    assert outputs[0].token == int(np.argmax(last_logits(model, random_tokens(model, 5))))


def test_step_probabilities_are_the_log_softmax_of_the_raw_logits(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 20)
    (output,) = engine.step([Work(0, tokens, greedy(model), 5)])
    logits = last_logits(model, tokens).astype(np.float64)
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = np.argsort(-expected, kind="stable")[:5]
    assert [token for token, _ in output.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in output.top], expected[order], atol=1e-5)
    assert output.logprob == output.top[0][1]


def test_step_with_post_sampling_probabilities_gives_the_chains_candidates(model: Model, engine: Engine) -> None:
    sampler = Sampler(model.n_vocab, temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, seed=5)
    (output,) = engine.step([Work(0, random_tokens(model, 20), sampler, 10, True)])
    assert len(output.top) == 3
    assert sum(value for _, value in output.top) == pytest.approx(1.0, abs=1e-6)
    assert output.logprob == dict(output.top)[output.token]


def test_step_accepts_the_drawn_token_in_the_samplers_history(model: Model, engine: Engine) -> None:
    sampler = Sampler(model.n_vocab, temperature=0.0, repeat_penalty=1e6, samplers=("penalties", "temperature"))
    tokens, seen = random_tokens(model, 4), []
    for _ in range(10):
        (output,) = engine.step([Work(0, tokens, sampler)])
        seen.append(output.token)
        tokens = [output.token]
    assert len(set(seen)) == len(seen)  # every earlier choice is penalised away


def test_several_passes_are_several_steps(model: Model, engine: Engine) -> None:
    def sampler() -> Sampler:
        return Sampler(model.n_vocab, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.3, seed=11)

    prompts = {0: random_tokens(model, 5), 2: random_tokens(model, 9, seed=2)}
    samplers = {seq_id: sampler() for seq_id in prompts}
    one_by_one, pending = [], dict(prompts)
    for _ in range(6):
        for output in engine.step([Work(seq_id, pending[seq_id], samplers[seq_id], 2) for seq_id in pending]):
            one_by_one.append(output)
            pending[output.seq_id] = [output.token]
    for seq_id in prompts:
        engine.clear(seq_id)
    works = [Work(0, prompts[0], sampler(), 2), Work(1, [3, 4]), Work(2, prompts[2], sampler(), 2)]
    assert engine.step(works, 6) == one_by_one
    assert [engine.length(seq_id) for seq_id in range(3)] == [5 + 5, 2, 9 + 5]


def test_passes_end_early_where_the_pool_ends(model: Model) -> None:
    engine = Engine(model, n_ctx=PAGE)
    outputs = engine.step([Work(0, random_tokens(model, PAGE - 2), greedy(model))], 10)
    assert (len(outputs), engine.length(0)) == (3, PAGE)
    with pytest.raises(InvalidArgument, match="n_passes is 0"):
        engine.step([Work(0, [3], greedy(model))], 0)
    engine.close()


def test_a_step_that_does_not_fit_changes_nothing_and_names_the_sequence(model: Model) -> None:
    engine = Engine(model, n_ctx=PAGE, n_seq_max=1)
    engine.decode(random_tokens(model, 200))
    with pytest.raises(ContextFull) as caught:
        engine.step([Work(0, random_tokens(model, 100), greedy(model))])
    assert caught.value.seq_id == 0
    assert engine.length(0) == 200
    engine.step([Work(0, random_tokens(model, 56), greedy(model))])
    assert engine.length(0) == PAGE
    engine.close()


def test_all_sequences_of_a_refused_step_keep_their_lengths(model: Model) -> None:
    engine = Engine(model, n_ctx=2 * PAGE, n_seq_max=2)  # four pages: one more per sequence
    with pytest.raises(ContextFull) as caught:
        engine.step([Work(0, random_tokens(model, 3 * PAGE)), Work(1, random_tokens(model, 2 * PAGE))])
    assert caught.value.seq_id == 1
    assert (engine.length(0), engine.length(1)) == (0, 0)
    assert engine.free_tokens() == 4 * PAGE
    engine.close()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([Work(0, [])], "no tokens"),
        ([Work(0, [3]), Work(0, [4])], "sequence 0 appears twice"),
        ([Work(3, [3])], "sequence"),
        ([Work(-1, [3])], "sequence"),
        ([Work(0, [-1])], "token id -1"),
        ([Work(0, [10**6])], "token id 1000000"),
        ([Work(0, [2**40])], "token id 1099511627776"),
        ([Work(0, [1.5])], "not an integer"),
    ],
)
def test_invalid_work_is_refused_with_its_reason(engine: Engine, work: list[Work], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        engine.step(work)
    assert engine.free_tokens() == 7 * PAGE


def test_a_sampler_of_another_vocabulary_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidArgument, match="vocabulary of 7"):
        engine.step([Work(0, [3], Sampler(7))])


def test_a_fork_shares_pages_until_one_side_writes(model: Model, engine: Engine) -> None:
    prefix = random_tokens(model, PAGE + 40)
    engine.decode(prefix)
    free = engine.free_tokens()
    engine.fork(0, 1, len(prefix))
    assert engine.free_tokens() == free
    branches = {seq_id: random_tokens(model, 9, seed=10 + seq_id) for seq_id in (0, 1)}
    for seq_id, branch in branches.items():
        engine.decode(branch, [seq_id] * len(branch))
        np.testing.assert_array_equal(engine.logits()[-1], last_logits(model, prefix + branch))
    assert engine.free_tokens() == free - PAGE  # the shared tail page was copied once


def test_truncating_and_appending_again_gives_the_same_logits(model: Model, engine: Engine) -> None:
    tokens = random_tokens(model, 2 * PAGE)
    engine.decode(tokens)
    for length in (2 * PAGE - 1, PAGE + 1, PAGE, PAGE - 1, 1):
        engine.truncate(0, length)
        tail = random_tokens(model, 5, seed=length)
        engine.decode(tail)
        np.testing.assert_array_equal(engine.logits()[-1], last_logits(model, tokens[:length] + tail))
        engine.truncate(0, length)


def test_truncating_beyond_the_end_is_refused(engine: Engine) -> None:
    engine.decode([3, 4, 5])
    with pytest.raises(InvalidArgument):
        engine.truncate(0, 4)


def test_clearing_gives_all_pages_back(model: Model, engine: Engine) -> None:
    before = engine.free_tokens()
    engine.decode(random_tokens(model, 600))
    engine.clear(0)
    assert (engine.length(0), engine.free_tokens()) == (0, before)


def test_pretended_tokens_take_room_and_are_gone_on_from(model: Model) -> None:
    engine = Engine(model, n_ctx=768, n_threads=1)
    engine.pretend(0, 600)
    assert engine.length(0) == 600
    engine.decode([1, 2, 3])
    assert engine.length(0) == 603
    with pytest.raises(ContextFull):
        engine.pretend(0, 600)
    engine.close()
    keeping = Engine(model, n_ctx=256, n_threads=1, cache_bytes=1 << 20)
    with pytest.raises(InvalidArgument, match="cache_bytes"):
        keeping.pretend(0, 5)
    keeping.close()


def test_batch_rows_of_several_sequences_may_be_interleaved(model: Model, engine: Engine) -> None:
    a, b = random_tokens(model, 6), random_tokens(model, 6, seed=2)
    tokens = [token for pair in zip(a, b, strict=True) for token in pair]
    engine.decode(tokens, [0, 1] * 6, [False] * 8 + [True] * 4)
    logits = engine.logits()
    assert logits.shape == (4, model.n_vocab)
    np.testing.assert_array_equal(logits[2], last_logits(model, a))
    np.testing.assert_array_equal(logits[3], last_logits(model, b))


def test_a_batch_larger_than_n_batch_is_refused(model: Model) -> None:
    engine = Engine(model, n_ctx=PAGE, n_batch=8)
    with pytest.raises(InvalidArgument, match="n_batch is 8"):
        engine.decode(random_tokens(model, 9))
    engine.close()


@pytest.mark.parametrize("cache_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_a_saved_sequence_continues_identically_in_another_engine(tmp_path: Path, cache_type: str) -> None:
    model = Model(write_tiny_llama(tmp_path / "wide.gguf", head_dim=32))
    tokens, tail = random_tokens(model, PAGE + 20), random_tokens(model, 4, seed=3)
    first = Engine(model, n_ctx=2 * PAGE, type_k=cache_type, type_v=cache_type)
    first.decode(tokens)
    state = first.save_sequence(0)
    first.decode(tail)
    second = Engine(model, n_ctx=3 * PAGE, n_seq_max=2, type_k=cache_type, type_v=cache_type)
    second.load_sequence(1, state)
    assert second.length(1) == len(tokens)
    second.decode(tail, [1] * len(tail))
    np.testing.assert_array_equal(first.logits(), second.logits())


def test_a_state_takes_memory_in_proportion_to_its_tokens(model: Model, engine: Engine) -> None:
    engine.decode(random_tokens(model, 10))
    assert len(engine.save_sequence(0)) < 2 * engine.kv_bytes / 7  # one of seven pages


def test_damaged_or_foreign_states_are_refused_with_the_reason(model: Model, engine: Engine, tmp_path: Path) -> None:
    engine.decode(random_tokens(model, 10))
    state = engine.save_sequence(0)
    other_model = Model(write_tiny_llama(tmp_path / "other.gguf", seed=7))
    other = Engine(other_model, n_ctx=PAGE)
    other.decode([3, 4])
    quantised = Engine(model, n_ctx=PAGE, type_k="f32")
    for target, bad, reason in [
        (engine, state[:-1], "bytes, expected"),
        (engine, state[:20], "truncated"),
        (engine, b"", "truncated"),
        (engine, b"x" + state[1:], "mark"),
        (engine, state[:4] + b"\x09" + state[5:], "version"),
        (engine, other.save_sequence(0), "another model"),
        (quantised, state, "other KV cache types"),
    ]:
        with pytest.raises(InvalidArgument, match=reason):
            target.load_sequence(0, bad)
        assert target.length(0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_ctx": -1}, "n_ctx is -1"),
        ({"n_seq_max": 0}, "n_seq_max is 0"),
        ({"n_batch": 0}, "n_batch is 0"),
        ({"n_ubatch": 0}, "n_ubatch is 0"),
        ({"n_threads": -1}, "n_threads is -1"),
        ({"type_k": "q9_9"}, "q9_9"),
        ({"type_v": "q6_K"}, "q6_K"),
        ({"type_k": "q8_0"}, "multiple of 32"),  # this model's heads have 16 features
        ({"rope_scaling_type": "spiral"}, "spiral"),
        ({"rope_freq_scale": -2.0}, "rope frequency scale"),
    ],
)
def test_engine_arguments_out_of_range_are_named(model: Model, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Engine(model, **{"n_ctx": PAGE, **arguments})


def test_context_zero_takes_the_training_length_rounded_to_pages(tmp_path: Path) -> None:
    model = Model(write_tiny_llama(tmp_path / "short.gguf", n_ctx_train=300))
    assert Engine(model, n_ctx=0).n_ctx == 512


def test_closed_objects_raise_and_an_engine_outlives_its_models_close(tiny_llama_path: Path) -> None:
    model = Model(tiny_llama_path)
    engine = Engine(model, n_ctx=PAGE)
    model.close()
    model.close()
    engine.decode([3, 4])
    with pytest.raises(PyllamaError, match="model is closed"):
        Engine(model, n_ctx=PAGE)
    engine.close()
    engine.close()
    with pytest.raises(PyllamaError, match="engine is closed"):
        engine.decode([3])


def test_closing_while_another_thread_computes_is_safe(model: Model) -> None:
    for _ in range(5):
        engine = Engine(model, n_ctx=4 * PAGE, n_ubatch=32)
        tokens = random_tokens(model, 900)
        thread = threading.Thread(target=engine.decode, args=(tokens,))
        thread.start()
        engine.close()
        thread.join()


def test_threads_calling_one_engine_queue(model: Model) -> None:
    engine = Engine(model, n_ctx=4 * PAGE, n_seq_max=4)
    expected = last_logits(model, random_tokens(model, 30, seed=9))
    wrong: list[int] = []

    def use(seq_id: int) -> None:
        for _ in range(20):
            (output,) = engine.step([Work(seq_id, random_tokens(model, 30, seed=9), greedy(model))])
            if output.token != int(np.argmax(expected)):
                wrong.append(seq_id)
            engine.clear(seq_id)

    threads = [threading.Thread(target=use, args=(seq_id,)) for seq_id in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    engine.close()
