"""A tuned kernel by name, in a process that has neither its source nor Numba."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schedsearch.device import preload
from schedsearch.errors import ArgumentError, NoRecordError, UsageError, did_you_mean
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB
from schedsearch.ops.own_kernel import Argument, OwnKernelParams, arguments_of, parameters_of
from schedsearch.own.arguments import Given, read
from schedsearch.own.calls import Launches
from schedsearch.own.habits import Called
from schedsearch.records.location import require_file
from schedsearch.records.lookup import Lookup
from schedsearch.runtime.kernel import Step
from schedsearch.workload import Workload


def own_kernel(name: str, db: str | os.PathLike[str] = DEFAULT_DB, *, code: str | None = None) -> DeployedKernel:
    """A kernel that `schedsearch.tunable` tuned, from its records alone.

    It loads the libraries of the devices that the records are for, so that the first call only loads the kernel.

    Args:
        name: of the function.
        db: a live database or one written by `records export --deploy`.
        code: digest of the version to use; needed if the database holds several.

    Raises:
        NoRecordError: the database has no record of such a kernel.
        UsageError: it has several versions, and `code` names none of them.
        DatabaseError: the database cannot be used.
    """
    path = require_file(db)
    lookup = Lookup(path)
    try:
        rows = lookup.nearest("own_kernel", COLD_GRAPH)
    finally:
        lookup.close()
    workloads = [Workload.from_json(row.workload_json) for row in rows]
    names = sorted({OwnKernelParams.of(workload.params).kernel for workload in workloads})
    mine = [workload for workload in workloads if OwnKernelParams.of(workload.params).kernel == name]
    if not mine:
        known = f"it has {', '.join(names)}" if names else "it has no kernels of users"
        raise NoRecordError(f"{path} has no record of {name!r}{did_you_mean(name, names)}; {known}; tune it first")
    codes = sorted({OwnKernelParams.of(workload.params).code for workload in mine})
    if code is None and len(codes) > 1:
        raise UsageError(
            f"{path} holds {len(codes)} versions of {name}: {', '.join(codes)}; give code= one of them "
            "(`TUNABLE.definition.code` is the present one), or export a database with one version"
        )
    if code is not None and code not in codes:
        raise UsageError(f"{path} has no version {code!r} of {name}; it has {', '.join(codes)}")
    for kind in {row.target_key.partition(":")[0] for row in rows}:
        preload(kind)
    return DeployedKernel(name, path, [each for each in mine if OwnKernelParams.of(each.params).code == (code or codes[0])])


class DeployedKernel(Called):
    """Called and bound like the `Tunable` that it was tuned as, for the shapes that have records.

    Attributes:
        workloads: those that the database has records of.
    """

    def __init__(self, name: str, db: Path, workloads: Sequence[Workload]) -> None:
        self.__name__ = name
        self.name, self.workloads = name, tuple(workloads)
        self._arguments = arguments_of(OwnKernelParams.of(self.workloads[0].params))
        self._launches = Launches(db, self._read, self._workload, ("exact", "same_architecture"))

    def __call__(self, *args: Any, stream: Any = None, **named: Any) -> None:
        """Runs the stored machine code for these shapes.

        Raises:
            ArgumentError: an array or number is not possible.
            NoRecordError: there is no record of these shapes and number formats.
        """
        self._launches.call(self._in_order(args, named) if named else args, stream)

    def bind(self, *args: object, **named: object) -> Step:
        """Packs the arguments once; the result, called with a stream, only launches."""
        return self._launches.bind(self._in_order(args, named))

    def _parameters(self) -> Sequence[str]:
        return [argument.name for argument in self._arguments]

    def close(self) -> None:
        self._launches.close()

    def _read(self, args: tuple[object, ...]) -> list[Given]:
        names = [argument.name for argument in self._arguments]
        if len(args) != len(names):
            raise ArgumentError(f"{self.name} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
        return [read(each.name, value, each.role) for each, value in zip(self._arguments, args)]

    def _workload(self, given: Sequence[Given]) -> Workload:
        known = self.workloads[0]
        arguments: list[Argument] = [each.argument for each in given]
        params = OwnKernelParams.of(known.params)
        workload = Workload("own_kernel", parameters_of(self.name, params.code, arguments, params.verified_by))
        if workload not in self.workloads:
            have = "; ".join(sorted(each.label for each in self.workloads)[:5])
            raise NoRecordError(f"there is no record of {workload.label}; the database has {have}; tune this shape")
        return workload

    def __repr__(self) -> str:
        return f"<{self.name} for {len(self.workloads)} shapes>"
