// The start of the page: source, addresses, live changes, and one page at a time.

import { drawAll } from "./chart.js";
import { comparePage } from "./compare_page.js";
import { el, replaceChildren } from "./dom.js";
import { formatMoment } from "./format.js";
import { overviewPage } from "./overview_page.js";
import { recordsPage } from "./records_page.js";
import { replayPage } from "./replay_page.js";
import { parseRoute, routeTo } from "./router.js";
import { runPage, runsPage } from "./runs_page.js";
import { openSource } from "./source.js";
import { taskPage } from "./task_page.js";
import { startTheme } from "./theme.js";
import { trialPage } from "./trial_page.js";

// A page is { title, paths(route), make(context) }: it needs the answers of these paths. `make` gives
// { element, show(answers, route), title(answers), dispose() }; `show` is called again whenever an answer changed.
const PAGES = {
  overview: overviewPage,
  task: taskPage,
  trial: trialPage,
  runs: runsPage,
  run: runPage,
  compare: comparePage,
  records: recordsPage,
  replay: replayPage,
};
const PARTS = { task: "overview", trial: "overview", run: "runs" }; // page -> the link of the navigation that it belongs to

const main = document.getElementById("main");
let source = null;
let current = null; // { page, paths, view, route }
let wanted = 0; // counts loads, so that a late answer does not replace a newer page

let pages = ["overview"]; // those on which there is something to see

function drawNavigation(page) {
  const part = PARTS[page] ?? page;
  replaceChildren(
    document.getElementById("nav"),
    pages.map((name) =>
      el("a", { href: routeTo(name), "aria-current": name === part ? "page" : null, data: { key: name } }, PAGES[name].title),
    ),
  );
}

async function updateNavigation(page) {
  try {
    ({ pages } = await source.get("overview"));
  } catch {
    return; // the page itself says that there is no data
  }
  drawNavigation(page);
}

async function navigate() {
  const route = parseRoute(location.hash);
  const page = Object.hasOwn(PAGES, route.page) ? PAGES[route.page] : null;
  drawNavigation(route.page);
  updateNavigation(route.page);
  if (!page) {
    showProblem("There is no such page", `This address names the page “${route.page}”.`);
    return;
  }
  const paths = page.paths(route);
  const moved = !current || current.page !== page || current.paths.join() !== paths.join();
  await load(page, route, paths, moved);
}

async function load(page, route, paths, moved) {
  wanted += 1;
  const turn = wanted;
  let answers;
  try {
    answers = await Promise.all(paths.map((path) => source.get(path)));
  } catch (problem) {
    // What a page showed stays while its server is gone. If the server says that there is no such thing any more, the page says so.
    if (turn === wanted && (moved || problem.final)) showProblem("This page has no data", problem.message);
    return;
  }
  if (turn !== wanted) return;
  if (moved) {
    closePage();
    const view = page.make({ source, route, announce });
    current = { page, paths, view, route };
    replaceChildren(main, view.element);
    view.show(answers, route);
    document.title = `${view.title?.(answers) ?? page.title} – schedsearch`;
    main.setAttribute("data-page", route.page);
    if (navigated) {
      window.scrollTo(0, 0);
      main.focus({ preventScroll: true });
    }
    navigated = true;
  } else {
    current.route = route;
    current.view.show(answers, route);
  }
  main.setAttribute("data-ready", String(turn));
}

let navigated = false;

function closePage() {
  current?.view.dispose?.();
  current = null;
}

function showProblem(title, words) {
  closePage();
  replaceChildren(
    main,
    el("div", { class: "head" }, el("h1", {}, title), el("p", { class: "problem" }, words), el("p", {}, el("a", { href: routeTo("overview") }, "To the overview"))),
  );
  document.title = `${title} – schedsearch`;
  main.setAttribute("data-ready", "problem");
}

/** Says `words` to screen readers. */
function announce(words) {
  document.getElementById("announce").textContent = words;
}

// Changes come faster than pages can be drawn when a tuner is quick, so one load runs at a time and one waits.
let loading = false;
let waiting = false;

async function refresh() {
  if (loading) {
    waiting = true;
    return;
  }
  loading = true;
  try {
    updateNavigation(current?.route.page);
    if (current) await load(current.page, current.route, current.paths, false);
    else await navigate();
  } finally {
    loading = false;
  }
  if (waiting) {
    waiting = false;
    setTimeout(refresh, 150);
  }
}

/** Whether a page that is shown needs an answer that changed. */
function concerns(changed) {
  return !current || current.paths.some((path) => changed.includes(path.split("?")[0]));
}

function followServer() {
  const line = document.getElementById("connection");
  const say = (state, words) => {
    if (line.dataset.state === state) return;
    line.dataset.state = state;
    line.textContent = words;
  };
  let gone = false;
  source.watch((event, data) => {
    if (event === "gone") {
      gone = true;
      say("gone", "The server is gone; what you see is the last state. Reconnecting …");
      return;
    }
    say("open", "Live");
    if (gone || (event === "change" && concerns(data.paths))) refresh();
    else if (event === "change") updateNavigation(current?.route.page);
    gone = false;
  });
}

async function start() {
  const boot = JSON.parse(document.getElementById("boot").textContent);
  startTheme(document.getElementById("theme"), drawAll);
  try {
    source = await openSource(boot, document.getElementById("data").textContent.trim());
  } catch (problem) {
    showProblem("The data of this report cannot be read", `The browser is too old, or the file is damaged (${problem.message}).`);
    return;
  }
  const made = boot.live ? `schedsearch ${boot.version}` : `A report of schedsearch ${boot.version}, made ${formatMoment((await source.get("overview")).now_s)}.`;
  document.getElementById("foot").textContent = made;
  window.addEventListener("hashchange", (event) => {
    if (location.hash === "#main") history.replaceState(null, "", new URL(event.oldURL).hash || "#/");
    else navigate();
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  if (source.live) followServer();
  await navigate();
}

start();
