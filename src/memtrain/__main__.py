"""`python -m memtrain` is `memtrain`."""

import sys

from memtrain.cli import main

sys.exit(main())
