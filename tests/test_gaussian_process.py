"""The Gaussian process against textbook formulas written out, finite differences and sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from schedsearch.space import ConfigSpace, Knob
from schedsearch.tuner.gaussian_process import JITTER, NOISE, GaussianProcess, representatives
from schedsearch.tuner.transfer import OtherTasks, standardised


def matern(A: Any, B: Any, length_scales: Any) -> Any:
    """Matern-5/2 as in Rasmussen and Williams, equation 4.17, point by point."""
    out = np.empty((len(A), len(B)))
    for i, a in enumerate(A):
        for j, b in enumerate(B):
            r = np.sqrt((((a - b) / length_scales) ** 2).sum())
            out[i, j] = (1 + np.sqrt(5) * r + 5 * r * r / 3) * np.exp(-np.sqrt(5) * r)
    return out


@pytest.fixture
def data() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    X, fresh = rng.random((30, 3)), rng.random((12, 3))
    return X, standardised(np.exp(np.sin(5 * X[:, 0]) + X[:, 1])), fresh


def test_the_posterior_is_that_of_the_textbook(data: Any) -> None:
    X, y, fresh = data
    process = GaussianProcess(3)
    posterior = process.posterior(X, y, fresh)
    ones = np.ones(3)  # the initial length scales and the initial variance of the signal
    inverse = np.linalg.inv(matern(X, X, ones) + (NOISE + JITTER) * np.eye(30))
    cross = matern(fresh, X, ones)
    np.testing.assert_allclose(posterior.mean, cross @ inverse @ y, atol=1e-6)
    np.testing.assert_allclose(posterior.variance, 1 - np.einsum("ij,jk,ik->i", cross, inverse, cross), atol=1e-6)


def test_believing_is_having_measured_the_mean(data: Any) -> None:
    X, y, fresh = data
    process = GaussianProcess(3)
    posterior = process.posterior(X, y, fresh)
    believed = posterior.mean.copy()
    for at in (3, 7):
        posterior.believe(at)
    anew = process.posterior(np.r_[X, fresh[[3, 7]]], np.r_[y, believed[[3, 7]]], fresh)
    np.testing.assert_allclose(posterior.mean, anew.mean, atol=1e-3)
    np.testing.assert_allclose(posterior.variance, anew.variance, atol=1e-5)


def test_the_gradient_is_the_difference_quotient(data: Any) -> None:
    X, y, _ = data
    process = GaussianProcess(3)
    at = np.log([0.3, 0.9, 2.0, 1.5, 0.05])
    _, gradient = process._loss(at, X, y)
    np.testing.assert_allclose(
        gradient, approx_fprime(at, lambda log: process._loss(log, X, y)[0], 1e-6), rtol=1e-3, atol=1e-3
    )


def test_learning_finds_the_coordinates_that_matter(data: Any) -> None:
    """The third coordinate has no effect, so points may be far apart along it."""
    X, y, _ = data
    process = GaussianProcess(3)
    before = process._loss(process._log, X, y)[0]
    process.learn_scales(X, y)
    assert process._loss(process._log, X, y)[0] < before
    length_scales, _, _ = process._hyperparameters()
    assert length_scales[2] > length_scales[0]


def test_expected_improvement_is_the_mean_of_samples(data: Any) -> None:
    X, y, fresh = data
    posterior = GaussianProcess(3).posterior(X, y, fresh)
    best = float(np.median(posterior.mean))
    draws = posterior.mean + np.sqrt(posterior.variance) * np.random.default_rng(1).standard_normal((200_000, len(fresh)))
    sampled = np.maximum(best - draws, 0).mean(axis=0)
    np.testing.assert_allclose(posterior.expected_improvement(best), sampled, atol=3e-3)


def test_means_by_weights_are_those_of_the_posterior(data: tuple[Any, Any, Any]) -> None:
    X, y, fresh = data
    process = GaussianProcess(3)
    process.learn_scales(X, y)
    means = process.mean(X, process.weights(X, y), fresh)
    assert means == pytest.approx(process.posterior(X, y, fresh).mean, abs=1e-9)


def test_representatives_keep_the_lowest_and_the_range() -> None:
    y = np.random.default_rng(0).permutation(1000).astype(np.float64)
    kept = y[representatives(y, 100)]
    assert set(range(50)) <= set(kept) and kept.max() == 999 and len(set(kept)) == 100
    assert representatives(y[:7], 100).tolist() == list(range(7))


class TestOtherTasks:
    space = ConfigSpace([Knob("a", tuple(range(1, 21))), Knob("b", tuple(range(1, 21)))])

    def rows_and(self, time: Any) -> tuple[Any, Any]:
        rows = self.space.sample_indices(60, np.random.default_rng(0))
        return rows, np.exp(time(rows.astype(np.float64) / 20))

    def test_without_results_the_tasks_count_alike_and_order_the_unknown(self) -> None:
        others = OtherTasks.learn(self.space, [self.rows_and(lambda at: at[:, 0]), self.rows_and(lambda at: at[:, 1])])
        unknown = np.array([[0, 0], [0, 19], [19, 0], [19, 19]], dtype=np.int32)
        _, expected = others.expect(unknown[:0], np.empty(0), unknown)
        assert expected[0] < min(expected[1:3]) and max(expected[1:3]) < expected[3]
        assert abs(expected[1] - expected[2]) < 0.3

    def test_results_tell_which_task_is_like_this_one(self) -> None:
        others = OtherTasks.learn(self.space, [self.rows_and(lambda at: at[:, 0]), self.rows_and(lambda at: at[:, 1])])
        rows = self.space.sample_indices(15, np.random.default_rng(1))
        here, _ = others.expect(rows, standardised(np.exp(rows[:, 1] / 20)), rows)
        assert np.corrcoef(here, rows[:, 1])[0, 1] > 0.95

    def test_a_task_that_is_the_opposite_is_soon_left_alone(self) -> None:
        others = OtherTasks.learn(self.space, [self.rows_and(lambda at: -at[:, 0])])
        rows = self.space.sample_indices(15, np.random.default_rng(1))
        here, _ = others.expect(rows, standardised(np.exp(rows[:, 0] / 20)), rows)
        assert np.ptp(here) == 0

    def test_only_tasks_that_explain_half_of_the_results_are_believed(self) -> None:
        others = OtherTasks.learn(self.space, [self.rows_and(lambda at: at[:, 0]), self.rows_and(lambda at: at[:, 1])])
        rows = self.space.sample_indices(40, np.random.default_rng(1))
        a, b = rows.T / 20

        def believed(log_time: Any, n: int = 40) -> int:
            values = standardised(np.exp(log_time))[:n]
            few = others.believed(rows[:n], values)
            return few.values(rows).shape[1] if few.known else 0

        assert [believed(a), believed(b), believed(-a), believed(0 * a)] == [1, 1, 0, 0]
        assert believed(a + 0.5 * b) == 1, "a explains four fifths, b one fifth"
        assert believed(0.1 * a + np.sin(40 * a * b)) == 0
        assert believed(-a - b, n=3) == 2, "three results are too few to doubt anybody"

    def test_too_few_results_are_not_learnt_from(self) -> None:
        rows, times_ns = self.rows_and(lambda at: at[:, 0])
        times_ns[7:] = np.nan
        assert not OtherTasks.learn(self.space, [(rows, times_ns)]).known


def test_failures_count_as_the_slowest() -> None:
    assert (
        standardised(np.array([1.0, np.nan, 4.0, 2.0])).tolist()[1]
        == standardised(np.array([1.0, 4.0, 4.0, 2.0])).tolist()[1]
    )
    assert standardised(np.array([np.nan, np.nan])).tolist() == [0.0, 0.0]
    assert standardised(np.array([3.0, 3.0])).tolist() == [0.0, 0.0]
