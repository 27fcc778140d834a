"""Install what the tests of the dashboard's pages need, as far as this machine lets it.

    python scripts/setup_browser.py FOLDER

Chromium comes from the system's packages, if it is missing and apt may be used. axe-core, which finds barriers for people
with disabilities, comes from npm into FOLDER, pinned by its SHA-512. The tests skip themselves, with a reason, without them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from apt_packages import install
from npm_packages import fetch

AXE = ("axe-core", "4.14.1", "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==")


def install_chromium() -> None:
    if shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome"):
        return
    install("chromium", "Chromium")


def install_axe(folder: Path) -> None:
    target = folder / "axe.min.js"
    if target.exists():
        return
    if not shutil.which("npm"):
        print("npm is missing, so axe-core cannot be fetched; its tests will be skipped")
        return
    with tempfile.TemporaryDirectory() as name:
        try:
            package = fetch(*AXE, Path(name))
        except subprocess.CalledProcessError as error:
            print(f"npm could not download axe-core, so its tests will be skipped: {error.stderr.strip()[-200:]}")
            return
        shutil.copy(package / "axe.min.js", target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    install_chromium()
    install_axe(Path(sys.argv[1]))
