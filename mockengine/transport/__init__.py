# SPDX-License-Identifier: Apache-2.0
"""Sockets, clocks and signals. What a message means is not decided here."""
