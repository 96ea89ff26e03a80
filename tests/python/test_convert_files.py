"""`convert-hf-to-gguf` around the tensors: names, metadata, splits, options."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import Engine, GgufFile, Model
from pyllama.convert.metadata.naming import ModelName, size_label
from support import checkpoints
from support.checkpoints import CONFIGS, added_token, safetensors_bytes, tokenizer_json, write_checkpoint, write_json
from support.convert_program import failure, left_over, run

LLAMA = CONFIGS["llama"]
CARD = """---
license: other
license_name: "my-license"
language:
- en
- 'de'
tags: [chat, "small"]
pipeline_tag: text-generation
base_model: some-org/Base-Model
datasets:
  - org/data  # first
model-index:
- name: ignored
  results: []
---
# A model
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "Tiny-Llama-1M-Chat-v2", LLAMA, dtype="BF16")


def test_output_is_named_after_the_model_its_size_and_type(llama: Path) -> None:
    assert run(llama) == 0
    assert left_over(llama) == ["Tiny-Llama-101K-Chat-v2-BF16.gguf"]
    assert run(llama, "--outtype", "f16", "--outfile", llama.parent / "my-{ftype}-{OUTTYPE}.gguf") == 0
    path = llama.parent / "my-f16-F16.gguf"
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444 & ~_umask()
    (llama.parent / "out").mkdir()
    assert run(llama, "--outfile", llama.parent / "out", "--model-name", "Other Name 90K it") == 0
    assert left_over(llama.parent / "out") == ["Other-Name-90K-it-BF16.gguf"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("TinyLlama-1.1B-Chat-v1.0", ("TinyLlama", "1.1B", "Chat", "v1.0")),
        ("Qwen2.5-0.5B-Instruct", ("Qwen2.5", "0.5B", "Instruct", "")),
        ("Llama-3.2-1B", ("Llama-3.2", "1B", "", "")),
        ("Qwen3-30B-A3B-Thinking-2507", ("Qwen3", "30B-A3B", "Thinking-2507", "")),
        ("Mistral-7B-Instruct-v0.3", ("Mistral", "7B", "Instruct", "v0.3")),
        ("Qwen2.5-Coder-7B-Instruct", ("Qwen2.5-Coder", "7B", "Instruct", "")),
        ("Llama-2-7b-chat-hf", ("Llama-2", "7B", "chat-hf", "")),
        ("gemma-chat", ("gemma", "", "chat", "")),
        ("my model", ("my-model", "", "", "")),
        ("SmolLM2_360M", ("SmolLM2", "360M", "", "")),
    ],
)
def test_names_are_taken_apart(name: str, parts: tuple[str, ...]) -> None:
    assert ModelName.parse(name) == ModelName(*parts)


@pytest.mark.parametrize(
    ("count", "named", "label"),
    [
        (1_100_048_384, "", "1.1B"),
        (134_515_008, "", "135M"),
        (8_030_261_248, "", "8.0B"),
        (8_030_261_248, "8B", "8B"),
        (494_032_768, "0.5B", "0.5B"),
        (494_032_768, "7B", "494M"),
        (90_000, "", "90K"),
        (999, "", "1.0K"),
    ],
)
def test_size_labels(count: int, named: str, label: str) -> None:
    assert size_label(count, named) == label


def test_metadata_comes_from_the_model_card_and_the_generation_settings(llama: Path) -> None:
    (llama / "README.md").write_text(CARD)
    write_json(llama / "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1})
    assert run(llama, "--outfile", llama / "out.gguf") == 0
    metadata = GgufFile(llama / "out.gguf").metadata
    general = {key.removeprefix("general."): value for key, value in metadata.items() if key.startswith("general.")}
    assert general.pop("sampling.temp") == pytest.approx(0.6)
    assert general == {
        "architecture": "llama",
        "type": "model",
        "sampling.top_k": 20,
        "sampling.top_p": 1.0,
        "name": "Tiny Llama 1M Chat v2",
        "version": "v2",
        "finetune": "Chat",
        "basename": "Tiny-Llama",
        "size_label": "101K",
        "license": "other",
        "license.name": "my-license",
        "base_model.count": 1,
        "base_model.0.name": "Base Model",
        "base_model.0.organization": "some-org",
        "base_model.0.repo_url": "https://huggingface.co/some-org/Base-Model",
        "dataset.count": 1,
        "dataset.0.name": "data",
        "dataset.0.organization": "org",
        "dataset.0.repo_url": "https://huggingface.co/datasets/org/data",
        "tags": ["chat", "small", "text-generation"],
        "languages": ["en", "de"],
        "file_type": 32,
        "quantization_version": 2,
    }
    assert [metadata[f"llama.{key}"] for key in ("block_count", "context_length", "vocab_size")] == [2, 256, 304]
    assert metadata["llama.rope.dimension_count"] == 16
    assert "llama.attention.key_length" not in metadata


def test_metadata_file_and_model_name_replace_what_was_found(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = llama / "override.json"
    write_json(
        override,
        {
            "general.author": "Someone",
            "general.tags": ["x"],
            "general.base_models": [{"name": "B"}],
            "general.name": "A",
        },
    )
    assert run(llama, "--metadata", override, "--model-name", "New", "--outfile", llama / "out.gguf") == 0
    metadata = GgufFile(llama / "out.gguf").metadata
    assert [metadata[f"general.{key}"] for key in ("author", "name", "base_model.0.name")] == ["Someone", "New", "B"]
    assert metadata["general.tags"] == ["x"]
    for value in ({"general.file_type": 1}, {"general.tags": "x"}, {"general.base_models": [{"size": "1"}]}):
        write_json(override, value)
        assert next(iter(value)) in failure(capsys, llama, "--metadata", override)


def test_generation_settings_of_a_greedy_model_are_not_written(llama: Path) -> None:
    write_json(llama / "generation_config.json", {"do_sample": False, "temperature": 0.6})
    assert run(llama, "--outfile", llama / "out.gguf") == 0
    assert not any(key.startswith("general.sampling.") for key in GgufFile(llama / "out.gguf").metadata)


@pytest.mark.parametrize("limit", [("--split-max-size", "50K"), ("--split-max-tensors", "5")])
@pytest.mark.parametrize("first", [(), ("--no-tensor-first-split",)])
def test_split_output_loads_and_computes_the_same(llama: Path, limit: tuple[str, str], first: tuple[str, ...]) -> None:
    whole = llama / "whole.gguf"
    assert run(llama, "--outfile", whole) == 0
    assert run(llama, "--outfile", llama / "part.gguf", *limit, *first) == 0
    parts = sorted(llama.glob("part-*-of-*.gguf"))
    assert len(parts) > 2
    assert GgufFile(parts[0], single_file=True).tensors == [] if first else True
    expected, found = GgufFile(whole), GgufFile(parts[0])
    assert [tensor[:3] for tensor in found.tensors] == [tensor[:3] for tensor in expected.tensors]
    for tensor in expected.tensors:
        assert found.tensor_bytes(tensor.name) == expected.tensor_bytes(tensor.name)
    if limit[0] == "--split-max-size":
        assert all(sum(t.n_bytes for t in GgufFile(p, single_file=True).tensors) <= 50_000 for p in parts)
    Model(parts[0]).close()


def test_converted_model_has_a_chat_template_and_runs(llama: Path) -> None:
    assert run(llama, "--outtype", "q8_0", "--outfile", llama / "out.gguf") == 0
    model = Model(llama / "out.gguf", check_tensors=True)
    assert "<|im_start|>" in model.metadata["tokenizer.chat_template"]
    assert model.ftype_label == "Q8_0"
    engine = Engine(model, n_ctx=256)
    engine.decode([5, 6, 7])
    assert np.isfinite(engine.logits()).all()
    engine.close()
    model.close()


def test_indexed_shards_are_read(llama: Path) -> None:
    assert run(llama, "--outfile", llama / "whole.gguf") == 0
    tensors = {name: checkpoints.bf16_bits(values) for name, values in checkpoints.weights(LLAMA).items()}
    names = list(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"model-{index + 1:05d}-of-00002.safetensors"
        (llama / file).write_bytes(safetensors_bytes({name: tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, file)
    (llama / "model.safetensors").unlink()
    write_json(llama / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    assert run(llama, "--outfile", llama / "shards.gguf") == 0
    assert (llama / "shards.gguf").read_bytes() == (llama / "whole.gguf").read_bytes()


def test_dry_run_names_the_files_and_writes_nothing(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llama, "--dry-run", "--split-max-tensors", "15") == 0
    lines = capsys.readouterr().out.splitlines()
    assert left_over(llama) == []
    assert run(llama, "--split-max-tensors", "15") == 0
    written = sorted(llama.glob("*.gguf"))
    sizes = [(path.name, path.stat().st_size) for path in written]
    assert [line.partition(llama.name + "/")[2] for line in lines] == [
        f"{name}: {len(GgufFile(path, single_file=True).tensors)} tensors, {size} bytes"
        for (name, size), path in zip(sizes, written, strict=True)
    ]


def test_vocabulary_alone_needs_no_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert run(llama, "--vocab-only") == 0
    file = GgufFile(llama / "Tiny-Llama-1M-Chat-v2-vocab.gguf")
    assert file.tensors == []
    assert len(file.metadata["tokenizer.ggml.tokens"]) == LLAMA["vocab_size"]
    assert "general.file_type" not in file.metadata


def test_options_without_effect_are_noted(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llama, "--no-lazy", "--use-temp-file", "--dry-run", "--verbose") == 0
    errors = capsys.readouterr().err
    assert "--no-lazy has no effect" in errors
    assert "--use-temp-file has no effect" in errors
    assert "llama.block_count = 2" in errors
    assert "blk.1.ffn_down.weight bf16 [96, 64]" in errors


def test_what_gguf_cannot_say_is_warned_about(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mistral = CONFIGS["mistral"] | {"sliding_window": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    write_json(llama / "config.json", mistral)
    assert run(llama, "--dry-run") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" rope ")[0] for line in lines if "dynamic" in line] == ["warning: dynamic"]
    assert "warning: sliding-window attention has no form in llama files and is left out" in lines


def test_head_size_is_written_where_it_does_not_follow_from_the_width(tmp_path: Path) -> None:
    config = CONFIGS["qwen3-tied"] | {"head_dim": 128}
    folder = write_checkpoint(tmp_path, config)
    write_json(folder / "config.json", config | {"head_dim": None})  # 128 is what the family then means
    assert run(folder, "--outfile", folder / "out.gguf") == 0
    metadata = GgufFile(folder / "out.gguf").metadata
    assert [metadata[f"qwen3.attention.{key}_length"] for key in ("key", "value")] == [128, 128]


def test_added_token_without_an_embedding_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3's text models share the tokenizer of the larger ones, which know one token more."""
    config = CONFIGS["gemma3"]
    description = tokenizer_json()
    description["added_tokens"].append(added_token(config["vocab_size"], "<image>"))
    folder = write_checkpoint(tmp_path, config, tokenizer=description)
    assert run(folder, "--outfile", folder / "out.gguf") == 0
    tokens = GgufFile(folder / "out.gguf").metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == config["vocab_size"]
    assert "<image>" not in tokens
    assert "token 304, '<image>', is beyond the model's vocab_size and is left out" in capsys.readouterr().err


@pytest.mark.parametrize("prefixes", [("language_model.", ""), ("model.language_model.", "model.")], ids=["old", "new"])
def test_text_part_of_a_multimodal_gemma_is_that_of_the_text_model(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    """The configuration leaves out what transformers takes for granted."""
    taken_for_granted = ("hidden_activation", "tie_word_embeddings", "rope_theta", "sliding_window_pattern")
    config = CONFIGS["gemma3"] | {"rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "head_dim": 256}
    folder = write_checkpoint(tmp_path, config)
    assert run(folder, "--outfile", folder / "text.gguf") == 0
    inner = {key: value for key, value in config.items() if key not in (*taken_for_granted, "rms_norm_eps", "head_dim")}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    write_json(folder / "config.json", outer)
    text, vision = prefixes
    tensors = {
        text + (name if text == "language_model." else name.removeprefix("model.")): values
        for name, values in checkpoints.weights(config).items()
    }
    for name in ("vision_tower.vision_model.embeddings.patch_embedding.bias", "multi_modal_projector.mm_input"):
        tensors[vision + name] = np.zeros(3, np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    assert run(folder, "--outfile", folder / "multimodal.gguf") == 0
    assert (folder / "multimodal.gguf").read_bytes() == (folder / "text.gguf").read_bytes()


def test_supported_architectures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--print-supported-models") == 0
    listed = capsys.readouterr().out.split()
    text, multimodal = (
        ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe"),
        ("Qwen3_5", "Qwen3_5Moe", "Qwen4Exp"),
    )
    assert listed == [
        *("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "DSparkDraftModel"),
        *("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel"),
        *("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
        *(f"{name}ForCausalLM" for name in text),
        *(f"{name}For{task}" for name in multimodal for task in ("ConditionalGeneration", "CausalLM")),
    ]
