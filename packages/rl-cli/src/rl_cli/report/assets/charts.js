// Curves on canvases. A chart is drawn when it comes into view, and again when the
// settings, the window or the colours change.

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 4], [1, 2], [6, 2, 1, 2]];
const settings = { smoothing: 0, log: false, time: false };
const charts = new Set();

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

/**
 * Make a chart.
 * title, unit: texts. lines(): [{label, points: [xs, ys], colour, dash, run}] in steps.
 * marks(): see marksOf. stacked: the lines lie upon each other, areas filled.
 */
function chart({ title, unit, lines, marks = () => [], wide = false, stacked = false, height = 240 }) {
  const box = el("div", { class: "plot", role: "img" });
  const card = el("section", { class: wide ? "chart wide" : "chart" }, el("h3", null, title), box);
  let plot = null;
  const draw = () => {
    if (plot) plot.destroy();
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
        series.push({ ...style, label: `${line.label} (raw)`, alpha: 0.25, width: 1, dash: [], points: { show: false } });
      }
      tables.push([xs, weight > 0 && !few ? smooth(ys, weight) : ys]);
      series.push({ ...style, label: line.label, width: stacked ? 1 : 2,
        ...(stacked ? { fill: stroke, value: (_, v, i, k) => (k === null ? "–" : shown(line.own[k])) } : {}) });
    }
    if (!tables.length) { box.replaceChildren(el("p", { class: "muted" }, "Nothing was measured.")); return; }
    const data = uPlot.join(tables, tables.map(() => [1, 1]));
    plot = new uPlot({
      width: Math.max(box.clientWidth, 200), height, series: [{ label: settings.time ? "hours" : "step", value: (_, v) => shown(v === null ? v : Math.round(v * 1e3) / 1e3) }, ...series],
      scales: { x: { time: false }, y: { distr: settings.log && !stacked ? 3 : 1, range: valueRange(stacked) } },
      legend: { markers: { width: 3, stroke: (u, i) => series[i - 1].stroke, dash: (u, i) => (series[i - 1].dash.length ? "dashed" : "solid") } },
      axes: axes(unit), cursor: { sync: { key: "steps" }, points: { size: 6 } },
      hooks: { draw: [(u) => drawMarks(u, marks())] },
    }, data, box);
    card.dataset.drawn = "yes";
  };
  const entry = {
    card, draw, visible: false,
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
function linesOf(names) {
  const lines = [];
  page.runs.forEach((run, number) => names.forEach((name, place) => {
    const points = curve(run, name);
    if (!points[0].length) return;
    const several = page.runs.length > 1;
    lines.push({ run, points,
      label: several ? `${run.name} ${name}` : name,
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

/** Make a chart of metrics; null where no run has one of them. */
function metricChart(title, names, unit) {
  const known = new Set(metricNames());
  const present = names.filter((name) => known.has(name));
  if (!present.length) return null;
  return chart({ title, unit, lines: () => linesOf(present), marks: allMarks });
}
