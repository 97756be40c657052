"""Run at the start of every Python that the tests start: its garbage collector looks less often.

Importing torch and Lightning makes some hundred thousand objects that stay. To look through them again and again while
they are made takes a third of what a rank costs that trains little.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
