sections.tokens = function (root, data) {
  // What a token can be coloured by: its number, or null, and the ends of its scale, which is this long at least.
  const kinds = {
    log_prob: {name: "sampler's log-prob", least: 1, ends: ["likely, 0", (top) => `unlikely, −${number(top)} and less`], of: (t) => t.sampler === null ? null : -t.sampler},
    entropy: {name: "entropy", least: 0.1, ends: ["certain, 0", (top) => `open, ${number(top)} nats and more`], of: (t) => t.entropy},
    mismatch: {name: "|sampler − trainer|", least: 0.01, ends: ["equal, 0", (top) => `${number(top)} nats and more`], of: (t) => gap(t)},
    version: {name: "policy version", ends: [], of: (t) => t.version},
  };
  let current = null, focused = 0;
  const note = el("p", {class: "note"});
  const slider = el("input", {type: "range", min: 0, step: 1, value: 0, "aria-label": "Step of the tokens", oninput: () => toStep(Number(slider.value))});
  const place = el("output", {class: "place"});
  const which = choice("Response", [], () => go(data.responses[Number(which.value)]));
  const colourBy = choice("Colour by", Object.entries(kinds).map(([id, kind]) => [id, kind.name]), draw);
  const back = el("span");
  const legend = el("p", {class: "scale"});
  const strip = el("div", {class: "strip", role: "listbox", "aria-label": "Tokens: arrow keys move from one to the next", "aria-orientation": "horizontal",
    onkeydown: keys, onmouseover: (event) => tell(event.target), onfocusin: (event) => tell(event.target)});
  const detail = el("dl", {class: "facts detail"});
  root.append(note, el("div", {class: "controls"}, labelled("Step", slider), place, labelled("Response", which), labelled("Colour by", colourBy), back),
    el("div", {class: "card"}, legend, strip, el("div", {role: "status"}, detail)));

  const steps = () => [...new Set(data.responses.map((response) => response.step))];
  const gap = (t) => t.sampler === null || t.trainer === null || t.read ? null : Math.abs(t.sampler - t.trainer);

  function token(i, of = current) {
    return {text: of.texts[i], id: of.ids[i], sampler: of.sampler[i], trainer: of.trainer[i],
      entropy: of.entropy[i], version: of.versions[i], special: of.special.includes(i), read: of.read.includes(i)};
  }

  // The end of a scale: the 99th percentile of its values, as a few outliers would leave all others pale.
  function top(kind) {
    const values = data.responses.flatMap((response) => response.ids.map((_, i) => kind.of(token(i, response)))).filter((value) => value !== null);
    values.sort((a, b) => a - b);
    return Math.max(values[Math.floor(0.99 * (values.length - 1))] ?? 0, kind.least);
  }

  function toStep(at) {
    const here = data.responses.filter((response) => response.step === current?.step).indexOf(current);
    const there = data.responses.filter((response) => response.step === steps()[at]);
    go(there[Math.min(Math.max(here, 0), there.length - 1)]);
  }

  function go(response) {
    current = response;
    focused = 0;
    draw();
  }

  function draw() {
    const all = steps(), at = all.indexOf(current.step);
    slider.max = all.length - 1;
    slider.value = at;
    slider.disabled = all.length < 2;
    slider.setAttribute("aria-valuetext", `step ${current.step}`);
    place.textContent = `${current.step} (${at + 1} of ${all.length})`;
    which.replaceChildren(...data.responses.map((response, i) => [response, i]).filter(([response]) => response.step === current.step).map(([response, i]) =>
      el("option", {value: i, text: `row ${response.row}, response ${response.response + 1}`})));
    which.value = data.responses.indexOf(current);
    const show = links.responses?.(current.step, current.group, current.response);
    back.replaceChildren(show ? el("button", {type: "button", text: "Show among the responses", onclick: show}) : "");
    const kind = kinds[colourBy.value], byVersion = colourBy.value === "version";
    const first = Math.min(...current.versions), last = Math.max(...current.versions);
    const low = byVersion ? first : 0, high = byVersion ? Math.max(last, first + 1) : top(kind);
    legend.replaceChildren(...(byVersion
      ? [el("span", {text: first === last ? `all tokens are of version ${first}` : `version ${first}`}), ...(first === last ? [] : [el("span", {class: "ramp", "aria-hidden": "true"}), el("span", {text: `version ${last}`})])]
      : [el("span", {text: kind.ends[0]}), el("span", {class: "ramp", "aria-hidden": "true"}), el("span", {text: kind.ends[1](high)})]),
      ...(current.read.length ? [el("span", {class: "token read", text: "read, not trained on"})] : []),
      ...(current.special.length ? [el("span", {class: "token special", text: "special token"})] : []));
    const made = [];
    let before = null;
    for (let i = 0; i < current.ids.length; i++) {
      const one = token(i), value = kind.of(one);
      if (one.version !== before && (byVersion || before !== null)) made.push(el("span", {class: "version", "aria-hidden": "true", text: `v${one.version}`}));
      before = one.version;
      const span = el("span", {class: `token${one.special ? " special" : ""}${one.read ? " read" : ""}${one.text === "" ? " part" : ""}`,
        role: "option", "aria-selected": "false", tabIndex: i === focused ? 0 : -1, text: visible(one.text)});
      if (!one.text.trim()) span.setAttribute("aria-label", one.text === "" ? "a part of the next character" : JSON.stringify(one.text));
      span.dataset.at = i;
      if (value !== null && !one.read) span.style.setProperty("--v", Math.min(Math.max((value - low) / (high - low), 0), 1).toFixed(3));
      made.push(span);
    }
    strip.replaceChildren(...made);
    if (current.cut) strip.append(el("span", {class: "help", text: ` … ${current.cut} more tokens in tokens.parquet`}));
    describe(focused);
  }

  const visible = (text) => text === "" ? "·" : text.replaceAll("\n", "↵\n");
  const unscored = "not scored: a zero-variance group";
  const exact = (value) => value === null ? "not recorded" : value.toFixed(4);

  function tell(target) {
    if (!target.dataset || target.dataset.at === undefined) return;
    describe(Number(target.dataset.at));
  }

  function describe(i) {
    const one = token(i);
    for (const span of strip.querySelectorAll('[aria-selected="true"]')) span.setAttribute("aria-selected", "false");
    strip.querySelector(`[data-at="${i}"]`)?.setAttribute("aria-selected", "true");
    const sampler = one.read ? "none: read, not sampled" : one.sampler === null ? "not recorded" : `${exact(one.sampler)} (${percent(Math.exp(one.sampler))})`;
    const rows = [["token", one.text === "" ? "a part of the next character" : JSON.stringify(one.text)], ["position", String(i)], ["id", String(one.id)],
      ["sampler's log-prob", sampler], ["trainer's log-prob", one.trainer === null ? unscored : exact(one.trainer)],
      ["|sampler − trainer|", gap(one) === null ? "n/a" : exact(gap(one))], ["entropy", one.entropy === null ? unscored : exact(one.entropy)],
      ["policy version", String(one.version)], ...(one.special ? [["kind", "special token"]] : [])];
    detail.replaceChildren(...rows.map(([name, value]) => el("div", {}, el("dt", {text: name}), el("dd", {text: value}))));
  }

  function keys(event) {
    const last = current.ids.length - 1;
    const to = {ArrowRight: focused + 1, ArrowLeft: focused - 1, ArrowDown: focused + 10, ArrowUp: focused - 10, Home: 0, End: last}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const from = strip.querySelector(`[data-at="${focused}"]`);
    focused = Math.min(Math.max(to, 0), last);
    from.tabIndex = -1;
    const next = strip.querySelector(`[data-at="${focused}"]`);
    next.tabIndex = 0;
    next.focus();
  }

  function fill() {
    const shown = steps().length, all = data.all_steps.toLocaleString("en");
    note.textContent = `${shown === data.all_steps ? `All ${all}` : `${shown} of ${all}`} recorded steps, and of each the first responses of the groups in tokens.parquet. `
      + "The stronger a token's colour and the higher the bar below it, the larger the number. The trainer's numbers are those of the first optimizer step with the group, which mostly has the sampler's weights.";
    if (!data.responses.length) return strip.replaceChildren();
    current ??= data.responses[0];
    draw();
  }
  links.tokens = (step, group) => {
    const of = data.responses.find((response) => response.step === step && response.group === group);
    return of ? () => { go(of); root.scrollIntoView(); which.focus(); } : null;
  };
  fill();
  links.tokensChanged?.();
  return (fresh) => {
    const before = current;
    data = fresh;
    current = data.responses.find((other) => before && other.step === before.step && other.group === before.group && other.response === before.response) ?? null;
    fill();
  };
};
