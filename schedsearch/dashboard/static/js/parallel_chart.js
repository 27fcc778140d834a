// Every config as a line through its knobs; the fastest stand out, and axes can be brushed.

import { Chart, timeAxis } from "./chart.js";
import { el } from "./dom.js";
import { formatTime, formatValue, plural, shorten } from "./format.js";
import { picker } from "./knob_charts.js";
import { routeTo } from "./router.js";
import { extent, fastestTrials, trialConfig, trialKey } from "./trials.js";

const MOST_LINES = 1500;
const REM_PER_AXIS = 5; // narrower, and the names of neighbours meet
const MOST_AXES = 12;
const SHARES = ["1 %", "5 %", "10 %", "25 %"];

/** { element, show(task), dispose() } */
export function parallelChart() {
  let latest = null;
  let template = null;
  let share = "10 %";
  const templatePicker = picker("Template", (value) => {
    template = value;
    draw();
  });
  const sharePicker = picker("Emphasise the fastest", (value) => {
    share = value;
    draw();
  });
  const chart = new Chart({
    title: "Configurations",
    help: "Each line is a configuration. The knobs that matter most come first. Drag along an axis to keep only the lines that pass there, click the axis to let go.",
    height: 24,
    controls: el("div", { class: "controls" }, templatePicker.element, sharePicker.element),
  });

  function draw() {
    const all = fastestTrials(latest);
    const templates = latest.knobs.map((item) => item.template).filter((name, index) => all.some((position) => latest.trials.template[position] === index));
    if (templates.length === 0) {
      chart.note("There is no valid trial yet.");
      templatePicker.show([], null);
      sharePicker.show([], null);
      return;
    }
    if (!templates.includes(template)) template = templates.includes(latest.row.template) ? latest.row.template : templates[0];
    templatePicker.show(templates, template);
    sharePicker.show(SHARES, share);
    const index = latest.knobs.findIndex((item) => item.template === template);
    const positions = all.filter((position) => latest.trials.template[position] === index);
    const count = Math.max(1, Math.round((positions.length * parseFloat(share)) / 100));
    const room = Math.floor(chart.plot.clientWidth / parseFloat(getComputedStyle(document.documentElement).fontSize) / REM_PER_AXIS);
    const axes = knobAxes(latest, template, index).slice(0, Math.max(2, Math.min(MOST_AXES, room - 1)));
    if (axes.length === 0) {
      chart.note("Every trial has the same configuration.");
      return;
    }
    drawLines(chart, latest, { positions: thinned(positions, count), count, axes, total: positions.length });
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

/** Knobs with several values, the most important first: [{ name, knob (its index), values }]. */
function knobAxes(task, template, index) {
  const importance = new Map(task.knob_effects.filter((effect) => effect.template === template).map((effect) => [effect.knob, effect.importance ?? 0]));
  return task.knobs[index].names
    .map((name, knob) => ({ name, knob, values: task.knobs[index].values[knob] }))
    .filter(({ values }) => values.length > 1)
    .sort((a, b) => (importance.get(b.name) ?? 0) - (importance.get(a.name) ?? 0));
}

/** All of the fastest `count` positions, and evenly chosen others, so that there are at most MOST_LINES. */
function thinned(positions, count) {
  const fast = positions.slice(0, Math.min(count, MOST_LINES));
  const others = positions.slice(fast.length);
  const room = MOST_LINES - fast.length;
  if (others.length <= room) return positions;
  return [...fast, ...Array.from({ length: room }, (_, place) => others[Math.floor((place * others.length) / room)])];
}

function drawLines(chart, task, { positions, count, axes, total }) {
  const { trials } = task;
  const [low, high] = extent(positions.map((position) => trials.time_ns[position]));
  const row = (position) => {
    const config = trials.config[position];
    return [trials.time_ns[position], ...axes.map(({ knob }) => config[knob] ?? "-")];
  };
  chart.show({
    summary: `${plural(total, "configuration")} over ${plural(axes.length, "knob")}; the fastest ${count} are emphasised.`,
    option: (colors) => ({
      grid: undefined,
      tooltip: { show: false },
      parallel: {
        left: colors.fontPx * 3.5,
        right: colors.fontPx * 4,
        top: colors.fontPx * 3.2,
        bottom: colors.fontPx * 1.2,
        parallelAxisDefault: {
          nameLocation: "end",
          nameGap: colors.fontPx,
          nameTextStyle: { color: colors.text, fontSize: colors.fontPx },
          axisLine: { lineStyle: { color: colors.line } },
          axisTick: { show: false },
          axisLabel: { color: colors.text, fontSize: colors.fontPx * 0.92 },
          z: 20,
          areaSelectStyle: { width: colors.fontPx * 1.4, borderWidth: 1, borderColor: colors.accent, color: colors.accent, opacity: 0.2 },
        },
      },
      parallelAxis: [
        { dim: 0, ...parallelTime(colors, low, high) },
        ...axes.map(({ name, values }, place) => ({
          dim: place + 1,
          name: shorten(name, axes.length > 8 ? 10 : 16),
          type: "category",
          data: values.map((_, at) => at),
          axisLabel: { color: colors.text, backgroundColor: colors.page, padding: [1, 3], borderRadius: 2, fontSize: colors.fontPx * 0.92, formatter: (at) => shorten(formatValue(values[Number(at)]), 10) },
        })),
      ],
      series: [
        lineSeries("others", positions.slice(count).map(row), { color: colors.muted, width: 0.8, opacity: 0.16 }),
        lineSeries("fastest", positions.slice(0, count).map(row), { color: colors.series[0], width: 1.6, opacity: count > 60 ? 0.35 : 0.7 }),
      ],
    }),
    table: () => ({
      rows: positions.slice(0, Math.max(count, 100)),
      columns: [
        {
          label: "Record",
          numeric: true,
          value: (position) => trials.id[position],
          show: (position) => el("a", { href: routeTo("trial", [trialKey(task.database, trials.id[position])]) }, String(trials.id[position])),
        },
        { label: "Time", numeric: true, value: (position) => trials.time_ns[position], show: (position) => formatTime(trials.time_ns[position]) },
        ...axes.map(({ name }) => ({ label: name, value: (position) => trialConfig(task, position).find(([knob]) => knob === name)?.[1] ?? null, show: (position) => formatValue(trialConfig(task, position).find(([knob]) => knob === name)?.[1]) })),
      ],
    }),
  });
}

function parallelTime(colors, low, high) {
  const axis = timeAxis(colors, { name: "time", low, high });
  const { type, name, axisLabel } = axis;
  return { type, name, z: 20, min: axis.min ?? low, max: axis.max ?? high, scale: true, inverse: true, axisLabel, nameLocation: "start" };
}

function lineSeries(id, data, lineStyle) {
  return { type: "parallel", id, data, lineStyle, inactiveOpacity: 0.02, activeOpacity: lineStyle.opacity, smooth: false, silent: true };
}
