"""Installs packages of Debian for tests, as far as this machine lets it."""

from __future__ import annotations

import os
import shutil
import subprocess


def install(package: str, what: str) -> bool:
    """Installs a package with apt, if root runs this and apt is there. Returns whether it did.

    Args:
        what: the program as messages name it; its tests are skipped without it.
    """
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print(f"{what} is missing; its tests will be skipped. On Debian: apt install {package}")
        return False
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
    ):
        if subprocess.run(command, check=False, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}).returncode:
            print(f"`{' '.join(command)}` failed; the tests that need {what} will be skipped")
            return False
    return True
