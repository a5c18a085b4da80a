// A conversation: asks, streams the answer, and keeps forecast and clocks going beside it.

import { Failure, chat, sentence } from "./api.js";
import { Clocks } from "./clocks.js";
import { byId, element, plural, say, seconds } from "./dom.js";
import { Forecast } from "./forecast.js";
import { Reader } from "./reader.js";

const MOST_TURNS = 40; // sent along; what is older is let go
const TICK_MS = 100;
const SAMPLES = ["What can you do?", "Count from 1 to 100.", "Write star 40 times."];
const ENDINGS = { stop: "Ended after", length: "Reached its limit of", deadline: "Its time was over after" };

export class Chat {
  /** `onAsked(id)` is told of each request's id. */
  constructor(onAsked) {
    this.onAsked = onAsked;
    this.turns = [];
    this.classes = {};
    this.wishes = { include_forecast: true }; // until this server turns out not to know of it
    this.logprobs = true; // counts an answer's tokens as they come
    this.stopping = null;
    this.forecast = new Forecast();
    this.clocks = new Clocks();
    this.reader = new Reader(byId("spoken"));
    this.listen();
  }

  /** The model and SLA classes that the server told of. */
  know({ classes, default_class: preferred }) {
    this.classes = classes;
    byId("sla").replaceChildren(
      ...Object.keys(classes).map((name) => new Option(name, name, false, name === preferred)),
    );
    this.chooseClass();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(byId("message").value.trim());
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.ask(byId("message").value.trim());
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open && !byId("view-chat").hidden) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("fresh").addEventListener("click", () => this.forget());
    byId("sla").addEventListener("change", () => this.chooseClass());
    for (const text of SAMPLES) {
      const button = element("button", { type: "button", textContent: text });
      button.addEventListener("click", () => this.ask(text));
      byId("samples").append(button);
    }
  }

  chooseClass() {
    if (!this.stopping) this.clocks.choose(byId("sla").value, this.classes[byId("sla").value] ?? {});
  }

  stop() {
    this.stopping?.abort();
  }

  /** A new conversation. */
  forget() {
    this.stop();
    this.turns = [];
    const place = byId("conversation");
    place.replaceChildren(byId("welcome"));
    byId("welcome").hidden = false;
    say(byId("chat-error"), "");
    focusMessage();
  }

  async ask(text) {
    if (!text || this.stopping) return;
    byId("message").value = "";
    byId("welcome").hidden = true;
    say(byId("chat-error"), "");
    this.turns = [...this.turns, { role: "user", content: text }].slice(-MOST_TURNS);
    const said = this.turns; // should a new chat begin meanwhile, the answer is none of its
    this.add("user", "You").textContent = text;
    const answer = new Answer(this.add("assistant", byId("model").textContent || "Model"), this);
    this.setBusy(new AbortController());
    try {
      await answer.stream(byId("sla").value, Number(byId("limit").value));
    } finally {
      this.setBusy(null);
    }
    if (answer.text) said.push({ role: "assistant", content: answer.text });
    else said.pop(); // what got no answer is not said again with the next
  }

  add(role, name) {
    const place = byId("conversation");
    const body = element("p", { className: "said" });
    place.append(element("article", { className: role }, element("h3", { textContent: name }), body));
    place.scrollTop = place.scrollHeight;
    return body;
  }

  setBusy(controller) {
    this.stopping = controller;
    byId("conversation").setAttribute("aria-busy", String(Boolean(controller)));
    byId("send").hidden = Boolean(controller);
    byId("stop").hidden = !controller;
    if (!controller && document.activeElement === document.body) focusMessage();
  }
}

/** One answer, from its request to its end. */
class Answer {
  constructor(place, owner) {
    Object.assign(this, { place, owner, text: "", id: "", tokens: 0, reason: null, usage: null });
    this.shown = document.createTextNode("");
    place.append(this.shown);
  }

  async stream(sla, limit) {
    const { forecast, clocks, reader } = this.owner;
    const began = performance.now();
    forecast.begin(Boolean(this.owner.wishes.include_forecast));
    clocks.choose(sla, this.owner.classes[sla] ?? {});
    clocks.begin(began);
    byId("ending").hidden = true;
    const ticking = setInterval(() => this.tick(), TICK_MS);
    this.place.classList.add("growing");
    try {
      for await (const event of this.events(sla, limit)) this.take(event);
    } catch (error) {
      this.fail(error);
    } finally {
      clearInterval(ticking);
      this.place.classList.remove("growing");
      this.finish(performance.now() - began);
      reader.end(this.text ? `Answer complete, ${plural(this.tokens, "token")}.` : "");
    }
  }

  /** The server's events; a server that does not know of forecasts is asked again without. */
  async *events(sla, limit) {
    const { owner } = this;
    for (;;) {
      const body = {
        messages: owner.turns,
        stream: true,
        stream_options: { include_usage: true, ...owner.wishes },
        ...(owner.logprobs && { logprobs: true }),
        ...(limit > 0 && { max_tokens: Math.floor(limit) }),
      };
      try {
        yield* chat(body, sla, owner.stopping.signal);
        return;
      } catch (error) {
        if (!(error instanceof Failure) || error.status !== 400 || !this.without(error.param)) throw error;
      }
    }
  }

  /** Do without what was refused; false where that is nothing that can be done without. */
  without(param) {
    const { owner } = this;
    if (param.startsWith("stream_options") && owner.wishes.include_forecast) {
      owner.wishes = {};
      return true;
    }
    if (param === "logprobs" && owner.logprobs) {
      owner.logprobs = false;
      return true;
    }
    return false;
  }

  take(event) {
    const now = performance.now();
    if (event.id && !this.id) {
      this.id = event.id;
      this.owner.onAsked(event.id);
    }
    if (event.usage) this.usage = event.usage;
    const told = event.forecast ?? null;
    if (told) this.owner.clocks.promise(told);
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const fresh = choice?.logprobs?.content?.length ?? (text ? 1 : 0);
    this.reason = choice?.finish_reason ?? this.reason;
    if (fresh) {
      this.tokens += fresh;
      this.owner.clocks.onTokens(fresh, now);
    }
    if (told || fresh) this.owner.forecast.tell(this.tokens, told, now);
    if (text) this.grow(text);
  }

  grow(text) {
    const place = byId("conversation");
    const follows = place.scrollHeight - place.scrollTop - place.clientHeight < 80;
    this.text += text;
    this.shown.appendData(text);
    this.owner.reader.add(text);
    if (follows) place.scrollTop = place.scrollHeight;
  }

  tick() {
    const now = performance.now();
    this.owner.clocks.tick(now);
    this.owner.forecast.tick(now);
  }

  fail(error) {
    if (error.name === "AbortError") {
      this.reason = "cancelled";
      return;
    }
    if (!(error instanceof Failure)) throw error;
    say(byId("chat-error"), sentence(error.message));
  }

  finish(took) {
    const { forecast, clocks, wishes } = this.owner;
    clocks.end(performance.now());
    if (this.usage) this.tokens = this.usage.completion_tokens;
    const ended = ENDINGS[this.reason];
    const how = ended ?? (this.reason === "cancelled" ? "Stopped after" : "Broke off after");
    forecast.end(this.tokens, how, Boolean(ended));
    if (!this.text) this.place.parentElement.remove();
    const look = wishes.include_forecast
      ? forecast.lookBack(this.tokens, Boolean(ended))
      : "This server tells its clients no forecasts.";
    const ending = byId("ending");
    ending.replaceChildren(`${seconds(took / 1000)} in all. ${look} `);
    if (this.id) ending.append(element("a", { href: `#why/${this.id}`, textContent: "Why it went so" }));
    ending.hidden = false;
  }
}

/** Where there is a keyboard: on a phone it would come up unasked. */
function focusMessage() {
  if (matchMedia("(pointer: fine)").matches) byId("message").focus({ preventScroll: true });
}
