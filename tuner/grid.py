"""Exhaustive search in lexicographic order, for small spaces and for recording a whole space."""

from __future__ import annotations

import numpy as np

from schedsearch.space import Rows
from schedsearch.tuner.base import Tuner

_CHUNK_ROWS = 1024


class GridTuner(Tuner):
    """Walks the space lazily, the last knob fastest, and skips illegal and taken configurations. Nothing is random."""

    def _set_up(self) -> None:
        self._chunks = self.space.walk(_CHUNK_ROWS)
        self._ahead = self._no_rows()

    def _propose(self, n: int) -> Rows:
        rows = self._no_rows()
        while len(rows) < n:
            if not len(self._ahead):
                self._ahead = next(self._chunks, self._no_rows())
                if not len(self._ahead):
                    break
            use = n - len(rows)
            rows = np.concatenate([rows, self._unseen(self._ahead[:use])])
            self._ahead = self._ahead[use:]
        return rows
