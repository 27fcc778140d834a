// Parts about runs, for the overview and for the pages of runs.

import { el } from "./dom.js";
import { deviceName, formatCount, formatDuration, formatMoment, formatPercent, plural, significant } from "./format.js";
import { routeTo } from "./router.js";

export const RUN_STATES = { running: "running", silent: "quiet without an end", finished: "finished", interrupted: "interrupted" };
const STOPPED = { trials: "all trials were spent", time: "its time was spent", exhausted: "every configuration was tried", interrupted: "its user stopped it", lost: "its last device was lost" };

/** State, device, tuner and start of a run as a line. */
export function runLine(run) {
  return el("p", { class: "line" }, [
    el("span", { class: `tag ${run.state === "running" ? "good" : run.state === "silent" ? "bad" : ""}` }, RUN_STATES[run.state]),
    ` ${deviceName(run.target)}, tuner ${run.tuner}${run.seed === null ? "" : `, seed ${run.seed}`}, started ${formatMoment(run.started_at_s)}`,
    run.stopped ? `; it ended because ${STOPPED[run.stopped] ?? run.stopped}` : "",
  ]);
}

/** How far a run is: facts as `facts` takes them. */
export function runFacts(run) {
  const used = run.budget_trials ? run.trials / run.budget_trials : run.budget_s ? run.wall_s / run.budget_s : null;
  return [
    run.state === "running" ? ["Time left", formatDuration(run.left_s), run.phase === "racing" ? "then final races, which have begun" : "estimate, without final races"] : ["Took", formatDuration(run.wall_s)],
    ["Budget used", used === null ? "no limit" : formatPercent(Math.min(1, used)), budgetWords(run)],
    ["Speed", run.trials_per_s === null ? null : `${significant(run.trials_per_s)} /s`, "trials a second"],
  ];
}

function budgetWords(run) {
  if (run.budget_trials) return `${formatCount(run.trials)} of ${plural(run.budget_trials, "trial")}`;
  if (run.budget_s) return `${formatDuration(run.wall_s)} of ${formatDuration(run.budget_s)}`;
  return plural(run.trials, "trial");
}

const SHARE_NAMES = { device: "device measures", build: "waiting for builds", tuner: "waiting for the tuner", preparing: "preparing", other: "other" };

/** Where the wall time of a run goes: null if it is not known. */
export function timeShares(shares) {
  const parts = Object.entries(SHARE_NAMES)
    .map(([name, label]) => ({ label, share: shares[name] }))
    .filter((part) => part.share !== null);
  const known = parts.reduce((sum, part) => sum + part.share, 0);
  if (parts.length === 1) parts.push({ label: "the rest, which was not recorded", share: Math.max(0, 1 - known) });
  return shareBar("Where the wall time goes", parts, `${significant(shares.builders_busy, 2)} builders busy on average`);
}

/** Which tasks a run's seconds went to; null with fewer than two. */
export function budgetShares(run, { tasks }) {
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
