"""A Gaussian process over coordinates of configurations: a smooth model that estimates its own uncertainty."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.special import ndtr

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

HYPERPARAMETER_POINTS = 150  # most points for maximising the likelihood; the cost is cubic in their number
HYPERPARAMETER_STEPS = 10  # steps of the optimiser, which continues from the last optimum
LENGTH_SCALE, LENGTH_SCALE_SPREAD = 1.0, 1.0  # log-normal prior; coordinates span [0, 1]
SIGNAL, SIGNAL_SPREAD = 1.0, 1.0  # prior of the variance of standardised values
NOISE, NOISE_SPREAD = 0.02, 1.5  # prior of the variance of what the coordinates do not explain
JITTER = 1e-6  # on the diagonal, against rounding
SMALLEST_VARIANCE = 1e-9
_SQRT5 = 5**0.5


class GaussianProcess:
    """Regression with a Matern-5/2 kernel and one length scale per coordinate (Rasmussen and Williams, 2006, chapters 2, 4
    and 5). The hyperparameters maximise the posterior density under log-normal priors.

    Args:
        dimensions: number of coordinates, each within [0, 1].
    """

    def __init__(self, dimensions: int) -> None:
        self._prior = np.log(np.r_[np.full(dimensions, LENGTH_SCALE), SIGNAL, NOISE])
        self._prior_spread = np.r_[np.full(dimensions, LENGTH_SCALE_SPREAD), SIGNAL_SPREAD, NOISE_SPREAD]
        self._log = self._prior.copy()  # length scales, variance of the signal, variance of the noise
        self._limits = [(-4.0, 4.0)] * (dimensions + 1) + [(-9.0, 1.0)]

    def learn_scales(self, X: Matrix, y: Vector) -> None:
        """Fits the hyperparameters, starting from the present ones.

        Args:
            X: (n, dimensions). y: (n,), standardised, lower is better.
        """
        chosen = representatives(y, HYPERPARAMETER_POINTS)
        X, y = X[chosen], y[chosen]
        options = {"maxiter": HYPERPARAMETER_STEPS, "maxfun": HYPERPARAMETER_STEPS + 5}
        found = minimize(
            self._loss, self._log, args=(X, y), jac=True, method="L-BFGS-B", bounds=self._limits, options=options
        )
        self._log = found.x

    def weights(self, X: Matrix, y: Vector) -> Vector:
        """The weights that `mean` takes: solve once, then predict many candidates."""
        length_scales, signal, noise = self._hyperparameters()
        covariance = signal * _correlation(X / length_scales, X / length_scales)[0]
        covariance[np.diag_indices(len(y))] += noise + JITTER
        result: Vector = np.linalg.solve(covariance, y)
        return result

    def mean(self, X: Matrix, weights: Vector, candidates: Matrix) -> Vector:
        """Means of the posterior at `candidates`, (m,), given `weights` at X."""
        length_scales, signal, _ = self._hyperparameters()
        result: Vector = signal * _correlation(candidates / length_scales, X / length_scales)[0] @ weights
        return result

    def posterior(self, X: Matrix, y: Vector, candidates: Matrix) -> Posterior:
        """The posterior at `candidates`, (m, dimensions), given the values y at X."""
        length_scales, signal, noise = self._hyperparameters()
        known, unknown = X / length_scales, candidates / length_scales
        covariance = signal * _correlation(known, known)[0]
        covariance[np.diag_indices(len(y))] += noise + JITTER
        factor = np.linalg.cholesky(covariance)
        cross = solve_triangular(factor, signal * _correlation(known, unknown)[0], lower=True, check_finite=False)
        mean = solve_triangular(factor, y, lower=True, check_finite=False) @ cross
        return Posterior(mean, unknown, cross, signal, noise)

    def _hyperparameters(self) -> tuple[Vector, float, float]:
        values = np.exp(self._log)
        return values[:-2], float(values[-2]), float(values[-1])

    def _loss(self, log: Vector, X: Matrix, y: Vector) -> tuple[float, Vector]:
        """Negative log posterior density, and its gradient (Rasmussen and Williams, equations 2.30 and 5.9)."""
        values = np.exp(log)
        scaled, signal, noise = X / values[:-2], values[-2], values[-1]
        correlation, distance, decay = _correlation(scaled, scaled)
        covariance = signal * correlation
        covariance[np.diag_indices(len(y))] += noise + JITTER
        try:
            factor = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(log)
        half = solve_triangular(factor, np.eye(len(y)), lower=True, check_finite=False)
        inverse = half.T @ half
        weights = inverse @ y
        gradient = np.empty_like(log)
        outer = 0.5 * (inverse - np.outer(weights, weights))
        pull = outer * (signal * 5 / 3 * (1 + _SQRT5 * distance) * decay)
        gradient[:-2] = 2 * (pull.sum(axis=1) @ scaled**2 - np.einsum("ij,ij->j", scaled, pull @ scaled))
        gradient[-2] = (outer * (signal * correlation)).sum()
        gradient[-1] = noise * np.trace(outer)
        off = (log - self._prior) / self._prior_spread
        loss = 0.5 * y @ weights + np.log(np.diag(factor)).sum() + 0.5 * (off**2).sum()
        return float(loss), gradient + off / self._prior_spread


class Posterior:
    """Means and variances of candidates, (m,) each, while the means of some of them are taken as their values.

    Attributes:
        mean, variance: of the value without noise.
    """

    def __init__(self, mean: Vector, scaled: Matrix, cross: Matrix, signal: float, noise: float) -> None:
        self.mean = mean
        self._scaled, self._cross, self._signal, self._noise = scaled, cross, signal, noise
        self.variance = np.maximum(signal - (cross**2).sum(axis=0), SMALLEST_VARIANCE)

    def believe(self, at: int) -> None:
        """Takes the mean of candidate `at` as its value: all means stay, and variances nearby shrink.

        This is the kriging believer of Ginsbourger, Le Riche and Carraro (2010).
        """
        covariance = self._signal * _correlation(self._scaled[at : at + 1], self._scaled)[0][0]
        row = (covariance - self._cross[:, at] @ self._cross) / np.sqrt(self.variance[at] + self._noise)
        self._cross = np.concatenate([self._cross, row[None]])
        self.variance = np.maximum(self.variance - row**2, SMALLEST_VARIANCE)

    def expected_improvement(self, best: float) -> Vector:
        """Expected improvement: how much lower than `best` each candidate is on average; a higher value counts as 0.

        See Jones, Schonlau and Welch (1998).
        """
        deviation = np.sqrt(self.variance)
        z = (best - self.mean) / deviation
        result: Vector = deviation * (z * ndtr(z) + np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi))
        return result


def representatives(y: Vector, most: int) -> NDArray[np.int64]:
    """Positions of all values, at most `most`. If there are more: half of them are the lowest, and the other half are spread
    evenly over the sorted rest."""
    order = np.argsort(y, kind="stable")
    if len(y) <= most:
        return np.arange(len(y))
    lowest, others = np.split(order, [most // 2])
    return np.concatenate([lowest, others[np.linspace(0, len(others) - 1, most - len(lowest)).astype(np.int64)]])


def _correlation(A: Matrix, B: Matrix) -> tuple[Any, Any, Any]:
    """Matern-5/2 correlations of scaled coordinates, (len(A), len(B)), with distances and exponentials for gradients."""
    squared = (A**2).sum(axis=1)[:, None] + (B**2).sum(axis=1)[None] - 2 * A @ B.T
    distance = np.sqrt(np.maximum(squared, 0))
    decay = np.exp(-_SQRT5 * distance)
    return (1 + _SQRT5 * distance + 5 / 3 * distance**2) * decay, distance, decay
