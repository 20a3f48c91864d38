#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The frontend image's health check: exit code 0 when /health answers 200, else 1.
#
# 503 is an answer for good: the frontend's engine has gone, and it takes no other. Docker restarts no container for being
# unhealthy, so this ends the frontend (process 1), for a restart policy to begin it anew. EXIT_WHEN_UNHEALTHY=0 leaves
# it running. A refused connection is no such answer: nothing listens before an engine has joined.
set -u

fail() {
  echo "$1" >&2
  exit 1
}

port=${HEALTH_PORT:-8000}
{ exec 3<>"/dev/tcp/127.0.0.1/${port}"; } 2>/dev/null || fail "nothing listens on port ${port} yet: no engine has joined"
printf 'GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n' >&3
read -r -t 3 -u 3 _ status _ || fail "no answer from port ${port} within 3 s"

case ${status} in
  200) exit 0 ;;
  503)
    [[ ${EXIT_WHEN_UNHEALTHY:-1} == 1 ]] || fail "the frontend's engine has gone (503)"
    kill -TERM 1
    fail "the frontend's engine has gone (503): ended the frontend"
    ;;
  *) fail "/health answered ${status}" ;;
esac
