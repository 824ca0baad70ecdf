"""Certificates for TLS tests: members of one authority, strangers, and one that is out of date."""

from __future__ import annotations

import datetime
import tempfile
from functools import cache
from pathlib import Path

import trustme


class Authority:
    """A CA and what it signed, as the files that `EngineConfig` wants."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mooncake-certs-")  # removed when the process ends
        self._ca = trustme.CA()
        self.ca = str(Path(self._folder.name, "ca.pem"))
        self._ca.cert_pem.write_to_path(self.ca)

    def member(self, name: str, *, ca: str = "", not_after: datetime.datetime | None = None) -> dict[str, str]:
        """`tls_*` fields of an engine; `ca`: another authority's file, for one that trusts somebody else."""
        made = self._ca.issue_cert(f"{name}.mooncake.test", not_after=not_after)
        cert, key = Path(self._folder.name, f"{name}.pem"), Path(self._folder.name, f"{name}.key")
        cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": ca or self.ca}


@cache
def authority() -> Authority:
    return Authority()


@cache
def member(name: str) -> dict[str, str]:
    """One of the authority that most tests share."""
    return authority().member(name)
