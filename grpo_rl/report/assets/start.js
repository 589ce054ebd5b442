// Fills the page: the head and the charts in one task, as two of the charts are in the head; then section after section.
// At the top of the page nothing on screen moves: an unfilled section is as high as the window.
(function () {
  const updates = {};

  function show(id, data) {
    const root = document.getElementById(id), fill = root.querySelector(".fill");
    root.hidden = false;
    document.querySelector(`nav a[href="#${id}"]`)?.removeAttribute("hidden");
    // A section is filled once: it comes back as it was when what it lacked is there again.
    root.querySelector(".left-out")?.remove();
    fill.hidden = Boolean(data.left_out);
    if (data.left_out) {
      root.append(el("p", {class: "note left-out", text: `Left out: ${data.left_out}`}));
    } else if (updates[id]) {
      updates[id](data);
    } else {
      fill.replaceChildren();
      updates[id] = sections[id](fill, data);
    }
  }

  function showSafely(id, read) {
    try {
      show(id, read());
    } catch (error) {
      // One section that fails must not take the others with it.
      document.querySelector(`#${id} .fill`).append(el("p", {class: "note", text: `This part can't be shown: ${error}`}));
      console.error(error);
    }
  }

  document.getElementById("theme").addEventListener("click", () => {
    setTheme(remembered("theme", isDark() ? "light" : "dark") ?? (isDark() ? "light" : "dark"));
  });
  systemDark.addEventListener("change", () => setTheme());
  setTheme(remembered("theme"));

  async function unpacked(script) {
    const letters = atob(script.textContent), bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    script.remove();
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }

  // What a live page showed at first, to see whether the server's first reply differs from it.
  const atFirst = {}, live = "live" in document.body.dataset;
  const scripts = [...document.querySelectorAll("script[data-section]")];
  const atOnce = ({dataset}) => ["summary", "charts"].includes(dataset.section);
  async function fill() {
    const rest = scripts.filter((script) => !atOnce(script)).map((script) => [script]);
    for (const together of [scripts.filter(atOnce), ...rest]) {
      const data = await Promise.allSettled(together.map(unpacked));
      together.forEach(({dataset: {section}}, i) => showSafely(section, () => {
        if (data[i].status === "rejected") throw data[i].reason;
        if (live) atFirst[section] = JSON.stringify(data[i].value);
        return data[i].value;
      }));
      await new Promise((go) => setTimeout(go));
    }
    document.body.dataset.ready = "";
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();  // hidden while it was loaded
    if (live) setTimeout(look, 1000);
  }
  fill();

  // Asks the server for the sections that changed; seldom once the run has ended, for it may be resumed.
  const versions = {}, says = document.getElementById("live");
  let state = "";
  async function look() {
    let wait = 2000;
    try {
      const have = Object.entries(versions).map((pair) => pair.join(":")).join(",");
      const reply = await fetch(`data.json?have=${have}`);
      if (!reply.ok) throw new Error(await reply.text());
      for (const [id, now] of Object.entries(await reply.json())) {
        if (id in versions || JSON.stringify(now.data) !== atFirst[id]) showSafely(id, () => now.data);
        versions[id] = now.version;
        if (id === "summary") state = now.data.state;
      }
      tell({ended: "The run has ended.", running: "Live: this page follows the run.",
        stopped: "No process is working on this run; the page follows it if one begins."}[state] ?? "Live.");
      if (state === "ended") wait = 15000;
    } catch (error) {
      tell(error instanceof TypeError ? "The server has ended; this is the last that it said." : `Can't be read now: ${error.message}`);
      wait = 5000;
    }
    setTimeout(look, wait);
  }

  function tell(text) {
    if (says.textContent !== text) says.textContent = text;
  }
})();
