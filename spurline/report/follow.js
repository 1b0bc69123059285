// Follows a run that is training: asks whether there is something new, and puts it in the place of what is shown.
// Boxes that were clicked, the place on the page and the focused chart stay as they are.

const PAUSE = 1000;  // milliseconds between two questions
const versionOf = (page) => page.querySelector("meta[name=version]").content;
let version = versionOf(document);

function say(text) {
  if (!document.getElementById("follows")) {
    document.querySelector("header").append(Object.assign(document.createElement("p"), { id: "follows" }));
  }
  document.getElementById("follows").textContent = text;
}

function replaceBy(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const data = fresh.getElementById("data");
  if (!data || !document.getElementById("smooth")) { location.reload(); return; }  // the first step, or a restart
  const boxes = [...document.querySelectorAll(".tools input")].map((box) => box.checked);
  const plots = () => [...document.querySelectorAll(".plot")];
  const focused = plots().indexOf(document.activeElement), place = scrollY;
  const parts = [...document.body.children].filter((part) => part.tagName !== "SCRIPT");
  const own = document.querySelector("body > script");
  parts.forEach((part) => part.remove());
  [...fresh.body.children].filter((part) => part.tagName !== "SCRIPT").forEach((part) => own.before(part));
  document.getElementById("data").textContent = data.textContent;
  document.querySelectorAll(".tools input").forEach((box, i) => { box.checked = boxes[i] ?? box.checked; });
  version = versionOf(fresh);
  start();
  plots()[focused]?.focus({ preventScroll: true });
  scrollTo(0, place);
}

async function look() {
  try {
    const answer = await fetch("version", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    if (await answer.text() !== version) {
      const page = await fetch("./", { cache: "no-store" });
      if (!page.ok) throw new Error(page.statusText);
      replaceBy(await page.text());
    }
    say("This page follows the run.");
  } catch {
    say("No longer followed: spurline report --serve has ended.");
  }
  setTimeout(look, PAUSE);
}
look();
