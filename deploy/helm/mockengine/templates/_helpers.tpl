{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{- define "mockengine.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "mockengine.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "mockengine.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "mockengine.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* What selects pods; given (list root component). */}}
{{- define "mockengine.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "mockengine.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "mockengine.labels" -}}
{{- $root := index . 0 -}}
{{ include "mockengine.selector" . }}
app.kubernetes.io/part-of: mockengine
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{/* Helm hands numbers over as floats: 1000000 would become 1e+06. */}}
{{- define "mockengine.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}

{{- define "mockengine.servedModelName" -}}
{{- .Values.frontend.servedModelName | default (eq .Values.frontend.model "/models/mock" | ternary "mock" .Values.frontend.model) -}}
{{- end }}

{{- define "mockengine.isSidecar" -}}
{{- if eq .Values.mode "sidecar" }}yes{{ end -}}
{{- end }}

{{/* Values that are valid each by itself, but not together. */}}
{{- define "mockengine.check" -}}
{{- if include "mockengine.isSidecar" . -}}
{{- if gt (int .Values.dataParallelSize) 64 -}}
{{- fail (printf "dataParallelSize: one engine plays at most 64 ranks, not %d (use mode data-parallel)" (int .Values.dataParallelSize)) -}}
{{- end -}}
{{- else -}}
{{- if gt (int .Values.frontend.replicas) 1 -}}
{{- fail "frontend.replicas: in the mode data-parallel there is one frontend (use 1, or the mode sidecar)" -}}
{{- end -}}
{{- if .Values.autoscaling.enabled -}}
{{- fail "autoscaling.enabled: in the mode data-parallel the number of ranks is fixed (use false, or the mode sidecar)" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "mockengine.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "mockengine.securityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Fields of a pod that both kinds of pod have; given (list root component). */}}
{{- define "mockengine.pod" -}}
{{- $root := index . 0 -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "mockengine.podSecurityContext" $root | nindent 2 }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "mockengine.selector" . | nindent 8 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Metadata of a pod; given (list root component port-to-scrape). */}}
{{- define "mockengine.podMetadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "mockengine.labels" (list $root (index . 1)) | nindent 2 }}
  {{- with $root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/settings: {{ include "mockengine.settings" $root | sha256sum }}
  {{- if $root.Values.metrics.annotations }}
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ index . 2 | quote }}
  prometheus.io/path: /metrics
  {{- end }}
  {{- with $root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The engine's container, without what makes it a sidecar. */}}
{{- define "mockengine.engine" -}}
name: engine
image: "{{ .Values.engine.image.repository }}:{{ .Values.engine.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
envFrom:
  - configMapRef:
      name: {{ include "mockengine.fullname" . }}
ports:
  - name: engine-admin
    containerPort: {{ .Values.engine.adminPort }}
# Listening, never joined: a frontend is started only after its sidecar's startup probe has succeeded.
startupProbe:
  httpGet:
    path: /health
    port: engine-admin
  periodSeconds: 1
  timeoutSeconds: 3
  failureThreshold: 60
livenessProbe:
  httpGet:
    path: /health
    port: engine-admin
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /ready
    port: engine-admin
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 1
resources:
  {{- toYaml .Values.engine.resources | nindent 2 }}
securityContext:
  {{- include "mockengine.securityContext" . | nindent 2 }}
volumeMounts:
  - name: engine-state
    mountPath: /var/lib/mockengine
{{- end }}

{{/* Outlives the container: an engine that was killed finds here whom to go on serving. */}}
{{- define "mockengine.stateVolume" -}}
- name: engine-state
  emptyDir:
    sizeLimit: 1Mi
{{- end }}

{{- define "mockengine.settings" -}}
{{- $handshake := ternary "127.0.0.1" (printf "%s-handshake" (include "mockengine.fullname" .)) (eq .Values.mode "sidecar") -}}
MOCKENGINE_HANDSHAKE_ADDRESS: {{ printf "tcp://%s:%d" $handshake (int .Values.frontend.handshakePort) | quote }}
MOCKENGINE_ENGINE_COUNT: {{ ternary (int .Values.dataParallelSize) 1 (eq .Values.mode "sidecar") | quote }}
MOCKENGINE_DATA_PARALLEL_SIZE: {{ int .Values.dataParallelSize | quote }}
MOCKENGINE_ADMIN_HOST: "0.0.0.0"
MOCKENGINE_ADMIN_PORT: {{ int .Values.engine.adminPort | quote }}
MOCKENGINE_STATE_FILE: /var/lib/mockengine/state.json
{{- range $name, $value := .Values.engine.settings }}
{{- if not (kindIs "invalid" $value) }}
MOCKENGINE_{{ upper $name }}: {{ include "mockengine.text" $value | quote }}
{{- end }}
{{- end }}
{{- end }}
