// What was it? Configuration and its origins, differences, versions, machine, command.

const ORIGINS = {
  default: "default", preset: "preset", stage: "the stage", common: "common", set: "set",
  run: "the run itself", updated: "changed while it ran",
};

function setupView() {
  return [
    ...page.runs.map(aboutRun),
    el("h2", null, "Configuration"), configTable(),
    ...page.runs.flatMap(updates), ...page.runs.flatMap(recipe),
  ];
}

function aboutRun(run) {
  const rows = [
    ["what", `${run.what} (${run.kind})`],
    ["state", run.reason ? `${run.state}: ${run.reason}` : run.state],
    ["started", run.started || "–"],
    ["wall time", typeof run.result.wall_s === "number" ? duration(run.result.wall_s) : "–"],
    ["command", run.started_by ? el("code", null, run.started_by) : "–"],
    ["machine", run.machine || "–"],
    ["seed", run.result.seed === undefined ? "–" : String(run.result.seed)],
    ...(run.command ? [["continue with", el("code", null, run.command)]] : []),
    ["versions", Object.entries(run.versions).map(([k, v]) => `${k} ${v}`).join(", ") || "–"],
    ["data", run.data.length ? el("div", null, run.data.map((text) => el("div", null, text))) : "–"],
    ["workers", run.logs.workers.length
      ? el("details", null, el("summary", null, `${shown(run.logs.workers.length)} lines`), el("pre", null, run.logs.workers.join("\n")))
      : "–"],
  ];
  return el("section", null, el("h2", null, run.name), table(`About ${run.name}`, ["", ""], rows, [1]));
}

/** Return the stages of all runs as columns: a key has a value in each. */
function configColumns() {
  return page.runs.flatMap((run) => [
    ...run.stages.map((stage) => ({
      label: run.stages.length > 1 ? `${run.name} ${stage.name}` : run.name, run, stage,
      values: new Map(stage.config.map((v) => [v.key, v])) })),
  ]);
}

function configTable() {
  const columns = configColumns();
  const keys = [...new Set(columns.flatMap((c) => [...c.values.keys()]))];
  const filter = { text: "", changed: true, differs: false };
  const target = el("div", null);
  const show = () => target.replaceChildren(configRows(columns, keys, filter));
  const box = el("input", { type: "search", size: "24", oninput: () => { filter.text = box.value; show(); } });
  show();
  return el("div", null,
    el("div", { class: "tools" }, labelled("Keys with", box),
      checkbox("Only what is not the default", (on) => { filter.changed = on; show(); }, true),
      columns.length > 1 ? checkbox("Only differences between columns", (on) => { filter.differs = on; show(); }) : null),
    target);
}

function configRows(columns, keys, filter) {
  const wanted = filter.text.toLowerCase();
  const found = keys.filter((key) => {
    const values = columns.map((c) => c.values.get(key)).filter((v) => v);
    if (wanted && !key.toLowerCase().includes(wanted) && !values.some((v) => v.value.toLowerCase().includes(wanted))) return false;
    if (filter.changed && values.every((v) => v.origin === "default" || v.value === v.default)) return false;
    return !filter.differs || (values.length > 1 && new Set(values.map((v) => v.value)).size > 1);
  });
  const rows = found.map((key) => [el("code", null, key), ...columns.map((c) => configCell(c.values.get(key)))]);
  if (!rows.length) return el("p", { class: "muted" }, "No key is like that.");
  return table("Configuration", ["key", ...columns.map((c) => c.label)], rows, columns.map((_, i) => i + 1));
}

function configCell(value) {
  if (!value) return "";
  const where = ORIGINS[value.origin] || value.origin;
  const note = value.default !== null && value.default !== value.value ? `${where}; default ${value.default}` : where;
  return el("div", null, el("code", null, value.value), el("div", { class: "who" }, note));
}

function recipe(run) {
  if (!run.recipe.length) return [];
  const rows = run.recipe.map((v) => [el("code", null, v.key), el("code", null, v.value)]);
  return [el("h2", null, `${run.name}: the recipe itself`), table("Recipe", ["key", "value"], rows, [1])];
}

function updates(run) {
  const rows = run.stages.flatMap((stage) => stage.updates.map((u) => [
    stage.name, u.step ?? "–", String(u.by ?? ""), el("code", null, JSON.stringify(u.changes ?? {})),
    el("code", null, JSON.stringify(u.before ?? {})), String(u.time ?? "")]));
  if (!rows.length) return [];
  return [el("h2", null, `${run.name}: changed while it ran`),
    table("Changes", ["stage", "step", "by", "new", "before", "when"], rows, [3, 4])];
}
