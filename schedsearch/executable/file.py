"""Executables in files: `schedsearch.load` finds the executor of a file.

See docs/decisions/127-an-executable-is-one-signed-file.md.
"""

from __future__ import annotations

import os
from pathlib import Path

from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import DatabaseError, DeviceError, UsageError
from schedsearch.executable.check import check, readable
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.net import Net
from schedsearch.executable.program import DYNAMIC, SIZED, Program, unseal
from schedsearch.executable.stored import Stored
from schedsearch.fields import FieldError
from schedsearch.identity import canonical_json
from schedsearch.records import executables
from schedsearch.target import Target
from schedsearch.text import quoted
from schedsearch.typed import JsonObject


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
        stored = Stored(path, Program.from_json(text))
        check(stored.program, stored.plans())
    return FixedNet(stored, open_device(target))


def _program(path: Path) -> JsonObject:
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
