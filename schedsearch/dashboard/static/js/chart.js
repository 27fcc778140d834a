// One chart: a figure with its plot, a legend of buttons, and the table of the same numbers.

import { ChartCursor } from "./chart_cursor.js";
import { el, replaceChildren } from "./dom.js";
import { formatTime, significant, timeUnit } from "./format.js";
import { isWideSpread, logBounds, logTicks, ratioScale } from "./stats.js";
import { dataTable } from "./table.js";
import { SERIES, chartColors, onThemeChange } from "./theme.js";

/** The series of failed trials has a mark and a colour of its own. */
export const FAILED = "failed";

/**
 * A figure that keeps its zoom and its hidden series when its data changes.
 *
 * `show({ summary, legend, option, table, onclick })` draws: `summary` is one sentence for screen readers, `legend` the
 * names of series with buttons, `option(colors, hidden)` makes the option of ECharts, `table()` the columns and rows of the
 * table below, made when it is opened. `note(words)` shows words in place of the plot.
 */
export class Chart {
  constructor({ title, help, height = 18, controls = null }) {
    this.plot = el("div", { class: "plot", role: "img", style: { height: `${height}rem` } });
    this.cursor = new ChartCursor(this.plot);
    this.legend = el("div", { class: "legend" });
    this.words = el("p", { class: "empty", hidden: true });
    this.help = el("p", {}, help);
    this.table = null;
    this.details = el("details", { ontoggle: () => this.fillTable() }, el("summary", {}, `Table: ${title}`));
    this.element = el(
      "figure",
      { class: "chart" },
      el("figcaption", {}, el("h3", {}, title), help ? this.help : null, controls),
      this.legend,
      this.words,
      el("div", { class: "frame" }, this.plot, this.cursor.ring),
      this.cursor.words,
      this.details,
    );
    this.hidden = new Set();
    this.shown = null;
    this.instance = null;
    this.endTheme = onThemeChange(() => this.draw());
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.plot);
    this.emptyWords = ""; // why there is no plot
  }

  show(shown) {
    this.shown = shown;
    this.emptyWords = "";
    this.words.hidden = true;
    this.plot.hidden = false;
    this.details.hidden = !shown.table;
    this.cursor.follow(shown.dots ?? null, shown.summary);
    this.drawLegend();
    this.draw();
    this.fillTable();
  }

  note(words) {
    this.shown = null;
    this.emptyWords = words;
    this.cursor.follow(null, "");
    this.plot.hidden = true;
    this.details.hidden = true;
    replaceChildren(this.legend);
    this.words.hidden = false;
    replaceChildren(this.words, words);
  }

  drawLegend() {
    const names = this.shown.legend ?? [];
    replaceChildren(
      this.legend,
      names.map((name, index) => {
        const failed = name === FAILED;
        const button = el(
          "button",
          {
            type: "button",
            class: "key",
            "aria-pressed": String(!this.hidden.has(name)),
            data: { key: `legend-${name}`, mark: failed ? "cross" : SERIES[index % SERIES.length] },
            style: { "--key": failed ? "var(--bad)" : `var(--series-${(index % SERIES.length) + 1})` },
          },
          name,
        );
        button.addEventListener("click", () => {
          if (!this.hidden.delete(name)) this.hidden.add(name);
          button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
          this.drawNow();
        });
        return button;
      }),
    );
  }

  /** Draws as soon as there is time; charts in the window come first. */
  draw() {
    if (this.shown) drawSoon(this);
  }

  drawNow() {
    if (!this.shown || !this.plot.isConnected || this.plot.clientWidth === 0) return;
    if (!this.instance) {
      this.instance = echarts.init(this.plot, null, { renderer: "canvas" });
      this.instance.on("click", (event) => this.shown?.onclick?.(event));
      this.cursor.attach(this.instance);
    }
    const colors = chartColors();
    const option = { ...baseOption(colors), ...this.shown.option(colors, this.hidden) };
    this.instance.setOption(option, { replaceMerge: ["series"] });
    this.cursor.place();
  }

  resize() {
    if (!this.instance) {
      this.draw();
      return;
    }
    this.instance.resize();
    this.cursor.place();
  }

  fillTable() {
    if (!this.details.open || !this.shown?.table) return;
    const { columns, rows } = this.shown.table();
    if (this.table) this.table.update(rows, columns);
    else {
      const dotOf = (row) => this.shown?.dotOf?.(row);
      this.table = dataTable({ columns, rows, pageSize: 25, caption: this.element.querySelector("h3").textContent, rowKey: dotOf });
      const { element } = this.table;
      const mark = ({ target }) => {
        const row = target.closest("tr[data-row]");
        this.cursor.mark(row ? Number(row.dataset.row) : null);
      };
      for (const name of ["focusin", "pointerover"]) element.addEventListener(name, mark);
      for (const name of ["focusout", "pointerleave"]) element.addEventListener(name, () => this.cursor.mark(null));
      this.details.append(element);
    }
  }

  dispose() {
    this.endTheme();
    this.resized.disconnect();
    undrawn.delete(this);
    this.instance?.dispose();
    this.instance = null;
  }
}

// Every chart is drawn, those outside the window too, so that printed pages and pictures of whole pages are complete. They
// are drawn one after the other, so that a long page opens as fast as its first chart.
const undrawn = new Set();

function drawSoon(chart) {
  if (undrawn.size === 0) setTimeout(drawNext);
  undrawn.add(chart);
  document.documentElement.dataset.drawn = "no";
}

function drawNext() {
  const [next] = [...undrawn].sort((a, b) => distanceFromWindow(a.plot) - distanceFromWindow(b.plot));
  if (next) {
    undrawn.delete(next);
    next.drawNow();
  }
  if (undrawn.size) setTimeout(drawNext);
  else document.documentElement.dataset.drawn = "yes";
}

/** Draws all that waits, at once. */
export function drawAll() {
  for (const chart of undrawn) chart.drawNow();
  undrawn.clear();
  document.documentElement.dataset.drawn = "yes";
}

function distanceFromWindow(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return Math.max(0, top - window.innerHeight, -bottom);
}

function baseOption(colors) {
  return {
    animation: false,
    textStyle: { fontFamily: colors.font, fontSize: colors.fontPx, color: colors.text },
    color: colors.series,
    aria: { enabled: false },
    grid: plotGrid(colors),
    tooltip: tooltip(colors),
  };
}

/** The place of the axes inside the plot. */
export function plotGrid(colors, more = {}) {
  const em = colors.fontPx;
  return { left: em, right: em * 1.5, top: em * 2.2, bottom: em * 2.4, containLabel: true, ...more };
}

/** Tooltips are drawn on the canvas: text of others can never become markup. */
export function tooltip(colors, more = {}) {
  return {
    renderMode: "richText",
    confine: true,
    backgroundColor: colors.surface,
    borderColor: colors.line,
    borderWidth: 1,
    padding: [8, 10],
    textStyle: { color: colors.text, fontFamily: colors.font, fontSize: colors.fontPx },
    ...more,
  };
}

function axisLook(colors, vertical) {
  return {
    nameLocation: vertical ? "end" : "middle",
    nameGap: colors.fontPx * (vertical ? 0.9 : 2.1),
    nameTextStyle: { color: colors.muted, fontSize: colors.fontPx, ...(vertical ? { align: "left", padding: [0, 0, 0, -colors.fontPx * 2] } : {}) },
    axisLabel: { color: colors.muted, fontSize: colors.fontPx, hideOverlap: true },
    axisLine: { show: false, lineStyle: { color: colors.line } },
    axisTick: { show: false },
    splitLine: { show: true, lineStyle: { color: colors.grid } },
  };
}

/** An axis of numbers; `zero` makes it begin at zero, as bars, shares and ratios need. */
export function numberAxis(colors, { name, zero = false, format = significant, vertical = false, ...more }) {
  const look = axisLook(colors, vertical);
  return {
    type: "value",
    name,
    scale: !zero,
    ...(zero ? { min: 0 } : {}),
    ...look,
    axisLabel: { ...look.axisLabel, formatter: (value) => format(value) },
    ...more,
  };
}

/** An axis of categories. */
export function nameAxis(colors, { name, names, vertical = false, ...more }) {
  const look = axisLook(colors, vertical);
  return { type: "category", name, data: names, ...look, splitLine: { show: false }, ...more };
}

/**
 * An axis of times in nanoseconds, logarithmic when they spread by more than a factor of `wide`.
 *
 * All labels have the unit that fits the least time. `zero` is for bars: these always begin at zero.
 */
export function timeAxis(colors, { name, low, high, zero = false, vertical = false, wide = 4, ...more }) {
  const { unit, ns } = timeUnit(low > 0 ? low : high);
  const label = (value) => `${Number((value / ns).toPrecision(high / low > 1.05 ? 3 : 5)).toLocaleString("en-US")}`;
  if (!zero && isWideSpread(low, high, wide)) {
    const [min, max] = logBounds(low, high);
    const ticks = logTicks(min / ns, max / ns).map((tick) => tick * ns);
    const axis = numberAxis(colors, { name: `${name} [${unit}], log`, format: label, vertical });
    return {
      ...axis,
      type: "log",
      min,
      max,
      axisLabel: { ...axis.axisLabel, customValues: ticks },
      splitLine: { ...axis.splitLine, customValues: ticks },
      axisTick: { show: false, customValues: ticks },
      ...more,
    };
  }
  return numberAxis(colors, { name: `${name} [${unit}]`, zero, format: label, vertical, ...more });
}

/** An axis of ratios: logarithmic, with 1 in the middle, so that twice as fast and half as fast are equally far from it. */
export function ratioAxis(colors, { name, ends, ...more }) {
  const { limit, ticks } = ratioScale(ends);
  const axis = numberAxis(colors, { name, format: (value) => `${Number(value.toPrecision(3))}×` });
  return {
    ...axis,
    type: "log",
    min: 1 / limit,
    max: limit,
    axisLabel: { ...axis.axisLabel, customValues: ticks },
    splitLine: { ...axis.splitLine, customValues: ticks },
    axisTick: { show: false, customValues: ticks },
    ...more,
  };
}

/** A slider below the plot, and the wheel with Ctrl, so that the page scrolls as ever; neither resets what is zoomed. */
export function zoom(colors) {
  return [
    { type: "inside", xAxisIndex: 0, zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, filterMode: "none" },
    {
      type: "slider",
      xAxisIndex: 0,
      height: colors.fontPx * 1.2,
      bottom: 2,
      filterMode: "none",
      borderColor: "transparent",
      backgroundColor: colors.grid,
      fillerColor: `${colors.accent}22`,
      handleStyle: { color: colors.accent, borderColor: colors.accent },
      moveHandleSize: 0,
      showDataShadow: false,
      showDetail: false,
      brushSelect: false,
    },
  ];
}

/** Lines of a tooltip. */
export function lines(...texts) {
  return texts.filter(Boolean).join("\n");
}

/** "time: 12.3 µs" for tooltips. */
export function timeLine(label, ns) {
  return ns === null || ns === undefined ? "" : `${label}: ${formatTime(ns)}`;
}
