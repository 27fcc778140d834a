import assert from "node:assert/strict";
import test from "node:test";
import { stepOf } from "../../../schedsearch/dashboard/static/js/chart_cursor.js";
import { parseRoute, routeTo } from "../../../schedsearch/dashboard/static/js/router.js";
import { compareValues } from "../../../schedsearch/dashboard/static/js/table.js";
import * as trials from "../../../schedsearch/dashboard/static/js/trials.js";

test("addresses name pages and come back from their text", () => {
  assert.deepEqual(parseRoute(""), { page: "overview", parts: [], query: {} });
  assert.deepEqual(parseRoute("#/"), { page: "overview", parts: [], query: {} });
  for (const part of ["0.a1", "a/b", "50 %", "<img onerror>", "ü"]) {
    assert.deepEqual(parseRoute(routeTo("task", [part])), { page: "task", parts: [part], query: {} });
  }
  assert.deepEqual(parseRoute("#/compare/a/b?x=1").query, { x: "1" });
  assert.equal(routeTo("overview"), "#/");
  assert.deepEqual(parseRoute("#/task/%E0%A4%A").parts, ["%E0%A4%A"]); // not UTF-8: taken as it is
});

test("tables order numbers by size, texts by their numbers, unknown values last", () => {
  const sorted = (values, descending) => [...values].sort((a, b) => compareValues(a, b, descending));
  assert.deepEqual(sorted([10, null, 9], false), [9, 10, null]);
  assert.deepEqual(sorted([10, null, 9], true), [10, 9, null]);
  assert.deepEqual(sorted(["k10", "k9", undefined], false), ["k9", "k10", undefined]);
});

const TASK = {
  knobs: [
    { template: "one", names: ["tile", "order"], values: [[32, 64], ["row", "column"]] },
    { template: "two", names: ["lanes"], values: [[4]] },
  ],
  trials: {
    id: [11, 12, 13, 14],
    template: [0, 1, 0, 0],
    config: [[1, 0], [0], [0, null], [1, 1]],
    counted: [true, true, false, false],
    race: [false, false, false, true],
    time_ns: [50, 40, null, 45],
    tuning_s: [1, 2, 3, 4],
  },
};

test("a config is read from the indices of its values; knobs that it lacks are left out", () => {
  assert.deepEqual(trials.trialConfig(TASK, 0), [["tile", 64], ["order", "row"]]);
  assert.deepEqual(trials.trialConfig(TASK, 2), [["tile", 32]]);
  assert.equal(trials.configText(trials.trialConfig(TASK, 1)), "lanes=4");
  assert.equal(trials.templateOf(TASK, 1), "two");
});

test("the search has neither static rejects nor final races", () => {
  assert.deepEqual(trials.searchTrials(TASK), { positions: [0, 1], numbers: [1, 2], seconds: [1, 2] });
  assert.deepEqual(trials.fastestTrials(TASK), [1, 0]);
});

test("long configs are cut for tooltips", () => {
  const pairs = Array.from({ length: 30 }, (_, index) => [`knob${index}`, index]);
  const lines = trials.configLines(pairs, 20, 3);
  assert.equal(lines.length, 4);
  assert.equal(lines[3], "…");
  assert.ok(lines.every((line) => line.length <= 20));
});

test("the extent of values skips those that are unknown", () => {
  assert.deepEqual(trials.extent([3, null, 1]), [1, 3]);
  assert.equal(trials.extent([null]), null);
});

test("keys go from dot to dot and stay on the chart", () => {
  const presses = (keys, at) => keys.reduce((place, key) => stepOf(key, place, 30), at);
  assert.equal(presses(["ArrowRight", "ArrowUp", "ArrowLeft"], 4), 5);
  assert.equal(presses(["PageUp", "PageUp", "PageDown"], 0), 10);
  assert.equal(presses(["PageUp", "PageUp", "PageUp"], 5), 29);
  assert.equal(presses(["ArrowLeft"], 0), 0);
  assert.equal(presses(["End"], 3), 29);
  assert.equal(presses(["Home"], 12), 0);
  assert.equal(stepOf("a", 3, 30), null);
  assert.equal(stepOf("toString", 3, 30), null);
});
