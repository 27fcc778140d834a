"""Packages of the npm registry, pinned by version and SHA-512."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path


def fetch(name: str, version: str, sha512: str, folder: Path) -> Path:
    """Unpacks one package into `folder/node_modules/NAME`, where Node and esbuild look for it. Needs `npm`.

    Args:
        sha512: in base64, as `npm view NAME@VERSION dist.integrity` prints it behind `sha512-`.

    Raises:
        SystemExit: the download does not have this SHA-512; nothing of it is unpacked.
        subprocess.CalledProcessError: npm could not download it.
        FileNotFoundError: npm is not installed.
    """
    packed = subprocess.run(
        ["npm", "pack", "--silent", f"{name}@{version}"], cwd=folder, check=True, capture_output=True, text=True
    )
    archive = folder / packed.stdout.strip().splitlines()[-1]
    got = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if got != sha512:
        sys.exit(f"{name} {version}: sha512-{got} is not the pinned sha512-{sha512}; nothing was written")
    with tarfile.open(archive) as files:
        files.extractall(folder / "unpacked", filter="data")
    target = folder / "node_modules" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    (folder / "unpacked" / "package").rename(target)
    return target
