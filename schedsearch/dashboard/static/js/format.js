// Numbers for readers: units by size, three significant digits, and words where a number is unknown.

export const UNKNOWN = "–";

const TIME_UNITS = [
  { unit: "ns", ns: 1 },
  { unit: "µs", ns: 1e3 },
  { unit: "ms", ns: 1e6 },
  { unit: "s", ns: 1e9 },
];

/** True for numbers that can be shown. */
export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** `value` with `digits` significant digits, thousands in groups, and no exponent: 1234.5 -> "1,230". */
export function significant(value, digits = 3) {
  if (!isNumber(value)) return UNKNOWN;
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(digits));
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(rounded))));
  return rounded.toLocaleString("en-US", {
    minimumFractionDigits: Math.min(decimals, 12),
    maximumFractionDigits: Math.min(decimals, 12),
  });
}

/** The unit in which `ns` nanoseconds read best: { unit, ns }. */
export function timeUnit(ns) {
  let chosen = TIME_UNITS[0];
  for (const candidate of TIME_UNITS) if (Math.abs(ns) >= candidate.ns * 0.9995) chosen = candidate;
  return chosen;
}

/** A duration in nanoseconds: 12345 -> "12.3 µs". */
export function formatTime(ns, digits = 3) {
  if (!isNumber(ns)) return UNKNOWN;
  const { unit, ns: size } = timeUnit(ns);
  return `${significant(ns / size, digits)} ${unit}`;
}

/** A long duration in seconds: 75 -> "1 min 15 s". */
export function formatDuration(seconds) {
  if (!isNumber(seconds)) return UNKNOWN;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return formatTime(seconds * 1e9);
  if (seconds < 59.5) return `${significant(seconds, seconds < 10 ? 2 : 3).replace(/\.0$/, "")} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return joinUnits([Math.floor(whole / 60), "min"], [whole % 60, "s"]);
  const minutes = Math.round(seconds / 60);
  if (minutes < 24 * 60) return joinUnits([Math.floor(minutes / 60), "h"], [minutes % 60, "min"]);
  const hours = Math.round(seconds / 3600);
  return joinUnits([Math.floor(hours / 24), "d"], [hours % 24, "h"]);
}

function joinUnits([large, largeUnit], [small, smallUnit]) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

/** Integers with groups: 12345 -> "12,345". */
export function formatCount(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
}

/** "1 trial", "2 trials". */
export function plural(count, noun, nouns = `${noun}s`) {
  return `${formatCount(count)} ${count === 1 ? noun : nouns}`;
}

/** A ratio: 2.345 -> "2.35×"; around 1, where small differences matter, with three decimals: 0.9976 -> "0.998×". */
export function formatRatio(value) {
  if (!isNumber(value)) return UNKNOWN;
  return value >= 0.9 && value < 1.1 ? `${value.toFixed(3)}×` : `${significant(value)}×`;
}

/** A share of one: 0.034 -> "3.4 %". */
export function formatPercent(share) {
  if (!isNumber(share)) return UNKNOWN;
  const percent = share * 100;
  if (percent !== 0 && Math.abs(percent) < 0.1) return percent > 0 ? "<0.1 %" : ">−0.1 %";
  return `${percent.toLocaleString("en-US", { maximumFractionDigits: Math.abs(percent) < 9.95 ? 1 : 0 })} %`;
}

/** A change against a base, with its sign: 1.034 -> "+3.4 %", 0.9 -> "−10 %". */
export function formatChange(ratio) {
  if (!isNumber(ratio)) return UNKNOWN;
  const text = formatPercent(Math.abs(ratio - 1));
  if (text === "0 %") return "±0 %";
  return `${ratio > 1 ? "+" : "−"}${text}`;
}

const PREFIXES = ["", "k", "M", "G", "T", "P"];

/** A quantity with a decimal prefix: formatSi(1.2e12, "FLOP/s") -> "1.20 TFLOP/s". */
export function formatSi(value, unit) {
  if (!isNumber(value)) return UNKNOWN;
  let scaled = value;
  let index = 0;
  while (Math.abs(scaled) >= 999.5 && index < PREFIXES.length - 1) {
    scaled /= 1000;
    index += 1;
  }
  return `${significant(scaled)} ${PREFIXES[index]}${unit}`;
}

/** A size in memory: 98304 -> "96 KiB". */
export function formatBytes(bytes) {
  if (!isNumber(bytes)) return UNKNOWN;
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let scaled = bytes / 1024;
  let index = 0;
  while (scaled >= 1024 && index < units.length - 1) {
    scaled /= 1024;
    index += 1;
  }
  return `${Number(scaled.toPrecision(3))} ${units[index]}`;
}

/** A moment in seconds since 1970, in the reader's time zone: "2026-11-22 17:05". */
export function formatMoment(seconds) {
  if (!isNumber(seconds)) return UNKNOWN;
  const date = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}`
  );
}

/** The name of the device in a target key: "cuda:sm_90:132:NVIDIA H200" -> "NVIDIA H200". */
export function deviceName(target) {
  return /^cuda:[^:]+:\d+:(.+)$/s.exec(target)?.[1] ?? target;
}

/** A knob's value as a reader would type it. */
export function formatValue(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value === "string") return value;
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : significant(value, 4);
  return JSON.stringify(value);
}

/** `text` cut to `length` characters, with an ellipsis where it was cut. */
export function shorten(text, length) {
  const characters = Array.from(String(text));
  return characters.length <= length ? String(text) : `${characters.slice(0, length - 1).join("")}…`;
}

/** A rate that comes in 1e9 of `unit` without its G: formatRate(812345, "GFLOP/s") -> "812 TFLOP/s". */
export function formatRate(giga, unit) {
  return isNumber(giga) ? formatSi(giga * 1e9, unit.replace(/^G/, "")) : UNKNOWN;
}
