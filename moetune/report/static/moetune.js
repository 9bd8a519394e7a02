// The theme, figures, and tables that sort and filter. Pages work without it, but for figures.
"use strict";

(() => {
  const root = document.documentElement;
  const THEMES = ["auto", "light", "dark"];
  const ROLE = /^@(\w+)(?:\/([\d.]+))?$/;
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

  // Figures name colours by their role in the stylesheet: "@accent", "@accent/0.2".
  const palette = () => {
    const probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
    const found = {};
    for (const role of ["ink", "muted", "grid", "surface", "accent", "second", "third"]) {
      probe.style.color = `var(--${role})`;
      found[role] = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).join(",");
    }
    probe.remove();
    return found;
  };

  const coloured = (value, colours) => {
    if (typeof value === "string") {
      const match = ROLE.exec(value);
      return match ? `rgba(${colours[match[1]]},${match[2] || 1})` : value;
    }
    if (Array.isArray(value)) {
      const plain = typeof value[0] === "number" || value[0] === null;
      return plain ? value : value.map((one) => coloured(one, colours));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(
        Object.entries(value).map(([key, one]) => [key, coloured(one, colours)]),
      );
    }
    return value;
  };

  const draw = (plot, colours) => {
    const figure = coloured(JSON.parse(plot.nextElementSibling.textContent), colours);
    // A finger that scrolls the page must not be caught by a figure.
    if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false;
    return window.Plotly.react(plot, figure.data, figure.layout, {
      displayModeBar: false, responsive: true,
    });
  };

  const loadPlotly = () =>
    new Promise((resolve, reject) => {
      if (window.Plotly) return resolve();
      const script = document.createElement("script");
      script.src = document.body.dataset.plotly;
      script.onload = resolve;
      script.onerror = () => reject(new Error("plotly.js could not be loaded"));
      document.head.append(script);
    });

  const startFigures = async () => {
    const plots = [...document.querySelectorAll(".plot")];
    if (!plots.length) return;
    try {
      await loadPlotly();
    } catch (error) {
      for (const plot of plots) plot.dataset.waiting = `${error.message}: reload the page`;
      return;
    }
    let colours = palette();
    const drawn = new Set();
    const observer = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting || drawn.has(target)) continue;
        drawn.add(target);
        draw(target, colours).then(() => target.setAttribute("data-drawn", ""));
      }
    }, { rootMargin: "400px" });
    for (const plot of plots) observer.observe(plot);
    const again = () => {
      colours = palette();
      for (const plot of drawn) draw(plot, colours);
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new MutationObserver(again).observe(root, { attributeFilter: ["data-theme"] });
  };

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
    // What has no number stands after what has one.
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
        for (const one of heads) one.removeAttribute("aria-sort");
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

  const startTables = (part) => {
    for (const section of part.querySelectorAll(".table")) {
      const table = section.querySelector("table");
      if (table && table.tHead) makeSortable(table);
      makeFilter(section);
    }
  };

  // Of a part of the page that another script has put in.
  document.addEventListener("moetune-tables", ({ target }) => startTables(target));
  document.addEventListener("DOMContentLoaded", () => {
    startTheme();
    startTables(document);
    startFigures();
  });
})();
