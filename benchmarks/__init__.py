# SPDX-License-Identifier: Apache-2.0
"""What the speed claims are measured with: `make bench`. Each figure comes with a plain loop's of the same run."""
