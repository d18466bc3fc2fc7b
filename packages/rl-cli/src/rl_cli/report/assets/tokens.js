// Tokens with a colour for what is known of each: how likely it was, its advantage, the
// version of the weights that sampled it. Lines below the text say the same as colours.

const MOST_TOKENS = 4000;
const COLOURINGS = {
  probability: ["probability", (sample) => sample.logprobs],
  advantage: ["advantage", (sample) => sample.advantages || (sample.advantage === undefined ? null : [])],
  version: ["weight version", (sample) => sample.versions],
};
const LEGENDS = {
  probability: "probability of a token: plain above 90 %, then above 50 %, above 10 % (dotted line), below (line)",
  advantage: "advantage of a token: blue above 0, orange with a line below 0, the stronger the farther from 0",
  version: "weight version: its colour changes where a token comes from other weights than the one before it",
};
let tokenColouring = "probability";

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
  return (i) => {
    const logprob = sample.logprobs[i];
    if (logprob === null) return ["t0", "probability unknown"];
    const level = logprob > -0.105 ? 0 : logprob > -0.69 ? 1 : logprob > -2.3 ? 2 : 3;
    return [`t${level}`, `probability ${shown(100 * Math.exp(logprob))} %`];
  };
}

function advantageClass(value) {
  if (value === null || value === 0) return "t0";
  const level = Math.abs(value) < 0.25 ? 1 : Math.abs(value) < 1 ? 2 : 3;
  return value > 0 ? `p${level}` : `t${level}`;
}

/** Show sampled tokens by the colouring that is chosen. */
function tokenText(sample) {
  const box = el("div", { class: "said answer tokens" });
  const mark = tokenMarks(sample);
  sample.tokens.slice(0, MOST_TOKENS).forEach((token, i) => {
    const [kind, title] = mark(i);
    box.append(el("span", { class: kind, title }, token));
  });
  const left = sample.tokens.length - MOST_TOKENS;
  if (left <= 0) return box;
  box.append(sample.tokens.slice(MOST_TOKENS).join(""));
  return el("div", null, box, el("p", { class: "muted who" }, `the last ${shown(left)} tokens have no colour here`));
}
