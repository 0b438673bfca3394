"""Where this folder is on PYTHONPATH, each Python opens a software GPU as it starts.

So the tests for a GPU run on one as they are, and so do the programs that they start.
"""

import umem

umem.software_gpu("t4", "4GiB", force=True, devices=2)
