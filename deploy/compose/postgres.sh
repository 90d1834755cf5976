#!/bin/sh
# Starts PostgreSQL as its own user, with its password from a file. The official entrypoint would need root, or the password
# in the environment. The first start makes the cluster under another name and moves it last, so a start that is cut short is repeated.
set -eu

secret=/secrets/database/password
data=/var/lib/postgresql/octet
if [ ! -d "$data" ]; then
  rm -rf "$data.new"
  initdb --pgdata="$data.new" --username=octet --pwfile=$secret --auth-host=scram-sha-256 --auth-local=trust --encoding=UTF8
  echo "host all all all scram-sha-256" >>"$data.new/pg_hba.conf"
  echo "CREATE DATABASE octet;" | postgres --single -D "$data.new" postgres
  mv "$data.new" "$data"
fi
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=/tmp -c shared_buffers=128MB -c max_connections=200
