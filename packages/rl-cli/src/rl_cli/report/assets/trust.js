// Can I trust it? Sampler against trainer, what was dropped, and what was warned of.

function trustView() {
  return [
    ...page.runs.flatMap((run) => [
      el("h2", null, run.name),
      run.reason ? el("p", { class: "bad" }, `The run is ${run.state}: ${run.reason}`) : null,
      table(`Checks: ${run.name}`, ["check", "found", "what it means"], checks(run), [2]),
    ]),
    el("h2", null, "Sampler and trainer"), trustCharts(),
    ...page.runs.flatMap(warnings),
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

/** Return the greatest distance of the versions that sampled one step. */
function spread(run) {
  const found = run.stages.map((s) => s.max_version_spread).filter((v) => v !== null && v !== undefined);
  return found.length ? Math.max(...found) : null;
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
  const versions = spread(run);
  return [
    ["Mismatch of sampler and trainer", verdict(p99, p99 <= (Number.isFinite(limit) ? limit : 1)),
      `Highest p99 of the difference of log-probs of a token, in nats${Number.isFinite(limit) ? `; mismatch.limit is ${shown(limit)}` : ""}.`],
    ["Weights of one batch", verdict(versions, versions === 0, versions === 0 ? "one version" : `${shown(versions)} versions apart`),
      "Most versions between the oldest and the newest weights that sampled one step."],
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
