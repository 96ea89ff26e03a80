"""Blocks of multi-token prediction in a file of their own: they draft as in the model's file, and belong to one model.

The files are those that `convert-hf-to-gguf` makes with `--no-mtp` and `--mtp`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama import Llama, SpeculationOptions
from pyllama._engine import DraftOrder, Engine, Model, Sampler, Speculator, Work
from pyllama.errors import ModelError
from support import convert_program
from support.checkpoints import CONFIGS, write_checkpoint
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module", params=["qwen35-multimodal-tied", "qwen4exp"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A hybrid with its block of multi-token prediction, without it, and the block alone."""
    folder = write_checkpoint(tmp_path_factory.mktemp("mtp") / "model", CONFIGS[request.param])
    paths = {name: folder.parent / f"{name}.gguf" for name in ("whole", "without", "alone")}
    for name, more in (("whole", ()), ("without", ("--no-mtp",)), ("alone", ("--mtp",))):
        assert convert_program.run(folder, "--outtype", "f32", "--outfile", paths[name], *more) == 0
    return paths


def test_a_block_in_a_file_of_its_own_drafts_as_one_in_the_models(converted: dict[str, Path]) -> None:
    found = []
    for path, arguments in (
        (converted["whole"], {}),
        (converted["without"], {"mtp_file": converted["alone"]}),
        (converted["whole"], {"mtp_file": converted["alone"]}),  # the separate one counts
    ):
        model = Model(path, load_mtp=True, **arguments)
        assert model.n_mtp == 1
        engine = Engine(model, n_ctx=512, n_threads=1)
        speculator, sampler = Speculator(engine, ["draft-mtp"], draft_n_max=4), Sampler(model.n_vocab, temperature=0.0)
        pending, seen = [5, 80, 17, 200, 33, 90, 41], []
        for _ in range(20):
            outputs = engine.step([Work(0, pending, sampler)])
            pending = [outputs[-1].token]
            (draft,) = speculator.draft([DraftOrder(0, pending[0], 4)])
            seen.append((pending[0], draft.tokens))
        found.append(seen)
        engine.close()
        model.close()
    assert found[0] == found[1] == found[2]
    assert all(len(draft) == 4 for _, draft in found[0])


def test_the_types_of_a_drafts_file_and_the_model_go_together(converted: dict[str, Path]) -> None:
    options = SpeculationOptions(draft_model=str(converted["alone"]), infers_type=True).resolved()
    assert options.model_arguments == {"load_mtp": True, "mtp_file": str(converted["alone"])}
    texts = []
    for draft_model in (None, converted["alone"]):
        llama = Llama(str(converted["without"]), n_ctx=256, n_threads=1, draft_model=draft_model, verbose=False)
        texts.append(llama("the world", max_tokens=40, temperature=0.0)["choices"][0]["text"])
        llama.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("converted", ["qwen35-multimodal-tied"], indirect=True)
def test_blocks_of_another_model_are_refused(converted: dict[str, Path], tmp_path: Path) -> None:
    other = write_tiny_hybrid(tmp_path / "other.gguf", n_layer=5, n_mtp=1)
    for mtp_file, message in (
        (other, "do not belong to this model: the number of layers is 5, the model.s 4"),
        (converted["without"], "no blocks of multi-token prediction"),
        (write_tiny_llama(tmp_path / "llama.gguf"), "the architecture is llama, the model's qwen35"),
    ):
        with pytest.raises(ModelError, match=message):
            Model(converted["without"], load_mtp=True, mtp_file=mtp_file)
