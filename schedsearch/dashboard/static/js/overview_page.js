// Every task in one row, and what the run is doing now.

import { el, emptyNote, facts, replaceChildren, section, svg } from "./dom.js";
import {
  deviceName,
  formatBytes,
  formatCount,
  formatDuration,
  formatMoment,
  formatPercent,
  formatRate,
  formatRatio,
  formatTime,
  plural,
  significant,
} from "./format.js";
import { routeTo } from "./router.js";
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
  const table = dataTable({ columns: taskColumns([]), rows: [], caption: "Tasks", className: "cards", pageSize: 100, rowKey: (task) => task.key });
  return {
    element: el("div", { class: "page" }, head, notices, runs, section("Tasks", empty, table.element)),
    show([overview]) {
      replaceChildren(head, el("h1", {}, overview.databases.length === 1 ? overview.databases[0].name : plural(overview.databases.length, "database")), summaryFacts(overview));
      const words = overviewNotices(overview);
      notices.hidden = words.length === 0;
      replaceChildren(notices, words);
      const [latest, ...earlier] = chosenRuns(overview.runs);
      runs.hidden = !latest;
      if (latest) replaceChildren(runs, latest.map((run) => runSection(run, overview)), earlierRuns(earlier[0] ?? []));
      replaceChildren(empty, overview.tasks.length === 0 ? emptyNote(noTasks(overview)) : null);
      table.element.hidden = overview.tasks.length === 0;
      table.update(overview.tasks, taskColumns(overview.databases));
    },
  };
}

/** [runs to show in full, the others]: those that are going on, or else the last one; [] without any. */
function chosenRuns(runs) {
  if (runs.length === 0) return [];
  const newest = [...runs].sort((a, b) => b.started_at_s - a.started_at_s);
  const going = newest.filter((run) => run.state === "running");
  const shown = going.length ? going : newest.slice(0, 1);
  return [shown, newest.filter((run) => !shown.includes(run))];
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

function summaryFacts({ tasks, databases, geomean_speedup: geomean, raced_tasks: raced }) {
  const trials = tasks.reduce((sum, task) => sum + task.trials, 0);
  const failures = trials - tasks.reduce((sum, task) => sum + task.valid, 0);
  const size = databases.reduce((sum, database) => sum + database.size_bytes, 0);
  const where = databases.length === 1 ? databases[0].name : plural(databases.length, "database");
  return facts([
    ["Speed-up", formatRatio(geomean), geomean === null ? "known after a final race" : `over the default, ${raced > 1 ? `geometric mean of ${raced} tasks` : "one task"}`],
    ["Tasks", formatCount(tasks.length), plural(tasks.reduce((sum, task) => sum + (task.configurations ?? 0), 0), "configuration")],
    ["Trials", formatCount(trials), `${where}, ${formatBytes(size)}`],
    ["Failed", formatPercent(trials ? failures / trials : null), plural(failures, "trial")],
  ]);
}

const RUN_STATES = { running: "running", silent: "quiet without an end", finished: "finished", interrupted: "interrupted" };
const STOPPED = { trials: "all trials were spent", time: "its time was spent", exhausted: "every configuration was tried", interrupted: "its user stopped it" };

function runSection(run, overview) {
  const going = run.state === "running";
  const used = run.budget_trials ? run.trials / run.budget_trials : run.budget_s ? run.wall_s / run.budget_s : null;
  return section(
    going ? "Running now" : "The last run",
    el("p", { class: "line" }, [
      el("span", { class: `tag ${going ? "good" : run.state === "silent" ? "bad" : ""}` }, RUN_STATES[run.state]),
      ` ${deviceName(run.target)}, tuner ${run.tuner}${run.seed === null ? "" : `, seed ${run.seed}`}, started ${formatMoment(run.started_at_s)}`,
      run.stopped ? `; it ended because ${STOPPED[run.stopped] ?? run.stopped}` : "",
    ]),
    facts([
      going ? ["Time left", formatDuration(run.left_s), run.phase === "racing" ? "then final races, which have begun" : "estimate, without final races"] : ["Took", formatDuration(run.wall_s)],
      ["Budget used", used === null ? "no limit" : formatPercent(Math.min(1, used)), budgetWords(run)],
      ["Speed", run.trials_per_s === null ? null : `${significant(run.trials_per_s)} /s`, "trials a second"],
      ["Failed", formatPercent(run.trials ? run.failures / run.trials : null), plural(run.failures, "trial")],
    ]),
    el("div", { class: "charts" }, run.shares ? timeShares(run.shares) : null, budgetShares(run, overview)),
  );
}

function budgetWords(run) {
  if (run.budget_trials) return `${formatCount(run.trials)} of ${plural(run.budget_trials, "trial")}`;
  if (run.budget_s) return `${formatDuration(run.wall_s)} of ${formatDuration(run.budget_s)}`;
  return plural(run.trials, "trial");
}

const SHARE_NAMES = { device: "device measures", build: "waiting for builds", tuner: "waiting for the tuner", preparing: "preparing", other: "other" };

function timeShares(shares) {
  const parts = Object.entries(SHARE_NAMES)
    .map(([name, label]) => ({ label, share: shares[name] }))
    .filter((part) => part.share !== null);
  const known = parts.reduce((sum, part) => sum + part.share, 0);
  if (parts.length === 1) parts.push({ label: "the rest, which was not recorded", share: Math.max(0, 1 - known) });
  return shareBar("Where the wall time goes", parts, `${significant(shares.builders_busy, 2)} builders busy on average`);
}

function budgetShares(run, { tasks }) {
  const names = new Map(tasks.map((task) => [task.key, task.name]));
  const parts = [...run.tasks]
    .sort((a, b) => b.share_of_seconds - a.share_of_seconds)
    .map((part) => ({ label: names.get(part.task) ?? "a task that is not listed", share: part.share_of_seconds, href: routeTo("task", [part.task]), note: plural(part.trials, "trial") }));
  if (parts.length < 2) return null;
  const shown = parts.slice(0, 7);
  const rest = parts.slice(7).reduce((sum, part) => sum + part.share, 0);
  if (rest > 0) shown.push({ label: `${parts.length - 7} others`, share: rest });
  const why = "Shares are of the seconds of tuning. Tasks share the trials by the square roots of their weights; a template far behind the leader of its task gets few.";
  return shareBar("Where the budget goes, and why", shown, why);
}

/** Shares of a whole: one bar, and its parts in words. */
function shareBar(title, parts, note) {
  const look = (index) => ({ "--share": String(parts[index].share), "--key": `var(--series-${(index % 8) + 1})` });
  return el(
    "div",
    { class: "share-block" },
    el("h3", {}, title),
    el("div", { class: "shares", "aria-hidden": "true" }, parts.map((_, index) => el("i", { style: look(index) }))),
    el(
      "ul",
      { class: "shares-list" },
      parts.map((part, index) =>
        el(
          "li",
          { style: look(index) },
          part.href ? el("a", { href: part.href, data: { key: `share-${part.href}` } }, part.label) : part.label,
          " ",
          el("strong", {}, formatPercent(part.share)),
          part.note ? el("small", {}, ` ${part.note}`) : null,
        ),
      ),
    ),
    el("small", {}, note),
  );
}

function earlierRuns(runs) {
  if (runs.length === 0) return null;
  const columns = [
    { label: "Started", value: (run) => run.started_at_s, show: (run) => formatMoment(run.started_at_s) },
    { label: "Device", value: (run) => deviceName(run.target) },
    { label: "Tuner", value: (run) => run.tuner },
    { label: "State", value: (run) => RUN_STATES[run.state] },
    { label: "Took", value: (run) => run.wall_s, show: (run) => formatDuration(run.wall_s), numeric: true },
    { label: "Trials", value: (run) => run.trials, show: (run) => formatCount(run.trials), numeric: true },
    { label: "Failed", value: (run) => run.failures, show: (run) => formatCount(run.failures), numeric: true },
  ];
  return el("details", {}, el("summary", {}, plural(runs.length, "earlier run")), dataTable({ columns, rows: runs, caption: "Earlier runs" }).element);
}

function taskColumns(databases) {
  const files = new Map(databases.length > 1 ? databases.map((database) => [database.key, database.name]) : []);
  return [
    {
      label: "Task",
      className: "task",
      value: (task) => task.name,
      show: (task) => [
        el("a", { href: routeTo("task", [task.key]), data: { key: task.key } }, task.name),
        el("br"),
        el("small", {}, [task.op, deviceName(task.target), files.get(task.database)].filter(Boolean).join(" · ")),
        task.problem ? el("small", { class: "bad" }, el("br"), task.problem) : null,
      ],
    },
    { label: "Best so far", value: (task) => task.curve.length, show: (task) => spark(task) },
    { label: "Default", numeric: true, value: (task) => task.default_ns, show: (task) => formatTime(task.default_ns) },
    { label: "Best", numeric: true, className: "strong", value: (task) => task.best_ns, show: (task) => (task.best_ns === null ? "none valid" : formatTime(task.best_ns)) },
    { label: "Speed-up", numeric: true, descendingFirst: true, value: (task) => task.speedup, show: (task) => (task.speedup === null && task.best_ns !== null ? "no race yet" : formatRatio(task.speedup)) },
    { label: "Rate", numeric: true, descendingFirst: true, value: (task) => task.rate, show: (task) => formatRate(task.rate, task.rate_unit) },
    { label: "Of the limit", numeric: true, descendingFirst: true, value: (task) => task.limit_share, show: (task) => meter(task.limit_share) },
    {
      label: "Trials",
      numeric: true,
      descendingFirst: true,
      value: (task) => task.trials,
      show: (task) => [formatCount(task.trials), task.configurations ? [el("br"), el("small", {}, `of ${formatCount(task.configurations)}`)] : null],
    },
    { label: "Failed", numeric: true, descendingFirst: true, value: (task) => task.trials - task.valid, show: (task) => formatCount(task.trials - task.valid) },
    { label: "Leads", value: (task) => task.template },
    {
      label: "Since improved",
      numeric: true,
      value: (task) => task.since_improvement_trials,
      show: (task) => (task.since_improvement_trials === null ? null : plural(task.since_improvement_trials, "trial")),
    },
  ];
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
