"""The folder of an export: kernels, the launcher, a table, build files and a manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from schedsearch.c_export.chosen import Chosen, LeftOut, choose
from schedsearch.c_export.describe import description
from schedsearch.c_export.source import header, source
from schedsearch.c_export.text import PREFIX, check_prefix, comment, with_prefix
from schedsearch.c_export.torch_source import torch_source
from schedsearch.errors import DatabaseError, NoRecordError, UnsupportedError, UsageError
from schedsearch.identity import sha256_hex
from schedsearch.measurement import COLD_GRAPH
from schedsearch.records.output import new_file
from schedsearch.records.store import Store
from schedsearch.typed import JsonObject

MANIFEST = "MANIFEST.json"
_FORMAT = "schedsearch C export 1"
_RUNTIME = ("schedsearch.h", "schedsearch_code.h", "schedsearch_driver.h", "schedsearch_runtime.c")
_TORCH = ("schedsearch_torch.h", "schedsearch_torch.cpp")
_BUILD = ("CMakeLists.txt", "Makefile", "schedsearch_kernels.pc")
_TORCH_BUILD = ("CMakeLists.txt", "Makefile")  # they get a part for PyTorch
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Exported:
    """What an export holds.

    Attributes:
        code_bytes: of the machine code of all kernels.
        files: how many files were written.
    """

    folder: Path
    kernels: tuple[Chosen, ...]
    left_out: tuple[LeftOut, ...]
    files: int

    @property
    def code_bytes(self) -> int:
        return sum(len(each.artifact.code) for each in self.kernels)


def export_c(
    store: Store,
    folder: str | Path,
    *,
    workloads: Sequence[str] = (),
    target: str | None = None,
    mode: str = COLD_GRAPH,
    torch: bool = False,
    prefix: str = PREFIX,
) -> Exported:
    """Writes the best GPU kernels of a database as C that needs libcuda alone.

    Only kernels that were verified, and that this machine signed or its user trusts, are exported. The same database gives
    the same bytes. Other files in the folder stay; those of an earlier export that this one lacks are removed unless they
    were changed.

    Args:
        store: the source.
        folder: created when missing.
        workloads: labels, or beginnings of ids; empty: all.
        target: only kernels measured on this kind of device.
        mode: how the records were timed.
        torch: also write operators of PyTorch, `torch.ops.schedsearch_c.NAME`, in C++.
        prefix: with which all names of the export begin instead of `schedsearch`, those of kernels too. A program can hold
            several exports with different prefixes.

    Raises:
        NoRecordError: the database has no best record. Nothing is written.
        UnsupportedError: none of its kernels can be exported; the message has the reason for each. Nothing is written.
        UsageError: the folder holds other files of the same names, or cannot be written; the prefix is not one.
        DatabaseError: the database is damaged.
    """
    check_prefix(prefix)
    path = Path(folder)
    chosen, left_out = choose(store, workloads=workloads, target=target, mode=mode, prefix=prefix)
    if not chosen:
        raise (UnsupportedError if left_out else NoRecordError)(_nothing(store, target, mode, left_out))
    files = {
        name.replace(PREFIX, prefix, 1) if name.startswith(PREFIX) else name: with_prefix(text, prefix)
        for name, text in _sources(chosen, torch).items()
    }
    files[MANIFEST] = _manifest(chosen, left_out, files)
    _write(path, files)
    return Exported(path, chosen, left_out, len(files))


def _nothing(store: Store, target: str | None, mode: str, left_out: Sequence[LeftOut]) -> str:
    where = f"{f' on {target}' if target else ''} in mode {mode}"
    if not left_out:
        return (
            f"{store.name} has no best kernel{where}; nothing was written; look with: schedsearch records best "
            f"--db {store.name}"
        )
    reasons = "; ".join(f"{each.label} on {each.target}: {each.reason}" for each in left_out[:5])
    more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
    return f"{store.name} has no kernel that can be exported{where}; nothing was written. {reasons}{more}"


def _sources(chosen: Sequence[Chosen], torch: bool) -> dict[str, str]:
    """Name -> content of all files but the manifest, with the usual prefix."""
    runtime = resources.files("schedsearch.c_export") / "runtime"
    files = {name: (runtime / name).read_text(encoding="utf-8") for name in _RUNTIME}
    for each in chosen:
        files[f"{each.name}.h"] = header(each)
        files[f"{each.name}.c"] = source(each)
    files["schedsearch_table.c"] = _table(chosen)
    files["schedsearch_kernels.h"] = _all_headers(chosen)
    sources = sorted(name for name in files if name.endswith(".c"))
    if torch:
        files |= {name: (runtime / name).read_text(encoding="utf-8") for name in _TORCH}
        files["schedsearch_torch_table.cpp"] = torch_source(chosen)
    for name in _BUILD:
        template = (runtime / f"{name}.in").read_text(encoding="utf-8")
        if torch:
            template += (runtime / f"{name}.torch.in").read_text(encoding="utf-8") if name in _TORCH_BUILD else ""
        separator = " \\\n    " if name == "Makefile" else "\n    "
        files[name] = template.replace("@SOURCES@", separator.join(sources))
    return files


def _manifest(chosen: Sequence[Chosen], left_out: Sequence[LeftOut], files: dict[str, str]) -> str:
    manifest: JsonObject = {
        "format": _FORMAT,
        "kernels": [description(each) for each in chosen],
        "left_out": [vars(each) for each in left_out],
        "files": {name: sha256_hex(text) for name, text in sorted(files.items())},
    }
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def _table(chosen: Sequence[Chosen]) -> str:
    includes = "\n".join(f'#include "{each.name}.h"' for each in chosen)
    rows = "\n".join(f"    &{each.name}_kernel," for each in chosen)
    return f"""/* All kernels of this export. Written by schedsearch. */
#include "schedsearch.h"
{includes}

const schedsearch_kernel *const schedsearch_kernels[] = {{
{rows}
}};
const size_t schedsearch_kernel_count = {len(chosen)};
"""


def _all_headers(chosen: Sequence[Chosen]) -> str:
    rows = "\n".join(f'#include "{each.name}.h" /* {comment(each.workload.label)} */' for each in chosen)
    return f"""/* All kernels of this export. Written by schedsearch. */
#ifndef SCHEDSEARCH_KERNELS_H
#define SCHEDSEARCH_KERNELS_H

#include "schedsearch.h"
{rows}

#endif
"""


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes all files and removes those of an earlier export that are no longer in it.

    The manifest comes first: it names the files of an export that was interrupted, so that the next one may replace them.

    Raises:
        UsageError: a file is in the way that no earlier export wrote, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _earlier(folder)
        for name in files:
            if name not in earlier and (folder / name).exists():
                raise UsageError(
                    f"{folder / name} exists and is not of an earlier export, so it is left alone; give another folder"
                )
        for name in earlier.keys() - files.keys():
            if (folder / name).is_file() and sha256_hex((folder / name).read_bytes()) == earlier[name]:
                (folder / name).unlink()  # what was changed since is the user's
        for name in sorted(files, key=lambda name: name != MANIFEST):
            with new_file(folder / name) as stream:
                stream.write(files[name].encode())
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; give another folder") from error


def _earlier(folder: Path) -> dict[str, str]:
    """The files that an earlier export wrote to the folder, each with its sha256.

    Raises:
        DatabaseError: there is a manifest that is not one of ours.
    """
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = {str(name): str(sha256) for name, sha256 in manifest["files"].items()} | {MANIFEST: ""}
        if manifest["format"] == _FORMAT and all(_FILE_NAME.fullmatch(name) for name in files):
            return files
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise DatabaseError(f"{path} is not the manifest of an export; give another folder")
