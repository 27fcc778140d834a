// Every task in one row; what the run is doing now comes below.

import { doubtMark } from "./doubts.js";
import { el, emptyNote, facts, replaceChildren, section, svg } from "./dom.js";
import { deviceName, formatBytes, formatCount, formatDuration, formatPercent, formatRate, formatRatio, formatTime, plural } from "./format.js";
import { routeTo } from "./router.js";
import { budgetShares, runFacts, runLine, timeShares } from "./run_parts.js";
import { dataTable } from "./table.js";

export const overviewPage = {
  title: "Overview",
  paths: () => ["overview"],
  make: makeOverview,
};

function makeOverview() {
  const head = el("div", { class: "head" });
  const notices = el("div", { class: "stack tight" });
  const runs = el("div", { class: "stack" });
  const empty = el("div");
  const doubts = el("div");
  let databases = new Map();
  const table = dataTable({
    columns: [],
    rows: [],
    caption: "Tasks",
    className: "cards",
    pageSize: 100,
    rowKey: (task) => task.key,
    group: { of: (task) => task.database, head: (key) => (databases.size > 1 ? databaseHead(databases.get(key)) : null) },
  });
  return {
    element: el("div", { class: "page" }, head, notices, section("Tasks", empty, table.element, doubts), runs),
    show([overview]) {
      databases = new Map(overview.databases.map((database) => [database.key, database]));
      replaceChildren(head, el("h1", {}, overview.databases.length === 1 ? overview.databases[0].name : plural(overview.databases.length, "database")), summaryFacts(overview));
      const words = overviewNotices(overview);
      notices.hidden = words.length === 0;
      replaceChildren(notices, words);
      replaceChildren(empty, overview.tasks.length === 0 ? emptyNote(noTasks(overview)) : null);
      table.element.hidden = overview.tasks.length === 0;
      table.update(overview.tasks, taskColumns(overview.tasks));
      replaceChildren(doubts, doubtList(overview.tasks));
      const shown = shownRuns(overview.runs);
      runs.hidden = shown.length === 0;
      replaceChildren(runs, shown.map((run) => runSection(run, overview)), otherRuns(overview.runs, shown));
    },
  };
}

/** The runs that are going on, or else the last one; they come newest first. */
function shownRuns(runs) {
  const going = runs.filter((run) => run.state === "running");
  return going.length ? going : runs.slice(0, 1);
}

function otherRuns(runs, shown) {
  const others = runs.length - shown.length;
  return others > 0 ? el("p", {}, el("a", { href: routeTo("runs"), data: { key: "runs" } }, plural(others, "more run"))) : null;
}

function noTasks({ databases, runs }) {
  if (databases.length === 0) return "No database was given.";
  if (runs.some((run) => run.state === "running")) return "The run has begun and has no trial yet. This page changes by itself.";
  return "There are no trials yet. `schedsearch tune` makes some.";
}

function overviewNotices({ databases, notes }) {
  const problems = databases.filter((database) => database.problem);
  const words = problems.map(({ name, problem }) => el("p", { class: "problem" }, el("strong", {}, name), `: ${problem}`));
  words.push(...notes.map((note) => el("p", { class: "notice" }, note)));
  const remarks = databases.flatMap(({ name, notes: ofFile }) => ofFile.map((note) => el("li", {}, `${name}: ${note}`)));
  if (remarks.length) words.push(el("details", {}, el("summary", {}, plural(remarks.length, "remark on the files", "remarks on the files")), el("ul", {}, remarks)));
  return words;
}

function summaryFacts(overview) {
  const { tasks, databases, runs } = overview;
  const trials = tasks.reduce((sum, task) => sum + task.trials, 0);
  const failures = trials - tasks.reduce((sum, task) => sum + task.valid, 0);
  const size = databases.reduce((sum, database) => sum + database.size_bytes, 0);
  const going = runs.find((run) => run.state === "running");
  return facts([
    ["Speed-up", formatRatio(overview.geomean_speedup), speedupWords(overview)],
    ["Tasks", formatCount(tasks.length), databases.length > 1 ? `in ${plural(databases.length, "database")}` : plural(tasks.reduce((sum, task) => sum + (task.configurations ?? 0), 0), "configuration")],
    ["Trials", formatCount(trials), `${failures ? `${formatPercent(failures / trials)} failed` : "none failed"}, ${formatBytes(size)}`],
    going ? ["Time left", formatDuration(going.left_s), `${formatCount(going.trials)} trials so far`] : null,
  ]);
}

/** What a geometric mean of speed-ups stands on: of the overview, or of one of its databases. */
function speedupWords({ geomean_speedup: geomean, raced_tasks: raced, trusted_tasks: trusted }) {
  if (raced === 0) return "known after a final race";
  if (geomean === null) return raced > 1 ? `none of ${raced} can be trusted` : "it cannot be trusted";
  const mean = trusted > 1 ? `over the default, mean of ${trusted} tasks` : "over the default, one task";
  return raced > trusted ? `${mean}; ${raced - trusted} not to be trusted` : mean;
}

/** A database as the head of its tasks. */
function databaseHead(database) {
  const words = [
    plural(database.tasks, "task"),
    plural(database.trials, "trial"),
    database.failures ? `${formatCount(database.failures)} failed` : null,
    database.geomean_speedup === null ? null : `${formatRatio(database.geomean_speedup)} ${speedupWords(database)}`,
  ];
  return [database.name, el("small", {}, ` ${words.filter(Boolean).join(" · ")}`)];
}

function doubtList(tasks) {
  const found = tasks.filter((task) => task.doubts.length);
  if (found.length === 0) return null;
  return el(
    "details",
    {},
    el("summary", {}, `Why ${plural(found.length, "speed-up is", "speed-ups are")} not to be trusted`),
    el("ul", {}, found.map((task) => el("li", {}, el("a", { href: routeTo("task", [task.key]) }, task.name), `: ${task.doubts.join("; ")}.`))),
  );
}

function runSection(run, overview) {
  const going = run.state === "running";
  return section(
    going ? "Running now" : "The last run",
    runLine(run),
    facts(runFacts(run).slice(going ? 1 : 0)),
    el("div", { class: "charts" }, run.shares ? timeShares(run.shares) : null, budgetShares(run, overview)),
    el("p", {}, el("a", { href: routeTo("run", [run.key]), data: { key: `run-${run.key}` } }, "Timeline of this run")),
  );
}

/** Columns of the task table. Those in which no task has anything to show are left out. */
function taskColumns(tasks) {
  const anyone = (test) => tasks.some(test);
  return [
    {
      label: "Task",
      className: "task",
      value: (task) => task.name,
      show: (task) => [
        el("a", { href: routeTo("task", [task.key]), data: { key: task.key } }, task.name),
        task.live ? el("span", { class: "tag good" }, "running") : null,
        el("br"),
        el("small", {}, [task.op, deviceName(task.target)].join(" · ")),
        task.problem ? el("small", { class: "bad" }, el("br"), task.problem) : null,
      ],
    },
    { label: "Best so far", value: (task) => task.curve.length, show: (task) => spark(task) },
    { label: "Default", numeric: true, value: (task) => task.default_ns, show: (task) => timeCell(task.default_ns, task.default_spread) },
    { label: "Best", numeric: true, className: "strong", value: (task) => task.best_ns, show: (task) => (task.best_ns === null ? "none valid" : timeCell(task.best_ns, task.best_spread)) },
    { label: "Speed-up", numeric: true, descendingFirst: true, value: (task) => task.speedup, show: speedupCell },
    { label: "Rate", numeric: true, descendingFirst: true, value: (task) => task.rate, show: (task) => formatRate(task.rate, task.rate_unit) },
    anyone((task) => task.limit_share !== null) ? { label: "Of the limit", numeric: true, descendingFirst: true, value: (task) => task.limit_share, show: (task) => meter(task.limit_share) } : null,
    {
      label: "Trials",
      numeric: true,
      descendingFirst: true,
      value: (task) => task.trials,
      show: (task) => [formatCount(task.trials), task.configurations ? [el("br"), el("small", {}, `of ${formatCount(task.configurations)}`)] : null],
    },
    anyone((task) => task.trials > task.valid) ? { label: "Failed", numeric: true, descendingFirst: true, value: (task) => task.trials - task.valid, show: (task) => formatCount(task.trials - task.valid) } : null,
    new Set(tasks.flatMap((task) => task.templates.map((each) => each.template))).size > 1 ? { label: "Leads", value: (task) => task.template } : null,
    {
      label: "Since improved",
      numeric: true,
      value: (task) => task.since_improvement_trials,
      show: (task) => (task.since_improvement_trials === null ? null : plural(task.since_improvement_trials, "trial")),
    },
  ].filter(Boolean);
}

function timeCell(time, spread) {
  return [formatTime(time), spread === null ? null : [el("br"), el("small", {}, `± ${formatPercent(spread)}`)]];
}

function speedupCell(task) {
  if (task.speedup === null) return task.best_ns === null ? null : "no race yet";
  const interval = task.speedup_low === null ? null : el("small", {}, `${formatRatio(task.speedup_low)} to ${formatRatio(task.speedup_high)}`);
  return [doubtMark(task.doubt), " ", el("span", { class: task.doubt ? "doubtful" : "" }, formatRatio(task.speedup)), interval ? [el("br"), interval] : null];
}

function meter(share) {
  if (share === null) return null;
  return [formatPercent(share), el("br"), el("span", { class: "meter", "aria-hidden": "true" }, el("i", { style: { "--share": String(Math.min(1, share)) } }))];
}

/** The best time over the trials as a small curve of steps. */
function spark({ curve, best_ns: best }) {
  if (curve.length === 0) return null;
  const times = curve.map(([, time]) => Math.log(time));
  const low = Math.min(...times);
  const spread = Math.max(...times) - low || 1;
  const first = curve[0][0];
  const last = Math.max(curve[curve.length - 1][0], first + 1);
  const x = (trial) => (((trial - first) / (last - first)) * 100).toFixed(1);
  const y = (value) => (spread === 1 && times.length === 1 ? 13 : 25 - ((value - low) / spread) * 23).toFixed(1);
  let path = `M0 ${y(times[0])}`;
  for (let step = 1; step < curve.length; step += 1) path += `H${x(curve[step][0])}V${y(times[step])}`;
  path += "H100";
  const words = `From ${formatTime(curve[0][1])} to ${formatTime(best ?? curve[curve.length - 1][1])}`;
  return svg("svg", { class: "spark", viewBox: "0 0 100 27", preserveAspectRatio: "none", role: "img", "aria-label": words }, svg("path", { d: path }));
}
