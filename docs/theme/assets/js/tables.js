// A table that is wider than its box can be scrolled by keyboard too, in every browser. Material does the same for code.
"use strict";

addEventListener("load", () => {
  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const box = target.closest(".md-typeset__scrollwrap");
      if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
      else box.removeAttribute("tabindex");
    }
  });
  // Material has put a box around every table by now. Either of the two may change its width.
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    watcher.observe(box);
    watcher.observe(box.querySelector("table"));
  }
});
