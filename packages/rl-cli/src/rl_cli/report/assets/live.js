// A page of rl watch asks for what is new, and changes in place: what somebody looks at
// or has typed stays. A page that is a file has no `live`, and none of this runs.

const VIEW_REFRESH = {
  learning: () => refreshLearning(),
  samples: (parts, view) => refreshSamples(view),
  timing: null,
  trust: null,
  setup: null,
};
let following = true;

/** Return the names of chunks that may have grown: the last one of each source. */
function openChunks() {
  return page.runs.flatMap((run) => run.stages.flatMap((stage) => stage.samples.map(
    (found) => `${found.key}-${found.steps[found.steps.length - 1][4]}`)));
}

/** Take new data, and bring the view that is shown up to date. */
function takeNews(fresh) {
  for (const name of openChunks()) loaded.delete(name);
  Object.assign(page, fresh);
  page.live.version = fresh.version;
  showHeader();
  const name = VIEWS.map(([key]) => key).find((key) => !document.getElementById(`view-${key}`).hidden);
  for (const [key] of VIEWS) if (key !== name) stale.add(key);
  refreshView(name);
}

function refreshView(name) {
  const view = document.getElementById(`view-${name}`);
  stale.delete(name);
  if (VIEW_REFRESH[name] && VIEW_REFRESH[name](name, view)) return;
  // Somebody types or reads here: it is made new when it is next opened.
  const isInUse = view.contains(document.activeElement) && document.activeElement !== view;
  if (isInUse || view.querySelector("details[open]")) { stale.add(name); return; }
  fillView(name);
}

let drawnNames = "";

/** Draw the curves again where no metric is new; return whether that was enough. */
function refreshLearning() {
  const names = metricNames().join();
  const isSame = names === drawnNames;
  drawnNames = names;
  const old = document.querySelector("#view-learning [aria-label=Figures]");
  if (!isSame || !old) return false;
  old.replaceWith(figuresTable());
  redrawCharts();
  return true;
}

function refreshSamples(view) {
  return Boolean(view.browser) && view.browser.refresh();
}

/** Ask the server, with the key of the address: a page that is saved holds none. */
async function ask(path) {
  const key = new URLSearchParams(location.search).get("token");
  return fetch(path, { headers: { Authorization: `Bearer ${key}` }, cache: "no-store" });
}

/** Load a chunk from the server. */
async function askForChunk(name) {
  const reply = await ask(`chunk?name=${encodeURIComponent(name)}`);
  if (!reply.ok) throw new Error(`these answers are not there any more (${reply.status}): go to another step and back`);
  const records = await reply.json();
  loaded.set(name, records);
  return records;
}

async function poll(status) {
  if (following && !document.hidden) {
    try {
      const reply = await ask(`data?seen=${page.live.version}`);
      if (reply.status === 200) takeNews(await reply.json());
      status.textContent = reply.ok ? "live" : `rl watch refuses (${reply.status})`;
    } catch (error) {
      status.textContent = error instanceof TypeError ? "rl watch does not answer" : String(error);
    }
  }
  setTimeout(() => poll(status), page.live.poll_s * 1000);
}

function goLive() {
  drawnNames = metricNames().join();
  const status = el("span", { class: "muted", role: "status", id: "live" }, "live");
  const box = checkbox("Follow the run", (on) => { following = on; status.textContent = on ? "live" : "held still"; }, true);
  document.getElementById("runs").after(el("div", { class: "tools" }, box, status));
  poll(status);
}
