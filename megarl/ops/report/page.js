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

function withTheme(figure, width) {
  const [ink, muted, line, card] = ["--ink", "--muted", "--line", "--card"].map(color);
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true, tickfont: { color: muted } };
  const names = figure.data.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => trace.name);
  const rows = Math.ceil(names.reduce((sum, name) => sum + 7 * name.length + 52, 0) / Math.max(width - 60, 120));
  const given = figure.layout;
  return {
    ...given,
    xaxis: { ...axis, ...given.xaxis },
    yaxis: { ...axis, ...given.yaxis },
    ...(given.xaxis2 && { xaxis2: { ...axis, ...given.xaxis2 } }),
    ...(given.yaxis2 && { yaxis2: { ...axis, ...given.yaxis2 } }),
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink },
    title: given.title && { ...given.title, font: { size: 13 }, x: 0, xref: "paper" },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
    hovermode: given.hovermode || (figure.data.some((trace) => trace.type === "heatmap") ? "closest" : "x unified"),
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    legend: { ...given.legend, orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom", maxheight: 0.6 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
    margin: { l: 56, r: 12, t: 30, b: 40 },
    showlegend: names.length > 0 && given.showlegend !== false && figure.data[0].type !== "heatmap",
    height: (given.height || 300) + 19 * (figure.data[0].type === "heatmap" ? 1 : rows),
  };
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
    const figure = figures[div.dataset.figure];
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
  const texts = samples.map((one) => [one.run, one.prompt, one.response, one.error].join("\n").toLowerCase());
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
    count.textContent = `${Math.min(most, found.length)} of ${found.length} shown`;
    byId("sample-more").hidden = found.length <= most;
  };
  const again = () => { most = 25; show(); };
  query.addEventListener("input", again);
  order.addEventListener("change", again);
  byId("sample-more").addEventListener("click", () => { most += 100; show(); });
  show();
}

const short = (value) => (value === null ? "none" : Number(value.toPrecision(4)).toString());

function sampleRow(one) {
  const row = make("details", "", "sample");
  const head = make("summary", `${one.run ? one.run + ", " : ""}step ${one.step}: reward ${short(one.reward)}, ${one.length} tokens, gap ${short(one.gap)} `);
  one.flags.forEach((flag) => head.append(make("span", `${flag} `, "flag")));
  head.append(make("span", one.response.slice(0, 120), "start"));
  row.append(head);
  row.addEventListener("toggle", () => {
    if (row.childElementCount > 1) return;
    for (const [title, text] of [["Prompt", one.prompt], ["Response", one.response], ["Rewards", one.rewards], ["Error", one.error]]) {
      if (text) row.append(make("h3", title), make("pre", text));
    }
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
