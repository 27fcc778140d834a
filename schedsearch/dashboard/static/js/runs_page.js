// Runs: a list of all, and the timeline of one.

import { Chart, FAILED, lines, nameAxis, numberAxis, plotGrid, tooltip, zoom } from "./chart.js";
import { chartSection, el, emptyNote, facts, replaceChildren, section } from "./dom.js";
import { deviceName, formatCount, formatDuration, formatMoment, formatPercent, formatValue, plural, significant } from "./format.js";
import { routeTo } from "./router.js";
import { budgetShares, runFacts, runLine, RUN_STATES, timeShares } from "./run_parts.js";
import { dataTable } from "./table.js";

export const runsPage = {
  title: "Runs",
  paths: () => ["overview"],
  make: makeRuns,
};

export const runPage = {
  title: "Run",
  paths: ({ parts }) => ["overview", `run/${encodeURIComponent(parts[0] ?? "")}`],
  make: makeRun,
};

function makeRuns() {
  const empty = el("div");
  const table = dataTable({ columns: [], rows: [], caption: "Runs", className: "cards", rowKey: (run) => run.key, sort: { label: "Started", descending: true } });
  return {
    element: el("div", { class: "page" }, el("div", { class: "head" }, el("h1", {}, "Runs")), empty, table.element),
    show([overview]) {
      replaceChildren(empty, overview.runs.length ? null : emptyNote("There is no run yet. `schedsearch tune` starts one; imported records have none."));
      empty.hidden = overview.runs.length > 0;
      table.element.hidden = overview.runs.length === 0;
      table.update(overview.runs, runColumns(overview));
    },
  };
}

function runColumns({ databases, runs }) {
  const names = new Map(databases.map((database) => [database.key, database.name]));
  return [
    { label: "Started", value: (run) => run.started_at_s, descendingFirst: true, show: (run) => el("a", { href: routeTo("run", [run.key]), data: { key: run.key } }, formatMoment(run.started_at_s)) },
    { label: "State", value: (run) => RUN_STATES[run.state] },
    databases.length > 1 ? { label: "Database", value: (run) => names.get(run.database) } : null,
    { label: "Device", value: (run) => deviceName(run.target) },
    { label: "Tuner", value: (run) => run.tuner },
    runs.some((run) => run.seed !== null) ? { label: "Seed", numeric: true, value: (run) => run.seed, show: (run) => formatValue(run.seed) } : null,
    { label: "Tasks", numeric: true, value: (run) => run.tasks.length },
    { label: "Trials", numeric: true, descendingFirst: true, value: (run) => run.trials, show: (run) => formatCount(run.trials) },
    runs.some((run) => run.failures) ? { label: "Failed", numeric: true, descendingFirst: true, value: (run) => run.failures, show: (run) => formatCount(run.failures) } : null,
    { label: "Took", numeric: true, descendingFirst: true, value: (run) => run.wall_s, show: (run) => formatDuration(run.wall_s) },
    { label: "Trials a second", numeric: true, descendingFirst: true, value: (run) => run.trials_per_s, show: (run) => (run.trials_per_s === null ? null : significant(run.trials_per_s)) },
    { label: "Device busy", numeric: true, descendingFirst: true, value: (run) => run.shares?.device ?? null, show: (run) => formatPercent(run.shares?.device ?? null) },
  ].filter(Boolean);
}

function makeRun() {
  const head = el("div", { class: "head" });
  const notices = el("div", { class: "stack tight" });
  const shares = el("div", { class: "charts" });
  const options = el("div");
  const timeline = timelineChart();
  const devices = el("div");
  const when = chartSection("When was what under way?", [timeline], timeline.element);
  return {
    element: el("div", { class: "page" }, head, notices, devices, when.element, section("Where did the time go?", shares), section("Options and toolchain", options)),
    title: ([, { row }]) => `Run of ${formatMoment(row.started_at_s)}`,
    show([overview, view]) {
      const { row } = view;
      replaceChildren(
        head,
        el("p", { class: "trail" }, el("a", { href: routeTo("runs"), data: { key: "up" } }, "Runs"), " / run"),
        el("h1", {}, `Run of ${formatMoment(row.started_at_s)}`),
        runLine(row),
        facts([...runFacts(row), ["Failed", formatPercent(row.trials ? row.failures / row.trials : null), plural(row.failures, "trial")]]),
      );
      notices.hidden = view.notes.length === 0;
      replaceChildren(notices, view.notes.map((note) => el("p", { class: "notice" }, note)));
      replaceChildren(devices, deviceList(view));
      timeline.show(view);
      when.settle();
      replaceChildren(shares, row.shares ? timeShares(row.shares) : null, budgetShares(row, overview));
      const pairs = (values) => Object.entries(values).map(([name, value]) => [name.replaceAll("_", " "), formatValue(value)]);
      replaceChildren(options, facts([["id", row.id], ...pairs(row.options), ...pairs(row.toolchain)], "facts plain"));
    },
    dispose: () => timeline.dispose(),
  };
}

const DEVICE_STATES = {
  busy: ["good", "busy"],
  preparing: ["good", "preparing inputs and a reference"],
  waiting: ["", "waiting for builds"],
  lost: ["bad", "away"],
  quarantined: ["bad", "taken out of the run"],
};

/** What each of several devices did and does; null for one that is well. */
function deviceList({ devices }) {
  if (devices.length < 2 && !devices.some((device) => device.note || device.state === "lost")) return null;
  return el("ul", { class: "plain" }, devices.map((device) => {
    const [look, words] = DEVICE_STATES[device.state] ?? ["", ""];
    return el("li", {}, device.name, words ? [" ", el("span", { class: `tag ${look}` }, words)] : null, device.trials === null ? null : `: ${plural(device.trials, "trial")}`, device.note ? `; ${device.note}` : null);
  }));
}

/** Who had the device when, and which candidates waited or were built meanwhile: { element, emptyWords, show(view), dispose() }. */
function timelineChart() {
  const chart = new Chart({
    title: "Timeline",
    help: "The lowest rows are the devices. Each row above holds one candidate at a time, from its proposal until a device takes it: it waits, or is built. Zoom with the slider; a click opens the trial.",
    height: 16,
  });
  return {
    element: chart.element,
    get emptyWords() {
      return chart.emptyWords;
    },
    show: (view) => drawTimeline(chart, view),
    dispose: () => chart.dispose(),
  };
}

const MANY_TASKS = "several tasks";

function drawTimeline(chart, { bars, tasks, devices, lanes, seconds, joined, keys }) {
  const count = bars.lane.length;
  if (count === 0) {
    chart.note("No candidate was measured in this run yet.");
    return;
  }
  chart.plot.style.setProperty("height", `${Math.min(40, 7 + lanes * 1.3)}rem`);
  const failed = (index) => !["ok", ""].includes(bars.outcome[index]);
  const nameOf = (index) => tasks[bars.task[index]] ?? MANY_TASKS;
  const names = [...new Set([...tasks, ...(bars.task.includes(-1) ? [MANY_TASKS] : [])])];
  const busy = bars.lane.reduce((sum, lane, index) => sum + (lane < devices.length ? bars.end_s[index] - bars.start_s[index] : 0), 0);
  const laneName = (lane) => (lane < devices.length ? (devices.length > 1 ? devices[lane].name : "device") : `candidate ${lane - devices.length + 1}`);
  const beside = devices.length > 1 ? `${devices.length} devices, which were` : "the device, which was";
  const shown = (hidden) => bars.lane.flatMap((lane, index) => (hidden.has(failed(index) ? FAILED : nameOf(index)) ? [] : [[lane, bars.start_s[index], bars.end_s[index], index]]));
  const look = (colors, index) => (failed(index) ? colors.bad : colors.series[names.indexOf(nameOf(index)) % colors.series.length]);
  chart.show({
    summary: `Timeline of ${formatDuration(seconds)} with up to ${plural(lanes - devices.length, "candidate")} under way beside ${beside} busy ${formatPercent(busy / seconds / devices.length)} of the time.`,
    legend: [...names, ...(bars.outcome.some((_, index) => failed(index)) ? [FAILED] : [])],
    onclick: ({ value }) => {
      const trial = Array.isArray(value) ? bars.trial[value[3]] : "";
      if (trial) location.hash = routeTo("trial", [trial]);
    },
    option: (colors, hidden) => ({
      grid: plotGrid(colors, { top: colors.fontPx * 0.6, bottom: colors.fontPx * 4 }),
      dataZoom: zoom(colors),
      xAxis: numberAxis(colors, { name: "time of the run", zero: true, max: seconds, format: formatDuration, nameGap: colors.fontPx * 1.9 }),
      yAxis: nameAxis(colors, { names: Array.from({ length: lanes }, (_, lane) => laneName(lane)), vertical: true, axisLabel: { color: colors.text, fontSize: colors.fontPx, hideOverlap: true } }),
      tooltip: tooltip(colors, { trigger: "item", formatter: ({ value }) => barTooltip(value[3]) }),
      series: [
        {
          type: "custom",
          id: "bars",
          clip: true,
          encode: { x: [1, 2], y: 0 },
          data: shown(hidden),
          renderItem: (params, api) => {
            const [left, y] = api.coord([api.value(1), api.value(0)]);
            const [right] = api.coord([api.value(2), api.value(0)]);
            const height = api.size([0, 1])[1] * 0.72;
            const index = api.value(3);
            const isDevice = api.value(0) < devices.length;
            return {
              type: "rect",
              shape: { x: left, y: y - height / 2, width: Math.max(1, right - left), height },
              style: { fill: look(colors, index), opacity: isDevice ? 1 : 0.42, ...(bars.race[index] ? { stroke: colors.text, lineWidth: 1 } : {}) },
            };
          },
        },
      ],
    }),
    table: () => ({
      rows: bars.lane.map((_, index) => index),
      columns: [
        { label: "Where", value: (index) => bars.lane[index], show: (index) => laneName(bars.lane[index]) },
        { label: "From", numeric: true, value: (index) => bars.start_s[index], show: (index) => formatDuration(bars.start_s[index]) },
        { label: "Lasted", numeric: true, value: (index) => bars.end_s[index] - bars.start_s[index], show: (index) => formatDuration(bars.end_s[index] - bars.start_s[index]) },
        { label: "Task", value: nameOf, show: (index) => (bars.task[index] < 0 ? MANY_TASKS : el("a", { href: routeTo("task", [keys[bars.task[index]]]) }, nameOf(index))) },
        { label: "Outcome", value: (index) => bars.outcome[index], show: (index) => outcomeOf(index) },
        { label: "Trial", value: (index) => bars.trial[index], show: (index) => (bars.trial[index] ? el("a", { href: routeTo("trial", [bars.trial[index]]) }, bars.trial[index].split(".")[1]) : plural(bars.count[index], "trial")) },
      ],
    }),
  });
  if (joined) chart.help.textContent = `${chart.help.textContent.replace(/ Neighbours .*/, "")} Neighbours that are too near to one another to be told apart are joined.`;

  function outcomeOf(index) {
    return bars.race[index] ? "final race" : bars.outcome[index].replaceAll("_", " ") || "several";
  }

  function barTooltip(index) {
    return lines(
      `${laneName(bars.lane[index])}: ${outcomeOf(index)}`,
      nameOf(index),
      bars.count[index] > 1 ? plural(bars.count[index], "trial") : "",
      `${formatDuration(bars.end_s[index] - bars.start_s[index])}, from ${formatDuration(bars.start_s[index])} on`,
    );
  }
}
