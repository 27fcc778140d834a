"""Runs every kernel of a database on the fake driver twice, by the launcher in Python and by the C export; a script.

    c_export_calls.py records.db libschedsearch_kernels.so

It prints JSON: function -> way of calling -> the launches of each as the driver saw them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)

from schedsearch.c_export.chosen import Chosen, choose, pointer_names  # noqa: E402
from schedsearch.c_export.plan_source import Memory  # noqa: E402
from schedsearch.c_export.source import Signature  # noqa: E402
from schedsearch.device import Workspaces  # noqa: E402
from schedsearch.device.cuda import CudaDevice  # noqa: E402
from schedsearch.measurement import COLD_GRAPH  # noqa: E402
from schedsearch.records.store import Store  # noqa: E402
from schedsearch.target import PRESETS  # noqa: E402

LOG = Path(os.environ["FAKE_LOG"])
WORKSPACE, PREPARED = 0x7A0000000000, 0x7B0000000000
_C_TYPES = {
    "bool": ctypes.c_uint8, "int8": ctypes.c_int8, "uint8": ctypes.c_uint8, "int16": ctypes.c_int16,
    "uint16": ctypes.c_uint16, "int32": ctypes.c_int32, "uint32": ctypes.c_uint32, "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64, "float32": ctypes.c_float, "float64": ctypes.c_double,
}  # fmt: skip


def launches() -> list[str]:
    """What the driver noted since the last call."""
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    LOG.write_text("")
    return lines


def in_python(device: CudaDevice, chosen: Chosen, addresses: dict[str, int], scalars: dict[str, float]) -> dict[str, Any]:
    memory = Memory.of(chosen.plan)
    bases = {False: WORKSPACE, True: WORKSPACE + memory.scratch_bytes}
    placed = {name: bases[prepared] + offset for name, (offset, prepared) in memory.offsets.items()}
    loaded = device.load(chosen.artifact)
    found = {"load": launches()}
    loaded.bind({**addresses, **placed}, scalars).launch()
    found["plain"] = launches()
    if chosen.plan.constants:
        bases[True] = PREPARED
        placed = {name: bases[prepared] + offset for name, (offset, prepared) in memory.offsets.items()}
        prepared = loaded.prepare({**addresses, **placed})
        found["prepare"] = launches()
        scratch = {name: placed[name] for name, (_, constant) in memory.offsets.items() if not constant}
        assert isinstance(prepared, Workspaces)
        loaded.bind({**addresses, **scratch}, scalars, prepared).launch()
        found["prepared"] = launches()
    return found


def in_c(library: Any, chosen: Chosen, addresses: dict[str, int], scalars: dict[str, float]) -> dict[str, Any]:
    signature = Signature.of(chosen)
    numbers = [
        _C_TYPES[each.dtype]((float if each.dtype.startswith("float") else int)(scalars[each.name]))
        for each in chosen.workload.scalars
    ]

    def pointers(names: Any) -> list[Any]:
        return [ctypes.c_void_p(addresses[name]) for name in names]

    def call(suffix: str, *arguments: Any) -> list[str]:
        code = getattr(library, chosen.name + suffix)(None, *arguments)
        assert code == 0, (chosen.name, suffix, code)
        return launches()

    def load() -> list[str]:
        code = getattr(library, f"{chosen.name}_load")()
        assert code == 0, (chosen.name, code)
        return launches()

    workspace, prepared = ctypes.c_void_p(WORKSPACE), ctypes.c_void_p(PREPARED)
    found = {"load": load(), "plain": call("", *pointers(signature.names), *numbers, workspace)}
    if signature.constants:
        found["prepare"] = call("_prepare", *pointers(signature.constants), prepared)
        found["prepared"] = call("_with_prepared", *pointers(signature.remaining), *numbers, workspace, prepared)
    return found


def _number(n: int, dtype: str) -> float:
    return 3.5 + n if dtype.startswith("float") else n % 2 if dtype == "bool" else 5 + n


def main() -> None:
    database, path = sys.argv[1:]
    library, libcuda = ctypes.CDLL(path), ctypes.CDLL("libcuda.so.1")
    device = CudaDevice(PRESETS["h200"])
    context = ctypes.c_void_p()
    libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    libcuda.cuCtxSetCurrent(context)
    with Store.open(database, create=False, readonly=True) as store:
        kernels, _ = choose(store, workloads=(), target=None, mode=COLD_GRAPH)
    found = {}
    for chosen in kernels:
        addresses = {name: 0x700000000000 + (n << 32) for n, name in enumerate(pointer_names(chosen.workload))}
        scalars = {each.name: _number(n, each.dtype) for n, each in enumerate(chosen.workload.scalars)}
        both = {"python": in_python(device, chosen, addresses, scalars), "c": in_c(library, chosen, addresses, scalars)}
        for aliased in (each for each in chosen.workload.signature if f"{each.name}_after" in addresses):
            same = {**addresses, f"{aliased.name}_after": addresses[aliased.name]}
            both["python"]["in place"] = in_python(device, chosen, same, scalars)["plain"]
            both["c"]["in place"] = in_c(library, chosen, same, scalars)["plain"]
        found[chosen.name] = both
    print(json.dumps(found))


if __name__ == "__main__":
    main()
