// Accessibility checks that tests run in the page. Each returns a list of faults.

window.probes = {
  // Elements outside the screen, except within scrolling containers.
  overflowing() {
    const apart = ".scroll, .sr, .skip";
    const beyond = (box) => box.width > 1 && (box.right > innerWidth + 1 || box.left < -1);
    return [...document.querySelectorAll("main *, header *")]
      .filter((element) => beyond(element.getBoundingClientRect()) && !element.closest(apart))
      .map(outline);
  },

  // Controls without an accessible name.
  unnamed() {
    const named = (element) =>
      element.textContent.trim() || element.labels?.length || element.ariaLabel;
    return [...document.querySelectorAll("button, input, select, textarea, a")]
      .filter((element) => element.checkVisibility() && !named(element))
      .map(outline);
  },

  // Visible text with a contrast below WCAG's AA: 4.5, or 3 where it is large.
  pale() {
    const apart = ".sr, .skip, noscript, option";
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) {
      const element = texts.currentNode.parentElement;
      const text = texts.currentNode.data.trim();
      if (!text || !element.checkVisibility() || element.closest(apart)) continue;
      const style = getComputedStyle(element);
      const below = ground(element);
      const [dark, bright] = [light(over(style.color, below)), light(below)].sort((a, b) => a - b);
      const contrast = (bright + 0.05) / (dark + 0.05);
      const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
      if (contrast < least) found.push(`${contrast.toFixed(2)} ${text.slice(0, 40)}`);
    }
    return found;
  },
};

const outline = (element) => element.outerHTML.slice(0, 80);
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

function over(top, below) {
  canvas.fillStyle = `rgb(${below})`;
  canvas.fillRect(0, 0, 1, 1);
  canvas.fillStyle = top;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

function ground(element) {
  if (!element) return [255, 255, 255];
  return over(getComputedStyle(element).backgroundColor, ground(element.parentElement));
}

function light(colour) {
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = colour.map((part) => linear(part / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
