# SPDX-License-Identifier: Apache-2.0
"""Bytes to values and back: vLLM's engine-core messages, and nothing else.

Nothing here knows a socket, a clock or an engine. Reading never raises anything but `WireError`; writing cannot
produce what kills a frontend, because the values that would do so cannot be built or are refused by the encoder.
"""
