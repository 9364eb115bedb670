// Keyboard shortcuts for links on the page.

/** @param {Record<string, () => void>} keys */
export function keys(handlers) {
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLElement && event.target.matches("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
    if (typing) return void event.target.blur();
    const handler = handlers[event.key];
    if (handler) { event.preventDefault(); handler(); }
  });
}

/** Follows a link of the page, if it exists. @param {string} id */
export const link = (id) => () => document.getElementById(id)?.click();
