"""The state folder, which holds this machine's key, marks of trust and revocations; and who may write there.

Whoever writes there decides which machine code runs with the rights of this user. As OpenSSH does with a private key, a file
or folder counts only if it belongs to this user or to root and nobody else can write it. Others must not be able to read the
key either. Links are followed, and what they lead to is judged. Folders above are not judged, because whoever may rename
there cannot make a file that belongs to this user. So /tmp and volumes of containers may hold a state folder.

This module needs platformdirs and the standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from schedsearch.errors import DatabaseError

STATE_DIR_VARIABLE = "SCHEDSEARCH_STATE_DIR"
_KEY_BYTES = 32
_FOLDERS = ("", "trusted", "revoked")


class RefusedStateError(DatabaseError):
    """Others may write to the state folder, or could read the key."""


def state_dir() -> Path:
    if folder := os.environ.get(STATE_DIR_VARIABLE):
        return Path(folder)
    return _usual_dir(*(os.environ.get(name) for name in ("XDG_STATE_HOME", "HOME")))


@functools.cache
def _usual_dir(*decides: str | None) -> Path:
    """For these values of what decides about it: a run asks several times for each of its records."""
    import platformdirs

    return Path(platformdirs.user_state_dir("schedsearch", appauthor=False))


def key_path() -> Path:
    return state_dir() / "machine-key"


def objection() -> str | None:
    """Why the state folder is not used, with the remedy; None if it is used, or is not there yet.

    Raises:
        DatabaseError: it cannot be looked at.
    """
    try:
        check()
        with contextlib.suppress(FileNotFoundError):
            _check_key(key_path().stat())
    except RefusedStateError as error:
        return str(error)
    except OSError as error:
        raise unusable(key_path(), error) from error
    return None


def check() -> None:
    """Raises RefusedStateError if somebody else may write to the folder or to those in it."""
    base = state_dir()
    for name in _FOLDERS:
        folder = base / name
        try:
            found = folder.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unusable(folder, error) from error
        if (reason := _written_by_others(found)) is not None:
            remedy = f"chmod -R go-w {base} if what it holds is yours, else " if _is_mine(found) else ""
            raise RefusedStateError(
                f"the state folder {folder} is not used: {reason}, so that others could vouch for code that you "
                f"run; {remedy}set {STATE_DIR_VARIABLE} to another folder"
            )


def key(*, create: bool) -> bytes:
    """This machine's key. Without `create` b"" if there is none.

    Raises:
        RefusedStateError: somebody else may write to the folder, or write or read the key.
        DatabaseError: the key is damaged, or the folder cannot be used.
    """
    check()
    path = key_path()
    try:
        found = _read_key(path)
        if found is None and create:
            write(path, secrets.token_bytes(_KEY_BYTES))
            found = _read_key(path)  # perhaps written by another process that came first
            if found is None:
                raise FileNotFoundError(2, "it is a link to a file that does not exist", str(path))
    except OSError as error:
        raise unusable(path, error) from error
    if found is None:
        return b""
    if len(found) != _KEY_BYTES:
        raise DatabaseError(
            f"{path} is damaged: {len(found)} bytes, {_KEY_BYTES} wanted; delete it (code stored so far then needs: "
            "schedsearch records trust FILE)"
        )
    return found


def _read_key(path: Path) -> bytes | None:
    """The content of the key's file; None if there is none. Raises RefusedStateError and OSError."""
    try:
        _check_key(path.stat())  # it may be somebody's whose files cannot be opened
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would make its reader wait
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        _check_key(os.fstat(descriptor))
        return file.read(_KEY_BYTES + 1)


def _check_key(found: os.stat_result) -> None:
    reason = None if stat.S_ISREG(found.st_mode) else "it is not a file"
    if reason is None and (reason := _written_by_others(found)) is None and found.st_mode & 0o077:
        reason = f"others can read it (mode {stat.S_IMODE(found.st_mode):o})"
    if reason is not None:
        remedy = ", or chmod 600 it if nobody else has used it" if _is_mine(found) else ""
        raise RefusedStateError(
            f"the key {key_path()} is not used: {reason}, so that others could sign code that you run; "
            f"delete it (code stored so far then needs: schedsearch records trust FILE){remedy}"
        )


def _is_mine(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), 0)


def _written_by_others(found: os.stat_result) -> str | None:
    """Why somebody else decides what a file or folder holds; None if nobody does."""
    if not _is_mine(found):
        return f"it belongs to another user (number {found.st_uid})"
    if found.st_mode & 0o022:
        return f"other users may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def holds(path: Path) -> bool:
    """Whether a mark is there and counts. What others may have put there does not; a warning says so."""
    try:
        found = path.stat()
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode):
        return False
    try:
        check()
    except RefusedStateError as error:
        warn(str(error))
        return False
    if (reason := _written_by_others(found)) is not None:
        warn(f"{path} does not count: {reason}; delete it")
        return False
    return True


@functools.cache
def warn(text: str) -> None:
    """Logs a warning, once in a process."""
    logging.getLogger("schedsearch.records").warning("schedsearch: warning: %s", text)


def write(path: Path, data: bytes) -> None:
    """Creates a file with mode 0600 and all its content at once. An existing file stays as it is.

    Raises:
        RefusedStateError: somebody else may write to the folder or to that file.
        DatabaseError: the folder cannot be written.
    """
    try:
        state_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        check()
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                if not holds(path) and path.exists():
                    raise RefusedStateError(f"others may write to {path}, so it does not count; delete it") from None
        finally:
            Path(temporary).unlink()
    except OSError as error:
        raise unusable(path, error) from error


def unusable(path: Path, error: OSError) -> DatabaseError:
    return DatabaseError(
        f"cannot use {path} ({error.strerror}), where this machine's key and marks of trust are kept; "
        f"set {STATE_DIR_VARIABLE} to a folder that can be written"
    )
