#!/usr/bin/env bash
# Make PostgreSQL's programs available to the store's tests, which start their own server.
# Where that cannot be done the tests say so: they skip, or fail where CI=true.
set -euo pipefail

have_server() {
    command -v initdb >/dev/null && return
    compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

if have_server; then
    exit 0
fi
if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    echo 'installing PostgreSQL for the tests'
    export DEBIAN_FRONTEND=noninteractive
    if apt-get -qq update && apt-get -qq install -y postgresql >/dev/null; then
        exit 0
    fi
    echo 'apt-get could not install postgresql' >&2
fi
echo 'PostgreSQL is not installed: its tests will not run. Install the package postgresql.' >&2
