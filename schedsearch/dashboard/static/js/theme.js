// Light and dark: the system's choice until the reader switches; kept in this browser.

const KEY = "schedsearch-theme";
const ORDER = ["auto", "light", "dark"];
const listeners = new Set();

function stored() {
  try {
    const value = localStorage.getItem(KEY);
    return ORDER.includes(value) ? value : "auto";
  } catch {
    return "auto"; // storage is forbidden for files in some browsers
  }
}

/** Sets up the switch `button` and follows the system. `afterSwitch` is called before and after printing. */
export function startTheme(button, afterSwitch = () => {}) {
  let choice = stored();
  let printing = false;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const dark = !printing && (choice === "dark" || (choice === "auto" && system.matches)); // paper is light
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[choice];
    button.setAttribute("aria-label", `Colours: ${choice}. Switch`);
    for (const listener of listeners) listener();
  };
  for (const [event, value] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(event, () => {
      printing = value;
      apply();
      afterSwitch();
    });
  }
  button.addEventListener("click", () => {
    choice = ORDER[(ORDER.indexOf(choice) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, choice);
    } catch {
      // the choice lasts until the page is closed
    }
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

/** Calls `listener` after each change of colours; returns a function that ends this. */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The colours and sizes that charts draw with, read from the style sheet. */
export function chartColors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    text: read("--text"),
    muted: read("--muted"),
    line: read("--line"),
    grid: read("--grid"),
    page: read("--page"),
    surface: read("--surface"),
    accent: read("--accent"),
    bad: read("--bad"),
    series: SERIES.map((_, index) => read(`--series-${index + 1}`)),
    fontPx: Math.round(parseFloat(style.fontSize) * 0.8),
    font: style.fontFamily,
  };
}

/** Marks of series, so that nobody needs to tell them apart by colour alone. */
export const SERIES = ["circle", "diamond", "triangle", "rect", "roundRect", "pin", "arrow", "circle"];

/** A colour between two of the style sheet, "#rrggbb": `share` 0 is `from`, 1 is `to`. */
export function mixColors(from, to, share) {
  const parts = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const [start, end] = [parts(from), parts(to)];
  return `#${start.map((value, index) => Math.round(value + (end[index] - value) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** Whether text on a colour "#rrggbb" should be dark: by its relative luminance (WCAG 2). */
export function isLight(color) {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const value = parseInt(color.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179; // where black and white have the same contrast
}
