"""The contract of a tuner, the bookkeeping that all of them share, and the contract of a cost model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.config import Config
from schedsearch.space import ConfigSpace, Rows


class CostModel(ABC):
    """Ranks configurations by their features. It sees a matrix, never a configuration."""

    @abstractmethod
    def fit(self, X: NDArray[np.float32], y: NDArray[np.float64]) -> bool:
        """Learns from all results so far and replaces what it learned before.

        Args:
            X: features, (n, features).
            y: -log(time), (n,); NaN where the configuration failed.

        Returns:
            Whether there was enough data. If not, `predict` must not be called.
        """

    @abstractmethod
    def predict(self, X: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores, (n,): higher is faster. They compare only with each other, and only until the next `fit`."""


class Tuner(ABC):
    """Proposes configurations to measure.

    Every tuner keeps these rules:

    - A proposal is legal. It differs from all earlier proposals and from all configurations that were excluded or told.
    - The default comes first, then the hints.
    - The same seed and the same calls give the same proposals in every process.
    - Failures are results.
    - `ask` may be called while earlier proposals are still being measured.

    Subclasses implement `_propose`, also `_learn` if they use results, and `_set_up` if they keep state.

    Args:
        space: where to search.
        seed: of all random choices.
        default: proposed first, unless it is excluded or was told.
        exclude: never proposed, e.g. because they are measured. Configurations that are not in the space are ignored.
        hints: configurations that were good elsewhere, e.g. for a similar workload, best first. They are proposed right
            after the default. Hints that are illegal in the space or excluded are ignored.

    Raises:
        ConfigError: the default is illegal in the space.
    """

    batch: int = 8
    """The preferred number of proposals per `ask`. Asking for more or fewer is allowed."""

    def __init__(
        self,
        space: ConfigSpace,
        *,
        seed: int,
        default: Config | None = None,
        exclude: Collection[Config] = (),
        hints: Sequence[Config] = (),
    ) -> None:
        self.space = space
        self.rng = np.random.default_rng(seed)
        self._taken: set[Any] = set()  # keys of rows that must not be proposed (again)
        self._pending: dict[Any, NDArray[np.int32]] = {}  # key -> row of proposals that were not told yet
        self._finished = False
        if default is not None:
            space.require(default)
        first = hints if default is None else (default, *hints)
        self._first = self.space.legal_among(first)[0]  # proposed before anything else
        self._results: dict[
            Any, tuple[NDArray[np.int32], float]
        ] = {}  # key -> (row, time in ns or NaN), in order of arrival
        self._elsewhere: list[tuple[Rows, NDArray[np.float64]]] = []  # results of other tasks: rows, times or NaN
        self._taken.update(self._keys(self.space.legal_among(exclude)[0]))
        self._set_up()

    # ---- for callers

    @classmethod  # noqa: B027 (optional hook)
    def load(cls) -> None:
        """Imports what instances would import later; making one needs no call."""

    def ask(self, n: int) -> list[Config]:
        """Up to n new configurations to measure: fewer only if the space has no more, [] if `finished`."""
        if n <= 0 or self._finished:
            return []
        first, rest = self._no_rows(), self._no_rows()
        if len(self._first):
            unseen = self._unseen(self._first)
            first, self._first = self._take(unseen[:n]), unseen[n:]
        if n > len(first):
            rest = self._take(self._propose(n - len(first)))
            self._finished = len(first) + len(rest) < n
        return self.space.configs(np.concatenate([first, rest]))

    def tell(self, results: Sequence[tuple[Config, float | None]]) -> None:
        """Reports measured times in nanoseconds, None for a failure.

        The results may include configurations that this tuner did not propose (an earlier run, another tuner); it will not
        propose them again. A result is ignored if its configuration is not in the space, e.g. because it was recorded before
        the space was restricted. A later result for the same configuration replaces the earlier one.

        Raises:
            ValueError: a time is not a positive finite number.
        """
        if wrong := [time_ns for _, time_ns in results if time_ns is not None and not 0 < time_ns < float("inf")]:
            raise ValueError(f"a time must be a positive number of nanoseconds, or None for a failure; got {wrong[0]!r}")
        rows, known = self.space.legal_among(config for config, _ in results)
        times = np.array([np.nan if time_ns is None else time_ns for _, time_ns in results], dtype=np.float64)[known]
        if not len(rows):
            return
        for key, row, time_ns in zip(self._keys(rows), rows, times.tolist()):
            self._results[key] = (row, time_ns)
            self._taken.add(key)
            self._pending.pop(key, None)
        self._learn(rows, times)

    def transfer(self, sources: Sequence[Sequence[tuple[Config, float | None]]]) -> None:
        """Offers results of other tasks with the same knobs: another device, another shape. Call it before `ask`.

        They are evidence, not results of this task: their configurations are still proposed. A tuner that cannot use them
        proposes as if they were not there.

        Args:
            sources: one sequence of (config, time in ns or None) per task; times are comparable within one task only.
                Configurations that are not legal in this space are ignored.
        """
        for results in sources:
            rows, known = self.space.legal_among(config for config, _ in results)
            times = np.array([np.nan if time_ns is None else time_ns for _, time_ns in results], dtype=np.float64)[known]
            if len(rows):
                self._elsewhere.append((rows, times))

    @property
    def finished(self) -> bool:
        """Whether the space is exhausted, so that `ask` returns nothing more. Known once an `ask` has come short."""
        return self._finished

    def predict(self, configs: Sequence[Config]) -> NDArray[np.float64] | None:
        """The model's scores of configurations of the space, (n,), higher is faster; None without a (trained) model."""
        return None

    # ---- for subclasses

    def _set_up(self) -> None:  # noqa: B027 (optional hook)
        """Creates the state that a strategy keeps between calls; the constructor's last step."""

    @abstractmethod
    def _propose(self, n: int) -> Rows:
        """n new legal rows, n >= 1; fewer only if there are no more. `_fresh` adds random rows if a strategy has too few."""

    def _learn(self, rows: Rows, times_ns: NDArray[np.float64]) -> None:  # noqa: B027 (optional hook)
        """Takes in new results, NaN for a failure. `_result_arrays` already contains them."""

    def _fresh(self, n: int, besides: Rows | None = None) -> Rows:
        """n random rows that were never taken and are not in `besides`; fewer only if there are no more."""
        exclude = self._taken if besides is None or not len(besides) else self._taken.union(self._keys(besides))
        return self.space.sample_indices(n, self.rng, exclude)

    def _unseen(self, rows: Rows) -> Rows:
        """The rows that were never taken, each once, in their order."""
        fresh: dict[Any, int] = {}
        for at, key in enumerate(self._keys(rows)):
            if key not in self._taken:
                fresh.setdefault(key, at)
        return rows[list(fresh.values())]

    def _result_arrays(self) -> tuple[Rows, NDArray[np.float64]]:
        """All results so far, in order of arrival: rows (n, knobs) and times in ns (n,), NaN for failures."""
        if not self._results:
            return self._no_rows(), np.empty(0)
        rows, times = zip(*self._results.values())
        return np.stack(rows), np.array(times)

    def _pending_rows(self) -> Rows:
        """Rows that were proposed and not told yet, (n, knobs)."""
        return np.stack(list(self._pending.values())) if self._pending else self._no_rows()

    def _keys(self, rows: Rows) -> list[Any]:
        keys: list[Any] = self.space.keys(rows).tolist()
        return keys

    def _no_rows(self) -> Rows:
        return np.empty((0, len(self.space.knobs)), dtype=np.int32)

    # ---- private

    def _take(self, rows: Rows) -> Rows:
        """Marks proposals as taken. Raises if one breaks the contract, which is a bug of the tuner."""
        keys = self._keys(rows)
        illegal = rows[~self.space.legal(rows)]
        if len(illegal):
            config = self.space.config(illegal[0])
            raise AssertionError(
                f"{type(self).__name__} proposed the illegal {config}: {'; '.join(self.space.check(config))}"
            )
        if len(set(keys)) < len(keys) or not self._taken.isdisjoint(keys):
            raise AssertionError(f"{type(self).__name__} proposed a configuration a second time, or one that was excluded")
        self._taken.update(keys)
        self._pending.update(zip(keys, rows))
        return rows
