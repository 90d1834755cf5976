/** A job with what was measured of it: it is measured once it has started. */

import { ask } from "./api.js";

/**
 * @param {string} id @param {AbortSignal} signal
 * @returns {Promise<[import("octet-types").Job, import("octet-types").Measurements | null]>}
 */
export async function readJob(id, signal) {
  const job = await ask(`/v1/jobs/${id}`, { signal });
  return [job, job.started_at ? await ask(`/v1/jobs/${id}/measurements`, { signal }).catch(() => null) : null];
}
