// Is it learning? Curves, and the figures behind them.

const PANELS = [
  ["Reward", ["train:reward", "val:reward"], "mean per answer"],
  ["Accuracy", ["val:accuracy", "train:accuracy", "train:env/accuracy"], "share of answers"],
  ["Loss", ["train:loss", "val:val_loss", "val:loss"], "mean"],
  ["KL divergence", ["train:kl_penalty", "train:approx_kl", "train:kl", "train:gen_kl_error"], "nats"],
  ["Entropy", ["train:approx_entropy", "train:entropy"], "nats per token"],
  ["Length of answers", ["train:mean_gen_tokens_per_sample", "train:max_gen_tokens_per_sample",
    "val:mean_gen_tokens_per_sample"], "tokens"],
  ["Cut off by the length limit", ["train:truncation_rate", "val:truncation_rate"], "share of answers"],
  ["Groups without a difference", ["train:zero_variance_rate"], "share of prompts"],
  ["Clipped ratios", ["train:clip_fraction"], "share of tokens"],
  ["Preferred answers", ["train:rewards_chosen_mean", "train:rewards_rejected_mean"], "implicit reward"],
  ["Value function", ["train:value_loss", "train:explained_variance"], ""],
  ["Gradient norm", ["train:grad_norm"], ""],
  ["Learning rate", ["train:lr"], ""],
];

function learningView() {
  const grid = el("div", { class: "charts" });
  for (const [title, names, unit] of PANELS) {
    const made = metricChart(title, names, unit);
    if (made) grid.append(made);
  }
  const more = el("div", { class: "charts" });
  return [
    ...page.runs.map(nothingLearnt), figuresTable(), chartTools(), grid,
    el("h2", null, "Any other metric"), metricPicker(more), more,
  ];
}

function nothingLearnt(run) {
  const found = Object.values(run.figures).pop();
  if (!found || !found.nothing_learnt) return null;
  return el("p", { class: "look" }, `${run.name}: ${found.nothing_learnt}`);
}

function figuresTable() {
  const rows = page.runs.flatMap((run) => run.stages.map((stage) => {
    const f = run.figures[stage.name] || {};
    const best = f.best === null || f.best === undefined ? "–" : `${shown(f.best)} at step ${shown(f.best_step)}`;
    return [run.name, stage.name, stage.steps, f.measure || "–", shown(f.start), best, shown(f.end),
      stage.stop_reason || (run.state === "running" ? "" : run.reason || "")];
  }));
  return table("Figures", ["run", "stage", "steps", "measure", "first", "best", "last", "ended because"], rows);
}

function chartTools() {
  const range = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(settings.smoothing),
    oninput: () => { settings.smoothing = Number(range.value); output.textContent = range.value; redrawCharts(); } });
  const output = el("output", null, String(settings.smoothing));
  return el("div", { class: "tools" },
    labelled("Smoothing", range), output,
    checkbox("Logarithmic axis", (on) => { settings.log = on; redrawCharts(); }, settings.log),
    checkbox("By time", (on) => { settings.time = on; redrawCharts(); }, settings.time),
    el("span", { class: "muted" }, "▲ best checkpoint, △ kept checkpoint, dotted line: a stage begins"));
}

function metricPicker(target) {
  const names = metricNames();
  const input = el("input", { list: "metrics", size: "34", placeholder: "train:…" });
  const add = () => {
    if (!names.includes(input.value)) return;
    target.prepend(metricChart(input.value, [input.value], ""));
    input.value = "";
  };
  input.addEventListener("change", add);
  return el("div", { class: "tools" }, labelled(`One of ${names.length} metrics`, input),
    el("datalist", { id: "metrics" }, names.map((name) => el("option", { value: name }))));
}
