// Walks from dot to dot of a chart by keyboard. To assistive technology the plot is a slider whose value is a trial in words.

import { el } from "./dom.js";

const STRIDE = 10; // dots that Page Up and Page Down skip

/** The index that a key leads to from `at` among `count` dots; null for any other key. */
export function stepOf(key, at, count) {
  const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: STRIDE, PageDown: -STRIDE, Home: -count, End: count };
  return Object.hasOwn(steps, key) ? Math.min(count - 1, Math.max(0, at + steps[key])) : null;
}

/**
 * A ring around one dot of a plot, and the words about it below: { ring, words } are elements.
 *
 * The dots are { count, start, at(index) }: `start` is the first that gets the ring, `at` gives { value: [x, y], words, open() }.
 */
export class ChartCursor {
  constructor(plot) {
    this.plot = plot;
    this.ring = el("div", { class: "ring", hidden: true, "aria-hidden": "true" });
    this.words = el("p", { class: "line", "aria-hidden": "true" });
    this.dots = null;
    this.index = null; // the dot that the keyboard reached; it stays when the focus leaves
    this.marked = null; // the dot that has the ring
    this.instance = null;
    plot.addEventListener("keydown", (event) => this.pressed(event));
    plot.addEventListener("focus", () => {
      if (this.dots && plot.matches(":focus-visible")) this.mark(this.index);
    });
    plot.addEventListener("blur", () => this.mark(null));
  }

  /** Takes the dots of what the plot shows now; null makes it a picture. */
  follow(dots, summary) {
    this.dots = dots && dots.count ? dots : null;
    const { plot } = this;
    plot.setAttribute("aria-label", summary);
    if (!this.dots) {
      plot.setAttribute("role", "img");
      for (const name of ["tabindex", "aria-valuemin", "aria-valuemax", "aria-valuenow", "aria-valuetext"]) plot.removeAttribute(name);
      this.mark(null);
      return;
    }
    plot.setAttribute("role", "slider");
    plot.setAttribute("tabindex", "0");
    this.index = Math.min(this.index ?? dots.start, dots.count - 1);
    if (this.marked !== null && this.marked >= dots.count) this.marked = null;
    this.tell();
    this.mark(this.marked);
  }

  /** Takes the chart that draws; the ring moves with its zoom. */
  attach(instance) {
    this.instance = instance;
    instance.on("datazoom", () => this.place());
  }

  /** Puts the ring around a dot; null takes it away. */
  mark(index) {
    this.marked = this.dots ? index : null;
    this.words.textContent = this.marked === null ? "" : this.dots.at(this.marked).words;
    this.place();
  }

  /** Puts the ring where its dot is drawn now. */
  place() {
    this.ring.hidden = true;
    if (this.marked === null || !this.instance) return;
    const at = this.instance.convertToPixel("grid", this.dots.at(this.marked).value);
    if (!at || !this.instance.containPixel("grid", at)) return;
    this.ring.style.setProperty("left", `${at[0]}px`);
    this.ring.style.setProperty("top", `${at[1]}px`);
    this.ring.hidden = false;
  }

  tell() {
    const { plot, dots, index } = this;
    plot.setAttribute("aria-valuemin", "1");
    plot.setAttribute("aria-valuemax", String(dots.count));
    plot.setAttribute("aria-valuenow", String(index + 1));
    plot.setAttribute("aria-valuetext", dots.at(index).words);
  }

  pressed(event) {
    if (!this.dots || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.dots.at(this.index).open();
      return;
    }
    const next = stepOf(event.key, this.index, this.dots.count);
    if (next === null) return;
    event.preventDefault();
    this.index = next;
    this.tell();
    this.mark(next);
    this.words.scrollIntoView({ block: "nearest" });
  }
}
