// Every record with filters, failures too.

import { el, replaceChildren } from "./dom.js";
import { deviceName, formatCount, formatMoment, formatTime, plural } from "./format.js";
import { picker } from "./knob_charts.js";
import { routeTo } from "./router.js";
import { dataTable } from "./table.js";
import { trialKey } from "./trials.js";

export const recordsPage = {
  title: "Records",
  paths: () => ["records"],
  make: makeRecords,
};

const ALL = "all";
const FAILURES = "all failures";

function makeRecords({ source, announce }) {
  let latest = null;
  const chosen = { text: "", task: ALL, template: ALL, outcome: ALL };
  let turn = 0;
  const table = dataTable({ columns: [], rows: [], caption: "Records", className: "cards", pageSize: 100, rowKey: (row) => row.key });
  const count = el("p", { class: "line" });
  const notices = el("div", { class: "stack tight" });
  const search = el("input", { type: "search", placeholder: "config or message", "aria-label": "Search in configuration and message" });
  search.addEventListener("input", () => {
    chosen.text = search.value;
    filter();
  });
  const pick = (label, field) =>
    picker(label, (value) => {
      chosen[field] = value;
      filter();
    });
  const pickers = { task: pick("Task", "task"), template: pick("Template", "template"), outcome: pick("Outcome", "outcome") };

  function show(records) {
    latest = records;
    pickers.task.show([ALL, ...records.tasks.map((task) => [task.key, `${task.name} · ${deviceName(task.target)}`])], chosen.task);
    pickers.template.show([ALL, ...new Set(records.tasks.flatMap((task) => task.templates.map((item) => item.template)))], chosen.template);
    pickers.outcome.show([ALL, FAILURES, "ok", ...new Set(records.tasks.flatMap((task) => Object.keys(task.failures)))], chosen.outcome);
    replaceChildren(notices, records.notes.map((note) => el("p", { class: "notice" }, note)));
    if (isServerNeeded()) askSoon();
    else showHeld();
  }

  // What is in the page is filtered at once; the server is asked when it holds more than that.
  let timer = null;
  function filter() {
    turn += 1; // an answer to an earlier filter comes too late
    clearTimeout(timer);
    const words = chosen.text.toLowerCase().split(/\s+/).filter(Boolean);
    table.setFilter((row) => matches(row, chosen, words));
    showHeld();
    announce(count.textContent);
    if (isServerNeeded()) askSoon();
  }

  function showHeld() {
    const held = table.update(recordRows(latest), recordColumns());
    tell(isFiltered() ? held : latest.total, held);
  }

  function isFiltered() {
    return chosen.text !== "" || [chosen.task, chosen.template, chosen.outcome].some((value) => value !== ALL);
  }

  function isServerNeeded() {
    return isFiltered() && source.live && latest.total > latest.records.id.length;
  }

  function askSoon() {
    clearTimeout(timer);
    timer = setTimeout(ask, 250);
  }

  async function ask() {
    turn += 1;
    const mine = turn;
    const query = new URLSearchParams({ limit: "5000" });
    if (chosen.text) query.set("text", chosen.text);
    if (chosen.task !== ALL) query.set("task", chosen.task);
    if (chosen.template !== ALL) query.set("template", chosen.template);
    if (chosen.outcome !== ALL) query.set("outcome", chosen.outcome === FAILURES ? "failed" : chosen.outcome);
    let found;
    try {
      found = await source.get(`records?${query}`);
    } catch (problem) {
      count.textContent = problem.message;
      return;
    }
    if (mine !== turn) return;
    table.update(recordRows(found));
    tell(found.total, found.records.id.length);
    announce(count.textContent);
  }

  function tell(matched, held) {
    const words = matched === latest.total ? plural(matched, "record") : `${formatCount(matched)} of ${plural(latest.total, "record")}`;
    count.textContent = `${words}${held < matched ? `; the newest ${formatCount(held)} are listed` : ""}.`;
  }

  return {
    element: el(
      "div",
      { class: "page" },
      el("div", { class: "head" }, el("h1", {}, "Every record"), el("div", { class: "controls" }, el("label", {}, "Search", search), Object.values(pickers).map((item) => item.element)), count, notices),
      table.element,
    ),
    show: ([records]) => show(records),
    dispose: () => clearTimeout(timer),
  };
}

function matches(row, chosen, words) {
  if (chosen.task !== ALL && row.task_key !== chosen.task) return false;
  if (chosen.template !== ALL && row.template !== chosen.template) return false;
  if (chosen.outcome === FAILURES ? row.outcome === "ok" : chosen.outcome !== ALL && row.outcome !== chosen.outcome) return false;
  if (words.length === 0) return true;
  const text = `${row.config} ${row.message}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

/** Rows of the columns of a RecordsView. */
export function recordRows({ records, tasks, shell_paths: paths }) {
  return records.id.map((id, index) => {
    const task = tasks[records.task[index]];
    return {
      id,
      key: trialKey(task.database, id),
      task: task.name,
      task_key: task.key,
      template: records.template[index],
      outcome: records.outcome[index],
      time_ns: records.time_ns[index],
      race: records.race[index],
      config: records.config[index],
      message: records.message[index],
      command: `schedsearch records show ${id} --db ${paths[task.database]}`,
      at_s: records.at_s[index],
    };
  });
}

function recordColumns() {
  return [
    { label: "Record", value: (row) => row.id, show: (row) => el("a", { href: routeTo("trial", [row.key]), data: { key: row.key } }, String(row.id)) },
    { label: "Time", numeric: true, className: "strong", value: (row) => row.time_ns, show: (row) => formatTime(row.time_ns) },
    {
      label: "Outcome",
      value: (row) => row.outcome,
      show: (row) => [el("span", { class: row.outcome === "ok" ? "" : "bad" }, row.outcome.replaceAll("_", " ")), row.race ? el("small", {}, " race") : null],
    },
    { label: "Task", value: (row) => row.task },
    { label: "Template", value: (row) => row.template },
    { label: "Config, message", className: "config", value: (row) => row.config, show: configCell },
    { label: "Measured", value: (row) => row.at_s, show: (row) => formatMoment(row.at_s) },
  ];
}

function configCell(row) {
  return [
    row.config,
    copyButton("copy", "Copy the configuration", row.config),
    copyButton("command", "Copy the command that shows this record", row.command),
    row.message ? el("div", {}, el("small", {}, row.message)) : null,
  ];
}

function copyButton(words, label, text) {
  const button = el("button", { type: "button", class: "link", "aria-label": label }, words);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      button.textContent = "not allowed";
    }
  });
  return button;
}
