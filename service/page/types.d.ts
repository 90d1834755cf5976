/** Names for the contracts that the page reads. `octet-api` is made from the OpenAPI document at check time. */
import type { components } from "octet-api";

type Schemas = components["schemas"];
export type Row = Schemas["Row"];
export type Job = Schemas["Job"];
export type JobSpec = Schemas["JobSpec"];
export type Pool = Schemas["Pool"];
export type Level = Schemas["Level"];
export type Curve = Schemas["Curve"];
export type Points = Schemas["Points"];
export type Attempt = Schemas["Attempt"];
export type Event = Schemas["Event"];
export type LogLine = Schemas["LogLine"];
export type Checkpoint = Schemas["Checkpoint"];
export type Measurements = Schemas["Measurements"];
