"""Calls the C export of `CONV` and `OWN` wrongly, on the fake driver; a script.

    c_export_errors.py libschedsearch_kernels.so WORKLOAD_ID OTHER_ID [--old-driver]

It prints JSON: what was wrong -> (code, its text).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

cuda = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(sys.argv[1])


class Kernel(ctypes.Structure):
    """The public fields of schedsearch_kernel."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("workload_id", ctypes.c_char_p), ("workload", ctypes.c_char_p),
        ("description", ctypes.c_char_p), ("pointers", ctypes.c_size_t), ("pointer_bytes", ctypes.POINTER(ctypes.c_size_t)),
        ("scalars", ctypes.c_size_t), ("workspace_bytes", ctypes.c_size_t), ("prepared_bytes", ctypes.c_size_t),
        ("prepared_workspace_bytes", ctypes.c_size_t),
    )  # fmt: skip


library.schedsearch_find.restype = ctypes.POINTER(Kernel)
library.schedsearch_error_text.restype = ctypes.c_char_p
results: dict[str, Any] = {}


def context(device: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), device)
    return made


def stream() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    cuda.cuStreamCreate(ctypes.byref(made), 0)
    return made


def note(what: str, code: int) -> None:
    results[what] = code, library.schedsearch_error_text(code).decode()


def find(text: str) -> Any:
    return library.schedsearch_find(text.encode())


def run(
    kernel: Any,
    change: Mapping[int, int | None] = MappingProxyType({}),
    *,
    workspace: int | None = 1 << 40,
    on: Any = None,
    scalars: Any = ...,
) -> int:
    """schedsearch_run with sound arguments, apart from some addresses."""
    count = kernel.contents.pointers
    pointers = (ctypes.c_void_p * count)(*(change.get(n, (n + 1) << 32) for n in range(count)))
    if scalars is ...:
        scalars = (ctypes.c_uint64 * kernel.contents.scalars)()
    return int(library.schedsearch_run(kernel, on, pointers, scalars, ctypes.c_void_p(workspace)))


def from_threads(kernel: Any) -> None:
    """Eight threads call a kernel for the first time at once."""
    codes = []

    def call() -> None:
        cuda.cuCtxSetCurrent(context(1))
        codes.append(run(kernel))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results["threads"] = codes


def noted() -> list[str]:
    """What the driver noted since the last call."""
    log = Path(os.environ["FAKE_LOG"])
    lines = log.read_text().splitlines()
    log.write_text("")
    return lines


def in_contexts(kernel: Any) -> None:
    """A kernel is loaded into two contexts of one device, and runs in both."""
    second = ctypes.c_void_p()
    cuda.cuCtxCreate_v2(ctypes.byref(second), 0, 0)
    for name, each in (("first", context(0)), ("second", second)):
        cuda.cuCtxSetCurrent(each)
        noted()
        note(f"load in the {name} context", library.schedsearch_load(kernel))
        note(f"run in the {name} context", run(kernel, on=stream()))
        kinds = [line.split()[0] for line in noted()]
        results[f"{name} context"] = [kinds.count(kind) for kind in ("load", "into", "launch")]
    cuda.cuCtxSetCurrent(context(0))


def encodings(kernel: Any) -> list[int]:
    """How many tensor maps are encoded by calls with x at four addresses, again, and twice at each of many others."""
    counts = []
    for x in (*range(11, 15), *range(11, 15), *(n // 2 for n in range(40, 120))):
        noted()
        assert run(kernel, {0: x << 40}) == 0
        counts.append(noted().count("encode"))
    return counts


def main() -> None:
    conv, own = find(sys.argv[2]), find(sys.argv[3])
    note("no context", run(conv))
    if "--old-driver" in sys.argv:
        cuda.cuCtxSetCurrent(context(0))
        note("old driver", run(conv))
        print(json.dumps(results))
        return
    note("no context, load", library.schedsearch_load(conv))
    cuda.cuCtxSetCurrent(context(1))
    elsewhere = stream()
    cuda.cuCtxSetCurrent(context(0))
    for name in ("cuLibraryLoadData", "cuKernelSetAttribute", "cuTensorMapEncode", "cuLaunchKernelEx"):
        os.environ["FAKE_REFUSE"] = name
        note(name, run(conv))
    del os.environ["FAKE_REFUSE"]
    os.environ["FAKE_CC"] = "100"
    note("another card", run(own))
    results["found on another card"] = bool(find(sys.argv[3]))
    del os.environ["FAKE_CC"]
    note("sound", run(conv))
    note("null", run(conv, {0: None}))
    note("null output", run(conv, {3: None}))
    note("misaligned", run(conv, {0: (1 << 32) + 8}))
    note("aligned enough", run(conv, {1: (2 << 32) + 2}))  # no alignment is asked of the weight
    note("no pointers", library.schedsearch_run(conv, None, None, (ctypes.c_uint64 * 1)(), ctypes.c_void_p(1 << 40)))
    note("no workspace", run(conv, workspace=None))
    note("misaligned workspace", run(conv, workspace=(1 << 40) + 256))
    note("no scalars", run(conv, scalars=None))
    note("stream of another context", run(conv, on=elsewhere))
    note("a stream", run(conv, on=stream()))
    note("no kernel", library.schedsearch_run(None, None, None, None, None))
    note("nothing to prepare", library.schedsearch_prepare(own, None, None, None))
    note("no prepared memory", library.schedsearch_run_prepared(
        conv, None, (ctypes.c_void_p * 4)(1 << 32, None, 1 << 33, 1 << 34), (ctypes.c_uint64 * 1)(),
        ctypes.c_void_p(1 << 40), None))  # fmt: skip
    note("unknown", -1000)
    note("unknown of the driver", 999)
    results["unknown workload"] = bool(find("0" * 64)) or bool(library.schedsearch_find(None))
    results["by text"] = find(conv.contents.workload.decode()).contents.name.decode()
    results["by id"] = conv.contents.name.decode()
    results["encodings"] = encodings(conv)
    note("unload", library.schedsearch_unload(conv))
    noted()
    from_threads(conv)
    lines = noted()
    results["loads"] = lines.count("load")
    results["launches"] = sum(line.startswith("launch") for line in lines)
    in_contexts(own)
    print(json.dumps(results))


main()
