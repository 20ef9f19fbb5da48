"use strict";
// The page of a report: unpacks plotly.js, plots each figure when it comes into view, and lists samples.
const byId = (id) => document.getElementById(id);
const read = (id) => JSON.parse(byId(`data-${id}`).textContent);
const make = (tag, text = "", name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });
const root = document.documentElement;

const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function color(variable) {
  const probe = document.body.appendChild(make("span"));
  probe.style.color = `var(${variable})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Names are wrapped where a legend or a hover would cut them; an entity such as &lt; is one letter.
const letters = (name) => name.match(/&\w+;|[^]/gu) || [];
function wrap(name, width) {
  const most = Math.max(20, Math.floor((width - 150) / 7));
  const lines = letters(name).reduce((rows, letter, at) => (at % most ? (rows[rows.length - 1] += letter) : rows.push(letter), rows), []);
  return lines.join("<br>");
}

function legendHeight(names, width) {
  let [height, x, lines] = [0, Infinity, 1];
  for (const name of names) {
    const parts = name.split("<br>");
    const needed = 7 * letters(parts[0]).length + 46;
    if (x + needed > width - 12) [x, lines] = [0, 0];
    height += 17 * Math.max(0, parts.length - lines) + (lines ? 0 : 11);
    [x, lines] = [x + needed, Math.max(lines, parts.length)];
  }
  return height;
}

function withTheme(figure, width) {
  const [ink, muted, line, card] = ["--ink", "--muted", "--line", "--card"].map(color);
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true, tickfont: { color: muted } };
  const names = figure.data.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => trace.name);
  const given = figure.layout;
  return {
    ...given,
    xaxis: { ...axis, spikecolor: muted, spikethickness: 1, ...given.xaxis },
    yaxis: { ...axis, ...given.yaxis, title: { ...given.yaxis?.title, font: { size: 12 } } },
    ...(given.xaxis2 && { xaxis2: { ...axis, ...given.xaxis2 } }),
    ...(given.yaxis2 && { yaxis2: { ...axis, ...given.yaxis2 } }),
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    title: given.title && { ...given.title, font: { size: 13 }, x: 0, xref: "paper" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink }, namelength: -1 },
    hovermode: given.hovermode || (figure.data.some((trace) => trace.type === "heatmap") ? "closest" : "x unified"),
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    legend: { ...given.legend, orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom", maxheight: 0.6 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
    margin: { l: 56, r: 12, t: 30, b: 40 },
    showlegend: names.length > 0 && given.showlegend !== false && figure.data[0].type !== "heatmap",
    height: (given.height || 300) + (figure.data[0].type === "heatmap" ? 19 : legendHeight(names, width)),
  };
}

// Of compared runs, held-out lines have a darker colour than the run; in dark mode, a lighter colour.
function shade(trace) {
  if (trace.meta !== "shade" || !isDark()) return trace;
  const parts = [1, 3, 5].map((at) => Math.min(255, parseInt(trace.line.color.slice(at, at + 2), 16) / 0.55));
  const color = `rgb(${parts.map((part) => Math.round(128 + part / 2)).join(", ")})`;
  return { ...trace, line: { ...trace.line, color }, marker: { ...trace.marker, color } };
}

async function loadPlotly() {
  // The library is compressed: 2 MB instead of 5. A script element of the page itself runs it.
  const packed = Uint8Array.from(atob(byId("data-plotly").textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", await new Response(plain).text()));
}

async function showFigures() {
  const figures = read("figures");
  await loadPlotly();
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const draw = (div) => {
    const { data, layout } = figures[div.dataset.figure];
    const figure = { layout, data: data.map((trace) => ({ ...shade(trace), ...(trace.name && { name: wrap(trace.name, div.clientWidth) }) })) };
    Plotly.react(div, figure.data, withTheme(figure, div.clientWidth), config);
    div.dataset.drawn = "yes";
  };
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && !target.dataset.drawn) draw(target);
    }
  }, { rootMargin: "600px" });
  const plots = [...document.querySelectorAll(".plot")];
  plots.forEach((div) => seen.observe(div));
  addEventListener("beforeprint", () => plots.forEach(draw));
  const redraw = () => plots.filter((div) => div.dataset.drawn).forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return redraw;
}

function showSamples(samples) {
  const [list, query, order, count] = ["sample-list", "sample-query", "sample-order", "sample-count"].map(byId);
  const texts = samples.map((one) => [one.run, one.prompt, one.response, one.expected, one.error].join("\n").toLowerCase());
  let most = 25;
  const show = () => {
    const [key, direction] = order.value.split(" ");
    const words = query.value.toLowerCase();
    const found = samples.filter((_, index) => texts[index].includes(words));
    const sign = direction === "down" ? -1 : 1;
    // Without a value: last, but without a reward first among the lowest.
    const absent = key === "reward" && direction === "up" ? -Infinity : Infinity;
    const rank = (one) => (one[key] === null ? absent : sign * one[key]);
    found.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b)));
    list.replaceChildren(...found.slice(0, most).map(sampleRow));
    const matching = words ? `${found.length} that match, of ${samples.length}` : `${samples.length}`;
    count.textContent = `${Math.min(most, found.length)} of ${matching} shown`;
    byId("sample-more").hidden = found.length <= most;
  };
  const again = () => { most = 25; show(); };
  query.addEventListener("input", again);
  order.addEventListener("change", again);
  byId("sample-more").addEventListener("click", () => { most += 100; show(); });
  show();
}

function short(value) {
  if (value === null) return "none";
  return value && Math.abs(value) < 1e-3 ? value.toExponential(2) : Number(value.toPrecision(4)).toString();
}

function sampleRow(one) {
  const row = make("details", "", "sample");
  const head = make("summary", `${one.run ? one.run + ", " : ""}step ${one.step}: reward ${short(one.reward)}, ${one.length} tokens, gap ${short(one.gap)} `);
  one.flags.forEach((flag) => head.append(make("span", `${flag} `, "flag")));
  head.append(make("span", one.response.slice(0, 120), "start"));
  if (one.expected) head.append(make("span", `expected ${one.expected.slice(0, 60)}${one.expected.length > 60 ? "…" : ""}`, "answer"));
  row.append(head);
  row.addEventListener("toggle", () => {
    if (row.childElementCount > 1) return;
    const block = (title, text) => {
      const part = make("div");
      if (text) part.append(make("h3", title), make("pre", text));
      return part;
    };
    const pair = make("div", "", one.expected ? "pair" : "");
    pair.append(block("Response", one.response), block("Expected answer", one.expected));
    row.append(block("Prompt", one.prompt), pair, block("Rewards", one.rewards), block("Error", one.error));
    row.append(make("h3", `prompt ${one.group}, response ${one.sample}, ${one.tool_calls} tool calls, ended by ${one.finish}`));
  });
  return row;
}

if (byId("sample-list")) showSamples(read("samples"));
const button = byId("theme");
const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
button.hidden = false;
label();
showFigures().then((redraw) => button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  label();
  redraw();
})).catch((error) => byId("theme").after(make("p", `The figures cannot be shown: ${error}`, "note")));
