{{/* Names. Whatever is cluster-wide carries the release's namespace, so that two releases do not meet. */}}
{{- define "aerostat.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 45 | trimSuffix "-" }}
{{- end }}

{{- define "aerostat.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" }}
{{- else if contains (include "aerostat.name" .) .Release.Name }}
{{- .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "aerostat.name" .) | trunc 45 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "aerostat.nodeNamespace" -}}
{{ default .Release.Namespace .Values.nodes.namespace }}
{{- end }}

{{/* The namespace of a component: (list . "agent"). */}}
{{- define "aerostat.namespaceOf" -}}
{{- $ := index . 0 -}}
{{- if has (index . 1) (list "agent" "engines") }}{{ include "aerostat.nodeNamespace" $ }}{{ else }}{{ $.Release.Namespace }}{{ end }}
{{- end }}

{{/* Labels: (list . "router"). */}}
{{- define "aerostat.selectorLabels" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ include "aerostat.name" $ }}
app.kubernetes.io/instance: {{ $.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "aerostat.labels" -}}
{{- $ := index . 0 -}}
{{ include "aerostat.selectorLabels" . }}
app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: aerostat
app.kubernetes.io/managed-by: {{ $.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $.Chart.Name $.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* An image: (list . $image). */}}
{{- define "aerostat.image" -}}
{{- $ := index . 0 -}}{{- $image := index . 1 -}}
{{- with $.Values.image.registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $.Chart.AppVersion $.Values.image.tag }}{{ end }}
{{- end }}

{{/* --cluster of every process. */}}
{{- define "aerostat.cluster" -}}
kubernetes:{{ with .Values.watch.namespace }}?namespace={{ . }}{{ end }}
{{- end }}

{{/* Where clients call. */}}
{{- define "aerostat.url" -}}
{{- if .Values.router.publicUrl -}}
{{ .Values.router.publicUrl }}
{{- else if .Values.router.ingress.enabled -}}
{{ ternary "https" "http" (not (empty .Values.router.ingress.tlsSecret)) }}://{{ .Values.router.ingress.host }}/v1
{{- else -}}
http://{{ include "aerostat.fullname" . }}.{{ .Release.Namespace }}:{{ .Values.router.service.httpPort }}/v1
{{- end }}
{{- end }}

{{/* What every pod has in common: (list . "router" $values $placed). $values: of its component. $placed: who says where it runs,
     the component itself or a node pool. */}}
{{- define "aerostat.podCommon" -}}
{{- $ := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}{{- $placed := index . 3 -}}
serviceAccountName: {{ include "aerostat.fullname" $ }}-{{ $component }}
enableServiceLinks: false
{{- with $.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with (ternary $placed.runtimeClassName $values.runtimeClassName (eq $component "engines")) }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $placed.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $placed.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $apart := dict }}
{{- if has $component (list "operator" "router") }}{{ $apart = include "aerostat.apart" (list $ $component) | fromYaml }}{{ end }}
{{- with mergeOverwrite $apart (deepCopy ($placed.affinity | default dict)) }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $.Values.podSecurity.user | int64 }}
  runAsGroup: {{ $.Values.podSecurity.group | int64 }}
  {{- if and $.Values.tls.enabled (has $component (list "router" "agent" "engines")) }}
  fsGroup: {{ $.Values.podSecurity.group | int64 }} # who reads the key
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "aerostat.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Environment of every process: (list . $values). The root file system is read-only, so what libraries cache goes to /tmp. */}}
{{- define "aerostat.env" -}}
{{- $values := index . 1 -}}
- {name: HOME, value: /tmp}
- {name: PYTHONUNBUFFERED, value: "1"}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- range $name, $value := $values.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* Labels and annotations of a pod: (list . "router" $values). */}}
{{- define "aerostat.podMetadata" -}}
{{- $values := index . 2 -}}
labels:
  {{- include "aerostat.labels" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Replicas on different nodes and zones where that is possible: (list . "router"). No topologySpreadConstraints: where one names
     zones, the scheduler spreads nothing over nodes that have none. */}}
{{- define "aerostat.apart" -}}
{{- $labels := include "aerostat.selectorLabels" . -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    {{- range $topology := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - weight: 100
      podAffinityTerm:
        topologyKey: {{ $topology }}
        labelSelector:
          matchLabels: {{- $labels | nindent 12 }}
        matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}

{{/* A part's certificate, key and trusted CAs. The pod waits until the operator has made them. */}}
{{- define "aerostat.tlsVolume" -}}
{{- $ := index . 0 -}}
- name: tls
  secret:
    secretName: {{ include "aerostat.fullname" $ }}-{{ index . 1 }}-tls
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      - {key: ca.crt, path: ca.crt}
{{- end }}

{{/* Both pods of a node share two host folders. A host folder belongs to root at first: one container, which has these two
     capabilities and nothing else to do, gives it to our id. (list . $sizeOfTmp) */}}
{{- define "aerostat.nodeVolumes" -}}
{{- $ := index . 0 -}}
- name: run
  hostPath: {path: {{ $.Values.nodes.runDir | quote }}, type: DirectoryOrCreate}
- name: model-cache
  hostPath: {path: {{ $.Values.nodes.modelCache | quote }}, type: DirectoryOrCreate}
- name: tmp
  emptyDir: {sizeLimit: {{ index . 1 }}}
{{- end }}

{{/* Size of a node pool's /tmp. */}}
{{- define "aerostat.tmp" -}}
{{ .tmp | default "4Gi" }}
{{- end }}

{{/* What people mount where engines and what prepares models run; nobody there may write it. */}}
{{- define "aerostat.extraMounts" -}}
{{- range .Values.nodes.extraVolumeMounts }}
- {{ merge (dict "readOnly" true) . | toJson }}
{{- end }}
{{- end }}

{{- define "aerostat.nodeFolders" -}}
{{- $ := index . 0 -}}{{- $image := index . 1 -}}
- name: folders
  image: {{ include "aerostat.image" (list $ $image) }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command: [install, --directory, --mode=0700]
  args:
    - --owner={{ $.Values.podSecurity.user | int64 }}
    - --group={{ $.Values.podSecurity.group | int64 }}
    - /run/aerostat
    - /var/cache/aerostat
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN, FOWNER]}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 32Mi}
  volumeMounts:
    - {name: run, mountPath: /run/aerostat}
    - {name: model-cache, mountPath: /var/cache/aerostat}
{{- end }}
