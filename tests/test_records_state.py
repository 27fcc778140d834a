"""A state folder or key that others can use vouches for nothing and signs nothing, as OpenSSH ignores such a private key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import start
from records_support import H200, artifact, conv, record

from schedsearch.errors import DatabaseError, UntrustedDatabaseError
from schedsearch.records import claims, state, trust
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store

SIGNED = claims.Kind.EXECUTABLE, "ab" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder with a key, a mark and a revocation."""
    folder = tmp_path / "state"
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(folder))
    claims.machine_id()
    trust.mark([claims.ExecutableClaim("cd" * 32)], tmp_path / "a file")
    claims.revoke(claims.Claim("w", "t", "m", "c", 1, "{}", 1.0, True, "ef" * 32))
    state.warn.cache_clear()
    return folder


def of_another(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, 12345)


def links_to_anothers(key: Path) -> None:
    key.rename(key.parent.parent / "elsewhere")
    of_another(key.parent.parent / "elsewhere")
    key.symlink_to(key.parent.parent / "elsewhere")


def links_to_a_folder_of_others(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    (folder.parent / "elsewhere").chmod(0o777)
    folder.symlink_to(folder.parent / "elsewhere")


def a_pipe(key: Path) -> None:
    key.unlink()
    os.mkfifo(key, 0o600)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "the folder is open to everybody": (lambda folder: folder.chmod(0o777), r"may write to it \(mode 777\).*chmod -R go-w"),
    "the folder is open to a group": (lambda folder: folder.chmod(0o770), r"may write to it \(mode 770\)"),
    "everybody may write, but not delete": (lambda folder: folder.chmod(0o1777), r"may write to it \(mode 1777\)"),
    "the folder belongs to somebody else": (of_another, "belongs to another user .*; set SCHEDSEARCH_STATE_DIR"),
    "the folder is a link to one that is open": (links_to_a_folder_of_others, r"may write to it \(mode 777\)"),
    "the marks are open to everybody": (lambda folder: (folder / "trusted").chmod(0o777), r"trusted is not used"),
    "the revocations are open": (lambda folder: (folder / "revoked").chmod(0o775), r"revoked is not used"),
    "everybody can read the key": (lambda folder: (folder / "machine-key").chmod(0o644), r"others can read it \(mode 644\)"),
    "a group can read the key": (lambda folder: (folder / "machine-key").chmod(0o640), r"others can read it \(mode 640\)"),
    "everybody can write the key": (lambda folder: (folder / "machine-key").chmod(0o602), r"may write to it \(mode 602\)"),
    "the key belongs to somebody else": (lambda folder: of_another(folder / "machine-key"), "belongs to another user"),
    "the key is a link to a file of another": (
        lambda folder: links_to_anothers(folder / "machine-key"),
        "belongs to another user",
    ),
    "the key is a pipe": (lambda folder: a_pipe(folder / "machine-key"), "it is not a file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_others_can_use_vouches_for_nothing_and_signs_nothing(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_it, reason = REFUSED[name]
    signature = claims.sign(*SIGNED)
    assert claims.is_ours(*SIGNED, signature) and state.objection() is None
    open_it(folder)
    assert not claims.is_ours(*SIGNED, signature) and not claims.vouches(claims.ExecutableClaim("ab" * 32), signature)
    assert len({each.getMessage() for each in caplog.records}) == len(caplog.records) == 1, "one warning"
    for use in (lambda: claims.sign(*SIGNED), claims.machine_id):
        with pytest.raises(DatabaseError, match=reason) as raised:
            use()
        assert "\n" not in str(raised.value) and ("another folder" in str(raised.value) or "delete it" in str(raised.value))
    assert str(raised.value) == state.objection() and str(raised.value) in caplog.text


@pytest.mark.parametrize("name", [name for name in REFUSED if "key" not in name])
def test_marks_in_a_folder_of_others_do_not_count(folder: Path, name: str) -> None:
    claim = claims.ExecutableClaim("cd" * 32)
    assert claims.vouches(claim, "")
    REFUSED[name][0](folder)
    assert not claims.vouches(claim, "")
    for use in (trust.sources, lambda: trust.mark([claims.ExecutableClaim("12" * 32)], Path("f"))):
        with pytest.raises(DatabaseError, match="is not used"):
            use()


@pytest.mark.parametrize("damage", [of_another, lambda mark: mark.chmod(0o666)])
def test_a_mark_that_another_user_made_or_may_change_does_not_count(folder: Path, damage: Callable[[Path], None]) -> None:
    claim = claims.ExecutableClaim("cd" * 32)
    damage(claims.mark_of(claim))
    assert not claims.vouches(claim, "")
    with pytest.raises(DatabaseError, match="does not count; delete it"):
        trust.mark([claim], Path("f"))


def own_link(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def own_key_link(folder: Path) -> None:
    (folder / "machine-key").rename(folder.parent / "key")
    (folder / "machine-key").symlink_to(folder.parent / "key")


@pytest.mark.parametrize(
    "change",
    [
        own_link,
        own_key_link,
        lambda folder: folder.chmod(0o755),
        lambda folder: folder.parent.chmod(0o1777),
        lambda folder: (folder / "machine-key").chmod(0o400),
    ],
    ids=["a link to an own folder", "a key that is a link", "others may look", "in a folder like /tmp", "a read-only key"],
)
def test_what_only_this_user_can_write_counts(folder: Path, change: Callable[[Path], None]) -> None:
    signature = claims.sign(*SIGNED)
    change(folder)
    assert claims.is_ours(*SIGNED, signature) and claims.sign(*SIGNED) == signature
    assert claims.vouches(claims.ExecutableClaim("cd" * 32), "")


def test_a_new_state_folder_is_closed_to_others_whatever_is_made_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "new" / "state"))
    before = os.umask(0)
    try:
        trust.mark([claims.ExecutableClaim("cd" * 32)], tmp_path / "a file")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "state", tmp_path / "new/state/trusted")}
    assert modes == {"state": 0o700, "trusted": 0o700}
    assert claims.vouches(claims.ExecutableClaim("cd" * 32), "")


def test_a_key_that_is_a_link_to_nothing_is_one_message(folder: Path) -> None:
    (folder / "machine-key").unlink()
    (folder / "machine-key").symlink_to(folder / "nothing")
    assert not claims.is_ours(*SIGNED, "0" * 64)
    with pytest.raises(DatabaseError, match="link to a file that does not exist"):
        claims.machine_id()


def test_deployment_goes_on_without_stored_code(folder: Path, tmp_path: Path) -> None:
    """Rows are read and configurations served; only the code of this machine counts for nothing."""
    with Store.open(tmp_path / "records.db") as store:
        store.promote(store.append(record()), artifact())
    folder.chmod(0o777)
    with Lookup(tmp_path / "records.db") as lookup:
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None and not row.vouched
        with pytest.raises(UntrustedDatabaseError, match=r"nothing vouches for .* is not used: other users may write to it"):
            lookup.code(row)
    with pytest.raises(DatabaseError, match="is not used: other users may write to it"):
        Store.open(tmp_path / "new.db")


@pytest.mark.parametrize("command", [["trust", "--list"], ["trust", "records.db"], ["export", "--deploy", "d.db"]])
def test_commands_say_it_in_one_line_with_exit_code_6(folder: Path, tmp_path: Path, command: list[str]) -> None:
    with Store.open(tmp_path / "records.db") as store:
        store.promote(store.append(record()), artifact())
    folder.chmod(0o777)
    process = start("records", *command, cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 6 and "is not used: other users may write to it" in err, (out, err)
    assert len(set(err.splitlines())) <= 2, "at most a warning before the error"
