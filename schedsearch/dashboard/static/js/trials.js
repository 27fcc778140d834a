// What the columns of a task's trials say: configs, trial numbers, the best so far. Pure functions of a TaskView.

import { formatValue } from "./format.js";

/** The config of the trial at `position`: [[knob, value], ...], without knobs that it lacks. */
export function trialConfig(task, position) {
  const knobs = task.knobs[task.trials.template[position]];
  const pairs = [];
  task.trials.config[position].forEach((index, knob) => {
    if (index !== null) pairs.push([knobs.names[knob], knobs.values[knob][index]]);
  });
  return pairs;
}

/** [[knob, value], ...] as text: "bm=64, bn=128". */
export function configText(pairs) {
  return pairs.map(([name, value]) => `${name}=${formatValue(value)}`).join(", ");
}

/** The name of a trial's template. */
export function templateOf(task, position) {
  return task.knobs[task.trials.template[position]].template;
}

/** The address of a trial's page needs this key. */
export function trialKey(database, id) {
  return `${database}.${id}`;
}

/** The first knobs of a config for a tooltip, several on a line; `width` characters a line, at most `most` lines. */
export function configLines(pairs, width = 44, most = 6) {
  const result = [];
  let line = "";
  for (const [name, value] of pairs) {
    const part = `${name}=${formatValue(value)}`;
    if (line && line.length + part.length + 2 > width) {
      result.push(line);
      line = "";
    }
    line = line ? `${line}  ${part}` : part;
  }
  if (line) result.push(line);
  return result.length > most ? [...result.slice(0, most), "…"] : result;
}

/**
 * The trials of the search (those of final races are left out, and static rejects, which cost no trial).
 *
 * Returns positions in the columns with the number of each trial, from 1, and its seconds of tuning:
 * { positions, numbers, seconds }.
 */
export function searchTrials(task) {
  const { counted, race, tuning_s: tuning } = task.trials;
  const positions = [];
  const numbers = [];
  const seconds = [];
  for (let position = 0; position < counted.length; position += 1) {
    if (!counted[position] || race[position]) continue;
    positions.push(position);
    numbers.push(positions.length);
    seconds.push(tuning[position]);
  }
  return { positions, numbers, seconds };
}

/** Positions of valid trials of the search, fastest first. */
export function fastestTrials(task) {
  const { time_ns: times, race } = task.trials;
  const positions = [];
  for (let position = 0; position < times.length; position += 1) {
    if (times[position] !== null && !race[position]) positions.push(position);
  }
  return positions.sort((a, b) => times[a] - times[b]);
}

/** Least and greatest of the numbers of `values`, null values skipped; null without any. */
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low === Infinity ? null : [low, high];
}
