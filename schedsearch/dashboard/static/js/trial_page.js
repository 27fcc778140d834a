// A trial: what was measured, how, and what lies between it and the best.

import { Chart, lines, numberAxis, timeAxis, tooltip } from "./chart.js";
import { doubtMark, doubtNotice } from "./doubts.js";
import { copyBox, el, emptyNote, facts, replaceChildren, section } from "./dom.js";
import { formatBytes, formatChange, formatCount, formatDuration, formatMoment, formatPercent, formatRatio, formatTime, formatValue, plural, significant } from "./format.js";
import { routeTo } from "./router.js";
import { dataTable } from "./table.js";
import { extent } from "./trials.js";

export const trialPage = {
  title: "Trial",
  paths: ({ parts }) => [`trial/${encodeURIComponent(parts[0] ?? "")}`],
  make: makeTrial,
};

function makeTrial() {
  const head = el("div", { class: "head" });
  const numbers = el("div");
  const message = el("div");
  const differences = el("div");
  const repetitions = repetitionChart();
  const config = el("div");
  const doubt = el("div");
  const commands = el("div", { class: "stack tight" });
  const circumstances = el("div");
  const code = el("div", { class: "stack tight" });
  return {
    element: el(
      "div",
      { class: "page" },
      head,
      numbers,
      message,
      section("What lies between it and the best?", differences),
      section("Configuration", config),
      section("Can I trust the time?", doubt, repetitions.element),
      section("Measure it again", commands),
      section("Circumstances", circumstances),
      section("Plan and code", code),
    ),
    title: ([trial]) => `Record ${trial.id} of ${trial.task_name}`,
    show([trial]) {
      replaceChildren(
        head,
        el("p", { class: "trail" }, el("a", { href: routeTo("overview") }, "Overview"), " / ", el("a", { href: routeTo("task", [trial.task]), data: { key: "task" } }, trial.task_name), " / trial"),
        el("h1", {}, `Record ${trial.id}`, trialTags(trial)),
        el("p", {}, `${trial.template}, version ${trial.template_version}; measured ${formatMoment(trial.finished_at_s)}`),
        trial.notes.map((note) => el("p", { class: "notice" }, note)),
      );
      replaceChildren(numbers, trialFacts(trial));
      replaceChildren(message, trial.message ? el("pre", { class: "text", tabindex: "0", role: "group", "aria-label": "Message" }, trial.message) : null);
      message.hidden = !trial.message;
      replaceChildren(differences, differenceTable(trial));
      replaceChildren(config, knobList(trial));
      replaceChildren(doubt, doubtNotice(trial.words ? [`this time, because ${trial.words}`] : []));
      repetitions.show(trial);
      replaceChildren(commands, trial.commands.map(({ purpose, command }) => el("div", {}, el("h3", {}, purpose), copyBox(command, purpose))));
      replaceChildren(circumstances, circumstanceList(trial));
      replaceChildren(code, codeParts(trial));
    },
    dispose: () => repetitions.dispose(),
  };
}

function trialTags(trial) {
  return [
    trial.outcome === "ok" ? null : el("span", { class: "tag bad" }, trial.outcome.replaceAll("_", " ")),
    trial.best ? el("span", { class: "tag good" }, "best") : null,
    trial.race ? el("span", { class: "tag" }, "final race") : null,
  ];
}

function trialFacts(trial) {
  const onGpu = trial.registers !== null;
  return facts([
    ["Time", trial.time_ns === null ? "none" : [formatTime(trial.time_ns), " ", doubtMark(trial.doubt)], trial.spread === null ? null : `spread ${formatPercent(trial.spread)}`],
    ["Against the best", formatRatio(trial.ratio_to_best), trial.best_ns === null ? null : `best ${formatTime(trial.best_ns)}`],
    ["Registers", onGpu ? formatCount(trial.registers) : null, "a thread"],
    ["Shared memory", onGpu ? formatBytes(trial.shared_bytes) : null, "a block"],
    ["Spills", onGpu ? formatBytes(trial.spill_bytes) : null, trial.local_bytes ? `${formatBytes(trial.local_bytes)} local` : null],
    ["Occupancy", onGpu ? formatPercent(trial.occupancy) : null, trial.blocks_per_sm === null ? trial.occupancy_note : `${plural(trial.blocks_per_sm, "block")} of ${plural(trial.block_threads, "thread")} a multiprocessor`],
    ["Code", trial.code_bytes === null ? null : formatBytes(trial.code_bytes)],
    ["Build and run", formatDuration(trial.build_s + trial.run_s), `${formatDuration(trial.build_s)} and ${formatDuration(trial.run_s)}`],
  ].filter(([, value]) => value !== null));
}

function differenceTable(trial) {
  if (trial.best) return emptyNote("It is the best trial of its task.");
  if (trial.best_key === null) return emptyNote("The task has no valid trial to compare with.");
  const link = el("a", { href: routeTo("trial", [trial.best_key]), data: { key: "best" } }, "the best trial");
  if (trial.other_template) return el("p", { class: "empty" }, "It is of another template than ", link, ", so their knobs cannot be compared one by one.");
  if (trial.differences.length === 0) return el("p", { class: "empty" }, "It has the same configuration as ", link, ".");
  const columns = [
    { label: "Knob", value: (item) => item.knob },
    { label: "Here", value: (item) => item.here, show: (item) => formatValue(item.here) },
    { label: "Best", value: (item) => item.best, show: (item) => formatValue(item.best) },
    { label: "Worth", numeric: true, className: "strong", value: (item) => item.ratio, show: (item) => (item.ratio === null ? "never measured alone" : `${formatChange(item.ratio)} time`) },
    { label: "Middle half", numeric: true, value: (item) => item.low, show: (item) => (item.low === null ? null : `${formatChange(item.low)} to ${formatChange(item.high)}`) },
    { label: "Pairs", numeric: true, value: (item) => item.pairs, show: (item) => formatCount(item.pairs) },
  ];
  return [
    el("p", { class: "line" }, "Compared with ", link, ". The worth is the median over measured pairs that differ in this knob only."),
    dataTable({ columns, rows: trial.differences, caption: "Differences from the best" }).element,
  ];
}

function knobList(trial) {
  const pairs = Object.entries(trial.config);
  if (pairs.length === 0) return emptyNote("The template has no knobs.");
  return [facts(pairs.map(([name, value]) => [name, formatValue(value)]), "facts plain"), copyBox(JSON.stringify(trial.config), "configuration")];
}

function repetitionChart() {
  const chart = new Chart({ title: "Repetitions", help: "Each repetition in the order of measurement.", height: 15 });
  return {
    element: chart.element,
    show({ times_ns: times, time_ns: median, modes }) {
      if (times.length === 0) {
        chart.note("There are no times, because the trial failed.");
        return;
      }
      const [low, high] = extent(times);
      chart.show({
        summary: `${plural(times.length, "repetition")} from ${formatTime(low)} to ${formatTime(high)}, median ${formatTime(median)}.`,
        option: (colors) => ({
          xAxis: numberAxis(colors, { name: "repetition", nameGap: colors.fontPx * 0.8, format: formatCount, min: 0.5, max: times.length + 0.5, minInterval: 1, interval: Math.max(1, Math.ceil(times.length / 10)), axisLabel: { show: false } }),
          yAxis: timeAxis(colors, { name: "time", low, high, vertical: true }),
          tooltip: tooltip(colors, { trigger: "item", formatter: ({ value }) => (value ? lines(`repetition ${value[0]}`, formatTime(value[1], 4)) : "") }),
          series: [
            {
              type: "scatter",
              id: "times",
              symbolSize: colors.fontPx * 0.58,
              itemStyle: { color: colors.series[0], opacity: 0.75 },
              data: times.map((time, index) => [index + 1, time]),
              markLine: { silent: true, symbol: "none", label: { formatter: "{b}", color: colors.muted, fontSize: colors.fontPx, position: "insideEndTop" }, lineStyle: { color: colors.text, type: "dashed" }, data: marksOf(median, modes) },
            },
          ],
        }),
        table: () => ({
          rows: times.map((time, index) => ({ time, index })),
          columns: [
            { label: "Repetition", numeric: true, value: (row) => row.index + 1 },
            { label: "Time", numeric: true, value: (row) => row.time, show: (row) => formatTime(row.time, 5) },
          ],
        }),
      });
    },
    dispose: () => chart.dispose(),
  };
}

/** Lines at the median, or at the middle of each group if the repetitions fall into two. */
function marksOf(median, modes) {
  if (modes.length === 0) return [{ yAxis: median, name: "median" }];
  return modes.map(({ time_ns: time, share }) => ({ yAxis: time, name: `${formatPercent(share)} near ${formatTime(time)}` }));
}

function circumstanceList(trial) {
  const clocks = Object.entries(trial.clocks).map(([name, value]) => [name, formatValue(value)]);
  const more = [
    ["batch", formatCount(trial.batch)],
    trial.max_error === null ? null : ["largest error", significant(trial.max_error)],
    trial.prediction === null ? null : ["model's score", `${significant(trial.prediction, 4)}, state ${formatValue(trial.model)}`],
    ["started", formatMoment(trial.started_at_s)],
  ];
  return facts([...trial.facts.map(({ name, value }) => [name, value]), ...clocks, ...more], "facts plain");
}

function codeParts(trial) {
  const parts = [];
  const box = (title, text) => el("details", {}, el("summary", {}, title), el("pre", { class: "text", tabindex: "0", role: "group", "aria-label": title }, text));
  if (trial.plan !== null) parts.push(box("Launch plan", JSON.stringify(trial.plan, null, 2)));
  for (const [name, text] of Object.entries(trial.code)) parts.push(box(name, text));
  trial.profiles.forEach((profile, index) => parts.push(box(`Profile ${index + 1}`, JSON.stringify(profile, null, 2))));
  if (trial.code_note) parts.push(emptyNote(trial.code_note));
  return parts;
}
