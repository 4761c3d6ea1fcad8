// The status page: /status, /metrics and /ready, every two seconds.

const POLL_MS = 2000;
const KEPT_MS = 300000; // that the charts show
const RATE_MS = 10000; // that rates look back
const QUANTILE_MS = 60000; // that percentiles look back
const MIB = 1 << 20;
const history_ = []; // samples, the latest last
let last = null; // when an answer came
let timer = null;
let polling = false;

// Series by name, each a list of {labels, value}.
function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (match === null) continue;
    const labels = new Map();
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels.set(name, value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one)));
    }
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const series = (metrics, name) => metrics.get(name) || [];
const total = (metrics, name) => series(metrics, name).reduce((sum, one) => sum + one.value, 0);

function buckets(metrics, name) {
  const counts = new Map();
  for (const one of series(metrics, `${name}_bucket`)) {
    const bound = one.labels.get("le") === "+Inf" ? Infinity : Number(one.labels.get("le"));
    counts.set(bound, (counts.get(bound) || 0) + one.value);
  }
  return [...counts].sort((a, b) => a[0] - b[0]);
}

// As PromQL's histogram_quantile. null without a value between the two.
function quantile(after, before, fraction) {
  const counts = after.map(([bound, count], index) => [bound, count - (before[index] ? before[index][1] : 0)]);
  const all = counts.length ? counts[counts.length - 1][1] : 0;
  if (!(all > 0)) return null;
  let low = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (bound === Infinity) return low;
    if (count >= fraction * all) return count > below ? low + ((bound - low) * (fraction * all - below)) / (count - below) : bound;
    low = bound;
    below = count;
  }
  return low;
}

const tokensOf = (counters) => Number(counters.prompt_tokens) + Number(counters.decoded_tokens);

function sample(metrics, status) {
  const workers = status.islands.flatMap((island) => island.workers);
  return {
    at: performance.now(),
    metrics,
    running: Math.max(0, status.active - status.queued),
    waiting: status.queued,
    output: total(metrics, "vllm:generation_tokens_total"),
    prompts: total(metrics, "vllm:prompt_tokens_total"),
    computed: new Map(workers.filter((one) => one.counters).map((one) => [one.pid, tokensOf(one.counters)])),
  };
}

// The newest sample that is at least so old, else the oldest.
function before(milliseconds) {
  const now = history_[history_.length - 1].at;
  return history_.findLast((one) => now - one.at >= milliseconds) || history_[0];
}

function rate(of) {
  const now = history_[history_.length - 1];
  const then = before(RATE_MS);
  const grown = of(now) - of(then);
  return now.at > then.at && grown >= 0 ? (1000 * grown) / (now.at - then.at) : null;
}

const number = (value, digits = 0) =>
  value === null || !Number.isFinite(value) ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
const seconds = (value) => (value === null ? "–" : value < 1 ? `${number(1000 * value, 1)} ms` : `${number(value, 2)} s`);
const bytes = (value) => (value >= 1024 * MIB ? `${number(value / 1024 / MIB, 1)} GiB` : `${number(value / MIB)} MiB`);

function age(value) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"]];
  const [size, unit] = parts.find(([one]) => value >= one) || [1, "s"];
  return `${Math.floor(value / size)} ${unit}`;
}

function bar(parts, whole) {
  const track = element("span", { class: "track" });
  for (const [value, kind] of parts) {
    const fill = element("span", { class: `fill ${kind}` });
    fill.style.width = whole > 0 ? `${(100 * value) / whole}%` : "0";
    track.append(fill);
  }
  return track;
}

// heads: those that begin with < stand on the left.
function table(id, heads, rows, empty) {
  const left = heads.map((head) => head.startsWith("<"));
  const cells = (row, tag) =>
    element("tr", {}, ...row.map((cell, index) => element(tag, left[index] ? { class: "text" } : {}, cell)));
  const head = element("thead", {}, cells(heads.map((one) => one.replace("<", "")), "th"));
  const none = element("tr", {}, element("td", { class: "text dim", colspan: heads.length }, empty || "none"));
  byId(id).replaceChildren(head, element("tbody", {}, ...(rows.length ? rows.map((row) => cells(row, "td")) : [none])));
}

const mark = (text, kind) => element("span", { class: kind }, text);

function line(points, kind, most) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  made.setAttribute("class", kind);
  made.setAttribute("points", points.map(([x, y]) => `${(300 * x).toFixed(1)},${(58 - (56 * y) / most).toFixed(1)}`).join(" "));
  return made;
}

// lines: [class, points]; a point is [when, value].
function chart(id, lines, unit) {
  const now = history_[history_.length - 1].at;
  const most = Math.max(1, ...lines.flatMap(([, points]) => points.map(([, value]) => value)));
  const place = ([at, value]) => [1 - (now - at) / KEPT_MS, value];
  byId(id).replaceChildren(...lines.map(([kind, points]) => line(points.map(place), kind, most)));
  byId(`most-${id}`).textContent = `at most ${number(most)}${unit}, in 5 min`;
}

function rates(of) {
  return history_.slice(1).map((one, index) => {
    const then = history_[index];
    return [one.at, Math.max(0, (1000 * (of(one) - of(then))) / (one.at - then.at))];
  });
}

function showCards(metrics) {
  const now = history_[history_.length - 1];
  const then = before(QUANTILE_MS);
  const percentile = (name, one) => seconds(quantile(buckets(metrics, name), then === now ? [] : buckets(then.metrics, name), one));
  const first = "vllm:time_to_first_token_seconds";
  const next = "vllm:inter_token_latency_seconds";
  const used = series(metrics, "vllm:kv_cache_usage_perc");
  const cards = [
    ["running", number(now.running)],
    ["waiting", number(now.waiting)],
    ["output tokens/s", number(rate((one) => one.output))],
    ["prompt tokens/s", number(rate((one) => one.prompts))],
    [`first token, p90 (p50 ${percentile(first, 0.5)})`, percentile(first, 0.9)],
    [`next token, p90 (p50 ${percentile(next, 0.5)})`, percentile(next, 0.9)],
    ["pages for decoding in use", used.length ? `${number(100 * used[0].value, 1)} %` : "–"],
  ];
  byId("cards").replaceChildren(
    ...cards.map(([name, value]) => element("div", { class: "panel" }, element("span", { class: "value" }, value), mark(name, "dim"))),
  );
}

const role = (worker) => worker.role.replace("ROLE_", "").toLowerCase();

function islandState(island) {
  if (!island.workers.length) return mark("starting again", "bad");
  const lost = island.workers.filter((one) => !one.alive).length;
  return lost ? mark(`${lost} lost`, "bad") : mark("serves", "good");
}

function showIslands(status) {
  const rows = status.islands.map((island) => [
    island.name, islandState(island), island.workers.filter((one) => one.alive).length, island.epoch, island.restarts,
    island.transport, island.host || "–",
  ]);
  table("islands", ["<island", "<state", "workers", "epoch", "restarts", "<transport", "<host"], rows);
}

function workerState(worker) {
  if (!worker.alive) return mark("lost", "bad");
  const ranks = worker.ranks.filter((one) => !one.alive || one.stalled);
  return ranks.length ? mark(`rank ${ranks[0].rank} ${ranks[0].stalled ? "stalled" : "ended"}`, "bad") : mark("up", "good");
}

function usedPages(worker) {
  const used = worker.num_pages - worker.free_pages - worker.draining_pages;
  const text = `${number(used)} of ${number(worker.num_pages)}`;
  return element("span", {}, bar([[used, ""], [worker.draining_pages, "draining"]], worker.num_pages), text);
}

function showWorkers(status) {
  const rows = status.islands.flatMap((island) =>
    island.workers.map((one) => {
      const name = [island.name, one.pe, role(one), workerState(one)];
      if (!one.alive) return [...name, "", "", "", "", "", ""];
      const pace = rate((sampled) => sampled.computed.get(one.pid) ?? NaN);
      return [...name, one.running, one.waiting, one.parked, number(pace), usedPages(one), bytes(Number(one.resident_bytes))];
    }),
  );
  const heads = ["<island", "PE", "<role", "<state", "running", "waiting", "parked", "tokens/s", "<pages in use", "memory"];
  table("workers", heads, rows);
}

// A tier is a pair of numbers that a worker reports, in use and in all. Those that no worker has are left out.
const TIERS = [
  ["device", "pages", (one) => [one.num_pages - one.free_pages, one.num_pages]],
  ["device: with a reusable prefix", "pages", (one) => [one.cached_pages, one.num_pages]],
  ["device: recurrent states", "pages", (one) => [one.state_pages - one.free_state_pages, one.state_pages]],
  ["host memory: evicted prefixes", "bytes", (one) => [Number(one.host_bytes_used), Number(one.host_bytes)]],
  ["host memory: parked requests", "bytes", (one) => [Number(one.parked_bytes_used), Number(one.parked_bytes)]],
  ["disk: evicted prefixes", "bytes", (one) => [Number(one.disk_bytes_used || 0), Number(one.disk_bytes || 0)]],
];

function showTiers(status) {
  const workers = status.islands.flatMap((island) => island.workers).filter((one) => one.alive);
  const rows = TIERS.map(([name, unit, of]) => {
    const [used, whole] = workers.map(of).reduce(([a, b], [c, d]) => [a + c, b + d], [0, 0]);
    const shown = unit === "bytes" ? [bytes(used), bytes(whole)] : [number(used), number(whole)];
    const part = element("span", {}, bar([[used, ""]], whole), whole ? `${number((100 * used) / whole, 1)} %` : "");
    return [whole, [name, unit, ...shown, part]];
  });
  const there = rows.filter(([whole], index) => whole > 0 || index === 0).map(([, row]) => row);
  table("tiers", ["<tier", "<unit", "in use", "in all", "<part"], there);
}

function showErrors(metrics, status) {
  const counts = new Map();
  const add = (name, value, of, kind) => {
    if (value > 0) counts.set(name, [value, rate(of), kind]);
  };
  for (const one of series(metrics, "tandem:rejected_total")) {
    const [frontend, code] = [one.labels.get("frontend"), one.labels.get("code")];
    const same = (other) => other.labels.get("frontend") === frontend && other.labels.get("code") === code;
    const of = (sampled) => (series(sampled.metrics, "tandem:rejected_total").find(same) || { value: 0 }).value;
    const failed = /^5|UNAVAILABLE|INTERNAL|DATA_LOSS|ABORTED/.test(code);
    add(`calls that ended with ${code} (${frontend})`, one.value, of, failed ? "bad" : "warn");
  }
  const named = [
    ["tandem:replays_total", "placements lost, and placed again", "warn"],
    ["tandem:island_restarts_total", "restarts of islands", "warn"],
    ["tandem:gateway_restarts_total", "restarts of gateway processes", "warn"],
    ["tandem:worker_corrupt_total", "pushes of KV that changed on their way", "bad"],
    ["tandem:worker_host_bad_pages_total", "pages that changed in host memory", "bad"],
    ["tandem:worker_expired_leases_total", "leases that expired", "warn"],
  ];
  for (const [name, text, kind] of named) add(text, total(metrics, name), (one) => total(one.metrics, name), kind);
  const rows = [...counts].map(([name, [value, pace, kind]]) => [mark(name, kind), number(value), number(pace === null ? null : 60 * pace, 1)]);
  const none = metrics.size ? "none so far" : "not known here: /metrics is on a port of its own (metrics.port), or off";
  table("errors", ["<what", "so far", "a minute"], rows, none);
}

function showGateways(status) {
  const rows = status.gateways.map((one) => [
    one.host || "–", one.process, one.pid || mark("starting again", "bad"), one.active, one.queued, one.calls, one.restarts,
  ]);
  table("gateways", ["<host", "process", "pid", "requests", "waiting", "calls", "restarts"], rows);
}

function showHead(metrics, status, reason) {
  const info = series(metrics, "vllm:cache_config_info")[0];
  const model = info ? `${info.labels.get("model_name")} · ` : "";
  byId("name").textContent = status.name;
  document.title = `${status.name} · tandem`;
  byId("about").textContent = `${model}tandem ${status.version} · up ${age(status.uptime_seconds)}`;
  byId("ready").replaceChildren(reason ? mark("not ready", "bad") : mark("ready", "good"));
  const scaling = status.scaling;
  const waits = scaling && scaling.waits_for ? `${scaling.wanted_islands} islands are wanted: ${scaling.waits_for}` : "";
  const gone = status.islands.filter((one) => !one.workers.length).map((one) => `island ${one.name} is starting again`);
  banner([reason, status.starts_nothing, ...gone, waits].filter(Boolean).join(" · "));
}

function banner(text) {
  byId("banner").textContent = text;
  byId("banner").hidden = !text;
}

function show(metrics, status, reason) {
  history_.push(sample(metrics, status));
  while (history_[history_.length - 1].at - history_[0].at > KEPT_MS) history_.shift();
  showHead(metrics, status, reason);
  showCards(metrics);
  chart("tokens", [["one", rates((one) => one.output)], ["two", rates((one) => one.prompts)]], " a second");
  chart("requests", [["one", history_.map((one) => [one.at, one.running])], ["two", history_.map((one) => [one.at, one.waiting])]], "");
  showIslands(status);
  showWorkers(status);
  showTiers(status);
  showErrors(metrics, status);
  showGateways(status);
  byId("main").hidden = false;
}

// /metrics may be on another port: then it is not asked for, as that would count as an error. /ready answers 503 with its
// reason.
async function poll() {
  const [status, metrics, ready] = await Promise.all([
    ask("/status").then((answer) => answer.json()),
    "metrics" in document.body.dataset ? ask("/metrics").then((answer) => answer.text()) : "",
    ask("/ready").then(() => "", (error) => {
      if (error.status === 503) return error.message;
      throw error;
    }),
  ]);
  show(parseMetrics(metrics), status, ready);
  last = Date.now();
}

async function run() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  try {
    if (!document.hidden) await poll();
    keys.fine();
  } catch (error) {
    if (error.status === 401) {
      byId("main").hidden = true;
      banner("");
      keys.need(error.message);
      return;
    }
    const since = last === null ? "" : ` (what is below is ${age((Date.now() - last) / 1000)} old)`;
    banner(explain(error) + since);
  } finally {
    polling = false;
  }
  timer = setTimeout(run, POLL_MS);
}

const keys = keyForm(run);
byId("api").hidden = !("docs" in document.body.dataset);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer !== null) run();
});
run();
