"use strict";
// Sections of the page put their functions here: sections.NAME = function (root, data) {...}.
const sections = {};

// What one section offers to others, as functions by name.
const links = {};

// An element with properties and children; text only ever becomes text. Names with a dash are attributes, as is role.
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for" || name === "list") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A value to three significant digits, as a person writes it.
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "n/a";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

function percent(value) {
  return value === null || !Number.isFinite(value) ? "n/a" : number(100 * value) + " %";
}

// Seconds as h:mm:ss or m:ss.
function duration(seconds) {
  const whole = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

// What a CSS variable of the page is now, as a colour that a canvas takes.
function colour(name) {
  const probe = el("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// A button that copies a text; where the browser does not allow it, the text is selected in an area instead.
function copyButton(label, text) {
  const button = el("button", {type: "button", text: label, onclick: async () => {
    let copied = false;
    try {
      await navigator.clipboard.writeText(text());
      copied = true;
    } catch {
      const area = el("textarea", {value: text(), "aria-label": label});
      document.body.append(area);
      area.select();
      copied = document.execCommand("copy");
      area.remove();
    }
    button.textContent = copied ? "Copied" : "Copying is not allowed here";
    setTimeout(() => { button.textContent = label; }, 1500);
  }});
  return button;
}

// The theme follows the system until it is chosen. Functions in onTheme run after a change, for what is drawn.
const onTheme = [];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : systemDark.matches;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
  document.getElementById("theme").setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
  onTheme.forEach((draw) => draw());
}

function remembered(name, value) {
  try {  // a page opened from a file may have no storage
    if (value !== undefined) localStorage.setItem(`grpo-rl-${name}`, value);
    return localStorage.getItem(`grpo-rl-${name}`);
  } catch {
    return null;
  }
}
