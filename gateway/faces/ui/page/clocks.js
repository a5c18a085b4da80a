// The clocks of an answer's SLA: first token, present gap, pace, each against its budget.

import { byId, element, seconds, write } from "./dom.js";

const CLOCKS = [
  ["ttft_s", "First token"],
  ["mtpot_s", "Longest gap"],
  ["tpot_s", "Pace a token"],
];

export class Clocks {
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
    this.over = true;
  }

  /** The class of the next answer, with its budgets, null where there is none. */
  choose(name, budgets) {
    this.budgets = budgets;
    write(byId("clocks-class"), name);
    for (const [budget, { meter }] of this.rows) {
      const value = budgets[budget];
      meter.hidden = !value;
      this.show(budget, null);
    }
  }

  begin(now) {
    this.askedAt = now;
    this.firstAt = this.lastAt = null;
    this.longest = 0;
    this.tokens = 0;
    this.over = false;
    write(byId("promise"), "");
    this.draw(now);
  }

  /** `count` tokens came. */
  onTokens(count, now) {
    if (this.firstAt === null) this.firstAt = now;
    else this.longest = Math.max(this.longest, now - this.lastAt);
    this.lastAt = now;
    this.tokens += count;
    this.draw(now);
  }

  /** What the server promised at the start. */
  promise({ ttft_s: ttft, sla_expected: holds }) {
    const parts = [];
    if (Number.isFinite(ttft)) parts.push(`first token promised after ${seconds(ttft)}`);
    if (typeof holds === "boolean") parts.push(holds ? "expected to hold" : "expected to be missed");
    if (parts.length) write(byId("promise"), `At the start: ${parts.join(", ")}.`);
  }

  end(now) {
    this.over = true;
    this.draw(now);
  }

  tick(now) {
    if (!this.over) this.draw(now);
  }

  draw(now) {
    const open = this.lastAt === null || this.over ? 0 : now - this.lastAt;
    const pace = this.tokens > 1 ? (this.lastAt - this.firstAt) / (this.tokens - 1) : null;
    this.show("ttft_s", this.firstAt === null && this.over ? null : (this.firstAt ?? now) - this.askedAt);
    this.show("mtpot_s", this.tokens > 1 || open ? Math.max(this.longest, open) : null);
    this.show("tpot_s", pace);
  }

  show(budget, taken) {
    const { row, value, limit: limitText, meter } = this.rows.get(budget);
    const limit = this.budgets[budget];
    const spent = taken === null || !limit ? 0 : taken / 1000 / limit;
    write(value, taken === null ? "–" : seconds(taken / 1000));
    meter.style.setProperty("--spent", `${Math.min(100, spent * 100)}%`);
    row.classList.toggle("missed", spent > 1);
    write(limitText, limitOf(limit, spent > 1));
  }
}

const limitOf = (budget, over) => (budget ? ` of ${exactly(budget)}${over ? ", over" : ""}` : ", no limit");

const exactly = (budget) => (budget < 0.0995 ? `${Number((budget * 1000).toPrecision(3))}\u00a0ms` : `${budget}\u00a0s`);
