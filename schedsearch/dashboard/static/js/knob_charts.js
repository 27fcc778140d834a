// What made it better: importance of knobs, and for each value of a knob its times and failures.

import { Chart, lines, nameAxis, numberAxis, plotGrid, timeAxis, timeLine, tooltip } from "./chart.js";
import { el, replaceChildren } from "./dom.js";
import { formatCount, formatPercent, formatTime, formatValue, plural, shorten } from "./format.js";
import { rangeSeries } from "./glyphs.js";
import { extent } from "./trials.js";

/** Importance bars, and the values of the chosen knob: { importance, values, picker, show(task), dispose() }. */
export function knobCharts() {
  let latest = null;
  let template = null;
  let knob = null;
  const templatePicker = picker("Template", (value) => {
    template = value;
    knob = null;
    draw();
  });
  const knobPicker = picker("Knob", (value) => {
    knob = value;
    draw();
  });
  const importance = new Chart({
    title: "Importance of knobs",
    help: "The share of the differences between times, and between failing and not failing, that a knob explains by itself. A click chooses the knob.",
    height: 20,
  });
  const values = new Chart({
    title: "Times by value of a knob",
    help: "Whiskers reach from the least to the greatest time, boxes hold the middle half, dots are medians. Below: the share that failed.",
    height: 20,
    controls: el("div", { class: "controls" }, knobPicker.element),
  });

  function draw() {
    const templates = [...new Set(latest.knob_effects.map((effect) => effect.template))];
    if (!templates.includes(template)) template = latest.row.template && templates.includes(latest.row.template) ? latest.row.template : templates[0];
    templatePicker.show(templates, template);
    const effects = latest.knob_effects.filter((effect) => effect.template === template && effect.values.length > 1);
    effects.sort((a, b) => (b.importance ?? -1) - (a.importance ?? -1) || (b.failure_importance ?? 0) - (a.failure_importance ?? 0));
    if (effects.length === 0) {
      const words = "No knob has been tried with two values yet, so there is nothing to compare.";
      importance.note(words);
      values.note(words);
      knobPicker.show([], null);
      return;
    }
    if (!effects.some((effect) => effect.knob === knob)) knob = effects[0].knob;
    knobPicker.show(effects.map((effect) => effect.knob), knob);
    drawImportance(importance, effects, (name) => {
      knob = name;
      draw();
    });
    drawValues(values, effects.find((effect) => effect.knob === knob));
  }

  return {
    importance: importance.element,
    values: values.element,
    picker: templatePicker.element,
    show(task) {
      latest = task;
      draw();
    },
    dispose() {
      importance.dispose();
      values.dispose();
    },
  };
}

/** A labelled select that is hidden while there is nothing to choose: { element, show(choices, chosen) }. Choices are texts, or [value, text]. */
export function picker(label, onchange) {
  const select = el("select", { onchange: () => onchange(select.value) });
  const element = el("label", {}, label, select);
  let last = "";
  return {
    element,
    show(choices, chosen) {
      const key = JSON.stringify(choices);
      if (key !== last) {
        replaceChildren(select, choices.map((choice) => [choice].flat()).map(([value, text = value]) => el("option", { value }, shorten(text, 60))));
        last = key;
      }
      if (chosen !== null) select.value = chosen;
      element.hidden = choices.length < 2;
    },
  };
}

const EFFECT_NAMES = ["times", "failures"];

function drawImportance(chart, effects, choose) {
  const shown = effects.slice(0, 14);
  if (effects.every((effect) => effect.importance === null && effect.failure_importance === null)) {
    chart.note("There are too few trials to tell which knobs matter.");
    return;
  }
  chart.show({
    summary: `Importance of ${plural(shown.length, "knob")}; the first is ${shown[0].knob} with ${formatPercent(shown[0].importance)}.`,
    legend: EFFECT_NAMES,
    onclick: ({ name }) => {
      if (shown.some((effect) => effect.knob === name)) choose(name);
    },
    option: (colors, hidden) => {
      const bars = (index, field) => ({
        type: "bar",
        id: field,
        name: EFFECT_NAMES[index],
        barMaxWidth: colors.fontPx * 0.9,
        barGap: "15%",
        itemStyle: { color: colors.series[index], borderRadius: [0, 2, 2, 0] },
        data: hidden.has(EFFECT_NAMES[index]) ? [] : shown.map((effect) => Math.max(0, effect[field] ?? 0)),
      });
      return {
        grid: plotGrid(colors, { top: colors.fontPx * 0.5 }),
        xAxis: numberAxis(colors, { name: "share explained", zero: true, format: formatPercent }),
        yAxis: nameAxis(colors, { names: shown.map((effect) => effect.knob), vertical: true, inverse: true, axisLabel: nameLabel(colors) }),
        tooltip: tooltip(colors, {
          trigger: "axis",
          axisPointer: { type: "shadow", shadowStyle: { color: colors.grid, opacity: 0.5 } },
          formatter: ([{ dataIndex }]) => {
            const effect = shown[dataIndex];
            return lines(effect.knob, `explains of the times: ${formatPercent(effect.importance)}`, `of the failures: ${formatPercent(effect.failure_importance)}`);
          },
        }),
        series: [bars(0, "importance"), bars(1, "failure_importance")],
      };
    },
    table: () => ({
      rows: effects,
      columns: [
        { label: "Knob", value: (effect) => effect.knob },
        { label: "Explains of the times", numeric: true, value: (effect) => effect.importance, show: (effect) => formatPercent(effect.importance) },
        { label: "Of the failures", numeric: true, value: (effect) => effect.failure_importance, show: (effect) => formatPercent(effect.failure_importance) },
        { label: "Values tried", numeric: true, value: (effect) => effect.values.length },
      ],
    }),
  });
}

function nameLabel(colors) {
  return { color: colors.text, fontSize: colors.fontPx, formatter: (name) => shorten(name, 22) };
}

function drawValues(chart, effect) {
  const range = extent(effect.values.flatMap(({ quantiles_ns: five }) => (five ? [five[0], five[4]] : [])));
  const failureShare = (value) => (value.trials ? value.failures / value.trials : 0);
  const names = effect.values.map(({ value }) => shorten(formatValue(value), 18));
  chart.show({
    summary: `Times by value of ${effect.knob}: ${plural(effect.values.length, "value")}.`,
    option: (colors) => {
      const label = colors.fontPx;
      return {
        grid: [
          { left: label * 4.2, right: label, top: label * 2.2, bottom: "32%" },
          { left: label * 4.2, right: label, top: "77%", bottom: label * 3.6 },
        ],
        xAxis: [
          nameAxis(colors, { names, gridIndex: 0, axisLabel: { show: false } }),
          nameAxis(colors, { names, gridIndex: 1, name: shorten(effect.knob, 40), nameGap: label * 2.1, axisLabel: { color: colors.text, fontSize: label, hideOverlap: true } }),
        ],
        yAxis: [
          range ? timeAxis(colors, { name: "time", low: range[0], high: range[1], vertical: true, gridIndex: 0 }) : numberAxis(colors, { name: "no valid trial", vertical: true, gridIndex: 0 }),
          numberAxis(colors, { name: "failed", vertical: true, gridIndex: 1, zero: true, max: 1, interval: 1, format: formatPercent }),
        ],
        tooltip: tooltip(colors, { trigger: "item", formatter: ({ dataIndex, seriesId }) => valueTooltip(effect.knob, seriesId.startsWith("failed") ? effect.values[dataIndex] : effect.values.filter((value) => value.quantiles_ns)[dataIndex]) }),
        series: [
          {
            id: "times",
            ...rangeSeries(
              effect.values.flatMap(({ quantiles_ns: five }, at) => (five ? [{ at, five, color: colors.series[0], name: names[at] }] : [])),
              { surface: colors.surface, fontPx: colors.fontPx },
            ),
          },
          {
            type: "bar",
            id: "failed",
            xAxisIndex: 1,
            yAxisIndex: 1,
            barMaxWidth: label * 1.6,
            itemStyle: { color: colors.series[1] },
            data: effect.values.map(failureShare),
          },
        ],
      };
    },
    table: () => ({
      rows: effect.values,
      columns: [
        { label: effect.knob, value: ({ value }) => value, show: ({ value }) => formatValue(value) },
        { label: "Trials", numeric: true, value: (value) => value.trials, show: (value) => formatCount(value.trials) },
        { label: "Failed", numeric: true, value: failureShare, show: (value) => formatPercent(failureShare(value)) },
        { label: "Rejected", numeric: true, value: (value) => value.rejected, show: (value) => formatCount(value.rejected) },
        ...["Least", "Quartile", "Median", "Quartile 3", "Greatest"].map((label, index) => ({
          label,
          numeric: true,
          value: (value) => value.quantiles_ns?.[index] ?? null,
          show: (value) => formatTime(value.quantiles_ns?.[index]),
        })),
      ],
    }),
  });
}

function valueTooltip(knob, { value, trials, failures, rejected, quantiles_ns: five }) {
  return lines(
    `${shorten(knob, 40)} = ${shorten(formatValue(value), 40)}`,
    `${plural(trials, "trial")}, ${formatCount(failures)} failed`,
    rejected ? `${formatCount(rejected)} rejected without a trial` : "",
    five ? timeLine("median", five[2]) : "",
    five ? `from ${formatTime(five[0])} to ${formatTime(five[4])}` : "",
  );
}
