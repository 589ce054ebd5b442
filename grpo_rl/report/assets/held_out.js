sections.held_out = function (root, data) {
  let order = [], at = 0;
  const note = el("p", {class: "note"});
  const sort = choice("Order of rows", [["data", "as in the data"], ["gain", "gained most first"], ["loss", "lost most first"]], arrange);
  const changed = el("input", {type: "checkbox", onchange: arrange});
  const slider = el("input", {type: "range", min: 0, step: 1, value: 0, "aria-label": "Held-out row", oninput: () => go(Number(slider.value))});
  const place = el("output", {class: "place"});
  const viewer = el("div", {class: "viewer", tabIndex: 0, role: "group", "aria-label": "Held-out row: left and right arrow keys change it", onkeydown: (event) => {
    if (event.target !== viewer || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    go(at + (event.key === "ArrowRight" ? 1 : -1));
  }});
  root.append(note, el("div", {class: "controls"}, labelled("Row", slider), place, labelled("Order", sort), labelled("Only changed rewards", changed)), viewer);

  function arrange() {
    order = data.rows.filter((row) => !changed.checked || row.gain);
    const sign = {gain: -1, loss: 1}[sort.value] ?? 0;
    if (sign) order = [...order].sort((a, b) => sign * ((a.gain ?? 0) - (b.gain ?? 0)) || a.row - b.row);
    go(0);
  }

  function go(number_) {
    at = Math.min(Math.max(number_, 0), Math.max(order.length - 1, 0));
    slider.max = Math.max(order.length - 1, 0);
    slider.value = at;
    slider.disabled = order.length < 2;
    const row = order[at];
    place.textContent = row ? `${row.row} (${at + 1} of ${order.length})` : "";
    if (!row) return viewer.replaceChildren(el("p", {class: "note", text: "No reward changed."}));
    slider.setAttribute("aria-valuetext", `row ${row.row}`);
    const titles = (response) => response.step === 0 ? "Before training" : `After step ${response.step}`;
    viewer.replaceChildren(promptCard(row.prompt, row.prompt_cut, row.gold, ""), el("div", {class: "side"}, ...row.responses.map((response) =>
      responseCard(titles(response), response, [["reward", number(response.reward)], ["tokens", number(response.tokens)]]))));
  }

  function fill() {
    const shown = data.rows.length < data.all ? `${data.rows.length} of ${data.all.toLocaleString("en")} rows: those that gained and lost most, and others, evenly spaced.` : `All ${data.all} rows.`;
    const changes = data.steps.length > 1 ? ` From step ${data.steps[0]} to step ${data.steps[1]}, ${data.better} earn more, ${data.worse} less, ${data.same} the same.` : "";
    note.textContent = shown + changes + " Responses are greedy.";
    arrange();
  }
  fill();
  return (fresh) => {
    const row = order[at]?.row;
    data = fresh;
    fill();
    const again = order.findIndex((other) => other.row === row);
    if (again >= 0) go(again);
  };
};
