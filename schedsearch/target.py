"""The device that kernels are made for, as data. `schedsearch.device.detect` finds its facts.

There is no global current device: callers pass a `Target` along.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Literal

from schedsearch.typed import JsonObject


@dataclass(frozen=True)
class Target:
    """Device facts. `key` identifies the kind of device, not the single card, so that records serve all cards of a kind.

    Attributes:
        kind: cuda or cpu.
        name: as the driver or the operating system reports it.
        compute_capability: (major, minor); (0, 0) on a CPU.
        sms: multiprocessors; on a CPU the hardware threads that this process may use.
        shared_bytes_per_block, shared_bytes_per_sm, registers_per_sm, threads_per_sm: limits; 0 on a CPU.
        l2_bytes: the last-level cache.
        clock_khz, memory_bytes: as reported, for information only.
        ordinal, uuid: which card; not part of `key`.
        simd_bits: widest vector unit of a CPU; 0 on a GPU.
        host: the machine that has it, if it is not this one; not part of `key`.
    """

    kind: Literal["cuda", "cpu"]
    name: str
    compute_capability: tuple[int, int] = (0, 0)
    sms: int = 1
    shared_bytes_per_block: int = 0
    shared_bytes_per_sm: int = 0
    registers_per_sm: int = 0
    threads_per_sm: int = 0
    l2_bytes: int = 0
    clock_khz: int = 0
    memory_bytes: int = 0
    simd_bits: int = 0
    ordinal: int = 0
    uuid: str = ""
    host: str = ""

    @property
    def key(self) -> str:
        """E.g. 'cuda:sm_90:132:NVIDIA H200' or 'cpu:avx512:2:<model name>'."""
        if self.kind == "cuda":
            return f"cuda:sm_{self.compute_capability[0]}{self.compute_capability[1]}:{self.sms}:{self.name}"
        return f"cpu:{self.simd_bits}:{self.sms}:{self.name}"

    def runs(self, arch: str) -> bool:
        """Whether a GPU runs machine code for `arch`; False on a CPU, whose code is for its very model.

        sm_XY runs on the same major compute capability with a minor one of at least Y; sm_XYa runs on X.Y only.

        Source: CUDA C++ Programming Guide, "Binary Compatibility".
        """
        match = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch)
        if self.kind != "cuda" or match is None:
            return False
        major, minor, here = int(match[1]), int(match[2]), self.compute_capability
        return here == (major, minor) if match[3] else here[0] == major and here[1] >= minor

    def older_than(self, least: tuple[int, int]) -> str | None:
        """What to say of a GPU that lacks the instructions of compute capability `least`; None if it has them.

        Examples:
            >>> PRESETS["a100"].older_than((9, 0))
            'compute capability is 8.0; allowed: 9.0 and later'
        """
        if self.compute_capability >= least:
            return None
        got, allowed = (".".join(map(str, each)) for each in (self.compute_capability, least))
        return f"compute capability is {got}; allowed: {allowed} and later"

    def facts(self) -> JsonObject:
        return asdict(self)


def _card(
    name: str,
    capability: tuple[int, int],
    sms: int,
    shared_kib: tuple[int, int],
    threads: int,
    l2_mib: int,
    mhz: int,
    gib: int,
) -> Target:
    """A card with 65,536 registers in a multiprocessor; `shared_kib`: of a block at most, and of a multiprocessor."""
    block, whole = (each << 10 for each in shared_kib)
    return Target("cuda", name, capability, sms, block, whole, 65536, threads, l2_mib << 20, mhz * 1000, gib << 30)


PRESETS = {
    "a100": _card("NVIDIA A100-SXM4-80GB", (8, 0), 108, (163, 164), 2048, 40, 1410, 80),
    "l4": _card("NVIDIA L4", (8, 9), 58, (99, 100), 1536, 48, 2040, 24),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", (8, 9), 128, (99, 100), 1536, 72, 2520, 24),
    "h100": _card("NVIDIA H100 80GB HBM3", (9, 0), 132, (227, 228), 2048, 50, 1980, 80),
    "h200": _card("NVIDIA H200", (9, 0), 132, (227, 228), 2048, 60, 1980, 141),
    "b200": _card("NVIDIA B200", (10, 0), 148, (227, 228), 2048, 126, 1965, 180),
    "rtx5090": _card("NVIDIA GeForce RTX 5090", (12, 0), 170, (99, 100), 1536, 96, 2407, 32),
}
"""Cards that kernels are compiled for, and records are shown of, where there is no such card.

Sources: limits of a multiprocessor from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
the rest from NVIDIA's data sheets and architecture white papers.
"""
