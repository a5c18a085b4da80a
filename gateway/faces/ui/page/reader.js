// Reads a growing answer to those who hear it: whole sentences, now and then, never each token.

const EVERY_MS = 2500;
const MOST_CHARS = 400; // of one saying, where no sentence ends
const MOST_SAID = 20; // kept in the page
const SENTENCE_END = /[.!?\n]["')\]]?\s/g;

export class Reader {
  constructor(place) {
    this.place = place;
    this.rest = "";
    this.saidAt = 0;
  }

  add(text) {
    this.rest += text;
    const now = performance.now();
    if (now - this.saidAt < EVERY_MS) return;
    const ends = [...this.rest.matchAll(SENTENCE_END)].at(-1);
    const cut = ends ? ends.index + ends[0].length : this.rest.length > MOST_CHARS ? this.rest.length : 0;
    if (!cut) return;
    this.say(this.rest.slice(0, cut));
    this.rest = this.rest.slice(cut);
    this.saidAt = now;
  }

  end(closing) {
    this.say(`${this.rest} ${closing}`);
    this.rest = "";
  }

  say(text) {
    if (!text.trim()) return;
    const line = document.createElement("p");
    line.textContent = text.trim();
    this.place.append(line);
    while (this.place.childElementCount > MOST_SAID) this.place.firstElementChild.remove();
  }
}
