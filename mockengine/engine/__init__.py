# SPDX-License-Identifier: Apache-2.0
"""The engine as a state machine: messages and the time go in, encoded messages come out.

It takes the time as an argument, never reads a clock and never sees a socket. Times are seconds of a monotonic clock,
but for `arrival_time` of requests, which are unix seconds.
"""
