"""File types: the named mixtures a model can be quantised to, with their numbers in `general.file_type`."""

from typing import NamedTuple

from pyllama.errors import InvalidArgument
from pyllama.gguf import type_traits


class FileType(NamedTuple):
    name: str
    id: int | None  # general.file_type; None keeps the source's
    default: str  # type of ordinary tensors; "" copies them
    note: str  # size of the model and rise of its perplexity, or bits per weight
    stands_for: str = ""

    @property
    def mixture(self) -> str:
        """The name that the mixture rules know."""
        return self.stands_for or self.name


COPY = FileType("COPY", None, "", "copies the tensors as they are")

_8B = "on Llama-3-8B"
_7B = "on Mistral-7B"

FILE_TYPES: tuple[FileType, ...] = (
    FileType("Q1_0", 40, "q1_0", "1.125 bits per weight"),
    FileType("Q2_0", 41, "q2_0", "2.25 bits per weight, groups of 64"),
    FileType("Q4_0", 2, "q4_0", f"4.34G, +0.4685 {_8B}"),
    FileType("Q4_1", 3, "q4_1", f"4.78G, +0.4511 {_8B}"),
    FileType("MXFP4_MOE", 38, "mxfp4", "experts MXFP4, the rest Q8_0"),
    FileType("Q5_0", 8, "q5_0", f"5.21G, +0.1316 {_8B}"),
    FileType("Q5_1", 9, "q5_1", f"5.65G, +0.1062 {_8B}"),
    FileType("IQ2_XXS", 19, "iq2_xxs", "2.06 bits per weight"),
    FileType("IQ2_XS", 20, "iq2_xs", "2.31 bits per weight"),
    FileType("IQ2_S", 28, "iq2_xs", "2.5 bits per weight"),
    FileType("IQ2_M", 29, "iq2_s", "2.7 bits per weight"),
    FileType("IQ1_S", 24, "iq1_s", "1.56 bits per weight"),
    FileType("IQ1_M", 31, "iq1_m", "1.75 bits per weight"),
    FileType("TQ1_0", 36, "tq1_0", "1.69 bits per weight, ternary"),
    FileType("TQ2_0", 37, "tq2_0", "2.06 bits per weight, ternary"),
    FileType("Q2_K", 10, "q2_K", f"2.96G, +3.5199 {_8B}"),
    FileType("Q2_K_S", 21, "q2_K", f"2.96G, +3.1836 {_8B}"),
    FileType("IQ3_XXS", 23, "iq3_xxs", "3.06 bits per weight"),
    FileType("IQ3_S", 26, "iq3_s", "3.44 bits per weight"),
    FileType("IQ3_M", 27, "iq3_s", "3.66 bits per weight"),
    FileType("Q3_K", 12, "q3_K", "same as Q3_K_M", stands_for="Q3_K_M"),
    FileType("IQ3_XS", 22, "iq3_s", "3.3 bits per weight"),
    FileType("Q3_K_S", 11, "q3_K", f"3.41G, +1.6321 {_8B}"),
    FileType("Q3_K_M", 12, "q3_K", f"3.74G, +0.6569 {_8B}"),
    FileType("Q3_K_L", 13, "q3_K", f"4.03G, +0.5562 {_8B}"),
    FileType("IQ4_NL", 25, "iq4_nl", "4.50 bits per weight"),
    FileType("IQ4_XS", 30, "iq4_xs", "4.25 bits per weight"),
    FileType("Q4_K", 15, "q4_K", "same as Q4_K_M", stands_for="Q4_K_M"),
    FileType("Q4_K_S", 14, "q4_K", f"4.37G, +0.2689 {_8B}"),
    FileType("Q4_K_M", 15, "q4_K", f"4.58G, +0.1754 {_8B}"),
    FileType("Q5_K", 17, "q5_K", "same as Q5_K_M", stands_for="Q5_K_M"),
    FileType("Q5_K_S", 16, "q5_K", f"5.21G, +0.1049 {_8B}"),
    FileType("Q5_K_M", 17, "q5_K", f"5.33G, +0.0569 {_8B}"),
    FileType("Q6_K", 18, "q6_K", f"6.14G, +0.0217 {_8B}"),
    FileType("Q8_0", 7, "q8_0", f"7.96G, +0.0026 {_8B}"),
    FileType("F16", 1, "f16", f"14.00G, +0.0020 {_7B}"),
    FileType("BF16", 32, "bf16", f"14.00G, -0.0050 {_7B}"),
    FileType("F32", 0, "f32", "26.00G with 7B weights"),
    COPY,
)

# Tensor types that weights have; integers, f64 and the formats of activations are only ever copied.
CONVERTIBLE = frozenset(type_traits) - {"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K"}


def find_file_type(text: str) -> FileType | None:
    """By name in any case or by number."""
    number = int(text) if text.isdecimal() else -1
    return next((one for one in FILE_TYPES if one.name == text.upper() or one.id == number), None)


def parse_tensor_type(text: str) -> str:
    """The name of a tensor type that weights can have, given in any case. Raises `InvalidArgument`."""
    name = next((name for name in type_traits if name.lower() == text.lower()), None)
    if name not in CONVERTIBLE:
        known = ", ".join(name for name in type_traits if name in CONVERTIBLE)
        raise InvalidArgument(f"'{text}' is not a type to quantise to; there are {known}")
    return name
