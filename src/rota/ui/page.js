// The live page: a list of runs that follows the folder, and charts of those that are ticked.

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8a5fbf",
  "#7f7f7f"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const FIRST = 4; // so many runs are ticked when the page opens
const KEYS = 8; // so many configuration keys are columns
const T95 = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
  2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056,
  2.052, 2.048, 2.045, 2.042];
const $ = (id) => document.getElementById(id);

let columns = [];
let keys = [];
let common = {}; // the configuration that all runs share
const runs = new Map(); // name -> what the list knows
const curves = new Map(); // name -> {models, rows}
const ticked = new Set();
let sorting = { by: "changed", down: true };
let opened = null;
let first = true;

// --- what the server says

async function get(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply.json();
}

async function loadList() {
  const told = await get("/api/runs");
  columns = told.columns;
  common = told.common;
  keys = told.keys.filter((key) => !["seed", "summary", "rounds"].includes(key));
  const names = new Set(told.runs.map((run) => run.name));
  for (const name of [...runs.keys()]) if (!names.has(name)) forget(name);
  for (const run of told.runs) runs.set(run.name, { ...runs.get(run.name), ...run });
  if (first) {
    first = false;
    const recent = [...runs.values()].filter((run) => run.tests).sort(byChange);
    const going = recent.filter((run) => run.state === "running");
    for (const run of (going.length ? going : recent).slice(0, FIRST)) ticked.add(run.name);
  }
  drawHeads();
  drawRows();
  await Promise.all([...ticked].map(loadCurve));
  drawCharts();
}

function byChange(a, b) {
  return b.changed - a.changed;
}

function forget(name) {
  runs.delete(name);
  curves.delete(name);
  ticked.delete(name);
}

async function loadCurve(name) {
  const known = curves.get(name);
  const after = known ? known.rows.length : 0;
  const told = await get(`/api/rows?run=${encodeURIComponent(name)}&after=${after}`);
  const tests = runs.get(name)?.tests ?? 0;
  if (known && after > tests) { // the run was resumed from an earlier round
    curves.delete(name);
    return loadCurve(name);
  }
  const now = curves.get(name) ?? { models: [], rows: [] };
  if (now.rows.length === told.start) now.rows.push(...told.rows);
  curves.set(name, { models: told.models, rows: now.rows });
}

function listen() {
  const events = new EventSource("/api/events");
  events.onopen = () => {
    $("live").textContent = "live";
    $("live").className = "on";
    loadList().catch(offline);
  };
  events.onerror = () => offline();
  events.onmessage = async (event) => {
    const news = JSON.parse(event.data);
    if (news.new.length || news.gone.length) {
      await loadList().catch(offline);
      return;
    }
    for (const run of news.runs) runs.set(run.name, { ...runs.get(run.name), ...run });
    drawRows();
    const mine = news.runs.map((run) => run.name).filter((name) => ticked.has(name));
    await Promise.all(mine.map(loadCurve)).catch(offline);
    if (mine.length) drawCharts();
    if (opened && news.runs.some((run) => run.name === opened)) show(opened);
  };
}

function offline() {
  $("live").textContent = "not connected: is rota ui still running?";
  $("live").className = "off";
}

// --- the list

const BASIC = [
  ["", null],
  ["run", (run) => run.name],
  ["state", (run) => run.state],
  ["round", (run) => run.round],
  ["score", (run) => run.last.accuracy],
];

function heads() {
  const more = keys.slice(0, KEYS).map((key) => [key, (run) => run.config[key]]);
  const rest = [
    ["seed", (run) => run.seed],
    ["loss", (run) => run.last.loss],
    ["sent", (run) => run.last.bytes_up + run.last.bytes_down],
    ["virtual time", (run) => run.last.seconds],
    ["failures", (run) => run.failures],
    ["changed", (run) => run.changed],
  ];
  return [...BASIC, ...more, ...rest];
}

function drawHeads() {
  $("heads").replaceChildren(...heads().map(([label, value]) => {
    const cell = document.createElement("th");
    cell.textContent = label;
    if (value) cell.onclick = () => {
      sorting = { by: label, down: sorting.by === label ? !sorting.down : false };
      drawHeads();
      drawRows();
    };
    const order = sorting.down ? "descending" : "ascending";
    if (label === sorting.by) cell.setAttribute("aria-sort", order);
    return cell;
  }));
}

function matches(run, words) {
  return words.every((word) => {
    const at = word.indexOf("=");
    if (at < 1) return run.name.includes(word) || run.state.startsWith(word);
    const key = word.slice(0, at);
    const value = word.slice(at + 1);
    const known = { ...common, ...run.config, seed: run.seed, state: run.state };
    return Object.entries(known).some(([each, mine]) =>
      (each === key || each.endsWith(`.${key}`) || each === `${key}.name`)
      && String(mine ?? "").startsWith(value));
  });
}

function visible() {
  const words = $("filter").value.trim().split(/\s+/).filter(Boolean);
  const value = heads().find(([label]) => label === sorting.by)?.[1] ?? ((run) => run.changed);
  const down = sorting.down ? -1 : 1;
  return [...runs.values()].filter((run) => matches(run, words)).sort((a, b) => {
    const [p, q] = [value(a) ?? null, value(b) ?? null];
    if (p === q) return a.name < b.name ? -1 : 1;
    if (p === null) return 1;
    if (q === null) return -1;
    return (p < q ? -1 : 1) * down;
  });
}

function cells(run) {
  const of = run.rounds ? `${run.round} / ${run.rounds}` : run.round;
  const more = keys.slice(0, KEYS).map((key) => [text(run.config[key]), ""]);
  return [
    [run.state, run.state],
    [of, ""],
    [digits(run.last.accuracy), ""],
    ...more,
    [text(run.seed), ""],
    [digits(run.last.loss), ""],
    [size(run.last.bytes_up === null ? null : run.last.bytes_up + run.last.bytes_down), ""],
    [time(run.last.seconds), ""],
    [run.failures || "", ""],
    [run.changed ? new Date(run.changed * 1000).toLocaleTimeString() : "", ""],
  ];
}

function drawRows() {
  const some = visible();
  $("count").textContent = `${some.length} of ${runs.size} runs`;
  const rows = some.map((run) => {
    const row = document.createElement("tr");
    row.dataset.run = run.name;
    const tick = document.createElement("td");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = ticked.has(run.name);
    box.setAttribute("aria-label", `show ${run.name}`);
    box.onchange = () => tickRun(run.name, box.checked);
    const line = document.createElement("i");
    if (box.checked) Object.assign(line.style, { borderTopColor: style(run.name).color });
    tick.append(box, line);
    const name = document.createElement("td");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = run.name;
    button.title = run.problem || run.name;
    button.onclick = () => show(run.name);
    name.append(button);
    row.append(tick, name);
    for (const [words, kind] of cells(run)) {
      const cell = document.createElement("td");
      cell.textContent = words;
      if (kind) cell.className = kind;
      row.append(cell);
    }
    return row;
  });
  $("rows").replaceChildren(...rows);
  const query = [...ticked].map((name) => `run=${encodeURIComponent(name)}`).join("&");
  if (query) $("report").href = `/report?${query}`;
  else $("report").removeAttribute("href");
}

async function tickRun(name, on) {
  if (on) {
    ticked.add(name);
    await loadCurve(name).catch(offline);
  } else ticked.delete(name);
  drawRows();
  drawCharts();
}

function style(name) {
  const place = [...ticked].indexOf(name);
  return { color: COLOURS[place % COLOURS.length],
    dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length] };
}

// --- the curves

let plotly = null;

function charts() {
  plotly ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.onload = () => done(window.Plotly);
    script.onerror = fail;
    document.head.append(script);
  });
  return plotly;
}

function settings() {
  return { along: $("along").value, model: $("model").value, smooth: Number($("smooth").value),
    logx: $("logx").checked, logy: $("logy").checked, merge: $("merge").checked };
}

function points(name, what, chosen) {
  const curve = curves.get(name);
  if (!curve) return { x: [], y: [] };
  const at = (key) => columns.indexOf(key);
  const place = curve.models.indexOf(chosen.model);
  const model = chosen.model && curve.models.length > 1;
  if (chosen.model && place < 0) return { x: [], y: [] };
  const column = model ? columns.length + 2 * place + (what === "loss" ? 1 : 0) : at(what);
  const along = (row) => (chosen.along === "bytes" ? row[at("bytes_up")] + row[at("bytes_down")]
    : row[at(chosen.along)]);
  return { x: curve.rows.map(along), y: curve.rows.map((row) => row[column] ?? null) };
}

function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    total = weight * total + 1;
    return sum / total;
  });
}

function groups() {
  const found = new Map(); // runs that differ in nothing but their seed
  for (const name of ticked) {
    const run = runs.get(name);
    if (!run) continue;
    const key = JSON.stringify(keys.map((each) => run.config[each] ?? null));
    found.set(key, [...(found.get(key) ?? []), run]);
  }
  return [...found.values()];
}

function label(group) {
  if (group.length === 1) return group[0].name;
  return group[0].name.replace(/[-_.]?seed[-_=]?\d+$/, "") || group[0].name;
}

function traces(what, chosen) {
  const out = [];
  if (chosen.merge) {
    groups().forEach((group, place) => {
      const color = COLOURS[place % COLOURS.length];
      const each = group.map((run) => points(run.name, what, chosen));
      const length = Math.min(...each.map((one) => one.x.length));
      const at = [...Array(length).keys()];
      const known = (i) => each.map((one) => one.y[i]).filter((y) => y !== null);
      const sum = (values) => values.reduce((a, b) => a + b);
      const mean = (values) => (values.length ? sum(values) / values.length : null);
      const x = at.map((i) => mean(each.map((one) => one.x[i])));
      const y = smoothed(at.map((i) => mean(known(i))), chosen.smooth);
      if (group.length > 1) {
        const low = at.map((i) => Math.min(...known(i)));
        const high = at.map((i) => Math.max(...known(i)));
        out.push({ x: [...x, ...[...x].reverse()], y: [...high, ...low.reverse()], fill: "toself",
          fillcolor: `${color}22`, line: { width: 0 }, hoverinfo: "skip", showlegend: false,
          mode: "lines" });
      }
      out.push({ x, y, name: `${label(group)} (${group.length})`, mode: "lines",
        line: { color, width: 2 } });
    });
    return out;
  }
  for (const name of ticked) {
    const { color, dash } = style(name);
    const { x, y } = points(name, what, chosen);
    if (chosen.smooth > 0) out.push({ x, y, mode: "lines", line: { color, width: 1, dash },
      opacity: 0.25, hoverinfo: "skip", showlegend: false });
    const mode = x.length < 40 ? "lines+markers" : "lines";
    out.push({ x, y: smoothed(y, chosen.smooth), name, mode,
      line: { color, width: 2, dash }, marker: { size: 4 } });
  }
  return out;
}

const ALONG = { round: "round", seconds: "virtual time (s)", client_seconds: "client computing (s)",
  bytes: "bytes sent, both ways" };

function layout(title, chosen, log) {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), automargin: true };
  return {
    title: { text: title, x: 0, y: 0.99, yanchor: "top", font: { size: 14 } },
    margin: { l: 52, r: 10, t: ticked.size > 1 ? 60 : 34, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), size: 12 }, showlegend: ticked.size > 1,
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    uirevision: JSON.stringify(chosen.along),
    xaxis: { ...axis, title: { text: ALONG[chosen.along], font: { size: 12 } },
      type: chosen.logx ? "log" : "linear", rangemode: "tozero" },
    yaxis: { ...axis, type: log ? "log" : "linear" }, hovermode: "x unified",
  };
}

async function drawCharts() {
  const chosen = settings();
  const models = [...new Set([...ticked].flatMap((name) => curves.get(name)?.models ?? []))];
  drawModels(models);
  $("hint").hidden = ticked.size > 0;
  paired(chosen);
  if (!ticked.size && !window.Plotly) return;
  const Plotly = await charts();
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  const names = new Set([...ticked].map((name) => runs.get(name)?.measure ?? "score"));
  const score = layout(`test ${names.size === 1 ? [...names][0] : "score"}`, chosen, false);
  const loss = layout("test loss", chosen, chosen.logy);
  for (const name of ["accuracy", "loss"]) $(name).classList.add("drawn"); // so it has a width
  await Plotly.react("accuracy", traces("accuracy", chosen), score, options);
  await Plotly.react("loss", traces("loss", chosen), loss, options);
  const last = [...ticked].map((name) => curves.get(name)?.rows.at(-1)?.[0] ?? 0);
  document.documentElement.dataset.drawn = String(Math.max(0, ...last));
}

function drawModels(models) {
  const select = $("model");
  const wanted = ["", ...(models.length > 1 ? models : [])];
  const present = [...select.options].map((option) => option.value);
  if (JSON.stringify(wanted) === JSON.stringify(present)) return;
  const before = select.value;
  select.replaceChildren(...wanted.map((name) => new Option(name || "mean", name)));
  select.value = wanted.includes(before) ? before : "";
}

// --- paired differences

function paired(chosen) {
  const all = groups();
  const place = $("paired");
  place.replaceChildren();
  if (all.length < 2) return;
  const named = all.map((group) => ({ name: label(group), runs: finals(group, chosen) }));
  const [base, ...others] = named;
  const lines = others.map((other) => {
    const seeds = [...other.runs.keys()].filter((seed) => base.runs.has(seed));
    const off = seeds.map((seed) => other.runs.get(seed) - base.runs.get(seed));
    return [other.name, seeds.length, spread(off)];
  }).filter(([, number]) => number > 0);
  if (!lines.length) return;
  const table = document.createElement("table");
  const caption = table.createCaption();
  caption.textContent = `Last scores minus those of ${base.name}, paired by seed`
    + " (with 3 seeds or more: the mean and its 95 % interval).";
  const head = table.createTHead().insertRow();
  for (const word of ["setting", "seeds", "difference"]) {
    const cell = document.createElement("th");
    cell.textContent = word;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const line of lines) {
    const row = body.insertRow();
    for (const word of line) row.insertCell().textContent = word;
  }
  place.append(table);
}

function finals(group, chosen) {
  const found = new Map();
  for (const run of group) {
    const y = points(run.name, "accuracy", chosen).y.filter((value) => value !== null);
    if (y.length) found.set(run.seed, y.at(-1));
  }
  return found;
}

function spread(values) {
  const n = values.length;
  if (n < 3) return values.map((value) => value.toFixed(4)).join(", ");
  const mean = values.reduce((a, b) => a + b) / n;
  const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1);
  const half = (T95[n - 2] ?? 1.96) * Math.sqrt(variance / n);
  return `${mean.toFixed(4)} (${(mean - half).toFixed(4)} to ${(mean + half).toFixed(4)})`;
}

// --- one run

async function show(name) {
  const told = await get(`/api/details?run=${encodeURIComponent(name)}`).catch(() => null);
  if (!told) return;
  const fresh = opened !== name;
  opened = name;
  $("one").hidden = false;
  $("name").textContent = name;
  $("config").textContent = told.text;
  const facts = [];
  const run = runs.get(name);
  if (run?.problem) facts.push(paragraph(run.problem));
  const mine = keys.filter((key) => told.config[key] !== undefined);
  if (mine.length) facts.push(tableOf("What differs between the runs",
    mine.map((key) => [key, text(told.config[key])])));
  const costs = told.costs;
  if (costs.seconds !== undefined) facts.push(tableOf("Costs until now", [
    ["virtual time", time(costs.seconds)],
    ["client computing", time(costs.client_seconds)],
    ["sent up", size(costs.bytes_up)],
    ["sent down", size(costs.bytes_down)],
    ["server memory", size(costs.server_bytes)],
  ]));
  if (told.failures.length) facts.push(tableOf("Failures", told.failures));
  if (told.last_failures.length) facts.push(tableOf("The last failures",
    told.last_failures.map((each) => [`round ${each.round}, client ${each.client}, ${each.model}`,
      each.reason])));
  $("facts").replaceChildren(...facts);
  const lines = [...told.log].reverse().map((line) => [
    `round ${line.round}`, `score ${digits(line.score) || "not tested"}`,
    `loss ${digits(line.loss) || "not tested"}`, `${line.drawn} drawn`,
    line.failed ? `${line.failed} failed` : "", time(line.seconds)].filter(Boolean).join("  "));
  $("log").textContent = lines.join("\n");
  const Plotly = await charts();
  const drawn = Object.entries(told.sampled).map(([model, counts], i) => ({
    x: [...counts.keys()], y: counts, type: "bar", name: model,
    marker: { color: COLOURS[i % COLOURS.length] } }));
  const plan = layout("how often each client was drawn", { along: "round" }, false);
  plan.xaxis.title.text = "client";
  plan.hovermode = "closest";
  plan.showlegend = drawn.length > 1;
  await Plotly.react("sampled", drawn, plan, { responsive: true, displayModeBar: false });
  Plotly.Plots.resize("sampled");
  if (fresh) $("one").scrollIntoView({ behavior: "smooth", block: "nearest" });
}

function paragraph(words) {
  const out = document.createElement("p");
  out.textContent = words;
  return out;
}

function tableOf(title, lines) {
  const table = document.createElement("table");
  table.createCaption().textContent = title;
  const body = table.createTBody();
  for (const [left, right] of lines) {
    const row = body.insertRow();
    row.insertCell().textContent = left;
    row.insertCell().textContent = right;
  }
  return table;
}

// --- words

function digits(value) {
  if (value === null || value === undefined) return "";
  return Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001)
    ? value.toExponential(2) : value.toFixed(4);
}

function text(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "";
  const step = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([n]) => bytes >= n);
  return step ? `${(bytes / step[0]).toFixed(1)} ${step[1]}` : `${bytes} B`;
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

for (const id of ["along", "model", "smooth", "logx", "logy", "merge"]) {
  $(id).addEventListener("input", drawCharts);
}
$("filter").addEventListener("input", drawRows);
$("none").onclick = () => {
  ticked.clear();
  drawRows();
  drawCharts();
};
$("close").onclick = () => {
  opened = null;
  $("one").hidden = true;
};
listen();
