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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from schedsearch.errors import DatabaseError, UntrustedDatabaseError
from schedsearch.records import state
from schedsearch.records.state import state_dir

_MARK = re.compile(r"[0-9a-f]{64}")  # the name of a mark's file


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
    def text(self) -> str:
        """Canonical JSON of all fields. A damaged row may hold other types; its text then matches no signature."""
        return json.dumps([*self[:7], bool(self.verified), self.artifact_sha256], separators=(",", ":"), default=repr)

    @property
    def mark(self) -> Path:
        return state_dir() / "trusted" / _digest("claim", self.text)

    @property
    def revocation(self) -> Path:
        """It is of the code, for all targets, modes and times: code that is wrong for a workload is wrong in each."""
        return state_dir() / "revoked" / _digest("code", json.dumps([self.workload_id, self.artifact_sha256], default=repr))


class ExecutableClaim(NamedTuple):
    """What a model.ssx claims: the sha256 of its program, which names its code and weights by their own digests."""

    program_sha256: str

    @property
    def mark(self) -> Path:
        return state_dir() / "trusted" / _digest("executable", self.program_sha256)


class RangeClaim(NamedTuple):
    """What a row of table size_table claims; `digest` is the sha256 of its table and machine code."""

    family: str
    target_key: str
    mode: str
    low: int
    high: int
    digest: str

    @property
    def text(self) -> str:
        return json.dumps(list(self), separators=(",", ":"))

    @property
    def mark(self) -> Path:
        return state_dir() / "trusted" / _digest("range", self.text)


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
    return _hmac(state.key(create=True), _separated(kind, text))


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


def vouches(claim: Claim, signature: str | None) -> bool:
    """Whether the code of a claim may run here, and the claim counts as measured: this machine signed it or its user marked
    it, and the code has not turned out wrong since."""
    return (is_ours(Kind.BEST, claim.text, signature) or state.holds(claim.mark)) and not is_revoked(claim)


def vouches_executable(claim: ExecutableClaim, signature: str | None) -> bool:
    """Whether a model.ssx may run here: this machine built it, or its user marked it."""
    return is_ours(Kind.EXECUTABLE, claim.program_sha256, signature) or state.holds(claim.mark)


def vouches_range(claim: RangeClaim, signature: str | None) -> bool:
    """Whether the kernels of a range may run here: this machine made them, or its user marked them."""
    return is_ours(Kind.RANGE, claim.text, signature) or state.holds(claim.mark)


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


def mark(claims: Iterable[Claim | ExecutableClaim | RangeClaim], source: Path) -> int:
    """Marks claims as trusted on this machine; `source` is noted in the marks. Returns how many had no mark before.

    Raises:
        DatabaseError: the state folder cannot be written.
    """
    note = json.dumps({"source": str(source.absolute()), "at": time.time()}).encode()
    new = [path for claim in claims if not state.holds(path := claim.mark)]
    for path in new:
        state.write(path, note)
    return len(new)


@dataclass(frozen=True)
class Trusted:
    """What `trust` did: how many kernels the file holds, and how many of them were neither signed nor marked before.
    A model.ssx counts as one, and so does the table of a range of sizes."""

    kernels: int
    marked: int


def trust(path: str | Path) -> Trusted:
    """Marks the kernels that a database holds now, or a whole model.ssx, as trusted on this machine, wherever the file goes.

    Raises:
        DatabaseError: it is not a file of schedsearch, or a mark cannot be written.
    """
    from schedsearch.records import size_tables
    from schedsearch.records.executables import ExecutableFile, is_executable
    from schedsearch.records.lookup import Lookup

    if is_executable(path):
        with ExecutableFile(path) as file:
            return Trusted(1, mark([] if file.vouched else [file.claim], file.path))
    with Lookup(path) as lookup:
        rows, tables = lookup.with_code(), size_tables.all_rows(lookup.path, lookup.damage)
        claims: list[Claim | RangeClaim] = [row.claim for row in rows if not row.vouched]
        claims += [row.claim for row in tables if not row.vouched]
        return Trusted(len(rows) + len(tables), mark(claims, lookup.path))


@dataclass(frozen=True)
class Source:
    """A file whose kernels were marked.

    Attributes:
        path: where the file was when `trust` read it.
        marks: how many of its kernels are still marked.
        last_s: when the last of them was marked, in seconds since 1970.
    """

    path: str
    marks: int
    last_s: float


def sources() -> list[Source]:
    """The files whose kernels are marked on this machine, the latest first.

    Raises:
        DatabaseError: the state folder cannot be read, or others may write to it.
    """
    state.check()
    found: dict[str, list[float]] = {}
    for note in _notes().values():
        found.setdefault(note[0], []).append(note[1])
    return sorted((Source(path, len(times), max(times)) for path, times in found.items()), key=lambda each: -each.last_s)


def distrust(path: str | Path) -> int:
    """Removes the marks of the kernels that were marked when a file was at `path`, and of those that it holds now.

    The file may be gone. Returns the number of marks removed. Kernels that this machine signed need no mark, and stay.

    Raises:
        DatabaseError: a mark cannot be removed, or the file is not a database of schedsearch.
    """
    from schedsearch.records import size_tables
    from schedsearch.records.executables import ExecutableFile, is_executable
    from schedsearch.records.lookup import Lookup

    path = Path(path)
    marks = {mark for mark, (source, _) in _notes().items() if source == str(path.absolute())}
    if is_executable(path):
        with ExecutableFile(path) as file:
            marks |= {file.claim.mark} if state.holds(file.claim.mark) else set()
    elif path.exists():
        with Lookup(path) as lookup:
            held = [row.claim.mark for row in lookup.with_code()]
            held += [row.claim.mark for row in size_tables.all_rows(lookup.path, lookup.damage)]
            marks |= {each for each in held if each.is_file()}
    for each in marks:
        try:
            each.unlink(missing_ok=True)
        except OSError as error:
            raise state.unusable(each, error) from error
    return len(marks)


def _notes() -> dict[Path, tuple[str, float]]:
    """Every mark with its source and its time; both are empty in a mark whose note cannot be read."""
    folder = state_dir() / "trusted"
    try:
        marks = sorted(folder.iterdir()) if folder.is_dir() else []
        texts = {mark: mark.read_bytes() for mark in marks if _MARK.fullmatch(mark.name)}
    except OSError as error:
        raise state.unusable(folder, error) from error
    found = {}
    for mark, text in texts.items():
        try:
            note = json.loads(text)
            found[mark] = (str(note["source"]), float(note["at"]))
        except (ValueError, TypeError, KeyError):
            found[mark] = ("", 0.0)
    return found


def is_revoked(claim: Claim) -> bool:
    """Whether the code of a claim turned out wrong on this machine."""
    return claim.artifact_sha256 is not None and claim.revocation.is_file()


def revoke(claim: Claim) -> None:
    """The code of a claim turned out wrong for its workload: this machine serves it from no file any more.

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
