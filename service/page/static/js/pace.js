/** How often something runs: at most once a second, every few seconds, and not while nobody looks. */

/**
 * Run something at most once a second, and not while the page is hidden.
 * @param {() => void} run @param {AbortSignal} signal
 */
export function paced(run, signal) {
  let timer = 0;
  let last = 0;
  const fire = () => {
    timer = 0;
    if (document.hidden || signal.aborted) return;
    last = performance.now();
    run();
  };
  document.addEventListener(
    "visibilitychange",
    () => {
      if (!timer) fire();
    },
    { signal },
  );
  return () => {
    if (!timer) timer = setTimeout(fire, Math.max(0, last + 1000 - performance.now()));
  };
}

/**
 * Run something every few seconds until the view is left, while the page is in sight.
 * @param {number} seconds @param {() => void} run @param {AbortSignal} signal
 */
export function every(seconds, run, signal) {
  const timer = setInterval(() => {
    if (!document.hidden) run();
  }, 1000 * seconds);
  signal.addEventListener("abort", () => clearInterval(timer));
}
