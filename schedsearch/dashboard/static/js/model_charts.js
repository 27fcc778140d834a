// Is the cost model any good? Predicted against measured, and its rank correlation state by state.

import { Chart, lines, numberAxis, timeAxis, tooltip, zoom, plotGrid } from "./chart.js";
import { el } from "./dom.js";
import { formatCount, formatTime, significant, plural } from "./format.js";
import { trialDot, trialTooltip } from "./progress_chart.js";
import { routeTo } from "./router.js";
import { SERIES } from "./theme.js";
import { extent, templateOf, trialKey } from "./trials.js";

const NO_MODEL = "No trial was chosen by a model: the tuner has none, or it had too few results to train it. There is nothing to compare.";

const LEAST_TRIALS = 4; // the correlation of two trials is 1 or -1, whatever the model

/** Predicted against measured times: { element, show(task), dispose() }. */
export function predictionChart() {
  const chart = new Chart({
    title: "Predicted against measured",
    help: "Each dot is a trial, predicted before it was measured. On the diagonal the model was exact; a cloud without direction is a useless model. By keyboard, arrows go from trial to trial, and Enter opens one.",
    height: 22,
  });
  return {
    element: chart.element,
    get emptyWords() {
      return chart.emptyWords;
    },
    show(task) {
      const { trials, knobs, database } = task;
      const known = [];
      for (let position = 0; position < trials.id.length; position += 1) {
        if (trials.predicted_ns[position] !== null && trials.time_ns[position] !== null) known.push(position);
      }
      if (known.length === 0) {
        chart.note(NO_MODEL);
        return;
      }
      const [low, high] = extent(known.flatMap((position) => [trials.predicted_ns[position], trials.time_ns[position]]));
      const names = knobs.map((item) => item.template);
      chart.show({
        summary: `Predicted against measured times of ${plural(known.length, "trial")}; rank correlation ${task.agreement === null ? "unknown" : significant(task.agreement, 2)}.`,
        legend: names.length > 1 ? names : [],
        onclick: ({ value }) => {
          if (Array.isArray(value) && value[2] !== undefined) location.hash = routeTo("trial", [trialKey(database, trials.id[value[2]])]);
        },
        option: (colors, hidden) => ({
          xAxis: timeAxis(colors, { name: "predicted", low, high }),
          yAxis: timeAxis(colors, { name: "measured", low, high, vertical: true }),
          tooltip: tooltip(colors, { trigger: "item", formatter: (item) => trialTooltip(task, item) }),
          series: [
            ...names.map((name, index) => ({
              type: "scatter",
              name,
              id: `template-${index}`,
              symbol: SERIES[index % SERIES.length],
              symbolSize: colors.fontPx * (known.length > 2000 ? 0.25 : 0.5),
              large: known.length > 3000,
              itemStyle: { color: colors.series[index % colors.series.length], opacity: 0.55 },
              data: hidden.has(name) ? [] : known.filter((position) => trials.template[position] === index).map((position) => [trials.predicted_ns[position], trials.time_ns[position], position]),
            })),
            { type: "line", id: "exact", silent: true, showSymbol: false, data: [[low, low], [high, high]], lineStyle: { color: colors.muted, width: 1.2, type: "dashed" } },
          ],
        }),
        dots: {
          count: known.length,
          start: 0,
          at: (place) => trialDot(task, known[place], [trials.predicted_ns[known[place]], trials.time_ns[known[place]]], `Record ${trials.id[known[place]]}`),
        },
        dotOf: (position) => known.indexOf(position),
        table: () => ({
          rows: known,
          columns: [
            { label: "Record", numeric: true, value: (position) => trials.id[position], show: (position) => el("a", { href: routeTo("trial", [trialKey(database, trials.id[position])]) }, String(trials.id[position])) },
            { label: "Template", value: (position) => templateOf(task, position) },
            { label: "Predicted", numeric: true, value: (position) => trials.predicted_ns[position], show: (position) => formatTime(trials.predicted_ns[position]) },
            { label: "Measured", numeric: true, value: (position) => trials.time_ns[position], show: (position) => formatTime(trials.time_ns[position]) },
          ],
        }),
      });
    },
    dispose: () => chart.dispose(),
  };
}

/** Rank correlation of each state of the model: { element, show(task), dispose() }. */
export function modelStateChart() {
  const chart = new Chart({
    title: "Rank correlation of each state of the model",
    help: "Each time the model is trained, it makes a new state. 1 ranks the next trials perfectly, 0 is chance. Larger dots stand for more trials; states with fewer than four are in the table only.",
    height: 22,
  });
  return {
    element: chart.element,
    get emptyWords() {
      return chart.emptyWords;
    },
    show(task) {
      const states = task.models.filter((state) => state.correlation !== null && state.trials >= LEAST_TRIALS);
      if (states.length === 0) {
        chart.note(task.models.length ? `No state of the model has ${LEAST_TRIALS} valid trials yet; fewer say nothing.` : NO_MODEL);
        return;
      }
      const templates = [...new Set(states.map((state) => state.template))];
      chart.show({
        summary: `Rank correlation of ${plural(states.length, "state")} of the model, between ${significant(Math.min(...states.map((state) => state.correlation)), 2)} and ${significant(Math.max(...states.map((state) => state.correlation)), 2)}.`,
        legend: templates.length > 1 ? templates : [],
        option: (colors, hidden) => ({
          grid: plotGrid(colors, { bottom: colors.fontPx * 4 }),
          dataZoom: zoom(colors),
          xAxis: numberAxis(colors, { name: "first trial of the state", zero: true, format: formatCount, nameGap: colors.fontPx * 1.9 }),
          yAxis: numberAxis(colors, { name: "rank correlation", min: -1, max: 1, vertical: true, format: (value) => String(value) }),
          tooltip: tooltip(colors, {
            trigger: "item",
            formatter: ({ value }) => (value[2] === undefined ? "" : stateTooltip(states[value[2]])),
          }),
          series: [
            ...templates.map((template, index) => ({
              type: "scatter",
              id: `states-${index}`,
              symbol: SERIES[index % SERIES.length],
              symbolSize: ([, , place]) => Math.min(16, 4 + Math.sqrt(states[place].trials)) * (colors.fontPx / 12),
              itemStyle: { color: colors.series[index % colors.series.length], opacity: 0.75 },
              data: hidden.has(template) ? [] : states.flatMap((state, place) => (state.template === template ? [[state.first_trial, state.correlation, place]] : [])),
            })),
            { type: "line", id: "chance", data: [], markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: colors.muted, type: "dashed" }, data: [{ yAxis: 0 }] } },
          ],
        }),
        table: () => ({
          rows: task.models,
          columns: [
            { label: "Template", value: (state) => state.template },
            { label: "Run", value: (state) => task.runs[state.run]?.id },
            { label: "State", numeric: true, value: (state) => state.state },
            { label: "Trials", numeric: true, value: (state) => state.trials },
            { label: "Rank correlation", numeric: true, value: (state) => state.correlation, show: (state) => (state.correlation === null ? null : significant(state.correlation, 2)) },
          ],
        }),
      });
    },
    dispose: () => chart.dispose(),
  };
}

function stateTooltip(state) {
  return lines(`${state.template}, state ${state.state ?? "unknown"}`, `rank correlation: ${significant(state.correlation, 2)}`, plural(state.trials, "trial"));
}
