// The frame: what the runs are, and one tab for each question.

const VIEWS = [
  ["learning", "Is it learning?", learningView],
  ["samples", "What does it write?", samplesView],
  ["timing", "Where does the time go?", timingView],
  ["trust", "Can I trust it?", trustView],
  ["setup", "What was it?", setupView],
];

function runChip(run, number) {
  const steps = run.stages.reduce((sum, stage) => sum + stage.steps, 0);
  const last = Object.values(run.figures).pop();
  const best = last && last.measure ? `, best ${last.measure} ${shown(last.best)}` : "";
  const kind = { finished: "good", failed: "bad", interrupted: "look", stopped: "look", paused: "look" }[run.state] || "";
  const swatch = page.runs.length > 1 ? el("span", { class: `swatch s${number % NUM_COLOURS}` }) : null;
  return el("li", null, swatch, el("strong", null, run.name), " ",
    el("span", { class: kind }, run.state), `, ${shown(steps)} steps${best}`);
}

/** Views that are older than the data. */
const stale = new Set(VIEWS.map(([key]) => key));

function showHeader() {
  document.getElementById("title").textContent = page.runs.length > 1
    ? `${page.runs.length} runs` : `${page.runs[0].what}: ${page.runs[0].name}`;
  document.getElementById("runs").replaceChildren(...page.runs.map(runChip));
  document.getElementById("footer").textContent = page.live
    ? `As of ${page.written}, by rl watch.` : `Written ${page.written} by rl report.`;
}

function fillView(name) {
  const view = document.getElementById(`view-${name}`);
  forgetCharts(view);
  stale.delete(name);
  const parts = VIEWS.find(([key]) => key === name)[2](view);
  view.replaceChildren(...parts.flat().filter((part) => part));
}

function main() {
  showHeader();
  const tabs = document.getElementById("tabs"), views = document.getElementById("views");
  const select = (name, focus) => {
    for (const [key] of VIEWS) {
      const tab = document.getElementById(`tab-${key}`);
      tab.setAttribute("aria-selected", String(key === name));
      tab.tabIndex = key === name ? 0 : -1;
      if (key === name && focus) tab.focus();
      const view = document.getElementById(`view-${key}`);
      view.hidden = key !== name;
    }
    if (stale.has(name)) {
      if (document.getElementById(`view-${name}`).hasChildNodes()) refreshView(name);
      else fillView(name);
    }
    history.replaceState(null, "", `#${name}`);
  };
  for (const [key, text] of VIEWS) {
    tabs.append(el("button", { role: "tab", type: "button", id: `tab-${key}`, "aria-controls": `view-${key}`,
      onclick: () => select(key, false) }, text));
    views.append(el("div", { role: "tabpanel", id: `view-${key}`, "aria-labelledby": `tab-${key}`, tabindex: "0", hidden: true }));
  }
  tabs.addEventListener("keydown", (event) => {
    const keys = VIEWS.map(([key]) => key);
    const at = keys.findIndex((key) => document.getElementById(`tab-${key}`).tabIndex === 0);
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: keys.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    select(keys[(moves[event.key] + keys.length) % keys.length], true);
  });
  const asked = location.hash.slice(1);
  select(VIEWS.some(([key]) => key === asked) ? asked : "learning", false);
  if (page.live) goLive();
}

main();
