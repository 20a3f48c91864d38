# SPDX-License-Identifier: Apache-2.0
"""`mockengine fit`: the coefficients of the step model from benchmarks of a real deployment.

`results` reads what `vllm bench serve` saved, `estimate` makes a first guess from it, `simulator` replays the same
requests with given coefficients, `search` improves the guess until the replay is like the original, `report` says how
far off it still is, and `profile` keeps the outcome in a file. Nothing here is needed while serving but `profile`.
"""
