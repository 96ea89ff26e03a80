"""llama.cpp as a black box for vocabularies: C functions of the `xllamacpp` wheel, called in a process of their own.

`ask(model, texts)` gives its ids, texts and special tokens. Only functions whose arguments are plain numbers and bytes
are used, besides one parameter block that is passed through unread, so the layout of its structures does not matter.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120
ID_NAMES = ("bos", "eos", "eot", "pad", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")


def is_available() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def ask(model: Path, texts: Sequence[bytes], *, decode: bool = True) -> dict[str, Any]:
    """`ids`: special ids (-1: none); `eog`; `flags`: [add_bos, add_eos]; `answers`: one dict per text.

    An answer has `encode`: {"<add_special><parse_special>": ids} with digits 0 or 1, and
    `decode`: {"<special><remove_special>": latin-1 text} of the ids with both switches on.
    Without `decode` it has only `encode` with add_special 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder, "request.json")
        answer = Path(folder, "answer.json")
        request.write_text(json.dumps({"texts": [text.decode("latin-1") for text in texts], "decode": decode}))
        command = [sys.executable, __file__, str(model), str(request), str(answer)]
        # A failed assertion inside would otherwise start a debugger.
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
        if run.returncode != 0:
            raise RuntimeError(f"the oracle ended with status {run.returncode}: {run.stderr[-2000:]}")
        return json.loads(answer.read_text())


class _Parameters(ctypes.Structure):
    """llama_model_params, seen as more bytes than it has: made by the library, handed back unread."""

    _fields_ = (("content", ctypes.c_uint8 * 512),)


class _Vocabulary:
    def __init__(self, path: str) -> None:
        spec = importlib.util.find_spec("xllamacpp")
        if spec is None or spec.origin is None:
            raise SystemExit("needs the xllamacpp package")
        library = next(Path(spec.origin).parent.glob("xllamacpp*.so"))
        self.lib = ctypes.CDLL(str(library))
        pointer, number, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
        signatures = {
            "llama_model_default_params": ([], _Parameters),
            "llama_model_load_from_file": ([ctypes.c_char_p, _Parameters], pointer),
            "llama_model_get_vocab": ([pointer], pointer),
            "llama_vocab_n_tokens": ([pointer], number),
            "llama_vocab_is_eog": ([pointer, number], flag),
            "llama_vocab_get_add_bos": ([pointer], flag),
            "llama_vocab_get_add_eos": ([pointer], flag),
            "llama_tokenize": ([pointer, ctypes.c_char_p, number, pointer, number, flag, flag], number),
            "llama_detokenize": ([pointer, pointer, number, ctypes.c_char_p, number, flag, flag], number),
            **{f"llama_vocab_{name}": ([pointer], number) for name in ID_NAMES},
        }
        for name, (arguments, result) in signatures.items():
            function = getattr(self.lib, name)
            function.argtypes, function.restype = arguments, result
        self.lib.llama_backend_init()
        model = self.lib.llama_model_load_from_file(os.fsencode(path), self.lib.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp refuses {path}")
        self.vocabulary = self.lib.llama_model_get_vocab(model)

    def encode(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        capacity = len(text) + 8
        tokens = (ctypes.c_int32 * capacity)()
        count = self.lib.llama_tokenize(self.vocabulary, text, len(text), tokens, capacity, add_special, parse_special)
        return list(tokens[:count])

    def decode(self, tokens: list[int], special: bool, remove_special: bool) -> bytes:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        capacity = 256 + 32 * len(tokens)
        text = ctypes.create_string_buffer(capacity)
        count = self.lib.llama_detokenize(self.vocabulary, ids, len(tokens), text, capacity, remove_special, special)
        return text.raw[:count]

    def describe(self) -> dict[str, Any]:
        count = self.lib.llama_vocab_n_tokens(self.vocabulary)
        return {
            "ids": {name: getattr(self.lib, f"llama_vocab_{name}")(self.vocabulary) for name in ID_NAMES},
            "eog": [token for token in range(count) if self.lib.llama_vocab_is_eog(self.vocabulary, token)],
            "flags": [
                self.lib.llama_vocab_get_add_bos(self.vocabulary),
                self.lib.llama_vocab_get_add_eos(self.vocabulary),
            ],
        }

    def answer(self, text: bytes, decode: bool) -> dict[str, Any]:
        switches = (False, True)
        if not decode:
            return {"encode": {f"0{parse:d}": self.encode(text, False, parse) for parse in switches}}
        encoded = {f"{add:d}{parse:d}": self.encode(text, add, parse) for add in switches for parse in switches}
        decoded = {
            f"{special:d}{remove:d}": self.decode(encoded["11"], special, remove).decode("latin-1")
            for special in switches
            for remove in switches
        }
        return {"encode": encoded, "decode": decoded}


def _main(model: str, request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    vocabulary = _Vocabulary(model)
    answers = [vocabulary.answer(text.encode("latin-1"), request["decode"]) for text in request["texts"]]
    Path(answer_path).write_text(json.dumps({**vocabulary.describe(), "answers": answers}))
    sys.stdout.flush()
    os._exit(0)  # the library's own tear-down at exit is of no interest and may hang


if __name__ == "__main__":
    _main(*sys.argv[1:])
