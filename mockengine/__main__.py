# SPDX-License-Identifier: Apache-2.0
"""`python -m mockengine` is the command `mockengine`."""

import sys

from mockengine.cli import main

sys.exit(main())
