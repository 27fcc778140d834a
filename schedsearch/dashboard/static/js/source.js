// Where the data comes from: the server that sent this page, or the data inside this file.

/** An answer that is not there: `message` says why, in words for the reader. `final`: asking again would not help. */
export class NoAnswer extends Error {
  constructor(message, { final = true } = {}) {
    super(message);
    this.final = final;
  }
}

/** The source of this page: { live, get(path), watch(listener) }. */
export async function openSource(boot, packed) {
  return boot.live ? liveSource() : fileSource(await unpack(packed));
}

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function fileSource(answers) {
  return {
    live: false,
    async get(path) {
      if (Object.hasOwn(answers, path)) return answers[path];
      throw new NoAnswer("This report does not hold that page. It may have been left out to keep the file small.");
    },
    watch() {},
  };
}

function liveSource() {
  return { live: true, get: fetchAnswer, watch };
}

async function fetchAnswer(path) {
  let response;
  try {
    response = await fetch(`api/${path}`, { headers: { Accept: "application/json" }, cache: "no-cache" });
  } catch {
    throw new NoAnswer("The server does not answer. Start `schedsearch dashboard` again; this page reconnects by itself.", { final: false });
  }
  if (response.ok) return response.json();
  let message = `The server answered ${response.status}.`;
  try {
    const { error } = await response.json();
    if (typeof error === "string") message = error;
  } catch {
    // no JSON: the status has to do
  }
  throw new NoAnswer(message);
}

/** Calls listener("open"), listener("gone") and listener("change", event data) as the server says so. */
function watch(listener) {
  const events = new EventSource("api/events");
  events.addEventListener("open", () => listener("open"));
  events.addEventListener("error", () => {
    listener("gone");
    if (events.readyState === EventSource.CLOSED) {
      events.close();
      setTimeout(() => watch(listener), 2000);
    }
  });
  events.addEventListener("change", (event) => listener("change", JSON.parse(event.data)));
}
