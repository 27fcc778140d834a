"""Objects that `with` closes."""

from __future__ import annotations

from typing import Self


class Closing:
    """Gives a class with `close` the methods of `with`, whose block closes the object at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
