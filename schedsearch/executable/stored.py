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
    held = (
        (sha256, bundle.weights[number]) for number, sha256 in enumerate(program.weights) if sha256 not in program.references
    )
    code = [(sha256, each.plan.to_json(), each.code) for sha256, each in bundle.artifacts.items()]
    models = ((sha256, memoryview(data)) for sha256, data in bundle.models.items())
    executables.write(Path(path), program.target, seal(program.json), code, itertools.chain(held, models))


class Stored:
    """The bundle of an executable in a file. The file is read when its fields are asked for."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.program = path, Program.from_json(text)
        self.references: Mapping[str, Reference] = {}  # what is written again holds all weights

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
