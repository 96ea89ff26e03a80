"""Which files a repository and a quant mean, and which names from outside are refused."""

from __future__ import annotations

import pytest

from pyllama.download.selection import checked_path, checked_repo, quant_of, select_model, select_projector, shards_of
from pyllama.errors import DownloadError

SHARDS = [f"Q8_0/m-Q8_0-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
OTHERS = [f"m-BF16-0000{index}-of-00002.gguf" for index in (1, 2)]
PATHS = [
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-UD-Q4_K_M.gguf",
    "m-IQ4_XS.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
    "mtp-m-Q4_K_M.gguf",
    "eagle3-m-Q4_K_M.gguf",
    "dspark-m-Q4_K_M.gguf",
    "imatrix.gguf",
    *SHARDS,
    *OTHERS,
]


@pytest.mark.parametrize(
    ("quant", "first"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        ("Q2_K", "m-Q2_K.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
        ("Q8_0", SHARDS[0]),
        ("bf16", OTHERS[0]),
    ],
)
def test_a_quant_names_a_model(quant: str, first: str) -> None:
    assert select_model(PATHS, quant=quant)[0] == first


@pytest.mark.parametrize("quant", ["Q4_K", "K_S", "F16", "XS4", "Q8", ".*", "Q4_K_M.gguf"])
def test_a_quant_that_is_not_there_is_an_error_with_the_choice(quant: str) -> None:
    with pytest.raises(DownloadError, match=r"there is no .* model; there are: .*m-Q2_K\.gguf"):
        select_model(PATHS, quant=quant)


def test_a_split_model_comes_whole_and_in_order() -> None:
    assert select_model(PATHS[::-1], quant="Q8_0") == tuple(SHARDS)
    assert select_model(PATHS, file=SHARDS[1]) == tuple(SHARDS)


def test_a_missing_shard_is_named_and_not_taken_from_another_quant() -> None:
    paths = [path for path in PATHS if path != SHARDS[1]] + ["Q4_0/m-Q4_0-00002-of-00003.gguf"]
    with pytest.raises(DownloadError, match=r"one of 3 shards, and Q8_0/m-Q8_0-00002-of-00003\.gguf is missing"):
        select_model(paths, quant="Q8_0")


def test_without_q4_k_m_the_first_model_is_taken() -> None:
    assert select_model(["b-Q8_0.gguf", "a-Q5_0.gguf", "README.gguf.txt"]) == ("a-Q5_0.gguf",)


def test_the_only_dynamic_quant_answers_to_the_plain_name() -> None:
    assert select_model(["m-UD-Q4_K_M.gguf", "m-Q8_0.gguf"], quant="Q4_K_M") == ("m-UD-Q4_K_M.gguf",)


def test_a_folder_names_the_quant_where_the_file_does_not() -> None:
    paths = ["BF16/m-00001-of-00001.gguf", "Q8_0/m.gguf", "Q8_0/m-Q4_0.gguf"]
    assert select_model(paths, quant="BF16") == ("BF16/m-00001-of-00001.gguf",)
    assert select_model(paths, quant="Q8_0") == ("Q8_0/m.gguf",)


def test_a_file_is_taken_by_its_path_only() -> None:
    assert select_model(PATHS, file="imatrix.gguf") == ("imatrix.gguf",)
    with pytest.raises(DownloadError, match="there is no file m-Q8_0"):
        select_model(PATHS, file="m-Q8_0-00001-of-00003.gguf")


def test_a_repository_without_models_is_an_error() -> None:
    with pytest.raises(DownloadError, match=r"no model in GGUF format; there are: mmproj-F16\.gguf"):
        select_model(["mmproj-F16.gguf"])
    with pytest.raises(DownloadError, match="there are: none"):
        select_model([])


def test_the_f16_projector_is_preferred() -> None:
    assert select_projector(PATHS) == "mmproj-F16.gguf"
    assert select_projector(["mmproj-Q8_0.gguf", "a.gguf"]) == "mmproj-Q8_0.gguf"
    with pytest.raises(DownloadError, match="projector"):
        select_projector(["a.gguf"])


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Qwen3.8-27B-UD-Q4_K_M.gguf", "UD-Q4_K_M"),
        ("x/Qwen3.8-27B-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("ggml-model-q4_0.gguf", "Q4_0"),
        ("m-BF16.gguf", "BF16"),
        ("m-mxfp4_moe.gguf", "MXFP4_MOE"),
        ("stories15M.gguf", ""),
    ],
)
def test_the_quant_is_read_from_the_end_of_the_name(path: str, quant: str) -> None:
    assert quant_of(path) == quant


def test_odd_shard_numbers_are_plain_names() -> None:
    assert shards_of("m-00004-of-00003.gguf") == ("m-00004-of-00003.gguf",)
    assert shards_of("m-00000-of-00000.gguf") == ("m-00000-of-00000.gguf",)


OUTSIDE = ["", "/etc/x.gguf", "../x.gguf", "a/../../x.gguf", "a//x.gguf", "./x.gguf", "a/"]
ODD = ["C:/x.gguf", "C:x", "a\\x.gguf", "\\\\host\\x", "x\0.gguf", "x\n.gguf"]


@pytest.mark.parametrize("path", OUTSIDE + ODD)
def test_names_that_leave_their_folder_are_refused(path: str) -> None:
    with pytest.raises(DownloadError, match="not allowed"):
        checked_path(path)


@pytest.mark.parametrize("repo", ["", "a", "a/b/c", "../b", "a/..", "a/b?x", "a b/c", "a/b\n", "ä/b"])
def test_what_is_no_repository_is_refused(repo: str) -> None:
    with pytest.raises(DownloadError, match="is not a repository"):
        checked_repo(repo)
