"""Machine code by name: what the kernels of one device need beside them, and what was compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schedsearch.backend import RejectedError
from schedsearch.launch import Artifact


class CodeCache:
    """Each piece of code is compiled once. Processes that hand their pieces on spare others the compilation."""

    def __init__(self) -> None:
        self._known: dict[str, Artifact] = {}
        self._fresh: dict[str, Artifact] = {}
        self._refused: dict[str, str] = {}
        self.verified: set[str] = set()  # code that serves several workloads and was verified on one of them

    def __contains__(self, name: str) -> bool:
        """Whether `get` compiles nothing."""
        return name in self._known or name in self._refused

    def learn(self, known: Mapping[str, Artifact]) -> None:
        """Adds code that another process compiled."""
        self._known.update(known)

    def refuse(self, name: str, reason: str) -> None:
        """Notes that another process could not compile it."""
        self._refused[name] = reason

    def refusal(self, name: str) -> str | None:
        """Why another process could not compile it; None if no one tried, or it could."""
        return self._refused.get(name)

    def get(self, name: str, build: Callable[[], Artifact]) -> Artifact:
        """The code of this name; it is built the first time.

        Raises:
            RejectedError: it was refused.
            Exception: any exception of `build`.
        """
        if name in self._refused:
            raise RejectedError(self._refused[name])
        if name not in self._known:
            self._known[name] = self._fresh[name] = build()
        return self._known[name]

    def take_fresh(self) -> dict[str, Artifact]:
        """What was compiled here since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh
