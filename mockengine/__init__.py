# SPDX-License-Identifier: Apache-2.0
"""A mock of vLLM's engine core that real vLLM frontends join."""

__version__ = "0.1.0"
