// Elements built without markup: every text goes in as text, so names and messages of others cannot become elements.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element with properties and children.
 *
 * `on...` properties become listeners, `class` and `aria-...` attributes, `data` the dataset. Children are elements,
 * texts, numbers or arrays of these; null, undefined and false are left out.
 */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** As `el`, for elements of SVG. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replaces the children of `element`. The focus stays on the child that carries the same data-key, if there is one. */
export function replaceChildren(element, ...children) {
  keepFocus(element, () => element.replaceChildren(...flat(children)));
}

/** Calls `change`, which replaces parts of `element`. The focus stays on the part that carries the same data-key, if there is one. */
export function keepFocus(element, change) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset?.key : undefined;
  change();
  if (focused === undefined) return;
  for (const candidate of element.querySelectorAll("[data-key]")) {
    if (candidate.dataset.key === focused) {
      candidate.focus({ preventScroll: true });
      return;
    }
  }
}

/** A section of a page, with the question that it answers as its heading. */
export function section(title, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), children);
}

/**
 * A section that is one line as long as there is nothing to see in it: { element, fold(words) }.
 *
 * `fold` takes the reason, or "" to show the content.
 */
export function foldingSection(title, ...children) {
  const why = el("p", { class: "why", hidden: true });
  const element = section(title, why, children);
  return {
    element,
    fold(words) {
      element.classList.toggle("folded", Boolean(words));
      why.hidden = !words;
      why.textContent = words ?? "";
    },
  };
}

/** A folding section of charts: { element, settle(isFull) }. Charts that have nothing to draw are hidden; without any, it folds
 * unless `isFull` says that there is something else. */
export function chartSection(title, charts, ...children) {
  const { element, fold } = foldingSection(title, ...children);
  return {
    element,
    settle(isFull = false) {
      for (const chart of charts) for (const part of [chart.element].flat()) part.hidden = Boolean(chart.emptyWords);
      const empty = charts.every((chart) => chart.emptyWords);
      fold(empty && !isFull ? charts[0].emptyWords : "");
    },
  };
}

/** A paragraph that says why there is nothing to see. */
export function emptyNote(...words) {
  return el("p", { class: "empty" }, words);
}

/** Facts as a description list: [[label, value, note], ...]; a value may be text or an element. */
export function facts(pairs, className = "facts") {
  return el(
    "dl",
    { class: className },
    pairs.filter(Boolean).map(([label, value, note]) =>
      el("div", {}, el("dt", {}, label), el("dd", {}, value, note ? el("small", {}, note) : null)),
    ),
  );
}

/** Text in a box with a button that copies it. */
export function copyBox(text, label) {
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy ${label}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  const code = el("code", {}, text);
  return el("div", { class: "copy" }, el("pre", { tabindex: "0", role: "group", "aria-label": label }, code), button);
}
