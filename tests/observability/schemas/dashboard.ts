// The parts of an Octet dashboard, in the types that Grafana 12.2 publishes in @grafana/schema: each kind of panel has the
// options of its plugin. The JSON schema is generated from this file; README.md says how.
import type * as common from '@grafana/schema';
import type * as core from '@grafana/schema/dist/types/raw/dashboard/x/dashboard_types.gen';
import type * as bargauge from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as xychart from '@grafana/schema/dist/types/raw/composable/xychart/panelcfg/x/XYChartPanelCfg_types.gen';

interface Source {
  type: 'prometheus';
  uid: string;
}

// The part of Prometheus' query model that a provisioned dashboard may set (`Prometheus` in @grafana/prometheus).
interface Target {
  refId: string;
  datasource: Source;
  expr: string;
  legendFormat?: string;
  format?: 'time_series' | 'table' | 'heatmap';
  instant?: boolean;
  range?: boolean;
  exemplar?: boolean;
  hide?: boolean;
}

type Drawn<Type extends string, Options, Custom> = Omit<core.Panel, 'type' | 'options' | 'fieldConfig' | 'targets' | 'datasource'> & {
  type: Type;
  id: number;
  title: string;
  description: string;
  gridPos: core.GridPos;
  datasource: Source;
  targets: Target[];
  options?: Options; // the plugin's defaults fill in what is missing
  fieldConfig: Omit<core.FieldConfigSource, 'defaults'> & { defaults: Omit<core.FieldConfig, 'custom'> & { custom?: Custom } };
};

type Panel =
  | Drawn<'timeseries', timeseries.Options, timeseries.FieldConfig>
  | Drawn<'stat', Partial<stat.Options>, never>
  | Drawn<'bargauge', Partial<bargauge.Options>, never>
  | Drawn<'table', Partial<table.Options>, Partial<table.FieldConfig>>
  | Drawn<'xychart', xychart.Options, xychart.FieldConfig>
  | (Omit<core.RowPanel, 'panels'> & { panels: [] });

// Annotations of Prometheus carry their expression themselves; Grafana's own type leaves that to the data source.
interface Annotation extends Omit<core.AnnotationQuery, 'target'> {
  expr: string;
  step?: string;
  titleFormat?: string;
  textFormat?: string;
  tagKeys?: string;
}

// The SDK writes the fields of an interval variable for variables of every kind.
type Variable = core.VariableModel & { auto?: boolean; auto_count?: number; auto_min?: string };

export type Dashboard = Omit<core.Dashboard, 'panels' | 'annotations' | 'templating' | 'uid' | 'title' | 'description'> & {
  uid: string;
  title: string;
  description: string;
  panels: Panel[];
  annotations: { list?: Annotation[] };
  templating: { list: Variable[] };
};
