"use strict";
const live = document.getElementById("live");
let busy = false;

async function refresh() {
  if (busy || document.hidden) return;
  try {
    const answer = await fetch("/live", { cache: "no-store" });
    const focused = document.activeElement?.dataset?.path;
    const log = live.querySelector("pre");
    const top = log ? log.scrollTop : 0;
    live.innerHTML = await answer.text();
    if (focused) live.querySelector(`[data-path="${CSS.escape(focused)}"]`)?.focus();
    live.querySelector("pre").scrollTop = top;
    document.title = "mockengine";
  } catch {
    document.title = "mockengine: no answer";
  }
}

async function order(element, asks) {
  const headers = { "Content-Type": "application/json" };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  const { method, path, body } = element.dataset;
  const answer = await fetch(path, { method, headers, body });
  if (answer.status === 401 && asks) {
    const given = prompt("The engine's admin_token:");
    if (given === null) return;
    sessionStorage.setItem("token", given);
    await order(element, false);
  } else if (!answer.ok) {
    alert([].concat((await answer.json()).detail).join("\n"));
  }
}

live.addEventListener("click", async (event) => {
  const element = event.target.closest("[data-path]");
  if (!element) return;
  busy = true;
  try {
    await order(element, true);
  } finally {
    busy = false;
    await refresh();
  }
});
setInterval(refresh, 1000);
