"""The dashboard that `schedsearch tune --dashboard` starts beside itself, with less priority than the run."""

from __future__ import annotations

import os
import sys

from schedsearch.cli.main import main

_NICE = 10

if __name__ == "__main__":
    os.nice(_NICE)
    main(["dashboard", "--no-browser", *sys.argv[1:]])
