"""`python -m tests.rehearsal`: see `rehearse`."""

import sys

from tests.rehearsal.rehearse import main

sys.exit(main())
