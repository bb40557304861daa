"""`python -m te_cli` is `te`."""

import sys

from te_cli.main import main

sys.exit(main())
