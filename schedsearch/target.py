"""The device that kernels are made for, as data. `schedsearch.device.detect` finds its facts.

There is no global current device: callers pass a `Target` along.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal


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

    def facts(self) -> dict[str, Any]:
        return asdict(self)


# For compiling without a device (NVIDIA's datasheets and occupancy tables).
PRESETS = {
    "a100": Target(
        "cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912, 167_936, 65536, 2048, 40 << 20, 1_410_000, 80 << 30
    ),
    "h200": Target("cuda", "NVIDIA H200", (9, 0), 132, 232_448, 233_472, 65536, 2048, 60 << 20, 1_980_000, 141 << 30),
    "b200": Target("cuda", "NVIDIA B200", (10, 0), 148, 232_448, 233_472, 65536, 2048, 126 << 20, 1_965_000, 180 << 30),
}
