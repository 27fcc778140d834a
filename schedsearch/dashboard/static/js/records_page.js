// Every record with filters, failures too.

import { el, replaceChildren } from "./dom.js";
import { doubtMark } from "./doubts.js";
import { deviceName, formatCount, formatMoment, formatTime, formatValue, plural, shorten } from "./format.js";
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
const NEWEST = { label: "Measured", descending: true };
// Columns by which the server can sort: its name of the column, and what comes first.
const SORTS = { Record: ["id", "first", "last"], Time: ["time_ns", "fastest", "slowest"], Measured: ["at_s", "oldest", "newest"] };

function makeRecords({ source, announce }) {
  let latest = null;
  const chosen = { text: "", task: ALL, template: ALL, outcome: ALL, run: ALL };
  let order = NEWEST;
  let turn = 0;
  const table = dataTable({ columns: [], rows: [], caption: "Records", className: "cards one-line", pageSize: 100, rowKey: (row) => row.key, sort: NEWEST, onsort: sorted });
  const same = el("p", { class: "same" });
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
  const pickers = { task: pick("Task", "task"), template: pick("Template", "template"), outcome: pick("Outcome", "outcome"), run: pick("Run", "run") };

  function sorted(sort) {
    order = sort;
    if (isServerNeeded()) askSoon();
    else showHeld();
  }

  function show(records) {
    latest = records;
    pickers.task.show([ALL, ...records.tasks.map((task) => [task.key, `${task.name} · ${deviceName(task.target)}`])], chosen.task);
    pickers.template.show([ALL, ...new Set(records.tasks.flatMap((task) => task.templates.map((item) => item.template)))], chosen.template);
    pickers.outcome.show([ALL, FAILURES, "ok", ...new Set(records.tasks.flatMap((task) => Object.keys(task.failures)))], chosen.outcome);
    pickers.run.show([ALL, ...Object.keys(records.runs).filter(Boolean)], chosen.run);
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
    const held = fill(latest);
    tell(isFiltered() ? held : latest.total, held);
  }

  function fill(records) {
    const rows = recordRows(records);
    const words = chosen.text.toLowerCase().split(/\s+/).filter(Boolean);
    const columns = recordColumns(records, rows.filter((row) => matches(row, chosen, words)));
    same.textContent = columns.same;
    return table.update(rows, columns.columns);
  }

  function isFiltered() {
    return chosen.text !== "" || [chosen.task, chosen.template, chosen.outcome, chosen.run].some((value) => value !== ALL);
  }

  function isServerNeeded() {
    const other = SORTS[order.label] && (order.label !== NEWEST.label || !order.descending);
    return (isFiltered() || other) && source.live && latest.total > latest.records.id.length;
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
    if (chosen.run !== ALL) query.set("run", chosen.run);
    if (SORTS[order.label]) query.set("sort", SORTS[order.label][0]);
    query.set("descending", order.descending || !SORTS[order.label] ? "1" : "0");
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
    fill(found);
    tell(found.total, found.records.id.length);
    announce(count.textContent);
  }

  function tell(matched, held) {
    const [, ascending, descending] = SORTS[order.label] ?? SORTS.Measured;
    const which = isServerNeeded() && SORTS[order.label] && !order.descending ? ascending : isServerNeeded() ? descending : "newest";
    const words = matched === latest.total ? plural(matched, "record") : `${formatCount(matched)} of ${plural(latest.total, "record")}`;
    count.textContent = `${words}${held < matched ? `; the ${which} ${formatCount(held)} are listed` : ""}.`;
  }

  return {
    element: el(
      "div",
      { class: "page" },
      el("div", { class: "head" }, el("h1", {}, "Every record"), el("div", { class: "controls" }, el("label", {}, "Search", search), Object.values(pickers).map((item) => item.element)), count, same, notices),
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
  if (chosen.run !== ALL && row.run !== chosen.run) return false;
  if (words.length === 0) return true;
  const text = `${row.config} ${row.message}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

/** Rows of the columns of a RecordsView. */
export function recordRows({ records, tasks, knobs, runs, shell_paths: paths }) {
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
      doubt: records.doubt[index],
      race: records.race[index],
      config: records.config[index],
      knobs: new Map((knobs[records.template[index]] ?? []).map((name, place) => [name, records.values[index][place]])),
      run: records.run[index],
      run_key: runs[records.run[index]] ?? null,
      message: records.message[index],
      command: `schedsearch records show ${id} --db ${paths[task.database]}`,
      at_s: records.at_s[index],
    };
  });
}

/**
 * The columns for the records that are shown, and the knobs that all of them share, in words: { columns, same }.
 *
 * Records of one template have a column for each knob that varies, others one column for their configuration. What is the
 * same in all of them has no column.
 */
function recordColumns({ knobs, varying }, shown) {
  const several = (field) => new Set(shown.map((row) => row[field])).size > 1;
  const templates = [...new Set(shown.map((row) => row.template))];
  const [template] = templates;
  const isOne = templates.length === 1;
  const differ = isOne ? varying[template].filter((name) => new Set(shown.map((row) => row.knobs.get(name))).size > 1) : [];
  const alike = isOne ? knobs[template].filter((name) => !differ.includes(name)) : [];
  const knobColumn = (name) => ({ label: name, numeric: shown.every((row) => typeof (row.knobs.get(name) ?? 0) === "number"), value: (row) => row.knobs.get(name) ?? null, show: (row) => formatValue(row.knobs.get(name)) });
  const columns = [
    { label: "Record", value: (row) => row.id, show: (row) => el("a", { href: routeTo("trial", [row.key]), data: { key: row.key } }, String(row.id)) },
    { label: "Time", numeric: true, className: "strong", value: (row) => row.time_ns, show: (row) => (row.doubt ? [doubtMark(row.doubt), " ", formatTime(row.time_ns)] : formatTime(row.time_ns)) },
    {
      label: "Outcome",
      value: (row) => row.outcome,
      show: (row) => [el("span", { class: row.outcome === "ok" ? "" : "bad" }, row.outcome.replaceAll("_", " ")), row.race ? el("small", {}, " race") : null],
    },
    several("task_key") ? { label: "Task", value: (row) => row.task } : null,
    several("template") ? { label: "Template", value: (row) => row.template } : null,
    { label: "Run", value: (row) => row.run, show: (row) => (row.run_key ? el("a", { href: routeTo("run", [row.run_key]) }, shortRun(row.run)) : row.run) },
    ...(isOne ? differ.map(knobColumn) : [{ label: "Config", className: "config", value: (row) => row.config }]),
    shown.some((row) => row.message) ? { label: "Message", className: "config", value: (row) => row.message } : null,
    { label: "Measured", value: (row) => row.at_s, show: (row) => formatMoment(row.at_s) },
    { label: "Copy", value: (row) => row.id, show: (row) => [copyButton("config", "Copy the config", row.config), copyButton("command", "Copy the command that shows this record", row.command)] },
  ].filter(Boolean);
  const first = shown[0]?.knobs;
  const same = alike.length && first ? `The same in all of them: ${alike.map((name) => `${name}=${formatValue(first.get(name))}`).join(", ")}.` : "";
  return { columns, same };
}

/** The part of a run's id that tells it from others: "20261128T112344-76d547b0" -> "76d547b0". */
function shortRun(id) {
  return /^\d{8}T\d{6}-(\w+)$/.exec(id)?.[1] ?? shorten(id, 12);
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
