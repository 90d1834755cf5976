{{/* What every pod of ours has: a user without rights. */}}
{{- define "octet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "octet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The probes of a process that has an internal address. */}}
{{- define "octet.probes" -}}
startupProbe: # waits for the database as long as it takes
  httpGet: {path: /healthz, port: internal}
  periodSeconds: 2
  failureThreshold: 150
readinessProbe: # not /readyz: jobs are taken, and wait, while no dispatcher leads
  httpGet: {path: /healthz, port: internal}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: internal}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "octet.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The image of api and dispatcher, which trace the peaks of plans if it has PyTorch. */}}
{{- define "octet.plannerImage" -}}
{{ ternary .Values.images.node .Values.images.control .Values.planner }}
{{- end }}

{{/* The settings that api and dispatcher share. */}}
{{- define "octet.settings" -}}
- {name: OCTET_DATABASE_URL_FILE, value: /secrets/database/url}
- {name: OCTET_DATA_DIR, value: /var/lib/octet}
- {name: OCTET_DATA_ROOTS, value: {{ join ":" .Values.dataRoots | quote }}}
{{- with .Values.dataStores }}
- {name: OCTET_DATA_STORES, value: {{ join "," . | quote }}}
{{- end }}
{{- with .Values.exportStores }}
- {name: OCTET_EXPORT_STORES, value: {{ join "," . | quote }}}
{{- end }}
- {name: OCTET_LOG_FORMAT, value: json}
{{- if not .Values.planner }}
- {name: OCTET_PLANNER, value: "false"}
{{- end }}
- {name: OCTET_POOLS_FILE, value: /etc/octet/pools.yaml}
{{- if .Values.quotas }}
- {name: OCTET_QUOTAS_FILE, value: /etc/octet/quotas.yaml}
{{- end }}
{{- end }}

{{/* The pools as the service reads them; raycluster.yaml has a group of nodes for each. */}}
{{- define "octet.pools" -}}
{{- range .Values.pools }}
- name: {{ .name }}
  node_label: [octet-pool, {{ .name }}]
  slots: {{ mul .slotsPerNode .maxNodes }}
  {{- if eq .accelerator "cuda" }}
  accelerator: cuda
  {{- end }}
  {{- with .minComputeCapability }}
  min_compute_capability: [{{ join ", " . }}]
  {{- end }}
  {{- with .memoryPerDeviceBytes }}
  memory_per_device_bytes: {{ int64 . }}
  {{- end }}
  {{- with .device }}
  device: {{ . | quote }}
  {{- end }}
  {{- with .slotHourPrice }}
  slot_hour_price: {{ . }}
  {{- end }}
  threads_per_worker: {{ .threadsPerWorker }}
  {{- if .allowsEntrypoints }}
  allows_entrypoints: true
  {{- end }}
  {{- with .tenants }}
  tenants:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
