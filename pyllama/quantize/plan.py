"""What quantising a file will do, decided before anything is written: types, names, order, metadata."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyllama.errors import InvalidArgument
from pyllama.gguf import (
    SET_ID,
    KeyValue,
    TensorInfo,
    TensorReader,
    TensorSpec,
    shard_path,
    split_id,
    type_traits,
    with_key,
    without_split_keys,
)

from .file_types import FileType
from .imatrix import ImportanceMatrix
from .mixture import Choice, ModelTraits, TypeOptions, Weight, choose_types, needs_importance

_BLOCK = re.compile(r"blk\.(\d+)\.(.*)", re.DOTALL)
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Everything beside the file type that shapes the target."""

    types: TypeOptions = field(default_factory=TypeOptions)
    allow_requantize: bool = False  # convert tensors that are quantised already
    strict: bool = False  # refuse a fallback to another type
    imatrix: ImportanceMatrix | None = None
    imatrix_path: str = ""  # recorded in the target
    pruned_layers: frozenset[int] = frozenset()
    keep_split: bool = False  # one target file per source file
    overrides: Sequence[KeyValue] = ()


class PlannedTensor(NamedTuple):
    source: TensorInfo
    target: TensorSpec
    choice: Choice | None  # None: copied, whatever its type

    @property
    def is_converted(self) -> bool:
        return self.target.type_name != self.source.type_name

    @property
    def n_values(self) -> int:
        return prod(self.source.shape)


class TargetFile(NamedTuple):
    path: Path
    key_values: list[KeyValue]
    tensors: list[PlannedTensor]


class Fallback(NamedTuple):
    wanted: str
    used: str
    n_tensors: int


@dataclass(frozen=True, slots=True)
class Plan:
    file_type: FileType
    files: list[TargetFile]
    tensors: list[PlannedTensor]  # of all files, in the order of processing
    unmet: list[str]  # what stops it from being carried out, if anything

    @property
    def source_bytes(self) -> int:
        return sum(tensor.source.n_bytes for tensor in self.tensors)

    @property
    def target_bytes(self) -> int:
        return sum(tensor.target.n_bytes for tensor in self.tensors)

    @property
    def n_values(self) -> int:
        return sum(tensor.n_values for tensor in self.tensors)

    @property
    def fallbacks(self) -> list[Fallback]:
        """Substituted types, the most frequent first."""
        counts = Counter(choice for _, _, choice in _substituted(self.tensors))
        return [Fallback(choice.wanted, choice.type_name, n) for choice, n in counts.most_common()]

    def fallback_bits(self) -> tuple[float, float, float]:
        """Share of the weights that fell back, their bits per weight as wanted and as they are."""
        substituted = _substituted(self.tensors)
        sizes = [prod(target.shape) for _, target, _ in substituted]
        wanted = sum(size * _bits(choice.wanted) for size, (_, _, choice) in zip(sizes, substituted, strict=True))
        used = sum(8 * target.n_bytes for _, target, _ in substituted)
        return sum(sizes) / self.n_values, wanted / sum(sizes), used / sum(sizes)


def make_plan(reader: TensorReader, target: Path, file_type: FileType, options: QuantizeOptions) -> Plan:
    """Raises `InvalidArgument` for options that do not fit the file."""
    traits = ModelTraits.of(reader.file.metadata)
    unknown_layers = [layer for layer in options.pruned_layers if layer >= traits.n_layer]
    if unknown_layers:
        raise InvalidArgument(f"there is no layer {min(unknown_layers)} to prune, the model has {traits.n_layer}")
    sources = [info for info in reader.tensors if _layer(info.name) not in options.pruned_layers]
    sources.sort(key=_in_file_order if options.keep_split else _by_block)
    names = [_renumbered(info.name, options.pruned_layers) for info in sources]
    weights = [Weight(name, info.type_name, info.shape) for name, info in zip(names, sources, strict=True)]
    choices = choose_types(weights, traits, file_type, options.types, has_imatrix=options.imatrix is not None)
    tensors = [
        PlannedTensor(info, TensorSpec(name, choice.type_name if choice else info.type_name, info.shape), choice)
        for name, info, choice in zip(names, sources, choices, strict=True)
    ]
    if options.strict:
        _refuse_fallbacks(tensors)
    key_values = _metadata(reader.file.key_values, traits, file_type, options)
    if options.keep_split:
        files = _split_like_source(reader, target, key_values, tensors)
    else:
        files = [TargetFile(target, key_values, tensors)]
    return Plan(file_type, files, tensors, _unmet(tensors, file_type, options))


def importance_of(tensor: PlannedTensor, matrix: ImportanceMatrix | None) -> NDArray[np.float32] | None:
    """[matrices, columns] weights for a converted tensor. Raises `InvalidArgument` for an entry of another size."""
    if matrix is None:
        return None
    columns, _, *stack = tensor.source.shape
    try:
        return matrix.weights(tensor.source.name, columns, prod(stack))
    except InvalidArgument:
        if tensor.source.name == "token_embd.weight":
            return None  # ignored as llama.cpp does: lookups of rows have no importance
        raise


def _refuse_fallbacks(tensors: list[PlannedTensor]) -> None:
    substituted = _substituted(tensors)
    for source, _, choice in substituted:
        raise InvalidArgument(
            f"tensor '{source.name}': rows of {source.shape[0]} values are not whole {choice.wanted} blocks, and "
            f"--strict allows no fallback to {choice.type_name} ({len(substituted)} tensor(s) need one)"
        )


def _unmet(tensors: list[PlannedTensor], file_type: FileType, options: QuantizeOptions) -> list[str]:
    reasons: list[str] = []
    for tensor in tensors:
        name, choice = tensor.source.name, tensor.choice
        if choice is None or not tensor.is_converted:
            continue
        if type_traits[tensor.source.type_name].is_quantized and not options.allow_requantize:
            reasons.append(
                f"tensor '{name}': requantizing from type {tensor.source.type_name} is disabled "
                "(--allow-requantize permits it)"
            )
        has_importance = importance_of(tensor, options.imatrix) is not None
        if needs_importance(name, choice.type_name, file_type) and not has_importance:
            missing = "has no entry for it" if options.imatrix else "is not given"
            reasons.append(
                f"tensor '{name}': this quantization requires an imatrix for {choice.type_name}, and one {missing}"
            )
    return reasons


def _metadata(
    source: list[KeyValue], traits: ModelTraits, file_type: FileType, options: QuantizeOptions
) -> list[KeyValue]:
    key_values = without_split_keys(source)
    file_type_id = next((entry.value for entry in source if entry.key == "general.file_type"), None)
    if file_type.id is not None:
        file_type_id = file_type.id
    added = [KeyValue("general.quantization_version", "u32", _QUANTIZATION_VERSION)]
    if file_type_id is not None:
        added.append(KeyValue("general.file_type", "u32", file_type_id))
    added += options.overrides
    if options.imatrix is not None:
        added.append(KeyValue("quantize.imatrix.file", "string", _cut(options.imatrix_path)))
        added += [KeyValue("quantize.imatrix.dataset", "string", _cut(text)) for text in options.imatrix.datasets[:1]]
        added.append(KeyValue("quantize.imatrix.entries_count", "u32", len(options.imatrix.entries)))
        if options.imatrix.chunk_count > 0:
            added.append(KeyValue("quantize.imatrix.chunks_count", "u32", options.imatrix.chunk_count))
    if options.pruned_layers:
        n_layer = traits.n_layer - len(options.pruned_layers)
        added.append(KeyValue(f"{traits.architecture}.block_count", "u32", n_layer))
    for entry in added:
        key_values = with_key(key_values, entry.key, entry.type, entry.value)
    return key_values


def _cut(text: str) -> str:
    """127 bytes at most, as readers of these keys expect."""
    return text.encode("utf-8", "surrogateescape")[:127].decode("utf-8", "ignore")


def _split_like_source(
    reader: TensorReader, target: Path, key_values: list[KeyValue], tensors: list[PlannedTensor]
) -> list[TargetFile]:
    prefix = target.with_name(target.name.removesuffix(".gguf"))
    n_files = max(1, int(reader.file.metadata.get("split.count", 1)))
    set_id = split_id(key_values, [tensor.target for tensor in tensors])
    files: list[TargetFile] = []
    for shard in range(n_files):
        keys = key_values if shard == 0 else [entry for entry in key_values if entry.key == "general.alignment"]
        if n_files > 1:
            keys = [
                *keys,
                KeyValue("split.no", "u16", shard),
                KeyValue("split.count", "u16", n_files),
                KeyValue("split.tensors.count", "i32", len(tensors)),
                KeyValue(SET_ID, "string", set_id),
            ]
        own = [tensor for tensor in tensors if tensor.source.shard == shard]
        files.append(TargetFile(shard_path(prefix, shard, n_files), keys, own))
    return files


def _layer(name: str) -> int | None:
    match = _BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def _renumbered(name: str, pruned: frozenset[int]) -> str:
    match = _BLOCK.fullmatch(name)
    if match is None or not pruned:
        return name
    layer = int(match[1])
    return f"blk.{layer - sum(one < layer for one in pruned)}.{match[2]}"


def _by_block(info: TensorInfo) -> tuple[int, bytes]:
    layer = _layer(info.name)
    return -1 if layer is None else layer, info.name.encode("utf-8", "surrogateescape")


def _in_file_order(info: TensorInfo) -> tuple[int, int]:
    return info.shard, info.offset


def _substituted(tensors: list[PlannedTensor]) -> list[tuple[TensorInfo, TensorSpec, Choice]]:
    return [(source, target, choice) for source, target, choice in tensors if choice is not None and choice.is_fallback]


def _bits(type_name: str) -> float:
    traits = type_traits[type_name]
    return 8 * traits.block_bytes / traits.block_values
