// The theme, tables that sort and filter, and files that are dropped. Pages work without it.
"use strict";

(() => {
  const root = document.documentElement;
  const THEMES = ["auto", "light", "dark"];
  const FEW_ROWS = 7;

  const storedTheme = () => {
    try {
      return localStorage.getItem("moetune-theme") || "auto";
    } catch {
      return "auto";
    }
  };

  const setTheme = (theme) => {
    if (theme === "auto") root.removeAttribute("data-theme");
    else root.dataset.theme = theme;
    try {
      localStorage.setItem("moetune-theme", theme);
    } catch { /* a browser that keeps nothing still shows it */ }
  };

  // Before the page is painted.
  setTheme(storedTheme());

  const startTheme = () => {
    const button = document.querySelector(".theme");
    if (!button) return;
    const show = () => {
      button.textContent = `Theme: ${storedTheme()}`;
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      setTheme(THEMES[(THEMES.indexOf(storedTheme()) + 1) % THEMES.length]);
      show();
    });
    show();
  };

  const keyOf = (row, column) => {
    const cell = row.cells[column];
    const number = cell.dataset.key;
    return number === undefined ? cell.textContent.trim().toLowerCase() : Number(number);
  };

  const compare = (first, second) => {
    if (typeof first === "number" && typeof second === "number") return first - second;
    // Cells without a number stand after cells with a number.
    if (typeof first !== typeof second) return typeof first === "number" ? -1 : 1;
    return first.localeCompare(second, "en", { numeric: true });
  };

  const makeSortable = (table) => {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim() || body.rows.length < 2) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent.trim();
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const cell of heads) cell.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows];
        rows.sort((first, second) => compare(keyOf(first, column), keyOf(second, column)));
        if (down) rows.reverse();
        body.append(...rows);
      });
    });
  };

  const makeFilter = (section) => {
    const rows = [...section.querySelectorAll("tbody tr")];
    const input = section.querySelector("input[type=search]");
    const output = section.querySelector("output");
    if (!input || rows.length < FEW_ROWS) return;
    const texts = rows.map((row) => row.textContent.toLowerCase());
    input.hidden = false;
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, at) => {
        row.hidden = !words.every((word) => texts[at].includes(word));
        shown += !row.hidden;
      });
      output.value = words.length ? `${shown} of ${rows.length}` : "";
    });
  };

  // Say where a table has more columns than the window shows.
  const markCut = (section) => {
    const scroll = section.querySelector(".scroll");
    if (!scroll) return;
    const mark = () => {
      const hidden = scroll.scrollWidth - scroll.clientWidth;
      section.classList.toggle("cut", hidden > 1);
      section.classList.toggle("ended", scroll.scrollLeft >= hidden - 1);
    };
    scroll.addEventListener("scroll", mark, { passive: true });
    new ResizeObserver(mark).observe(scroll);
  };

  const startTables = () => {
    for (const section of document.querySelectorAll(".table")) {
      const table = section.querySelector("table");
      if (table && table.tHead) makeSortable(table);
      makeFilter(section);
      markCut(section);
    }
  };

  // A file that is dropped on a field becomes its text, and its name that of the form.
  const startDrops = () => {
    for (const area of document.querySelectorAll("textarea[data-drop]")) {
      area.addEventListener("dragover", (event) => event.preventDefault());
      area.addEventListener("drop", async (event) => {
        const file = event.dataTransfer.files[0];
        if (!file) return;
        event.preventDefault();
        area.value = await file.text();
        area.form.elements[area.dataset.drop].value = file.name;
      });
    }
  };

  document.addEventListener("DOMContentLoaded", () => {
    startTheme();
    startTables();
    startDrops();
  });
})();
