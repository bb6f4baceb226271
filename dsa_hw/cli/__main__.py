"""Run ``python -m dsa_hw.cli``."""

import sys

from dsa_hw.cli.main import main

sys.exit(main())
