"""Do the parts of a split model belong together? Found out before anything is read from them, with the part named."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from pyllama._engine import GgufFile, KeyValue
from pyllama.errors import GgufError

from .splits import shard_path, split_name
from .writer import TensorSpec, encoded_header

SET_ID = "split.set_id"
"""Key of our own, the same in all parts that one run wrote. Other programs' parts lack it."""


def without_split_keys(key_values: Iterable[KeyValue]) -> list[KeyValue]:
    """The keys of the model itself."""
    return [entry for entry in key_values if not entry.key.startswith("split.")]


def split_id(key_values: Sequence[KeyValue], tensors: Sequence[TensorSpec]) -> str:
    """Value of `SET_ID` for the parts of this model: a digest of its metadata and its list of tensors."""
    return hashlib.sha256(encoded_header(key_values, tensors)).hexdigest()[:32]


def open_parts(path: Path) -> list[tuple[Path, GgufFile]]:
    """All parts of the model whose first part (or only file) is `path`, each opened as a single file.

    Raises `GgufError` naming the part that is missing, out of its place or from another model.
    """
    first = GgufFile(path, single_file=True)
    count, number = (first.metadata.get(key, 0) for key in ("split.count", "split.no"))
    if isinstance(count, int) and count in (0, 1):
        return [(path, first)]
    name = split_name(path)
    if not isinstance(count, int) or not isinstance(number, int) or number or name is None or name[1:] != (0, count):
        GgufFile(path).close()  # says what is wrong
        raise GgufError(f"{path}: is not the first part of a split model")
    parts = [(path, first)]
    owners = {tensor.name: path for tensor in first.tensors}
    for index in range(1, count):
        sibling = shard_path(path.with_name(name.prefix), index, count)
        if not sibling.exists():
            raise GgufError(f"{sibling}: part {index + 1} of {count} is missing")
        part = GgufFile(sibling, single_file=True)
        _check_keys(sibling, index, part, first)
        for tensor in part.tensors:
            if tensor.name in owners:
                raise GgufError(f"{sibling}: tensor '{tensor.name}' is in {owners[tensor.name].name} as well")
            owners[tensor.name] = sibling
        parts.append((sibling, part))
    _check_types(parts)
    GgufFile(path).close()  # the number of tensors in all parts
    return parts


def check_parts(path: Path) -> None:
    """What loading a model asks first. Raises `GgufError` as `open_parts` does; a file that is not split passes."""
    if split_name(path) is not None:
        for _, part in open_parts(path):
            part.close()


def _check_keys(path: Path, index: int, part: GgufFile, first: GgufFile) -> None:
    expected = {"split.no": index} | {
        key: first.metadata.get(key) for key in ("split.count", "split.tensors.count", SET_ID)
    }
    for key, value in expected.items():
        found = part.metadata.get(key)
        if repr(found) != repr(value):  # arrays, which no such key should be, compare by element
            raise GgufError(f"{path}: {key} is {found!r}, expected {value!r}: a part of another split or model")


def _check_types(parts: Sequence[tuple[Path, GgufFile]]) -> None:
    """Parts of two quantisations of one model differ in nothing but tensor types.

    Within one file a matrix (say `blk.*.attn_q.weight`) may change its type from layer to layer, but hardly all
    matrices at once from one part to the others. Three are needed as evidence.
    """
    roles = [_types_by_role(part) for _, part in parts]
    # In a set of two the first, whose metadata would be used, is taken for the right one: the last is asked first.
    for index in reversed(range(len(parts))):
        others: dict[str, set[str]] = defaultdict(set)
        for other in (*roles[:index], *roles[index + 1 :]):
            for role, types in other.items():
                others[role] |= types
        shared = [role for role in roles[index] if role in others]
        if len(shared) >= 3 and all(roles[index][role].isdisjoint(others[role]) for role in shared):
            role = shared[0]
            raise GgufError(
                f"{parts[index][0]}: a part of another quantisation: {role} is "
                f"{'/'.join(sorted(roles[index][role]))} here, {'/'.join(sorted(others[role]))} in the other parts"
            )


def _types_by_role(part: GgufFile) -> dict[str, set[str]]:
    types: dict[str, set[str]] = defaultdict(set)
    for tensor in part.tensors:
        if len(tensor.shape) > 1 and tensor.type_name != "f32":  # f32 matrices are f32 in every quantisation
            types[re.sub(r"\d+", "*", tensor.name)].add(tensor.type_name)
    return types
