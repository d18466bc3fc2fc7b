// Where does the time go? Phases of the steps, who worked when, and rates.

function timingView() {
  const parts = page.runs.flatMap((run) => run.stages.filter((s) => s.phases || s.timeline).flatMap((stage) => stageTimes(run, stage)));
  if (!parts.length) return [el("p", { class: "muted" }, "No step was timed.")];
  const rates = metricNames().filter((n) => n.startsWith("performance:") && !n.endsWith("_per_worker"));
  const grid = el("div", { class: "charts" });
  for (const name of ["timing:total_step_time", ...rates]) {
    const unit = name.endsWith("_time") ? "seconds" : name.endsWith("_per_sec") ? "per second" : "";
    const made = metricChart(name.replace(/^\w+:/, "").replaceAll("_", " "), [name], unit);
    if (made) grid.append(made);
  }
  const machine = metricNames().filter((n) => n.startsWith("system/"));
  for (const name of machine) grid.append(metricChart(name, [name], ""));
  return [...parts, el("h2", null, "Rates"), grid];
}

function stageTimes(run, stage) {
  const label = page.runs.length > 1 || run.stages.length > 1 ? `${run.name} ${stage.name}` : run.name;
  const actors = stage.timeline ? timelineOf(stage, label) : null;
  return [
    el("h2", null, label),
    ...(stage.phases ? phaseTimes(stage, label) : []),
    ...(actors ? actors.parts() : []),
    el("div", { class: "tools" }, traceButton(stage, label, actors), el("span", { class: "muted" },
      actors ? actors.about() : "Of averages of the phases: no time line of the actors was stored.")),
  ];
}

function phaseTimes(stage, label) {
  const { steps, phases, totals, parts } = stage.phases;
  const names = Object.keys(totals);
  const all = names.reduce((sum, name) => sum + totals[name], 0);
  const rows = names.filter((name) => totals[name] > 0).flatMap((name) => [
    timeRow(name, totals[name], all, stage.steps),
    ...Object.entries(parts).filter(([part]) => part.startsWith(`${name}/`)).map(
      ([part, seconds]) => timeRow(`  ${part}`, seconds, all, stage.steps)),
  ]);
  return [
    el("div", { class: "charts" }, chart({
      title: `Seconds of a step by phase: ${label}`, unit: "seconds", wide: true, stacked: true, height: 260,
      lines: () => stackedLines(steps, phases, totals) })),
    el("p", null, `${duration(all)} in all`),
    table(`Time by phase: ${label}`, ["phase", "share", "seconds", "per step"], rows),
  ];
}

function timeRow(name, seconds, all, steps) {
  return [el("span", { class: "mono" }, name.replace("  ", "\u00a0\u00a0")), `${(100 * seconds / all).toFixed(1)} %`, seconds, seconds / Math.max(steps, 1)];
}

const SMALL_SHARE = 0.005;

/** Return areas upon each other; the highest is drawn first. */
function stackedLines(steps, phases, totals) {
  const names = Object.keys(totals);
  const all = names.reduce((total, name) => total + totals[name], 0);
  const main = names.filter((name) => totals[name] > SMALL_SHARE * all).slice(0, NUM_COLOURS - 1);
  const sum = steps.map(() => 0);
  const lines = main.map((name, i) => {
    phases[name].forEach((seconds, k) => { sum[k] += seconds; });
    return { label: name, own: phases[name], points: [steps, [...sum]], colour: `--c${i}`, dash: 0 };
  });
  const rest = names.filter((name) => !main.includes(name) && totals[name] > 0);
  if (rest.length) {
    const own = steps.map((_, k) => rest.reduce((total, name) => total + phases[name][k], 0));
    lines.push({ label: rest.length > 1 ? "everything else" : rest[0], own,
      points: [steps, own.map((seconds, k) => seconds + sum[k])], colour: `--c${NUM_COLOURS - 1}`, dash: 0 });
  }
  return lines.reverse();
}

/** Offer a Chrome trace of all actors, or of the phases where no time line was stored. */
function traceButton(stage, label, actors) {
  const made = el("button", { class: "plain", type: "button", onclick: async () => {
    made.disabled = true;
    try {
      save(`${label}.trace.json`, { traceEvents: actors ? await actors.trace() : traceEvents(stage.phases), displayTimeUnit: "ms" });
    } catch (error) {
      made.after(el("span", { class: "bad", role: "alert" }, error.message));
    } finally {
      made.disabled = false;
    }
  } }, "Download as a Chrome trace");
  return made;
}

function save(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value)], { type: "application/json" }));
  el("a", { href: url, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Return one slice for each phase of each bucket of steps. */
function traceEvents({ steps, phases }) {
  const events = [];
  let start = 0;
  steps.forEach((step, k) => {
    const width = step - (k ? steps[k - 1] : steps[0] - 1);
    for (const [name, seconds] of Object.entries(phases)) {
      const length = seconds[k] * 1e6 * Math.max(width, 1);
      if (length <= 0) continue;
      events.push({ name, ph: "X", pid: 0, tid: 0, ts: start, dur: length, args: { step } });
      start += length;
    }
  });
  return events;
}
