"""What a repository holds, on Hugging Face (and mirrors) and on ModelScope: the paths, sizes and checksums of its GGUF
files, and where to get them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from pyllama.errors import DownloadError

from .cache import PRESET
from .selection import checked_path, checked_repo
from .session import NO_ACCESS, Access, Session, origin, parsed_url, shown

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://www.modelscope.cn"

MAX_PAGES = 100


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL. `path`: inside its repository. Size (bytes) and sha256 (hex): None where the hub is silent."""

    path: str
    url: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The GGUF files of one revision, by path. `revision`: a commit, or a branch where the hub names no commit.

    preset: the repository's `preset.ini`, where it has one.
    """

    revision: str
    files: Mapping[str, RemoteFile]
    preset: RemoteFile | None = None


@dataclass(frozen=True, slots=True)
class HuggingFace:
    endpoint: str = HUGGING_FACE
    access: Access = NO_ACCESS

    def list_files(self, session: Session, repo: str) -> Listing:
        """Raises DownloadError."""
        base = f"{self.endpoint}/api/models/{checked_repo(repo)}"
        info, _ = session.get_json(f"{base}/revision/main", self.access)
        commit = _text(info, "sha")
        if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise DownloadError(f"{repo}: the hub names no commit, but {commit!r}")
        files: dict[str, RemoteFile] = {}
        page = f"{base}/tree/{commit}?recursive=true"
        for _ in range(MAX_PAGES):
            entries, headers = session.get_json(page, self.access)
            for entry in _entries(entries, repo):
                if _text(entry, "type") == "file" and (path := _wanted_path(_text(entry, "path"))):
                    lfs = _object(entry.get("lfs"))
                    files[path] = RemoteFile(
                        path,
                        f"{self.endpoint}/{repo}/resolve/{commit}/{quote(path)}",
                        _size(lfs.get("size", entry.get("size"))),
                        _sha256(lfs.get("oid")),
                    )
            if (next_page := _next_page(headers, page)) is None:
                return Listing(commit, files, files.pop(PRESET, None))
            page = next_page
        raise DownloadError(f"{repo}: the list of files has more than {MAX_PAGES} pages")


@dataclass(frozen=True, slots=True)
class ModelScope:
    endpoint: str = MODELSCOPE
    access: Access = NO_ACCESS

    def list_files(self, session: Session, repo: str) -> Listing:
        """Raises DownloadError."""
        base = f"{self.endpoint}/api/v1/models/{checked_repo(repo)}/repo"
        query = urlencode({"Revision": "master", "Recursive": "true"})
        document, _ = session.get_json(f"{base}/files?{query}", self.access)
        if (answer := _object(document)).get("Code") != 200:
            raise DownloadError(f"{repo}: the hub answered: {answer.get('Message', 'nothing that it should')}")
        files: dict[str, RemoteFile] = {}
        for entry in _entries(_object(answer.get("Data")).get("Files"), repo):
            if entry.get("Type") != "tree" and (path := _wanted_path(_text(entry, "Path"))):
                query = urlencode({"Revision": "master", "FilePath": path})
                files[path] = RemoteFile(
                    path, f"{base}?{query}", _size(entry.get("Size")), _sha256(entry.get("Sha256"))
                )
        return Listing("master", files, files.pop(PRESET, None))


Hub = HuggingFace | ModelScope


def hugging_face(environ: Mapping[str, str], token: str | None = None) -> Hub:
    """The hub of `-hf`: MODEL_ENDPOINT, else HF_ENDPOINT, else Hugging Face. A ModelScope address is taken as such."""
    endpoint = environ.get("MODEL_ENDPOINT") or environ.get("HF_ENDPOINT") or HUGGING_FACE
    if re.search(r"(^|\.)modelscope\.", parsed_url(endpoint).host):
        return modelscope({**environ, "MODELSCOPE_ENDPOINT": endpoint})
    endpoint = endpoint.rstrip("/")
    token = token or environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {_header_value(token, 'HF_TOKEN')}"} if token else {}
    return HuggingFace(endpoint, Access(origin(endpoint), headers, "HF_TOKEN"))


def modelscope(environ: Mapping[str, str]) -> ModelScope:
    """ModelScope, or what MODELSCOPE_ENDPOINT (a URL) or MODELSCOPE_DOMAIN (a host) names."""
    domain = environ.get("MODELSCOPE_DOMAIN")
    endpoint = environ.get("MODELSCOPE_ENDPOINT") or (f"https://{domain}" if domain else MODELSCOPE)
    endpoint = endpoint.rstrip("/")
    token = environ.get("MODELSCOPE_API_TOKEN")
    headers = {"Cookie": f"m_session_id={_header_value(token, 'MODELSCOPE_API_TOKEN')}"} if token else {}
    return ModelScope(endpoint, Access(origin(endpoint), headers, "MODELSCOPE_API_TOKEN"))


def _header_value(token: str, variable: str) -> str:
    if not re.fullmatch(r"[\x21-\x3a\x3c-\x7e]+", token):
        raise DownloadError(f"{variable} holds characters that a token cannot have")
    return token


def _next_page(headers: httpx.Headers, page: str) -> str | None:
    found = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', headers.get("link", ""))
    if found is None:
        return None
    try:
        link = httpx.URL(page).join(found[1])
    except httpx.InvalidURL:
        raise DownloadError(f"{shown(page)}: the link to the next page is not a URL") from None
    return str(httpx.URL(page).copy_with(raw_path=link.raw_path))  # mirrors pass on links to the original host


def _wanted_path(path: str) -> str | None:
    return checked_path(path) if path.lower().endswith(".gguf") or path == PRESET else None


def _entries(value: Any, repo: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise DownloadError(f"{repo}: the hub sent no list of files")
    return value


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(document: Any, key: str) -> str:
    value = _object(document).get(key)
    if not isinstance(value, str):
        raise DownloadError(f"the hub's answer has no text in {key!r}")
    return value


def _size(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _sha256(value: Any) -> str | None:
    return value.lower() if isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{64}", value) else None
