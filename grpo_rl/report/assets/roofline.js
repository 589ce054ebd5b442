sections.roofline = function (root, data) {
  const rows = data.phases.map((phase) => {
    const known = phase.share !== null;
    const bar = el("div", {class: "phase-bar"}), floor = el("i");
    bar.style.width = `${100 * phase.length}%`;
    floor.style.width = `${known ? Math.min(100 * phase.share, 100) : 0}%`;
    bar.append(floor);
    const says = `${number(phase.spent_s)} s` +
      (known ? `, roofline ${number(phase.floor_s)} s: ${percent(phase.share)}` : "");
    return [el("dt", {text: phase.name}), el("dd", {}, bar, el("span", {text: says}))];
  });
  root.append(el("dl", {class: "card phases"}, ...rows.flat()));
};
