// Curves on canvases. A chart is drawn when it comes into view, and again when the
// settings, the window or the colours change.

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4], [1, 2], [6, 2, 1, 2]];
const settings = { smoothing: 0, log: false, time: false };
const charts = new Set();
let numCharts = 0;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return the points of a metric over all stages of a run: [x, y], x ascending. */
function curve(run, name) {
  const xs = [], ys = [];
  for (const stage of run.stages) {
    const found = stage.curves[name];
    if (!found) continue;
    // A stage begins where the one before it ended: a gap, and no line between.
    const shift = stage.offset > 0 ? 1e-3 : 0;
    if (xs.length) { xs.push(stage.offset + shift / 2); ys.push(null); }
    found[0].forEach((step, i) => {
      const x = stage.offset + (step === 0 ? shift : step);
      if (xs.length && x <= xs[xs.length - 1]) return;
      xs.push(x);
      ys.push(found[1][i]);
    });
  }
  return [xs, ys];
}

/** Return hours since the start of the run for its steps. */
function clock(run) {
  const steps = [], hours = [];
  let start = null;
  for (const stage of run.stages) {
    stage.times[0].forEach((step, i) => {
      start = start === null ? stage.times[1][i] : start;
      steps.push(stage.offset + step);
      hours.push((stage.times[1][i] - start) / 3600);
    });
  }
  return (x) => {
    let low = 0, high = steps.length - 1;
    if (high < 0) return x;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= x) low = middle; else high = middle;
    }
    const width = steps[high] - steps[low];
    const share = width > 0 ? Math.min(Math.max((x - steps[low]) / width, 0), 1) : 0;
    // Kept ascending where two steps were logged in one moment.
    return hours[low] + share * (hours[high] - hours[low]) + x * 1e-9;
  };
}

/** Smooth by an exponential mean that begins without a bias. */
function smooth(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) { mean = 0; mass = 0; return null; }
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

// A step is a whole number.
const STEPS = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));

/** Write a number of an axis with the digits that tell it from its neighbour. */
function tick(value, step) {
  const size = Math.abs(value);
  if (!(step > 0) || size / step < 1000 || size >= 1e6) return shown(value);
  return value.toFixed(Math.min(Math.max(Math.ceil(-Math.log10(step)), 0), 12));
}

/** Return the range of the axis of values; that of a constant is not empty. */
function valueRange(stacked) {
  return (_, low, high) => {
    if (low === null || high === null) return settings.log && !stacked ? [0.1, 1] : [0, 1];
    if (stacked) return [0, high > 0 ? high * 1.02 : 1];
    if (settings.log) return uPlot.rangeLog(low, high, 10, false);
    if (low === high) return [low - (Math.abs(low) * 0.1 || 0.1), high + (Math.abs(high) * 0.1 || 0.1)];
    return uPlot.rangeNum(low, high, 0.1, true);
  };
}

function axes(unit) {
  const base = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
  const label = { labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 2 };
  const values = (_, ticks, __, ___, step) => ticks.map((v) => (v === null ? "" : tick(v, step)));
  // Wide enough for the longest number; 62 is that of most, so that charts line up.
  const width = (_, texts) => Math.max(62, 18 + 7.2 * Math.max(0, ...(texts ?? []).map((text) => text.length)));
  const whole = settings.time ? {} : { incrs: STEPS };
  return [
    { ...base, ...label, ...whole, values, label: settings.time ? "hours since the start" : "step", size: 32 },
    { ...base, values, size: width, ...(unit ? { ...label, label: unit } : {}) },
  ];
}

/** Draw where stages begin and where checkpoints are. */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.textAlign = "left";
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  for (const mark of marks) {
    const x = plot.valToPos(mark.x, "x", true);
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = colour(mark.colour);
    ctx.lineWidth = devicePixelRatio;
    if (mark.stage) {
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(mark.stage, x + 3 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
      continue;
    }
    const size = (mark.best ? 6 : 4) * devicePixelRatio;
    const y = bbox.top + bbox.height;
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x - size, y);
    ctx.lineTo(x, y - 1.6 * size);
    ctx.lineTo(x + size, y);
    ctx.closePath();
    if (mark.best) ctx.fill(); else ctx.stroke();
  }
  ctx.restore();
}

/** Return the marks of a run: its stages, its checkpoints and the best of them. */
function marksOf(run, colourName) {
  const at = settings.time ? clock(run) : (x) => x;
  return run.stages.flatMap((stage) => [
    ...(run.stages.length > 1 ? [{ x: at(stage.offset), stage: stage.name, colour: "--muted" }] : []),
    ...stage.checkpoints.map((step) => (
      { x: at(stage.offset + step), best: step === stage.best, colour: colourName })),
  ]);
}

/** Say in words what a chart shows. */
function described(title, lines) {
  const parts = lines.map(({ label, points: [xs, ys] }) => {
    const values = ys.filter((y) => y !== null);
    const last = xs[xs.length - 1];
    return `${label}: from ${shown(values[0])} to ${shown(values[values.length - 1])} at ${shown(last)}`;
  });
  return `${title}. ${parts.join("; ")}`;
}

const CHART_KEYS = "Keys: + and − zoom, arrows move, 0 or Escape resets; Tab goes to the names of the curves, and Enter hides one or shows it again.";
const ZOOM_KEYS = { "+": "in", "=": "in", "-": "out", "_": "out", "−": "out", ArrowLeft: "left", ArrowRight: "right", 0: "reset", Escape: "reset" };

/**
 * Return the part [from, to] of an axis that a step of zooming shows.
 * whole: the whole axis. part: what is shown now. Null stands for the whole axis.
 */
function zoomedPart(whole, part, move) {
  const [first, last] = whole, [from, to] = part || whole;
  const width = to - from, middle = (from + to) / 2;
  if (move === "reset" || !(last > first)) return null;
  if (move === "left" || move === "right") {
    const shift = move === "left" ? Math.max(-width / 4, first - from) : Math.min(width / 4, last - to);
    return part && [from + shift, to + shift];
  }
  const wanted = move === "in" ? Math.max(width / 2, (last - first) * 1e-4) : width * 2;
  if (wanted >= last - first) return null;
  const start = Math.min(Math.max(middle - wanted / 2, first), last - wanted);
  return [start, start + wanted];
}

/** Return the whole axis of a plot. */
function wholeOf(plot) {
  const xs = plot.data[0];
  return [xs[0], xs[xs.length - 1]];
}

/** Return the part of its axis that a plot shows; null for all of it. */
function partOf(plot) {
  const { min, max } = plot.scales.x, [first, last] = wholeOf(plot);
  return min <= first && max >= last ? null : [min, max];
}

/** Show a part of the axis in all charts that are on the screen, as the mouse does. */
function zoomAll(part) {
  for (const { card, plot } of charts) {
    if (!plot() || !card.clientWidth) continue;
    const [min, max] = part || wholeOf(plot());
    plot().setScale("x", { min, max });
  }
}

/** Make the names of curves in a legend buttons; hidden: the names that are hidden. */
function makeLegendButtons(plot, hidden) {
  const rows = [...plot.root.querySelectorAll(".u-legend .u-series")].slice(1);
  const buttons = rows.map((row, i) => {
    const name = row.querySelector("th"), label = plot.series[i + 1].label;
    // The click goes on to the name, where uPlot waits for it.
    const button = el("button", { type: "button", class: "curve", "aria-label": `curve ${label}` });
    button.append(...name.childNodes);
    name.append(button);
    return button;
  });
  const tell = () => buttons.forEach((button, i) => {
    const { label, show } = plot.series[i + 1];
    button.setAttribute("aria-pressed", String(show));
    if (show) hidden.delete(label); else hidden.add(label);
  });
  tell();
  return tell;
}

/**
 * Make a chart.
 * title, unit: texts. lines(): [{label, points: [xs, ys], colour, dash, run}] in steps.
 * marks(): see marksOf. stacked: the lines lie upon each other, areas filled.
 */
function chart({ title, unit, lines, marks = () => [], wide = false, stacked = false, height = 240 }) {
  const id = `chart-keys-${numCharts += 1}`;
  // A group and no image: the legend inside has buttons.
  const box = el("div", { class: "plot", role: "group", "aria-roledescription": "chart", tabindex: "0", "aria-describedby": id, "aria-keyshortcuts": "+ - ArrowLeft ArrowRight 0 Escape" });
  const shownPart = el("span", { class: "muted", "aria-live": "polite" });
  // Not reached by Tab: with 13 charts that would be a long way, and the keys do the same.
  const zoomButton = (text, name, move) => el("button", { class: "plain", type: "button", tabindex: "-1", "aria-label": `${name}: ${title}`, title: name, onclick: () => zoom(move) }, text);
  const tools = el("div", { class: "zoom" }, shownPart, zoomButton("+", "Zoom in", "in"), zoomButton("−", "Zoom out", "out"),
    zoomButton("‹", "To the left", "left"), zoomButton("›", "To the right", "right"), zoomButton("↺", "Show all", "reset"));
  const card = el("section", { class: wide ? "chart wide" : "chart" },
    el("div", { class: "chart-head" }, el("h3", null, title), tools), box, el("p", { class: "muted who keys", id }, CHART_KEYS));
  let plot = null, part = null, partIsTime = false, tellLegend = () => {};
  const hidden = new Set();
  const zoom = (move) => {
    if (plot) zoomAll(zoomedPart(wholeOf(plot), partOf(plot), move));
  };
  const noteScale = () => {
    part = partOf(plot);
    partIsTime = settings.time;
    const [from, to] = part || [];
    shownPart.textContent = part ? `${settings.time ? "hours" : "steps"} ${shown(Number(from.toPrecision(4)))} to ${shown(Number(to.toPrecision(4)))}` : "";
  };
  box.addEventListener("keydown", (event) => {
    const move = ZOOM_KEYS[event.key];
    if (!move || !plot || event.ctrlKey || event.altKey || event.metaKey) return;
    // Arrows of a chart that shows all scroll the page, as ever.
    if ((move === "left" || move === "right") && !partOf(plot)) return;
    event.preventDefault();
    zoom(move);
  });
  const draw = () => {
    const focused = plot ? [...box.querySelectorAll(".curve")].indexOf(document.activeElement) : -1;
    if (plot) plot.destroy();
    plot = null;
    tellLegend = () => {};
    box.replaceChildren();
    if (partIsTime !== settings.time) part = null;
    const drawn = lines();
    box.setAttribute("aria-label", described(title, drawn));
    const weight = stacked ? 0 : settings.smoothing;
    const series = [], tables = [];
    for (const line of drawn) {
      const at = settings.time && line.run ? clock(line.run) : (x) => x;
      const xs = line.points[0].map(at);
      const ys = line.points[1].map((y) => (settings.log && !stacked && y <= 0 ? null : y));
      const stroke = colour(line.colour);
      const few = xs.length <= 40;
      const value = (_, v) => (v === null || v === undefined ? "–" : shown(v));
      const style = { stroke, value, dash: DASHES[line.dash % DASHES.length], points: { show: few, size: 5 } };
      if (weight > 0 && !few) {
        tables.push([xs, ys]);
        series.push({ ...style, label: `${line.label} (raw)`, show: !hidden.has(`${line.label} (raw)`), alpha: 0.25, width: 1, dash: [], points: { show: false } });
      }
      tables.push([xs, weight > 0 && !few ? smooth(ys, weight) : ys]);
      series.push({ ...style, label: line.label, show: !hidden.has(line.label), width: stacked ? 1 : 2,
        ...(stacked ? { fill: stroke, value: (_, v, i, k) => (k === null ? "–" : shown(line.own[k])) } : {}) });
    }
    if (!tables.length) { box.replaceChildren(el("p", { class: "muted" }, "Nothing was measured.")); return; }
    const data = uPlot.join(tables, tables.map(() => [1, 1]));
    plot = new uPlot({
      width: Math.max(box.clientWidth, 200), height, series: [{ label: settings.time ? "hours" : "step", value: (_, v) => shown(v === null ? v : Math.round(v * 1e3) / 1e3) }, ...series],
      scales: { x: { time: false }, y: { distr: settings.log && !stacked ? 3 : 1, range: valueRange(stacked) } },
      legend: { markers: { width: 3, stroke: (u, i) => series[i - 1].stroke, dash: (u, i) => (series[i - 1].dash.length ? "dashed" : "solid") } },
      axes: axes(unit), cursor: { sync: { key: "steps" }, points: { size: 6 } },
      hooks: { draw: [(u) => drawMarks(u, marks())], setSeries: [() => tellLegend()],
        setScale: [(u, key) => { if (key === "x" && u === plot) noteScale(); }] },
    }, data, box);
    tellLegend = makeLegendButtons(plot, hidden);
    // As it was before it was drawn again.
    if (part) plot.setScale("x", { min: part[0], max: part[1] });
    box.querySelectorAll(".curve")[focused]?.focus({ preventScroll: true });
    card.dataset.drawn = "yes";
  };
  const entry = {
    card, draw, visible: false, plot: () => plot,
    resize() { if (plot && box.clientWidth) plot.setSize({ width: Math.max(box.clientWidth, 200), height }); },
  };
  charts.add(entry);
  observer.observe(card);
  card.chart = entry;
  return card;
}

const observer = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const entry = target.chart;
    if (isIntersecting && !entry.visible) { entry.visible = true; entry.draw(); }
  }
}, { rootMargin: "300px" });

/** Draw again what has been drawn; the rest is drawn when it comes into view. */
function redrawCharts() {
  for (const entry of charts) {
    if (entry.visible && entry.card.isConnected) entry.draw();
  }
}

/** Forget charts of a view that is made new. */
function forgetCharts(parent) {
  for (const entry of charts) {
    if (parent.contains(entry.card)) { observer.unobserve(entry.card); charts.delete(entry); }
  }
}

let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => charts.forEach((entry) => entry.resize()));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);

/** Return the lines of metrics over all runs: runs by colour, metrics by dashes. */
function linesOf(names, text = (name) => name) {
  const lines = [];
  page.runs.forEach((run, number) => names.forEach((name, place) => {
    const points = curve(run, name);
    if (!points[0].length) return;
    const several = page.runs.length > 1;
    lines.push({ run, points,
      label: several ? `${run.name} ${text(name)}` : text(name),
      colour: `--c${(several ? number : place) % NUM_COLOURS}`,
      dash: several ? (names.length > 1 ? place : number) : place });
  }));
  return lines;
}

/** Return the marks of all runs. */
function allMarks() {
  const several = page.runs.length > 1;
  return page.runs.flatMap((run, i) => marksOf(run, several ? `--c${i % NUM_COLOURS}` : "--muted"));
}

/** Return the names of all metrics, of any run and stage. */
function metricNames() {
  const found = new Set();
  page.runs.forEach((run) => run.stages.forEach((s) => Object.keys(s.curves).forEach((n) => found.add(n))));
  return [...found].sort();
}

/** Make a chart of metrics, named by text(name); null where no run has one of them. */
function metricChart(title, names, unit, text) {
  const known = new Set(metricNames());
  const present = names.filter((name) => known.has(name));
  if (!present.length) return null;
  return chart({ title, unit, lines: () => linesOf(present, text), marks: allMarks });
}
