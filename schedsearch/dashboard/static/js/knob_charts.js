// What made it better: importance of knobs, and for each value of a knob its times and failures.

import { Chart, lines, nameAxis, numberAxis, plotGrid, timeAxis, timeLine, tooltip } from "./chart.js";
import { el, replaceChildren } from "./dom.js";
import { formatCount, formatPercent, formatTime, formatValue, plural, shorten, significant } from "./format.js";
import { rangeSeries } from "./glyphs.js";
import { extent } from "./trials.js";

const MEASURES = [
  ["model", "From a model", "The share of a cost model's rank correlation that is lost if the values of a knob are shuffled among trials. A click chooses the knob."],
  ["trials", "From the trials", "The share of the differences between times, and between failing and not failing, that a knob explains by itself. A click chooses the knob."],
];

/**
 * Importance bars, and the values of the chosen knob: { importance, values, picker, show(task), showModel(view or words), dispose() }.
 *
 * The model's importance comes later than the task: until then, and where there is none, the bars are those of the trials.
 */
export function knobCharts() {
  let latest = null;
  let template = null;
  let knob = null;
  let measure = "model";
  let model = null; // an ImportanceView, or words that say why there is none
  const templatePicker = picker("Template", (value) => {
    template = value;
    knob = null;
    draw();
  });
  const knobPicker = picker("Knob", (value) => {
    knob = value;
    draw();
  });
  const buttons = MEASURES.map(([name, words]) =>
    el("button", { type: "button", "aria-pressed": String(name === measure), onclick: () => chooseMeasure(name) }, words),
  );
  const state = el("p", { class: "line", role: "status" });
  const importance = new Chart({
    title: "Importance of knobs",
    help: MEASURES[0][2],
    height: 20,
    controls: el("div", { class: "controls" }, el("div", { class: "switch", role: "group", "aria-label": "Measure of importance" }, buttons), state),
  });
  const values = new Chart({
    title: "Times by value of a knob",
    help: "Whiskers reach from the least to the greatest time, boxes hold the middle half, dots are medians. Below: the share that failed.",
    height: 20,
    controls: el("div", { class: "controls" }, knobPicker.element),
  });

  function chooseMeasure(name) {
    measure = name;
    knob = null;
    draw();
  }

  function draw() {
    const templates = [...new Set(latest.knob_effects.map((effect) => effect.template))];
    if (!templates.includes(template)) template = latest.row.template && templates.includes(latest.row.template) ? latest.row.template : templates[0];
    templatePicker.show(templates, template);
    const found = modelOf(model, template);
    const drawn = measure === "model" && found.knobs.length ? "model" : "trials";
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(MEASURES[index][0] === measure)));
    state.textContent = measure === "model" ? found.words : "";
    importance.help.textContent = MEASURES.find(([name]) => name === drawn)[2];
    const losses = new Map(found.knobs.map(({ knob: name, loss }) => [name, loss]));
    const effects = latest.knob_effects.filter((effect) => effect.template === template && effect.values.length > 1);
    const rank = (effect) => (drawn === "model" ? (losses.get(effect.knob) ?? -1) : (effect.importance ?? -1));
    effects.sort((a, b) => rank(b) - rank(a) || (b.failure_importance ?? 0) - (a.failure_importance ?? 0));
    if (effects.length === 0) {
      const words = "No knob has been tried with two values yet, so there is nothing to compare.";
      importance.note(words);
      values.note(words);
      knobPicker.show([], null);
      return;
    }
    if (!effects.some((effect) => effect.knob === knob)) knob = effects[0].knob;
    knobPicker.show(effects.map((effect) => effect.knob), knob);
    drawImportance(importance, effects, drawn === "model" ? losses : null, (name) => {
      knob = name;
      draw();
    });
    drawValues(values, effects.find((effect) => effect.knob === knob));
  }

  return {
    element: [importance.element, values.element],
    importance: importance.element,
    values: values.element,
    get emptyWords() {
      return importance.emptyWords && values.emptyWords;
    },
    picker: templatePicker.element,
    show(task) {
      latest = task;
      draw();
    },
    showModel(found) {
      model = found;
      if (latest) draw();
    },
    dispose() {
      importance.dispose();
      values.dispose();
    },
  };
}

/** What the models of a task say about a template: { knobs, words }. */
function modelOf(view, template) {
  const none = (words) => ({ knobs: [], words });
  if (view === null) return none("A model is being trained on these trials; until then, the importance is that of the trials.");
  if (typeof view === "string") return none(`There is no model: ${view} The importance is that of the trials.`);
  if (view.note) return none(`There is no model: ${view.note}. The importance is that of the trials.`);
  const model = view.models.find((each) => each.template === template);
  if (!model) return none("No model was trained for this template. The importance is that of the trials.");
  if (model.note) return none(`No model: ${model.note}. The importance is that of the trials.`);
  const quality = `its rank correlation for configurations that it had not seen is ${significant(model.correlation, 2)}`;
  return { knobs: model.knobs, words: `Boosted trees, trained on ${plural(model.trials, "valid trial")}; ${quality}.` };
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

// What the bars say: { name, field of an effect, or null for the model's losses, words of the tooltip, label in the table }.
const MODEL_BARS = [{ name: "model", of: null, words: "the model loses without it", label: "The model loses without it" }];
const TRIAL_BARS = [
  { name: "times", of: "importance", words: "explains of the times", label: "Explains of the times" },
  { name: "failures", of: "failure_importance", words: "of the failures", label: "Of the failures" },
];

/** Bars of the trials, or those of a model if `losses` (knob -> share) are given. */
function drawImportance(chart, effects, losses, choose) {
  const bars = losses ? MODEL_BARS : TRIAL_BARS;
  const share = (effect, { of }) => (of === null ? (losses.get(effect.knob) ?? null) : effect[of]);
  const shown = effects.slice(0, 14);
  if (effects.every((effect) => bars.every((bar) => share(effect, bar) === null))) {
    chart.note("There are too few trials to tell which knobs matter.");
    return;
  }
  chart.show({
    summary: `Importance of ${plural(shown.length, "knob")}; the first is ${shown[0].knob} with ${formatPercent(share(shown[0], bars[0]))}.`,
    legend: bars.length > 1 ? bars.map(({ name }) => name) : [],
    onclick: ({ name }) => {
      if (shown.some((effect) => effect.knob === name)) choose(name);
    },
    option: (colors, hidden) => ({
      grid: plotGrid(colors, { top: colors.fontPx * 0.5, right: colors.fontPx * 3.5 }),
      xAxis: numberAxis(colors, { name: losses ? "share lost" : "share explained", zero: true, format: formatPercent }),
      yAxis: nameAxis(colors, { names: shown.map((effect) => effect.knob), vertical: true, inverse: true, axisLabel: nameLabel(colors) }),
      tooltip: tooltip(colors, {
        trigger: "axis",
        axisPointer: { type: "shadow", shadowStyle: { color: colors.grid, opacity: 0.5 } },
        formatter: ([{ dataIndex }]) => lines(shown[dataIndex].knob, ...bars.map((bar) => `${bar.words}: ${formatPercent(share(shown[dataIndex], bar))}`)),
      }),
      series: bars.map((bar, index) => ({
        type: "bar",
        id: bar.name,
        name: bar.name,
        barMaxWidth: colors.fontPx * 0.9,
        barGap: "15%",
        itemStyle: { color: colors.series[index], borderRadius: [0, 2, 2, 0] },
        label: { show: true, position: "right", color: colors.muted, fontSize: colors.fontPx * 0.85, formatter: ({ value }) => formatPercent(value) },
        data: hidden.has(bar.name) ? [] : shown.map((effect) => Math.max(0, share(effect, bar) ?? 0)),
      })),
    }),
    table: () => ({
      rows: effects,
      columns: [
        { label: "Knob", value: (effect) => effect.knob },
        ...bars.map((bar) => ({ label: bar.label, numeric: true, value: (effect) => share(effect, bar), show: (effect) => formatPercent(share(effect, bar)) })),
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
