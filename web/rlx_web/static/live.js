// Polls for updates: pauses while the page is hidden, and backs off on failure.

const EVERY = 5000, SLOWEST = 60000;

/** The JSON at an address; null if the request fails or is refused. */
export async function got(address) {
  try {
    const response = await fetch(address, { headers: { Accept: "application/json" } });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

/** @param {() => string} address of the JSON @param {(data: any) => boolean} show false ends it */
export function follow(address, show) {
  let wait = EVERY;
  const ask = async () => {
    if (document.hidden) return void setTimeout(ask, EVERY);
    const data = await got(address());
    wait = data ? EVERY : Math.min(2 * wait, SLOWEST);
    if (data && show(data) === false) return;
    setTimeout(ask, wait);
  };
  setTimeout(ask, EVERY);
}

/** A duration, formatted as on the pages. @param {number | null} seconds */
export function lasting(seconds) {
  if (seconds === null || seconds === undefined) return "—";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= size) return `${(seconds / size).toFixed(1)} ${unit}`;
  return `${seconds.toFixed(0)} s`;
}

/** The time since something, formatted as on the pages. @param {number} seconds */
export function ago(seconds) {
  const passed = Math.max(0, seconds);
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (passed >= size) return `${(passed / size).toFixed(0)} ${unit} ago`;
  return `${passed.toFixed(0)} s ago`;
}
