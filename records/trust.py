"""Decides whose machine code may run here.

A cubin is machine code. schedsearch therefore loads code from a database only if this machine wrote it, or if the user
marked the database with `schedsearch records trust FILE`. A database cannot claim either for itself:

- every artifact that is written carries an HMAC of its sha256 under a random key that never leaves this machine
  (`machine-key` in the state folder, mode 0600);
- a mark is a file in the state folder, named by the absolute path and the unique id of the database.

The state folder is platformdirs' `user_state_dir`, or SCHEDSEARCH_STATE_DIR. This module needs platformdirs and the standard
library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
import time
from pathlib import Path

from schedsearch.errors import DatabaseError, UntrustedDatabaseError

STATE_DIR_VARIABLE = "SCHEDSEARCH_STATE_DIR"
_KEY_BYTES = 32


def state_dir() -> Path:
    if folder := os.environ.get(STATE_DIR_VARIABLE):
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_state_dir("schedsearch", appauthor=False))


def machine_id() -> str:
    """A public name of this machine, 16 hex digits. It reveals nothing about the key.

    Raises:
        DatabaseError: the state folder cannot be written.
    """
    return hashlib.sha256(b"schedsearch machine\0" + _key(create=True)).hexdigest()[:16]


def sign(text: str) -> str:
    """This machine's signature of a text (an artifact's sha256, a database's id).

    Raises:
        DatabaseError: the state folder cannot be written.
    """
    return _hmac(_key(create=True), text)


def is_ours(text: str, signature: str | None) -> bool:
    """Whether this machine signed `text`. A machine without a key has signed nothing; this creates no key."""
    key = _key(create=False) if signature else b""
    return bool(key) and hmac.compare_digest(_hmac(key, text), signature or "")


def is_marked(path: Path, uuid: str) -> bool:
    """Whether the user of this machine marked this database as trusted."""
    return _mark(path, uuid).is_file()


def trust(path: str | Path) -> None:
    """Marks a database as trusted on this machine, at its present path.

    Raises:
        DatabaseError: it is not a database of schedsearch, or the mark cannot be written.
    """
    from schedsearch.records.lookup import Lookup

    path = Path(path)
    with Lookup(path) as lookup:
        uuid = lookup.uuid
    mark = _mark(path, uuid)
    _write(mark, json.dumps({"path": str(path.resolve()), "uuid": uuid, "at": time.time()}).encode())


def require(path: Path, uuid: str, sha256: str, signature: str | None) -> None:
    """Raises UntrustedDatabaseError unless code with this sha256 may be loaded from the database."""
    if not is_ours(sha256, signature) and not is_marked(path, uuid):
        raise UntrustedDatabaseError(
            f"{path} holds machine code ({sha256[:12]}) that another machine wrote; if you trust its origin run: "
            f"schedsearch records trust {path}; else tune here, or rebuild from the stored configuration"
        )


def verify_digest(path: Path, sha256: str, plan_json: str, code: bytes) -> None:
    """Raises DatabaseError if code and plan do not match `sha256` (see `Artifact.sha256`)."""
    if hashlib.sha256(plan_json.encode() + b"\0" + code).hexdigest() != sha256:
        raise DatabaseError(
            f"{path} is damaged: artifact {sha256[:12]} does not match its checksum; tune again or restore a copy"
        )


def _hmac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _mark(path: Path, uuid: str) -> Path:
    return state_dir() / "trusted" / hashlib.sha256(f"{path.resolve()}\0{uuid}".encode()).hexdigest()


def _key(*, create: bool) -> bytes:
    path = state_dir() / "machine-key"
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        if not create:
            return b""
        _write(path, secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()  # perhaps written by another process that came first
    except OSError as error:
        raise _no_state(path, error) from error
    if len(key) != _KEY_BYTES:
        raise DatabaseError(
            f"{path} is damaged: {len(key)} bytes, {_KEY_BYTES} wanted; delete it (code stored so far then needs: "
            "schedsearch records trust FILE)"
        )
    return key


def _write(path: Path, data: bytes) -> None:
    """Creates a file with mode 0600 and all its content at once. An existing file stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            Path(temporary).unlink()
    except OSError as error:
        raise _no_state(path, error) from error


def _no_state(path: Path, error: OSError) -> DatabaseError:
    return DatabaseError(
        f"cannot use {path} ({error.strerror}), where this machine's key and marks of trust are kept; "
        f"set {STATE_DIR_VARIABLE} to a folder that can be written"
    )
