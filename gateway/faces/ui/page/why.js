// A request's story, by its id.

import { ask } from "./api.js";
import { byId, element, say, whole } from "./dom.js";

const MOST_RECENT = 8;

export class Why {
  constructor() {
    this.recent = [];
    this.asked = 0;
    byId("ask-why").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = byId("request-id").value.trim();
      if (location.hash === `#why/${id}`) this.tell(id);
      else location.hash = `#why/${id}`;
    });
  }

  /** The chat has asked for something. */
  remember(id) {
    this.recent = [id, ...this.recent].slice(0, MOST_RECENT);
    const links = this.recent.map((each) => element("a", { href: `#why/${each}`, textContent: shortened(each) }));
    byId("recent-requests").replaceChildren("From the chat: ", ...links);
  }

  /** The story of a request, or of the chat's last where no id is given. */
  async tell(given) {
    const id = given || this.recent[0];
    if (!id) return;
    const mine = ++this.asked;
    byId("request-id").value = id;
    say(byId("why-error"), "");
    try {
      const { stories } = await ask(`why/${encodeURIComponent(id)}`);
      if (mine === this.asked) byId("stories").replaceChildren(...stories.map(drawStory));
    } catch (error) {
      if (mine !== this.asked) return;
      byId("stories").replaceChildren();
      say(byId("why-error"), error.message);
    }
  }
}

const shortened = (id) => (id.length > 18 ? `${id.slice(0, 17)}…` : id);

function drawStory({ request_id: id, live, chapters }) {
  const head = element("h2", {}, element("code", { textContent: id }), element("span", { className: "chip", textContent: live ? "live" : "ended" }));
  return element("article", { className: "story" }, head, element("ol", {}, ...chapters.map(drawChapter)));
}

function drawChapter({ at_s: at, kind, text, times, until_s: until }) {
  const more = times > 1 ? ` (${whole(times)} times, until ${until.toFixed(3)} s)` : "";
  return element(
    "li",
    { className: kind.replace(/[^a-z-]/g, "") },
    element("time", { textContent: `${at.toFixed(3)} s` }),
    element("span", { className: "kind", textContent: kind }),
    element("p", { textContent: text + more }),
  );
}
