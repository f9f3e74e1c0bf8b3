"""`python -m memtrain` is `memtrain`."""

import sys

from memtrain.cli import main

status = main()
# A Ctrl-C that met code made from a string (a dataclass, in an import) is remembered by Python,
# which would end itself by the signal whatever the status, although it was caught. This forgets it.
exec("")
sys.exit(status)
