"""Install a PostgreSQL server for the tests of the record store, as far as this machine lets it.

    python scripts/setup_postgres.py

It comes from the system's packages, if it is missing and apt may be used. No server is started here: the tests start one of
their own. They skip themselves, with a reason, without it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from apt_packages import install

if __name__ == "__main__":
    if not shutil.which("initdb") and not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        install("postgresql", "PostgreSQL")
