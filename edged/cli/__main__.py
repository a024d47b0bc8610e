"""``python -m edged.cli`` is ``edgectl``."""

import sys

from edged.cli.main import main

sys.exit(main())
