sections.configuration = function (root, data) {
  const list = (title, rows) => rows.length ? el("div", {class: "card"}, el("h3", {text: title}), ...rows) : null;
  const command = data.overrides.join(" ");
  const body = el("tbody"), count = el("span", {role: "status", class: "note"});
  const search = el("input", {type: "search", id: "setting-search", placeholder: "lr, env, …"});
  function fill() {
    const words = search.value.toLowerCase().split(/\s+/);
    const found = data.settings.filter((pair) => words.every((word) => pair.join(" ").toLowerCase().includes(word)));
    body.replaceChildren(...found.map(([key, value]) =>
      el("tr", {}, el("th", {scope: "row", text: key}), el("td", {text: value}))));
    count.textContent = search.value ? `${found.length} of ${data.settings.length} settings` : "";
  }
  search.addEventListener("input", () => { whole.open = true; fill(); });
  const whole = el("details", {}, el("summary", {text: `All ${data.settings.length} settings`}),
    el("div", {class: "scroll"}, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {scope: "col", text: "Setting"}), el("th", {scope: "col", text: "Value"}))), body)));
  fill();
  root.append(
    el("div", {class: "controls"},
      el("label", {for: "setting-search"}, "Search settings", search), count,
      command ? copyButton("Copy overrides", () => command) : null,
      data.text ? copyButton("Copy config", () => data.text) : null),
    el("div", {class: "stack"},
      list("Given on the command line", command ? [el("pre", {text: command, tabIndex: 0})] : []),
      el("div", {class: "card"}, whole),
      list("Versions", [el("p", {class: "help", text: data.versions.map((pair) => pair.join(" ")).join(" · ")})])));
};
