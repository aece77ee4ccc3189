"use strict";
// Python gives the charts' values. Here they get their colours and the x axis that the reader
// chose; hidden series are left out.
(() => {
  const page = JSON.parse(document.getElementById("page").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const state = { axis: "round", log: false, hidden: new Set(), focus: null };

  // Okabe and Ito's colours, a little darker or lighter to suit the background; Tol's muted colours
  // for classes
  const LIGHT = {
    ink: "#1c2530", quiet: "#5d6875", rule: "#e8ebee", card: "#ffffff",
    series: ["#0072b2", "#d55e00", "#009e73", "#c0609a", "#d18f00", "#4aa8e0"],
    classes: [
      "#332288", "#88ccee", "#44aa99", "#117733", "#999933",
      "#ddcc77", "#cc6677", "#882255", "#aa4499", "#bbbbbb",
    ],
    heat: [[0, "#f3f6f9"], [0.5, "#6aa9d6"], [1, "#08366b"]],
  };
  const DARK = {
    ink: "#e4e8ec", quiet: "#9aa5b1", rule: "#2c343d", card: "#1a2027",
    series: ["#3d9be9", "#f0783c", "#1fbf92", "#da8dbd", "#e6a820", "#8fd3f7"],
    classes: [
      "#7468d8", "#88ccee", "#44aa99", "#2a8f4c", "#999933",
      "#ddcc77", "#cc6677", "#a83d74", "#c068b4", "#bbbbbb",
    ],
    heat: [[0, "#1f262e"], [0.5, "#2f78b0"], [1, "#c9e6ff"]],
  };
  const theme = () => (dark.matches ? DARK : LIGHT);

  let drawings = 0;
  const rounds = Math.max(...Object.values(page.x).map((entry) => entry.round.at(-1) ?? 0));

  function colour(key, alpha = 1) {
    const at = page.series[key].colour;
    const hex = at < 0 ? theme().ink : theme().series[at];
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  // overlapping areas hide the lines: if there are many, only the one under the pointer is filled
  const shown = () => Object.keys(page.series).length - state.hidden.size;
  const filled = (series) => state.focus === series || shown() <= page.crowd;

  function finish(trace) {
    const { series, role, along, value, index } = trace.meta;
    const out = { ...trace };
    if (series) {
      const fill = (alpha) => colour(series, filled(series) ? alpha : 0);
      out.visible = !state.hidden.has(series);
      const pale = state.focus && state.focus !== series;
      out.opacity = pale ? 0.15 : 1;
      const width = { dotted: 1.3, under: 9 }[role] ?? (page.series[series].colour < 0 ? 3 : 2);
      const dash = role === "dotted" ? "dot" : page.series[series].dash;
      if (role === "edge" || role === "band") {
        out.line = { width: 0 };
        out.marker = { color: fill(0.6), symbol: "line-ew-open", size: 14 };
        out.fillcolor = fill(pale ? 0.03 : 0.16);
      } else if (role === "bar") {
        out.marker = { color: colour(series, 0.9) };
      } else {
        const alpha = role === "under" ? 0.18 : 1;
        out.line = { ...trace.line, color: colour(series, alpha), width, dash };
        out.marker = { color: colour(series), size: 5 };
        if (role === "area") out.fillcolor = fill(pale ? 0.03 : 0.12);
      }
    }
    if (role === "class") out.marker = { color: theme().classes[index], line: { width: 0 } };
    if (role === "before") {
      const line = { color: theme().ink, width: 1.5 };
      out.marker = { color: theme().card, symbol: "diamond", size: 8, line };
    }
    if (role === "sizes") out.marker = { color: theme().series[0], line: { width: 0 } };
    if (role === "heat") {
      out.colorscale = theme().heat;
      out.colorbar = {
        thickness: 10, outlinewidth: 0, tickformat: ".0%", len: 0.7, y: 0, yanchor: "bottom",
      };
    }
    if (along !== undefined) {
      out.x = page.x[along][state.axis];
      if (value) {
        out.customdata = page.x[along].round;
        const place = `round %{customdata}, %{x:.4~g} ${page.axes[state.axis].unit}`;
        const whole = `<b>%{fullData.name}</b><br>${value}<br>${place}<extra></extra>`;
        const short = `${value}<extra>%{fullData.name}</extra>`;
        out.hovertemplate = state.axis === "round" ? short : whole;
      }
    }
    return out;
  }

  function frame(key, chart, narrow) {
    const { ink, quiet, rule, card } = theme();
    const family = getComputedStyle(document.documentElement).fontFamily;
    const axis = {
      gridcolor: rule, linecolor: rule, zeroline: false, tickfont: { color: quiet },
      automargin: true,
    };
    const titled = { font: { size: 12, color: quiet }, standoff: 8 };
    const named = (given) =>
      given && given.title ? { ...given, title: { ...titled, ...given.title } } : given;
    const clear = "rgba(0,0,0,0)";
    const layout = {
      // always drawn anew, because plotly loses the axes' ranges if it finds no change; a zoom
      // stays until the reader chooses another axis
      datarevision: ++drawings, uirevision: chart.progress ? `${state.axis} ${state.log}` : "",
      showlegend: false, margin: { l: 46, r: 10, t: 10, b: 40 },
      paper_bgcolor: clear, plot_bgcolor: clear,
      font: { family, size: 12, color: ink },
      hoverlabel: {
        bgcolor: card, bordercolor: rule, font: { family, size: 12, color: ink },
        namelength: 60, align: "left",
      },
      modebar: { bgcolor: clear, color: quiet, activecolor: ink },
      dragmode: touch ? false : "zoom",
      legend: {
        orientation: "h", y: narrow ? -0.25 : 1.02, yanchor: narrow ? "top" : "bottom",
        x: 0, traceorder: "normal", font: { size: 11 },
      },
      ...chart.layout,
    };
    for (const name of ["xaxis", "yaxis", "yaxis2"]) {
      if (name !== "yaxis2" || layout.yaxis2) layout[name] = { ...axis, ...named(layout[name]) };
    }
    layout.xaxis.showgrid = false;
    if (chart.progress) {
      layout.xaxis = {
        ...layout.xaxis,
        ...named({ title: { text: page.axes[state.axis].title } }),
        rangemode: "tozero", spikecolor: quiet, spikethickness: 1, spikedash: "solid",
        unifiedhovertitle: { text: "round %{x}" },
      };
      if (state.axis === "round" && rounds <= 10) layout.xaxis.dtick = 1;
      layout.hovermode = state.axis === "round" ? "x unified" : "closest";
      if (key.startsWith("loss") && state.log) layout.yaxis.type = "log";
    }
    return layout;
  }

  const config = {
    displaylogo: false, responsive: true,
    modeBarButtons: [["toImage", "resetScale2d"]], displayModeBar: !touch,
  };
  const places = [...document.querySelectorAll("[data-chart]")];

  function draw(place) {
    const key = place.dataset.chart;
    const chart = page.charts[key];
    const layout = frame(key, chart, place.clientWidth < 480);
    Plotly.react(place, chart.traces.map(finish), layout, config);
  }

  // charts in sight are drawn at once, the others one by one, so that the page stays responsive
  const root = document.documentElement;
  const waiting = new Set();
  let next = 0;
  const inSight = (place) => {
    const { top, bottom } = place.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  };
  function drawNext() {
    const now = [...waiting].filter(inSight);
    for (const place of now.length ? now : [...waiting].slice(0, 1)) {
      waiting.delete(place);
      draw(place);
    }
    clearTimeout(next);
    if (waiting.size) next = setTimeout(drawNext);
    root.dataset.drawn = waiting.size ? "no" : "yes";
  }
  function redraw(which = () => true) {
    for (const place of places) if (which(page.charts[place.dataset.chart])) waiting.add(place);
    drawNext();
  }
  const overRounds = (chart) => chart.progress;
  const withSeries = (chart) => chart.traces.some((trace) => trace.meta.series);

  const chips = [...document.querySelectorAll(".chip")];
  const all = document.getElementById("all");
  function legend() {
    const style = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "dashed" };
    for (const chip of chips) {
      const key = chip.dataset.series;
      chip.setAttribute("aria-pressed", String(!state.hidden.has(key)));
      const look = key === "worst" ? `${colour(key, 0.18)};border-top-width:9px` : colour(key);
      const line = style[page.series[key].dash];
      chip.querySelector("i").style.cssText = `border-top-color:${look};border-top-style:${line}`;
    }
    if (all) all.hidden = state.hidden.size === 0;
  }

  let resting = 0;
  function focus(key) {
    clearTimeout(resting);
    resting = setTimeout(() => {
      if (state.focus === key) return;
      state.focus = key;
      redraw(withSeries);
    }, 120);
  }
  function hide(keys) {
    clearTimeout(resting);
    state.focus = null;
    state.hidden = new Set(keys);
    legend();
    redraw(withSeries);
  }

  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.addEventListener("change", () => { state.axis = radio.value; redraw(overRounds); });
  }
  document.getElementById("log").addEventListener("change", (event) => {
    state.log = event.target.checked;
    redraw(overRounds);
  });
  for (const chip of chips) {
    const key = chip.dataset.series;
    chip.title = "click: hide or show; double-click: show only this one";
    const others = (keys) => [...keys].filter((other) => other !== key);
    chip.addEventListener("click", () => {
      hide(state.hidden.has(key) ? others(state.hidden) : [...state.hidden, key]);
    });
    chip.addEventListener("dblclick", () => hide(others(Object.keys(page.series))));
    if (!touch) {
      chip.addEventListener("mouseenter", () => focus(state.hidden.has(key) ? null : key));
      chip.addEventListener("mouseleave", () => focus(null));
    }
  }
  if (all) all.addEventListener("click", () => hide([]));
  dark.addEventListener("change", () => { legend(); redraw(); });
  legend();
  redraw();
})();
