// Searches over recorded spaces: how near they come to the optimum, by evaluations.

import { Chart, lines, numberAxis, plotGrid, tooltip } from "./chart.js";
import { el, emptyNote, replaceChildren, section } from "./dom.js";
import { formatCount, formatPercent, formatTime, plural, significant } from "./format.js";
import { picker } from "./knob_charts.js";
import { SERIES } from "./theme.js";

export const replayPage = {
  title: "Replay",
  paths: () => ["replay"],
  make: makeReplay,
};

const ALL_SPACES = "all spaces, geometric mean";

function makeReplay() {
  let latest = null;
  let space = ALL_SPACES;
  const notices = el("div", { class: "stack tight" });
  const spacePicker = picker("Space", (value) => {
    space = value;
    draw();
  });
  const chart = new Chart({
    title: "Fraction of the optimum by evaluations",
    help: "1 is the best known configuration. The bands are 95 % bootstrap intervals over seeds.",
    height: 26,
    controls: el("div", { class: "controls" }, spacePicker.element),
  });

  function draw() {
    const { files } = latest;
    const spaces = [...new Set(files.flatMap((file) => file.spaces.map((item) => item.name)))];
    if (!spaces.includes(space)) space = ALL_SPACES;
    spacePicker.show([ALL_SPACES, ...spaces], space);
    const curves = files.map((file, index) => curveOf(file, space, index)).filter(Boolean);
    if (curves.length === 0) {
      chart.note("No file has curves of this space.");
      return;
    }
    drawCurves(chart, curves);
  }

  return {
    element: el("div", { class: "page" }, el("div", { class: "head" }, el("h1", {}, "Which search finds more?"), notices), section("How near to the optimum?", chart.element)),
    show([replay]) {
      latest = replay;
      replaceChildren(
        notices,
        replay.problems.map((problem) => el("p", { class: "problem" }, problem)),
        replay.files.length ? null : emptyNote("No replay was given. `schedsearch replay --json > FILE` writes one; name the file beside the databases."),
      );
      chart.element.parentElement.hidden = replay.files.length === 0;
      if (replay.files.length) draw();
    },
    dispose: () => chart.dispose(),
  };
}

/** What a file says of a space: { name, index, budgets, middle, low, high, note }; null when it lacks the space. */
function curveOf(file, space, index) {
  const name = `${file.tuner} (${file.name})`;
  const note = `${plural(file.seeds, "seed")}, ${significant(file.cpu_s_per_64, 2)} CPU s for 64 evaluations`;
  if (space === ALL_SPACES) return { name, index, budgets: file.budgets, middle: file.geomean, low: file.low, high: file.high, note };
  const found = file.spaces.find((item) => item.name === space);
  return found && { name, index, budgets: file.budgets, middle: found.fractions, low: found.low, high: found.high, note: `${note}; optimum ${formatTime(found.best_ns)} of ${formatCount(found.valid)} valid` };
}

function drawCurves(chart, curves) {
  const names = curves.map((curve) => curve.name);
  const budgets = curves.flatMap((curve) => curve.budgets);
  chart.show({
    summary: `${plural(curves.length, "search", "searches")} over up to ${formatCount(Math.max(...budgets))} evaluations.`,
    legend: names,
    option: (colors, hidden) => ({
      grid: plotGrid(colors),
      xAxis: { ...numberAxis(colors, { name: "evaluations, log", format: formatCount }), type: "log", logBase: 2, min: Math.min(...budgets), max: Math.max(...budgets) },
      yAxis: numberAxis(colors, { name: "fraction of the optimum", vertical: true, zero: true, max: 1, format: (value) => formatPercent(value) }),
      tooltip: tooltip(colors, { trigger: "item", formatter: ({ value, seriesName }) => (value?.length > 2 ? lines(seriesName, `${formatCount(value[0])} evaluations: ${formatPercent(value[1])}`, `${formatPercent(value[2])} to ${formatPercent(value[3])}`) : "") }),
      series: curves.filter((curve) => !hidden.has(curve.name)).flatMap((curve) => curveSeries(curve, colors, names.indexOf(curve.name))),
    }),
    table: () => ({
      rows: curves.flatMap((curve) => curve.budgets.map((budget, at) => ({ ...curve, budget, at }))),
      columns: [
        { label: "Search", value: (row) => row.name, show: (row) => [row.name, el("br"), el("small", {}, row.note)] },
        { label: "Evaluations", numeric: true, value: (row) => row.budget, show: (row) => formatCount(row.budget) },
        { label: "Fraction of the optimum", numeric: true, value: (row) => row.middle[row.at], show: (row) => formatPercent(row.middle[row.at]) },
        { label: "95 % interval", numeric: true, value: (row) => row.low[row.at], show: (row) => `${formatPercent(row.low[row.at])} to ${formatPercent(row.high[row.at])}` },
      ],
    }),
  });
}

function curveSeries(curve, colors, index) {
  const color = colors.series[index % colors.series.length];
  const stack = `band-${index}`;
  const band = (id, values, opacity) => ({ type: "line", id: `${id}-${index}`, stack, data: values, symbol: "none", silent: true, lineStyle: { opacity: 0 }, areaStyle: { color, opacity } });
  return [
    band("low", curve.budgets.map((budget, at) => [budget, curve.low[at]]), 0),
    band("high", curve.budgets.map((budget, at) => [budget, curve.high[at] - curve.low[at]]), 0.14),
    {
      type: "line",
      id: `curve-${index}`,
      name: curve.name,
      symbol: SERIES[index % SERIES.length],
      symbolSize: colors.fontPx * 0.6,
      itemStyle: { color },
      lineStyle: { color, width: 2 },
      data: curve.budgets.map((budget, at) => [budget, curve.middle[at], curve.low[at], curve.high[at]]),
    },
  ];
}
