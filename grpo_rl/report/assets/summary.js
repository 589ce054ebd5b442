sections.summary = function (root, data) {
  const tiles = el("dl", {class: "tiles"});
  function fill(now) {
    document.title = now.title;
    for (const field of document.querySelectorAll("[data-field]")) {
      if (field.textContent !== now[field.dataset.field]) field.textContent = now[field.dataset.field];
    }
    tiles.replaceChildren(...now.tiles.map((tile) => el("div", {class: "card tile"},
      el("dt", {text: tile.label}), el("dd", {class: `value ${tile.tone}`, text: tile.value}),
      tile.detail ? el("dd", {class: "label", text: tile.detail}) : null)));
  }
  root.append(tiles);
  fill(data);
  return fill;
};
