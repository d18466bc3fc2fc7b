// Runs the script of a page in Node, on a small stand-in for a browser's document: its
// elements have children, attributes and events, and no layout or style.
// node rl_cli_page_in_node.js PAGE EXPRESSION: prints the value as JSON.

const fs = require("fs"), vm = require("vm");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, childNodes: [], attributes: {}, dataset: {}, listeners: {}, parent: null,
      style: {}, className: "", hidden: false, clientWidth: 600, value: "", tabIndex: -1, checked: false, disabled: false });
  }
  get children() { return this.childNodes.filter((node) => node instanceof Element); }
  get childElementCount() { return this.children.length; }
  get isConnected() { return this === root || Boolean(this.parent && this.parent.isConnected); }
  get textContent() { return this.childNodes.map((node) => (node instanceof Element ? node.textContent : node)).join(""); }
  set textContent(text) { this.replaceChildren(String(text)); }
  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof Element) { node.remove(); node.parent = this; }
      this.childNodes.push(node instanceof Element ? node : String(node));
    }
  }
  prepend(node) { this.append(node); this.childNodes.unshift(this.childNodes.pop()); }
  after(node) { this.parent.append(node); }
  remove() { if (this.parent) { this.parent.childNodes = this.parent.childNodes.filter((node) => node !== this); this.parent = null; } }
  replaceChildren(...nodes) { [...this.childNodes].forEach((node) => node instanceof Element && node.remove()); this.childNodes = []; this.append(...nodes); }
  hasChildNodes() { return this.childNodes.length > 0; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return name === "class" ? this.className : this.attributes[name] ?? null; }
  addEventListener(name, act) { (this.listeners[name] ??= []).push(act); }
  contains(other) { return this === other || this.children.some((child) => child.contains(other)); }
  scrollIntoView() {}
  focus() { document.activeElement = this; }
  /** Send an event here, then to the elements around. */
  send(type, more = {}) {
    const event = { type, target: this, button: 0, prevented: false, preventDefault() { this.prevented = true; }, ...more };
    for (let at = this; at; at = at.parent) for (const act of at.listeners[type] || []) act(event);
    return event.prevented;
  }
  press(key, more = {}) { return this.send("keydown", { key, ...more }); }
  matches(selector) {
    const parts = selector.match(/^[a-z0-9]+|[.#][\w-]+|\[[^\]]+\]/g);
    return parts.every((part) => {
      if (part[0] === ".") return this.className.split(" ").includes(part.slice(1));
      if (part[0] === "#") return this.attributes.id === part.slice(1);
      if (part[0] !== "[") return this.tag === part;
      const [name, value] = part.slice(1, -1).split("=");
      const own = name.startsWith("data-") ? this.dataset[name.slice(5)] : this.attributes[name];
      return own !== undefined && (value === undefined || own === value.replace(/^["']|["']$/g, ""));
    });
  }
  querySelectorAll(selector) {
    const steps = selector.split(" ");
    let found = [this];
    for (const step of steps) found = [...new Set(found.flatMap((from) => from.below()))].filter((node) => node.matches(step));
    return found;
  }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
  below() { return this.children.flatMap((child) => [child, ...child.below()]); }
}

const page = fs.readFileSync(process.argv[2], "utf8");
const [, data] = page.match(/<script type="application\/json" id="data">(.*?)<\/script>/s);
const script = page.slice(page.lastIndexOf("<script>") + 8, page.lastIndexOf("</script>"));
const root = new Element("html");
for (const [tag, id] of [["h1", "title"], ["ul", "runs"], ["div", "tabs"], ["main", "views"], ["footer", "footer"], ["script", "data"]]) {
  const made = new Element(tag);
  made.attributes.id = id;
  root.append(made);
}
root.querySelector("#data").textContent = data;
const document = {
  documentElement: root, head: root, activeElement: root,
  createElement: (tag) => new Element(tag),
  getElementById: (id) => root.querySelector(`#${id}`),
  querySelector: (selector) => root.querySelector(selector),
  querySelectorAll: (selector) => root.querySelectorAll(selector),
};

/** uPlot without its canvas: what is shown, and the legend as uPlot makes it. */
class Plot {
  constructor(options, data, box) {
    Object.assign(this, { options, data, series: options.series.map((one) => ({ show: true, ...one })), root: new Element("div") });
    const legend = new Element("table");
    legend.className = "u-legend u-inline u-live";
    this.series.forEach((one, place) => {
      const row = new Element("tr"), name = new Element("th"), marker = new Element("div"), label = new Element("div");
      row.className = one.show ? "u-series" : "u-series u-off";
      marker.className = "u-marker";
      label.className = "u-label";
      label.textContent = one.label;
      name.append(marker, label);
      row.append(name);
      legend.append(row);
      if (place) name.addEventListener("click", () => this.setSeries(place, { show: !one.show }));
    });
    this.root.append(legend);
    box.append(this.root);
    this.scales = { x: { min: data[0][0], max: data[0].at(-1) } };
    queueMicrotask(() => this.call("setScale", "x"));
  }
  call(name, ...given) { (this.options.hooks[name] || []).forEach((act) => act(this, ...given)); }
  setScale(key, { min, max }) { this.scales[key] = { min, max }; this.call("setScale", key); }
  setSeries(place, { show }) { this.series[place].show = show; this.call("setSeries", place, { show }); }
  setSize() {}
  destroy() { this.root.remove(); }
  static join(tables) {
    const xs = [...new Set(tables.flatMap(([x]) => x))].sort((a, b) => a - b);
    return [xs, ...tables.map(([x, y]) => xs.map((one) => (x.includes(one) ? y[x.indexOf(one)] : undefined)))];
  }
}

class Observer {
  constructor(act) { this.act = act; }
  observe(target) { queueMicrotask(() => this.act([{ isIntersecting: true, target }])); }
  unobserve() {}
}

const context = vm.createContext({
  document, console, setTimeout, queueMicrotask, addEventListener() {}, history: { replaceState() {} },
  location: { hash: `#${process.argv[4] || "learning"}`, search: "" }, devicePixelRatio: 1,
  getComputedStyle: () => ({ getPropertyValue: () => "#000" }), matchMedia: () => ({ addEventListener() {} }),
  requestAnimationFrame() {}, cancelAnimationFrame() {}, IntersectionObserver: Observer, Plot,
});
// The page's own script begins with uPlot, which draws on a canvas.
vm.runInContext(script.replace(/var uPlot=function\(\)\{.*?\n/s, "var uPlot = Plot;\n"), context);
setTimeout(async () => {
  const found = await vm.runInContext(`(async () => (${process.argv[3]}))()`, context);
  process.stdout.write(JSON.stringify(found ?? null));
}, 0);
