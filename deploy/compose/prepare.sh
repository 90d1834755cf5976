#!/bin/sh
# Makes the secrets of the compose stack, each once, and hands the volumes to the users who write to them.
# Files appear whole: a reader finds the secret or nothing. To change one, remove its file and start the stack again.
set -eu

random() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }

# write FILE OWNER MODE TEXT
write() {
  (umask 077 && printf '%s\n' "$4" >"$1.new")
  chown "$2" "$1.new"
  chmod "$3" "$1.new"
  mv "$1.new" "$1"
}

octet=10001:10001
[ -s /secrets/ray/token ] || write /secrets/ray/token $octet 0400 "$(random)"
# Readable for all: Prometheus, Grafana and PostgreSQL run as users of their own. Only they and Octet mount these volumes.
[ -s /secrets/api/key ] || write /secrets/api/key $octet 0444 "$(random)"
[ -s /secrets/grafana/password ] || write /secrets/grafana/password $octet 0444 "$(random)"
[ -s /secrets/database/password ] || write /secrets/database/password $octet 0444 "$(random)"
write /secrets/database/url $octet 0400 "postgresql://octet:$(cat /secrets/database/password)@postgres:5432/octet"

chown $octet /volumes/jobs
chown 65534:65534 /volumes/prometheus
