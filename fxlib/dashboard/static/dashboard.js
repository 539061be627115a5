"use strict";
// The server renders all pages. When a stream says that something happened, the page is fetched again, and its changed
// regions are replaced: this script turns nobody's text into HTML.
const PAUSE_MS = 500, AGAIN_MS = 3000;
let stream = null, busy = false, again = false;

const pause = ms => new Promise(done => setTimeout(done, ms));
const regions = root => [...root.querySelectorAll("[data-region]")];
const say = text => { document.getElementById("connection").textContent = text; };

function put(next) {
  const focused = document.activeElement, name = focused && (focused.id ? `#${CSS.escape(focused.id)}` :
    focused.getAttribute("href") ? `a[href="${CSS.escape(focused.getAttribute("href"))}"]` : "");
  const open = [...document.querySelectorAll("details[open]")].map(each => each.id);
  const names = root => regions(root).map(each => each.dataset.region).join();
  const main = document.querySelector("main"), other = next.querySelector("main");
  if (names(document) !== names(next)) {
    main.replaceChildren(...other.childNodes);
    document.title = next.title;
  } else {
    const fresh = regions(next);
    regions(document).forEach((each, index) => {
      if (each.innerHTML !== fresh[index].innerHTML) each.replaceChildren(...fresh[index].childNodes);
    });
  }
  open.forEach(id => { const found = document.getElementById(id); if (found) found.open = true; });
  if (name && document.activeElement === document.body) document.querySelector(name)?.focus({ preventScroll: true });
  if (main.dataset.live !== other.dataset.live) main.dataset.live = other.dataset.live;
}

async function refresh() {
  again = true;
  if (busy) return;
  busy = true;
  while (again) {
    again = false;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      put(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } catch {
      say("not live");
    }
    await pause(PAUSE_MS);
  }
  busy = false;
}

function listen() {
  stream?.close();
  stream = null;
  const address = document.querySelector("main").dataset.live;
  if (!address || document.hidden) return say("");
  const mine = stream = new EventSource(address);
  let opened = false;
  mine.addEventListener("open", () => { say("live"); if (opened) refresh(); opened = true; });
  mine.addEventListener("changed", refresh);
  mine.addEventListener("event", refresh);
  mine.addEventListener("end", async () => { mine.close(); say(""); await refresh(); setTimeout(listen, AGAIN_MS); });
  mine.addEventListener("error", () => {
    say("not live");
    if (mine.readyState === EventSource.CLOSED && stream === mine)
      setTimeout(async () => { await refresh(); if (stream === mine) listen(); }, AGAIN_MS);
  });
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); listen(); });
addEventListener("pageshow", event => { if (event.persisted) refresh(); listen(); });
addEventListener("pagehide", () => stream?.close());
