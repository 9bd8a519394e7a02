#!/usr/bin/env bash
# Make Debian's Chromium available to the tests of the page, which drive it headless.
# Where that cannot be done the tests say so: they skip, or fail where CI=true.
set -euo pipefail

if command -v chromium >/dev/null; then
    exit 0
fi
if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    echo 'installing Chromium for the tests'
    export DEBIAN_FRONTEND=noninteractive
    if apt-get -qq update && apt-get -qq install -y chromium >/dev/null; then
        exit 0
    fi
    echo 'apt-get could not install chromium' >&2
fi
echo 'Chromium is not installed: its tests will not run. Install the package chromium.' >&2
