# SPDX-License-Identifier: Apache-2.0
"""HTTP for those who run the engine: health, readiness, metrics. On a thread of its own, from what is handed to it.

`port` is light and may be imported at any time. The rest brings FastAPI and is imported by the port's own thread.
"""
