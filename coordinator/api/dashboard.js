
"use strict";
// Reads the public REST API with a viewer's token. Text goes in as text, never as markup.
const PERIOD_MS = 3000, DEADLINE_MS = 15000, KEY = "echo2-token", NS = "http://www.w3.org/2000/svg";
const REWARD = "reward/all/mean", EVAL = "eval/all/mean";
const TONES = { running: "busy", starting: "busy", finishing: "busy", completed: "good", active: "good", paused: "warn", draining: "warn",
  queued: "", standby: "", failed: "bad", quarantined: "bad", cancelled: "", gone: "" };
const state = { chosen: null, series: new Map(), timer: 0, turn: 0 };
const byId = (id) => document.getElementById(id);

class NotAllowed extends Error {}

function element(name, attributes, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS(NS, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const svg = (name, attributes, ...children) => element("svg:" + name, attributes, ...children);

async function get(path) {
  const headers = { Authorization: "Bearer " + sessionStorage.getItem(KEY) };
  const answer = await fetch("/api/v1" + path, { headers, signal: AbortSignal.timeout(DEADLINE_MS) });
  if (answer.status === 401 || answer.status === 403) throw new NotAllowed((await answer.json()).detail);
  if (!answer.ok) throw new Error((await answer.json()).detail || "the coordinator answered " + answer.status);
  return answer.json();
}

// Words for figures; a figure that is not known reads as a dash, never as zero.
const DASH = "–";
const number = (value, digits) => value === null || value === undefined ? DASH : value.toFixed(digits);
const count = (value) => value === null || value === undefined ? DASH : value.toLocaleString("en");
const percent = (value) => value === null || value === undefined ? DASH : (100 * value).toFixed(1) + " %";
const plural = (value, noun) => count(value) + " " + noun + (value === 1 ? "" : "s");
const dollars = (uusd) => uusd === null || uusd === undefined ? DASH : "$" + (uusd / 1e6).toFixed(uusd < 1e6 ? 4 : 2);
function span(seconds) {
  if (seconds < 0) return "0 s";
  if (seconds < 120) return Math.round(seconds) + " s";
  if (seconds < 7200) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? (seconds / 3600).toFixed(1) + " h" : Math.round(seconds / 86400) + " d";
}
const ago = (time) => span(Date.now() / 1000 - time) + " ago";
const chip = (word) => element("span", { class: "chip " + (TONES[word] || "") }, word);

function table(id, columns, rows, none) {
  const node = byId(id);
  if (!rows.length) return void node.replaceChildren(element("tbody", {}, element("tr", {}, element("td", { class: "none" }, none))));
  const head = element("tr", {}, ...columns.map(([name, kind]) => element("th", { class: kind, scope: "col" }, name)));
  node.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}
const cell = (kind, content, title) => element("td", title ? { class: kind, title } : { class: kind }, content);

function showJobs(jobs) {
  const columns = [["Name", ""], ["State", ""], ["Step", "number"], ["Reward", "number"], ["Submitted", "number"], ["Reason", ""]];
  const rows = jobs.map((job) => {
    const row = element("tr", { class: job.id === state.chosen ? "choice chosen" : "choice", tabindex: "0" },
      cell("", job.name, job.id), cell("", chip(job.state)), cell("number", count(job.committed_steps) + " / " + count(job.planned_steps)),
      cell("number", job.reward ? number(job.reward.value, 3) : DASH), cell("number", ago(job.created_at)), cell("soft", job.reason, job.reason));
    const choose = () => { state.chosen = job.id; state.series.clear(); refresh(); };
    row.addEventListener("click", choose);
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
    return row;
  });
  table("jobs", columns, rows, "No jobs yet. Submit one with `echo2 job submit job.toml`.");
}

function showWorkers(workers) {
  const columns = [["Name", ""], ["State", ""], ["Engine", ""], ["Version", "number"], ["Rate, tok/s", "number"], ["Price, $/h", "number"],
    ["Accepted", "number"], ["Leases", "number"], ["Seen", "number"], ["Doing", ""]];
  const rows = workers.map((w) => element("tr", {},
    cell("", w.name, w.id + ", owner " + w.owner), cell("", chip(w.state), w.reason),
    cell("soft", [w.engine.kind, w.engine.dtype, w.engine.device].filter(Boolean).join(" · ")),
    cell("number", w.version === null ? DASH : "v" + w.version), cell("number", w.tokens_per_s > 0 ? number(w.tokens_per_s, 1) : DASH),
    cell("number", (w.price_uusd_per_hour / 1e6).toFixed(3)), cell("number", count(w.accepted_rollouts)), cell("number", count(w.live_leases)),
    cell("number", ago(w.last_seen_at)), cell("soft", w.activity || w.reason, w.reason)));
  table("workers", columns, rows, "No workers yet. Make an invite with `echo2 invite create`, then `echo2-worker join`.");
}

function showFigures(job) {
  const refused = Object.values(job.work.refused).reduce((sum, n) => sum + n, 0);
  const accepted = ["accepted", "scored", "unscored", "grader_failed", "grader_timeout"].reduce((sum, s) => sum + (job.work.rollouts[s] || 0), 0);
  const idle = job.learner.utilisation === null ? null : 1 - job.learner.utilisation;
  const figures = [[count(job.committed_steps) + " / " + count(job.planned_steps), "steps committed"],
    [job.reward ? number(job.reward.value, 3) : DASH, "sampled reward"], [job.eval ? number(job.eval.value, 3) : DASH, "held-out, greedy"],
    [percent(idle), "learner idle"], [number(job.rate.accepted_per_s, 2), "rollouts/s accepted"], [number(job.rate.required_per_s, 2), "rollouts/s it can train"],
    [count(accepted), "rollouts accepted"], [count(refused), "refused"], [count(job.work.accepted_tokens), "tokens"],
    [count(job.work.workers_serving), "workers serving"], [job.newest_version === null ? DASH : "v" + job.newest_version, "newest version"],
    [dollars(job.spent_uusd), "spent"]];
  byId("figures").replaceChildren(...figures.map(([value, words]) => element("div", {}, element("b", {}, value), element("span", {}, words))));
}

// Charts: plain SVG, drawn from what the API answered.
function ticks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}
function smooth(points, window) {
  return points.map((point, place) => {
    const near = points.slice(Math.max(0, place - window + 1), place + 1);
    return { step: point.step, value: near.reduce((sum, p) => sum + p.value, 0) / near.length };
  });
}
function showReward(rewards, evals) {
  const known = (points) => points.filter((point) => point.value !== null);
  const [raw, held] = [known(rewards), known(evals)], all = [...raw, ...held];
  byId("reward-note").textContent = raw.length ? "mean of each step (light), of 10 steps (dark)" + (held.length ? ", held-out (orange)" : "") : "";
  if (!all.length) return void byId("reward").replaceChildren(element("p", { class: "none" }, "No step was committed yet."));
  const width = 620, height = 250, left = 44, bottom = 26, top = 10, right = 10;
  let low = Math.min(0, ...all.map((p) => p.value)), high = Math.max(...all.map((p) => p.value));
  if (high - low < 1e-9) high = low + 1;
  const first = Math.min(...all.map((p) => p.step)), last = Math.max(first + 1, ...all.map((p) => p.step));
  const [marks, digits] = ticks(low, high);
  high = Math.max(high, marks[marks.length - 1]);
  const x = (step) => left + (step - first) / (last - first) * (width - left - right);
  const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
  const path = (points) => points.map((p, place) => (place ? "L" : "M") + x(p.step).toFixed(1) + " " + y(p.value).toFixed(1)).join("");
  const [steps] = ticks(first, last);
  byId("reward").replaceChildren(svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": "reward by step" },
    ...marks.flatMap((mark) => [svg("line", { class: "grid", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }),
      svg("text", { x: left - 6, y: y(mark) + 4, "text-anchor": "end" }, mark.toFixed(digits))]),
    ...steps.filter(Number.isInteger).map((step) => svg("text", { x: x(step), y: height - 8, "text-anchor": "middle" }, String(step))),
    svg("path", { class: "raw", d: path(raw) }), svg("path", { class: "line", d: path(smooth(raw, 10)) }), svg("path", { class: "eval", d: path(held) }),
    ...held.map((p) => svg("circle", { class: "dot", cx: x(p.step), cy: y(p.value), r: 3 }))));
}
function showStaleness(staleness) {
  const ages = Array.from({ length: Math.max(staleness.bound, staleness.highest || 0) + 1 }, (_, age) => age);
  const counts = ages.map((age) => staleness.histogram[age] || 0), most = Math.max(1, ...counts), total = counts.reduce((a, b) => a + b, 0);
  byId("staleness-note").textContent = "groups, bound S = " + staleness.bound;
  const width = 300, height = 250, bottom = 26, top = 20, slot = width / ages.length, bar = Math.min(44, slot * 0.7);
  byId("staleness").replaceChildren(svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": "groups by staleness" },
    svg("line", { class: "grid", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }),
    ...ages.flatMap((age) => {
      const tall = counts[age] / most * (height - top - bottom), middle = slot * (age + 0.5), above = height - bottom - tall;
      const share = counts[age] ? (100 * counts[age] / total).toFixed(0) + "%" : "";
      return [svg("rect", { class: age > staleness.bound ? "over" : "bar", x: middle - bar / 2, y: above, width: bar, height: tall, rx: 2 },
        svg("title", {}, plural(counts[age], "group"))), svg("text", { class: "value", x: middle, y: above - 5, "text-anchor": "middle" }, share),
      svg("text", { x: middle, y: height - 8, "text-anchor": "middle" }, String(age))];
    })));
}
function showLearner(learner, rate) {
  byId("learner-note").textContent = "last " + plural(learner.steps_counted, "step");
  if (learner.utilisation === null) return void byId("learner").replaceChildren(element("p", { class: "none" }, "No step was committed yet."));
  const width = 300, height = 250, busy = learner.utilisation * width;
  byId("learner").replaceChildren(svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": "learner time" },
    svg("rect", { class: "idle", x: 0, y: 40, width, height: 26, rx: 4 }), svg("rect", { class: "bar", x: 0, y: 40, width: busy, height: 26, rx: 4 }),
    svg("text", { class: "value", x: 0, y: 28 }, "training " + percent(learner.utilisation)),
    svg("text", { class: "value", x: width, y: 28, "text-anchor": "end" }, "idle " + percent(1 - learner.utilisation)),
    svg("text", { x: 0, y: 90 }, span(learner.train_s) + " of training, " + span(learner.waited_s) + " of waiting"),
    svg("text", { x: 0, y: 107 }, plural(learner.restarts, "restart") + " since the last step"),
    svg("rect", { class: "idle", x: 0, y: 160, width, height: 26, rx: 4 }),
    svg("rect", { class: "bar", x: 0, y: 160, width: rate.required_per_s ? width * Math.min(1, rate.accepted_per_s / rate.required_per_s) : 0, height: 26, rx: 4 }),
    svg("text", { class: "value", x: 0, y: 148 }, number(rate.accepted_per_s, 2) + " rollouts/s come in"),
    svg("text", { class: "value", x: width, y: 148, "text-anchor": "end" }, number(rate.required_per_s, 2) + " it can train"),
    svg("text", { x: 0, y: 210 }, "counted over the last " + span(rate.window_s))));
}

function showMarket(market) {
  byId("market").hidden = market === undefined;
  if (market === undefined) return;
  const rate = (value) => number(value, 2);
  byId("market-note").textContent = market.name + ", decided " + ago(market.decided_at);
  const figures = [[percent(market.predicted_idle), "learner idle, predicted"], [percent(market.measured_idle), "learner idle, measured"],
    [rate(market.required_rate), "completions/s required, with replaced groups and pauses"],
    [rate(market.offered_rate), "completions/s from the active set"], [market.active + " of " + market.offers.length, "workers active"], ["$" + market.usd_per_hour.toFixed(3), "asked an hour"],
    [market.usd_per_thousand === null ? DASH : "$" + market.usd_per_thousand.toFixed(4), "per 1,000 admitted"], [market.binding || DASH, "limited by"],
    [market.warning_line === null ? DASH : market.warning_line + " / " + market.staleness_bound, "warning line / S"], [count(market.kappa), "kappa"]];
  byId("market-figures").replaceChildren(...figures.map(([value, words]) => element("div", {}, element("b", {}, value), element("span", {}, words))));
  byId("market-words").textContent = [market.reason, market.infeasible_because, market.binding_words].filter(Boolean).join(" · ");
  const columns = [["Worker", ""], ["Active", ""], ["Price, $/h", "number"], ["Completions/s", "number"], ["$ per 1,000", "number"],
    ["$ per 1M tokens", "number"], ["Why", ""]];
  const rows = [...market.offers].sort((a, b) => b.is_active - a.is_active).map((o) => element("tr", {},
    cell("", o.name, o.worker_id + ", owner " + o.owner), cell("", chip(o.is_active ? "active" : "standby")),
    cell("number", (o.uusd_per_hour / 1e6).toFixed(3)), cell("number", rate(o.completions_per_s) + " ± " + rate(o.deviation)),
    cell("number", number(o.usd_per_thousand, 4)), cell("number", dollars(o.uusd_per_million_tokens)), cell("soft", o.reason, o.reason)));
  table("offers", columns, rows, "No worker may serve this job yet.");
}

async function series(job, name) {
  const known = state.series.get(name) || [], last = known[known.length - 1];
  const since = last ? "&since=" + last.at : "";
  const answer = await get("/jobs/" + job + "/metrics?name=" + encodeURIComponent(name) + since);
  const all = new Map([...known, ...answer.points].map((point) => [point.step, point]));
  const points = [...all.values()].sort((a, b) => a.step - b.step);
  state.series.set(name, points);
  return points;
}
async function showJob(id) {
  const [job, rewards, evals, market] = await Promise.all([get("/jobs/" + id), series(id, REWARD), series(id, EVAL), get("/market")]);
  if (state.chosen !== id) return;
  byId("job").hidden = false;
  byId("job-name").textContent = job.name;
  byId("job-reason").textContent = [job.doing, job.reason].filter(Boolean).join(" · ");
  byId("job-warning").textContent = job.warnings.join(" · ");
  byId("job-state").replaceWith(Object.assign(chip(job.state), { id: "job-state" }));
  showFigures(job);
  showReward(rewards, evals);
  showStaleness(job.staleness);
  showLearner(job.learner, job.rate);
  showMarket(market.jobs.find((one) => one.job_id === id));
}

function say(words, bad) { byId("status").textContent = words; byId("status").className = bad ? "bad" : ""; }
function signedIn(yes) {
  byId("sign-in").hidden = yes;
  byId("board").hidden = !yes;
  byId("sign-out").hidden = !yes;
}
async function refresh() {
  const turn = ++state.turn;
  clearTimeout(state.timer);
  try {
    const [jobs, pool] = await Promise.all([get("/jobs?limit=50"), get("/workers?limit=200")]);
    if (turn !== state.turn) return;
    const live = jobs.jobs.find((job) => job.state === "running") || jobs.jobs[0];
    if (!jobs.jobs.some((job) => job.id === state.chosen)) state.chosen = live ? live.id : null;
    showJobs(jobs.jobs);
    showWorkers(pool.workers);
    byId("job").hidden = state.chosen === null;
    if (state.chosen !== null) await showJob(state.chosen);
    say("updated " + new Date().toLocaleTimeString(), false);
    signedIn(true);
  } catch (error) {
    if (error instanceof NotAllowed) return signOut(error.message);
    say("not updated: " + error.message, true);
  }
  if (turn === state.turn) state.timer = setTimeout(refresh, PERIOD_MS);
}
function signOut(words) {
  state.turn += 1;
  clearTimeout(state.timer);
  sessionStorage.removeItem(KEY);
  state.series.clear();
  signedIn(false);
  byId("sign-in-error").textContent = words;
  say("not signed in", false);
}
byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("token").value.trim());
  byId("token").value = "";
  byId("sign-in-error").textContent = "";
  refresh();
});
byId("sign-out").addEventListener("click", () => signOut(""));
if (sessionStorage.getItem(KEY)) refresh(); else signedIn(false);
