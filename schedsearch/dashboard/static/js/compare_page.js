// Two runs, databases or cards: which one is faster, where, and what their best configurations have in common.

import { Chart, lines, nameAxis, plotGrid, ratioAxis, tooltip } from "./chart.js";
import { doubtMark } from "./doubts.js";
import { el, emptyNote, facts, replaceChildren, section } from "./dom.js";
import { deviceName, formatChange, formatCount, formatPercent, formatRatio, formatTime, formatValue, plural, shorten } from "./format.js";
import { routeTo } from "./router.js";
import { dataTable } from "./table.js";

export const comparePage = {
  title: "Compare",
  paths: ({ parts }) => (parts.length >= 2 ? ["overview", `compare/${encodeURIComponent(parts[0])}/${encodeURIComponent(parts[1])}`] : ["overview"]),
  make: makeCompare,
};

function makeCompare({ source, route }) {
  const chooser = sideChooser(source);
  const result = el("div", { class: "page" });
  const ratios = ratioChart();
  const view = {
    element: el("div", { class: "page" }, el("div", { class: "head" }, el("h1", {}, "How do two sides compare?"), chooser.element), result),
    show([overview, comparison]) {
      chooser.show(overview, comparison);
      if (comparison) showComparison(result, comparison, ratios);
      else {
        const pair = firstPair(overview, source.live);
        if (pair && route.parts.length === 0) location.replace(routeTo("compare", pair));
        else replaceChildren(result, emptyNote(noSides(overview, source.live)));
      }
    },
    dispose: () => ratios.dispose(),
  };
  return view;
}

function firstPair({ sides, compared }, live) {
  if (!live) return compared[0] ?? null;
  if (sides.length < 2) return null;
  for (const kind of ["database", "target", "run"]) {
    const alike = sides.filter((side) => side.kind === kind);
    if (alike.length >= 2) return [alike[alike.length - 2].key, alike[alike.length - 1].key];
  }
  return [sides[0].key, sides[1].key];
}

function noSides({ sides }, live) {
  if (sides.length < 2) return "There is only one side: one run on one device in one database. Name a second database, or tune once more.";
  return live ? "Choose two sides." : "This report holds no comparison.";
}

const KINDS = { database: "Databases", target: "Devices", run: "Runs" };

function sideChooser(source) {
  const selects = ["A", "B"].map((name) => el("select", { id: `side-${name}`, onchange: go }));
  const element = el("div", { class: "controls" }, selects.map((select, index) => el("label", {}, `Side ${"AB"[index]}`, select)), el("button", { type: "button", class: "quiet", onclick: swap }, "Swap"));
  let pairs = null;
  function go() {
    location.hash = routeTo("compare", selects.map((select) => select.value));
  }
  function swap() {
    [selects[0].value, selects[1].value] = [selects[1].value, selects[0].value];
    go();
  }
  return {
    element,
    show({ sides, compared }, comparison) {
      element.hidden = sides.length < 2;
      pairs = source.live ? null : new Set(compared.flat());
      const usable = pairs ? sides.filter((side) => pairs.has(side.key)) : sides;
      const groups = () =>
        Object.entries(KINDS).map(([kind, label]) => {
          const members = usable.filter((side) => side.kind === kind);
          return members.length ? el("optgroup", { label }, members.map((side) => el("option", { value: side.key }, shorten(side.label, 70)))) : null;
        });
      const key = JSON.stringify(usable);
      if (element.dataset.sides !== key) selects.forEach((select) => replaceChildren(select, groups()));
      element.dataset.sides = key;
      if (comparison) {
        selects[0].value = comparison.a.key;
        selects[1].value = comparison.b.key;
      }
    },
  };
}

const VERDICTS = { faster: "B is faster", slower: "B is slower", same: "no difference shown", unknown: "not known" };

function showComparison(result, comparison, ratios) {
  const { rows, geomean, low, high, verdict, counts, trusted_tasks: trusted, doubtful, only_a: onlyA, only_b: onlyB } = comparison;
  replaceChildren(
    result,
    facts([
      ["B against A", formatRatio(geomean), geomean === null ? (rows.length ? "no time can be trusted" : "no task in common") : `${VERDICTS[verdict]}; ${trusted > 1 ? `geometric mean of ${trusted} tasks` : "one task"}`],
      ["95 % interval", low === null ? "not known" : `${formatRatio(low)} to ${formatRatio(high)}`, low === null ? "too few repetitions or tasks" : "of tasks and repetitions"],
      ...["faster", "slower", "same"].map((each) => [capital(VERDICTS[each]), formatCount(counts[each]), `of ${plural(rows.length, "task")}`]),
      counts.unknown ? ["Not known", formatCount(counts.unknown), "too few repetitions, or two groups"] : null,
      doubtful ? ["Not to be trusted", formatCount(doubtful), "noisy, or two groups of times"] : null,
    ]),
    comparison.notes.map((note) => el("p", { class: "notice" }, note)),
    rows.length === 0
      ? emptyNote("The two sides have no task in common that has a valid trial on both.")
      : [section("Where is B faster?", ratios.element), section("Where do the best configurations differ?", comparisonTable(comparison)), section("What transfers?", transferTable(rows))],
    onlyA.length + onlyB.length ? section("Without a partner", partnerLists(comparison)) : null,
  );
  if (rows.length) ratios.show(comparison);
}

function capital(words) {
  return words[0].toUpperCase() + words.slice(1);
}

function ratioChart() {
  const chart = new Chart({ title: "Ratio of times, A over B", help: "Right of 1, B is faster; the axis is logarithmic, so that twice as fast and half as fast are equally far from 1. The line is the 95 % interval of the ratio: a difference is shown if it does not contain 1. There is none where the repetitions of a side fall into two groups.", height: 18 });
  return {
    element: chart.element,
    show({ rows }) {
      const sorted = [...rows].sort((a, b) => b.ratio - a.ratio);
      const shown = sorted.length > 60 ? [...sorted.slice(0, 30), ...sorted.slice(-30)] : sorted;
      chart.plot.style.setProperty("height", `${5 + shown.length * 1.6}rem`);
      const devices = new Set(rows.map((row) => row.target_a));
      const nameOf = (row) => (devices.size > 1 ? `${shorten(row.name, 20)}, ${deviceName(row.target_a)}` : row.name);
      const ends = shown.flatMap((row) => [row.ratio, row.low ?? row.ratio, row.high ?? row.ratio, 1]);
      const [least, most] = [Math.min(...ends), Math.max(...ends)];
      chart.show({
        summary: `Ratio of the times of ${plural(rows.length, "task")}: from ${formatRatio(least)} to ${formatRatio(most)}.`,
        option: (colors) => {
          const look = { faster: colors.series[0], slower: colors.series[1], same: colors.series[7], unknown: colors.series[7] };
          return {
            grid: plotGrid(colors, { top: colors.fontPx * 0.6, right: colors.fontPx * 2 }),
            xAxis: ratioAxis(colors, { name: "time of A over time of B, log", ends }),
            yAxis: nameAxis(colors, { names: shown.map((row) => nameOf(row)), vertical: true, inverse: true, axisLabel: { color: colors.text, fontSize: colors.fontPx, formatter: (name) => shorten(name, 34) } }),
            tooltip: tooltip(colors, {
              trigger: "item",
              formatter: ({ dataIndex }) => {
                const row = shown[dataIndex];
                return row ? lines(nameOf(row), VERDICTS[row.verdict], `ratio: ${formatRatio(row.ratio)}`, row.low === null ? "" : `95 % interval: ${formatRatio(row.low)} to ${formatRatio(row.high)}`, `A: ${formatTime(row.a.time_ns)}, B: ${formatTime(row.b.time_ns)}`, row.a.doubt ? "A is not to be trusted" : "", row.b.doubt ? "B is not to be trusted" : "") : "";
              },
            }),
            series: [
              {
                type: "custom",
                id: "ratios",
                encode: { x: [0, 2, 3], y: 1 },
                data: shown.map((row, at) => [row.ratio, at, row.low ?? row.ratio, row.high ?? row.ratio]),
                markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: colors.text, type: "dashed" }, data: [{ xAxis: 1 }] },
                renderItem: ({ dataIndexInside }, api) => {
                  const color = look[shown[dataIndexInside].verdict];
                  const [x, y] = api.coord([api.value(0), api.value(1)]);
                  const [from] = api.coord([api.value(2), api.value(1)]);
                  const [to] = api.coord([api.value(3), api.value(1)]);
                  return {
                    type: "group",
                    children: [
                      { type: "line", shape: { x1: from, y1: y, x2: to, y2: y }, style: { stroke: color, lineWidth: 2 } },
                      { type: "circle", shape: { cx: x, cy: y, r: colors.fontPx * 0.42 }, style: { fill: color, stroke: colors.surface, lineWidth: 1.5 } },
                    ],
                  };
                },
              },
            ],
          };
        },
        table: () => ({ rows: sorted, columns: ratioColumns() }),
      });
    },
    dispose: () => chart.dispose(),
  };
}

function ratioColumns() {
  return [
    { label: "Task", value: (row) => row.name, show: (row) => [row.name, el("br"), el("small", {}, [row.label === row.name ? null : row.label, deviceName(row.target_a)].filter(Boolean).join(" · "))] },
    { label: "A", numeric: true, value: (row) => row.a.time_ns, show: (row) => bestCell(row.a) },
    { label: "B", numeric: true, value: (row) => row.b.time_ns, show: (row) => bestCell(row.b) },
    { label: "A over B", numeric: true, className: "strong", value: (row) => row.ratio, show: (row) => formatRatio(row.ratio) },
    { label: "95 % interval", numeric: true, value: (row) => row.low, show: (row) => (row.low === null ? null : `${formatRatio(row.low)} to ${formatRatio(row.high)}`) },
    { label: "Verdict", value: (row) => row.verdict, show: (row) => el("span", { class: { slower: "tag bad", faster: "tag good" }[row.verdict] ?? "tag" }, VERDICTS[row.verdict]) },
  ];
}

function bestCell(best) {
  const link = el("a", { href: routeTo("trial", [best.trial]) }, formatTime(best.time_ns));
  return best.doubt ? [link, el("br"), doubtMark(best.doubt)] : link;
}

function comparisonTable({ rows }) {
  const columns = [
    ...ratioColumns(),
    {
      label: "Best configurations differ in",
      className: "wide",
      value: (row) => row.differences.length,
      show: (row) => {
        if (row.a.template !== row.b.template) return `templates: ${row.a.template} and ${row.b.template}`;
        if (row.differences.length === 0) return "nothing";
        return el("span", { class: "knobs" }, row.differences.map((item) => el("span", {}, el("b", {}, item.knob), ` ${formatValue(item.here)} → ${formatValue(item.best)}`)));
      },
    },
  ];
  return dataTable({ columns, rows, caption: "Tasks of both sides", className: "cards" }).element;
}

function transferTable(rows) {
  const known = rows.filter((row) => row.a_on_b_ns !== null || row.b_on_a_ns !== null);
  if (known.length === 0) return emptyNote("Neither side measured the best configuration of the other.");
  const columns = [
    { label: "Task", value: (row) => row.name, show: (row) => [row.name, el("br"), el("small", {}, deviceName(row.target_a))] },
    { label: "Best of A on B", numeric: true, value: (row) => row.a_on_b_ns, show: (row) => formatTime(row.a_on_b_ns) },
    { label: "against B's best", numeric: true, className: "strong", value: (row) => row.a_on_b_ns && row.a_on_b_ns / row.b.time_ns, show: (row) => (row.a_on_b_ns === null ? null : formatChange(row.a_on_b_ns / row.b.time_ns)) },
    { label: "Best of B on A", numeric: true, value: (row) => row.b_on_a_ns, show: (row) => formatTime(row.b_on_a_ns) },
    { label: "against A's best", numeric: true, className: "strong", value: (row) => row.b_on_a_ns && row.b_on_a_ns / row.a.time_ns, show: (row) => (row.b_on_a_ns === null ? null : formatChange(row.b_on_a_ns / row.a.time_ns)) },
  ];
  const near = known.filter((row) => row.a_on_b_ns !== null && row.a_on_b_ns <= 1.05 * row.b.time_ns).length;
  const tried = known.filter((row) => row.a_on_b_ns !== null).length;
  return [
    tried ? el("p", { class: "line" }, `A's best is within 5 % of B's best in ${formatPercent(near / tried)} of ${plural(tried, "task")} where B measured it.`) : null,
    dataTable({ columns, rows: known, caption: "What transfers" }).element,
  ];
}

function partnerLists({ a, b, only_a: onlyA, only_b: onlyB }) {
  const list = (side, names) => (names.length ? el("div", {}, el("h3", {}, `Only in ${side.label}`), el("ul", {}, names.map((name) => el("li", {}, name)))) : null);
  return el("div", { class: "charts" }, list(a, onlyA), list(b, onlyB));
}
