"use strict";
const table = document.getElementById("models"), body = table.tBodies[0];
const filter = document.getElementById("filter"), outcome = document.getElementById("outcome");
const show = () => {
  const text = filter.value.toLowerCase();
  for (const row of body.rows)
    row.hidden = !(row.textContent.toLowerCase().includes(text) && (!outcome.value || row.dataset.outcome === outcome.value));
};
filter.addEventListener("input", show);
outcome.addEventListener("change", show);
[...table.tHead.rows[0].cells].forEach((cell, column) => cell.addEventListener("click", () => {
  const up = cell.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  cell.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const compare = (a, b) => (a === "") - (b === "") || (up ? 1 : -1) * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
}));
