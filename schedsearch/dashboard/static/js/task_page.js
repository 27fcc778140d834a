// A task: one section for each question that its reader has.

import { chartSection, copyBox, el, facts, foldingSection, replaceChildren } from "./dom.js";
import { doubtMark, doubtNotice } from "./doubts.js";
import { deviceName, formatCount, formatDuration, formatPercent, formatRate, formatRatio, formatTime, formatValue, plural, significant } from "./format.js";
import { knobCharts } from "./knob_charts.js";
import { knobMap } from "./knob_map.js";
import { modelStateChart, predictionChart } from "./model_charts.js";
import { clockChart, spreadChart } from "./noise_charts.js";
import { parallelChart } from "./parallel_chart.js";
import { progressChart } from "./progress_chart.js";
import { raceChart } from "./race_chart.js";
import { routeTo } from "./router.js";
import { dataTable } from "./table.js";
import { configText, trialConfig, trialKey } from "./trials.js";

export const taskPage = {
  title: "Task",
  paths: ({ parts }) => [`task/${encodeURIComponent(parts[0] ?? "")}`],
  make: makeTask,
};

function makeTask({ source }) {
  const head = el("div", { class: "head" });
  const numbers = el("div");
  const best = el("div", { class: "stack tight" });
  const notices = el("div", { class: "stack tight" });
  const templates = el("div");
  const failures = failureTable();
  const agreement = el("p", { class: "line" });
  const pairs = pairTable();
  const repeated = repeatedTable();
  const charts = {
    progress: progressChart(),
    race: raceChart(),
    knobs: knobCharts(),
    map: knobMap(),
    parallel: parallelChart(),
    prediction: predictionChart(),
    states: modelStateChart(),
    spread: spreadChart(),
    clock: clockChart(),
  };
  const models = modelFollower(source, charts.knobs);
  const { knobs } = charts;
  const sections = {
    progress: chartSection("Is it still getting better?", [charts.progress], charts.progress.element),
    race: chartSection("Which finalist won?", [charts.race], el("div", { class: "charts" }, charts.race.element, templates)),
    knobs: chartSection(
      "What made it better?",
      [knobs, charts.map, charts.parallel],
      el("div", { class: "controls" }, knobs.picker),
      el("div", { class: "charts" }, knobs.importance, knobs.values),
      el("div", { class: "charts" }, charts.map.element),
      charts.parallel.element,
      pairs.element,
    ),
    failures: foldingSection("What fails, and why?", failures.element),
    model: chartSection("Can I trust the model?", [charts.prediction, charts.states], agreement, el("div", { class: "charts" }, charts.prediction.element, charts.states.element)),
    numbers: chartSection("Can I trust the numbers?", [charts.spread, charts.clock], el("div", { class: "charts" }, charts.spread.element, charts.clock.element), repeated.element),
  };
  const element = el(
    "div",
    { class: "page" },
    head,
    numbers,
    best,
    notices,
    sections.progress.element,
    sections.race.element,
    sections.knobs.element,
    sections.failures.element,
    sections.model.element,
    sections.numbers.element,
  );
  return {
    element,
    title: ([task]) => task.row.name,
    show([task]) {
      showHead(head, task);
      replaceChildren(numbers, taskFacts(task.row));
      replaceChildren(best, bestConfiguration(task));
      showNotices(notices, task);
      replaceChildren(templates, templateTable(task.row));
      for (const chart of Object.values(charts)) chart.show(task);
      failures.show(task);
      pairs.show(task);
      repeated.show(task);
      agreement.textContent = agreementWords(task);
      const { templates: tried, trials } = task.row;
      templates.hidden = tried.length < 2; // of one template, the numbers are at the top of the page
      sections.progress.settle();
      sections.race.settle(tried.length > 1);
      sections.knobs.settle();
      sections.failures.fold(task.failures.length ? "" : trials ? "Nothing failed." : "No trial was measured yet.");
      sections.model.settle();
      sections.numbers.settle(task.noise.repeated.length > 0 || task.noise.throttled > 0);
      models.follow(task);
    },
    dispose() {
      models.dispose();
      for (const chart of Object.values(charts)) chart.dispose();
    },
  };
}

const GROWTH = 1.25; // as importance.py trains again

/** Asks for what a model says about the knobs, beside the page, and again when the task has grown. */
function modelFollower(source, charts) {
  let asked = 0; // records of the task at the last question
  let ended = false;
  return {
    async follow({ row, total }) {
      if (asked && asked <= total && total <= GROWTH * asked) return;
      asked = total;
      let found;
      try {
        found = await source.get(`importance/${encodeURIComponent(row.key)}`);
      } catch (problem) {
        found = problem.message;
      }
      if (!ended) charts.showModel(found);
    },
    dispose() {
      ended = true;
    },
  };
}

function showHead(head, { row }) {
  const workload = Object.entries(row.workload ?? {}).filter(([, value]) => value !== null && typeof value !== "object");
  replaceChildren(
    head,
    el("p", { class: "trail" }, el("a", { href: routeTo("overview"), data: { key: "up" } }, "Overview"), " / task"),
    el("h1", {}, row.name, row.live ? el("span", { class: "tag good" }, "running") : null),
    el("p", {}, [row.name === row.label ? null : row.label, row.op, deviceName(row.target), row.mode].filter(Boolean).join(" · ")),
    workload.length ? el("details", {}, el("summary", {}, "Workload and device"), el("pre", { class: "text", tabindex: "0" }, `${row.target}\n${JSON.stringify(row.workload, null, 2)}`)) : null,
  );
}

function taskFacts(row) {
  const failed = row.trials - row.valid;
  return facts([
    ["Best", row.best_ns === null ? "none valid" : formatTime(row.best_ns), row.template],
    ["Default", formatTime(row.default_ns), row.raced ? "in the same race" : "measured once"],
    ["Speed-up", [formatRatio(row.speedup), " ", doubtMark(row.doubt)], speedupNote(row)],
    ["Rate", formatRate(row.rate, row.rate_unit), row.limit_share === null ? null : `${formatPercent(row.limit_share)} of the device's limit, ${formatTime(row.limit_ns)}`],
    ["Trials", formatCount(row.trials), row.configurations ? `${formatPercent(row.measured_share)} of ${plural(row.configurations, "configuration")}` : null],
    ["Failed", formatPercent(row.trials ? failed / row.trials : null), row.rejected ? `${plural(failed, "trial")}; ${formatCount(row.rejected)} more rejected before` : plural(failed, "trial")],
    ["Last improved", row.since_improvement_trials === null ? "never" : `${plural(row.since_improvement_trials, "trial")} ago`, row.since_improvement_s === null ? null : `${formatDuration(row.since_improvement_s)} of tuning`],
    ["Time spent", formatDuration(row.seconds)],
  ]);
}

function speedupNote(row) {
  if (row.speedup === null) return "known after a final race";
  return row.speedup_low === null ? "over the default" : `${formatRatio(row.speedup_low)} to ${formatRatio(row.speedup_high)} over the default`;
}

/** The configuration of the best trial, to copy, and the way to its page. */
function bestConfiguration(task) {
  const { row, trials, database } = task;
  const position = trials.id.indexOf(row.best_id);
  if (row.best_id === null || position < 0) return null;
  const pairs = trialConfig(task, position);
  return [
    el("p", {}, "The best: ", el("a", { href: routeTo("trial", [trialKey(database, row.best_id)]), data: { key: "best" } }, `record ${row.best_id}`), pairs.length ? ", of this configuration:" : "."),
    pairs.length ? copyBox(JSON.stringify(Object.fromEntries(pairs)), "best configuration") : null,
  ];
}

function showNotices(notices, { row, notes, sampled, total, trials }) {
  const words = notes.filter((note) => note !== row.problem).map((note) => el("p", { class: "notice" }, note));
  if (row.doubts.length) words.unshift(doubtNotice(row.doubts));
  if (row.problem) words.unshift(el("p", { class: "problem" }, row.problem));
  if (sampled && notes.length === 0) words.push(el("p", { class: "notice" }, `The charts show ${formatCount(trials.id.length)} of ${plural(total, "trial")}; all figures are of all trials.`));
  notices.hidden = words.length === 0;
  replaceChildren(notices, words);
}

function templateTable(row) {
  const columns = [
    { label: "Template", value: (item) => item.template },
    { label: "Best", numeric: true, className: "strong", value: (item) => item.best_ns, show: (item) => (item.best_ns === null ? "none valid" : formatTime(item.best_ns)) },
    { label: "Trials", numeric: true, value: (item) => item.trials, show: (item) => formatCount(item.trials) },
    { label: "Failed", numeric: true, value: (item) => item.failures, show: (item) => `${formatCount(item.failures)}, ${formatPercent(item.trials ? item.failures / item.trials : 0)}` },
  ];
  return [el("h3", {}, "Templates in the search"), dataTable({ columns, rows: row.templates, caption: "Templates in the search" }).element];
}

function agreementWords({ agreement, agreement_trials: trials }) {
  if (agreement === null) return "";
  const verdict = agreement > 0.7 ? "it ranks new configurations well" : agreement > 0.3 ? "it helps, with many mistakes" : "it hardly helps";
  return `Rank correlation of predicted and measured speed over ${plural(trials, "trial")}: ${significant(agreement, 2)}; ${verdict}.`;
}

function failureTable() {
  const table = dataTable({ columns: [], rows: [], caption: "Failures", className: "cards", pageSize: 20 });
  return {
    element: table.element,
    show({ failures, database }) {
      table.update(failures, failureColumns(database));
    },
  };
}

function failureColumns(database) {
  return [
    {
      label: "Reason",
      className: "wide",
      value: (group) => group.reason,
      show: (group) => [
        group.reason || "no message",
        group.message && group.message !== group.reason ? el("details", {}, el("summary", {}, "A whole message"), el("pre", { class: "text", tabindex: "0" }, group.message)) : null,
      ],
    },
    { label: "Count", numeric: true, descendingFirst: true, className: "strong", value: (group) => group.count, show: (group) => formatCount(group.count) },
    { label: "Stage", value: (group) => group.stage, show: (group) => [group.stage, el("br"), el("small", {}, group.outcome.replaceAll("_", " "))] },
    {
      label: "What they share",
      className: "wide",
      value: (group) => group.shared.length,
      show: (group) =>
        group.shared.length
          ? el("ul", { class: "plain" }, group.shared.slice(0, 4).map((item) => el("li", {}, el("b", {}, `${item.knob}=${formatValue(item.value)}`), ` in ${formatPercent(item.share_in_group)}, elsewhere ${formatPercent(item.share_elsewhere)}`)))
          : "nothing that stands out",
    },
    { label: "Template", value: (group) => group.template },
    {
      label: "Trials",
      value: (group) => group.ids[0] ?? null,
      show: (group) => group.ids.slice(0, 3).map((id, index) => [index ? ", " : "", el("a", { href: routeTo("trial", [trialKey(database, id)]) }, String(id))]),
    },
  ];
}

function pairTable() {
  const columns = [
    { label: "Knob", value: (pair) => pair.knob },
    { label: "From", value: (pair) => pair.of, show: (pair) => formatValue(pair.of) },
    { label: "To", value: (pair) => pair.to, show: (pair) => formatValue(pair.to) },
    { label: "Time becomes", numeric: true, className: "strong", value: (pair) => pair.ratio, show: (pair) => formatRatio(pair.ratio) },
    { label: "Middle half", numeric: true, value: (pair) => pair.high - pair.low, show: (pair) => `${formatRatio(pair.low)} to ${formatRatio(pair.high)}` },
    { label: "Pairs", numeric: true, descendingFirst: true, value: (pair) => pair.pairs, show: (pair) => formatCount(pair.pairs) },
    { label: "Template", value: (pair) => pair.template },
  ];
  const table = dataTable({ columns, rows: [], caption: "What one change of a knob does", pageSize: 10 });
  const element = el("details", {}, el("summary", {}, "What one change of a knob does, from measured pairs"), table.element);
  return {
    element,
    show({ pairs }) {
      element.hidden = pairs.length === 0;
      table.update(pairs);
    },
  };
}

function repeatedTable() {
  const table = dataTable({ columns: [], rows: [], caption: "Configurations measured several times", pageSize: 10 });
  const details = el("details", {}, el("summary", {}, "Configurations measured several times"), table.element);
  const words = el("p", { class: "line" });
  return {
    element: el("div", { class: "stack tight" }, words, details),
    show({ noise, database }) {
      const reasons = Object.entries(noise.throttle_reasons).map(([reason, count]) => `${reason} ${formatCount(count)}`);
      words.textContent = noise.throttled ? `The card was throttled in ${plural(noise.throttled, "trial")} (${reasons.join(", ")}); their times are too long.` : "";
      words.hidden = !noise.throttled;
      details.hidden = noise.repeated.length === 0;
      table.update(noise.repeated, [
        { label: "Slowest over fastest", numeric: true, descendingFirst: true, className: "strong", value: (item) => item.ratio, show: (item) => formatRatio(item.ratio) },
        { label: "Times", value: (item) => item.times_ns[0], show: (item) => item.times_ns.map((time) => formatTime(time)).join(", ") },
        { label: "Template", value: (item) => item.template },
        { label: "Config", className: "config", value: (item) => configText(Object.entries(item.config)) },
        { label: "Records", value: (item) => item.ids[0], show: (item) => item.ids.slice(0, 6).map((id, index) => [index ? ", " : "", el("a", { href: routeTo("trial", [trialKey(database, id)]) }, String(id))]) },
      ]);
    },
  };
}
