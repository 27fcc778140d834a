"""The device that kernels are made for, as data. `schedsearch.device.detect` finds its facts.

There is no global current device: callers pass a `Target` along.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Literal

from schedsearch.typed import JsonObject


@dataclass(frozen=True)
class Architecture:
    """What machine code is for: sm_80, sm_90a, sm_120f.

    Attributes:
        major, minor: compute capability.
        suffix: "" for instructions that all later cards of the same major number have; "f" also for those of its family,
            which later cards of the family have; "a" also for those that no other card has.

    Source: CUDA C++ Programming Guide, "Feature Availability"; PTX ISA, ".target".
    """

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Raises ValueError for any other text; there are no families before 10.0, and no suffix before 9.0.

        Examples:
            >>> Architecture.parse("sm_120f")
            Architecture(major=12, minor=0, suffix='f')
        """
        match = re.fullmatch(r"sm_([0-9]{1,3})([0-9])([af]?)", text, re.ASCII)
        if match is None or int(match[1]) < _SUFFIXED[match[3]]:
            raise ValueError(
                f"architecture {text!r} does not exist; allowed: sm_ and a compute capability, as sm_80, then a from sm_90 "
                "on, or f from sm_100 on, as sm_90a and sm_120f"
            )
        return cls(int(match[1]), int(match[2]), match[3])

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def virtual(self) -> str:
        """The name without suffix, such as sm_90."""
        return f"sm_{self.major}{self.minor}"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a card runs the code: it has the same major number and at least the minor one; with the suffix "a" it
        has just these.

        Source: CUDA C++ Programming Guide, "Binary Compatibility".
        """
        if self.suffix == "a":
            return capability == self.capability
        return capability[0] == self.major and capability[1] >= self.minor

    def __str__(self) -> str:
        return f"{self.virtual}{self.suffix}"


_SUFFIXED = {"": 0, "a": 9, "f": 10}  # suffix -> the first major number that has it


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
            return f"cuda:{self.architecture}:{self.sms}:{self.name}"
        return f"cpu:{self.simd_bits}:{self.sms}:{self.name}"

    @property
    def architecture(self) -> Architecture:
        """What `native` code of a GPU is for."""
        return Architecture(*self.compute_capability)

    def runs(self, arch: str) -> bool:
        """Whether a GPU runs machine code for `arch`, as `Architecture.runs_on` says; False on a CPU, whose code is for its
        very model, and for any text that names no architecture."""
        try:
            return self.kind == "cuda" and Architecture.parse(arch).runs_on(self.compute_capability)
        except ValueError:
            return False

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


def multiprocessors(key: str) -> int:
    """Those of the kind of GPU that a `Target.key` names; 0 of a CPU.

    Example:
        >>> multiprocessors("cuda:sm_90:132:NVIDIA H200"), multiprocessors("cpu:512:2:AMD EPYC")
        (132, 0)
    """
    match = re.match(r"cuda:sm_\d+:(\d+):", key)
    return int(match[1]) if match else 0


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
    "b200": _card("NVIDIA B200", (10, 0), 148, (227, 228), 2048, 126, 1965, 178),
    "gb300": _card("NVIDIA GB300", (10, 3), 152, (227, 228), 2048, 126, 1920, 279),
    "rtx5090": _card("NVIDIA GeForce RTX 5090", (12, 0), 170, (99, 100), 1536, 96, 2407, 32),
}
"""Cards that kernels are compiled for, and records are shown of, where there is no such card.

Sources: limits of a multiprocessor from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
the rest from NVIDIA's data sheets and architecture white papers: A100 (2020), Ada GPU Architecture (RTX 4090, L4), H100
Tensor Core GPU Architecture, HGX H200, DGX B200, GB300 NVL72, RTX Blackwell GPU Architecture (RTX 5090). Names are the
driver's. The multiprocessors and the L2 cache of a GB300 were not read from a card: its chip has up to 160, and cards of the
same design 152.
"""
