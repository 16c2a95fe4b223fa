#!/bin/sh
# Install OpenSSH's server for tests of `launch --machine`, if it is missing and we may.
# They start one of their own; without it they are skipped, and say so: this never fails.
set -eu
if command -v sshd >/dev/null || [ -x /usr/sbin/sshd ]; then exit 0; fi
# Where services are started it would listen for all.
if [ -d /run/systemd/system ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
{
  timeout -k 10 120 apt-get -qq update &&
  timeout -k 10 120 apt-get -qq install -y --no-install-recommends \
    openssh-server openssh-client iproute2
} >/dev/null 2>&1 </dev/null ||
  echo "sshd could not be installed: its tests will be skipped." >&2
