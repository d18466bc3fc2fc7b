// What does it write? Answers by step, searched and sorted, and one prompt over training.

const MOST_SHOWN = 100;
const ORDERS = {
  written: ["as written", () => 0],
  low: ["lowest reward first", (a, b) => rewardOf(a, Infinity) - rewardOf(b, Infinity)],
  high: ["highest reward first", (a, b) => rewardOf(b, -Infinity) - rewardOf(a, -Infinity)],
  long: ["longest first", (a, b) => lengthOf(b) - lengthOf(a)],
  short: ["shortest first", (a, b) => lengthOf(a) - lengthOf(b)],
  group: ["by group", (a, b) => groupOf(a).localeCompare(groupOf(b), "en", { numeric: true })],
};

function rewardOf(sample, missing) {
  return sample.reward === undefined ? missing : sample.reward;
}

function lengthOf(sample) {
  return sample.tokens ? sample.tokens.length : sample.length ?? (sample.response || "").length;
}

function groupOf(sample) {
  return sample.group === undefined ? sample.prompt || "" : String(sample.group);
}

/** Return where there are answers; those of the newest stage first. */
function sampleSources() {
  return page.runs.flatMap((run) => [...run.stages].reverse().flatMap((stage) => stage.samples.map((found) => (
    { ...found, label: `${page.runs.length > 1 ? `${run.name}: ` : ""}${stage.name}, ${found.kind}` }))));
}

function samplesView(view) {
  const sources = sampleSources();
  const answers = page.runs.flatMap(beforeAndAfter);
  if (!sources.length) return [el("p", { class: "muted" }, "The run has kept no answers."), ...answers];
  const browser = new SampleBrowser(sources);
  view.browser = browser;
  return [...browser.parts(), ...answers];
}

function beforeAndAfter(run) {
  if (!run.answers.length) return [];
  const rows = run.answers.map((a) => [a.prompt, a.before, a.after, a.expected || ""]);
  return [el("h2", null, `${run.name}: before and after the last stage`),
    table("Before and after", ["prompt", "before", "after", "right"], rows, [0, 1, 2, 3])];
}

/** Shows the answers of one step, or of all steps to one prompt. */
class SampleBrowser {
  constructor(sources) {
    this.sources = sources;
    this.source = sources[0];
    this.place = this.source.steps.length - 1;
    this.order = "written";
    this.search = "";
    this.pairs = false;
    this.run = 0;
    this.list = el("div", { "aria-live": "polite" });
    this.status = el("p", { class: "muted", role: "status" });
    this.why = el("p", { class: "muted who" });
    this.slider = el("input", { type: "range", min: "0", step: "1", oninput: () => this.goTo(Number(this.slider.value)) });
    this.stepText = el("output", null);
    this.searchBox = el("input", { type: "search", size: "24", oninput: () => { this.search = this.searchBox.value; this.showStep(); } });
    this.fit();
    this.showStep();
  }

  parts() {
    const sources = choice(this.sources.map((s, i) => [i, s.label]), (value) => {
      this.source = this.sources[Number(value)];
      this.place = this.source.steps.length - 1;
      this.fit();
      this.showStep();
    });
    const orders = choice(Object.entries(ORDERS).map(([key, [text]]) => [key, text]), (value) => { this.order = value; this.showStep(); });
    const colourings = choice(Object.entries(COLOURINGS).map(([key, [text]]) => [key, text]), (value) => { tokenColouring = value; legend.textContent = LEGENDS[value]; this.showStep(); });
    colourings.value = tokenColouring;
    const legend = el("p", { class: "muted who" }, LEGENDS[tokenColouring]);
    const button = (text, name, act) => el("button", { class: "plain", type: "button", "aria-label": name, onclick: act }, text);
    return [
      el("div", { class: "tools" }, labelled("Answers of", sources),
        labelled("Step", this.slider), this.stepText,
        button("‹", "Step before", () => this.goTo(this.place - 1)),
        button("›", "Next step", () => this.goTo(this.place + 1))),
      el("div", { class: "tools" }, labelled("Sort", orders), labelled("Search", this.searchBox),
        button("Search all steps", "Search all steps", () => this.searchAll())),
      el("div", { class: "tools" }, labelled("Colour tokens by", colourings),
        checkbox("Best and worst of each group side by side", (on) => { this.pairs = on; this.showStep(); })),
      legend, this.why,
      this.status, this.list,
    ];
  }

  /** Take new steps; whoever looks at the newest one goes on to it. */
  refresh() {
    const fresh = sampleSources();
    const labels = (sources) => sources.map((s) => s.label).join("\n");
    if (labels(fresh) !== labels(this.sources)) return false;
    const wasLast = this.place === this.source.steps.length - 1;
    const step = this.source.steps[this.place][0];
    const number = this.sources.indexOf(this.source);
    this.sources = fresh;
    this.source = fresh[number];
    const found = this.source.steps.findLastIndex((row) => row[0] === step);
    const last = this.source.steps.length - 1;
    const before = this.place;
    this.place = wasLast || found < 0 ? last : found;
    this.fit();
    const isSearch = this.collected;
    if (!isSearch && (wasLast || this.place !== before || found === last)) this.showStep();
    return true;
  }

  fit() {
    this.slider.max = String(this.source.steps.length - 1);
    this.slider.value = String(this.place);
    this.slider.setAttribute("aria-valuetext", `step ${this.source.steps[this.place][0]}`);
    this.stepText.textContent = shown(this.source.steps[this.place][0]);
  }

  goTo(place) {
    this.place = Math.min(Math.max(place, 0), this.source.steps.length - 1);
    this.fit();
    this.showStep();
  }

  async load(first, last) {
    const chunks = [];
    for (let i = first; i <= last; i += 1) chunks.push(await loadChunk(`${this.source.key}-${i}`));
    return chunks.flat();
  }

  /** Do something that waits for chunks; a later action takes its place. */
  async show(work) {
    const run = ++this.run;
    const isCurrent = () => run === this.run;
    try {
      await work(isCurrent);
    } catch (error) {
      if (isCurrent()) { this.status.textContent = error.message; this.list.replaceChildren(); }
    }
  }

  showStep() {
    this.collected = false;
    return this.show(async (isCurrent) => {
      const [step, count, mean, first, last] = this.source.steps[this.place];
      const records = (await this.load(first, last)).filter((r) => r.step === step);
      if (!isCurrent()) return;
      const found = this.matching(records).sort(ORDERS[this.order][1]);
      this.why.textContent = whyPlain(found);
      const of = this.search ? `${shown(found.length)} of ${shown(count)}` : shown(count);
      const reward = mean === null ? "" : `, mean reward ${shown(mean)}`;
      this.status.textContent = `Step ${shown(step)}: ${of} answers${reward}${this.cut(found)}`;
      if (this.pairs) this.fillPairs(found);
      else this.fill(found, false);
    });
  }

  searchAll() {
    return this.collect((record) => matches(record, this.search), `with “${this.search}”`);
  }

  samePrompt(prompt) {
    return this.collect((record) => record.prompt === prompt, "to this prompt");
  }

  collect(isWanted, what) {
    this.collected = true;
    return this.show(async (isCurrent) => {
      const found = [];
      const end = this.source.steps[this.source.steps.length - 1][4];
      for (let i = 0; i <= end && found.length < MOST_SHOWN; i += 1) {
        found.push(...(await this.load(i, i)).filter(isWanted));
        if (!isCurrent()) return;
        this.status.textContent = `Searching: part ${i + 1} of ${end + 1}, ${shown(found.length)} found`;
      }
      this.status.textContent = `${shown(found.length)} answers ${what}, by step${this.cut(found)}`;
      this.why.textContent = whyPlain(found);
      this.fill(found, true);
    });
  }

  cut(found) {
    return found.length > MOST_SHOWN ? `; the first ${MOST_SHOWN} are shown` : "";
  }

  matching(records) {
    return this.search ? records.filter((r) => matches(r, this.search)) : records;
  }

  fill(records, withStep) {
    this.list.replaceChildren(...records.slice(0, MOST_SHOWN).map((r) => this.card(r, withStep)));
  }

  /** Show the best and the worst answer of each group beside each other. */
  fillPairs(records) {
    const groups = new Map();
    for (const r of records.filter((found) => found.reward !== undefined)) {
      groups.set(groupOf(r), [...(groups.get(groupOf(r)) || []), r]);
    }
    const pairs = [...groups.values()].filter((found) => found.length > 1).slice(0, MOST_SHOWN / 2);
    this.list.replaceChildren(...pairs.map((found) => {
      const ranked = [...found].sort(ORDERS.high[1]);
      return el("div", { class: "pair" }, [["best", ranked[0]], ["worst", ranked[ranked.length - 1]]].map(([name, r]) =>
        el("section", { "aria-label": `${name} of its group` }, el("h3", null, name), this.card(r, false))));
    }));
    if (!pairs.length) this.list.append(el("p", { class: "muted" }, "No group of this step has two answers with a reward."));
  }

  card(sample, withStep) {
    const facts = [
      withStep ? `step ${shown(sample.step)}` : null,
      sample.reward === undefined ? null : `reward ${shown(sample.reward)}`,
      ...Object.entries(sample.rewards || {}).map(([name, value]) => `${name} ${shown(value)}`),
      sample.advantage === undefined ? null : `advantage ${shown(sample.advantage)}`,
      sample.tokens ? `${sample.tokens.length} tokens` : `${shown(lengthOf(sample))} characters`,
      sample.group === undefined ? null : `group ${sample.group}`,
      versionText(sample),
      sample.outcome && sample.outcome !== "ok" ? sample.outcome.replaceAll("_", " ") : null,
      sample.ending && sample.ending !== "finished" ? sample.ending.replaceAll("_", " ") : null,
      sample.second_check ? `second check: ${sample.second_check}` : null,
      sample.dataset || null,
    ].filter((fact) => fact !== null);
    const same = sample.prompt === undefined ? null : el("button", {
      class: "plain", type: "button", onclick: () => this.samePrompt(sample.prompt) }, "Over training");
    return el("article", { class: "sample" },
      el("header", null, facts.map((fact) => el("span", null, fact)), same),
      el("div", { class: "turns" }, conversation(sample, this.search),
        sample.expected === undefined ? null : [el("div", { class: "who" }, "right answer"), said(sample.expected, "", "")]));
  }
}

function versionText(sample) {
  const found = (sample.versions || []).map(([version]) => version);
  if (!found.length) return null;
  const oldest = Math.min(...found), newest = Math.max(...found);
  return oldest === newest ? `weights ${shown(oldest)}` : `weights ${shown(oldest)} to ${shown(newest)}`;
}

function matches(sample, text) {
  const wanted = text.toLowerCase();
  const second = sample.second_check && `second check: ${sample.second_check}`;
  const texts = [sample.prompt, sample.response, sample.expected, second, ...(sample.messages || []).map((m) => m[1])];
  return texts.some((found) => found !== undefined && found.toLowerCase().includes(wanted));
}

function conversation(sample, search) {
  if (sample.messages && sample.messages.length) {
    const parts = sample.messages.flatMap(([role, content]) => [
      el("div", { class: "who" }, role), said(content, role === "assistant" ? "answer" : "", search)]);
    return hasColouring(sample) ? [...parts, el("div", { class: "who" }, "tokens"), tokenDetails(sample)] : parts;
  }
  return [
    el("div", { class: "who" }, "prompt"), said(sample.prompt || "", "", search),
    el("div", { class: "who" }, "answer"),
    hasColouring(sample) && !search ? tokenText(sample) : said(sample.response || "", "answer", search),
  ];
}

/** Show a text, with what was searched for marked. */
function said(text, kind, search) {
  const box = el("div", { class: `said ${kind}` });
  const wanted = search.toLowerCase();
  const lower = text.toLowerCase();
  let from = 0;
  // A lower-case text of another length has other places.
  for (let at = 0; wanted && lower.length === text.length && (at = lower.indexOf(wanted, from)) >= 0;) {
    box.append(text.slice(from, at), el("mark", null, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  box.append(text.slice(from));
  return box;
}

function tokenDetails(sample) {
  return el("details", null, el("summary", null, `Tokens by ${COLOURINGS[tokenColouring][0]}`), tokenText(sample));
}
