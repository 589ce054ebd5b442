// All charts of the page share the x axis, the zoom, the cursor and the smoothing. A chart is drawn once it is near the
// window, and again when something changed while it was away. Those of the group "Summary" are in the head of the page;
// the other groups are folded.
sections.charts = function (root, first) {
  let data = first, palette, cards = [], zoom = null, cursorX = null;
  const chosen = {}, opened = new Set();
  const axes = {step: "Step", time: "Time trained", tokens: "Tokens trained"};
  const SMOOTH_FROM = 30, COLOURS = 8;
  const longest = Math.max(...data.runs.map((run) => run.step.length));

  const axis = el("select", {id: "axis", onchange: () => { zoom = cursorX = null; changed(); }});
  const smoothing = el("input", {id: "smoothing", type: "range", min: 0, max: 0.98, step: 0.02,
    value: longest < SMOOTH_FROM ? 0 : 0.8, oninput: () => { shown.textContent = smoothing.value; changed(); }});
  const shown = el("output", {text: smoothing.value, for: "smoothing"});
  const search = el("input", {type: "search", id: "metric-search", placeholder: "reward, kl, lr, …", oninput: filter});
  const reset = el("button", {type: "button", text: "Reset zoom", hidden: true, onclick: () => zoomTo(null)});
  const none = el("p", {class: "note", role: "status"});
  const place = el("div"), head = document.getElementById("first");
  root.append(
    el("div", {class: "controls"},
      el("label", {for: "metric-search"}, "Search metrics", search),
      el("label", {for: "axis"}, "Over", axis),
      el("label", {for: "smoothing"}, "Smoothing", smoothing, shown), reset),
    none, place);

  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.card.near = entry.isIntersecting;
      if (entry.isIntersecting) entry.target.card.refresh();
    }
  }, {rootMargin: "300px"});
  const sized = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.card.resize()));

  function readPalette() {
    const names = [...Array(COLOURS).keys()].map((i) => `series-${i}`).concat("muted", "line", "card");
    palette = Object.fromEntries(names.map((name) => [name, colour(name)]));
  }

  function xOf(run) {
    const unit = axis.value === "time" ? timeUnit()[0] : 1;
    return run[axis.value].map((value) => value / unit);
  }

  function timeUnit() {
    const last = Math.max(...data.runs.map((run) => run.time?.at(-1) ?? 0));
    return last > 3 * 3600 ? [3600, "hours"] : last > 180 ? [60, "minutes"] : [1, "seconds"];
  }

  function axisLabel() {
    return axis.value === "time" ? `${axes.time}, ${timeUnit()[1]}` : axes[axis.value];
  }

  // A series as [x, y]; x of the points that it has.
  function points([metric, , run]) {
    const column = data.runs[run].columns[metric], x = xOf(data.runs[run]);
    return [column.at ? column.at.map((i) => x[i]) : x, column.values];
  }

  // An exponential moving average that starts at the first value, not at zero.
  function smooth(values, weight) {
    let sum = 0, mass = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = weight * sum + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return sum / mass;
    });
  }

  function makeCard(spec) {
    const text = spec.percent ? percent : number;
    // What a reader has chosen outlives the charts being made anew: a live page does so when a metric is new.
    const kept = chosen[spec.title] ??= {log: false, wide: false, hidden: new Set()};
    const card = {spec, near: false, stale: true, kept};
    const isHidden = (i) => kept.hidden.has(spec.series[i].slice(0, 2).join("/"));
    // In the head below the page's h1; elsewhere below a section's h2 and a subject's h3.
    const title = el(spec.group === "Summary" ? "h2" : "h4", {class: "title", text: spec.title});
    const plot = el("div", {class: "plot", tabIndex: 0, role: "group", "aria-roledescription": "chart",
      "aria-label": `${spec.title}. Arrow keys move the cursor, plus and minus zoom, Escape resets.`, onkeydown: onKey});
    const status = el("span", {class: "hidden", role: "status"});
    const log = el("button", {type: "button", text: "log", "aria-pressed": String(kept.log), "aria-label": `Log scale: ${spec.title}`,
      onclick: () => { kept.log = !kept.log; log.setAttribute("aria-pressed", kept.log); draw(); }});
    const wide = el("button", {type: "button", text: "⤢", "aria-pressed": String(kept.wide), "aria-label": `Large: ${spec.title}`,
      onclick: () => { kept.wide = card.element.classList.toggle("wide"); wide.setAttribute("aria-pressed", kept.wide); }});
    const legend = el("div", {class: "legend"});
    card.element = el("article", {class: kept.wide ? "card chart wide" : "card chart"}, el("div", {class: "chart-head"}, title, log, wide), plot, legend,
      spec.help ? el("p", {class: "help", text: spec.help}) : null, status);
    card.words = [spec.group, spec.title, ...spec.series.flatMap((line) => line.slice(0, 2))].join(" ").toLowerCase();
    plot.card = card;
    const shades = (i) => `series-${spec.series[i][3] % COLOURS}`;

    const entries = spec.series.map((line, i) => {
      const value = el("b");
      const swatch = el("i");
      swatch.style.background = `var(--${shades(i)})`;
      const name = line.slice(0, 2).join("/");
      const entry = el("button", {type: "button", class: "series", "aria-pressed": String(!isHidden(i)), title: line[0],
        onclick: () => {
          kept.hidden.delete(name) || kept.hidden.add(name);
          entry.setAttribute("aria-pressed", !isHidden(i));
          draw();
        }}, swatch, line[1], " ", value);
      return {entry, value};
    });
    legend.append(...entries.map((entry) => entry.entry));

    function endsOf(metric, {values, ends}) {
      const bad = values.filter((value) => value === null).length;
      const shown = metric.startsWith("eval/") && ends ? [values[0], values.at(-1)] : ends;  // an evaluation is of all rows
      const said = shown ? shown.map(text).join(" → ") : text(values[0]);
      return said + (bad ? ` (${bad} not finite)` : "");
    }

    // What the legend says: the values under the cursor, or the means of the first and the last steps.
    function tell(index) {
      entries.forEach((entry, i) => {
        const [metric, , run] = spec.series[i], value = index === null ? null : card.raw[i + 1][index];
        entry.value.textContent = index === null ? endsOf(metric, data.runs[run].columns[metric])
          : value === undefined ? "–" : text(value);
      });
    }

    function draw() {
      card.stale = false;
      card.plot?.destroy();
      const joined = uPlot.join(spec.series.map(points));
      card.raw = joined;
      const x = joined[0], lines = joined.slice(1).map((y, i) => isHidden(i) ? y.map(() => undefined) : y);
      const weight = Number(smoothing.value), smoothed = weight > 0 && !spec.markers && !spec.stacked && x.length >= SMOOTH_FROM;
      const series = [{}], columns = [x], bands = [];
      if (spec.stacked) {
        const below = x.map(() => 0);
        const sums = lines.map((y) => y.map((value, i) => below[i] += value ?? 0));
        sums.reverse().forEach((y, k) => {  // the highest first, so that each band lies over those behind it
          const i = lines.length - 1 - k;
          columns.push(y);
          series.push({stroke: () => palette[shades(i)], fill: () => palette[shades(i)], width: 1, points: {show: x.length === 1}});
        });
      } else {
        lines.forEach((y, i) => {
          const safe = kept.log ? y.map((value) => value > 0 ? value : value === undefined ? undefined : null) : y;
          const dash = spec.series[i][3] >= COLOURS ? [5, 3] : undefined;
          const alone = spec.markers || safe.filter((value) => Number.isFinite(value)).length === 1;
          columns.push(safe);
          series.push({stroke: () => palette[shades(i)], width: smoothed ? 1 : 2, alpha: smoothed ? 0.3 : 1, dash,
            points: {show: alone, size: 7, fill: () => palette[shades(i)]}});
          if (smoothed) {
            columns.push(smooth(safe, weight));
            series.push({stroke: () => palette[shades(i)], width: 2, dash, points: {show: false}});
          }
        });
      }
      const tick = {show: false}, font = "12px system-ui, sans-serif";
      const whole = axis.value === "step" ? [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((e) => n * 10 ** e)).sort((a, b) => a - b) : undefined;
      card.plot = new uPlot({
        width: Math.max(plot.clientWidth, 100), height: card.element.classList.contains("wide") ? 380 : 190, legend: {show: false},
        padding: [8, 8, 0, 0],
        cursor: {drag: {x: true, y: false, setScale: false}, y: false, points: {size: 7},
          bind: {dblclick: () => () => { zoomTo(null); return null; }}},
        scales: {
          x: {time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high]},
          y: kept.log && !spec.stacked ? {distr: 3} : {range: (_, low, high) => yRange(low, high)},
        },
        axes: [
          {stroke: () => palette.muted, grid: {show: false}, ticks: tick, font, size: 26, incrs: whole, space: 60,
            values: (_, ticks) => ticks.map((value) => Math.abs(value) >= 10000 ? compact(value) : number(value))},
          {stroke: () => palette.muted, grid: {stroke: () => palette.line, width: 1}, ticks: tick, font, size: 56,
            space: 34, values: (_, ticks) => ticks.map((value) => value === null ? "" : (spec.percent ? percent : compact)(value))},
        ],
        series, bands,
        hooks: {
          setCursor: [(u) => { if (!card.silent) pointAt(u.cursor.left < 0 ? null : u.posToVal(u.cursor.left, "x")); }],
          setSelect: [(u) => {
            if (u.select.width > 4) zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          }],
        },
      }, columns, plot);
      if (zoom) card.plot.setScale("x", {min: zoom[0], max: zoom[1]});
      tell(null);
    }

    function yRange(low, high) {
      if (low === null || high === null) return [0, 1];
      // A series that is zero throughout would otherwise lie in the middle of an axis that goes below nought.
      if (spec.floor !== null) return [Math.min(low, spec.floor), high > spec.floor ? high + 0.05 * (high - spec.floor) : spec.floor + 1];
      if (low === high) return [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
      return [low - 0.06 * (high - low), high + 0.06 * (high - low)];
    }

    card.refresh = () => { if (card.stale) draw(); };
    card.resize = () => {
      const height = card.element.classList.contains("wide") ? 380 : 190;
      if (card.plot && plot.clientWidth && (card.plot.width !== plot.clientWidth || card.plot.height !== height)) {
        card.plot.setSize({width: plot.clientWidth, height});
      }
    };
    card.pointAt = (x) => {
      if (!card.plot || !card.near || card.stale) return;
      const index = x === null ? null : card.plot.valToIdx(x);
      card.silent = true;
      card.plot.setCursor(x === null ? {left: -10, top: -10} : {left: card.plot.valToPos(x, "x"), top: 0});
      card.silent = false;
      tell(index);
    };
    card.say = () => {
      const index = card.plot.valToIdx(cursorX);
      status.textContent = `${axisLabel()} ${number(card.raw[0][index])}: ` + entries.map((entry, i) =>
        `${spec.series[i][1]} ${entry.value.textContent}`).join(", ");
    };
    card.zoom = () => {
      if (!card.plot) return;
      const x = card.raw[0];
      card.plot.setScale("x", zoom ? {min: zoom[0], max: zoom[1]} : {min: x[0], max: x.at(-1)});
    };

    function onKey(event) {
      const x = card.raw[0], low = zoom ? zoom[0] : x[0], high = zoom ? zoom[1] : x.at(-1);
      const at = cursorX === null ? null : card.plot.valToIdx(cursorX), by = event.shiftKey ? 10 : 1;
      const move = {ArrowLeft: at === null ? x.length - 1 : at - by, ArrowRight: at === null ? 0 : at + by, Home: 0, End: x.length - 1}[event.key];
      if (move !== undefined) {
        pointAt(x[Math.min(Math.max(move, 0), x.length - 1)]);
        card.say();
      } else if (event.key === "+" || event.key === "-" || event.key === "=") {
        const centre = cursorX ?? (low + high) / 2, half = (high - low) * (event.key === "-" ? 1 : 0.25);
        const wider = [Math.max(centre - half, x[0]), Math.min(centre + half, x.at(-1))];
        zoomTo(wider[0] <= x[0] && wider[1] >= x.at(-1) ? null : wider);
      } else if (event.key === "Escape" || event.key === "0") {
        pointAt(null);
        zoomTo(null);
      } else {
        return;
      }
      event.preventDefault();
    }

    tell(null);
    near.observe(card.element);
    card.element.card = card;
    sized.observe(plot);
    return card;
  }

  function compact(value) {
    const size = Math.abs(value);
    if (size >= 1e4) return Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1}).format(value);
    return size !== 0 && size < 1e-3 ? value.toExponential().replace("e-", "e−") : String(Number(value.toPrecision(6)));
  }

  function pointAt(x) {
    cursorX = x;
    cards.forEach((card) => card.pointAt(x));
  }

  function zoomTo(range) {
    zoom = range;
    reset.hidden = !range;
    cards.forEach((card) => card.zoom());
  }

  function changed() {
    reset.hidden = !zoom;
    cards.forEach((card) => { card.stale = true; if (card.near) card.refresh(); });
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/);
    let found = 0, all = 0;
    for (const group of place.children) {
      const own = cards.filter((card) => card.group === group);
      own.forEach((card) => { card.element.hidden = !words.every((word) => card.words.includes(word)); });
      const left = own.filter((card) => !card.element.hidden).length;
      group.hidden = left === 0;
      found += left;
      all += own.length;
      group.open = search.value ? left > 0 : opened.has(group.dataset.name);
    }
    none.textContent = search.value ? `${found} of ${all} folded charts` : "";
  }

  function rebuild() {
    near.disconnect();
    sized.disconnect();
    cards.forEach((card) => card.plot?.destroy());
    cards = data.charts.map(makeCard);
    const names = [...new Set(data.charts.map((chart) => chart.group))];
    const of = (name) => cards.filter((card) => card.spec.group === name);
    head.replaceChildren(...of("Summary").map((card) => card.element));
    const groups = names.filter((name) => name !== "Summary").map((name) => {
      const own = of(name), count = el("span", {class: "help", text: ` ${own.length}`});
      const summary = el("summary", {onclick: () => { made.open ? opened.delete(name) : opened.add(name); }}, el("h3", {text: name}), count);
      const made = el("details", {class: "group"}, summary, el("div", {class: "grid"}, ...own.map((card) => card.element)));
      made.dataset.name = name;
      own.forEach((card) => { card.group = made; });
      return made;
    });
    place.replaceChildren(...groups);
    filter();
  }

  function fillAxes() {
    const chosen = axis.value, known = Object.keys(axes).filter((name) => data.runs.every((run) => run[name]));
    axis.replaceChildren(...known.map((name) => el("option", {value: name, text: axes[name]})));
    if (known.includes(chosen)) axis.value = chosen;
  }

  readPalette();
  fillAxes();
  rebuild();
  onTheme.push(() => { readPalette(); cards.forEach((card) => card.plot?.redraw()); });

  return function (now) {
    const same = JSON.stringify(now.charts) === JSON.stringify(data.charts);
    data = now;
    fillAxes();
    same ? changed() : rebuild();
  };
};
