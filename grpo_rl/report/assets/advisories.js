sections.advisories = function (root, data) {
  root.append(el("ul", {class: "stack plain"}, ...data.advisories.map((advisory) =>
    el("li", {class: "card advisory"},
      advisory.title ? el("h3", {text: advisory.title}) : null,
      el("p", {text: advisory.text}),
      advisory.remedy ? el("p", {class: "help", text: advisory.remedy}) : null))));
};
