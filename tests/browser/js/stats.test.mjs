import assert from "node:assert/strict";
import test from "node:test";
import * as stats from "../../../schedsearch/dashboard/static/js/stats.js";

test("quantiles are those of numpy.quantile", () => {
  const sorted = [1, 2, 4, 8, 16];
  assert.equal(stats.quantile(sorted, 0), 1);
  assert.equal(stats.quantile(sorted, 0.25), 2);
  assert.equal(stats.quantile(sorted, 0.6), 5.6);
  assert.equal(stats.quantile(sorted, 1), 16);
  assert.equal(stats.quantile([], 0.5), null);
  assert.deepEqual(stats.fiveNumbers([16, 1, 8, 2, 4]), { count: 5, low: 1, first: 2, median: 4, third: 8, high: 16 });
});

test("improvements are new minima; failures are skipped", () => {
  assert.deepEqual(stats.improvements([null, 5, 7, null, 4, 4, 3]), [
    { index: 1, value: 5 },
    { index: 4, value: 4 },
    { index: 6, value: 3 },
  ]);
  assert.deepEqual(stats.improvements([null, null]), []);
});

test("logarithmic axes have bounds and ticks at 1, 2 and 5", () => {
  assert.deepEqual(stats.logBounds(26, 180), [20, 200]);
  assert.deepEqual(stats.logBounds(20, 200), [20, 200]);
  assert.deepEqual(stats.logBounds(0.9, 1.1), [0.5, 2]);
  assert.deepEqual(stats.logTicks(20, 500), [20, 50, 100, 200, 500]);
  assert.deepEqual(stats.logTicks(1, 1e4), [1, 10, 100, 1000, 10000]);
});

test("wide spreads are those beyond a factor of four", () => {
  assert.equal(stats.isWideSpread(1, 3), false);
  assert.equal(stats.isWideSpread(1, 5), true);
  assert.equal(stats.isWideSpread(0, 5), false);
});

test("a histogram counts every value once", () => {
  assert.deepEqual(stats.histogram([0, 1, 2, 3, 4], 2), [
    { from: 0, to: 2, count: 2 },
    { from: 2, to: 4, count: 3 },
  ]);
  assert.deepEqual(stats.histogram([3, 3], 5), [{ from: 3, to: 3, count: 2 }]);
  assert.deepEqual(stats.histogram([], 5), []);
});

test("a scale of ratios has 1 in its middle, ticks in pairs, and room for all ends", () => {
  for (const ends of [[1], [0.98, 1.001], [0.215, 0.979], [1.3, 7], [0.004, 2], [3e7]]) {
    const { limit, ticks } = stats.ratioScale(ends);
    assert.ok(ends.every((end) => end >= 1 / limit && end <= limit), `${ends} in ${limit}`);
    assert.ok(ticks.includes(1) && ticks.length % 2 === 1 && ticks.length >= 3);
    ticks.forEach((tick, index) => assert.ok(Math.abs(tick * ticks[ticks.length - 1 - index] - 1) < 1e-9));
    assert.ok(ticks.every((tick) => tick >= (1 / limit) * (1 - 1e-9) && tick <= limit * (1 + 1e-9)));
  }
  assert.deepEqual(stats.ratioScale([1.9]).ticks.slice(3), [1, 1.2, 1.5, 2]);
});
