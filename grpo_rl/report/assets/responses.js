// The text with each occurrence of the query marked; all of it is set as text.
function marked(text, query) {
  if (!query) return [document.createTextNode(text)];
  const found = [], lower = text.toLowerCase(), wanted = query.toLowerCase();
  // Lower case may be longer than the text in a few scripts; then places would not fit.
  if (lower.length !== text.length) return [document.createTextNode(text)];
  let start = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, start)) {
    found.push(document.createTextNode(text.slice(start, at)), el("mark", {text: text.slice(at, at + wanted.length)}));
    start = at + wanted.length;
  }
  found.push(document.createTextNode(text.slice(start)));
  return found;
}

// A prompt or a reply as messages, each with its role: chat templates write role names on lines of their own between the
// messages. A text without them is one message of the role `otherwise`.
function messagesOf(text, otherwise = "reply") {
  const names = "(tool|user|system|developer|assistant|ipython)", whole = text.trim();
  if (!new RegExp(`^${names}[ \\t]*\\n`, "i").test(whole)) return [{role: otherwise, text: whole}];
  const parts = whole.replace(/\n[ \t]*assistant$/, "").split(new RegExp(`(?:^|\\n)[ \\t]*${names}[ \\t]*\\n`, "gi")), found = [];
  for (let i = 1; i < parts.length; i += 2) found.push({role: parts[i].toLowerCase(), text: parts[i + 1].trim()});
  return found;
}

// A turn's text, its calls set apart: lines that begin with a tool's name, and JSON between tags.
function withCalls(text, tools, query) {
  const names = tools.map((name) => name.replace(/\W/g, "")).join("|");
  const call = new RegExp(`(<tool_call>[\\s\\S]*?</tool_call>|^[ \\t]*(?:${names}):.*$)`, "gim");
  return text.split(call).map((part, i) => i % 2 ? el("span", {class: "call", title: "tool call"}, ...marked(part, query))
    : el("span", {}, ...marked(part, query)));
}

// A conversation: turns of the policy, which are trained on, and the replies that it read.
function conversation(turns, tools, query) {
  const list = el("ol", {class: "turns"});
  turns.forEach((text, i) => {
    if (i % 2) {
      for (const message of messagesOf(text)) {
        list.append(el("li", {class: "turn reply"},
          el("p", {class: "role"}, el("b", {text: message.role}), " · read, not trained on"),
          el("pre", {tabIndex: 0}, ...marked(message.text, query))));
      }
    } else if (text) {
      const answered = i + 1 < turns.length;
      list.append(el("li", {class: "turn policy"},
        el("p", {class: "role"}, el("b", {text: "policy"}), " · trained on"),
        el("pre", {tabIndex: 0}, ...(answered ? withCalls(text, tools, query) : marked(text, query)))));
    }
  });
  return list;
}

// A response with what it earned. `facts` are pairs of a name and a value.
function responseCard(title, response, facts, {tools = [], query = "", chosen = false} = {}) {
  const head = el("div", {class: "head"}, el("h3", {text: title}));
  if (response.truncated) head.append(el("span", {class: "badge", text: "cut off", title: "reached the length limit"}));
  const list = el("dl", {class: "facts"});
  for (const [name, value] of facts) list.append(el("div", {}, el("dt", {text: name}), el("dd", {text: value})));
  const card = el("article", {class: chosen ? "card response chosen" : "card response"}, head, list);
  if (response.turns) card.append(conversation(response.turns, tools, query));
  else if (response.text === "") card.append(el("p", {class: "help", text: "(no text)"}));
  else card.append(el("pre", {tabIndex: 0}, ...marked(response.text, query)));
  if (response.cut) card.append(el("p", {class: "help", text: `${response.cut.toLocaleString("en")} more characters are in completions.parquet.`}));
  return card;
}

function promptCard(prompt, cut, gold, query) {
  const card = el("div", {class: "card prompt"}, el("h3", {text: "Prompt"}), ...messagesOf(prompt, "").flatMap(({role, text}) => [
    role ? el("p", {class: "role"}, el("b", {text: role})) : null, el("pre", {tabIndex: 0}, ...marked(text, query))]).filter(Boolean));
  if (cut) card.append(el("p", {class: "help", text: `${cut.toLocaleString("en")} more characters.`}));
  if (gold) card.append(el("p", {class: "gold"}, el("b", {text: "Gold answer: "}), gold));
  return card;
}

function labelled(text, input) {
  return el("label", {}, text, input);
}

function choice(name, options, onchange) {
  const made = el("select", {"aria-label": name, onchange});
  for (const [value, text] of options) made.append(el("option", {value, text}));
  return made;
}

sections.responses = function (root, data) {
  let shown = [], steps = [], marking = null, current = null;
  const note = el("p", {class: "note"});
  const slider = el("input", {type: "range", min: 0, step: 1, value: 0, "aria-label": "Step", oninput: () => toStep(Number(slider.value))});
  const place = el("output", {class: "place"});
  const groups = choice("Group", [], () => go(shown[Number(groups.value)]));
  const sort = choice("Order of responses", [["sampled", "as sampled"], ["best", "best first"], ["worst", "worst first"]], draw);
  const spread = choice("Groups", [["all", "all groups"], ["none", "zero-variance only"], ["some", "rewards differ"]], filter);
  const cut = el("input", {type: "checkbox", onchange: filter});
  const from = el("input", {type: "number", step: "any", class: "short", "aria-label": "Reward at least", oninput: filter});
  const to = el("input", {type: "number", step: "any", class: "short", "aria-label": "Reward at most", oninput: filter});
  const search = el("input", {type: "search", placeholder: "in prompts and responses", "aria-label": "Search in texts", oninput: filter});
  const status = el("p", {class: "help", role: "status"});
  const viewer = el("div", {class: "viewer", tabIndex: 0, role: "group", "aria-label": "Group: left and right arrow keys change the step, with shift the group", onkeydown: keys});
  root.append(note,
    el("div", {class: "controls"}, labelled("Step", slider), place, labelled("Group", groups), labelled("Order", sort)),
    el("div", {class: "controls"}, labelled("Show", spread), labelled("Cut off", cut), labelled("Reward", from), labelled("to", to), labelled("Search", search)),
    status, viewer);

  function keys(event) {
    if (event.target !== viewer || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const by = event.key === "ArrowRight" ? 1 : -1;
    if (event.shiftKey) go(shown[Math.min(Math.max(shown.indexOf(current) + by, 0), shown.length - 1)]);
    else toStep(Math.min(Math.max(steps.indexOf(current?.step) + by, 0), steps.length - 1));
  }

  function toStep(number) {
    // The same place among the groups of the step, as far as it has one.
    const here = shown.filter((group) => group.step === current?.step).indexOf(current);
    const there = shown.filter((group) => group.step === steps[number]);
    if (there.length) go(there[Math.min(Math.max(here, 0), there.length - 1)]);
  }

  function go(group, mark = null) {
    current = group ?? null;
    marking = mark;
    draw();
  }

  const rewards = (group) => group.responses.map((response) => response.reward).filter((reward) => reward !== null);
  const hasZeroVariance = (group) => new Set(rewards(group)).size < 2;
  const bound = (input) => input.value === "" ? null : Number(input.value);
  const words = (response) => response.turns ? response.turns.join("\n") : response.text;

  function fits(group, response) {
    const query = search.value.toLowerCase();
    if (cut.checked && !response.truncated) return false;
    if (bound(from) !== null && !(response.reward !== null && response.reward >= bound(from))) return false;
    if (bound(to) !== null && !(response.reward !== null && response.reward <= bound(to))) return false;
    return !query || group.prompt.toLowerCase().includes(query) || words(response).toLowerCase().includes(query);
  }

  function filter() {
    shown = data.groups.filter((group) => (spread.value === "all" || hasZeroVariance(group) === (spread.value === "none"))
      && group.responses.some((response) => fits(group, response)));
    steps = [...new Set(shown.map((group) => group.step))];
    if (!shown.includes(current)) {  // at first one from which something was learned
      current = shown.find((group) => current ? group.step >= current.step : !hasZeroVariance(group)) ?? shown.at(current ? -1 : 0) ?? null;
      marking = null;
    }
    status.textContent = `${shown.length} of ${data.groups.length} groups on this page`
      + (shown.length < data.groups.length ? " match." : ".");
    draw();
  }

  function draw() {
    slider.max = Math.max(steps.length - 1, 0);
    slider.disabled = steps.length < 2;
    if (!current) {
      place.textContent = "";
      groups.replaceChildren();
      viewer.replaceChildren(el("p", {class: "note", text: "No group matches."}));
      return;
    }
    slider.value = steps.indexOf(current.step);
    slider.setAttribute("aria-valuetext", `step ${current.step}`);
    place.textContent = `${current.step} (${steps.indexOf(current.step) + 1} of ${steps.length})`;
    groups.replaceChildren(...shown.map((group, i) => [group, i]).filter(([group]) => group.step === current.step).map(([group, i]) => {
      const mean = rewards(group).reduce((sum, reward) => sum + reward, 0) / Math.max(rewards(group).length, 1);
      return el("option", {value: i, text: `row ${group.row}, mean reward ${number(mean)}`});
    }));
    groups.value = shown.indexOf(current);
    const order = current.responses.map((response, i) => ({response, i})).filter(({response}) => fits(current, response));
    const sign = {best: -1, worst: 1}[sort.value] ?? 0;
    const worth = (reward) => reward === null ? (sign < 0 ? -Infinity : Infinity) : reward;  // without a reward: last
    if (sign) order.sort((a, b) => sign * (worth(a.response.reward) - worth(b.response.reward)) || a.i - b.i);
    const cards = el("div", {class: "side"}, ...order.map(({response, i}) =>
      responseCard(`Response ${i + 1}`, response, facts(response), {tools: data.tools, query: search.value, chosen: i === marking})));
    const hidden = current.responses.length - order.length;
    const said = [hidden ? `${hidden} responses of this group don't match.` : "", hasZeroVariance(current) ? "Zero-variance group: all rewards are equal, and nothing is learned from it." : ""].filter(Boolean).join(" ");
    const strips = links.tokens?.(current.step, current.id);
    const link = strips ? el("p", {}, el("button", {type: "button", text: "Show its tokens", onclick: strips})) : "";
    viewer.replaceChildren(link, promptCard(current.prompt, current.prompt_cut, current.gold, search.value), ...(said ? [el("p", {class: "help", text: said})] : []), cards);
  }

  function facts(response) {
    const named = (values) => Object.entries(values).map(([name, value]) => [name.replaceAll("_", " "), number(value)]);
    return [["reward", number(response.reward)], ...(Object.keys(response.parts).length > 1 ? named(response.parts) : []), ...named(response.measures),
      ["advantage", number(response.advantage)], ["tokens", number(response.tokens)], ...(response.version === null ? [] : [["policy version", String(response.version)]])];
  }

  function clear() {
    for (const input of [from, to, search]) input.value = "";
    spread.value = "all";
    cut.checked = false;
    filter();
  }

  function fill() {
    const all = data.all_groups.toLocaleString("en"), shown = data.groups.length.toLocaleString("en");
    note.textContent = data.groups.length === data.all_groups ? `All ${data.all_responses.toLocaleString("en")} responses of the run.`
      : `${shown} of ${all} groups: some evenly spaced over the run, and those of the tokens below. completions.parquet has all.`;
    if (data.unread.length) note.textContent += ` Left out: ${data.unread.join(" ")}`;
    filter();
  }
  // What shows a group of the page, for sections that link to it; null where the page does not have it.
  links.responses = (step, id, response) => {
    const of = data.groups.find((group) => group.step === step && group.id === id);
    return of ? () => { clear(); go(of, response); viewer.focus(); viewer.scrollIntoView({block: "nearest"}); } : null;
  };
  links.tokensChanged = draw;
  fill();

  return (fresh) => {
    const before = current;
    data = fresh;
    current = data.groups.find((group) => group.step === before?.step && group.id === before?.id) ?? null;
    fill();
  };
};
