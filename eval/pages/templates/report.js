"use strict";
// Sorts a table by a click on a header, and searches tables of many rows. Without scripts the page is complete.
(() => {
  const UNITS = { KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };
  // "≥ 1,234", "12.5 % (3 of 24)", "1.5 KiB", "3/4": the first number, times its unit; null where there is none.
  const number = (text) => {
    const found = text.replace(/,/g, "").match(/^[≥\s]*(-?\d+(?:\.\d+)?)\s*([KMG]iB)?/);
    return found ? Number(found[1]) * (UNITS[found[2]] || 1) : null;
  };
  const text = (row, column) => row.cells[column].textContent.trim();
  const sort = (table, rows, column, down) => {
    const numeric = table.rows[0].cells[column].classList.contains("num");
    const key = (row) => (numeric ? number(text(row, column)) : text(row, column));
    const missing = (value) => value === null || value === "" || value === "–";
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y); // missing values are last in both orders
      const order = numeric ? x - y : x.localeCompare(y, "en", { numeric: true });
      return down ? -order : order;
    };
    [...rows].sort(compare).forEach((row) => row.parentNode.appendChild(row));
  };
  for (const table of document.querySelectorAll("table")) {
    const [head, ...rows] = table.rows;
    if (rows.length < 2 || !head.querySelector("th")) continue;
    [...head.cells].forEach((cell, column) => {
      const act = () => {
        const down = cell.getAttribute("aria-sort") === "ascending";
        for (const other of head.cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        sort(table, rows, column, down);
      };
      cell.tabIndex = 0;
      cell.classList.add("sorts");
      cell.addEventListener("click", act);
      cell.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          act();
        }
      });
    });
    if (rows.length < 8) continue;
    const box = document.createElement("input");
    const count = document.createElement("small");
    const search = () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      count.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
    };
    box.type = "search";
    box.placeholder = `search ${rows.length} rows`;
    box.setAttribute("aria-label", box.placeholder);
    box.addEventListener("input", search);
    // A link into a table must find its row.
    window.addEventListener("hashchange", () => {
      const target = document.getElementById(location.hash.slice(1));
      if (target && table.contains(target) && target.closest("tr").hidden) {
        box.value = "";
        search();
        target.scrollIntoView();
      }
    });
    const bar = document.createElement("div");
    bar.className = "search";
    bar.append(box, count);
    table.closest(".wide").before(bar);
  }
})();
