"""Runs NVIDIA's command-line tools over a process of ours."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from schedsearch.errors import DeviceError


def run_tool(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    if_missing: str,
    if_slow: str = "",
) -> tuple[int, str]:
    """Exit code and output of both streams. The process group of the tool, with the process it watches, ends with it.

    Args:
        name: of the tool, for messages.
        if_missing, if_slow: what to do if it cannot be started or takes too long.

    Raises:
        DeviceError: it cannot be started, or did not end in time.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise DeviceError(f"{command[0]} cannot be run: {error.strerror}; {if_missing}") from error
    with process:
        try:
            output = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            raise DeviceError(f"{name} did not end within {timeout_s:g} s and was killed{if_slow}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output
