"""Executables in files: what `schedsearch.load` reads and `Net.save` writes.

See docs/decisions/127-an-executable-is-one-signed-file.md.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import DatabaseError, DeviceError, PlanError, UsageError
from schedsearch.executable import references
from schedsearch.executable.check import artifacts, check, readable
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.net import Net
from schedsearch.executable.program import DYNAMIC, SIZED, Program, Reference, seal, unseal
from schedsearch.executable.run import Bundle
from schedsearch.fields import FieldError
from schedsearch.identity import canonical_json
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.records import executables
from schedsearch.target import Target
from schedsearch.text import quoted


def save(bundle: Bundle, path: str | os.PathLike[str], outside: Mapping[str, Reference] | None = None) -> None:
    """Writes an executable, signed by this machine. The same executable gives the same bytes.

    Args:
        outside: sha256 of a weight -> where it lies outside of the file; the file holds all other weights.

    Raises:
        UsageError: there is a file that is not an executable; it stays.
        DatabaseError: it cannot be written, or a weight of `bundle` cannot be read.
    """
    program = replace(bundle.program, references=outside or {})
    held = (
        (sha256, bundle.weights[number]) for number, sha256 in enumerate(program.weights) if sha256 not in program.references
    )
    code = [(sha256, each.plan.to_json(), each.code) for sha256, each in bundle.artifacts.items()]
    models = ((sha256, memoryview(data)) for sha256, data in bundle.models.items())
    executables.write(Path(path), program.target, seal(program.json), code, itertools.chain(held, models))


def load(path: str | os.PathLike[str], *, target: str | Target = "auto") -> Net:
    """Loads a network that `schedsearch.build` made. It needs none of Numba, ONNX and torch.

    Args:
        path: a model.ssx.
        target: the device, as `schedsearch.detect` takes it; auto: the one that the file is for.

    Raises:
        UsageError: `path` is not a path; or nodes of the model are for ONNX Runtime, which is not installed here.
        UntrustedDatabaseError: this machine did not build the file, and its user did not trust it
            (`schedsearch records trust FILE`).
        DatabaseError: no such file, or it is damaged or not an executable, or its program cannot be one that was built; or
            its weights are in a model's file that is missing or was changed.
        SchemaVersionError: a later version of schedsearch wrote it.
        DeviceError: the file is for another kind of device, or the device cannot be used.

    Examples:
        >>> with schedsearch.load("model.ssx") as net:
        ...     y = net(x)
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path is of type {type(path).__name__}; give the path of a model.ssx")
    path = Path(path)
    data = _program(path)
    kind = data["target"].partition(":")[0]
    if isinstance(target, str):
        target = detect(kind if target == "auto" and kind in ("cpu", "cuda") else target)
    if target.key != data["target"]:
        raise DeviceError(
            f"{path} is for {data['target']}, and this device is {target.key}; build it here: schedsearch build "
            f"{data['model'] or 'MODEL.onnx'} -o {path.name}"
        )
    text = canonical_json(data)
    with readable(path):
        if data.get("kind") == DYNAMIC:
            from schedsearch.dynamic.executable import DynamicExecutable
            from schedsearch.dynamic.file import stored_bundle

            return DynamicExecutable(stored_bundle(path, data), open_device(target))
        if data.get("kind") == SIZED:
            from schedsearch.executable.sized import SizedNet, StoredBundle

            return SizedNet(StoredBundle(path, text), open_device(target))
        stored = Stored(path, text)
        check(stored.program, {sha256: each.plan for sha256, each in stored.artifacts.items()})
    return FixedNet(stored, open_device(target))


def _program(path: Path) -> dict[str, Any]:
    """The program of a file. Raises UntrustedDatabaseError, SchemaVersionError or DatabaseError, as `load` does."""
    with executables.ExecutableFile(path) as file, readable(path):
        text, named = file.program, file.target
        data = unseal(text, required=file.version >= executables.SEALED_VERSION)
        for name in ("target", "model"):
            if not isinstance(data.get(name), str):
                raise FieldError(f"{name} is {quoted(data.get(name))}; allowed: text")
        if data.get("kind", DYNAMIC) not in (DYNAMIC, SIZED):
            raise FieldError(f"its kind {quoted(data['kind'])} is not one that this version knows", later=True)
    if named != data["target"]:
        raise DatabaseError(
            f"{path} was changed: it names the device {quoted(named)}, but its program is for {quoted(data['target'])}; "
            "restore it from a copy, or build it again: schedsearch build MODEL.onnx"
        )
    return data


class Stored:
    """The bundle of an executable in a file. The file is read when its fields are asked for."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.program = path, Program.from_json(text)

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
