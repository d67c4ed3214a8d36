"""`python -m orca_dist` is orca-dist."""

import sys

from orca_dist.cli.main import main

sys.exit(main())
