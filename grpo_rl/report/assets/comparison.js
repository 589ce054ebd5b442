const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(3);
const span = (gain) => `${signed(gain.gain)} (${signed(gain.low)} to ${signed(gain.high)})`;
const tone = (gain) => gain.low > 0 ? "good" : gain.high < 0 ? "bad" : "unsure";

sections.comparison = function (root, data) {
  const keys = Object.keys(data.settings), head = (text) => el("th", {scope: "col", text});
  const imitated = data.runs.some((run) => run.loss), scored = !imitated || data.runs.some((run) => run.gain);
  const measured = data.runs.some((run) => run.difference || run.unpaired);
  const rows = data.runs.map((run, i) => el("tr", {},
    el("th", {scope: "row"}, swatch(i), run.name, run.ended ? null : el("span", {class: "help", text: " (not ended)"})),
    el("td", {text: number(run.steps)}),
    !scored ? null
      : run.gain ? el("td", {class: tone(run.gain)}, span(run.gain), el("div", {class: "help", text: run.gain.of}))
      : el("td", {text: run.loss ? "–" : "too few steps to say"}),
    imitated ? el("td", {text: run.loss ? `${run.loss.before.toFixed(3)} → ${run.loss.after.toFixed(3)}` : "–"}) : null,
    measured ? el("td", run.difference ? {class: tone(run.difference), text: span(run.difference)}
      : {text: run.unpaired ? `not comparable: ${run.unpaired}` : "–"}) : null,
    ...keys.map((key) => el("td", {text: data.settings[key][i]}))));
  root.append(el("div", {class: "card scroll", tabIndex: 0, role: "region", "aria-label": "Table of the runs"}, el("table", {},
    el("thead", {}, el("tr", {}, head("Run"), head("Steps"), scored ? head("Gain (95 % interval)") : null,
      imitated ? head("Held-out loss (lower is better)") : null,
      measured ? head("Difference from the first (95 % interval)") : null, ...keys.map(head))),
    el("tbody", {}, ...rows))));
};

function swatch(i) {
  const made = el("i", {class: "swatch"});
  made.style.background = `var(--series-${i % 8})`;
  return made;
}

sections.sweep = function (root, data) {
  const all = data.panels.flatMap((panel) => panel.runs);
  const low = Math.min(0, ...all.map((run) => run.low)), high = Math.max(0, ...all.map((run) => run.high));
  const at = (value) => `${100 * (value - low) / (high - low || 1)}%`;
  root.append(el("div", {class: "grid"}, ...data.panels.map((panel) => el("article", {class: "card"},
    el("h3", {text: panel.key}),
    el("dl", {class: "forest"}, ...panel.runs.flatMap((run) => {
      const line = el("i", {class: "whisker"}), dot = el("i", {class: "dot"}), zero = el("i", {class: "zero"});
      line.style.left = at(run.low);
      line.style.right = `calc(100% - ${at(run.high)})`;
      dot.style.left = at(run.gain);
      zero.style.left = at(0);
      return [el("dt", {text: run.value, title: run.name}),
        el("dd", {}, el("div", {class: "track"}, zero, line, dot), el("span", {class: tone(run), text: span(run)}))];
    }))))));
};
