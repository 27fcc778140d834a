"""Temporary folders of a run, which the next run removes if this one is killed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from schedsearch.leftovers import OwnedFolder


class ScratchFolder(OwnedFolder):
    """A folder for one `kind` of work in the system's temporary folder. Raises OSError if it cannot be made."""

    def __init__(self, kind: str) -> None:
        super().__init__(Path(tempfile.gettempdir()), f"schedsearch-{kind}-")
