// Who worked when? The calls of all actors and the phases of the driver, by the wall
// clock. Only the steps that are looked at are loaded; the functions above the class
// know nothing of the page, and are tested alone.

const MOST_LANES = 6, MOST_ROWS = 40, NUM_NAMED = 7, GREY = "--c6";
const DRIVER = "driver";

/**
 * Join records of steps that follow one another: times in seconds from their begin.
 * Returns { start, end, marks: [{ at, text }], rows: [{ name, node, pid, calls, summed,
 * memory, gpu }] }; a call is { method, start, end }.
 */
function joinRecords(records) {
  const origin = records[0].start_s, last = records[records.length - 1];
  const rows = new Map();
  const marks = records.map((record) => ({ at: record.start_s - origin, text: stepName(record.step, record.is_start) }));
  for (const record of records) {
    const shift = record.start_s - origin;
    for (const found of record.rows) {
      const key = JSON.stringify([found.name, found.node, found.pid]);
      if (!rows.has(key)) rows.set(key, { name: found.name, node: found.node, pid: found.pid, calls: [], summed: {}, memory: 0, gpu: null });
      const row = rows.get(key);
      const earlier = row.calls.length;
      for (const [number, begin, length] of found.calls) {
        const call = { method: record.methods[number], start: shift + begin / 1e6, end: shift + (begin + length) / 1e6 };
        // It went on when the step before ended, where it is as well.
        const known = begin < 0 ? row.calls.slice(0, earlier).find((c) => c.method === call.method && Math.abs(c.start - call.start) < 1e-3) : null;
        if (known) known.end = Math.max(known.end, call.end); else row.calls.push(call);
      }
      for (const [method, [number, seconds]] of Object.entries(found.summed)) {
        const sum = row.summed[method] || [0, 0];
        row.summed[method] = [sum[0] + number, sum[1] + seconds];
      }
      row.memory = Math.max(row.memory, found.memory);
      row.gpu = found.gpu === null ? row.gpu : Math.max(row.gpu || 0, found.gpu);
    }
  }
  const order = (row) => (row.name === DRIVER ? 0 : 1);
  const sorted = [...rows.values()].sort((a, b) => order(a) - order(b) || a.name.localeCompare(b.name, "en", { numeric: true }) || a.pid - b.pid);
  for (const row of sorted) row.calls.sort((a, b) => a.start - b.start || b.end - a.end);
  return { start: 0, end: last.start_s + last.seconds - origin, marks, rows: sorted };
}

function stepName(step, isStart) {
  if (!isStart) return `step ${step}`;
  return step ? `start again after step ${step}` : "start";
}

/** Give each call a lane in which it overlaps no other; the last one takes the rest. */
function lanesOf(calls) {
  const ends = [];
  return calls.map((call) => {
    let lane = ends.findIndex((end) => end <= call.start + 1e-6);
    if (lane < 0) lane = Math.min(ends.length, MOST_LANES - 1);
    ends[lane] = Math.max(ends[lane] ?? -Infinity, call.end);
    return lane;
  });
}

/** Return the seconds of a window in which at least one call ran. */
function busySeconds(row, start, end) {
  let busy = 0, reached = start;
  for (const call of row.calls) {
    const from = Math.max(call.start, reached), to = Math.min(call.end, end);
    if (to > from) { busy += to - from; reached = to; }
  }
  for (const [, seconds] of Object.values(row.summed)) busy += seconds;
  return Math.min(busy, end - start);
}

/** Return number and seconds of each method of a row in a window, the longest first. */
function methodSums(row, start, end) {
  const sums = new Map();
  const add = (method, number, seconds) => {
    const [n, s] = sums.get(method) || [0, 0];
    sums.set(method, [n + number, s + seconds]);
  };
  for (const call of row.calls) {
    const seconds = Math.min(call.end, end) - Math.max(call.start, start);
    if (seconds > 0) add(call.method, 1, seconds);
  }
  for (const [method, [number, seconds]] of Object.entries(row.summed)) add(method, number, seconds);
  return [...sums].sort((a, b) => b[1][1] - a[1][1]);
}

/** Return the methods of all workers, those with the most time first. */
function methodsOf(joined) {
  const sums = new Map();
  for (const row of joined.rows.filter((found) => found.name !== DRIVER)) {
    for (const [method, [, seconds]] of methodSums(row, joined.start, joined.end)) sums.set(method, (sums.get(method) || 0) + seconds);
  }
  return [...sums].sort((a, b) => b[1] - a[1]).map(([method]) => method);
}

/** Return the events of a Chrome trace; groups: joined records with their origin. */
function actorEvents(groups) {
  const events = [], numbers = new Map();
  const first = Math.min(...groups.map((group) => group.origin));
  for (const { origin, joined } of groups) {
    const shift = (origin - first) * 1e6;
    for (const row of joined.rows) {
      const key = JSON.stringify([row.name, row.node, row.pid]);
      if (!numbers.has(key)) {
        const pid = numbers.size + 1;
        numbers.set(key, pid);
        events.push({ name: "process_name", ph: "M", pid, tid: 0, args: { name: `${row.name} (node ${row.node}, pid ${row.pid})` } },
          { name: "process_sort_index", ph: "M", pid, tid: 0, args: { sort_index: row.name === DRIVER ? 0 : pid } });
      }
      const pid = numbers.get(key), lanes = lanesOf(row.calls);
      row.calls.forEach((call, i) => events.push({ name: call.method, ph: "X", pid, tid: lanes[i], ts: shift + call.start * 1e6, dur: (call.end - call.start) * 1e6 }));
      if (row.name === DRIVER) joined.marks.forEach((mark) => events.push({ name: mark.text, ph: "i", s: "g", pid, tid: 0, ts: shift + mark.at * 1e6 }));
    }
  }
  return events;
}

/** Return the places of steps up to one of them that follow one another without a gap. */
function placesUpTo(steps, last, most) {
  const end = ([, , number, seconds]) => number / 1000 + seconds;
  let first = last;
  // Begins are rounded to milliseconds.
  while (first > 0 && last - first + 1 < most && Math.abs(end(steps[first - 1]) - steps[first][2] / 1000) < 0.01) first -= 1;
  return [first, last];
}

function share(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(1)}\u00a0%` : "–";
}

function bytes(number) {
  if (!number) return "–";
  return number < 2 ** 30 ? `${Math.round(number / 2 ** 20)} MiB` : `${(number / 2 ** 30).toFixed(1)} GiB`;
}

const timelineViews = new Map();

/** Return the time line of a stage: one that is there stays as it was left. */
function timelineOf(stage, label) {
  const { key } = stage.timeline;
  if (!timelineViews.has(key)) timelineViews.set(key, new TimelineView(label));
  const view = timelineViews.get(key);
  view.take(stage.timeline);
  return view;
}

/** Shows some steps of the time line of a stage. */
class TimelineView {
  constructor(label) {
    this.label = label;
    this.source = null;
    this.place = -1;
    this.count = 1;
    this.part = null;
    this.joined = null;
    this.run = 0;
    this.shownName = "";
    this.allRows = false;
    this.colours = new Map();
    const button = (text, name, act) => el("button", { class: "plain", type: "button", title: name, "aria-label": `${name}: ${label}`, onclick: act }, text);
    const zoomButton = (text, name, move) => Object.assign(button(text, name, () => this.zoom(move)), { tabIndex: -1 });
    this.steps = el("select", { onchange: () => this.goTo(Number(this.steps.value)) });
    this.counts = choice([[1, "1"], [3, "3"], [10, "10"]], (value) => { this.count = Number(value); this.goTo(this.place); });
    this.range = el("span", { class: "muted", "aria-live": "polite" });
    this.canvas = el("canvas");
    this.said = el("p", { class: "muted who" }, "Point at a slice to see what it is.");
    this.legend = el("ul", { class: "slices", "aria-label": `Colours: ${label}` });
    this.status = el("p", { class: "muted", role: "status" });
    this.actors = el("div");
    this.more = el("div");
    const keys = `timeline-keys-${timelineViews.size}`;
    this.box = el("div", { class: "timeline", role: "group", tabindex: "0", "aria-roledescription": "time line",
      "aria-describedby": keys, "aria-keyshortcuts": "+ - ArrowLeft ArrowRight 0 Escape", onkeydown: (event) => this.press(event) }, this.canvas);
    this.card = el("section", { class: "chart wide actors" },
      el("div", { class: "chart-head" }, el("h3", null, `Who worked when: ${label}`),
        el("div", { class: "zoom" }, this.range, zoomButton("+", "Zoom in", "in"), zoomButton("−", "Zoom out", "out"),
          zoomButton("‹", "To the left", "left"), zoomButton("›", "To the right", "right"), zoomButton("↺", "Show all", "reset"))),
      el("div", { class: "tools" }, labelled("Up to", this.steps),
        button("‹", "Step before", () => this.goTo(this.place - 1)), button("›", "Next step", () => this.goTo(this.place + 1)),
        labelled("Steps at once", this.counts)),
      this.status, this.box,
      el("p", { class: "muted who keys", id: keys }, "Keys: + and − zoom, arrows move, 0 or Escape resets. The table below has the same as numbers."),
      this.said, this.legend, this.more);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  parts() {
    return [this.card, this.actors];
  }

  /** Take what is stored now; whoever looks at the newest step goes on to it. */
  take(source) {
    const isFirst = this.source === null;
    const number = isFirst ? null : this.source.steps[this.place][2];
    const wasNewest = isFirst || (this.place === this.source.steps.length - 1 && this.part === null);
    this.source = source;
    const found = source.steps.findIndex((step) => step[2] === number);
    this.steps.replaceChildren(...source.steps.map(([step, isStart, , seconds], i) =>
      el("option", { value: String(i) }, `${stepName(step, isStart)} (${duration(seconds)})`)));
    const place = wasNewest || found < 0 ? source.steps.length - 1 : found;
    if (isFirst || source.steps[place][2] !== number) this.goTo(place);
    else { this.place = place; this.steps.value = String(place); }
  }

  async goTo(place) {
    this.place = Math.min(Math.max(place, 0), this.source.steps.length - 1);
    this.steps.value = String(this.place);
    const run = ++this.run;
    const { steps, key } = this.source;
    const [first, last] = placesUpTo(steps, this.place, this.count);
    try {
      const records = [];
      for (let i = first; i <= last; i += 1) records.push(...await loadChunk(`${key}-${steps[i][2]}`));
      if (run !== this.run) return;
      this.status.textContent = "";
      this.part = null;
      this.show(joinRecords(records));
    } catch (error) {
      if (run === this.run) this.status.textContent = error.message;
    }
  }

  show(joined) {
    this.joined = joined;
    // A method keeps its colour, so that steps can be compared.
    const methods = methodsOf(joined);
    for (const method of methods) {
      if (this.colours.has(method)) continue;
      const place = this.colours.size;
      this.colours.set(method, place < NUM_NAMED ? `--c${place < 6 ? place : 7}` : GREY);
    }
    const named = methods.filter((method) => this.colours.get(method) !== GREY);
    const swatch = (name) => el("span", { class: `swatch s${name.slice(3)}` });
    this.legend.replaceChildren(...named.map((method) => el("li", null, swatch(this.colours.get(method)), method)),
      ...(methods.length > named.length ? [el("li", null, swatch(GREY), "others")] : []));
    this.more.replaceChildren(...(joined.rows.length > MOST_ROWS
      ? [checkbox(`Show all ${joined.rows.length} rows`, (on) => { this.allRows = on; this.draw(); }, this.allRows)] : []));
    this.showActors();
    this.draw();
  }

  showActors() {
    const { rows, start, end } = this.joined;
    const width = end - start;
    const lines = rows.map((row) => {
      const sums = methodSums(row, start, end), isDriver = row.name === DRIVER;
      const busy = busySeconds(row, start, end);
      const largest = sums.slice(0, 3).map(([method, [, seconds]]) => `${method} ${share(seconds, width)}`).join(", ");
      return [el("span", { class: "mono" }, row.name), isDriver ? "–" : share(busy, width), isDriver ? "–" : share(width - busy, width), largest || "–",
        sums.reduce((sum, [, [number]]) => sum + number, 0), bytes(row.memory), bytes(row.gpu), `${row.node}, ${row.pid}`];
    });
    const columns = ["actor", "busy", "idle", "most time", "calls", "peak memory", "GPU memory", "node, process"];
    this.actors.replaceChildren(el("p", { class: "muted" },
      `Shares are of the ${duration(width)} shown above, also where it is zoomed. Phases of the driver include its waits for workers.`),
    table(`Actors: ${this.label}`, columns, lines, [3]));
  }

  whole() {
    return [this.joined.start, this.joined.end];
  }

  zoom(move) {
    if (!this.joined) return;
    this.part = zoomedPart(this.whole(), this.part, move);
    this.draw();
  }

  press(event) {
    const move = ZOOM_KEYS[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
    // Arrows of a time line that shows all scroll the page, as ever.
    if ((move === "left" || move === "right") && !this.part) return;
    event.preventDefault();
    this.zoom(move);
  }

  listen() {
    let from = null;
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.joined) return;
      from = at(event);
      if (event.pointerType === "mouse") this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.joined) return;
      this.sayWhat(at(event), event.clientY - this.canvas.getBoundingClientRect().top);
      if (from !== null && event.pointerType === "mouse") this.draw([from, at(event)]);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const to = at(event), begin = from;
      from = null;
      if (begin === null || event.pointerType !== "mouse") return;
      if (Math.abs(to - begin) > 5) this.part = [this.timeAt(Math.min(begin, to)), this.timeAt(Math.max(begin, to))];
      this.draw();
    });
    this.canvas.addEventListener("pointercancel", () => { from = null; this.draw(); });
    this.canvas.addEventListener("dblclick", () => this.zoom("reset"));
    this.canvas.addEventListener("wheel", (event) => {
      // Without Ctrl the wheel scrolls the page.
      if (!event.ctrlKey || !this.joined) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? "in" : "out");
    }, { passive: false });
  }

  timeAt(x) {
    const [from, to] = this.part || this.whole(), [first, last] = this.whole();
    return Math.min(Math.max(from + (x / this.canvas.clientWidth) * (to - from), first), last);
  }

  sayWhat(x, y) {
    const slack = 2 * (this.timeAt(1) - this.timeAt(0)), time = this.timeAt(x);
    const place = this.places.find((p) => y >= p.top && y < p.bottom);
    if (!place) return;
    const lane = Math.floor((y - place.top) / LANE_PX);
    const hit = place.row.calls.findLast((call, i) => place.lanes[i] === lane && call.start <= time + slack && call.end >= time - slack);
    if (hit) this.said.textContent = `${place.row.name}: ${hit.method}, ${duration(hit.end - hit.start)}, from ${shown(Number(hit.start.toPrecision(5)))} s on`;
  }

  /** Draw all rows; dragged: the pixels that are being chosen. */
  draw(dragged = null) {
    const width = Math.floor(this.box.clientWidth);
    if (!this.joined || width < 50) return;
    const rows = this.allRows ? this.joined.rows : this.joined.rows.slice(0, MOST_ROWS);
    let top = AXIS_PX;
    this.places = rows.map((row) => {
      row.lanes ??= lanesOf(row.calls);
      const num = 1 + row.lanes.reduce((most, lane) => Math.max(most, lane), 0);
      const place = { row, lanes: row.lanes, top: top + LABEL_PX, bottom: top + LABEL_PX + num * LANE_PX };
      top = place.bottom + 5;
      return place;
    });
    const [from, to] = this.part || this.whole();
    const { ctx, x } = this.paper(width, top + 4, from, to);
    for (const place of this.places) this.drawRow(ctx, place, x, width);
    if (dragged) {
      ctx.globalAlpha = 0.2;
      ctx.fillStyle = colour("--accent");
      ctx.fillRect(Math.min(...dragged), 0, Math.abs(dragged[1] - dragged[0]), top);
      ctx.globalAlpha = 1;
    }
    this.range.textContent = this.part ? `seconds ${shown(Number(from.toPrecision(4)))} to ${shown(Number(to.toPrecision(4)))}` : "";
    this.box.setAttribute("aria-label", this.describe());
    this.card.dataset.drawn = "yes";
  }

  /** Prepare the canvas: background, axis and begins of steps. */
  paper(width, height, from, to) {
    const scale = devicePixelRatio || 1, ctx = this.canvas.getContext("2d");
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    ctx.scale(scale, scale);
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    const x = (time) => ((time - from) / (to - from)) * width;
    const step = tickStep((to - from) / Math.max(width / 90, 1));
    ctx.fillStyle = colour("--muted");
    ctx.strokeStyle = colour("--grid");
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      ctx.beginPath();
      ctx.moveTo(x(time), AXIS_PX);
      ctx.lineTo(x(time), height);
      ctx.stroke();
      ctx.fillText(`${tick(time, step)} s`, x(time) + 3, 8);
    }
    ctx.strokeStyle = colour("--muted");
    ctx.setLineDash([3, 3]);
    let free = -Infinity;
    for (const mark of this.joined.marks) {
      if (x(mark.at) < -1 || x(mark.at) > width) continue;
      ctx.beginPath();
      ctx.moveTo(x(mark.at), 16);
      ctx.lineTo(x(mark.at), height);
      ctx.stroke();
      if (x(mark.at) >= free) { ctx.fillText(mark.text, x(mark.at) + 3, 24); free = x(mark.at) + ctx.measureText(mark.text).width + 10; }
    }
    ctx.setLineDash([]);
    return { ctx, x };
  }

  drawRow(ctx, { row, lanes, top }, x, width) {
    ctx.fillStyle = colour("--fg");
    ctx.fillText(row.name, 2, top - LABEL_PX / 2);
    const fills = new Map([...this.colours].map(([method, name]) => [method, colour(name)]));
    // Phases of the driver have no colours: they name what the workers do for it.
    const isDriver = row.name === DRIVER;
    const ink = colour(isDriver ? "--fg" : "--bg");
    const drawn = [];
    row.calls.forEach((call, i) => {
      const left = Math.max(x(call.start), 0), right = Math.min(x(call.end), width);
      // What would lie within one pixel that is filled changes nothing.
      if (right < 0 || left > width || right <= (drawn[lanes[i]] ?? -1)) return;
      const y = top + lanes[i] * LANE_PX, size = Math.max(right - left, 1);
      drawn[lanes[i]] = Math.floor(left + size);
      ctx.fillStyle = isDriver ? colour("--grid") : fills.get(call.method) || colour(GREY);
      ctx.fillRect(left, y, size > 2 ? size - 0.5 : size, LANE_PX - 1);
      ctx.strokeStyle = colour("--muted");
      if (isDriver && size > 2) ctx.strokeRect(left + 0.5, y + 0.5, size - 1.5, LANE_PX - 2);
      if (size < 30) return;
      const letters = Math.floor((size - 6) / 6.5);
      ctx.fillStyle = ink;
      ctx.fillText(call.method.length > letters ? `${call.method.slice(0, letters - 1)}…` : call.method, left + 3, y + LANE_PX / 2, size - 4);
    });
  }

  describe() {
    const { rows, start, end } = this.joined;
    const workers = rows.filter((row) => row.name !== DRIVER).slice(0, 20);
    return `Who worked when: ${this.label}. ${duration(end - start)}. ${workers.map((row) => `${row.name} busy ${share(busySeconds(row, start, end), end - start)}`).join("; ")}`;
  }

  /** Return the events of all steps that the page has. */
  async trace() {
    const { steps, key } = this.source;
    const groups = [];
    for (let last = steps.length - 1; last >= 0;) {
      const [first] = placesUpTo(steps, last, Infinity);
      const records = [];
      for (let i = first; i <= last; i += 1) records.push(...await loadChunk(`${key}-${steps[i][2]}`));
      groups.push({ origin: records[0].start_s, joined: joinRecords(records) });
      last = first - 1;
    }
    return actorEvents(groups.reverse());
  }

  /** Say which steps are there. */
  about() {
    const { steps, stored } = this.source;
    return stored > steps.length
      ? `The time line, and the trace, show the first and the newest steps, ${steps.length} in all; timeline.jsonl has ${stored}.`
      : "The trace holds the calls of all actors as they were.";
  }
}

const AXIS_PX = 34, LABEL_PX = 17, LANE_PX = 16;

/** Return the distance of ticks: 1, 2 or 5 times a power of ten, at least as given. */
function tickStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least) ?? 10 * power;
}
