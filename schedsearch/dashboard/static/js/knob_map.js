// Two knobs at once: the time of every pair of their values as a map.

import { Chart, lines, nameAxis, plotGrid, tooltip } from "./chart.js";
import { el } from "./dom.js";
import { formatCount, formatPercent, formatTime, formatValue, plural, shorten } from "./format.js";
import { picker } from "./knob_charts.js";
import { routeTo } from "./router.js";
import { isLight, mixColors } from "./theme.js";
import { extent, trialKey } from "./trials.js";

const TIMES = [["best_ns", "best time"], ["median_ns", "median time"]];

/** { element, emptyWords, show(task), dispose() } */
export function knobMap() {
  let latest = null;
  let pair = null; // its place in `knob_pairs`, as text
  let field = TIMES[0][0];
  const pairPicker = picker("Pair", (value) => {
    pair = value;
    draw();
  });
  const timePicker = picker("Show", (value) => {
    field = value;
    draw();
  });
  const chart = new Chart({
    title: "Times by two knobs",
    help: "Each cell is a pair of values: the darker, the faster. × marks pairs of which every trial failed; empty cells were not tried. The percentage is the share of the differences between times that both knobs explain together. A click opens the best trial of a cell.",
    height: 22,
    controls: el("div", { class: "controls" }, pairPicker.element, timePicker.element),
  });

  function draw() {
    const pairs = latest.knob_pairs;
    if (pairs.length === 0) {
      chart.note("There are no two knobs with a few values each, so there is nothing to map.");
      return;
    }
    if (pair === null || !pairs[Number(pair)]) pair = String(Math.max(0, pairs.findIndex((each) => each.template === latest.row.template)));
    const several = new Set(pairs.map((each) => each.template)).size > 1;
    const nameOf = ({ template, first, second, importance }) => `${several ? `${shorten(template, 18)}: ` : ""}${first} and ${second}${importance === null ? "" : `, ${formatPercent(importance)}`}`;
    pairPicker.show(pairs.map((each, place) => [String(place), nameOf(each)]), pair);
    timePicker.show(TIMES, field);
    drawMap(chart, latest, pairs[Number(pair)], field);
  }

  return {
    element: chart.element,
    get emptyWords() {
      return chart.emptyWords;
    },
    show(task) {
      latest = task;
      draw();
    },
    dispose: () => chart.dispose(),
  };
}

function drawMap(chart, task, { template, first, second, cells }, field) {
  const knobs = task.knobs.find((each) => each.template === template);
  const valuesOf = (name) => knobs.values[knobs.names.indexOf(name)];
  const [across, up] = [valuesOf(first), valuesOf(second)];
  const words = (values) => values.map((value) => shorten(formatValue(value), 14));
  const range = extent(cells[field]);
  const places = cells.trials.map((_, index) => index);
  const fastest = range && places.find((index) => cells[field][index] === range[0]);
  const pairOf = (index) => `${first}=${formatValue(across[cells.first[index]])}, ${second}=${formatValue(up[cells.second[index]])}`;
  chart.plot.style.setProperty("height", `${Math.min(34, 7 + Math.max(4, up.length) * 1.9)}rem`);
  chart.show({
    summary: `Times of ${plural(places.length, "pair")} of values of ${first} and ${second}${range ? `; the fastest is ${pairOf(fastest)} with ${formatTime(range[0])}` : ""}.`,
    onclick: ({ value }) => {
      const id = Array.isArray(value) ? cells.best_id[value[2]] : null;
      if (id !== null) location.hash = routeTo("trial", [trialKey(task.database, id)]);
    },
    option: (colors) => ({
      grid: plotGrid(colors, { top: colors.fontPx * 2.2 }),
      xAxis: nameAxis(colors, { names: words(across), name: shorten(first, 40), axisLabel: { color: colors.text, fontSize: colors.fontPx, hideOverlap: true } }),
      yAxis: nameAxis(colors, { names: words(up), name: shorten(second, 40), vertical: true, axisLabel: { color: colors.text, fontSize: colors.fontPx, hideOverlap: true } }),
      tooltip: tooltip(colors, { trigger: "item", formatter: ({ value }) => cellTooltip(value[2]) }),
      series: [
        {
          type: "custom",
          id: "cells",
          encode: { x: 0, y: 1 },
          data: places.map((index) => [cells.first[index], cells.second[index], index]),
          renderItem: (params, api) => drawCell(api, colors, cells[field][api.value(2)], range),
        },
      ],
    }),
    table: () => ({
      rows: places,
      columns: [
        { label: first, value: (index) => across[cells.first[index]], show: (index) => formatValue(across[cells.first[index]]) },
        { label: second, value: (index) => up[cells.second[index]], show: (index) => formatValue(up[cells.second[index]]) },
        { label: "Best", numeric: true, value: (index) => cells.best_ns[index], show: (index) => bestLink(index) },
        { label: "Median", numeric: true, value: (index) => cells.median_ns[index], show: (index) => formatTime(cells.median_ns[index]) },
        { label: "Trials", numeric: true, descendingFirst: true, value: (index) => cells.trials[index], show: (index) => formatCount(cells.trials[index]) },
        { label: "Failed", numeric: true, descendingFirst: true, value: (index) => cells.failures[index], show: (index) => formatCount(cells.failures[index]) },
      ],
    }),
  });

  function bestLink(index) {
    const id = cells.best_id[index];
    return id === null ? null : el("a", { href: routeTo("trial", [trialKey(task.database, id)]) }, formatTime(cells.best_ns[index]));
  }

  function cellTooltip(index) {
    return lines(
      `${first} = ${shorten(formatValue(across[cells.first[index]]), 40)}`,
      `${second} = ${shorten(formatValue(up[cells.second[index]]), 40)}`,
      cells.best_ns[index] === null ? "" : `best ${formatTime(cells.best_ns[index])}, median ${formatTime(cells.median_ns[index])}`,
      `${plural(cells.trials[index], "trial")}, ${formatCount(cells.failures[index])} failed`,
    );
  }
}

/** A cell with its time, if there is room for it. The colour follows the logarithm of the time. */
function drawCell(api, colors, time, range) {
  const [x, y] = api.coord([api.value(0), api.value(1)]);
  const [width, height] = api.size([1, 1]).map((side) => side - 2);
  const shape = { x: x - width / 2, y: y - height / 2, width, height, r: 2 };
  const text = (words, fill) => ({ type: "text", style: { text: words, x, y, fill, align: "center", verticalAlign: "middle", fontSize: colors.fontPx, fontFamily: colors.font } });
  if (time === null) return { type: "group", children: [{ type: "rect", shape, style: { fill: colors.grid } }, text("×", colors.bad)] };
  const share = range[1] > range[0] ? Math.log(time / range[0]) / Math.log(range[1] / range[0]) : 0;
  const fill = mixColors(colors.series[0], colors.grid, share);
  const words = formatTime(time);
  const fits = width > colors.fontPx * 0.55 * words.length && height > colors.fontPx * 1.1;
  return { type: "group", children: [{ type: "rect", shape, style: { fill } }, ...(fits ? [text(words, isLight(fill) ? "#000000" : "#ffffff")] : [])] };
}
