// Tokens with a colour for what is known of each: how likely it was, how far trainer and
// sampler differ, its advantage, the version of the weights that sampled it. Lines below
// the text say the same as colours, and the arrow keys say all of it in words.

const MOST_TOKENS = 4000;
const COLOURINGS = {
  probability: ["probability", (sample) => sample.logprobs],
  mismatch: ["mismatch of trainer and sampler", (sample) => sample.logprobs && sample.trainer_logprobs],
  advantage: ["advantage", (sample) => sample.advantages || (sample.advantage === undefined ? null : [])],
  version: ["weight version", (sample) => sample.versions],
};
const LEGENDS = {
  probability: "probability of a token: plain above 90 %, then above 50 %, above 10 % (dotted line), below (line)",
  mismatch: "difference of the log-probs of trainer and sampler, in nats: plain below 0.02, then below 0.1, below 0.5 (dotted line), above (line); where weights sampled ahead of training, it includes that of the versions",
  advantage: "advantage of a token: blue above 0, orange with a line below 0, the stronger the farther from 0",
  version: "weight version: its colour changes where a token comes from other weights than the one before it",
};
const MISSING = {
  mismatch: "No answer here has the trainer's log-probs, so no token has a colour. GRPO and PPO note them for answers that they train on; held-out answers have none.",
};
let tokenColouring = "probability";

/** Say why no token has a colour; empty where one has, or it needs no words. */
function whyPlain(samples) {
  if (!samples.length || samples.some(hasColouring)) return "";
  return MISSING[tokenColouring] || "";
}

function hasColouring(sample) {
  return sample.tokens !== undefined && Boolean(COLOURINGS[tokenColouring][1](sample));
}

/** Return [class, what it says] for each token. */
function tokenMarks(sample) {
  if (tokenColouring === "advantage") {
    const of = (i) => (sample.advantages ? sample.advantages[i] : sample.advantage);
    return (i) => [advantageClass(of(i)), `advantage ${shown(of(i))}`];
  }
  if (tokenColouring === "version") {
    const classes = sample.versions.flatMap(([version, count], run) => Array(count).fill([`v${run % 4}`, `weight version ${version}`]));
    return (i) => classes[i];
  }
  if (tokenColouring === "mismatch") {
    return (i) => {
      const apart = mismatchOf(sample, i);
      if (apart === null) return ["t0", "difference unknown"];
      const level = apart < 0.02 ? 0 : apart < 0.1 ? 1 : apart < 0.5 ? 2 : 3;
      return [`t${level}`, mismatchText(sample, i)];
    };
  }
  return (i) => {
    const logprob = sample.logprobs[i];
    if (logprob === null) return ["t0", "probability unknown"];
    const level = logprob > -0.105 ? 0 : logprob > -0.69 ? 1 : logprob > -2.3 ? 2 : 3;
    return [`t${level}`, `probability ${shown(100 * Math.exp(logprob))} %`];
  };
}

/** Return the distance of the log-probs of a token; null where one is unknown. */
function mismatchOf(sample, i) {
  const ours = sample.trainer_logprobs && sample.trainer_logprobs[i], theirs = sample.logprobs && sample.logprobs[i];
  return typeof ours === "number" && typeof theirs === "number" ? Math.abs(ours - theirs) : null;
}

function mismatchText(sample, i) {
  // Both are rounded to four digits after the point; more digits would be made up.
  const apart = Number(mismatchOf(sample, i).toFixed(4));
  return `difference ${shown(apart)}: log-prob ${shown(sample.trainer_logprobs[i])} by the trainer, ${shown(sample.logprobs[i])} by the sampler`;
}

/** Say all that is known of a token, in words. */
function tokenInWords(sample, i) {
  const logprob = sample.logprobs ? sample.logprobs[i] : null;
  const advantage = sample.advantages ? sample.advantages[i] : sample.advantage;
  let left = i;
  const run = (sample.versions || []).find(([, count]) => (left -= count) < 0);
  return [
    `token ${i + 1} of ${sample.tokens.length}: ${JSON.stringify(sample.tokens[i])}`,
    logprob === null ? null : `probability ${shown(100 * Math.exp(logprob))} %`,
    mismatchOf(sample, i) === null ? null : mismatchText(sample, i),
    advantage === undefined || advantage === null ? null : `advantage ${shown(advantage)}`,
    run ? `weight version ${run[0]}` : null,
  ].filter((fact) => fact !== null).join("; ");
}

/** Let the arrow keys, or a click, go to a token, and say in words what is known of it. */
function letTokensBeRead(box, sample) {
  const words = el("p", { class: "muted who", "aria-live": "polite" });
  const spans = [...box.children];
  let at = -1;
  const goTo = (place) => {
    if (at >= 0) delete spans[at].dataset.current;
    at = Math.min(Math.max(place, 0), spans.length - 1);
    spans[at].dataset.current = "yes";
    spans[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    words.textContent = tokenInWords(sample, at);
  };
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: at + 1, ArrowLeft: Math.max(at, 1) - 1, Home: 0, End: spans.length - 1 };
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    goTo(moves[event.key]);
  });
  box.addEventListener("click", (event) => {
    const place = spans.indexOf(event.target);
    if (place >= 0) goTo(place);
  });
  return words;
}

function advantageClass(value) {
  if (value === null || value === 0) return "t0";
  const level = Math.abs(value) < 0.25 ? 1 : Math.abs(value) < 1 ? 2 : 3;
  return value > 0 ? `p${level}` : `t${level}`;
}

/** Show sampled tokens by the colouring that is chosen. */
function tokenText(sample) {
  const box = el("div", { class: "said answer tokens", tabindex: "0", role: "group",
    "aria-label": "Tokens of the answer: the arrow keys go from one to the next" });
  const mark = tokenMarks(sample);
  sample.tokens.slice(0, MOST_TOKENS).forEach((token, i) => {
    const [kind, title] = mark(i);
    box.append(el("span", { class: kind, title }, token));
  });
  const words = letTokensBeRead(box, sample);
  const left = sample.tokens.length - MOST_TOKENS;
  if (left <= 0) return el("div", null, box, words);
  box.append(sample.tokens.slice(MOST_TOKENS).join(""));
  return el("div", null, box, words, el("p", { class: "muted who" }, `the last ${shown(left)} tokens have no colour here`));
}
