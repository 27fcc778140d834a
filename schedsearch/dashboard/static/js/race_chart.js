// The final race: every finalist was timed again within the same minutes.

import { Chart, lines, nameAxis, plotGrid, timeAxis, timeLine, tooltip } from "./chart.js";
import { el } from "./dom.js";
import { doubtMark } from "./doubts.js";
import { formatPercent, formatTime, plural, shorten } from "./format.js";
import { rangeSeries } from "./glyphs.js";
import { routeTo } from "./router.js";
import { fiveNumbers } from "./stats.js";
import { configText, extent, trialKey } from "./trials.js";

/** { element, show(task), dispose() } */
export function raceChart() {
  const chart = new Chart({
    title: "Final race",
    help: "The finalists and the default, timed again in turns within the same minutes. Only these times compare to a few percent. (?) marks times that are not to be trusted.",
    height: 18,
  });
  return {
    element: chart.element,
    get emptyWords() {
      return chart.emptyWords;
    },
    show(task) {
      const entries = task.race.filter((entry) => entry.times_ns.length > 0).sort((a, b) => a.time_ns - b.time_ns);
      if (entries.length === 0) {
        chart.note(task.race.length ? "Every finalist failed in the race." : "There was no final race yet; it takes place when the run ends. Until then times are single measurements.");
        return;
      }
      const fives = entries.map((entry) => fiveNumbers(entry.times_ns));
      const [low, high] = extent(fives.flatMap((five) => [five.low, five.high]));
      chart.plot.style.setProperty("height", `${Math.min(36, 6 + entries.length * 2)}rem`);
      const label = (entry) => `${entry.is_best ? "best" : entry.is_default ? "default" : `record ${entry.id}`}${entry.doubt ? " (?)" : ""}`;
      chart.show({
        summary: `Final race of ${plural(entries.length, "entrant")}; the winner takes ${formatTime(entries[0].time_ns)}.`,
        onclick: ({ dataIndex }) => {
          location.hash = routeTo("trial", [trialKey(task.database, entries[dataIndex].id)]);
        },
        option: (colors) => ({
          grid: plotGrid(colors, { top: colors.fontPx * 0.6 }),
          yAxis: nameAxis(colors, { names: entries.map((entry) => `${label(entry)}  ${shorten(entry.template, 18)}`), vertical: true, inverse: true, axisLabel: { color: colors.text, fontSize: colors.fontPx } }),
          xAxis: timeAxis(colors, { name: "time", low, high }),
          tooltip: tooltip(colors, {
            trigger: "item",
            formatter: ({ dataIndex }) => {
              const entry = entries[dataIndex];
              return lines(
                `${label(entry)}, ${entry.template}`,
                timeLine("median", entry.time_ns),
                entry.ratio === null ? "" : `${formatPercent(entry.ratio - 1)} slower than the winner`,
                entry.doubt ? `not to be trusted: ${entry.doubt === "bimodal" ? "two groups of times" : "noisy"}` : "",
                `${plural(entry.times_ns.length, "repetition")} from ${formatTime(fives[dataIndex].low)} to ${formatTime(fives[dataIndex].high)}`,
              );
            },
          }),
          series: [
            {
              id: "race",
              ...rangeSeries(
                entries.map((entry, at) => ({
                  at,
                  five: [fives[at].low, fives[at].first, fives[at].median, fives[at].third, fives[at].high],
                  color: entry.is_best ? colors.series[0] : entry.is_default ? colors.series[1] : colors.series[7],
                  name: label(entry),
                })),
                { horizontal: true, surface: colors.surface, fontPx: colors.fontPx },
              ),
            },
          ],
        }),
        table: () => ({
          rows: task.race,
          columns: [
            { label: "Record", numeric: true, value: (entry) => entry.id, show: (entry) => el("a", { href: routeTo("trial", [trialKey(task.database, entry.id)]) }, String(entry.id)) },
            { label: "Entrant", value: (entry) => `${entry.is_best ? "best" : ""}${entry.is_default ? " default" : ""}`.trim() || "finalist" },
            { label: "Time", numeric: true, value: (entry) => entry.time_ns, show: (entry) => (entry.time_ns === null ? entry.outcome.replaceAll("_", " ") : [formatTime(entry.time_ns), " ", doubtMark(entry.doubt)]) },
            { label: "Slower by", numeric: true, value: (entry) => entry.ratio, show: (entry) => (entry.ratio === null ? null : formatPercent(entry.ratio - 1)) },
            { label: "Spread", numeric: true, value: (entry) => entry.spread, show: (entry) => formatPercent(entry.spread) },
            { label: "Template", value: (entry) => entry.template },
            { label: "Config", className: "config", value: (entry) => configText(Object.entries(entry.config)) },
          ],
        }),
      });
    },
    dispose: () => chart.dispose(),
  };
}
