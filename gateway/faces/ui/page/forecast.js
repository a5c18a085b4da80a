// The length forecast of an answer: the bar, its numbers, and the chart of how it narrows.

import { byId, element, integer, plural, seconds, setText, svgElement } from "./dom.js";

const MAX_POINTS = 256; // of the chart; beyond, every second point is dropped
const MARGIN = 1.04; // right of the bar's interval
const MAX_OVERSHOOT = 4; // first forecasts above 4 × the present one run along the chart's top
const ANNOUNCE_EVERY_MS = 2000; // of the bar's text, for screen readers
const MAX_TICKS = 4; // of a chart axis, in addition to 0
const STEPS = [1, 2, 2.5, 5, 10];

export class ForecastPanel {
  /** Starts a new answer. `supported`: whether the server sends forecasts. */
  begin(supported) {
    this.last = null; // last forecast
    this.first = null;
    this.sent = 0;
    this.scale = 1; // tokens at the bar's right end
    this.ended = false;
    this.endsAt = null;
    this.path = []; // [sent, low, expected, high]
    this.step = 1;
    this.announcedAt = -Infinity;
    byId("bar").classList.remove("over", "without");
    byId("cone-figure").hidden = true;
    byId("view-chat").classList.toggle("without-forecast", !supported);
    setText(byId("forecast-note"), "");
    setText(byId("forecast"), supported ? "Waiting for the forecast" : "Waiting for the first token");
    this.draw(performance.now());
  }

  /** Whether the server has sent nothing yet. */
  get waiting() {
    return !this.ended && !this.last && !this.sent;
  }

  /** Shows why there is no forecast yet: the waiting requests and recent answer lengths. */
  showQueue({ arriving, queued, classes }) {
    if (!this.waiting) return;
    const recent = meanTokens(Object.values(classes));
    const ahead = [];
    if (arriving) ahead.push(`${integer(arriving)} to be read`);
    if (queued) ahead.push(`${integer(queued)} to run`);
    const queue = ahead.length ? `Requests waiting: ${ahead.join(", ")}. ` : "";
    const typical = recent ? `Recent answers: ${plural(recent, "token")} on average.` : "";
    setText(byId("forecast-note"), queue + typical);
  }

  /** Updates the number of sent tokens and, if given, the forecast. */
  update(sent, forecast, now) {
    this.sent = sent;
    setText(byId("forecast-note"), "");
    if (forecast) {
      this.last = forecast;
      this.first ??= forecast;
      if (Number.isFinite(forecast.end_s)) this.endsAt = now + forecast.end_s * 1000;
      this.addPoint(forecast);
    } else if (!this.last) setText(byId("forecast"), `${plural(sent, "token")} so far`);
    this.draw(now);
  }

  /** Ends the answer. A `complete` one has nothing left to forecast. */
  end(tokens, description, complete) {
    this.sent = tokens;
    this.endsAt = null;
    this.ended = complete;
    setText(byId("forecast-note"), "");
    if (complete && this.last) this.path.push([tokens, tokens, tokens, tokens]);
    this.announcedAt = -Infinity;
    this.draw(performance.now());
    setText(byId("forecast"), tokens ? `${description} ${plural(tokens, "token")}` : "No answer");
  }

  addPoint({ low_tokens: low, expected_tokens: expected, high_tokens: high }) {
    const [previous, latest] = this.path.slice(-2);
    if (latest && latest[0] - previous[0] < this.step) this.path.pop();
    this.path.push([this.sent, low, expected, high]);
    if (this.path.length > MAX_POINTS) {
      this.path = this.path.filter((_, index) => index % 2 === 0);
      this.step *= 2;
    }
  }

  draw(now) {
    const { last, sent } = this;
    const bar = byId("bar");
    if (last && !this.ended) this.fitBar(Math.max(last.high_tokens, sent));
    const scale = this.ended ? Math.max(sent, 1) : this.scale;
    const position = (tokens) => `${Math.min(100, (tokens / scale) * 100)}%`;
    bar.classList.toggle("over", this.ended);
    bar.classList.toggle("without", !last);
    bar.style.setProperty("--sent", last ? position(sent) : "0%");
    bar.style.setProperty("--low", position(last ? Math.max(last.low_tokens, 0) : 0));
    bar.style.setProperty("--high", position(last ? last.high_tokens : 0));
    bar.style.setProperty("--expected", position(last ? last.expected_tokens : 0));
    const unknown = this.waiting ? "…" : "–";
    const shown = last && !this.ended;
    setText(byId("number-sent"), integer(sent));
    setText(byId("number-expected"), shown ? integer(last.expected_tokens) : unknown);
    setText(byId("number-band"), shown ? formatInterval(last) : unknown);
    this.tick(now);
    this.announce(now);
    if (last && this.path.length > 1) this.drawChart();
  }

  /** The bar shows the whole interval, and is rescaled once that fills less than half of it. */
  fitBar(high) {
    const needed = high * MARGIN;
    if (needed > this.scale || needed < this.scale / 2) this.scale = needed;
  }

  /** Updates the times between tokens. */
  tick(now) {
    const left = this.endsAt === null ? null : Math.max(0, this.endsAt - now) / 1000;
    setText(byId("number-end"), this.waiting ? "…" : seconds(left));
    if (this.last && this.endsAt !== null) {
      setText(byId("forecast"), `About ${plural(Math.max(1, Math.round(this.last.expected_tokens)), "token")}`);
    }
  }

  announce(now) {
    if (now - this.announcedAt < ANNOUNCE_EVERY_MS) return;
    this.announcedAt = now;
    const bar = byId("bar");
    const { sent } = this;
    const last = this.ended ? null : this.last;
    bar.setAttribute("aria-valuemax", String(Math.max(1, sent, Math.ceil(last?.expected_tokens ?? 0))));
    bar.setAttribute("aria-valuenow", String(sent));
    const expected = last ? `, ${integer(last.expected_tokens)} expected, 90 percent within ${formatInterval(last)}` : "";
    bar.setAttribute("aria-valuetext", `${integer(sent)} sent${expected}`);
  }

  /** The axes hold every sent token and the present interval; both grow with the answer. */
  drawChart() {
    const [, , , high] = this.path.at(-1);
    const now = Math.max(high, this.sent, 1);
    const highest = this.path.reduce((most, point) => Math.max(most, point[3]), now);
    const yTicks = axisTicks(Math.min(highest, MAX_OVERSHOOT * now));
    const xTicks = axisTicks(now);
    const [top, right] = [yTicks.at(-1), xTicks.at(-1)];
    const x = (tokens) => Math.min(100, (tokens / right) * 100);
    const y = (tokens) => 100 - Math.min(100, Math.max(0, tokens / top) * 100);
    const point = (sent, tokens) => `${x(sent).toFixed(2)},${y(tokens).toFixed(2)}`;
    const highs = this.path.map(([sent, , , tokens]) => point(sent, tokens));
    const lows = this.path.map(([sent, tokens]) => point(sent, tokens)).reverse();
    const middle = this.path.map(([sent, , tokens]) => point(sent, tokens));
    const diagonal = Math.min(top, right);
    const grid = yTicks.map((tick) => `M0 ${y(tick)}H100`).join("");
    byId("cone-figure").hidden = false;
    byId("cone").replaceChildren(
      svgElement("path", { d: grid, class: "grid" }),
      svgElement("path", { d: `M0 100L${x(diagonal)} ${y(diagonal)}`, class: "diagonal" }),
      svgElement("polygon", { points: [...highs, ...lows].join(" "), class: "band" }),
      svgElement("polyline", { points: middle.join(" "), class: "expected" }),
    );
    labelAxis(byId("cone-y"), yTicks, (tick) => ["top", y(tick)]);
    labelAxis(byId("cone-x"), xTicks, (tick) => ["left", x(tick)]);
  }

  /** Compares the first forecast with the number of tokens. */
  summarize(tokens, complete) {
    if (!this.first) return "";
    const { low_tokens: low, high_tokens: high, expected_tokens: expected } = this.first;
    const forecast = `First forecast: ${integer(expected)}, 90 % within ${formatInterval(this.first)}`;
    const inside = low <= tokens && tokens <= high;
    return complete ? `${forecast}; the answer was ${inside ? "inside" : "outside"}.` : `${forecast}.`;
  }
}

const formatInterval = ({ low_tokens: low, high_tokens: high }) => `${integer(low)}–${integer(high)}`;

/** Mean length of the answers of the last minute; 0 if there are none. */
function meanTokens(classes) {
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  const answers = classes.map(({ met, missed }) => met + total(Object.values(missed)) - (missed.rejected ?? 0));
  return total(classes.map(({ tokens }) => tokens)) / Math.max(1, total(answers));
}

/** Round numbers from 0 to at least `most`, evenly spaced. */
function axisTicks(most) {
  const magnitude = 10 ** Math.floor(Math.log10(most / MAX_TICKS));
  const factor = STEPS.find((each) => each * magnitude * MAX_TICKS >= most);
  const step = Math.max(1, Math.ceil(factor * magnitude));
  return Array.from({ length: Math.max(1, Math.ceil(most / step)) + 1 }, (_, index) => index * step);
}

function labelAxis(axis, ticks, place) {
  axis.replaceChildren(
    ...ticks.map((tick) => {
      const label = element("span", { textContent: integer(tick) });
      const [side, at] = place(tick);
      label.style.setProperty(side, `${at}%`);
      return label;
    }),
  );
}
