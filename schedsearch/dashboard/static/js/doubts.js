// Marks beside times that are not to be trusted.

import { el } from "./dom.js";

const DOUBTS = { noisy: "noisy", bimodal: "two groups" };

/** A mark beside a time; null for a time without doubt. */
export function doubtMark(doubt) {
  return doubt ? el("span", { class: "tag bad" }, DOUBTS[doubt]) : null;
}

/** Sentences about doubts as one notice; null without any. */
export function doubtNotice(sentences) {
  return sentences.length ? el("p", { class: "problem" }, `Not to be trusted: ${sentences.join("; ")}.`) : null;
}
