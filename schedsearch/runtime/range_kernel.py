"""A deployed kernel for every size of a range."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedsearch.closing import Closing
from schedsearch.device import Device
from schedsearch.errors import ArgumentError, DatabaseError, DeviceError, NoRecordError, PlanError
from schedsearch.runtime import arrays
from schedsearch.runtime.explanation import Explanation, Level
from schedsearch.runtime.kernel import Kernel, Provenance
from schedsearch.size_table import SizeTable
from schedsearch.target import Target
from schedsearch.workload import WorkloadRange


class RangeKernel(Closing):
    """Runs the workloads of a range on one device. A call takes arrays of any size of the range.

    The first call of a size loads its kernel; later ones find it by the shape of the array. Calls, arguments, outputs and
    errors are those of `Kernel`. Calls may come from any thread.

    Attributes:
        of_range: what it computes.
        table: which kernel serves which size, with times and verified sizes.
        device: (cpu or cuda, ordinal).
    """

    def __init__(
        self,
        of_range: WorkloadRange,
        table: SizeTable,
        device: Callable[[], Device],
        place: tuple[str, int],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.of_range, self.table, self.device = of_range, table, place
        self._open_device, self._on_close = device, on_close
        self._lock = threading.Lock()
        self._by_size: dict[int, Kernel] = {}
        self._by_shape: dict[tuple[int, ...], Kernel] = {}
        lowest, highest = of_range.at(of_range.low).signature, of_range.workload.signature
        self._position = next(n for n, (one, other) in enumerate(zip(lowest, highest)) if one.shape != other.shape)
        self._name = highest[self._position].name
        self._shapes = {
            form.shape: size
            for size in reversed(of_range.sizes)
            for form in arrays.forms(of_range.at(size).signature[self._position])
        }

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Computes the outputs; as `Kernel.__call__`.

        Raises:
            ArgumentError: as there, or the size of the arrays is outside of the range.
            DeviceError: the launch failed, or the code cannot be loaded.
        """
        try:
            kernel = self._by_shape[args[self._position].shape]
        except (LookupError, TypeError, AttributeError):
            kernel = self._kernel_for(args, named)
        return kernel(*args, **named)

    def at(self, size: int) -> Kernel:
        """The kernel of one size, for `bind` and `prepare`; loads it the first time.

        Raises:
            ArgumentError: the size is outside of the range.
            DatabaseError: the stored launch plan cannot be used.
            DeviceError: the code does not fit the device.
        """
        of_range = self.of_range
        if size not in of_range.sizes:
            raise ArgumentError(
                f"{of_range.parameter} is {size}; this kernel was compiled for {of_range.low} to {of_range.high}"
            )
        with self._lock:
            if size not in self._by_size:
                self._by_size[size] = self._load(size)
            return self._by_size[size]

    def close(self) -> None:
        """Unloads all kernels and closes the device. Do not use the kernel afterwards."""
        with self._lock:
            self._by_shape = {}
            kernels, self._by_size = self._by_size, {}
            for kernel in kernels.values():
                kernel.close()
            self._on_close()

    def _kernel_for(self, args: tuple[object, ...], named: dict[str, Any]) -> Kernel:
        if len(args) > self._position:
            array = args[self._position]
        elif self._name in named:
            array = named[self._name]
        else:
            raise ArgumentError(f"missing {self._name}, whose shape says which {self.of_range.parameter} is wanted")
        shape = arrays.view(array, self._name).shape
        size = self._shapes.get(shape)
        if size is None:
            of_range, first = self.of_range, self._position
            ends = " to ".join(str(of_range.at(end).signature[first].shape) for end in (of_range.low, of_range.high))
            raise ArgumentError(
                f"{self._name} has shape {shape}; this kernel takes {of_range.parameter} from {of_range.low} to "
                f"{of_range.high}, which are the shapes {ends}; tune a wider range, or check the other axes"
            )
        kernel = self._by_shape[shape] = self.at(size)
        return kernel

    def _load(self, size: int) -> Kernel:
        workload, found = self.of_range.at(size), self.table.kernel_for(size)
        try:
            artifact = found.artifact(size)
            artifact.plan.check(workload)
        except PlanError as error:
            raise DatabaseError(f"the launch plan of {workload.label} cannot be used: {error}; tune again") from error
        verified = size in found.times_ns
        sizes = f"{self.of_range.parameter} = {', '.join(map(str, found.verified))}"
        why = (f"range: {found.template}, one machine code for many sizes, verified for {sizes}",)
        origin = Provenance("exact", found.template, found.config, found.times_ns.get(size), why=why)
        return Kernel(workload, self._open_device().load(artifact), self.device, origin, verified)


def compile_range(
    of_range: WorkloadRange, db: Path, target: Target, mode: str, device: Callable[[], Device], on_close: Callable[[], None]
) -> RangeKernel:
    """The kernels of a range from a database. Raises as `stored_table`."""
    table = stored_table(of_range, db, target, mode)
    return RangeKernel(of_range, table, device, (target.kind, target.ordinal if target.kind == "cuda" else 0), on_close)


def explain_range(of_range: WorkloadRange, db: Path, target: Target, mode: str) -> Explanation:
    """What `compile_range` would do. Only the level exact serves ranges."""
    try:
        table = stored_table(of_range, db, target, mode)
    except (NoRecordError, DatabaseError, DeviceError) as error:
        return Explanation(of_range, target, (Level("exact", "no", str(error)),))
    kernels = {table.kernel_for(size).template: None for size in of_range.sizes}
    reason = (
        f"{', '.join(kernels)}, stored machine code that was tuned for {of_range.parameter} = {table.low} to {table.high}"
    )
    return Explanation(of_range, target, (Level("exact", "serves", reason),))


def stored_table(of_range: WorkloadRange, db: Path, target: Target, mode: str) -> SizeTable:
    """The narrowest table of a database that covers a range.

    Raises:
        NoRecordError: there is no table that covers the range on this kind of device.
        DatabaseError: the database cannot be used, or this machine does not trust its code.
        DeviceError: the code was made for another processor.
    """
    from schedsearch.records import size_tables

    if not db.exists():
        raise NoRecordError(f"there is no database {db}; tune the range first: schedsearch.tune([range], {str(db)!r})")
    row = size_tables.find(db, of_range.family, of_range.low, of_range.high, target.key, mode)
    if row is None:
        raise NoRecordError(
            f"{db} has no kernels for {of_range.label} on {target.key} in mode {mode}; tune the range: "
            "schedsearch.tune([workload.with_dynamic(...)])"
        )
    try:
        table = SizeTable.from_bytes(row.size_table, row.code)
    except PlanError as error:
        raise DatabaseError(f"{db}: {error}") from error
    arch = str(table.kernels[0].plan.base.get("arch"))
    if target.kind == "cuda" and not target.runs(arch):
        raise DeviceError(f"the kernels are for {arch}, which {target.name} does not run; tune the range here")
    return table
