// How long an answer is foreseen to be, and how that narrows: the bar, its numbers and the cone.

import { byId, drawn, plural, seconds, whole, write } from "./dom.js";

const MOST_POINTS = 256; // of the cone; beyond, every second one is dropped
const ROOM = 1.04; // right of the interval
const MOST_BEYOND = 4; // times what is foreseen now: a first guess beyond leaves the cone at its top
const SAY_EVERY_MS = 2000; // of the bar's text, for who hears it

export class Forecast {
  /** A new answer begins; whether its server foresees it. */
  begin(foreseen) {
    this.last = null; // what was foreseen last
    this.first = null;
    this.sent = 0;
    this.scale = 1; // tokens at the bar's right end
    this.over = false;
    this.endsAt = null;
    this.path = []; // [sent, low, expected, high]
    this.step = 1;
    this.saidAt = -Infinity;
    byId("bar").classList.remove("over", "without");
    byId("cone-figure").hidden = true;
    byId("view-chat").classList.toggle("unforeseen", !foreseen);
    write(byId("foreseen"), foreseen ? "Waiting for the first forecast" : "Waiting for the first token");
    this.draw(performance.now());
  }

  /** So many tokens were sent, and perhaps a newer forecast came with the last. */
  tell(sent, told, now) {
    this.sent = sent;
    if (told) {
      this.last = told;
      this.first ??= told;
      if (Number.isFinite(told.end_s)) this.endsAt = now + told.end_s * 1000;
      this.remember(told);
    } else if (!this.last) write(byId("foreseen"), `${plural(sent, "token")} so far`);
    this.draw(now);
  }

  /** Nothing more comes; an answer that is `complete` has nothing left to be foreseen. */
  end(tokens, how, complete) {
    this.sent = tokens;
    this.endsAt = null;
    this.over = complete;
    if (complete && this.last) {
      this.path.push([tokens, tokens, tokens, tokens]);
    }
    this.saidAt = -Infinity;
    this.draw(performance.now());
    write(byId("foreseen"), tokens ? `${how} ${plural(tokens, "token")}` : "No answer came");
  }

  remember({ low_tokens: low, expected_tokens: expected, high_tokens: high }) {
    const [before, latest] = this.path.slice(-2);
    if (latest && latest[0] - before[0] < this.step) this.path.pop();
    this.path.push([this.sent, low, expected, high]);
    if (this.path.length > MOST_POINTS) {
      this.path = this.path.filter((_, index) => index % 2 === 0);
      this.step *= 2;
    }
  }

  draw(now) {
    const { last, sent } = this;
    const bar = byId("bar");
    if (last && !this.over) this.fit(Math.max(last.high_tokens, sent));
    const most = this.over ? Math.max(sent, 1) : this.scale;
    const at = (tokens) => `${Math.min(100, (tokens / most) * 100)}%`;
    bar.classList.toggle("over", this.over);
    bar.classList.toggle("without", !last);
    bar.style.setProperty("--sent", last ? at(sent) : "0%");
    bar.style.setProperty("--low", at(last ? Math.max(last.low_tokens, 0) : 0));
    bar.style.setProperty("--high", at(last ? last.high_tokens : 0));
    bar.style.setProperty("--expected", at(last ? last.expected_tokens : 0));
    write(byId("number-sent"), whole(sent));
    write(byId("number-expected"), last && !this.over ? whole(last.expected_tokens) : "–");
    write(byId("number-band"), last && !this.over ? band(last) : "–");
    this.tick(now);
    this.speak(now);
    if (last && this.path.length > 1) this.drawCone();
  }

  /** All of the interval is to be seen, and not in a corner: a first guess may be far too long. */
  fit(high) {
    const needed = high * ROOM;
    if (needed > this.scale || needed < this.scale / 2) this.scale = needed;
  }

  /** Time passes between tokens. */
  tick(now) {
    const left = this.endsAt === null ? null : Math.max(0, this.endsAt - now) / 1000;
    write(byId("number-end"), seconds(left));
    if (this.last && this.endsAt !== null) {
      write(byId("foreseen"), `About ${plural(Math.max(1, Math.round(this.last.expected_tokens)), "token")}`);
    }
  }

  speak(now) {
    if (now - this.saidAt < SAY_EVERY_MS) return;
    this.saidAt = now;
    const bar = byId("bar");
    const { sent } = this;
    const last = this.over ? null : this.last;
    bar.setAttribute("aria-valuemax", String(Math.max(1, sent, Math.ceil(last?.expected_tokens ?? 0))));
    bar.setAttribute("aria-valuenow", String(sent));
    const foreseen = last ? `, ${whole(last.expected_tokens)} expected, 90 percent within ${band(last)}` : "";
    bar.setAttribute("aria-valuetext", `${whole(sent)} sent${foreseen}`);
  }

  drawCone() {
    const figure = byId("cone-figure");
    const cone = byId("cone");
    const highest = this.path.reduce((most, [, , , high]) => Math.max(most, high), 1);
    const most = Math.min(highest, MOST_BEYOND * Math.max(this.path.at(-1)[3], 1)) * ROOM;
    const point = (x, y) => `${((x / most) * 100).toFixed(2)},${(100 - (y / most) * 100).toFixed(2)}`;
    const highs = this.path.map(([sent, , , high]) => point(sent, high));
    const lows = this.path.map(([sent, low]) => point(sent, Math.max(low, 0))).reverse();
    const middle = this.path.map(([sent, , expected]) => point(sent, expected));
    figure.hidden = false;
    cone.replaceChildren(
      drawn("path", { d: "M0 100L100 0", class: "diagonal" }),
      drawn("polygon", { points: [...highs, ...lows].join(" "), class: "band" }),
      drawn("polyline", { points: middle.join(" "), class: "expected" }),
    );
  }

  /** What was foreseen at first, and beside it what came, where it came to its end. */
  lookBack(tokens, ended) {
    if (!this.first) return "";
    const { low_tokens: low, high_tokens: high, expected_tokens: expected } = this.first;
    const foreseen = `First forecast: ${whole(expected)}, 90 % within ${band(this.first)}`;
    const held = low <= tokens && tokens <= high ? "within" : "outside";
    return ended ? `${foreseen}; it came to lie ${held}.` : `${foreseen}.`;
  }
}

const band = ({ low_tokens: low, high_tokens: high }) => `${whole(low)}–${whole(high)}`;
