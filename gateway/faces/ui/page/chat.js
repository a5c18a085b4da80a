// The conversation: sends a message, streams the answer, and updates its forecast and SLA clocks.

import { Announcer } from "./announcer.js";
import { RequestError, fetchJson, ofModel, streamChat, toSentence } from "./api.js";
import { SlaClocks } from "./clocks.js";
import { byId, element, plural, seconds, showMessage } from "./dom.js";
import { ForecastPanel } from "./forecast.js";
import { MarkdownView } from "./markdown.js";
import { ChatSettings } from "./settings.js";

const MAX_TURNS = 40; // sent with a request; older turns are dropped
const TICK_MS = 100;
const QUEUE_AFTER_MS = 500; // without a forecast: then the queue is shown
const QUEUE_EVERY_MS = 1000;
const LARGE_CHARS = 8192; // answers above this are rendered at intervals, not at each token
const RENDER_EVERY_MS = 150;
const FOLLOW_PX = 80; // the view follows the answer if it is this close to its end
const SAMPLES = ["What can you do?", "Count from 1 to 100.", "Write star 40 times."];
const ENDINGS = { stop: "Ended after", length: "Reached the limit of", deadline: "Reached the deadline after" };

export class ChatView {
  /** `onRequest(id)` is called with the id of each request. */
  constructor(onRequest) {
    this.onRequest = onRequest;
    this.turns = [];
    this.classes = {};
    this.model = ""; // empty: the server's first
    this.streamOptions = { include_forecast: true }; // until the server refuses the option
    this.logprobs = true; // to count the tokens of each event; until the server refuses the field
    this.controller = null; // of the running answer
    this.settings = new ChatSettings();
    this.forecast = new ForecastPanel();
    this.clocks = new SlaClocks();
    this.announcer = new Announcer(byId("announcements"));
    this.listen();
  }

  /** Sets the model of further messages, and the SLA classes of the server. */
  configure({ model, classes, default_class: preferred }) {
    this.model = model;
    this.classes = classes;
    byId("sla").replaceChildren(
      ...Object.keys(classes).map((name) => new Option(name, name, false, name === preferred)),
    );
    this.selectClass();
  }

  listen() {
    const sendMessage = (event) => {
      event.preventDefault();
      this.send(byId("message").value.trim());
    };
    byId("composer").addEventListener("submit", sendMessage);
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) sendMessage(event);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !byId("key-dialog").open && !byId("view-chat").hidden) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("sla").addEventListener("change", () => this.selectClass());
    for (const text of SAMPLES) {
      const button = element("button", { type: "button", textContent: text });
      button.addEventListener("click", () => this.send(text));
      byId("samples").append(button);
    }
  }

  selectClass() {
    if (!this.controller) this.clocks.selectClass(byId("sla").value, this.classes[byId("sla").value] ?? {});
  }

  stop() {
    this.controller?.abort();
  }

  /** Starts a new conversation. */
  clear() {
    this.stop();
    this.turns = [];
    byId("conversation").replaceChildren(byId("welcome"));
    byId("welcome").hidden = false;
    showMessage(byId("chat-error"), "");
    focusMessage();
  }

  async send(text) {
    if (!text || this.controller) return;
    byId("message").value = "";
    byId("welcome").hidden = true;
    showMessage(byId("chat-error"), "");
    this.turns = [...this.turns, { role: "user", content: text }].slice(-MAX_TURNS);
    const turns = this.turns; // a new chat may replace this.turns before the answer ends
    this.addArticle("user", "You", "p").textContent = text;
    const answer = new Answer(this.addArticle("assistant", byId("model").textContent || "Model", "div"), this);
    this.setController(new AbortController());
    try {
      await answer.stream(byId("sla").value, Number(byId("limit").value));
    } finally {
      this.setController(null);
    }
    if (answer.text) turns.push({ role: "assistant", content: answer.text });
    else turns.pop(); // a message without an answer is not sent again
  }

  addArticle(role, name, tag) {
    const place = byId("conversation");
    const body = element(tag, { className: "content" });
    place.append(element("article", { className: role }, element("h3", { textContent: name }), body));
    place.scrollTop = place.scrollHeight;
    return body;
  }

  setController(controller) {
    this.controller = controller;
    byId("conversation").setAttribute("aria-busy", String(Boolean(controller)));
    byId("send").hidden = Boolean(controller);
    byId("stop").hidden = !controller;
    if (!controller && document.activeElement === document.body) focusMessage();
  }
}

/** One answer, from its request to its end. */
class Answer {
  constructor(place, chat) {
    Object.assign(this, { place, chat, text: "", id: "", tokens: 0, reason: null, usage: null });
    this.view = new MarkdownView(place);
    this.renderTimer = 0;
  }

  async stream(sla, limit) {
    const { forecast, clocks, announcer, streamOptions } = this.chat;
    const startedAt = performance.now();
    forecast.begin(Boolean(streamOptions.include_forecast));
    clocks.selectClass(sla, this.chat.classes[sla] ?? {});
    clocks.begin(startedAt);
    byId("ending").hidden = true;
    const timer = setInterval(() => this.tick(), TICK_MS);
    this.queueAt = startedAt + QUEUE_AFTER_MS;
    this.place.classList.add("growing");
    try {
      for await (const event of this.events(sla, limit)) this.onEvent(event);
    } catch (error) {
      this.onError(error);
    } finally {
      clearInterval(timer);
      this.render();
      this.place.classList.remove("growing");
      this.finish(performance.now() - startedAt);
      announcer.end(this.text ? `Answer complete, ${plural(this.tokens, "token")}.` : "");
    }
  }

  /** The server's events. Options that an older server refuses are left out in a second request. */
  async *events(sla, limit) {
    const { chat } = this;
    for (;;) {
      const body = {
        ...(chat.model && { model: chat.model }),
        messages: [...chat.settings.messages, ...chat.turns],
        stream: true,
        stream_options: { include_usage: true, ...chat.streamOptions },
        ...chat.settings.fields,
        ...(chat.logprobs && { logprobs: true }),
        ...(limit > 0 && { max_tokens: Math.floor(limit) }),
      };
      try {
        yield* streamChat(body, sla, chat.controller.signal);
        return;
      } catch (error) {
        if (!(error instanceof RequestError) || error.status !== 400 || !this.dropOption(error.param)) throw error;
      }
    }
  }

  /** Leaves out a refused option. False if it cannot be left out. */
  dropOption(param) {
    const { chat } = this;
    if (param.startsWith("stream_options") && chat.streamOptions.include_forecast) {
      chat.streamOptions = {};
      return true;
    }
    if (param === "logprobs" && chat.logprobs) {
      chat.logprobs = false;
      return true;
    }
    return false;
  }

  onEvent(event) {
    const now = performance.now();
    if (event.id && !this.id) {
      this.id = event.id;
      this.chat.onRequest(event.id);
    }
    if (event.usage) this.usage = event.usage;
    const forecast = event.forecast ?? null;
    if (forecast) this.chat.clocks.showPromise(forecast);
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const count = choice?.logprobs?.content?.length ?? (text || choice?.delta?.reasoning ? 1 : 0);
    this.reason = choice?.finish_reason ?? this.reason;
    if (count) {
      this.tokens += count;
      this.chat.clocks.onTokens(count, now);
    }
    if (forecast || count) this.chat.forecast.update(this.tokens, forecast, now);
    if (text) this.append(text);
  }

  append(text) {
    this.text += text;
    this.chat.announcer.add(text);
    if (this.text.length <= LARGE_CHARS) this.render();
    else this.renderTimer ||= setTimeout(() => this.render(), RENDER_EVERY_MS);
  }

  render() {
    clearTimeout(this.renderTimer);
    this.renderTimer = 0;
    const scroller = byId("conversation");
    const follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < FOLLOW_PX;
    this.view.render(this.text);
    if (follows) scroller.scrollTop = scroller.scrollHeight;
  }

  tick() {
    const now = performance.now();
    this.chat.clocks.tick(now);
    this.chat.forecast.tick(now);
    if (this.chat.forecast.waiting && now >= this.queueAt) {
      this.queueAt = now + QUEUE_EVERY_MS;
      this.showQueue();
    }
  }

  /** A server under load reads a request late and has no forecast before: shows what it waits for. */
  async showQueue() {
    try {
      const path = ofModel("board", this.chat.model);
      this.chat.forecast.showQueue(await fetchJson(path, { quiet: true, signal: this.chat.controller?.signal }));
    } catch {
      // the answer itself reports a lost server
    }
  }

  onError(error) {
    if (error.name === "AbortError") {
      this.reason = "cancelled";
      return;
    }
    if (!(error instanceof RequestError)) throw error;
    showMessage(byId("chat-error"), toSentence(error.message));
  }

  finish(tookMs) {
    const { forecast, clocks, streamOptions } = this.chat;
    clocks.end(performance.now());
    if (this.usage) this.tokens = this.usage.completion_tokens;
    const ended = ENDINGS[this.reason];
    const description = ended ?? (this.reason === "cancelled" ? "Stopped after" : "Interrupted after");
    forecast.end(this.tokens, description, Boolean(ended));
    if (!this.text) this.place.parentElement.remove();
    const summary = streamOptions.include_forecast
      ? forecast.summarize(this.tokens, Boolean(ended))
      : "This server sends no forecasts.";
    const ending = byId("ending");
    ending.replaceChildren(`Total time ${seconds(tookMs / 1000)}. ${summary} `);
    if (this.id) ending.append(element("a", { href: `#why/${this.id}`, textContent: "Show its scheduling" }));
    ending.hidden = false;
  }
}

/** Only with a keyboard: on a phone, focus would open the on-screen keyboard. */
function focusMessage() {
  if (matchMedia("(pointer: fine)").matches) byId("message").focus({ preventScroll: true });
}
