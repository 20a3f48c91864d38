# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on demand: what it is, when it strikes, and what has struck."""
