"""Row counts at which one kernel of a rollout gives way to another, and the precision of all."""

import torch

PRODUCTS = torch.bfloat16
"""The precision in which products are taken and what lies between them is written."""
LONGEST = 128
"""Positions in a sequence that one tile of attention holds."""
FEW_ROWS = 64
"""Up to here latency is all: tiles span the whole sum, in slices that run side by side."""
WIDE_ROWS = 4096
"""Up to here the first block reads fp32: a cast would be one kernel more."""
FUSED_ROWS = 1024
"""Up to here projection and attention are one kernel, as they are where sequences fill its tile."""
PLAIN_ROWS = 2**13
"""Up to here that projection, where it stands alone, is our product; above, torch's."""
CHAINED_ROWS = 64
"""Up to here a kernel is launched before the one in front of it has ended (0: never). With more
rows, those that wait take the place of those that work."""
MANY_ROWS = 2**14
"""From here on a block is two kernels, `many_attend` and `many_finish`, where sizes are theirs."""
CHUNK_ROWS = 36_864
"""More rows are run in chunks of whole sequences."""
