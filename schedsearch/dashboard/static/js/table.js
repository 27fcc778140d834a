// Tables that sort, filter by page, and stay as the reader left them when their rows change.

import { el, keepFocus, replaceChildren } from "./dom.js";
import { UNKNOWN, plural } from "./format.js";

/** Order of two values of a column: numbers before texts, unknown values always last. */
export function compareValues(a, b, descending) {
  const aMissing = a === null || a === undefined || Number.isNaN(a);
  const bMissing = b === null || b === undefined || Number.isNaN(b);
  if (aMissing || bMissing) return Number(aMissing) - Number(bMissing);
  const order =
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
  return descending ? -order : order;
}

/**
 * A table: { element, update(rows, columns), setFilter(predicate) }.
 *
 * A column is { label, value(row), show?(row), numeric?, className?, sort? }: `value` is what it sorts by, `show` gives the text or element
 * of the cell (without it, the value). `sort` is { label, descending } at the start; null keeps the order of the rows. It
 * stays as long as there is a column of this label, and `onsort` hears of each choice. `group` is { of(row), head(key) }: rows
 * of a group stand together below its head, groups in the order of their first row.
 */
export function dataTable({ columns, rows, caption, sort = null, pageSize = 50, className = "", rowKey = null, group = null, onsort = null }) {
  const state = { columns, rows, sort, shown: pageSize, filter: null };
  const head = el("thead");
  const table = el("table", { class: className }, el("caption", {}, caption), head);
  const more = el("button", { type: "button", class: "quiet", data: { key: "more" } });
  const count = el("p", { class: "count" });
  more.addEventListener("click", () => {
    state.shown += pageSize * 4;
    draw();
  });

  function drawHead() {
    replaceChildren(
      head,
      el(
        "tr",
        {},
        state.columns.map((column, index) => {
          const sorted = state.sort?.label === column.label;
          const direction = sorted ? (state.sort.descending ? "descending" : "ascending") : null;
          return el(
            "th",
            { scope: "col", class: column.numeric ? "number" : null, "aria-sort": direction },
            el(
              "button",
              {
                type: "button",
                data: { key: `sort-${index}` },
                onclick: () => {
                  const descending = sorted ? !state.sort.descending : Boolean(column.descendingFirst);
                  state.sort = { label: column.label, descending };
                  drawHead();
                  draw();
                  onsort?.(state.sort);
                },
              },
              column.label,
              sorted ? el("span", { class: "arrow", "aria-hidden": "true" }, state.sort.descending ? " ↓" : " ↑") : null,
            ),
          );
        }),
      ),
    );
  }

  function draw() {
    let chosen = state.filter ? state.rows.filter(state.filter) : state.rows;
    const sorting = state.columns.find((column) => column.label === state.sort?.label);
    if (sorting) {
      const { value } = sorting;
      const { descending } = state.sort;
      chosen = [...chosen].sort((a, b) => compareValues(value(a), value(b), descending));
    }
    keepFocus(table, () => {
      for (const body of [...table.tBodies]) body.remove();
      table.append(...drawBodies(chosen.slice(0, state.shown)));
    });
    const left = chosen.length - state.shown;
    more.hidden = left <= 0;
    more.textContent = `Show more (${plural(Math.max(0, left), "row")} left)`;
    count.hidden = chosen.length > 0;
    count.textContent = state.rows.length === 0 ? "There are no rows." : "No row matches the filter.";
    return chosen.length;
  }

  function drawBodies(shown) {
    if (!group) return [el("tbody", {}, shown.map(drawRow))];
    const groups = new Map(state.rows.map((row) => [group.of(row), []]));
    for (const row of shown) groups.get(group.of(row)).push(row);
    const drawHeadOf = (key) => el("tr", { class: "group" }, el("th", { scope: "rowgroup", colspan: String(state.columns.length) }, group.head(key)));
    return [...groups].filter(([, members]) => members.length).map(([key, members]) => el("tbody", {}, group.head(key) ? drawHeadOf(key) : null, members.map(drawRow)));
  }

  function drawRow(row) {
    const key = rowKey?.(row);
    return el(
      "tr",
      { data: key === undefined ? {} : { row: key } },
      state.columns.map((column) => {
        const shown = column.show ? column.show(row) : column.value(row);
        return el(
          "td",
          { class: [column.numeric ? "number" : "", column.className ?? ""].join(" ").trim() || null, data: { label: column.label } },
          cellContent(shown),
        );
      }),
    );
  }

  function cellContent(shown) {
    if (shown === null || shown === undefined || shown === "") return UNKNOWN;
    return Array.isArray(shown) ? el("div", {}, shown) : shown; // one child, so that narrow pages can lay out label and content
  }

  drawHead();
  draw();
  const element = el(
    "div",
    { class: "table" },
    el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `${caption}, scrolls` }, table),
    count,
    more,
  );
  return {
    element,
    /** Shows other rows with the same filter, order and number of pages; returns how many match. */
    update(newRows, newColumns = state.columns) {
      const changed = newColumns.map((c) => c.label).join("\n") !== state.columns.map((c) => c.label).join("\n");
      state.rows = newRows;
      state.columns = newColumns;
      if (changed) drawHead();
      return draw();
    },
    /** Shows the rows for which `predicate` holds, from the first page on; returns how many there are. */
    setFilter(predicate) {
      state.filter = predicate;
      state.shown = pageSize;
      return draw();
    },
  };
}
