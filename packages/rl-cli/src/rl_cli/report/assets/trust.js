// Can I trust it? Sampler against trainer, what was dropped, and what was warned of.

function trustView() {
  return [
    ...page.runs.flatMap((run) => [
      el("h2", null, run.name),
      run.reason ? el("p", { class: "bad" }, `The run is ${run.state}: ${run.reason}`) : null,
      table(`Checks: ${run.name}`, ["check", "found", "what it means"], checks(run), [2]),
    ]),
    el("h2", null, "Sampler and trainer"), trustCharts(), ...page.runs.flatMap(positionTable),
    ...page.runs.flatMap(weightsTable),
    ...page.runs.flatMap(warnings),
  ];
}

/** Return [name of the metric, range of positions] of the mismatch, in order. */
function positionNames() {
  const range = /^train:mismatch\/logprob_diff\/pos_(\d+)_(\d+|up)\/p99$/;
  return metricNames().map((name) => [name, range.exec(name)]).filter(([, found]) => found)
    .sort(([, a], [, b]) => Number(a[1]) - Number(b[1]))
    .map(([name, [, first, last]]) => [name, last === "up" ? `from ${first}` : `${first} to ${last}`]);
}

function positionChart() {
  const ranges = new Map(positionNames());
  return metricChart("Difference of log-probs by position of the token in its row, p99", [...ranges.keys()], "nats",
    (name) => `tokens ${ranges.get(name)}`);
}

/** Show the newest values of the mismatch by position. */
function positionTable(run) {
  const newest = (name) => {
    const stage = run.stages.findLast((s) => s.curves[name]);
    return stage ? [stage.offset + stage.curves[name][0].at(-1), stage.curves[name][1].at(-1)] : [null, null];
  };
  const rows = positionNames().map(([name, text]) => {
    const [step, p99] = newest(name);
    const other = (quantile) => newest(name.replace(/p99$/, quantile))[1];
    return [text, step, other("p50"), p99, other("max")];
  }).filter(([, step]) => step !== null);
  const title = `${run.name}: newest difference of log-probs by position of the token in its row`;
  return rows.length
    ? [el("h3", { class: "above" }, title), table(title, ["tokens of a row", "newest step", "p50", "p99", "max (nats)"], rows)] : [];
}

/** Show which weights the generator had, by the digests that its processes compared. */
function weightsTable(run) {
  const stages = run.stages.filter((s) => s.weights);
  if (!stages.length) return [];
  const count = stages.reduce((sum, s) => sum + s.weights.count, 0);
  const rows = [...stages].reverse().flatMap((s) => s.weights.newest.map(([version, step, digest, processes]) => [
    s.name, version, step, el("code", null, digest), `${shown(processes)} process${processes === 1 ? "" : "es"}`]));
  return [
    el("h2", null, `${run.name}: weights of the generator`),
    el("p", { class: "muted" }, `${shown(count)} transfer${count === 1 ? "" : "s"} in all. Each process that got the weights computed the digest ` +
      "of every tensor that arrived and compared it with the sender's; a transfer that differed would have been refused. " +
      "A version is a number of optimizer steps."),
    table(`Newest weights: ${run.name}`, ["stage", "version", "after step", "digest of all tensors", "verified on"], rows),
  ];
}

function trustCharts() {
  const grid = el("div", { class: "charts" });
  const panels = [
    ["Difference of log-probs, trainer and sampler", ["p50", "p99", "max"].map((q) => `train:mismatch/logprob_diff/${q}`), "nats"],
    ["Ratio of probabilities, trainer over sampler", ["p50", "p99", "max"].map((q) => `train:mismatch/ratio/${q}`), ""],
    ["KL divergence of sampler and trainer", ["train:gen_kl_error", "train:policy_kl_error", "train:js_divergence_error"], "nats"],
    ["Versions of the weights that sampled", ["train:weight_version_min", "train:weight_version_max"], "version"],
    ["Stale, failed or cut answers", ["train:stale_rate", "train:environment_error_rate", "train:infrastructure_error_rate", "train:truncation_rate"], "share of answers"],
    ["Tokens outside of the importance bounds", ["train:is_oob_ratio", "train:seq_logprob_error_masked_rate"], "share"],
  ];
  for (const [title, names, unit] of panels) {
    const made = metricChart(title, names, unit);
    if (made) grid.append(made);
  }
  const byPosition = positionChart();
  if (byPosition) grid.append(byPosition);
  const weights = metricNames().filter((n) => /probe|weight_sync|staleness/.test(n));
  for (const name of weights) grid.append(metricChart(name, [name], ""));
  return grid.childElementCount ? grid : el("p", { class: "muted" }, "The run sampled nothing to compare.");
}

function total(run, name) {
  const found = run.stages.map((s) => s.totals[name]).filter((v) => v !== undefined && v !== null);
  return found.length ? found.reduce((a, b) => a + b, 0) : null;
}

function extreme(run, name, pick) {
  const found = run.stages.flatMap((s) => (s.curves[name] ? s.curves[name][1] : []));
  return found.length ? found.reduce((a, b) => pick(a, b)) : null;
}

/** Check the age of the weights that sampled, in the stage that comes closest to its limit. */
function ageCheck(run) {
  const ages = run.stages.map((s) => s.age).filter((age) => age);
  const what = "Weights of one batch";
  const { found, limit, by } = ages.sort((a, b) => (b.found - b.limit) - (a.found - a.limit))[0] || { found: null };
  if (by === "asynchronous.max_staleness") {
    return [what, verdict(found, found <= limit, found === 0 ? "of the step itself" : `${shown(found)} step${found === 1 ? "" : "s"} old at most`),
      `Steps between the weights that sampled the oldest token of an answer and the step that trains on it; ${by} is ${shown(limit)}.`];
  }
  return [what, verdict(found, found <= limit, found === 0 ? "one version" : `${shown(found)} version${found === 1 ? "" : "s"} apart`),
    `Most versions between the oldest and the newest weights that sampled one step${by ? `; ${by} is ${shown(limit)}` : ""}.`];
}

function verdict(value, isFine, text) {
  if (value === null) return el("span", { class: "muted" }, "not measured");
  return el("span", { class: isFine ? "good" : "look" }, `${isFine ? "✓" : "▲"} ${text ?? shown(value)}`);
}

function checks(run) {
  const limit = Math.min(...run.stages.map((s) => s.mismatch_limit).filter((v) => typeof v === "number"));
  const p99 = extreme(run, "train:mismatch/logprob_diff/p99", Math.max);
  const skipped = total(run, "train:skipped_steps");
  const dropped = run.stages.flatMap((s) => Object.keys(s.totals)).filter((n) => n.startsWith("train:num_dropped/"));
  const restarts = run.stages.reduce((sum, s) => sum + Math.max(s.starts - 1, 0), 0);
  const nonfinite = Object.entries(run.stages.reduce((all, s) => ({ ...all, ...s.nonfinite }), {}));
  const errors = run.logs.notes.filter((n) => n.level !== "WARNING").reduce((sum, n) => sum + n.count, 0);
  return [
    ["Mismatch of sampler and trainer", verdict(p99, p99 <= (Number.isFinite(limit) ? limit : 1)),
      `Highest p99 of the difference of log-probs of a token, in nats${Number.isFinite(limit) ? `; mismatch.limit is ${shown(limit)}` : ""}.`],
    ageCheck(run),
    ["Skipped steps", verdict(skipped, skipped === 0), "Optimizer steps left out because the gradient was not finite."],
    ...[...new Set(dropped)].sort().map((name) => [
      `Dropped: ${name.split("/").pop().replaceAll("_", " ")}`, verdict(total(run, name), total(run, name) === 0),
      "Trajectories that were sampled and not trained on, for this reason."]),
    ["Retried trajectories", verdict(total(run, "train:num_retried"), total(run, "train:num_retried") === 0), "Sampled again after an error."],
    ["Metrics that are not finite", verdict(nonfinite.length, nonfinite.length === 0),
      nonfinite.map(([name, count]) => `${name} (${shown(count)} times)`).join(", ") || "No NaN and no infinity was logged."],
    ["Restarts", verdict(restarts, restarts === 0), "How often the run was resumed."],
    ["Errors in the log", verdict(errors, errors === 0), "Lines of the levels ERROR and CRITICAL, of the program and its workers."],
  ];
}

function warnings(run) {
  const said = Array.isArray(run.result.warnings) ? run.result.warnings : [];
  const { notes, num_left_out: left } = run.logs;
  const rows = notes.map((n) => [n.level, n.count, n.step === null ? "–" : n.step, n.actor,
    n.traceback ? el("details", null, el("summary", null, n.message), el("pre", null, n.traceback)) : n.message, n.first]);
  return [
    el("h2", null, `${run.name}: warnings and errors`),
    said.length ? el("ul", null, said.map((text) => el("li", null, String(text)))) : null,
    rows.length
      ? table("Log", ["level", "times", "first step", "by", "message", "first at"], rows, [4])
      : el("p", { class: "good" }, "✓ The log has no warning and no error."),
    left ? el("p", { class: "muted" }, `${shown(left)} further messages are in logs/ of the run folder.`) : null,
  ];
}
