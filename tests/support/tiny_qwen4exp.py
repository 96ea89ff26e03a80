"""Writes tiny random-weight `qwen4exp` GGUF files: four residual streams, sparse attention, n-gram memory, experts.

As in `tiny_llama`, weight scales are chosen so that gates, block scores, router and logits are not flat; the sparse
budget is small, so that a few dozen tokens go beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from pyllama.gguf.reader import TensorReader
from pyllama.gguf.writer import DEFAULT_ALIGNMENT, TensorSpec, encoded_header
from support.tiny_llama import CHAT_TEMPLATE, IM_END, MetadataValue, ModelWriter, common_keys

EOS = IM_END  # cuts n-grams; the text tokens of the tests are above it
KEY = "qwen4exp."
TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True, slots=True)
class NgramMemory:
    """The hashed table of one layer: `heads` rows for each n-gram of 2 to `ngram_size` tokens."""

    layer: int = 0
    ngram_size: int = 3
    heads: int = 2
    conv_kernel: int = 4
    eos: int = EOS
    multipliers: Sequence[int] = (23703573157769, 20109073645365, 8052911324071)
    vocab_sizes: Sequence[int] = (101, 103, 107, 109)
    table_rows: int = 512  # at least their sum; files are padded
    row_features: int = 0  # 0: so many that the rows of a token together are as wide as the model

    @property
    def n_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads

    @property
    def offsets(self) -> list[int]:
        return [sum(self.vocab_sizes[:head]) for head in range(self.n_heads)]


@dataclass(frozen=True, slots=True)
class TinyQwen4Exp:
    """Shape of the model. Layers with `(i + 1) % interval == 0` attend, the others are delta nets."""

    n_layer: int = 4
    interval: int = 2
    n_embd: int = 64
    n_streams: int = 4
    low_rank: int = 32
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_rot: int = 16
    sections: Sequence[int] = (3, 3, 2, 0)
    index_heads: int = 8  # so many that hardly a block scores exactly 0, where the choice would be a matter of taste
    index_dim: int = 32
    block: int = 4
    top_k: int = 32  # tokens
    key_heads: int = 2
    value_heads: int = 4
    state: int = 16
    conv_kernel: int = 4
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff: int = 32  # of an expert
    n_ff_shared: int = 64
    memory: NgramMemory | None = field(default_factory=NgramMemory)
    mtp: bool = False
    logit_std: float = 2.0  # roughly

    def recurrent(self, layer: int) -> bool:
        return layer < self.n_layer and (layer + 1) % self.interval != 0

    @property
    def row_features(self) -> int:
        return (self.memory.row_features or self.n_embd // self.memory.n_heads) if self.memory else 0

    @property
    def n_block(self) -> int:
        return self.n_layer + self.mtp


def write_tiny_qwen4exp(
    path: Path | str,
    shape: TinyQwen4Exp | None = None,
    *,
    weight_type: str = "f32",
    tensor_types: Mapping[str, str] | None = None,
    fused_gate_up: bool = False,
    metadata: Mapping[str, MetadataValue] | None = None,
    table: bool = True,
    seed: int = 20260103,
) -> Path:
    """Write the model and return its path. The same arguments give the same bytes.

    fused_gate_up: one `ffn_gate_up_exps` per layer. table: False leaves out the n-gram table (see `add_sparse_table`).
    Other arguments as for `write_tiny_llama`.
    """
    m = shape or TinyQwen4Exp()
    keys = common_keys(
        "qwen4exp",
        n_layer=m.n_block,
        n_embd=m.n_embd,
        n_head=m.n_head,
        n_head_kv=m.n_head_kv,
        n_ff=m.n_ff,
        n_ctx_train=2048,
        rope_freq_base=10_000.0,
        weight_type=weight_type,
    )
    keys |= {
        "tokenizer.chat_template": CHAT_TEMPLATE,
        KEY + "attention.layer_norm_rms_epsilon": 1e-6,
        KEY + "attention.key_length": m.head_dim,
        KEY + "attention.value_length": m.head_dim,
        KEY + "rope.dimension_count": m.n_rot,
        KEY + "rope.dimension_sections": list(m.sections),
        KEY + "full_attention_interval": m.interval,
        KEY + "ssm.conv_kernel": m.conv_kernel,
        KEY + "ssm.state_size": m.state,
        KEY + "ssm.group_count": m.key_heads,
        KEY + "ssm.time_step_rank": m.value_heads,
        KEY + "ssm.inner_size": m.value_heads * m.state,
        KEY + "expert_count": m.n_expert,
        KEY + "expert_used_count": m.n_expert_used,
        KEY + "expert_feed_forward_length": m.n_ff,
        KEY + "expert_shared_feed_forward_length": m.n_ff_shared,
        KEY + "hyper_connection.count": m.n_streams,
        KEY + "hyper_connection.low_rank": m.low_rank,
        KEY + "attention.indexer.head_count": m.index_heads,
        KEY + "attention.indexer.key_length": m.index_dim,
        KEY + "attention.indexer.top_k": m.top_k,
        KEY + "attention.compress_ratios": [0 if m.recurrent(layer) else m.block for layer in range(m.n_block)],
    }
    if m.mtp:
        keys[KEY + "nextn_predict_layers"] = 1
    if m.memory:
        keys |= {
            KEY + "ple.layers": [m.memory.layer],
            KEY + "ple.ngram_size": m.memory.ngram_size,
            KEY + "ple.heads_per_ngram": m.memory.heads,
            KEY + "ple.conv_kernel": m.memory.conv_kernel,
            KEY + "ple.eos_token_id": m.memory.eos,
            KEY + "embedding_length_per_layer_input": m.row_features,
        }
    keys |= dict(metadata or {})
    writer = ModelWriter(path, "qwen4exp", keys, weight_type=weight_type, tensor_types=tensor_types, seed=seed)
    if m.memory:
        for name, values in (
            ("layer_multipliers", m.memory.multipliers),
            ("head_offsets", m.memory.offsets),
            ("head_vocab_sizes", m.memory.vocab_sizes),
        ):
            writer.add_array(f"{KEY}ple.{name}", list(values), gguf.GGUFValueType.UINT64)
    _write_tensors(writer, m, fused_gate_up=fused_gate_up, table=table)
    return writer.close()


def add_sparse_table(source: Path, target: Path, n_rows: int, rows: Mapping[int, NDArray[np.float32]]) -> Path:
    """Copy a file without n-gram table and give it one of F32 that is a hole but for the given rows."""
    features = len(next(iter(rows.values())))
    with TensorReader(source) as reader, target.open("wb") as file:
        specs = [*(TensorSpec.of(tensor) for tensor in reader.tensors), TensorSpec(TABLE, "f32", (features, n_rows))]
        file.write(encoded_header(reader.file.key_values, specs))
        for tensor in reader.tensors:
            file.seek(-(-file.tell() // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT)
            file.write(reader.read(tensor, 0, tensor.n_bytes))
        start = -(-file.tell() // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        for row, values in rows.items():
            file.seek(start + row * features * 4)
            file.write(np.asarray(values, "<f4").tobytes())
        file.truncate(start + n_rows * features * 4)
    return target


def _write_tensors(writer: ModelWriter, m: TinyQwen4Exp, *, fused_gate_up: bool, table: bool) -> None:
    wide = m.n_streams * m.n_embd

    def mixer(prefix: str, *, inject: bool) -> None:
        writer.vector(prefix + "norm.weight", wide, 1.0, 0.3)
        writer.matrix(prefix + "down.weight", m.low_rank, wide, 2.0 * m.n_streams / wide**0.5)
        writer.matrix(prefix + "up.weight", wide, m.low_rank, 2.0 / m.low_rank**0.5)
        if inject:
            writer.matrix(prefix + "inject.weight", m.n_streams, wide, 1.5 * m.n_streams / wide**0.5)

    writer.matrix("token_embd.weight", writer.n_vocab, m.n_embd, 1.0)
    writer.matrix("output.weight", writer.n_vocab, m.n_embd, 2 * m.logit_std / m.n_embd**0.5)
    mixer("output_hc_", inject=False)
    if m.memory and table:
        writer.matrix(TABLE, m.memory.table_rows, m.row_features, 1.0)
    for layer in range(m.n_block):
        block = f"blk.{layer}."
        mixer(block + "hc_attn_", inject=True)
        mixer(block + "hc_ffn_", inject=True)
        if m.recurrent(layer):
            _write_delta_net(writer, m, block)
        else:
            _write_attention(writer, m, block)
        _write_experts(writer, m, block, fused_gate_up=fused_gate_up)
        if m.memory and layer == m.memory.layer:
            columns = m.memory.n_heads * m.row_features
            writer.matrix(block + "ple_key.weight", wide, columns, 1.0 / columns**0.5)
            writer.matrix(block + "ple_value.weight", m.n_embd, columns, 1.0 / columns**0.5)
            for name in ("key", "query", "conv"):
                writer.vector(f"{block}ple_norm_{name}.weight", wide, 1.0, 0.3)
            taps = 0.5 * writer.rng.standard_normal((wide, m.memory.conv_kernel))
            writer.values(block + "ple_conv1d.weight", taps)
        if layer == m.n_layer:
            writer.matrix(block + "nextn.eh_proj.weight", m.n_embd, 2 * m.n_embd, 1.0 / m.n_embd**0.5)
            writer.vector(block + "nextn.enorm.weight", m.n_embd, 1.0, 0.3)
            writer.vector(block + "nextn.hnorm.weight", wide, 1.0, 0.3)
            mixer(block + "nextn.hc_head_", inject=False)


def _write_attention(writer: ModelWriter, m: TinyQwen4Exp, block: str) -> None:
    columns = m.n_embd
    writer.matrix(block + "attn_q.weight", 2 * m.n_head * m.head_dim, columns, 1.6 / columns**0.5)
    writer.matrix(block + "attn_k.weight", m.n_head_kv * m.head_dim, columns, 1.6 / columns**0.5)
    writer.matrix(block + "attn_v.weight", m.n_head_kv * m.head_dim, columns, 1.0 / columns**0.5)
    writer.matrix(block + "attn_output.weight", columns, m.n_head * m.head_dim, 2.0 / (m.n_head * m.head_dim) ** 0.5)
    writer.vector(block + "attn_q_norm.weight", m.head_dim, 1.6, 0.5)
    writer.vector(block + "attn_k_norm.weight", m.head_dim, 1.6, 0.5)
    writer.matrix(block + "indexer.q_proj.weight", m.index_heads * m.index_dim, columns, 1.0 / columns**0.5)
    writer.matrix(block + "indexer.k_proj.weight", m.index_dim, columns, 1.0 / columns**0.5)
    writer.vector(block + "indexer.q_norm.weight", m.index_dim, 1.0, 0.3)
    writer.vector(block + "indexer.k_norm.weight", m.index_dim, 1.0, 0.3)


def _write_delta_net(writer: ModelWriter, m: TinyQwen4Exp, block: str) -> None:
    columns, values = m.n_embd, m.value_heads * m.state
    channels = 2 * m.key_heads * m.state + values
    writer.matrix(block + "attn_qkv.weight", channels, columns, 1.0 / columns**0.5)
    writer.matrix(block + "attn_gate.weight", values, columns, 1.5 / columns**0.5)
    writer.values(block + "ssm_conv1d.weight", 0.6 * writer.rng.standard_normal((channels, m.conv_kernel)))
    writer.vector(block + "ssm_dt.bias", m.value_heads, -1.0, 0.5)
    writer.values(block + "ssm_a", -np.exp(0.5 * writer.rng.standard_normal(m.value_heads)))
    writer.matrix(block + "ssm_beta.weight", m.value_heads, columns, 1.5 / columns**0.5)
    writer.matrix(block + "ssm_alpha.weight", m.value_heads, columns, 1.0 / columns**0.5)
    writer.vector(block + "ssm_norm.weight", m.state, 1.0, 0.3)
    writer.matrix(block + "ssm_out.weight", columns, values, 2.0 / values**0.5)


def _write_experts(writer: ModelWriter, m: TinyQwen4Exp, block: str, *, fused_gate_up: bool) -> None:
    columns = m.n_embd
    writer.router(block + "ffn_gate_inp.weight", m.n_expert, columns, 1.5 / columns**0.5)
    if fused_gate_up:
        writer.experts(block + "ffn_gate_up_exps.weight", m.n_expert, 2 * m.n_ff, columns, 1.3 / columns**0.5)
    else:
        writer.experts(block + "ffn_gate_exps.weight", m.n_expert, m.n_ff, columns, 1.5 / columns**0.5)
        writer.experts(block + "ffn_up_exps.weight", m.n_expert, m.n_ff, columns, 1.0 / columns**0.5)
    writer.experts(block + "ffn_down_exps.weight", m.n_expert, columns, m.n_ff, 2.0 / m.n_ff**0.5)
    writer.vector(block + "ffn_gate_inp_shexp.weight", columns, 0.0, 1.5 / columns**0.5)
    writer.matrix(block + "ffn_gate_shexp.weight", m.n_ff_shared, columns, 1.5 / columns**0.5)
    writer.matrix(block + "ffn_up_shexp.weight", m.n_ff_shared, columns, 1.0 / columns**0.5)
    writer.matrix(block + "ffn_down_shexp.weight", columns, m.n_ff_shared, 2.0 / m.n_ff_shared**0.5)
