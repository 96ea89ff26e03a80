"""`qwen35`: Qwen3.5, 3.6 and 3.8. Most layers are gated delta nets, the others attention with a gated output.

Checkpoints group the delta net's value heads by the key head they share (value head g r + j uses key head g, with
r = Hv/Hk); files hold them in turns, so that value head h uses key head h mod Hk. Norm weights are stored less 1, but
for that of the delta net's output. S size of the delta net's heads, Hk/Hv its key and value heads.

A block for multi-token prediction stands behind the others. It is an attention block with a matrix `eh_proj` that joins
the embedding of the next token and the state of the last layer.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import InvalidArgument
from pyllama.gguf import KeyValue

from ..config import Config
from ..rope import Rope, rope_section
from ..safetensors import StoredTensor
from ..tensor import Order, Tensor, plus_one
from .dense import DenseFamily, Layer

logger = logging.getLogger(__name__)

_MTP = "mtp."
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\..*")


class Qwen35(DenseFamily):
    architecture = "qwen35"
    hf_architectures = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
    model_types = ("qwen3_5", "qwen3_5_text")
    default_head_dim = 256
    names_head_dim = True
    rope_kinds = ("default", "linear", "yarn")
    has_axes = True
    ignored = re.compile(r".*\.rotary_emb\.inv_freq|model\.visual\..*")  # the vision part is a file of its own
    attention_types: tuple[str, ...] = ("full_attention",)  # in layer_types
    sections = (11, 11, 10)  # pairs of a head that rotate with the time, height and width of an image's part

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.require("attention_bias", False, False)
        config.require("attn_output_gate", True, True)
        config.require("mtp_use_dedicated_embeddings", False, False)
        self.key_heads = config.integer("linear_num_key_heads", 16)
        self.value_heads = config.integer("linear_num_value_heads", 32)
        self.state_size = config.integer("linear_value_head_dim", 128)
        self.taps = config.integer("linear_conv_kernel_dim", 4)
        if self.value_heads % self.key_heads:
            raise config.fault("linear_num_value_heads", self.value_heads, f"a multiple of {self.key_heads} key heads")
        config.require("linear_key_head_dim", self.state_size, 128)  # the state is square
        self.recurrent = self._recurrent_layers()
        self.rotary_dims = self._rotary_dims()
        self.mtp_choice = "keep"
        self.mtp_layers = 0

    def read_rope(self) -> Rope:
        return Rope.read(self.config, self.rope_kinds, has_axes=True)

    def settle_mtp(self, choice: str, stored: Mapping[str, StoredTensor] | None) -> None:
        """Models that were trained further have often lost these blocks, though the configuration still names them."""
        declared = self.config.count("mtp_num_hidden_layers", 0)
        if declared > 1 and choice != "drop":
            raise self.config.fault("mtp_num_hidden_layers", declared, "at most 1")
        self.mtp_choice = choice
        self.mtp_layers = 0 if choice == "drop" else declared
        if stored is not None and choice != "drop":
            found = {int(match[1]) for name in stored if (match := _MTP_LAYER.fullmatch(name))}
            if declared and not found and choice == "keep":
                logger.warning("the checkpoint lacks its block for multi-token prediction; the file is made without")
            self.mtp_layers = max(found) + 1 if found else 0
            if self.mtp_layers > 1:
                raise self.config.fault("mtp_num_hidden_layers", declared, f"at most 1; there are {self.mtp_layers}")
        if choice == "only" and not self.mtp_layers:
            raise InvalidArgument(f"{self.config.source}: the model has no block for multi-token prediction")

    @property
    def n_blocks(self) -> int:
        return self.layers + self.mtp_layers

    def key_values(self) -> list[KeyValue]:
        prefix = self.architecture
        keys = [
            *super().key_values(),
            KeyValue(f"{prefix}.rope.dimension_count", "u32", self.rotary_dims),
            KeyValue(f"{prefix}.rope.dimension_sections", "i32[]", self._sections()),
            KeyValue(f"{prefix}.ssm.conv_kernel", "u32", self.taps),
            KeyValue(f"{prefix}.ssm.state_size", "u32", self.state_size),
            KeyValue(f"{prefix}.ssm.group_count", "u32", self.key_heads),
            KeyValue(f"{prefix}.ssm.time_step_rank", "u32", self.value_heads),
            KeyValue(f"{prefix}.ssm.inner_size", "u32", self.value_heads * self.state_size),
            KeyValue(f"{prefix}.full_attention_interval", "u32", self.config.integer("full_attention_interval", 4)),
            KeyValue(f"{prefix}.attention.recurrent_layers", "bool[]", self.recurrent + [False] * self.mtp_layers),
        ]
        if self.mtp_layers:
            keys.append(KeyValue(f"{prefix}.nextn_predict_layers", "u32", self.mtp_layers))
        return keys

    def tensors(self, stored: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        for tensor in self._all_tensors(stored):
            is_less_1 = "norm" in tensor.name and not tensor.name.endswith("ssm_norm.weight")
            yield replace(tensor, compute=plus_one) if is_less_1 else tensor

    def is_ignored(self, name: str, stored: Mapping[str, StoredTensor]) -> bool:
        return super().is_ignored(name, stored) or (not self.mtp_layers and name.startswith(_MTP))

    def is_written(self, tensor: Tensor) -> bool:
        """With the prediction blocks go the embeddings and the head, which they share with the others."""
        if self.mtp_choice != "only" or tensor.name.startswith(("token_embd.", "output")):
            return True
        return tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) >= self.layers

    def norms(self, layer: Layer) -> Iterator[Tensor]:
        for name, source in (("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")):
            yield Tensor(f"{layer.block}{name}.weight", (self.hidden,), f"{layer.module}{source}.weight")

    def mixer(self, layer: Layer) -> Iterator[Tensor]:
        is_recurrent = layer.index < self.layers and self.recurrent[layer.index]
        yield from self._delta_net(layer) if is_recurrent else super().mixer(layer)

    def query_rows(self) -> int:
        return 2 * self.heads * self.head_dim  # of each head first the query, then the gate of its output

    def attention_extras(self, layer: Layer) -> Iterator[Tensor]:
        yield from self.head_norms(layer)

    def mtp_block(self, layer: Layer) -> Iterator[Tensor]:
        """What the block has besides the tensors of an attention block."""
        hidden, nextn = self.hidden, layer.block + "nextn."
        yield Tensor(nextn + "eh_proj.weight", (hidden, 2 * hidden), _MTP + "fc.weight")
        yield Tensor(nextn + "enorm.weight", (hidden,), _MTP + "pre_fc_norm_embedding.weight")
        yield Tensor(nextn + "hnorm.weight", (hidden,), _MTP + "pre_fc_norm_hidden.weight")
        yield Tensor(nextn + "shared_head_norm.weight", (hidden,), _MTP + "norm.weight")

    def _all_tensors(self, stored: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        yield from super().tensors(stored)
        for number in range(self.mtp_layers):
            index = self.layers + number
            layer = Layer(index, f"blk.{index}.", f"{_MTP}layers.{number}.", stored)
            yield from self.decoder_block(layer)
            yield from self.mtp_block(layer)

    def _delta_net(self, layer: Layer) -> Iterator[Tensor]:
        hidden, block, module = self.hidden, layer.block, layer.module + "linear_attn."
        keys, values = self.key_heads * self.state_size, self.value_heads * self.state_size
        channels = 2 * keys + values
        one_each = self._value_order(1)
        value_rows, all_rows = self._value_order(self.state_size), self._value_order(self.state_size, behind=2 * keys)
        yield Tensor(block + "attn_qkv.weight", (channels, hidden), module + "in_proj_qkv.weight", all_rows)
        yield Tensor(block + "attn_gate.weight", (values, hidden), module + "in_proj_z.weight", value_rows)
        yield Tensor(
            block + "ssm_conv1d.weight",
            (channels, self.taps),
            module + "conv1d.weight",
            all_rows,
            source_shapes=((channels, 1, self.taps),),
        )
        yield Tensor(block + "ssm_dt.bias", (self.value_heads,), module + "dt_bias", one_each)
        yield Tensor(block + "ssm_a", (self.value_heads,), module + "A_log", one_each, compute=_decay)
        yield Tensor(block + "ssm_beta.weight", (self.value_heads, hidden), module + "in_proj_b.weight", one_each)
        yield Tensor(block + "ssm_alpha.weight", (self.value_heads, hidden), module + "in_proj_a.weight", one_each)
        yield Tensor(block + "ssm_norm.weight", (self.state_size,), module + "norm.weight")
        yield Tensor(block + "ssm_out.weight", (hidden, values), module + "out_proj.weight", columns=value_rows)

    def _value_order(self, size: int, behind: int = 0) -> Order | None:
        """Of `size` rows per value head that stand behind others; None where the order is the same."""
        if self.key_heads in (1, self.value_heads):
            return None
        return partial(value_heads_in_turns, self.key_heads, self.value_heads, size, behind)

    def _recurrent_layers(self) -> list[bool]:
        kinds = self.config.get("layer_types")
        if kinds is None:
            interval = self.config.integer("full_attention_interval", 4)
            return [(index + 1) % interval != 0 for index in range(self.layers)]
        names = ("linear_attention", *self.attention_types)
        if not isinstance(kinds, list) or len(kinds) != self.layers or any(kind not in names for kind in kinds):
            raise self.config.fault("layer_types", kinds, f"{self.layers} times one of {', '.join(names)}")
        return [kind == "linear_attention" for kind in kinds]

    def _rotary_dims(self) -> int:
        section = rope_section(self.config)
        share = section.number("partial_rotary_factor", self.config.number("partial_rotary_factor", 0.25))
        dims = int(self.head_dim * share)
        if not 0 < share <= 1 or dims < 2 or dims % 2:
            raise section.fault("partial_rotary_factor", share, f"a share that rotates an even part of {self.head_dim}")
        return dims

    def _sections(self) -> list[int]:
        section = rope_section(self.config)
        section.require("mrope_interleaved", True, True)
        sections = section.integers("mrope_section", self.sections)
        if not 0 < len(sections) <= 4 or not 0 < sum(sections) <= self.head_dim:
            raise section.fault("mrope_section", sections, "the numbers of pairs for at most four axes")
        return sections + [0] * (4 - len(sections))


def value_heads_in_turns(key_heads: int, value_heads: int, size: int, behind: int) -> NDArray[np.int64]:
    """`behind` rows stay; of the value heads behind them, `size` rows each, the first of every key head come first."""
    heads = np.arange(value_heads).reshape(key_heads, -1).T.reshape(-1)
    rows = behind + heads[:, None] * size + np.arange(size)
    return np.concatenate([np.arange(behind), rows.reshape(-1)])


def _decay(logarithm: NDArray[np.float32]) -> NDArray[np.float32]:
    """What files hold is the factor itself, negative."""
    return -np.exp(logarithm)
