"""`SizeTable`: which kernel serves which size of a range, what was measured and verified, and the machine code."""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

from schedsearch.config import Config
from schedsearch.errors import PlanError
from schedsearch.identity import canonical_json
from schedsearch.launch import Artifact
from schedsearch.launch_sizes import SizedPlan, runs
from schedsearch.typed import JsonMapping

_VERSION = 1
MAX_CODE_BYTES = 1 << 28


@dataclass(frozen=True)
class SizedKernel:
    """One machine code for several sizes.

    Attributes:
        template, template_version, config: what it was made from.
        code: the machine code.
        plan: how to launch it for each size that it can serve.
        times_ns: size -> measured time. Before it was timed, the kernel was verified for this size.
    """

    template: str
    template_version: int
    config: Config
    code: bytes
    plan: SizedPlan
    times_ns: Mapping[int, float]

    @property
    def verified(self) -> tuple[int, ...]:
        """The sizes for which every element was compared with the reference."""
        return tuple(sorted(self.times_ns))

    def artifact(self, size: int) -> Artifact:
        """Code and launch plan for one size. Raises PlanError if the plan has none, or is damaged."""
        return Artifact(self.code, self.plan.at(size))


@dataclass(frozen=True)
class SizeTable:
    """The kernels of a range of sizes.

    Attributes:
        low, high: the range.
        kernels: the kernels that serve some sizes.
        serves: (smallest size, largest size, index of the kernel), rising and without gaps.
        specialised_ns: size -> the best time of machine code for this size alone.
        trials: measurements that the search and the choice of kernels took.
    """

    low: int
    high: int
    kernels: tuple[SizedKernel, ...]
    serves: tuple[tuple[int, int, int], ...]
    specialised_ns: Mapping[int, float]
    trials: int

    def kernel_for(self, size: int) -> SizedKernel:
        """The kernel that serves a size between `low` and `high`."""
        return self.kernels[next(index for low, high, index in self.serves if low <= size <= high)]

    @property
    def gains(self) -> dict[int, float]:
        """Size -> time of its kernel over the best time of machine code for this size alone."""
        times = {size: self.kernel_for(size).times_ns.get(size) for size in self.specialised_ns}
        return {size: time_ns / self.specialised_ns[size] for size, time_ns in times.items() if time_ns}

    @property
    def mean_gain(self) -> float:
        """Geometric mean of `gains`, where a size that gains nothing counts as 1; 1 without any."""
        found = [math.log(max(gain, 1.0)) for gain in self.gains.values()]
        return math.exp(sum(found) / len(found)) if found else 1.0

    def to_bytes(self) -> tuple[str, bytes]:
        """JSON text, and an archive with the machine code."""
        kernels = [
            {
                "template": each.template, "template_version": each.template_version, "config": dict(each.config),
                "code": _digest(each.code), "plan": json.loads(each.plan.to_json()),
                "times_ns": {str(size): time_ns for size, time_ns in each.times_ns.items()},
            }
            for each in self.kernels
        ]  # fmt: skip
        text = canonical_json(
            {
                "version": _VERSION, "low": self.low, "high": self.high, "kernels": kernels, "serves": self.serves,
                "specialised_ns": {str(size): time_ns for size, time_ns in self.specialised_ns.items()},
                "trials": self.trials,
            }
        )  # fmt: skip
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, code in {_digest(each.code): each.code for each in self.kernels}.items():
                archive.writestr(zipfile.ZipInfo(name), code, zipfile.ZIP_DEFLATED)
        return text, buffer.getvalue()

    @classmethod
    def from_bytes(cls, text: str, code: bytes) -> SizeTable:
        """Inverse of `to_bytes`.

        Raises:
            PlanError: the table or the code is damaged, or another version of schedsearch wrote it.
        """
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise PlanError(f"the table of a range has version {data['version']}, this schedsearch knows {_VERSION}")
            with zipfile.ZipFile(io.BytesIO(code)) as archive:
                if sum(each.file_size for each in archive.infolist()) > MAX_CODE_BYTES:
                    raise PlanError(f"the machine code of a range has more than {MAX_CODE_BYTES} bytes")
                codes = {name: archive.read(name) for name in archive.namelist()}
            if any(_digest(each) != name for name, each in codes.items()):
                raise PlanError("the machine code of a range does not match its checksum; tune again")
            kernels = tuple(_kernel(each, codes) for each in data["kernels"])
            serves = tuple((int(low), int(high), int(index)) for low, high, index in data["serves"])
            table = cls(data["low"], data["high"], kernels, serves, _times(data["specialised_ns"]), int(data["trials"]))
        except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise PlanError(f"the table of a range is damaged: {error!r}; tune again") from error
        table._check()
        return table

    def _check(self) -> None:
        sizes = [size for low, high, _ in self.serves for size in (low, high)]
        joined = all(before[1] + 1 == after[0] for before, after in zip(self.serves, self.serves[1:]))
        if not sizes or (sizes[0], sizes[-1]) != (self.low, self.high) or not joined or sizes != sorted(sizes):
            raise PlanError(f"the table of a range has gaps between {self.low} and {self.high}; tune again")
        for low, high, index in self.serves:
            if not 0 <= index < len(self.kernels) or not set(range(low, high + 1)) <= set(self.kernels[index].plan.sizes):
                raise PlanError(f"the table of a range has no kernel for the sizes {low} to {high}; tune again")


def served(choice: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """`SizeTable.serves` of a choice: size -> index of the kernel.

    >>> served({1: 0, 2: 0, 3: 1, 4: 0})
    ((1, 2, 0), (3, 3, 1), (4, 4, 0))
    """
    found = [
        (low, high, index)
        for index in sorted(set(choice.values()))
        for low, high in runs([size for size in sorted(choice) if choice[size] == index])
    ]
    return tuple(sorted(found))


def _kernel(data: JsonMapping, codes: Mapping[str, bytes]) -> SizedKernel:
    plan = SizedPlan.from_json(canonical_json(data["plan"]))
    return SizedKernel(
        str(data["template"]), int(data["template_version"]), Config(data["config"]), codes[data["code"]], plan,
        _times(data["times_ns"]),
    )  # fmt: skip


def _times(data: JsonMapping) -> dict[int, float]:
    return {int(size): float(time_ns) for size, time_ns in data.items()}


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()
