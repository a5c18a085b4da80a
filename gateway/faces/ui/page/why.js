// Shows the scheduling decisions of one request.

import { fetchJson } from "./api.js";
import { byId, element, integer, showMessage } from "./dom.js";

const MAX_RECENT = 8;
const MAX_ID_CHARS = 18; // of a link's text

export class WhyView {
  constructor() {
    this.recent = [];
    this.requests = 0;
    byId("why-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = byId("request-id").value.trim();
      if (location.hash === `#why/${id}`) this.load(id);
      else location.hash = `#why/${id}`;
    });
  }

  /** Adds a link to a request of the chat. */
  addRecent(id) {
    this.recent = [id, ...this.recent].slice(0, MAX_RECENT);
    const links = this.recent.map((each) => element("a", { href: `#why/${each}`, textContent: shorten(each) }));
    byId("recent-requests").replaceChildren("From the chat: ", ...links);
  }

  /** Loads the story of a request; without an id, of the last chat request. */
  async load(requested) {
    const id = requested || this.recent[0];
    if (!id) return;
    const number = ++this.requests;
    byId("request-id").value = id;
    showMessage(byId("why-error"), "");
    try {
      const { stories } = await fetchJson(`why/${encodeURIComponent(id)}`);
      if (number === this.requests) byId("stories").replaceChildren(...stories.map(renderStory));
    } catch (error) {
      if (number !== this.requests) return;
      byId("stories").replaceChildren();
      showMessage(byId("why-error"), error.message);
    }
  }
}

const shorten = (id) => (id.length > MAX_ID_CHARS ? `${id.slice(0, MAX_ID_CHARS - 1)}…` : id);

function renderStory({ request_id: id, live, chapters }) {
  const state = element("span", { className: "chip", textContent: live ? "running" : "ended" });
  const head = element("h2", {}, element("code", { textContent: id }), state);
  return element("article", { className: "story" }, head, element("ol", {}, ...chapters.map(renderChapter)));
}

function renderChapter({ at_s: at, kind, text, times, until_s: until }) {
  const repeats = times > 1 ? ` (${integer(times)} times, until ${until.toFixed(3)} s)` : "";
  return element(
    "li",
    { className: kind.replace(/[^a-z-]/g, "") },
    element("time", { textContent: `${at.toFixed(3)} s` }),
    element("span", { className: "kind", textContent: kind }),
    element("p", { textContent: text + repeats }),
  );
}
