// Measures an answer against its SLA budgets: first token, longest gap, time per token.

import { byId, element, seconds, setText } from "./dom.js";

const CLOCKS = [
  ["ttft_s", "First token"],
  ["mtpot_s", "Longest gap"],
  ["tpot_s", "Per token"],
];

export class SlaClocks {
  constructor() {
    this.rows = new Map();
    for (const [budget, name] of CLOCKS) {
      const value = element("span", { className: "value", textContent: "–" });
      const limit = element("span", { className: "limit" });
      const fill = element("div", { className: "fill" });
      const meter = element("div", { className: "meter", "aria-hidden": "true" }, fill);
      const row = element("div", {}, element("dt", { textContent: name }), element("dd", {}, value, limit), meter);
      this.rows.set(budget, { row, value, limit, meter });
      byId("clocks").append(row);
    }
    this.budgets = {};
    this.ended = true;
  }

  /** Sets the class of the next answer and its budgets in seconds; null means no limit. */
  selectClass(name, budgets) {
    this.budgets = budgets;
    setText(byId("clocks-class"), name);
    for (const [budget, { meter }] of this.rows) {
      meter.hidden = !budgets[budget];
      this.update(budget, null);
    }
  }

  begin(now) {
    this.startedAt = now;
    this.firstAt = this.lastAt = null;
    this.longest = 0;
    this.tokens = 0;
    this.ended = false;
    setText(byId("promise"), "");
    this.draw(now);
  }

  onTokens(count, now) {
    if (this.firstAt === null) this.firstAt = now;
    else this.longest = Math.max(this.longest, now - this.lastAt);
    this.lastAt = now;
    this.tokens += count;
    this.draw(now);
  }

  /** Shows the forecast of the first token and of the SLA. */
  showPromise({ ttft_s: ttft, sla_expected: met }) {
    const parts = [];
    if (Number.isFinite(ttft)) parts.push(`first token expected within ${seconds(ttft)}`);
    if (typeof met === "boolean") parts.push(met ? "SLA expected to be met" : "SLA expected to be missed");
    if (parts.length) setText(byId("promise"), `On arrival: ${parts.join(", ")}.`);
  }

  end(now) {
    this.ended = true;
    this.draw(now);
  }

  tick(now) {
    if (!this.ended) this.draw(now);
  }

  draw(now) {
    const open = this.lastAt === null || this.ended ? 0 : now - this.lastAt;
    const perToken = this.tokens > 1 ? (this.lastAt - this.firstAt) / (this.tokens - 1) : null;
    this.update("ttft_s", this.firstAt === null && this.ended ? null : (this.firstAt ?? now) - this.startedAt);
    this.update("mtpot_s", this.tokens > 1 || open ? Math.max(this.longest, open) : null);
    this.update("tpot_s", perToken);
  }

  /** Shows one measured time in ms, null while unknown. */
  update(budget, measured) {
    const { row, value, limit: limitText, meter } = this.rows.get(budget);
    const limit = this.budgets[budget];
    const used = measured === null || !limit ? 0 : measured / 1000 / limit;
    setText(value, measured === null ? "–" : seconds(measured / 1000));
    meter.style.setProperty("--used", `${Math.min(100, used * 100)}%`);
    row.classList.toggle("missed", used > 1);
    setText(limitText, formatLimit(limit, used > 1));
  }
}

const formatLimit = (budget, over) => (budget ? ` of ${formatExactly(budget)}${over ? ", over" : ""}` : ", no limit");

const formatExactly = (budget) => (budget < 0.0995 ? `${Number((budget * 1000).toPrecision(3))}\u00a0ms` : `${budget}\u00a0s`);
