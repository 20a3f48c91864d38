# SPDX-License-Identifier: Apache-2.0
"""What the speed claims are measured with: `make bench`. Costs of a token stand beside those of a plain loop."""
