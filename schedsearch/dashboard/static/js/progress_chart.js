// Best time so far, and every trial as a dot, over trials or over seconds of tuning.

import { Chart, FAILED, lines, numberAxis, plotGrid, timeAxis, timeLine, tooltip, zoom } from "./chart.js";
import { el } from "./dom.js";
import { formatDuration, formatPercent, formatTime, plural } from "./format.js";
import { routeTo } from "./router.js";
import { improvements, isWideSpread, logBounds } from "./stats.js";
import { SERIES } from "./theme.js";
import { configLines, configText, extent, searchTrials, templateOf, trialConfig, trialKey } from "./trials.js";

/** { element, show(task), dispose() } */
export function progressChart() {
  let over = "trials";
  let latest = null;
  let range = "improving";
  const rangeButtons = [["improving", "Where it improved"], ["all", "All times"]].map(([name, words]) => {
    const button = el("button", { type: "button", "aria-pressed": String(name === range), data: { range: name } }, words);
    button.addEventListener("click", () => {
      range = name;
      for (const each of rangeButtons) each.setAttribute("aria-pressed", String(each.dataset.range === range));
      draw();
    });
    return button;
  });
  const ranges = el("div", { class: "switch", role: "group", "aria-label": "Times on the vertical axis" }, rangeButtons);
  const left = el("small");
  const buttons = ["trials", "seconds"].map((name) =>
    el("button", { type: "button", "aria-pressed": String(name === over), onclick: () => choose(name) }, `Over ${name}`),
  );
  const chart = new Chart({
    title: "Best time so far",
    help: "Each dot is a trial; the line is the best of all before it. Zoom with the slider, or with Ctrl and the wheel; a click opens the trial. By keyboard, arrows go from trial to trial, and Enter opens one.",
    height: 24,
    controls: el("div", { class: "controls" }, el("div", { class: "switch", role: "group", "aria-label": "Horizontal axis" }, buttons), ranges, left),
  });

  function choose(name) {
    over = name;
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(["trials", "seconds"][index] === name)));
    draw();
  }

  function draw() {
    const { trials, knobs, database } = latest;
    const search = searchTrials(latest);
    if (search.positions.length === 0) {
      chart.note("No trial was measured yet.");
      return;
    }
    const xs = over === "trials" ? search.numbers : search.seconds;
    const times = search.positions.map((position) => trials.time_ns[position]);
    const whole = extent(times);
    if (!whole) {
      chart.note("Every trial failed so far, so there is no time to draw. The failures are listed below.");
      return;
    }
    const { window } = latest;
    ranges.hidden = window.above === 0;
    const isWindow = range === "improving" && window.above > 0;
    const bounds = isWindow ? windowBounds(window) : whole;
    left.textContent = isWindow ? `▲ ${plural(window.above, "slower trial")} above` : "";
    const top = isWindow ? bounds[1] : topOf(whole);
    const steps = improvements(times);
    const failures = times.some((time) => time === null);
    const names = [...knobs.map((item) => item.template), ...(failures ? [FAILED] : [])];
    chart.show({
      summary: `Best time so far over ${over}: ${steps.length} improvements, from ${formatTime(steps[0].value)} to ${formatTime(steps[steps.length - 1].value)}.`,
      legend: names,
      onclick: ({ value }) => {
        if (Array.isArray(value) && value[2] !== undefined) location.hash = routeTo("trial", [trialKey(database, trials.id[value[2]])]);
      },
      option: (colors, hidden) => ({
        grid: plotGrid(colors, { bottom: colors.fontPx * 4 }),
        dataZoom: zoom(colors),
        xAxis: numberAxis(colors, {
          name: over === "trials" ? "trial" : "time of tuning",
          format: over === "trials" ? (value) => value.toLocaleString("en-US") : formatDuration,
          zero: true,
          max: xs[xs.length - 1],
          nameGap: colors.fontPx * 1.9,
        }),
        yAxis: isWindow ? windowAxis(colors, bounds) : timeAxis(colors, { name: "time", low: bounds[0], high: bounds[1], vertical: true }),
        tooltip: tooltip(colors, { trigger: "item", formatter: (item) => trialTooltip(latest, item) }),
        series: seriesOf(colors, hidden, { names, knobs, search, xs, times, steps, top }),
      }),
      dots: {
        count: xs.length,
        start: steps[steps.length - 1].index,
        at: (place) => trialDot(latest, search.positions[place], [xs[place], Math.min(times[place] ?? top, top)], `Trial ${search.numbers[place]}`),
      },
      dotOf: (row) => row.place,
      table: () => trialTable(latest, search, times),
    });
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

  function seriesOf(colors, hidden, { names, knobs, search, xs, times, steps, top }) {
    const clouds = knobs.map((_, index) => ({ points: [], index }));
    const failed = [];
    const above = [];
    search.positions.forEach((position, place) => {
      const time = times[place];
      const cloud = time === null ? failed : time > top ? above : clouds[latest.trials.template[position]].points;
      cloud.push([xs[place], Math.min(time ?? top, top), position]);
    });
    const series = clouds
      .filter(({ points, index }) => points.length && !hidden.has(names[index]))
      .map(({ points, index }) => ({
        type: "scatter",
        name: names[index],
        id: `template-${index}`,
        data: points,
        symbol: SERIES[index % SERIES.length],
        symbolSize: colors.fontPx * (points.length > 3000 ? 0.25 : 0.5),
        large: points.length > 3000,
        itemStyle: { color: colors.series[index % colors.series.length], opacity: points.length > 1000 ? 0.45 : 0.65 },
      }));
    const slow = above.filter(([, , position]) => !hidden.has(names[latest.trials.template[position]]));
    if (slow.length) {
      series.push({ type: "scatter", name: "slower", id: "above", data: slow, symbol: "triangle", symbolSize: colors.fontPx * 0.5, itemStyle: { color: colors.muted, opacity: 0.5 } });
    }
    if (failed.length && !hidden.has(FAILED)) {
      series.push({
        type: "scatter",
        name: FAILED,
        id: "failed",
        data: failed,
        symbol: "path://M0 0L4 4M4 0L0 4",
        symbolSize: colors.fontPx * 0.5,
        symbolOffset: [0, "80%"],
        itemStyle: { color: "transparent", borderColor: colors.bad, borderWidth: 1.2, opacity: 0.75 },
      });
    }
    const line = steps.flatMap(({ index, value }, step) => [...(step ? [[xs[index], steps[step - 1].value]] : []), [xs[index], value, search.positions[index]]]);
    line.push([xs[xs.length - 1], steps[steps.length - 1].value]);
    series.push({ type: "line", name: "best so far", id: "best", data: line, showSymbol: false, z: 5, lineStyle: { color: colors.text, width: colors.fontPx / 6 } });
    return series;
  }
}

/** The lines of a tooltip for the trial whose position is the third number of the item's value. */
export function trialTooltip(task, { value }) {
  const position = Array.isArray(value) ? value[2] : undefined;
  if (position === undefined) return "";
  const { trials, outcomes } = task;
  const time = trials.time_ns[position];
  return lines(
    `${templateOf(task, position)}, record ${trials.id[position]}`,
    time === null ? outcomes[trials.outcome[position]].replaceAll("_", " ") : timeLine("measured", time),
    trials.spread[position] === null ? "" : `spread of its repetitions: ${formatPercent(trials.spread[position])}`,
    timeLine("predicted", trials.predicted_ns[position]),
    ...configLines(trialConfig(task, position)),
  );
}

/** The bounds of the axis for the times between which the search improved, with some room on both sides. */
function windowBounds({ low_ns: low, high_ns: high }) {
  const room = Math.max((high - low) * 0.06, low * 0.005);
  return [Math.max(0, low - room), high + room];
}

function windowAxis(colors, [low, high]) {
  const axis = timeAxis(colors, { name: "time", low, high, vertical: true, wide: 10 });
  return { ...axis, min: low, max: high, axisLabel: { ...axis.axisLabel, showMinLabel: false, showMaxLabel: false } };
}

/** Where failures are drawn. */
function topOf(range) {
  return isWideSpread(...range) ? logBounds(...range)[1] : range[1];
}

/** A trial as a dot of a chart for the keyboard. */
export function trialDot(task, position, value, name) {
  const { trials, outcomes, database } = task;
  const time = trials.time_ns[position];
  const result = time === null ? outcomes[trials.outcome[position]].replaceAll("_", " ") : formatTime(time);
  const predicted = trials.predicted_ns[position] === null ? "" : `, predicted ${formatTime(trials.predicted_ns[position])}`;
  return {
    value,
    words: `${name}: ${result}${predicted}; ${templateOf(task, position)}, ${configText(trialConfig(task, position))}`,
    open: () => {
      location.hash = routeTo("trial", [trialKey(database, trials.id[position])]);
    },
  };
}

function trialTable(task, search, times) {
  const { trials, outcomes, database } = task;
  let best = null;
  const rows = times.map((time, place) => {
    const before = best;
    if (time !== null && (best === null || time < best)) best = time;
    return { place, time, best, gain: best !== before && before !== null ? before / best - 1 : null, position: search.positions[place] };
  });
  return {
    rows,
    columns: [
      {
        label: "Trial",
        numeric: true,
        value: (row) => search.numbers[row.place],
        show: (row) => el("a", { href: routeTo("trial", [trialKey(database, trials.id[row.position])]) }, String(search.numbers[row.place])),
      },
      { label: "After", numeric: true, value: (row) => search.seconds[row.place], show: (row) => formatDuration(search.seconds[row.place]) },
      { label: "Time", numeric: true, value: (row) => row.time, show: (row) => (row.time === null ? outcomes[trials.outcome[row.position]].replaceAll("_", " ") : formatTime(row.time)) },
      { label: "Best so far", numeric: true, value: (row) => row.best, show: (row) => (row.best === null ? null : formatTime(row.best)) },
      { label: "Gain", numeric: true, descendingFirst: true, value: (row) => row.gain, show: (row) => (row.gain === null ? null : formatPercent(row.gain)) },
      { label: "Template", value: (row) => templateOf(task, row.position) },
    ],
  };
}
