"""Prints the extra that this machine's NVIDIA driver can use: cu13, cu12, or nothing if there is no driver.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

CUDA_13_DRIVER = 580  # the first driver branch of CUDA 13 (NVIDIA's "CUDA Compatibility")


def driver_version() -> str:
    """The version from nvidia-smi or the kernel module, e.g. '580.65.06'; '' if there is neither."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if result.returncode == 0 and result.stdout.strip():
            return result.stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""


def extra(version: str) -> str:
    """The extra for a driver version."""
    major = re.match(r"\d+", version)
    if major is None:
        return ""
    return "cu13" if int(major[0]) >= CUDA_13_DRIVER else "cu12"


if __name__ == "__main__":
    print(extra(driver_version()))
