# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests and benchmarks of this project and of others: real frontends, fetched and started."""
