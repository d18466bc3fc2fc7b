"use strict";
// Elements, numbers and the page's data. Texts of models, data and logs become text
// nodes only; nothing here, or in the other files, reads a string as HTML.

const page = JSON.parse(document.getElementById("data").textContent);
const NUM_COLOURS = 8;

/** Make an element: properties, then children; texts become text nodes. */
function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

/** Write a number with about four digits. */
function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** Write seconds as people say them. */
function duration(seconds) {
  if (seconds < 90) return `${shown(Number(seconds.toPrecision(3)))} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** Make a table of rows under names; cells are texts, numbers or elements. */
function table(caption, columns, rows, longColumns = []) {
  const isNumber = columns.map((_, i) => rows.some((r) => typeof r[i] === "number"));
  const cell = (value, i) => {
    const kind = isNumber[i] ? "number" : longColumns.includes(i) ? "long" : "";
    return el("td", { class: kind }, typeof value === "number" ? shown(value) : value);
  };
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { class: "data" },
      el("thead", null, el("tr", null, columns.map((name, i) =>
        el("th", { scope: "col", class: isNumber[i] ? "number" : "" }, name)))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map(cell))))));
}

/** Make a labelled control. */
function labelled(text, control) {
  return el("label", null, text, control);
}

/** Make a select of [value, text] pairs. */
function choice(options, change) {
  const made = el("select", { onchange: () => change(made.value) },
    options.map(([value, text]) => el("option", { value: String(value) }, text)));
  return made;
}

/** Make a checkbox with its label. */
function checkbox(text, change, checked = false) {
  const box = el("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
  return el("label", null, box, text);
}

const waiting = new Map();
const loaded = new Map(Object.entries(page.chunks));

/** What the chunk files call when they have been loaded. */
globalThis.rlReport = Object.freeze({
  chunk(name, records) {
    loaded.set(name, records);
    const found = waiting.get(name);
    if (found) found.resolve(records);
  },
});

/** Return the answers of a chunk, inside the page or from a file beside it. */
function loadChunk(name) {
  if (loaded.has(name)) return Promise.resolve(loaded.get(name));
  if (page.live) return askForChunk(name);
  if (waiting.has(name)) return waiting.get(name).promise;
  const entry = {};
  entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
  waiting.set(name, entry);
  const missing = `${page.files}/chunk-${name}.js could not be loaded: keep the folder ` +
    `${page.files} beside this page`;
  document.head.append(el("script", {
    src: `${encodeURIComponent(page.files)}/chunk-${name}.js`,
    onerror: () => { waiting.delete(name); entry.reject(new Error(missing)); },
  }));
  return entry.promise;
}
