"""Build schedsearch/dashboard/static/vendor/echarts.min.js from pinned npm packages.

The dashboard uses five chart types of Apache ECharts, so the file that is checked in holds only these. Every package is
pinned by version and by the SHA-512 that the npm registry publishes; a download that differs stops the script. Releases of
ECharts before 6.1 can be made to run foreign script (CVE-2026-45249), so do not pin an older one.

    python scripts/vendor_echarts.py            # needs npm and Linux on x86-64; writes the vendor folder
    python scripts/vendor_echarts.py --check    # needs neither; compares the checked-in files with their checksums
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from npm_packages import fetch

VENDOR = Path(__file__).resolve().parent.parent / "schedsearch" / "dashboard" / "static" / "vendor"
CHECKSUMS = "SHA256SUMS"

# Package, version, SHA-512 in base64 (`npm view NAME@VERSION dist.integrity`).
PACKAGES = {
    "echarts": ("6.1.0", "q0yaFPggC9FUdsWH4blavRWFmxdrIodbkoKNAjJudAI6CA9gNPxHtV2RcZNEepZVlk4yvBYkOkbk6HIVpIyHZA=="),
    "zrender": ("6.1.0", "oEGMDB6pOP2S6OwRR4PdVv610zrjnA3Bh+JnSG12fYJlBKjtNAoEb5fSUoCOOINlH96I2fU38/A2UpRKs67xYQ=="),
    "tslib": ("2.3.0", "N82ooyxVNm6h1riLCoyS9e3fuJ3AMG2zIZs2Gd1ATcSFjSA23Q0fzjjZeh0jbJvWVDZ0cJT8yaNNaaXHzueNjg=="),
    "@esbuild/linux-x64": (
        "0.28.2",
        "4xTZr1FUmSoQW4XIWmit3tzQrUTZM+N3P0XV8xROKYF50XfI7xeO90+1bZvNwxIufQ9hDQVRJH5YhgPVF8A/HQ==",
    ),
}

# What the pages draw with: see schedsearch/dashboard/static/js/chart.js.
ENTRY = """
import * as core from 'echarts/core';
import { BarChart, CustomChart, LineChart, ParallelChart, ScatterChart } from 'echarts/charts';
import { AriaComponent, DataZoomComponent, GridComponent, MarkLineComponent, ParallelComponent, TooltipComponent }
  from 'echarts/components';
import { CanvasRenderer } from 'echarts/renderers';
core.use([BarChart, CustomChart, LineChart, ParallelChart, ScatterChart, AriaComponent, DataZoomComponent, GridComponent,
  MarkLineComponent, ParallelComponent, TooltipComponent, CanvasRenderer]);
export const { init, getInstanceByDom, version } = core;
"""


def build(folder: Path) -> None:
    """Bundle ENTRY and write it to VENDOR with the licences and the checksums."""
    entry = folder / "entry.js"
    entry.write_text(ENTRY, encoding="utf-8")
    out = folder / "echarts.min.js"
    subprocess.run(
        [
            str(folder / "node_modules/@esbuild/linux-x64/bin/esbuild"),
            str(entry),
            "--bundle",
            "--minify",
            "--format=iife",
            "--global-name=echarts",
            "--target=es2020",
            "--charset=utf8",
            "--legal-comments=none",
            f"--outfile={out}",
        ],
        cwd=folder,
        check=True,
    )
    modules = folder / "node_modules"
    banner = (
        f"/* Apache ECharts {PACKAGES['echarts'][0]} (Apache-2.0), ZRender {PACKAGES['zrender'][0]} (BSD-3-Clause), "
        f"tslib {PACKAGES['tslib'][0]} (0BSD); licences beside this file. Built by scripts/vendor_echarts.py. */\n"
    )
    VENDOR.mkdir(parents=True, exist_ok=True)
    texts = {
        "echarts.min.js": banner + out.read_text(encoding="utf-8"),
        "LICENSE.echarts": (modules / "echarts/LICENSE").read_text(encoding="utf-8"),
        "NOTICE.echarts": (modules / "echarts/NOTICE").read_text(encoding="utf-8"),
        "LICENSE.zrender": (modules / "zrender/LICENSE").read_text(encoding="utf-8"),
        "LICENSE.tslib": (modules / "tslib/LICENSE.txt").read_text(encoding="utf-8"),
    }
    for name, text in texts.items():
        (VENDOR / name).write_text(text, encoding="utf-8")
    lines = [f"{hashlib.sha256((VENDOR / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(texts)]
    (VENDOR / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def changed_files() -> list[str]:
    """Names of checked-in files that do not have the checksum that SHA256SUMS gives."""
    changed = []
    for line in (VENDOR / CHECKSUMS).read_text(encoding="utf-8").splitlines():
        digest, name = line.split("  ", 1)
        if hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() != digest:
            changed.append(name)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the files with their checksums")
    if parser.parse_args().check:
        if changed := changed_files():
            sys.exit(f"changed since they were built: {', '.join(changed)}; run scripts/vendor_echarts.py")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in PACKAGES:
            fetch(package, *PACKAGES[package], folder)
        build(folder)
    size = (VENDOR / "echarts.min.js").stat().st_size
    print(f"wrote {VENDOR} ({size:,} bytes of script)")


if __name__ == "__main__":
    main()
