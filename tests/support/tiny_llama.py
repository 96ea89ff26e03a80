"""Writes tiny random-weight `llama` GGUF files: deterministic weights, byte-level vocabulary, chat template.

The default (2 layers, width 64, 4 query and 2 KV heads, 300 tokens, F32) takes about 0.5 MB. Weight scales are chosen
so that attention scores and logits are not flat; a wrong weight or position shows in the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = 0, 1, 2

# Pairs joined in this order, written in plain text; a space becomes the byte-level space character.
MERGES = (
    ("t", "h"), ("th", "e"), (" ", "t"), (" ", "the"), ("i", "n"), ("e", "r"), (" ", "a"), ("a", "n"), ("an", "d"),
    ("r", "e"), ("o", "n"), ("e", "s"), ("a", "t"), ("o", "u"), ("y", "ou"), ("h", "e"), ("l", "l"), ("he", "ll"),
    ("hell", "o"), ("in", "g"), (" ", "w"), ("o", "r"), ("l", "d"), (" w", "or"), (" wor", "ld"), ("a", "s"),
    ("u", "s"), ("us", "er"), ("as", "s"), ("i", "s"), ("i", "t"), (" ", "i"), (" ", "s"), ("e", "n"), ("e", "d"),
    (" ", "f"), (" ", "o"), (" ", "c"), (" ", "m"), (" ", "b"), (" ", "d"),
)  # fmt: skip


MetadataValue = int | float | bool | str | list[bool] | list[int] | list[str]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]  # in the byte-level alphabet of GPT-2
    types: list[int]  # gguf.TokenType per token
    merges: list[str]


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where printable, else U+0100, U+0101, ..."""
    printable = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    stand_in = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_in)) for byte in range(256)]


def byte_level_vocabulary() -> Vocabulary:
    """Special tokens first (ids 0-2), then the 256 bytes (id 3 + byte), then one token per merge."""
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    merges = [(left.replace(" ", space), right.replace(" ", space)) for left, right in MERGES]
    tokens = [*SPECIAL_TOKENS, *alphabet]
    known = set(tokens)
    for left, right in merges:
        if left not in known or right not in known:
            raise ValueError(f"merge {left!r} + {right!r} uses a piece that no earlier merge made")
        tokens.append(left + right)
        known.add(left + right)
    types = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL_TOKENS))
    return Vocabulary(tokens, [int(value) for value in types], [f"{left} {right}" for left, right in merges])


# Byte offsets of the f16 scale and, where the type has one, the f16 minimum in a block; the second number of the
# minimum is its ratio to the scale that centres random quants near zero. Everything else in the block may be any bits.
_SUPER_BLOCK_SCALES: dict[str, tuple[int, tuple[int, float] | None]] = {
    "q2_k": (80, (82, 1.5)),
    "q3_k": (108, None),
    "q4_k": (0, (2, 7.5)),
    "q5_k": (0, (2, 15.5)),
    "q6_k": (208, None),
    "iq1_s": (0, None),
    "iq2_xxs": (0, None),
    "iq2_xs": (0, None),
    "iq2_s": (0, None),
    "iq3_xxs": (0, None),
    "iq3_s": (0, None),
    "iq4_nl": (0, None),
    "iq4_xs": (0, None),
}


def encode_random(
    rng: np.random.Generator, shape: tuple[int, int], std: float, type_name: str
) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
    """A random matrix `[rows, columns]` of the given spread, stored as `type_name` (``f32``, ``q4_0``, ``q6_k``, ...).

    Types the `gguf` package can encode are encoded from normal values; K types get random quant bits and a fitting
    scale.
    """
    quant_type = gguf.GGMLQuantizationType[type_name.upper()]
    if type_name not in _SUPER_BLOCK_SCALES:
        values = (rng.standard_normal(shape) * std).astype(np.float32)
        if type_name in ("f32", "f16"):
            return values.astype(np.float32 if type_name == "f32" else np.float16), quant_type
        return gguf.quants.quantize(values, quant_type), quant_type
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
    if shape[1] % block_size:
        raise ValueError(f"{type_name} needs columns in multiples of {block_size}, found {shape[1]}")
    scale_at, minimum = _SUPER_BLOCK_SCALES[type_name]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block_size, block_bytes), dtype=np.uint8)

    def set_scale(scale: float) -> None:
        blocks[:, scale_at : scale_at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        if minimum is not None:
            at, ratio = minimum
            blocks[:, at : at + 2] = np.frombuffer(np.float16(scale * ratio).tobytes(), np.uint8)

    set_scale(1.0)
    set_scale(std / float(np.std(gguf.quants.dequantize(blocks, quant_type))))
    return blocks.reshape(shape[0], -1), quant_type


class ModelWriter:
    """A GGUF file with the tiny vocabulary and random tensors, in the order they are asked for.

    keys: int is stored as u32. n_vocab: tokens, with unused ones behind the vocabulary; 0: none. weight_type and
    tensor_types: see `write_tiny_llama`.
    """

    def __init__(
        self,
        path: Path | str,
        architecture: str,
        keys: Mapping[str, MetadataValue],
        *,
        weight_type: str = "f32",
        tensor_types: Mapping[str, str] | None = None,
        n_vocab: int = 0,
        seed: int,
    ) -> None:
        self.path = Path(path)
        self._weight_type = weight_type
        self._overrides = sorted((tensor_types or {}).items(), key=lambda item: -len(item[0]))
        self._rng = np.random.default_rng(seed)
        self._writer = gguf.GGUFWriter(self.path, architecture)
        self.add_keys(keys)
        vocabulary = byte_level_vocabulary()
        n_unused = max(0, n_vocab - len(vocabulary.tokens))
        self.n_vocab = len(vocabulary.tokens) + n_unused
        self._writer.add_token_list([*vocabulary.tokens, *(f"<unused{i}>" for i in range(n_unused))])
        self._writer.add_token_types([*vocabulary.types, *[gguf.TokenType.UNUSED] * n_unused])
        self._writer.add_token_merges(vocabulary.merges)

    def add_keys(self, keys: Mapping[str, MetadataValue]) -> None:
        for key, value in keys.items():
            if isinstance(value, bool):
                self._writer.add_bool(key, value)
            elif isinstance(value, int):
                self._writer.add_uint32(key, value)
            elif isinstance(value, float):
                self._writer.add_float32(key, value)
            elif isinstance(value, str):
                self._writer.add_string(key, value)
            else:
                self._writer.add_array(key, value)

    def add_array(self, key: str, values: Sequence[int], element_type: gguf.GGUFValueType) -> None:
        self._writer.add_key_value(key, values, gguf.GGUFValueType.ARRAY, element_type)

    @property
    def rng(self) -> np.random.Generator:
        return self._rng

    def matrix(self, name: str, rows: int, columns: int, std: float) -> None:
        self.experts(name, 0, rows, columns, std)

    def experts(self, name: str, count: int, rows: int, columns: int, std: float) -> None:
        """`count` matrices in one tensor; 0: a single matrix."""
        type_name = next((value for suffix, value in self._overrides if name.endswith(suffix)), self._weight_type)
        data, quant_type = encode_random(self._rng, (max(1, count) * rows, columns), std, type_name)
        shape = (count, rows, data.shape[1]) if count else data.shape
        self._writer.add_tensor(name, data.reshape(shape), raw_dtype=quant_type)

    def router(self, name: str, rows: int, columns: int, std: float) -> None:
        """A matrix that is F32 in files of every type."""
        self.values(name, std * self._rng.standard_normal((rows, columns)))

    def vector(self, name: str, size: int, mean: float, std: float) -> None:
        self.values(name, mean + std * self._rng.standard_normal(size))

    def values(self, name: str, values: Sequence[float] | NDArray[Any]) -> None:
        self._writer.add_tensor(name, np.asarray(values, np.float32))

    def integers(self, name: str, values: Sequence[int]) -> None:
        self._writer.add_tensor(name, np.asarray(values, np.int64))

    def close(self) -> Path:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        return self.path


def common_keys(
    architecture: str,
    *,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    n_ff: int,
    n_ctx_train: int,
    rope_freq_base: float,
    weight_type: str,
) -> dict[str, MetadataValue]:
    """Hyperparameters that every text architecture has, and the tokenizer's keys besides the vocabulary."""
    keys: dict[str, MetadataValue] = {
        "general.name": f"tiny random {architecture}",
        f"{architecture}.context_length": n_ctx_train,
        f"{architecture}.embedding_length": n_embd,
        f"{architecture}.block_count": n_layer,
        f"{architecture}.feed_forward_length": n_ff,
        f"{architecture}.attention.head_count": n_head,
        f"{architecture}.attention.head_count_kv": n_head_kv,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": rope_freq_base,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": IM_START,
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.unknown_token_id": ENDOFTEXT,
        "tokenizer.ggml.padding_token_id": IM_END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    member = "ALL_F32" if weight_type == "f32" else f"MOSTLY_{weight_type.upper()}"
    if member in gguf.LlamaFileType.__members__:
        keys |= {"general.file_type": int(gguf.LlamaFileType[member]), "general.quantization_version": 2}
    return keys


def write_tiny_llama(
    path: Path | str,
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int = 128,
    n_ctx_train: int = 2048,
    rope_freq_base: float = 10000.0,
    weight_type: str = "f32",
    tensor_types: Mapping[str, str] | None = None,
    tied: bool = False,
    fused_qkv: bool = False,
    qkv_bias: bool = False,
    rope_freqs: Sequence[float] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    metadata: Mapping[str, MetadataValue] | None = None,
    seed: int = 20260101,
) -> Path:
    """Write the model and return its path. The same arguments give the same bytes.

    weight_type: type of every matrix. tensor_types: overrides by the end of the name, e.g. ``{"ffn_down.weight":
    "q6_k"}``; the longest match wins. head_dim: width of a head when it is not n_embd / n_head. tied: no
    `output.weight`. rope_freqs: divisors, head_dim / 2 of them. metadata: further keys (int is stored as u32), which
    replace those written here.
    """
    explicit_head_dim = head_dim is not None
    head_dim = head_dim if head_dim is not None else n_embd // n_head
    keys = common_keys(
        "llama",
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=n_ff,
        n_ctx_train=n_ctx_train,
        rope_freq_base=rope_freq_base,
        weight_type=weight_type,
    )
    keys |= {"llama.rope.dimension_count": head_dim, "llama.vocab_size": len(byte_level_vocabulary().tokens)}
    if explicit_head_dim:
        keys |= {"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim}
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    keys |= dict(metadata or {})

    writer = ModelWriter(path, "llama", keys, weight_type=weight_type, tensor_types=tensor_types, seed=seed)
    n_vocab = writer.n_vocab
    q_rows, kv_rows = n_head * head_dim, n_head_kv * head_dim
    q_std = 1.6 / n_embd**0.5  # scores of spread 2.5 after 1/sqrt(head_dim)
    writer.matrix("token_embd.weight", n_vocab, n_embd, 2.4 / n_embd**0.5)
    writer.vector("output_norm.weight", n_embd, 1.0, 0.1)
    if not tied:
        writer.matrix("output.weight", n_vocab, n_embd, 2.4 / n_embd**0.5)  # logits of spread 2.4
    if rope_freqs is not None:
        if len(rope_freqs) != head_dim // 2:
            raise ValueError(f"rope_freqs: {len(rope_freqs)} divisors, expected {head_dim // 2}")
        writer.values("rope_freqs.weight", rope_freqs)
    for layer in range(n_layer):
        block = f"blk.{layer}."
        writer.vector(block + "attn_norm.weight", n_embd, 1.0, 0.1)
        if fused_qkv:
            writer.matrix(block + "attn_qkv.weight", q_rows + 2 * kv_rows, n_embd, q_std)
        else:
            writer.matrix(block + "attn_q.weight", q_rows, n_embd, q_std)
            writer.matrix(block + "attn_k.weight", kv_rows, n_embd, q_std)
            writer.matrix(block + "attn_v.weight", kv_rows, n_embd, 1.0 / n_embd**0.5)
        if qkv_bias:
            for name, size in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                writer.vector(f"{block}attn_{name}.bias", size, 0.0, 0.2)
        writer.matrix(block + "attn_output.weight", n_embd, q_rows, 1.0 / q_rows**0.5)
        writer.vector(block + "ffn_norm.weight", n_embd, 1.0, 0.1)
        writer.matrix(block + "ffn_gate.weight", n_ff, n_embd, 1.5 / n_embd**0.5)
        writer.matrix(block + "ffn_up.weight", n_ff, n_embd, 1.0 / n_embd**0.5)
        writer.matrix(block + "ffn_down.weight", n_embd, n_ff, 1.0 / n_ff**0.5)
    return writer.close()
