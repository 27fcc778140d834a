// The colours of series, measured: contrast by WCAG 2.2, and how far they stay apart for colour-blind readers.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

const css = readFileSync(new URL("../../../schedsearch/dashboard/static/app.css", import.meta.url), "utf8");
const block = (start) => css.slice(css.indexOf(start), css.indexOf("}", css.indexOf(start)));
const colorsOf = (text) => Object.fromEntries([...text.matchAll(/--([\w-]+): (#[0-9a-f]{6});/g)].map(([, name, value]) => [name, value]));
const THEMES = { light: colorsOf(block(":root {")), dark: colorsOf(block(':root[data-theme="dark"]')) };

const linear = (hex) =>
  [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255).map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
const luminance = (hex) => linear(hex).reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};

// Machado, Oliveira and Fernandes 2009, severity 1, for linear sRGB.
const BLINDNESS = {
  none: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritanopia: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};
const seenBy = (hex, matrix) => {
  const rgb = linear(hex);
  return matrix.map((row) => Math.min(1, Math.max(0, row.reduce((sum, weight, index) => sum + weight * rgb[index], 0))));
};

// OKLab, in which distances are about as large as they look (Ottosson 2020).
const oklab = ([r, g, b]) => {
  const [l, m, s] = [
    0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
    0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
    0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
  ].map(Math.cbrt);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
};
const distance = (a, b) => Math.hypot(...a.map((value, index) => value - b[index]));

for (const [theme, colors] of Object.entries(THEMES)) {
  const series = Array.from({ length: 8 }, (_, index) => colors[`series-${index + 1}`]);

  test(`${theme}: text has a contrast of 4.5, marks have 3`, () => {
    for (const name of ["text", "muted", "accent", "good", "bad"]) {
      for (const ground of ["page", "surface", "soft"]) assert.ok(contrast(colors[name], colors[ground]) >= 4.5, `${name} on ${ground}`);
    }
    for (const color of series) assert.ok(contrast(color, colors.page) >= 3, `${color}: ${contrast(color, colors.page)}`);
  });

  // Marks have shapes too; the first four, which most charts stop at, must differ by colour alone.
  test(`${theme}: colours of series stay apart for every kind of colour blindness`, () => {
    for (const [kind, matrix] of Object.entries(BLINDNESS)) {
      const seen = series.map((color) => oklab(seenBy(color, matrix)));
      for (let a = 0; a < 8; a += 1) {
        for (let b = 0; b < a; b += 1) {
          const least = a < 4 ? 0.078 : 0.044;
          const apart = distance(seen[a], seen[b]);
          assert.ok(apart >= least, `${kind}: ${series[a]} and ${series[b]} are ${apart.toFixed(3)} apart`);
        }
      }
    }
  });
}
