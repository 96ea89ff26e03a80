"""TLS: the key and the certificate of the server, looked at before anything else starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


class TlsError(ValueError):
    """The key or the certificate cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A private key and the certificate for it (or a chain that begins with it), both PEM."""

    key: str
    certificate: str


def _refuse_passphrase() -> str:
    raise TlsError("the key is protected by a passphrase; give one without")


def tls_files(key: str, certificate: str) -> TlsFiles | None:
    """None when neither file is given. Raises `TlsError` when only one is, or they cannot serve together."""
    if not key and not certificate:
        return None
    if not key or not certificate:
        missing, given = ("--ssl-key-file", "--ssl-cert-file") if certificate else ("--ssl-cert-file", "--ssl-key-file")
        raise TlsError(f"{given} needs {missing} too")
    for option, path in (("--ssl-key-file", key), ("--ssl-cert-file", certificate)):
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise TlsError(f"{option}: {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, _refuse_passphrase)
    except TlsError as error:
        raise TlsError(f"--ssl-key-file: {key}: {error}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key} is not the key of the certificate {certificate}") from None
        reason = error.reason or "not a PEM file of that kind"
        raise TlsError(f"{key} and {certificate} are not a private key and its certificate: {reason}") from None
    return TlsFiles(key, certificate)
