// One choice of light or dark for all languages: Material remembers one for each folder, and each language has its own.
// Loaded in the head, behind the script that defines how Material remembers and before anything asks.
(() => {
  "use strict";

  const root = new URL(".", new URL(document.currentScript.dataset.index, location));
  const [get, set] = [__md_get, __md_set];
  const KEY = "__palette";
  window.__md_get = (key, storage, scope) => get(key, storage, key === KEY ? root : scope);
  window.__md_set = (key, value, storage, scope) => set(key, value, storage, key === KEY ? root : scope);

  /** Another tab has chosen, or the browser shows a page again as it was left. */
  function follow() {
    const chosen = window.__md_get(KEY)?.color?.scheme;
    if (!chosen || chosen === document.body.dataset.mdColorScheme) return;
    for (const input of document.querySelectorAll("[data-md-component=palette] input"))
      if (input.dataset.mdColorScheme === chosen) {
        input.checked = true;
        input.dispatchEvent(new Event("change"));
      }
  }

  addEventListener("storage", (event) => event.key === `${root.pathname}.${KEY}` && follow());
  addEventListener("pageshow", (event) => event.persisted && follow());
})();
