/** Names for the contracts that the page reads. `octet-api` is made from the OpenAPI document at check time. */
import type { components } from "octet-api";

type Schemas = components["schemas"];
export type Row = Schemas["Row"];
export type Job = Schemas["Job"];
export type JobSpec = Schemas["JobSpec"];
export type Pool = Schemas["Pool"];
export type Alert = Schemas["Alert"];
export type Loop = Schemas["Loop"];
export type Level = Schemas["Level"];
export type Curve = Schemas["Curve"];
/** What a stream's `points` have; the OpenAPI document describes the stream as text. */
export interface Points {
  after: number;
  step: number[];
  at: number[];
  loss: (number | null)[];
  gradient_norm: (number | null)[];
  learning_rate: number[];
  tokens: number[];
  step_time_s: number[];
  data_wait_s: number[];
  evaluated_after: number;
  evaluation_step: number[];
  evaluation_loss: (number | null)[];
  evaluation_metrics: Record<string, (number | null)[]>;
}
export type Attempt = Schemas["Attempt"];
export type Event = Schemas["Event"];
export type LogLine = Schemas["LogLine"];
export type Checkpoint = Schemas["Checkpoint"];
export type Export = Schemas["Export"];
export type Measurements = Schemas["Measurements"];
export type JobPlan = Schemas["JobPlan"];
export type Plan = Schemas["Plan"];
export type PlanRow = Schemas["PlanRow"];
export type Comparison = Schemas["Comparison"];
export type ComparisonDetails = Schemas["ComparisonDetails"];
export type ArmReport = Schemas["ArmReport"];
export type Child = Schemas["Child"];
