// The kinds of the Prometheus operator that deploy/kubernetes has, in the types of @kubernetes-models/prometheus-operator. Of a ScrapeConfig
// only what a list of targets over HTTP needs. prometheus-operator.schema.json is generated from this; README.md says how.
import type { IPrometheusRule } from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule';
import type { IServiceMonitor } from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor';
import type { IScrapeConfig } from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1alpha1/ScrapeConfig';

type Resource<Kind extends { apiVersion: string; kind: string }, Spec> = Pick<Kind, 'apiVersion' | 'kind'> & {
  metadata: { name: string; namespace?: string; labels?: { [name: string]: string } };
  spec: Spec;
};

type Scrape = Pick<
  IScrapeConfig['spec'],
  | 'httpSDConfigs' | 'relabelings' | 'metricRelabelings' | 'sampleLimit' | 'scrapeInterval' | 'scrapeTimeout' | 'authorization'
  | 'jobName' | 'metricsPath' | 'scheme'
>;

export type Manifest =
  | Resource<IPrometheusRule, IPrometheusRule['spec']>
  | Resource<IServiceMonitor, IServiceMonitor['spec']>
  | Resource<IScrapeConfig, Scrape>;
