"""Model names: the parts of `TinyLlama-1.1B-Chat-v1.0`, size labels, names of output files."""

import re
from dataclasses import dataclass
from pathlib import Path

_SIZE = re.compile(r"(?:\d+x)?(?P<count>\d+(?:\.\d+)?)(?P<unit>[KMBTkmbt])(?:-A\d+(?:\.\d+)?[KMBTkmbt])?")
_ACTIVE = re.compile(r"A\d+(?:\.\d+)?[KMBTkmbt]")  # follows the size of a mixture of experts
_VERSION = re.compile(r"[vV]\d+(?:\.\d+)*")
_TUNINGS = {"base", "chat", "instruct", "it", "thinking"}
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class ModelName:
    """Parts of a name; an empty text where it has none. `basename` is what stands before the first other part."""

    basename: str
    size_label: str
    finetune: str
    version: str

    @classmethod
    def parse(cls, text: str) -> "ModelName":
        parts = [part for part in re.split(r"[-_\s]+", text) if part]
        rest = next(
            (at for at, part in enumerate(parts) if _SIZE.fullmatch(part) or _VERSION.fullmatch(part)),
            next((at for at, part in enumerate(parts) if at and part.lower() in _TUNINGS), len(parts)),
        )
        finetune: list[str] = []
        size = version = ""
        for part in parts[rest:]:
            if not size and _SIZE.fullmatch(part):
                size = part[:-1] + part[-1].upper()
            elif size and not finetune and _ACTIVE.fullmatch(part):
                size += f"-{part}"
            elif not version and _VERSION.fullmatch(part):
                version = part
            else:
                finetune.append(part)
        return cls("-".join(parts[:rest]), size, "-".join(finetune), version)

    def file_stem(self, type_label: str) -> str:
        """As users know it: `TinyLlama-1.1B-Chat-v1.0-F16`."""
        parts = (self.basename, self.size_label, self.finetune, self.version, type_label)
        return "-".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts if part)


def spaced(name: str) -> str:
    """A name for people: `TinyLlama 1.1B Chat v1.0`."""
    return " ".join(re.split(r"[-_\s]+", name)).strip()


def folder_name(folder: Path) -> tuple[str, str]:
    """(organisation, model) of a checkpoint's folder; the organisation only from a download cache, else empty."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and (names := folder.parent.parent.name.split("--"))[0] == "models":
        return names[-2] if len(names) > 2 else "", names[-1]
    return "", folder.name


def size_label(n_parameters: int, named: str = "") -> str:
    """`135M`, `1.1B`: two digits at least. A size in the name stands unless it is far off."""
    match = _SIZE.fullmatch(named)
    if match and 0.7 <= n_parameters / (float(match["count"]) * _UNITS[match["unit"].upper()]) <= 1.4:
        return named
    unit = next((unit for unit in "TBMK" if n_parameters >= _UNITS[unit]), "K")
    count = n_parameters / _UNITS[unit]
    return f"{count:.{1 if round(count) < 10 else 0}f}{unit}"
