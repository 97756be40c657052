"""A job's history, folded from the lines of its event log: who was there, what happened, how long training stood still.

Pure: no clock, no file. Lines that can't be read, or that say something this version does not know, are counted and
change nothing else; a log may begin or end anywhere.

Words:

* An **incident** is one suspension of the view, from the moment the job failed to the moment training goes on, however
  many rounds that took. Its phases add up to all of it:

      failed ─ detect ─> rank 0 knows ─ park ─> next view ─ rebuild ─> ring ─ settle ─> all equal ─ catch up ─> trains

  All but `detect` are measured by rank 0, on its own clock. `catch_up` is what it took besides: to leave the broken
  view, and to do the broken step again.
* The job **makes progress** from its first committed step to its end, except within incidents. **Goodput** at a moment
  is the share of the time since the first committed step in which it made progress. Where the log does not have the
  first step, the first view takes its place.
* **Capacity** is the share of its members that the job had on average since then.
"""
