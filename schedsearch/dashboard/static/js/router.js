// Addresses of pages: the part behind `#`, so that a file on disk has them too.

/** { page, parts, query } of an address such as "#/task/a%20b?x=seconds". */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decode);
  return { page: parts[0] ?? "overview", parts: parts.slice(1), query: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a page: routeTo("task", ["a b"], { x: "seconds" }) -> "#/task/a%20b?x=seconds". */
export function routeTo(page, parts = [], query = {}) {
  const path = [page === "overview" ? "" : page, ...parts.map((part) => encodeURIComponent(part))];
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return `#/${path.filter((part, index) => index === 0 || part !== "").join("/")}${text ? `?${text}` : ""}`;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
