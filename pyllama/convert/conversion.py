"""One conversion: a checkpoint folder in, the keys, tensors and files of a GGUF model out."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType

from pyllama.errors import InvalidArgument, ModelError
from pyllama.gguf import KeyValue, TensorSpec

from .config import Config
from .families import MTP_CHOICES, family_of
from .metadata.general import General
from .safetensors import FLOATS, Checkpoint, StoredTensor
from .tensor import FILE_TYPES, Tensor
from .tokenizer import tokenizer_keys

OUT_TYPES = (*FILE_TYPES, "auto")


class Conversion:
    """Everything is read and checked on construction, except the tensors' values. A context manager.

    outtype: one of `OUT_TYPES`; `auto` keeps the checkpoint's 16-bit type, and takes bf16 for one in f32.
    vocab_only: no tensors; the weights are not looked at. pre: name of the pre-tokenizer instead of the one found.
    metadata: JSON file of `general.*` keys. target: folder of the model that a drafter is made for.
    mtp: one of `MTP_CHOICES`; `only` makes a file of the embeddings, the head and the prediction blocks.
    Raises `ModelError`, `TokenizerError`, `InvalidArgument`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        outtype: str = "auto",
        vocab_only: bool = False,
        pre: str | None = None,
        model_name: str | None = None,
        metadata: Path | None = None,
        mtp: str = "keep",
        target: Path | None = None,
    ) -> None:
        if outtype not in OUT_TYPES:
            raise InvalidArgument(f"outtype is {outtype!r}, expected one of {', '.join(OUT_TYPES)}")
        if mtp not in MTP_CHOICES:
            raise InvalidArgument(f"mtp is {mtp!r}, expected one of {', '.join(MTP_CHOICES)}")
        for path in (folder,) if target is None else (folder, target):
            if not path.is_dir():
                raise InvalidArgument(f"{path} is not a folder")
        self.folder = folder
        self.vocab_only = vocab_only
        self.mtp = mtp
        self.family = family_of(Config.read(folder))
        self.target = None if target is None else family_of(Config.read(target))
        self.family.settle_target(self.target)
        self._tokenizer_folder = folder if target is None else target
        self.checkpoint: Checkpoint | None = None
        self.outtype = outtype
        self.tensors: list[tuple[Tensor, TensorSpec]] = []
        self.n_parameters: int | None = None
        self._table_keys: list[KeyValue] = []
        if vocab_only:
            self.family.settle_mtp(mtp, None)
        else:
            self.checkpoint = Checkpoint(folder, text_name)
            self.family.settle_mtp(mtp, self.checkpoint.tensors)
            self._read_tensors(self.checkpoint.tensors)
            self._table_keys = self.family.table_keys(self.checkpoint)
        self.general = General(folder, self.n_parameters)
        if metadata is not None:
            self.general.override(metadata)
        if model_name:
            self.general.rename(model_name)
        self.key_values = self._all_keys(pre)

    @property
    def default_file_name(self) -> str:
        stem = self.general.model_name.file_stem("vocab" if self.vocab_only else self.outtype.upper())
        return ("mtp-" if self.mtp == "only" else "") + stem + ".gguf"

    def _read_tensors(self, stored: Mapping[str, StoredTensor]) -> None:
        tensors = list(self.family.tensors(stored))
        sources = {
            name: shape for tensor in tensors for name, shape in zip(tensor.sources, tensor.stored_shapes, strict=True)
        }
        if missing := sources.keys() - stored.keys():
            raise ModelError(f"{self.folder}: missing {_listed(missing)}")
        extra = [name for name in stored.keys() - sources.keys() if not self.family.is_ignored(name, stored)]
        if extra:
            raise ModelError(f"{self.folder}: not part of a {self.family.architecture} model: {_listed(extra)}")
        integers = {name for tensor in tensors if tensor.is_integer for name in tensor.sources}
        for name, shape in sources.items():
            _check(stored[name], shape, ("I64",) if name in integers else FLOATS)
        if self.outtype == "auto":
            elements: Counter[str] = Counter()
            for name, shape in sources.items():
                elements[stored[name].dtype] += math.prod(shape)
            self.outtype = "f16" if elements.most_common(1)[0][0] == "F16" else "bf16"
        written = filter(self.family.is_written, tensors)
        self.tensors = [(tensor, tensor.spec(self.outtype)) for tensor in written]
        self.n_parameters = sum(math.prod(shape) for shape in sources.values())

    def _all_keys(self, pre: str | None) -> list[KeyValue]:
        family = self.family
        keys = [*self.general.key_values(family.architecture), *family.key_values(), *self._table_keys]
        if not self.vocab_only:
            keys.append(KeyValue("general.file_type", "u32", FILE_TYPES[self.outtype]))
        speaker = family if self.target is None else self.target
        tokens = tokenizer_keys(
            self._tokenizer_folder, speaker.config, speaker.vocab_size, speaker.tokenizer_kinds, pre
        )
        keys += family.own_tokenizer_keys(tokens)
        return [*keys, KeyValue("general.quantization_version", "u32", 2)]

    def __enter__(self) -> "Conversion":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.checkpoint is not None:
            self.checkpoint.close()


def text_name(name: str) -> str:
    """The name that a tensor of a multimodal model's text part has where that part stands alone."""
    for prefix, plain in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _check(stored: StoredTensor, shape: tuple[int, ...], dtypes: Collection[str]) -> None:
    if stored.shape != shape:
        raise ModelError(
            f"{stored.path}: tensor '{stored.name}' has shape {list(stored.shape)}, "
            f"expected {list(shape)} by config.json"
        )
    if stored.dtype not in dtypes:
        raise ModelError(
            f"{stored.path}: tensor '{stored.name}' has dtype {stored.dtype}, expected {', '.join(dtypes)}"
        )


def _listed(names: Collection[str]) -> str:
    """The first names, and how many there are in all."""
    shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    return f"tensor {shown}" if len(names) == 1 else f"{len(names)} tensors ({shown})"
