sections.lanes = function (root, data) {
  const NAMES = {read: "Trainer: read rows", sample: "Engine: sample", wait: "Trainer: wait for responses", score: "Trainer: score", train: "Trainer: train", sync: "Push weights", other: "Trainer: other", evaluate: data.phases.includes("read") ? "Trainer: evaluate" : "Engine: evaluate"};
  const LEAST_WIDTH = 8, ROW = 38, BAR = 16;  // pixels: of a step with its phases, of a lane, of its bars
  let view = [0, 1], cursor = 0, dragged = null, told = false;
  const note = el("p", {class: "note"});
  const button = (text, name, act) => el("button", {type: "button", text, "aria-label": name, onclick: () => { act(); draw(); }});
  const box = el("div", {class: "lanes", tabIndex: 0, role: "application", "aria-label": "Lanes: left and right arrow keys go from step to step, plus and minus zoom, Home shows all", onkeydown: keys});
  const detail = el("p", {class: "lane-detail", role: "status", text: "Point at a step to read how long its phases took."});
  root.append(note, el("div", {class: "controls"}, button("+", "Zoom in", () => zoom(.5)), button("−", "Zoom out", () => zoom(2)), button("‹", "Earlier", () => pan(-.5)), button("›", "Later", () => pan(.5)), button("All", "All: show the whole run", whole)),
    el("div", {class: "card"}, box, detail));

  function svg(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const lengthOf = (step) => step.phases.reduce((sum, seconds) => sum + seconds, 0);
  const endOf = (step) => step.begun + lengthOf(step);
  // Spread into Math.max, a long run would be more arguments than a call takes.
  const most = (items, of, first) => items.reduce((top, item) => Math.max(top, of(item)), first);
  const limits = () => [-most(data.evaluations, (one) => -one[1], -data.steps[0].begun),
    most(data.evaluations, (one) => one[1] + one[2], endOf(data.steps[data.steps.length - 1]))];
  const named = (step) => step.first === step.step ? `Step ${step.step}` : `Steps ${step.first} to ${step.step}`;

  function set(from, to) {
    const [first, last] = limits(), length = Math.min(Math.max(to - from, 1e-3), last - first);
    const start = Math.min(Math.max(from, first), last - length);
    view = [start, start + length];
  }
  function whole() { set(...limits()); }
  function zoom(factor, around = (view[0] + view[1]) / 2) { set(around - (around - view[0]) * factor, around + (view[1] - around) * factor); }
  function pan(share) { const by = share * (view[1] - view[0]); set(view[0] + by, view[1] + by); }

  // The bars of a row: begin, seconds. Of many steps several become one bar, as long as all of them together.
  function bars(phase, room) {
    if (phase === "evaluate") return data.evaluations.map(([, begun, seconds]) => [begun, seconds]);
    const place = data.phases.indexOf(phase);
    const visible = data.steps.filter((step) => step.begun <= view[1] && endOf(step) >= view[0]);
    const together = Math.ceil(visible.length / room), made = [];
    for (let i = 0; i < visible.length; i += together) {
      const some = visible.slice(i, i + together);
      const before = some.reduce((sum, step) => sum + step.phases.slice(0, place).reduce((a, b) => a + b, 0), 0);
      made.push([some[0].begun + before, some.reduce((sum, step) => sum + step.phases[place], 0)]);
    }
    return made;
  }

  function draw() {
    const width = Math.max(box.clientWidth, 280), x = (time) => (time - view[0]) / (view[1] - view[0]) * width;
    const room = Math.ceil(width / LEAST_WIDTH);
    const rows = [...data.phases, ...(data.evaluations.length ? ["evaluate"] : [])];
    const stale = data.steps.some((step) => step.stale[1] > 0), lanes = rows.length + data.engines.length + (stale ? 1 : 0);
    const height = lanes * ROW + 24, all = data.steps.reduce((sum, step) => sum + lengthOf(step), 0) + data.evaluations.reduce((sum, one) => sum + one[2], 0);
    const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "What trainer and engines did over time"});
    const clipped = (from, seconds) => { const a = Math.max(x(from), 0), b = Math.min(x(from + seconds), width); return b > a || (b >= 0 && a <= width && seconds > 0) ? [a, Math.max(b - a, .6)] : null; };
    const title = (text, y) => svg("text", {x: 0, y: y + 12, class: "lane-name"}, text);
    rows.forEach((phase, i) => {
      const y = i * ROW, spent = phase === "evaluate" ? data.evaluations.reduce((sum, one) => sum + one[2], 0) : data.steps.reduce((sum, step) => sum + step.phases[data.phases.indexOf(phase)], 0);
      picture.append(title(`${NAMES[phase]} · ${percent(spent / all)} of all steps${data.evaluations.length ? " and evaluations" : ""}`, y), svg("rect", {x: 0, y: y + ROW - BAR - 4, width, height: BAR, class: "lane-back"}));
      for (const [begun, seconds] of bars(phase, room)) {
        const at = clipped(begun, seconds);
        if (at) picture.append(svg("rect", {x: at[0].toFixed(2), width: at[1].toFixed(2), y: y + ROW - BAR - 4, height: BAR, class: `lane-bar lane-${phase}`}));
      }
    });
    data.engines.forEach((engine, i) => {
      const y = (rows.length + i) * ROW, base = y + ROW - 4, top = most(engine.curve, (point) => point[1], 1);
      picture.append(title(`${engine.name}: groups in flight, at most ${top}`, y), svg("rect", {x: 0, y: base - BAR, width, height: BAR, class: "lane-back"}));
      let path = "";
      for (const [time, count] of engine.curve) {
        const at = Math.min(Math.max(x(time), 0), width).toFixed(2);
        path += path ? `H${at}V${(base - BAR * count / top).toFixed(2)}` : `M${at} ${base}V${(base - BAR * count / top).toFixed(2)}`;
      }
      picture.append(svg("path", {d: `${path}V${base}Z`, class: "lane-engine"}));
    });
    if (stale) {
      const y = (lanes - 1) * ROW, base = y + ROW - 4, top = most(data.steps, (step) => step.stale[1] ?? 0, 1);
      picture.append(title(`Mean staleness; full height: ${top} versions`, y), svg("rect", {x: 0, y: base - BAR, width, height: BAR, class: "lane-back"}));
      const shown = data.steps.filter((step) => step.begun <= view[1] && endOf(step) >= view[0]), each = Math.ceil(shown.length / room);
      for (let i = 0; i < shown.length; i += each) {
        const some = shown.slice(i, i + each), mean = some.reduce((sum, step) => sum + (step.stale[0] ?? 0), 0) / some.length;
        const at = clipped(some[0].begun, endOf(some[some.length - 1]) - some[0].begun);
        if (at) picture.append(svg("rect", {x: at[0].toFixed(2), width: at[1].toFixed(2), y: (base - BAR * mean / top).toFixed(2), height: (BAR * mean / top).toFixed(2), class: "lane-bar lane-stale"}));
      }
    }
    for (let i = 0; i <= 4; i++) {
      const time = view[0] + (view[1] - view[0]) * i / 4, anchor = ["start", "middle", "middle", "middle", "end"][i];
      if (width < 420 && i % 2) continue;
      picture.append(svg("text", {x: width * i / 4, y: height - 4, "text-anchor": anchor, class: "lane-tick"}, view[1] - view[0] < 20 ? `${time.toFixed(2)} s` : duration(time)));
    }
    if (told) {
      const at = clipped(data.steps[cursor].begun, lengthOf(data.steps[cursor]));
      if (at) picture.append(svg("rect", {x: at[0], width: at[1], y: 0, height: height - 20, class: "lane-cursor"}));
    }
    if (dragged) picture.append(svg("rect", {x: Math.min(...dragged), width: Math.abs(dragged[1] - dragged[0]), y: 0, height: height - 20, class: "lane-drag"}));
    box.replaceChildren(picture);
  }

  function tell(i) {
    cursor = Math.min(Math.max(i, 0), data.steps.length - 1);
    told = true;
    const step = data.steps[cursor], said = data.phases.map((phase, p) => `${phase} ${number(step.phases[p])} s`);
    const evaluated = data.evaluations.filter((one) => one[0] >= step.first && one[0] <= step.step).map((one) => `, then evaluation ${number(one[2])} s`).join("");
    const stale = step.stale[1] ? `; staleness ${number(step.stale[0])} on average, ${number(step.stale[1])} at most` : "";
    const open = step.open === null || step.open === undefined ? "" : `; ${step.open} groups open`;
    detail.textContent = `${named(step)}, ${number(lengthOf(step))} s from ${duration(step.begun)}: ${said.join(", ")}${evaluated}${stale}${open}.`;
  }

  function at(event) {
    const frame = box.getBoundingClientRect();
    return event.clientX - frame.left;
  }
  const timeAt = (pixels) => view[0] + pixels / Math.max(box.clientWidth, 280) * (view[1] - view[0]);
  function nearest(time) {
    let best = 0;
    data.steps.forEach((step, i) => { if (step.begun <= time) best = i; });
    return best;
  }
  box.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) dragged = [at(event), at(event)]; });
  box.addEventListener("pointermove", (event) => {
    if (dragged) dragged[1] = at(event);
    tell(nearest(timeAt(at(event))));
    draw();
  });
  box.addEventListener("pointerup", (event) => {
    const range = dragged;
    dragged = null;
    if (range && Math.abs(range[1] - range[0]) > 5) set(...range.map(timeAt).sort((a, b) => a - b));
    else tell(nearest(timeAt(at(event))));
    draw();
  });
  box.addEventListener("pointerleave", () => { dragged = null; draw(); });
  box.addEventListener("dblclick", () => { whole(); draw(); });

  function keys(event) {
    const acts = {ArrowRight: () => tell(told ? cursor + 1 : 0), ArrowLeft: () => tell(cursor - 1), Home: whole,
      "+": () => zoom(.5, data.steps[cursor].begun), "-": () => zoom(2, data.steps[cursor].begun)};
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
    const step = data.steps[cursor], length = view[1] - view[0];
    if (event.key.startsWith("Arrow") && (step.begun < view[0] || endOf(step) > view[1])) set(step.begun - length / 4, step.begun + 3 * length / 4);
    draw();
  }

  function fill() {
    note.textContent = (data.assumed ? "When steps began was not recorded: they are drawn one after the other, without what lay between them. " : "")
      + "Phases of a step are drawn in their order, what is left of its time at its end; gaps are checkpoints and logs. Where there is no room, several steps are drawn as one. Drag to zoom in, double-click for all."
      + (data.engines.length ? " Engines sample while the trainer trains; a group counts from when an engine got it until all its responses were there." : "");
    draw();
  }
  whole();
  fill();
  new ResizeObserver(draw).observe(root);
  return (fresh) => {
    const everything = view[0] <= limits()[0] && view[1] >= limits()[1];
    data = fresh;
    if (everything) whole();
    fill();
  };
};
