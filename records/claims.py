"""Decides whose machine code may run here.

A cubin is machine code. schedsearch therefore loads code from a file only if this machine vouches for what the file says
about it, or if the user marked exactly that with `schedsearch records trust FILE`. A file can claim neither for itself:

- This machine signs with a random key that never leaves it (`machine-key` in the state folder, mode 0600). A signature is
  an HMAC over kind and string: one of an artifact is none of a best row. What deployment serves is a `Claim`, a row of
  table best: this code is the best of this workload on this target, in this configuration. The row's signature covers all
  of it, so that good code cannot be put beside another workload.
- A mark is a file in the state folder, named by the digest of the claim. It follows the content wherever the file goes, and
  does not cover what comes into the file later.
- Code that turned out wrong here is revoked by a file in the state folder. Neither signature nor mark help it, so that an
  old copy of the row cannot bring it back.

The state folder is platformdirs' `user_state_dir`, or SCHEDSEARCH_STATE_DIR; `state` says when it is refused. This module
needs platformdirs and the standard library only.

See docs/decisions/004-trust.md.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from schedsearch.errors import DatabaseError, UntrustedDatabaseError
from schedsearch.records import state
from schedsearch.records.state import state_dir


class Kind(enum.StrEnum):
    """What a signature is of. A signature of one kind is never valid as one of another."""

    ARTIFACT = "artifact"  # its sha256: this machine compiled the code
    BEST = "best"  # `Claim.text`: this machine measured and verified it
    DATABASE = "database"  # its unique id: this machine created it
    RECORD = "record"  # `record_text`: this machine measured it
    RANGE = "range"  # `RangeClaim.text`: this machine measured and verified the kernels of a range of sizes
    EXECUTABLE = "executable"  # sha256 of the program of a model.ssx: this machine built it


# Until schema version 3 the bare sha256 of an artifact and the bare id of a database were signed. Neither text can be taken
# for the other.
_SIGNED_BARE = {
    Kind.ARTIFACT: re.compile(r"[0-9a-f]{64}"),
    Kind.DATABASE: re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
}


class Claim(NamedTuple):
    """What a row of table best claims: the columns that its signature covers."""

    workload_id: str
    target_key: str
    mode: str
    template: str
    template_version: int
    config: str
    time_ns: float | None
    verified: bool
    artifact_sha256: str | None

    @property
    def kind(self) -> Kind:
        return Kind.BEST

    @property
    def text(self) -> str:
        """Canonical JSON of all fields. A damaged row may hold other types; its text then matches no signature."""
        return json.dumps([*self[:7], bool(self.verified), self.artifact_sha256], separators=(",", ":"), default=repr)

    @property
    def revocation(self) -> Path:
        """It is of the code, for all targets, modes and times: code that is wrong for a workload is wrong in each."""
        return state_dir() / "revoked" / _digest("code", json.dumps([self.workload_id, self.artifact_sha256], default=repr))


class ExecutableClaim(NamedTuple):
    """What a model.ssx claims: the sha256 of its program, which names its code and weights by their own digests."""

    program_sha256: str

    @property
    def kind(self) -> Kind:
        return Kind.EXECUTABLE

    @property
    def text(self) -> str:
        return self.program_sha256


class RangeClaim(NamedTuple):
    """What a row of table size_table claims; `digest` is the sha256 of its table and machine code."""

    family: str
    target_key: str
    mode: str
    low: int
    high: int
    digest: str

    @property
    def kind(self) -> Kind:
        return Kind.RANGE

    @property
    def text(self) -> str:
        return json.dumps(list(self), separators=(",", ":"))


AnyClaim = Claim | ExecutableClaim | RangeClaim


def record_text(content_id: str, artifact_sha256: str | None) -> str:
    """What the signature of a record covers: its content, and the code that was measured if that was kept."""
    return f"{content_id} {artifact_sha256 or '-'}"


def machine_id() -> str:
    """A public name of this machine, 16 hex digits. It reveals nothing about the key.

    Raises:
        DatabaseError: the state folder cannot be written, or others could use it (`state`).
    """
    return hashlib.sha256(b"schedsearch machine\0" + state.key(create=True)).hexdigest()[:16]


def sign(kind: Kind, text: str) -> str:
    """This machine's signature.

    Raises:
        DatabaseError: the state folder cannot be written, or others could use it (`state`).
    """
    return sign_all(kind, [text])[0]


def sign_all(kind: Kind, texts: Sequence[str]) -> list[str]:
    """This machine's signatures of several texts, with one look at its key; see `sign`."""
    key = state.key(create=True) if texts else b""
    return [_hmac(key, _separated(kind, text)) for text in texts]


def is_ours(kind: Kind, text: str, signature: str | None) -> bool:
    """Whether this machine signed `text` as `kind`. A machine without a key has signed nothing; this creates no key. Nothing
    was signed by a key that others can use (`state`), either; a warning says so.

    Raises:
        DatabaseError: the key is damaged or cannot be read.
    """
    try:
        key = state.key(create=False) if signature else b""
    except state.RefusedStateError as error:
        state.warn(str(error))
        return False
    if not key:
        return False
    signed = [_separated(kind, text)]
    if kind in _SIGNED_BARE and _SIGNED_BARE[kind].fullmatch(text):
        signed.append(text)
    given = str(signature).encode(errors="replace")
    return any(hmac.compare_digest(_hmac(key, each).encode(), given) for each in signed)


def created_here(meta: Mapping[str, str]) -> bool:
    """Whether this machine created the database that has this table meta."""
    return is_ours(Kind.DATABASE, meta.get("uuid", ""), meta.get("signature", ""))


def vouches(claim: AnyClaim, signature: str | None) -> bool:
    """Whether the code of a claim may run here, and the claim counts as measured: this machine signed it or its user marked
    it, and the code has not turned out wrong since."""
    return (is_ours(claim.kind, claim.text, signature) or state.holds(mark_of(claim))) and not is_revoked(claim)


def mark_of(claim: AnyClaim) -> Path:
    """The file that marks a claim as trusted on this machine, wherever the file that makes the claim goes."""
    kind = "claim" if claim.kind is Kind.BEST else claim.kind
    return state_dir() / "trusted" / _digest(kind, claim.text)


def require(claim: Claim, signature: str | None, path: Path, *, kind: str = "store") -> None:
    """Raises UntrustedDatabaseError unless the code of a claim may be loaded from the file.

    Args:
        path, kind: the file and whether it is a "store" or a "deploy" file, for the message.
    """
    if vouches(claim, signature):
        return
    code = f"the machine code {str(claim.artifact_sha256)[:12]} in {path}"
    if is_revoked(claim):
        raise UntrustedDatabaseError(
            f"{code} turned out wrong for this workload on this machine, so it is not loaded; tune the workload again"
        )
    if (objection := state.objection()) is not None:
        raise UntrustedDatabaseError(
            f"nothing vouches for {code}: {objection}; else it is built again from its configuration"
        )
    verify = "" if kind == "deploy" else f"to verify and sign it here: schedsearch records verify --db {path}; "
    raise UntrustedDatabaseError(
        f"this machine did not sign {code} for this workload, device and configuration: another machine or an earlier "
        f"version of schedsearch wrote it, or it was changed; {verify}if you trust its origin: schedsearch records trust "
        f"{path}; else it is built again from its configuration"
    )


def is_revoked(claim: AnyClaim) -> bool:
    """Whether the code of a claim turned out wrong on this machine. Only bests are revoked."""
    return isinstance(claim, Claim) and claim.artifact_sha256 is not None and claim.revocation.is_file()


def revoke(claim: Claim) -> None:
    """The code of a claim turned out wrong for its workload: this machine no longer serves it from any file.

    Raises:
        DatabaseError: the state folder cannot be written.
    """
    if claim.artifact_sha256 is not None:
        state.write(claim.revocation, json.dumps({"claim": claim.text, "at": time.time()}).encode())


def reinstate(claim: Claim) -> None:
    """The code of a claim was verified here again."""
    if is_revoked(claim):
        with contextlib.suppress(FileNotFoundError):
            claim.revocation.unlink()


def matches_digest(sha256: str, plan_json: str, code: bytes) -> bool:
    """Whether code and plan match `sha256` (see `Artifact.sha256`)."""
    return hashlib.sha256(plan_json.encode(errors="surrogateescape") + b"\0" + code).hexdigest() == sha256


def verify_digest(path: Path, sha256: str, plan_json: str, code: bytes) -> None:
    """Raises DatabaseError if code and plan do not match `sha256`."""
    if not matches_digest(sha256, plan_json, code):
        raise DatabaseError(
            f"{path} is damaged: artifact {sha256[:12]} does not match its checksum; tune again or restore a copy"
        )


def _separated(kind: Kind, text: str) -> str:
    return f"schedsearch {kind}\0{text}"


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"schedsearch {kind}\0{text}".encode(errors="replace")).hexdigest()


def _hmac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(errors="replace"), hashlib.sha256).hexdigest()
