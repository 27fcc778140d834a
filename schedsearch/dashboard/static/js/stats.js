// Statistics and scales: pure functions of arrays of numbers.

/** The quantile `q` (0 to 1) of numbers in ascending order, interpolated between neighbours (R's type 7). */
export function quantile(sorted, q) {
  if (sorted.length === 0) return null;
  const place = (sorted.length - 1) * q;
  const low = Math.floor(place);
  const high = Math.ceil(place);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

/** Five numbers of a distribution: { count, low, first, median, third, high }; null for no values. */
export function fiveNumbers(values) {
  if (values.length === 0) return null;
  const sorted = Float64Array.from(values).sort();
  return {
    count: sorted.length,
    low: sorted[0],
    first: quantile(sorted, 0.25),
    median: quantile(sorted, 0.5),
    third: quantile(sorted, 0.75),
    high: sorted[sorted.length - 1],
  };
}

/** The points at which a series gets a new minimum: [{ index, value }], unknown values skipped. */
export function improvements(values) {
  const steps = [];
  let best = Infinity;
  for (let index = 0; index < values.length; index += 1) {
    const value = values[index];
    if (value !== null && value < best) {
      best = value;
      steps.push({ index, value });
    }
  }
  return steps;
}

/** Whether times from `low` to `high` need a logarithmic axis. */
export function isWideSpread(low, high, factor = 4) {
  return low > 0 && high / low > factor;
}

/** Bounds for a logarithmic axis around positive values: 1, 2 or 5 times a power of ten on both sides. */
export function logBounds(low, high) {
  return [niceBelow(low), niceAbove(high)];
}

function niceBelow(value) {
  const power = 10 ** Math.floor(Math.log10(value) + 1e-12);
  for (const step of [5, 2, 1]) if (step * power <= value * (1 + 1e-9)) return round12(step * power);
  return round12(power);
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value) + 1e-12);
  for (const step of [1, 2, 5, 10]) if (step * power >= value * (1 - 1e-9)) return round12(step * power);
  return round12(10 * power);
}

function round12(value) {
  return Number(value.toPrecision(12));
}

/** Ticks at 1, 2 and 5 times powers of ten inside [low, high]; fewer (only powers) when there would be over nine. */
export function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low) - 1e-9); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of [1, 2, 5]) {
      const tick = round12(step * 10 ** power);
      if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) ticks.push(tick);
    }
  }
  if (ticks.length <= 9) return ticks;
  return ticks.filter((tick) => /^1(0*|e.*)$|^0\.0*1$/.test(String(tick)));
}

const RATIO_LIMITS = [1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1e3, 1e4, 1e5, 1e6];
const RATIO_TICKS = {
  1.02: [1.01, 1.02],
  1.05: [1.01, 1.02, 1.03, 1.04, 1.05],
  1.1: [1.02, 1.05, 1.1],
  1.2: [1.05, 1.1, 1.2],
  1.5: [1.1, 1.2, 1.5],
  2: [1.2, 1.5, 2],
  3: [1.5, 2, 3],
  5: [1.5, 2, 3, 5],
  10: [2, 5, 10],
};

/** A scale of ratios that holds `ends` and 1 in its middle: { limit, ticks }; it reaches from 1 / limit to limit. */
export function ratioScale(ends) {
  const most = Math.max(1, ...ends.map((ratio) => Math.max(ratio, 1 / ratio)));
  const limit = RATIO_LIMITS.find((each) => each >= most) ?? 10 ** Math.ceil(Math.log10(most));
  const above = RATIO_TICKS[limit] ?? logTicks(2, limit).filter((tick) => String(tick).startsWith("1"));
  return { limit, ticks: [...above.map((tick) => round12(1 / tick)).reverse(), 1, ...above] };
}

/** Counts of `values` in `bins` equal bins between the least and the greatest: [{ from, to, count }]. */
export function histogram(values, bins) {
  if (values.length === 0) return [];
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === high) return [{ from: low, to: high, count: values.length }];
  const width = (high - low) / bins;
  const counts = new Array(bins).fill(0);
  for (const value of values) counts[Math.min(bins - 1, Math.floor((value - low) / width))] += 1;
  return counts.map((count, index) => ({ from: low + index * width, to: low + (index + 1) * width, count }));
}
