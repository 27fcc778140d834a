"""The contents of the file of a `FixedNet`: written by `save`, and read piece by piece.

See docs/decisions/127-an-executable-is-one-signed-file.md.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from schedsearch.errors import DatabaseError, PlanError
from schedsearch.executable import references
from schedsearch.executable.check import artifacts
from schedsearch.executable.program import Program, Reference, seal
from schedsearch.executable.run import Bundle
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.records import executables


def save(bundle: Bundle, path: str | os.PathLike[str], checked: str | None = None) -> None:
    """Writes an executable, signed by this machine. The same executable gives the same bytes.

    Args:
        checked: as of a `Program`; default: that of the bundle's.

    Raises:
        UsageError: there is a file that is not an executable; it stays.
        DatabaseError: it cannot be written, or a weight of `bundle` cannot be read.
    """
    program = replace(bundle.program, references=bundle.references)
    if checked is not None:
        program = replace(program, checked=checked)
    bundles = list(_with_inner(bundle))
    code = {sha256: (sha256, each.plan.to_json(), each.code) for held in bundles for sha256, each in held.artifacts.items()}
    weights = itertools.chain.from_iterable(map(_kept, bundles))
    executables.write(Path(path), program.target, seal(program.json), code.values(), weights)


def _with_inner(bundle: Bundle) -> Iterator[Bundle]:
    """A bundle and those of the programs inside of it."""
    yield bundle
    for number, call in enumerate(bundle.program.calls):
        for body in () if call.control is None else bundle.bodies(number):
            yield from _with_inner(body)


def _kept(bundle: Bundle) -> Iterator[tuple[str, memoryview]]:
    """The weights and ONNX models that are written."""
    for number, sha256 in enumerate(bundle.program.weights):
        if sha256 not in bundle.references:
            yield sha256, bundle.weights[number]
    yield from ((sha256, memoryview(data)) for sha256, data in bundle.models.items())


class Stored:
    """The bundle of an executable in a file. The file is read when its fields are asked for."""

    def __init__(self, path: Path, program: Program) -> None:
        self.path, self.program = path, program
        self.references: Mapping[str, Reference] = {}  # what is written again holds all weights

    def bodies(self, number: int) -> Sequence[Stored]:
        control = self.program.calls[number].control
        return [Stored(self.path, each) for each in control.programs] if control is not None else []

    def plans(self) -> Mapping[str, LaunchPlan]:
        """The launch plans of all code, that of programs inside included. Raises DatabaseError as `artifacts`."""
        held = (each for each in _with_inner(self) if isinstance(each, Stored))
        return {sha256: artifact.plan for each in held for sha256, artifact in each.artifacts.items()}

    @functools.cached_property
    def artifacts(self) -> Mapping[str, Artifact]:
        """Raises DatabaseError if code is missing or damaged."""
        with executables.ExecutableFile(self.path) as file:
            found = {}
            for sha256 in artifacts(self.program):
                plan, code = file.code(sha256)
                found[sha256] = Artifact(code, self._plan(plan))
            return found

    @property
    def models(self) -> Mapping[str, bytes]:
        """Raises DatabaseError if one is missing or damaged."""
        with executables.ExecutableFile(self.path) as file:
            foreign = {call.artifact: call.foreign for call in self.program.calls if call.foreign is not None}
            return {sha256: file.weight(sha256, each.nbytes) for sha256, each in foreign.items()}

    @property
    def weights(self) -> Sequence[memoryview]:
        """Read one after the other, so that a network needs the host's memory of its largest weight only."""
        return _Weights(self)

    def _plan(self, text: str) -> LaunchPlan:
        try:
            return LaunchPlan.from_json(text)
        except PlanError as error:
            raise DatabaseError(f"{self.path}: a launch plan cannot be used: {error}; build the model again") from error


class _Weights(Sequence[memoryview]):
    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def __len__(self) -> int:
        return len(self._stored.program.weights)

    @overload
    def __getitem__(self, number: int) -> memoryview: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, number: int | slice) -> memoryview | Sequence[memoryview]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        with executables.ExecutableFile(self._stored.path) as file:
            return self._read(file, range(len(self))[number])

    def __iter__(self) -> Iterator[memoryview]:
        with executables.ExecutableFile(self._stored.path) as file:
            for number in range(len(self)):
                yield self._read(file, number)

    def _read(self, file: executables.ExecutableFile, number: int) -> memoryview:
        program = self._stored.program
        sha256, array = program.weights[number], program.arrays[program.constants[number]]
        if (reference := program.references.get(sha256)) is not None:
            return memoryview(references.read(reference, array, sha256, file.path))
        return memoryview(file.weight(sha256, array.nbytes))
