{{/* What a schema cannot say of the values: sizes that must fit into each other. Each message has the numbers and the value to change. */}}

{{/* A number of a quantity: "1.5Gi", 4, "500m". */}}
{{- define "aerostat.amount" -}}
{{- $text := toString . -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (ternary (get $units $unit | default 1.0) 1.0 (ne $unit "") | float64) -}}
{{- end }}

{{- define "aerostat.checks" -}}
{{- range $component := list "operator" "router" "agent" "engines" }}
{{- $values := index $.Values $component }}
{{- include "aerostat.checkOurs" (list $component $values) }}
{{- with $values.resources }}{{ include "aerostat.checkResources" (list $component .) }}{{ end }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- range .Values.modelSecrets.namespaces }}
{{- if has . (list $.Release.Namespace (include "aerostat.nodeNamespace" $)) }}
{{- fail (printf "modelSecrets.namespaces: in %s lie the keys of our certificates, which agents would be allowed to read; declare Models with a secretRef in another namespace" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- $seen := dict }}
{{- range $pool := .Values.nodePools }}
{{- $where := printf "nodePools[%s]" $pool.name }}
{{- if hasKey $seen $pool.name }}{{ fail (printf "%s: two node pools have that name; give each its own" $where) }}{{ end }}
{{- $_ := set $seen $pool.name true }}
{{- include "aerostat.checkResources" (list $where $pool.resources) }}
{{- include "aerostat.checkMemory" (list $where $pool) }}
{{- include "aerostat.checkDevices" (list $where $pool) }}
{{- end }}
{{- end }}

{{- define "aerostat.checkOurs" -}}
{{- $component := index . 0 -}}{{- $values := index . 1 -}}
{{- range $name, $_ := $values.env }}
{{- if has $name (list "HOME" "PYTHONUNBUFFERED" "POD_NAME" "POD_IP" "NODE_NAME") }}
{{- fail (printf "%s.env: %s is set by the chart; leave it out" $component $name) }}
{{- end }}
{{- end }}
{{- range $name, $_ := $values.podLabels }}
{{- if regexMatch "^(app\\.kubernetes\\.io|helm\\.sh|aerostat\\.dev)/" $name }}
{{- fail (printf "%s.podLabels: %s is one of the labels by which the chart finds its pods; choose another name" $component $name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "aerostat.checkResources" -}}
{{- $where := index . 0 -}}{{- $resources := index . 1 -}}
{{- range $name, $requested := $resources.requests }}
{{- with get $resources.limits $name }}
{{- if gt (include "aerostat.amount" $requested | float64) (include "aerostat.amount" . | float64) }}
{{- fail (printf "%s.resources: requests.%s %v is more than limits.%s %v; lower the request or raise the limit" $where $name $requested $name .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What lies in /dev/shm counts as memory of the container. 3Gi: what the keeper and the processes of one engine take beside
     weights and KV (2.8Gi, measured with torch 2.13). What Pools declare on top, the agent checks, who sees them. */}}
{{- define "aerostat.checkMemory" -}}
{{- $where := index . 0 -}}{{- $pool := index . 1 -}}
{{- $gi := 1073741824.0 -}}
{{- $limit := $pool.resources.limits.memory -}}
{{- $needed := addf (include "aerostat.amount" $pool.sharedMemory | float64) (mulf 3 $gi) -}}
{{- if gt $needed (include "aerostat.amount" $limit | float64) }}
{{- fail (printf "%s: resources.limits.memory %v has no room for sharedMemory %v and the 3Gi that the processes of one engine take; raise the limit to at least %vGi, or lower sharedMemory" $where $limit $pool.sharedMemory (divf $needed $gi | ceil)) }}
{{- end }}
{{- $tmp := include "aerostat.tmp" $pool }}
{{- with get $pool.resources.limits "ephemeral-storage" }}
{{- if gt (include "aerostat.amount" $tmp | float64) (include "aerostat.amount" . | float64) }}
{{- fail (printf "%s: resources.limits.ephemeral-storage %v is less than tmp %v; raise it, or lower tmp" $where . $tmp) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "aerostat.checkDevices" -}}
{{- $where := index . 0 -}}{{- $devices := (index . 1).devices -}}{{- $resources := (index . 1).resources -}}
{{- $resource := $devices.resource | default "" -}}
{{- if and $resource $devices.claim }}
{{- fail (printf "%s.devices: resource %s and claim of %s are both given; keep the one by which these nodes hand out their devices" $where $resource $devices.claim.deviceClassName) }}
{{- end }}
{{- if and $resource (not $devices.count) }}
{{- fail (printf "%s.devices: resource %s needs count, the number of devices that each of these nodes has" $where $resource) }}
{{- end }}
{{- if and $devices.count (not $resource) }}
{{- fail (printf "%s.devices: count %v says how many, and resource not of what; set resource, or for a DRA claim claim.count" $where $devices.count) }}
{{- end }}
{{- if and $resource (or (hasKey $resources.requests $resource) (hasKey $resources.limits $resource)) }}
{{- fail (printf "%s: %s is in resources and in devices; leave it to devices" $where $resource) }}
{{- end }}
{{- end }}
