"""Tables of scenarios: what torchscout must decide, stated without knowing how it decides.

One file a decision. A row has a name, what was seen, in words, and what must come of it; see ``rows.py``. The
tables know none of torchscout's classes: for each there is one adapter in ``today``, which translates a row
into what the code takes today, and its answer back. A rebuild of a part rewrites its adapter and no row.

A row that is answered wrongly today is marked ``wrong_today``. The change that mends it removes the mark.
"""
