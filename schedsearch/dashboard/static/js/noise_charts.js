// Can the numbers be trusted: spread of repetitions, and the clock of the card.

import { Chart, lines, numberAxis, plotGrid, tooltip, zoom } from "./chart.js";
import { el } from "./dom.js";
import { formatCount, formatPercent, plural, significant } from "./format.js";
import { trialDot } from "./progress_chart.js";
import { routeTo } from "./router.js";
import { histogram } from "./stats.js";
import { trialKey } from "./trials.js";

/** How far the repetitions of a trial lie apart: { element, show(task), dispose() }. */
export function spreadChart() {
  const chart = new Chart({
    title: "Spread of repetitions",
    help: "How many trials have which spread: the interquartile range of a trial's repetitions over its median. Differences smaller than this mean little.",
    height: 16,
  });
  return {
    element: chart.element,
    get emptyWords() {
      return chart.emptyWords;
    },
    show({ trials }) {
      const spreads = trials.spread.filter((spread) => spread !== null);
      if (spreads.length === 0) {
        chart.note("No trial has four repetitions or more, so their spread is not known.");
        return;
      }
      const sorted = Float64Array.from(spreads).sort();
      const cap = sorted[Math.floor((sorted.length - 1) * 0.98)]; // the last 2 % share a bar, or they would flatten all others
      const bins = histogram(spreads.map((spread) => Math.min(spread, cap)), 24);
      const range = ({ from, to }, last) => (last && sorted[sorted.length - 1] > cap ? `${formatPercent(from)} and more` : `${formatPercent(from)} to ${formatPercent(to)}`);
      chart.show({
        summary: `Spread of the repetitions of ${plural(spreads.length, "trial")}, median ${formatPercent(sorted[Math.floor(sorted.length / 2)])}.`,
        option: (colors) => ({
          xAxis: numberAxis(colors, { name: "spread", format: formatPercent, min: bins[0].from, max: bins[bins.length - 1].to || 0.01 }),
          yAxis: numberAxis(colors, { name: "trials", zero: true, vertical: true, format: formatCount, minInterval: 1 }),
          tooltip: tooltip(colors, { trigger: "item", formatter: ({ dataIndex }) => lines(range(bins[dataIndex], dataIndex === bins.length - 1), plural(bins[dataIndex].count, "trial")) }),
          series: [
            {
              type: "bar",
              id: "spread",
              barWidth: "90%",
              itemStyle: { color: colors.series[0], borderRadius: [2, 2, 0, 0] },
              data: bins.map(({ from, to, count }) => [(from + to) / 2, count]),
            },
          ],
        }),
        table: () => ({
          rows: bins.map((bin, index) => ({ ...bin, index })),
          columns: [
            { label: "Spread", value: (bin) => bin.from, show: (bin) => range(bin, bin.index === bins.length - 1) },
            { label: "Trials", numeric: true, value: (bin) => bin.count },
          ],
        }),
      });
    },
    dispose: () => chart.dispose(),
  };
}

/** The clock of the card after each trial: { element, show(task), dispose() }. */
export function clockChart() {
  const chart = new Chart({ title: "Clock of the card", help: "Read after each trial. A card that gets hot lowers its clock, and times rise with it.", height: 16 });
  return {
    element: chart.element,
    get emptyWords() {
      return chart.emptyWords;
    },
    show(task) {
      const { trials, database } = task;
      const known = [];
      for (let position = 0; position < trials.sm_mhz.length; position += 1) if (trials.sm_mhz[position] !== null) known.push(position);
      if (known.length === 0) {
        chart.note("No clocks were recorded: the device has none, or they could not be read.");
        return;
      }
      const clocks = known.map((position) => trials.sm_mhz[position]);
      chart.show({
        summary: `Clock after each of ${plural(known.length, "trial")}, from ${formatCount(Math.min(...clocks))} to ${formatCount(Math.max(...clocks))} MHz.`,
        option: (colors) => ({
          grid: plotGrid(colors, { bottom: colors.fontPx * 4 }),
          dataZoom: zoom(colors),
          xAxis: numberAxis(colors, { name: "record", format: formatCount, nameGap: colors.fontPx * 1.9, zero: true }),
          yAxis: numberAxis(colors, { name: "clock [MHz]", vertical: true, format: formatCount }),
          tooltip: tooltip(colors, {
            trigger: "item",
            formatter: ({ value: [, clock, position] }) =>
              lines(
                `${formatCount(clock)} MHz`,
                trials.temperature_c[position] === null ? "" : `${significant(trials.temperature_c[position])} °C`,
                trials.power_w[position] === null ? "" : `${significant(trials.power_w[position])} W`,
              ),
          }),
          series: [
            {
              type: "scatter",
              id: "clock",
              symbolSize: colors.fontPx * 0.33,
              large: known.length > 3000,
              itemStyle: { color: colors.series[0], opacity: 0.6 },
              data: known.map((position) => [position + 1, trials.sm_mhz[position], position]),
            },
          ],
        }),
        onclick: ({ value }) => {
          if (Array.isArray(value) && value[2] !== undefined) location.hash = routeTo("trial", [trialKey(database, trials.id[value[2]])]);
        },
        dots: {
          count: known.length,
          start: 0,
          at: (place) => trialDot(task, known[place], [known[place] + 1, clocks[place]], `${formatCount(clocks[place])} MHz after record ${trials.id[known[place]]}`),
        },
        dotOf: (position) => known.indexOf(position),
        table: () => ({
          rows: known,
          columns: [
            { label: "Record", numeric: true, value: (position) => trials.id[position], show: (position) => el("a", { href: routeTo("trial", [trialKey(database, trials.id[position])]) }, String(trials.id[position])) },
            { label: "Clock [MHz]", numeric: true, value: (position) => trials.sm_mhz[position] },
            { label: "Temperature [°C]", numeric: true, value: (position) => trials.temperature_c[position] },
            { label: "Power [W]", numeric: true, value: (position) => trials.power_w[position] },
          ],
        }),
      });
    },
    dispose: () => chart.dispose(),
  };
}
