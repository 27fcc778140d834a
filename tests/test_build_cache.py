"""Compiled pieces are kept between runs. The cache returns the right one or none, even if files are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import extending, types

from schedsearch.backend import compile_source, cpu, sharing
from schedsearch.backend.build_cache import BuildCache, cache_state
from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.kernel_identity import UnidentifiedError, digest
from schedsearch.device.detect import detect
from schedsearch.launch import Grid, Pointer
from schedsearch.template import KernelSource, KernelStep

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    (tmp_path / "cache").mkdir(mode=0o700)
    return BuildCache(tmp_path / "cache")


def only_file(cache: BuildCache) -> Path:
    (path,) = cache.folder.iterdir()
    return path


def test_a_piece_is_there_for_every_process(cache: BuildCache) -> None:
    assert cache.load(KEY) is None
    cache.store(KEY, b"piece")
    assert cache.load(KEY) == BuildCache(cache.folder).load(KEY) == b"piece"
    assert cache.load(OTHER) is None
    assert cache.size() == (1, only_file(cache).stat().st_size)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b"something of another program")


def renamed(path: Path) -> None:
    """A sound piece under the name of another one."""
    BuildCache(path.parent).store(OTHER, b"another piece")
    (path.parent / f"{OTHER}.piece").replace(path)


@pytest.mark.parametrize("damage", [cut_off, changed, emptied, foreign, renamed])
def test_a_damaged_piece_is_made_again(cache: BuildCache, damage: Callable[[Path], None]) -> None:
    cache.store(KEY, b"piece" * 1000)
    damage(only_file(cache))
    assert cache.load(KEY) is None
    cache.store(KEY, b"new")
    assert cache.load(KEY) == b"new"


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "never made")
    cache.store(KEY, b"piece")
    assert cache.load(KEY) is None and cache.size() == (0, 0)


def test_the_least_recently_used_piece_is_dropped_first(cache: BuildCache) -> None:
    keys = [f"{number:064x}" for number in range(4)]
    for age, key in enumerate(keys):
        cache.store(key, os.urandom(1000))
        os.utime(cache._path(key), (1000 + age, 1000 + age))
    assert cache.load(keys[0]) is not None  # used just now
    small = BuildCache(cache.folder, limit_bytes=2500)
    small.trim()
    assert [small.load(key) is not None for key in keys] == [True, False, False, True]


def test_processes_that_write_one_piece_each_keep_the_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", str(tmp_path / "builds"))
    for number in range(5):
        cache = BuildCache.open()
        assert cache is not None
        cache._limit_bytes = 2500
        cache.store(f"{number:064x}", os.urandom(1000))
    assert cache.size()[0] == 2


def test_pieces_of_a_folder_that_can_only_be_read_are_used(cache: BuildCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(KEY, b"piece")

    def refuse(*args: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.load(KEY) == b"piece"


def test_the_folder_is_made_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", str(tmp_path / "new" / "builds"))
    cache = BuildCache.open()
    assert cache is not None and cache.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", ["off", "OFF", "0", "no"])
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", value)
    assert BuildCache.open() is None
    assert cache_state().problem == f"switched off by SCHEDSEARCH_BUILD_CACHE={value}"


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def a_file(folder: Path) -> None:
    folder.touch()


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("made", "problem"), [(open_to_others, "chmod 700"), (a_file, "not a folder"), (a_link, "not a folder")]
)
def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], None], problem: str
) -> None:
    folder = tmp_path / "builds"
    made(folder)
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", str(folder))
    assert BuildCache.open() is None
    assert problem in str(cache_state().problem)


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert BuildCache.open() is None
    assert cache_state().problem == "it belongs to another user"


# --- The folder may hold what others put there -----------------------------------------------------------------------------


def of_a_user(folder: Path) -> dict[str, bytes]:
    """Puts old files there that would have to go first, if any of them were the cache's. Returns name -> content."""
    files = {
        "thesis.tar": b"x" * 5000,
        f"{'12' * 32}.piece": b"a file that only has the name of a piece",
        f"{'12' * 32}.piece.bak": b"schedsearch build 1\n and so on",
        "a copy": b"schedsearch build 1\n and so on",
        "unfinished-abcdefgh": b"a text",
        "tmpabcdefgh": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "sub").mkdir()
    (folder / "sub" / f"{'34' * 32}.piece").write_bytes(b"schedsearch build 1\n and so on")
    (folder / f"{'56' * 32}.piece").symlink_to(folder / "thesis.tar")
    for path in (*folder.iterdir(), *folder.glob("sub/*")):
        os.utime(path, (1000, 1000), follow_symlinks=False)
    return files


@pytest.mark.parametrize("trimming", [lambda cache: cache.trim(), lambda cache: cache.store(OTHER, os.urandom(4000))])
def test_only_pieces_are_removed_from_a_folder(cache: BuildCache, trimming: Callable[[BuildCache], None]) -> None:
    files = of_a_user(cache.folder)
    cache.store(KEY, os.urandom(4000))
    full = BuildCache(cache.folder, limit_bytes=10)
    full._written = 199
    trimming(full)
    assert full.load(KEY) is None and full.load(OTHER) is None
    assert {name: (cache.folder / name).read_bytes() for name in files} == files
    assert len(list(cache.folder.glob("sub/*"))) == 1 and (cache.folder / f"{'56' * 32}.piece").is_symlink()


def tagged(folder: Path) -> str:
    """Makes it the user's cache, and returns the tag that it got."""
    assert BuildCache.open() is not None
    return (folder / "CACHEDIR.TAG").read_text()


@pytest.mark.parametrize("name", ["thesis.tar", "CACHEDIR.TAG", "piece", f"{'12' * 32}.PIECE", ".hidden", "a\nb"])
@pytest.mark.parametrize(
    "make", [lambda path: path.write_text("x"), lambda path: path.mkdir(), lambda path: os.mkfifo(path)]
)
def test_a_folder_of_other_things_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    make(folder / name)
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", str(folder))
    assert BuildCache.open() is None
    assert "is not of a build cache; set SCHEDSEARCH_BUILD_CACHE to a new or an empty folder" in str(cache_state().problem)
    assert "\n" not in str(cache_state().problem)
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_cache_stays_one_when_other_files_come_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", str(tmp_path / "builds"))
    assert tagged(tmp_path / "builds").startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    (tmp_path / "builds" / "notes.txt").write_text("x")
    assert BuildCache.open() is not None


def test_a_cache_of_an_earlier_version_has_no_tag_and_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "builds"
    folder.mkdir(mode=0o700)
    BuildCache(folder).store(KEY, b"piece")
    (folder / "tmpabcdefgh").write_bytes(b"schedsearch build 1\n")  # its process was killed
    (folder / f"{OTHER}.piece").touch()  # the disk was full
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", str(folder))
    assert tagged(folder)
    cache = BuildCache.open()
    assert cache is not None and cache.load(KEY) == b"piece"


def test_what_a_killed_process_was_writing_is_removed_after_an_hour(cache: BuildCache) -> None:
    old, new, others = (cache.folder / f"unfinished-{name * 8}" for name in "abc")
    for path, content in ((old, b"schedsearch build 1\nx"), (new, b"schedsearch build 1\nx"), (others, b"a text")):
        path.write_bytes(content)
    for path in (old, others):
        os.utime(path, (1000, 1000))
    cache.trim()
    assert [path.exists() for path in (old, new, others)] == [False, True, True]


def test_a_piece_that_is_a_link_or_a_pipe_is_not_read(cache: BuildCache) -> None:
    BuildCache(cache.folder).store(OTHER, b"piece")
    (cache.folder / f"{OTHER}.piece").rename(cache.folder.parent / "elsewhere")
    (cache.folder / f"{OTHER}.piece").symlink_to(cache.folder.parent / "elsewhere")
    os.mkfifo(cache.folder / f"{KEY}.piece")
    assert cache.load(OTHER) is None and cache.load(KEY) is None


def test_processes_that_start_together_agree_about_the_folder(tmp_path: Path) -> None:
    code = (
        "from schedsearch.backend.build_cache import BuildCache\n"
        "caches = [BuildCache.open() for _ in range(50)]\n"
        "assert None not in caches\n"
    )
    environment = {**os.environ, "SCHEDSEARCH_BUILD_CACHE": str(tmp_path / "builds")}
    together = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(4)]
    assert [each.wait() for each in together] == [0] * 4
    assert [path.name for path in (tmp_path / "builds").iterdir()] == ["CACHEDIR.TAG"]


# --- The key covers everything that decides the code ---------------------------------------------------------------------

MODULE = """
import math
from numba import types
LIMIT = {limit}
def helper(v):
    return v + {step}
def outer(factor, inner):
    def kernel(x, y={default}):
        def local(v):
            return v {operator} 2
        return local(helper(x)) * factor + LIMIT + inner(y) + math.floor(types.float32(1.5))
    return kernel
UNUSED = {unused}
"""
SAME: dict[str, Any] = dict(limit="3", step="1", default="0", operator="+", unused="1")


def kernel(factor: Any = 2, inner: Any = abs, **changes: str) -> Any:
    names: dict[str, Any] = {"__name__": "a_template"}
    exec(MODULE.format(**SAME) if not changes else MODULE.format(**{**SAME, **changes}), names)
    return names["outer"](factor, inner)


def doubling(number: float) -> Any:
    return lambda value: value * number


DIFFERENT: list[Any] = [
    kernel(limit="4"), kernel(limit="3.0"), kernel(limit="True"), kernel(step="2"), kernel(default="1"),
    kernel(operator="-"), kernel(factor=2.0), kernel(factor=-0.0), kernel(factor=0.0),
    kernel(factor=True), kernel(factor=np.float32(2)),
    kernel(inner=doubling(2)), kernel(inner=doubling(3)), kernel(factor=(1, 2)), kernel(factor=(1, 2.0)),
    kernel(factor=types.int32), kernel(factor=types.int64),
]  # fmt: skip


def test_everything_that_decides_the_code_is_in_the_key() -> None:
    digests = [digest(kernel()), *map(digest, DIFFERENT)]
    assert len(set(digests)) == len(digests)


def test_other_things_are_not_in_the_key() -> None:
    assert digest(kernel()) == digest(kernel()) == digest(kernel(unused="2"))


def test_functions_that_refer_to_each_other_have_an_identity() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert digest(even) == digest(even) != digest(odd)


def test_an_object_of_an_unknown_class_has_none() -> None:
    with pytest.raises(UnidentifiedError, match="object"):
        digest(kernel(factor=object()))


@pytest.mark.parametrize("register", [extending.overload, pytest.param("numba.cuda.extending", id="for CUDA")])
def test_a_function_for_which_numba_compiles_something_else_has_none(register: Any) -> None:
    def twice(value: float) -> float:
        return 2 * value

    def thrice(value: float) -> Any:
        return lambda value: 3 * value

    step = kernel(factor=twice)
    assert digest(step)
    if isinstance(register, str):
        register = pytest.importorskip(register).overload
    register(twice)(thrice)
    with pytest.raises(UnidentifiedError, match="twice, which Numba implements by other code"):
        digest(step)


def test_all_processes_agree_before_they_load_what_numba_implements() -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from test_build_cache import digest, kernel; print(digest(kernel())); "
        "print('numba.cpython.setobj' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [digest(kernel()), "False"]


# --- On the CPU ---------------------------------------------------------------------------------------------------------


def filling(value: float) -> KernelSource:
    def fill(y, start, stop):  # type: ignore[no-untyped-def]
        target = as_array(y, (8,), types.float32)
        for i in range(start, stop):
            target[i] = value

    return KernelSource("cpu", "native", (KernelStep(fill, (Pointer("y"),), Grid(8), 1),))


def test_a_cpu_step_is_compiled_once_for_all_runs(cache: BuildCache, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counted(step: KernelStep, entry: str, original: Any = cpu._object_code) -> bytes:
        compiled.append(step)
        code: bytes = original(step, entry)
        return code

    monkeypatch.setattr(sharing, "user_cache", lambda: cache)
    monkeypatch.setattr(cpu, "_object_code", counted)
    target = detect("cpu")
    results = [compile_source(filling(value), target) for value in (1.5, 1.5, 2.5, 1.5)]
    assert len(compiled) == 2 and all(result.shared for result in results)
    assert results[0].artifact == results[1].artifact == results[3].artifact != results[2].artifact
