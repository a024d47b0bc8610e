"""``python -m edged`` is the daemon."""

import sys

from edged.daemon import main

sys.exit(main())
