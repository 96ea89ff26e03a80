"""`qwen4exp`: Qwen3.8-Flash-Next. The blocks of `qwen35moe` on several residual streams, attention that an indexer
makes sparse, and embeddings of token n-grams from a large table.

The streams' mixing (`hyper connection`) takes the place of every norm around a block.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from pyllama.errors import ModelError
from pyllama.gguf import KeyValue

from ..config import Config
from ..safetensors import Checkpoint, StoredTensor
from ..tensor import Tensor
from .dense import Layer
from .qwen35moe import Qwen35Moe

_SHARD = re.compile(r".*\.ngram_embedding\.shard_(\d+)\.weight")
_BUFFERS = {
    "layer_multipliers": "layer_multipliers",
    "head_offsets": "ngram_heads_offsets",
    "head_vocab_sizes": "ngram_heads_vocab_sizes",
}
_MAX_NGRAM, _MAX_HEADS = 8, 64  # what loaders accept


class Qwen4Exp(Qwen35Moe):
    architecture = "qwen4exp"
    hf_architectures = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM")
    model_types = ("qwen4_exp", "qwen4_exp_text")
    attention_types = ("full_attention", "indexed_attention", "qwen_sparse_attention", "deepseek_sparse_attention")
    default_experts = (512, 10)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("output_gate_type", "sigmoid", config.get("hidden_act") or "silu")
        self.streams = config.integer("hc_count", 4)
        self.rank = config.integer("hc_lowrank", 320)
        if self.streams < 2:
            raise config.fault("hc_count", self.streams, "at least 2 residual streams")
        config.require("indexer_kv_heads", 1, 1)
        self.index_heads = config.integer("indexer_n_heads")
        self.index_dim = config.integer("indexer_head_dim")
        self.index_budget = config.integer("indexer_budget")
        self.index_block = config.integer("indexer_compress_ratio")
        if self.index_block < 2 or self.index_budget % self.index_block:
            raise config.fault("indexer_compress_ratio", self.index_block, f"a divisor of {self.index_budget} above 1")
        if self.index_dim < self.rotary_dims:
            raise config.fault("indexer_head_dim", self.index_dim, f"room for {self.rotary_dims} rotated dimensions")
        self.ngram_layer = self._ngram_layer()
        self.ngram_size = config.integer("ngram_size", 3)
        self.ngram_heads = (self.ngram_size - 1) * config.integer("heads_per_ngram", 8)
        self.ngram_width = config.integer("ple_embed_dim", self.hidden)
        if self.ngram_layer is not None:
            self._check_ngrams()

    def key_values(self) -> list[KeyValue]:
        prefix = self.architecture
        ratios = [0 if recurrent else self.index_block for recurrent in self.recurrent]
        keys = [
            *super().key_values(),
            KeyValue(f"{prefix}.hyper_connection.count", "u32", self.streams),
            KeyValue(f"{prefix}.hyper_connection.low_rank", "u32", self.rank),
            KeyValue(f"{prefix}.attention.indexer.head_count", "u32", self.index_heads),
            KeyValue(f"{prefix}.attention.indexer.key_length", "u32", self.index_dim),
            KeyValue(f"{prefix}.attention.indexer.top_k", "u32", self.index_budget),
            KeyValue(f"{prefix}.attention.compress_ratios", "u32[]", ratios + [self.index_block] * self.mtp_layers),
        ]
        if self.ngram_layer is None:
            return keys
        keys += [
            KeyValue(f"{prefix}.ple.layers", "u32[]", [self.ngram_layer]),
            KeyValue(f"{prefix}.ple.ngram_size", "u32", self.ngram_size),
            KeyValue(f"{prefix}.ple.heads_per_ngram", "u32", self.config.integer("heads_per_ngram", 8)),
            KeyValue(f"{prefix}.ple.conv_kernel", "u32", self.config.integer("ple_conv_kernel_size", 4)),
            KeyValue(f"{prefix}.ple.eos_token_id", "u32", self._token("eos_token_id")),
            KeyValue(f"{prefix}.embedding_length_per_layer_input", "u32", self.ngram_width // self.ngram_heads),
        ]
        if self.config.get("image_token_id") is not None:
            keys.append(KeyValue(f"{prefix}.ple.image_token_id", "u32", self._token("image_token_id")))
        return keys

    def table_keys(self, checkpoint: Checkpoint) -> list[KeyValue]:
        """The hash of the n-grams: its numbers need all of their 64 bits."""
        if self.ngram_layer is None:
            return []
        found = {}
        for name, source in _BUFFERS.items():
            stored = checkpoint.tensors.get(self._ngram_module + "ple_embedding." + source)
            if stored is None:
                raise ModelError(f"{checkpoint.folder}: missing tensor {self._ngram_module}ple_embedding.{source}")
            count = self.ngram_size if name == "layer_multipliers" else self.ngram_heads
            if stored.dtype != "I64" or stored.shape != (count,):
                raise ModelError(
                    f"{stored.path}: tensor '{stored.name}' is {stored.dtype} of shape {list(stored.shape)}, "
                    f"expected I64 of shape {[count]}"
                )
            found[name] = [int(value) for value in checkpoint.whole(stored)]
            if min(found[name]) < 0 or (name == "head_vocab_sizes" and min(found[name]) < 1):
                raise ModelError(f"{stored.path}: tensor '{stored.name}' holds {min(found[name])}")
        rows = sum(checkpoint.tensors[name].shape[0] for name in self._table_parts(checkpoint.tensors))
        ends = [begin + size for begin, size in zip(found["head_offsets"], found["head_vocab_sizes"], strict=True)]
        if max(ends) > rows:
            raise ModelError(f"{checkpoint.folder}: n-gram rows go up to {max(ends)}, the table has {rows}")
        return [KeyValue(f"{self.architecture}.ple.{name}", "u64[]", values) for name, values in found.items()]

    def is_ignored(self, name: str, stored: Mapping[str, StoredTensor]) -> bool:
        buffers = {self._ngram_module + "ple_embedding." + source for source in _BUFFERS.values()}
        return super().is_ignored(name, stored) or (self.ngram_layer is not None and name in buffers)

    def decoder_block(self, layer: Layer) -> Iterator[Tensor]:
        if layer.index == self.ngram_layer:
            yield from self._ngram_embedding(layer)
        yield from super().decoder_block(layer)

    def norms(self, layer: Layer) -> Iterator[Tensor]:
        for name in ("attn", "ffn"):
            module = layer.module + ("attn" if name == "attn" else "mlp") + "_hyper_connection."
            prefix = f"{layer.block}hc_{name}_"
            yield from self._mixing(prefix, module)
            inject = module + "block_inject_weight.weight"
            yield Tensor(prefix + "inject.weight", (self.streams, self.streams * self.hidden), inject)

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        yield from super().attention_extras(layer)
        block, module = layer.block + "indexer.", layer.module + "self_attn.indexer."
        queries, size = self.index_heads * self.index_dim, self.index_dim
        for name, begin, rows in (("q", 0, queries), ("k", queries, size)):
            yield Tensor(
                f"{block}{name}_proj.weight",
                (rows, self.hidden),
                module + "index_qk_proj.weight",
                rows=partial(np.arange, begin, begin + rows),
                source_shapes=((queries + size, self.hidden),),
            )
            yield Tensor(f"{block}{name}_norm.weight", (size,), f"{module}{name}_layernorm.weight")

    def final_norm(self) -> Iterator[Tensor]:
        yield from self._mixing("output_hc_", "model.hyper_connection_mixer.")

    def mtp_block(self, layer: Layer) -> Iterator[Tensor]:
        hidden, nextn = self.hidden, layer.block + "nextn."
        yield Tensor(
            nextn + "eh_proj.weight",
            (hidden, 2 * hidden),
            ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight"),
            source_shapes=((hidden, hidden), (hidden, hidden)),
            side_by_side=True,
        )
        yield Tensor(nextn + "enorm.weight", (hidden,), "mtp.pre_fc_norm_embedding.weight")
        yield Tensor(nextn + "hnorm.weight", (self.streams * hidden,), "mtp.pre_fc_norm_hidden.weight")
        yield from self._mixing(nextn + "hc_head_", "mtp.hyper_connection_mixer.")

    def _mixing(self, prefix: str, module: str) -> Iterator[Tensor]:
        width = self.streams * self.hidden
        yield Tensor(prefix + "norm.weight", (width,), module + "hc_norm.weight")
        yield Tensor(prefix + "down.weight", (self.rank, width), module + "input_mix_weight_down.weight")
        yield Tensor(prefix + "up.weight", (width, self.rank), module + "input_mix_weight_up.weight")

    def _ngram_embedding(self, layer: Layer) -> Iterator[Tensor]:
        width, module, block = self.streams * self.hidden, self._ngram_module, layer.block + "ple_"
        columns = self.ngram_width // self.ngram_heads
        parts = self._table_parts(layer.stored)
        # Their heights are the checkpoint's to choose; whether there are rows enough is checked with the hash.
        heights = [layer.stored[part].shape[0] if part in layer.stored else 0 for part in parts]
        shapes = tuple((height, columns) for height in heights)
        yield Tensor("per_layer_token_embd.weight", (sum(heights), columns), parts, source_shapes=shapes)
        yield Tensor(block + "key.weight", (width, self.ngram_width), module + "key_proj.weight")
        yield Tensor(block + "value.weight", (self.hidden, self.ngram_width), module + "value_proj.weight")
        for name in ("key", "query", "conv"):
            yield Tensor(f"{block}norm_{name}.weight", (width,), f"{module}norm_{name}.weight")
        taps = self.config.integer("ple_conv_kernel_size", 4)
        source = module + "conv1d.weight"
        yield Tensor(block + "conv1d.weight", (width, taps), source, source_shapes=((width, 1, taps),))

    @property
    def _ngram_module(self) -> str:
        return f"model.layers.{self.ngram_layer}.ple."

    def _table_parts(self, stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
        """The tensors that make the table, in order."""
        table = self._ngram_module + "ple_embedding.ngram_embedding."
        numbers = {int(match[1]) for name in stored if (match := _SHARD.fullmatch(name)) and name.startswith(table)}
        if not numbers:
            return (table + "weight",)
        return tuple(f"{table}shard_{number}.weight" for number in range(max(numbers) + 1))

    def _ngram_layer(self) -> int | None:
        """Configurations count layers from 1."""
        layers = self.config.integers("ple_layer_ids", [])
        if not layers:
            return None
        if len(layers) > 1 or not 1 <= layers[0] <= self.layers or not self.recurrent[layers[0] - 1]:
            raise self.config.fault("ple_layer_ids", layers, "one layer, of linear attention")
        return layers[0] - 1

    def _check_ngrams(self) -> None:
        if not 2 <= self.ngram_size <= _MAX_NGRAM:
            raise self.config.fault("ngram_size", self.ngram_size, f"2 to {_MAX_NGRAM}")
        if self.ngram_heads > _MAX_HEADS:
            heads = self.ngram_heads // (self.ngram_size - 1)
            raise self.config.fault("heads_per_ngram", heads, f"at most {_MAX_HEADS} heads in all")
        if self.ngram_width % self.ngram_heads:
            raise self.config.fault("ple_embed_dim", self.ngram_width, f"a multiple of {self.ngram_heads} heads")
        self._token("eos_token_id")

    def _token(self, key: str) -> int:
        """Of several ids the first one is hashed."""
        value = self.config.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if type(first) is not int or not 0 <= first < 1 << 31:
            raise self.config.fault(key, value, "a token")
        return first
