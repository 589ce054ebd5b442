// Fills the page: the head at once, then section after section, so that the first paint waits for none of them.
(function () {
  const updates = {};

  function show(id, data) {
    const root = document.getElementById(id), fill = root.querySelector(".fill");
    root.hidden = false;
    document.querySelector(`nav a[href="#${id}"]`)?.removeAttribute("hidden");
    if (data.left_out) {
      fill.replaceChildren(el("p", {class: "note", text: `Left out: ${data.left_out}`}));
      updates[id] = null;
    } else if (updates[id]) {
      updates[id](data);
    } else {
      fill.replaceChildren();
      updates[id] = sections[id](fill, data);
    }
  }

  function showSafely(id, text) {
    try {
      show(id, JSON.parse(text));
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

  const waiting = [...document.querySelectorAll('script[type="application/json"]')];
  function next() {
    const script = waiting.shift();
    if (!script) return document.body.dataset.ready = "";
    showSafely(script.id.slice("data-".length), script.textContent);
    script.remove();
    setTimeout(next);
  }
  next();
})();
