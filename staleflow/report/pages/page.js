"use strict";
// What stands under the pointer, and a closer look at the lanes. The page says everything without this, too.
document.querySelectorAll("figure[data-hover]").forEach(function (figure) {
  const box = figure.querySelector(".box");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const cursor = box.appendChild(document.createElement("div"));
  const tip = box.appendChild(document.createElement("div"));
  cursor.className = "cursor";
  tip.className = "tip";
  const low = Number(figure.dataset.low), high = Number(figure.dataset.high);
  function hide() { cursor.hidden = tip.hidden = true; }
  function show(event) {
    const place = box.getBoundingClientRect();
    const wanted = low + (high - low) * (event.clientX - place.left) / place.width;
    let best = 0;
    data.x.forEach(function (x, at) { if (Math.abs(x - wanted) < Math.abs(data.x[best] - wanted)) { best = at; } });
    const share = (data.x[best] - low) / (high - low);
    const said = data.y.filter(function (one) { return one.v[best] !== null; }).map(function (one) {
      return (data.y.length > 1 ? one.name + " " : "") + one.v[best].toLocaleString("en", { maximumSignificantDigits: 4 });
    });
    tip.textContent = figure.dataset.place + " " + data.x[best].toLocaleString("en", { maximumFractionDigits: 1 }) + ": " + said.join(", ");
    cursor.hidden = tip.hidden = false;
    cursor.style.left = 100 * share + "%";
    tip.style.left = share > 0.5 ? "auto" : 100 * share + 1 + "%";
    tip.style.right = share > 0.5 ? 101 - 100 * share + "%" : "auto";
  }
  hide();
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("pointerleave", hide);
});
document.querySelectorAll("figure[data-lanes]").forEach(function (figure) {
  const rows = figure.querySelector(".rows"), stretch = figure.querySelector(".stretch");
  let zoom = 1;
  function set(wanted, at) {
    const before = zoom;
    zoom = Math.min(Math.max(wanted, 1), 64);
    const middle = rows.scrollLeft + at;
    stretch.style.setProperty("--zoom", zoom);
    stretch.classList.toggle("close", zoom >= 8);
    stretch.classList.toggle("closer", zoom >= 64);
    rows.scrollLeft = middle * zoom / before - at;
  }
  figure.querySelectorAll("button").forEach(function (button) {
    button.addEventListener("click", function () {
      const by = Number(button.dataset.by);
      set(by ? zoom * by : 1, rows.clientWidth / 2);
    });
  });
  rows.addEventListener("wheel", function (event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      set(zoom * Math.exp(-event.deltaY / 300), event.clientX - rows.getBoundingClientRect().left);
    }
  }, { passive: false });
});
document.documentElement.dataset.ready = "yes";
