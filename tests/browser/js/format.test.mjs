import assert from "node:assert/strict";
import test from "node:test";
import * as format from "../../../schedsearch/dashboard/static/js/format.js";
import * as theme from "../../../schedsearch/dashboard/static/js/theme.js";

const cases = (name, formatter, table) =>
  test(name, () => {
    for (const [input, expected] of table) assert.equal(formatter(...[input].flat()), expected, `of ${input}`);
  });

cases("times choose the unit that keeps three digits", format.formatTime, [
  [0, "0 ns"],
  [7, "7.00 ns"],
  [999.4, "999 ns"],
  [999.9, "1.00 µs"],
  [12345, "12.3 µs"],
  [1.5e6, "1.50 ms"],
  [2.34e9, "2.34 s"],
  [null, "–"],
  [NaN, "–"],
]);

cases("long durations have two units", format.formatDuration, [
  [0.0123, "12.3 ms"],
  [5, "5 s"],
  [5.25, "5.3 s"],
  [75, "1 min 15 s"],
  [3600, "1 h"],
  [3599.7, "1 h"],
  [5400, "1 h 30 min"],
  [90000, "1 d 1 h"],
  [null, "–"],
]);

cases("shares", format.formatPercent, [
  [0, "0 %"],
  [0.0004, "<0.1 %"],
  [0.034, "3.4 %"],
  [0.0996, "10 %"],
  [0.5, "50 %"],
  [1, "100 %"],
  [null, "–"],
]);

cases("ratios and changes", format.formatRatio, [[2.345, "2.35×"], [0.5, "0.500×"], [1234, "1,230×"], [0.9976, "0.998×"], [1.0999, "1.100×"], [null, "–"]]);
cases("changes have their sign", format.formatChange, [[1.034, "+3.4 %"], [0.9, "−10 %"], [1, "±0 %"], [null, "–"]]);
cases("rates come in 1e9", format.formatRate, [[[812345, "GFLOP/s"], "812 TFLOP/s"], [[3.2, "GB/s"], "3.20 GB/s"], [[null, "GB/s"], "–"]]);
cases("sizes", format.formatBytes, [[512, "512 B"], [98304, "96 KiB"], [3.5 * 2 ** 20, "3.5 MiB"]]);
cases("counts", format.formatCount, [[1234567, "1,234,567"], [null, "–"]]);
cases("devices", format.deviceName, [["cuda:sm_90:132:NVIDIA H200", "NVIDIA H200"], ["cpu:avx2", "cpu:avx2"], ["cuda:sm_90:132:a:b", "a:b"]]);
cases("plurals", format.plural, [[[1, "trial"], "1 trial"], [[2, "trial"], "2 trials"], [[0, "search", "searches"], "0 searches"]]);
cases("values of knobs", format.formatValue, [[64, "64"], [true, "true"], [null, "–"], ["<b>", "<b>"], [0.123456, "0.1235"]]);

test("texts are cut by characters, not in the middle of one", () => {
  assert.equal(format.shorten("abcdef", 4), "abc…");
  assert.equal(format.shorten("a😀b😀c", 3), "a😀…");
  assert.equal(format.shorten("abc", 3), "abc");
});

test("text on a mixed colour has the contrast that readers need (WCAG 2, 4.5:1), whatever the share", () => {
  const luminance = (color) => {
    const [r, g, b] = [1, 3, 5].map((at) => {
      const value = parseInt(color.slice(at, at + 2), 16) / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  assert.equal(theme.mixColors("#000000", "#ffffff", 0.5), "#808080");
  for (const [from, to] of [["#0a66a8", "#eceef0"], ["#56a8ec", "#272c33"]]) {
    assert.equal(theme.mixColors(from, to, 0), from);
    assert.equal(theme.mixColors(from, to, 1), to);
    for (let share = 0; share <= 1; share += 0.05) {
      const fill = theme.mixColors(from, to, share);
      const text = theme.isLight(fill) ? 0 : 1;
      const [low, high] = [luminance(fill), text].sort((a, b) => a - b);
      assert.ok((high + 0.05) / (low + 0.05) >= 4.5, `${fill} at ${share}`);
    }
  }
});
