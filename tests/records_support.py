"""Shared by the tests of the record store: records of every outcome, artifacts, and a way to give up root's rights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from child_environment import child_environment

from schedsearch.measurement import Record
from schedsearch.testing.store_contract import A100, H100, H200, TOOLCHAIN, artifact, conv, profile, record

__all__ = [
    "A100", "H100", "H200", "TOOLCHAIN", "artifact", "before_version_3", "conv", "forked", "profile", "python", "record",
]  # fmt: skip


def before_version_3(record: Record) -> Record:
    """The same record without the fields that schema version 3 added."""
    return replace(record, measurement=replace(record.measurement, host="", device_uuid=""), model=None, anchor=None)


def python(code: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Starts another Python process that can import this module."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment(), **options)


def forked(action: Callable[[], str], *, drop_root: bool = False) -> str:
    """Runs `action` in a forked process and returns its text. The process can give up the right to override permissions."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if drop_root and os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            text = action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
