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

/** Sets up the switch `button` and follows the system. */
export function startTheme(button) {
  let choice = stored();
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[choice];
    button.setAttribute("aria-label", `Colours: ${choice}. Switch`);
    for (const listener of listeners) listener();
  };
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
